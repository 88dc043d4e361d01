"""Run a whole language model as provider and verifier do: prefill with final states and logits, and cached decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hiddenlab.errors import InputError
from hiddenlab.models.device import parse_device
from hiddenlab.models.load import (
    load_config,
    load_module,
    load_tokenizer,
    parse_dtype,
    resolve_model,
)
from hiddenlab.models.quantized import quiet_bitsandbytes
from hiddenlab.models.tokens import most_tokens
from hiddenlab.text import count_of

ATTENTIONS = ("sdpa", "eager")
MEASURED = 256  # tokens over which the scale of columns is taken
_STRIDE = 2654435761  # a prime, larger than any vocabulary: its multiples are spread over all tokens


@dataclass(frozen=True)
class Step:
    """The result of one pass over a batch.

    Attributes:
        logits: of the last position of each row of the batch.
        states: final-norm states of all positions of the pass.
    """

    logits: Float[Tensor, "b v"]
    states: Float[Tensor, "b t d"]


class WholeModel:
    """A causal language model with its head, run by transformers' own attention.

    Attributes:
        name: as the user named it. tokenizer: may be None. vocabulary: width of the logits.
    """

    def __init__(self, model: nn.Module, name: str, tokenizer: Any = None) -> None:
        self.model = model
        self.name = name
        self.tokenizer = tokenizer
        self._states: Tensor | None = None
        self.base.register_forward_hook(self._capture)

    @property
    def base(self) -> nn.Module:
        """The model without its head; its output is the state after the final norm."""
        return self.model.base_model  # type: ignore[return-value]

    @property
    def vocabulary(self) -> int:
        return int(self.model.get_output_embeddings().weight.shape[0])  # type: ignore[operator]

    @property
    def width(self) -> int:
        return int(self.model.config.hidden_size)  # type: ignore[union-attr,arg-type]

    @property
    def device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device  # type: ignore[operator,no-any-return]

    def check_length(self, tokens: int, what: str) -> None:
        """Check that the model has enough positions.

        Args:
            tokens: number of positions.
            what: names the text in the error.

        Raises:
            InputError: the model has fewer positions.
        """
        limit = most_tokens(self.model)
        if limit is not None and tokens > limit:
            raise InputError(f"{what}: {count_of(tokens, 'token')}; {self.name} takes {limit} together")

    def check_tokens(self, tokens: Sequence[int], what: str) -> None:
        """Check that every token has an embedding: a tokenizer may know more tokens than its model.

        Args:
            what: names the text in the error.

        Raises:
            InputError: one has none.
        """
        if (largest := max(tokens, default=0)) >= self.vocabulary:
            raise InputError(
                f"{what}: token {largest} is not in a vocabulary of {self.vocabulary}; another tokenizer's?"
            )

    def _capture(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._states = output[0]

    def _run(self, keep: int, **inputs: Any) -> tuple[Tensor, Tensor]:
        with torch.inference_mode():
            output = self.model(**inputs, logits_to_keep=keep)
        assert self._states is not None
        states, self._states = self._states, None
        return output.logits, states

    def prefill(
        self, tokens: Sequence[int], outputs: int
    ) -> tuple[Float[Tensor, "t d"], Float[Tensor, "n v"]]:
        """Run one pass over prompt and output.

        Args:
            tokens: of prompt and output.
            outputs: how many at the end are output.

        Returns:
            Final-norm states of all positions, and the logits from which each output token was to be drawn.
        """
        inputs = torch.tensor(tokens, device=self.device)[None]
        logits, states = self._run(outputs + 1, input_ids=inputs, use_cache=False)
        return states[0], logits[0, :-1]

    @cached_property
    def scale(self) -> Float[Tensor, " d"]:
        """The root mean square of each column of the final-norm states, over fixed tokens.

        The tokens are 1 · s, 2 · s … modulo the vocabulary. Anybody who has the model can compute the scale; proofs by
        row measure values in units of it (``rules.ROWS``). It needs neither text nor tokenizer.
        """
        count = min(MEASURED, most_tokens(self.model) or MEASURED)
        tokens = [place * _STRIDE % self.vocabulary for place in range(1, count + 1)]
        states = self.prefill(tokens, 0)[0].double()
        # A column of zeros has no scale; any positive one will do, as zeros stay the smallest.
        return states.square().mean(0).sqrt().clamp(min=1e-6).cpu()

    def step(self, tokens: Int[Tensor, "b t"], mask: Int[Tensor, "b n"], cache: Any = None) -> Step:
        """Run one pass over tokens that follow what ``cache`` holds.

        Args:
            tokens: new tokens of each row of the batch.
            mask: which of all n positions are not left padding.
            cache: KV cache of the positions before; None to run without one.
        """
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        options = {"past_key_values": cache, "use_cache": True} if cache is not None else {"use_cache": False}
        logits, states = self._run(
            1, input_ids=tokens, attention_mask=mask, position_ids=positions, **options
        )
        return Step(logits[:, -1], states)

    def __repr__(self) -> str:
        return f"WholeModel({self.name}, {self.model.dtype}, {self.device})"


def load_whole(
    name: str = "builtin",
    *,
    dtype: str = "float32",
    device: str = "auto",
    quantization: str | None = None,
    attention: str | None = None,
    layers: int | None = None,
) -> WholeModel:
    """Load a whole model to generate or to verify with.

    Args:
        name: ``builtin``, a local directory, a GGUF file, or a hub id. dtype, device, quantization: see ``load_model``.
        attention: ``sdpa``, ``eager``, or None for the model's default. layers: run only so many of the first.

    Raises:
        InputError: unknown model, dtype, device or attention, or more layers than there are.
    """
    if attention not in (None, *ATTENTIONS):
        raise InputError(f"unknown attention {attention!r}; known are {', '.join(ATTENTIONS)}")
    ref = resolve_model(name)
    config = load_config(ref)
    if layers is not None and not 1 <= layers <= config.num_hidden_layers:
        raise InputError(f"{layers} layers are out of range: {name} has 1 to {config.num_hidden_layers}")
    with quiet_bitsandbytes():
        model = load_module(
            ref, config, head=True, dtype=parse_dtype(dtype), device=parse_device(device),
            quantization=quantization, attention=attention, layers=layers,
        )  # fmt: skip
    return WholeModel(model, name, load_tokenizer(ref))
