"""Channels release what they say, secrets undo it, and nothing of a secret is in an observation."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from hiddenlab import attack, registry
from hiddenlab.channels import Channel
from hiddenlab.errors import HiddenlabError, InputError
from hiddenlab.models import TruncatedModel, load_model
from hiddenlab.stages import Stage
from hiddenlab.types import GroundTruth, Observation, ObservationInfo
from tests.marks import slow_cases

torch.set_num_threads(1)

VOCABULARY, WIDTH, LAYER = 97, 64, 2
PERMUTATIONS = ("seq-perm", "hidden-perm", "hidden-perm:shared", "2d-perm")
TOKENS = [11, 3, 3, 90, 0, 45, 96]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TruncatedModel:
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=128, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return load_model(str(folder), LAYER, device="cpu")


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def release(
    model: TruncatedModel, *specs: str, tokens: Sequence[int] = TOKENS, seed: int = 0
) -> tuple[Observation, GroundTruth]:
    return Channel.parse(specs).release(model, tokens, seeded(seed))


def plain(model: TruncatedModel, tokens: Sequence[int] = TOKENS) -> Tensor:
    return model.encode(torch.tensor(tokens)).clone()


def undo(states: Tensor, secret: GroundTruth) -> Tensor:
    """Walk back through the stages' secret details, one permutation at a time."""
    for name, drawn in reversed(list(secret.details.items())):
        if name == "seed":
            continue
        if "row_order" in drawn:
            back = torch.empty_like(states)
            back[list(drawn["row_order"])] = states
            states = back
        if "columns" in drawn:
            states = torch.empty_like(states).scatter_(1, drawn["columns"].long(), states)
    return states


# ---- permutations


@pytest.mark.slow
@settings(max_examples=40)
@given(
    specs=st.lists(st.sampled_from(PERMUTATIONS), max_size=4),
    tokens=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=12),
    seed=st.integers(0, 2**32),
)
def test_the_secret_undoes_any_composition_of_permutations(
    model: TruncatedModel, specs: list[str], tokens: list[int], seed: int
) -> None:
    observation, secret = release(model, *specs, tokens=tokens, seed=seed)
    expected = plain(model, tokens)
    assert torch.equal(undo(observation.states, secret), expected)
    assert secret.tokens == tuple(tokens)
    # The composed row order alone puts every row back, up to its coordinates.
    order = list(range(len(tokens))) if secret.row_order is None else list(secret.row_order)
    assert torch.equal(observation.states.sort(-1).values, expected[order].sort(-1).values)

    info = observation.info
    assert info.channel == tuple(specs)
    assert info.rows_permuted == (secret.row_order is not None) == bool({"seq-perm", "2d-perm"} & set(specs))
    if {"hidden-perm", "2d-perm"} & set(specs):
        assert info.columns_permuted == "per-row"
    else:
        assert info.columns_permuted == ("shared" if "hidden-perm:shared" in specs else None)


def test_permutations_are_drawn_and_per_row_ones_differ(model: TruncatedModel) -> None:
    for spec in PERMUTATIONS:
        first, second = (release(model, spec, seed=seed)[0].states for seed in (1, 2))
        assert not torch.equal(first, second) and not torch.equal(first, plain(model))
    columns = release(model, "hidden-perm")[1].details["hidden-perm"]["columns"]
    assert len({tuple(row) for row in columns.tolist()}) == len(TOKENS)
    columns = release(model, "hidden-perm:shared")[1].details["hidden-perm:shared"]["columns"]
    assert len({tuple(row) for row in columns.tolist()}) == 1


def test_a_permutation_is_uniform() -> None:
    draw = Channel.parse(["hidden-perm"]).defenses[0].states
    _, _, drawn = draw(torch.zeros(6000, 3), seeded())
    counts = torch.unique(drawn["columns"], dim=0, return_counts=True)[1]
    assert len(counts) == 6 and int((counts - 1000).abs().max()) < 150  # five standard deviations


MAPS = ["orthogonal", "orthogonal:fresh=row", "row-mixing:kind=orthogonal"]


@given(specs=st.lists(st.sampled_from([*PERMUTATIONS, *MAPS]), max_size=3), seed=st.integers(0, 2**31 - 1))
@settings(max_examples=25, deadline=None)
def test_who_knows_what_was_drawn_gets_the_states_back(
    model: TruncatedModel, specs: list[str], seed: int
) -> None:
    channel = Channel.parse(specs)
    observation, secret = channel.release(model, TOKENS, seed)
    back = channel.received(observation, secret)
    assert torch.allclose(back, plain(model), atol=1e-4)


