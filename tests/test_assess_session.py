"""What the attacker has beside the rows reaches attacks, sentence, record and page, and changes no row."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import hiddenlab as hl
from hiddenlab.attacker import Attacker
from hiddenlab.channels import Channel
from hiddenlab.cli import app
from hiddenlab.config import AttackConfig
from hiddenlab.errors import InputError
from hiddenlab.eval.assess import command
from hiddenlab.eval.assess.command import assess
from hiddenlab.eval.assess.ensemble import ATTACKS, Step
from hiddenlab.eval.assess.session import LONGEST, chosen_lengths, release_all
from hiddenlab.eval.assess.verdict import Evidence, sentence_of
from hiddenlab.eval.measures.intervals import Estimate
from hiddenlab.job import Case
from hiddenlab.models import TruncatedModel
from hiddenlab.records import read_run
from hiddenlab.runner import Interrupted
from hiddenlab.types import GroundTruth, Observation

Truncated = Callable[..., TruncatedModel]
PROMPTS = ((84, 105, 32, 84, 201), (9, 77, 13, 40, 41), (42, 250, 3))


def shown(model: TruncatedModel, spec: str, **attacker: Any) -> list[Observation]:
    cases = [Case(i, f"p{i}", GroundTruth(tokens)) for i, tokens in enumerate(PROMPTS)]
    made = release_all(model, Channel.parse(spec.split("+")), cases, 0, Attacker(**attacker))
    return [observation for observation, _ in made]


def undone(model: TruncatedModel, one: Observation, other: Observation) -> bool:
    """Return whether the order of coordinates of one release undoes another's."""
    plain = model.encode(torch.tensor(one.known[0].tokens)).float()
    order = one.known[0].shown.states[0].argsort()[plain[0].argsort().argsort()]
    own = model.encode(torch.tensor(other.known[0].tokens)).float()
    return torch.allclose(other.known[0].shown.states[0][order], own[0], atol=1e-5)


def test_a_session_shares_one_key_and_another_has_another(tiny_model: Truncated) -> None:
    model = tiny_model("llama", 2)
    for key, same in (("session", False), ("forever", True)):
        rows = shown(model, "hidden-perm:shared", key=key, known=2)
        assert undone(model, rows[0], rows[0]) and undone(model, rows[0], rows[1]) is same
        assert all(len(one.known) == 2 for one in rows)
    assert [len(one.known[0].tokens) for one in shown(model, "identity", known=1)] == [5, 5, 3]
    assert [len(one.known[0].tokens) for one in shown(model, "identity", known=1, key="forever")] == [5, 5, 5]


def test_texts_of_the_attacker_leave_the_prompts_rows_as_they_are(tiny_model: Truncated) -> None:
    model = tiny_model("llama", 2)
    for spec in ("hidden-perm", "output-noise:sigma=0.1"):
        plain, beside = shown(model, spec), shown(model, spec, known=3)
        assert all(
            torch.equal(a.states, b.states) and not a.known for a, b in zip(plain, beside, strict=True)
        )
    again, more = (shown(model, "output-noise:sigma=0.1+orthogonal", key="session", known=n) for n in (1, 2))
    assert torch.equal(again[0].states, more[0].states)
    assert torch.equal(again[0].known[0].shown.states, more[0].known[0].shown.states)


def test_chosen_texts_span_all_coordinates_where_rows_are_in_order(tiny_model: Truncated) -> None:
    model = tiny_model("llama", 2)
    rows = shown(model, "orthogonal", key="session", chosen=2)[0]
    assert sum(len(text.tokens) for text in rows.known) > model.width
    for spec in ("seq-perm", "row-mixing"):
        assert [len(text.tokens) for text in shown(model, spec, key="session", chosen=2)[0].known] == [5, 5]
    assert chosen_lengths(model, Attacker(chosen=1), 700, rows.info) == [700] and LONGEST < 700
    assert len({text.tokens for one in shown(model, "orthogonal", chosen=2) for text in one.known}) == 6


def test_chosen_texts_behind_replaced_tokens_hold_each_token_once(tiny: Callable[..., str]) -> None:
    model = hl.load_model(tiny("llama", tokenizer=True), layer=2, device="cpu")
    rows = shown(model, "vocab-bijection", key="session", known=1, chosen=3)[0]
    assert len(rows.known[0].tokens) == 5
    chosen = [token for text in rows.known[1:] for token in text.tokens]
    assert len(chosen) == 3 * LONGEST and len(rows.known) == 4
    assert len(set(chosen[: model.vocab_size])) == model.vocab_size  # each once, then again
    assert chosen_lengths(model, Attacker(chosen=3), 5, rows.info) == [LONGEST] * 3
    assert not [
        text for one in shown(model, "vocab-bijection", key="session", known=1) for text in one.known[1:]
    ]
    # The frequent ones stand first: the space and letters of English, in texts of bytes.
    assert set(model.text(chosen[1:9])) < set(" etaoinsrhl")


@pytest.fixture
def known_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "ATTACKS", (Step("known-texts"),))
    monkeypatch.setattr(command, "plantable", lambda *_: [])


