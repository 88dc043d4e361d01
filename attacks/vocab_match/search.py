"""Search a prompt's tokens by speculative verification, or step by step where a guess is not worth verifying."""

from dataclasses import replace

import torch
from torch import Tensor

from hiddenlab.attacks.vocab_match.mismatch import look_ahead, unexplained
from hiddenlab.attacks.vocab_match.task import Task, Trials, find_next
from hiddenlab.matching.batching import ForwardCall, Search
from hiddenlab.models import Answer, Request
from hiddenlab.types import TokenPrediction

SURE = 0.9  # alternatives are tried beside a guess until this much of the probe's probability is covered
MAX_LEAVES = 3  # alternatives beside one guess in one pass
WRONG_IN_CHAIN = 1.5  # a chain ends where this many of its guesses are expected to be wrong
STEPWISE_BELOW = 0.5  # mean confidence of the guesses below which a chain is not worth verifying
ROUND_COST = 1.0  # prefills that one wrong guess costs: part of a pass over what follows it
FEW = 32  # candidates of each further row where rows are not of this site; the nearest is taken


def stepwise(task: Task) -> Search:
    """Search one position after the other, candidates in proposal order (Algorithms 1, 4, 5, 6)."""
    if task.extra:
        yield from _opening_among_decoys(task)
    while len(task.found) < task.count:
        yield from _next(task)


def _opening_among_decoys(task: Task) -> Search:
    """Find the first two tokens; a row whose token is followed by none may be the beginning of another text."""
    while task.count > 1 and len(task.decoys) < task.extra:
        trial = replace(task, prefix=task.model.prefix(offset=task.prefix.offset), found=[])
        yield from find_next(trial)
        if not trial.found[0].verified:
            return
        yield from find_next(trial)
        if trial.found[1].verified:
            vars(task).update(vars(trial))
            return
        task.decoys = task.decoys | {trial.found[0].row}
    task.decoys = frozenset()


def _next(task: Task, trials: Trials | None = None, first: Tensor | None = None) -> Search:
    """Search the next position; where no row looks like a state of this site, end the whole search early."""
    opening = not task.found
    yield from find_next(task, trials, first)
    if opening and unexplained(task) and (yield from look_ahead(task)):
        task.foreign, task.budget = True, FEW
        while len(task.found) < task.count:
            yield from find_next(task)


def speculative(task: Task) -> Search:
    """Verify a whole guess in one pass, with alternatives at its unsure places in the same pass.

    Each round runs the guessed remainder as a chain and, where the guess is unsure, alternatives as branches. The
    longest matching run is committed. At the first miss the branches had the exact context, so a match among them is
    committed too. Further right the context is slightly wrong; there the nearest of guess and branches becomes the next
    round's guess, so that one pass corrects several misses. Only where branches fail is a position searched by itself.
    docs/internals/search.md explains it.
    """
    if task.shortlist is not None and task.in_line:
        yield from _rerank(task)
    if task.shortlist is None or not task.in_line or _confidence(task).mean() < STEPWISE_BELOW:
        yield from stepwise(task)
        return
    if task.proposer.first_tokens is not None:
        yield from _next(task)
        task.shortlist[0, 0] = task.found[0].token
    guess, device = _Guess(task), task.rows.device
    while len(task.found) < len(task.rows):
        start = len(task.found)
        trials = Trials(task.limits[start : start + 1])
        if guess.needs_search(start):
            trials.add(guess.refuted_tokens().to(device), guess.refuted_distances()[:, None].to(device))
            yield from _next(task, trials, guess.order[start].to(device))
            continue
        end = guess.chain_end(start)
        branches, parents = guess.branches(start, end)
        chain = guess.best[start:end].to(device)
        request = Request(task.prefix, chain, branches=branches.to(device), parents=parents.to(device))
        answer: Answer = yield ForwardCall(task.model, request)
        guess.digest(answer, start, end, branches, parents)


def _rerank(task: Task) -> Search:
    """Rank the guesses again with the language model where that costs less than the expected misses."""
    assert task.shortlist is not None and task.scores is not None
    misses = float((1 - _confidence(task)).sum())
    if task.lm is None or len(task.shortlist) < 2:
        return
    gain = misses * ROUND_COST - task.lm.cost_of_prefill(task.model)
    if gain > 0 and task.lm.wanted(gain * len(task.shortlist)):
        ranked = yield from task.lm.reranked(task.shortlist, task.scores)
        task.shortlist, task.scores = ranked


def _confidence(task: Task) -> Tensor:
    assert task.scores is not None
    return task.scores[:, 0].exp()


