"""Turn scores of tokens into a verdict on a provider: clip them, pool them over batches, and measure the detection.

All scores grow with divergence. One number per batch is compared with a threshold. So a detector is defined by its
clipping and pooling alone, and is measured by the area under its ROC curve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hiddenlab.errors import InputError

Scores = NDArray[np.float64]
PERCENTILES = (99.0, 99.9, 99.99, 99.999)
POOLINGS = ("best", "plain", "mean", "tail")
TAILS = ((99.999, 99.99), (99.9, 99.0))  # clipped at the first, zero below the second
UNIT = 1.0  # where scores are clipped if no honest token diverges at all
CHANCE = 0.5
MAX_FPR = 0.01
BATCHES = 500


def auc(honest: Scores, other: Scores) -> float:
    """Return the probability that another provider's statistic is above an honest one's; ties count half."""
    from scipy.stats import mannwhitneyu

    return float(mannwhitneyu(other, honest).statistic) / (len(honest) * len(other))


def standardised_auc(honest: Scores, other: Scores, max_fpr: float = MAX_FPR) -> float:
    """Return McClish's standardised area under the ROC curve up to a false positive rate: 0.5 is chance, 1 perfect.

    Raises:
        InputError: fewer than two statistics per side, or a rate outside (0, 1].
    """
    if min(len(honest), len(other)) < 2:
        raise InputError("an ROC curve needs at least two statistics a side")
    if not 0 < max_fpr <= 1:
        raise InputError(f"a false positive rate of {max_fpr} is not in (0, 1]")
    edges = np.unique(np.concatenate([honest, other]))[::-1]
    fpr, tpr = (
        np.concatenate([[0.0], (len(v) - np.searchsorted(np.sort(v), edges, "left")) / len(v)])
        for v in (honest, other)
    )
    return standardised(fpr, tpr, max_fpr)


def standardised(fpr: Scores, tpr: Scores, max_fpr: float = MAX_FPR) -> float:
    """Return McClish's standardised partial area of a curve, given by its corners.

    False positive rates have to ascend.
    """
    inside = fpr <= max_fpr
    x = np.append(fpr[inside], max_fpr)
    y = np.append(tpr[inside], np.interp(max_fpr, fpr, tpr))
    area = float(np.trapezoid(y, x))
    least, most = max_fpr**2 / 2, max_fpr
    return (1 + (area - least) / (most - least)) / 2


@dataclass(frozen=True)
class Pooling:
    """A rule that turns the token scores of a batch into one number: the mean after clipping.

    Attributes:
        top: value at which scores are clipped (not a percentile).
        floor: scores below this value count as 0.
    """

    top: float
    floor: float = 0.0

    def __call__(self, scores: Scores) -> Scores:
        """Return the scores of tokens as they enter the mean."""
        cut = np.minimum(scores, self.top)
        return np.where(scores >= self.floor, cut, 0.0) if self.floor else cut


def clipping(honest: Scores, top: float = 99.9, floor: float = 0.0) -> Pooling:
    """Fit a pooling to honest scores: clip at the percentile ``top``, and set scores below ``floor`` to zero.

    Infinite scores (filtered tokens) do not enter the percentiles and are clipped like the others.

    Raises:
        InputError: no honest score is finite.
    """
    finite = honest[np.isfinite(honest)]
    if not len(finite):
        raise InputError("no honest token has a finite score; nothing can be calibrated")
    # If no honest token diverges, the percentile is 0 and would clip away every difference.
    cut = float(np.percentile(finite, top)) or UNIT
    return Pooling(cut, float(np.percentile(finite, floor)) if floor else 0.0)


def poolings(honest: Scores, which: str = "best") -> list[tuple[Pooling, ...]]:
    """List the winsorized means and tail-focused means, each once (DiFR, section 5.2 and appendix E).

    Args:
        honest: scores of tokens, or rows of several scores each; every score has a pooling of its own.
        which: ``best`` for both kinds, ``mean`` for the first alone, ``tail`` for the second, ``plain`` for the mean
            that is hardly clipped (at the last of the percentiles; filtered tokens, which are infinite, need a limit).

    Raises:
        InputError: another kind.
    """
    if which not in POOLINGS:
        raise InputError(f"pooling {which!r}: one of {', '.join(POOLINGS)}")
    means, tails = [(top, 0.0) for top in PERCENTILES], list(TAILS)
    wanted = {"best": means + tails, "plain": means[-1:], "mean": means, "tail": tails}[which]
    return list(
        dict.fromkeys(
            tuple(clipping(column, top, floor) for column in _columns(honest)) for top, floor in wanted
        )
    )


def _columns(scores: Scores) -> Scores:
    """Return scores as rows, one for each score of a token."""
    return np.atleast_2d(scores.T)


@dataclass(frozen=True)
class Verdict:
    """The quality of a detector on held-out tokens.

    Attributes:
        auc, auc_low_fpr: the whole area, and the area up to 1 % false positives, standardised. Both are 0.5 where the
            provider diverges less than the honest ones, which is not suspicious.
        pooling: of each score of a token, chosen on the training half; none where the provider diverges less.
        batches: number of batches per side.
    """

    auc: float
    auc_low_fpr: float
    pooling: tuple[Pooling, ...]
    batches: int


def detect(
    honest: Scores, other: Scores, size: int, rng: np.random.Generator, batches: int = BATCHES, which: str = "best"
) -> Verdict:  # fmt: skip
    """Choose clipping and pooling on one half of the tokens and measure them on the other (DiFR, section 5.2).

    A token may have several scores, as TOPLOC's proofs have. Then a batch has a mean of each. A logistic regression on
    the training half weighs them, and scores in which the provider diverges less than the honest ones are left out.

    Args:
        honest, other: scores of tokens; with several a token, one row a token.
        size: tokens of a batch, drawn without replacement.
        rng: of all draws.
        batches: number of batches per side.
        which: poolings to choose from, see ``poolings``.

    Raises:
        InputError: a half has fewer tokens than a batch.
    """
    halves = [np.array_split(v[rng.permutation(len(v))], 2) for v in (honest, other)]
    if min(len(half) for pair in halves for half in pair) < size:
        raise InputError(f"half of the tokens are fewer than a batch of {size}")
    train, test = zip(*halves, strict=True)
    picks = [[_picks(len(half), size, batches, rng) for half in part] for part in (train, test)]

    def means(part: int, pooling: tuple[Pooling, ...]) -> list[Scores]:
        """Return the batches' means of each score, honest ones first."""
        sides = zip((train, test)[part], picks[part], strict=True)
        return [
            np.stack(
                [pool(column)[pick].mean(1) for pool, column in zip(pooling, _columns(half), strict=True)], 1
            )
            for half, pick in sides
        ]

    best: tuple[float, tuple[Pooling, ...], Scores] | None = None
    for pooling in poolings(train[0], which):
        more = [
            pool(b).mean() > pool(a).mean() for pool, a, b in zip(pooling, *map(_columns, train), strict=True)
        ]
        if not any(more):
            continue
        a, b = means(0, pooling)
        weights = np.zeros(len(more))
        weights[more] = weigh(a[:, more], b[:, more])
        value = standardised_auc(a @ weights, b @ weights)
        if best is None or value > best[0]:
            best = value, pooling, weights
    if best is None:
        return Verdict(CHANCE, CHANCE, (), batches)
    a, b = (side @ best[2] for side in means(1, best[1]))
    return Verdict(auc(a, b), standardised_auc(a, b), best[1], batches)


