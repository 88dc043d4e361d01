"""Solve a substitution of tokens: find each symbol's token from how symbols follow each other (appendix I.3).

The attacker has symbols of many requests and text of its own. Frequencies, and how often a kind opens a text, give a
first guess. The most frequent kinds are then distinguished by their neighbours: shares of left and right neighbours
among those named so far are compared, and an optimal one-to-one assignment is made of the similarities. This is
repeated while the set of neighbours grows.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hiddenlab.types import Progress, silent

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class Statistics:
    """How often the most frequent kinds (at most ``size``) occur, start a text, and follow each other.

    Attributes:
        kinds: the symbols or tokens, most frequent first. counts, first: of each. follow: ``follow[i, j]`` counts
            kind j right behind kind i.
    """

    kinds: tuple[int, ...]
    counts: Matrix
    first: Matrix
    follow: Matrix

    @classmethod
    def of(cls, texts: Sequence[Sequence[int]], size: int) -> "Statistics":
        """Count kinds, first kinds and pairs of some texts."""
        counts = Counter(kind for text in texts for kind in text)
        kinds = tuple(kind for kind, _ in counts.most_common(size))
        place = {kind: i for i, kind in enumerate(kinds)}
        first, follow = np.zeros(len(kinds)), np.zeros((len(kinds), len(kinds)))
        for text in texts:
            if text and text[0] in place:
                first[place[text[0]]] += 1
            known = [place.get(kind, -1) for kind in text]
            for a, b in pairwise(known):
                if a >= 0 and b >= 0:
                    follow[a, b] += 1
        return cls(kinds, np.array([counts[kind] for kind in kinds], dtype=float), first, follow)


def solve(
    cipher: Sequence[Sequence[int]],
    reference: Sequence[Sequence[int]],
    *,
    size: int = 1500,
    seeds: dict[int, int] | None = None,
    rounds: int = 12,
    progress: Progress = silent,
) -> dict[int, int]:
    """Name the most frequent symbols.

    Args:
        cipher: symbols by request. reference: tokens of the attacker's own texts. size: how many symbols to name.
        seeds: known names, by symbol (a fixed opening of all requests, say). rounds: of refinement.

    Returns:
        Symbol to token, one to one.
    """
    a, b = Statistics.of(cipher, size), Statistics.of(reference, size)
    n = min(len(a.kinds), len(b.kinds))
    if not n:
        return {}
    fixed = _fixed(a, b, n, seeds or {})
    similar = _frequency_similarity(a, b, n)
    match = assign(similar, fixed)
    core = 64
    step = 0
    while True:
        size_now = min(core, n)
        for _ in range(rounds):
            step += 1
            progress("naming symbols", step, 0)
            moved = assign(_context_similarity(a, b, n, match, size_now) + 0.3 * similar, fixed)
            same = float((moved[:size_now] == match[:size_now]).mean())
            match = moved
            if same > 0.999:
                break
        if size_now == n:
            break
        core *= 2
    return {a.kinds[i]: b.kinds[int(j)] for i, j in enumerate(match)}


def _fixed(a: Statistics, b: Statistics, n: int, seeds: dict[int, int]) -> dict[int, int]:
    places = {kind: i for i, kind in enumerate(b.kinds[:n])}
    return {
        i: places[seeds[kind]]
        for i, kind in enumerate(a.kinds[:n])
        if kind in seeds and seeds[kind] in places
    }


def _frequency_similarity(a: Statistics, b: Statistics, n: int) -> Matrix:
    """Return minus the difference of log frequencies, and of how often a text begins with the kind."""
    total, other = a.counts.sum(), b.counts.sum()
    x, y = np.log(a.counts[:n] / total), np.log(b.counts[:n] / other)
    similarity = -np.abs(x[:, None] - y[None])
    opening = [np.sqrt(s.first[:n] / max(s.first.sum(), 1.0)) for s in (a, b)]
    return similarity - 4 * np.abs(opening[0][:, None] - opening[1][None])  # type: ignore[no-any-return]


def _context_similarity(a: Statistics, b: Statistics, n: int, match: NDArray[np.int64], core: int) -> Matrix:
    """Return the similarity of neighbours (Hellinger), counted over the most frequent kinds as they are named now."""
    named = match[:core]
    similarity = np.zeros((n, n))
    for left, right in (
        (a.follow[:n, :core], b.follow[:n][:, named]),
        (a.follow[:core, :n].T, b.follow[named][:, :n].T),
    ):
        x, y = (_root_shares(side, stats.counts[:n]) for side, stats in ((left, a), (right, b)))
        similarity += 5 * (x @ y.T)
    return similarity


def _root_shares(follow: Matrix, counts: Matrix) -> Matrix:
    shares = np.sqrt(follow / counts[:, None])
    rest = np.sqrt(np.clip(1 - (shares**2).sum(1, keepdims=True), 0, None))
    return np.concatenate([shares, rest], 1)


def assign(similar: Matrix, fixed: dict[int, int]) -> NDArray[np.int64]:
    """Return the best one-to-one assignment: the column of each row, -1 for rows that are left over.

    Args:
        fixed: columns of rows that are known.
    """
    from scipy.optimize import linear_sum_assignment

    if fixed:
        similar = similar.copy()
        for i, j in fixed.items():
            similar[i], similar[:, j] = -1e9, -1e9
            similar[i, j] = 1e9
    rows, columns = linear_sum_assignment(similar, maximize=True)
    assignment = np.full(len(similar), -1)
    assignment[rows] = columns
    return assignment
