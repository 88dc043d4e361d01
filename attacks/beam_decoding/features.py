"""What speaks for a token at a place: the probe, the language model, traces in other rows, its state in context."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.matching.distance import Matcher

FEATURES = (
    "probe", "language model", "trace 1", "trace 2", "place", "pairwise order", "log distance",
    "log whitened distance", "log distance over expected",
)  # fmt: skip
TRACES = (1, 2)  # how many positions before a row's own the tokens are that it is asked for
PLACE = 2 + len(TRACES)
PRECEDES = PLACE + 1
BEFORE = PRECEDES + 1  # features known before a candidate is run; the others need its state
FIT = BEFORE + 2  # the distance over what the channel is expected to make of it
ROUNDING = 1e-5  # of a row's norm
PART = 8192  # pairs compared at once, so that copies of rows stay small
DENSE = 2  # where so many times the pairs asked for are all there are, all are compared, which copies less
EUCLIDEAN = Matcher(2, False)
LEAST = 1e-6  # relative distances are no smaller than this, so that their logarithm is bounded


@dataclass
class Rows:
    """One observation, as the decoder needs it.

    Attributes:
        shown: rows in the matcher's form. norms: of them, in the matcher's norm.
        white: the same times ``whitening``, or themselves without; candidates' states are compared with them in
            the Euclidean norm. units: what these distances are compared with.
        ids, scores: each row's likeliest tokens by the probe, and their log-probabilities.
        columns: place of each of ``ids`` among the distinct ones, which are the columns of ``traces``.
        traces: for each offset, log-probability that a token stands so many positions before a row; None without.
        places: position of each row in the prompt, or None where rows are in unknown order.
        length: tokens of the prompt.
        when: what each row says for each position (see ``position_model``), where rows are in unknown order.
        precedes: log-odds that each row stood before each of the others, where rows are in unknown order.
        expected: distance between a row and the right candidate's state that the channel is expected to make.
        whitening: of what the channel does to rows (see ``distortion_model``), where rows are in unknown order or
            columns shuffled, and the channel does anything; None elsewhere.
        wide: where the probe's shortlist is too short for a first guess (shuffled columns), log-probabilities of the
            whole vocabulary in half precision; None elsewhere.
        missed: for each position without a row that has one soon after it, what that row tells of its token, as
            ``traces`` but for the whole vocabulary; zeros for an offset that has no row.
        openers: tokens whose state alone comes nearest to some row, tried first of all; none unless ``wide``.
    """

    shown: Float[Tensor, "rows d"]
    norms: Float[Tensor, " rows"]
    white: Float[Tensor, "rows d"]
    units: Float[Tensor, " rows"]
    ids: Int[Tensor, "rows k"]
    scores: Float[Tensor, "rows k"]
    columns: Int[Tensor, "rows k"]
    traces: Float[Tensor, "offsets rows u"] | None
    places: tuple[int, ...] | None
    length: int
    when: Float[Tensor, "rows length"] | None = None
    precedes: Float[Tensor, "rows rows"] | None = None
    expected: Float[Tensor, " rows"] | None = None
    whitening: Float[Tensor, "d d"] | None = None
    wide: Float[Tensor, "rows v"] | None = None
    missed: Mapping[int, Float[Tensor, "offsets v"]] = field(default_factory=dict)
    openers: Int[Tensor, " k"] | None = None

    def row_at(self, place: int) -> int | None:
        """The row of a position, where rows are in order and it is among them."""
        assert self.places is not None
        return self.places.index(place) if place in self.places else None


@dataclass(frozen=True)
class Learned:
    """What the attacker's own texts taught.

    Attributes:
        weights: of each piece of evidence. lead: nats by which the best candidate that was run has to be ahead of all
            that were not (``unseen``) to be believed; less, and others should be tried.
    """

    weights: Float[Tensor, " features"]
    lead: float = -math.inf


@dataclass
class Candidates:
    """Tokens that may come next in one hypothesis.

    Attributes:
        rows: the row that each would belong to, -1 where none is shown. columns: its place among the distinct tokens,
            -1 where it has none. features: see ``FEATURES``; those of states are zero until ``measure``.
        distances: to its row, in the matcher's norm, once measured.
    """

    tokens: Int[Tensor, " c"]
    rows: Int[Tensor, " c"]
    columns: Int[Tensor, " c"]
    features: Float[Tensor, "c features"]
    distances: Float[Tensor, " c"] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def keep(self, which: Tensor) -> "Candidates":
        """Some of them."""
        distances = None if self.distances is None else self.distances[which]
        return Candidates(
            self.tokens[which], self.rows[which], self.columns[which], self.features[which], distances
        )

    def and_also(self, other: "Candidates") -> "Candidates":
        """These and others, all measured."""
        assert self.distances is not None
        assert other.distances is not None
        return Candidates(
            torch.cat([self.tokens, other.tokens]), torch.cat([self.rows, other.rows]),
            torch.cat([self.columns, other.columns]), torch.cat([self.features, other.features]),
            torch.cat([self.distances, other.distances]),
        )  # fmt: skip

    def measure(
        self, states: Float[Tensor, "s d"], of: Int[Tensor, " c"], view: Rows, matcher: Matcher
    ) -> None:
        """Fill in what states in context say; candidates without a row get zeros, as all of them do there.

        Args:
            states: of distinct tokens, in the matcher's form. of: which of them is each candidate's.
        """
        shown = self.rows >= 0
        self.distances = torch.full((len(self),), float("nan"), device=states.device)
        if not bool(shown.any()):
            return
        rows, of = self.rows[shown], of[shown]
        distances = _distances(states, of, view.shown, rows, matcher)
        white = states if view.whitening is None else states @ view.whitening
        apart = _distances(white, of, view.white, rows, EUCLIDEAN)
        self.distances[shown] = distances
        relative = (distances / view.norms[rows]).clamp(min=LEAST)
        self.features[shown, BEFORE] = relative.log()
        self.features[shown, BEFORE + 1] = (apart / view.units[rows]).clamp(min=LEAST).log()
        if view.expected is not None:
            # Where the channel moves nothing, rounding is what is left of a right candidate's distance.
            rounding = ROUNDING * view.norms[rows]
            self.features[shown, FIT] = (distances.maximum(rounding) / view.expected[rows]).log()


def _distances(
    states: Float[Tensor, "s d"],
    of: Int[Tensor, " c"],
    shown: Float[Tensor, "rows d"],
    rows: Int[Tensor, " c"],
    matcher: Matcher,
) -> Float[Tensor, " c"]:
    """The distance of each pair of a state and a row."""
    distinct, place = rows.unique(return_inverse=True)
    if len(distinct) > 1 and len(rows) * DENSE >= len(states) * len(distinct):
        return matcher.table(candidates=states, observed=shown[distinct])[of, place]
    parts = torch.arange(len(rows), device=states.device).split(PART)
    return torch.cat(
        [matcher.pairs(candidates=states[of[part]], observed=shown[rows[part]]) for part in parts]
    )


def candidates_of(
    view: Rows,
    place: int,
    free: Sequence[int],
    path: Sequence[int],
    following: Float[Tensor, " v"] | None,
    tokens: Int[Tensor, " k"] | None = None,
) -> Candidates:
    """All candidates for a position of one hypothesis, with what is known of them before they are run.

    Args:
        free: rows not used yet (rows in unknown order). path: columns of the tokens before, the last one last.
        following: the language model's log-probabilities, or None.
        tokens: tried for every row or for a position without one, in place of each row's shortlist (``chosen``).
    """
    device = view.shown.device
    which = rows_at(view, place, free)
    if which is None:
        assert following is not None
        assert tokens is not None
        features = torch.zeros(len(tokens), len(FEATURES), device=device)
        features[:, 1] = following.to(device)[tokens]
        if place in view.missed:
            features[:, 2:PLACE] = view.missed[place][:, tokens].T
        nowhere = torch.full((len(tokens),), -1, device=device)
        return Candidates(tokens, nowhere, nowhere, features)
    if tokens is None:
        tokens, scores, columns = view.ids[which], view.scores[which], view.columns[which]
    else:
        assert view.wide is not None
        scores = view.wide[which][:, tokens].float()
        tokens = tokens.expand_as(scores)
        columns = torch.full_like(tokens, -1)
    features = torch.zeros(*tokens.shape, len(FEATURES), device=device)
    features[..., 0] = scores
    if following is not None:
        features[..., 1] = following.to(device)[tokens]
    for i, offset in enumerate(TRACES if view.traces is not None else ()):
        assert view.traces is not None
        if view.places is None:
            # The row tells of the tokens before it, which are known.
            if len(path) >= offset and path[-offset] >= 0:
                features[..., 2 + i] = view.traces[i, which, path[-offset]][:, None]
        elif (later := view.row_at(place + offset)) is not None:
            # Later rows tell of this token.
            features[..., 2 + i] = view.traces[i, later][columns]
    if view.places is None:
        features[..., PLACE : PRECEDES + 1] = order_of(view, place, which)[:, None]
    rows = which[:, None].expand_as(tokens)
    return Candidates(tokens.flatten(), rows.flatten(), columns.flatten(), features.flatten(0, 1))


def order_of(view: Rows, place: int, free: Int[Tensor, " r"]) -> Float[Tensor, "r 2"]:
    """What each of the rows that are free says for a place: by itself, and beside the others, which come later."""
    out = torch.zeros(len(free), 2, device=view.shown.device)
    if view.when is not None:
        out[:, 0] = view.when[free, place]
    if view.precedes is not None:
        out[:, 1] = view.precedes[free][:, free].sum(1)
    return out


def chosen(view: Rows, place: int) -> bool:
    """Candidates for a position come from the whole vocabulary, not from the rows' shortlists."""
    return view.wide is not None or (view.places is not None and view.row_at(place) is None)


