"""Detectors: areas under curves, clipping from honest tokens only, no suspicion of the better than honest."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiddenlab.defenses.verification.detect import (
    auc,
    detect,
    frontier,
    mmd_test,
    poolings,
    standardised,
    standardised_auc,
    weigh,
)
from hiddenlab.errors import InputError


def test_standardised_area_has_the_known_values() -> None:
    corners = np.array([0.0, 0.0, 1.0, 1.0])
    assert standardised(corners, np.array([0.0, 0.5, 0.5, 1.0])) == pytest.approx(0.7487437, abs=1e-7)
    assert standardised(corners, np.array([0.0, 1.0, 1.0, 1.0])) == pytest.approx(1)
    assert standardised(np.array([0.0, 1.0]), np.array([0.0, 1.0])) == pytest.approx(0.5)
    apart = np.arange(100.0), np.arange(200.0, 300.0)
    assert standardised_auc(*apart) == auc(*apart) == 1
    assert standardised_auc(*apart[::-1]) < 0.5


@settings(max_examples=50)
@given(st.integers(0, 10_000), st.integers(2, 60), st.integers(2, 60), st.booleans())
def test_standardised_area_equals_a_slow_one(seed: int, n: int, m: int, ties: bool) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=n), rng.normal(0.5, size=m)
    if ties:
        a, b = a.round(), b.round()
    slow = 0.0
    for one in b:
        slow += ((one > a).sum() + 0.5 * (one == a).sum()) / n
    assert auc(a, b) == pytest.approx(slow / m)
    assert standardised_auc(a, b, 1.0) == pytest.approx(slow / m)


def tokens(seed: int, rate: float, size: float, n: int = 4000) -> np.ndarray:
    rng = np.random.default_rng(seed)
    out = np.where(rng.random(n) < rate, rng.exponential(size, n), 0.0)
    out[rng.random(n) < rate / 50] = np.inf
    return out


def test_more_tokens_detect_better_and_honest_is_not_detected() -> None:
    honest, other, same = tokens(0, 0.02, 0.1), tokens(1, 0.1, 0.5), tokens(2, 0.02, 0.1)
    rng = np.random.default_rng(0)
    found = [detect(honest, other, size, rng).auc_low_fpr for size in (1, 30, 300)]
    assert found[0] < found[1] < found[2] and found[2] > 0.99
    assert detect(honest, same, 300, rng).auc_low_fpr < 0.9


def test_less_divergent_than_honest_is_not_suspicious() -> None:
    verdict = detect(tokens(0, 0.1, 0.5), tokens(1, 0.01, 0.1), 300, np.random.default_rng(0))
    assert verdict.auc == verdict.auc_low_fpr == 0.5 and verdict.pooling == ()


def test_poolings_come_from_finite_honest_scores() -> None:
    for (pooling,) in poolings(tokens(0, 0.1, 0.5)):
        assert np.isfinite(pooling(np.array([0.0, 1.0, np.inf]))).all()
        assert float(pooling(np.array([np.inf]))[0]) == pooling.top
    with pytest.raises(InputError):
        list(poolings(np.array([np.inf])))
    with pytest.raises(InputError, match="batch"):
        detect(np.zeros(10), np.ones(10), 6, np.random.default_rng(0))


def test_divergence_is_found_where_honest_tokens_never_diverge() -> None:
    verdict = detect(np.zeros(1000), tokens(1, 0.1, 0.5, 1000), 100, np.random.default_rng(0))
    assert verdict.auc_low_fpr > 0.99


@pytest.mark.parametrize("seed", range(5))
def test_weights_are_those_of_a_slow_logistic_regression(seed: int) -> None:
    """Plain gradient descent on the same loss, on standardised scores, until nothing moves."""
    rng = np.random.default_rng(seed)
    honest, other = rng.normal(size=(60, 3)) * [1, 5, 0.1], rng.normal(0.4, 1, size=(50, 3)) * [1, 5, 0.1]
    rows, is_other = np.concatenate([honest, other]), np.repeat([0.0, 1.0], [60, 50])
    x = (rows - rows.mean(0)) / rows.std(0)
    w, constant = np.zeros(3), 0.0
    for _ in range(20_000):
        wrong = 1 / (1 + np.exp(-(x @ w + constant))) - is_other
        w, constant = w - 0.01 * (x.T @ wrong + w), constant - 0.01 * wrong.sum()
    assert weigh(honest, other) == pytest.approx(w / rows.std(0), rel=1e-3)
    assert weigh(honest[:, :1], other[:, :1]) == pytest.approx([1.0])


def test_several_scores_detect_together_what_each_shows_in_part() -> None:
    rng = np.random.default_rng(0)
    shared = rng.normal(size=8000)  # noise that the two scores have in common
    honest = np.column_stack([shared[:4000], shared[:4000]]) + rng.normal(0, 0.1, (4000, 2))
    other = np.column_stack([shared[4000:] + 0.3, shared[4000:] + 0.05]) + rng.normal(0, 0.1, (4000, 2))
    alone, both = (
        detect(honest[:, :n].squeeze(), other[:, :n].squeeze(), 8, np.random.default_rng(1)).auc_low_fpr
        for n in (1, 2)
    )
    assert both > 0.95 > 0.8 > alone
    same = np.column_stack([honest[:, 0], other[:, 0]])
    # The second score diverges less than the honest ones': it is left out, and the first one says nothing.
    assert detect(same[:, ::-1], same, 4, np.random.default_rng(1)).auc_low_fpr < 0.6
    lower = detect(honest + 1, honest, 4, np.random.default_rng(1))
    assert (lower.auc, lower.pooling) == (0.5, ())


def test_mmd_finds_another_distribution_only() -> None:
    rng = np.random.default_rng(0)
    ours, same, other = (rng.integers(0, top, (60, 20)) for top in (4, 4, 6))
    assert mmd_test(ours, other, rng) < 0.01 < mmd_test(ours, same, rng)
    with pytest.raises(InputError):
        mmd_test(ours, other[:, :5], rng)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1))
def test_a_frontier_beats_every_point(points: list[tuple[int, int]]) -> None:
    kept = frontier([(float(a), float(b)) for a, b in points])
    for cost, value in points:
        assert any(c <= cost and v >= value for c, v in kept)
    assert all(a[0] < b[0] and a[1] < b[1] for a, b in pairwise(kept))


def test_poolings_can_be_chosen_by_kind() -> None:
    honest = np.abs(np.random.default_rng(0).normal(size=100_000))
    means, tails = poolings(honest, "mean"), poolings(honest, "tail")
    assert all(one.floor == 0 for (one,) in means) and all(one.floor > 0 for (one,) in tails)
    assert poolings(honest) == means + tails and poolings(honest, "plain") == means[-1:]
    with pytest.raises(InputError, match="pooling"):
        poolings(honest, "median")


def test_a_rare_fault_needs_the_tail() -> None:
    """One token in 200 far off, in tokens that differ among themselves: a mean over many does not show it."""
    rng = np.random.default_rng(1)
    honest, other = (np.where(rng.random(60_000) < 0.3, rng.exponential(2.0, 60_000), 0.0) for _ in range(2))
    other[rng.random(60_000) < 0.001] = 60.0
    tail, mean = (
        detect(honest, other, 3000, np.random.default_rng(2), which=which).auc_low_fpr for which in ("tail", "mean")
    )  # fmt: skip
    assert tail > mean + 0.05


def test_completions_of_a_prompt_are_compared_among_themselves() -> None:
    """Answers depend on prompts far more than on the provider: only by prompt does the difference show."""
    rng = np.random.default_rng(3)
    prompts = np.repeat(np.arange(40), 2).tolist()

    def answers(shift: float) -> Any:
        own = np.random.default_rng(4).integers(0, 50, size=(40, 12))[prompts]
        return np.where(rng.random(own.shape) < 0.5 + shift, own, rng.integers(50, 100, own.shape))

    together = mmd_test(answers(0), answers(0.4), np.random.default_rng(0))
    same = mmd_test(answers(0), answers(0), np.random.default_rng(0), prompts=prompts)
    other = mmd_test(answers(0), answers(0.4), np.random.default_rng(0), prompts=prompts)
    assert same > 0.02 and other < 0.01 < together
    with pytest.raises(InputError, match="at least two completions"):
        mmd_test(answers(0), answers(0), rng, prompts=list(range(80)))
