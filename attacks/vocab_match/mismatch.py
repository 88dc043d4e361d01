"""Whether observed rows are states of the model's site at all: what is not is no reason to try every token behind it.

States of another layer or another stream, without their first rows, or with noise that nobody declared, match nothing.
The first row tells so at the cost of one vocabulary, since its state depends on no token but its own.
"""

from dataclasses import replace

import torch

from hiddenlab.attacks.vocab_match.task import Task, find_next
from hiddenlab.matching.batching import ForwardCall, Search
from hiddenlab.models import Answer, Request
from hiddenlab.types import TokenPrediction

ROWS, CANDIDATES = 8, 512  # that are looked at behind a first row that no token explains
BLIND_ROWS = 2  # the same where nothing orders candidates, so that each row takes the whole vocabulary
STANDS_OUT = 10.0  # so many times nearer than any other candidate is no accident, whatever the limit


def unexplained(task: Task) -> bool:
    """Whether the first position is decided, and no token explains its row.

    It is where every token was tried, none behind anything unknown, and distances tell right from wrong.
    """
    decided = task.exhausted and not task.overlapping and task.prefix.offset == 0
    whole = task.budget is None or task.budget >= task.proposer.vocab_size
    return decided and whole and not _fits(task.found[0])


def look_ahead(task: Task) -> Search:
    """Search some rows behind the first, few candidates each, and say whether none of them fits.

    The task itself stays as it is: if one fits, the search goes on as if nobody had looked.
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
    while look.free and len(look.found) <= (BLIND_ROWS if blind else ROWS):
        yield from find_next(look)
        if _fits(look.found[-1]):
            return False
    return True


def _fits(one: TokenPrediction) -> bool:
    return one.verified or (one.margin is not None and one.margin >= (STANDS_OUT - 1) * one.distance)
