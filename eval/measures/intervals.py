"""Estimate figures with 95 % confidence intervals over prompts."""

import math
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


def wilson(share: float, count: float) -> tuple[float, float]:
    """Return Wilson's interval of a share of ``count`` things; neither has to be a whole number of them."""
    z = float(stats.norm.ppf((1 + LEVEL) / 2))
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return (max(0.0, middle - half) if share > 0 else 0.0), (min(1.0, middle + half) if share < 1 else 1.0)


def share(hits: Sequence[bool]) -> Estimate:
    """Estimate a share of prompts, with Wilson's interval; resampling would call 50 of 50 certain."""
    found = sum(map(bool, hits)) / len(hits)
    return Estimate(found, *wilson(found, len(hits)), len(hits))


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
