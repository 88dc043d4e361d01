"""Detect rows that are no states of the model's site, so that the search does not try every token for each.

States of another layer or another stream, without their first rows, or with undeclared noise match nothing. The first
row shows this at the cost of one vocabulary, since its state depends on no token but its own.
"""

from dataclasses import replace

import torch

from hiddenlab.attacks.vocab_match.task import Task, find_next
from hiddenlab.matching.batching import ForwardCall, Search
from hiddenlab.models import Answer, Request
from hiddenlab.types import TokenPrediction

ROWS, CANDIDATES = 8, 512  # rows searched behind a first row that no token explains, and candidates for each
BLIND_ROWS = 2  # rows where candidates are unordered, so that each takes the whole vocabulary
STANDS_OUT = 10.0  # a candidate so many times nearer than any other fits, whatever the limit


def unexplained(task: Task) -> bool:
    """Return whether the first position is decided and no token explains its row.

    This holds where every token was tried, nothing unknown stands before it, and distances separate right from wrong.
    """
    decided = task.exhausted and not task.overlapping and task.prefix.offset == 0
    whole = task.budget is None or task.budget >= task.proposer.vocab_size
    return decided and whole and not _fits(task.found[0])


def look_ahead(task: Task) -> Search:
    """Search a few rows behind the first with few candidates each; return True if none of them fits.

    The task itself is not changed: if one row fits, the search continues as before.
    """
    blind = task.proposer.probe is None and task.proposer.lm is None
    look = replace(
        task,
        prefix=task.model.prefix(),
        budget=None if blind else CANDIDATES,
        found=[],
        spent=0,
        asked=0.0,
        shadow=None,
    )
    (first,) = task.found
    token = torch.tensor([first.token], device=task.rows.device)
    answer: Answer = yield ForwardCall(task.model, Request(look.prefix, token))
    look.prefix.keep(answer, tokens=1)
    look.accept(first)
    while len(look.found) < look.count and len(look.found) <= (BLIND_ROWS if blind else ROWS):
        yield from find_next(look)
        if _fits(look.found[-1]):
            return False
    return True


def _fits(prediction: TokenPrediction) -> bool:
    return prediction.verified or (
        prediction.margin is not None and prediction.margin >= (STANDS_OUT - 1) * prediction.distance
    )
