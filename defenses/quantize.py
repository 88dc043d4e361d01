"""Run the model with quantized weights (Hidden No More, appendix F) or in another dtype; round states to fewer bits."""

from dataclasses import replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from hiddenlab.errors import InputError
from hiddenlab.stages import Stage
from hiddenlab.types import ObservationInfo

HALVES = ("bfloat16", "float16")
WHOLE_NUMBERS = {"int8": 127, "int4": 7}  # the largest of each, so that both signs reach as far


class Int8(Stage):
    """Compute the states with weights quantized to 8 bits (bitsandbytes LLM.int8)."""

    spec = "int8"

    def provider(self, options: dict[str, Any]) -> dict[str, Any]:
        return {**options, "quantization": "int8"}

    def publish(self, info: ObservationInfo) -> ObservationInfo:
        return replace(info, quantization="int8")

    def __repr__(self) -> str:
        return "int8: the attacker sees the states of the 8-bit model and knows the full-precision weights"


class Nf4(Stage):
    """Compute the states with weights quantized to 4 bits (bitsandbytes NF4)."""

    spec = "nf4"

    def provider(self, options: dict[str, Any]) -> dict[str, Any]:
        return {**options, "quantization": "nf4"}

    def publish(self, info: ObservationInfo) -> ObservationInfo:
        return replace(info, quantization="nf4")

    def __repr__(self) -> str:
        return "nf4: the attacker sees the states of the 4-bit model and knows the full-precision weights"


class ProviderDtype(Stage):
    """Compute and release the states in another dtype than the attacker's.

    Args:
        dtype: ``float32``, ``bfloat16`` or ``float16``.
    """

    def __init__(self, dtype: Literal["float32", "bfloat16", "float16"]) -> None:
        self.dtype = dtype
        self.spec = f"dtype:{dtype}"

    def provider(self, options: dict[str, Any]) -> dict[str, Any]:
        return {**options, "dtype": self.dtype}

    def publish(self, info: ObservationInfo) -> ObservationInfo:
        return replace(info, provider_dtype=self.dtype)

    def __repr__(self) -> str:
        return (
            f"{self.spec}: the attacker sees the states that the provider computed in {self.dtype}, in order"
        )


class RoundStates(Stage):
    """Release the states rounded to 16, 8 or 4 bits, as those who send or store many of them do.

    Args:
        dtype: ``bfloat16``, ``float16``, ``float8_e4m3fn``, ``float8_e5m2``, ``int8`` or ``int4`` (whole numbers from
            -7 to 7).
        scale: what a scale is chosen for, so that its largest number is the largest of the dtype: the whole prompt
            (``tensor``), each ``row``, each ``column``; ``none`` rounds the numbers as they are. ``auto`` is
            ``row``, and ``none`` for 16 bits. Numbers beyond the largest of float16, 65,504, become that one.
        stochastic: round up or down at random, so that the expected number is the exact one. Otherwise to the nearest.

    Raises:
        InputError: there is a scale for 16 bits.
    """

    def __init__(
        self,
        dtype: Literal["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "int4"],
        scale: Literal["auto", "none", "tensor", "row", "column"] = "auto",
        stochastic: bool = False,
    ) -> None:
        half = dtype in HALVES
        if half and scale not in ("auto", "none"):
            raise InputError(f"round:dtype={dtype} takes no scale; leave out 'scale'")
        self.dtype, self.stochastic = dtype, stochastic
        self.scale = ("none" if half else "row") if scale == "auto" else scale
        self.spec = f"round:dtype={dtype},scale={self.scale}" + ",stochastic=true" * stochastic

    def states(
        self, states: Float[Tensor, "rows d"], generator: torch.Generator
    ) -> tuple[Float[Tensor, "rows d"], tuple[int, ...] | None, dict[str, Any]]:
        whole = WHOLE_NUMBERS.get(self.dtype)
        kind: torch.dtype = torch.float32 if whole else getattr(torch, self.dtype)
        largest = float(whole or torch.finfo(kind).max)
        numbers = states.float()
        over: dict[str, Any] = {"tensor": (0, 1), "row": 1, "column": 0}
        scale = torch.ones((), device=states.device)
        if self.scale in over:
            scale = (numbers.abs().amax(over[self.scale], keepdim=True) / largest).clamp(min=1e-30)
        scaled = (numbers / scale).clamp(-largest, largest)
        if self.stochastic:
            chance = torch.rand(scaled.shape, generator=generator, device=generator.device).to(scaled)
            step = torch.ones_like(scaled) if whole else _spacing(scaled, kind)
            steps = scaled / step
            below = steps.floor()
            up = chance < steps - below  # their sum would be rounded, and move a number that is exact already
            rounded = ((below + up) * step).clamp(-largest, largest)
        else:
            rounded = scaled.round() if whole else scaled.to(kind).float()
        return rounded * scale, None, {}

    def __repr__(self) -> str:
        bits = 16 if self.dtype in HALVES else 4 if self.dtype == "int4" else 8
        way = ", up or down at random" * self.stochastic
        return f"{self.spec}: the attacker sees every state, in order, rounded to {bits} bits{way}"


def _spacing(numbers: Float[Tensor, "rows d"], kind: torch.dtype) -> Float[Tensor, "rows d"]:
    """Return the distance between the two numbers of a float dtype that each number lies between."""
    format = torch.finfo(kind)
    exponents = torch.frexp(numbers).exponent - 1  # frexp's mantissa is between a half and one
    return format.eps * torch.exp2(exponents.float()).clamp(min=format.smallest_normal)
