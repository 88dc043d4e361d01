"""Distances: what they are, that sorting forgets the order of coordinates, and that small ones keep their digits."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from hiddenlab.errors import InputError
from hiddenlab.matching.distance import DISTANCES, Matcher, choose_matcher
from hiddenlab.matching.epsilon import near_tokens
from hiddenlab.types import ObservationInfo, Site

PUBLIC = ObservationInfo("m", (0.0,), Site(1))
MATCHERS = [choose_matcher(name, PUBLIC) for name in DISTANCES]


def slow(matcher: Matcher, one: torch.Tensor, other: torch.Tensor) -> float:
    """The definition, one pair of rows, in double precision."""
    a, b = one.double().tolist(), other.double().tolist()
    if matcher.sorted:
        a, b = sorted(a), sorted(b)
    differences = [abs(x - y) for x, y in zip(a, b, strict=True)]
    return sum(differences) if matcher.norm == 1 else sum(d * d for d in differences) ** 0.5


@pytest.mark.parametrize("matcher", MATCHERS, ids=DISTANCES)
@settings(max_examples=30)
@given(c=st.integers(1, 6), rows=st.integers(1, 6), width=st.integers(1, 9), seed=st.integers(0, 999))
def test_distances_are_their_definition(matcher: Matcher, c: int, rows: int, width: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    candidates, observed = (torch.randn(k, width, generator=generator) for k in (c, rows))
    a, b = matcher.prepare(candidates), matcher.prepare(observed)
    expected = torch.tensor([[slow(matcher, x, y) for y in observed] for x in candidates])
    assert torch.allclose(matcher.table(candidates=a, observed=b), expected, atol=1e-5)
    n = min(c, rows)
    pairs = matcher.pairs(candidates=a[:n], observed=b[:n])
    assert torch.allclose(pairs, expected.diagonal()[:n], atol=1e-5)
    # Norms are distances from the origin, whatever the order of coordinates.
    from_zero = matcher.pairs(candidates=torch.zeros_like(b), observed=b)
    assert torch.allclose(matcher.norms(observed), from_zero, atol=1e-5)


@pytest.mark.parametrize("name", DISTANCES)
def test_only_sorted_distances_forget_the_order_of_coordinates(name: str) -> None:
    matcher = choose_matcher(name, PUBLIC)
    states = torch.randn(5, 32)
    shuffled = torch.stack([row[torch.randperm(32)] for row in states])
    distance = matcher.pairs(candidates=matcher.prepare(states), observed=matcher.prepare(shuffled))
    assert bool((distance == 0).all() if matcher.sorted else (distance > 1).all())


@pytest.mark.parametrize("matcher", MATCHERS, ids=DISTANCES)
def test_small_distances_between_large_states_keep_their_digits(matcher: Matcher) -> None:
    """The GEMM form of L2 would answer 0 or several units here."""
    observed = 1000 + torch.arange(64 * 40.0).view(40, 64)
    candidates = observed.clone()
    candidates[:, 3] += 0.5
    table = matcher.table(candidates=matcher.prepare(candidates), observed=matcher.prepare(observed))
    assert torch.allclose(table.diagonal(), torch.full((40,), 0.5), atol=1e-3)


def test_preparing_leaves_the_observation_as_it_was() -> None:
    states = torch.randn(3, 8).bfloat16()
    before = states.clone()
    for matcher in MATCHERS:
        assert matcher.prepare(states).dtype == torch.float32
    assert torch.equal(states, before)


def test_no_row_has_norm_zero() -> None:
    for matcher in MATCHERS:
        assert bool((matcher.norms(torch.zeros(2, 4)) > 0).all())


@pytest.mark.parametrize("columns", [None, "per-row", "shared"])
def test_auto_is_l1_and_sorts_where_coordinates_were_permuted(columns: str | None) -> None:
    matcher = choose_matcher("auto", replace(PUBLIC, columns_permuted=columns))
    assert matcher.name == ("l1" if columns is None else "sorted-l1")


def test_names() -> None:
    assert tuple(matcher.name for matcher in MATCHERS) == DISTANCES
    # By hand, a distance is taken as it was given.
    assert choose_matcher("l2", replace(PUBLIC, columns_permuted="shared")) == Matcher(2, sorted=False)
    for wrong in ("l3", "L1", "cosine", ""):
        with pytest.raises(InputError, match=r"unknown distance.*sorted-l2"):
            choose_matcher(wrong, PUBLIC)


@pytest.mark.parametrize("alike", [1, 2, 40])
def test_near_tokens_are_nearest_but_for_twins(alike: int) -> None:
    """The few that are looked at first are enough, or the whole vocabulary is."""
    drawn = torch.Generator().manual_seed(alike)
    table = torch.randn(12, 6, generator=drawn).repeat_interleave(alike, dim=0)
    table += 1e-6 * torch.randn(table.shape, generator=drawn)
    tokens = torch.arange(0, len(table), alike)
    found = near_tokens(tokens, table, table.norm(dim=1), 3)
    for token, near in zip(tokens.tolist(), found.tolist(), strict=True):
        cosines = F.cosine_similarity(table[token][None], table, dim=1)
        # The scale of a candidate's own embedding does not matter, and one of the same group is the token's twin.
        others = [other for other in range(len(table)) if other // alike != token // alike]
        wanted = sorted((float(cosines[other]) for other in others), reverse=True)[:3]
        assert [float(cosines[other]) for other in near] == pytest.approx(wanted, abs=1e-5)
        assert token // alike not in [other // alike for other in near]
