"""Say how well each token explains what a frame shows of the next row, by the state that is expected of it."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy

import torch
from jaxtyping import Float
from torch import Tensor

from hiddenlab.matching.invariants import Frame, Gram, Norms, Span
from hiddenlab.proposals.expected_states import ExpectedStates

# How much less likely than the likeliest a token is where its log-likelihood begins to fall by a logarithm only: so far
# out errors are not Gaussian.
FLOOR = 30.0
# Tokens of a prompt lie outside of the released space by the length of their errors. How many standard deviations more
# are usual.
USUAL = 3.0
SURE = 0.9  # share of the likelihood that one token has
FIRST_COLUMNS = 8  # known rows for which there is room at first


class Explained(ABC):
    """The log-likelihood of the next row of one prompt for each token; it may keep what it computed before.

    Attributes:
        weight: of it beside the language model's log-probability, since errors have longer tails than normal ones.
        in_turn: candidates are tried in turn in the order of both together and in that of this likelihood alone.
    """

    weight: float = 0.5
    in_turn: bool = False

    def __init__(self, expected: ExpectedStates) -> None:
        self.expected = expected

    @abstractmethod
    def scores(self, frame: Frame) -> Float[Tensor, " v"]:
        """Return each token's log-likelihood, up to a constant.

        Args:
            frame: of the same observation in every call, behind ever more states.
        """

    @staticmethod
    def follow(several: "Sequence[tuple[Explained, Frame]]") -> None:
        """Compute for several hypotheses together what each needs of expected states; by default they need nothing."""
        return

    def fork(self) -> "Explained":
        """Return the same, to follow other states from here on."""
        return copy(self)

    def sure(self, frame: Frame | None) -> bool:
        """Return whether one token explains the next row so well that nothing else need be asked."""
        return frame is not None and float(self.scores(frame).softmax(0).max()) > SURE


class ByNorm(Explained):
    """By the norm of the row."""

    weight = 0.25

    def scores(self, frame: Frame) -> Float[Tensor, " v"]:
        assert isinstance(frame, Norms)
        likely = self.expected.lengths + self.expected.covariance.diagonal().sum()
        return _bounded(_of_length(likely, frame.shown[frame.count, 0].float(), self.expected))


class BySpan(Explained):
    """By the released space: the likeliest state within it for each token. It is the same at every position.

    So it is computed once, for all hypotheses that go on from the first one (``fork``).

    The few tokens that it allows all come before those that only the language model expects.
    """

    in_turn = True

    def __init__(self, expected: ExpectedStates) -> None:
        super().__init__(expected)
        self._kept = list[Tensor]()  # of all forks

    def scores(self, frame: Frame) -> Float[Tensor, " v"]:
        assert isinstance(frame, Span)
        if not self._kept:
            space = torch.linalg.qr((frame.space.float() @ self.expected.whitening).T).Q
            inside = self.expected.along(space, whitened=True).square().sum(1)
            free = space.shape[0] - space.shape[1]
            # Of a token of the prompt this is the squared length of errors of unit variance.
            outside = (self.expected.whitened_lengths - inside - free) / math.sqrt(2 * max(free, 1))
            # Which of the prompt's tokens has a larger error says nothing of which comes next.
            self._kept.append(_bounded(-(outside - USUAL).clamp(min=0)))
        return self._kept[0]


class ByGram(Explained):
    """By the row's coordinates on known rows, and by the norm of its rest.

    Coordinates are kept for every token, and grow by one column with each known row, in a buffer that grows by
    doubling: several hypotheses with buffers of ever new sizes would leave the memory in pieces.
    """

    def __init__(self, expected: ExpectedStates) -> None:
        super().__init__(expected)
        root = expected.root
        self._directions = root[:0]
        self._triangle = root.new_zeros(
            0, 0
        )  # Cholesky factor of the covariance of errors in these directions
        # Coordinates of expected states, in units in which errors are independent; the squared length of these, and of
        # that part of the states themselves.
        self._columns = root.new_zeros(len(expected.lengths), FIRST_COLUMNS)
        self._squares, self._inside = torch.zeros_like(expected.lengths), torch.zeros_like(expected.lengths)
        self._free = float(expected.covariance.diagonal().sum())  # variance of errors in all other directions

    def scores(self, frame: Frame) -> Float[Tensor, " v"]:
        assert isinstance(frame, Gram)
        self.follow([(self, frame)])
        row = frame.shown[frame.count].float()
        seen = torch.linalg.solve_triangular(self._triangle, row[: frame.count, None], upper=False)[:, 0]
        inside = -(self._squares - 2 * (self._known @ seen) + seen.square().sum()) / 2
        rest = self.expected.lengths - self._inside + self._free
        return _bounded(inside + _of_length(rest, row[frame.count], self.expected))

    @staticmethod
    def follow(several: Sequence[tuple[Explained, Frame]]) -> None:
        """Add the directions of known rows that are new; the large table of expected states is read once for all."""
        behind = [(one, one._new(frame)) for one, frame in several if isinstance(one, ByGram)]
        behind = [(one, directions) for one, directions in behind if len(directions)]
        if not behind:
            return
        along = behind[0][0].expected.along(torch.cat([directions for _, directions in behind]).T)
        parts = along.split([len(directions) for _, directions in behind], 1)
        for (one, directions), part in zip(behind, parts, strict=True):
            for direction, column in zip(directions, part.T, strict=True):
                one._add(direction, column)

    def fork(self) -> "ByGram":
        other = copy(self)
        other._columns = self._columns.clone()
        return other

    @property
    def _known(self) -> Float[Tensor, "v t"]:
        return self._columns[:, : len(self._directions)]

    def _new(self, frame: Frame) -> Float[Tensor, "k d"]:
        """Return the directions of known rows that are not added yet; of a row that adds none it is zero."""
        assert isinstance(frame, Gram)
        return frame.known.directions[len(self._directions) :].float()

    def _add(self, direction: Float[Tensor, " d"], along: Float[Tensor, " v"]) -> None:
        """Add the direction of one more known row, with every expected state's part along it."""
        errors = self.expected.covariance @ direction
        variance = float(direction @ errors)
        others = (self._directions @ errors)[:, None]
        inner = torch.linalg.solve_triangular(self._triangle, others, upper=False)[:, 0]
        pivot = math.sqrt(max(variance - float(inner.square().sum()), 1e-12)) if variance else 1.0
        column = (along - self._known @ inner) / pivot
        grown = torch.nn.functional.pad(self._triangle, (0, 1, 0, 1))
        grown[-1, :-1], grown[-1, -1] = inner, pivot
        self._triangle, self._free = grown, self._free - variance
        self._inside = self._inside + along.square()
        self._squares = self._squares + column.square()
        if len(self._directions) == self._columns.shape[1]:
            self._columns = torch.cat([self._columns, torch.zeros_like(self._columns)], 1)
        self._columns[:, len(self._directions)] = column
        self._directions = torch.cat([self._directions, direction[None]])


EXPLAINED: dict[type[Frame], type[Explained]] = {Gram: ByGram, Norms: ByNorm, Span: BySpan}


def explained_by(frame: Frame | None, expected: ExpectedStates | None) -> Explained | None:
    """Return what tells how well tokens explain an observation's rows; None where there is no secret map."""
    return None if frame is None or expected is None else EXPLAINED[type(frame)](expected)


def _of_length(
    likely: Float[Tensor, " v"], seen: Float[Tensor, ""], expected: ExpectedStates
) -> Float[Tensor, " v"]:
    """Return the log-likelihood of a length, given the expected squared length for each token."""
    missed = (likely.clamp(min=1e-12).log() / 2 - seen.clamp(min=1e-12).log()) / expected.spread
    return -missed.square() / 2


def _bounded(scores: Float[Tensor, " v"]) -> Float[Tensor, " v"]:
    return -FLOOR * torch.log1p((scores.max() - scores) / FLOOR)
