"""Register one attention function for every Hugging Face model through transformers' ``AttentionInterface``."""

from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from hiddenlab.errors import HiddenlabError

EAGER = "eager"  # transformers' name of the function that every architecture has: plain products and its own masks


@dataclass(frozen=True)
class Attention:
    """How a layer attends.

    Attributes:
        scaling: of the scores. window: keys at this distance or further are hidden. softcap: scores stay within it.
    """

    scaling: float
    causal: bool = True
    window: int | None = None
    softcap: float | None = None

    def sees_all(self, queries: Sequence[int], keys: Sequence[int], hidden: Set[int] = frozenset()) -> bool:
        """Return whether every query sees every key, by position in the prompt (``visible`` has no False)."""
        if not queries or not keys:
            return True
        distance = max(max(queries) - min(keys), max(keys) - min(queries))
        return (
            (not self.causal or max(keys) <= min(queries))
            and (self.window is None or distance < self.window)
            and hidden.isdisjoint(keys)
        )

    def visible(
        self, queries: Sequence[int], keys: Sequence[int], hidden: Set[int] = frozenset()
    ) -> Bool[Tensor, "a b"]:
        """Return which keys each query sees, by position in the prompt; no query sees ``hidden`` ones (padding)."""
        seen = self.visible_at(torch.tensor(queries, dtype=torch.long), torch.tensor(keys, dtype=torch.long))
        if hidden:
            seen &= ~torch.tensor([key in hidden for key in keys], dtype=torch.bool)
        return seen

    def visible_at(self, queries: Int[Tensor, "*s a"], keys: Int[Tensor, "*s b"]) -> Bool[Tensor, "*s a b"]:
        """Return which keys each query sees, by positions as tensors, of one sequence or of several."""
        q, k = queries[..., :, None], keys[..., None, :]
        seen = k <= q if self.causal else torch.ones_like(k <= q)
        if self.window is not None:
            seen &= (q - k).abs() < self.window
        return seen


class Attender(Protocol):
    """An object that computes attention for the running pass."""

    def attend(self, layer: int | None, q: Tensor, k: Tensor, v: Tensor, attention: Attention) -> Tensor:
        """Return outputs ``[1, t, h, width]`` of queries ``[1, h, t, width]`` and new k, v ``[1, kv, t, width]``.

        ``layer`` is None where the model's parts do not know their number.
        """
        ...


def register_attention(name: str, active: ContextVar[Any], misuse: str) -> str:
    """Register ``attn_implementation=name``: the active ``Attender`` gets q, k, v after rotary embedding.

    Masks that transformers makes are ignored; the attender knows the positions.

    Args:
        active: holds the ``Attender`` of the running pass, or None. misuse: error text that says how to run such a
            model.

    Returns:
        The name.
    """
    from transformers import AttentionInterface

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        attender: Attender | None = active.get()
        if s_aux is not None:
            raise HiddenlabError(
                "models with learned attention sinks are not supported: their states would be wrong"
            )
        if attender is None:
            raise RuntimeError(misuse)
        settings = Attention(
            query.shape[-1] ** -0.5 if scaling is None else scaling,
            bool(getattr(module, "is_causal", True)),
            sliding_window,
            softcap,
        )
        index: Any = getattr(module, "layer_idx", None)
        layer = None if index is None else int(index)
        return attender.attend(layer, query, key, value, settings), None

    AttentionInterface.register(name, attention)
    return name


def use_attention(module: nn.Module, name: str) -> None:
    """Make every part of a model attend by the attention function of this name, where it has a choice."""
    for part in module.modules():
        if (config := getattr(part, "config", None)) is not None and hasattr(config, "_attn_implementation"):
            config._attn_implementation = name


@contextmanager
def unchanged_rotary(module: nn.Module) -> Iterator[None]:
    """Put back what a pass changes in rotary embeddings: factors that grow with the longest prompt so far (dynamic)."""
    kept = [
        (part, name, value)
        for part in module.modules()
        for name, value in (*vars(part).items(), *part.named_buffers(recurse=False))
        if name.endswith(("inv_freq", "max_seq_len_cached"))
    ]
    try:
        yield
    finally:
        for part, name, value in kept:
            setattr(part, name, value)


@contextmanager
def attending(module: nn.Module, name: str) -> Iterator[None]:
    """Let a model attend by another attention function for a while."""
    before = module.config._attn_implementation  # type: ignore[union-attr]
    use_attention(module, name)
    try:
        yield
    finally:
        use_attention(module, before)  # type: ignore[arg-type]