def test_a_mixture_is_solved_for_by_who_knows_it(model: TruncatedModel) -> None:
    channel = Channel.parse(["row-mixing", "orthogonal"])
    back = channel.received(*channel.release(model, TOKENS, 5))
    assert torch.allclose(back, plain(model), atol=1e-3)


@pytest.mark.parametrize("spec", ["decoys:count=5", "row-mixing:kind=orthogonal,shield=3"])
def test_who_knows_which_rows_are_no_tokens_drops_them(model: TruncatedModel, spec: str) -> None:
    channel = Channel.parse([spec])
    observation, secret = channel.release(model, TOKENS, 2)
    assert len(observation.states) > len(TOKENS)
    assert torch.allclose(channel.received(observation, secret), plain(model), atol=1e-4)


def test_what_rounding_loses_no_receiver_gets_back(model: TruncatedModel) -> None:
    channel = Channel.parse(["round:int8", "orthogonal:fresh=row", "seq-perm"])
    rounded = release(model, "round:int8")[0].states
    back = channel.received(*channel.release(model, TOKENS, 3))
    assert torch.allclose(back, rounded, atol=1e-5) and not torch.allclose(back, plain(model), atol=1e-3)


# ---- noise and prefix


def test_gaussian_noise_is_on_the_input_embeddings(model: TruncatedModel) -> None:
    stage = Channel.parse(["gaussian:sigma=0.5"]).defenses[0]
    noise = stage.inputs(torch.zeros(400, WIDTH), model.embedding, seeded())
    assert abs(float(noise.std()) - 0.5) < 0.02 and abs(float(noise.mean())) < 0.02

    observation, secret = release(model, "gaussian:sigma=0.5")
    embedded = model.embed(torch.tensor(TOKENS))
    again = stage.inputs(embedded, model.embedding, seeded(secret.details["seed"]))
    assert torch.allclose(observation.states, model.encode(again), atol=1e-5)
    assert not torch.allclose(observation.states, plain(model), atol=1e-2)
    assert observation.info.noise_sigma == 0.5


def test_gaussian_then_permutation_is_the_same_noise_permuted(model: TruncatedModel) -> None:
    noised, _ = release(model, "gaussian:sigma=0.01")
    both, secret = release(model, "gaussian:sigma=0.01", "seq-perm")
    assert secret.row_order is not None and secret.row_order != tuple(range(len(TOKENS)))
    assert torch.equal(both.states, noised.states[list(secret.row_order)])
    swapped, _ = release(model, "seq-perm", "gaussian:sigma=0.01")
    assert torch.equal(swapped.states, both.states)
    assert both.info.noise_sigma == 0.01 and both.info.rows_permuted


def test_noise_adds_in_quadrature(model: TruncatedModel) -> None:
    observation, _ = release(model, "gaussian:sigma=0.3", "gaussian:sigma=0.4")
    assert observation.info.noise_sigma == pytest.approx(0.5)


def test_the_random_prefix_acts_on_the_states_and_is_not_released(model: TruncatedModel) -> None:
    observation, secret = release(model, "random-prefix")
    assert observation.states.shape == (len(TOKENS), WIDTH) and observation.info.prefix_tokens == 1
    stage = Channel.parse(["random-prefix"]).defenses[0]
    embedded = model.embed(torch.tensor(TOKENS))
    inputs = stage.inputs(embedded, model.embedding, seeded(secret.details["seed"]))
    assert torch.equal(inputs[1:], embedded)
    assert torch.allclose(observation.states, model.encode(inputs)[1:], atol=1e-5)
    assert not torch.allclose(observation.states, plain(model), atol=1e-3)
    assert release(model, "random-prefix", "random-prefix")[0].info.prefix_tokens == 2


def test_the_random_prefix_follows_the_vocabulary(model: TruncatedModel) -> None:
    stage = Channel.parse(["random-prefix"]).defenses[0]
    generator = seeded()
    for table in (torch.randn(300, 8) * torch.arange(1.0, 9) - 4, torch.randn(300, 8) + 50):
        drawn = torch.stack([stage.inputs(table[:1], table, generator)[0] for _ in range(3000)])
        assert torch.allclose(drawn.mean(0), table.mean(0), atol=0.6)
        assert torch.allclose(drawn.std(0), table.std(0), rtol=0.08)


def test_the_prefix_knows_that_some_models_scale_their_embeddings(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=80, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16,
    )  # fmt: skip
    Gemma3ForCausalLM(config).save_pretrained(tmp_path)
    scaled = load_model(str(tmp_path), 1, device="cpu")
    seen: list[Tensor] = []

    class Look(Stage):
        def inputs(self, embeddings: Tensor, table: Tensor, generator: torch.Generator) -> Tensor:
            seen.append(table)
            return embeddings

    observation, _ = Channel([Look()]).release(scaled, [4, 5], seeded())
    assert torch.allclose(seen[0], scaled.embedding * 32**0.5, rtol=1e-2)
    assert torch.allclose(observation.states, plain(scaled, [4, 5]), atol=1e-5)