def likeliest(
    view: Rows,
    place: int,
    free: Sequence[int],
    following: Float[Tensor, " v"] | None,
    weights: Float[Tensor, " features"],
    most: int,
    learned: Float[Tensor, " v"] | None = None,
) -> Int[Tensor, " most"]:
    """Of the whole vocabulary the tokens that may come next, the likeliest for any row first (see ``chosen``).

    Args:
        learned: log-likelihoods that candidates which failed suggest, or None.
    """
    best = _likely(view, place, free, following, weights)
    if learned is not None:
        best = best + learned
    return best.topk(min(most, len(best))).indices


def unseen(
    view: Rows,
    place: int,
    free: Sequence[int],
    following: Float[Tensor, " v"] | None,
    weights: Float[Tensor, " features"],
    tokens: Int[Tensor, " k"],
) -> float:
    """How likely it was, before any candidate was run, that none of some tokens comes next: in nats, as scores are."""
    best = _likely(view, place, free, following, weights)
    return float(best.index_fill(0, tokens, float("-inf")).logsumexp(0))


def _likely(
    view: Rows,
    place: int,
    free: Sequence[int],
    following: Float[Tensor, " v"] | None,
    weights: Float[Tensor, " features"],
) -> Float[Tensor, " v"]:
    """What speaks for each token of the vocabulary before it is run, in the row for which most does."""
    which = rows_at(view, place, free)
    if which is None:
        best = weights[2:PLACE] @ view.missed[place] if place in view.missed else torch.zeros(())
    else:
        assert view.wide is not None
        scores = weights[0] * view.wide[which].float()
        if view.places is None:
            scores += (order_of(view, place, which) @ weights[PLACE : PRECEDES + 1])[:, None]
        best = scores.amax(0)
    if following is not None:
        best = best.to(view.shown.device) + weights[1] * following.to(view.shown.device)
    return best


def rows_at(view: Rows, place: int, free: Sequence[int]) -> Int[Tensor, " r"] | None:
    """Rows that may belong to a position: those that are free, or in known order its own, or None without one."""
    if view.places is None:
        return torch.tensor(list(free), device=view.shown.device)
    row = view.row_at(place)
    return None if row is None else torch.tensor([row], device=view.shown.device)
