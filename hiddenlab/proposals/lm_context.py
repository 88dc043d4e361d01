"""Find the tokens that a language model reads before every prompt so that it predicts the first ones better.

Many models attend to their first position whatever stands there (an attention sink). So a prompt's own first token,
read first, tells them little about the second: the second is about the 1,500th in the built-in model's order, and 36th
behind a line break (docs/log/013-opener.md). A tokenizer that puts a special token first has the same effect.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from hiddenlab.models import Prefix, Request, TruncatedModel
from hiddenlab.models.choice import CODE, facts_of, fingerprint, remembered
from hiddenlab.models.tokens import longest_text
from hiddenlab.utils.schema import CLOSED

WINDOWS, LENGTH, CHARACTERS = 24, 16, 400  # of the attacker's own text, on which openers are compared
WINDOWS_PER_PASS = 6  # windows in a pass: logits are as wide as the vocabulary
SPECIALS = 4  # special tokens tried at most


def openers_of(model: TruncatedModel) -> list[Int[Tensor, " n"]]:
    """Return what may be read first: nothing, a special token, a line break."""
    openers: list[list[int]] = [[], *([token] for token in model.special_ids[:SPECIALS])]
    if model.tokenizer is not None:
        openers.append(model.embedded(model.tokenizer("\n", add_special_tokens=False)["input_ids"]))
    return [torch.tensor(ids, dtype=torch.long, device=model.device) for ids in openers]


def beginnings(model: TruncatedModel, seed: int) -> list[Int[Tensor, " n"]]:
    """Return openings of the attacker's own texts: topics of Python's language reference, or random tokens.

    ``Corpus`` is not used, since it holds the whole standard library in memory.
    """
    length = min(LENGTH, longest_text(model.module))
    if model.tokenizer is None:
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(model.vocab_size, (WINDOWS, length), generator=generator)
        return list(drawn.to(model.device))
    from pydoc_data.topics import topics

    texts = [str(topics[name]) for name in sorted(topics)][:: max(1, len(topics) // WINDOWS)][:WINDOWS]
    # As prompts begin: with the tokenizer's own special token, if it puts one first.
    tokenized = (model.tokenizer(text[:CHARACTERS])["input_ids"] for text in texts)
    ids = [model.embedded(tokens)[:length] for tokens in tokenized]
    return [torch.tensor(tokens, device=model.device) for tokens in ids if len(tokens) > 1]


@dataclass(frozen=True)
class Opener:
    """The token ids of an opener."""

    __pydantic_config__ = CLOSED

    ids: tuple[int, ...]


@torch.inference_mode()
def opened(
    model: TruncatedModel, seed: int = 0, log_probs: Callable[[Tensor], Tensor] | None = None
) -> Prefix:
    """Return the opener behind which the attacker's own text is likeliest, run once; forks of it read prompts.

    The choice for a language model is kept in the cache.

    Args:
        model: the language model. log_probs: of the next token, by its states ``n d``; None where these are logits.
    """
    if log_probs is None:
        key = {"config": facts_of(model.module.config), "weights": fingerprint(model.module), "seed": seed}
        key |= {"dtype": str(model.dtype), "text": model.tokenizer is not None}
        code = (*CODE, Path(__file__).parent)
        chosen = remembered("opener", key, Opener, lambda: _likeliest(model, seed, None), code)
    else:
        chosen = _likeliest(model, seed, log_probs)
    prefix = model.prefix()
    if chosen.ids:
        prefix.extend(torch.tensor(chosen.ids, device=model.device))
    return prefix


def _likeliest(model: TruncatedModel, seed: int, log_probs: Callable[[Tensor], Tensor] | None) -> Opener:
    windows = beginnings(model, seed)
    best, most = Opener(()), -float("inf")
    for opener in openers_of(model):
        prefix = model.prefix()
        if len(opener):
            prefix.extend(opener)
        total = 0.0
        for start in range(0, len(windows), WINDOWS_PER_PASS):
            part = windows[start : start + WINDOWS_PER_PASS]
            answers = model.run_all([Request(prefix, window) for window in part], keep=False)
            for window, answer in zip(part, answers, strict=True):
                states = answer.states[:-1]
                following = states.float().log_softmax(-1) if log_probs is None else log_probs(states)
                total += float(following.gather(1, window[1:, None]).sum())
        if total > most:
            best, most = Opener(tuple(opener.tolist())), total
    return best
