"""What an observation shows of a state, where it is not the state itself: known random projections of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hiddenlab.core import Public
from hiddenlab.errors import InputError, NotApplicableError

FACT = "projection"


@dataclass(frozen=True)
class Projection:
    """Inner products of a state with random directions (paper, theorem J.1: Gaussian, spherically symmetric).

    Attributes:
        count: directions. seed: of them; the attacker knows it.
    """

    count: int
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, least in (("count", self.count, 1), ("seed", self.seed, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InputError(
                    f"a projection's {name} must be a whole number of at least {least}, not {value!r}"
                )

    def __call__(self, states: Float[Tensor, "rows d"]) -> Float[Tensor, "rows k"]:
        """The inner products, in float32; directions have N(0, 1/d) coordinates."""
        return states.float() @ _directions(states.shape[1], self.count, self.seed).to(states.device)

    def fact(self) -> dict[str, Any]:
        """Its form among the public facts."""
        return {FACT: {"count": self.count, "seed": self.seed}}


@lru_cache(maxsize=8)
def _directions(width: int, count: int, seed: int) -> Float[Tensor, "d k"]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(width, count, generator=generator) / width**0.5


def lens_of(public: Public) -> Projection | None:
    """The projection that an observation went through, or None.

    Raises:
        InputError: its facts are malformed. NotApplicableError: coordinates were permuted as well.
    """
    facts = public.facts.get(FACT)
    if facts is None:
        return None
    if not isinstance(facts, Mapping) or set(facts) != {"count", "seed"}:
        raise InputError(f"the facts of a projection are its count and seed, not {facts!r}")
    if public.columns_permuted is not None:
        raise NotApplicableError("projections of permuted coordinates cannot be compared with a candidate's")
    return Projection(facts["count"], facts["seed"])
