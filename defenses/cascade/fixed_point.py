"""Compute linear maps on additive shares modulo 2^64: fixed-point numbers, and exact products by float64.

A client writes each row of activations as 30-bit integers times a power of two that he keeps. A node writes each
output's weights as integers whose magnitudes sum to at most 2^32, times a power of two. Products then stay below 2^62,
so that nothing wraps but the shares themselves. A share has 64 bits, more than float64 multiplies exactly. So it is cut
into three limbs of at most 22 bits: sums of limb times weight stay within 2^53, where float64 is exact in any order.
"""

from dataclasses import dataclass

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from hiddenlab.errors import InputError

ROW_BITS = 30  # of a number of a row
MOST_SUM = 2.0**32  # of the magnitudes of an output's weights
LIMBS = (22, 21, 21)  # bits, from the lowest
SEED_BYTES = 32  # the key of a mask


@dataclass(frozen=True)
class Matrix:
    """The weights of linear maps of one input, as integers.

    Attributes:
        weights: integers, in float64.
        powers: output o has its weights times 2^powers[o].
    """

    weights: Float[Tensor, "i o"]
    powers: Int[Tensor, " o"]

    @classmethod
    def of(cls, weight: Float[Tensor, "o i"]) -> "Matrix":
        """Round weights to integers; those of 16 bits stay exact, but for ones far smaller than their output's others.

        Raises:
            InputError: a weight is not finite.
        """
        powers = powers_of(weight)
        return cls((weight.double() * torch.exp2(powers.double())[:, None]).round().T.contiguous(), powers)

    def times(self, share: Int[Tensor, "n i"]) -> Int[Tensor, "n o"]:
        """Return rows times weights modulo 2^64, exactly."""
        limbs = torch.cat(limbs_of(share)).to(self.weights)
        low, middle, high = (limbs @ self.weights).split(len(share))
        output = high.long()
        for part, bits in ((middle, LIMBS[1]), (low, LIMBS[0])):  # in place: outputs are large
            output <<= bits
            output += part.long()
        return output


def powers_of(weight: Float[Tensor, "o i"]) -> Int[Tensor, " o"]:
    """Return the largest power for each output with which its rounded weights' magnitudes sum to at most 2^32.

    Raises:
        InputError: a weight is not finite.
    """
    sums = weight.double().abs().sum(1)
    if not bool(sums.isfinite().all()):
        raise InputError("a weight of the model is not finite")
    # Rounding adds at most a half for each weight; twice that leaves room for the logarithm's own rounding.
    powers = torch.log2((MOST_SUM - weight.shape[1]) / sums).floor()
    return torch.where(sums > 0, powers, 0.0).long()


def limbs_of(share: Int[Tensor, "n i"]) -> tuple[Tensor, Tensor, Tensor]:
    """Return signed limbs with ``low + middle 2^22 + high 2^43 = share`` modulo 2^64, the lowest first."""
    low, rest = _cut(share, LIMBS[0])
    middle, high = _cut(rest, LIMBS[1])
    return low, middle, high


def _cut(numbers: Int[Tensor, "n i"], bits: int) -> tuple[Tensor, Tensor]:
    half = 1 << (bits - 1)
    low = ((numbers + half) & ((1 << bits) - 1)) - half
    return low, (numbers - low) >> bits


def encoded(rows: Float[Tensor, "n i"]) -> tuple[Int[Tensor, "n i"], Float[Tensor, "n 1"]]:
    """Write each row as integers of at most 2^30, and return them with the power of two that it was multiplied by.

    The rows must be finite.
    """
    exact = rows.double()
    step = torch.exp2(ROW_BITS - torch.frexp(exact.abs().amax(1, keepdim=True)).exponent.double())
    return (exact * step).round().long(), step


def decoded(
    products: Int[Tensor, "n o"], step: Float[Tensor, "n 1"], powers: Int[Tensor, " o"]
) -> Float[Tensor, "n o"]:
    """Return products of encoded rows with a matrix as float64 numbers.

    Args:
        step: of the rows, see ``encoded``. powers: of the matrix.
    """
    return products.double() / step * torch.exp2(-powers.double())


def mask_of(seed: UInt8[Tensor, " 32"], rows: int, width: int) -> Int[Tensor, "rows width"]:
    """Return the random numbers of a seed: a ChaCha20 stream, which must be of a new seed for each use."""
    cipher = Cipher(algorithms.ChaCha20(seed.numpy().tobytes(), bytes(16)), mode=None).encryptor()
    stream = bytearray(cipher.update(bytes(8 * rows * width)))
    return torch.frombuffer(stream, dtype=torch.int64).view(rows, width)
