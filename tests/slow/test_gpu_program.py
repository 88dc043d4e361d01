"""The GPU program: parts that fail, die or are cut, a terminated run, and a rehearsal of everything without a card."""

import json
import subprocess
import sys
from pathlib import Path

from typer import Typer
from typer.testing import CliRunner

from hiddenlab.eval.gpu import __main__ as command
from hiddenlab.eval.gpu import parts
from hiddenlab.eval.gpu.program import RESULT, Cell, Result, left_out, load_result, to_json
from tests.test_gpu import SETTING, conduct, part


def test_failures_and_cut_parts_are_told_and_made_up_for(tmp_path: Path) -> None:
    marker = tmp_path / "now it works"
    cells = [{"n": n, "marker": str(marker)} for n in (0, 1, 2, 3, 5)]
    one = part("some", "sometimes", cells, limit=3)  # ten times as much in a rehearsal
    result = Result(SETTING)
    told, tables = conduct([one], result)
    assert [(row["cell"]["n"], row["status"], row["reason"]) for row in result.rows] == [
        (0, "measured", None),
        (1, "failed", "one is not wanted"),
        (2, "failed", "ValueError: two lines"),
    ]
    assert left_out(result, [one]) == {"some": cells[3:]}
    assert any("stopped at its limit" in line for line in told)
    assert "one is not wanted" in tables[-1]
    assert "- some: 2 of 5 measurements" in tables[-1]
    # Going on: what was measured stays, what failed or was cut is measured now.
    marker.touch()
    (tmp_path / RESULT).write_text(json.dumps(to_json(result, [one])))
    again = load_result(tmp_path, SETTING)
    conduct([one], again)
    assert [row["cell"]["n"] for row in again.rows[3:]] == [1, 2, 3, 5]
    assert left_out(again, [one]) == {}
    assert len(again.of("some")) == 5


def test_a_part_that_dies_does_not_end_the_others(tmp_path: Path) -> None:
    def cells(*which: int) -> list[Cell]:
        return [{"n": n, "marker": str(tmp_path / "never")} for n in which]

    three = [
        part("leaving", "sometimes", cells(0, 4, 5)),
        part("killed", "sometimes", cells(6)),
        part("other", "double", [{"n": 1}]),
    ]
    result = Result(SETTING)
    told, _ = conduct(three, result)
    assert [row["part"] for row in result.rows] == ["leaving", "other"]
    assert result.faults == [
        "leaving: its process ended with exit code 7",
        "killed: its process ended with signal 11",
    ]
    assert all(fault in told for fault in result.faults)


def test_a_terminated_run_stops_its_part_and_says_how_to_go_on(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "hiddenlab.eval.gpu",
        "--rehearse",
        "--parts",
        "recovery",
        "--out",
        str(tmp_path),
    ]
    run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert run.stderr is not None
    assert run.stderr.readline().startswith("[1/1] recovery")
    run.terminate()
    told = run.stderr.read()
    assert run.wait(timeout=60) == 130
    assert f"go on with --resume {tmp_path}" in told
    assert (tmp_path / "gpu.json").is_file()


def test_a_rehearsal_measures_every_part(tmp_path: Path) -> None:
    app = Typer()
    app.command()(command.main)
    result = CliRunner().invoke(
        app, ["--rehearse", "--minutes", "40", "--out", str(tmp_path), "--commit", "abc"]
    )
    data = json.loads((tmp_path / "gpu.json").read_text())
    reasons = [
        (row["part"], row["cell"], row["reason"]) for row in data["rows"] if row["status"] != "measured"
    ]
    assert result.exit_code == 0, (result.stderr, reasons)
    assert data["left_out"] == {}
    assert {row["part"] for row in data["rows"]} == {one.name for one in parts.PARTS}
    assert all(row["figures"].get("equal", True) for row in data["rows"])
    page = (tmp_path / "gpu.md").read_text()
    assert all(one.title in page for one in parts.PARTS)
    assert "A rehearsal on a CPU" in page
    assert "Commit: abc." in page
