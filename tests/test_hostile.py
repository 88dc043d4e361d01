"""Faults that a hostile reader found: none of them crashes, hangs, writes elsewhere, or passes for a result."""

import dataclasses
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hiddenlab import registry
from hiddenlab.cli import app
from hiddenlab.config import AttackConfig
from hiddenlab.defenses.cascade.port import free
from hiddenlab.defenses.verification.transcript import cut_torn_line, write_transcripts
from hiddenlab.errors import HiddenlabError, InputError
from hiddenlab.eval.cells import Cell, load_result, measure_cell, row_of
from hiddenlab.job import _fits
from hiddenlab.models import load_model
from hiddenlab.models.gguf import converted
from hiddenlab.models.load import resolve_model
from hiddenlab.observation import load_observation, save_observation
from hiddenlab.records import RECORD, SAMPLES, Recorder, RecordError, RunRecord, read_run
from hiddenlab.report.markdown import load_study, write_report
from hiddenlab.testing import attack_sample, write_tiny_gguf
from hiddenlab.types import GroundTruth, Observation, ObservationInfo, Site
from hiddenlab.utils import schema
from hiddenlab.utils.cache import cache_dir
from hiddenlab.utils.files import write_file
from tests.fuzz.campaign import limited
from tests.fuzz.readers import requests

SPEC = {"model": "builtin", "layer": 1, "stream": "resid", "defense": [], "seed": 0}
PUBLIC = ObservationInfo("m", (0.5,), Site(1))


