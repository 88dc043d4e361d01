"""Hold the state of one prompt under attack, and search its next position; all searches share this step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.matching.batching import ForwardCall, Search
from hiddenlab.matching.distance import Matcher
from hiddenlab.matching.epsilon import Apart
from hiddenlab.matching.explained import Explained
from hiddenlab.matching.observed_context import ObservedContext
from hiddenlab.matching.ranking import LanguageModel, Proposer
from hiddenlab.matching.screening import Screen, near_ones
from hiddenlab.models import Answer, Prefix, Request, TruncatedModel
from hiddenlab.proposals.in_context import log_likelihood
from hiddenlab.types import TokenPrediction

# Candidates in one pass: doubled while that is cheap, then a quarter of those tried in the same order, since
# candidates beyond the match are wasted.
FIRST_BATCH, SMALL_BATCH, LAST_BATCH = 4, 16, 512
# Candidates tried at one position before the prompt's own tokens are, and how many of these at most.
COPY_FROM, MAX_COPIES = 24, 64
# Where right and wrong distances overlap: candidates tried at one position before one outside its limit is taken
# because it is twice as near as any other; the more were tried, the smaller that ratio has to be.
SETTLE_AFTER = 1024
# Where no candidate matched: at most so many, within so many times the nearest distance, are compared by so many
# following rows.
CONTENDERS, CONTENDER_RATIO, AHEAD = 64, 2.0, 8
ADAPT_AT = (256, 1024)  # candidates tried at one position when their states are learned from
# Most numbers of a table of rows and tokens that is kept (128 MB); a larger one is computed again for each token.
MOST_KEPT = 1 << 25
SCREENED_FACTOR = 1.001  # least distance of a candidate that only the screen ran, in limits of its row


@dataclass
class Task:
    """One observation, prepared for search.

    Attributes:
        raw: rows as observed (for the probe). rows: rows in the matcher's form. limits: distance within which a row
            counts as matched. shortlist, scores: best tokens of each row and their log-probabilities.
        budget: candidates for one position at most, or None.
        spent, asked: candidates searched so far, and the cost of asking the language model, in candidates.
        overlapping: right and wrong distances overlapped when the limits were measured, so that a right candidate may
            lie outside of them.
        explained: how likely each token makes a row behind a secret map; in place of the probe.
        apart: how far right and wrong candidates come behind a secret map and noise.
        screen: runs large batches first, where that is faster; None runs every candidate in the truncated model alone.
        extra: how many rows are no token's. decoys: rows that turned out to be such.
        exhausted: vocabulary or budget were used up at some position. foreign: no row looks like a state of this site.
    """

    model: TruncatedModel
    matcher: Matcher
    proposer: Proposer
    raw: Float[Tensor, "rows d"]
    rows: Float[Tensor, "rows e"]
    limits: Float[Tensor, " rows"]
    prefix: Prefix
    ordered: bool
    budget: int | None = None
    shortlist: Int[Tensor, "rows k"] | None = None
    scores: Float[Tensor, "rows k"] | None = None
    found: list[TokenPrediction] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
    spent: int = 0
    asked: float = 0.0
    exhausted: bool = False
    foreign: bool = False
    overlapping: bool = False
    explained: Explained | None = None
    apart: Apart | None = None
    screen: Screen | None = None
    extra: int = 0
    decoys: frozenset[int] = frozenset()
    shadow: Prefix | None = None
    _table: Float[Tensor, "rows v"] | None = None

    def __post_init__(self) -> None:
        self.free = list(range(len(self.rows)))
        self.lm: LanguageModel | ObservedContext | None = None
        if self.proposer.reader is not None and self.ordered:
            self.lm = ObservedContext(self.proposer.reader, self.raw)
        elif self.proposer.lm is not None:
            self.lm = LanguageModel(self.proposer.lm, self.proposer.weights)

    @property
    def tokens(self) -> list[int]:
        return [prediction.token for prediction in self.found]

    def recent(self) -> list[int]:
        """Return the distinct tokens found so far, the latest first, at most ``MAX_COPIES``."""
        return list(dict.fromkeys(reversed(self.tokens)))[:MAX_COPIES]

    @property
    def count(self) -> int:
        """How many tokens the rows are of."""
        return len(self.rows) - self.extra

    @property
    def in_line(self) -> bool:
        """Whether each row is known to be of the token at its place."""
        return self.ordered and not self.extra

    def targets(self) -> list[int]:
        """Return the rows that the next token may match: its own, or all free ones where the order is unknown.

        Of rows in order among which some are no token's, so many are left out that the others suffice.
        """
        if not self.ordered:
            return [row for row in self.free if row not in self.decoys]
        first = self.found[-1].row + 1 if self.found else 0
        last = first + self.extra - (first - len(self.found))
        return [row for row in range(first, last + 1) if row not in self.decoys]

    def of_rows(self, targets: Sequence[int]) -> Float[Tensor, " v"] | None:
        """Return the probe's log-probability of each token for the best of some rows; None without a probe.

        Where rows are out of order, every position asks for all that are still free.
        """
        if self.explained is not None:
            assert self.matcher.frame is not None
            return self.explained.scores(self.matcher.frame)
        probe = self.proposer.probe
        if probe is None:
            return None
        if self.ordered or len(self.raw) * self.proposer.vocab_size > MOST_KEPT:
            return probe.log_probs(self.raw[targets]).amax(0)
        if self._table is None:
            self._table = probe.log_probs(self.raw)
        return self._table[targets].amax(0)

    def keep(self, answer: Answer, *, tokens: int = 0, branch: int | None = None) -> None:
        """Append the first tokens of an answered request, and then one of its branches, to what is known."""
        self.prefix.keep(answer, tokens=tokens, branch=branch)
        kept = answer.branches[:0] if branch is None else answer.branches[branch : branch + 1]
        self.matcher = self.matcher.behind(torch.cat([answer.states[:tokens], kept]))

    def fork(self) -> "Task":
        """Return the same task, to be searched on in another way."""
        explained = None if self.explained is None else self.explained.fork()
        other = replace(self, prefix=self.prefix.fork(), found=list(self.found), explained=explained)
        other.lm = self.lm.fork() if isinstance(self.lm, LanguageModel) else self.lm
        other.free = list(self.free)
        return other

    def accept(self, prediction: TokenPrediction) -> None:
        self.found.append(prediction)
        self.free.remove(prediction.row)


@dataclass
class Trials:
    """Candidates evaluated at one position, in its exact context."""

    limits: Tensor  # of the targets; distances are divided by them, since rows' norms may differ by much
    tokens: list[Tensor] = field(default_factory=list)
    nearest: list[Tensor] = field(default_factory=list)  # distance of each candidate to its nearest target
    rows: list[Tensor] = field(default_factory=list)  # which target that is
    screened: list[Tensor] = field(default_factory=list)  # the distance is a screen's, not the model's

    def add(self, tokens: Tensor, table: Float[Tensor, "c targets"], exact: Tensor | None = None) -> None:
        """Add candidates; ``exact`` are the indices of those that the model ran, if it did not run all."""
        nearest, rows = self._nearest(table)
        screened = torch.full_like(tokens, exact is not None, dtype=torch.bool)
        screened[exact if exact is not None else slice(0)] = False
        # Only what the truncated model ran can match, whatever the screen's distance.
        nearest = torch.where(screened, nearest.maximum(SCREENED_FACTOR * self._units[rows]), nearest)
        self.tokens.append(tokens)
        self.nearest.append(nearest)
        self.rows.append(rows)
        self.screened.append(screened)

    def relative(self, table: Float[Tensor, "c targets"]) -> Float[Tensor, " c"]:
        """Return the distance of each candidate to its nearest row, in units of that row's limit."""
        return (table / self._units).amin(dim=1)

    def doubtful(self) -> Int[Tensor, " n"]:
        """Return the indices of candidates that only the screen has run, nearest first."""
        for of in (self.tokens, self.nearest, self.rows, self.screened):
            of[:] = [torch.cat(of)]
        (which,) = self.screened[0].nonzero(as_tuple=True)
        return which[(self.nearest[0] / self._units[self.rows[0]])[which].argsort()]

    def correct(self, places: Int[Tensor, " n"], table: Float[Tensor, "n targets"]) -> None:
        """Set the model's own distances of candidates at indices that ``doubtful`` returned."""
        self.nearest[0][places], self.rows[0][places] = self._nearest(table)
        self.screened[0][places] = False

    def _nearest(self, table: Float[Tensor, "c targets"]) -> tuple[Float[Tensor, " c"], Int[Tensor, " c"]]:
        rows = (table / self._units).argmin(dim=1)
        return table.gather(1, rows[:, None])[:, 0], rows

    @property
    def _units(self) -> Tensor:
        return self.limits.clamp(min=1e-30)

    @property
    def count(self) -> int:
        return sum(len(t) for t in self.tokens)

    def stands_out(self) -> bool:
        """Return whether one of many candidates is far nearer than any other."""
        if self.count < SETTLE_AFTER:
            return False
        nearest = torch.cat(self.nearest) / self._units[torch.cat(self.rows)]
        first, second = nearest.topk(2, largest=False).values.tolist()
        return bool((1 + SETTLE_AFTER / self.count) * first <= second)

    def best(self, targets: list[int], limits: Tensor) -> tuple[TokenPrediction, bool]:
        """Return the nearest candidate, and whether it is within its row's limit."""
        (prediction,) = self.nearest_few(1, targets, limits)
        return prediction, prediction.verified

    def nearest_few(self, count: int, targets: list[int], limits: Tensor) -> list[TokenPrediction]:
        """Return the nearest candidates, best first; margins are to the nearest other one."""
        tokens, nearest, rows = torch.cat(self.tokens), torch.cat(self.nearest), torch.cat(self.rows)
        relative = nearest / self._units[rows]
        near = relative.topk(min(count + 1, len(nearest)), largest=False)
        values, places, within = near.values.tolist(), near.indices[:count], limits.tolist()
        few = zip(*(of[places].tolist() for of in (tokens, rows, nearest)), strict=True)
        predictions = []
        for k, (token, target, distance) in enumerate(few):
            row = targets[target]
            other = values[0] if k else values[1] if len(values) > 1 else None
            margin = None if other is None else (other - values[k]) * within[row]
            predictions.append(
                TokenPrediction(token, row, distance, margin, len(tokens), distance <= within[row])
            )
        return predictions


