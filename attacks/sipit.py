"""Recover tokens one after another by gradient-guided search, a baseline (SipIt, Nikolaou et al. 2025, 2510.15511)."""

import time
from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.attacks.vocab_match import Prepared, VocabMatch
from hiddenlab.base import Attack
from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.models import Answer, Request, TruncatedModel
from hiddenlab.preparations import by_channel
from hiddenlab.projections import projection_of
from hiddenlab.types import AttackResult, Observation, ObservationInfo, TokenPrediction
from hiddenlab.utils.random import generator

MOMENTS = 0.9, 0.999  # of Adam


class SipIt(Attack):
    """Recover tokens by following a gradient over embeddings and running the nearest untried tokens (SipIt).

    For each position an embedding starts at the table's mean and follows the gradient of half the squared distance
    between its state and the observed one. After each step the nearest tokens not tried yet are run, until one matches.
    The paper's policy takes a plain gradient step and one token a step; here the step is Adam's, since gradients differ
    by orders of magnitude between layers. ``policy=random`` tries tokens in random order.

    Knows: the weights, the released states, the channel. Does not know: tokens, noise.

    Args:
        policy: ``gradient`` or ``random``. step: Adam's, in standard deviations of the embedding table's entries.
        per_step: tokens run after each gradient. budget: tokens run for one position at most; None: the whole
            vocabulary. distance, epsilon: as in ``vocab-match``. batch: prompts searched together.
    """

    use_when = "you want the published SipIt search as a baseline for raw states"

    def __init__(
        self,
        policy: Literal["gradient", "random"] = "gradient",
        step: float = 0.1,
        per_step: int = 1,
        budget: int | None = None,
        distance: str = "auto",
        epsilon: str = "auto",
        batch: int = 32,
    ) -> None:
        if not step > 0 or per_step < 1 or (budget is not None and budget < 1):
            raise InputError(
                f"step, per_step and budget must be positive, not {step}, {per_step} and {budget}"
            )
        self.policy, self.step, self.per_step, self.budget = policy, step, per_step, budget
        if batch < 1:
            raise InputError(f"the batch must be at least 1 prompt, not {batch}")
        self.batch = batch
        self.matching = VocabMatch(proposal="vocab", distance=distance, epsilon=epsilon, setup="full")

    def _fit(self, info: ObservationInfo) -> dict[str, float | str]:
        """Measure epsilon, as ``VocabMatch`` does; nothing is trained."""
        self.matching.progress = self.progress
        return dict(self.matching.fit(info, self.model, self.seed).measured)

    def _recover_batch(self, observations: Sequence[Observation]) -> list[AttackResult]:
        """Recover prompts together: every pass holds one gradient, or the tokens behind it, of each prompt.

        A pass with one token mostly waits for weights, so that many prompts cost little more than one.

        Raises:
            NotApplicableError: rows or coordinates in unknown order, or rows with gaps before them.
        """
        for observation in observations:
            _check(observation)
        seed = int(torch.randint(1 << 62, (1,), generator=generator(self.seed, "attack")))
        return [
            recovery
            for group in by_channel(observations, self.batch)
            for recovery in self._recover_group(group, self.model, seed)
        ]

    def _recover_group(
        self, observations: Sequence[Observation], model: TruncatedModel, seed: int
    ) -> list[AttackResult]:
        prepared, _ = self.matching.prepare(observations[0].info)
        table = model.embed(torch.arange(model.vocab_size, device=model.device)).float()
        lengths = table.square().sum(1)
        searches = [_Search(self, prepared, model, observation, table, seed) for observation in observations]
        done, total = 0, sum(len(search.rows) for search in searches)
        while active := [search for search in searches if not search.finished]:
            started = time.perf_counter()
            if self.policy == "gradient":
                for search, gradient in zip(active, _gradients(model, active), strict=True):
                    search.move(gradient)
                points = torch.stack([search.point for search in active])
                far = torch.addmm(
                    lengths[None], points, table.T, alpha=-2
                )  # squared distances, less a constant
            else:
                far = torch.stack([search.order for search in active])
            tokens = [search.choose(row) for search, row in zip(active, far, strict=True)]
            requests = [
                Request(search.prefix, some[:0], branches=some)
                for search, some in zip(active, tokens, strict=True)
            ]
            for search, answer in zip(active, model.run_all(requests), strict=True):
                search.judge(answer)
            spent = (time.perf_counter() - started) / len(active)
            for search in active:
                search.seconds += spent
            before, done = done, sum(len(search.found) for search in searches)
            if done > before:
                self.progress("positions", done, total)
        return [search.recovery() for search in searches]

    def __repr__(self) -> str:
        return f"SipIt({self.policy}): knows the weights, the released states and the channel, not the tokens"


