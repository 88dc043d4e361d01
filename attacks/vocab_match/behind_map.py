"""Search the tokens of rows behind a secret linear map, by what the map leaves of them.

The first row has no row before it, so that little tells its token. It is compared with the states of all one-token
prompts. Of the tokens that come near enough, the one is taken behind which a second token is found. Each later token is
searched like one of a plain observation.

Behind noise right and wrong candidates overlap. There several hypotheses are kept, and each candidate is weighed by its
distance in the context of its own hypothesis, and by the language model. Nothing is verified.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.attacks.vocab_match.task import Task, Trials, find_next
from hiddenlab.matching.batching import ForwardCall, Search, Together
from hiddenlab.matching.epsilon import Apart
from hiddenlab.matching.explained import explained_by
from hiddenlab.matching.invariants import Span
from hiddenlab.matching.ranking import LanguageModel
from hiddenlab.models import Answer, Request
from hiddenlab.types import TokenPrediction

OPENINGS = 64  # tokens whose state in the table is nearest to the first row; the model itself runs these
# Candidates for the second token behind each opening, round after round, until one matches.
SECOND = (64, 512, 4096)
ADDING = 4096  # candidates that add a direction, before one that repeats a state is taken
# Behind noise: hypotheses kept, and candidates of all of them together that are run, at each position and all later
# ones. First rows say little, each by one number or two.
WIDTHS = ((128, 0), (128, 8192), (64, 4096), (32, 2048), (16, 768))


def behind_map(task: Task) -> Search:
    """Search one position after the other, the first two together.

    A first token counts as verified only together with the next one that proves something, which is found in its
    context.
    """
    if task.apart is not None:
        yield from _behind_noise(task, task.apart)
        return
    openings = yield from _openings(task)
    yield from _begin(task, openings)
    while len(task.found) < len(task.rows):
        yield from _next(task)
    # A state that lies in the space of those before it lies in the released space too, whatever the prompt.
    frame = task.matcher.frame
    proves = frame.known.directions.any(1).tolist() if isinstance(frame, Span) else [True] * len(task.found)
    found = [
        token if own else replace(token, verified=False)
        for token, own in zip(task.found, proves, strict=True)
    ]
    confirmed = next((token.verified for token, own in zip(found[1:], proves[1:], strict=True) if own), False)
    task.found = [replace(found[0], verified=found[0].verified and confirmed), *found[1:]]


def _next(task: Task) -> Search:
    """Search the next position: first among candidates that add a direction, where the right one may add none.

    Mixed rows may have fewer directions than there are tokens: a token may repeat a state. Then a candidate that
    repeats one fits as well as the right token, and must not come before it.
    """
    if isinstance(frame := task.matcher.frame, Span) and frame.repeats:
        trial = task.fork()
        trial.matcher = replace(trial.matcher, frame=replace(frame, repeats=0))
        trial.budget = min(ADDING, task.budget or ADDING)
        yield from find_next(trial)
        behind = trial.matcher.frame
        if trial.found[-1].verified and isinstance(behind, Span):
            trial.matcher = replace(trial.matcher, frame=replace(behind, repeats=frame.repeats))
            vars(task).update(vars(trial) | {"budget": task.budget})
            return
    yield from find_next(task)


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
            yield from _next(trial)
            if trial.found[1].verified:
                vars(task).update(vars(trial) | {"budget": task.budget, "exhausted": False})
                return
    yield from _take(task, openings[0])


def _take(task: Task, opening: TokenPrediction) -> Search:
    chain = torch.tensor([opening.token], device=task.rows.device)
    answer: Answer = yield ForwardCall(task.model, Request(task.prefix, chain))
    task.keep(answer, tokens=1)
    task.accept(opening)


@dataclass
class _Grown:
    """A hypothesis with one token more: a candidate that was run behind it.

    Attributes:
        score: of all its tokens, in nats. place: of the candidate in the answer.
    """

    score: float
    before: Task
    answer: Answer
    place: int
    prediction: TokenPrediction

    def task(self) -> Task:
        grown = self.before.fork()
        grown.keep(self.answer, branch=self.place)
        grown.accept(self.prediction)
        return grown


def _behind_noise(task: Task, apart: Apart) -> Search:
    """Keep the likeliest hypotheses, and take the best at the end."""
    norms = task.matcher.norms(task.rows)
    _follow_together([task])  # what all hypotheses have in common
    beam = yield from _beginnings(task, apart, norms)
    for position in range(1, len(task.rows)):
        kept, tried = WIDTHS[min(position, len(WIDTHS) - 1)]
        grown = yield from _grown(
            beam, min(tried, len(beam) * (task.budget or tried)), position, norms, apart
        )
        grown.sort(key=lambda one: one.score, reverse=True)
        beam = [(one.score, one.task()) for one in grown[:kept]]
    vars(task).update(vars(max(beam, key=lambda one: one[0])[1]))


def _beginnings(task: Task, apart: Apart, norms: Float[Tensor, " rows"]) -> Search:
    """Return the likeliest first tokens as hypotheses, by the table of one-token states and the language model."""
    assert task.explained is not None
    matcher, kept = task.matcher, WIDTHS[0][0]
    views = torch.cat([matcher.view(part) for part in task.explained.expected.alone()])
    distances = matcher.table(candidates=views, observed=task.rows[:1])[:, 0]
    scores = apart.evidence(0, distances / norms[0])
    if isinstance(task.lm, LanguageModel) and (said := task.lm.model.beginning) is not None:
        scores = scores + said.to(scores)
    best = scores.topk(min(kept, task.budget or kept, len(scores)))
    answer: Answer = yield ForwardCall(
        task.model, Request(task.prefix, best.indices[:0], branches=best.indices)
    )
    return [
        (
            score,
            _Grown(
                score, task, answer, i, _guess(token, 0, float(distances[token]), len(best.indices))
            ).task(),
        )
        for i, (score, token) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True))
    ]


def _grown(
    beam: list[tuple[float, Task]], tried: int, position: int, norms: Float[Tensor, " rows"], apart: Apart
) -> Search:
    """Run the likeliest next tokens of all hypotheses together, each behind its own, and return the longer ones."""
    _follow_together([trial for _, trial in beam])
    likely = yield Together([_likely(trial, score, tried, position) for score, trial in beam])
    values = torch.cat([best.values for best, _ in likely])
    least = values.topk(min(tried, len(values))).values[-1]
    behind = [
        _longer(trial, score, best.indices[best.values >= least], said, position, norms, apart)
        for (score, trial), (best, said) in zip(beam, likely, strict=True)
    ]
    return [one for longer in (yield Together(behind)) for one in longer]


def _follow_together(trials: Sequence[Task]) -> None:
    """Compute for all hypotheses of one prompt together what each needs of expected states."""
    behind = [
        (trial.explained, trial.matcher.frame)
        for trial in trials
        if trial.explained is not None and trial.matcher.frame is not None
    ]
    if behind:
        type(behind[0][0]).follow(behind)


def _likely(trial: Task, score: float, tried: int, position: int) -> Search:
    """Return the likeliest next tokens of one hypothesis with the scores so far, and what the language model says."""
    said = None if trial.lm is None else (yield from trial.lm.next_token(trial.tokens))
    assert trial.explained is not None
    each = trial.proposer.scores(trial.of_rows([position]), said, (trial.explained.weight, 1.0))
    best = (each + score).topk(min(tried, len(each)))
    return best, said


def _longer(
    trial: Task, score: float, batch: Int[Tensor, " n"], said: Float[Tensor, " v"] | None, position: int,
    norms: Float[Tensor, " rows"], apart: Apart,
) -> Search:  # fmt: skip
    """Run candidates behind one hypothesis, and return it with each of them, weighed by row and language model."""
    if len(batch) == 0:
        return []
    answer: Answer = yield ForwardCall(trial.model, Request(trial.prefix, batch[:0], branches=batch))
    seen, observed = trial.matcher.view(answer.branches), trial.rows[position : position + 1]
    distances = trial.matcher.table(candidates=seen, observed=observed)[:, 0]
    totals = score + apart.evidence(position, distances / norms[position])
    if said is not None:
        totals = totals + said.to(totals)[batch]
    each = zip(totals.tolist(), batch.tolist(), distances.tolist(), strict=True)
    return [
        _Grown(total, trial, answer, i, _guess(one, position, distance, len(batch)))
        for i, (total, one, distance) in enumerate(each)
    ]


def _guess(token: int, row: int, distance: float, evaluated: int) -> TokenPrediction:
    return TokenPrediction(token, row, distance, None, evaluated, False)
