"""Match vectors whose coordinates are in an unknown order, and find that order."""

from collections.abc import Hashable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.errors import NotApplicableError

CHUNK = 1024  # rows compared with a table at once
EXACT_FEW = 4  # nearest rows by the fast form that are compared exactly


def match_sorted(
    rows: Float[Tensor, "rows d"], table: Float[Tensor, "v d"]
) -> tuple[Int[Tensor, " rows"], Float[Tensor, " rows"], Float[Tensor, " rows"]]:
    """Return the table row whose sorted values are nearest (L2) to each row's; coordinates may be in any order.

    Returns:
        Its index, its distance, and how much farther the next one is.
    """
    return nearest(rows.float().sort(dim=1).values, table.float().sort(dim=1).values)


def nearest(
    rows: Float[Tensor, "rows d"], table: Float[Tensor, "v d"]
) -> tuple[Int[Tensor, " rows"], Float[Tensor, " rows"], Float[Tensor, " rows"]]:
    """Return the nearest table row (L2) of each row, coordinate by coordinate; see ``match_sorted``."""
    indices, distance, margin = [], [], []
    norms = table.square().sum(1)
    for chunk in rows.split(CHUNK):
        # The fast form loses the last digits, so the best few are compared again exactly.
        few = (norms - 2 * chunk @ table.T).topk(min(EXACT_FEW, len(table)), largest=False).indices
        exact = torch.linalg.vector_norm(table[few] - chunk[:, None], dim=2)
        values, places = exact.sort(dim=1)
        indices.append(few.gather(1, places[:, :1])[:, 0])
        distance.append(values[:, 0])
        margin.append(
            values[:, 1] - values[:, 0] if values.shape[1] > 1 else torch.full((len(chunk),), torch.inf)
        )
    return torch.cat(indices), torch.cat(distance), torch.cat(margin)


def likeliest_order(rows: Float[Tensor, "m d"], guessed: Float[Tensor, "m d"]) -> Int[Tensor, " d"]:
    """Return the order of coordinates in which rows agree best with guessed vectors, some of them wrong."""
    from scipy.optimize import linear_sum_assignment

    agreement = (rows - rows.mean(0)).T @ guessed
    _, order = linear_sum_assignment(agreement.double().numpy(), maximize=True)
    return torch.from_numpy(order).long()


def common_order(
    rows: Float[Tensor, "m d"], matched: Float[Tensor, "m d"], tolerance: float = 1e-5, rounding: float = 0.0
) -> Int[Tensor, " d"]:
    """Return the order of coordinates with ``rows[:, j] = matched[:, order[j]]`` for all rows.

    A coordinate is identified by its values in all rows; coordinates that agree everywhere are interchangeable.

    Args:
        tolerance: largest difference, relative to the rows' largest value. rounding: an absolute difference allowed in
            addition.

    Raises:
        NotApplicableError: there is no such order.
    """
    from scipy.optimize import linear_sum_assignment

    a, b = rows.double().T, matched.double().T
    cost = torch.cdist(a, b, p=1.0)
    _, order = linear_sum_assignment(cost.numpy())
    permutation = torch.from_numpy(order).long()
    worst = float((rows - matched[:, permutation]).abs().max())
    if worst > tolerance * max(float(rows.abs().max()), 1e-30) + rounding:
        raise NotApplicableError(
            "the vectors have no common order of coordinates; each request may have its own, or they are of "
            "another model"
        )
    return permutation


def number(rows: Float[Tensor, "rows d"], known: dict[Hashable, int] | None = None) -> list[int]:
    """Assign a number to each distinct row, whatever the order of its coordinates, by first appearance.

    Args:
        known: numbers given before; extended.
    """
    known = {} if known is None else known
    values = rows.float().sort(dim=1).values.numpy()
    return [known.setdefault(row.tobytes(), len(known)) for row in values]
