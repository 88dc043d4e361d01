"""Provide the language models that an infiller can tune: the attacked decoder itself, or a masked language model."""

from contextvars import ContextVar
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from hiddenlab.errors import InputError
from hiddenlab.models import TruncatedModel
from hiddenlab.models.attention import Attention, register_attention
from hiddenlab.models.load import load_config, load_module, load_tokenizer, load_whole, resolve_model

DOOR = "hiddenlab-infill"
SHORT = 512  # tokens up to which attention is computed step by step on a CPU
_ACTIVE: ContextVar["_BothSides | None"] = ContextVar("hiddenlab_infill", default=None)


@runtime_checkable
class Backbone(Protocol):
    """A language model that reads vectors of the attacked model's tokens and returns logits over its vocabulary.

    Attributes:
        model: what LoRA is applied to. mask: the initial vector of an unknown token.
    """

    model: Any
    mask: Float[Tensor, " d"]

    def embed(self, tokens: Int[Tensor, "b n"]) -> Float[Tensor, "b n d"]:
        """Return input vectors of tokens of the attacked model."""
        ...

    def logits(self, inputs: Float[Tensor, "b n d"], wanted: Bool[Tensor, "b n"]) -> Float[Tensor, "w v"]:
        """Return logits of the tokens at the wanted positions."""
        ...


class _BothSides:
    """Attention over all tokens of each text, in both directions.

    It is computed step by step for short texts on a CPU, where the fused kernel takes seven times as long in bfloat16,
    mostly in its backward pass.
    """

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, attention: Attention) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        short = q.device.type == "cpu" and q.shape[2] <= SHORT
        if not short and attention.window is None and attention.softcap is None:
            return F.scaled_dot_product_attention(q, k, v, scale=attention.scaling).transpose(1, 2)
        scores = (q @ k.transpose(-1, -2)).float() * attention.scaling
        if attention.softcap is not None:
            scores = torch.tanh(scores / attention.softcap) * attention.softcap
        if attention.window is not None:
            place = torch.arange(q.shape[2], device=q.device)
            far = (place[:, None] - place[None]).abs() >= attention.window
            scores = scores.masked_fill(far, float("-inf"))
        return (scores.softmax(-1).to(v.dtype) @ v).transpose(1, 2)


class Decoder:
    """The attacked model itself, with attention in both directions.

    The token at position i is predicted at position i − 1, as in the decoder, so that training starts from the language
    model's own knowledge of the next token.
    """

    def __init__(self, model: TruncatedModel, dtype: torch.dtype) -> None:
        self.model: Any = load_module(
            model.ref, load_config(model.ref), head=True, dtype=dtype, device=model.device,
            attention=register_attention(DOOR, _ACTIVE, "an infiller is run through Infiller.forward"),
        )  # fmt: skip
        table: Tensor = self.model.get_input_embeddings().weight  # type: ignore[operator]
        self.mask = table.float().mean(0)
        self.opening = int((model.special_ids or [0])[0])

    def embed(self, tokens: Int[Tensor, "b n"]) -> Float[Tensor, "b n d"]:
        return self.model.get_input_embeddings()(tokens).float()  # type: ignore[no-any-return]

    def logits(self, inputs: Float[Tensor, "b n d"], wanted: Bool[Tensor, "b n"]) -> Float[Tensor, "w v"]:
        opening = self.model.get_input_embeddings()(
            torch.full((len(inputs), 1), self.opening, device=inputs.device)
        )
        inputs = torch.cat([opening, inputs.to(opening.dtype)], 1)
        token = _ACTIVE.set(_BothSides())
        try:
            hidden = self.model.base_model(inputs_embeds=inputs, use_cache=False).last_hidden_state
        finally:
            _ACTIVE.reset(token)
        return self.model.get_output_embeddings()(hidden[:, :-1][wanted]).float()  # type: ignore[no-any-return]


