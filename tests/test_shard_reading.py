"""Shard reading: own tokens come from their rows, the beam is exact where it is wide, the control asks no other row."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from hiddenlab import registry
from hiddenlab.attacks.shard_reading import Rows, ShardReading, beam, readers
from hiddenlab.attacks.shard_reading.beam import Path as Reading
from hiddenlab.attacks.shard_reading.beam import extend
from hiddenlab.attacks.shard_reading.readers import sites_of
from hiddenlab.channels import Channel
from hiddenlab.defenses.cascade.command import Backend, run
from hiddenlab.defenses.cascade.planning import plan
from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.eval.cells import MEASURED, NOT_RUN, Setting, conduct, split_specs
from hiddenlab.models import Request, TruncatedModel, load_model
from hiddenlab.observation import load_site
from hiddenlab.proposals import own_text as texts
from hiddenlab.proposals.lens import TunedLens
from hiddenlab.proposals.own_text import OwnText
from hiddenlab.testing import VOCABULARY, PlainModel
from hiddenlab.types import AttackResult, Observation

LoadModel = Callable[..., TruncatedModel]
TinyPath = Callable[..., str]
SHARD = "shard:alpha=3,c=4,node=1"
HELD = (4, 5, 6, 7, 16, 17, 18, 19)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "ROWS", 4000)
    monkeypatch.setattr(texts, "HELD_OUT", 4)


def tokens_of(n: int, seed: int = 0, size: int = VOCABULARY) -> list[int]:
    return torch.randint(0, size, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def released(model: TruncatedModel, tokens: list[int], *specs: str) -> Observation:
    return Channel.parse(specs).release(model, tokens, torch.Generator().manual_seed(1))[0]


def recover(model: TruncatedModel, tokens: list[int], *specs: str, **options: Any) -> AttackResult:
    shown = released(model, tokens, *specs)
    return ShardReading(**options).fit(shown.info, model).recover(shown)


# ---- what it reads


@pytest.mark.slow
def test_own_embeddings_are_read_and_every_position_up_to_the_last_row_is_named(
    tiny_model: LoadModel,
) -> None:
    tokens = tokens_of(24)
    found = recover(tiny_model("llama", 0, "embed"), tokens, SHARD)
    assert len(found.ids) == 20 and found.positions is None and found.stop_reason == "complete"
    assert [found.ids[place] for place in HELD] == [tokens[place] for place in HELD]
    assert [found.tokens[place].row for place in HELD] == list(range(8))
    assert {one.row for place, one in enumerate(found.tokens) if place not in HELD} == {-1}
    assert not any(one.verified for one in found.tokens)


@pytest.mark.parametrize(("layer", "stream"), [(1, "resid"), (2, "k")])
def test_own_tokens_are_read_behind_layers_far_better_than_by_chance(
    tiny_model: LoadModel, layer: int, stream: str
) -> None:
    model = tiny_model("llama", layer, stream)
    shown = released(model, tokens_of(24), SHARD)
    attack = ShardReading(reach=1, without="language-model").fit(shown.info, model)
    assert attack.measured["read_0"] > 10 / VOCABULARY  # type: ignore[operator]
    assert set(attack.measured) == {"read_0", "read_1", "weight_lm"}


@pytest.mark.slow
def test_files_of_a_hardened_cascade_are_attacked(tiny: TinyPath, tmp_path: Path) -> None:
    path = tiny("llama", tokenizer=True)
    prompt = "what nodes see of a prompt"
    run(prompt, Backend(model=path, harden="client:first=1,last=1"), alpha=3, c=2, record=f"{tmp_path}/seen")
    (shown,) = load_site(f"{tmp_path}/seen/CompNode-1.safetensors", 1, "resid")
    model = load_model(path, 1, device="cpu")
    found = ShardReading().fit(shown.info, model).recover(shown)
    assert len(found.ids) == 1 + max(shown.info.positions or ())


@pytest.mark.slow
def test_prompts_at_once_give_what_each_gives_alone(tiny_model: LoadModel) -> None:
    model = tiny_model("llama", 1)
    several = [released(model, tokens_of(n, seed=n), SHARD) for n in (24, 9, 17)]
    attack = ShardReading(beam=3).fit(several[0].info, model)
    together = attack.recover_batch(several)
    assert [found.ids for found in together] == [attack.recover(one).ids for one in several]
    assert [len(found.ids) for found in together] == [20, 8, 17]


def test_readers_learn_the_tokens_before_a_row() -> None:
    """States that are one-hot of the own token, and in part of the one before."""
    generator, size = torch.Generator().manual_seed(0), 12
    tokens = torch.randint(0, size, (2600,), generator=generator)
    places = torch.arange(26).repeat(100)
    one_hot = torch.eye(size)
    states = torch.cat([one_hot[tokens], 0.5 * one_hot[tokens.roll(1)]], 1)
    text = OwnText(states, tokens, places, fitted=2080)
    rows, targets = text.at(1, held_out=True)
    assert len(rows) == 20 * 25 and torch.equal(rows[:, size:].argmax(1), targets)
    named = readers.readers_of(torch.randn(size, size, generator=generator), text, 1)
    assert [reader.right for reader in named] == [1.0, 1.0]
    (window, own), *_ = text.held_windows()
    said = named[1].log_probs(window[1:])
    assert said.argmax(1).tolist() == own[:-1].tolist()
    assert torch.allclose(said.exp().sum(1), torch.ones(len(said)), atol=1e-5)


# ---- the beam


@pytest.mark.slow
def test_a_wide_beam_finds_what_trying_every_prompt_finds(tiny: TinyPath) -> None:
    """The oracle runs all prompts of three tokens through the plain model."""
    path = tiny("llama", vocab_size=12, bos_token_id=1, eos_token_id=2)
    model = load_model(path, 1, device="cpu")
    shown = released(model, tokens_of(3, size=12), "drop-rows:size=2,after=0")
    attack = ShardReading(beam=200).fit(shown.info, model)
    found, prepared = attack.recover(shown), attack.prepare((shown.info,))
    speaker = attack._speaker(model)
    assert speaker is not None and prepared.weight in readers.WEIGHTS
    prompts = torch.tensor(list(product(range(12), repeat=3)))
    opener = torch.tensor(speaker.opened.tokens, dtype=torch.long)
    inputs = torch.cat([opener.expand(len(prompts), -1), prompts], 1)
    plain = PlainModel(path).model.to(speaker.model.dtype)
    with torch.no_grad():
        said = plain(inputs).logits.float().log_softmax(-1)[:, len(opener) :]
        begun = beam._first(speaker)
    row = shown.states[:1].float()
    scores = prepared.weight * (
        begun[prompts[:, 0]] + sum(said[:, at].gather(1, prompts[:, at + 1, None])[:, 0] for at in (0, 1))
    )
    for offset, reader in enumerate(prepared.kinds[0].readers):
        scores = scores + reader.log_probs(row)[0, prompts[:, 2 - offset]]
    best = prompts[scores.argmax()].tolist()
    right = float(scores.max())
    chosen = float(scores[(prompts == torch.tensor(found.ids)).all(1)][0])
    assert found.ids == best or right - chosen < 1e-2  # half precision may swap near ties


def test_paths_are_the_best_sums_of_both_parts() -> None:
    generator = torch.Generator().manual_seed(0)
    following, evidence = torch.randn(3, 7, generator=generator), torch.randn(7, generator=generator)
    paths = [Reading((i,), (0.5,), float(i), following=following[i]) for i in range(3)]
    every = {
        (i, t): i + 0.5 * float(following[i, t]) + float(evidence[t]) for i, t in product(range(3), range(7))
    }
    best = sorted(every, key=lambda pair: -every[pair])[:5]
    longer = extend(paths, evidence, 0.5, 5)
    assert [path.tokens for path in longer] == best
    assert [path.score for path in longer] == pytest.approx([every[pair] for pair in best], abs=1e-5)
    shares = (0.5 * following + evidence).softmax(-1)
    assert [path.chances[1] for path in longer] == pytest.approx([float(shares[pair]) for pair in best])


# ---- the control, and what it refuses


def test_without_a_language_model_positions_without_evidence_are_left_out(tiny_model: LoadModel) -> None:
    model, tokens = tiny_model("llama", 0, "embed"), tokens_of(24)
    found = recover(model, tokens, SHARD, without="language-model")
    assert found.positions == (2, 3, *HELD[:4], 14, 15, *HELD[4:])
    control = recover(model, tokens, SHARD, without="language-model", reach=0)
    assert control.positions == HELD and control.ids == [tokens[place] for place in HELD]


def test_the_control_asks_the_language_model_alone(tiny_model: LoadModel) -> None:
    """Behind given tokens the first missing one is the language model's own choice."""
    model, tokens = tiny_model("llama", 0, "embed"), tokens_of(6)
    shown = released(model, tokens, "drop-rows:size=1,after=4")
    attack = ShardReading(reach=0, beam=1).fit(shown.info, model)
    found, speaker = attack.recover(shown), attack._speaker(model)
    assert speaker is not None
    said = speaker.model.run([Request(speaker.opened, torch.tensor(tokens[:4]))], keep=False)[0].states[-1]
    assert found.ids[:4] == tokens[:4] and found.ids[4] == int(said.argmax())


