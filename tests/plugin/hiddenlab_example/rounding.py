"""A defense: the provider rounds the states before it releases them."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hiddenlab.errors import InputError
from hiddenlab.stages import Stage
from hiddenlab.types import ObservationInfo


class Round(Stage):
    """Rounds every coordinate of the released states to a number of decimals."""

    def __init__(self, decimals: int) -> None:
        if decimals < 0:
            raise InputError(f"decimal needs decimals ≥ 0, not {decimals}")
        self.decimals = decimals
        self.spec = f"decimal:decimals={decimals}"

    def states(
        self, states: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, tuple[int, ...] | None, dict[str, Any]]:
        return states.round(decimals=self.decimals), None, {}

    def publish(self, info: ObservationInfo) -> ObservationInfo:
        return replace(info, facts={**info.facts, "decimals": self.decimals})

    def __repr__(self) -> str:
        return (
            f"{self.spec}: the attacker sees states rounded to {self.decimals} decimals and knows the model"
        )