@pytest.fixture
def asked(tiny: Callable[..., str], tmp_path: Path) -> Callable[..., AttackConfig]:
    file = tmp_path / "prompts.txt"
    file.write_text("abcdefgh\nsome words\nthe other one\n")

    def config(*defense: str, **options: Any) -> AttackConfig:
        given = {"model": tiny("llama", tokenizer=True), "prompts": str(file), "layer": 2, "device": "cpu"}
        return AttackConfig(**given | options, defense=defense)

    return config


@pytest.mark.slow
@pytest.mark.usefixtures("known_texts")
def test_a_key_that_serves_known_texts_breaks_a_defense(
    asked: Callable[..., AttackConfig], tmp_path: Path
) -> None:
    attacker = Attacker(key="session", known=3)
    made = assess(asked("hidden-perm", "row-mixing"), 1.0, attacker=attacker, runs_dir=tmp_path)
    alone = assess(asked("hidden-perm", "row-mixing"), 1.0, attacker=Attacker(known=3), keep=False)
    assert alone.leak <= 0 and alone.status == "INCONCLUSIVE"
    assert made.findings["attacks"][0]["status"] == "not applicable"  # two maps at once are not fitted
    turned = assess(asked("orthogonal", "seq-perm"), 1.0, attacker=attacker, runs_dir=tmp_path)
    assert turned.status == "BROKEN" and turned.findings["token_accuracy"] == 1.0
    has = "has 3 known texts under the key of each prompt"
    assert turned.sentence.startswith(f"BROKEN against an attacker who {has}: ")
    assert turned.findings["attacker"] == {
        "knows": "code",
        "key": "session",
        "releases": 1,
        "known": 3,
        "chosen": 0,
        "attacks": [],
        "words": has,
        "reads": None,
    }
    assert turned.path is not None
    assert read_run(turned.path)[0].setup == {
        "minutes": 1.0,
        "knows": "code",
        "key": "session",
        "releases": 1,
        "known": 3,
        "chosen": 0,
        "attacks": [],
    }
    from hiddenlab.cli.assess import show
    from hiddenlab.report.markdown import PAGE, write_report

    write_report([turned.path], tmp_path / "page")
    assert f"<dt>the attacker</dt><dd>{has}</dd>" in (tmp_path / "page" / PAGE).read_text()
    show(turned.findings)


@pytest.mark.slow
@pytest.mark.usefixtures("known_texts")
def test_what_the_attacker_has_decides_what_is_the_same(
    asked: Callable[..., AttackConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hiddenlab.attacks.known_texts import KnownTexts

    def stopped(*_: Any) -> Any:
        raise KeyboardInterrupt

    config, attacker = asked("hidden-perm"), Attacker(key="session", known=2)
    with monkeypatch.context() as patched:
        patched.setattr(KnownTexts, "_recover", stopped)
        with pytest.raises(Interrupted) as found:
            assess(config, 1.0, attacker=attacker, runs_dir=tmp_path / "runs")
    assert found.value.run is not None
    first = found.value.run.path
    assert (
        assess(config, 1.0, attacker=Attacker(key="session", known=1), runs_dir=tmp_path / "runs").path
        != first
    )
    ended = CliRunner().invoke(app, ["rerun", str(first), "--resume", "--json"])
    told = json.loads(ended.stdout)
    assert (
        ended.exit_code == 1
        and told["attacker"] == {**attacker.to_json(), "words": attacker.words, "reads": None}
        and told["status"] == "BROKEN"
    )


def test_wrong_values_and_files_are_refused_in_one_line(tiny_model: Truncated) -> None:
    for given, said in (
        (["--known", "-1"], "--known"),
        (["--known", "1001"], "--known"),
        (["--key", "session,forever"], "--key"),
    ):
        found = CliRunner().invoke(app, ["assess", "identity", *given])
        assert found.exit_code == 2 and said in found.output, found.output
    with pytest.raises(InputError, match="go with a DEFENSE"):
        assess(AttackConfig(observation="rows.safetensors"), attacker=Attacker(known=1))
    for wrong in ({"known": -1}, {"key": "day"}, {"knowing": 3}):
        with pytest.raises(InputError, match="the attacker"):
            hl.assess("identity", tiny_model("llama", 2), "ab", **wrong)


def test_a_held_defense_says_against_whom() -> None:
    evidence = Evidence(Estimate(0.0, 0.0, 0.01, 20), 0, (0, 4), able=["a"])
    held = sentence_of(evidence, 10, None, Attacker(key="forever", chosen=1).words)
    assert held.startswith(
        "HELD against an attacker who has 1 chosen text under the one key of all prompts within 10 minutes: "
    )
    assert sentence_of(evidence, 10, None, Attacker().words).startswith(
        "HELD against these attacks within 10"
    )
    assert "keys of their own" in Attacker(known=1, chosen=2).words


def test_known_texts_is_tried_before_what_takes_long() -> None:
    names = [step.attack for step in ATTACKS]
    assert names.index("known-texts") < names.index("shard-reading")
