"""Partial attention at the first layer names the tokens that it is of; what cannot be explained is not verified."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hiddenlab.attacks.partial_sums import PartialSums
from hiddenlab.attacks.partial_sums.first import EXPLAINED, one_of_each
from hiddenlab.attacks.vocab_match import VocabMatch
from hiddenlab.channels import Channel
from hiddenlab.defenses.cascade import command
from hiddenlab.defenses.cascade.exposure import outputs_read
from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.eval.measures.partial_sums import node_view, partial_sums
from hiddenlab.matching.first_layer import FirstLayer
from hiddenlab.models import TruncatedModel, load_model
from hiddenlab.observation import load_site
from hiddenlab.sharding import Plan
from hiddenlab.testing import DECODERS, HEADS, KV_HEADS, VOCABULARY, WIDTH, WINDOW, PlainModel
from hiddenlab.types import AttackResult, Observation

LoadModel = Callable[..., TruncatedModel]
TinyPath = Callable[..., str]


def tokens_of(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def view(
    tiny_model: LoadModel, architecture: str, tokens: list[int], plan: Plan, node: int, masked: bool = False
) -> Observation:
    streams = {name: tiny_model(architecture, 1, name) for name in "qkv"}
    streams["own"] = tiny_model(architecture, 0, "embed")
    return node_view(streams, tokens, plan, node, masked)


def recover(tiny_model: LoadModel, architecture: str, observation: Observation) -> AttackResult:
    return PartialSums().fit(observation.info, tiny_model(architecture, 1, "attn")).recover(observation)


@pytest.mark.parametrize("architecture", DECODERS)
@pytest.mark.parametrize("m", [1, 2])
def test_a_node_reads_the_others_tokens(tiny_model: LoadModel, architecture: str, m: int) -> None:
    tokens = tokens_of(18)
    plan = Plan.clustered(len(tokens), 3, alpha=3, m=m)
    found = recover(tiny_model, architecture, view(tiny_model, architecture, tokens, plan, 2))
    last = plan.shards[2][-1]
    places = found.positions or tuple(range(len(found.ids)))
    right = {p: token for p, token in zip(places, found.ids, strict=True) if tokens[p] == token}
    windowed = architecture in ("gemma2", "gemma3_text", "mistral")
    wanted = [p for p in range(last) if not windowed or any(0 <= r - p < WINDOW for r in plan.shards[2])]
    assert set(wanted) <= set(right)
    for place, one in zip(places, found.tokens, strict=True):
        assert (one.row >= 0) == (place in plan.shards[2])
        assert not one.verified or tokens[place] == one.token


def test_repeated_tokens(tiny_model: LoadModel) -> None:
    tokens = [5, 5, 5, 9, 5, 9, 7, 7, 1, 2, 3, 4]
    plan = Plan.clustered(12, 4, alpha=3)
    found = recover(tiny_model, "llama", view(tiny_model, "llama", tokens, plan, 2))
    assert found.ids == tokens[:12]
    assert all(one.verified for one in found.tokens)
    assert found.evaluated_tokens > 0 and found.forward_calls > 0
    assert all(one.distance < EXPLAINED for one in found.tokens if one.row < 0)


def test_what_is_not_explained_is_not_verified(tiny_model: LoadModel) -> None:
    tokens = tokens_of(12)
    plan = Plan.clustered(12, 2, alpha=3)
    observation = view(tiny_model, "llama", tokens, plan, 2)
    noise = 0.3 * torch.randn(observation.states.shape, generator=torch.Generator().manual_seed(0))
    noise[:, : int(observation.info.facts["own"])] = 0
    found = recover(tiny_model, "llama", Observation(observation.states + noise, observation.info))
    assert not any(one.verified for one in found.tokens if one.row < 0)


def test_a_recorded_request_is_read(tiny: TinyPath, tmp_path: Path) -> None:
    """Through everything: nodes of a real run, files, and an attack that has nothing else."""
    model = tiny("llama", tokenizer=True)
    prompt = "the ferry leaves at nine"
    for compress in (False, True):
        folder = tmp_path / str(compress)
        backend = command.Backend(kind="local", model=model, compress=compress)
        command.run(prompt, backend, alpha=3, c=3, record=str(folder))
        observation = load_site(folder / "CompNode-2.safetensors", 1, "attn")[0]
        truncated = load_model(model, 1, stream="attn", device="cpu")
        found = PartialSums().fit(observation.info, truncated).recover(observation)
        assert truncated.text(found.ids) == prompt[: len(found.ids)]
        assert len(found.ids) == 1 + max(observation.info.positions or ())
        assert all(one.verified for one in found.tokens)


def test_what_it_cannot_use(tiny_model: LoadModel) -> None:
    model = tiny_model("llama", 1, "attn")
    states, _ = Channel.parse([]).release(model, [1, 2, 3], torch.Generator())
    with pytest.raises(NotApplicableError, match="is no combined view of a CompNode"):
        PartialSums().fit(states.info, model).recover(states)
    observation = view(tiny_model, "llama", tokens_of(6), Plan.clustered(6, 1, alpha=2), 1)
    facts = {**observation.info.facts, "heads": 5}
    broken = Observation(observation.states, replace(observation.info, facts=facts))
    with pytest.raises(InputError, match="do not hold m, e and u"):
        PartialSums().fit(broken.info, model).recover(broken)
    with pytest.raises(NotApplicableError, match="see the attack partial-sums"):
        VocabMatch(proposal="vocab").fit(observation.info, model).recover(observation)
    with pytest.raises(InputError, match="candidates"):
        PartialSums(candidates=0)


def test_figures_say_which_tokens_they_are_of(tiny: TinyPath, tmp_path: Path) -> None:
    """Two of ten tokens stand behind the node's last row: all that can be read is, and the prompt is not whole."""
    source = tmp_path / "prompts.txt"
    source.write_text("the ferry leaves\nat nine o'clock\n")
    spec = {
        "model": tiny("llama", tokenizer=True), "prompts": str(source), "limit": 2, "max_tokens": 10, "alpha": 2,
        "c": 2, "m": 1, "node": 1, "seed": 0, "device": "cpu",
    }  # fmt: skip
    found = {name: figure["value"] for name, figure in partial_sums(spec, tmp_path).items()}
    assert found["missing"] == 4  # 0, 1, 4, 5 of ten; 8 and 9 stand behind the last row
    assert (found["missing_exact"], found["missing_token_accuracy"], found["missing_verified"]) == (1, 1, 1)
    assert found["missing_wrong_verified"] == 0
    assert (found["exact"], found["token_accuracy"], found["verified"]) == (0, 0.8, 0.8)
    assert 0 < found["rouge_l"] < 1 and 0 < found["bleu"] < 1


