"""A hardened Cascade gives what the plain model gives, and its nodes get nothing of the client's layers."""

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM

from hiddenlab.attacks.self_scores import SelfScores
from hiddenlab.defenses.cascade.backend import Cascade
from hiddenlab.defenses.cascade.client_layers import BetweenClientLayers
from hiddenlab.defenses.cascade.command import Backend, run
from hiddenlab.defenses.cascade.exposure import NOT_MEASURED, NOT_PRIVATE, attack_on, verdicts
from hiddenlab.defenses.cascade.generate import generate
from hiddenlab.defenses.cascade.hardening import ClientLayers, Hardening, SecretCoordinates
from hiddenlab.defenses.cascade.load import load_cascade_model, plain_outputs
from hiddenlab.defenses.cascade.passes import Pass
from hiddenlab.defenses.cascade.planning import plan
from hiddenlab.defenses.cascade.secret_maps import Secret, SecretMaps
from hiddenlab.errors import HiddenlabError, InputError
from hiddenlab.models import load_model
from hiddenlab.observation import load_observations
from hiddenlab.sharding import Plan
from hiddenlab.testing import DECODERS, VOCABULARY, byte_tokenizer
from hiddenlab.types import Site

TinyPath = Callable[..., str]
ENDS = "client:first=1,last=1"


def start(path: str, kind: str = "local", alpha: int = 2, **options: object) -> Cascade:
    return Backend(kind=kind, model=path, harden=ENDS, **options).start(alpha, 1, True)  # type: ignore[arg-type]


def prompt(n: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, (n,), generator=torch.Generator().manual_seed(seed))


def plain(path: str, tokens: Tensor) -> Tensor:
    return plain_outputs(load_cascade_model(path, attention="eager"), tokens)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", sorted({*DECODERS} - {"gpt2"}))
def test_every_architecture_gives_the_plain_models_logits_and_tokens(
    tiny: TinyPath, architecture: str
) -> None:
    path, tokens = tiny(architecture), prompt(11)
    with start(path) as cascade:
        found = cascade.forward(tokens, Plan.clustered(11, 2, alpha=2))
        assert torch.allclose(found, plain(path, tokens), atol=1e-4)
        answer = list(generate(cascade, tokens, Plan.clustered(11, 2, alpha=2), new_tokens=5))
    whole = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32)
    whole.generation_config.eos_token_id = None
    expected = whole.generate(tokens[None], max_new_tokens=5, do_sample=False)
    assert answer == expected[0, 11:].tolist()


def test_a_model_that_adds_positions_to_its_inputs_is_refused(tiny: TinyPath) -> None:
    with pytest.raises(InputError, match="cannot be shared between client and nodes"):
        start(tiny("gpt2"))


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    n=st.integers(1, 17), alpha=st.integers(1, 4), c=st.integers(1, 3), m=st.integers(1, 2), first=st.integers(1, 2),
    symmetric=st.booleans(), data=st.data(),
)  # fmt: skip
def test_every_plan_gives_the_plain_models_logits(
    tiny: TinyPath, n: int, alpha: int, c: int, m: int, first: int, symmetric: bool, data: st.DataObject
) -> None:
    path, tokens = tiny("gemma2"), prompt(n, seed=data.draw(st.integers(0, 9)))
    made = Plan.clustered(n, c, alpha=alpha, m=m, symmetric=symmetric)
    cascade = Backend(model=path, harden=f"client:first={first},last=1").start(alpha, m, symmetric)
    assert torch.allclose(cascade.forward(tokens, made), plain(path, tokens), atol=1e-4)


