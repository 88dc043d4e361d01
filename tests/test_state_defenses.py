"""Defenses on released rows: rounding, noise, low rank, decoys, shields; what is public of them, who reads them."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hiddenlab import registry
from hiddenlab.attacks.vocab_match import VocabMatch
from hiddenlab.channels import Channel, in_order
from hiddenlab.defenses.decoys import Decoys
from hiddenlab.defenses.quantize import HALVES, WHOLE_NUMBERS, RoundStates
from hiddenlab.diagnosis import diagnose
from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.eval.measures.attack import utility
from hiddenlab.matching.distance import choose_matcher
from hiddenlab.matching.row_space import RowSpace
from hiddenlab.models import TruncatedModel
from hiddenlab.row_facts import extra_rows, rank_of
from hiddenlab.stages import changes_states
from hiddenlab.types import AttackResult, GroundTruth, Observation, ObservationInfo, Site

LoadModel = Callable[..., TruncatedModel]
TOKENS = [5, 77, 3, 3, 200, 41, 8, 150, 5, 77]
PUBLIC = ObservationInfo("m", (0.0,), Site(1))
# Each with the facts that it publishes.
SPECS = {
    "round:int4,stochastic=true": {},
    "truncated-svd:rank=4": {"row_space": 4},
    "truncated-svd:share=0.5": {"row_space": None},
    "output-noise:sigma=0.05": {"output_noise": [{"sigma": 0.05, "scale": "row", "kind": "gaussian"}]},
    "output-noise:sigma=0.5,scale=none,kind=laplace": {
        "output_noise": [{"sigma": 0.5, "scale": "none", "kind": "laplace"}]
    },
    "sparsify:keep=0.1": {"kept_share": 0.1},
    "decoys:count=4": {"extra_rows": 4},
    "decoys:count=4,kind=gaussian": {"extra_rows": 4},
    "row-mixing:shield=3": {"extra_rows": 3, "secret_map": ["rows"]},
}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed))


def release(model: TruncatedModel, *specs: str, seed: int = 0) -> tuple[Observation, GroundTruth]:
    return Channel.parse(specs).release(model, TOKENS, seed)


def attacked(model: TruncatedModel, *specs: str, seed: int = 0) -> AttackResult:
    observation, _ = release(model, *specs, seed=seed)
    return VocabMatch().fit(observation.info, model).recover(observation)


# ---- what is released, and what is public


@pytest.mark.parametrize("spec", SPECS)
def test_a_release_repeats_by_its_seed_and_says_what_is_public(tiny_model: LoadModel, spec: str) -> None:
    model = tiny_model("llama", 2)
    observation, secret = release(model, spec, seed=1)
    again, _ = release(model, spec, seed=1)
    assert torch.equal(observation.states, again.states) and observation.info == again.info
    assert observation.info.facts == SPECS[spec] and observation.info.noise_sigma is None
    assert len(observation.states) == len(TOKENS) + extra_rows(observation.info)
    assert secret.tokens == tuple(TOKENS) and observation.info.positions is None
    other, _ = release(model, spec, seed=2)
    assert torch.equal(observation.states, other.states) == spec.startswith(("truncated-svd", "sparsify"))
    (stage,) = Channel.parse([spec]).defenses
    assert Channel.parse([stage.spec]).published(PUBLIC).facts == SPECS[spec]


def test_several_layers_at_once_release_the_same_decoys(tiny_model: LoadModel) -> None:
    model, channel = tiny_model("llama", 2), Channel.parse(["gaussian:sigma=0.01", "decoys:count=4"])
    layers = channel.release_layers(model, [1, 2], [TOKENS], seeded(3))
    (alone, secret), *_ = channel.release_batch(model, [TOKENS], seeded(3))
    (first, hidden), (last, _) = (at[0] for at in layers)
    assert torch.allclose(last.states, alone.states, atol=1e-4)
    assert hidden.row_order == secret.row_order and not torch.equal(first.states, last.states)


def numbers_of(dtype: str) -> Tensor:
    """Every finite number of a format, ascending."""
    if dtype in WHOLE_NUMBERS:
        return torch.arange(-WHOLE_NUMBERS[dtype], WHOLE_NUMBERS[dtype] + 1.0)
    kind = getattr(torch, dtype)
    bits, whole = (16, torch.int16) if dtype in HALVES else (8, torch.uint8)
    every = torch.arange(2**bits, dtype=torch.int32).to(whole).view(kind).float()
    return every[every.isfinite()].unique()


@pytest.mark.parametrize("dtype", [*HALVES, "float8_e4m3fn", "float8_e5m2", "int8", "int4"])
@settings(max_examples=25)
@given(size=st.floats(1e-4, 5), seed=st.integers(0, 999))
@example(size=0.9851381496166478, seed=468)  # of it one number is exact in float16
def test_stochastic_rounding_takes_a_neighbour_and_is_right_on_average(
    dtype: str, size: float, seed: int
) -> None:
    numbers, count = size * drawn(16, seed=seed), 500
    stage = RoundStates(dtype, "none", stochastic=True)  # type: ignore[arg-type]
    rounded = stage.states(numbers.repeat(count, 1), seeded(seed))[0]
    grid = numbers_of(dtype)
    inside = numbers.clamp(grid[0], grid[-1])
    above = torch.searchsorted(grid, inside).clamp(1, len(grid) - 1)
    low, high = grid[above - 1], grid[above]
    assert bool(((rounded == low) | (rounded == high)).all())
    error = (rounded.double().mean(0) - inside).abs()
    assert bool((error <= 6 * (high - low) / math.sqrt(4 * count)).all())


def test_four_bits_are_fifteen_numbers(tiny_model: LoadModel) -> None:
    observation, _ = release(tiny_model("llama", 2), "round:int4")
    assert max(len(row.unique()) for row in observation.states) <= 15
    assert Channel.parse(["round:int4"]).specs == ("round:dtype=int4,scale=row",)


@pytest.mark.parametrize("dtype", HALVES)
def test_sixteen_bits_are_the_nearest_numbers_without_a_scale(tiny_model: LoadModel, dtype: str) -> None:
    model = tiny_model("llama", 2)
    observation, _ = release(model, "row-mixing", f"round:{dtype}")
    mixed, _ = release(model, "row-mixing")
    assert torch.equal(observation.states, mixed.states.to(getattr(torch, dtype)).float())
    assert Channel.parse([f"round:{dtype}"]).specs == (f"round:dtype={dtype},scale=none",)
    with pytest.raises(InputError, match="leave out 'scale'"):
        Channel.parse([f"round:{dtype},scale=row"])


@pytest.mark.parametrize("kind", ["gaussian", "laplace"])
def test_noise_on_rows_has_the_strength_that_is_public(kind: str) -> None:
    (relative,) = Channel.parse([f"output-noise:sigma=0.1,kind={kind}"]).defenses
    (absolute,) = Channel.parse([f"output-noise:sigma=0.1,scale=none,kind={kind}"]).defenses
    rows = drawn(50, 400) * torch.logspace(-2, 2, 50)[:, None]
    added = (relative.states(rows, seeded())[0] - rows) / rows.square().mean(1, keepdim=True).sqrt()
    assert float(added.std()) == pytest.approx(0.1, rel=0.03) and abs(float(added.mean())) < 0.002
    rest = absolute.states(rows, seeded())[0] - rows
    assert float(rest.std()) == pytest.approx(0.1, rel=0.03)
    # Fourth moments tell the two apart: 3 of a Gaussian, 6 of Laplace.
    assert float((added / 0.1).pow(4).mean()) == pytest.approx(3 if kind == "gaussian" else 6, rel=0.15)
    for wrong in ("0", "-1", "inf"):
        with pytest.raises(InputError, match="output-noise"):
            Channel.parse([f"output-noise:sigma={wrong}"])


@settings(max_examples=40)
@given(rows=st.integers(1, 9), rank=st.integers(1, 10), seed=st.integers(0, 999))
def test_a_truncated_svd_is_the_best_of_its_rank_and_shows_its_space(rows: int, rank: int, seed: int) -> None:
    states = drawn(rows, 12, seed=seed)
    (stage,) = Channel.parse([f"truncated-svd:rank={rank}"]).defenses
    released = stage.states(states, seeded())[0]
    sizes = torch.linalg.svdvals(states.double())
    assert float((released - states).norm()) == pytest.approx(float(sizes[rank:].norm()), abs=1e-4)
    assert torch.allclose(RowSpace.of(released, rank)(states), released, atol=1e-4)
    share = Channel.parse([f"truncated-svd:share={rank / 10}"]).defenses[0].states(states, seeded())[0]
    assert int(torch.linalg.matrix_rank(share, rtol=1e-4)) == max(1, math.ceil(rank / 10 * rows - 1e-9))


@settings(max_examples=30)
@given(keep=st.floats(0.01, 1), seed=st.integers(0, 999))
def test_sparsified_states_keep_their_largest_numbers(keep: float, seed: int) -> None:
    states = drawn(4, 20, seed=seed)
    (stage,) = Channel.parse([f"sparsify:keep={keep}"]).defenses
    released = stage.states(states, seeded())[0]
    left = released != 0
    assert bool((left.sum(1) == math.ceil(keep * 20)).all()) and torch.equal(released[left], states[left])
    assert bool((states.abs().where(left, math.inf).amin(1) >= states.abs().where(~left, 0).amax(1)).all())


@settings(max_examples=10)
@given(count=st.integers(1, 5), shuffled=st.booleans(), seed=st.integers(0, 999))
def test_decoys_stand_among_the_rows_and_the_truth_tells_them(
    tiny_model: LoadModel, count: int, shuffled: bool, seed: int
) -> None:
    model = tiny_model("llama", 2)
    specs = [f"decoys:count={count},kind=gaussian", *["seq-perm"] * shuffled]
    observation, secret = release(model, *specs, seed=seed)
    plain = model.encode(torch.tensor(TOKENS))
    assert secret.row_order is not None and secret.row_order.count(-1) == count
    for row, place in zip(observation.states, secret.row_order, strict=True):
        assert place < 0 or torch.equal(row, plain[place])
    assert torch.equal(in_order(observation, secret), plain)
    kept = [place for place in secret.row_order if place >= 0]
    assert (kept == sorted(kept)) or shuffled


def test_text_decoys_are_states_of_other_texts(tiny_model: LoadModel) -> None:
    """Each is the last state of a text no longer than the prompt, noised at its input like the prompt."""
    model = tiny_model("llama", 2)
    stage = Decoys(3)
    texts = stage.texts(model, len(TOKENS), seeded(1))
    assert len(texts) == 3 and all(1 <= len(text) <= len(TOKENS) for text in texts)
    others = [model.encode(torch.tensor(text)) for text in texts]
    released, order, _ = stage.mixed(model.encode(torch.tensor(TOKENS)), others, seeded(2))
    decoys = released[[place < 0 for place in order]]
    assert torch.equal(decoys, torch.stack([other[-1] for other in others]))


def test_stages_that_contradict_decoys_are_refused() -> None:
    for specs in (
        ["decoys:count=2", "drop-rows:size=2"], ["seq-perm", "decoys:count=2"], ["decoys:count=2", "decoys:count=2"],
    ):  # fmt: skip
        with pytest.raises(InputError, match="decoys"):
            Channel.parse(specs)
    for spec in (
        "sparsify:keep=0",
        "sparsify:keep=1.5",
        "decoys:count=0",
        "row-mixing:shield=-1",
        "row-mixing:shield=2,energy=0",
        "truncated-svd",
    ):
        with pytest.raises(InputError):
            Channel.parse([spec])
    for spec in ("truncated-svd:rank=0", "truncated-svd:share=1.5", "truncated-svd:rank=2,share=0.5"):
        with pytest.raises(InputError, match="truncated-svd"):
            Channel.parse([spec])
    Channel.parse(["gaussian:sigma=0.1", "decoys:count=2", "seq-perm", "round:int8"])


@pytest.mark.parametrize("spec", ["decoys:count=2", "row-mixing:shield=2"])
def test_the_models_own_answers_are_not_measured_behind_added_rows(
    tiny: Callable[..., str], spec: str
) -> None:
    assert all(map(changes_states, Channel.parse([spec]).defenses))
    asked = {"model": tiny("llama", tokenizer=True), "device": "cpu", "dtype": "float32", "defense": [spec]}
    with pytest.raises(NotApplicableError, match="no token's"):
        utility(asked | {"prompts": "builtin", "limit": 1, "max_tokens": 8, "seed": 0}, Path())


def test_what_is_public_of_rows_is_checked(tiny_model: LoadModel) -> None:
    for wrong in (-1, True, "3", 1.5):
        with pytest.raises(InputError, match="extra_rows"):
            extra_rows(ObservationInfo("m", (), Site(1), facts={"extra_rows": wrong}))
    for wrong in (0, 2, "3"):
        with pytest.raises(InputError, match="kept_share"):
            choose_matcher("auto", ObservationInfo("m", (), Site(1), facts={"kept_share": wrong}))
    for wrong in (0, True, "3"):
        with pytest.raises(InputError, match="row_space"):
            rank_of({"row_space": wrong})
    model = tiny_model("llama", 2)
    rows = model.encode(torch.tensor(TOKENS))
    none_left = Observation.from_states(rows, model, facts={"extra_rows": len(rows)})
    with pytest.raises(InputError, match="no token is left"):
        VocabMatch().fit(none_left.info, model).recover(none_left)
    # Rows of another prompt's length do not fit the space any more: decoys behind it take the fact away.
    assert not choose_matcher("auto", Channel.parse(["decoys:count=1"]).published(PUBLIC)).in_row_space


# ---- attacks


@pytest.mark.parametrize(
    "specs",
    [
        *(
            pytest.param((spec,), marks=pytest.mark.slow)
            for spec in (
                "round:int4", "round:int4,stochastic=true", "truncated-svd:share=0.4", "output-noise:sigma=0.05",
                "sparsify:keep=0.1",
            )
        ),
        ("truncated-svd:rank=4",), ("decoys:count=4",), ("decoys:count=4", "seq-perm"),
        ("decoys:count=6,kind=gaussian", "seq-perm"), ("row-mixing:shield=3",),
        ("row-mixing:kind=orthogonal,shield=6,energy=10",), ("decoys:count=3", "row-mixing"),
        pytest.param(("truncated-svd:rank=4", "seq-perm"), marks=pytest.mark.slow),
        pytest.param(("sparsify:keep=0.2", "hidden-perm"), marks=pytest.mark.slow),
    ],
    ids="+".join,
)  # fmt: skip
def test_vocabulary_matching_reads_through(tiny_model: LoadModel, specs: tuple[str, ...]) -> None:
    result = attacked(tiny_model("llama", 2), *specs, seed=1)
    assert result.ids == TOKENS
    # What the channel only rounds or noises is matched by a threshold, which may miss one of the prompt's rows.
    assert result.verified or specs[0].startswith(("round", "output-noise"))


@pytest.mark.slow
def test_the_beginning_of_another_text_is_left_again(tiny_model: LoadModel) -> None:
    """A decoy may be the state of a first token: no second token follows it, so it was none of the prompt's."""
    model = tiny_model("llama", 2)
    for first in range(3):
        rows = model.encode(torch.tensor(TOKENS))
        begins = torch.stack([model.encode(torch.tensor([token]))[0] for token in (9, 60)])
        places = [first, len(TOKENS) - first]
        states = torch.cat(
            [rows[: places[0]], begins[:1], rows[places[0] : places[1]], begins[1:], rows[places[1] :]]
        )
        observation = Observation.from_states(
            states, model, channel=("decoys:count=2",), facts={"extra_rows": 2}
        )
        result = VocabMatch().fit(observation.info, model).recover(observation)
        assert result.ids == TOKENS and result.verified


