"""Keys and values behind KV-Cloak's secret matrices: angles are found with a token, and tokens follow from them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hiddenlab.attacks.turned_blocks import TurnedBlocks
from hiddenlab.attacks.turned_blocks.angles import fit, outside_of, search, share_outside, turned
from hiddenlab.channels import Channel
from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.models import TruncatedModel, load_model
from hiddenlab.types import AttackResult
from hiddenlab.utils.random import orthogonal

LoadModel = Callable[..., TruncatedModel]
TOKENS = [5, 77, 3, 41, 200, 9, 8, 150, 60, 77, 12, 31]
WIDTH, HALF, ROWS = 24, 12, 6


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mixed(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return states, their secret angles, and what their turned and mixed rows do not span."""
    states, angles = drawn(ROWS, WIDTH, seed=seed), 6.0 * drawn(HALF, seed=seed + 1)
    mixing = orthogonal(ROWS, torch.Generator().manual_seed(seed)).float()
    return states, angles, outside_of(mixing @ turned(states, angles[None]))


@settings(max_examples=20)
@given(seed=st.integers(0, 10**6))
def test_turning_is_the_product_of_complex_numbers(seed: int) -> None:
    states, angles = drawn(3, WIDTH, seed=seed).double(), drawn(3, HALF, seed=seed + 1).double()
    slow = torch.complex(*states.chunk(2, 1)) * torch.polar(torch.ones_like(angles), angles)
    assert torch.allclose(turned(states, angles), torch.cat([slow.real, slow.imag], 1))


@pytest.mark.slow
@settings(max_examples=10)
@given(seed=st.integers(0, 10**6))
def test_a_token_of_the_block_has_angles_that_put_it_inside_and_another_has_none(seed: int) -> None:
    states, angles, outside = mixed(seed)
    beginnings = torch.Generator().manual_seed(seed)
    assert float(share_outside(turned(states, angles[None]), outside).max()) < 1e-10
    right, found = search(states, outside, 200, beginnings)
    wrong, _ = search(drawn(ROWS, WIDTH, seed=seed + 2), outside, 20, beginnings)
    assert float(wrong.min()) > 1e-5
    at = int(right.argmin())
    assert float(right[at]) < 1e-10
    # The space is the same for the opposite of a state, so that all angles may be off by half a turn.
    apart = (found[at] - angles) % math.pi
    assert float(torch.minimum(apart, math.pi - apart).max()) < 1e-2


@settings(max_examples=10)
@given(seed=st.integers(0, 10**6))
def test_several_known_states_mend_angles_that_are_nearly_right(seed: int) -> None:
    states, angles, outside = mixed(seed)
    left, better = fit(states[None], outside, angles[None] + 0.05 * drawn(1, HALF, seed=seed))
    assert float(left) < 1e-10
    assert float(share_outside(turned(states, better), outside).max()) < 1e-9


def attacked(
    model: TruncatedModel, spec: str, tokens: Sequence[int] = TOKENS, seed: int = 0, **options: Any
) -> AttackResult:
    observation, _ = Channel.parse([spec]).release(model, list(tokens), seed)
    return TurnedBlocks(**options).fit(observation.info, model).recover(observation)


@pytest.mark.parametrize(
    ("stream", "layer", "spec"),
    [
        pytest.param("v", 2, "kv-cloak:heads=2,block=4,mask=false", marks=pytest.mark.slow),
        ("k", 2, "kv-cloak:heads=2,block=4,mask=false"),
        pytest.param("kv", 2, "kv-cloak:heads=4,block=4", marks=pytest.mark.slow),
    ],
)
def test_a_cloaked_prompt_is_read_and_verified(
    tiny_model: LoadModel, stream: str, layer: int, spec: str
) -> None:
    result = attacked(tiny_model("llama", layer, stream), spec)
    assert list(result.ids) == TOKENS and all(token.verified for token in result.tokens)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_token_that_no_head_shows_is_found_by_the_next_one(tiny_model: LoadModel, seed: int) -> None:
    """With one head an offset hides one token of each block; nothing tells a last token that is hidden."""
    result = attacked(tiny_model("gemma3_text", 2, "v"), "kv-cloak:heads=1,block=4", seed=seed)
    read = list(result.ids)
    assert read[: len(TOKENS) - 1] == TOKENS[: len(read)][: len(TOKENS) - 1]
    assert [t.token for t in result.tokens if t.verified] == [
        want for want, t in zip(TOKENS, result.tokens, strict=False) if t.verified
    ]