def refused(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 2 and isinstance(done.exception, SystemExit), (done.output, done.exception)
    return " ".join(done.output.split())


def made(folder: Path, status: str = "interrupted", samples: int = 1, **spec: Any) -> Path:
    record = RunRecord(verb="attack", spec=SPEC | spec, prompts=samples, inputs_sha256="ab")
    recorder = Recorder.create(record, out=folder)
    for i in range(samples):
        recorder.append(attack_sample(i))
    recorder.close(status)
    return folder


# ---- writing where it should not


def test_links_devices_and_pipes_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    (tmp_path / "dangling").symlink_to(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "dangling", "pipe"):
        with pytest.raises(InputError, match=r"is a link|is no regular file"):
            write_file(tmp_path / name, "x")
    with pytest.raises(InputError, match="is a link"):
        save_observation(Observation(torch.ones(1, 2), PUBLIC), tmp_path / "link")
    assert (tmp_path / "victim").read_text() == "precious" and not (tmp_path / "none").exists()
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_a_record_of_somebody_else_writes_through_no_link(tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    (run / SAMPLES).unlink()
    (tmp_path / "victim").write_text("one precious line")
    (run / SAMPLES).symlink_to(tmp_path / "victim")
    with pytest.raises((InputError, RecordError)):
        Recorder.resume(run, "ab")
    assert (tmp_path / "victim").read_text() == "one precious line"


def test_a_report_writes_through_no_link(tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "cost.png").symlink_to(tmp_path / "victim")
    with pytest.raises(InputError, match=r"cost.png: it is a link"):
        write_report([run], tmp_path / "report")
    assert (tmp_path / "victim").read_text() == "precious"


def test_prompts_in_records_are_for_their_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        run = made(tmp_path / "run")
    finally:
        os.umask(before)
    assert {stat.S_IMODE((run / name).stat().st_mode) for name in (RECORD, SAMPLES)} == {0o600}


def test_resuming_cuts_no_file_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "n.txt"
    for text in ("one precious line without its end", "two\nlines", '{"format":1}\n{"format":1,"id":'):
        path.write_text(text)
        with pytest.raises(InputError):
            cut_torn_line(path)
        assert path.read_text() == text
    path.unlink()
    write_transcripts(path, requests())
    whole = path.read_text()
    for torn in ('{"for', '{"format":1,"id":"x","mod'):
        path.write_text(whole + torn)
        cut_torn_line(path)
        assert path.read_text() == whole


# ---- results that are none


def test_a_cell_takes_no_result_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.BUILTINS["measures"], "fake", "tests.test_hostile:measure")
    one, other = (Cell(measure="fake", spec={"n": n}, keys={}, paper={}) for n in (1, 2))
    measure_cell(one, tmp_path)
    found = load_result(one, tmp_path)
    assert found is not None and row_of(one, found)["figures"]["exact"]["value"] == 1.0
    stored = (one.folder(tmp_path) / "result.json").read_text()
    other.folder(tmp_path).mkdir(parents=True)
    (other.folder(tmp_path) / "result.json").write_text(stored)
    assert load_result(other, tmp_path) is None
    for wrong in ({"commits": 5}, {"commits": [5]}, {"code": 5}):
        (one.folder(tmp_path) / "result.json").write_text(json.dumps(json.loads(stored) | {"made": wrong}))
        assert load_result(one, tmp_path) is None


def measure(spec: dict[str, Any], folder: Path, progress: Any) -> dict[str, dict[str, float]]:
    return {"exact": {"value": 1.0, "low": 1.0, "high": 1.0, "n": spec["n"]}}


def test_nothing_is_not_the_same_as_nothing(tmp_path: Path) -> None:
    assert "no prompts to compare with" in refused(
        "rerun", str(made(tmp_path / "empty", "finished", 0)), "--no-record"
    )
    run = made(tmp_path / "short", "finished", 2)
    lines = (run / SAMPLES).read_text().splitlines(keepends=True)
    (run / SAMPLES).write_text(lines[0])
    assert "holds 1 of 2 prompts" in refused("rerun", str(run), "--no-record")
    (run / SAMPLES).write_text(lines[0] * 2)
    with pytest.raises(InputError, match="line 2: the prompt 0 stands twice"):
        read_run(run)


def test_a_run_without_prompts_yet_does_not_stop_a_report(tmp_path: Path) -> None:
    row = {
        "keys": {"c": "x"}, "figures": {}, "paper": {}, "status": "not run", "reason": "no", "commit": None,
        "cell": "a-1",
    }  # fmt: skip
    table = {
        "format": 1,
        "experiment": "t",
        "title": "T",
        "figures": {},
        "rows": [row],
        "notes": [],
        "command": "x",
    }
    (tmp_path / "t.json").write_text(json.dumps(table))
    made(tmp_path / "cells" / "a-1" / "run", "failed", 0)
    assert load_study(tmp_path / "t.json").runs == []


def test_an_empty_name_is_no_model(tmp_path: Path) -> None:
    assert "no model at ''" in refused(
        "capture", "hi", "--model", "", "--layer", "1", "-o", str(tmp_path / "o")
    )


def test_a_truth_fits_the_rows() -> None:
    shuffled = dataclasses.replace(PUBLIC, rows_permuted=True)
    observation = Observation(torch.ones(3, 2), shuffled)
    assert _fits(GroundTruth((1, 2, 3), (2, 0, 1)), observation)
    for order in (None, (), (0, 1), (2, 0, 3)):
        assert not _fits(GroundTruth((1, 2, 3), order), observation)


# ---- numbers and names out of range


@pytest.mark.parametrize(
    "options",
    [
        ("--max-tokens", "9" * 20), ("--limit", str(2**31)), ("--budget", str(2**31)), ("--batch", str(2**31)),
        ("--seed", "9" * 23), ("--threads", str(2**31 - 1)), ("--device", "meta"), ("--layer", "9" * 30),
    ],
    ids=lambda options: options[0],
)  # fmt: skip
def test_numbers_that_no_record_could_hold_are_refused_before(
    tiny: Callable[..., str], options: tuple[str, str]
) -> None:
    model = tiny("llama", tokenizer=True)
    refused("attack", "hello", "--no-record", "--model", model, "--layer", "1", *options)


def test_what_options_allow_a_record_can_say() -> None:
    spec = AttackConfig(seed=2**63 - 1, limit=2**31 - 1, max_tokens=2**31 - 1, budget=2**31 - 1, threads=1024)
    assert AttackConfig.from_json(spec.to_json()) == spec
    for wrong in ({"seed": 2**64 - 1}, {"threads": 2**31 - 1}, {"limit": 0}):
        with pytest.raises(InputError):
            AttackConfig.from_json(spec.to_json() | wrong)


def test_a_place_beyond_any_prompt_is_refused(tmp_path: Path) -> None:
    info = dataclasses.replace(PUBLIC, positions=(0, 2**31 - 1))
    with pytest.raises(InputError, match=r"positions\[1\] should be less than"):
        save_observation(Observation(torch.ones(2, 2), info), tmp_path / "o")


def test_names_that_are_no_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("x" * 5000, "~nobody-of-this-name/x", "a\0b"):
        with pytest.raises(InputError, match=r"no model at|cannot find|is not on this machine"):
            resolve_model(name, local_only=True)
    monkeypatch.setenv("HIDDENLAB_CACHE", "~nobody-of-this-name")
    with pytest.raises(InputError, match="set HIDDENLAB_CACHE"):
        cache_dir()
    with pytest.raises(InputError, match="no name of a host"):
        free("a" * 100, 8000)


def test_many_names_are_compared_in_one_pass() -> None:
    names = ",".join(f'"{i:06}":0' for i in range(20_000))
    with limited(), pytest.raises(InputError, match="the name 'x' stands twice"):
        schema.loads("{" + names + ',"x":0,"x":0}', "the body")


# ---- other people's models


def test_parts_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIDDENLAB_CACHE", str(tmp_path / "cache"))
    for name in ("m-00001-of-00000.gguf", "m-00009-of-00002.gguf", "m-00001-of-99999.gguf"):
        write_tiny_gguf(tmp_path / name)
        with pytest.raises(InputError, match="which cannot be"):
            converted(tmp_path / name)
    write_tiny_gguf(tmp_path / "p.gguf", split_max_tensors=15)
    (tmp_path / "p-00002-of-00003.gguf").write_bytes((tmp_path / "p-00001-of-00003.gguf").read_bytes())
    with pytest.raises(InputError, match=r"cannot read .*p-00001-of-00003.gguf and its other parts"):
        converted(tmp_path / "p-00001-of-00003.gguf")


def test_something_damaged_in_the_cache_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIDDENLAB_CACHE", str(tmp_path / "cache"))
    write_tiny_gguf(tmp_path / "m.gguf")
    target = converted(tmp_path / "m.gguf")
    (target / "config.json").unlink()
    with pytest.raises(InputError, match=r"holds something damaged .* remove it"):
        converted(tmp_path / "m.gguf")


def test_logits_of_the_wrong_width_are_refused(tiny: Callable[..., str], tmp_path: Path) -> None:
    from hiddenlab.observation import check_observation

    model = load_model(tiny("llama"), None, stream="logits", device="cpu")
    info = ObservationInfo("m", model.signature, model.site)
    check_observation(Observation(torch.ones(2, model.vocab_size), info), model)
    with pytest.raises(InputError, match="wide"):
        check_observation(Observation(torch.ones(2, model.width), info), model)


def test_more_rows_than_the_model_takes_are_refused(tiny: Callable[..., str], tmp_path: Path) -> None:
    model = load_model(tiny("llama"), 1, device="cpu")
    info = ObservationInfo(tiny("llama"), model.signature, model.site)
    save_observation(Observation(torch.ones(513, model.width), info), tmp_path / "long")
    save_observation(
        Observation(torch.ones(1, model.width), dataclasses.replace(info, positions=(512,))),
        tmp_path / "far",
    )
    for name in ("long", "far"):
        told = refused("attack", "--observation", str(tmp_path / name), "--no-record")
        assert "has 513 tokens, and" in told and "takes 512" in told


def test_rerun_asks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    def connect(*_: object, **__: object) -> None:
        raise AssertionError("a connection")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setattr("socket.socket.connect", connect)
    monkeypatch.setattr("socket.getaddrinfo", connect)
    for i, changes in enumerate(({"model": "evil/hub"}, {"prompts": "hf:evil/data"})):
        run = made(tmp_path / str(i), "finished", 1, **changes)
        told = refused("rerun", str(run), "--no-record")
        assert "connection" not in told or "offline" in told.lower(), told


def test_errors_are_hiddenlabs_own() -> None:
    assert issubclass(InputError, HiddenlabError) and issubclass(RecordError, HiddenlabError)
    with pytest.raises(InputError, match="no observation file at"):
        load_observation("none")
