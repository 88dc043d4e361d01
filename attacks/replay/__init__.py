"""Read prompts behind a defense that draws nothing fresh for a request, by releasing candidates through it.

A seed that is always the same, or one key for all requests, makes a release a function of its text. The attacker knows
the code and releases texts of his own: the one that gives the observed rows is the prompt. He finds it token by token,
since rows of a causal model depend on no later token. The language model says which candidates come first.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.attacks.replay.own_texts import RESOLUTION, OwnTexts, as_rows
from hiddenlab.attacks.replay.released import Replayed
from hiddenlab.attacks.replay.subtracted import Added, Subtracted
from hiddenlab.base import Attack
from hiddenlab.channels import Channel
from hiddenlab.errors import NEEDS_CODE, InputError, NotApplicableError
from hiddenlab.matching.ranking import Continuations, LazyModel
from hiddenlab.models import TruncatedModel
from hiddenlab.proposals.corpus import Corpus, language_reference
from hiddenlab.row_facts import extra_rows
from hiddenlab.stages import are_replaced, is_supposed
from hiddenlab.types import AttackResult, Observation, ObservationInfo, TokenPrediction

BUDGET = 400_000  # tokens that are run for one prompt
FIRST, GROWTH, LARGEST = 64, 4, 2048  # candidates that are tried at once
PROBE = 12  # tokens of the own text that shows whether a release draws anything
LEARNED = 8  # lengths of prompts whose own texts are kept


@runtime_checkable
class Comparison(Protocol):
    """How candidates for the next token of one prompt are compared with its rows."""

    @property
    def places(self) -> Sequence[int]:
        """The row of each position."""

    @property
    def limits(self) -> Float[Tensor, " n"]:
        """For each position the distance within which a candidate is right."""

    def cost(self, candidates: int) -> int:
        """Return how many tokens are run to compare so many candidates."""
        ...

    def distances(self, found: list[int], candidates: Int[Tensor, " c"]) -> Float[Tensor, " c"]:
        """Return how far from the observed row each candidate's is, behind the tokens that were found."""
        ...


@dataclass
class _Found:
    """The tokens that were found of one prompt."""

    tokens: list[TokenPrediction]
    run: int = 0
    passes: int = 0
    reason: str = "complete"


