"""Bounds on exfiltration: the check values, and simulations or sums where a formula can be wrong."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiddenlab.defenses.verification.bounds import (
    Risk,
    divergence,
    entropy,
    extractable,
    game_bound,
    hidden_seed_rate,
    hidden_seed_rate_printed,
    required_samples,
    response_rate,
    searching_rate,
    searching_risk,
    slowdown,
    support_rate,
    symmetric_capacity,
    uses_needed,
)
from hiddenlab.errors import InputError

shares = st.floats(0.0, 1.0)


# ---- Theorem 4.1


def test_rates_of_known_sets() -> None:
    assert support_rate([1, 2, 4, 1]) == 0.75
    assert support_rate([0, 1]) == 0.0
    assert response_rate(30.0, 100, 0.5) == 0.3
    assert response_rate(90.0, 100, 0.5) == 0.5
    with pytest.raises(InputError, match="at least one token"):
        support_rate([])
    with pytest.raises(InputError, match="whole number from 0"):
        support_rate([-1])
    with pytest.raises(InputError, match="tokens 0"):
        response_rate(1.0, 0, 1.0)


def test_few_responses_are_unsurprising() -> None:
    """The step of Theorem 4.1's proof: at most 2^(rate·tokens) responses have that surprisal."""
    tokens, rate = 6, 1.1
    step = {0: 0.7, 1: 0.2, 2: 0.1}
    responses = [1.0]
    for _ in range(tokens):
        responses = [p * q for p in responses for q in step.values()]
    support = sum(-math.log2(p) <= rate * tokens for p in responses)
    assert 1 < support <= 2 ** (rate * tokens)
    assert response_rate(math.log2(support), tokens, rate) < rate


# ---- Theorems 2.4 and 4.2


@pytest.mark.parametrize(
    ("free", "permitted", "printed", "corrected"),
    [
        (0.02, 2, 0.858559, 0.000289),
        (0.1, 4, 0.104538, 0.020414),
        (0.5, 4, 0.207519, 0.451205),
        (0.0, 2, 1.0, 0.0),
    ],
)
def test_theorem_4_2_printed_and_corrected(
    free: float, permitted: int, printed: float, corrected: float
) -> None:
    assert hidden_seed_rate_printed(free, permitted) == pytest.approx(printed, abs=1e-6)
    assert hidden_seed_rate(free, permitted) == pytest.approx(corrected, abs=1e-6)


def mutual_information(free: float, permitted: int) -> float:
    """Slow oracle: I(X; Y) of the proof's channel from its whole table, X uniform."""
    table = [[free * (x == y) + (1 - free) / permitted for y in range(permitted)] for x in range(permitted)]
    total = 0.0
    for row in table:
        total += sum(p * math.log2(p * permitted) for p in row if p > 0) / permitted
    return total


@settings(max_examples=60)
@given(free=shares, permitted=st.integers(2, 40))
def test_the_corrected_rate_is_the_channels(free: float, permitted: int) -> None:
    rate = hidden_seed_rate(free, permitted)
    assert rate == pytest.approx(mutual_information(free, permitted), abs=1e-9)
    assert -1e-12 <= rate <= searching_rate(free, 0.0, permitted) + 1e-9
    assert hidden_seed_rate(0.0, permitted) == pytest.approx(0, abs=1e-12)
    assert hidden_seed_rate(1.0, permitted) == pytest.approx(math.log2(permitted))


def test_capacity_and_uses() -> None:
    assert entropy(0.5) == 1.0 and entropy(0.0) == 0.0
    assert symmetric_capacity(2, 0.5) == 0.0 and symmetric_capacity(1, 0.3) == 0.0
    assert symmetric_capacity(2, 1.0) == 1.0  # always wrong is as good as always right
    assert symmetric_capacity(4, 0.75) == pytest.approx(0, abs=1e-12)
    assert uses_needed(100.0, 0.5) == 200.0
    assert uses_needed(1.0, 0.25, 0.5) == 0.0  # a bit that is wrong half of the time needs nothing
    assert uses_needed(1e13, 1.0, 0.01) == pytest.approx(0.99e13)
    assert uses_needed(3.0, 0.0) == math.inf and uses_needed(0.0, 0.0) == 0.0
    exact = (3 - entropy(0.1) - 0.1 * math.log2(7)) / 0.5
    assert uses_needed(3.0, 0.5, 0.1) == pytest.approx(exact)


# ---- Theorem 4.3 and Lemma 4.4


def test_searching() -> None:
    assert searching_rate(0.02, 0.01, 2) == pytest.approx(0.03)
    assert searching_rate(0.9, 0.5, 4) == 2.0
    assert searching_risk(0.1, 0.1, 100, 1) == 1.0 and searching_risk(0.1, 0.05, 100, 1) == 1.0
    assert searching_risk(0.02, 0.05, 1000, 1000) == pytest.approx(
        1000 * math.exp(-1000 * divergence(0.05, 0.02))
    )
    assert searching_risk(0.0, 0.1, 10, 5) == 0.0
    assert searching_risk(0.02, 0.05, 2000, 2000) < searching_risk(0.02, 0.05, 1000, 1000)


