"""Compute on additive shares between two parties, with fixed-point numbers in the ring of 64-bit integers.

A trusted dealer hands out correlated randomness in advance (Beaver's triples, masks of truncation); its bytes are
counted separately. Everything is exact but for rounding to the fixed point. A `Holder` computes with its own share, the
messages that were sent to it, and what the dealer gave it, and with nothing else.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from hiddenlab.defenses.protocols.transcript import Transcript
from hiddenlab.errors import InputError

FRACTION = 16  # bits behind the point
_OFFSET_BIT = 62


@dataclass(frozen=True)
class Shared:
    """A tensor as two integer tensors, one with each holder, that sum to it (modulo 2⁶⁴)."""

    first: Int[Tensor, "*shape"]
    second: Int[Tensor, "*shape"]

    def map(self, change: Callable[[Tensor], Tensor]) -> "Shared":
        """Apply the same linear change to both shares."""
        return Shared(change(self.first), change(self.second))

    def __add__(self, other: "Shared") -> "Shared":
        if self.first.shape != other.first.shape:
            raise InputError(f"shares of shapes {_shapes(self, other)} cannot be added")
        return Shared(self.first + other.first, self.second + other.second)


@dataclass(frozen=True)
class Holder:
    """A party that holds a share of every value; of the two, the one that ``leads`` adds what both know."""

    name: str
    leads: bool

    def opened(self, own: Tensor, received: Tensor) -> Tensor:
        """Reconstruct a value from this party's share and the other's."""
        return own + received

    def shifted(self, own: Tensor, by: Tensor) -> Tensor:
        """Return the share of a sum with public integers."""
        return own + by if self.leads else own

    def product(
        self,
        e: Tensor,
        f: Tensor,
        triple: tuple[Tensor, Tensor, Tensor],
        times: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        """Return the share of a product by a Beaver triple.

        Args:
            e, f: the factors, opened under the triple's masks u and v.
            triple: this party's shares of u, v and w = u times v.
            times: the bilinear product.
        """
        u, v, w = triple
        own = times(e, v) + times(u, f) + w
        return own + times(e, f) if self.leads else own

    def truncated(self, z: Tensor, upper: Tensor, top: Tensor, fraction: int) -> Tensor:
        """Return the share of a value divided by 2^fraction.

        Args:
            z: the value, opened under a random mask.
            upper, top: this party's shares of the mask's upper bits and of its highest bit.
            fraction: bits to remove.
        """
        wrapped = (1 - _logical(z, 63)) << (64 - fraction)
        own = wrapped * top - upper
        return own + _logical(z, fraction) - (1 << (_OFFSET_BIT - fraction)) if self.leads else own


class Ring:
    """Two holders of shares, the messages between them, and the dealer.

    Args:
        transcript: where messages are counted.
        holders: names of the two parties.
        fraction: bits behind the point.
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
        self.first, self.second = Holder(holders[0], True), Holder(holders[1], False)
        self._generator = torch.Generator().manual_seed(seed)

    # ---- numbers

    @property
    def step(self) -> float:
        """The distance between neighbouring numbers."""
        return float(2.0**-self.fraction)

    def encode(self, x: Tensor) -> Int[Tensor, "*shape"]:
        """Convert numbers to fixed-point integers.

        Raises:
            InputError: a value is not finite, or a product with a number below 1 would leave the ring.
        """
        if bool((x.abs() >= 2.0 ** (_OFFSET_BIT - 2 * self.fraction)).any()) or not bool(x.isfinite().all()):
            raise InputError(
                f"values of {float(x.abs().max()):.3g} do not fit the ring with {self.fraction} fraction bits"
            )
        return (x.double() * 2**self.fraction).round().long()

    def decode(self, x: Int[Tensor, "*shape"]) -> Tensor:
        """Convert fixed-point integers to float32 numbers."""
        return (x.double() / 2**self.fraction).float()

    def random(self, *shape: int) -> Int[Tensor, "*shape"]:
        """Draw uniform ring elements."""
        high, low = (torch.randint(0, 1 << 32, shape, generator=self._generator) for _ in range(2))
        return (high << 32) + low

    # ---- in and out

    def share(self, x: Tensor, owner: str) -> Shared:
        """Split a party's numbers into shares; it sends the holders what it does not keep."""
        whole = self.encode(x)
        mask = self.random(*whole.shape)
        parts = (whole - mask, mask)
        held = [
            part if holder == owner else self.transcript.send(owner, holder, part)
            for holder, part in zip(self.holders, parts, strict=True)
        ]
        self.transcript.turn()
        return Shared(*held)

    def reveal(self, x: Shared, to: str, label: str, layer: int) -> Tensor:
        """Let a party learn shared numbers: the holders send it their shares."""
        known = [
            part if holder == to else self.transcript.send(holder, to, part)
            for holder, part in zip(self.holders, (x.first, x.second), strict=True)
        ]
        self.transcript.turn()
        return self.transcript.learn(to, label, layer, self.decode(known[0] + known[1]))

    # ---- arithmetic

    def shift(self, x: Shared, by: Int[Tensor, "*shape"]) -> Shared:
        """Add public integers."""
        return Shared(self.first.shifted(x.first, by), self.second.shifted(x.second, by))

    def product(
        self, a: Shared, b: Shared, times: Callable[[Tensor, Tensor], Tensor] = torch.matmul
    ) -> Shared:
        """Multiply shared tensors by a bilinear product, with a triple from the dealer (Beaver 1991).

        Raises:
            InputError: the product leaves the ring (which the simulation checks, though no party could notice), or the
                shapes do not fit.
        """
        self._check(self._magnitude(a), self._magnitude(b), times)
        u, v = self.random(*a.first.shape), self.random(*b.first.shape)
        first, second = zip(*(self._deal(part) for part in (u, v, times(u, v))), strict=True)
        e = self._open(Shared(a.first - first[0], a.second - second[0]))
        f = self._open(Shared(b.first - first[1], b.second - second[1]))
        self.transcript.turn()
        return self.truncate(
            Shared(
                self.first.product(e[0], f[0], first, times), self.second.product(e[1], f[1], second, times)
            )
        )

    def by_public(
        self, x: Shared, weight: Tensor, times: Callable[[Tensor, Tensor], Tensor] = torch.matmul
    ) -> Shared:
        """Multiply by fixed-point numbers that both holders know.

        Raises:
            InputError: see ``product``.
        """
        self._check(self._magnitude(x), weight.double().abs(), times)
        return self.truncate(x.map(lambda part: times(part, weight)))

    def by_private(
        self, x: Shared, weight: Tensor, owner: str, times: Callable[[Tensor, Tensor], Tensor] = torch.matmul
    ) -> Shared:
        """Multiply by fixed-point numbers that only one holder and the dealer know.

        Raises:
            InputError: see ``product``.
        """
        self._check(self._magnitude(x), weight.double().abs(), times)
        return self.truncate(self.by_owner(x, lambda part: times(part, weight), owner))

    def by_owner(self, x: Shared, function: Callable[[Tensor], Tensor], owner: str) -> Shared:
        """Apply a linear function that only one holder and the dealer know: private weights, or a permutation.

        The other holder sends its share under a mask u. The dealer has given the owner a random s, and the other holder
        function(u) − s.
        """
        mine, other = (x.first, x.second) if owner == self.holders[0] else (x.second, x.first)
        u = self.random(*other.shape)
        image = function(u)
        s = self.random(*image.shape)
        self.transcript.dealt += 8 * (u.numel() + 2 * s.numel())
        received = self.transcript.send(self._partner(owner), owner, other - u)
        self.transcript.turn()
        own, rest = function(mine + received) + s, image - s
        return Shared(own, rest) if owner == self.holders[0] else Shared(rest, own)

    def truncate(self, x: Shared) -> Shared:
        """Divide numbers below 2⁶² by 2^fraction, rounding up or down at random.

        The dealer shares a random r, its upper bits and its highest bit. The sum x + r is opened. Whether it wrapped
        around follows from its highest bit and r's (as in Escudero et al. 2020).
        """
        f = self.fraction
        r = self.random(*x.first.shape)
        first, second = zip(*(self._deal(part) for part in (r, _logical(r, f), _logical(r, 63))), strict=True)
        z = self._open(Shared(x.first + first[0] + (1 << _OFFSET_BIT), x.second + second[0]))
        self.transcript.turn()
        return Shared(
            self.first.truncated(z[0], first[1], first[2], f),
            self.second.truncated(z[1], second[1], second[2], f),
        )

    def _magnitude(self, x: Shared) -> Tensor:
        return (x.first + x.second).double().abs()

    def _check(self, a: Tensor, b: Tensor, times: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Check that a product of numbers of these magnitudes stays in the ring, whatever their signs."""
        try:
            bound = times(a, b)
        except RuntimeError:
            raise InputError(
                f"no product of shapes {tuple(a.shape)} and {tuple(b.shape)}: they do not fit"
            ) from None
        if float(bound.max()) >= 2.0**_OFFSET_BIT:
            raise InputError(f"a product does not fit the ring with {self.fraction} fraction bits")

    def _open(self, x: Shared) -> tuple[Tensor, Tensor]:
        """Open a value that a mask makes random; return it as each holder reconstructs it."""
        there, here = (
            self.transcript.send(sender.name, receiver.name, part)
            for sender, receiver, part in (
                (self.first, self.second, x.first),
                (self.second, self.first, x.second),
            )
        )
        return self.first.opened(x.first, here), self.second.opened(x.second, there)

    def _deal(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Split the dealer's randomness into shares."""
        mask = self.random(*x.shape)
        self.transcript.dealt += 16 * x.numel()
        return x - mask, mask

    def _partner(self, holder: str) -> str:
        return self.holders[1] if holder == self.holders[0] else self.holders[0]


def _shapes(*parts: Shared) -> str:
    return " and ".join(str(tuple(part.first.shape)) for part in parts)


def _logical(x: Int[Tensor, "*shape"], bits: int) -> Int[Tensor, "*shape"]:
    """Shift integers right as if they were unsigned."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
