"""Release only the largest numbers of each state."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hiddenlab.errors import InputError
from hiddenlab.matching.row_space import Largest
from hiddenlab.row_facts import with_kept_share
from hiddenlab.stages import Stage
from hiddenlab.types import ObservationInfo


class Sparsify(Stage):
    """Release each state with zeros in place of all but its largest numbers, whatever their sign.

    Args:
        keep: share of the numbers that stay, rounded up.

    Raises:
        InputError: ``keep`` is not above 0 and up to 1.
    """

    def __init__(self, keep: float) -> None:
        if not 0 < keep <= 1:
            raise InputError(f"sparsify keeps a share above 0 and up to 1, not {keep}")
        self.keep = float(keep)
        self.spec = f"sparsify:keep={self.keep!r}"

    def states(
        self, states: Float[Tensor, "rows d"], generator: torch.Generator
    ) -> tuple[Float[Tensor, "rows d"], tuple[int, ...] | None, dict[str, Any]]:
        return Largest(self.keep)(states).to(states.dtype), None, {}

    def publish(self, info: ObservationInfo) -> ObservationInfo:
        return with_kept_share(info, self.keep)

    def __repr__(self) -> str:
        return f"{self.spec}: the attacker sees the largest numbers of every state, in order"
