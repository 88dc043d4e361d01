"""Define experiments on the errors that TOPLOC's limits have to leave room for, and on its moduli."""

from typing import Any

from hiddenlab.defenses.verification.toploc import TOP
from hiddenlab.eval.cells import Cell, Experiment, Setting
from hiddenlab.eval.measures.toploc_errors import BOTH
from hiddenlab.eval.tables.verification import PAPER_NOTE, base, listed, size_note

PROVIDERS = ("honest", "attention=eager", "dtype=float32", "nf4")


def errors(setting: Setting, providers: str = "", turns: int = 1, new_tokens: int = 128) -> Experiment:
    """Measure errors by number of values and place of the token (TOPLOC, tables 1 and 7, figures 2 and 3 in form).

    Args:
        providers: variants joined by ``;``, in place of the experiment's own.
    """
    spec = base(setting, new_tokens, turns)
    return Experiment(
        "TOPLOC: errors of the largest values, by their number and by place",
        [
            Cell("toploc-errors", {**spec, "variant": v}, {"provider": v})
            for v in listed(providers) or PROVIDERS
        ],
        {
            "same": "same exponent", "one": "exponent ±1", "two": "±2", "more": "±3 to 100", "cancelled": "over 100",
            "mantissa": "mantissa difference", "mantissa_median": "in the median", "lacking": "indices lacking",
            "lacking_median": "lacking, median", "lacking_most": "lacking, most",
        },
        [
            PAPER_NOTE,
            size_note(spec),
            "The paper's tables 1 and 7 are of the 2,048th token of 2,000 answers, generated and validated on GPUs.",
            "Values of: one token, as in the paper's tables 1 and 7, or 32 tokens, as a proof has them. Top k: the k "
            "largest values of the verifier, beside the provider's at the same places. Lacking: not among the "
            "provider's k largest. At such a place a proof holds no value; the exponents compared there are of the "
            f"provider's states. “Top k{BOTH}” leaves such places out, so that only values that differ count.",
            f"Tokens a to b: the {TOP} largest values, by place of the token (or of the first of 32) in the answer. "
            "Mantissas are compared where exponent and sign agree, in units of the last of 7 bits.",
        ],
        fold=_by_view,
    )  # fmt: skip


def _by_view(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Make a row for each view of each provider's cell."""
    result = []
    for row in rows:
        views: dict[tuple[str, str], dict[str, Any]] = {}
        for name, figure in row["figures"].items():
            unit, label, figure_name = name.split("|")
            views.setdefault((unit, label), {})[figure_name] = figure
        ordered = sorted(views.items(), key=lambda view: (view[0][0], view[0][1].startswith("tokens")))
        result += [
            {**row, "keys": {**row["keys"], "values of": unit, "compared": label}, "figures": figures}
            for (unit, label), figures in ordered
        ] or [row]
    return result


def moduli(setting: Setting, sets: int = 1_000_000, values: int = TOP) -> Experiment:
    """Count which modulus is returned for random sets of indices (TOPLOC, table 11).

    Args:
        sets: how many are drawn.
        values: indices in each set.
    """
    spec = {"sets": sets, "values": values, "seed": setting.seed}
    return Experiment(
        "TOPLOC: moduli that the search returns for random indices",
        [Cell("toploc-moduli", spec, {"modulus": "all"})],
        {"share": "share of sets", "expected": "expected"},
        [
            f"{sets:,} sets of {values} different indices, uniform over 31 bits. The paper draws 100 million sets. "
            "No model is run. The search starts at 65497, as the published bytes do; in the paper it starts at 65536.",
            "Expected: each modulus keeps the indices apart by a chance of its own.",
        ],
        fold=_by_modulus,
    )


def _by_modulus(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Make a row for each modulus."""
    result = []
    for row in rows:
        by_modulus: dict[int, dict[str, Any]] = {}
        for name, figure in row["figures"].items():
            kind, modulus = name.split("_")
            by_modulus.setdefault(int(modulus), {})[kind] = figure
        result += [
            {**row, "keys": {"modulus": modulus}, "figures": figures}
            for modulus, figures in by_modulus.items()
        ] or [row]
    return result
