"""``hiddenlab compare`` and ``hiddenlab demo``: what they run, print, write and refuse."""

import json
import re
from collections.abc import Callable
from datetime import datetime, timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from hiddenlab import batch, runner
from hiddenlab import job as job_module
from hiddenlab.cli import app
from hiddenlab.config import AttackConfig
from hiddenlab.errors import InputError
from hiddenlab.records import RunRecord
from hiddenlab.report.bars import draw_bars
from hiddenlab.report.markdown import load
from hiddenlab.summary import NOT_APPLICABLE

compare = import_module("hiddenlab.cli.compare")
demo = import_module("hiddenlab.cli.demo")
Run = Callable[..., Result]
ROUNDED = "round:int8"
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def run(tiny: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command on a tiny model, in an empty directory."""
    monkeypatch.chdir(tmp_path)
    model = ("--model", tiny("llama", tokenizer=True), "--layer", "1", "--threads", "1")

    def _run(verb: str, *words: str, code: int = 0, columns: int = 80) -> Result:
        result = CliRunner().invoke(app, [verb, *words, *model], env={"COLUMNS": str(columns)})
        assert result.exit_code == code, (result.output, result.exception)
        return result

    return _run


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where a model is loaded."""

    def loaded(*_: Any, **__: Any) -> None:
        pytest.fail("a model was loaded")

    monkeypatch.setattr(job_module, "load_model", loaded)


def defenses(*specs: str) -> list[str]:
    return [word for spec in specs for word in ("--defense", spec)]


def inside(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.slow
def test_runs_are_those_of_attack_and_are_recorded(run: Run, tmp_path: Path) -> None:
    given = defenses("seq-perm", f" {ROUNDED} + seq-perm ", "identity")
    result = run("compare", "six ab", *given, "--json", "--out", "out")
    made = json.loads(result.stdout)
    assert made["format"] == 1
    names = ["identity", "seq-perm", f"{ROUNDED}+seq-perm"]
    assert [one["defense"] for one in made["runs"]] == names
    stages = [[], ["seq-perm"], [ROUNDED, "seq-perm"]]
    assert [one["spec"]["defense"] for one in made["runs"]] == stages
    for one, given in zip(made["runs"], stages, strict=True):
        options = ("--budget", str(compare.BUDGET), "--no-record", "--json")
        alone = json.loads(run("attack", "six ab", *defenses(*given), *options).stdout)
        assert one["spec"] == alone["spec"]
        for name in ("recovered_ids", "exact", "verified", "truth_ids", "status"):
            assert one["samples"][0][name] == alone["samples"][0][name]
        assert one["samples"][0]["per_token"]["row"] == alone["samples"][0]["per_token"]["row"]
    folders = ["01-identity", "02-seq-perm", "03-round-int8+seq-perm"]
    assert inside(tmp_path) == ["out"]
    assert inside(tmp_path / "out") == [*folders, "compare.png"]
    assert (tmp_path / "out" / "compare.png").read_bytes().startswith(PNG)
    # The line that leads on to a report names what a report can read.
    named = re.search(r"'hiddenlab report out/(\S+)'", result.stderr)
    assert named is not None
    runs, *_ = load(sorted((tmp_path / "out").glob(named[1])))
    assert [list(one.record.spec["defense"]) for one in runs] == stages
    refused = run("compare", "six ab", *defenses("seq-perm"), "--out", "out", code=2)
    assert refused.stderr == "error: out exists and is not an empty directory; name a new one\n"
    assert inside(tmp_path / "out") == [*folders, "compare.png"]


def test_no_attack_profits_from_another_on_the_same_prompts(tiny: Callable[..., str]) -> None:
    """Rows that one attack verified are those of the prompts that the next one would be asked for."""
    config = AttackConfig(model=tiny("llama", tokenizer=True), layer=1, prompt="six ab")
    jobs = job_module.prepare_defenses(config, [(), ("seq-perm",), (ROUNDED,)])
    assert [job.attack.learns for job in jobs] == [False] * 3
    assert job_module.prepare(config).attack.learns


@pytest.mark.slow
@pytest.mark.parametrize("columns", [40, 120])
def test_one_table_with_the_baseline_first_and_a_sentence_for_each(
    run: Run, tmp_path: Path, columns: int
) -> None:
    text = run("compare", "ab", *defenses("seq-perm"), "--no-record", columns=columns).stdout
    rows = re.findall(r"^[│|] *(identity|seq-perm) ", text, re.M)
    assert rows[:2] == ["identity", "seq-perm"]
    assert "identity: 1 of 1 prompt came back exactly, 100 % of all their tokens." in text.splitlines()
    assert re.search(
        r"^seq-perm: [01] of 1 prompt came back exactly, \S+ % of all their tokens\.$", text, re.M
    )
    assert "At most 256 candidates a token" in text
    assert inside(tmp_path) == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (defenses("seq-perm", "seq-perm"), "the defense seq-perm is given twice"),
        (defenses("seq-perm+int8", "seq-perm + int8"), "the defense seq-perm+int8 is given twice"),
        (defenses("seq-perm", "nope"), "unknown defense 'nope'"),
        (defenses("seq-perm+nope"), "unknown defense 'nope'"),
        (defenses(""), "'' names nothing"),
        (defenses(" "), "'' names nothing"),
        (defenses("+"), "'' names nothing"),
        (defenses("seq-perm+"), "'' names nothing, and each '+' stands between two names"),
        (defenses("seq-perm++int8"), "'' names nothing"),
        (defenses("gaussian"), "the defense gaussian needs sigma"),
        (defenses("gaussian:sigma=1e999"), "cannot use sigma='1e999'"),
        (defenses("gaussian:sigma=nan"), "cannot use sigma='nan'"),
        (defenses("seq\x1b[31m"), "unknown defense 'seq\\x1b[31m'"),
        ([*defenses("seq-perm"), "--attack", ""], "'' names nothing"),
        ([*defenses("seq-perm"), "--attack", "nope"], "unknown attack 'nope'"),
        ([*defenses("seq-perm"), "--out", "new", "--no-record"], "give one of them"),
        ([*defenses("seq-perm"), "--out", "full"], "full exists and is not an empty directory"),
        ([*defenses("seq-perm"), "--out", "full/file"], "full/file exists and is not an empty directory"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_a_model_is_loaded(
    run: Run, no_model: None, tmp_path: Path, words: list[str], says: str
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    result = run("compare", "ab", *words, code=2)
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ") and says in line and result.stdout == ""
    assert inside(tmp_path) == ["full"] and inside(tmp_path / "full") == ["file"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "Missing option '--defense'"),
        ([*defenses("seq-perm"), "--observation", "x"], "No such option: --observation"),
        ([*defenses("seq-perm"), "--states", "x"], "No such option: --states"),
        ([*defenses("seq-perm"), "--truth", "x"], "No such option: --truth"),
        ([*defenses("seq-perm"), "--budget", "0"], "Invalid value for '--budget'"),
        ([*defenses("seq-perm"), "--budget", "9" * 30], "Invalid value for '--budget'"),
        ([*defenses("seq-perm"), "--limit", "-1"], "Invalid value for '--limit'"),
    ],
)
def test_usage(run: Run, no_model: None, words: list[str], says: str) -> None:
    assert says in run("compare", "ab", *words, code=2).stderr


@pytest.mark.parametrize("source", [{"observation": "x.safetensors"}, {"states": ("x.npy",)}])
def test_states_of_a_file_are_refused(no_model: None, source: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="states of a file lie behind one defense"):
        runner.run_defenses(AttackConfig(**source), [(), ("seq-perm",)], keep=False)


def test_an_interruption_says_what_was_not_begun(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recover, calls = batch.recover, list[int]()

    def interrupted(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return recover(*given)

    monkeypatch.setattr(batch, "recover", interrupted)
    given = defenses("seq-perm", f"{ROUNDED}+seq-perm", ROUNDED)
    result = run("compare", "ab", *given, "--out", "out", code=130)
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    path = Path("out", "02-seq-perm")
    assert f"interrupted; recorded: 0 of 1 prompt. Continue with: hiddenlab rerun {path} --resume" in lines
    assert f"not begun: --defense {ROUNDED}+seq-perm --defense {ROUNDED}; finished: 1" in lines
    assert inside(tmp_path / "out") == ["01-identity", "02-seq-perm"]
    status = [json.loads((tmp_path / "out" / name / "record.json").read_text())["status"] for name in
              ("01-identity", "02-seq-perm")]  # fmt: skip
    assert status == ["finished", "interrupted"]


def test_an_interruption_before_the_first_one(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(job_module, "load_model", interrupted)
    lines = run("compare", "ab", *defenses("seq-perm"), code=130).stderr.splitlines()
    assert "interrupted; nothing was recorded" in lines
    assert "not begun: --defense identity --defense seq-perm" in lines
    assert inside(tmp_path) == []


@pytest.mark.parametrize(
    ("words", "budget"),
    [
        ((), compare.BUDGET),
        (("--budget", "7"), 7),
        (("--attack", "vocab-match:search=greedy"), compare.BUDGET),
        (("--attack", "beam-decoding"), None),
        (("--attack", "beam-decoding", "--budget", "7"), 7),
    ],
)
def test_vocabulary_matching_has_a_cap(
    run: Run, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], budget: int | None
) -> None:
    seen: list[AttackConfig] = []

    def conducted(config: AttackConfig, *_: Any) -> None:
        seen.append(config)
        raise InputError("seen")

    monkeypatch.setattr(compare, "_conduct", conducted)
    run("compare", "ab", *defenses("seq-perm"), *words, code=2)
    assert seen[0].budget == budget


def of_samples(*samples: dict[str, Any]) -> runner.Run:
    record = RunRecord(verb="attack", spec={}, seeds={}, inputs_sha256="", prompts=len(samples))
    return runner.Run(record, list(samples), None)


def test_a_sentence_counts_tokens_and_prompts() -> None:
    short = {"status": "attacked", "exact": True, "token_accuracy": 1.0, "tokens": 1}
    long = {"status": "attacked", "exact": False, "token_accuracy": 0.0, "tokens": 99}
    none = {"status": NOT_APPLICABLE, "exact": None, "reason": "no rows"}
    said = compare._sentence
    assert (
        said("x", of_samples(short, long))
        == "x: 1 of 2 prompts came back exactly, 1.0 % of all their tokens."
    )
    assert said("x", of_samples(short, none, none)) == (
        "x: 1 of 1 prompt came back exactly, 100 % of all their tokens. 2 prompts could not be attacked."
    )
    assert said("x", of_samples(none)) == "x: not attacked, no rows"
    nearly = {**long, "token_accuracy": 1 - 1 / 9999, "tokens": 9999}
    assert "99.9 % of all their tokens" in said("x", of_samples(nearly))


def test_two_of_one_second_have_directories_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime(2026, 1, 2, 3, 4, 5, tzinfo=tz) + timedelta()

    monkeypatch.setattr(compare, "datetime", Clock)
    names = []
    for _ in range(3):
        path = compare._new_folder(tmp_path)
        path.mkdir()
        names.append(path.name)
    assert names == ["20260102-030405-compare", "20260102-030405-compare-2", "20260102-030405-compare-3"]


def test_a_long_spec_has_a_name_that_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Path] = []
    monkeypatch.setattr(runner, "prepare_defenses", lambda *_: iter(()))
    monkeypatch.setattr(runner, "_run_each", lambda jobs, names, folders, **_: seen.extend(folders) or [])
    runner.run_defenses(
        AttackConfig(), [(), (f"gaussian:sigma=0.{'0' * 300}1",), ("A/../b",)], tmp_path / "new"
    )
    assert [path.parent for path in seen] == [tmp_path / "new"] * 3
    for path in seen:
        path.mkdir(parents=True)


def test_names_are_drawn_as_they_are(tmp_path: Path) -> None:
    """A path with dollar signs is no formula."""
    rows = [{"defense": "a$\\x$", "exact": 1.0}, {"defense": "$", "exact": None}]
    draw_bars(rows, "defense", {"exact": "exact"}, "model $\\frac$", tmp_path / "x.png", logarithmic=False)
    assert (tmp_path / "x.png").read_bytes().startswith(PNG)


# demo


def test_demo_shows_three_attacks_and_records_nothing(
    tiny: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[AttackConfig] = []

    def configured(**options: Any) -> AttackConfig:
        made.append(AttackConfig(**options))
        return AttackConfig(
            **{**options, "model": tiny("llama", tokenizer=True), "layer": 1, "budget": 8, "max_tokens": 4}
        )

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "AttackConfig", configured)
    result = CliRunner().invoke(app, ["demo", "--threads", "1"], env={"COLUMNS": "40"})
    assert result.exit_code == 0, (result.output, result.exception)
    text, flat = result.stdout, re.sub(r"\s+", " ", result.stdout)
    assert [config.defense for config in made] == [act.defense for act in demo.ACTS]
    assert len(made) == 3 and all(config.model is None and config.threads == 1 for config in made)
    places = [flat.index(act.title) for act in demo.ACTS]
    assert places == sorted(places)
    for act in demo.ACTS:
        assert re.sub(r"\s+", " ", act.before) in flat and re.sub(r"\s+", " ", act.after) in flat
        assert f"  the prompt:    {act.prompt}\n" in text
    assert len(re.findall(r"^  The prompt was (?:not )?recovered exactly", text, re.M)) == 3
    assert text.endswith(f"{demo.NEXT}\n")
    assert inside(tmp_path) == []


def test_demo_is_interrupted_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(job_module, "load_model", interrupted)
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == "interrupted; nothing was recorded"
    assert demo.ACTS[1].title not in result.stdout and inside(tmp_path) == []


def test_every_command_that_demo_names_exists() -> None:
    for line in demo.NEXT.splitlines():
        if found := re.match(r"  hiddenlab (\w+)((?: --[\w-]+)*)", line):
            text = CliRunner().invoke(app, [found[1], "-h"]).output
            for option in re.findall(r"--[\w-]+", line):
                assert re.search(rf"^  (?:-\w, )?{option}\b", text, re.M), (line, option)