@pytest.mark.parametrize("part", ["truncated-svd:rank=4", "sparsify:keep=0.2"])
@pytest.mark.parametrize("map", ["row-mixing", "orthogonal"])
def test_parts_of_states_behind_a_map_are_refused(part: str, map: str) -> None:
    """A right candidate need not lie in the space of mixed parts, while wrong ones may: tokens would be verified."""
    for specs in ([part, map], [map, part]):
        with pytest.raises(NotApplicableError, match="only a part"):
            choose_matcher("auto", Channel.parse(specs).published(PUBLIC))


def test_noise_that_drowns_the_rows_is_not_read(tiny_model: LoadModel) -> None:
    model = tiny_model("llama", 2)
    observation, _ = release(model, "output-noise:sigma=10")
    result = VocabMatch(budget=16, proposal="vocab").fit(observation.info, model).recover(observation)
    assert sum(a == b for a, b in zip(result.ids, TOKENS, strict=True)) < 5 and not result.verified


@pytest.mark.parametrize("name", [name for name in registry.names("attacks") if name != "vocab-match"])
def test_attacks_that_would_name_a_token_for_a_decoy_refuse(tiny_model: LoadModel, name: str) -> None:
    model = tiny_model("llama", 2)
    observation, _ = release(model, "decoys:count=2")
    # replay reads decoys that are the same for every request; these are not
    whys = {
        "replay": "draws afresh", "known-texts": "no text is known", "replaced-tokens": "no token was replaced",
    }  # fmt: skip
    why = whys.get(name, "no token's|and no others")
    with pytest.raises(NotApplicableError, match=why):
        registry.build("attacks", name).fit(observation.info, model).recover(observation)


