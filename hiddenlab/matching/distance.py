"""Measure distances between candidate states and observed rows, on plain or sorted coordinates."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from hiddenlab.errors import InputError
from hiddenlab.projections import Projection, projection_of
from hiddenlab.types import ObservationInfo

DISTANCES = ("l1", "l2", "sorted-l1", "sorted-l2")


@dataclass(frozen=True)
class Matcher:
    """L1 or L2 distance, on the coordinates or (Hidden No More, section 5.2.2) on the sorted coordinates of both sides.

    Attributes:
        norm: 1 or 2. sorted: sort coordinates first, so that a permutation of them does not matter.
        projection: maps a state to what the rows show of it, where that is not the state itself.
    """

    norm: int
    sorted: bool
    projection: Projection | None = None

    @property
    def name(self) -> str:
        return f"{'sorted-' if self.sorted else ''}l{self.norm}"

    def prepare(self, rows: Float[Tensor, "rows d"]) -> Float[Tensor, "rows d"]:
        """Return observed rows in the form that is compared: float32, sorted where the matcher sorts."""
        rows = rows.float()
        return rows.sort(dim=1).values if self.sorted else rows

    def view(self, states: Float[Tensor, "c d"]) -> Float[Tensor, "c k"]:
        """Return candidates' states in the form that is compared: as they would have been observed."""
        return self.prepare(states if self.projection is None else self.projection(states))

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

    Raises:
        InputError: the name is unknown.
        NotApplicableError: the channel's stages cannot be combined.
    """
    projection = projection_of(info)
    if distance == "auto":
        return Matcher(1, info.columns_permuted is not None, projection)
    if distance not in DISTANCES:
        raise InputError(f"unknown distance {distance!r}; known are auto, {', '.join(DISTANCES)}")
    return Matcher(int(distance[-1]), distance.startswith("sorted"), projection)
