"""Arithmetic on additive shares between two parties: fixed-point numbers in the ring of 64-bit integers.

A trusted dealer hands out correlated randomness beforehand (Beaver's triples, masks of truncation); its bytes are
counted apart. Everything is exact but for rounding to the fixed point.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from defenses.schemes.transcript import Transcript
from hiddenlab.errors import InputError

FRACTION = 16  # bits behind the point
_OFFSET_BIT = 62


@dataclass(frozen=True)
class Shared:
    """A tensor as two integer tensors, one with each holder, that sum to it (modulo 2⁶⁴)."""

    first: Int[Tensor, "*shape"]
    second: Int[Tensor, "*shape"]

    def map(self, change: Callable[[Tensor], Tensor]) -> "Shared":
        """The same linear change to both."""
        return Shared(change(self.first), change(self.second))

    def __add__(self, other: "Shared") -> "Shared":
        if self.first.shape != other.first.shape:
            raise InputError(f"shares of shapes {_shapes(self, other)} cannot be added")
        return Shared(self.first + other.first, self.second + other.second)


class Ring:
    """Two holders of shares, and what they do with them.

    Args:
        transcript: where messages are counted. holders: names of the two parties. fraction: bits behind the point.
        seed: of the dealer's and the parties' randomness.

    Raises:
        InputError: too many bits for products to fit the ring.
    """

    def __init__(
        self, transcript: Transcript, holders: tuple[str, str], *, fraction: int = FRACTION, seed: int = 0
    ) -> None:
        if not 1 <= fraction <= 24:
            raise InputError(f"fixed-point numbers have 1 to 24 bits behind the point here, not {fraction}")
        self.transcript, self.holders, self.fraction = transcript, holders, fraction
        self._generator = torch.Generator().manual_seed(seed)

    # ---- numbers

    @property
    def step(self) -> float:
        """How far apart neighbouring numbers are."""
        return float(2.0**-self.fraction)

    def encode(self, x: Tensor) -> Int[Tensor, "*shape"]:
        """Fixed-point integers.

        Raises:
            InputError: a value that a product with a number below 1 would push out of the ring.
        """
        if bool((x.abs() >= 2.0 ** (_OFFSET_BIT - 2 * self.fraction)).any()) or not bool(x.isfinite().all()):
            raise InputError(
                f"values of {float(x.abs().max()):.3g} do not fit the ring with {self.fraction} fraction bits"
            )
        return (x.double() * 2**self.fraction).round().long()

    def decode(self, x: Int[Tensor, "*shape"]) -> Tensor:
        """The float32 numbers of fixed-point integers."""
        return (x.double() / 2**self.fraction).float()

    def random(self, *shape: int) -> Int[Tensor, "*shape"]:
        """Uniform ring elements."""
        high, low = (torch.randint(0, 1 << 32, shape, generator=self._generator) for _ in range(2))
        return (high << 32) + low

    # ---- in and out

    def share(self, x: Tensor, owner: str) -> Shared:
        """Cut a party's numbers into shares; it sends the holders what it does not keep."""
        whole = self.encode(x)
        mask = self.random(*whole.shape)
        parts = (whole - mask, mask)
        for holder, part in zip(self.holders, parts, strict=True):
            if holder != owner:
                self.transcript.send(owner, holder, part)
        self.transcript.turn()
        return Shared(*parts)

    def reveal(self, x: Shared, to: str, label: str, layer: int) -> Tensor:
        """Let a party learn the numbers: the holders send it their shares."""
        for holder, part in zip(self.holders, (x.first, x.second), strict=True):
            if holder != to:
                self.transcript.send(holder, to, part)
        self.transcript.turn()
        return self.transcript.learn(to, label, layer, self.decode(x.first + x.second))

    # ---- arithmetic

    def shift(self, x: Shared, by: Int[Tensor, "*shape"]) -> Shared:
        """Add public integers."""
        return Shared(x.first + by, x.second)

    def product(
        self, a: Shared, b: Shared, times: Callable[[Tensor, Tensor], Tensor] = torch.matmul
    ) -> Shared:
        """A product of shared tensors, bilinear, by a triple from the dealer (Beaver 1991).

        Raises:
            InputError: the product leaves the ring (no party could notice; this is a simulation, and looks), or the
                shapes do not fit.
        """
        self._check(self._magnitude(a), self._magnitude(b), times)
        u, v = self.random(*a.first.shape), self.random(*b.first.shape)
        w = times(u, v)
        (u0, u1), (v0, v1), (w0, w1) = self._deal(u), self._deal(v), self._deal(w)
        e = self._open(Shared(a.first - u0, a.second - u1))
        f = self._open(Shared(b.first - v0, b.second - v1))
        self.transcript.turn()
        return self.truncate(
            Shared(times(e, f) + times(e, v0) + times(u0, f) + w0, times(e, v1) + times(u1, f) + w1)
        )

    def by_public(
        self, x: Shared, weight: Tensor, times: Callable[[Tensor, Tensor], Tensor] = torch.matmul
    ) -> Shared:
        """A product with fixed-point numbers that both holders know.

        Raises:
            InputError: see ``product``.
        """
        self._check(self._magnitude(x), weight.double().abs(), times)
        return self.truncate(x.map(lambda part: times(part, weight)))

    def by_private(
        self, x: Shared, weight: Tensor, owner: str, times: Callable[[Tensor, Tensor], Tensor] = torch.matmul
    ) -> Shared:
        """A product with fixed-point numbers that one holder and the dealer know.

        Raises:
            InputError: see ``product``.
        """
        self._check(self._magnitude(x), weight.double().abs(), times)
        return self.truncate(self.by_owner(x, lambda part: times(part, weight), owner))

    def by_owner(self, x: Shared, function: Callable[[Tensor], Tensor], owner: str) -> Shared:
        """A linear function that only one holder and the dealer know: private weights, or a permutation.

        The other sends its share under a mask u; the dealer has given the owner a random s, and the other
        function(u) − s.
        """
        mine, other = (x.first, x.second) if owner == self.holders[0] else (x.second, x.first)
        u = self.random(*other.shape)
        image = function(u)
        s = self.random(*image.shape)
        self.transcript.dealt += 8 * (u.numel() + 2 * s.numel())
        self.transcript.send(self._partner(owner), owner, u)  # a masked share has its size
        self.transcript.turn()
        own, rest = function(mine + (other - u)) + s, image - s
        return Shared(own, rest) if owner == self.holders[0] else Shared(rest, own)

    def truncate(self, x: Shared) -> Shared:
        """Divide numbers below 2⁶² by 2^fraction, rounding up or down at random, never wrong by more.

        The dealer shares a random r, its upper bits and its highest bit; x + r is opened, and whether that sum wrapped
        around follows from its highest bit and r's (as in Escudero et al. 2020).
        """
        f = self.fraction
        r = self.random(*x.first.shape)
        (r0, r1), (upper0, upper1), (top0, top1) = (
            self._deal(part) for part in (r, _logical(r, f), _logical(r, 63))
        )
        z = self._open(Shared(x.first + r0 + (1 << _OFFSET_BIT), x.second + r1))
        self.transcript.turn()
        wrapped = (1 - _logical(z, 63)) << (64 - f)
        return Shared(
            _logical(z, f) - upper0 + wrapped * top0 - (1 << (_OFFSET_BIT - f)), wrapped * top1 - upper1
        )

    def _magnitude(self, x: Shared) -> Tensor:
        return (x.first + x.second).double().abs()

    def _check(self, a: Tensor, b: Tensor, times: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Whether a product of numbers of these magnitudes stays in the ring, whatever their signs."""
        try:
            bound = times(a, b)
        except RuntimeError:
            raise InputError(
                f"no product of shapes {tuple(a.shape)} and {tuple(b.shape)}: they do not fit"
            ) from None
        if float(bound.max()) >= 2.0**_OFFSET_BIT:
            raise InputError(f"a product does not fit the ring with {self.fraction} fraction bits")

    def _open(self, x: Shared) -> Tensor:
        """Both holders learn a value that a mask makes random."""
        first, second = self.holders
        self.transcript.send(first, second, x.first)
        self.transcript.send(second, first, x.second)
        return x.first + x.second

    def _deal(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Shares of the dealer's randomness."""
        mask = self.random(*x.shape)
        self.transcript.dealt += 16 * x.numel()
        return x - mask, mask

    def _partner(self, holder: str) -> str:
        return self.holders[1] if holder == self.holders[0] else self.holders[0]


def _shapes(*parts: Shared) -> str:
    return " and ".join(str(tuple(part.first.shape)) for part in parts)


def _logical(x: Int[Tensor, "*shape"], bits: int) -> Int[Tensor, "*shape"]:
    """Shift right as unsigned numbers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
