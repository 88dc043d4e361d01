"""Show an attack on a terminal: a coloured line per prompt, a table of figures."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from hiddenlab.report.markdown import channel_of
from hiddenlab.report.tables import grid
from hiddenlab.summary import FIGURES, NOT_APPLICABLE, Sample, figure, figures_of
from hiddenlab.text import visible

BY_LAYER = (
    "exact", "token_accuracy", "rouge_l", "verified", "evaluated_tokens_per_token", "slowdown_vs_prefill",
    "attack_seconds", "setup_seconds",
)  # fmt: skip
WHOLE = ("node",)  # columns of names, which are never folded
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


@dataclass(frozen=True)
class TextTable:
    """A table that fits any terminal: where it is too wide, its right part stands below the left one.

    The first column stands in each part. No number and no heading's word is broken.

    Attributes:
        left: indices of the columns of texts; the others hold numbers and are aligned to the right.
        whole: those of ``left`` whose texts are not folded, such as names.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Collection[int]
    title: str | None
    whole: Collection[int] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the table for a console of the given width."""
        head = list(self.head)
        if self._width(range(len(head)), head) > options.max_width:
            head = [name.replace(" ", "\n") for name in head]
        parts: list[list[int]] = [[0]]
        for column in range(1, len(head)):
            if len(parts[-1]) > 1 and self._width([*parts[-1], column], head) > options.max_width:
                parts.append([0])
            parts[-1].append(column)
        for i, columns in enumerate(parts):
            yield self._part(columns, head, self.title if i == 0 else None)

    def _width(self, columns: Iterable[int], head: Sequence[str]) -> int:
        """Return the least width at which no heading and no number is broken."""
        return 1 + sum(3 + self._least(column, head[column]) for column in columns)

    def _least(self, column: int, heading: str) -> int:
        longest = self._longest(column)
        line = max(cell_len(line) for line in heading.split("\n"))
        return max(
            line, min(longest, FOLDED) if self._is_text(column) and column not in self.whole else longest
        )

    def _longest(self, column: int) -> int:
        return max((cell_len(row[column]) for row in self.rows), default=0)

    def _is_text(self, column: int) -> bool:
        """Return whether cells may be folded; an answer's text may stand among numbers."""
        return column in self.left or self._longest(column) > 2 * FOLDED

    def _part(self, columns: Sequence[int], head: Sequence[str], title: str | None) -> Table:
        part = Table(title=None if title is None else Text(title))
        for column in columns:
            text = self._is_text(column)
            part.add_column(
                Text(head[column]),
                justify="left" if text else "right",
                overflow="fold",
                no_wrap=not text or column in self.whole,
            )
        for row in self.rows:
            part.add_row(*(Text(visible(row[column])) for column in columns))
        return part


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[int] = (0,), title: str | None = None
) -> TextTable:
    """Return a table for a terminal; all columns but those of the indices ``left`` are aligned to the right."""
    return TextTable(head, [list(row) for row in rows], left, title)


def summary_table(summary: Mapping[str, Any]) -> TextTable:
    """Return the table of a run's figures."""
    return table(("figure", "value"), figures_of(summary))


def layers_table(spec: Mapping[str, Any], given: Sequence[tuple[int, Mapping[str, Any]]]) -> TextTable:
    """Return a table of the figures of runs at several layers of one model, a line for each.

    Figures that no run measured are left out.

    Args:
        spec: of one of the runs. given: layers and summaries.
    """
    names = [name for name in BY_LAYER if any(summary.get(name) is not None for _, summary in given)]
    rows = [[str(layer), *(figure(name, summary.get(name)) for name in names)] for layer, summary in given]
    heading = f"{spec['model']}, {spec['stream']}, channel {channel_of(spec)}"
    return table(["layer", *(FIGURES[name][0] for name in names)], rows, left=(), title=visible(heading))


def figures_table(rows: Sequence[Mapping[str, Any]], title: str) -> TextTable:
    """Return a table for few rows of many figures: one column for each row, so that it fits any terminal."""
    first, *keys = dict.fromkeys(key for row in rows for key in row)
    head = [first.replace("_", " "), *(cell(row.get(first)) for row in rows)]
    lines = [[key.replace("_", " "), *(cell(row.get(key)) for row in rows)] for key in keys]
    return table(head, lines, title=title)


def experiment_table(result: Mapping[str, Any]) -> list[TextTable | Text]:
    """Return an experiment's table, its notes, and the reasons why parts of it were not run."""
    cells = grid(result)
    notes = [Text(f"- {visible(text)}") for text in [*result["notes"], *cells.reasons]]
    return [table(cells.header, cells.rows, range(cells.keys), result["title"]), *notes]


def rows_table(
    rows: Sequence[Mapping[str, Any]], title: str, columns: Mapping[str, str] | None = None
) -> TextTable:
    """Return a table of dictionaries, with the given columns and headings, or all in order of first appearance."""
    if columns is None:
        columns = {key: key.replace("_", " ") for row in rows for key in row}
    texts = [
        index
        for index, column in enumerate(columns)
        if not all(isinstance(row.get(column), int | float | None) for row in rows)
    ]
    lines = [[cell(row.get(column)) for column in columns] for row in rows]
    names = [index for index, column in enumerate(columns) if column in WHOLE]
    return TextTable(list(columns.values()), lines, texts, title, names)


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
