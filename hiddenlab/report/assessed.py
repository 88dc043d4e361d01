"""Show an assessment on a report's page: verdict, leakiest prompt, leak beside utility and cost, attacks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from hiddenlab.report.data import Run
from hiddenlab.report.prompts import kept, legend, marked, prompts_html
from hiddenlab.report.tables import Grid
from hiddenlab.summary import ENDED, Sample, figure
from hiddenlab.text import html, markdown, markdown_table

SHOWN = 20  # prompts
UNKNOWN = (
    "The true text is not known. So tokens count that attacks verified, nothing tells what can be guessed, and no "
    "defense can hold."
)
LEAK = (
    "The leak is the share of the tokens that a language model does not guess and that came back, each at its place. "
    "Brackets and lines are 95 % intervals over prompts."
)


def name_of(run: Run) -> str:
    """Return the name of an assessment's section and picture, which differs from any other's on the page."""
    return run.label


def defense_of(run: Run) -> str:
    """Return the stages of the assessed defense as words."""
    return " + ".join(run.summary["defense"]) or "identity"


def chosen(run: Run) -> list[Sample]:
    """Return what the attacker believes of each prompt: a sample of the record each, where anything was read."""
    by = {
        (line["id"], line["attack"]): line
        for line in run.samples
        if line["part"] == "defended" and line["status"] != ENDED
    }
    pairs = [(one["id"], one["attack"]) for one in run.summary["readings"]]
    return [by[pair] for pair in pairs if pair in by]


def heading(run: Run) -> tuple[str, str]:
    """Return the title of a section, and one line of what it says."""
    return f"Does {defense_of(run)} hold?", run.summary["sentence"]


READS = {
    "mean": "their mean, with the noise that is left in it",
    "same": "any one, since all are the same",
    "first": "of some prompts the first alone, since no mean of them is known",
}


def lines(run: Run, image: str, table_html: Callable[[Grid, str], str]) -> Iterator[str]:
    """Yield the parts of a section.

    Args:
        image: the picture as HTML. table_html: writes a table.
    """
    found = run.summary
    status, said = found["status"], found["sentence"].removeprefix(found["status"])
    named = [
        ("model", str(found["model"])),
        ("states", f"{found['stream']} at layer {found['layer']}"),
        ("prompts", str(found["prompts"])),
        ("minutes for all attacks", f"{found['minutes']:g}"),
        *attacker(found),
        *figures(found),
    ]
    listed = "".join(f"<div><dt>{html(label)}</dt><dd>{html(text)}</dd></div>" for label, text in named)
    yield f'<div class="card"><p class="said"><strong>{html(status)}</strong>{html(said)}</p>'
    yield f'<dl class="main">{listed}</dl>{"" if found["truth"] else f"<p>{UNKNOWN}</p>"}</div>'
    yield from _leakiest(run)
    yield "<h3>Leak, utility and cost</h3>"
    yield image
    yield f'<p class="note">{html(" ".join([LEAK, *unmeasured(found)]))}</p>'
    yield "<h3>What each attack did</h3>"
    yield table_html(attacks(found), f"Attacks on {defense_of(run)}, in order")
    if found["undefended"]:
        yield "<h3>The same attacks without the defense</h3>"
        yield table_html(undefended(found), f"Attacks without {defense_of(run)}")
    if samples := chosen(run):
        more = f", the first {SHOWN} of {len(samples)}" if len(samples) > SHOWN else ""
        shown = f"{legend(samples)}\n{prompts_html(samples, SHOWN)}"
        yield f"<details><summary>All prompts as the attacker reads them{more}</summary>{shown}</details>"


def attacker(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what the attacker has beside the rows, where he has anything, and what he makes of several releases."""
    if has := found["attacker"]["words"]:
        yield "the attacker", has
    if (reads := found["attacker"]["reads"]) is not None:
        yield "what attacks read of the releases", READS[reads]


def _leakiest(run: Run) -> Iterator[str]:
    """Yield the prompt of which most was read: the true text beside the recovered one."""
    worst = run.summary["leakiest"]
    if worst is None:
        return
    sample = next((one for one in chosen(run) if one["id"] == worst["id"]), None)
    known = worst["token_accuracy"] is not None
    share = figure("token_accuracy", worst["token_accuracy" if known else "verified"])
    yield "<h3>The prompt that leaked most</h3>"
    did = "read" if known else "verified"
    yield f"<p>{html(worst['id'])}: {html(worst['attack'])} {did} {share} of its tokens.</p>"
    read = html(worst["recovered"]) if sample is None else marked(sample)
    true = escape(kept(worst["text"])) if worst["text"] is not None else '<span class="na">not known</span>'
    yield (
        f'<div class="pair"><div><h4>True text</h4><p class="text">{true}</p></div>'
        f'<div><h4>Recovered text</h4><p class="text">{read}</p></div></div>'
    )
    if sample is not None:
        yield legend([sample])


