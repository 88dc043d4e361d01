"""Show of a state what rows show of it: what lies in the space that they span, or its largest numbers."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

# Of the largest singular value: smaller ones are what float32 leaves of rows that lie in fewer dimensions.
ROUNDED = 2e-6


@dataclass(frozen=True)
class RowSpace:
    """The space that the rows of one observation span.

    Rows that were projected to their own best space lie in it, and so say which space it was. Projected to it, the
    state of a right candidate is the row itself.

    Attributes:
        basis: orthonormal directions.
    """

    basis: Float[Tensor, "k d"]

    @classmethod
    def of(cls, rows: Float[Tensor, "rows d"], rank: int | None = None, least: float = ROUNDED) -> "RowSpace":
        """Return the space of rows; of noised ones the ``rank`` directions that hold most of them.

        Args:
            least: share of the largest singular value, below which a direction is left out.
        """
        _, sizes, directions = torch.linalg.svd(rows.double(), full_matrices=False)
        return cls(directions[: int((sizes > least * sizes[0]).sum())][:rank])

    def __call__(self, states: Float[Tensor, "c d"]) -> Float[Tensor, "c d"]:
        """Return the states' parts in the space, in float32."""
        return (states.double() @ self.basis.T @ self.basis).float()


@dataclass(frozen=True)
class Largest:
    """The largest numbers of each state, whatever their sign, and zeros elsewhere.

    Attributes:
        share: of the numbers that stay, rounded up.
    """

    share: float

    def __call__(self, states: Float[Tensor, "c d"]) -> Float[Tensor, "c d"]:
        """Return the states with zeros in place of their other numbers, in float32."""
        states = states.float()
        kept = states.abs().topk(math.ceil(self.share * states.shape[1]), dim=1).indices
        return torch.zeros_like(states).scatter_(1, kept, states.gather(1, kept))