def test_what_cannot_be_read_is_refused(tiny_model: LoadModel) -> None:
    model = tiny_model("llama", 1)
    for spec in ("seq-perm", "hidden-perm", "project:count=8"):
        with pytest.raises(NotApplicableError, match="shard-reading needs"):
            recover(model, tokens_of(8), spec)
    for options in ({"reach": -1}, {"beam": 0}, {"batch": 0}, {"without": "rows"}):
        with pytest.raises(InputError):
            ShardReading(**options)


# ---- the experiment


@pytest.mark.slow
def test_the_experiment_sets_every_row_beside_its_control(tiny: TinyPath, tmp_path: Path) -> None:
    make = registry.resolve("experiments", "hardened-shards")
    setting = Setting(model=tiny("llama", tokenizer=True), limit=2, max_tokens=24, device="cpu")
    experiment = make(setting, alphas="3", c=3, client="1/0,1/1", nodes="1,2", noise=0.01)
    rows = conduct("hardened-shards", experiment, tmp_path / "eval")["rows"]
    assert [row["keys"]["last layers"] for row in rows] == [0, 1, 0, 1]
    assert [row["keys"]["rows held"] for row in rows] == ["9 of 24"] * 2 + ["15 of 24"] * 2
    for row in rows:
        assert row["status"] == MEASURED
        read, control, beyond = (
            row["figures"][name]["value"]
            for name in ("missing_token_accuracy", "control_token_accuracy", "beyond_control")
        )
        assert beyond == pytest.approx((read - control) / (1 - control))
        assert 0 <= row["figures"]["held_token_accuracy"]["value"] <= 1


