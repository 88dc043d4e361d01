"""Compute the features that score a candidate token: probe, language model, traces in other rows, state distances."""

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
TRACES = (1, 2)  # how many positions before a row the tokens stand that its traces predict
PLACE = 2 + len(TRACES)
PRECEDES = PLACE + 1
BEFORE = PRECEDES + 1  # features known before a candidate is run; the others need its state
FIT = BEFORE + 2  # the distance over the distance that the channel is expected to cause
ROUNDING = 1e-5  # of a row's norm
PART = 8192  # pairs compared at once, so that copies of rows stay small
DENSE = 2  # all pairs are compared where they are at most so many times those asked for: this copies less
EUCLIDEAN = Matcher(2, False)
LEAST = 1e-6  # relative distances are no smaller than this, so that their logarithm is bounded


@dataclass
class Rows:
    """One observation in the form that the decoder uses.

    Attributes:
        shown: rows in the matcher's form. norms: their norms, in the matcher's norm.
        white: rows times ``whitening``, or the rows themselves without; candidates' states are compared with them in
            the Euclidean norm. units: divisors of these distances.
        ids, scores: each row's likeliest tokens by the probe, and their log-probabilities.
        columns: index of each of ``ids`` among the distinct ones, which are the columns of ``traces``.
        traces: for each offset, log-probability that a token stands so many positions before a row; None without.
        places: position of each row in the prompt, or None where rows are in unknown order.
        length: tokens of the prompt.
        when: log-likelihood ratio of each row for each position (see ``position_model``), where rows are in unknown
            order.
        precedes: log-odds that each row stood before each of the others, where rows are in unknown order.
        expected: distance between a row and the right candidate's state that the channel is expected to cause.
        whitening: matrix of the distortion model (see ``distortion_model``), where rows are in unknown order or columns
            shuffled and the channel changes values; None elsewhere.
        wide: log-probabilities of the whole vocabulary in half precision, where the probe's shortlist is too short for
            a first guess (shuffled columns); None elsewhere.
        missed: for each position without a row that has one soon after it, what that row says about its token, as
            ``traces`` but for the whole vocabulary; zeros for an offset that has no row.
        openers: tokens whose state alone comes nearest to some row, tried first; None unless ``wide`` is given.
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
        """Return the row of a position where rows are in order; None where that position has no row."""
        assert self.places is not None
        return self.places.index(place) if place in self.places else None


@dataclass(frozen=True)
class Learned:
    """The weights and the threshold that were learned on the attacker's own texts.

    Attributes:
        weights: one for each feature. lead: nats by which the best candidate that was run has to be ahead of all that
            were not (``unseen``) to be reliable; below it, more candidates are run.
    """

    weights: Float[Tensor, " features"]
    lead: float = -math.inf


@dataclass
class Candidates:
    """Tokens that may come next in one hypothesis.

    Attributes:
        rows: the row that each would belong to, -1 where no row is shown. columns: index of each among the distinct
            tokens, -1 where it has none. features: see ``FEATURES``; those that need states are zero until ``measure``.
        distances: to the row, in the matcher's norm, once measured.
    """

    tokens: Int[Tensor, " c"]
    rows: Int[Tensor, " c"]
    columns: Int[Tensor, " c"]
    features: Float[Tensor, "c features"]
    distances: Float[Tensor, " c"] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def keep(self, which: Tensor) -> "Candidates":
        """Return the selected candidates."""
        distances = None if self.distances is None else self.distances[which]
        return Candidates(
            self.tokens[which], self.rows[which], self.columns[which], self.features[which], distances
        )

    def and_also(self, other: "Candidates") -> "Candidates":
        """Return these candidates and others, all of them measured."""
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
        """Fill in the features that need states in context; candidates without a row get zeros there.

        Args:
            states: of distinct tokens, in the matcher's form. of: index of each candidate's state.
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
            # Where the channel moves nothing, a right candidate's distance is rounding alone.
            rounding = ROUNDING * view.norms[rows]
            self.features[shown, FIT] = (distances.maximum(rounding) / view.expected[rows]).log()


def _distances(
    states: Float[Tensor, "s d"],
    of: Int[Tensor, " c"],
    shown: Float[Tensor, "rows d"],
    rows: Int[Tensor, " c"],
    matcher: Matcher,
) -> Float[Tensor, " c"]:
    """Return the distance of each pair of a state and a row."""
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
    """Return all candidates for a position of one hypothesis, with the features known before they are run.

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
            # The row's traces score the tokens before it, which are known.
            if len(path) >= offset and path[-offset] >= 0:
                features[..., 2 + i] = view.traces[i, which, path[-offset]][:, None]
        elif (later := view.row_at(place + offset)) is not None:
            # Later rows' traces score this token.
            features[..., 2 + i] = view.traces[i, later][columns]
    if view.places is None:
        features[..., PLACE : PRECEDES + 1] = order_of(view, place, which)[:, None]
    rows = which[:, None].expand_as(tokens)
    return Candidates(tokens.flatten(), rows.flatten(), columns.flatten(), features.flatten(0, 1))


def order_of(view: Rows, place: int, free: Int[Tensor, " r"]) -> Float[Tensor, "r 2"]:
    """Return how well each free row fits a place: by itself, and against the other free rows, which come later."""
    fits = torch.zeros(len(free), 2, device=view.shown.device)
    if view.when is not None:
        fits[:, 0] = view.when[free, place]
    if view.precedes is not None:
        fits[:, 1] = view.precedes[free][:, free].sum(1)
    return fits


def chosen(view: Rows, place: int) -> bool:
    """Return whether a position takes its candidates from the whole vocabulary instead of the rows' shortlists."""
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
    """Return the tokens of the whole vocabulary that are likeliest for any row, best first (see ``chosen``).

    Args:
        learned: log-likelihoods learned from failed candidates, or None.
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
    """Return the log-likelihood, before any candidate is run, that the next token is none of ``tokens`` (in nats)."""
    best = _likely(view, place, free, following, weights)
    return float(best.index_fill(0, tokens, float("-inf")).logsumexp(0))


def _likely(
    view: Rows,
    place: int,
    free: Sequence[int],
    following: Float[Tensor, " v"] | None,
    weights: Float[Tensor, " features"],
) -> Float[Tensor, " v"]:
    """Return each vocabulary token's score before it is run, in the row where that is highest."""
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
    """Return the rows that may belong to a position: all free ones, or its own in known order; None without one."""
    if view.places is None:
        return torch.tensor(list(free), device=view.shown.device)
    row = view.row_at(place)
    return None if row is None else torch.tensor([row], device=view.shown.device)