def figures(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the label and the text of each figure of an assessment that was measured."""
    if not found["truth"]:
        yield "tokens verified", _interval(found["leak"])
        return
    yield "leak beyond a guess", _interval(found["leak"])
    yield "tokens read", figure("token_accuracy", found["token_accuracy"])
    yield "tokens guessed without rows", figure("token_accuracy", found["control"])
    yield "exact prompts", _interval(found["exact"])
    yield "ROUGE-L (1: the whole text)", figure("rouge_l", found["rouge_l"]["value"])
    if found["rare_accuracy"] is not None:
        yield "rare tokens read", _interval(found["rare_accuracy"])
    if found["secrets"] is not None:
        yield "planted secrets read", f"{found['secrets']['read']} of {found['secrets']['planted']}"


def unmeasured(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield why utility or cost were not measured."""
    for name in ("utility", "cost"):
        if "reason" in found[name]:
            yield f"{name.capitalize()} {found[name]['reason']}."


def attacks(found: Mapping[str, Any]) -> Grid:
    """Return the table of what each attack did."""
    share = "token_accuracy" if found["truth"] else "verified"
    rows = [
        [
            one["attack"],
            f"{one['status']}: {one['reason']}" if one["reason"] else one["status"],
            str(one["prompts"]),
            figure("token_accuracy", one[share]),
            f"{one['seconds']:.0f}",
        ]
        for one in found["attacks"]
    ]
    header = [
        "attack",
        "what it did",
        "prompts",
        "tokens read" if found["truth"] else "tokens verified",
        "seconds",
    ]
    return Grid(header, rows, 2, 0, [])


def undefended(found: Mapping[str, Any]) -> Grid:
    """Return the table of what the attacks read without the defense."""
    rows = [
        [
            one["attack"],
            one["status"],
            "–" if one["status"] == "not applicable" else _interval(one["leak"]),
            f"{one['seconds']:.0f}",
        ]
        for one in found["undefended"]
    ]
    return Grid(["attack", "what it did", "leak", "seconds"], rows, 2, 0, [])


def markdown_lines(run: Run, image: str) -> list[str]:
    """Return a section as Markdown.

    Args:
        image: the file of the picture.
    """
    found, cells = run.summary, attacks(run.summary)
    rows = [[markdown(text) for text in row] for row in cells.rows]
    title, said = (markdown(text) for text in heading(run))
    worst = found["leakiest"]
    lines = [f"## {title}", "", said, ""]
    lines += [f"- {label}: {markdown(text)}" for label, text in (*attacker(found), *figures(found))]
    lines += [f"- {markdown(reason)}" for reason in unmeasured(found)]
    lines += [] if found["truth"] else [f"- {UNKNOWN}"]
    if worst is not None:
        lines += [
            f"- The prompt that leaked most, {markdown(worst['id'])}, as it came back: {markdown(worst['recovered'])}"
        ]
    lines += ["", f"![{title}]({image})", "", *markdown_table(cells.header, rows, cells.keys), ""]
    return lines


def _interval(estimate: Mapping[str, float]) -> str:
    value, low, high = (f"{100 * estimate[name]:.1f}" for name in ("value", "low", "high"))
    return f"{value} % [{low}, {high}]"


def bars_of(
    found: Mapping[str, Any],
) -> Sequence[tuple[str, list[tuple[str, Mapping[str, float]]], str | None]]:
    """Return the panels of the picture: a title, bars with their figures, and why there are none."""
    leak = [("read" if found["truth"] else "verified", found["leak"])]
    if found["truth"]:
        leak.append(("best attack told", found["oracle"]))
        leak += [
            (f"{one['attack'].partition(':')[0]}, no defense", one["leak"])
            for one in sorted(found["undefended"], key=lambda one: -one["leak"]["value"])[:1]
        ]
    utility, cost = found["utility"], found["cost"]
    useful = [] if "reason" in utility else [
        ("plain", utility["clean_perplexity"]), ("behind the defense", utility["perplexity"])
    ]  # fmt: skip
    dear = [] if "reason" in cost else [
        (name, {"value": cost[f"{name}_over_plain"]}) for name in ("time", "bytes")
    ]  # fmt: skip
    return [
        ("leak, % of tokens", [(name, {k: 100 * v for k, v in one.items()}) for name, one in leak], None),
        ("utility: perplexity", useful, utility.get("reason")),
        ("cost of a release, × plain", dear, cost.get("reason")),
    ]