# ---- the provider's own numbers


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_quantized_providers_release_other_states(model: TruncatedModel, kind: str) -> None:
    channel = Channel.parse([kind, "seq-perm"])
    observation, secret = channel.release(model, TOKENS, seeded())
    provider = channel.provider_model(model)
    assert provider is not model and provider is channel.provider_model(model)
    layers = {type(module).__module__.partition(".")[0] for module in provider.module.modules()}
    assert "bitsandbytes" in layers and model.quantization is None

    assert observation.info.quantization == kind and observation.info.model == model.ref.name
    assert secret.row_order is not None
    order = list(secret.row_order)
    directly = load_model(model.ref.path, LAYER, device="cpu", quantization=kind)
    assert torch.allclose(observation.states, plain(directly)[order], atol=1e-4)
    expected = plain(model)[order]
    error = float((observation.states.float() - expected).norm() / expected.norm())
    assert (
        1e-4 < error < 0.7
    )  # quantized, but still states of this prompt: unrelated ones differ by about 1.4


def test_the_provider_dtype_is_released_and_the_attackers_model_stays(model: TruncatedModel) -> None:
    observation, _ = release(model, "dtype:bfloat16")
    assert observation.states.dtype == torch.bfloat16 and observation.info.provider_dtype == "bfloat16"
    assert model.dtype == torch.float32
    expected = plain(model)
    error = float((observation.states.float() - expected).norm() / expected.norm())
    assert 1e-4 < error < 0.05
    noised, _ = release(model, "dtype:bfloat16", "gaussian:sigma=0.1", "hidden-perm")
    assert noised.states.dtype == torch.bfloat16


def test_the_model_itself_is_the_provider_where_nothing_changes(model: TruncatedModel) -> None:
    for specs in ([], ["identity"], ["dtype:float32"], ["gaussian:sigma=1", "2d-perm"]):
        assert Channel.parse(specs).provider_model(model) is model


def test_a_provider_given_as_the_model_releases_the_same(
    model: TruncatedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "ref", replace(model.ref, name="what the user typed"))
    channel = Channel.parse(["dtype:bfloat16", "seq-perm"])
    provider = channel.provider_model(model)
    assert channel.provider_model(provider) is provider
    one, other = (channel.release(s, TOKENS, seeded())[0] for s in (model, provider))
    assert torch.equal(one.states, other.states) and one.info == other.info
    assert one.info.model == "what the user typed"


def test_stages_that_contradict_each_other_are_refused() -> None:
    for specs in (["int8", "nf4"], ["dtype:float32", "dtype:bfloat16"]):
        with pytest.raises(InputError, match=f"{specs[0]} and {specs[1]} both set"):
            Channel.parse(specs)
    Channel.parse(["int8", "int8", "dtype:float16"])


# ---- releases


def test_identity_releases_the_plain_states(model: TruncatedModel) -> None:
    for specs in ([], ["identity"]):
        observation, secret = release(model, *specs)
        assert torch.equal(observation.states, plain(model))
        assert secret.row_order is None and secret.tokens == tuple(TOKENS)
        assert observation.info == ObservationInfo(
            model.ref.name, model.signature, model.site, channel=tuple(specs), provider_dtype="float32"
        )


def test_a_batch_is_one_by_one_whatever_the_packing(
    model: TruncatedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[5], [6, 7, 8], list(range(20)), [1, 2], [3] * 9]
    channel = Channel.parse(["gaussian:sigma=0.1", "random-prefix", "2d-perm"])
    generator = seeded(3)
    single = [channel.release(model, prompt, generator) for prompt in prompts]
    for limit, passes in ((2048, 1), (8, 4), (1, 5)):
        monkeypatch.setattr(model, "max_pass_tokens", limit)
        before = model.forward_calls
        batch = channel.release_batch(model, prompts, seeded(3))
        assert model.forward_calls - before == passes
        for (one, hidden), (other, other_hidden) in zip(single, batch, strict=True):
            assert torch.allclose(one.states, other.states, rtol=1e-4, atol=1e-4)
            assert one.info == other.info
            assert (hidden.tokens, hidden.row_order) == (other_hidden.tokens, other_hidden.row_order)
    assert len({secret.details["seed"] for _, secret in single}) == len(prompts)


def test_unusable_prompts_are_refused_before_anything_runs(model: TruncatedModel) -> None:
    before = model.forward_calls
    for tokens, says in (
        ([], "empty"),
        ([5, VOCABULARY], f"token {VOCABULARY} is outside"),
        ([-1], "token -1"),
    ):
        with pytest.raises(InputError, match=says):
            Channel.parse([]).release_batch(model, [[1], tokens], seeded())
    assert model.forward_calls == before
    assert Channel.parse([]).release_batch(model, [], seeded()) == []


