"""Order the candidates that the search for missing tokens runs: one slot of a sequence, the other tokens held."""

import math
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.proposals.in_context import Adapter

LEARN_FROM, LEARN_TO = 256, 4096  # candidates whose states are learned from, and again at each doubling
FIRST_CHUNK, LAST_CHUNK = 32, 512
UNEXPECTED = 0.02  # share of the probability that is spread evenly over the vocabulary


@dataclass(frozen=True)
class Likely:
    """A sequence, or the beginning of one, with its tokens' log-probabilities by the priors, and its distance."""

    tokens: tuple[int, ...]
    scores: tuple[float, ...]
    distance: float = 0.0

    def with_token(self, token: int, score: float) -> "Likely":
        return Likely((*self.tokens, token), (*self.scores, score))

    def held(self, slot: int) -> float:
        """Return the probability, by the priors, of all tokens but the one at the slot."""
        return math.exp(sum(self.scores) - self.scores[slot])


@dataclass
class SlotCandidates:
    """The candidates of one slot of a sequence whose other tokens are held: those tried, and those that come next.

    Attributes:
        held: the sequence; its token at ``slot`` does not matter. prior: scores of the slot's tokens.
        order, cumulated: the tokens by score, and their probability up to each; made when the first are needed.
    """

    slot: int
    held: tuple[int, ...]
    prior: Float[Tensor, " v"]
    order: Int[Tensor, " n"] | None = None
    cumulated: Float[Tensor, " n"] | None = None
    place: int = 0
    chunk: int = FIRST_CHUNK
    tokens: list[Tensor] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    learn_at: int = LEARN_FROM
    learning: bool = True

    def __post_init__(self) -> None:
        first = self.prior.topk(min(FIRST_CHUNK, len(self.prior))).values
        self._first = float((first.logsumexp(0) - self.prior.logsumexp(0)).exp()) / len(first)

    def _sort(self, scores: Float[Tensor, " v"], seen: Int[Tensor, " n"]) -> None:
        left = scores.clone()
        left[seen] = float("-inf")
        values, order = left.log_softmax(0).sort(descending=True)
        self.order = order[: len(order) - len(seen)].int()
        self.cumulated = values.exp().cumsum(0)
        self.place = 0

    @property
    def exhausted(self) -> bool:
        return self.order is not None and self.place >= len(self.order)

    def chance(self) -> float:
        """Return the probability, by the priors, that a candidate of the next chunk is right: per candidate."""
        likely = self._first
        if self.order is not None and self.cumulated is not None:
            end = min(self.place + self.chunk, len(self.order))
            before = float(self.cumulated[self.place - 1]) if self.place else 0.0
            likely = (float(self.cumulated[end - 1]) - before) / max(1, end - self.place)
        return (1 - UNEXPECTED) * likely + UNEXPECTED / len(self.prior)

    def next(self, limit: int) -> Int[Tensor, " c"]:
        if self.order is None:
            self._sort(self.prior, torch.empty(0, dtype=torch.long, device=self.prior.device))
            assert self.order is not None
        batch = self.order[self.place : self.place + min(self.chunk, limit)].long()
        self.place += len(batch)
        self.chunk = min(2 * self.chunk, LAST_CHUNK)
        return batch

    def learn(
        self, tokens: Int[Tensor, " c"], states: Float[Tensor, "c d"], row: Tensor, adapter: Adapter
    ) -> None:
        """Reorder the remaining candidates by the states of those tried here (``proposals/in_context.py``)."""
        self.tokens.append(tokens)
        self.states.append(states)
        tried = sum(map(len, self.tokens))
        if tried > LEARN_TO:
            self.learning = False
            self.tokens.clear()
            self.states.clear()
        if not self.learning or tried < self.learn_at:
            return
        seen = torch.cat(self.tokens)
        evidence = adapter.log_likelihoods(seen, torch.cat(self.states), row).to(self.prior.device)
        self._sort(self.prior + evidence, seen)
        self.learn_at = 2 * tried


def moved(tokens: tuple[int, ...], i: int, j: int) -> tuple[int, ...]:
    """Return the tokens with the one at i moved to j."""
    rest = tokens[:i] + tokens[i + 1 :]
    return (*rest[:j], tokens[i], *rest[j:])


def swapped(tokens: tuple[int, ...], i: int, j: int) -> tuple[int, ...]:
    result = list(tokens)
    result[i], result[j] = result[j], result[i]
    return tuple(result)
