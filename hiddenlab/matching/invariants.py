"""Compare a candidate with rows behind a secret linear map, by what the map cannot change.

A frame holds what is seen of one observation by someone who knows the states of its first tokens. It shows a candidate
for the next token, and each row, as a few numbers; the distance of a candidate is the L2 distance of these.

- ``Gram``: an orthogonal map of the columns keeps inner products. So a row's coordinates on the rows before it, and the
  norm of its rest, are the same on both sides. Their distance is the least over all maps that fit the known rows.
- ``Norms``: where each row has a map of its own, only its norm stays.
- ``Span``: where rows were mixed, a right candidate lies in the space that the released rows span. What of it the known
  rows span already proves nothing. So what lies outside is compared with what the known rows do not span.

``hiddenlab.matching.explained`` says how well each token explains what a frame shows of the next row.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from hiddenlab.matching.row_space import RowSpace
from hiddenlab.secret_maps import Invariant

# A row whose rest beyond the rows before it is shorter than this share of it says nothing by that rest: rounding would
# be compared. At layer 1 a row like the first has no rest at all. Behind noise the share is larger.
LEAST_REST = 1e-2
# Of mixed rows, a state whose rest is shorter than this share of it is spanned by the known rows, up to rounding.
SPANNED = 5e-5
# Of the largest singular value of mixed rows: what float32 leaves of a direction that no row has. One between this and
# ``SPANNED`` may be a token's that repeats a state, or a mixture made it that small.
RELEASED = 2e-8
# Directions outside of the space of mixed rows, below which wrong candidates lie in it by chance: with one, 17 of 4,000
# random ones came within ``Span.farthest``.
OUTSIDE = 4


class Frame(ABC):
    """One observation behind a secret map, seen behind some known states.

    Attributes:
        shown: each row as it is compared, behind the rows before it, in double precision.
        betrays: a wrong token before a row shows in that row.
        rounding: a threshold may be so many rounding errors of one operation, however near the measured candidates
            came: in the measurement both sides may run passes of one shape, and the attack's passes have others. Three
            were seen by norms. A nearer wrong candidate still bounds it.
        farthest: the largest threshold, however far right candidates came in the measurement.
    """

    betrays: ClassVar[bool] = False
    rounding: ClassVar[float] = 4.0
    farthest: ClassVar[float] = math.inf
    shown: Float[Tensor, "rows k"]

    @classmethod
    @abstractmethod
    def of(cls, rows: Float[Tensor, "rows d"], least: float = LEAST_REST) -> "Frame":
        """Return the frame of released rows of which no token is known; for ``least`` see ``LEAST_REST``."""

    @property
    @abstractmethod
    def count(self) -> int:
        """How many states are known."""

    @property
    def tells(self) -> bool:
        """Whether the rows tell candidates apart at all."""
        return True

    @abstractmethod
    def view(self, states: Float[Tensor, "c d"]) -> Float[Tensor, "c k"]:
        """Return candidates for the next token as they are compared."""

    @abstractmethod
    def behind(self, state: Float[Tensor, " d"]) -> "Frame":
        """Return the frame behind one more token, whose state is known."""


@dataclass(frozen=True)
class Basis:
    """Orthonormal directions of some rows, one for each: zeros where a row adds none.

    Attributes:
        directions: in double precision.
    """

    directions: Float[Tensor, "t d"]

    @classmethod
    def none(cls, like: Float[Tensor, "rows d"]) -> "Basis":
        """Return the basis of no rows."""
        return cls(like.new_zeros(0, like.shape[1], dtype=torch.float64))

    def split(self, states: Float[Tensor, "c d"]) -> tuple[Float[Tensor, "c t"], Float[Tensor, "c d"]]:
        """Return states' coordinates and what is left of them."""
        states = states.double()
        inside = states @ self.directions.T
        rest = states - inside @ self.directions
        again = rest @ self.directions.T  # once more: the first time leaves rounding of long states
        return inside + again, rest - again @ self.directions

    def with_rest(self, rest: Float[Tensor, " d"], least: float) -> "Basis":
        """Return the basis with the direction of a row's rest; with zeros where that is not longer than ``least``."""
        norm = rest.norm()
        direction = rest / norm if float(norm) > least else torch.zeros_like(rest)
        return Basis(torch.cat([self.directions, direction[None]]))


