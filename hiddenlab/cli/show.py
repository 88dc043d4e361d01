"""Show an attack on a terminal: a coloured line per prompt, a table of figures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from hiddenlab.report.markdown import channel_of
from hiddenlab.report.tables import grid
from hiddenlab.summary import NOT_APPLICABLE, Sample, figure, figures_of
from hiddenlab.text import visible

FOLDED = 16  # columns of a terminal in which a text of a table may be folded
STYLES = {"exact": "green", "verified": "", "wrong": "bold red", "unverified": "yellow", "missing": "dim"}


def sample_line(sample: Sample) -> Text:
    """Return id, outcome and recovered text of a sample: right tokens green, wrong ones red, unverified ones yellow."""
    line = Text().append(f"{sample['id']} ", style="bold")
    if sample["status"] == NOT_APPLICABLE:
        return line.append(f"{NOT_APPLICABLE}: {visible(sample['reason'])}", style="magenta")
    outcome = {
        True: "exact",
        False: f"{figure('token_accuracy', sample['token_accuracy'])} of tokens",
        None: "no truth",
    }
    line.append(f"[{outcome[sample['exact']]}] ", style="dim")
    for text, status in sample["spans"]:
        line.append(visible(text), style=STYLES[status])
    return line


def title(spec: Mapping[str, Any]) -> Text:
    """Return one line that says what was attacked."""
    where = f"{spec['model']}, {spec['stream']} at layer {spec['layer']}, channel {channel_of(spec)}"
    return Text(f"\n{visible(where)}", style="bold")


def summary_table(summary: Mapping[str, Any]) -> Table:
    """Return the table of a run's figures."""
    table = Table()
    table.add_column("figure")
    table.add_column("value", justify="right")
    for label, value in figures_of(summary):
        table.add_row(label, value)
    return table


def figures_table(rows: Sequence[Mapping[str, Any]], title: str) -> Table:
    """Return a table for few rows of many figures: one column for each row, so that it fits any terminal."""
    first, *keys = dict.fromkeys(key for row in rows for key in row)
    table = Table(title=title)
    table.add_column(Text(first.replace("_", " ")))
    for row in rows:
        table.add_column(Text(cell(row.get(first))), justify="right")
    for key in keys:
        table.add_row(Text(key.replace("_", " ")), *(Text(cell(row.get(key))) for row in rows))
    return table


def experiment_table(result: Mapping[str, Any]) -> list[Table | Text]:
    """Return an experiment's table, its notes, and the reasons why parts of it were not run."""
    cells = grid(result)
    table = Table(title=Text(result["title"]))
    for index, name in enumerate(cells.header):
        side: Literal["left", "right"] = "left" if index < cells.keys else "right"
        table.add_column(Text(name), justify=side, overflow="fold")
    for row in cells.rows:
        table.add_row(*(Text(visible(text)) for text in row))
    notes = [Text(f"- {visible(text)}") for text in [*result["notes"], *cells.reasons]]
    return [table, *notes]


def rows_table(
    rows: Sequence[Mapping[str, Any]], title: str, columns: Mapping[str, str] | None = None
) -> "RowsTable":
    """Return a table of dictionaries, with the given columns and headings, or all in order of first appearance."""
    if columns is None:
        columns = {key: key.replace("_", " ") for row in rows for key in row}
    return RowsTable(rows, title, columns)


@dataclass(frozen=True)
class RowsTable:
    """A table of dictionaries that fits any terminal: where it is too wide, its right part stands below the left one.

    The first column stands in each part.
    """

    rows: Sequence[Mapping[str, Any]]
    title: str
    columns: Mapping[str, str]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the table for a console of the given width."""
        headings = dict(self.columns)
        if self._width(headings) > options.max_width:
            headings = {column: heading.replace(" ", "\n") for column, heading in headings.items()}
        parts: list[dict[str, str]] = [{}]
        for column, heading in headings.items():
            wider = parts[-1] | {column: heading}
            if len(parts[-1]) > 1 and self._width(wider) > options.max_width:
                first = next(iter(headings))
                wider = {first: headings[first], column: heading}
                parts.append(wider)
            parts[-1] = wider
        for i, part in enumerate(parts):
            yield self._table(part, self.title if i == 0 else None)

    def _width(self, headings: Mapping[str, str]) -> int:
        """Return the least width at which no heading and no number is broken."""
        return 1 + sum(3 + self._least(column, heading) for column, heading in headings.items())

    def _least(self, column: str, heading: str) -> int:
        longest = max((cell_len(cell(row.get(column))) for row in self.rows), default=0)
        line = max(cell_len(line) for line in heading.split("\n"))
        return max(line, longest if self._numbers(column) else min(longest, FOLDED))

    def _numbers(self, column: str) -> bool:
        return all(isinstance(row.get(column), int | float | None) for row in self.rows)

    def _table(self, headings: Mapping[str, str], title: str | None) -> Table:
        table = Table(title=title)
        for column, heading in headings.items():
            numbers = self._numbers(column)
            table.add_column(
                Text(heading), justify="right" if numbers else "left", overflow="fold", no_wrap=numbers
            )
        for row in self.rows:
            table.add_row(*(Text(cell(row.get(column))) for column in headings))
        return table


def holders_picture(holders: Sequence[int], nodes: int, width: int) -> Text:
    """Draw a line for each CompNode, with a mark at each token that it holds; cut into blocks of the width."""
    label = len(f"CompNode {nodes - 1} ")
    step = max(1, width - label)
    picture = Text()
    for start in range(0, len(holders), step):
        part = holders[start : start + step]
        picture.append(f"{'token':<{label}}{start}\n", style="dim")
        for node in range(nodes):
            marks = "".join("█" if holder == node else "·" for holder in part)
            picture.append(f"{f'CompNode {node}':<{label}}{marks}\n")
    return picture


def cell(value: Any) -> str:
    """Return a value as text: four significant digits, a dash for what was not measured."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(cell, value))
    return visible(str(value))
