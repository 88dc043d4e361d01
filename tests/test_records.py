"""Records: what is on disk at each moment, and what a reader makes of it."""

import errno
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from hiddenlab import records as module
from hiddenlab.errors import InputError
from hiddenlab.records import (
    RECORD,
    SAMPLES,
    Recorder,
    RecordError,
    RunRecord,
    foreign_code,
    read_run,
    resume_command,
)
from hiddenlab.summary import summarise
from hiddenlab.testing import attack_sample
from hiddenlab.utils.digests import digest_of_files
from hiddenlab.utils.environment import describe_environment, peak_memory_mb
from hiddenlab.utils.files import new_folder


def sample(index: int, **changes: Any) -> dict[str, Any]:
    return attack_sample(
        index,
        **{"tokens": 10, "evaluated_tokens": 20, "text": "é\u2028\n", "prefill_seconds": 0.5, **changes},
    )


def start(path: Path) -> Recorder:
    return Recorder.create(RunRecord(verb="attack", spec={"seed": 0}, inputs_sha256="abc"), out=path)


def on_disk(path: Path) -> dict[str, Any]:
    return json.loads((path / RECORD).read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def test_the_record_is_written_first_and_replaced_at_the_end(tmp_path: Path) -> None:
    recorder = start(tmp_path / "run")
    first = on_disk(tmp_path / "run")
    assert first["status"] == "started"
    assert first["summary"] is None
    assert first["finished"] is None
    assert (tmp_path / "run" / SAMPLES).read_bytes() == b""
    recorder.append(sample(0))
    assert read_run(tmp_path / "run")[1] == [sample(0)]
    recorder.close("finished", {"exact": None, "odd": float("nan")})
    last = on_disk(tmp_path / "run")
    assert last["status"] == "finished"
    assert last["summary"] == {"exact": None, "odd": None}
    assert last["started"] == first["started"] <= last["finished"]
    assert sorted(os.listdir(tmp_path / "run")) == sorted([RECORD, SAMPLES])


def test_directories_are_named_by_time_verb_and_hash(tmp_path: Path) -> None:
    records = [RunRecord(verb="attack", spec={"seed": seed}) for seed in (0, 0, 1)]
    paths = [Recorder.create(r, runs_dir=tmp_path / "runs").path for r in records]
    names = [path.name.split("-") for path in paths if path is not None]
    assert len(set(paths)) == 3
    assert all(name[2] == "attack" and len(name[3]) == 8 for name in names)
    assert names[0][3] == names[1][3] != names[2][3]


def test_nothing_is_written_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recorder = Recorder.create(RunRecord(verb="attack", spec={}), keep=False)
    recorder.append(sample(0))
    recorder.close("finished", {})
    assert recorder.path is None
    assert recorder.samples == [sample(0)]
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("torn", ["", '{"index": 1', '{"index": 1}', "\xff"])
def test_a_torn_last_sample_is_dropped(tmp_path: Path, torn: str) -> None:
    recorder = start(tmp_path / "run")
    recorder.append(sample(0))
    recorder.close("interrupted")
    with open(tmp_path / "run" / SAMPLES, "a", encoding="latin-1") as handle:
        handle.write(torn)
    assert read_run(tmp_path / "run")[1] == [sample(0)]
    again = Recorder.resume(tmp_path / "run", "abc")
    assert again.samples == [sample(0)]
    assert again.record.status == "started"
    again.append(sample(1))
    again.close("finished", {})
    assert read_run(tmp_path / "run")[1] == [sample(0), sample(1)]


def test_damage_in_the_middle_is_not_passed_over(tmp_path: Path) -> None:
    start(tmp_path / "run").close("interrupted")
    (tmp_path / "run" / SAMPLES).write_text(json.dumps(sample(0)) + '\n{broken\n{"index": 2}\n')
    with pytest.raises(
        InputError, match=r"samples.jsonl, line 2 is no valid JSON.*cut the file before that line"
    ):
        read_run(tmp_path / "run")


def test_resume_refuses_other_inputs_and_a_run_that_is_being_written(tmp_path: Path) -> None:
    recorder = start(tmp_path / "run")
    before = on_disk(tmp_path / "run")
    with pytest.raises(InputError, match="have changed"):
        Recorder.resume(tmp_path / "run", "other")
    with pytest.raises(InputError, match="another process"):
        Recorder.resume(tmp_path / "run", "abc")
    assert on_disk(tmp_path / "run") == before
    recorder.close("interrupted")
    Recorder.resume(tmp_path / "run", "abc").close("finished")


def test_a_full_disk_leaves_what_was_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = start(tmp_path / "run")
    recorder.append(sample(0))

    def full(handle: Any, data: bytes) -> None:
        handle.write(data[:5])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "_write_all", full)
    with pytest.raises(
        RecordError, match=r"No space left.*what it holds \(1 prompt\) stays readable"
    ) as caught:
        recorder.append(sample(1))
    assert "\n" not in str(caught.value)
    monkeypatch.setattr("hiddenlab.utils.files.os.fsync", lambda handle: full(io.BytesIO(), b""))
    with pytest.raises(RecordError, match="No space left"):
        recorder.close("failed")
    assert sorted(os.listdir(tmp_path / "run")) == sorted([RECORD, SAMPLES])
    record, samples = read_run(tmp_path / "run")
    assert record.status == "started"
    assert samples == [sample(0)]
    assert (tmp_path / "run" / SAMPLES).read_bytes().endswith(b"}\n")