@pytest.mark.parametrize(
    "specs",
    [[], ["random-prefix"], ["2d-perm"], ["gaussian:sigma=0.1", "random-prefix", "hidden-perm", "seq-perm"]],
    ids=str,
)
def test_an_observation_holds_nothing_of_the_secret(model: TruncatedModel, specs: list[str]) -> None:
    channel = Channel.parse(specs)
    batch = channel.release_batch(model, [TOKENS, [1] * len(TOKENS)], seeded(5))
    (observation, _), (other, _) = batch
    # What is public is the same for another prompt and another seed …
    assert observation.info == other.info == channel.release(model, [2], seeded(6))[0].info
    for one, _ in batch:
        # … and the states share memory with nothing: no neighbour's or prefix rows, no order in the strides.
        assert set(vars(one)) == {"states", "info", "known", "first"}
        assert one.known == () and one.first is None
        assert one.states.is_contiguous() and one.states._base is None
        assert one.states.untyped_storage().nbytes() == one.states.numel() * one.states.element_size()
    assert "not shown" in repr(batch[0][1]) and str(TOKENS[3]) not in repr(batch[0][1])


# ---- defenses of third parties


class Faulty(Stage):
    spec = "faulty"


class Half:
    """No defense: most of one is missing."""

    spec = "half"

    def states(self, states: Tensor, generator: torch.Generator) -> Any: ...


def test_what_is_no_defense_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "resolve", lambda kind, name: Half)
    with pytest.raises(HiddenlabError, match="Half is no defense: it lacks provider, inputs, publish"):
        Channel.parse(["half"])


def test_a_defense_that_breaks_its_word_is_named(model: TruncatedModel) -> None:
    class LosesRows(Faulty):
        def states(self, states: Tensor, generator: torch.Generator) -> Any:
            return states[1:], None, {}

    class WrongOrder(Faulty):
        def states(self, states: Tensor, generator: torch.Generator) -> Any:
            return states, (0,) * len(states), {}

    class HiddenRow(Faulty):
        def inputs(self, embeddings: Tensor, table: Tensor, generator: torch.Generator) -> Tensor:
            return torch.cat([embeddings[:1], embeddings])

    class UnknownOption(Faulty):
        def provider(self, options: dict[str, Any]) -> dict[str, Any]:
            return {**options, "device": "cpu"}

    for stage, says in (
        (LosesRows, "the defense faulty released"),
        (WrongOrder, "no permutation of 7 rows"),
        (HiddenRow, "faulty added 1 input rows, but its public facts say 0"),
        (UnknownOption, "unknown load options: device"),
    ):
        with pytest.raises(HiddenlabError, match=says):
            Channel([stage()]).release(model, TOKENS, seeded())


def test_a_sharded_model_gets_a_sharded_provider(
    model: TruncatedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def fake(ref: object, layer: int, **options: Any) -> TruncatedModel:
        asked.append(options)
        return model

    monkeypatch.setattr("hiddenlab.models.load_truncated", fake)
    for placed in ({"": "cpu"}, {"embed_tokens": "cpu", "layers": "disk"}):
        monkeypatch.setattr(model.module, "hf_device_map", placed, raising=False)
        Channel.parse(["dtype:bfloat16"]).provider_model(model)
    assert [options["device_map"] for options in asked] == [None, "auto"]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> TruncatedModel:
    """A model that takes 16 tokens."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=WIDTH, n_layer=2, n_head=2, initializer_range=0.2,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("small")
    GPT2LMHeadModel(config).save_pretrained(path)
    return load_model(str(path), 1, device="cpu")


@pytest.mark.parametrize("defense", [[], *slow_cases(["orthogonal"], ["hidden-perm"], ["random-prefix"])])
def test_model_of_few_positions_is_attacked_within_these(small: TruncatedModel, defense: list[str]) -> None:
    observation, _ = Channel.parse(defense).release(small, TOKENS)
    found = [token.token for token in attack(observation, small).tokens]
    assert len(found) == len(TOKENS)
    assert defense or found == TOKENS, "untrained weights tell little of tokens behind a defense"


def test_a_prompt_beyond_a_models_positions_is_refused(small: TruncatedModel) -> None:
    with pytest.raises(InputError, match=r"the prompt has 17 tokens, and \S+ takes 16; cut the prompt"):
        Channel.parse([]).release(small, [1] * 17)
    with pytest.raises(InputError, match=r"has 16 tokens behind a prefix of 1, and \S+ takes 16"):
        Channel.parse(["random-prefix"]).release(small, [1] * 16)
