"""Draw the plots of a report; matplotlib is imported only when a report is drawn."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from textwrap import wrap
from typing import Any

from hiddenlab.report.data import Picture, Run
from hiddenlab.report.pictures import COLOURS, INK, drawn, new_figure, picture
from hiddenlab.report.points import MARKERS, names_of, over_figure, points_by_row, style, value_of, values_of
from hiddenlab.report.tables import kind_of
from hiddenlab.summary import figure
from hiddenlab.text import visible

MOST_BARS = 50
# Points over another figure whose names do not lie on one another: at most so many, of so many letters.
MOST_NAMED, LONG_NAME = 12, 30

Panel = tuple[str, str, bool]  # name in the summary, title, whether it is a share
FILES: dict[str, tuple[Panel, Panel]] = {
    "recovery.png": (("exact", "exact prompts", True), ("token_accuracy", "token accuracy", True)),
    "cost.png": (
        ("evaluated_tokens_per_token", "evaluated tokens per token", False),
        ("slowdown_vs_prefill", "attack time over prefill time", False),
    ),
}


def draw(runs: "Sequence[Run]", folder: Path) -> list[Picture]:
    """Draw recovery and cost into a directory: lines over layers, or a bar for each run where no line has two points.

    What no run measured gets no panel, and a picture without a panel is not drawn.
    """
    labels = sorted({run.label for run in runs})
    over_layers = any(len({run.layer for run in runs if run.label == label}) > 1 for label in labels)
    pictures = []
    for name, wanted in FILES.items():
        panels = [panel for panel in wanted if any(_known(run, panel[0]) for run in runs)]
        if not panels:
            continue
        with drawn():
            drawing = (_lines if over_layers else _bars)(panels, runs, labels)
            shown = " and ".join(title for _, title, _ in panels)
            form = "by layer, a line for each run" if over_layers else "a bar for each run"
            pictures.append(picture(drawing, folder / name, f"{shown}, {form}"))
    return pictures


def draw_table(table: Mapping[str, Any], folder: Path) -> Path | None:
    """Draw an experiment's table as ``table_picture`` does and return the file, if there is one."""
    made = table_picture(table, folder)
    return None if made is None else made.path


def table_picture(table: Mapping[str, Any], folder: Path) -> Picture | None:
    """Draw an experiment's table with its intervals; return None where a picture would show nothing.

    The table chooses the form: every figure over a key (``over``), figures as curves over the numbers that end their
    names (``curves``), or figures over another one (``against``), which are
    beside it on a line for each row where there are many. Otherwise its first figure that is not zero
    everywhere is drawn, as lines over layers where it has several, or as one bar for each row with the paper's figure
    beside it.
    Nothing is drawn of a single row, or where there would be too many bars to read.
    """
    table = _printable(table)
    rows = [row for row in table["rows"] if row["figures"]]
    names = [name for name in table["figures"] if any(value_of(row, name) for row in rows)]
    if not names:
        return None
    with drawn():
        made = _table_drawing(table, rows, names)
        path = folder / f"{table['experiment']}.png"
        return None if made is None else picture(made[0], path, f"{table['title']} ({made[1]})")