def test_a_short_write_is_completed(tmp_path: Path) -> None:
    class Slow(io.FileIO):
        def write(self, data: Any) -> int:
            return super().write(data[:3])

    with Slow(tmp_path / "file", "wb") as slow:
        module._write_all(slow, b"0123456789")
    assert (tmp_path / "file").read_bytes() == b"0123456789"


def test_an_unwritable_place(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RecordError, match="cannot make the run directory"):
        Recorder.create(RunRecord(verb="attack", spec={}), runs_dir=tmp_path / "file" / "runs")
    with pytest.raises(InputError, match="not an empty directory"):
        start(tmp_path / "file")


@pytest.mark.parametrize(
    ("verb", "spec", "setup", "code"),
    [
        ("attack", {"attack": "vocab-match", "defense": ["seq-perm"]}, {}, []),
        (
            "attack",
            {"attack": "my.py:k=3", "defense": ["seq-perm", "r.py:1"]},
            {},
            ["my.py", "r.py"],
        ),
        ("assess", {"attack": "auto", "defense": []}, {"attacks": ["a.py::A"]}, ["a.py::A"]),
        ("attack", {"model": "m", "trust_remote_code": True, "defense": None}, {}, ["its model m"]),
    ],
)
def test_whoever_goes_on_with_a_run_is_told_of_the_code_that_it_runs(
    verb: str, spec: dict[str, Any], setup: dict[str, Any], code: list[str]
) -> None:
    record = RunRecord(verb=verb, spec=spec, setup=setup)
    assert foreign_code(record) == code
    trust = " --trust-remote-code" if code else ""
    assert resume_command(record, Path("runs/it")) == f"hiddenlab rerun runs/it --resume{trust}"


