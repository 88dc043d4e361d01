"""Write the measured rows as Markdown, one table per part."""

from collections.abc import Sequence
from typing import Any

from hiddenlab.eval.gpu.program import Part, Result, Row, left_out
from hiddenlab.text import markdown_table

NOISE = (
    "Attacks below 5 seconds are timed in a second run, which finds everything warm; longer ones in a single run. The "
    "host starts every kernel, and its speed varies: the same work may take half as long again in another row. Smaller "
    "differences between rows mean nothing."
)


def markdown(result: Result, parts: Sequence[Part]) -> str:
    """Return every part that has rows, what failed and why, and what was left out, as Markdown."""
    lines = ["# On a graphics card", ""]
    if result.setting.rehearse:
        lines += ["**A rehearsal on a CPU with tiny models: these figures say nothing of a card.**", ""]
    lines += [
        _facts(result.facts),
        "",
        "`make gpu` makes this page; docs/how-to/gpu.md says how.",
        "",
        NOISE,
        "",
    ]
    for part in parts:
        if rows := result.of(part.name):
            lines += [f"## {part.title}", "", part.says, "", *_table(rows), ""]
            lines += [*_slowest(rows), *_reasons(rows)]
    if missing := left_out(result, parts):
        lines += ["## Left out", ""]
        lines += [
            f"- {name}: {len(cells)} of {len(part.cells(result.setting))} measurements"
            for part in parts
            for name, cells in missing.items()
            if name == part.name
        ]
        lines += [""]
    return "\n".join(lines)


def _facts(facts: dict[str, Any]) -> str:
    """Return card, versions and commit in one line."""
    card, packages, code = facts.get("card"), facts.get("packages", {}), facts.get("code", {})
    on = (
        f"{card['name']} ({card['memory_mb'] / 1e3:.0f} GB, CUDA {card['cuda']})"
        if card
        else facts.get("hardware", {}).get("cpu") or "an unknown processor"
    )
    versions = ", ".join(f"{name} {packages.get(name)}" for name in ("python", "torch", "transformers"))
    dirty = " with changes" if code.get("dirty") else ""
    return f"Measured on: {on}. Versions: {versions}. Commit: {code.get('commit') or 'unknown'}{dirty}."


def _table(rows: Sequence[Row]) -> list[str]:
    measured = [row for row in rows if row["status"] == "measured"]
    if not measured:
        return []
    keys = list(dict.fromkeys(key for row in rows for key in row["cell"]))
    names = list(dict.fromkeys(name for row in measured for name in row["figures"] if name != "slowest"))
    names = [name for name in names if any(row["figures"].get(name) is not None for row in measured)]
    head = [name.replace("_", " ") for name in (*keys, *names)]
    cells = [
        [_key(row["cell"].get(key)) for key in keys]
        + [_figure(name, row["figures"].get(name)) for name in names]
        for row in measured
    ]
    return markdown_table(head, cells, len(keys))


def _slowest(rows: Sequence[Row]) -> list[str]:
    """Return the slowest operations of each profile as a separate table."""
    lines = []
    for row in rows:
        if row["status"] == "measured" and row["figures"].get("slowest"):
            what = ", ".join(_key(value) for value in row["cell"].values())
            cells = [
                [
                    f"`{_one_line(name['name'])}`",
                    _figure("ms", name["ms"]),
                    _figure("share", name["share"]),
                    str(name["calls"]),
                ]
                for name in row["figures"]["slowest"]
            ]
            lines += [
                f"Slowest in {what}:",
                "",
                *markdown_table(("operation", "ms", "share", "calls"), cells, 1),
            ]
            lines.append("")
    return lines


def _reasons(rows: Sequence[Row]) -> list[str]:
    failed = [row for row in rows if row["status"] != "measured"]
    lines = [
        f"- Failed: {', '.join(map(_key, row['cell'].values()))}: {' '.join(str(row['reason']).split())}"
        for row in failed
    ]
    return [*lines, ""] if lines else []


def _one_line(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _key(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}={option}" for key, option in value.items()) or "as by default"
    return "–" if value is None else _one_line(str(value))


def _figure(name: str, value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    if not isinstance(value, float):
        return str(value)
    if "share" in name or name in ("token_accuracy", "verified", "top1", "top1_cpu"):
        return f"{100 * value:.1f} %"
    if name in ("speedup", "over_prefill") or name.endswith(("_over_plain", "_over_weights")):
        return f"{value:.2f} ×"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
