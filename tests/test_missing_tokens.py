"""Tokens that no row shows: found where the search can find them, honest where it cannot."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hiddenlab.attacks import missing_tokens
from hiddenlab.attacks.missing_tokens import MissingTokenSearch, gap
from hiddenlab.attacks.missing_tokens.clearance import BACK, CLEAR, Clearance, measure
from hiddenlab.attacks.missing_tokens.slots import moved, swapped
from hiddenlab.channels import Channel
from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.matching import screening
from hiddenlab.matching.distance import choose_matcher
from hiddenlab.models import TruncatedModel
from hiddenlab.testing import VOCABULARY
from hiddenlab.types import AttackResult, Observation
from tests.marks import slow_cases

LoadModel = Callable[..., TruncatedModel]

pytestmark = pytest.mark.usefixtures("small_probes")


def prompts_of(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def released(model: TruncatedModel, tokens: Sequence[int], *specs: str) -> Observation:
    return Channel.parse(specs).release(model, tokens, torch.Generator().manual_seed(1))[0]


def recover(model: TruncatedModel, tokens: Sequence[int], *specs: str, **options: Any) -> AttackResult:
    return (
        MissingTokenSearch(**options)
        .fit((shown := released(model, tokens, *specs)).info, model)
        .recover(shown)
    )


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", *slow_cases("gemma2", "gpt2")])
@pytest.mark.parametrize("layer", [1, *slow_cases(3)])
def test_one_missing_token_is_found_within_the_vocabulary(
    tiny_model: LoadModel, architecture: str, layer: int
) -> None:
    model = tiny_model(architecture, layer)
    for tokens in prompts_of(7):
        found = recover(model, tokens, "drop-rows:size=1,after=4", budget=40 * VOCABULARY)
        assert found.ids == tokens[:6]
        assert [one.row for one in found.tokens] == [0, 1, 2, 3, -1, 4]
        assert all(one.verified for one in found.tokens)
        assert (found.stop_reason, found.positions) == ("complete", None)
        assert found.evaluated_tokens > 0 and found.forward_calls > 0


@pytest.mark.slow
@pytest.mark.parametrize("proposal", ["probe", "probe+lm"])
def test_two_missing_tokens(tiny_model: LoadModel, proposal: str) -> None:
    model = tiny_model("llama", 1)
    for tokens in prompts_of(8, seed=3):
        found = recover(model, tokens, "drop-rows:size=2,after=5", proposal=proposal)
        assert found.ids == tokens[:8]
        assert all(one.verified for one in found.tokens)
        # Never more than Algorithm 3 would enumerate.
        assert found.tokens[-1].evaluated < VOCABULARY**3


@pytest.mark.slow
def test_gaps_before_the_first_row_and_between_all(tiny_model: LoadModel) -> None:
    (tokens,) = prompts_of(7, seed=5)
    found = recover(tiny_model("llama", 1), tokens, "shard:alpha=2,c=1,node=1")
    assert found.ids == tokens[:6]
    assert [one.row for one in found.tokens] == [-1, 0, -1, 1, -1, 2]


@pytest.mark.slow
def test_right_tokens_match_however_passes_round(tiny_model: LoadModel) -> None:
    """A threshold measured where both sides rounded alike is 0, and would have the whole budget spent."""
    model = tiny_model("llama", 3)
    for tokens in prompts_of(7):
        observation = released(model, tokens, "drop-rows:size=1,after=4")
        attack = MissingTokenSearch(budget=40 * VOCABULARY)
        prepared, _ = attack.matching.fit(observation.info, model).prepare(observation.info)
        attack.matching._prepared = replace(prepared, threshold=replace(prepared.threshold, floor=0.0))
        noise = torch.randn(observation.states.shape[1], generator=torch.Generator().manual_seed(0))
        rounded = observation.states[-1] * (1 + 2e-7 * noise)
        states = torch.cat([observation.states[:-1], rounded[None]])
        found = attack.fit((shown := replace(observation, states=states)).info, model).recover(shown)
        assert found.ids == tokens[:6] and all(one.verified for one in found.tokens)


def farthest(relative: Tensor) -> Tensor:
    """What a screen would choose whose distances say nothing."""
    return relative.argsort(descending=True)[:2]


@pytest.mark.slow
@pytest.mark.parametrize("safeguard", [None, "rounding", "second look"])
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_screened_in_a_faster_dtype_it_finds_the_same(
    tiny_model: LoadModel, monkeypatch: pytest.MonkeyPatch, size: int, safeguard: str | None
) -> None:
    """Also where the screen chooses badly: by what is within its rounding, or by a second look at the nearest."""
    monkeypatch.setattr(screening, "fast_dtype", lambda device: torch.bfloat16)
    monkeypatch.setattr(screening, "LEAST_LAYERS", 2)
    monkeypatch.setattr(screening, "LOAD_AFTER", 0)
    if safeguard is not None:
        monkeypatch.setattr(gap, "near_ones", farthest)
        monkeypatch.setattr(gap, "ROUNDING_FACTOR", 1e6 if safeguard == "rounding" else 0.0)
    model = tiny_model("llama", 2)
    for tokens in prompts_of(10, seed=2):
        observation = released(model, tokens, f"drop-rows:size={size},after=6")
        ran = []
        for screened in (False, True):
            attack = MissingTokenSearch(budget=40 * VOCABULARY, without="" if screened else "screening")
            attack.fit(observation.info, model)
            prepared, _ = attack.matching.fit(observation.info, model).prepare(observation.info)
            engines = [model] + ([prepared.screen.model] if prepared.screen is not None else [])
            before = [one.evaluated_tokens for one in engines]
            found = attack.fit(observation.info, model).recover(observation)
            ran.append([one.evaluated_tokens - b for one, b in zip(engines, before, strict=True)])
            assert found.evaluated_tokens == sum(ran[-1])
            assert found.ids == tokens[: 7 + size] and all(one.verified for one in found.tokens)
            assert (
                found.tokens[-1].distance < 1e-3
            )  # the model's own; a screen's is thousands of times as large
        assert len(ran[1]) == 2 and ran[1][1] > 0
        assert safeguard == "rounding" or ran[1][0] < ran[0][0]


@pytest.mark.slow
def test_a_budget_ends_the_search_and_says_so(tiny_model: LoadModel) -> None:
    (tokens,) = prompts_of(12)
    found = recover(tiny_model("llama", 3), tokens, "drop-rows:size=4,after=3", budget=5)
    assert len(found.ids) == 8 and found.ids[:3] == tokens[:3]
    assert [one.verified for one in found.tokens] == [True] * 3 + [False] * 5
    assert found.tokens[-1].evaluated == 5
    assert found.stop_reason == "1 of 1 row not matched within the budget"


@pytest.mark.slow
def test_long_gaps_get_what_the_priors_propose(
    tiny_model: LoadModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not searched, and their beam narrows; what stands between other rows is still found."""
    model = tiny_model("llama", 1)
    (tokens,) = prompts_of(14, seed=5)
    found = recover(model, tokens, "drop-rows:size=6,after=4", longest=5, sums=False)
    assert len(found.ids) == 11 and found.tokens[-1].evaluated <= 4 * 32
    assert not any(one.verified for one in found.tokens[4:])
    monkeypatch.setattr(gap, "BEAM_POSITIONS", 3 * 49)
    assert (
        recover(model, tokens, "drop-rows:size=6,after=4", longest=5, sums=False).tokens[-1].evaluated
        <= 4 * 3
    )
    found = recover(model, tokens, "drop-rows:size=1,after=4", longest=1)
    assert found.ids == tokens[:6] and found.tokens[-1].verified


