"""Write reports of runs and experiments: Markdown, PNG plots, and self-contained HTML pages."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hiddenlab.assessment import Findings
from hiddenlab.errors import HiddenlabError, InputError
from hiddenlab.records import RECORD, read_run, resume_command
from hiddenlab.report.answers import answer, defense_of, verifies
from hiddenlab.report.assessed import markdown_lines, name_of
from hiddenlab.report.data import Picture, Run, Study
from hiddenlab.report.html import pages
from hiddenlab.report.leaderboard import BOARD_TITLE, INTRODUCTION, gathered, is_board, short_table
from hiddenlab.report.tables import TABLE_FORMAT, Grid, Table, measured, table_page
from hiddenlab.summary import FIGURES, figure, summarise
from hiddenlab.text import markdown as escaped
from hiddenlab.text import markdown_table
from hiddenlab.utils.files import write_file
from hiddenlab.utils.schema import CLOSED, OPEN, Finite, Layer, check, parse, read_bytes

MARKDOWN, PAGE, BOARD = "report.md", "report.html", "leaderboard.md"
TITLE = "Recovery of prompts from hidden states"

COLUMNS = (
    "prompts", "exact", "token_accuracy", "bag_of_tokens_recall", "rouge_l", "bleu", "verified",
    "evaluated_tokens_per_token", "slowdown_vs_prefill", "attack_seconds", "probe_seconds", "peak_memory_mb",
)  # fmt: skip
VARIANTS = (
    "model", "attack", "stream", "search", "proposal", "distance", "epsilon", "budget", "dtype", "device",
    "max_tokens", "limit", "prompts", "seed", "batch",
)  # fmt: skip

EXPLANATION = """\
Shares and scores are means over the prompts to which the attack applies; a dash means not measured.
*Exact* prompts came back token for token; *tokens in any order* are those that came back at all, wherever they
stand; *verified* tokens were matched within epsilon.
*Evaluated tokens per token* counts every position that the attack ran through the truncated model, verification passes
included and probe training apart. *Attack over prefill* compares the attack's time with one plain forward
pass of the same prompts in the same process.
"""


def write_report(paths: Sequence[Path], folder: Path) -> list[Path]:
    """Write the report of runs and experiments into a directory, replacing one that is there, and return its files.

    The HTML is one page, or an index and a page for each question where one would be too long. A leaderboard has a
    Markdown page of its own.

    Args:
        paths: run directories, tables that ``hiddenlab eval`` wrote (``NAME.json``), or its folder for all of them.

    Raises:
        InputError: one of them cannot be read, is no attack and no table, or holds no samples.
        HiddenlabError: ``folder`` cannot be written.
    """
    from hiddenlab.report.assessed_picture import draw_assessed  # matplotlib is slow to load
    from hiddenlab.report.plots import draw, table_picture

    runs, studies, judged = load(paths)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        images = draw(runs, folder) if runs else []
        images += [image for study in studies if (image := table_picture(study.table, folder)) is not None]
        images += [draw_assessed(run, folder) for run in judged]
        shown = grid_of(runs) if runs else None
        boards = [study for study in studies if is_board(study.table["experiment"])]
        written = {MARKDOWN: markdown(runs, studies, images, judged)}
        if boards:
            written[BOARD] = (
                "\n".join(line for board in boards for line in _board_lines(board, images)) + "\n"
            )
        written |= pages(PAGE, TITLE, shown, runs, studies, images, judged)
        for name, content in written.items():
            write_file(folder / name, content)
    except OSError as error:
        raise HiddenlabError(f"cannot write the report into {folder}: {error.strerror or error}") from None
    return [*(folder / name for name in written), *(image.path for image in images)]


def load(paths: Sequence[Path]) -> tuple[list[Run], list[Study], list[Run]]:
    """Load the runs, the experiments and the assessments at paths.

    Raises:
        InputError: one of them is neither.
    """
    runs: list[Path] = []
    tables: list[Path] = []
    for path in paths:
        inside = sorted(path.glob("*.json")) if path.is_dir() and not (path / RECORD).is_file() else []
        if path.suffix == ".json":
            tables.append(path)
        elif inside:
            tables += inside
        else:
            runs.append(path)
    judged = [path for path in runs if (path / RECORD).is_file() and read_run(path)[0].verb == "assess"]
    attacked = [path for path in runs if path not in judged]
    return (
        load_runs(attacked),
        gathered([load_study(path) for path in tables]),
        [load_assessed(path, f"assess-{number}") for number, path in enumerate(judged, 1)],
    )


def load_assessed(path: Path, label: str) -> Run:
    """Read a record of ``hiddenlab assess``.

    Raises:
        InputError: it cannot be read, or has not ended.
    """
    record, samples = read_run(path)
    if record.summary is None:
        raise InputError(
            f"{path} ({record.status}) has no verdict yet; '{resume_command(record, path)}' goes on with it"
        )
    check({"spec": record.spec}, _Asked, str(path / RECORD))
    findings = check(record.summary, Findings, f"{path / RECORD}, summary")
    return Run(path, record, samples, dict(findings), label)


def load_runs(paths: Sequence[Path]) -> list[Run]:
    """Read attack runs and label each by its channel and by the options in which they differ.

    Raises:
        InputError: a run cannot be read, is no attack, or holds no samples.
    """
    runs = [_load_run(path) for path in paths]
    varying = [name for name in VARIANTS if len({str(run.record.spec.get(name)) for run in runs}) > 1]
    return [Run(r.path, r.record, r.samples, r.summary, _label(r.record.spec, varying)) for r in runs]


def load_study(path: Path) -> Study:
    """Read a table of ``hiddenlab eval`` and the runs of its cells, which lie beside it.

    Raises:
        InputError: it is no such table.
    """
    data = read_bytes(path)
    try:
        table: dict[str, Any] = dict(parse(data, Table, str(path), TABLE_FORMAT))
    except InputError as error:
        raise InputError(f"{path} is no table of 'hiddenlab eval': {error}") from None
    # Several tables of one experiment have files of their own. Pictures and anchors go by these.
    if re.fullmatch(re.escape(table["experiment"]) + r"-[\w.-]+", path.stem):
        table["experiment"] = path.stem
    runs = []
    for row in table["rows"]:
        folder = path.parent / "cells" / str(row["cell"]) / "run"
        if row["cell"] and (folder / RECORD).is_file() and read_run(folder)[1]:
            run = _load_run(folder)
            label = ", ".join(f"{key} {value}" for key, value in row["keys"].items())
            runs.append(Run(folder.parent, run.record, run.samples, run.summary, label))
    return Study(table, runs)


@dataclass(frozen=True)
class _Spec:
    """The part of an attack's spec that a report uses; the rest is shown unchanged."""

    __pydantic_config__ = OPEN

    model: str
    layer: Layer
    defense: list[str]


