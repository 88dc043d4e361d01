"""Reports: Markdown, PNG plots and an HTML page of coloured prompts, of one or more runs."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from hiddenlab.errors import HiddenlabError, InputError
from hiddenlab.record import UNFINISHED, RunRecord, read_run
from hiddenlab.summary import FIGURES, NOT_APPLICABLE, Sample, figure, summarise

MARKDOWN, PAGE = "report.md", "prompts.html"

COLUMNS = (
    "prompts", "exact", "token_accuracy", "rouge_l", "bleu", "verified", "evaluated_tokens_per_token",
    "attack_over_prefill", "attack_seconds", "probe_seconds", "peak_memory_mb",
)  # fmt: skip
VARIANTS = (
    "model", "attack", "stream", "search", "proposal", "distance", "epsilon", "budget", "dtype", "device",
    "max_tokens", "limit", "prompts", "seed", "batch",
)  # fmt: skip

EXPLANATION = """\
Shares and scores are means over the prompts to which the attack applies; a dash means not measured.
*Exact* prompts came back token for token; *verified* tokens were matched within epsilon.
*Evaluated tokens per token* counts every position that the attack ran through the slice, verification passes
included and probe training apart. *Attack over prefill* compares the attack's time with one plain forward
pass of the same prompts in the same process.
"""

STYLE = """\
:root { color-scheme: light; }
body { font: 15px/1.6 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem;
  color: #1c1e21; background: #fff; }
h2 { margin-top: 2.5rem; font-size: 1.1rem; }
.prompt { display: grid; grid-template-columns: 8rem 1fr; gap: 1rem; padding: .6rem 0;
  border-top: 1px solid #e3e5e8; }
.id { color: #5a6069; font-size: .85rem; }
.text { font-family: ui-monospace, monospace; font-size: .9rem; white-space: pre-wrap;
  overflow-wrap: anywhere; }
.exact { color: #14612f; }
.wrong { color: #8f1414; background: #fde0de; text-decoration: underline wavy #c62828; }
.unverified { color: #6b4a00; background: #fff0c2; text-decoration: underline dotted #a87900; }
.na { color: #5a6069; font-style: italic; }
"""


@dataclass(frozen=True)
class Run:
    """A run as the report needs it; ``label`` tells it from the others at the same layer."""

    path: Path
    record: RunRecord
    samples: list[Sample]
    summary: dict[str, Any]
    label: str = ""

    @property
    def layer(self) -> int:
        return int(self.record.spec["layer"])


def write_report(paths: Sequence[Path], out: Path) -> list[Path]:
    """Write the report of runs into a directory, replacing one that is there, and return its files.

    Raises:
        InputError: a run cannot be read, is no attack, or holds no samples.
        HiddenlabError: ``out`` cannot be written.
    """
    from hiddenlab.plots import draw

    runs = load_runs(paths)
    try:
        out.mkdir(parents=True, exist_ok=True)
        images = draw(runs, out)
        (out / PAGE).write_text(prompts_page(runs), encoding="utf-8")
        (out / MARKDOWN).write_text(markdown(runs, images), encoding="utf-8")
    except OSError as error:
        raise HiddenlabError(f"cannot write the report into {out}: {error.strerror or error}") from None
    return [out / MARKDOWN, out / PAGE, *images]


def load_runs(paths: Sequence[Path]) -> list[Run]:
    """Read attack runs and label each by its channel and by the options in which they differ.

    Raises:
        InputError: a run cannot be read, is no attack, or holds no samples.
    """
    found = []
    for path in paths:
        record, samples = read_run(path)
        if record.verb != "attack":
            raise InputError(f"{path} is a run of {record.verb!r}; the report is of runs of 'attack'")
        if not samples:
            raise InputError(f"{path} ({record.status}) holds no samples yet; nothing to report")
        summary = record.summary or {**record.setup, **summarise(samples)}
        found.append(Run(path, record, samples, summary))
    varying = [name for name in VARIANTS if len({str(run.record.spec.get(name)) for run in found}) > 1]
    return [Run(r.path, r.record, r.samples, r.summary, _label(r.record.spec, varying)) for r in found]


def markdown(runs: Sequence[Run], images: Sequence[Path]) -> str:
    """The report's text."""
    heads = ["layer", "channel", *(FIGURES[name][0] for name in COLUMNS)]
    lines = ["# Recovery of prompts from hidden states", "", EXPLANATION]
    lines += [f"| {' | '.join(heads)} |", f"|---|---|{'---:|' * len(COLUMNS)}"]
    for run in sorted(runs, key=lambda run: (run.label, run.layer)):
        values = [str(run.layer), _cell(run.label), *(_cell(figure(n, run.summary.get(n))) for n in COLUMNS)]
        lines.append(f"| {' | '.join(values)} |")
    for image in images:
        lines += ["", f"![{image.stem.replace('_', ' ')}]({image.name})"]
    lines += [
        "",
        f"Each prompt, with wrong and unverified tokens coloured: [{PAGE}]({PAGE})",
        "",
        "## Runs",
        "",
    ]
    for run in runs:
        lines += _run_lines(run)
    return "\n".join(lines) + "\n"


def prompts_page(runs: Sequence[Run]) -> str:
    """A standalone HTML page with the recovered text of every prompt, coloured by its tokens' outcome."""
    legend = (
        '<p>Tokens: <span class="exact">right</span>, <span class="wrong">wrong</span>, '
        '<span class="unverified">unverified</span> (not matched within epsilon), '
        "and plain where there was no truth to compare with.</p>"
    )
    body = ["<h1>Recovered prompts</h1>", legend]
    for run in runs:
        body.append(f"<h2>{escape(run.record.spec['model'])}, layer {run.layer}, {escape(run.label)}</h2>")
        body += [_prompt_html(sample) for sample in sorted(run.samples, key=lambda s: s["index"])]
    head = f'<meta charset="utf-8"><title>Recovered prompts</title>\n<style>\n{STYLE}</style>'
    return (
        f'<!doctype html>\n<html lang="en">\n<head>{head}</head>\n<body>\n'
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def channel_of(spec: Mapping[str, Any]) -> str:
    """The defenses of a spec, in order."""
    return " | ".join(spec.get("defense") or ()) or "identity"


def visible(text: str) -> str:
    """Text with its control characters as pictures, safe to print: no escapes, no reversed reading order."""
    out = []
    for char in text:
        code = ord(char)
        if char == "\n":
            out.append("↵")
        elif char == "\t":
            out.append("⇥")
        elif code < 0x20 or code == 0x7F:
            out.append(chr(0x2400 + code) if code < 0x20 else "\u2421")
        elif (
            0x80 <= code < 0xA0
            or 0x202A <= code <= 0x202E
            or 0x2066 <= code <= 0x2069
            or code in (0x2028, 0x2029)
        ):
            out.append("\ufffd")
        else:
            out.append(char)
    return "".join(out)


def _label(spec: Mapping[str, Any], varying: Sequence[str]) -> str:
    extras = [f"{name.replace('_', ' ')} {spec[name]}" for name in varying if spec.get(name) is not None]
    return ", ".join([channel_of(spec), *extras])


def _prompt_html(sample: Sample) -> str:
    if sample["status"] == NOT_APPLICABLE:
        text, note = f'<span class="na">{NOT_APPLICABLE}: {escape(sample["reason"])}</span>', ""
    else:
        text = "".join(_span_html(piece, status) for piece, status in sample["spans"])
        accuracy = figure("token_accuracy", sample["token_accuracy"])
        note = (
            "no truth" if sample["exact"] is None else "exact" if sample["exact"] else f"{accuracy} of tokens"
        )
    return (
        f'<div class="prompt"><div class="id">{escape(str(sample["id"]))}<br>{note}</div>'
        f'<div class="text">{text}</div></div>'
    )


def _span_html(piece: str, status: str) -> str:
    # White space is kept by the style sheet; a wrong newline needs a sign to be coloured at all.
    shown = "\n".join(visible(line) for line in piece.split("\n")).replace("⇥", "\t")
    if status in ("wrong", "unverified"):
        shown = shown.replace("\n", "↵\n")
    return f'<span class="{escape(status)}">{escape(shown)}</span>'


def _run_lines(run: Run) -> list[str]:
    record, code, hardware = run.record, run.record.code, run.record.hardware
    state = record.status
    if record.status in UNFINISHED:
        state += f", {len(run.samples)} of {record.prompts} prompts"
    commit = f"commit {str(code.get('commit'))[:12]}" if code.get("commit") else "commit not known"
    dirty = " with uncommitted changes" if code.get("commit") and code.get("dirty") else ""
    return [
        f"- `{run.path.name}`: {state}, {record.started}, hiddenlab {code.get('version')}, {commit}{dirty}, "
        f"torch {record.packages.get('torch')}, {hardware.get('cpu')}, {record.threads} threads",
        "",
        f"      {visible(shlex.join(record.command))}",
        "",
    ]


def _cell(text: str) -> str:
    return escape(visible(text), quote=False).replace("|", "\\|")
