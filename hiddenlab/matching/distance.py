"""Measure distances between candidate states and observed rows: on plain or sorted coordinates, or by invariants."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.matching.invariants import FRAMES, LEAST_REST, Frame
from hiddenlab.matching.row_space import Largest, RowSpace
from hiddenlab.projections import Projection, projection_of
from hiddenlab.row_facts import extra_rows, kept_share, lies_in_row_space, rank_of
from hiddenlab.secret_maps import Invariant, invariant_of
from hiddenlab.types import ObservationInfo

DISTANCES = ("l1", "l2", "sorted-l1", "sorted-l2")


@dataclass(frozen=True)
class Matcher:
    """L1 or L2 distance, on the coordinates or (Hidden No More, section 5.2.2) on the sorted coordinates of both sides.

    Attributes:
        norm: 1 or 2. sorted: sort coordinates first, so that a permutation of them does not matter.
        projection: maps a state to what the rows show of it, where that is not the state itself.
        in_row_space: the rows show of a state what lies in the space that they span, of ``rank`` dimensions at most.
            Such a matcher has a projection once it is bound.
        invariant: what is compared of rows behind a secret map, where there is one. Such a matcher compares candidates
            only within a frame, of one observation behind the tokens found.
        extra: how many of the rows are no token's. least: of an invariant, see ``LEAST_REST``.
    """

    norm: int
    sorted: bool
    projection: Projection | RowSpace | Largest | None = None
    invariant: Invariant | None = None
    frame: Frame | None = None
    in_row_space: bool = False
    rank: int | None = None
    extra: int = 0
    least: float = LEAST_REST

    @property
    def name(self) -> str:
        return self.invariant or f"{'sorted-' if self.sorted else ''}l{self.norm}"

    def bound(self, rows: Float[Tensor, "rows d"]) -> "Matcher":
        """Return the matcher of one observation's next row, of whose tokens none is known."""
        if self.in_row_space:
            return replace(self, projection=RowSpace.of(rows, self.rank))
        if self.invariant is None:
            return self
        frame = FRAMES[self.invariant].of(rows, self.least)
        return replace(self, frame=replace(frame, shown=frame.shown[: len(rows) - self.extra]))  # type: ignore[type-var]

    def behind(self, states: Float[Tensor, "t d"]) -> "Matcher":
        """Return the matcher of the row behind some more tokens, whose states are known."""
        frame = self.frame
        for state in states if frame is not None else ():
            assert frame is not None
            frame = frame.behind(state)
        return self if frame is self.frame else replace(self, frame=frame)

    def prepare(self, rows: Float[Tensor, "more d"]) -> Float[Tensor, "rows k"]:
        """Return observed rows in the form that is compared: float32, sorted where the matcher sorts.

        Of mixed rows there is one for each token.
        """
        if self.invariant is not None:
            frame = self.bound(rows).frame if self.frame is None else self.frame
            assert frame is not None
            return frame.shown
        rows = rows.float()
        return rows.sort(dim=1).values if self.sorted else rows

    def view(self, states: Float[Tensor, "c d"]) -> Float[Tensor, "c k"]:
        """Return candidates' states in the form that is compared: as they would have been observed."""
        if self.frame is not None:
            return self.frame.view(states)
        return self.prepare(states if self.projection is None else self.projection(states))

    def along(
        self, chain: Float[Tensor, "n d"], beside: Float[Tensor, "n c d"]
    ) -> tuple[Float[Tensor, "n k"], Float[Tensor, "n c k"]]:
        """Return the states of a whole prompt, and alternatives for each of them, in the form that is compared."""
        if self.frame is None:
            return self.view(chain), self.view(beside.flatten(0, 1)).unflatten(0, beside.shape[:2])
        matcher, views = self, []
        for state, others in zip(chain, beside, strict=True):
            views.append(matcher.view(torch.cat([state[None], others])))
            matcher = matcher.behind(state[None])
        seen = torch.stack(views)
        return seen[:, 0], seen[:, 1:]

    def pairs(
        self, *, candidates: Float[Tensor, "c d"], observed: Float[Tensor, "c d"]
    ) -> Float[Tensor, " c"]:
        """Return the distance of each candidate to the observed row at the same index; both prepared."""
        return torch.linalg.vector_norm(candidates - observed, ord=self.norm, dim=1)

    def table(
        self, *, candidates: Float[Tensor, "c d"], observed: Float[Tensor, "rows d"]
    ) -> Float[Tensor, "c rows"]:
        """Return the distance of every candidate to every observed row; both prepared."""
        if len(observed) == 1:
            return self.pairs(candidates=candidates, observed=observed.expand_as(candidates))[:, None]
        # The GEMM form of L2 loses all digits at small distances, where matches are decided.
        return torch.cdist(
            candidates, observed, p=float(self.norm), compute_mode="donot_use_mm_for_euclid_dist"
        )

    def norms(self, observed: Float[Tensor, "rows d"]) -> Float[Tensor, " rows"]:
        """Return the norm of each row, the unit of relative thresholds."""
        return torch.linalg.vector_norm(observed.float(), ord=self.norm, dim=1).clamp(min=1e-12)


def choose_matcher(distance: str, info: ObservationInfo) -> Matcher:
    """Return the matcher of a name; ``auto`` is L1, sorted where the channel permuted the coordinates.

    Behind a secret map it is L2 of what the map leaves.

    Raises:
        InputError: the name is unknown.
        NotApplicableError: the channel's stages cannot be combined, or a secret map leaves nothing by that name.
    """
    if (invariant := invariant_of(info)) is not None:
        if distance != "auto":
            raise NotApplicableError(
                f"rows behind a secret map are compared by what it leaves ({invariant}), not by {distance}; "
                "give --distance auto"
            )
        return Matcher(2, False, invariant=invariant, extra=extra_rows(info))
    share = kept_share(info)
    projection = projection_of(info) or (None if share is None else Largest(share))
    facts: dict[str, Any] = {"projection": projection, "extra": extra_rows(info)}
    if lies_in_row_space(info):
        facts |= {"in_row_space": True, "rank": rank_of(info.facts)}
    if distance == "auto":
        return Matcher(1, info.columns_permuted is not None, **facts)
    if distance not in DISTANCES:
        raise InputError(f"unknown distance {distance!r}; known are auto, {', '.join(DISTANCES)}")
    return Matcher(int(distance[-1]), distance.startswith("sorted"), **facts)
