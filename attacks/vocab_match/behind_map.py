"""Search the tokens of rows behind a secret linear map, by what the map leaves of them.

The first row has no row before it, so that little tells its token. It is compared with the states of all one-token
prompts. Of the tokens that come near enough, the one is taken behind which a second token is found. Each later token is
searched like one of a plain observation.
"""

from dataclasses import replace

import torch

from hiddenlab.attacks.vocab_match.task import Task, Trials, find_next
from hiddenlab.matching.batching import ForwardCall, Search
from hiddenlab.matching.explained import explained_by
from hiddenlab.models import Answer, Request
from hiddenlab.types import TokenPrediction

OPENINGS = 64  # tokens whose state in the table is nearest to the first row; the model itself runs these
# Candidates for the second token behind each opening, round after round, until one matches.
SECOND = (64, 512, 4096)


def behind_map(task: Task) -> Search:
    """Search one position after the other, the first two together.

    A first token counts as verified only together with the second, which is found in its context.
    """
    openings = yield from _openings(task)
    yield from _begin(task, openings)
    while len(task.found) < len(task.rows):
        yield from find_next(task)
    first = task.found[0]
    confirmed = first.verified and len(task.found) > 1 and task.found[1].verified
    task.found[0] = replace(first, verified=confirmed)


def _openings(task: Task) -> Search:
    """Return the first tokens that are within the limit, nearest first, or the nearest where none is."""
    assert task.explained is not None
    matcher, row = task.matcher, task.rows[:1]
    views = torch.cat([matcher.view(part) for part in task.explained.expected.alone()])
    distances = matcher.table(candidates=views, observed=row)[:, 0]
    near = distances.topk(min(OPENINGS, task.budget or OPENINGS, len(distances)), largest=False).indices
    answer: Answer = yield ForwardCall(task.model, Request(task.prefix, near[:0], branches=near))
    trials = Trials(task.limits[:1])
    trials.add(near, matcher.table(candidates=matcher.view(answer.branches), observed=row))
    nearest = trials.nearest_few(len(near), [0], task.limits)
    return [opening for opening in nearest if opening.verified] or nearest[:1]


def _begin(task: Task, openings: list[TokenPrediction]) -> Search:
    """Accept the first opening behind which a second token matches, and that token; the nearest where none does."""
    several = len(openings) > 1 and len(task.rows) > 1
    assert task.explained is not None
    for budget in SECOND if several else ():
        for opening in openings:
            trial = replace(
                task, prefix=task.model.prefix(), found=[], budget=min(budget, task.budget or budget),
                explained=explained_by(task.matcher.frame, task.explained.expected),
            )  # fmt: skip
            yield from _take(trial, opening)
            yield from find_next(trial)
            if trial.found[1].verified:
                vars(task).update(vars(trial) | {"budget": task.budget, "exhausted": False})
                return
    yield from _take(task, openings[0])


def _take(task: Task, opening: TokenPrediction) -> Search:
    chain = torch.tensor([opening.token], device=task.rows.device)
    answer: Answer = yield ForwardCall(task.model, Request(task.prefix, chain))
    task.keep(answer, tokens=1)
    task.accept(opening)
