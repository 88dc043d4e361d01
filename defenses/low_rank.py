"""Release states projected to fewer directions, chosen for each prompt."""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hiddenlab.errors import InputError
from hiddenlab.row_facts import with_row_space
from hiddenlab.stages import Stage
from hiddenlab.types import ObservationInfo


class TruncatedSvd(Stage):
    """Release the states of a prompt projected to the few directions that keep most of them (truncated SVD).

    The directions are the prompt's own, and rows stay as wide as they were. Rows lie in the space that they were
    projected to, so the attacker reads it off them.

    Args:
        rank: directions that are kept; prompts of no more tokens stay as they are.
        share: in place of ``rank``: the share of a prompt's directions that is kept, rounded up.

    Raises:
        InputError: neither or both are given, or one is out of range.
    """

    def __init__(self, rank: int | None = None, share: float | None = None) -> None:
        if (rank is None) == (share is None):
            raise InputError("truncated-svd needs either rank or share, as in truncated-svd:rank=8")
        if rank is not None and rank < 1:
            raise InputError(f"truncated-svd keeps 1 direction or more, not {rank}")
        if share is not None and not 0 < share <= 1:
            raise InputError(f"truncated-svd keeps a share above 0 and up to 1, not {share}")
        self.rank, self.share = rank, share
        self.spec = "truncated-svd:" + (f"rank={rank}" if share is None else f"share={float(share)!r}")

    def states(
        self, states: Float[Tensor, "rows d"], generator: torch.Generator
    ) -> tuple[Float[Tensor, "rows d"], tuple[int, ...] | None, dict[str, Any]]:
        rows = states.double()
        directions = torch.linalg.svd(rows, full_matrices=False).Vh
        kept = directions[: self.rank or math.ceil(float(self.share or 1) * len(directions))]
        return (rows @ kept.T @ kept).to(states.dtype), None, {}

    def publish(self, info: ObservationInfo) -> ObservationInfo:
        return with_row_space(info, self.rank)

    def __repr__(self) -> str:
        return f"{self.spec}: the attacker sees every state, in order, projected to few directions, which the rows show"
