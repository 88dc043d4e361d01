"""Say in plain sentences what a run gave away, and how much; choose the figures that are worth showing."""

from collections.abc import Iterator, Mapping
from typing import Any

from hiddenlab.records import UNFINISHED
from hiddenlab.report.data import Run
from hiddenlab.report.tables import kind_of
from hiddenlab.summary import FIGURES, NOT_APPLICABLE, figure
from hiddenlab.text import count_of

MAIN = (
    "token_accuracy", "bag_of_tokens_recall", "missing_token_accuracy", "rouge_l", "verified", "attack_seconds",
)  # fmt: skip
MORE = {  # labels that a reader without the papers understands
    "token_accuracy": "tokens right, mean over prompts",
    "bag_of_tokens_recall": "tokens found in any order",
    "missing_token_accuracy": "right where no state was released",
    "rouge_l": "ROUGE-L (1: the whole text)",
    "verified": "tokens verified",
    "attack_seconds": "time of the attack",
}


def defense_of(spec: Mapping[str, Any]) -> str:
    """Return the defenses of a spec in order as words, or ``no defense``."""
    stages = [str(stage) for stage in spec.get("defense") or () if stage != "identity"]
    return ", then ".join(stages) or "no defense"


def source_of(run: Run) -> str:
    """Return which states were attacked, and behind which defense."""
    stream = str(run.record.spec.get("stream") or "resid")
    states = "states" if stream == "resid" else f"states ({stream})"
    defense = defense_of(run.record.spec)
    behind = "without a defense" if defense == "no defense" else f"behind {defense}"
    return f"{states} of layer {run.layer} {behind}"


def answer(run: Run) -> tuple[str, str]:
    """Return the main sentence on a run in two parts: what came back, and from which states."""
    attacked = [sample for sample in run.samples if sample["status"] != NOT_APPLICABLE]
    source = source_of(run)
    if not attacked:
        return "No prompt was attacked:", f"the attack does not apply to {source}."
    scored = [sample for sample in attacked if sample["exact"] is not None]
    if not scored:
        verb = "was" if len(attacked) == 1 else "were"
        return (
            f"{count_of(len(attacked), 'prompt')} {verb} read",
            f"from {source}. The true text is not known.",
        )
    exact = sum(sample["exact"] for sample in scored)
    return f"{exact or 'None'} of {count_of(len(scored), 'prompt')} came back exactly", f"from {source}."


def remarks(run: Run) -> Iterator[str]:
    """Yield what a reader has to know beside the main sentence: how the run ended, and what it leaves out."""
    left_out = sum(sample["status"] == NOT_APPLICABLE for sample in run.samples)
    if run.record.status in UNFINISHED:
        done = f"{len(run.samples)} of {count_of(run.record.prompts, 'prompt')}"
        yield f"This run is not finished ({run.record.status}, {done})."
    if left_out and left_out < len(run.samples):
        yield f"The attack does not apply to {count_of(left_out, 'more prompt')}."
    if not verifies(run):
        yield "This attack does not verify tokens."


def main_figures(run: Run) -> Iterator[tuple[str, str]]:
    """Yield the label and the text of a run's main figures that were measured."""
    for name in MAIN:
        value = run.summary.get(name)
        if value is None or (name == "verified" and not verifies(run)):
            continue
        shown = f"{figure(name, value)} s" if name == "attack_seconds" else figure(name, value)
        yield MORE.get(name, FIGURES[name][0]), shown


def verifies(run: Run) -> bool:
    """Return whether the attack compared tokens with the released states, and so could verify them."""
    return run.summary.get("epsilon") is not None or bool(run.summary.get("verified"))


def range_of(table: Mapping[str, Any]) -> str:
    """Return a figure of a table in words: its lowest and its highest value over the rows.

    It is the first one that was measured, or of curves the one at their end.
    """
    figures = list(table["figures"].items())
    if table.get("curves"):
        figure_of_curves = str(table["curves"]).rpartition("; ")[2]
        figures = [(name, f"{figure_of_curves}, {label}") for name, label in reversed(figures)]
    for name, label in figures:
        found = [row["figures"].get(name, {}).get("value") for row in table["rows"]]
        values = [value for value in found if value is not None]
        if values:
            low, high = (figure(name, end, kind_of(name)) for end in (min(values), max(values)))
            rows = count_of(len(values), "row")
            return f"{label}: {low} in {rows}" if low == high else f"{label}: {low} to {high} in {rows}"
    return "nothing was measured"
