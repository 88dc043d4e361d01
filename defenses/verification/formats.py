"""Read and write the bit patterns of the numbers that a TOPLOC proof holds: bfloat16 as published, or float32."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt
from torch import Tensor

from hiddenlab.defenses.verification.polynomials import PRIME
from hiddenlab.errors import InputError


@dataclass(frozen=True)
class Format:
    """A dtype whose bit patterns a proof holds: a sign, eight bits of exponent, and the mantissa.

    Attributes:
        bits: of a pattern. prime: that the polynomial's arithmetic is modulo; above every pattern of a finite number.
    """

    dtype: torch.dtype
    bits: int
    prime: int

    @property
    def mantissa_bits(self) -> int:
        return self.bits - 9

    @property
    def magnitude(self) -> int:
        """The mask of a pattern without its sign."""
        return 2 ** (self.bits - 1) - 1

    def patterns(self, values: Float[Tensor, "*shape"]) -> UInt[np.ndarray, "*shape"]:
        """Return the bit patterns of values, rounded to the dtype."""
        rounded = values.detach().to(self.dtype).cpu().contiguous()
        return rounded.view(getattr(torch, f"int{self.bits}")).numpy().view(f"u{self.bits // 8}")

    def numbers(self, patterns: Int64[np.ndarray, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return the numbers that bit patterns stand for."""
        raw = patterns.astype(f"u{self.bits // 8}").view(f"i{self.bits // 8}")
        return torch.from_numpy(raw).view(self.dtype)


FORMATS = {"bfloat16": Format(torch.bfloat16, 16, PRIME), "float32": Format(torch.float32, 32, 2**32 - 5)}
DTYPE = "bfloat16"  # of the published proofs


def format_of(dtype: str) -> Format:
    """Find the format of a proof's values.

    Raises:
        InputError: proofs hold no values of this dtype.
    """
    if dtype not in FORMATS:
        raise InputError(f"proofs of {dtype} values; known are {', '.join(FORMATS)}")
    return FORMATS[dtype]