def test_what_is_no_record(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no run directory"):
        read_run(tmp_path / "absent")
    for text, says in (
        ("[]", "names no format version"),
        ("{}", "names no format version"),
        ('{"format": "1"}', "names no format version"),
        ('{"format": 1, "verb": "attack", "spec": {}, "odd": 1}', "odd is unknown"),
        ('{"format": 1, "verb": "attack", "spec": []}', "spec should be an object"),
        ('{"format": 1, "verb": "attack", "spec": ' + '{"a":' * 400 + "1" + "}" * 401, "nested too deeply"),
        ("[" * 100_000, "nested too deeply"),
        ('{"format": 1, "verb": "attack", "spec": {}, "setup": {"x": 1e999}}', "beyond the range"),
    ):
        (tmp_path / RECORD).write_text(text)
        with pytest.raises(InputError, match=f"record.json.*{says}"):
            read_run(tmp_path)


def test_summary() -> None:
    found = summarise(
        [sample(0), sample(1, exact=False, token_accuracy=0.5, tokens=30, verified=0.5, epsilon=0.3)]
    )
    assert found["prompts"] == 2
    assert found["tokens"] == 40
    assert found["not_applicable"] == 0
    assert found["exact"] == 0.5
    assert found["token_accuracy"] == 0.75
    assert found["verified"] == (10 + 15) / 40
    assert found["evaluated_tokens_per_token"] == 1.0
    assert found["forward_calls_per_prompt"] == 2
    assert found["slowdown_vs_prefill"] == 2.0
    assert found["epsilon"] == pytest.approx(0.2)


def test_what_was_not_measured_is_none() -> None:
    unscored = dict.fromkeys(("exact", "token_accuracy", "bag_of_tokens_recall", "rouge_l", "bleu"))
    other = {"index": 1, "id": "p001", "status": "not applicable", "exact": None}
    found = summarise([sample(0, **unscored), other])
    assert found["not_applicable"] == 1
    assert found["prompts"] == 2
    assert found["verified"] == 1.0
    assert {found[name] for name in unscored} == {None}
    nothing = summarise([other])
    assert {value for name, value in nothing.items() if name not in ("prompts", "not_applicable")} == {None}
    assert summarise([])["exact"] is None


def test_environment_tells_of_the_machine_and_keeps_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "s3cr3t-token-value")
    found = describe_environment()
    assert set(found) == {"command", "code", "packages", "hardware", "threads"}
    assert found["hardware"]["cores"] >= 1
    assert found["packages"]["torch"]
    text = json.dumps(found)
    assert "s3cr3t-token-value" not in text
    assert os.uname().nodename not in found["hardware"]["system"]
    assert peak_memory_mb() > 10


def test_parts_by_other_versions_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = {"version": "1", "commit": "a" * 40, "dirty": False}
    recorder = start(tmp_path / "run")
    recorder.record.code = first
    recorder.append(sample(0))
    recorder.close("interrupted")
    kept = read_run(tmp_path / "run")[0]
    assert kept.commits == ["a" * 12]
    for index, commit, dirty in ((1, "a", False), (2, "b", True)):
        made = {"code": {"version": "2", "commit": commit * 40, "dirty": dirty}}
        monkeypatch.setattr("hiddenlab.utils.environment.describe_environment", lambda made=made: made)
        resumed = Recorder.resume(tmp_path / "run", "abc")
        resumed.append(sample(index))
        resumed.close("interrupted")
    kept = read_run(tmp_path / "run")[0]
    assert kept.commits == ["a" * 12, "b" * 12 + "+"]


def test_versions_that_made_no_prompt_are_not_named() -> None:
    def part(after: int, commit: str | None) -> dict[str, Any]:
        return {"at": "", "after": after, "code": {"commit": commit}}

    def names(*parts: Any) -> list[str]:
        return RunRecord(verb="attack", spec={}, code={"commit": "a"}, resumed=list(parts)).commits

    assert names(part(0, "b")) == ["b"]
    assert names(part(3, "b"), part(3, "c")) == ["a", "c"]
    assert names(part(3, None), part(5, "a")) == ["a", "unknown"]


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    """The first of two processes that make the same one wins; the other leaves nothing."""
    with pytest.raises(KeyError), new_folder(tmp_path / "made") as work:
        (work / "half").touch()
        raise KeyError
    assert os.listdir(tmp_path) == []
    with new_folder(tmp_path / "made") as first, new_folder(tmp_path / "made") as second:
        (first / "first").touch()
        (second / "second").touch()
    assert os.listdir(tmp_path) == ["made"] and os.listdir(tmp_path / "made") == ["second"]


def test_files_have_one_digest_in_their_order(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.write_text(path.name)
    digests = {digest_of_files(paths), digest_of_files(paths[::-1]), digest_of_files(paths[:2])}
    assert len(digests) == 3 and digest_of_files(paths) == digest_of_files(iter(paths))
