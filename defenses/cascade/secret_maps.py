"""Draw secret invertible maps of queries, keys and values, which AttnNodes do not know and CompNodes share.

For each request, layer and key/value head there are two invertible matrices R and S. CompNodes send queries ``q R``,
keys ``k R⁻ᵀ`` and values ``v S``. Scores ``q·k`` stay as they are, so that an AttnNode computes the same softmax
weights, and its outputs are the right ones times S. CompNodes multiply them by ``S⁻¹``.
"""

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from jaxtyping import Float, Int
from torch import Tensor

KEY_BYTES = 32
KEPT = 64  # requests whose maps are kept; those of others are drawn again


@dataclass(frozen=True)
class Maps:
    """The maps of one layer, by key/value head; a query head has those of its key/value head."""

    queries: Float[Tensor, "kv d d"]
    keys: Float[Tensor, "kv d d"]
    values: Float[Tensor, "kv dv dv"]
    back: Float[Tensor, "kv dv dv"]


@dataclass(frozen=True)
class Secret:
    """What CompNodes must share to draw the same maps.

    Attributes:
        spread: largest factor by which a map stretches or shrinks a direction; 1 keeps lengths.
        key: who has it can draw every map.
    """

    spread: float
    key: bytes = field(default_factory=lambda: secrets.token_bytes(KEY_BYTES), repr=False)


class SecretMaps:
    """The maps of all requests of a Cascade, drawn when they are first needed."""

    def __init__(self, secret: Secret) -> None:
        self._key, self._spread = secret.key, secret.spread
        self._kept: OrderedDict[str, dict[int, Maps]] = OrderedDict()

    def of(
        self, request: str, layer: int, like: Float[Tensor, "kv n d"], values: Float[Tensor, "kv n dv"]
    ) -> Maps:
        """Return the maps of a request and layer, in the dtype of its keys and values.

        Args:
            like, values: keys and values of the layer.
        """
        layers = self._kept.setdefault(request, {})
        self._kept.move_to_end(request)
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        if layer not in layers:
            name = b"\0".join((self._key, request.encode(), str(layer).encode()))
            # A seed would not do: torch's generator uses 32 bits of one, which can be tried out.
            draw = Stream(name)
            heads, _, d = like.shape
            forth, back = self._pair(heads, d, draw)
            # R is the inverse of back, so that keys take its transpose.
            mixed, unmixed = self._pair(heads, values.shape[2], draw)
            made = (forth, back.mT, mixed, unmixed)
            layers[layer] = Maps(*(part.to(device=like.device, dtype=like.dtype) for part in made))
        return layers[layer]

    def _pair(self, heads: int, d: int, draw: "Stream") -> tuple[Tensor, Tensor]:
        """Return invertible matrices ``[heads, d, d]`` and their inverses.

        Orthogonal matrices on both sides of a diagonal one bound how much rounding grows.
        """
        # The inverse error function makes normal numbers of uniform ones, up to a factor, which QR drops.
        left, right = torch.linalg.qr(torch.erfinv(draw.between_ones(2, heads, d, d))).Q
        bend = draw.between_ones(heads, 1, d)
        stretch = torch.tensor(self._spread, dtype=torch.float64).pow(bend)
        return (left * stretch) @ right, (right.mT / stretch) @ left.mT


class Stream:
    """Random numbers that only who has the key can compute: SHAKE-256 of a name that holds it, and a count."""

    def __init__(self, name: bytes) -> None:
        self._name, self._drawn = name, 0

    def words(self, *shape: int) -> Int[Tensor, "..."]:
        """Return uniform 64-bit integers."""
        name = b"\0".join((self._name, str(self._drawn).encode()))
        self._drawn += 1
        drawn = hashlib.shake_256(name).digest(8 * prod(shape))
        if not drawn:
            return torch.empty(shape, dtype=torch.int64)
        return torch.frombuffer(bytearray(drawn), dtype=torch.int64).reshape(shape)

    def between_ones(self, *shape: int) -> Float[Tensor, "..."]:
        """Return numbers between -1 and 1, never one of both."""
        whole = self.words(*shape) >> 12  # -2^51 to 2^51 - 1
        return (whole.to(torch.float64) + 0.5) / 2**51

    def normal(self, *shape: int) -> Float[Tensor, "..."]:
        """Return independent numbers of the standard normal distribution."""
        return torch.erfinv(self.between_ones(*shape)) * 2**0.5


class LayerMaps:
    """The maps of one layer for rows of several requests, which lie one request behind the other.

    Args:
        maps: of each request. counts: of its rows.
    """

    def __init__(self, maps: Sequence[Maps], counts: Sequence[int]) -> None:
        self._maps, self._counts = maps, list(counts)

    def hidden(
        self, queries: Float[Tensor, "h n d"], keys: Float[Tensor, "kv n d"], values: Float[Tensor, "kv n dv"]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows as AttnNodes get them."""
        return (
            self._mapped(queries, [maps.queries for maps in self._maps]),
            self._mapped(keys, [maps.keys for maps in self._maps]),
            self._mapped(values, [maps.values for maps in self._maps]),
        )

    def restored(self, outputs: Float[Tensor, "h n dv"]) -> Float[Tensor, "h n dv"]:
        """Return outputs as they are without maps; of one request also some of its rows alone."""
        return self._mapped(outputs, [maps.back for maps in self._maps])

    def _mapped(self, rows: Tensor, maps: Sequence[Tensor]) -> Tensor:
        """Apply each request's map to its rows; query heads are grouped over key/value heads."""
        split = [rows] if len(maps) == 1 else rows.split(self._counts, 1)
        parts = [
            (part.unflatten(0, (len(chosen), -1)) @ chosen[:, None].to(part.dtype)).flatten(0, 1)
            for part, chosen in zip(split, maps, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
