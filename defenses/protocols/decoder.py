"""Hold a decoder of Llama or GPT-2 type as plain tensors, which schemes permute, share and run step by step.

The attacks run models through transformers; a scheme changes the arithmetic inside a layer, and needs its parts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.errors import InputError


@dataclass(frozen=True)
class Linear:
    """A linear layer y = x Wᵀ + b, with a weight of shape ``out in``."""

    weight: Float[Tensor, "out in"]
    bias: Float[Tensor, " out"] | None


@dataclass(frozen=True)
class Norm:
    """An RMS norm, or a layer norm where ``centred``."""

    weight: Float[Tensor, " d"]
    bias: Float[Tensor, " d"] | None
    eps: float
    centred: bool


@dataclass(frozen=True)
class Block:
    """One decoder layer; ``gate`` is None where the activation is not gated."""

    norm1: Norm
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    norm2: Norm
    up: Linear
    gate: Linear | None
    down: Linear


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding: frequencies of half a head's dimensions, and a factor on cosine and sine."""

    frequencies: Float[Tensor, " half"]
    scaling: float

    def tables(self, positions: Int[Tensor, " n"]) -> tuple[Float[Tensor, "n d"], Float[Tensor, "n d"]]:
        """Return cosines and sines of positions, both halves of a head alike."""
        angles = positions.float()[:, None] * self.frequencies
        angles = torch.cat([angles, angles], 1)
        return angles.cos() * self.scaling, angles.sin() * self.scaling


@dataclass(frozen=True)
class Weights:
    """All weights of a decoder.

    Attributes:
        embedding: token vectors, or None for a party that does not have them.
        positions: learned position vectors (GPT-2 type).
        rotary: rotary position embedding (Llama type).
        limit: longest prompt in tokens.
        window: how many tokens back attention reaches, or None.
    """

    embedding: Float[Tensor, "v d"] | None
    positions: Float[Tensor, "m d"] | None
    rotary: Rotary | None
    blocks: tuple[Block, ...]
    final: Norm
    head: Linear
    heads: int
    kv_heads: int
    activation: str
    limit: int
    window: int | None

    @property
    def width(self) -> int:
        return len(self.final.weight)

    @property
    def head_dim(self) -> int:
        return len(self.blocks[0].q.weight) // self.heads

    @property
    def tied(self) -> bool:
        """Whether the output layer is the embedding."""
        return self.embedding is not None and torch.equal(self.embedding, self.head.weight)

    def to(self, dtype: torch.dtype) -> "Weights":
        """Return the same weights in another dtype."""
        return _cast(self, dtype)  # type: ignore[no-any-return]

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor of the weights."""
        for part in (self.embedding, self.positions, self.rotary, *self.blocks, self.final, self.head):
            yield from _tensors(part)

    def inputs(self, tokens: Sequence[int]) -> Float[Tensor, "n d"]:
        """Return the vectors of tokens, without positions.

        Raises:
            InputError: this party has no embedding, there are no tokens, or one is outside of the vocabulary.
        """
        if self.embedding is None:
            raise InputError("this party has no embedding")
        if not tokens or not 0 <= min(tokens) <= max(tokens) < len(self.embedding):
            raise InputError(f"tokens must be numbers below {len(self.embedding)}, and at least one")
        return self.embedding[torch.tensor(list(tokens))]


def _tensors(part: Any) -> Iterator[Tensor]:
    if isinstance(part, Tensor):
        yield part
    elif hasattr(part, "__dataclass_fields__"):
        for name in part.__dataclass_fields__:
            yield from _tensors(getattr(part, name))


def _cast(part: Any, dtype: torch.dtype) -> Any:
    if isinstance(part, Tensor):
        return part.to(dtype)
    if isinstance(part, tuple):
        return tuple(_cast(element, dtype) for element in part)
    if hasattr(part, "__dataclass_fields__"):
        return replace(
            part, **{name: _cast(getattr(part, name), dtype) for name in part.__dataclass_fields__}
        )
    return part


def take(linear: Linear, rows: Tensor | None = None, columns: Tensor | None = None) -> Linear:
    """Return a linear layer with its outputs (``rows``) and inputs (``columns``) in another order."""
    weight, bias = linear.weight, linear.bias
    if rows is not None:
        weight, bias = weight[rows], None if bias is None else bias[rows]
    return Linear(weight if columns is None else weight[:, columns], bias)


def take_norm(norm: Norm, order: Tensor) -> Norm:
    """Return a norm with its dimensions in another order."""
    return replace(norm, weight=norm.weight[order], bias=None if norm.bias is None else norm.bias[order])