@dataclass(frozen=True)
class _Asked:
    """The part of an assessment's record that a report shows beside its findings."""

    __pydantic_config__ = CLOSED

    spec: _Spec


@dataclass(frozen=True)
class _Shown:
    """The part of an attack's record that a report shows."""

    __pydantic_config__ = CLOSED

    spec: _Spec
    summary: dict[str, Finite | None]


def _load_run(path: Path) -> Run:
    record, samples = read_run(path)
    if record.verb != "attack":
        raise InputError(
            f"{path} is a run of {record.verb!r}; the report is of runs of 'attack' and 'assess'"
        )
    if not samples:
        raise InputError(f"{path} ({record.status}) holds no samples yet; nothing to report")
    needed = {"spec": record.spec, "summary": record.summary or {}}
    summary = check(needed, _Shown, str(path / RECORD)).summary
    if not summary:  # the run has not ended
        setup = {name: value for name, value in record.setup.items() if not isinstance(value, str | list)}
        summary = {**setup, **summarise(samples)}
    return Run(path, record, samples, summary)


def grid_of(runs: Sequence[Run]) -> Grid:
    """Return the table of some runs, one row each: what differs between them, and what was measured of any."""
    ordered = sorted(runs, key=lambda run: (run.label, run.layer))
    varying = [name for name in VARIANTS if len({str(run.record.spec.get(name)) for run in runs}) > 1]
    rows = [
        [
            str(run.layer),
            defense_of(run.record.spec),
            *("–" if run.record.spec.get(name) is None else str(run.record.spec[name]) for name in varying),
            *(figure(name, _known(run, name)) for name in COLUMNS),
        ]
        for run in ordered
    ]
    keys = ["layer", "defense", *(name.replace("_", " ") for name in varying)]
    return measured(Grid([*keys, *(FIGURES[name][0] for name in COLUMNS)], rows, len(keys), 0, []))


