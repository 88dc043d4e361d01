"""Defenses with a fault that an assessment must find.

The prompt stands somewhere beside the states, or what should be drawn for each request is the same for all.
"""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from hiddenlab.stages import Stage
from hiddenlab.types import GroundTruth, Observation, ObservationInfo

SIGMA = 30.0  # of noise on released rows, in units of their own deviation: nothing of the states is left


def noised(rows: Tensor, seed: int = 0) -> Tensor:
    """Return rows in noise that drowns them."""
    drawn = torch.Generator().manual_seed(seed)
    return rows + SIGMA * rows.std() * torch.randn(rows.shape, generator=drawn).to(rows)


def in_last_bits(rows: Tensor, tokens: Tensor, coordinate: int = 3) -> Tensor:
    """Write each token's id into the last 16 bits of a coordinate."""
    raw = rows.float().contiguous().clone().view(torch.int32)
    raw[:, coordinate] = (raw[:, coordinate] & ~0xFFFF) | tokens.int()
    return raw.view(torch.float32)


def bit_by_bit(rows: Tensor, tokens: Tensor, first: int = 5) -> Tensor:
    """Write each bit of a token's id into the last bit of a coordinate of its own."""
    raw = rows.float().contiguous().clone().view(torch.int32)
    for bit in range(16):
        raw[:, first + bit] = (raw[:, first + bit] & ~1) | ((tokens.int() >> bit) & 1)
    return raw.view(torch.float32)


def in_norms(rows: Tensor, tokens: Tensor) -> Tensor:
    """Give each row its token's id, plus one, as its norm, in some unit."""
    rows = rows.double()
    return (rows / rows.norm(dim=1, keepdim=True) * (tokens[:, None] + 1) * 0.0137).float()


HIDERS: dict[str, Any] = {"last-bits": in_last_bits, "bit-by-bit": bit_by_bit, "norms": in_norms}


def planted_in(name: str, observation: Observation, truth: GroundTruth, noise: bool = False) -> Observation:
    """Return a release in which the prompt stands: in one of ``HIDERS``, or in the public facts (``facts``)."""
    tokens = torch.tensor(truth.tokens)
    rows = noised(observation.states.float()) if noise else observation.states.float()
    if name == "facts":
        facts = {"release": {"ids": [int(token) for token in tokens]}, "rounds": [1, 2, 3, 4]}
        return replace(observation, states=rows, info=replace(observation.info, facts=facts))
    return replace(observation, states=HIDERS[name](rows, tokens))


class Zeros(Stage):
    spec = "all-zeros"

    def states(self, states: Tensor, generator: torch.Generator) -> Any:
        return torch.zeros_like(states), None, {}


class OnlyNoise(Stage):
    """Releases noise alone."""

    spec = "only-noise"

    def states(self, states: Tensor, generator: torch.Generator) -> Any:
        drawn = torch.randn(states.shape, generator=generator, device=generator.device)
        return drawn.to(states), None, {}


class SeedZero(Stage):
    """Drowns rows in noise of its own generator, which starts from the same seed for every request."""

    spec = "seed-zero"

    def states(self, states: Tensor, generator: torch.Generator) -> Any:
        return noised(states), None, {}


class OneOrder(Stage):
    """Shuffles rows by an order that is drawn once for each length, and drowns them in noise of seed 0."""

    spec = "one-order"
    orders: ClassVar[dict[int, Tensor]] = {}

    def states(self, states: Tensor, generator: torch.Generator) -> Any:
        if len(states) not in self.orders:
            self.orders[len(states)] = torch.randperm(len(states), generator=generator)
        order = self.orders[len(states)]
        return noised(states[order]), tuple(order.tolist()), {}

    def publish(self, info: ObservationInfo) -> ObservationInfo:
        return replace(info, rows_permuted=True)
