"""Estimate figures with 95 % confidence intervals over prompts."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

LEVEL, RESAMPLES = 0.95, 2000


class Estimate(NamedTuple):
    """A figure, its 95 % interval and the number of prompts behind it."""

    value: float
    low: float
    high: float
    n: int


def share(hits: Sequence[bool]) -> Estimate:
    """Estimate a share of prompts, with Wilson's interval; resampling would call 50 of 50 certain."""
    result = stats.binomtest(sum(map(bool, hits)), len(hits)).proportion_ci(LEVEL, method="wilson")
    return Estimate(sum(map(bool, hits)) / len(hits), float(result.low), float(result.high), len(hits))


def mean(values: Sequence[float]) -> Estimate:
    """Estimate a mean over prompts, with a percentile bootstrap interval."""
    return ratio(values, [1.0] * len(values))


def ratio(above: Sequence[float], below: Sequence[float]) -> Estimate:
    """Estimate the ratio of two sums over prompts, with a percentile bootstrap interval of fixed draws."""
    a, b = np.asarray(above, dtype=float), np.asarray(below, dtype=float)
    picks = np.random.default_rng(0).integers(0, len(a), (RESAMPLES, len(a)))
    resampled = a[picks].sum(1) / b[picks].sum(1)
    low, high = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(float(a.sum() / b.sum()), float(low), float(high), len(a))
