"""Run the parts of the GPU program, each in its own process, and keep what they measured.

A fault on a card (an illegal access, a full memory, a hang) breaks every later call of its process. So a part runs in
its own process, with its own time limit, and appends a row for each measured cell at once. The rows of a killed part
are kept. This module does not import torch.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hiddenlab.errors import InputError
from hiddenlab.utils.schema import loads, read_bytes

FORMAT = 1
RESULT, TABLE = "gpu.json", "gpu.md"
CACHE = "HIDDENLAB_CACHE"
POLL_SECONDS = 0.2
SLOWER = 10  # factor on a part's limit in a rehearsal, since the processor may be busy

Cell = dict[str, Any]  # names one measurement: the arguments of the part's function
Row = dict[str, Any]  # a cell, its part, and what came of it


@dataclass(frozen=True)
class Setting:
    """The device and the size of everything that runs.

    Attributes:
        device: torch's name of the card, or ``cpu`` in a rehearsal.
        rehearse: take tiny models and shapes, to try every part without a card.
        model: the real model, ``builtin`` where it is available; None leaves out what needs one.
        commit: of this code, where it lies outside a checkout.
    """

    device: str = "cuda"
    rehearse: bool = False
    model: str | None = "builtin"
    commit: str | None = None


@dataclass(frozen=True)
class Part:
    """One question, and the measurements that answer it.

    Attributes:
        name: on the command line.
        title: of its table.
        says: what the figures mean, in a sentence or two.
        limit: seconds at most.
        measure: ``module:function``, called with a ``Lab`` and a cell's values.
        cells: what to measure, the most valuable first.
    """

    name: str
    title: str
    says: str
    limit: float
    measure: str
    cells: Callable[[Setting], list[Cell]]


@dataclass
class Result:
    """Everything that was measured so far, and where.

    Attributes:
        setting: where it ran.
        facts: card, versions, commit.
        rows: one per cell, in the order of measurement.
        faults: what went wrong with a part's process, in words.
    """

    setting: Setting
    facts: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def done(self, part: str) -> list[Cell]:
        """Return the cells of a part that need not be measured again."""
        return [row["cell"] for row in self.rows if row["part"] == part and row["status"] == "measured"]

    def of(self, part: str) -> list[Row]:
        """Return the latest row of each cell of a part."""
        latest = {json.dumps(row["cell"], sort_keys=True): row for row in self.rows if row["part"] == part}
        return list(latest.values())


def left_out(result: Result, parts: Sequence[Part]) -> dict[str, list[Cell]]:
    """Return the cells without a row, by part."""
    cells = {}
    for part in parts:
        seen = [row["cell"] for row in result.of(part.name)]
        if missing := [cell for cell in part.cells(result.setting) if cell not in seen]:
            cells[part.name] = missing
    return cells


def load_result(folder: Path, setting: Setting) -> Result:
    """Load what an earlier run measured in the same setting, to resume it.

    Raises:
        InputError: the folder holds no result of this format, or one of another setting.
    """
    path = folder / RESULT
    refusal = InputError(f"{path} is no result of this program; --resume takes an earlier --out")
    try:
        data = loads(read_bytes(path), str(path))
    except InputError as error:
        raise InputError(
            f"{path} is no result of this program; --resume takes an earlier --out ({error})"
        ) from None
    if not isinstance(data, dict):
        raise refusal
    if data.get("format") != FORMAT:
        raise InputError(
            f"{path} has format {data.get('format')!r}; this version goes on from format {FORMAT}"
        )
    was, facts, rows = data.get("setting"), data.get("facts"), data.get("rows")
    if not (isinstance(was, dict) and isinstance(facts, dict) and isinstance(rows, list)):
        raise refusal
    if not all(isinstance(row, dict) and _is_row(row) for row in rows):
        raise refusal
    if (was.get("device"), was.get("rehearse")) != (setting.device, setting.rehearse):
        raise InputError(f"{path} was measured in another setting; use another folder")
    return Result(setting, facts, rows)


def _is_row(row: Row) -> bool:
    kinds = {"part": str, "cell": dict, "status": str, "seconds": int | float, "figures": dict | None}
    return all(isinstance(row.get(name), kind) for name, kind in kinds.items())


def run_parts(
    parts: Sequence[Part],
    result: Result,
    *,
    minutes: float,
    tell: Callable[[str], None],
    write: Callable[[Result], None],
) -> None:
    """Run parts, the most important first, until the time is up; write the tables after every part.

    Args:
        result: where rows go; what it holds already is not measured again.
        minutes: for everything, process starts included. tell: gets a line of progress.

    Raises:
        InputError: what the result holds was measured on another card, or with other code.
    """
    # Use a temporary cache, so that probes and tables are neither taken from the user's cache nor left in it.
    with tempfile.TemporaryDirectory(prefix="hiddenlab-gpu-") as own:
        _run_in_turn(parts, result, Path(own), 60 * minutes, tell, write)


def _run_in_turn(
    parts: Sequence[Part],
    result: Result,
    folder: Path,
    seconds: float,
    tell: Callable[[str], None],
    write: Callable[[Result], None],
) -> None:
    started = time.monotonic()
    for number, part in enumerate(parts, 1):
        done = result.done(part.name)
        todo = [cell for cell in part.cells(result.setting) if cell not in done]
        left = seconds - (time.monotonic() - started)
        head = f"[{number}/{len(parts)}] {part.name}"
        if not todo:
            tell(f"{head}: nothing to do")
            continue
        if left <= 0:
            tell(f"{head}: no time left for {len(todo)} measurements")
            continue
        limit = min(part.limit * (SLOWER if result.setting.rehearse else 1), left)
        tell(f"{head}: {len(todo)} measurements, {limit:.0f} s at most")
        before = len(result.rows)
        try:
            _run_part(part, result, todo, folder, limit, tell)
        finally:
            write(result)
        new = result.rows[before:]
        failed = sum(row["status"] != "measured" for row in new)
        tell(f"{head}: {len(new) - failed} measured, {failed} failed, {len(todo) - len(new)} left out")


def _run_part(
    part: Part, result: Result, todo: Sequence[Cell], folder: Path, limit: float, tell: Callable[[str], None]
) -> None:
    """Start the part's process, read its rows as they arrive, and stop it at its limit."""
    rows, job = folder / "rows.jsonl", folder / "part.json"
    rows.write_text("", encoding="utf-8")
    orders = {"part": part.name, "measure": part.measure, "cells": list(todo), "rows": str(rows)}
    job.write_text(json.dumps(orders | {"setting": asdict(result.setting)}), encoding="utf-8")
    # Large and small tensors alternate; without this the allocator keeps memory that no later size fits into.
    environment = {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        CACHE: str(folder / "cache"),
        **os.environ,
    }
    start = time.monotonic()
    child = subprocess.Popen([sys.executable, "-m", "hiddenlab.eval.gpu.work", str(job)], env=environment)
    read, cut = 0, False
    try:
        while True:
            ended = child.poll() is not None
            # An incomplete line is still being written, or the process died while writing it.
            lines = rows.read_text(encoding="utf-8").split("\n")[:-1]
            for line in lines[read:]:
                _take(json.loads(line), result, tell)
            read = len(lines)
            cut = not ended and time.monotonic() - start > limit
            if ended or cut:
                break
            time.sleep(POLL_SECONDS)
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
    if cut:
        tell(f"{part.name}: stopped at its limit of {limit:.0f} s")
    elif child.returncode:
        signal = f"signal {-child.returncode}" if child.returncode < 0 else f"exit code {child.returncode}"
        result.faults.append(f"{part.name}: its process ended with {signal}")
        tell(result.faults[-1])


def _take(row: Row, result: Result, tell: Callable[[str], None]) -> None:
    if "facts" in row:
        _check_same(result.facts, row["facts"])
        result.facts |= row["facts"]
        return
    result.rows.append(row)
    what = ", ".join(f"{name}={value}" for name, value in row["cell"].items())
    outcome = "" if row["status"] == "measured" else f": {row['status']}: {row['reason']}"
    tell(f"    {what} ({row['seconds']:.1f} s){outcome}")


def _check_same(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Check that one table holds figures of one card and one version of the code.

    Raises:
        InputError: the two differ.
    """
    for what, name in (("card", "name"), ("code", "commit"), ("packages", "torch")):
        old, new = ((facts.get(what) or {}).get(name) for facts in (before, now))
        if before and old != new:
            raise InputError(f"--resume: that run had the {what} {old}, this one has {new}; start a new one")


def to_json(result: Result, parts: Sequence[Part]) -> Mapping[str, Any]:
    """Return the result as one JSON object, including the names of what was left out."""
    return {
        "format": FORMAT,
        "setting": asdict(result.setting),
        "facts": result.facts,
        "rows": result.rows,
        "left_out": left_out(result, parts),
    }
