"""Define the data of a report: a run with its samples and figures, a table with the runs of its cells, a picture."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hiddenlab.records import UNFINISHED, RunRecord, commit_name
from hiddenlab.summary import Sample
from hiddenlab.text import count_of, visible


@dataclass(frozen=True)
class Run:
    """A run in a report; ``label`` distinguishes it from the others at the same layer."""

    path: Path
    record: RunRecord
    samples: list[Sample]
    summary: dict[str, Any]
    label: str = ""

    @property
    def layer(self) -> int:
        return int(self.record.spec["layer"])

    def made(self) -> str:
        """Return how the run ended, when, by which code and on what, and the command."""
        record, code, hardware = self.record, self.record.code, self.record.hardware
        state = record.status
        if record.status in UNFINISHED:
            state += f", {len(self.samples)} of {count_of(record.prompts, 'prompt')}"
        commit = (
            f"commit {commit_name({**code, 'dirty': False})}" if code.get("commit") else "commit not known"
        )
        dirty = " with uncommitted changes" if code.get("commit") and code.get("dirty") else ""
        if len(record.commits) > 1:
            dirty += f" (parts by {', '.join(record.commits)})"
        origin = (
            f"{self.path.name}: {state}, {record.started}, hiddenlab {code.get('version')}, {commit}{dirty}, "
            f"torch {record.packages.get('torch')}, {hardware.get('cpu')}, {count_of(record.threads, 'thread')}"
        )
        return f"{visible(origin)}\n{visible(shlex.join(record.command))}"


@dataclass(frozen=True)
class Study:
    """A table of an experiment, and the runs of its attack cells where they are available."""

    table: Mapping[str, Any]
    runs: list[Run] = field(default_factory=list)


@dataclass(frozen=True)
class Picture:
    """A drawing: the file of its PNG, its SVG, its text alternative, and its size in pixels of a page."""

    path: Path
    svg: str
    alt: str
    width: int
    height: int

    @property
    def name(self) -> str:
        return self.path.stem
