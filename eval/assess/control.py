"""Guess prompts without their rows: what a language model says of a text of which the length alone is known."""

from collections.abc import Sequence

import torch

from hiddenlab.attacks.infill.text import own_text
from hiddenlab.errors import InputError
from hiddenlab.eval.assess.readings import truth_of
from hiddenlab.job import Case
from hiddenlab.models import TruncatedModel
from hiddenlab.models.tokens import most_tokens
from hiddenlab.prompts import Prompt
from hiddenlab.types import Progress, silent

TEXTS = 256  # that the model writes
SHORTEST = 16  # tokens of them: short prompts share the texts of longer ones
CONTENTS = ("a b", "1 2")  # two texts that are alike nowhere: what is alike around them is no text's


def guesses(
    model: TruncatedModel, cases: Sequence[Case], seed: int = 0, progress: Progress = silent
) -> list[tuple[int, ...]]:
    """Return the best guess of each prompt: at each position the token that stands there most often.

    The texts are the model's own. The most frequent token is right most often, if prompts are like them. Tokens that
    the tokenizer or the chat template puts around every prompt are no guess: whoever knows the model knows them.

    Args:
        cases: prompts with their truth, of which the control knows the length and what stands around it.
    """
    prompts = [truth_of(case).tokens for case in cases]
    # Few lengths, since texts are kept in the cache; and none that the model does not take.
    longest = max(SHORTEST, 1 << (max(map(len, prompts)) - 1).bit_length())
    longest = min(longest, most_tokens(model.module) or longest)
    texts = own_text(model, TEXTS, longest, seed, progress)
    likely = torch.stack([torch.mode(column).values for column in texts.T]).tolist()
    guessed = []
    for case, tokens in zip(cases, prompts, strict=True):
        head, tail = _around(model, case)
        public = {*range(head), *range(len(tokens) - tail, len(tokens))}
        guessed.append(tuple(tokens[i] if i in public else likely[i] for i in range(len(tokens))))
    return guessed


def _around(model: TruncatedModel, case: Case) -> tuple[int, int]:
    """Return how many tokens at the two ends of a prompt are the tokenizer's or the chat template's."""
    tokens = truth_of(case).tokens
    if model.tokenizer is None:
        return 0, 0
    prompt = case.prompt or Prompt(case.id, "-", "")
    try:
        one, other = (model.tokenize(_with_contents(prompt, text)) for text in CONTENTS)
    except InputError:  # a template that takes only some contents; nothing is known of it then
        return 0, 0
    head, tail = _alike(one, other), _alike(one[::-1], other[::-1])
    # A prompt of ids may begin without them, and one that was cut has no end.
    at_first = _alike(one[:head], tokens)
    whole = tail > 0 and tokens[-tail:] == tuple(one[-tail:])
    return at_first, tail if whole else 0


def _with_contents(prompt: Prompt, text: str) -> Prompt:
    """Return a prompt with another text: that of each of its messages, if it has some."""
    messages = prompt.messages and tuple({**message, "content": text} for message in prompt.messages)
    return Prompt(prompt.id, text, prompt.source, messages)


def _alike(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two texts have in common at their beginning."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