def _printable(value: Any) -> Any:
    """Return a value of JSON whose texts hold no control character; a font has no sign for them."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, Mapping):
        return {visible(key): _printable(inner) for key, inner in value.items()}
    return [_printable(inner) for inner in value] if isinstance(value, list) else value


def _table_drawing(
    table: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> tuple[Any, str] | None:
    """Return the drawing of a table's rows, and in words what it shows."""
    labels, title = table["figures"], str(table["title"])
    if table.get("curves"):
        return _curves(rows, names, table), f"curves over {table['curves']}"
    name = names[0]
    over, against = table.get("over"), str(table.get("against"))
    if over:
        drawing = new_figure(8.5, 5.2, title)
        _over_key(drawing.subplots(), rows, over, {name: labels[name] for name in names})
        shown = f"figures over {over}"
    elif against in names[1:] and sum({name, against} <= set(row["figures"]) for row in rows) > 1:
        shown = f"figures over {labels[against]}"
        before = names[: names.index(against)]
        shares = all((value_of(row, against) or 0.0) <= 1 for row in rows)  # which one scale shows
        if len(rows) > MOST_NAMED or (shares and max(map(len, names_of(rows))) > LONG_NAME):
            drawing = new_figure(9.5, 1.6 + 0.24 * len(rows), title)
            points_by_row(drawing.subplots(), rows, [*before, against], labels)
            shown = f"{', '.join(labels[name] for name in [*before, against])} of each row"
        else:
            drawing = new_figure(8.5, 5.2, title)
            over_figure(drawing.subplots(), rows, against, labels, before)
    else:
        rows = [row for row in rows if value_of(row, name) is not None]
        layers = sorted({row["keys"]["layer"] for row in rows if isinstance(row["keys"].get("layer"), int)})
        series = len({_series(row, True) for row in rows})
        shown = labels[name]
        if len(layers) > 1 and all("layer" in row["keys"] for row in rows) and series <= len(MARKERS):
            drawing = new_figure(8.5, 3.9 + 0.12 * series, title)
            _over_layers(drawing.subplots(), rows, name, layers, labels[name])
            shown += " by layer"
        elif 1 < len(rows) <= MOST_BARS:
            lines = sum(1 + _bar(row).count("\n") for row in rows)
            drawing = new_figure(8.5, 1.4 + 0.36 * lines, title)
            _by_row(drawing.subplots(), rows, name, labels[name])
            shown += ", a bar for each row"
        else:
            return None
    axis = drawing.axes[0]
    _legend(drawing, axis, 2 if over else 3)
    axis.spines[["top", "right"]].set_visible(False)
    return drawing, shown