class Candidates:
    """Candidates of one position in proposal order, each once, to the end of the vocabulary or the budget.

    The cheap shortlist of the target rows (or ``first``, where the caller has a better order of it) comes first. The
    whole vocabulary is ordered only when that is used up, or when the language model was asked.
    """

    def __init__(self, task: Task, trials: Trials, targets: list[int], first: Tensor | None = None) -> None:
        self.task, self.targets, self.first = task, targets, first
        self.left = (task.budget or task.proposer.vocab_size) - trials.count
        self._seen = torch.zeros(task.proposer.vocab_size, dtype=torch.bool, device=task.rows.device)
        for tokens in trials.tokens:
            self._seen[tokens] = True
        self.rank(None)

    def rank(self, next_token: Tensor | None) -> None:
        """Order the remaining candidates again, with the language model's log-probabilities where they are known."""
        self._next_token = next_token
        self._scores: Tensor | None = None
        self._waiting = self._stages()
        self._order = torch.empty(0, dtype=torch.long, device=self._seen.device)
        self.size, self._tried = FIRST_BATCH, 0

    def learn(self, distances: Float[Tensor, " v"], count: int) -> None:
        """Reorder by the probe, the language model and squared distances predicted from ``count`` candidates."""
        evidence = log_likelihood(distances.to(self._seen.device), count)
        order = (self._likely() + evidence).argsort(descending=True)
        self._order, self._waiting = order[~self._seen[order]], iter(())
        self.size, self._tried = FIRST_BATCH, 0

    def promote(self, tokens: Int[Tensor, " n"]) -> None:
        """Try some tokens next."""
        order = torch.cat([tokens, self._order])
        self._order = first_of_each(order[~self._seen[order]], len(self._seen))

    def _stages(self) -> Iterator[Tensor]:
        task, first_tokens = self.task, self.task.proposer.first_tokens
        if not task.found and first_tokens is not None:
            yield first_tokens.nearest(task.raw[self.targets], LAST_BATCH).to(self._seen.device)
        if not task.found and task.model.special_ids:
            yield torch.tensor(task.model.special_ids, device=self._seen.device)
        if self._next_token is None:
            if self.first is not None:
                yield self.first
            elif task.shortlist is not None:
                yield _merged_shortlist(task, self.targets)
        order = self._likely().argsort(descending=True, stable=True)
        if task.explained is not None and task.explained.in_turn and self._next_token is not None:
            alone = task.of_rows(self.targets)
            assert alone is not None
            both = torch.stack([order, alone.argsort(descending=True, stable=True).to(order.device)], 1)
            order = first_of_each(both.flatten(), len(order))
        yield order

    def _likely(self) -> Float[Tensor, " v"]:
        """Return the scores of the vocabulary, computed when first needed."""
        if self._scores is None:
            weights = None if self.task.lm is None else self.task.lm.weights
            if self.task.explained is not None:
                weights = self.task.explained.weight, 1.0
            scores = self.task.proposer.scores(self.task.of_rows(self.targets), self._next_token, weights)
            self._scores = scores.to(self._seen.device)
        return self._scores

    def next_batch(self) -> Int[Tensor, " c"] | None:
        """Return the next batch, or None when vocabulary or budget are used up."""
        while len(self._order) == 0:
            stage = next(self._waiting, None)
            if stage is None or self.left <= 0:
                return None
            self._order = stage[~self._seen[stage]]
        batch = self._order[: min(self.size, self.left)]
        self._order = self._order[len(batch) :]
        if len(batch) == 0:
            return None
        self._seen[batch] = True
        self.left -= len(batch)
        self._tried += len(batch)
        self.size = larger_batch(self.size, self._tried)
        return batch


