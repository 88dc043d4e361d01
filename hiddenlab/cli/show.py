"""Show an attack on a terminal: a coloured line per prompt, a table of figures."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from hiddenlab.report.markdown import channel_of
from hiddenlab.report.tables import grid
from hiddenlab.summary import NOT_APPLICABLE, Sample, figure, figures_of
from hiddenlab.text import visible

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


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[int] = (0,), title: str | None = None
) -> Table:
    """Return a table for a terminal; all columns but those of the indices ``left`` are aligned to the right."""
    made = Table(title=None if title is None else Text(title))
    for index, name in enumerate(head):
        made.add_column(Text(name), justify="left" if index in left else "right", overflow="fold")
    for row in rows:
        made.add_row(*(Text(visible(cell)) for cell in row))
    return made


def summary_table(summary: Mapping[str, Any]) -> Table:
    """Return the table of a run's figures."""
    return table(("figure", "value"), figures_of(summary))


def figures_table(rows: Sequence[Mapping[str, Any]], title: str) -> Table:
    """Return a table for few rows of many figures: one column for each row, so that it fits any terminal."""
    first, *keys = dict.fromkeys(key for row in rows for key in row)
    head = [first.replace("_", " "), *(cell(row.get(first)) for row in rows)]
    lines = [[key.replace("_", " "), *(cell(row.get(key)) for row in rows)] for key in keys]
    return table(head, lines, title=title)


def experiment_table(result: Mapping[str, Any]) -> list[Table | Text]:
    """Return an experiment's table, its notes, and the reasons why parts of it were not run."""
    cells = grid(result)
    notes = [Text(f"- {visible(text)}") for text in [*result["notes"], *cells.reasons]]
    return [table(cells.header, cells.rows, range(cells.keys), result["title"]), *notes]


def rows_table(
    rows: Sequence[Mapping[str, Any]], title: str, columns: Mapping[str, str] | None = None
) -> Table:
    """Return a table of dictionaries, with the given columns and headings, or all in order of first appearance."""
    if columns is None:
        columns = {key: key.replace("_", " ") for row in rows for key in row}
    texts = [
        index
        for index, column in enumerate(columns)
        if not all(isinstance(row.get(column), int | float | None) for row in rows)
    ]
    lines = [[cell(row.get(column)) for column in columns] for row in rows]
    return table(list(columns.values()), lines, texts, title)


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