def markdown(
    runs: Sequence[Run], studies: Sequence[Study], images: Sequence[Picture], judged: Sequence[Run] = ()
) -> str:
    """Return the report's text; the leaderboard has a page of its own, to which it points."""
    lines = [f"# {TITLE}", ""]
    for run in judged:
        lines += markdown_lines(run, f"{name_of(run)}.png")
    others = [study for study in studies if not is_board(study.table["experiment"])]
    if len(others) < len(studies):
        lines += [f"Which defense holds: [{BOARD}]({BOARD}).", ""]
    lines += _study_lines(others, images)
    if runs:
        cells = grid_of(runs)
        lines += ["", "## Single runs", ""] * bool(studies or judged)
        lines += [*(f"- {escaped(' '.join(answer(run)))}" for run in runs), ""]
        rows = [[escaped(text) for text in row] for row in cells.rows]
        lines += [EXPLANATION, *markdown_table(cells.header, rows, cells.keys)]
        own_names = {study.table["experiment"] for study in studies} | set(map(name_of, judged))
        lines += [line for image in images if image.name not in own_names for line in _image_lines(image)]
    everything = [*judged, *runs, *(run for study in studies for run in study.runs)]
    if everything:
        shown = f"`{PAGE}`, written beside this page by `hiddenlab report`, shows each prompt with its tokens marked."
        lines += ["", shown, "", "## Runs", ""]
    for run in everything:
        what, _, command = run.made().partition("\n")
        lines += [f"- {escaped(what)}", "", f"      {command}", ""]
    return "\n".join(lines) + "\n"


def _study_lines(studies: Sequence[Study], images: Sequence[Picture]) -> list[str]:
    lines = []
    for study in studies:
        lines.append(table_page(study.table))
        own = [image for image in images if image.name == study.table["experiment"]]
        lines += [line for image in own for line in _image_lines(image)]
    return lines


def _board_lines(board: Study, images: Sequence[Picture]) -> list[str]:
    own = [image for image in images if image.name == board.table["experiment"]]
    lines = [f"# {BOARD_TITLE}", "", INTRODUCTION, "", *short_table(board.table)]
    lines += [line for image in own for line in _image_lines(image)]
    return [*lines, "", table_page(board.table, "All figures")]


def _known(run: Run, name: str) -> Any:
    """Return a figure of a run, None where it was not measured: an attack that verifies nothing has no share of it."""
    return None if name == "verified" and not verifies(run) else run.summary.get(name)


def channel_of(spec: Mapping[str, Any]) -> str:
    """Return the defenses of a spec, in order, as one text."""
    return " | ".join(spec.get("defense") or ()) or "identity"


def _label(spec: Mapping[str, Any], varying: Sequence[str]) -> str:
    extras = [f"{name.replace('_', ' ')} {spec[name]}" for name in varying if spec.get(name) is not None]
    return ", ".join([channel_of(spec), *extras])


def _image_lines(image: Picture) -> list[str]:
    return ["", f"![{escaped(image.alt)}]({image.path.name})"]