def test_the_wire_and_requests_at_once_give_the_same(tiny: TinyPath) -> None:
    path = tiny("llama")
    prompts = [prompt(n, seed=n) for n in (4, 9, 13)]

    def answer(cascade: Cascade, tokens: Tensor) -> list[int]:
        made = Plan.clustered(len(tokens), 2, alpha=2, symmetric=True)
        return list(generate(cascade, tokens, made, new_tokens=4))

    with start(path) as local, start(path, "wire") as wire, ThreadPoolExecutor(3) as pool:
        alone = [answer(local, tokens) for tokens in prompts]
        assert list(pool.map(lambda tokens: answer(wire, tokens), prompts)) == alone
        assert wire.counters()["client"]["compute"] > 0
        assert wire.healthy() == local.healthy()


def test_padding_is_hidden_from_the_clients_layers_too(tiny: TinyPath) -> None:
    path, tokens = tiny("llama"), prompt(9)
    mask = torch.ones(9, dtype=torch.bool)
    mask[4:6] = False
    made = Plan.clustered(9, 2, alpha=2)
    with start(path) as hardened:
        unhardened = Backend(model=path).start(2, 1, False)
        expected = unhardened.forward(tokens, made, mask=mask)
        found = hardened.forward(tokens, made, mask=mask)
    assert torch.allclose(found[mask], expected[mask], atol=1e-4)


def test_noise_of_the_client_is_gaussian_stays_with_a_request_and_is_told_to_attacks(
    tiny: TinyPath, tmp_path: Path
) -> None:
    path, n = tiny("gemma2", tokenizer=True), 60
    spec, made = "client:first=1,last=1+noise:sigma=0.2", Plan.clustered(n, 2, alpha=2)
    cascade = Backend(model=path, harden=spec).start(2, 1, False)
    assert isinstance(cascade, BetweenClientLayers)
    model = load_cascade_model(path, attention="eager")
    embedded = model.get_input_embeddings()(prompt(n)).detach()
    whole = cascade._noised(Pass("a", made), prompt(n))
    parts = [cascade._noised(Pass("a", Plan.clustered(n, 2, alpha=2), since=40), prompt(n)[40:])]
    assert torch.equal(whole[40:], parts[0])
    noise = (whole - embedded) / 0.2
    assert abs(float(noise.mean())) < 0.05 and abs(float(noise.std()) - 1) < 0.05
    assert abs(float(noise.quantile(0.9)) - 1.2816) < 0.1
    assert not torch.equal(whole, cascade._noised(Pass("b", made), prompt(n)))
    # Embeddings that the user computed get the same noise, and outputs are the model's of the noised ones.
    assert torch.allclose(cascade._noised(Pass("a", made), embedded), whole)
    found = cascade.step(Pass("a", made), prompt(n))
    assert torch.allclose(found, model(inputs_embeds=whole[None]).logits[0], atol=1e-4)
    run("what nodes see of this", Backend(model=path, harden=spec), alpha=2, c=2, record=f"{tmp_path}/seen")
    for one in load_observations(f"{tmp_path}/seen/CompNode-0.safetensors"):
        assert one.info.channel == ("gaussian:sigma=0.2",) and one.info.noise_sigma == 0.2