class _Search:
    """The search through one prompt: what was found, and what was tried for the next position.

    With ``policy=random``, ``order`` holds the tokens' places in a permutation, used in place of distances.
    """

    def __init__(
        self,
        attack: SipIt,
        prepared: Prepared,
        model: TruncatedModel,
        observation: Observation,
        table: Float[Tensor, "v d"],
        seed: int,
    ) -> None:
        self.attack, self.model = attack, model
        states = observation.states.to(model.device)
        self.matcher = prepared.matcher.bound(states)
        self.rows = self.matcher.prepare(states)
        self.limits = prepared.threshold.limits(self.matcher, self.rows)
        self.prefix = model.prefix(offset=observation.info.prefix_tokens)
        self.generator = torch.Generator().manual_seed(seed)
        self.start, self.unit = table.mean(0), attack.step * float(table.std())
        self.most = min(attack.budget or model.vocab_size, model.vocab_size)
        self.found: list[TokenPrediction] = []
        self.evaluated = self.calls = 0
        self.seconds = 0.0
        self._begin()

    @property
    def finished(self) -> bool:
        """Whether every position was searched."""
        return len(self.found) == len(self.rows)

    @property
    def row(self) -> Float[Tensor, " d"]:
        """The observed row that is searched for."""
        return self.rows[len(self.found)]

    def _begin(self) -> None:
        self.point = self.start
        self.first, self.second = torch.zeros_like(self.point), torch.zeros_like(self.point)
        self.steps = self.count = 0
        self.best: tuple[float, int] | None = None
        self.runner_up = float("inf")
        size, device = self.model.vocab_size, self.model.device
        self.tried = torch.zeros(size, dtype=torch.bool, device=device)
        if self.attack.policy == "random":
            self.order = torch.randperm(size, generator=self.generator).to(device).float()

    def move(self, gradient: Float[Tensor, " d"]) -> None:
        """Take one step of Adam."""
        self.evaluated += 1
        self.calls += 1
        self.steps += 1
        self.first = MOMENTS[0] * self.first + (1 - MOMENTS[0]) * gradient
        self.second = MOMENTS[1] * self.second + (1 - MOMENTS[1]) * gradient.square()
        scale = (self.second / (1 - MOMENTS[1] ** self.steps)).sqrt().clamp(min=1e-30)
        self.point = self.point - self.unit * self.first / (1 - MOMENTS[0] ** self.steps) / scale

    def choose(self, far: Float[Tensor, " v"]) -> Int[Tensor, " c"]:
        """Return the nearest tokens that were not tried."""
        count = min(self.attack.per_step, self.most - self.count)
        tokens = far.masked_fill(self.tried, float("inf")).topk(count, largest=False).indices
        self.tried[tokens] = True
        self.count += count
        return tokens

    def judge(self, answer: Answer) -> None:
        """Commit a token that matches, or the nearest where no more may be tried."""
        tokens = answer.request.inputs.tolist()
        self.evaluated += len(tokens)
        self.calls += 1
        states = self.matcher.view(answer.branches)
        distances = self.matcher.pairs(candidates=states, observed=self.row.expand_as(states))
        for token, distance in zip(tokens, distances.tolist(), strict=True):
            if self.best is None or distance < self.best[0]:
                self.runner_up = float("inf") if self.best is None else self.best[0]
                self.best = distance, token
            else:
                self.runner_up = min(self.runner_up, distance)
        assert self.best is not None
        distance, token = self.best
        matched = distance <= float(self.limits[len(self.found)])
        if matched:
            self.prefix.keep(answer, branch=tokens.index(token))
        elif self.count < self.most:
            return
        else:
            self.prefix.extend(torch.tensor([token], device=self.model.device))
            self.evaluated += 1
            self.calls += 1
        margin = _finite(self.runner_up - distance)
        self.found.append(TokenPrediction(token, len(self.found), distance, margin, self.count, matched))
        self._begin()

    def recovery(self) -> AttackResult:
        """Return the tokens found, and their cost."""
        reason = "complete"
        if not all(prediction.verified for prediction in self.found):
            reason = "budget exhausted" if self.attack.budget else "vocabulary exhausted"
        epsilon = float(self.limits.median())
        return AttackResult(tuple(self.found), self.evaluated, self.calls, self.seconds, reason, epsilon)


def _check(observation: Observation) -> None:
    info = observation.info
    if info.rows_permuted or info.columns_permuted is not None:
        raise NotApplicableError("gradients need rows and coordinates in order")
    if projection_of(info) is not None:
        raise NotApplicableError("gradients need whole states")
    if info.positions is not None and info.positions != tuple(range(len(observation.states))):
        raise NotApplicableError("every token before a row must be known; this observation has gaps")


def _gradients(model: TruncatedModel, searches: Sequence[_Search]) -> Float[Tensor, "n d"]:
    """Return the gradients of half the squared L2 distance between each point's state and its observed row."""
    with torch.inference_mode(False), torch.enable_grad():
        points = torch.stack([search.point for search in searches]).to(model.dtype).requires_grad_()
        requests = [
            Request(search.prefix, points[:0].detach(), branches=branch[None])
            for search, branch in zip(searches, points, strict=True)
        ]
        states = torch.cat([answer.branches for answer in model.run(requests, keep=False, grad=True)])
        rows = torch.stack([search.row for search in searches])
        loss = (states.float() - rows).square().sum() / 2
        return torch.autograd.grad(loss, points)[0].float()


def _finite(margin: float) -> float | None:
    return None if margin == float("inf") else margin