def weigh(honest: Scores, other: Scores) -> Scores:
    """Return weights of several scores, by a logistic regression that tells another provider's batches (DiFR, 5.2).

    Scores are standardised, and half the squared weights are added to the loss, as in the paper's code. A single score
    needs no regression: its weight is 1.

    Args:
        honest, other: one row a batch, one column a score.
    """
    from scipy.optimize import minimize
    from scipy.special import expit

    rows = np.concatenate([honest, other])
    if rows.shape[1] == 1:
        return np.ones(1)
    scale = rows.std(0)
    scale[scale == 0] = 1.0  # a score that is the same everywhere tells nothing
    x = np.column_stack([(rows - rows.mean(0)) / scale, np.ones(len(rows))])
    signs = np.repeat([-1.0, 1.0], [len(honest), len(other)])

    def loss(w: Scores) -> tuple[float, Scores]:
        inside = signs * (x @ w)
        slopes = w * ([1.0] * (len(w) - 1) + [0.0])  # the constant is free
        return (
            float(np.logaddexp(0, -inside).sum() + slopes @ slopes / 2),
            slopes - x.T @ (signs * expit(-inside)),
        )

    found = minimize(loss, np.zeros(x.shape[1]), jac=True, method="L-BFGS-B").x
    return np.asarray(found[:-1]) / scale


