"""Draw figures as points: over another figure, or side by side on a line for each row."""

import math
from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any

from hiddenlab.report.pictures import COLOURS

MARKERS = "osD^vPX*"
POINTS = 72  # of an inch
NAME_LETTERS = 60  # on a line of a row's name
STEEP, NAME_WIDTH = 70, 13  # degrees of a point's name; points from one name to the next


def over_figure(
    axis: Any,
    rows: Sequence[Mapping[str, Any]],
    against: str,
    labels: Mapping[str, str],
    names: Sequence[str],
) -> None:
    """Draw figures over another one, each row named at its highest point."""
    rows = [row for row in rows if value_of(row, against) is not None]
    rows = [row for row in rows if any(value_of(row, name) is not None for name in names)]
    titles = names_of(rows)
    for n, name in enumerate(names):
        own = [row for row in rows if value_of(row, name) is not None]
        (places, beside), (values, errors) = values_of(own, against), values_of(own, name)
        axis.errorbar(
            places, values, errors, beside, label=labels[name], linestyle="", markersize=5, capsize=2, **style(n),
        )  # fmt: skip
    axis.set_xlabel(labels[against])
    wide = [value_of(row, against) or 0.0 for row in rows]
    if max(wide) > max(1.0, 10 * min(wide)) and min(wide) > 0:  # no shares; so that neighbours stay apart
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter("{x:g}")
    if axis.get_ylim()[1] <= 1.2:  # shares: room for the names above them
        axis.set_ylim(bottom=0.0, top=1.25)
        axis.set_yticks([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    tops = {
        id(row): max(row["figures"][name]["high"] for name in names if value_of(row, name) is not None)
        for row in rows
    }

    def foot(row: Mapping[str, Any]) -> float:
        """Return where the line of the row's name meets the bottom, in points."""
        x, y = axis.transData.transform((row["figures"][against]["value"], tops[id(row)]))
        return float(x - y / math.tan(math.radians(STEEP))) * POINTS / axis.figure.dpi

    free = -math.inf
    for row in sorted(rows, key=foot):
        aside = max(0.0, free - foot(row))
        free = foot(row) + aside + NAME_WIDTH
        axis.annotate(
            titles[rows.index(row)],
            (row["figures"][against]["value"], tops[id(row)]),
            xytext=(3 + aside, 4),
            textcoords="offset points",
            fontsize=8,
            rotation=STEEP,  # so that names of points beside each other do not lie on one another
        )
    axis.grid(color="#e3e5e8", linewidth=0.8)


def points_by_row(
    axis: Any, rows: Sequence[Mapping[str, Any]], names: Sequence[str], labels: Mapping[str, str]
) -> None:
    """Draw figures of each row beside its name and verdict, if it has one, the first row on top.

    Args:
        names: of the figures, which share one scale.
    """
    for n, name in enumerate(names):
        known = [(place, row) for place, row in enumerate(rows) if value_of(row, name) is not None]
        values, errors = values_of([row for _, row in known], name)
        axis.errorbar(
            values, [place for place, _ in known], None, errors, label=labels[name], linestyle="", markersize=5,
            capsize=2, **style(n),
        )  # fmt: skip
    verdicts = [str(row.get("words", {}).get("verdict", "")) for row in rows]
    named = [" ".join(filter(None, words)) for words in zip(names_of(rows), verdicts, strict=True)]
    titles = ["\n".join(wrap(title, NAME_LETTERS, break_on_hyphens=False)) for title in named]
    axis.set_yticks(range(len(rows)), titles, fontsize=8)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_xlim(left=min(0.0, axis.get_xlim()[0]))
    axis.grid(color="#e3e5e8", linewidth=0.8)


def names_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the name of each row: the keys in which rows differ, text values without their key."""
    varying = [key for key in rows[0]["keys"] if len({str(row["keys"].get(key)) for row in rows}) > 1]
    known = [[(key, row["keys"][key]) for key in varying if row["keys"].get(key) is not None] for row in rows]
    return [
        " ".join(value if isinstance(value, str) else f"{key} {value}" for key, value in keys)
        for keys in known
    ]


def value_of(row: Mapping[str, Any], name: str) -> float | None:
    """Return a figure of a row, None where it was not measured."""
    return row["figures"].get(name, {}).get("value")  # type: ignore[no-any-return]


def values_of(rows: Sequence[Mapping[str, Any]], name: str) -> tuple[list[float], list[list[float]]]:
    """Return values, and how far their intervals reach below and above them."""
    figures = [row["figures"][name] for row in rows]
    values = [figure["value"] for figure in figures]
    below = [max(0.0, figure["value"] - figure["low"]) for figure in figures]
    above = [max(0.0, figure["high"] - figure["value"]) for figure in figures]
    return values, [below, above]


def style(n: int) -> dict[str, Any]:
    """Return colour and marker of a series."""
    return {"color": COLOURS[n % len(COLOURS)], "marker": MARKERS[n % len(MARKERS)]}
