"""Hide states behind a secret linear map: an orthogonal one of their coordinates, or one that mixes their rows."""

import math
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from hiddenlab.errors import InputError
from hiddenlab.row_facts import with_extra_rows
from hiddenlab.secret_maps import with_map
from hiddenlab.stages import Stage
from hiddenlab.types import ObservationInfo
from hiddenlab.utils.random import alike, key_of, orthogonal

Rows = Float[Tensor, "rows d"]


class Orthogonal(Stage):
    """Turn the coordinates of all states by one secret orthogonal map, or each row by a map of its own.

    Maps are drawn evenly (Haar). The one map of a prompt belongs to the key, which may serve several prompts. A map of
    every row is always drawn anew.

    Args:
        fresh: ``prompt`` for one map of all rows of a prompt, ``row`` for a map of every row.
    """

    exact = True

    def __init__(self, fresh: Literal["prompt", "row"] = "prompt") -> None:
        self.fresh = fresh
        self.spec = "orthogonal" if fresh == "prompt" else f"orthogonal:fresh={fresh}"

    def states(
        self, states: Rows, generator: torch.Generator
    ) -> tuple[Rows, tuple[int, ...] | None, dict[str, Any]]:
        rows, width = states.shape
        if self.fresh == "prompt":
            drawn = orthogonal(width, key_of(generator, "map"))
            return states @ drawn.to(states), None, {"map": drawn}
        # An even map takes a row to an even direction. So does a mirror between the row and a direction that is drawn,
        # which takes no matrix for each row.
        plain = torch.nn.functional.normalize(states.double().cpu(), dim=1)
        drawn = torch.nn.functional.normalize(
            torch.randn(rows, width, generator=generator, dtype=torch.float64), dim=1
        )
        mirrors = torch.nn.functional.normalize(plain - drawn, dim=1)
        return _mirrored(states, mirrors), None, {"mirrors": mirrors}

    def undo(self, states: Rows, details: dict[str, Any]) -> Rows:
        if "mirrors" in details:
            return _mirrored(states, details["mirrors"])
        return states @ details["map"].T.to(states)

    def publish(self, info: ObservationInfo) -> ObservationInfo:
        return with_map(info, "columns" if self.fresh == "prompt" else "each-row")

    def __repr__(self) -> str:
        scope = "one for all rows of a prompt" if self.fresh == "prompt" else "each row its own"
        return (
            f"{self.spec}: the attacker sees turned rows in order and knows the model; "
            f"only the provider knows the maps ({scope})"
        )


def _mirrored(states: Rows, mirrors: Rows) -> Rows:
    """Return each row behind its own mirror, given by the unit normal; mirroring twice changes nothing."""
    exact, normals = states.double(), mirrors.to(states.device)
    return (exact - 2 * (exact * normals).sum(1, keepdim=True) * normals).to(states)


class RowMixing(Stage):
    """Release secret mixtures of the states, as many as there are states, in place of the states.

    The square matrix that mixes them belongs to the key: if it serves several prompts, those of one length have the
    same matrix. Shield rows are normal numbers, always drawn anew, that are mixed with the states, so that there are as
    many more mixtures (GELO, Belikov and Fedotov 2026, arXiv 2603.05035).

    Args:
        kind: ``gaussian`` (independent normal entries of variance 1 / rows) or ``orthogonal`` (drawn evenly).
        shield: how many shield rows. The attacker knows it.
        energy: their root mean square, in that of the states.

    Raises:
        InputError: ``shield`` is negative, or ``energy`` is not positive.
    """

    exact = True

    def __init__(
        self, kind: Literal["gaussian", "orthogonal"] = "gaussian", shield: int = 0, energy: float = 4.0
    ) -> None:
        if shield < 0 or not (math.isfinite(energy) and energy > 0):
            raise InputError(
                f"row-mixing needs shield of 0 or more and energy above 0, not {shield}, {energy}"
            )
        self.kind, self.adds, self.energy = kind, shield, float(energy)
        given = [f"kind={kind}"] * (kind != "gaussian") + [f"shield={shield}"] * bool(shield)
        given += [f"energy={self.energy!r}"] * (bool(shield) and self.energy != 4.0)
        self.spec = ":".join(["row-mixing", ",".join(given)][: 1 + bool(given)])

    def states(
        self, states: Rows, generator: torch.Generator
    ) -> tuple[Float[Tensor, "more d"], tuple[int, ...] | None, dict[str, Any]]:
        if self.adds:
            states = torch.cat([states, alike(states, self.adds, generator, self.energy).to(states)])
        rows = len(states)
        secret = key_of(generator, "mixing", rows)
        if self.kind == "orthogonal":
            drawn = orthogonal(rows, secret)
        else:
            drawn = torch.randn(rows, rows, generator=secret, dtype=torch.float64) / rows**0.5
        return drawn.to(states) @ states, None, {"mixing": drawn}

    def undo(self, states: Float[Tensor, "more d"], details: dict[str, Any]) -> Rows:
        solved = torch.linalg.solve(details["mixing"].to(states.device), states.double()).to(states)
        return solved[: len(solved) - self.adds]

    def publish(self, info: ObservationInfo) -> ObservationInfo:
        return with_map(with_extra_rows(info, self.adds) if self.adds else info, "rows")

    def __repr__(self) -> str:
        more = f" and {self.adds} shield rows" * bool(self.adds)
        return (
            f"{self.spec}: the attacker sees as many mixtures as there are states{more} and knows the model; "
            "only the provider knows how they were mixed"
        )
