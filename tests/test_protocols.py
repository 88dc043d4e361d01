"""Schemes as protocols: exact, or as exact as their fixed point; nobody learns what the scheme says it hides."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from hiddenlab.channels import Channel
from hiddenlab.cli import app
from hiddenlab.defenses.protocols.checkpoint import load_weights
from hiddenlab.defenses.protocols.decoder import Weights
from hiddenlab.defenses.protocols.forward import Cache, Plain, walk
from hiddenlab.defenses.protocols.ring import Ring, Shared
from hiddenlab.defenses.protocols.shares import HELPER, Centaur, PermLLM
from hiddenlab.defenses.protocols.stip import DEVELOPER, SERVER, USER, Stip
from hiddenlab.defenses.protocols.transcript import Transcript
from hiddenlab.errors import InputError
from hiddenlab.eval.measures import protocols as measures
from hiddenlab.models import load_model
from hiddenlab.observation import save_observations

TinyPath = Callable[..., str]
TYPES = ("llama", "gpt2", "mistral")
TOKENS = [5, 17, 3, 3, 250, 41, 8]


def logits_of(path: str, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(path)(torch.tensor([tokens])).logits[0]  # type: ignore[no-any-return]


# ---- the decoder in parts


@pytest.mark.parametrize("architecture", TYPES)
def test_the_parts_are_the_model(tiny: TinyPath, architecture: str) -> None:
    path = tiny(architecture)
    weights, _ = load_weights(path)
    wanted = logits_of(path, TOKENS)
    logits, states = walk(weights, weights.inputs(TOKENS), Plain())
    assert torch.allclose(logits, wanted, atol=1e-4)
    assert len(states) == len(weights.blocks) + 1 and states[0].shape == (7, weights.width)
    cache: Cache[Tensor] = Cache()
    parts = [
        walk(weights, weights.inputs(part), Plain(), cache)[0]
        for part in (TOKENS[:3], TOKENS[3:4], TOKENS[4:])
    ]
    assert torch.allclose(torch.cat(parts), wanted, atol=1e-4)
    with pytest.raises(InputError, match="tokens at most"):
        walk(weights, weights.inputs([1] * (weights.limit + 1)), Plain())
    with pytest.raises(InputError, match="must be numbers below"):
        weights.inputs([len(weights.head.weight)])


@pytest.mark.parametrize("architecture", ["gemma2", "qwen3", "gpt_neox", "qwen3_moe", "olmo2", "phi3"])
def test_other_architectures_are_refused(tiny: TinyPath, architecture: str) -> None:
    with pytest.raises(InputError, match="is not of Llama or GPT-2 type"):
        load_weights(tiny(architecture))


def test_layers_that_reach_differently_are_refused(tmp_path: Path) -> None:
    """Qwen2 with biases on queries and keys is of Llama type; with a window in some layers only it is not."""
    common = {
        "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    }  # fmt: skip
    for name, more in (
        ("plain", {}), ("windows", {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 16}),
        ("window", {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 16}),
    ):  # fmt: skip
        config = AutoConfig.for_model("qwen2", **common, **more)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / name)
    long = list(range(40))
    for name in ("plain", "window"):
        weights, _ = load_weights(str(tmp_path / name))
        assert (weights.window is None) == (name == "plain")
        found = walk(weights, weights.inputs(long), Plain())[0]
        assert torch.allclose(found, logits_of(str(tmp_path / name), long), atol=1e-4)
    with pytest.raises(InputError, match="layers differ in how far attention reaches"):
        load_weights(str(tmp_path / "windows"))


# ---- STIP


@pytest.mark.parametrize("architecture", TYPES)
def test_stip_is_the_plain_model(tiny: TinyPath, architecture: str) -> None:
    path = tiny(architecture)
    stip = Stip(load_weights(path)[0], seed=3)
    assert torch.allclose(stip.logits(TOKENS), logits_of(path, TOKENS), atol=1e-4)
    wanted = list(TOKENS)
    for _ in range(4):
        wanted.append(int(logits_of(path, wanted)[-1].argmax()))
    assert stip.generate(TOKENS, 4) == wanted[len(TOKENS) :]


@pytest.mark.parametrize("architecture", TYPES)
def test_the_server_of_stip_has_nothing_in_its_own_order(tiny: TinyPath, architecture: str) -> None:
    weights, _ = load_weights(tiny(architecture))
    stip = Stip(weights, seed=3)
    stip.logits(TOKENS)
    (seen,) = stip.transcript.seen(SERVER)
    plain = weights.inputs(TOKENS)
    assert seen.label == "inputs" and not torch.equal(seen.value, plain)
    assert torch.equal(seen.value.sort(1).values, plain.sort(1).values)
    assert stip.server.permuted.embedding is None
    # Queries' and keys' own dimensions keep their order; nothing else is where it was.
    own = [t for t in weights.tensors() if t.ndim == 2]
    for theirs in stip.server.permuted.tensors():
        assert theirs.ndim != 2 or not any(t.shape == theirs.shape and torch.equal(t, theirs) for t in own)
    assert not list(stip.transcript.seen(DEVELOPER))
    assert [one.label for one in stip.transcript.seen(USER)] == ["logits"]
    assert stip.transcript.bytes == 4 * 7 * (weights.width + len(weights.head.weight))
    assert stip.transcript.rounds == 2
    assert "server learnt 1 tensors" in repr(stip.transcript)


# ---- the ring

numbers = st.floats(-1000, 1000, allow_nan=False, width=32)


def ring(**options: Any) -> Ring:
    return Ring(Transcript(("a", "b", "c")), ("a", "b"), **options)


@settings(max_examples=40)
@given(
    values=st.lists(numbers, min_size=1, max_size=20), owner=st.sampled_from("abc"), seed=st.integers(0, 9),
    fraction=st.integers(8, 20),
)  # fmt: skip
def test_what_is_shared_comes_back(values: list[float], owner: str, seed: int, fraction: int) -> None:
    r = ring(seed=seed, fraction=fraction)
    x = torch.tensor(values)
    for to in "abc":
        back = r.reveal(r.share(x, owner), to, "x", 0)
        assert torch.allclose(back, x, atol=2.0**-fraction, rtol=1e-6)
    assert {one.party for one in r.transcript.learnt} == set("abc")


@settings(max_examples=30)
@given(rows=st.integers(1, 5), inner=st.integers(1, 6), columns=st.integers(1, 5), seed=st.integers(0, 99))
def test_products_of_shares(rows: int, inner: int, columns: int, seed: int) -> None:
    r, draw = ring(seed=seed), torch.Generator().manual_seed(seed)
    a, b = (20 * torch.randn(*shape, generator=draw) for shape in ((rows, inner), (inner, columns)))
    x, y = r.share(a, "a"), r.share(b, "b")
    assert torch.allclose(r.decode(sum_of(r.product(x, y))), a @ b, atol=0.01)
    square = r.product(x, x, torch.mul)
    assert torch.allclose(r.decode(sum_of(square)), a * a, atol=0.01)
    weight = r.encode(b)
    for found in (
        r.by_public(x, weight), *(r.by_private(x, weight, who) for who in "ab")
    ):  # fmt: skip
        assert torch.allclose(r.decode(sum_of(found)), a @ b, atol=0.01)


def sum_of(x: Shared) -> Tensor:
    return x.first + x.second


def test_truncation_is_never_wrong_by_more_than_one() -> None:
    """Local truncation of each share would be, for one value of 2^(63 - bits) by chance; here large ones are tried."""
    r = ring()
    values = torch.cat([torch.arange(-2000, 2000), torch.randint(-(1 << 61), 1 << 61, (200_000,))])
    mask = r.random(len(values))
    found = sum_of(r.truncate(Shared(values - mask, mask)))
    error = found - (values >> 16)
    assert set(error.unique().tolist()) <= {0, 1}
    upper = (error[4000:] == 1).double().mean()
    assert abs(float(upper) - 0.5) < 0.01  # up and down at random: no bias


def test_a_product_that_leaves_the_ring_is_noticed() -> None:
    for fraction, value in ((16, 50_000.0), (24, 200.0)):
        r = ring(fraction=fraction)
        x = r.share(torch.tensor([value / (1 if fraction == 16 else 16)]), "a")
        if fraction == 24:
            x = Shared(x.first * 16, x.second * 16)
        weight = r.encode(torch.tensor([value / (1 if fraction == 16 else 16)])) * (
            1 if fraction == 16 else 16
        )
        products: list[Callable[[], Shared]] = [
            lambda r=r, x=x: r.product(x, x, torch.mul),  # type: ignore[misc]
            lambda r=r, x=x, w=weight: r.by_public(x, w, torch.mul),  # type: ignore[misc]
            lambda r=r, x=x, w=weight: r.by_private(x, w, "a", torch.mul),  # type: ignore[misc]
        ]
        for times in products:
            with pytest.raises(InputError, match="does not fit the ring"):
                times()


def test_a_sum_of_many_that_leaves_the_ring_is_noticed() -> None:
    """No single product does."""
    r = ring()
    x = r.share(torch.full((1, 8), 30_000.0), "a")
    assert float(r.decode(sum_of(r.by_public(x, r.encode(torch.full((8, 1), 100.0))))).round()) == 24e6
    with pytest.raises(InputError, match="does not fit the ring"):
        r.by_public(x, r.encode(torch.full((8, 1), 20_000.0)))


def test_shapes_that_do_not_fit() -> None:
    r = ring()
    x, y = r.share(torch.ones(2, 3), "a"), r.share(torch.ones(4, 2), "b")
    for wrong in (lambda: r.product(x, y), lambda: r.by_public(x, r.encode(torch.ones(4, 2)))):
        with pytest.raises(InputError, match=r"shapes \(2, 3\) and \(4, 2\)"):
            wrong()
    with pytest.raises(InputError, match="cannot be added"):
        x + y


def test_shares_look_random() -> None:
    """Each bit of a share, and of what is opened, is set half of the time, whatever was shared."""
    r = ring()
    opened: list[Tensor] = []
    honest = r._open
    r._open = lambda x: opened.extend(honest(x)) or tuple(opened[-2:])  # type: ignore[method-assign,func-returns-value,assignment,return-value]
    x = r.share(torch.full((20_000,), 3.0), "c")
    r.product(x, x, torch.mul)
    for share in (x.first, x.second, *opened):
        bits = torch.stack([(share >> bit) & 1 for bit in range(64)]).double().mean(1)
        assert float((bits - 0.5).abs().max()) < 0.02


def test_what_does_not_fit_the_ring() -> None:
    for value in (float("inf"), float("nan"), 2.0**31):
        with pytest.raises(InputError, match="do not fit the ring"):
            ring().encode(torch.tensor([1.0, value]))
    with pytest.raises(InputError, match="1 to 24 bits"):
        ring(fraction=40)
    for sender, receiver in (("a", "a"), ("a", "z")):
        with pytest.raises(InputError, match="no message from"):
            ring().transcript.send(sender, receiver, torch.zeros(1))


# ---- Centaur and PermLLM


@pytest.mark.parametrize("scheme", [Centaur, PermLLM])
@pytest.mark.parametrize("architecture", TYPES)
def test_shares_give_the_plain_models_logits(tiny: TinyPath, architecture: str, scheme: Any) -> None:
    path = tiny(architecture)
    weights, _ = load_weights(path)
    errors = {}
    for fraction in (12, 18):
        run = scheme(weights, fraction=fraction, seed=1)
        errors[fraction] = float((run.logits(TOKENS) - logits_of(path, TOKENS)).abs().max())
    assert errors[18] < 2e-3 and errors[18] < errors[12] / 8
    assert run.transcript.bytes > 0 and run.transcript.dealt > 0 and run.transcript.rounds > 10


def test_what_the_server_of_centaur_learns(tiny: TinyPath) -> None:
    weights, _ = load_weights(tiny("llama"))
    states = walk(weights, weights.inputs(TOKENS), Plain())[1]
    run = Centaur(weights, seed=1)
    run.show(TOKENS, 1)
    assert [one.label for one in run.transcript.learnt] == ["norm1", "softmax", "norm2", "activation"]
    run.transcript.learnt.clear()
    run.logits(TOKENS)
    labels = [one.label for one in run.transcript.seen(SERVER)]
    assert labels == ["norm1", "softmax", "norm2", "activation"] * len(weights.blocks) + ["final"]
    assert not list(run.transcript.seen(DEVELOPER))
    for layer, state in enumerate(states[:-1], 1):
        (seen,) = run.transcript.seen(SERVER, label="norm1", layer=layer)
        assert not torch.allclose(seen.value, state, atol=1e-2)
        assert torch.allclose(seen.value.sort(1).values, state.sort(1).values, atol=1e-2)
        # One order of dimensions in all layers, and for all prompts: Theta' is made once.
        assert torch.allclose(seen.value, state[:, run.user.keys.hidden], atol=1e-2)


@pytest.mark.parametrize("second", [HELPER, USER])
def test_what_the_second_holder_of_permllm_learns(tiny: TinyPath, second: str) -> None:
    weights, _ = load_weights(tiny("llama"))
    states = walk(weights, weights.inputs(TOKENS), Plain())[1]
    run = PermLLM(weights, second, seed=1)
    run.logits(TOKENS)
    assert not list(run.transcript.seen(SERVER))
    (seen,) = run.transcript.seen(second, label="norm1", layer=2)
    ordered, wanted = seen.value.sort(1).values, states[1].sort(1).values
    assert not torch.allclose(ordered, wanted, atol=1e-2)  # rows are shuffled too
    nearest = torch.cdist(ordered, wanted, p=1.0).argmin(1)
    assert sorted(nearest.tolist()) == list(range(len(TOKENS)))
    assert torch.allclose(ordered, wanted[nearest], atol=1e-2)
    (active,) = run.transcript.seen(second, label="activation", layer=1)
    assert active.value.shape[0] == 1
    with pytest.raises(InputError, match="second holder"):
        PermLLM(weights, "nobody")


def test_what_a_party_learns_is_attacked_from_a_file(tiny: TinyPath, tmp_path: Path) -> None:
    """A transcript's states, saved as any observation, and read back by the command."""
    path = tiny("llama", tokenizer=True)
    weights, _ = load_weights(path)
    run = Centaur(weights, seed=1)
    run.show(TOKENS, 2)
    model = load_model(path, 1, device="cpu")
    released, _ = Channel.parse(["hidden-perm:shared"]).release(model, TOKENS, torch.Generator())
    found = run.transcript.observations(SERVER, "norm1", 2, released.info)
    save_observations(found, tmp_path / "seen.safetensors")
    with pytest.raises(InputError, match="learnt no 'norm1' of layer 9"):
        run.transcript.observations(SERVER, "norm1", 9, released.info)
    words = [
        "attack",
        "--observation",
        str(tmp_path / "seen.safetensors"),
        "--epsilon",
        "1.0",
        "--proposal",
        "vocab",
    ]
    result = CliRunner().invoke(app, [*words, "--model", path, "--no-record", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["samples"][0]["recovered_ids"] == TOKENS


def test_a_party_without_an_embedding(tiny: TinyPath) -> None:
    weights: Weights = Stip(load_weights(tiny("llama"))[0]).server.permuted
    for tokens in ([], [-1], [300]):
        with pytest.raises(InputError, match="must be numbers below 300"):
            Stip(load_weights(tiny("llama"))[0]).logits(tokens)
    with pytest.raises(InputError, match="has no embedding"):
        weights.inputs([1])
    assert not weights.tied


def test_rows_that_are_equal_once_sorted_are_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two equal rows, one with the same numbers in another order, a zero with a sign, and three others."""
    table = torch.tensor(
        [[1.0, 2, 3], [3, 1, 2], [1, 2, 3], [0.0, 5, 6], [5, -0.0, 6], [7, 8, 9], [1, 2, 4], [2, 2, 3]]
    )
    monkeypatch.setattr(measures, "load_model", lambda *_, **__: SimpleNamespace(embedding=table))
    figures = measures.unique_rows({"model": "any"}, tmp_path)
    counted = {name: figure["value"] for name, figure in figures.items()}
    assert counted == {"rows": 8, "equal": 2, "equal_sorted": 5, "equal_only_sorted": 3}
