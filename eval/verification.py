"""Experiments on inference verification: who is detected from how many tokens, at what cost (DiFR, TOPLOC)."""

from collections.abc import Mapping
from typing import Any

from defenses.verification import toploc
from defenses.verification.detect import frontier
from eval.answers import COUNTS, PROOF_COUNTS
from eval.experiment import Cell, Experiment, Setting

HONEST = ("honest", "batch=7", "attention=eager", "dtype=float32")
SYSTEM = "You are a helpful assistant. Keep answers short."
QUANTIZED = ("nf4", "kv=fp8", "int8")
ADVERSARY = "nf4+temperature=tuned"
PRUNED = "layers=28"
OTHERS = (
    "nf4", "seed=1", "temperature=1.1", "bug=2", ADVERSARY, PRUNED, f"system={SYSTEM}", "kv=fp8", "int8", "bug=32",
    "top_p=0.85",
)  # fmt: skip
WINDOW = 32  # tokens that DiFR's comparison of costs looks at
METHODS = ("Activation-DiFR", "TOPLOC")
RANKED = 20  # requests of the rank-uniformity test
SIZES = (1, 4, 10, 30, 100, 300, 1000, 3000)
FEW = (1, 2, 4, 8, 16, 32)
ANOTHER = (
    "The papers' figures are of Llama-3.1-8B and Qwen3 models on H200 and A100 cards with vLLM; ours are of a small "
    "model on a CPU, whose honest variants differ by batch shape, attention function and dtype."
)
SPLIT_NOTE = (
    "AUC up to 1 % false positives, standardised (0.5 chance, 1 perfect), of the mean over so many tokens; clipping "
    "and pooling chosen on one half of the tokens, judged on the other. Brackets: least and most of five divisions. "
    "Where a provider diverges less than the honest ones it counts as 0.5."
)
CURVES = "tokens in a batch; AUC up to 1 % false positives"
TOKEN_SCORES = {
    "margin": "Token-DiFR (margin)", "likelihood": "Token-DiFR (likelihood)", "mismatch": "exact match",
    "cross_entropy": "cross-entropy",
}  # fmt: skip
ACTIVATION_SCORES = {
    **{f"activation:orthogonal:{k}": f"Activation-DiFR, k = {k}" for k in COUNTS},
    "activation:gaussian:8": "Activation-DiFR, k = 8, Gaussian",
    **{f"toploc:{k}:1:exponents": f"TOPLOC, {k} values a token" for k in PROOF_COUNTS[:-1]},
}


def base(setting: Setting, new_tokens: int = 100, turns: int = 2) -> dict[str, Any]:
    """Requests as DiFR asks them: temperature 1, top-k 50, top-p 0.95, a seed each; 100 prompts twice."""
    return {
        **setting.where(),
        **setting.source(100, 48),
        "dtype": "bfloat16" if setting.dtype == "float32" else setting.dtype,
        "turns": turns, "new_tokens": new_tokens,
        "sampling": {"method": "gumbel", "temperature": 1.0, "top_k": 50, "top_p": 0.95},
    }  # fmt: skip


def _list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(";") if part.strip())


def detected(
    spec: dict[str, Any],
    variants: tuple[str, ...],
    scores: dict[str, str],
    sizes: tuple[int, ...],
    keys: Mapping[str, Any] | None = None,
) -> list[Cell]:
    """Cells of detection, one a variant and score; ``keys`` name their rows in place of these two."""
    return [
        Cell(
            "detection",
            {**spec, "variant": variant, "honest": list(HONEST), "score": score, "sizes": list(sizes)},
            keys or {"provider": variant, "score": label},
        )
        for variant in variants
        for score, label in scores.items()
    ]


def detection(setting: Setting, providers: str = "", turns: int = 2, new_tokens: int = 100) -> Experiment:
    """Token-DiFR: which deviation is detected from how many tokens, beside cross-entropy (DiFR, figures 1 to 3).

    ``providers``: variants joined by ``;`` in place of the experiment's own.
    """
    spec = base(setting, new_tokens, turns)
    return Experiment(
        "Token-DiFR: detection by number of tokens",
        detected(spec, _list(providers) or (*OTHERS, "batch=7"), TOKEN_SCORES, SIZES),
        {f"auc_{n}": f"{n} tokens" for n in SIZES},
        [
            SPLIT_NOTE,
            ANOTHER,
            f"Honest: {', '.join(HONEST)}, less the one under test. Batch 7 is honest itself.",
        ],
        curves=CURVES,
    )


def activations(setting: Setting, providers: str = "", turns: int = 2, new_tokens: int = 100) -> Experiment:
    """Activation-DiFR: detection from a few tokens by numbers a fingerprint, beside TOPLOC (DiFR, figure 4)."""
    spec = base(setting, new_tokens, turns)
    return Experiment(
        "Activation-DiFR: detection by number of tokens",
        detected(spec, _list(providers) or (*QUANTIZED, PRUNED, "seed=1", "batch=7"), ACTIVATION_SCORES, FEW),
        {f"auc_{n}": f"{n} tokens" for n in FEW},
        [SPLIT_NOTE, ANOTHER, "Fingerprints of the state after the final norm, sent in bfloat16: 2k bytes a token. "
         "TOPLOC's score is how many of the values disagree in exponent or sign."],
        curves=CURVES,
    )  # fmt: skip