def test_nodes_see_no_token_and_no_layer_of_the_client(tiny: TinyPath, tmp_path: Path) -> None:
    path = tiny("llama", tokenizer=True)
    folder = f"{tmp_path}/seen"
    result = run("what nodes see of this", Backend(model=path, harden=ENDS), alpha=2, c=2, record=folder)
    with torch.no_grad():
        whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        tokens = torch.tensor([byte_tokenizer()("what nodes see of this")["input_ids"]])
        states = whole(tokens, output_hidden_states=True).hidden_states
    seen = load_observations(f"{folder}/CompNode-0.safetensors")
    sites = {o.info.site for o in seen}
    assert sites == {Site(1, "resid"), *(Site(layer, s) for layer in (2, 3) for s in ("resid", "attn"))}
    own = next(o for o in seen if o.info.site == Site(1, "resid"))
    assert own.info.positions is not None
    assert torch.allclose(own.states, states[1][0, list(own.info.positions)], atol=1e-4)
    layers = {o.info.site.layer for o in load_observations(f"{folder}/AttnNode-0-1.safetensors")}
    assert layers == {2, 3}
    assert result["worst"]["node"] == "CompNode 0" and result["worst"]["status"] == NOT_PRIVATE
    assert "--layer 2 --stream attn --attack partial-sums" in result["attack"]
    both = run(
        "what nodes see of this", Backend(model=path, harden=ENDS), alpha=2, c=2, symmetric=True,
        record=f"{folder}-both",
    )  # fmt: skip
    assert both["worst"]["status"] == NOT_PRIVATE and "--attack partial-sums" in both["attack"]
    rows = [
        o for o in load_observations(f"{folder}-both/AttnNode-0-1.safetensors") if o.info.site == Site(2, "v")
    ]
    assert len(rows[0].states) == len("what nodes see of this")
    noisy = "client:first=1,last=1+noise:sigma=0.1"
    away = run(
        "what nodes see of this", Backend(model=path, harden=noisy), alpha=3, c=2, record=f"{folder}-3"
    )
    assert away["worst"]["status"] == NOT_MEASURED and away["attack"] is None


def test_the_plan_counts_the_nodes_layers_and_claims_nothing_unmeasured(tiny: TinyPath) -> None:
    path = tiny("llama")
    without, hardened = (
        plan(24, alpha=3, c=2, model=path, harden=spec) for spec in (None, f"{ENDS}+noise:sigma=0.1")
    )
    assert hardened["cost"]["bytes_paper"] * 4 == without["cost"]["bytes_paper"] * 2
    assert hardened["cost"]["client_layers"] == 2 and without["cost"]["client_layers"] == 0
    assert {one["status"] for one in hardened["verdicts"]} == {NOT_MEASURED}
    assert all(one["others"] == 0 for one in hardened["verdicts"]) and hardened["evidence"] == []
    for old, new in zip(without["verdicts"], hardened["verdicts"], strict=True):
        assert old["others"] + old["not_measured"] == new["not_measured"] and old["own"] == new["own"]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("client", "needs first"),
        ("client:first=0", "at least 1 first"),
        ("client:first=2,last=0", "at least 1 first and 1 last"),
        ("clent:first=1", "did you mean client"),
        ("client:first=2+client:first=3", "names client twice"),
        ("client:first=one", "cannot use first='one'"),
        ("client:first=1+", "has an empty part"),
        ("noise:sigma=0.1", "needs layers of the client"),
        ("client:first=1+noise:sigma=0", "above 0"),
        ("shares+client:first=1", "stands alone"),
    ],
)
def test_a_wrong_hardening_names_the_way_out(spec: str, says: str) -> None:
    with pytest.raises(HiddenlabError, match=says):
        Hardening.parse(spec)


