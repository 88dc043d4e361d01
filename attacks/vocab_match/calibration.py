"""Search for the epsilon with which the printed attack does best on texts of the attacker's own (paper, Appendix D).

The paper finds each threshold by ternary search over its attack on 50 prompts. One run of the attack serves all
thresholds here: which candidate it takes follows from the distances of the candidates in their order, and these do not
depend on epsilon as long as all earlier tokens are right. So distances are kept, and more candidates are run only where
a smaller epsilon asks for them. An attempt ends at its first wrong token.

The paper does not print the measure that its search makes largest. Here it is the number of tokens found before the
first wrong one; of two epsilons that find as many, the one that tries fewer candidates is better.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.attacks.vocab_match.printed import first_within, nearest_of
from hiddenlab.attacks.vocab_match.task import LAST_BATCH, larger_batch
from hiddenlab.channels import Channel
from hiddenlab.errors import InputError
from hiddenlab.matching.distance import Matcher
from hiddenlab.matching.epsilon import Threshold, chance_within
from hiddenlab.matching.ranking import Proposer
from hiddenlab.models import Request, TruncatedModel
from hiddenlab.models.load import parse_dtype
from hiddenlab.models.tokens import most_tokens
from hiddenlab.proposals.corpus import Corpus
from hiddenlab.types import GroundTruth, Observation, ObservationInfo, Progress

TOKENS = 50  # of a training text at most, as the paper's
PRECISION = 1.05  # the search ends where the ends of its interval have this ratio
# Of one position at most. Where the right token stands behind them, only wrong ones are run.
CANDIDATES = 1024
FIRST_CANDIDATES = 32  # run at each position before any epsilon is tried
LEAST = 1e-6  # of a row's norm, the smallest epsilon that is tried


@dataclass
class Position:
    """Candidates of one position behind the right tokens, in proposal order, and what was measured of them.

    Attributes:
        index: of the position in its text.
        order: token ids. right: the right token's place in the order; None where it stands behind all of them.
        targets: rows that are free. own: place of the right token's row among these. nearest: least distance of each
            candidate run so far to a free row. of_right: the right token's distances to the free rows.
    """

    index: int
    order: Int[Tensor, " v"]
    right: int | None
    targets: list[int]
    own: int
    nearest: Float[Tensor, " c"]
    of_right: Float[Tensor, " targets"]
    size: int = FIRST_CANDIDATES

    def outcome(self, epsilon: float) -> "Outcome | None":
        """Return what the attack takes with an epsilon. None means that more candidates must be run to tell."""
        below = (self.nearest < epsilon).nonzero()
        if len(below):
            place = int(below[0, 0])
            taken = first_within(self.of_right[None], torch.full_like(self.of_right, epsilon))
            return Outcome(place == self.right and taken == (0, self.own), place + 1)
        if len(self.nearest) < len(self.order):
            return None
        if self.right is None:
            return Outcome(None, len(self.order))
        right = int(self.nearest.argmin()) == self.right and nearest_of(self.of_right[None]) == (0, self.own)
        return Outcome(right, len(self.order))


@dataclass(frozen=True)
class Outcome:
    """What the attack takes at one position.

    Attributes:
        right: whether it is the right token and row; None where no candidate is within epsilon and the right token
            stands behind all of them, so that the attack would have to go on. tried: candidates up to then.
    """

    right: bool | None
    tried: int


@dataclass(frozen=True, order=True)
class Score:
    """How an epsilon does: more right tokens are better, then fewer candidates.

    Attributes:
        right: tokens found before the first wrong one of each text. saved: minus the candidates tried for these.
    """

    right: int
    saved: int


class Trainer:
    """The printed attack on training texts, for any epsilon.

    Args:
        released: observations of the texts and what they hold.
        budget: candidates for one position at most. Where the right token is not among them, no epsilon finds it. A
            wrong token may still be taken there.
    """

    def __init__(
        self,
        model: TruncatedModel,
        matcher: Matcher,
        proposer: Proposer,
        released: Sequence[tuple[Observation, GroundTruth]],
        budget: int,
    ) -> None:
        self.model = model
        self.texts = [torch.tensor(truth.tokens, device=model.device) for _, truth in released]
        states = [observation.states.to(model.device).float() for observation, _ in released]
        self.matchers = [matcher.bound(rows) for rows in states]
        self.rows = [bound.prepare(rows) for bound, rows in zip(self.matchers, states, strict=True)]
        self.offset = released[0][0].info.prefix_tokens
        self.positions: list[list[Position]] = []
        for (observation, truth), matcher, rows, tokens in zip(
            released, self.matchers, self.rows, self.texts, strict=True
        ):
            places = truth.row_order or range(len(rows))
            # The right tokens run as candidates do, since chains and branches are rounded differently.
            own = self._branches(tokens, tokens, torch.arange(len(tokens), device=model.device))
            right = matcher.table(candidates=matcher.view(own), observed=rows)
            text = list[Position]()
            shuffled = observation.info.rows_permuted
            # Rows of no token are free to the end.
            targets = [
                [
                    row
                    for row, place in enumerate(places)
                    if place < 0 or (place >= i if shuffled else place == i)
                ]
                for i in range(len(tokens))
            ]
            for i, order in enumerate(_orders(model, proposer, tokens, budget)):
                free = targets[i]
                place = (order == tokens[i]).nonzero()
                text.append(
                    Position(
                        i,
                        order.cpu(),
                        int(place[0, 0]) if len(place) else None,
                        free,
                        free.index(list(places).index(i)),
                        torch.empty(0),
                        right[i, free].cpu(),
                    )
                )
            self.positions.append(text)

    @property
    def least_right(self) -> float:
        """The least distance of a right token to its row."""
        return min(self._of_right())

    @property
    def floor(self) -> float:
        """The largest distance of a right token to its row."""
        return max(self._of_right())

    def _of_right(self) -> list[float]:
        return [float(p.of_right[p.own]) for text in self.positions for p in text]

    def score(self, epsilon: float) -> Score:
        """Run the attack with an epsilon, each text up to its first wrong token."""
        right = spent = 0
        for text in range(len(self.texts)):
            outcomes = self._outcomes(text, epsilon)
            right += sum(bool(outcome.right) for outcome in outcomes)
            spent += sum(outcome.tried for outcome in outcomes)
        return Score(right, -spent)

    @property
    def beyond(self) -> float:
        """The share of positions whose right token stands behind all candidates."""
        rights = [p.right for text in self.positions for p in text]
        return rights.count(None) / len(rights)

    def _outcomes(self, text: int, epsilon: float) -> list[Outcome]:
        """Return what the attack takes at each position, up to the first wrong one."""
        while True:
            outcomes = list[Outcome]()
            for position in self.positions[text]:
                outcome = position.outcome(epsilon)
                if outcome is None:
                    break
                outcomes.append(outcome)
                if outcome.right is False:
                    return outcomes
            if len(outcomes) == len(self.positions[text]):
                return outcomes
            self._run_more(text, epsilon, len(outcomes))

    def _run_more(self, text: int, epsilon: float, start: int) -> None:
        """Run the next candidates of the positions from ``start`` on whose outcome is unknown, in one pass."""
        parts, parents, asked = [], list[int](), list[tuple[Position, int]]()
        for position in self.positions[text][start:]:
            done = len(position.nearest)
            if position.outcome(epsilon) is not None:
                continue
            if asked and len(parents) + position.size > max(LAST_BATCH, self.model.max_pass_tokens // 2):
                break
            part = position.order[done : done + position.size]
            position.size = larger_batch(position.size, done + len(part))
            parts.append(part)
            parents += [position.index] * len(part)
            asked.append((position, len(part)))
        device = self.model.device
        states = self._branches(
            self.texts[text], torch.cat(parts).to(device), torch.tensor(parents, device=device)
        )
        matcher = self.matchers[text]
        views = matcher.view(states).split([count for _, count in asked])
        for (position, _), view in zip(asked, views, strict=True):
            table = matcher.table(candidates=view, observed=self.rows[text][position.targets])
            position.nearest = torch.cat([position.nearest, table.amin(1).cpu()])

    def _branches(
        self, text: Int[Tensor, " n"], candidates: Int[Tensor, " c"], parents: Int[Tensor, " c"]
    ) -> Float[Tensor, "c d"]:
        """Return the states of candidates, each behind as many tokens of a text as ``parents`` says."""
        prefix = self.model.prefix(offset=self.offset)
        request = Request(prefix, text, branches=candidates, parents=parents)
        return self.model.run([request], keep=False)[0].branches

    def wrong(self) -> Float[Tensor, " n"]:
        """Return the distances of the wrong candidates that were run and stand before the right one."""
        return torch.cat([position.nearest[: position.right] for text in self.positions for position in text])


def _orders(
    model: TruncatedModel,
    proposer: Proposer,
    tokens: Int[Tensor, " n"],
    budget: int,
) -> list[Int[Tensor, " v"]]:
    """Return the tokens that are tried at each position behind the right ones, in the order of the language model."""
    following: list[Tensor | None] = [None] * len(tokens)
    if proposer.lm is not None:
        lm = proposer.lm.model
        answer = lm.run([Request(proposer.lm.opened, tokens[:-1])], keep=False)[0]
        following[0] = proposer.lm.first
        following[1:] = answer.states.float().log_softmax(-1)
    orders = []
    for next_token in following:
        scores = proposer.scores(None, next_token)
        orders.append(scores.argsort(descending=True, stable=True)[:budget].clone())
    return orders


def ternary_search(
    score: Callable[[float], Score], first: float, low: float, high: float, progress: Progress
) -> float:
    """Return the best epsilon between two, by ternary search over its logarithm; of equal ones the largest tried.

    On a plateau the search moves up, to its upper end.

    Args:
        first: an epsilon between the two, tried before the others.
    """
    steps = math.ceil(math.log(math.log(high / low) / math.log(PRECISION)) / math.log(1.5))
    tried = {math.log(first): score(first)}
    step, ends = 0, [math.log(low), math.log(high)]
    while ends[1] - ends[0] > math.log(PRECISION):
        third = (ends[1] - ends[0]) / 3
        a, b = ends[0] + third, ends[1] - third
        for point in (a, b):
            tried[point] = score(math.exp(point))
        best = max(tried, key=lambda point: (tried[point], point))
        # Two that are equally bad stand on one side of the best: too large ones take the first candidate everywhere.
        if tried[a] < tried[b] or (tried[a] == tried[b] and best > a):
            ends[0] = a
        else:
            ends[1] = b
        step += 1
        progress("searching epsilon", min(step, steps), steps)
    return math.exp(max(tried, key=lambda point: (tried[point], point)))


@torch.inference_mode()
def calibrate(
    model: TruncatedModel,
    info: ObservationInfo,
    matcher: Matcher,
    proposer: Proposer,
    seed: int,
    *,
    texts: int,
    budget: int,
    progress: Progress,
) -> Threshold:
    """Return the absolute threshold of a channel, the same for all rows, as the paper calibrates it.

    Without noise, right and wrong tokens lie far apart. The attack finds as many tokens with every epsilon between
    them. The search cannot tell which is best, and the paper does not say where on such a plateau its search ends. The
    geometric middle is taken, which leaves room on both sides. The plateau begins at the farthest right token, and ends
    where the ternary search does.

    Args:
        texts: how many of the attacker's own texts to search on.
        budget: candidates for one position, ``CANDIDATES`` at most.

    Returns:
        ``floor`` is the largest distance of a right token, ``gap`` the upper end of the plateau, or the best epsilon
        where there is no plateau; both, and ``relative``, are shares of the median row's norm.

    Raises:
        InputError: no text has a right token among the first ``CANDIDATES``.
    """
    corpus = Corpus(model, seed + 1)
    length = max(1, min(TOKENS, (most_tokens(model.module) or TOKENS) - info.prefix_tokens))
    windows = [corpus.beginning(length).tolist() for _ in range(texts)]
    generator = torch.Generator().manual_seed(seed)
    released = Channel.parse(list(info.channel)).release_batch(model, windows, generator)
    trainer = Trainer(model, matcher, proposer, released, budget)
    if trainer.beyond == 1:
        raise InputError(
            "epsilon cannot be calibrated: no right token of the attacker's own texts is among the candidates tried; "
            "take more texts (--attack vocab-match:calibration_texts=N) or a larger --budget, or --epsilon auto"
        )
    norms = torch.cat([matcher.norms(rows) for rows in trainer.rows])
    unit, high = float(norms.median()), float(norms.max())
    low = max(trainer.least_right, LEAST * unit)
    first = min(max(low, PRECISION * trainer.floor), high)
    best = ternary_search(trainer.score, first, low, high, progress)
    rounding = max(torch.finfo(dtype).eps for dtype in (model.dtype, parse_dtype(info.provider_dtype)))
    floor = max(trainer.floor, rounding * unit)
    epsilon = math.sqrt(floor * best) if floor < best else best
    return Threshold(
        epsilon / unit,
        trainer.floor / unit,
        best / unit,
        absolute=epsilon,
        chance=chance_within(trainer.wrong() / epsilon),
        found=trainer.score(epsilon).right / sum(map(len, trainer.positions)),
        beyond=trainer.beyond,
    )