def fingerprint_pareto(
    setting: Setting, provider: str = "nf4", turns: int = 2, new_tokens: int = 100
) -> Experiment:
    """Bytes of fingerprints against detection in 32 tokens, Activation-DiFR beside TOPLOC (DiFR, figures 7 to 10).

    ``provider``: the variant to be detected. Cells are those of ``activations``.
    """
    cells = detected(base(setting, new_tokens, turns), (provider,), ACTIVATION_SCORES, FEW)
    return Experiment(
        f"Bytes a token against detection in {WINDOW} tokens: {provider}",
        cells,
        {name: name for name in METHODS},
        [
            SPLIT_NOTE,
            ANOTHER,
            f"Of {WINDOW} tokens so many carry a fingerprint of k numbers in bfloat16 (2k bytes), or a proof of k "
            "values (2 + 2k bytes). Shown is what no cheaper setting of the same method beats.",
        ],
        fold=_by_bytes,
        over="bytes a token",
    )


def _by_bytes(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The settings that no cheaper one of the same method beats, as rows over bytes a token."""
    points: dict[str, list[tuple[float, float, dict[str, Any], dict[str, Any]]]] = {m: [] for m in METHODS}
    for row in rows:
        score = str(row["keys"]["score"])
        method = next((m for m in METHODS if score.startswith(m)), None)
        if method is None or "Gaussian" in score:
            continue
        count = int("".join(c for c in score.removeprefix(method) if c.isdigit()))
        size = 2 * count + (2 if method == METHODS[1] else 0)
        for name, figure in row["figures"].items():
            tokens = int(name.removeprefix("auc_"))
            points[method].append((size * tokens / WINDOW, figure["value"], figure, {**row, "paper": {}}))
    out: dict[float, dict[str, Any]] = {}
    for method, found in points.items():
        best = set(frontier([(cost, value) for cost, value, _, _ in found]))
        for cost, value, figure, row in found:
            if (cost, value) in best:
                one = out.setdefault(cost, {**row, "keys": {"bytes a token": cost}, "figures": {}})
                one["figures"].setdefault(method, figure)
    return [out[cost] for cost in sorted(out)]


def providers(setting: Setting, providers: str = "", turns: int = 2, new_tokens: int = 100) -> Experiment:
    """Every simulated provider's raw scores, and the tests that need no seed (DiFR, tables 4 to 8 in form)."""
    spec = {**base(setting, new_tokens, turns), "against": "seed=2"}
    variants = _list(providers) or (*HONEST, *OTHERS)
    cells = [Cell("agreement", {**spec, "variant": v}, {"provider": v}) for v in variants]
    cells += [
        Cell("uniformity", {**spec, "variant": v, "requests": RANKED}, {"provider": f"{v}, ranks"})
        for v in variants
    ]
    return Experiment(
        "Simulated providers: raw scores",
        cells,
        {
            "same_token": "same token", "margin": "mean margin", "margin_p99.9": "99.9th percentile",
            "filtered": "filtered tokens", "cross_entropy": "cross-entropy", "rank_uniformity_p": "rank uniformity, p",
            "mmd_p": "MMD, p",
        },
        [
            ANOTHER,
            "Margins in logits, without filtered tokens (infinite). p of the MMD test (Hamming kernel) against an "
            f"honest provider with other seeds, and of the rank-uniformity test (Kolmogorov-Smirnov, {RANKED} "
            "requests): small means that the distribution differs. Neither needs the seed, nor notices a wrong one.",
        ],
    )  # fmt: skip


def toploc_table(setting: Setting, providers: str = "", turns: int = 2, new_tokens: int = 100) -> Experiment:
    """TOPLOC with the published thresholds over honest and dishonest providers (TOPLOC, tables 1 to 4 in form)."""
    spec = base(setting, new_tokens, turns)
    variants = _list(providers) or (*HONEST, *OTHERS)
    cells = [Cell("proofs", {**spec, "variant": v}, {"provider": v}) for v in variants]
    cells.append(Cell("proof-cost", {**spec, "variant": "honest"}, {"provider": "cost of a commitment"}))
    return Experiment(
        "TOPLOC: proofs accepted",
        cells,
        {
            "requests_accepted": "requests accepted", "proofs_accepted": "proofs accepted",
            "exponents": "values in disagreement", "fewest_exponents": "fewest", "most_exponents": "most",
            "mean_mantissa": "mantissa difference", "milliseconds": "ms a commitment",
            "slowest_milliseconds": "slowest", "of_decoding": "of the decoding time",
        },
        [
            ANOTHER,
            f"{toploc.TOP} values for the prompt and for each {toploc.EVERY} tokens. Values disagree in exponent or "
            "sign, or are not among the largest of both sides.",
            "TOPLOC checks the forward pass over the tokens that are claimed, not how they were drawn: providers that "
            "only sample otherwise pass by design.",
        ],
    )  # fmt: skip
