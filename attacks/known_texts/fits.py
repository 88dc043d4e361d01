"""Fit from texts whose rows are known what a defense does to rows, and how to undo it.

A fit is learned from a part of what is known and judged by the other part: its error is how far undone rows are from
the states of the texts, relative to these. Nothing of a defense's code is read.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from scipy.optimize import linear_sum_assignment
from torch import Tensor

HELD_OUT = 5  # one of so many rows judges a fit of columns
ROUNDS = 3  # of matching rows by what was fitted of their columns, and fitting again
EXACT = 2e-4  # relative errors up to here are rounding
WEAK = 1e-5  # of the largest singular value: directions of known rows that hold no more are left out
SHARED_ROWS = 256  # of which an order of coordinates that all rows share is matched


@dataclass(frozen=True)
class Pair:
    """A known text: its plain states, and the rows that the defense released of it.

    Attributes:
        place: the position that each released row is taken to be of.
    """

    plain: Float[Tensor, "n d"]
    shown: Float[Tensor, "rows w"]
    place: Int[Tensor, " rows"]

    @property
    def behind(self) -> Float[Tensor, "rows d"]:
        """The plain state of each released row."""
        return self.plain[self.place]


@dataclass(frozen=True)
class Undo:
    """How to undo what a defense does to rows.

    Attributes:
        name: what was fitted, for a reader. rows: what each position is of the released rows; None where rows are not
            mixed. columns: the plain coordinates of released ones, with a last row that is added. orders: for each
            position the released coordinate that each plain one is; one position stands for all.
        basis: directions of plain states that undone rows show; None for all of them.
        error: of held-out rows, relative. order: the position of each released row, None where rows are in order;
            empty where the order differs from text to text.
    """

    name: str
    rows: Float[Tensor, "n rows"] | None = None
    columns: Float[Tensor, "w1 d"] | None = None
    orders: Int[Tensor, "n d"] | None = None
    basis: Float[Tensor, "k d"] | None = None
    error: float = float("inf")
    order: tuple[int, ...] | None = None

    @property
    def exact(self) -> bool:
        """Whether what is left of the defense is rounding."""
        return self.error <= EXACT

    def of(self, shown: Float[Tensor, "rows w"], place: Int[Tensor, " rows"]) -> Float[Tensor, "m d"]:
        """Return released rows undone, each still where it was released; mixed rows by position.

        Args:
            place: the position of each row.
        """
        shown = shown.double()
        if self.rows is not None:
            return self.rows @ shown
        if self.columns is not None:
            return shown @ self.columns[:-1] + self.columns[-1]
        if self.orders is not None:
            own = self.orders if len(self.orders) == 1 else self.orders[place]
            return shown.gather(1, own.expand(len(shown), -1))
        return shown

    def seen(self, plain: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """Return what undone rows show of plain states."""
        return plain if self.basis is None else plain @ self.basis.T @ self.basis


def best_fit(pairs: Sequence[Pair], rows: int) -> Undo:
    """Return the fit with the least error; ``Undo.name`` is empty where rows as they are come as near.

    Args:
        pairs: known texts, of at least one. rows: that were released of the prompt.
    """
    plain = Undo("", error=_error(Undo(""), _in_order(pairs)))
    best = plain
    for fit in _fits(pairs, rows):
        if fit.error < best.error / 2 or (best is not plain and fit.error < best.error):
            best = fit
        if best.exact and best is not plain:
            break
    return best


def _fits(pairs: Sequence[Pair], rows: int) -> Iterator[Undo]:
    """Yield fits, the cheapest first, since the first exact one ends the search."""
    alike = [pair for pair in pairs if len(pair.shown) == rows]
    if alike:
        yield from _of_rows(alike)
    ordered = _in_order(pairs)
    if ordered:
        yield from _of_columns(ordered)
    same = [pair for pair in ordered if len(pair.shown) == rows]
    if same:
        yield from _of_positions(same)
    if matched := _matched_by_norm(pairs):
        yield from _out_of_order(matched, rows)


def _in_order(pairs: Sequence[Pair]) -> list[Pair]:
    return [pair for pair in pairs if len(pair.shown) == len(pair.plain)]


def _error(undo: Undo, pairs: Sequence[Pair]) -> float:
    """Return the mean relative distance of undone rows to plain states; infinite without any."""
    apart = list[Tensor]()
    for pair in pairs:
        found = undo.of(pair.shown, pair.place)
        wanted = undo.seen(pair.plain if undo.rows is not None else pair.behind)
        if found.shape != wanted.shape:
            return float("inf")
        apart.append((found - wanted).norm(dim=1) / wanted.norm(dim=1).clamp(min=1e-30))
    return float(torch.cat(apart).mean()) if apart else float("inf")


# ---- rows that were mixed, or are in another order


def _of_rows(pairs: Sequence[Pair]) -> Iterator[Undo]:
    """Yield the matrix that gives a text's states from its released rows, the same for all texts of one length.

    It is fitted on half of the coordinates and judged on the other half. Rows that are no token's get no weight.
    """
    shown = torch.cat([pair.shown for pair in pairs], 1).double()
    plain = torch.cat([pair.plain for pair in pairs], 1).double()
    if len({len(pair.plain) for pair in pairs}) > 1 or plain.shape[1] != shown.shape[1]:
        return
    half = torch.arange(shown.shape[1]) % 2 == 0
    if int(half.sum()) < 2 * len(shown):
        return
    trial = _least_squares(shown[:, half].T, plain[:, half].T).T
    apart = (trial @ shown[:, ~half] - plain[:, ~half]).norm(dim=1) / plain[:, ~half].norm(dim=1).clamp(
        min=1e-30
    )
    yield Undo("mixed rows", rows=_least_squares(shown.T, plain.T).T, error=float(apart.mean()))


# ---- coordinates that were shuffled


def _of_positions(pairs: Sequence[Pair]) -> Iterator[Undo]:
    """Yield an order of coordinates for each position; one text judges what the others give, where there are several.

    A single text has nothing to judge by. It counts only where the same numbers are in each row, up to rounding.
    """
    if pairs[0].plain.shape[1] != pairs[0].shown.shape[1]:
        return
    judge = pairs[-1:]
    trial = Undo("an order of coordinates for each row", orders=_orders(pairs[:-1] or pairs))
    error = _error(trial, judge)
    if len(pairs) == 1 and error > EXACT:
        return
    yield replace(trial, orders=_orders(pairs) if len(pairs) > 1 else trial.orders, error=error)


def _orders(pairs: Sequence[Pair]) -> Int[Tensor, "n d"]:
    """Return for each position which released coordinate each plain one is."""
    by_place = [(pair.plain, pair.shown[pair.place.argsort()]) for pair in pairs]
    return torch.stack(
        [
            _order(
                torch.stack([plain[p] for plain, _ in by_place]),
                torch.stack([shown[p] for _, shown in by_place]),
            )
            for p in range(len(pairs[0].plain))
        ]
    )


def _order(plain: Float[Tensor, "t d"], shown: Float[Tensor, "t d"]) -> Int[Tensor, " d"]:
    """Return which released coordinate each plain one is, by their numbers in several rows."""
    plain, shown = plain.double(), shown.double()
    unit = plain.norm(dim=1, keepdim=True).clamp(min=1e-30)
    sorted_order = torch.empty(plain.shape[1], dtype=torch.long)
    sorted_order[plain[0].argsort()] = shown[0].argsort()
    if bool((((shown[:, sorted_order] - plain) / unit).norm(dim=1) <= EXACT).all()):
        return sorted_order
    apart = torch.cdist((plain / unit).T, (shown / unit).T)
    return torch.from_numpy(linear_sum_assignment(apart.square().numpy())[1])


# ---- coordinates behind one linear map


def _of_columns(pairs: Sequence[Pair]) -> Iterator[Undo]:
    """Yield maps of the coordinates that all rows share: an order, a turn, and any linear map with an offset.

    Every fifth row judges.
    """
    shown = torch.cat([pair.shown for pair in pairs]).double()
    plain = torch.cat([pair.behind for pair in pairs]).double()
    held = torch.arange(len(shown)) % HELD_OUT == HELD_OUT - 1
    if not bool(held.any()):
        return
    judge = [Pair(plain[held], shown[held], torch.arange(int(held.sum())))]
    fits: list[Callable[[Tensor, Tensor], Undo | None]] = [_turn, _linear]
    if plain.shape[1] == shown.shape[1]:
        fits.insert(0, _shared_order)
    for fit in fits:
        trial, whole = fit(plain[~held], shown[~held]), fit(plain, shown)
        if trial is not None and whole is not None:
            yield replace(whole, error=_error(trial, judge))


def _shared_order(plain: Float[Tensor, "m d"], shown: Float[Tensor, "m d"]) -> Undo:
    order = _order(plain[:SHARED_ROWS], shown[:SHARED_ROWS])
    return Undo("one order of coordinates", orders=order[None])


def _turn(plain: Float[Tensor, "m d"], shown: Float[Tensor, "m w"]) -> Undo | None:
    """Return the turn that takes released rows nearest to plain ones (Procrustes).

    Few rows determine it only between the spaces that both sides span. What lies outside is left out.
    """
    # Relative to its row every error counts alike: first rows are far longer than others.
    unit = plain.norm(dim=1, keepdim=True).clamp(min=1e-30)
    inside = min(_rank(plain / unit), _rank(shown / unit))
    left, _, right = torch.linalg.svd((shown / unit).T @ (plain / unit), full_matrices=False)
    turn = left[:, :inside] @ right[:inside]
    basis = None if inside == plain.shape[1] else right[:inside]
    return Undo("a turn of the coordinates", columns=_without_offset(turn), basis=basis)


def _linear(plain: Float[Tensor, "m d"], shown: Float[Tensor, "m w"]) -> Undo | None:
    """Return the linear map with an offset by least squares; None where rows do not determine it."""
    if len(shown) <= shown.shape[1] + 1:
        return None
    unit = plain.norm(dim=1, keepdim=True).clamp(min=1e-30)
    given = torch.cat([shown / unit, 1 / unit], 1)
    return Undo("a linear map of the coordinates", columns=_least_squares(given, plain / unit))


def _without_offset(matrix: Float[Tensor, "w d"]) -> Float[Tensor, "w1 d"]:
    return torch.cat([matrix, matrix.new_zeros(1, matrix.shape[1])])


def _rank(rows: Float[Tensor, "m d"]) -> int:
    sizes = torch.linalg.svdvals(rows)
    return int((sizes > WEAK * sizes[0]).sum())


def _least_squares(given: Float[Tensor, "m a"], wanted: Float[Tensor, "m b"]) -> Float[Tensor, "a b"]:
    left, sizes, right = torch.linalg.svd(given, full_matrices=False)
    kept = sizes > WEAK * sizes[0]
    return right[kept].T @ ((left[:, kept].T @ wanted) / sizes[kept, None])


# ---- rows out of order, with coordinates hidden as well


def _out_of_order(pairs: Sequence[Pair], rows: int) -> Iterator[Undo]:
    """Yield fits of coordinates where rows are shuffled too, with the order of rows where it is always the same."""
    alike = [pair for pair in pairs if len(pair.shown) == rows]
    orders = {tuple(pair.place.tolist()) for pair in alike}
    order = orders.pop() if len(orders) == 1 else ()
    if order:
        for fit in _of_positions(alike):
            yield replace(fit, order=order)
    for fit in _of_columns(pairs):
        for _ in range(ROUNDS if not fit.exact else 0):
            moved = [_matched(pair, fit) for pair in pairs]
            fit = min((fit, *_of_columns(moved)), key=lambda one: one.error)
            pairs = moved
        yield replace(fit, order=order)


def _matched_by_norm(pairs: Sequence[Pair]) -> list[Pair]:
    """Return known texts with the position of each row by its norm, which orders and turns of coordinates keep.

    Returns:
        Nothing where all rows are in order by their norms.
    """
    moved = []
    for pair in _in_order(pairs):
        lengths = [states.double().norm(dim=1).clamp(min=1e-30).log() for states in (pair.shown, pair.plain)]
        apart = (lengths[0][:, None] - lengths[1]).abs()
        moved.append(replace(pair, place=torch.from_numpy(linear_sum_assignment(apart.numpy())[1])))
    in_order = all(torch.equal(pair.place, torch.arange(len(pair.place))) for pair in moved)
    return [] if in_order else moved


def _matched(pair: Pair, fit: Undo) -> Pair:
    """Return a known text with the position of each row by what a fit of coordinates makes of it."""
    found = fit.of(pair.shown, pair.place)
    apart = torch.cdist(found, fit.seen(pair.plain.double()))
    return replace(pair, place=torch.from_numpy(linear_sum_assignment(apart.square().numpy())[1]))
