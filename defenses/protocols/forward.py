"""Run a decoder with any arithmetic: in floating point, or on the shares of a scheme."""

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F
from transformers.activations import ACT2FN

from hiddenlab.defenses.protocols.decoder import Linear, Norm, Weights
from hiddenlab.errors import InputError

T = TypeVar("T")


@runtime_checkable
class Arithmetic(Protocol[T]):
    """The operations that a decoder needs; ``layer`` is the number of the decoder layer, from 1."""

    def local(self, change: Callable[[Tensor], Tensor], x: T) -> T:
        """Apply a change of order or shape, the same for every share."""
        ...

    def add(self, a: T, b: T) -> T: ...

    def shift(self, x: T, by: Tensor) -> T:
        """Add public values."""
        ...

    def scale(self, x: T, by: Tensor | float) -> T:
        """Multiply by public values, element by element."""
        ...

    def linear(self, x: T, linear: Linear) -> T: ...

    def product(self, a: T, b: T) -> T:
        """Multiply two matrices."""
        ...

    def times(self, a: T, b: T) -> T:
        """Multiply element by element."""
        ...

    def norm(self, x: T, norm: Norm, layer: int, where: str) -> T: ...

    def softmax(self, scores: T, visible: Bool[Tensor, "n k"], layer: int) -> T: ...

    def activate(self, x: T, kind: str, layer: int) -> T: ...

    def output(self, x: T, head: Linear) -> T:
        """Apply the last linear layer, for the user."""
        ...


class Cache(Generic[T]):
    """Keys and values of the tokens before, by layer."""

    def __init__(self) -> None:
        self.keys: dict[int, Any] = {}
        self.values: dict[int, Any] = {}
        self.length = 0


def walk(
    weights: Weights,
    x: Any,
    arithmetic: Arithmetic[Any],
    cache: Cache[Any] | None = None,
    depth: int | None = None,
) -> tuple[Any, list[Any]]:
    """Run a decoder on a prompt's vectors; return its logits and the state after each layer.

    State 0 are the inputs with positions added.

    Args:
        weights: of the decoder.
        x: token vectors ``n d``, as the arithmetic holds them.
        arithmetic: the operations.
        cache: keys and values of the tokens before; it is extended.
        depth: run only so many layers; the logits are None then.

    Raises:
        InputError: the prompt is longer than the model's attention reaches.
    """
    a, past = arithmetic, 0 if cache is None else cache.length
    count = len(_parts(a, x)[0])
    if past + count > weights.limit:
        raise InputError(f"the model reads {weights.limit} tokens at most, not {past + count}")
    places = torch.arange(past, past + count)
    if weights.positions is not None:
        x = a.shift(x, weights.positions[places])
    rotary = None if weights.rotary is None else weights.rotary.tables(places)
    back = places[:, None] - torch.arange(past + count)
    visible = (back >= 0) & (back < (weights.window or past + count + 1))
    states = [x]
    groups = weights.heads // weights.kv_heads
    for number, block in enumerate(weights.blocks[:depth], 1):
        normed = a.norm(x, block.norm1, number, "norm1")
        q = _split(a, a.linear(normed, block.q), weights.heads)
        k = _split(a, a.linear(normed, block.k), weights.kv_heads)
        v = _split(a, a.linear(normed, block.v), weights.kv_heads)
        if rotary is not None:
            q, k = _rotate(a, q, rotary), _rotate(a, k, rotary)
        if cache is not None:
            k, v = (_append(a, kept, number, new) for kept, new in ((cache.keys, k), (cache.values, v)))
        k, v = (a.local(lambda t: t.repeat_interleave(groups, 0), t) for t in (k, v))
        scores = a.product(a.scale(q, weights.head_dim**-0.5), a.local(lambda t: t.transpose(1, 2), k))
        mixed = a.product(a.softmax(scores, visible, number), v)
        x = a.add(x, a.linear(a.local(lambda t: t.transpose(0, 1).flatten(1), mixed), block.o))
        normed = a.norm(x, block.norm2, number, "norm2")
        inner = a.activate(a.linear(normed, block.gate or block.up), weights.activation, number)
        if block.gate is not None:
            inner = a.times(inner, a.linear(normed, block.up))
        x = a.add(x, a.linear(inner, block.down))
        states.append(x)
    if cache is not None:
        cache.length += count
    if depth is not None:
        return None, states
    final = a.norm(x, weights.final, len(weights.blocks) + 1, "final")
    return a.output(final, weights.head), states


def _split(a: Arithmetic[Any], x: Any, heads: int) -> Any:
    return a.local(lambda t: t.view(len(t), heads, -1).transpose(0, 1), x)


def _append(a: Arithmetic[Any], kept: dict[int, Any], layer: int, new: Any) -> Any:
    if layer in kept:
        parts = iter(_parts(a, kept[layer]))
        new = a.local(lambda t: torch.cat([next(parts), t], 1), new)
    kept[layer] = new
    return new


def _parts(a: Arithmetic[Any], x: Any) -> list[Tensor]:
    parts: list[Tensor] = []
    a.local(lambda t: parts.append(t) or t, x)  # type: ignore[func-returns-value]
    return parts


def _rotate(a: Arithmetic[Any], x: Any, tables: tuple[Float[Tensor, "n d"], Float[Tensor, "n d"]]) -> Any:
    half = tables[0].shape[1] // 2
    turned = a.local(lambda t: torch.cat([-t[..., half:], t[..., :half]], -1), x)
    return a.add(a.scale(x, tables[0]), a.scale(turned, tables[1]))


class Plain:
    """Floating-point arithmetic that hides nothing; the reference for the schemes."""

    def local(self, change: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return change(x)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def shift(self, x: Tensor, by: Tensor) -> Tensor:
        return x + by

    def scale(self, x: Tensor, by: Tensor | float) -> Tensor:
        return x * by

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        return F.linear(x, linear.weight, linear.bias)

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ b

    def times(self, a: Tensor, b: Tensor) -> Tensor:
        return a * b

    def norm(self, x: Tensor, norm: Norm, layer: int, where: str) -> Tensor:
        return apply_norm(normalise(x, norm), norm)

    def softmax(self, scores: Tensor, visible: Bool[Tensor, "n k"], layer: int) -> Tensor:
        return scores.masked_fill(~visible, float("-inf")).softmax(-1)

    def activate(self, x: Tensor, kind: str, layer: int) -> Tensor:
        return activation(x, kind)

    def output(self, x: Tensor, head: Linear) -> Tensor:
        return self.linear(x, head)


def normalise(x: Float[Tensor, "n d"], norm: Norm) -> Float[Tensor, "n d"]:
    """Divide (and centre) as a norm does; this does not depend on the order of the dimensions."""
    if norm.centred:
        x = x - x.mean(-1, keepdim=True)
    return x * (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt()


def apply_norm(x: Float[Tensor, "n d"], norm: Norm) -> Float[Tensor, "n d"]:
    """Apply a norm's weight and bias, which depend on the order of the dimensions."""
    return x * norm.weight if norm.bias is None else x * norm.weight + norm.bias


def activation(x: Tensor, kind: str) -> Tensor:
    """Apply an activation by transformers' name for it."""
    return ACT2FN[kind](x)  # type: ignore[no-any-return]
