"""Write the report as one self-contained HTML page: tables, plots, coloured prompts, specs and versions."""

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

from hiddenlab.report.data import Run, Study
from hiddenlab.report.tables import NO_COMMAND, NOT_RECORDED, Grid, brackets, grid
from hiddenlab.summary import NOT_APPLICABLE, Sample, figure
from hiddenlab.text import html, printable, visible

STYLE = """\
:root { color-scheme: light; }
body { font: 15px/1.6 system-ui, sans-serif; margin: 2rem auto; max-width: 64rem; padding: 0 1rem;
  color: #1c1e21; background: #fff; }
h2 { margin-top: 2.5rem; font-size: 1.2rem; }
h3 { font-size: 1rem; margin: 1.5rem 0 .5rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid #e3e5e8; text-align: right; white-space: nowrap; }
th { border-bottom: 2px solid #9aa1ab; vertical-align: bottom; white-space: normal; }
th.key, td.key { text-align: left; }
td.paper, th.paper { color: #5a6069; }
img { max-width: 100%; height: auto; margin: 1rem 0; }
ul { padding-left: 1.2rem; }
nav ul { columns: 2; font-size: .85rem; }
details { margin: .6rem 0; }
summary { cursor: pointer; }
pre { background: #f5f6f7; padding: .5rem .7rem; white-space: pre-wrap; overflow-wrap: anywhere; font-size: .8rem; }
.prompt { display: grid; grid-template-columns: 8rem 1fr; gap: 1rem; padding: .6rem 0;
  border-top: 1px solid #e3e5e8; }
.id { color: #5a6069; font-size: .85rem; }
.text { font-family: ui-monospace, monospace; font-size: .9rem; white-space: pre-wrap;
  overflow-wrap: anywhere; }
.text, .id, td, summary { unicode-bidi: isolate; }
.exact { color: #14612f; }
.wrong { color: #8f1414; background: #fde0de; text-decoration: underline wavy #c62828; }
.unverified { color: #6b4a00; background: #fff0c2; text-decoration: underline dotted #a87900; }
.missing { color: #5a6069; background: #eceef0; }
.na { color: #5a6069; font-style: italic; }
"""
LEGEND = (
    '<p>Tokens: <span class="exact">right</span>, <span class="wrong">wrong</span>, '
    '<span class="unverified">unverified</span> (not matched within epsilon), '
    '<span class="missing">⟨n⟩</span> n tokens not recovered, and plain where there was no truth to compare with.</p>'
)
SHOWN = 12  # prompts shown of each cell of an experiment; its run directory holds all


def page(
    title: str, runs: Grid | None, listed: Sequence[Run], studies: Sequence[Study], images: Sequence[Path]
) -> str:
    """Return the whole page.

    Args:
        runs: the table of the runs, where there are any. listed: these runs, with their prompts. studies: tables of
            experiments. images: all plots; those of an experiment are named after it.
    """
    body = [f"<h1>{html(title)}</h1>"]
    if len(studies) > 1:
        named = [(html(study.table["experiment"]), html(study.table["title"])) for study in studies]
        links = [f'<li><a href="#{name}">{heading}</a></li>' for name, heading in named]
        body.append(f"<nav><ul>{''.join(links)}</ul></nav>")
    for study in studies:
        name = study.table["experiment"]
        heading = html(study.table["title"])
        body += [f'<h2 id="{html(name)}">{heading}</h2>', table_html(grid(study.table))]
        body += [_image(image) for image in images if image.stem == name]
        cells = grid(study.table)
        notes = [*study.table["notes"], *cells.reasons, brackets(study.table)]
        body.append("<ul>" + "".join(f"<li>{html(note)}</li>" for note in notes) + "</ul>")
        command = study.table["command"]
        known = command != NOT_RECORDED
        body.append(f"<pre>{html(command)}</pre>" if known else f"<p>{NO_COMMAND}.</p>")
        if study.runs:
            body.append(LEGEND)
        for run in study.runs:
            shown = sorted(run.samples, key=lambda s: s["index"])
            more = f", the first {SHOWN} of {len(shown)}" if len(shown) > SHOWN else ""
            body.append(f"<details><summary>Prompts: {html(run.label)}{more}</summary>")
            body += [prompt_html(sample) for sample in shown[:SHOWN]]
            body.append("</details>")
    if runs is not None:
        own = {study.table["experiment"] for study in studies}
        body += ["<h2>Runs</h2>", table_html(runs)]
        body += [_image(image) for image in images if image.stem not in own]
        body += ["<h2>Recovered prompts</h2>", LEGEND]
        for run in listed:
            body.append(f"<h3>{html(run.record.spec['model'])}, layer {run.layer}, {html(run.label)}</h3>")
            body += [prompt_html(sample) for sample in sorted(run.samples, key=lambda s: s["index"])]
    everything = [*listed, *(run for study in studies for run in study.runs)]
    body += ["<h2>How it was made</h2>"] * bool(everything)
    body += [
        f"<pre>{escape(printable(text))}</pre>" for text in dict.fromkeys(run.made() for run in everything)
    ]
    head = f'<meta charset="utf-8"><title>{html(title)}</title>\n<style>\n{STYLE}</style>'
    return (
        f'<!doctype html>\n<html lang="en">\n<head>{head}</head>\n<body>\n'
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def table_html(cells: Grid) -> str:
    """Return a table as HTML; columns that name a row are left-aligned, the paper's figures are grey."""
    first = len(cells.header) - cells.published

    def classes(index: int) -> str:
        return ' class="key"' if index < cells.keys else ' class="paper"' if index >= first else ""

    def line(tag: str, texts: Sequence[str]) -> str:
        return "".join(f"<{tag}{classes(i)}>{html(text)}</{tag}>" for i, text in enumerate(texts))

    rows = "\n".join(f"<tr>{line('td', row)}</tr>" for row in cells.rows)
    return f'<div class="wide"><table>\n<tr>{line("th", cells.header)}</tr>\n{rows}\n</table></div>'


def prompt_html(sample: Sample) -> str:
    """Return one prompt as HTML: its id, how well it was recovered, and its text coloured by its tokens' outcome."""
    if sample["status"] == NOT_APPLICABLE:
        text, note = f'<span class="na">{NOT_APPLICABLE}: {html(sample["reason"])}</span>', ""
    else:
        text = "".join(_span_html(piece, status) for piece, status in sample["spans"])
        accuracy = figure("token_accuracy", sample["token_accuracy"])
        note = (
            "no truth" if sample["exact"] is None else "exact" if sample["exact"] else f"{accuracy} of tokens"
        )
    return (
        f'<div class="prompt"><div class="id">{html(sample["id"])}<br>{note}</div>'
        f'<div class="text">{text}</div></div>'
    )


def _span_html(piece: str, status: str) -> str:
    # The style sheet keeps white space; a wrong newline needs a visible sign to be coloured.
    shown = "\n".join(visible(line) for line in piece.split("\n")).replace("⇥", "\t")
    if status in ("wrong", "unverified"):
        shown = shown.replace("\n", "↵\n")
    return f'<span class="{escape(status)}">{escape(shown)}</span>'


def _image(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{html(path.stem.replace("_", " "))}" src="data:image/png;base64,{data}">'