class Replay(Attack):
    """Release own texts through a defense that draws nothing fresh for a request, until they give the observed rows.

    Where two own texts show what the defense adds to states (noise of a seed that is always the same), that is taken
    off the observed rows, and candidates are run alone. Otherwise texts of the prompt's length are released with each
    candidate in place. An order of rows that is always the same is learned from own texts as well. A candidate that
    gives the row, up to rounding, is verified. A defense that draws afresh is refused, and so is one that changes
    nothing, or whose rows depend on later tokens.

    Knows: the weights, the defense's code, the rows. Does not know: tokens, nor what the defense always draws.

    Args:
        budget: tokens that are run for one prompt at most.
    """

    any_width = secret_maps = extra_rows = True
    use_when = "a defense may use the same seed or key for every request"

    def __init__(self, budget: int = BUDGET) -> None:
        if budget < 1:
            raise InputError(f"the budget must be at least 1 token, not {budget}")
        self.budget = budget
        self._lm: tuple[TruncatedModel, LazyModel] | None = None
        self._learned: dict[tuple[tuple[str, ...], int], tuple[OwnTexts, Added | None]] = {}

    def _forget(self) -> None:
        self._learned.clear()
        vars(self).pop("_corpus", None)

    @cached_property
    def _corpus(self) -> Corpus:
        """The attacker's own texts; each is turned into tokens once."""
        return Corpus(self.model, self.seed + 1, language_reference)

    @torch.inference_mode()
    def _fit(self, info: ObservationInfo) -> dict[str, float | str]:
        """Check that the defense draws nothing and changes something.

        Raises:
            NotApplicableError: it does not.
        """
        if is_supposed(info):
            raise NotApplicableError(NEEDS_CODE)
        channel = Channel.parse(info.channel)
        if not channel.defenses:
            raise NotApplicableError("no defense changes these rows")
        if channel.unknown:
            raise NotApplicableError(
                "the defense's strength is not known, so that nothing can be released through it"
            )
        own = OwnTexts(channel, self.model, self._corpus, PROBE)
        once, again = (own.release([own.text], seed)[0] for seed in (0, 1))
        if once.shape != again.shape or not same(once, again):
            raise NotApplicableError("the defense draws afresh for every request")
        plain = OwnTexts(Channel([]), self.model, self._corpus, PROBE).release([own.text])[0]
        if once.shape == plain.shape and same(once, plain):
            raise NotApplicableError("the defense draws nothing, and released rows are the states themselves")
        return {}

    @torch.inference_mode()
    def _recover(self, observation: Observation) -> AttackResult:
        started, info = time.perf_counter(), observation.info
        if info.positions is not None:
            raise NotApplicableError("replay needs the row of every token")
        rows, extra = as_rows(observation.states), extra_rows(info)
        self.progress("releasing own texts", 0, 0)
        before = self.model.evaluated_tokens
        own, added = self._own(info, len(rows) - extra, extra)
        comparison: Comparison = Replayed.of(own, rows) if added is None else Subtracted(own, added, rows)
        found = self._search(comparison, verifies=not are_replaced(info))
        return AttackResult(
            tuple(found.tokens), max(found.run, self.model.evaluated_tokens - before), found.passes,
            time.perf_counter() - started, found.reason,
        )  # fmt: skip

    def _own(self, info: ObservationInfo, length: int, extra: int) -> tuple[OwnTexts, Added | None]:
        """Return the own texts of a prompt's length, and what they show; those of the last lengths are kept."""
        if length < 1:
            raise NotApplicableError("no row is a token's")
        key = info.channel, length
        if key not in self._learned:
            while len(self._learned) >= LEARNED:
                self._learned.pop(next(iter(self._learned)))
            own = OwnTexts(Channel.parse(info.channel), self.model, self._corpus, length, extra)
            self._learned[key] = own, Added.of(own)
        return self._learned[key]

    def _search(self, comparison: Comparison, verifies: bool) -> _Found:
        """Find tokens one after another, until none gives the next row or the budget is spent."""
        if self._lm is None or self._lm[0] is not self.model:
            self._lm = (self.model, LazyModel(self.model))
        lm = self._lm[1]
        said, found = Continuations(lm, self.model.special_ids), _Found([])
        count = len(comparison.places)
        for position in range(count):
            tokens = [one.token for one in found.tokens]
            order = self._order(lm, said, tokens)
            best, size, tried = (float("inf"), -1), FIRST, 0
            while tried < len(order) and not best[0] <= float(comparison.limits[position]):
                left = (self.budget - found.run) // comparison.cost(1)
                if left < 1:
                    found.reason = "budget exhausted"
                    return found
                self.progress("comparing candidates", position, count)
                candidates = order[tried : tried + min(size, left)]
                apart = comparison.distances(tokens, candidates)
                at = int(apart.argmin())
                best = min(best, (float(apart[at]), int(candidates[at])))
                found.run += comparison.cost(len(candidates))
                found.passes += 1
                tried, size = tried + len(candidates), min(size * GROWTH, LARGEST)
            distance, token = best
            if not distance <= float(comparison.limits[position]):
                found.reason = f"no token gives row {comparison.places[position]}"
                return found
            found.tokens.append(
                TokenPrediction(token, comparison.places[position], distance, None, tried, verifies)
            )
        return found

    def _order(self, lm: LazyModel, said: Continuations, tokens: list[int]) -> Int[Tensor, " v"]:
        """Return all tokens, those first that the language model expects."""
        first: Callable[[], Tensor | None] = lambda: lm.beginning  # noqa: E731
        following = said.after(tokens, [()]) if tokens else first()
        if following is None:
            return torch.arange(self.model.vocab_size)
        order = following.flatten()[: self.model.vocab_size].argsort(descending=True)
        return order.cpu()

    def __repr__(self) -> str:
        return (
            "Replay: knows the weights, the defense's code and the rows; not tokens, nor what is always drawn"
        )


def same(one: Float[Tensor, "n d"], other: Float[Tensor, "n d"]) -> bool:
    """Return whether two releases are the same up to rounding."""
    return bool(((one - other).norm(dim=1) <= RESOLUTION * one.norm(dim=1).clamp(min=1e-30)).all())
