"""An assessment is recorded, shown as a page, goes on after Ctrl-C, and reads rows of a file."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import hiddenlab as hl
from hiddenlab import registry
from hiddenlab.cli import app
from hiddenlab.config import AttackConfig
from hiddenlab.errors import HiddenlabError, InputError
from hiddenlab.eval.assess import command
from hiddenlab.eval.assess.command import assess
from hiddenlab.eval.assess.kept import result_of
from hiddenlab.observation import save_observations
from hiddenlab.records import RECORD, SAMPLES, read_run
from hiddenlab.report.assessed import chosen
from hiddenlab.report.markdown import PAGE, load, write_report
from hiddenlab.runner import Interrupted
from hiddenlab.truths import save_truth
from hiddenlab.types import AttackResult, Observation
from tests.test_assess import Knowing, fakes, steps  # noqa: F401  (a fixture, used by every test)

WORDS = ("ab", "cde", "fg", "hij")


class Stopping(Knowing):
    """Reads two prompts, and is interrupted at the third, once."""

    calls = 0
    interrupts = True

    def _recover(self, observation: Observation) -> AttackResult:
        Stopping.calls += 1
        if Stopping.interrupts and Stopping.calls == 3:
            raise KeyboardInterrupt
        return super()._recover(observation)


@pytest.fixture
def words(tmp_path: Path) -> str:
    path = tmp_path / "words.txt"
    path.write_text("\n".join(WORDS))
    return str(path)


@pytest.fixture(autouse=True)
def attacks(fakes: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    Stopping.calls, Stopping.interrupts = 0, True
    registry.register("attacks", "stopping", Stopping)
    monkeypatch.setattr(command, "ATTACKS", steps("never", "knowing"))


def asked(tiny: Callable[..., str], words: str, *defense: str, **options: Any) -> AttackConfig:
    return AttackConfig(
        **{"model": tiny("llama", tokenizer=True), "prompts": words, "layer": 0, "stream": "embed"} | options,
        defense=defense,
    )


def test_a_record_holds_the_findings_and_what_each_attack_read(
    tiny: Callable[..., str], words: str, tmp_path: Path
) -> None:
    made = assess(asked(tiny, words, "identity"), 1.0, runs_dir=tmp_path / "runs")
    assert made.path is not None and made.path.parent == tmp_path / "runs" and "-assess-" in made.path.name
    record, samples = read_run(made.path)
    assert record.status == "finished" and record.summary == made.findings
    assert record.setup == {
        "minutes": 1.0,
        "knows": "code",
        "key": "request",
        "releases": 1,
        "known": 0,
        "chosen": 0,
        "attacks": [],
    }
    assert str(made) == repr(made) == made.findings["sentence"] and made.status == "BROKEN"
    read = [line for line in samples if line["attack"] == "knowing" and line["status"] == "attacked"]
    assert [line["text"] for line in read[:4]] == list(WORDS)  # the planted secrets come behind
    assert [line["outcome"] for line in samples if line["status"] == "ended"] == [
        "not applicable", "ran", "ran",  # a look at the shortest prompt, then the others
    ]  # fmt: skip
    result = result_of(read[1])
    assert result.text == "cde" and result.verified and result.ids == read[1]["truth_ids"]
    assert not list((tmp_path / "runs").glob("*/report"))  # the command makes the page
    assert assess(asked(tiny, words, "identity"), 1.0, keep=False).path is None


def test_the_page_shows_the_leakiest_prompt_and_the_attacks(
    tiny: Callable[..., str], words: str, tmp_path: Path
) -> None:
    runs = [
        assess(asked(tiny, words, *defense), 1.0, runs_dir=tmp_path / "runs").path
        for defense in (["identity"], ["gaussian:sigma=0.5"])
    ]
    assert runs[0] is not None and runs[1] is not None
    files = write_report([path for path in runs if path is not None], tmp_path / "report")
    assert sorted(path.name for path in files) == ["assess-1.png", "assess-2.png", PAGE, "report.md"]
    page, text = ((tmp_path / "report" / name).read_text() for name in (PAGE, "report.md"))
    assert page.index("Does identity hold?") < page.index("<strong>BROKEN</strong>: 100.0 %")
    assert '<h4>True text</h4><p class="text">ab</p>' in page and page.count("data:image/svg+xml") == 2
    assert "Does gaussian:sigma=0.5 hold?" in page and "not applicable: it needs something else" in page
    assert "| knowing | ran | 4 | 100 % |" in text and "![Does identity hold?](assess-1.png)" in text
    noised = load([runs[1]])[2][0]
    assert [line["id"] for line in chosen(noised)] == [one["id"] for one in noised.summary["readings"]]


def test_a_page_without_a_truth_marks_nothing_as_wrong(
    tiny: Callable[..., str], words: str, tmp_path: Path
) -> None:
    rows, _ = rows_of(tiny, tmp_path)
    path = assess(AttackConfig(observation=rows), 1.0, runs_dir=tmp_path / "runs").path
    assert path is not None
    page = write_report([path], tmp_path / "report")[1].read_text()
    assert "The true text is not known." in page and '<span class="na">not known</span>' in page
    assert 'class="wrong"' not in page and "Utility not measured: the rows come from a file" in page


def test_damaged_and_unfinished_records_are_told_in_one_line(
    tiny: Callable[..., str], words: str, tmp_path: Path
) -> None:
    path = assess(asked(tiny, words, "identity"), 1.0, out=tmp_path / "run").path
    assert path is not None
    whole = json.loads((path / RECORD).read_text())
    (path / RECORD).write_text(json.dumps(whole | {"summary": whole["summary"] | {"leak": {"value": 2}}}))
    with pytest.raises(InputError, match="leak"):
        write_report([path], tmp_path / "report")
    (path / RECORD).write_text(json.dumps(whole | {"summary": None, "status": "interrupted"}))
    with pytest.raises(InputError, match="has no verdict yet; 'hiddenlab rerun"):
        write_report([path], tmp_path / "report")
    lines = (path / SAMPLES).read_text().splitlines()
    (path / SAMPLES).write_text("\n".join([*lines, lines[0]]) + "\n")
    with pytest.raises(InputError, match="stands twice"):
        read_run(path)
    found = CliRunner().invoke(app, ["rerun", str(path)])
    assert found.exit_code == 2


# ---- Ctrl-C


def test_the_same_command_goes_on_after_an_interruption(
    tiny: Callable[..., str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "ATTACKS", steps("unsure", "stopping"))
    monkeypatch.setattr(command, "plantable", lambda *_: [])
    config = asked(tiny, words, "identity")
    with pytest.raises(Interrupted) as stopped:
        assess(config, 1.0, runs_dir=tmp_path)
    run = stopped.value.run
    assert run is not None and run.record.status == "interrupted" and run.path is not None
    kept = [(line["attack"], line.get("id")) for line in run.samples]
    assert kept == [
        ("unsure", "p001"), ("unsure", None), ("stopping", "p001"), ("stopping", "p002"), ("stopping", None),
    ]  # fmt: skip
    Stopping.calls, Stopping.interrupts = 0, False
    lines = list[str]()
    made = assess(config, 1.0, runs_dir=tmp_path, progress=lambda what, done, total: lines.append(what))
    assert made.path == run.path and Stopping.calls == 2  # the two that were left
    assert any("goes on with" in line for line in lines) and not any("unsure" in line for line in lines)
    assert made.status == "BROKEN" and made.findings["exact"]["value"] == 1
    assert [one["prompts"] for one in made.findings["attacks"]] == [1, 4]
    assert len(read_run(run.path)[0].resumed) == 1
    again = assess(config, 1.0, runs_dir=tmp_path)
    assert again.path != run.path  # it was finished
    assert again.findings["leak"] == made.findings["leak"]


def test_what_the_defense_released_and_the_minutes_decide_what_is_the_same(
    tiny: Callable[..., str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "ATTACKS", steps("stopping"))
    monkeypatch.setattr(command, "plantable", lambda *_: [])
    mine = tmp_path / "mine.py"
    code = (
        "import hiddenlab as hl\n\nclass Mine(hl.Stage):\n    spec = 'mine'\n\n"
        "    def states(self, states, generator):\n        return states * {}, None, {{}}\n"
    )
    mine.write_text(code.format(1.0))
    config = asked(tiny, words, str(mine))
    with pytest.raises(Interrupted) as stopped:
        assess(config, 1.0, runs_dir=tmp_path / "runs")
    assert stopped.value.run is not None
    Stopping.interrupts = False
    assert assess(config, 2.0, runs_dir=tmp_path / "runs").path != stopped.value.run.path
    mine.write_text(code.format(1.25))
    assert assess(config, 1.0, runs_dir=tmp_path / "runs").path != stopped.value.run.path
    mine.write_text(code.format(1.0))
    assert assess(config, 1.0, runs_dir=tmp_path / "runs").path == stopped.value.run.path


def test_rerun_goes_on_too(
    tiny: Callable[..., str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "ATTACKS", steps("stopping"))
    monkeypatch.setattr(command, "plantable", lambda *_: [])
    given = [
        "--model",
        tiny("llama", tokenizer=True),
        "--prompts",
        words,
        "--layer",
        "0",
        "--stream",
        "embed",
    ]
    out = str(tmp_path / "run")
    stopped = CliRunner().invoke(app, ["assess", "identity", *given, "--out", out])
    assert stopped.exit_code == 130 and f"hiddenlab rerun {out} --resume" in stopped.output.replace("\n", "")
    Stopping.interrupts = False
    refused = CliRunner().invoke(app, ["rerun", out])
    assert refused.exit_code == 2 and "--resume goes on" in refused.output
    ended = CliRunner().invoke(app, ["rerun", out, "--resume"])
    assert ended.exit_code == 1 and "BROKEN: 100.0 %" in ended.stdout
    assert (tmp_path / "run" / "report" / PAGE).is_file()
    other = CliRunner().invoke(app, ["assess", "seq-perm", *given, "--out", out])
    assert other.exit_code == 2 and "is not an empty directory" in other.output


# ---- Python


def test_one_call_says_whether_a_channel_holds(tiny: Callable[..., str], tmp_path: Path) -> None:
    model = hl.load_model(tiny("llama", tokenizer=True), 0, stream="embed", device="cpu")
    made = hl.assess(hl.channel(), model, list(WORDS), minutes=1.0)
    assert made.status == "BROKEN" and repr(made).startswith("BROKEN: 100.0 %") and made.path is None
    assert made.low <= made.leak <= made.high == 1 and made.findings["prompts"] == 4
    assert "<strong>BROKEN</strong>" in made._repr_html_()
    assert hl.assess("zeros", model, "ab", minutes=1.0, max_tokens=1).findings["defense"] == ["zeros"]
    for wrong in ({"minutes": 0.0}, {"prompts": []}):
        with pytest.raises(InputError):
            hl.assess("identity", model, **wrong)  # type: ignore[arg-type]
    with pytest.raises(HiddenlabError, match="did you mean gaussian"):
        hl.assess(["gausian:sigma=1"], model)


# ---- rows of a file


def rows_of(tiny: Callable[..., str], tmp_path: Path, *defense: str) -> tuple[str, str]:
    model = hl.load_model(tiny("llama", tokenizer=True), 0, stream="embed", device="cpu")
    channel = hl.channel(*defense)
    released = [channel.release(model, text, seed=i) for i, text in enumerate(WORDS * 6)]
    rows, truth = tmp_path / "rows.safetensors", tmp_path / "truth.json"
    save_observations([observation for observation, _ in released], rows)
    save_truth([secret for _, secret in released], truth)
    return str(rows), str(truth)


def test_rows_of_a_file_count_what_attacks_verify(tiny: Callable[..., str], tmp_path: Path) -> None:
    rows, _ = rows_of(tiny, tmp_path)
    found = assess(AttackConfig(observation=rows), 1.0, keep=False)
    assert found.status == "BROKEN" and "the attacks verified themselves" in found.sentence
    unknown = ("control", "exact", "token_accuracy", "rouge_l", "rare_accuracy", "secrets", "oracle")
    assert all(found.findings[name] is None for name in unknown) and found.findings["undefended"] == []
    assert found.findings["leakiest"]["text"] is None and found.findings["verified"] == 1
    assert "reason" in found.findings["utility"] and "reason" in found.findings["cost"]


def test_without_a_truth_no_defense_holds(
    tiny: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, truth = rows_of(tiny, tmp_path, "gaussian:sigma=50")
    monkeypatch.setattr(command, "ATTACKS", steps("unsure"))
    found = assess(AttackConfig(observation=rows), 1.0, keep=False)
    assert found.status == "INCONCLUSIVE" and "give the --truth of these rows" in found.sentence
    scored = assess(AttackConfig(observation=rows, truth=truth), 1.0, keep=False)
    assert scored.findings["truth"] and scored.findings["secrets"] is None
    assert scored.findings["undefended"][0]["leak"]["value"] == 1  # the truth is released without the defense
    assert scored.findings["defense"] == ["gaussian:sigma=50.0"]


def test_the_command_reads_rows_with_and_without_a_truth(tiny: Callable[..., str], tmp_path: Path) -> None:
    rows, truth = rows_of(tiny, tmp_path)
    bare = CliRunner().invoke(app, ["assess", "--observation", rows, "--no-record"])
    assert bare.exit_code == 1 and "tokens verified" in bare.stdout and "Without a truth" in bare.stdout
    given = CliRunner().invoke(app, ["assess", "--observation", rows, "--truth", truth, "--no-record"])
    assert given.exit_code == 1 and "tokens guessed without rows" in given.stdout


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([], "name a DEFENSE"),
        (["--observation", "x.safetensors"], "no observation file at x.safetensors"),
        (["identity", "--truth", "x.json"], "--truth goes with --observation"),
        (["identity", "--out", "x", "--no-record"], "give one of them"),
    ],
)
def test_wrong_input_is_one_line(given: list[str], says: str) -> None:
    found = CliRunner().invoke(app, ["assess", *given])
    assert found.exit_code == 2 and says in found.output and "Traceback" not in found.output


def test_rows_of_several_defenses_are_refused(tiny: Callable[..., str], tmp_path: Path) -> None:
    model = hl.load_model(tiny("llama", tokenizer=True), 0, stream="embed", device="cpu")
    one = hl.channel().release(model, "ab", seed=0)[0]
    other = replace(one, info=replace(one.info, channel=("seq-perm",)))
    save_observations([one, other], tmp_path / "rows.safetensors")
    with pytest.raises(InputError, match="of 2 defenses"):
        assess(AttackConfig(observation=str(tmp_path / "rows.safetensors")), 1.0, keep=False)
    assert torch.equal(one.states, other.states)
