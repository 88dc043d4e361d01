"""Estimate the score that each unused row will still bring, so that hypotheses with different rows compare fairly.

A hypothesis that used rows which any order explains well looks better than one that used the others, though each row
must be used in the end. So hypotheses are ranked by their score minus the score that their rows were expected to bring,
as phrase-based translation decoders do (future cost). The estimate is rough, so only a share of it counts
(docs/log/011-permuted-every-layer.md, eleventh and twenty-ninth entries).
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.attacks.beam_decoding.features import BEFORE, LEAST, TRACES, Rows
from hiddenlab.models import Prefix, Request

SHARE = 0.75  # of the best score of a row by language model and traces
OWN = 0.5  # of a row's own score, by probe and distance


def ahead_of(
    view: Rows, speaker: Prefix | None, weights: Float[Tensor, " features"]
) -> Float[Tensor, " rows"] | None:
    """Return the score that each row is expected to bring, behind the best of the other rows' likeliest tokens.

    Args:
        speaker: the language model, or None.

    Returns:
        None where rows are in known order, so that no row competes with another.
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
    """Return the language model's log-probability of each token (second axis) behind each token alone (first axis)."""
    tokens = tokens.to(speaker.model.device)
    answers = speaker.model.run_all(
        [Request(speaker, token) for token in tokens.split(1)], keep=False, together=True
    )
    return torch.stack([answer.states[0].float().log_softmax(-1)[tokens] for answer in answers])