def larger_batch(size: int, tried: int) -> int:
    """Return how many candidates to run after ``tried`` ones, of which the last batch held ``size``."""
    return min(2 * size, max(SMALL_BATCH, tried // 4), LAST_BATCH)


def first_of_each(tokens: Int[Tensor, " n"], vocab: int) -> Int[Tensor, " m"]:
    """Return the tokens without their later repeats, in order."""
    place = torch.full((vocab,), len(tokens), device=tokens.device)
    steps = torch.arange(len(tokens), device=tokens.device)
    place.scatter_reduce_(0, tokens, steps, "amin")
    return tokens[place[tokens] == steps]


def _merged_shortlist(task: Task, targets: list[int]) -> Int[Tensor, " m"]:
    """Return the shortlists of all target rows as one list, best first, each token at its best score."""
    assert task.shortlist is not None and task.scores is not None
    ids, scores = task.shortlist[targets].flatten(), task.scores[targets].flatten()
    ids = ids[scores.argsort(descending=True)]
    return first_of_each(ids, task.proposer.vocab_size)


def find_next(task: Task, trials: Trials | None = None, first: Tensor | None = None) -> Search:
    """Search the next position until a candidate matches; commit it, or else the nearest as unverified.

    A search otherwise ends only with the vocabulary or the budget or, where limits are known to exclude right
    candidates, at a candidate that stands out from more than a thousand others.

    The paper's own inner loop is in ``printed``. Here the language model is asked once as much has been spent on this
    prompt's candidates as asking it costs, so that neither costs much more than the other.
    """
    targets = list(task.targets())
    trials = trials or Trials(task.limits[targets])
    candidates = Candidates(task, trials, targets, first)
    sure = task.explained is not None and task.explained.sure(task.matcher.frame)
    if sure:  # one candidate is enough, and the language model can wait
        candidates.size = 1
    observed = task.rows[targets]
    asked = task.lm is None
    states: list[Tensor] = []
    adapt_at, copied = list(ADAPT_AT), False
    ordered = task.shortlist is not None or sure
    while not (task.overlapping and trials.stands_out()):
        if not asked and task.lm is not None:
            cost = task.lm.cost(task.tokens, max(1, task.model.site.layer))
            due = not ordered or task.spent + FIRST_BATCH > task.asked + cost
            due = due and not (sure and trials.count == 0)
            if due and task.lm.wanted(float(candidates.size)):
                asked = True
                task.asked += cost
                candidates.rank((yield from task.lm.next_token(task.tokens)))
        batch = candidates.next_batch()
        if batch is None:
            if (yield from _second_look(task, trials, targets, observed)):
                return
            task.exhausted = True
            break
        answer = yield from _run(task, trials, batch, observed, states)
        task.spent += len(batch)
        # An accepted token is always among those just run: an earlier match would have ended the search.
        if _commit(task, trials, targets, answer):
            return
        if task.proposer.probe is not None and not copied and trials.count >= COPY_FROM:
            # Prompts repeat their tokens, also where neither probe nor language model expects it ("no no no no").
            candidates.promote(torch.tensor(task.recent(), dtype=torch.long, device=task.rows.device))
            copied = True
        adapter = task.proposer.adapter if adapt_at and trials.count >= adapt_at[0] else None
        if adapter is not None:
            tokens = torch.cat(trials.tokens[-len(states) :])
            learned = adapter.distances(tokens, torch.cat(states), observed)
            candidates.learn(learned, len(tokens))
            adapt_at = [later for later in adapt_at if later > trials.count]
    yield from _settle(task, trials, targets)


def _run(
    task: Task,
    trials: Trials,
    batch: Int[Tensor, " c"],
    observed: Float[Tensor, "targets e"],
    states: list[Tensor],
) -> Search:
    """Run candidates, note their distances and append their states; return the model's answer for those it ran.

    The screen runs large batches first, and the truncated model only the near ones of them.
    """
    exact, table = None, None
    # First tokens may be attention sinks, whose states half precision cannot tell apart.
    if task.screen is not None and task.found and task.screen.runs(len(batch)):
        task.shadow = task.screen.follow(task.prefix, task.shadow)
        seen: Answer = yield ForwardCall(task.screen.model, Request(task.shadow, batch[:0], branches=batch))
        states.append(task.matcher.view(seen.branches))
        table = task.matcher.table(candidates=states[-1], observed=observed)
        exact = near_ones(trials.relative(table))
    branches = batch if exact is None else batch[exact]
    answer: Answer = yield ForwardCall(task.model, Request(task.prefix, batch[:0], branches=branches))
    own = task.matcher.view(answer.branches)
    if table is None:
        states.append(own)
        table = task.matcher.table(candidates=own, observed=observed)
    else:
        table[exact] = task.matcher.table(candidates=own, observed=observed)
    trials.add(batch, table, exact)
    return answer


def _commit(task: Task, trials: Trials, targets: list[int], answer: Answer) -> bool:
    """Accept the nearest candidate if it is within its limit; ``answer`` is of those that the model just ran."""
    best, matched = trials.best(targets, task.limits)
    if matched:
        assert answer.request.branches is not None
        task.keep(answer, branch=int((answer.request.branches == best.token).nonzero()[0, 0]))
        task.accept(best)
    return matched


def _second_look(task: Task, trials: Trials, targets: list[int], observed: Tensor) -> Search:
    """Run what only the screen has run in the model, nearest first; return whether a candidate was committed."""
    if task.screen is None:
        return False
    doubtful = trials.doubtful()
    for start in range(0, len(doubtful), LAST_BATCH):  # split() of an empty tensor would give one empty part
        places = doubtful[start : start + LAST_BATCH]
        tokens = trials.tokens[0][places]
        answer: Answer = yield ForwardCall(task.model, Request(task.prefix, tokens[:0], branches=tokens))
        own = task.matcher.view(answer.branches)
        trials.correct(places, task.matcher.table(candidates=own, observed=observed))
        if _commit(task, trials, targets, answer):
            return True
    return False


def _settle(task: Task, trials: Trials, targets: list[int]) -> Search:
    """Commit the nearest of the candidates although none matched.

    Where right and wrong distances overlap, those about as near as the nearest are compared by what follows: each is
    run with the guesses for the next rows behind it, and the one with the least sum of log distances is taken. A wrong
    guess is about as far from its row behind any of them.
    """
    start = len(task.found)
    count, guesses = 1, torch.empty(0, dtype=torch.long, device=task.rows.device)
    if task.overlapping and task.in_line and task.shortlist is not None:
        count = max(1, min(CONTENDERS, trials.count // (1 + AHEAD)))  # costs no more than what was tried
    contenders = trials.nearest_few(count, targets, task.limits)
    contenders = [
        contender
        for contender in contenders
        if contender.distance <= CONTENDER_RATIO * contenders[0].distance
    ]
    if task.shortlist is not None and len(contenders) > 1:
        guesses = task.shortlist[start + 1 : start + 1 + AHEAD, 0]
    rows = task.rows[start : start + 1 + len(guesses)]
    kept: tuple[float, TokenPrediction, Answer] | None = None
    for contender in contenders:
        chain = torch.cat([torch.tensor([contender.token], device=guesses.device), guesses])
        answer: Answer = yield ForwardCall(task.model, Request(task.prefix, chain))
        along = task.matcher.pairs(candidates=task.matcher.view(answer.states), observed=rows)
        total = float(along.clamp(min=1e-30).log().sum())
        if kept is None or total < kept[0]:
            kept = total, contender, answer
    assert kept is not None
    task.keep(kept[2], tokens=1)
    task.accept(kept[1])
