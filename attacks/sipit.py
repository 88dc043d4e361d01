"""Gradient-guided search for tokens, as a baseline (SipIt, Nikolaou et al. 2025, arXiv 2510.15511)."""

import time
from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from attacks.vocab_match import Prepared, VocabMatch
from hiddenlab.core import Observation, Progress, Recovery, TokenRecovery, silent
from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.lens import lens_of
from hiddenlab.slice import Prefix, Request, Slice

MOMENTS = 0.9, 0.999  # of Adam


class SipIt:
    """Recovers one token after another: a gradient moves an embedding, its nearest untried token is verified.

    For each position an embedding starts at the table's mean and follows the gradient of half the squared distance
    between its state and the observed one; after each step the nearest tokens not tried yet are run, until one
    matches. The paper's policy takes a plain gradient step and one token a step; here the step is Adam's, since
    gradients differ by orders of magnitude between layers. ``policy=random`` tries tokens in random order.

    Knows: the weights, the released states, the channel. Does not know: tokens, noise.

    Args:
        policy: ``gradient`` or ``random``. step: Adam's, in standard deviations of the embedding table's entries.
        per_step: tokens verified after each gradient. budget: tokens verified for one position at most; None: V.
        distance, epsilon: as in ``vocab-match``.
    """

    def __init__(
        self,
        policy: Literal["gradient", "random"] = "gradient",
        step: float = 0.1,
        per_step: int = 1,
        budget: int | None = None,
        distance: str = "auto",
        epsilon: str = "auto",
        seed: int = 0,
        progress: Progress = silent,
    ) -> None:
        if not step > 0 or per_step < 1 or (budget is not None and budget < 1):
            raise InputError(
                f"step, per_step and budget must be positive, not {step}, {per_step} and {budget}"
            )
        self.policy, self.step, self.per_step, self.budget = policy, step, per_step, budget
        self.progress = progress
        self.matching = VocabMatch(
            proposal="vocab", distance=distance, epsilon=epsilon, seed=seed, progress=progress
        )

    def setup(self, observation: Observation, slice: Slice, generator: torch.Generator) -> dict[str, float]:
        """Measure epsilon, see ``VocabMatch.setup``; nothing is trained."""
        return self.matching.setup(observation, slice, generator)

    def recover(self, observation: Observation, slice: Slice, generator: torch.Generator) -> Recovery:
        """Recover one prompt.

        Raises:
            NotApplicableError: rows or coordinates in unknown order, or rows with gaps before them.
        """
        public = observation.public
        if public.rows_permuted or public.columns_permuted is not None:
            raise NotApplicableError("gradients need rows and coordinates in order")
        if lens_of(public) is not None:
            raise NotApplicableError("gradients need whole states")
        if public.positions is not None and public.positions != tuple(range(len(observation.states))):
            raise NotApplicableError("every token before a row must be known; this observation has gaps")
        prepared, _ = self.matching.prepare(observation, slice)
        started, before = time.perf_counter(), (slice.evaluated_tokens, slice.forward_calls)
        rows = prepared.matcher.prepare(observation.states.to(slice.device))
        limits = prepared.threshold.limits(prepared.matcher, rows)
        prefix = slice.prefix(offset=public.prefix_tokens)
        found: list[TokenRecovery] = []
        exhausted = False
        for i, row in enumerate(rows):
            one = _Position(self, prepared, slice, row, float(limits[i]), generator)
            found.append(replace(one.search(prefix), row=i))
            exhausted |= not found[-1].verified
            self.progress("positions", i + 1, len(rows))
        evaluated, calls = slice.evaluated_tokens - before[0], slice.forward_calls - before[1]
        reason = (
            "complete" if not exhausted else "budget exhausted" if self.budget else "vocabulary exhausted"
        )
        return Recovery(
            tuple(found), evaluated, calls, time.perf_counter() - started, reason, float(limits.median())
        )

    def __repr__(self) -> str:
        return f"SipIt({self.policy}): knows the weights, the released states and the channel, not the tokens"


class _Position:
    """The search at one position."""

    def __init__(
        self,
        attack: SipIt,
        prepared: Prepared,
        slice: Slice,
        row: Float[Tensor, " d"],
        limit: float,
        generator: torch.Generator,
    ) -> None:
        self.attack, self.matcher, self.slice, self.limit = attack, prepared.matcher, slice, limit
        self.row = row
        self.table = slice.embed(torch.arange(slice.vocab_size, device=slice.device)).float()
        self.tried = torch.zeros(slice.vocab_size, dtype=torch.bool, device=slice.device)
        self.order = torch.randperm(slice.vocab_size, generator=generator).to(slice.device)

    def search(self, prefix: Prefix) -> TokenRecovery:
        """Verify tokens until one matches; the nearest is taken where none does."""
        point = self.table.mean(0)
        unit = self.attack.step * float(self.table.std())
        first, second, steps, count = torch.zeros_like(point), torch.zeros_like(point), 0, 0
        best: tuple[float, int] | None = None
        runner_up = float("inf")
        limit = min(self.attack.budget or self.slice.vocab_size, self.slice.vocab_size)
        while count < limit:
            if self.attack.policy == "gradient":
                steps += 1
                gradient = self._gradient(prefix, point)
                first = MOMENTS[0] * first + (1 - MOMENTS[0]) * gradient
                second = MOMENTS[1] * second + (1 - MOMENTS[1]) * gradient.square()
                scale = (second / (1 - MOMENTS[1] ** steps)).sqrt().clamp(min=1e-30)
                point = point - unit * first / (1 - MOMENTS[0] ** steps) / scale
                far = (self.table - point).square().sum(1).masked_fill(self.tried, float("inf"))
                tokens = far.topk(min(self.attack.per_step, limit - count), largest=False).indices
            else:
                tokens = self.order[count : min(count + self.attack.per_step, limit)]
            self.tried[tokens] = True
            count += len(tokens)
            states = self.matcher.view(prefix.branch(tokens))
            distances = self.matcher.pairs(candidates=states, observed=self.row.expand_as(states))
            for token, distance in zip(tokens.tolist(), distances.tolist(), strict=True):
                if best is None or distance < best[0]:
                    runner_up = float("inf") if best is None else best[0]
                    best = distance, token
                else:
                    runner_up = min(runner_up, distance)
            assert best is not None
            if best[0] <= self.limit:
                prefix.commit(tokens.tolist().index(best[1]))
                return TokenRecovery(best[1], 0, best[0], _finite(runner_up - best[0]), count, True)
        assert best is not None
        prefix.extend(torch.tensor([best[1]], device=self.slice.device))
        return TokenRecovery(best[1], 0, best[0], _finite(runner_up - best[0]), count, False)

    def _gradient(self, prefix: Prefix, point: Float[Tensor, " d"]) -> Float[Tensor, " d"]:
        """Of half the squared L2 distance between the embedding's state and the observed row."""
        leaf = point.to(self.slice.dtype)[None].clone().requires_grad_()
        request = Request(prefix, leaf[:0].detach(), leaves=leaf)
        with torch.inference_mode(False), torch.enable_grad():
            state = self.slice.run([request], keep=False, grad=True)[0].leaves[0]
            loss = (state.float() - self.row).square().sum() / 2
            return torch.autograd.grad(loss, leaf)[0][0].float()


def _finite(margin: float) -> float | None:
    return None if margin == float("inf") else margin
