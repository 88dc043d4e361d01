"""Search the tokens of rows behind a secret linear map, by what the map leaves of them.

The first row has no row before it, so that little tells its token. It is compared with the states of all one-token
prompts. Of the tokens that come near enough, the one is taken behind which a second token is found. Each later token is
searched like one of a plain observation.

Behind noise right and wrong candidates overlap. There several hypotheses are kept, and each candidate is weighed by its
distance in the context of its own hypothesis, and by the language model. Nothing is verified.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.attacks.vocab_match.task import Task, Trials, find_next
from hiddenlab.errors import NotApplicableError
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
# Candidates for the token behind one that no candidate matched, and behind two and more: behind a wrong token nothing
# matches, and what the right one needs is better spent on other prompts.
LOST = (2048, 64)
# Behind noise: hypotheses kept, and candidates of all of them together that are run, at each position and all later
# ones. First rows say little, each by one number or two.
WIDTHS = ((128, 0), (128, 8192), (64, 4096), (32, 2048), (16, 768))
# Where a row tells a right candidate from wrong ones, few run at first: then so many times as many in all, again and
# again, until one that explains the row is clearly ahead of every other token. That is so many nats in all, and half as
# many by the row alone: of mixed rows, the prompt's later tokens explain a row as well.
FIRST, GROWTH, CLEAR = 64, 4, 10.0
EXPLAINS = 0.5  # of what the nearest candidate can have by the row alone; one of ten right ones has less
FEW = 4  # the position from where on a wrong token hardly explains its row by chance
# ``WIDTHS`` of the last try, and candidates of a prompt beyond the usual ones where none of these explains a row.
CAREFUL, SPARE = ((128, 0), (128, 32768), (64, 16384), (32, 8192), (16, 768)), 16384
BEHIND = 30.0  # nats behind the best hypothesis, from where one is given up


def behind_map(task: Task) -> Search:
    """Search one position after the other, the first two together.

    A first token counts as verified only together with the next one that proves something, which is found in its
    context.

    Raises:
        NotApplicableError: mixed rows span the whole space of states.
    """
    if (behind := task.matcher.frame) is not None and not behind.tells:
        raise NotApplicableError(
            f"there are as many mixed rows as a state has numbers ({task.raw.shape[1]}), or nearly: every token "
            "lies in the space that they span"
        )
    if task.apart is not None:
        yield from _behind_noise(task, task.apart)
        return
    openings = yield from _openings(task)
    in_vain = yield from _begin(task, openings)
    allowed = task.budget
    while len(task.found) < len(task.rows):
        if missed := _missed(task):
            few = LOST[min(missed, len(LOST)) - 1]
            task.budget = min(few, allowed or few)
        yield from _next(task)
        _count(task, in_vain)
        task.budget, in_vain = allowed, 0
    # A state that lies in the space of those before it lies in the released space too, whatever the prompt.
    frame = task.matcher.frame
    proves = frame.known.directions.any(1).tolist() if isinstance(frame, Span) else [True] * len(task.found)
    found = [
        token if own else replace(token, verified=False)
        for token, own in zip(task.found, proves, strict=True)
    ]
    confirmed = next((token.verified for token, own in zip(found[1:], proves[1:], strict=True) if own), False)
    task.found = [replace(found[0], verified=found[0].verified and confirmed), *found[1:]]


def _missed(task: Task) -> int:
    """Return how many tokens in succession no candidate matched, up to the last one found."""
    return sum(1 for _ in takewhile(lambda token: not token.verified, reversed(task.found)))


def _next(task: Task) -> Search:
    """Search the next position: first among candidates that add a direction, where the right one may add none.

    Mixed rows may have fewer directions than there are tokens: a token may repeat a state. Then a candidate that
    repeats one fits as well as the right token, and must not come before it.
    """
    in_vain = 0
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
        in_vain = trial.found[-1].evaluated
    yield from find_next(task)
    _count(task, in_vain)


def _count(task: Task, more: int) -> None:
    """Add candidates that ran for the last token in vain: the more ran, the likelier is a chance match."""
    last = task.found[-1]
    task.found[-1] = replace(last, evaluated=last.evaluated + more)


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
    """Accept the first opening behind which a second token matches, and that token; the nearest where none does.

    Returns:
        How many candidates ran in vain for a second token that is still to be found.
    """
    several = len(openings) > 1 and len(task.rows) > 1
    assert task.explained is not None
    in_vain = 0
    for budget in SECOND if several else ():
        for opening in openings:
            trial = replace(
                task, prefix=task.model.prefix(), found=[], budget=min(budget, task.budget or budget),
                explained=explained_by(task.matcher.frame, task.explained.expected),
            )  # fmt: skip
            yield from _take(trial, opening)
            yield from _next(trial)
            if trial.found[1].verified:
                _count(trial, in_vain)
                vars(task).update(vars(trial) | {"budget": task.budget, "exhausted": False})
                return 0
            in_vain += trial.found[1].evaluated
    yield from _take(task, openings[0])
    return in_vain


def _take(task: Task, opening: TokenPrediction) -> Search:
    chain = torch.tensor([opening.token], device=task.rows.device)
    answer: Answer = yield ForwardCall(task.model, Request(task.prefix, chain))
    task.keep(answer, tokens=1)
    task.accept(opening)


@dataclass
class _Grown:
    """A hypothesis with one token more: a candidate that was run behind it.

    What a pass keeps of tens of thousands of candidates would fill the memory. So the few that stay are run once more.

    Attributes:
        score: of all its tokens, in nats. told: by its row alone.
    """

    score: float
    told: float
    before: Task
    prediction: TokenPrediction

    def extended(self, evaluated: int) -> Search:
        """Return the score and the search behind it.

        Args:
            evaluated: candidates that were run for its token, behind all hypotheses together.
        """
        grown = self.before.fork()
        yield from _take(grown, replace(self.prediction, evaluated=evaluated))
        return self.score, grown


@dataclass(frozen=True)
class _Try:
    """How the search behind noise goes through a prompt once.

    Attributes:
        widths: as ``WIDTHS``. spare: candidates beyond the usual ones, where none of these explains a row.
        hasty: a clear lead ends the search for one of the first few tokens too.
        last: it goes on where no candidate explains two rows in succession.
    """

    widths: Sequence[tuple[int, int]] = WIDTHS
    spare: int = 0
    hasty: bool = False
    last: bool = False


TRIES = (_Try(hasty=True), _Try(spare=SPARE), _Try(CAREFUL, SPARE, last=True))


def _behind_noise(task: Task, apart: Apart) -> Search:
    """Keep the likeliest hypotheses, and take the best at the end.

    Where a wrong token shows in later rows, the search begins again, with more care, after two rows in succession that
    no candidate explains.
    """
    norms, frame = task.matcher.norms(task.rows), task.matcher.frame
    _follow_together([task])  # what all hypotheses have in common
    beginnings, best = (yield from _beginnings(task, apart, norms)), None
    for one in TRIES if frame is not None and frame.betrays else (_Try(last=True),):
        if (best := (yield from _followed(beginnings, one, norms, apart))) is not None:
            break
    assert best is not None
    vars(task).update(vars(best))


def _followed(
    beam: list[tuple[float, Task]], how: _Try, norms: Float[Tensor, " rows"], apart: Apart
) -> Search:
    """Follow the likeliest hypotheses to the end, and return the best.

    All but the last try return None where no candidate explains two rows in succession that could tell a right one.
    """
    spare, unexplained = how.spare, 0
    for position in range(1, len(norms)):
        kept, usual = how.widths[min(position, len(how.widths) - 1)]
        early = how.hasty or position >= FEW
        grown = yield from _grown(beam, usual, usual + spare, early, position, norms, apart)
        missed = apart.most(position) >= CLEAR and not _explained(grown, position, apart)
        unexplained = unexplained + 1 if missed else 0
        if unexplained > 1 and not how.last:
            return None
        spare -= max(0, len(grown) - usual)
        least = grown[0].score - BEHIND
        stay = [one.extended(len(grown)) for one in grown[:kept] if not one.score < least]
        beam = yield Together(stay)
    return max(beam, key=lambda one: one[0])[1]


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
    each = zip(best.values.tolist(), best.indices.tolist(), strict=True)
    likely = [_Grown(score, 0.0, task, _guess(token, 0, float(distances[token]))) for score, token in each]
    return (yield Together([one.extended(len(likely)) for one in likely]))


def _grown(
    beam: list[tuple[float, Task]], usual: int, most: int, early: bool, position: int,
    norms: Float[Tensor, " rows"], apart: Apart,
) -> Search:  # fmt: skip
    """Run the likeliest next tokens of all hypotheses together, each behind its own, and return the longer ones.

    Args:
        usual: how many to run where the row says little, or several explain it. most: where it says which one is right,
            and none of these is. early: end where one is clearly ahead.

    Returns:
        The best first.
    """
    telling = apart.most(position) >= CLEAR
    budget = beam[0][1].budget or most
    allowed = len(beam) * budget
    usual, most = min(usual, allowed), min(most if telling else usual, allowed)
    _follow_together([trial for _, trial in beam])
    width = min(budget, most)
    likely = yield Together([_likely(trial, score, width, position) for score, trial in beam])
    values, tokens, said = (torch.cat(parts) for parts in zip(*likely, strict=True))
    counts = torch.tensor([len(best) for best, _, _ in likely], device=values.device)
    owners = torch.arange(len(beam), device=values.device).repeat_interleave(counts)
    order, grown = values.topk(min(most, len(values))).indices, list[_Grown]()
    owners, tokens, said = owners[order], tokens[order], said[order]
    del likely, values, order  # large, and not needed while candidates run
    size = FIRST if telling and early else usual
    while len(grown) < (wanted := len(tokens)):
        if grown and _explained(grown, position, apart):
            wanted = min(usual, wanted)
            if len(grown) >= wanted or (early and _is_clear(grown, position, apart)):
                break
        part = slice(len(grown), min(len(grown) + size, wanted))
        by_owner = part.start + owners[part].argsort(stable=True)
        shares = by_owner.split(owners[part].bincount(minlength=len(beam)).tolist())
        behind = [
            _longer(trial, score, tokens[share], said[share], position, norms, apart)
            for (score, trial), share in zip(beam, shares, strict=True)
        ]
        grown += [one for longer in (yield Together(behind)) for one in longer]
        grown.sort(key=lambda one: one.score, reverse=True)
        size = (GROWTH - 1) * len(grown)
    return grown


def _explained(grown: list[_Grown], position: int, apart: Apart) -> bool:
    """Return whether a candidate explains its row as nine of ten right ones do."""
    return any(one.told >= EXPLAINS * apart.most(position) for one in grown)


def _is_clear(grown: list[_Grown], position: int, apart: Apart) -> bool:
    """Return whether the best token explains its row and is far ahead of all others, whatever the tokens before it.

    Args:
        grown: the best first.
    """
    best = grown[0]
    others = [one for one in grown if one.prediction.token != best.prediction.token]
    score = max((one.score for one in others), default=-math.inf)
    told = max((one.told for one in others), default=-math.inf)
    ahead = best.score - score >= CLEAR and best.told - told >= CLEAR / 2
    return ahead and _explained([best], position, apart)


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
    """Return the scores of the likeliest next tokens of one hypothesis, these, and what the language model says."""
    said = None if trial.lm is None else (yield from trial.lm.next_token(trial.tokens))
    assert trial.explained is not None
    each = trial.proposer.scores(trial.of_rows([position]), said, (trial.explained.weight, 1.0))
    best = (each + score).topk(min(tried, len(each)))
    logs = torch.zeros_like(best.values) if said is None else said.to(best.values)[best.indices]
    return best.values, best.indices, logs


def _longer(
    trial: Task, score: float, batch: Int[Tensor, " n"], said: Float[Tensor, " n"], position: int,
    norms: Float[Tensor, " rows"], apart: Apart,
) -> Search:  # fmt: skip
    """Run candidates behind one hypothesis, and return it with each of them, weighed by row and language model."""
    longer, observed = list[_Grown](), trial.rows[position : position + 1]
    passes = zip(
        batch.split(trial.model.max_pass_tokens), said.split(trial.model.max_pass_tokens), strict=True
    )
    for part, logs in passes if len(batch) else ():
        answer: Answer = yield ForwardCall(trial.model, Request(trial.prefix, part[:0], branches=part))
        seen = trial.matcher.view(answer.branches)
        distances = trial.matcher.table(candidates=seen, observed=observed)[:, 0]
        told = apart.evidence(position, distances / norms[position])
        totals = score + told + logs.to(told)
        each = zip(totals.tolist(), told.tolist(), part.tolist(), distances.tolist(), strict=True)
        longer += [_Grown(total, own, trial, _guess(one, position, far)) for total, own, one, far in each]
    return longer


def _guess(token: int, row: int, distance: float) -> TokenPrediction:
    return TokenPrediction(token, row, distance, None, 0, False)