@dataclass(frozen=True)
class Gram(Frame):
    """A secret orthogonal map of the columns, the same for all rows, which are in order.

    Attributes:
        known: directions of the known states; of the first ``t`` rows as many. least: see ``LEAST_REST``.
    """

    betrays = True
    shown: Float[Tensor, "rows rows"]
    known: Basis
    least: float

    @classmethod
    def of(cls, rows: Float[Tensor, "rows d"], least: float = LEAST_REST) -> "Gram":
        rows, count = rows.double(), len(rows)
        shown, basis = rows.new_zeros(count, count), Basis.none(rows)
        for i in range(count):
            inside, rest = basis.split(rows[i : i + 1])
            shown[i, :i], shown[i, i] = inside[0], rest.norm()
            basis = basis.with_rest(rest[0], least * float(rows[i].norm()))
        return cls(shown, Basis.none(rows), least)

    @property
    def count(self) -> int:
        return len(self.known.directions)

    def view(self, states: Float[Tensor, "c d"]) -> Float[Tensor, "c rows"]:
        inside, rest = self.known.split(states)
        seen = torch.cat([inside, rest.norm(dim=1, keepdim=True)], 1)
        return torch.nn.functional.pad(seen, (0, self.shown.shape[1] - seen.shape[1]))

    def behind(self, state: Float[Tensor, " d"]) -> "Gram":
        _, rest = self.known.split(state[None])
        row = self.shown[self.count]
        # Both sides leave the same directions out: the released row says whether this is one.
        used = float(row[self.count]) > self.least * float(row.norm())
        return replace(self, known=self.known.with_rest(rest[0], 0.0 if used else math.inf))


@dataclass(frozen=True)
class Norms(Frame):
    """A secret orthogonal map of its own for each row, which are in order."""

    shown: Float[Tensor, "rows 1"]
    count: int = 0

    @classmethod
    def of(cls, rows: Float[Tensor, "rows d"], least: float = LEAST_REST) -> "Norms":
        return cls(_norms(rows))

    def view(self, states: Float[Tensor, "c d"]) -> Float[Tensor, "c 1"]:
        return _norms(states)

    def behind(self, state: Float[Tensor, " d"]) -> "Norms":
        return replace(self, count=self.count + 1)


@dataclass(frozen=True)
class Span(Frame):
    """A secret square matrix that mixed the rows.

    Attributes:
        space: orthonormal basis of the released rows. known: directions of the known states. least: see ``LEAST_REST``.
        repeats: how many of the rows that are still unknown may add no direction.
    """

    # Sixteen rounding errors of a state, of which a hundredth is compared (``LEAST_REST``).
    rounding = 16 / LEAST_REST
    # A later token of the prompt came within 3e-3 of "no no no no no yes", and right tokens of it within 5e-4.
    farthest = 1e-3
    shown: Float[Tensor, "rows 2"]
    released: Float[Tensor, "more d"]
    space: Float[Tensor, "k d"]
    known: Basis
    least: float
    repeats: int

    @classmethod
    def of(cls, rows: Float[Tensor, "rows d"], least: float = LEAST_REST) -> "Span":
        rows = rows.double()
        space, clear = (RowSpace.of(rows, least=least).basis for least in (RELEASED, SPANNED))
        shown = rows.new_tensor([[0.0, 1.0]]).repeat(len(rows), 1)
        return cls(shown, rows, space, Basis.none(rows), least, len(rows) - len(clear))

    @property
    def count(self) -> int:
        return len(self.known.directions)

    @property
    def tells(self) -> bool:
        rank, width = self.space.shape
        return rank <= width - OUTSIDE

    def view(self, states: Float[Tensor, "c d"]) -> Float[Tensor, "c 2"]:
        states = states.double()
        whole, rest = states.norm(dim=1), self.known.split(states)[1].norm(dim=1)
        outside = (states - (states @ self.space.T) @ self.space).norm(dim=1)
        share = outside / rest.maximum(self.least * whole).clamp(min=1e-30)
        if not self.repeats:  # then a state that the known rows span is not the next one
            share = torch.where(rest > SPANNED * whole, share, 1.0)
        return torch.stack([share, (1 - share.square()).clamp(min=0).sqrt()], 1)

    def behind(self, state: Float[Tensor, " d"]) -> "Span":
        _, rest = self.known.split(state[None])
        known = self.known.with_rest(rest[0], SPANNED * float(state.norm()))
        repeats = not bool(known.directions[-1].any())
        return replace(self, known=known, repeats=max(0, self.repeats - repeats))


def _norms(states: Float[Tensor, "c d"]) -> Float[Tensor, "c 1"]:
    return states.double().norm(dim=1, keepdim=True)


FRAMES: dict[Invariant, type[Frame]] = {"gram": Gram, "norms": Norms, "span": Span}
