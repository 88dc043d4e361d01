"""Release random projections of states in place of the states (Hidden No More, appendix J.1)."""

import math
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hiddenlab.errors import InputError
from hiddenlab.projections import FACT, GAUSSIAN, Projection
from hiddenlab.stages import Stage
from hiddenlab.types import ObservationInfo


class Project(Stage):
    """Release inner products of each state with random directions that the attacker knows.

    Args:
        count: number of directions.
        seed: of the directions.
        kind: ``gaussian``, or ``orthogonal`` as in the fingerprints of DiFR.
        sigma: standard deviation of Gaussian noise on each inner product, as a fraction of the root mean square of
            the row's inner products.

    Raises:
        InputError: a number is out of range.
    """

    def __init__(self, count: int, seed: int = 0, sigma: float = 0.0, kind: str = GAUSSIAN) -> None:
        self.projection = Projection(count, seed, kind)
        if not (math.isfinite(sigma) and sigma >= 0):
            raise InputError(f"a projection's sigma must be 0 or more, not {sigma}")
        self.sigma = float(sigma)
        extra = f",seed={seed}" * bool(seed) + f",sigma={self.sigma!r}" * bool(sigma)
        extra += f",kind={kind}" * (kind != GAUSSIAN)
        self.spec = f"project:count={count}{extra}"

    def states(
        self, states: Float[Tensor, "rows d"], generator: torch.Generator
    ) -> tuple[Float[Tensor, "rows k"], tuple[int, ...] | None, dict[str, Any]]:
        shown = self.projection(states)
        if self.sigma:
            noise = torch.randn(shown.shape, generator=generator, device=generator.device).to(shown)
            shown = shown + self.sigma * shown.square().mean(1, keepdim=True).sqrt() * noise
        return shown, None, {}

    def publish(self, info: ObservationInfo) -> ObservationInfo:
        if FACT in info.facts:
            raise InputError("states can be projected once; leave one of the 'project' stages out")
        return replace(info, facts={**info.facts, **self.projection.fact()})

    def __repr__(self) -> str:
        return f"{self.spec}: the attacker sees the inner products and knows the model and the directions"