@pytest.mark.slow
def test_each_view_of_a_node_is_measured_beside_the_control_of_its_tokens(
    tiny: TinyPath, tmp_path: Path
) -> None:
    make = registry.resolve("experiments", "hardened-shards")
    setting = Setting(model=tiny("llama", tokenizer=True), limit=2, max_tokens=24, device="cpu")
    options = {"alphas": "3", "c": 3, "client": "1/1", "nodes": 1, "joined": 3}
    experiment = make(setting, sees="ends,layers,attn,attn-pair", **options)
    rows = conduct("hardened-shards", experiment, tmp_path / "eval")["rows"]
    assert [row["keys"]["sees"] for row in rows] == ["ends", "layers", "attn", "attn-pair"]
    assert [row["keys"]["rows held"] for row in rows] == ["9 of 24"] * 3 + ["15 of 24"]
    assert {row["status"] for row in rows} == {MEASURED}
    control = [row["figures"]["control_token_accuracy"]["value"] for row in rows]
    assert control[0] == control[1] == control[2]
    # A cell of the ends alone is the one that was measured before there were other views.
    (plain,) = make(setting, **options).cells
    assert plain.digest == experiment.cells[0].digest and "sees" not in plain.keys


def test_specs_are_split_between_them_and_not_inside() -> None:
    specs = ["none", "client:first=4,last=4+noise:sigma=0.03", "client:first=1,last=1+secret-maps", "shares"]
    assert split_specs(",".join(specs)) == specs