class MaskedLM:
    """A masked language model with its vocabulary replaced by the attacked model's (paper, section 7.2.1: ModernBERT).

    A token of the attacked model gets the mean of the input vectors, and of the output weights, of the pieces into
    which the masked model's tokenizer splits its text; training adapts them. Positions are the attacked model's.

    Args:
        name: a directory or hub id.

    Raises:
        InputError: no such model, no masked language model, or one without a mask token.
    """

    def __init__(self, name: str, truncated: TruncatedModel, dtype: torch.dtype) -> None:
        from transformers import AutoModelForMaskedLM

        ref = resolve_model(name)
        config = load_config(ref)
        tokenizer = load_tokenizer(ref)
        if tokenizer is None or tokenizer.mask_token_id is None:
            raise InputError(
                f"{name} has no mask token; give a masked language model, or leave 'masked' out to tune the attacked "
                "model itself"
            )
        model = load_whole(AutoModelForMaskedLM, ref, config, dtype=dtype)
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise InputError(f"{name} has no linear output layer, so that its vocabulary cannot be exchanged")
        self.name = name
        self.limit = int(
            min(getattr(config, "max_position_embeddings", None) or 1 << 30, tokenizer.model_max_length)
        )
        table = model.get_input_embeddings().weight.detach()
        self.mask = table[tokenizer.mask_token_id].float().clone()
        self._ends = [
            table[i].float().clone() if i is not None else None
            for i in (tokenizer.cls_token_id, tokenizer.sep_token_id)
        ]
        pieces = cut(truncated, tokenizer)
        self.table = nn.Embedding.from_pretrained(average(table.float(), pieces)).to(truncated.device)
        new = nn.Linear(head.in_features, len(pieces), bias=head.bias is not None).to(dtype)
        with torch.no_grad():
            new.weight.copy_(average(head.weight.float(), pieces))
            if head.bias is not None:
                new.bias.copy_(average(head.bias.float()[:, None], pieces)[:, 0])
        model.set_output_embeddings(new)
        self.model = model.to(truncated.device).requires_grad_(False)
        self._ends = [None if end is None else end.to(truncated.device) for end in self._ends]
        self.mask = self.mask.to(truncated.device)

    def embed(self, tokens: Int[Tensor, "b n"]) -> Float[Tensor, "b n d"]:
        return self.table(tokens)  # type: ignore[no-any-return]

    def logits(self, inputs: Float[Tensor, "b n d"], wanted: Bool[Tensor, "b n"]) -> Float[Tensor, "w v"]:
        before, after = ([] if end is None else [end.expand(len(inputs), 1, -1)] for end in self._ends)
        whole = torch.cat([*before, inputs, *after], 1)
        if whole.shape[1] > self.limit:
            raise InputError(
                f"{self.name} reads {self.limit} tokens at most, not {whole.shape[1]}; give --max-tokens"
            )
        dtype = next(self.model.parameters()).dtype
        logits = self.model(inputs_embeds=whole.to(dtype)).logits
        return logits[:, len(before) : len(before) + inputs.shape[1]][wanted].float()  # type: ignore[no-any-return]


def cut(model: TruncatedModel, tokenizer: Any) -> list[list[int]]:
    """Return each attacked token's pieces in another vocabulary; its unknown token where there is no text."""
    texts = [model.text([i]) if i in model.known_ids else "" for i in range(model.vocab_size)]
    tokenized = tokenizer(texts, add_special_tokens=False)["input_ids"]
    unknown = tokenizer.unk_token_id if tokenizer.unk_token_id is not None else tokenizer.mask_token_id
    return [list(pieces) or [unknown] for pieces in tokenized]


def average(weights: Float[Tensor, "old d"], pieces: list[list[int]]) -> Float[Tensor, "v d"]:
    """Return the mean of the rows of each token's pieces."""
    flat = torch.tensor([i for ids in pieces for i in ids], device=weights.device)
    starts = torch.tensor([0, *map(len, pieces)], device=weights.device).cumsum(0)[:-1]
    return F.embedding_bag(flat, weights, starts, mode="mean")
