"""Project states onto known random directions, for observations that show projections instead of states."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.types import ObservationInfo
from hiddenlab.utils.random import orthonormal

FACT = "projection"
GAUSSIAN, ORTHOGONAL = "gaussian", "orthogonal"
KINDS = (GAUSSIAN, ORTHOGONAL)


@dataclass(frozen=True)
class Projection:
    """Inner products of a state with random directions.

    Attributes:
        count: number of directions. seed: of them; who knows it knows the directions.
        kind: ``gaussian`` (paper, theorem J.1: spherically symmetric, N(0, 1/d) coordinates) or ``orthogonal`` (DiFR,
            section 4.3: orthonormal, evenly distributed).
    """

    count: int
    seed: int = 0
    kind: str = GAUSSIAN

    def __post_init__(self) -> None:
        for name, value, least, most in (("count", self.count, 1, 2**16), ("seed", self.seed, 0, 2**63 - 1)):
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise InputError(
                    f"a projection's {name} must be a whole number of at least {least}, at most {most}, not {value!r}"
                )
        if self.kind not in KINDS:
            raise InputError(f"a projection's kind must be one of {', '.join(KINDS)}, not {self.kind!r}")

    def __call__(self, states: Float[Tensor, "rows d"]) -> Float[Tensor, "rows k"]:
        """Return the inner products, in float32.

        Raises:
            InputError: more orthogonal directions than dimensions.
        """
        width = states.shape[1]
        return states.float() @ _directions(width, self.count, self.seed, self.kind, states.device)

    def fact(self) -> dict[str, Any]:
        """Return its form among the public facts."""
        return {FACT: {"count": self.count, "seed": self.seed, "kind": self.kind}}


@lru_cache(maxsize=8)
def _directions(width: int, count: int, seed: int, kind: str, device: torch.device) -> Float[Tensor, "d k"]:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(width, count, generator=generator)
    if kind == GAUSSIAN:
        return (drawn / width**0.5).to(device)
    if count > width:
        raise InputError(f"{count} orthogonal directions do not exist in {width} dimensions")
    return orthonormal(drawn).to(device)


def projection_of(info: ObservationInfo) -> Projection | None:
    """Return the projection that an observation went through, or None.

    Raises:
        InputError: its facts are malformed.
        NotApplicableError: coordinates were permuted as well.
    """
    facts = info.facts.get(FACT)
    if facts is None:
        return None
    if not isinstance(facts, Mapping) or not {"count", "seed"} <= set(facts) <= {"count", "seed", "kind"}:
        raise InputError(f"the facts of a projection are its count, seed and kind, not {facts!r}")
    if info.columns_permuted is not None:
        raise NotApplicableError("projections of permuted coordinates cannot be compared with a candidate's")
    return Projection(**facts)
