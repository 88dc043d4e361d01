"""Define experiments on what fingerprints detect, beside proofs, by bytes a token (DiFR, figures 4 and 7 to 10)."""

from collections.abc import Callable
from typing import Any

from hiddenlab.defenses.verification import toploc
from hiddenlab.defenses.verification.detect import frontier
from hiddenlab.eval.cells import MEASURED, NOT_RUN, Cell, Experiment, Setting
from hiddenlab.eval.tables.verification import (
    ACTIVATION_SCORES,
    CURVES,
    FEW,
    PAPER_NOTE,
    PRUNED,
    SPLIT_NOTE,
    base,
    detected,
    listed,
    pool_note,
    pool_of,
    size_note,
)

WINDOW = 32  # tokens that DiFR's comparison of costs looks at
EACH = tuple(range(1, WINDOW + 1))
TARGETS = (0.95, 0.99, 0.999, 0.9999)  # areas under the curve, of DiFR's table 1
QUANTIZED = ("nf4", "kv=fp8", "weights=fp8", "int8")
METHODS = ("Activation-DiFR", "TOPLOC")
# Curves of bytes: the method, and what k numbers of a token count. DiFR's appendix G counts a byte a number.
COUNTED: dict[str, tuple[str, Callable[[int], int]]] = {
    "Activation-DiFR": (METHODS[0], int),
    "TOPLOC": (METHODS[1], int),
    "Activation-DiFR, sent": (METHODS[0], lambda k: 2 * k),
    "TOPLOC, sent": (METHODS[1], toploc.proof_bytes),
}
PROOF_NOTE = (
    "TOPLOC as in DiFR's code: a proof of each token. A batch has a mean of each of the rule's three figures: values "
    "that disagree in exponent or sign, and mean and median difference of the mantissas. A logistic regression on the "
    "training half weighs them."
)
BYTES_NOTE = (
    f"Of {WINDOW} tokens 1 to {WINDOW} carry k numbers each. DiFR's appendix G counts one byte a number, for both "
    "methods. What is sent is more: 2k bytes a fingerprint, whose numbers are rounded to bfloat16, and 2 + 2k a proof, "
    "in TOPLOC's own format."
)


def activations(
    setting: Setting, providers: str = "", turns: int = 2, new_tokens: int = 100, honest: str = ""
) -> Experiment:
    """Measure detection from a few tokens by Activation-DiFR, beside TOPLOC, by numbers per token (DiFR, figure 4).

    Args:
        honest: see ``detection``.
    """
    spec, pool = base(setting, new_tokens, turns), pool_of(honest)
    variants = listed(providers) or (*QUANTIZED, PRUNED, "seed=1", "batch=7")
    return Experiment(
        "Activation-DiFR: detection by number of tokens",
        detected(spec, variants, ACTIVATION_SCORES, FEW, honest=pool),
        {f"auc_{n}": f"{n} tokens" for n in FEW},
        [SPLIT_NOTE, PAPER_NOTE, pool_note(pool), size_note(spec), PROOF_NOTE,
         "Fingerprints of the state after the final norm, sent in bfloat16: 2k bytes a token. Proofs: 2 + 2k."],
        curves=CURVES,
    )  # fmt: skip


def _by_counts(
    setting: Setting, provider: str, turns: int, new_tokens: int, honest: str
) -> tuple[list[Cell], list[str]]:
    """Return the cells of all numbers k and of 1 to 32 tokens, and notes for their reader."""
    spec, pool = base(setting, new_tokens, turns), pool_of(honest)
    notes = [SPLIT_NOTE, PAPER_NOTE, pool_note(pool), size_note(spec), PROOF_NOTE, BYTES_NOTE]
    scores = {name: label for name, label in ACTIVATION_SCORES.items() if "gaussian" not in name}
    return detected(spec, (provider,), scores, EACH, honest=pool), notes


def fingerprint_pareto(
    setting: Setting, provider: str = "nf4", turns: int = 2, new_tokens: int = 100, honest: str = ""
) -> Experiment:
    """Compare fingerprint bytes with detection from 32 tokens, for Activation-DiFR and TOPLOC (DiFR, figures 7 to 10).

    Args:
        provider: the variant to be detected.
        honest: see ``detection``.
    """
    cells, notes = _by_counts(setting, provider, turns, new_tokens, honest)
    return Experiment(
        f"Bytes a token against detection in {WINDOW} tokens: {provider}",
        cells,
        {name: name for name in COUNTED},
        [*notes, "Shown is what no cheaper setting of the same method beats."],
        fold=_by_bytes,
        over="bytes a token",
    )


def fingerprint_cost(
    setting: Setting, provider: str = "kv=fp8", turns: int = 2, new_tokens: int = 100, honest: str = ""
) -> Experiment:
    """Find the fewest bytes per token that reach an AUC, for Activation-DiFR and TOPLOC (DiFR, table 1, figures 9, 10).

    Args:
        provider: the variant to be detected. Cells are those of ``fingerprint-pareto``.
        honest: see ``detection``.
    """
    cells, notes = _by_counts(setting, provider, turns, new_tokens, honest)
    return Experiment(
        f"Bytes a token that detection needs: {provider}",
        cells,
        {name: f"{name}, bytes a token" for name in COUNTED},
        [*notes, "Least over all settings; a dash: no setting measured reaches it."],
        fold=_by_target,
        over="AUC",
    )


def _by_target(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Make one row for each target AUC, with the least bytes of each method."""
    points = _points(rows)
    result = []
    for target in TARGETS:
        figures = {}
        for method, settings in points.items():
            reached = [(cost, figure) for cost, value, figure, _ in settings if value >= target]
            if reached:
                cost, figure = min(reached, key=lambda point: point[0])
                figures[method] = {"value": cost, "low": cost, "high": cost, "n": figure["n"]}
        status = MEASURED if figures else NOT_RUN
        none = None if figures else "no setting measured reaches it"
        result.append(
            {**rows[0], "keys": {"AUC": target}, "figures": figures, "status": status, "reason": none}
        )
    return result if any(points.values()) else rows


Point = tuple[float, float, dict[str, Any], dict[str, Any]]


def _points(rows: list[dict[str, Any]]) -> dict[str, list[Point]]:
    """Return bytes per token, AUC, its figure and its row, for every setting of each method and way of counting."""
    points: dict[str, list[Point]] = {name: [] for name in COUNTED}
    for row in rows:
        method, _, count = str(row["keys"]["score"]).partition(", k = ")
        for name, (counted, size) in COUNTED.items():
            if counted != method:
                continue
            points[name] += [
                (
                    size(int(count)) * int(key.removeprefix("auc_")) / WINDOW,
                    figure["value"],
                    figure,
                    {**row, "paper": {}},
                )
                for key, figure in row["figures"].items()
                if key.startswith("auc_")
            ]
    return points


def _by_bytes(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the settings that no cheaper one of the same method beats, as rows over bytes per token."""
    points = _points(rows)
    merged: dict[float, dict[str, Any]] = {}
    for method, settings in points.items():
        best = set(frontier([(cost, value) for cost, value, _, _ in settings]))
        for cost, value, figure, row in settings:
            if (cost, value) in best:
                entry = merged.setdefault(cost, {**row, "keys": {"bytes a token": cost}, "figures": {}})
                entry["figures"].setdefault(method, figure)
    return [merged[cost] for cost in sorted(merged)]