@pytest.mark.slow
def test_behind_an_open_gap_few_are_tried(tiny_model: LoadModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """No row can match there: its own probe, and the nearest of a few, are all that can be had."""
    monkeypatch.setattr(missing_tokens, "BEHIND", 20)
    model = tiny_model("llama", 2)
    (tokens,) = prompts_of(26)
    found = recover(model, tokens, "shard:alpha=3,c=4,node=0", longest=5)
    assert [one.row for one in found.tokens] == [0, 1, 2, 3, *[-1] * 8, 4, 5, 6, 7, *[-1] * 8, 8, 9]
    assert all(one.verified for one in found.tokens[:4]) and not any(one.verified for one in found.tokens[4:])
    assert all(found.tokens[i].evaluated <= 4 * 32 for i in (13, 14, 15, 25))
    assert found.stop_reason == (
        "4 of 6 rows not matched within the budget; 2 of 6 gaps longer than 5, not searched"
    )


@pytest.mark.slow
@pytest.mark.parametrize("channel", ["hidden-perm", *slow_cases("project:count=16", "project:count=64")])
def test_rows_that_show_less_than_states(tiny_model: LoadModel, channel: str) -> None:
    model = tiny_model("llama", 2)
    (tokens,) = prompts_of(8)
    observation = released(model, tokens, channel, "drop-rows:size=1,after=4")
    attack = MissingTokenSearch(budget=40 * VOCABULARY)
    found = attack.fit(observation.info, model).recover(observation)
    assert found.ids == tokens[:6] and all(one.verified for one in found.tokens)
    assert attack._earlier is not None and attack._earlier[2].floor < 1e-4


@pytest.mark.slow
def test_the_same_seed_finds_the_same(tiny_model: LoadModel) -> None:
    (tokens,) = prompts_of(9)
    first, second = (
        recover(tiny_model("llama", 2), tokens, "drop-rows:size=2,after=4", budget=500) for _ in "ab"
    )
    assert first.tokens == second.tokens


@pytest.mark.slow
def test_rows_without_gaps_are_matched_as_ever(tiny_model: LoadModel) -> None:
    (tokens,) = prompts_of(10)
    assert recover(tiny_model("llama", 2), tokens).ids == tokens


@pytest.mark.slow
def test_what_it_cannot_use(tiny_model: LoadModel) -> None:
    (tokens,) = prompts_of(8)
    with pytest.raises(NotApplicableError, match="where each row stands"):
        recover(tiny_model("llama", 2), tokens, "seq-perm")
    with pytest.raises(NotApplicableError, match="layer 0 say nothing"):
        recover(tiny_model("llama", 0, "embed"), tokens, "drop-rows:size=1,after=2")
    with pytest.raises(InputError, match="budget, breadth and longest"):
        MissingTokenSearch(budget=0)
    with pytest.raises(InputError, match="cannot do without the probe"):
        MissingTokenSearch(proposal="lm")


@given(tokens=st.lists(st.integers(0, 9), min_size=1, max_size=6), data=st.data())
def test_rearrangements_keep_the_tokens(tokens: list[int], data: st.DataObject) -> None:
    i, j = (data.draw(st.integers(0, len(tokens) - 1)) for _ in "ij")
    given_ = tuple(tokens)
    assert sorted(moved(given_, i, j)) == sorted(swapped(given_, i, j)) == sorted(given_)
    assert moved(given_, i, j)[j] == given_[i]
    assert swapped(swapped(given_, i, j), i, j) == given_


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["dtype:bfloat16", *slow_cases("gaussian:sigma=0.1")])
def test_where_wrong_tokens_come_as_near_nothing_is_verified(tiny_model: LoadModel, noise: str) -> None:
    """A row that is coarse or noised is nearest to the right tokens at best; that proves none of them."""
    model = tiny_model("llama", 1)
    for tokens in prompts_of(9, seed=3):
        found = recover(model, tokens, noise, "drop-rows:size=2,after=6", budget=4 * VOCABULARY)
        assert not any(one.verified for one in found.tokens[6:])
        assert found.stop_reason in (
            "1 of 1 row matched where wrong tokens come as near as right ones",
            "1 of 1 row not matched within the budget",
        )


@given(
    floor=st.floats(0, 1e-2),
    wrong=st.lists(st.floats(0, 1), min_size=4, max_size=4),
    missing=st.integers(1, 70),
)
def test_what_proves_a_gap_is_out_of_reach_of_wrong_tokens(
    floor: float, wrong: list[float], missing: int
) -> None:
    measured = Clearance(floor, dict(zip(BACK, wrong, strict=True)), 1e-7)
    limit, nearest = measured.limit(missing, 0.0), min(wrong[: sum(back <= missing for back in BACK)])
    assert measured.clear(missing + 1) <= measured.clear(missing) == CLEAR * nearest
    if limit <= measured.clear(missing):
        assert floor <= limit <= CLEAR * nearest
    else:
        assert limit == measured.least > CLEAR * nearest


def test_in_full_precision_wrong_tokens_stay_out_of_reach(tiny_model: LoadModel) -> None:
    model = tiny_model("llama", 2)
    info = released(model, prompts_of(4)[0]).info
    measured = measure(model, info, choose_matcher("auto", info), 0)
    assert 0 <= measured.floor < 1e-5 < measured.clear(8)
    assert measure(model, info, choose_matcher("auto", info), 0) == measured
