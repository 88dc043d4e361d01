"""Draw bars: numbers of each row, a panel a number, and shares that add up to one."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hiddenlab.report.pictures import COLOURS, drawn, new_figure, save
from hiddenlab.report.plots import percent, plain
from hiddenlab.report.points import style


def draw_bars(
    rows: Sequence[Mapping[str, Any]],
    name: str,
    panels: Mapping[str, str],
    title: str,
    path: Path,
    logarithmic: bool = True,
) -> None:
    """Draw bars of some numbers of each row, one panel for each number; what is None is left out.

    Args:
        name: key of a row's name. panels: keys of the numbers with their titles. logarithmic: use logarithmic scales,
            which leave out 0; otherwise scales start at 0.
    """
    with drawn():
        save(_bars(rows, name, panels, title, logarithmic), path)


def _bars(
    rows: Sequence[Mapping[str, Any]], name: str, panels: Mapping[str, str], title: str, logarithmic: bool
) -> Any:
    drawing = new_figure(10.5, 1.4 + 0.34 * len(rows), _literal(title))
    places = list(range(len(rows)))
    axes = drawing.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (key, label) in zip(axes, panels.items(), strict=True):
        known = [
            (place, float(row[key]))
            for place, row in zip(places, rows, strict=True)
            if row.get(key) or (not logarithmic and row.get(key) is not None)
        ]
        if known:
            axis.barh(*zip(*known, strict=True), color=COLOURS[0], height=0.6, zorder=3)
            low, high = min(v for _, v in known), max(v for _, v in known)
            if logarithmic:
                axis.set_xscale("log")
                axis.set_xlim(0.5 * low, 4 * high)
                plain(axis.xaxis)
            else:
                axis.set_xlim(0, 1.25 * high or 1.0)
        for place, value in known:
            axis.annotate(
                f"{value:,.0f}" if value >= 1000 else f"{value:.3g}",
                (value, place),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
        axis.set_xlabel(label)
        axis.grid(axis="x", color="#e3e5e8", linewidth=0.8)
        axis.spines[["top", "right"]].set_visible(False)
    axis.set_yticks(places, [_literal(str(row[name])) for row in rows], fontsize=9)
    axis.invert_yaxis()
    return drawing


def _literal(text: str) -> str:
    """Escape what matplotlib would read as a formula: a model's path may hold any character."""
    return text.replace("$", r"\$")


def draw_shares(
    series: Mapping[str, Sequence[float]],
    label: str,
    title: str,
    path: Path,
    marks: Mapping[str, float] | None = None,
) -> None:
    """Draw the share of values up to each value, one line for each series; draw nothing without any values.

    Args:
        label: of the values. marks: values to be marked, by name.
    """
    known = {name: sorted(values) for name, values in series.items() if values}
    if known:
        with drawn():
            save(_shares(known, label, title, marks or {}), path)


def _shares(known: Mapping[str, Sequence[float]], label: str, title: str, marks: Mapping[str, float]) -> Any:
    drawing = new_figure(7.5, 4.2, title)
    axis: Any = drawing.subplots()
    for n, (name, values) in enumerate(known.items()):
        shares = [(i + 1) / len(values) for i in range(len(values))]
        axis.plot(
            values, shares, label=f"{name} ({len(values)})", drawstyle="steps-post", zorder=3, **style(n)
        )
    for name, value in marks.items():
        axis.axvline(value, color="#666666", linestyle="--", linewidth=1.2)
        axis.annotate(
            name, (value, 0.02), xytext=(4, 0), textcoords="offset points", fontsize=9, color="#444444"
        )
    axis.set_ylim(0, 1.03)
    axis.yaxis.set_major_formatter(percent())
    axis.set_xlabel(label)
    axis.set_ylabel("share of requests up to it")
    axis.grid(color="#e3e5e8", linewidth=0.8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=9)
    return drawing
