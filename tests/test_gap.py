"""Tokens that no row shows: found where the search can find them, honest where it cannot."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attacks.gap import GapSearch, _moved, _swapped
from hiddenlab.channel import Channel
from hiddenlab.core import Observation, Recovery
from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.slice import Slice
from hiddenlab.testing import VOCABULARY

TinySlice = Callable[..., Slice]

pytestmark = pytest.mark.usefixtures("small_probes")


def prompts_of(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def released(slice: Slice, tokens: Sequence[int], *specs: str) -> Observation:
    return Channel.parse(specs).release(slice, tokens, torch.Generator().manual_seed(1))[0]


def recover(slice: Slice, tokens: Sequence[int], *specs: str, **options: Any) -> Recovery:
    return GapSearch(**options).recover(released(slice, tokens, *specs), slice, torch.Generator())


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("layer", [1, 3])
def test_one_missing_token_is_found_within_the_vocabulary(
    tiny_slice: TinySlice, architecture: str, layer: int
) -> None:
    slice = tiny_slice(architecture, layer)
    for tokens in prompts_of(8, 8):
        found = recover(slice, tokens, "gap:size=1,after=4", budget=20 * VOCABULARY)
        assert found.ids == tokens[:6]
        assert [one.row for one in found.tokens] == [0, 1, 2, 3, -1, 4]
        assert all(one.verified for one in found.tokens)
        assert (found.stop_reason, found.positions) == ("complete", None)
        assert found.evaluated_tokens > 0 and found.forward_calls > 0


@pytest.mark.parametrize("proposal", ["probe", "probe+lm"])
def test_two_missing_tokens(tiny_slice: TinySlice, proposal: str) -> None:
    slice = tiny_slice("llama", 1)
    for tokens in prompts_of(9, 9, seed=3):
        found = recover(slice, tokens, "gap:size=2,after=5", proposal=proposal)
        assert found.ids == tokens[:8]
        assert all(one.verified for one in found.tokens)
        # Never more than Algorithm 3 would enumerate.
        assert found.tokens[-1].evaluated < VOCABULARY**3


def test_gaps_before_the_first_row_and_between_all(tiny_slice: TinySlice) -> None:
    (tokens,) = prompts_of(7, seed=5)
    found = recover(tiny_slice("llama", 1), tokens, "shard:alpha=2,c=1,node=1")
    assert found.ids == tokens[:6]
    assert [one.row for one in found.tokens] == [-1, 0, -1, 1, -1, 2]


def test_a_budget_ends_the_search_and_says_so(tiny_slice: TinySlice) -> None:
    (tokens,) = prompts_of(12)
    found = recover(tiny_slice("llama", 3), tokens, "gap:size=4,after=3", budget=5)
    assert len(found.ids) == 8 and found.ids[:3] == tokens[:3]
    assert [one.verified for one in found.tokens] == [True] * 3 + [False] * 5
    assert found.tokens[-1].evaluated == 5
    assert found.stop_reason == "1 of 1 rows not matched within the budget"


def test_the_same_seed_finds_the_same(tiny_slice: TinySlice) -> None:
    (tokens,) = prompts_of(9)
    first, second = (recover(tiny_slice("llama", 2), tokens, "gap:size=2,after=4", budget=500) for _ in "ab")
    assert first.tokens == second.tokens


def test_rows_without_gaps_are_matched_as_ever(tiny_slice: TinySlice) -> None:
    (tokens,) = prompts_of(10)
    assert recover(tiny_slice("llama", 2), tokens).ids == tokens


def test_what_it_cannot_use(tiny_slice: TinySlice) -> None:
    (tokens,) = prompts_of(8)
    with pytest.raises(NotApplicableError, match="where each row stands"):
        recover(tiny_slice("llama", 2), tokens, "seq-perm")
    with pytest.raises(NotApplicableError, match="layer 0 say nothing"):
        recover(tiny_slice("llama", 0, "embed"), tokens, "gap:size=1,after=2")
    with pytest.raises(InputError, match="budget and breadth"):
        GapSearch(budget=0)
    with pytest.raises(InputError, match="cannot do without the probe"):
        GapSearch(proposal="lm")


@given(tokens=st.lists(st.integers(0, 9), min_size=1, max_size=6), data=st.data())
def test_rearrangements_keep_the_tokens(tokens: list[int], data: st.DataObject) -> None:
    i, j = (data.draw(st.integers(0, len(tokens) - 1)) for _ in "ij")
    given_ = tuple(tokens)
    assert sorted(_moved(given_, i, j)) == sorted(_swapped(given_, i, j)) == sorted(given_)
    assert _moved(given_, i, j)[j] == given_[i]
    assert _swapped(_swapped(given_, i, j), i, j) == given_
