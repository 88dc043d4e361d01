"""Show recovered prompts as HTML: each token's state is told by a mark, by its underline, and in words."""

import re
from collections.abc import Sequence
from html import escape
from itertools import groupby

from hiddenlab.summary import NOT_APPLICABLE, Sample
from hiddenlab.text import count_of, html, visible

# What a screen reader says before a piece; verified tokens are read without a word.
SPOKEN = {"wrong": "wrong", "unverified": "not verified"}
KNOWN, UNKNOWN = ", but right", "; the true token is not known"
LEGEND = (
    ("verified", "plain: the token is verified, its state matches the released one"),
    ("unverified", "dotted line: not verified{}"),
    ("wrong", "cross and wavy line: the token is wrong"),
    ("missing", "dashed box: tokens that were not recovered, and how many"),
)
EXAMPLE = {"missing": "⟨2⟩"}
FIRST = 12  # prompts that are shown at once; the others are folded


def legend(samples: Sequence[Sample]) -> str:
    """Return the legend of the states that occur in some samples."""
    found = {"verified" if status == "exact" else status for s in samples for _, status in s.get("spans", ())}
    truths = {KNOWN if sample["exact"] is not None else UNKNOWN for sample in samples if "spans" in sample}
    told_of = truths.pop() if len(truths) == 1 else f"{KNOWN}, or the true token is not known"
    items = []
    for name, told in LEGEND:
        if name in found:
            sign = f'<span class="{name}">{EXAMPLE.get(name, "token")}</span>'
            items.append(f'<li><span class="text">{sign}</span> {told.format(told_of)}</li>')
    return f'<ul class="legend" aria-label="Marks of tokens">{"".join(items)}</ul>' * bool(items)


def prompts_html(samples: Sequence[Sample], most: int | None = None) -> str:
    """Return samples as HTML, the first ones open and the others folded.

    Args:
        most: leave out those behind this many.
    """
    ordered = sorted(samples, key=lambda sample: sample["index"])[:most]
    first, others = ordered[:FIRST], ordered[FIRST:]
    lines = [prompt_html(sample) for sample in first]
    if others:
        lines.append(f"<details><summary>{count_of(len(others), 'more prompt')}</summary>")
        lines += [*map(prompt_html, others), "</details>"]
    return "\n".join(lines)


def prompt_html(sample: Sample) -> str:
    """Return one prompt as HTML: its id, how well it was recovered, its text with marks, and the true text."""
    if sample["status"] == NOT_APPLICABLE:
        shown, true = f'<span class="na">{NOT_APPLICABLE}: {html(sample["reason"])}</span>', ""
    else:
        shown, true = marked(sample), ""
        if sample["exact"] is False and sample["text"]:
            text = f'<p class="text">{escape(kept(sample["text"]))}</p>'
            true = f"<details><summary>True text</summary>{text}</details>"
    return (
        f'<div class="prompt"><p class="id"><strong>{html(sample["id"])}</strong> {outcome(sample)}</p>'
        f'<p class="text">{shown}</p>{true}</div>'
    )


def outcome(sample: Sample) -> str:
    """Return in words how well a prompt was recovered."""
    if sample["status"] == NOT_APPLICABLE:
        return ""
    if sample["exact"] is None:
        return "true text not known"
    if sample["exact"]:
        return "✓ exact"
    truth = sample["truth_ids"]
    if not truth:
        return "✗ not exact"
    right = round(sample["token_accuracy"] * len(truth)) if sample["token_accuracy"] is not None else 0
    return f"✗ {right} of {count_of(len(truth), 'token')} right"


def marked(sample: Sample) -> str:
    """Return a sample's recovered text as HTML; adjacent tokens of the same state share a mark."""
    pieces: list[str] = []
    for status, same in groupby(
        sample["spans"], key=lambda span: "exact" if span[1] == "verified" else span[1]
    ):
        texts = [text for text, _ in same]
        if status == "missing":
            pieces += map(_missing, texts)
        else:
            pieces.append(_span("".join(texts), status))
    return "".join(pieces)


def _missing(text: str) -> str:
    number = text.strip("⟨⟩")
    counted = re.fullmatch(r"[0-9]{1,9}", number)  # a recovered text may hold the same signs
    said = f"{count_of(int(number), 'token')} not recovered" if counted else "not recovered"
    shown = f'<span aria-hidden="true">{html(text)}</span>'
    return f'<span class="missing">{shown}<span class="sr"> ({said}) </span></span>'


def _span(text: str, status: str) -> str:
    shown = kept(text)
    if status not in SPOKEN:
        return escape(shown)
    # The style sheet keeps white space; a wrong newline needs a visible sign to be marked.
    shown = shown.replace("\n", "↵\n")
    before, after = f'<span class="sr"> ({SPOKEN[status]}: </span>', '<span class="sr">) </span>'
    return f'<span class="{status}">{before}{escape(shown)}{after}</span>'


def kept(text: str) -> str:
    """Make a text safe to show, but keep its line breaks and tabs."""
    return "\n".join(visible(line) for line in text.split("\n")).replace("⇥", "\t")