@pytest.mark.slow
def test_keys_of_the_first_layer_are_placed_although_positions_turn_them_too(tiny_model: LoadModel) -> None:
    """The angles of a token that stands fourth fit it as the first one: only the block's end tells."""
    model = tiny_model("llama", 1, "k")
    for seed in range(3):
        result = attacked(model, "kv-cloak:heads=2,block=4,mask=false", seed=seed)
        assert list(result.ids) == TOKENS and all(token.verified for token in result.tokens)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "stream", "spec", "seed", "tokens"),
    [
        ("qwen3", "k", "kv-cloak:heads=2,block=2", 527160, [108, 108, 176, 263]),
        ("gemma3_text", "kv", "kv-cloak:heads=4,block=2", 995708, [290, 290, 290, 121]),
        ("gemma3_text", "kv", "kv-cloak:heads=4,block=2,mask=false", 657911, [34, 34, 206, 28, 116, 26, 288]),
        (
            "gemma3_text", "kv", "kv-cloak:heads=4,block=6,mask=false", 177631,
            [200, 200, 271, 271, 271, 200, 271, 200],
        ),
        ("gemma2", "kv", "kv-cloak:heads=4,block=3", 550708, [232, 178, 232, 178, 232]),
    ],
)  # fmt: skip
def test_tokens_that_repeat_at_the_first_layer_are_never_verified_at_a_wrong_place(
    tiny_model: LoadModel, architecture: str, stream: str, spec: str, seed: int, tokens: list[int]
) -> None:
    """Each head places the first block by itself: where a token repeats, heads may take different ones for it."""
    result = attacked(tiny_model(architecture, 1, stream), spec, tokens, seed)
    wrong = [t for want, t in zip(tokens, result.tokens, strict=False) if t.verified and t.token != want]
    assert not wrong
    if "mask=false" in spec:
        assert list(result.ids) == tokens and all(token.verified for token in result.tokens)


@pytest.mark.slow
def test_a_token_whose_state_another_has_too_is_not_verified(tiny: Callable[..., str]) -> None:
    model = load_model(tiny("llama", 5), 2, stream="v", device="cpu")
    with torch.no_grad():
        table = model.module.get_input_embeddings().weight
        table[88] = table[41]
    result = attacked(model, "kv-cloak:heads=2,block=4,mask=false")
    assert [t.verified for t in result.tokens] == [want != 41 for want in TOKENS]


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["kv-cloak:heads=2,block=4", "kv-cloak:heads=2,block=4,mask=false"])
def test_no_token_is_verified_at_the_place_of_an_equal_one(tiny_model: LoadModel, spec: str) -> None:
    """A head may find the angles of a token's other place, where all others seem to stand elsewhere as well."""
    model, prompt = tiny_model("llama", 1, "k"), [5, 77, 9, 77, 9, 5, 5, 9, 41, 9, 41, 41]
    for seed in range(12):
        result = attacked(model, spec, prompt, seed)
        wrong = [
            one.token
            for one, want in zip(result.tokens, prompt, strict=False)
            if one.token != want and one.verified
        ]
        assert not wrong


def test_values_of_the_first_layer_show_tokens_and_no_places(tiny_model: LoadModel) -> None:
    result = attacked(tiny_model("llama", 1, "v"), "kv-cloak:heads=2,block=4,mask=false")
    assert [sorted(result.ids[i : i + 4]) for i in (0, 4, 8)] == [
        sorted(TOKENS[i : i + 4]) for i in (0, 4, 8)
    ]
    assert not any(token.verified for token in result.tokens)


@pytest.mark.slow
def test_a_block_that_is_not_read_to_its_end_is_not_verified(tiny_model: LoadModel) -> None:
    model = tiny_model("llama", 2, "v")
    observation, _ = Channel.parse(["kv-cloak:heads=2,block=4,mask=false"]).release(model, TOKENS, 0)
    rows = observation.states.clone()
    rows[4:8] = drawn(4, rows.shape[1])
    result = TurnedBlocks().fit(observation.info, model).recover(replace(observation, states=rows))
    assert list(result.ids) == TOKENS[:4] and all(token.verified for token in result.tokens)
    assert "no token" in result.stop_reason
    rows[2] += drawn(rows.shape[1])
    assert not any(
        token.verified
        for token in TurnedBlocks()
        .fit(observation.info, model)
        .recover(replace(observation, states=rows))
        .tokens
    )


def test_what_it_cannot_read_is_refused(tiny_model: LoadModel) -> None:
    model = tiny_model("llama", 2, "v")
    for spec, message in (
        ("kv-cloak:heads=2,block=16", "leave too little"),
        ("identity", "and no others"),
    ):
        observation, _ = Channel.parse([spec]).release(model, TOKENS, 0)
        with pytest.raises(NotApplicableError, match=message):
            TurnedBlocks().fit(observation.info, model)
    info = Channel.parse(["kv-cloak:heads=2,block=4"]).release(model, TOKENS, 0)[0].info
    with pytest.raises(NotApplicableError, match="too coarse"):
        TurnedBlocks().fit(replace(info, provider_dtype="bfloat16"), model)
    for facts in (5, {"heads": 2}, {"heads": 0, "block": 4, "offset": True}):
        with pytest.raises(InputError, match="the fact turned_blocks"):
            TurnedBlocks().fit(replace(info, facts={**info.facts, "turned_blocks": facts}), model)
    with pytest.raises(InputError, match="at least 1"):
        TurnedBlocks(budget=0)