@pytest.mark.parametrize("spec", ["output-noise:sigma=1", "decoys:count=2", "truncated-svd:rank=2"])
def test_changed_rows_are_not_diagnosed(tiny_model: LoadModel, spec: str) -> None:
    model = tiny_model("llama", 2)
    with pytest.raises(NotApplicableError, match="passed a defense"):
        diagnose(release(model, spec)[0], model)


# ---- keys and values


@settings(max_examples=30)
@given(
    rows=st.integers(1, 12), heads=st.sampled_from([1, 2, 4]), mask=st.booleans(), seed=st.integers(0, 999)
)
def test_a_cloak_mixes_blocks_of_turned_heads(rows: int, heads: int, mask: bool, seed: int) -> None:
    """Singular values of each head's block stay without the offset, and grow with it; nothing crosses a block."""
    keys, block = drawn(rows, 16, seed=seed), 5
    (stage,) = Channel.parse([f"kv-cloak:heads={heads},block={block},mask={str(mask).lower()}"]).defenses
    released = stage.states(keys, seeded(seed))[0]
    assert not torch.allclose(released, keys, atol=1e-3)
    for head, cloaked in zip(keys.chunk(heads, 1), released.chunk(heads, 1), strict=True):
        for part, other in zip(head.split(block), cloaked.split(block), strict=True):
            before, after = torch.linalg.svdvals(part), torch.linalg.svdvals(other)
            same = torch.allclose(before, after, rtol=1e-3, atol=1e-4)
            assert same != mask and bool(after[0] >= before[0] * 0.999)


