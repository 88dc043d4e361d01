"""Turn the vectors that users sent into symbols, without any public model (Hidden No More, appendix I.3)."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.attacks.closed_weights.order import (
    common_order,
    match_sorted,
    nearest,
    number,
)
from hiddenlab.attacks.closed_weights.public_embedding import EXACT
from hiddenlab.attacks.closed_weights.view import ServerView, rows_of
from hiddenlab.errors import NotApplicableError

SEEN_FOR_ORDER = 512  # distinct vectors from which the order of coordinates is found


@dataclass(frozen=True)
class Rebuilt:
    """A tied private embedding, rebuilt in the users' order of coordinates.

    Attributes:
        table: vectors of all tokens of the permuted vocabulary. order: of the head's coordinates in the users'.
        symbols: by request, rows of ``table``. residual: largest difference of a request's row from its symbol's.
    """

    table: Float[Tensor, "v d"]
    order: Int[Tensor, " d"]
    symbols: tuple[tuple[int, ...], ...]
    residual: float


def rebuild_tied(view: ServerView) -> Rebuilt:
    """Rebuild a private embedding from the permuted output layer that it is tied to (appendix I.3).

    Each vector that a user sent has the values of one row of the head, in another order. The order is the same for all
    rows, and turns the head into the permuted vocabulary's embedding.

    Raises:
        NotApplicableError: the head is not tied to the embedding, or the requests have no common order.
    """
    rows, counts = rows_of(view.requests)
    places: dict[int, int] = {}
    for place, symbol in enumerate(number(rows)):
        places.setdefault(symbol, place)
    distinct = rows[list(places.values())[:SEEN_FOR_ORDER]]
    matched, distance, _ = match_sorted(distinct, view.head)
    norms = torch.linalg.vector_norm(distinct, dim=1)
    if bool((distance > EXACT * norms + _rounding(view)).any()):
        raise NotApplicableError(
            "the vectors that users send are not those of the output layer: the embedding is not tied. Symbols remain "
            "(the experiment 'substitution'), or a public model near it (a row of 'closed-weights')"
        )
    order = common_order(distinct, view.head[matched], rounding=view.step)
    table = view.head[:, order]
    symbols, residual = _nearest(rows, table)
    return Rebuilt(table, order, tuple(tuple(part.tolist()) for part in symbols.split(counts)), residual)


def _rounding(view: ServerView) -> float:
    """Return how far (L2) fixed-point rounding can move a vector, doubled to allow for float32."""
    return float(view.step * view.head.shape[1] ** 0.5)


def _nearest(
    rows: Float[Tensor, "rows d"], table: Float[Tensor, "v d"]
) -> tuple[Int[Tensor, " rows"], float]:
    """Return the table row with each row's exact values, or else the nearest; coordinates are in order here."""
    known: dict[Hashable, int] = {}
    for i, row in enumerate(table.numpy()):
        known.setdefault(row.tobytes(), i)
    indices = torch.tensor([known.get(row.tobytes(), -1) for row in rows.numpy()])
    if bool((other := indices < 0).any()):
        indices[other] = nearest(rows[other], table)[0]
    return indices, float((rows - table[indices]).abs().max())


def collect_untied(requests: Sequence[Float[Tensor, "_ d"]]) -> list[list[int]]:
    """Return a symbol for every token, from the requests alone (appendix I.3, not tied): equal vectors share one."""
    known: dict[Hashable, int] = {}
    return [number(rows, known) for rows in requests]