def _curves(rows: Sequence[Mapping[str, Any]], names: Sequence[str], table: Mapping[str, Any]) -> Any:
    """Draw a panel for each value of the first key, with a line for each of the second, over the numbers in names."""
    from matplotlib.ticker import MaxNLocator, NullLocator

    first, second = list(rows[0]["keys"])[:2]
    names = [name for name in names if _number(name) is not None]
    across, up = table.get("scales") or ("log", "linear")
    panels = list(dict.fromkeys(str(row["keys"][first]) for row in rows))
    lines = list(dict.fromkeys(str(row["keys"][second]) for row in rows))
    columns = min(3, len(panels))
    height = -(-len(panels) // columns)
    width, lines_below = max(6.8, 3.4 * columns), -(-len(lines) // 3)
    title = f"{table['title']}\nover {table['curves']}"
    drawing = new_figure(width, 0.9 + 2.3 * height + 0.22 * lines_below, title)
    axes = drawing.subplots(height, columns, sharex=True, sharey=True, squeeze=False).ravel()
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    for axis, panel in zip(axes, panels, strict=False):
        for row in (row for row in rows if str(row["keys"][first]) == panel):
            own = [name for name in names if value_of(row, name) is not None]
            n = lines.index(str(row["keys"][second]))
            axis.plot(
                [_number(name) for name in own], [value_of(row, name) for name in own],
                label=lines[n], linewidth=1.1, markersize=3.5, **style(n),
            )  # fmt: skip
        axis.set_xscale(across)
        axis.set_yscale(up, **({"nonpositive": "mask"} if up == "log" else {}))
        axis.xaxis.set_minor_locator(NullLocator())
        if across == "linear":
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        for ticks in (axis.xaxis, *([axis.yaxis] if up == "log" else [])):
            plain(ticks)
        axis.set_title(panel if len(panel) <= 40 else f"{panel[:39]}…", loc="left", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.grid(color="#e3e5e8", linewidth=0.8)
        axis.spines[["top", "right"]].set_visible(False)
    named = axes[0].get_legend_handles_labels()[1]
    for n in (n for n, line in enumerate(lines) if line not in named):  # the legend is the first panel's
        axes[0].plot([], [], label=lines[n], linewidth=1.1, markersize=3.5, **style(n))
    found = [value for row in rows for name in names if (value := value_of(row, name)) is not None]
    if up == "linear" and min(found) >= 0 and max(found) <= 1:  # areas under a curve start at one half
        axes[0].set_ylim(0.4 if min(found) > 0.41 else 0.0, 1.03)
    for panel_below in range(
        len(panels), len(axes)
    ):  # the panel above an empty place shows the numbers itself
        if panel_below >= columns:
            axes[panel_below - columns].xaxis.set_tick_params(labelbottom=True)
    _legend(drawing, axes[0], 3, size=8)
    return drawing


def _number(name: str) -> float | None:
    """Return the number at the end of a figure's name, if there is one."""
    try:
        return float(name.rpartition("_")[2])
    except ValueError:
        return None


def _legend(drawing: Any, axis: Any, most: int, size: int = 10) -> None:
    """Draw the legend under the drawing, in as many columns as fit beside each other, ``most`` at most."""
    handles, texts = axis.get_legend_handles_labels()
    if not handles:
        return
    # A letter is about 0.55 of its size wide, in points of 1/72 inch; the marker takes four more letters.
    fit = int(72 * drawing.get_figwidth() / (0.55 * size * (max(map(len, texts)) + 5)))
    columns = max(1, min(most, fit, len(texts)))
    drawing.legend(handles, texts, loc="outside lower center", ncols=columns, frameon=False, fontsize=size)


def _over_layers(
    axis: Any, rows: Sequence[Mapping[str, Any]], name: str, layers: Sequence[int], label: str
) -> None:
    alike = [key for key in rows[0]["keys"] if len({str(row["keys"].get(key)) for row in rows}) == 1]
    names = {id(row): _series(row, True, alike) for row in rows}
    series = list(dict.fromkeys(names.values()))
    gap = float(min(b - a for a, b in pairwise(layers)))
    papers: dict[tuple[int, float], str] = {}  # several attacks on the same states may share a figure
    for n, line in enumerate(series):
        own = sorted((row for row in rows if names[id(row)] == line), key=lambda row: row["keys"]["layer"])
        places = [row["keys"]["layer"] + _aside(n, len(series), gap) for row in own]
        values, errors = values_of(own, name)
        shown = line if len(series) > 1 else None
        axis.errorbar(places, values, errors, label=shown, linewidth=1.2, markersize=5, capsize=3, **style(n))
        for row in own:
            for value in _papers(row, label):
                papers.setdefault((row["keys"]["layer"], value), style(n)["color"])
    if papers:
        where, marks = zip(*papers, strict=True)
        colours = list(papers.values())
        axis.scatter(where, marks, 30, "none", marker="D", edgecolors=colours, linewidths=1.2, zorder=4)
        # A separate series in the legend, after the others and in no channel's colour.
        axis.errorbar(
            [], [], label="the paper's, hollow", linestyle="", marker="D", mfc="none", color="#666666"
        )
    axis.set_xticks(layers)
    axis.set_xlim(layers[0] - 0.5 * gap, layers[-1] + 0.5 * gap)
    _bounds(axis.set_ylim, axis.yaxis, name, rows)
    common = _series({"keys": {key: rows[0]["keys"][key] for key in alike}}, True)
    axis.set_xlabel(f"layer ({common})" if common and len(series) > 1 else "layer")
    axis.set_ylabel(label)
    axis.grid(axis="y", color="#e3e5e8", linewidth=0.8)


def _by_row(axis: Any, rows: Sequence[Mapping[str, Any]], name: str, label: str) -> None:
    places = list(range(len(rows)))
    values, errors = values_of(rows, name)
    axis.barh(
        places, values, xerr=errors, color=COLOURS[0], ecolor=INK, height=0.6, zorder=3, capsize=3,
    )  # fmt: skip
    axis.set_yticks(places, [_bar(row) for row in rows], fontsize=9)
    axis.invert_yaxis()
    axis.set_xlabel(label)
    axis.grid(axis="x", color="#e3e5e8", linewidth=0.8)
    published = [(place, value) for place, row in enumerate(rows) for value in _papers(row, label)]
    if published:
        positions, marks = zip(*published, strict=True)
        axis.plot(marks, positions, "D", color=COLOURS[1], markersize=5, zorder=4, label="the paper's")
    if min(values) >= 0:
        axis.set_xlim(left=0)
        _bounds(axis.set_xlim, axis.xaxis, name, rows)
    for place, row in enumerate(rows):
        axis.annotate(
            figure(name, row["figures"][name]["value"], kind_of(name)), (1.0, place),
            xycoords=("axes fraction", "data"), xytext=(6, 0), textcoords="offset points", va="center", fontsize=8,
        )  # fmt: skip


def _bounds(
    limit: Callable[[float, float], Any], ticks: Any, name: str, rows: Sequence[Mapping[str, Any]]
) -> None:
    """Let an axis of shares or scores run from 0 to 1, so that pictures can be compared; leave others alone."""
    from matplotlib.ticker import FixedLocator

    kind = kind_of(name)
    figures = [row["figures"][name] for row in rows if value_of(row, name) is not None]
    if any(figure["low"] < 0 or figure["high"] > 1 for figure in figures):
        return
    if kind in ("share", "score") or any(figure["value"] >= 0.5 for figure in figures):
        limit(0, 1.03)
        ticks.set_major_locator(FixedLocator([0, 0.2, 0.4, 0.6, 0.8, 1.0]))
        if kind == "share":
            ticks.set_major_formatter(percent())


def _over_key(axis: Any, rows: Sequence[Mapping[str, Any]], over: str, figures: Mapping[str, str]) -> None:
    """Draw every figure as a point over the rows, sorted by the key; rows with the same value form a group."""
    rows = sorted(rows, key=lambda row: float(row["keys"][over]))
    steps = [a["keys"][over] != b["keys"][over] for a, b in pairwise(rows)]
    places = [float(n + sum(steps[:n])) for n in range(len(rows))]
    shared = {label.partition(", ")[0] for label in figures.values()}
    axis.set_ylabel(shared.pop() if len(shared) == 1 else "")
    for n, (name, label) in enumerate(figures.items()):
        label = label.partition(", ")[2] if axis.get_ylabel() else label
        own = [(x, row) for x, row in zip(places, rows, strict=True) if value_of(row, name) is not None]
        values, errors = values_of([row for _, row in own], name)
        spread = [x + 2 * _aside(n, len(figures), 0.6) for x, _ in own]
        axis.errorbar(spread, values, errors, label=label, linestyle="", markersize=5, capsize=2, **style(n))
    names = [key for key in rows[0]["keys"] if key != over]
    width = max(6, 110 // len(rows))  # letters that fit under a row
    labels = [
        "\n".join(
            line for key in names for line in wrap(str(row["keys"][key]), width, break_on_hyphens=False)
        )
        or f"{row['keys'][over]:g}"
        for row in rows
    ]
    axis.set_xticks(places, labels, fontsize=8)
    groups: dict[float, list[float]] = {}
    for x, row in zip(places, rows, strict=True):
        groups.setdefault(float(row["keys"][over]), []).append(x)
    for value, group in groups.items() if names else ():
        axis.annotate(
            f"{value:g}", (sum(group) / len(group), 1.0), xycoords=("data", "axes fraction"), xytext=(0, 3),
            textcoords="offset points", ha="center", fontsize=8,
        )  # fmt: skip
    axis.set_xlabel(f"{', '.join(names)}, from above; over the plot: {over}" if names else over)
    axis.set_ylim(bottom=min(0.0, axis.get_ylim()[0]))
    axis.grid(axis="y", color="#e3e5e8", linewidth=0.8)


def _aside(n: int, count: int, gap: float) -> float:
    """Return the horizontal offset of series ``n`` at a layer: equal series (all exact, say) would hide one another."""
    return 0.3 * gap * ((n + 0.5) / count - 0.5)


def _bar(row: Mapping[str, Any]) -> str:
    """Return a row's name beside its bar, wrapped, since a prompt among its keys may be long."""
    return "\n".join(wrap(_series(row, False), 60, break_on_hyphens=False))


def _papers(row: Mapping[str, Any], label: str) -> list[float]:
    """Return the paper's figures of that name, one for each model."""
    named = (value for key, value in row["paper"].items() if key.partition(",")[0] == label)
    return [value for value in named if isinstance(value, int | float)]


def _series(row: Mapping[str, Any], over_layers: bool, but: Sequence[str] = ()) -> str:
    """Return a row's name; over layers a short one: text values without their keys, and some keys left out."""
    if not over_layers:
        return ", ".join(f"{key} {value}" for key, value in row["keys"].items())
    keys = [(key, value) for key, value in row["keys"].items() if key not in (*but, "layer")]
    return ", ".join(value if isinstance(value, str) else f"{key} {value}" for key, value in keys)


def _lines(panels: Sequence[Panel], runs: "Sequence[Run]", labels: Sequence[str]) -> Any:
    """Draw a panel for each figure, with a line over layers for each label."""
    drawing = new_figure(5.25 * len(panels), 4.2)
    layers = sorted({run.layer for run in runs})
    gap = float(min(b - a for a, b in pairwise(layers)))
    axes = drawing.subplots(1, len(panels), squeeze=False)[0]
    for axis, (name, title, share) in zip(axes, panels, strict=True):
        for n, label in enumerate(labels):
            points = sorted((r.layer, r.summary[name]) for r in runs if r.label == label and _known(r, name))
            places = [x + _aside(n, len(labels), gap) for x, _ in points]
            values = [value for _, value in points]
            axis.plot(
                places, values, label=label, linewidth=1.2, markersize=6, clip_on=False, zorder=3, **style(n)
            )
        axis.set_xticks(layers)
        axis.set_xlim(layers[0] - 0.3 * gap, layers[-1] + 0.3 * gap)
        axis.set_xlabel("layer")
        axis.set_title(title, loc="left", fontsize=11)
        axis.grid(axis="y", color="#e3e5e8", linewidth=0.8)
        axis.spines[["top", "right"]].set_visible(False)
        if share:
            axis.set_ylim(0, 1.02)
            axis.yaxis.set_major_formatter(percent())
        else:
            _scale(axis, [run.summary[name] for run in runs if _known(run, name)])
    if len(labels) > 1:
        _legend(drawing, axes[0], 4)
    return drawing


def _bars(panels: Sequence[Panel], runs: "Sequence[Run]", _: Sequence[str]) -> Any:
    """Draw a panel for each figure, with a bar for each run."""
    ordered = sorted(runs, key=lambda run: (run.label, run.layer))
    names = [
        "\n".join(wrap(f"{run.label}, layer {run.layer}", 40, break_on_hyphens=False)) for run in ordered
    ]
    lines = sum(1 + name.count("\n") for name in names)
    drawing = new_figure(3.5 + 3.5 * len(panels), 1.1 + 0.3 * max(lines, 1.4 * len(names)))
    axes = drawing.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (name, title, share) in zip(axes, panels, strict=True):
        values = [run.summary.get(name) for run in ordered]
        known = [value for value in values if value is not None]
        axis.barh(
            range(len(values)), [value or 0 for value in values], color=COLOURS[0], height=0.6, zorder=3
        )
        axis.set_title(title, loc="left", fontsize=11)
        axis.grid(axis="x", color="#e3e5e8", linewidth=0.8)
        axis.spines[["top", "right"]].set_visible(False)
        if not share and _wide(known):
            axis.set_xscale("log")
            plain(axis.xaxis)
            low, high = min(known), max(known)
            axis.set_xlim(0.5 * low, high * (high / low) ** 0.3)  # room for the figures beside the bars
        else:
            axis.set_xlim(0, 1.3 * (1.0 if share else max(known) or 1.0))
        if share:
            axis.set_xticks([0, 0.25, 0.5, 0.75, 1.0])
            axis.xaxis.set_major_formatter(percent())
        for place, value in enumerate(values):
            text = "not measured" if value is None else figure(name, value)
            where = (value or axis.get_xlim()[0], place)
            axis.annotate(text, where, xytext=(4, 0), textcoords="offset points", va="center", fontsize=9)
    axes[0].set_yticks(range(len(names)), names, fontsize=9)
    axes[0].set_ylim(len(names) - 0.4, -0.6)
    return drawing


def _known(run: Run, name: str) -> bool:
    return run.summary.get(name) is not None


def percent() -> Any:
    from matplotlib.ticker import PercentFormatter

    return PercentFormatter(1.0, decimals=0)


def _scale(axis: Any, values: Sequence[float]) -> None:
    """Set a logarithmic scale where values spread over more than a decade, otherwise one from zero."""
    if _wide(values):
        axis.set_yscale("log")
        plain(axis.yaxis)
        axis.set_ylim(0.8 * min(values), 1.25 * max(values))
    else:
        axis.set_ylim(0, 1.12 * max([*values, 1e-9]))


def _wide(values: Sequence[float]) -> bool:
    return bool(values) and min(values) > 0 and max(values) > 10 * min(values)


def plain(ticks: Any) -> None:
    """Write numbers in place of powers of ten."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    ticks.set_major_formatter(FuncFormatter(_short))
    ticks.set_minor_formatter(NullFormatter())


def _short(value: float, _: int) -> str:
    return f"{value / 1e6:g}M" if value >= 1e6 else f"{value / 1e3:g}k" if value >= 1e4 else f"{value:g}"
