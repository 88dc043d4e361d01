"""Permute released states: their rows, their coordinates, or both (Hidden No More, section 5.2)."""

from dataclasses import replace
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.stages import Stage
from hiddenlab.types import ObservationInfo
from hiddenlab.utils.random import key_of


class SequencePermutation(Stage):
    """Shuffle the rows of the states (Hidden No More, section 5.2.1).

    The order belongs to the key: if it serves several prompts, those of one length have the same order.
    """

    exact = True
    spec = "seq-perm"

    def states(
        self, states: Float[Tensor, "rows d"], generator: torch.Generator
    ) -> tuple[Float[Tensor, "rows d"], tuple[int, ...] | None, dict[str, Any]]:
        released, order = _shuffle_rows(states, generator)
        return released, order, {}

    def publish(self, info: ObservationInfo) -> ObservationInfo:
        return replace(info, rows_permuted=True)

    def __repr__(self) -> str:
        return (
            "seq-perm: the attacker sees every state and knows the model; only the provider knows the order"
        )


class HiddenPermutation(Stage):
    """Shuffle the coordinates of the states, with one permutation per row or one for all rows of a prompt.

    ``per-row`` is the paper's setting (section 5.2.2), as in PermLLM. ``shared`` uses one permutation for all rows, as
    STIP and Centaur do. Permutations belong to the key: if it serves several prompts, row r of each has the same one.

    Args:
        mode: ``per-row`` or ``shared``.
    """

    exact = True

    def __init__(self, mode: Literal["per-row", "shared"] = "per-row") -> None:
        self.mode = mode
        self.spec = "hidden-perm" if mode == "per-row" else f"hidden-perm:{mode}"

    def states(
        self, states: Float[Tensor, "rows d"], generator: torch.Generator
    ) -> tuple[Float[Tensor, "rows d"], tuple[int, ...] | None, dict[str, Any]]:
        columns = _draw_columns(states, generator, shared=self.mode == "shared")
        return _shuffle_columns(states, columns), None, {"columns": columns}

    def undo(self, states: Float[Tensor, "rows d"], details: dict[str, Any]) -> Float[Tensor, "rows d"]:
        return _restore_columns(states, details["columns"])

    def publish(self, info: ObservationInfo) -> ObservationInfo:
        return _with_columns(info, self.mode)

    def __repr__(self) -> str:
        scope = "each row its own" if self.mode == "per-row" else "one for all rows of a prompt"
        return (
            f"{self.spec}: the attacker sees rows in order with shuffled coordinates and knows the model; "
            f"only the provider knows the permutations ({scope})"
        )


class Factorized2D(Stage):
    """Shuffle the coordinates of each row with its own permutation, and then the rows (paper, section 5.2.3)."""

    exact = True
    spec = "2d-perm"

    def states(
        self, states: Float[Tensor, "rows d"], generator: torch.Generator
    ) -> tuple[Float[Tensor, "rows d"], tuple[int, ...] | None, dict[str, Any]]:
        columns = _draw_columns(states, generator, shared=False)
        released, order = _shuffle_rows(_shuffle_columns(states, columns), generator)
        return released, order, {"columns": columns}

    def undo(self, states: Float[Tensor, "rows d"], details: dict[str, Any]) -> Float[Tensor, "rows d"]:
        return _restore_columns(states, details["columns"])

    def publish(self, info: ObservationInfo) -> ObservationInfo:
        return replace(_with_columns(info, "per-row"), rows_permuted=True)

    def __repr__(self) -> str:
        return (
            "2d-perm: the attacker sees rows in unknown order with shuffled coordinates and knows the model; "
            "only the provider knows the permutations"
        )


def _shuffle_rows(
    states: Float[Tensor, "rows d"], generator: torch.Generator
) -> tuple[Float[Tensor, "rows d"], tuple[int, ...]]:
    count, drawn = len(states), key_of(generator, "rows", len(states))
    order = torch.randperm(count, generator=drawn, device=drawn.device)
    return states[order.to(states.device)], tuple(order.tolist())


def _draw_columns(
    states: Float[Tensor, "rows d"], generator: torch.Generator, *, shared: bool
) -> Int[Tensor, "rows d"]:
    """Draw permutations of coordinates: row r says which coordinate of row r is released at each place."""
    rows, width = states.shape
    # Sorting uniform numbers gives a uniform permutation up to ties, which double precision makes negligible.
    # Row after row: a key that serves several prompts gives row r the same numbers in each of them.
    drawn = key_of(generator, "columns")
    keys = torch.rand(1 if shared else rows, width, generator=drawn, device=drawn.device, dtype=torch.float64)
    return keys.argsort(dim=1).to(torch.int32).expand(rows, width)


def _shuffle_columns(
    states: Float[Tensor, "rows d"], columns: Int[Tensor, "rows d"]
) -> Float[Tensor, "rows d"]:
    return states.gather(1, columns.to(states.device, torch.int64))


def _restore_columns(
    states: Float[Tensor, "rows d"], columns: Int[Tensor, "rows d"]
) -> Float[Tensor, "rows d"]:
    return torch.empty_like(states).scatter_(1, columns.to(states.device, torch.int64), states)


def _with_columns(info: ObservationInfo, mode: str) -> ObservationInfo:
    """Note the permutation of coordinates in the public facts; ``per-row`` stays so when stages are combined."""
    return replace(info, columns_permuted="per-row" if info.columns_permuted == "per-row" else mode)