class _Guess:
    """The current guess of every position, and the candidates that were refuted.

    It is kept on the CPU, since single positions are read: on a GPU each read would wait for the device.
    """

    def __init__(self, task: Task) -> None:
        assert task.shortlist is not None and task.scores is not None
        order, scores = task.shortlist.cpu(), task.scores.cpu()
        self.task, self.limits = task, task.limits.cpu()
        self.order, self.scores = order, scores
        self.best = order[:, 0].clone()
        confidence = scores.exp().cumsum(1)
        need = (confidence < SURE).sum(1)  # how many of the shortlist must be tried to be sure
        self.extra = need.clamp(max=MAX_LEAVES).tolist()
        self.wrong = (1 - scores[:, 0].exp()).clamp(min=0)
        self.offset = [1] * len(order)  # next place in the shortlist to try, per position
        self._refuted: tuple[int, Tensor, Tensor] | None = None

    def needs_search(self, position: int) -> bool:
        return self._refuted is not None and self._refuted[0] == position

    def refuted_tokens(self) -> Tensor:
        assert self._refuted is not None
        return self._refuted[1]

    def refuted_distances(self) -> Tensor:
        assert self._refuted is not None
        return self._refuted[2]

    def chain_end(self, start: int) -> int:
        """Return where the chain ends: before too many guesses are expected to be wrong."""
        expected = self.wrong[start:].cumsum(0)
        return start + max(1, int((expected <= WRONG_IN_CHAIN).sum()))

    def branches(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Return alternatives for unsure positions, and how many chain tokens stand before each."""
        tokens, parents = [], []
        for position in range(start, end):
            first = self.offset[position]
            if self.task.budget is not None:
                self.extra[position] = min(self.extra[position], self.task.budget - 1)
            part = self.order[position, first : first + self.extra[position]]
            part = part[part != self.best[position]]
            self.offset[position] += self.extra[position]
            tokens.append(part)
            parents += [position - start] * len(part)
        return torch.cat(tokens), torch.tensor(parents, dtype=torch.long)

    def digest(self, answer: Answer, start: int, end: int, branches: Tensor, parents: Tensor) -> None:
        """Commit what matched, remember what was refuted, and improve the guess further right."""
        task, matcher = self.task, self.task.matcher
        rows = task.rows[start:end]
        chain = matcher.pairs(candidates=matcher.view(answer.states), observed=rows).cpu()
        beside_rows = rows[parents.to(rows.device)]
        beside = matcher.pairs(candidates=matcher.view(answer.branches), observed=beside_rows).cpu()
        within = chain <= self.limits[start:end]
        run = int(within.long().cumprod(0).sum())
        distances = chain.tolist()
        runner_up = self._runner_up(beside, parents, end - start)
        for i in range(run):
            count = 1 + int((parents == i).sum())
            margin = None if runner_up[i] is None else runner_up[i] - distances[i]
            task.accept(
                TokenPrediction(int(self.best[start + i]), start + i, distances[i], margin, count, True)
            )
        miss = start + run
        self._refuted = None
        if miss == end:
            task.keep(answer, tokens=run)
            return
        here = (parents == run).nonzero()[:, 0]
        tokens = torch.cat([self.best[miss : miss + 1], branches[here]])
        nearest = torch.cat([chain[run : run + 1], beside[here]])
        trials = Trials(self.limits[miss : miss + 1])
        trials.add(tokens, nearest[:, None])
        best, matched = trials.best([miss], self.limits)
        if matched:
            task.keep(
                answer, tokens=run, branch=int(here[int((branches[here] == best.token).nonzero()[0, 0])])
            )
            task.accept(best)
        else:
            task.keep(answer, tokens=run)
            self._refuted = (miss, tokens, nearest)
        self._mend(chain, beside, start, end, miss, branches, parents)

    @staticmethod
    def _runner_up(beside: Tensor, parents: Tensor, n: int) -> list[float | None]:
        nearest: list[float | None] = [None] * n
        for i, distance in zip(parents.tolist(), beside.tolist(), strict=True):
            current = nearest[i]
            nearest[i] = distance if current is None else min(current, distance)
        return nearest

    def _mend(
        self,
        chain: Tensor,
        beside: Tensor,
        start: int,
        end: int,
        miss: int,
        branches: Tensor,
        parents: Tensor,
    ) -> None:
        """Take the nearest candidate as guess beyond the miss, and try more alternatives where even that is far.

        Far means more than half the distance that wrong candidates typically have.
        """
        norms = self.task.matcher.norms(self.task.rows[start:end]).cpu()
        typical = (beside / norms[parents]).median() if len(beside) else (chain / norms).median()
        for position in range(miss + 1, end):
            i = position - start
            here = (parents == i).nonzero()[:, 0]
            nearest = chain[i]
            if len(here):
                j = here[beside[here].argmin()]
                if beside[j] < nearest:
                    nearest = beside[j]
                    self.best[position] = branches[j]
            near = bool(nearest / norms[i] < 0.5 * typical)
            self.extra[position] = 0 if near else MAX_LEAVES
            self.wrong[position] = 0.05 if near else 0.7