def test_a_section_that_kept_other_layers_is_refused(tiny: TinyPath, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where layers share weights none are left out, so that a section would run all of them."""
    monkeypatch.setattr("hiddenlab.models.load.with_layers", lambda architecture, *_: architecture)
    with pytest.raises(InputError, match="share weights, so that they cannot be parted"):
        start(tiny("llama"))


def test_some_layer_must_remain_for_the_nodes() -> None:
    with pytest.raises(InputError, match="leave none to the nodes"):
        ClientLayers(3, 1).sections(4)
    assert [(s.first, s.end) for s in ClientLayers(2, 1).sections(4)] == [(0, 2), (2, 3), (3, None)]


# ---- secret maps


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    n=st.integers(1, 15), alpha=st.integers(1, 3), c=st.integers(1, 3), m=st.integers(1, 2),
    spread=st.sampled_from([1.0, 4.0, 64.0]), symmetric=st.booleans(),
)  # fmt: skip
def test_secret_maps_change_no_output(
    tiny: TinyPath, n: int, alpha: int, c: int, m: int, spread: float, symmetric: bool
) -> None:
    path, tokens = tiny("gemma2"), prompt(n, seed=n)  # with a soft cap and windows
    made = Plan.clustered(n, c, alpha=alpha, m=m, symmetric=symmetric)
    cascade = Backend(model=path, harden=f"secret-maps:spread={spread}").start(alpha, m, symmetric)
    assert torch.allclose(cascade.forward(tokens, made), plain(path, tokens), atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["secret-maps", f"{ENDS}+secret-maps"])
def test_requests_at_once_have_maps_of_their_own(tiny: TinyPath, spec: str) -> None:
    path = tiny("qwen3")
    prompts = [prompt(n, seed=n) for n in (3, 8, 12, 12)]

    def answer(cascade: Cascade, tokens: Tensor) -> list[int]:
        made = Plan.clustered(len(tokens), 2, alpha=2, symmetric=True)
        return list(generate(cascade, tokens, made, new_tokens=5))

    with (
        Backend(model=path).start(2, 1, True) as bare,
        Backend(kind="wire", model=path, harden=spec).start(2, 1, True) as hardened,
        ThreadPoolExecutor(4) as pool,
    ):
        expected = [answer(bare, tokens) for tokens in prompts]
        assert list(pool.map(lambda tokens: answer(hardened, tokens), prompts)) == expected


def test_an_attnnode_gets_other_rows_each_time_but_the_same_scores(tiny: TinyPath, tmp_path: Path) -> None:
    path = tiny("llama", tokenizer=True)

    def seen(spec: str | None, name: str) -> dict[str, Tensor]:
        folder = f"{tmp_path}/{name}"
        run("who sees this", Backend(model=path, harden=spec), alpha=2, c=2, record=folder)
        observations = [
            one for node in ("AttnNode-0-0", "CompNode-0")
            for one in load_observations(f"{folder}/{node}.safetensors")
        ]  # fmt: skip
        return {f"{o.info.site.stream} {o.info.site.layer}": o.states for o in observations}

    bare, once, again = seen(None, "bare"), seen("secret-maps", "once"), seen("secret-maps", "again")
    for stream in ("q 1", "k 1", "v 1", "q 3", "v 3"):
        others = [part[stream] for part in (bare, once, again)]
        assert all(
            not torch.allclose(a, b, atol=0.1) for a, b in ((others[0], others[1]), (others[1], others[2]))
        )
        # Lengths are changed too, or a table of them would name tokens.
        assert not torch.allclose(others[0].norm(dim=1), others[1].norm(dim=1), rtol=0.05)
    kv, heads = 2, 4
    for part in (once, again):
        scores = [
            p["q 2"].unflatten(1, (heads, -1))[:, 0] @ p["k 2"].unflatten(1, (kv, -1))[:, 0].T
            for p in (bare, part)
        ]
        assert torch.allclose(*scores, atol=1e-3)
        # A CompNode can undo the maps: what it sees is what it sees without.
        for stream in ("embed 0", "resid 2", "attn 1", "attn 3"):
            assert torch.allclose(bare[stream], part[stream], atol=2e-3)


def test_the_plan_says_what_was_measured_behind_secret_maps(tiny: TinyPath) -> None:
    path = tiny("llama")
    bare, mapped, both = (
        plan(24, alpha=3, c=2, model=path, harden=spec)
        for spec in (None, "secret-maps", f"{ENDS}+secret-maps")
    )
    comps = slice(0, 3)
    assert bare["verdicts"][comps] == mapped["verdicts"][comps]  # they know the maps
    for one in mapped["verdicts"][3:]:
        j, k = (int(n) for n in re.findall(r"\d+", one["node"]))
        # Scores of rows with themselves: only where queries and keys are of the same rows.
        assert one["status"] == (NOT_PRIVATE if j == k else NOT_MEASURED) and one["others"] == 0
        assert one["evidence"] == ("self scores" if j == k else None)
        assert ("read" in one["sentence"]) == (j == k)
    assert any("secret-coordinates" in line for line in mapped["evidence"])
    assert {one["status"] for one in both["verdicts"][3:]} == {NOT_MEASURED}
    assert bare["cost"] == mapped["cost"]


def test_a_recorded_run_names_the_attack_on_secret_maps(tiny: TinyPath, tmp_path: Path) -> None:
    path = tiny("llama", tokenizer=True)
    made = Plan.clustered(8, 2, alpha=2, symmetric=True)
    found = verdicts(made, hardening=Hardening.parse("secret-maps"))
    worst = next(one for one in found if one.evidence == "self scores" and one.own == 8)
    assert attack_on(made, worst) == ("self-scores", 1, "qkv")
    run(
        "8 tokens",
        Backend(model=path, harden="secret-maps"),
        alpha=2,
        c=2,
        symmetric=True,
        record=f"{tmp_path}/s",
    )
    seen = load_observations(f"{tmp_path}/s/AttnNode-0-1.safetensors")
    model = load_model(path, 1, stream="qkv", device="cpu")
    (one,) = [o for o in seen if o.info.site == Site(1, "qkv")]
    read = SelfScores().fit(one.info, model).recover(one)
    assert [token.token for token in read.tokens] == byte_tokenizer()("8 tokens")["input_ids"]


def test_a_node_with_all_rows_up_to_its_last_is_not_private_behind_the_clients_layers(tiny: TinyPath) -> None:
    result = plan(6, shards="0,1,2;3,4,5", model=tiny("llama"), harden=ENDS)
    status = {one["node"]: one["status"] for one in result["verdicts"]}
    assert [status[f"CompNode {i}"] for i in range(2)] == [NOT_PRIVATE, NOT_PRIVATE]
    assert status["AttnNode (0, 0)"] == NOT_PRIVATE
    assert status["AttnNode (0, 1)"] == status["AttnNode (1, 1)"] == NOT_MEASURED
    # Values at layers 1 and 2 are not what these nodes get.
    assert [line.partition(":")[0] for line in result["evidence"]] == [
        "partial sums behind the client's layers, in float32"
    ]
    (sent,) = [one["sentence"] for one in result["verdicts"] if one["node"] == "AttnNode (1, 1)"]
    assert "gets q, k or v of 3 of 6 tokens" in sent


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"wire": "bfloat16"}])
def test_a_spread_that_rounding_would_show_is_refused(tiny: TinyPath, options: dict[str, str]) -> None:
    with pytest.raises(InputError, match="spread must be at most 4 with bfloat16"):
        Backend(model=tiny("llama"), harden="secret-maps:spread=5", **options).start(2, 1, False)  # type: ignore[arg-type]


def test_maps_depend_on_all_of_the_secret() -> None:
    """A seed of torch's generator has 32 bits, which an AttnNode could try out."""
    keys = torch.zeros(1, 1, 4)
    with mock.patch("torch.Generator", side_effect=AssertionError):
        first, again, other = (
            SecretMaps(Secret(4.0, key)).of("request", 0, keys, keys)
            for key in (b"a" * 32, b"a" * 32, b"b" * 32)
        )
    assert torch.equal(first.queries, again.queries) and not torch.allclose(first.queries, other.queries)
    assert not torch.allclose(first.queries, first.values)
    for forth, back in ((first.queries, first.keys.mT), (first.values, first.back)):
        assert torch.allclose(forth @ back, torch.eye(4), atol=1e-5)


def test_the_secret_is_in_no_text() -> None:
    secret = SecretCoordinates().secret()
    assert repr(secret) == "Secret(spread=4.0)" and len(secret.key) == 32
    assert secret != SecretCoordinates().secret()
    with pytest.raises(InputError, match="spread must be between 1 and 64"):
        SecretCoordinates(0.5)