@pytest.mark.slow
def test_each_hardening_stands_with_its_leak_and_its_cost(tiny: TinyPath, tmp_path: Path) -> None:
    make = registry.resolve("experiments", "hardening")
    setting = Setting(model=tiny("llama", tokenizer=True), limit=2, max_tokens=24, device="cpu")
    variants = "none,client:first=1,last=1+masked-sums,shares"
    experiment = make(setting, alpha=2, c=3, repeats=1, variants=variants)
    *rows, shared = conduct("hardening", experiment, tmp_path)["rows"]
    assert shared["keys"] == {"hardening": "CrypTen, 3 of 4 layers"}  # measured where CrypTen is installed
    assert [row["keys"]["hardening"] for row in rows] == [
        "none",
        "client:first=1,last=1+masked-sums",
        "shares",
    ]
    assert {row["status"] for row in rows} == {MEASURED}
    none, ends, shares = ({name: one["value"] for name, one in row["figures"].items()} for row in rows)
    assert none["missing_token_accuracy"] == 1 and none["client_share"] == 0
    assert {"by_rows", "control_token_accuracy", "missing_token_accuracy"} <= ends.keys()
    assert "beyond_control" not in ends and 0 < shares["client_share"] < ends["client_share"] < 1
    assert shares["missing_token_accuracy"] == 0 and shares["rounds_per_layer"] == 4
    assert max(one["largest_error"] for one in (none, ends, shares)) < 1e-3
    # Bytes are those of the formula.
    counted = plan(24, model=setting.model, harden="shares")["cost"]
    assert shares["megabytes"] * 1e6 == pytest.approx(counted["bytes_up"] + counted["bytes_down"])
    counted = plan(24, 2, 3, model=setting.model, element_bytes=4)["cost"]["causal"]
    assert none["megabytes"] * 1e6 == pytest.approx(counted["bytes_paper"])


def test_the_experiment_refuses_what_leaves_nodes_nothing(tiny: TinyPath, tmp_path: Path) -> None:
    make = registry.resolve("experiments", "hardened-shards")
    setting = Setting(model=tiny("llama", tokenizer=True), limit=1, max_tokens=24, device="cpu")
    (row,) = conduct("x", make(setting, alphas="2", client="2/2", nodes=1), tmp_path)["rows"]
    assert row["status"] == NOT_RUN and "leave none" in row["reason"]
    for options in ({"client": "0/1"}, {"client": "1"}, {"client": "x/1"}, {"nodes": "0"}):
        with pytest.raises(InputError, match="whole number"):
            make(setting, **options)


# ---- late rows


def test_the_lens_finds_a_linear_relation_and_its_temperature() -> None:
    """States of which a hidden map gives the final ones: the head's best token is then the next one."""
    draws = torch.Generator().manual_seed(0)
    head, rows = torch.randn(40, 8, generator=draws), torch.randn(3000, 12, generator=draws)
    finals = rows @ torch.randn(12, 8, generator=draws) + 3
    following = (finals @ head.T).argmax(1)
    lens = TunedLens.fit(rows[:2000], finals[:2000], head, rows[2000:], following[2000:])
    assert lens.right > 0.9 and lens.scale > 0
    said = lens.log_probs(rows[2000:])
    assert torch.allclose(said.exp().sum(1), torch.ones(1000), atol=1e-4)
    assert float((said.argmax(1) == following[2000:]).float().mean()) == pytest.approx(lens.right)


def test_rows_before_a_token_are_those_of_the_same_window() -> None:
    places = torch.tensor([0, 1, 2, 0, 1, 0, 1, 2])
    text = OwnText(torch.arange(8.0)[:, None], torch.arange(8), places, fitted=5)
    rows, following = text.at(-1, held_out=False)
    assert rows[:, 0].tolist() == [1.0] and following.tolist() == [2]
    rows, following = text.at(-1, held_out=True)
    assert rows[:, 0].tolist() == [6.0] and following.tolist() == [7]


@pytest.mark.slow
def test_late_rows_take_the_place_of_the_language_model(tiny_model: LoadModel) -> None:
    """Rows behind the last layer say what the model would: a token behind a held row is the model's own answer."""
    tokens = tokens_of(24)
    model = tiny_model("llama", 1)
    last = model.sibling(stream="resid")
    first, late = (released(one, tokens, SHARD) for one in (model, last))
    attack = ShardReading(reach=0, beam=1).fit(first.info, model)
    (found,) = attack.recover_views([[Rows((first,), (late,))]])
    _, lens = attack._lens(sites_of([late]))
    expected = lens.log_probs(late.states.float()).argmax(1)
    assert found.ids[8] == int(expected[3])  # position 8 has no row; row 3 is of position 7


@pytest.mark.parametrize("alphas", ["1", "x", "2,"])
def test_a_wrong_alpha_is_refused(tiny: TinyPath, alphas: str) -> None:
    with pytest.raises(InputError, match="whole number from 2"):
        registry.resolve("experiments", "hardened-shards")(Setting(model=tiny("llama")), alphas=alphas)
