"""Draw leak, utility and cost of an assessed defense, a panel each; matplotlib is imported only when it is drawn."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from hiddenlab.report.assessed import bars_of, defense_of, name_of
from hiddenlab.report.data import Picture, Run
from hiddenlab.report.pictures import COLOURS, GRID, INK, drawn, new_figure, picture
from hiddenlab.report.plots import plain
from hiddenlab.text import visible

WIDE = 30  # how many times as long the longest bar is, from which on a scale is logarithmic


def draw_assessed(run: Run, folder: Path) -> Picture:
    """Draw an assessment's picture into a directory."""
    panels = bars_of(run.summary)
    said = [f"{title}: {_said(bars, reason)}" for title, bars, reason in panels]
    with drawn():
        drawing = new_figure(10.5, 2.6, visible(f"{defense_of(run)}: {run.summary['status']}"))
        axes = drawing.subplots(1, len(panels), squeeze=False)[0]
        for axis, (title, bars, reason) in zip(axes, panels, strict=True):
            axis.set_title(title, loc="left", fontsize=10)
            axis.spines[["top", "right"]].set_visible(False)
            if bars:
                _bars(axis, bars, title.startswith("leak"))
            else:
                _nothing(axis, str(reason))
        return picture(drawing, folder / f"{name_of(run)}.png", "; ".join(said))


def _said(bars: Sequence[tuple[str, Mapping[str, float]]], reason: str | None) -> str:
    return ", ".join(f"{name} {_short(one['value'])}" for name, one in bars) if bars else str(reason)


def _bars(axis: Any, bars: Sequence[tuple[str, Mapping[str, float]]], share: bool) -> None:
    """Draw bars with their intervals, and their figures beside them."""
    values = [max(0.0, one["value"]) for _, one in bars]
    ends = [max(0.0, one.get("high", one["value"])) for _, one in bars]
    places = list(range(len(bars)))
    axis.barh(places, values, color=COLOURS[0], height=0.55, zorder=3)
    for place, (_, one) in zip(places, bars, strict=True):
        if "low" in one:
            axis.plot(
                [max(0.0, one["low"]), max(0.0, one["high"])], [place] * 2, color=INK, linewidth=1.5, zorder=4
            )
    if not share and min(values) > 0 and max(ends) > WIDE * min(values):
        axis.set_xscale("log")
        plain(axis.xaxis)
        axis.set_xlim(0.5 * min(values), max(ends) * (max(ends) / min(values)) ** 0.5)
    else:
        axis.set_xlim(0, 130 if share else 1.35 * max(ends) or 1.0)
    if share:
        axis.set_xticks([0, 25, 50, 75, 100])
    for place, value, end in zip(places, values, ends, strict=True):
        axis.annotate(
            _short(value), (end, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9
        )
    axis.set_yticks(places, [fill(visible(name), 16) for name, _ in bars], fontsize=9)
    axis.set_ylim(len(bars) - 0.4, -0.6)
    axis.grid(axis="x", color=GRID, linewidth=0.8)


def _nothing(axis: Any, reason: str) -> None:
    axis.set_xticks([])
    axis.set_yticks([])
    axis.spines[["bottom", "left"]].set_visible(False)
    axis.text(0, 0.95, fill(visible(reason), 36), transform=axis.transAxes, va="top", fontsize=9, color=INK)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
