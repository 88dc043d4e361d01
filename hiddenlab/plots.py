"""The plots of a report; matplotlib is imported only here, and only when a report is drawn."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hiddenlab.report import Run

# Okabe and Ito's colours, told apart by colour-blind readers too; the marker changes with every line.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX*"

Panel = tuple[str, str, bool]  # name in the summary, title, whether it is a share
FILES: dict[str, tuple[Panel, Panel]] = {
    "recovery.png": (("exact", "exact prompts", True), ("token_accuracy", "token accuracy", True)),
    "cost.png": (
        ("evaluated_tokens_per_token", "evaluated tokens per token", False),
        ("attack_over_prefill", "attack time over prefill time", False),
    ),
}


def draw(runs: "Sequence[Run]", out: Path) -> list[Path]:
    """Draw every plot into a directory and return the files: lines over layers, bars for a single layer."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    labels = sorted({run.label for run in runs})
    layers = sorted({run.layer for run in runs})
    one = _bars if len(layers) == 1 else _lines
    height = 1.4 + 0.45 * len(labels) if len(layers) == 1 else 4.2
    files = []
    for name, panels in FILES.items():
        drawing = Figure(figsize=(10.5, height), layout="constrained")
        FigureCanvasAgg(drawing)
        axes = drawing.subplots(1, 2, sharey=len(layers) == 1)
        for axis, panel in zip(axes, panels, strict=True):
            one(axis, panel, runs, labels)
            axis.spines[["top", "right"]].set_visible(False)
        if len(layers) > 1 and len(labels) > 1:
            handles, names = axes[0].get_legend_handles_labels()
            drawing.legend(
                handles, names, loc="outside lower center", ncols=min(4, len(names)), frameon=False
            )
        drawing.savefig(out / name, dpi=130)
        files.append(out / name)
    return files


def _lines(axis: Any, panel: Panel, runs: "Sequence[Run]", labels: Sequence[str]) -> None:
    name, title, share = panel
    layers = sorted({run.layer for run in runs})
    # Series that agree (all exact, say) would hide one another: each stands a little beside the layer.
    gap = min(b - a for a, b in pairwise(layers))
    for n, label in enumerate(labels):
        aside = 0.5 * gap * ((n + 0.5) / len(labels) - 0.5)
        points = sorted((r.layer, r.summary[name]) for r in runs if r.label == label and _known(r, name))
        if not points:
            continue
        style = {"color": COLOURS[n % len(COLOURS)], "marker": MARKERS[n % len(MARKERS)]}
        xs, ys = zip(*points, strict=True)
        places = [x + aside for x in xs]
        axis.plot(places, ys, label=label, linewidth=1.2, markersize=6, clip_on=False, zorder=3, **style)
    axis.set_xticks(layers)
    axis.set_xlabel("layer")
    axis.set_title(title, loc="left", fontsize=11)
    axis.grid(axis="y", color="#e3e5e8", linewidth=0.8)
    if share:
        axis.set_ylim(0, 1.02)
        axis.yaxis.set_major_formatter(_percent())
    else:
        _scale(axis, [run.summary[name] for run in runs if _known(run, name)])


def _bars(axis: Any, panel: Panel, runs: "Sequence[Run]", labels: Sequence[str]) -> None:
    from hiddenlab.summary import figure

    name, title, share = panel
    values = {run.label: run.summary[name] for run in runs if _known(run, name)}
    places = range(len(labels))
    axis.barh(places, [values.get(label, 0) for label in labels], color=COLOURS[0], height=0.6, zorder=3)
    axis.set_yticks(places, ["\n".join(wrap(label, 34)) for label in labels], fontsize=9)
    axis.set_ylim(len(labels) - 0.3, -0.7)
    axis.set_title(title, loc="left", fontsize=11)
    axis.set_xlabel(f"layer {runs[0].layer}")
    axis.grid(axis="x", color="#e3e5e8", linewidth=0.8)
    known = list(values.values())
    if not share and _wide(known):
        axis.set_xscale("log")
        _plain(axis.xaxis)
        low, high = min(known), max(known)
        axis.set_xlim(0.5 * low, high * (high / low) ** 0.3)  # room for the figures beside the bars
    else:
        axis.set_xlim(0, 1.25 * (1.0 if share else max(known, default=1.0)))
    if share:
        axis.set_xticks([0, 0.25, 0.5, 0.75, 1.0])
        axis.xaxis.set_major_formatter(_percent())
    for place, label in zip(places, labels, strict=True):
        value = values.get(label)
        text = "not measured" if value is None else figure(name, value)
        axis.annotate(
            text,
            (value or axis.get_xlim()[0], place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )


def _known(run: "Run", name: str) -> bool:
    return run.summary.get(name) is not None


def _percent() -> Any:
    from matplotlib.ticker import PercentFormatter

    return PercentFormatter(1.0, decimals=0)


def _scale(axis: Any, values: Sequence[float]) -> None:
    """A logarithmic scale where values spread over more than a decade, else one from zero."""
    if _wide(values):
        axis.set_yscale("log")
        _plain(axis.yaxis)
        axis.set_ylim(0.8 * min(values), 1.25 * max(values))
    else:
        axis.set_ylim(0, 1.12 * max([*values, 1e-9]))


def _wide(values: Sequence[float]) -> bool:
    return bool(values) and min(values) > 0 and max(values) > 10 * min(values)


def _plain(ticks: Any) -> None:
    """Numbers in place of powers of ten."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    ticks.set_major_formatter(FuncFormatter(_short))
    ticks.set_minor_formatter(NullFormatter())


def _short(value: float, _: int) -> str:
    return f"{value / 1e6:g}M" if value >= 1e6 else f"{value / 1e3:g}k" if value >= 1e4 else f"{value:g}"
