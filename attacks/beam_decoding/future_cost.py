"""What each row will be worth once it is used: rows in unknown order compete fairly only with it.

A hypothesis that used rows which any order explains well looks better than one that used the others, though each row
must be used in the end. So hypotheses are compared by what they scored over what their rows can be expected to score,
as decoders of phrases do that translate words in any order (future cost). The expectation is rough, and not all of it
counts (docs/log/011-permuted-every-layer.md and 029-rows-linearised.md).
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.attacks.beam_decoding.features import BEFORE, LEAST, TRACES, Rows
from hiddenlab.models import Prefix, Request

SHARE = 0.75  # of what the language model and traces may say of a row
OWN = 0.5  # of what the row says by itself, by probe and distance


def ahead_of(
    view: Rows, speaker: Prefix | None, weights: Float[Tensor, " features"]
) -> Float[Tensor, " rows"] | None:
    """Shares of what each row's likeliest token will score behind the best of the other rows' tokens.

    Args:
        speaker: the language model, or None.

    Returns:
        None where rows are in known order, and none competes with another.
    """
    if view.places is not None or view.expected is None:
        return None
    tokens, columns = view.ids[:, 0], view.columns[:, 0]
    rows = len(tokens)
    behind = torch.zeros(len(TRACES), rows, rows, device=tokens.device)  # a row behind each of the others
    if view.traces is not None:
        behind += weights[2 : 2 + len(TRACES), None, None] * view.traces[:, :, columns]
    if speaker is not None:
        behind[0] += weights[1] * after_each(tokens, speaker).T.to(behind.device)
    if rows > 1:
        itself = torch.eye(rows, dtype=torch.bool, device=behind.device)
        behind.masked_fill_(itself, float("-inf"))
    sure = (view.scores.exp() * view.scores).sum(1)
    distance = (view.expected / view.norms).clamp(min=LEAST).log()
    return SHARE * behind.amax(2).sum(0) + OWN * (weights[0] * sure + weights[BEFORE] * distance)


def after_each(tokens: Int[Tensor, " n"], speaker: Prefix) -> Float[Tensor, "n n"]:
    """The language model's log-probability of each token (second axis) behind each token alone (first axis)."""
    tokens = tokens.to(speaker.model.device)
    answers = speaker.model.run_all(
        [Request(speaker, one) for one in tokens.split(1)], keep=False, together=True
    )
    return torch.stack([answer.states[0].float().log_softmax(-1)[tokens] for answer in answers])
