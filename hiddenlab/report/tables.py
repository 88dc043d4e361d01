"""Write tables of experiments as text: figures with intervals, the paper's beside them, reasons for what is missing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, with_config
from typing_extensions import TypedDict

from hiddenlab.summary import FIGURES, figure
from hiddenlab.text import markdown, markdown_table, visible
from hiddenlab.utils.schema import CLOSED, Count, Finite

# Figures that only experiments have; see ``hiddenlab.summary`` for the kinds.
MORE_FIGURES = {
    "top1_agreement": "share",
    "token_set": "share",
    "missing_exact": "share",
    "control_token_accuracy": "share",
    "beyond_control": "share",
    "by_rows": "share",
    "missing_verified": "share",
    "missing_wrong_verified": "share",
    "same_generated": "share",
    "kinds_named": "share",
    "rejected": "share",
    "covered": "share",
    "ensemble": "share",
    "single": "share",
    "gained": "share",
    "leak": "share",
    "control": "share",
    "over_plain": "times",
    "time_over_plain": "times",
    "bytes_over_plain": "times",
    "perplexity": "number",
    "kl": "number",
}
PAPER = "paper: "
NOTHING = "Nothing was measured"
TABLE_FORMAT = 1
Scale = Literal["log", "linear"]

# Names become file names; a table must not name anything outside its folder.
Name = Annotated[str, Field(pattern=r"\A[a-z0-9][a-z0-9-]*\z", max_length=100)]


@with_config(CLOSED)
class Figure(TypedDict):
    """A measured value with its 95 % interval and the number of samples; null where nothing was measured."""

    value: Finite | None
    low: Finite | None
    high: Finite | None
    n: Count


@with_config(CLOSED)
class Row(TypedDict):
    """A row of a table: the keys that name it, what was found in words and in figures, and the paper's figures."""

    keys: dict[str, str | int | Finite | bool | None]
    words: NotRequired[dict[str, str]]
    figures: dict[str, Figure]
    paper: dict[str, Finite | None]
    status: Literal["measured", "not run"]
    reason: str | None
    commit: str | None
    cell: Name | None


@with_config(CLOSED)
class Table(TypedDict):
    """A table of ``hiddenlab eval`` as it is stored."""

    format: int
    experiment: Name
    title: str
    figures: dict[str, str]
    rows: list[Row]
    versions: NotRequired[list[str]]
    notes: list[str]
    over: NotRequired[str | None]
    curves: NotRequired[str | None]
    against: NotRequired[str | None]
    scales: NotRequired[list[Scale]]
    command: str


@dataclass(frozen=True)
class Grid:
    """A table's cells as text: ``keys`` columns of words come first, ``published`` ones of the paper's figures last."""

    header: list[str]
    rows: list[list[str]]
    keys: int
    published: int
    reasons: list[str]


def grid(table: Mapping[str, Any]) -> Grid:
    """Return the text of a table that ``hiddenlab eval`` wrote.

    A figure is followed by its 95 % interval. A dash stands for what was not measured; ``reasons`` say why a whole row
    was not run.
    """
    rows: Sequence[Mapping[str, Any]] = table["rows"]
    keys = list(dict.fromkeys(key for row in rows for key in row["keys"]))
    words = list(dict.fromkeys(word for row in rows for word in row.get("words", ())))
    names = [name for name in table["figures"] if any(name in row["figures"] for row in rows)]
    published = list(
        dict.fromkeys(key for row in rows for key, value in row["paper"].items() if value is not None)
    )
    reasons: list[str] = []
    lines = []
    for row in rows:
        line = [_plain(row["keys"].get(key)) for key in keys]
        line += [_plain(row.get("words", {}).get(word)) for word in words]
        line += [_with_interval(name, row["figures"].get(name)) for name in names]
        line += [_published(key, row["paper"].get(key)) for key in published]
        measured = row["status"] == "measured"
        if not measured or row["reason"]:
            label = ", ".join(map(_plain, row["keys"].values()))
            status = "in part not run" if measured else "not run"
            reasons.append(f"{status}: {label}: {row['reason'] or 'not measured yet'}")
        lines.append(line)
    figures = (table["figures"][name] for name in names)
    header = [*keys, *words, *figures, *(PAPER + key for key in published)]
    return Grid(header, lines, len(keys) + len(words), len(published), list(dict.fromkeys(reasons)))


def measured(cells: Grid) -> Grid:
    """Return a table without the rows and the columns in which nothing was measured."""
    end = len(cells.header) - cells.published
    rows = [row for row in cells.rows if any(text != "–" for text in row[cells.keys : end])]
    kept = [i for i in range(len(cells.header)) if any(row[i] != "–" for row in rows)]
    return Grid(
        [cells.header[i] for i in kept],
        [[row[i] for i in kept] for row in rows],
        sum(i < cells.keys for i in kept),
        sum(i >= end for i in kept),
        cells.reasons,
    )


def gaps(rows: Sequence[Sequence[str]]) -> bool:
    """Return whether a table still has cells that were not measured."""
    return any(text == "–" for row in rows for text in row)


def kind_of(name: str) -> str:
    """Return a figure's number format by its name; the part behind a comma does not matter."""
    stem = name.partition(",")[0]
    return MORE_FIGURES.get(stem) or (FIGURES[stem][1] if stem in FIGURES else "number")


def _with_interval(name: str, estimate: Mapping[str, float | int | None] | None) -> str:
    if estimate is None or estimate.get("value") is None:
        return "–"
    kind = kind_of(name)
    value = figure(name, estimate["value"], kind)
    low, high = (
        figure(name, estimate[end], kind).removesuffix(" %").removesuffix(" ×") for end in ("low", "high")
    )
    return value if estimate["low"] == estimate["high"] else f"{value} [{low}, {high}]"


def _published(key: str, value: Any) -> str:
    if value is None:
        return "–"
    stem = key.partition(",")[0]
    share = stem in ("exact", "exact prompts")
    return figure("exact", value) if share else _plain(value)


def _plain(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def brackets(table: Mapping[str, Any]) -> str:
    """Return what brackets mean, and which versions of the code measured the rows."""
    versions = table.get("versions")
    if versions is None:  # written by an older version
        rows = [row for row in table["rows"] if row["status"] == "measured" and row.get("commit")]
        versions = list(dict.fromkeys(row["commit"] for row in rows))
    made = f" Measured by {', '.join(versions)}." if versions else ""
    return f"Brackets are 95 % intervals over prompts.{made}"


def table_page(table: Mapping[str, Any], title: str | None = None) -> str:
    """Return title, table, reasons and notes as Markdown.

    Args:
        title: None is the table's own.
    """
    cells = measured(grid(table))
    head, *rows = ([markdown(text) for text in row] for row in (cells.header, *cells.rows))
    lines = [f"## {markdown(table['title'] if title is None else title)}", ""]
    lines += markdown_table(head, rows, cells.keys) if rows else [f"{NOTHING}."]
    command = visible(table["command"]).replace("`", "'")
    lines += ["", f"`{command}`. {markdown(brackets(table))}"]
    lines += ["", *(f"- {markdown(text)}" for text in [*table["notes"], *cells.reasons])]
    return "\n".join(lines) + "\n"
