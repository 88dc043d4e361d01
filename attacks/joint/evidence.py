"""What speaks for a token at a place: the probe, the language model, traces in other rows, its state in context."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.match import Matcher

FEATURES = (
    "probe", "model", "trace 1", "trace 2", "place", "log distance", "plain log distance", "log distance over expected",
)  # fmt: skip
TRACES = (1, 2)  # how many positions before a row's own the tokens are that it is asked for
PLACE = 2 + len(TRACES)
BEFORE = PLACE + 1  # features known before a candidate is run; the others need its state
LEAST = 1e-6  # relative distances are no smaller than this, so that their logarithm is bounded


@dataclass
class Rows:
    """One observation, as the decoder needs it.

    Attributes:
        shown: rows in the matcher's form. norms: of them, in the matcher's norm. plain: their Euclidean norms.
        ids, scores: each row's likeliest tokens by the probe, and their log-probabilities.
        columns: place of each of ``ids`` among the distinct ones, which are the columns of ``traces``.
        traces: for each offset, log-probability that a token stands so many positions before a row; None without.
        places: position of each row in the prompt, or None where rows are in unknown order.
        length: tokens of the prompt.
        when: logarithm of one plus the position that each row seems to have, where rows are in unknown order.
        expected: distance between a row and the right candidate's state that the channel is expected to make.
        evaluated: positions run to know all this.
    """

    shown: Float[Tensor, "rows d"]
    norms: Float[Tensor, " rows"]
    plain: Float[Tensor, " rows"]
    ids: Int[Tensor, "rows k"]
    scores: Float[Tensor, "rows k"]
    columns: Int[Tensor, "rows k"]
    traces: Float[Tensor, "offsets rows u"] | None
    places: tuple[int, ...] | None
    length: int
    when: Float[Tensor, " rows"] | None = None
    expected: Float[Tensor, " rows"] | None = None
    evaluated: int = 0

    def row_at(self, place: int) -> int | None:
        """The row of a position, where rows are in order and it is among them."""
        assert self.places is not None
        return self.places.index(place) if place in self.places else None


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
        return Candidates(self.tokens[which], self.rows[which], self.columns[which], self.features[which])

    def measure(self, states: Float[Tensor, "c d"], view: Rows, matcher: Matcher) -> None:
        """Fill in what their states in context say; those without a row get zeros, as all of them do there."""
        shown = self.rows >= 0
        self.distances = torch.full((len(self),), float("nan"), device=states.device)
        if not bool(shown.any()):
            return
        rows = self.rows[shown]
        own, observed = matcher.view(states[shown]), view.shown[rows]
        distances = matcher.pairs(candidates=own, observed=observed)
        relative = (distances / view.norms[rows]).clamp(min=LEAST)
        plain = ((own - observed).norm(dim=1) / view.plain[rows]).clamp(min=LEAST)
        self.distances[shown] = distances
        self.features[shown, BEFORE] = relative.log()
        self.features[shown, BEFORE + 1] = plain.log()
        if view.expected is not None:
            self.features[shown, BEFORE + 2] = (distances / view.expected[rows]).clamp(min=LEAST).log()


def candidates_of(
    view: Rows,
    place: int,
    free: Sequence[int],
    path: Sequence[int],
    following: Float[Tensor, " v"] | None,
    unseen: int,
) -> Candidates:
    """All candidates for a position of one hypothesis, with what is known of them before they are run.

    Args:
        free: rows not used yet (rows in unknown order). path: columns of the tokens before, the last one last.
        following: the language model's log-probabilities, or None. unseen: tokens tried where no row is shown.
    """
    device = view.shown.device
    row = None if view.places is None else view.row_at(place)
    if view.places is not None and row is None:
        assert following is not None
        scores, tokens = following.topk(min(unseen, len(following)))
        features = torch.zeros(len(tokens), len(FEATURES), device=device)
        features[:, 1] = scores.to(device)
        nowhere = torch.full((len(tokens),), -1, device=device)
        return Candidates(tokens.to(device), nowhere, nowhere, features)
    which = torch.tensor(list(free) if row is None else [row], device=device)
    tokens, columns = view.ids[which], view.columns[which]
    features = torch.zeros(*tokens.shape, len(FEATURES), device=device)
    features[..., 0] = view.scores[which]
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
    if view.places is None and view.when is not None:
        features[..., PLACE] = -(view.when[which] - math.log1p(place)).square()[:, None]
    rows = which[:, None].expand_as(tokens)
    return Candidates(tokens.flatten(), rows.flatten(), columns.flatten(), features.flatten(0, 1))
