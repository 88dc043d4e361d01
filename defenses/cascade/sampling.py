"""Choose the next token of an answer from its logits, as transformers' ``generate`` and vLLM define each setting."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.errors import InputError

# From all token ids so far, prompt included, and the next one's logits, to the next token's id.
Chooser: TypeAlias = Callable[[Int[Tensor, " n"], Float[Tensor, " v"]], int]


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: 0 takes the most likely token.
        top_k: draw among so many of the most likely; 0 for all.
        top_p: draw among the most likely that together have this probability.
        seed: of the draws.
        min_p: draw among those with at least this share of the likeliest one's probability.
        repetition_penalty: divides positive logits of tokens in prompt and answer, and multiplies negative ones.
        frequency_penalty: taken from a token's logit as often as the answer holds it.
        presence_penalty: taken from a token's logit once, where the answer holds it.
        logit_bias: added to the logits of these token ids.
        min_tokens: the answer has at least so many tokens before one that ends it.
        rules: further settings of a model's generation_config.json, see ``RULES``.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    rules: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.temperature >= 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise InputError("temperature and top_k must be at least 0, top_p above 0 and at most 1")
        if not 0 <= self.min_p <= 1 or self.min_tokens < 0 or not 0 < self.repetition_penalty < math.inf:
            raise InputError("min_p must be 0 to 1, min_tokens at least 0, and repetition_penalty above 0")

    def chooser(self, prompt: int = 0, stop: Collection[int] = ()) -> Chooser:
        """Return a function that chooses the next token; its draws come from its own generator.

        Args:
            prompt: tokens of the prompt.
            stop: ids that end the answer.
        """
        change = self._processors(prompt, stop)
        if self.temperature == 0:
            return lambda history, logits: int(change(history, logits).argmax())
        warp, generator = self._warpers(), torch.Generator().manual_seed(self.seed)

        def choose(history: Tensor, logits: Tensor) -> int:
            # Shifted so that the largest logit is 0, logits over a tiny temperature overflow to -inf, never to NaN.
            scores = change(history, logits).double().cpu()
            scores = warp(history[None], (scores - scores.max())[None])[0]
            return int(torch.multinomial(scores.softmax(-1), 1, generator=generator))

        return choose

    def _warpers(self) -> Any:
        """Return what narrows a draw, in transformers' order."""
        import transformers as t

        warpers = t.LogitsProcessorList([t.TemperatureLogitsWarper(self.temperature)])
        if self.top_k:
            warpers.append(t.TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            warpers.append(t.TopPLogitsWarper(self.top_p))
        if self.min_p:
            warpers.append(t.MinPLogitsWarper(self.min_p))
        return warpers

    def _processors(self, prompt: int, stop: Collection[int]) -> Callable[[Tensor, Tensor], Tensor]:
        """Return what changes logits before a token is chosen, in transformers' order; vLLM's penalties come last."""
        import transformers as t

        changes = t.LogitsProcessorList()
        if self.repetition_penalty != 1:
            changes.append(t.RepetitionPenaltyLogitsProcessor(self.repetition_penalty))
        ends = sorted(stop)
        for name, make in RULES.items():
            if (value := self.rules.get(name)) is not None and (ends or name not in _ABOUT_THE_END):
                changes.append(make(value, prompt, ends))
        if self.min_tokens and ends:
            changes.append(_at_least(self.min_tokens, prompt, ends))
        biased = torch.tensor(list(self.logit_bias), dtype=torch.long)
        bias = torch.tensor(list(self.logit_bias.values()), dtype=torch.float32)
        counted = bool(self.frequency_penalty or self.presence_penalty)

        def change(history: Tensor, logits: Tensor) -> Tensor:
            if not changes and not counted and not self.logit_bias:
                return logits
            # Copied, as transformers does, and in its precision.
            scores = logits.to("cpu", torch.float32, copy=True)
            scores[biased] += bias
            scores = changes(history[None], scores[None])[0]  # type: ignore[arg-type]
            if counted:
                ids, times = history[prompt:].unique(return_counts=True)
                scores[ids] -= self.frequency_penalty * times + self.presence_penalty
            return scores

        return change


def _at_least(tokens: int, prompt: int, ends: list[int]) -> Any:
    from transformers import MinNewTokensLengthLogitsProcessor

    return MinNewTokensLengthLogitsProcessor(prompt, tokens, ends)


def _transformers(name: str) -> Callable[..., Any]:
    def make(*values: Any) -> Any:
        import transformers

        return getattr(transformers, name)(*values)

    return make


# Settings of a generation_config.json that change which token is the likeliest, beside the repetition penalty: each
# makes a processor of transformers' from its value, the prompt's tokens and the ids that end the answer. In its order.
RULES: dict[str, Callable[[Any, int, list[int]], Any]] = {
    "sequence_bias": lambda value, prompt, ends: _transformers("SequenceBiasLogitsProcessor")(value),
    "no_repeat_ngram_size": lambda value, prompt, ends: _transformers("NoRepeatNGramLogitsProcessor")(value),
    "bad_words_ids": lambda value, prompt, ends: _transformers("NoBadWordsLogitsProcessor")(
        value, ends or None
    ),
    "min_length": lambda value, prompt, ends: _transformers("MinLengthLogitsProcessor")(value, ends),
    "min_new_tokens": lambda value, prompt, ends: _at_least(value, prompt, ends),
    "suppress_tokens": lambda value, prompt, ends: _transformers("SuppressTokensLogitsProcessor")(value),
    "begin_suppress_tokens": lambda value, prompt, ends: _transformers(
        "SuppressTokensAtBeginLogitsProcessor"
    )(value, prompt),
}
_ABOUT_THE_END = ("min_length", "min_new_tokens")
