"""Guess prompts without their rows: what a language model says of a text of which the length alone is known."""

from collections.abc import Sequence

import torch

from hiddenlab.attacks.infill.text import own_text
from hiddenlab.models import TruncatedModel
from hiddenlab.types import Progress, silent

TEXTS = 256  # that the model writes
SHORTEST = 16  # tokens of them: short prompts share the texts of longer ones


def guesses(
    model: TruncatedModel, lengths: Sequence[int], seed: int = 0, progress: Progress = silent
) -> list[tuple[int, ...]]:
    """Return the best guess of each prompt: at each position the token that stands there most often.

    The texts are the model's own. The most frequent token is right most often, if prompts are like them.

    Args:
        lengths: tokens of each prompt, which rows show.
    """
    longest = max(
        SHORTEST, 1 << (max(lengths) - 1).bit_length()
    )  # few lengths, since texts are kept in the cache
    texts = own_text(model, TEXTS, longest, seed, progress)
    likely = torch.stack([torch.mode(column).values for column in texts.T]).tolist()
    return [tuple(likely[:length]) for length in lengths]