def _picks(tokens: int, size: int, batches: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw batches without replacement, many of them from one shuffling of all tokens."""
    each = tokens // size
    shuffled = [
        rng.permutation(tokens)[: each * size].reshape(each, size) for _ in range(-(-batches // each))
    ]
    return np.concatenate(shuffled)[:batches]


def mmd_test(
    ours: NDArray[np.int64],
    theirs: NDArray[np.int64],
    rng: np.random.Generator,
    permutations: int = 500,
    prompts: Sequence[int] | None = None,
) -> float:
    """Return the p-value of model equality testing: how often a random division of all completions differs as much.

    The statistic is the unbiased squared maximum mean discrepancy of token sequences with the Hamming kernel.

    Args:
        prompts: which prompt each of ``ours`` answers, and each of ``theirs`` in the same order; then only completions
            of one prompt are compared and exchanged, as model equality testing does. Each prompt needs two per side.

    Raises:
        InputError: fewer than two completions per side (of a prompt), or unequal lengths.
    """
    of = np.asarray([0] * len(ours) if prompts is None else prompts)
    theirs_of = np.zeros(len(theirs), dtype=int) if prompts is None else of
    counts = [int((side == prompt).sum()) for prompt in np.unique(of) for side in (of, theirs_of)]
    if min(counts, default=0) < 2 or len(of) != len(ours) or ours.shape[1:] != theirs.shape[1:]:
        raise InputError(
            "the MMD test needs at least two completions a side (of each prompt, where it is by prompt), of one length"
        )
    if len(theirs_of) != len(theirs):
        raise InputError(f"{len(theirs_of)} prompts for {len(theirs)} completions")
    kernels = [
        (
            _agreement(np.concatenate([ours[of == prompt], theirs[theirs_of == prompt]])),
            int((of == prompt).sum()),
        )
        for prompt in np.unique(of)
    ]
    observed = sum(_mmd(kernel, first) for kernel, first in kernels)
    above = 0
    for _ in range(permutations):
        orders = [rng.permutation(len(kernel)) for kernel, _ in kernels]
        value = sum(_mmd(k[np.ix_(o, o)], first) for (k, first), o in zip(kernels, orders, strict=True))
        above += value >= observed - 1e-12  # the margin keeps equal divisions in spite of rounding
    return (above + 1) / (permutations + 1)


def _agreement(rows: NDArray[np.int64]) -> Scores:
    return np.stack([(rows == row).mean(1) for row in rows])


def _mmd(kernel: Scores, first: int) -> float:
    a, b, cross = kernel[:first, :first], kernel[first:, first:], kernel[:first, first:]
    return _mean_of_pairs(a) + _mean_of_pairs(b) - 2 * float(cross.mean())


def _mean_of_pairs(kernel: Scores) -> float:
    """Return the mean over pairs of two rows, which leaves the diagonal out."""
    n = len(kernel)
    return float((kernel.sum() - np.trace(kernel)) / (n * (n - 1)))


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that no other beats: no other is both cheaper (first) and better (second)."""
    best: list[tuple[float, float]] = []
    for cost, value in sorted(points, key=lambda p: (p[0], -p[1])):
        if not best or value > best[-1][1]:
            best.append((cost, value))
    return best
