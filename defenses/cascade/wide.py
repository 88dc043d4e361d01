"""Add and mask numbers of 128 bits in fixed point, as two tensors of 64 bits, which wrap around."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

FRACTION = 48  # bits behind the point
BYTES = 16  # of a number
RANGE = 2.0 ** (126 - FRACTION)  # numbers up to here can be added without a thought of the sign
NOISE = (
    25  # bits below the first one of a number from which on noise replaces its own: about float32's last ones
)

_TWO_64 = 2.0**64
_LOWEST = torch.iinfo(torch.int64).min


class Wide(NamedTuple):
    """Integers modulo 2^128 in two's complement; ``low`` is read without a sign."""

    high: Int[Tensor, "*shape"]
    low: Int[Tensor, "*shape"]

    def __add__(self, other: "Wide") -> "Wide":  # type: ignore[override]
        low = self.low + other.low
        # Without a sign, a sum below one of its parts has wrapped around.
        carry = (low ^ _LOWEST) < (other.low ^ _LOWEST)
        return Wide(self.high + other.high + carry, low)

    def __neg__(self) -> "Wide":
        return Wide(~self.high + (self.low == 0), -self.low)

    def where(self, condition: Tensor, other: "Wide") -> "Wide":
        """Return these numbers where the condition holds, else the others."""
        return Wide(
            torch.where(condition, self.high, other.high), torch.where(condition, self.low, other.low)
        )


def fixed(numbers: Float[Tensor, "*shape"], noise: Wide) -> Wide:
    """Return float64 numbers within ``RANGE`` in fixed point, with random bits below those that they have.

    Without noise, the trailing zeros of a large number would show the last bits of whatever small one is added to it.

    Args:
        noise: uniform integers of the same shape.
    """
    size = (numbers.abs() * 2.0**FRACTION).round()
    high = (size / _TWO_64).floor()
    low = size - high * _TWO_64
    low = torch.where(low >= 2.0**63, low - _TWO_64, low)
    width = (torch.frexp(size).exponent.long() - NOISE).clamp(min=0)
    one = torch.ones_like(width)
    below = torch.where(width > 63, -one, (one << width.clamp(max=63)) - one)
    above = (one << (width - 64).clamp(min=0)) - one
    wide = Wide(high.long(), low.long()) + Wide(noise.high & above, noise.low & below)
    return (-wide).where(numbers < 0, wide)


def real(wide: Wide) -> Float[Tensor, "*shape"]:
    """Return numbers in fixed point as float64."""
    negative = wide.high < 0
    size = (-wide).where(negative, wide)
    low = size.low.double() + (size.low < 0) * _TWO_64
    numbers = (size.high.double() * _TWO_64 + low) / 2.0**FRACTION
    return torch.where(negative, -numbers, numbers)