def test_the_lemma_bounds_a_search() -> None:
    rng = random.Random(1)
    free, wanted, tokens, queries, rounds = 0.2, 0.45, 20, 3, 3000
    found = sum(
        any(sum(rng.random() < free for _ in range(tokens)) >= wanted * tokens for _ in range(queries))
        for _ in range(rounds)
    )
    assert 0 < found / rounds <= searching_risk(free, wanted, tokens, queries)


def test_divergence() -> None:
    assert divergence(0.3, 0.3) == 0.0 and divergence(0.5, 0.0) == math.inf and divergence(0.0, 0.5) > 0.69
    assert divergence(1.0, 0.25) == pytest.approx(math.log(4))


# ---- the game


def test_the_games_bound() -> None:
    assert game_bound(120.0, 100.0, 10_000, 1000, 20, 0.01) == pytest.approx(0.9199690, abs=5e-8)
    assert game_bound(120.0, 100.0, 100, 100, 10, 0.0) == pytest.approx(2.0**-20)
    assert game_bound(100.0, 100.0, 100, 100, 10, 0.0) == 1.0
    assert game_bound(1e12, 1.0, 100, 100, 2, 0.05) == 1.0  # alarms are bound to be used up
    assert game_bound(1e12, 1.0, 10, 0, 0, 0.0) == 1.0
    with pytest.raises(InputError, match="each at most the next"):
        game_bound(1.0, 1.0, 10, 11, 0, 0.0)
    with pytest.raises(InputError, match="each at most the next"):
        game_bound(1.0, 1.0, 10, 5, 6, 0.0)


# ---- sampling


@pytest.mark.parametrize(
    ("share", "confidence", "needed", "draws"),
    [
        (0.01, 0.99, 1, 459), (0.01, 0.99, 100, 12_460), (0.01, 0.95, 1, 299),
        (0.001, 0.99, 1, 4603), (0.1, 0.99, 1000, 10_712),
    ],
)  # fmt: skip
def test_required_samples(share: float, confidence: float, needed: int, draws: int) -> None:
    assert required_samples(share, confidence, needed) == draws


def enough(n: int, share: float, needed: int) -> float:
    """P(Bin(n, share) ≥ needed), term by term."""
    return 1 - math.fsum(math.comb(n, i) * share**i * (1 - share) ** (n - i) for i in range(needed))


@settings(max_examples=60)
@given(share=st.floats(0.02, 0.99), confidence=st.floats(0.01, 0.995), needed=st.integers(1, 5))
def test_required_samples_is_the_least(share: float, confidence: float, needed: int) -> None:
    n = required_samples(share, confidence, needed)
    assert n >= needed and enough(n, share, needed) >= confidence - 1e-9
    assert n == needed or enough(n - 1, share, needed) < confidence + 1e-9


def test_sampling_edges() -> None:
    assert required_samples(1.0, 0.9, 7) == 7
    assert required_samples(1e-9, 0.99) == pytest.approx(math.log(0.01) / math.log1p(-1e-9), rel=1e-6)
    for wrong in (
        (0.0, 0.9, 1),
        (0.1, 0.0, 1),
        (0.1, 1.0, 1),
        (0.1, 0.9, 0),
        (math.nan, 0.9, 1),
        (1e-17, 0.9, 1),
    ):
        with pytest.raises(InputError):
            required_samples(*wrong)


# ---- three classes


def test_three_classes() -> None:
    vocabulary, cutoff = 151_936, 8
    classes = [(Risk.SAFE, 1), (Risk.SAFE, 2), (Risk.SUSPICIOUS, 0), (Risk.DANGEROUS, 0)]
    bits = sum(extractable(risk, size, cutoff, vocabulary) for risk, size in classes)
    assert bits == pytest.approx(21.2131, abs=5e-5)
    assert bits / (4 * math.log2(vocabulary)) == pytest.approx(0.308095, abs=5e-7)
    assert slowdown(bits / 4, vocabulary) == pytest.approx(1 / 0.308095, rel=1e-5)
    assert slowdown(0.0, vocabulary) == math.inf
    with pytest.raises(InputError, match="suspicious"):
        extractable(Risk.SUSPICIOUS, 1, 0, 10)


@pytest.mark.parametrize("wrong", [-0.1, 1.1, math.nan, math.inf])
def test_no_probabilities(wrong: float) -> None:
    for call in (
        lambda: entropy(wrong), lambda: divergence(0.5, wrong), lambda: hidden_seed_rate(wrong, 2),
        lambda: searching_rate(0.1, wrong, 2), lambda: searching_risk(0.1, wrong, 5, 5),
        lambda: symmetric_capacity(3, wrong), lambda: game_bound(1.0, 1.0, 2, 1, 1, wrong),
    ):  # fmt: skip
        with pytest.raises(InputError, match="between 0 and 1"):
            call()
    with pytest.raises(InputError, match="permitted 1"):
        hidden_seed_rate_printed(0.5, 1)
    with pytest.raises(InputError, match="finite"):
        uses_needed(math.inf, 1.0)