def test_a_cloak_is_of_keys_and_values_and_no_attack_takes_it_for_rows(tiny_model: LoadModel) -> None:
    model = tiny_model("llama", 2, "v")
    width = len(model.encode(torch.tensor(TOKENS))[0])
    observation, secret = release(model, "kv-cloak:heads=2")
    assert observation.states.shape == (len(TOKENS), width) and secret.row_order is None
    assert observation.info.facts == {
        "secret_map": ["columns", "rows"], "turned_blocks": {"heads": 2, "block": 16, "offset": True},
    }  # fmt: skip
    for name in registry.names("attacks"):
        if name == "planted":  # it looks beside the rows too
            continue
        with pytest.raises(NotApplicableError):
            registry.build("attacks", name).fit(observation.info, model).recover(observation)
    with pytest.raises(InputError, match="heads of even width"):
        release(model, "kv-cloak:heads=7")
    with pytest.raises(InputError, match="use --stream"):
        release(tiny_model("llama", 2), "kv-cloak:heads=2")


@pytest.mark.slow
def test_a_decoy_that_is_a_token_s_state_is_not_verified(tiny_model: LoadModel) -> None:
    """Rows of other texts match tokens as well; only those in the context of the prompt's others show its tokens."""
    channel = Channel.parse(["decoys:count=3"])
    for model in (tiny_model("llama", 0, "embed"), tiny_model("llama", 2)):
        for prompt in ([72], [72, 101, 108, 108, 111]):
            observation, truth = channel.release(model, prompt, seed=0)
            result = VocabMatch(setup="quick").fit(observation.info, model).recover(observation)
            sure = [token.token for token in result.tokens if token.verified]
            assert sure == (list(truth.tokens) if len(prompt) > 1 and model.site.layer else [])