# ---- masked sums: the attention output alone


@pytest.mark.parametrize("architecture", DECODERS)
def test_attention_outputs_name_the_tokens_of_gaps(tiny_model: LoadModel, architecture: str) -> None:
    """Where a row has several query heads of a value head, or as many rows as missing tokens: all, in order."""
    tokens, plan = tokens_of(18), Plan.clustered(18, 3, alpha=2)
    observation = view(tiny_model, architecture, tokens, plan, 1, masked=True)
    found = recover(tiny_model, architecture, observation)
    places = found.positions or tuple(range(len(found.ids)))
    window = WINDOW if architecture in ("gemma2", "gemma3_text", "mistral") else 18
    shown = {p for r in plan.shards[1] for p in range(max(0, r + 1 - window), r + 1)}
    assert {p for p, token in zip(places, found.ids, strict=True) if tokens[p] == token} == shown
    assert all(one.verified for one in found.tokens)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(data=st.data(), tokens=st.lists(st.integers(0, 20), min_size=2, max_size=24))
def test_what_the_rule_covers_is_read_and_nothing_wrong_is_claimed(
    tiny_model: LoadModel, data: st.DataObject, tokens: list[int]
) -> None:
    """Any rows of any prompt, repeated tokens among them: exactly the tokens of gaps with enough equations."""
    held = sorted(data.draw(st.sets(st.integers(0, len(tokens) - 1), min_size=1)))
    others = [p for p in range(len(tokens)) if p not in held]
    plan = Plan.by_hand([shard for shard in (held, others) if shard])
    observation = view(tiny_model, "llama", tokens, plan, 0, masked=True)
    covered = set(outputs_read(tuple(held), HEADS // KV_HEADS, WIDTH // HEADS))
    if not covered and held[-1] >= len(held):
        with pytest.raises(NotApplicableError, match="at most 2 tokens before it"):
            recover(tiny_model, "llama", observation)
        return
    found = recover(tiny_model, "llama", observation)
    places = found.positions or tuple(range(len(found.ids)))
    assert set(places) == covered | set(held)
    assert ("left out" in found.stop_reason) == (len(places) <= held[-1])
    wrong = [i for i, p in enumerate(places) if found.tokens[i].verified and tokens[p] != found.ids[i]]
    assert not wrong
    assert all(one.verified for one in found.tokens)


def test_two_tokens_against_all_pairs(tiny_model: LoadModel) -> None:
    """The slow way: the attention output behind every pair of tokens, by softmax itself."""
    tokens, plan = tokens_of(6, seed=3), Plan.by_hand([[0, 3, 4, 5], [1, 2]])
    observation = view(tiny_model, "llama", tokens, plan, 0, masked=True)
    model, place = tiny_model("llama", 1, "attn"), torch.tensor([1, 2])
    layer = FirstLayer(model)
    outputs = observation.states[1:, WIDTH:].unflatten(1, (HEADS, -1)).double()  # of rows 3 to 5
    heads = layer.q.encode(torch.tensor(tokens))[3:].unflatten(1, (HEADS, -1)).transpose(0, 1)
    every = torch.arange(VOCABULARY)
    keys = {int(p): layer.keys(every, int(p)) for p in place}
    keys |= {p: layer.keys(torch.tensor([tokens[p]]), p) for p in (0, 3, 4, 5)}
    values = {p: layer.values(0, every if p in (1, 2) else torch.tensor([tokens[p]])) for p in keys}
    apart = torch.zeros(VOCABULARY, VOCABULARY, dtype=torch.double)
    for row in range(3):
        total, mass = torch.zeros(HEADS, 1, 1, WIDTH // HEADS), torch.zeros(HEADS, 1, 1)
        for p in (p for p in keys if p <= row + 3):
            weight = layer.scored(heads[:, row : row + 1], keys[p])[:, 0].exp()  # [h, c]
            shape = (HEADS, 1, -1) if p == 2 else (HEADS, -1, 1)
            mass = mass + weight.reshape(shape)
            total = total + (weight[..., None] * layer.spread(values[p]).transpose(0, 1)).reshape(*shape, 16)
        apart += (total / mass[..., None] - outputs[row][:, None, None]).square().sum((0, 3))
    best = divmod(int(apart.argmin()), VOCABULARY)
    assert list(best) == tokens[1:3]
    assert recover(tiny_model, "llama", observation).ids == tokens


def test_noise_on_attention_outputs_verifies_nothing(tiny_model: LoadModel) -> None:
    tokens, plan = tokens_of(12), Plan.clustered(12, 3, alpha=2)
    observation = view(tiny_model, "llama", tokens, plan, 1, masked=True)
    noise = 0.3 * torch.randn(observation.states.shape, generator=torch.Generator().manual_seed(0))
    noise[:, :WIDTH] = 0
    found = recover(tiny_model, "llama", Observation(observation.states + noise, observation.info))
    assert not any(one.verified for one in found.tokens if one.row < 0)
    facts = {**observation.info.facts, "heads": 2}
    broken = Observation(observation.states, replace(observation.info, facts=facts))
    with pytest.raises(InputError, match="2 heads with 32 numbers each, where the model has 4 with 16"):
        recover(tiny_model, "llama", broken)


@pytest.mark.slow
def test_a_masked_run_of_the_builtin_model_is_read(tmp_path: Path) -> None:
    """Gaps of 24 tokens behind eight rows, as many as equations, from recorded masked sums."""
    text = "The ferry to the northern islands leaves at nine, whatever the weather does, and my password is hunter2; "
    text += "please call Margaret Oduya at 555-0173 before noon about the invoice for the second shipment of parts."
    backend = command.Backend(kind="local", harden="masked-sums")
    command.run(text, backend, alpha=4, c=8, record=f"{tmp_path}/seen")
    (one,) = load_site(f"{tmp_path}/seen/CompNode-1.safetensors", 1, "attn")
    model = load_model("builtin", 1, stream="attn", device="cpu")
    found = PartialSums().fit(one.info, model).recover(one)
    assert found.ids == model.tokenize(text)[: len(found.ids)] and len(found.ids) > 40
    assert all(token.verified for token in found.tokens)


@settings(max_examples=25)
@given(n=st.integers(1, 4), c=st.integers(2, 5), seed=st.integers(0, 999))
def test_one_of_each_against_all_choices(n: int, c: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    dictionary = torch.rand(n, c, 12, generator=draw, dtype=torch.float64)
    truth = torch.randint(0, c, (n,), generator=draw).tolist()
    target = sum(dictionary[i, truth[i]] for i in range(n))
    assert isinstance(target, torch.Tensor)
    chosen, left = one_of_each(dictionary, target, seed)
    assert left < EXPLAINED and chosen == truth
    best = min(
        float((target + 0.1 - sum(dictionary[i, p] for i, p in enumerate(picks))).square().sum())
        for picks in np.ndindex(*[c] * n)
    )
    _, left = one_of_each(dictionary, target + 0.1, seed)
    assert left * float((target + 0.1).square().sum()) >= best - 1e-9


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2"])
def test_the_attention_stream_is_what_enters_the_output_projection(
    tiny: TinyPath, tiny_model: LoadModel, architecture: str
) -> None:
    tokens = tokens_of(7)
    model = PlainModel(tiny(architecture)).model
    seen: list[torch.Tensor] = []
    for name, module in model.named_modules():
        if name.endswith(("layers.1.self_attn.o_proj", "h.1.attn.c_proj")):
            module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        model(input_ids=torch.tensor([tokens]))
    states = tiny_model(architecture, 2, "attn").encode(torch.tensor(tokens))
    assert torch.allclose(states, seen[0].reshape(len(tokens), -1), atol=1e-4)
