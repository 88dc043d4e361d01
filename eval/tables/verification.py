"""Define experiments on inference verification: which deviation is detected from how many tokens (DiFR, TOPLOC)."""

from collections.abc import Mapping
from typing import Any

from hiddenlab.defenses.verification import toploc
from hiddenlab.defenses.verification.detect import frontier
from hiddenlab.defenses.verification.rules import EVERY
from hiddenlab.defenses.verification.sampling import Sampling
from hiddenlab.errors import InputError
from hiddenlab.eval.cells import MEASURED, NOT_RUN, Cell, Experiment, Setting
from hiddenlab.eval.measures.answers import COUNTS, MONTE_CARLO, PROOF_COUNTS
from hiddenlab.eval.measures.verification import PERCENTILES

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
TARGETS = (0.95, 0.99, 0.999, 0.9999)  # areas under the curve, of DiFR's table 1
POOLING_LABELS = {
    "plain": "plain mean",
    "mean": "clipped mean",
    "tail": "tail-focused mean",
    "best": "chosen on the training half",
}
LIMITS = ("published", "calibrated")
LIMIT_NOTES = {
    "published": "of the paper for bfloat16 (38 exponents, mean 10, median 8). Those for float32 count bits that "
    "proofs of 16-bit values do not hold.",
    "calibrated": "the largest of each figure over all proofs of the honest providers, less the one under test.",
}  # fmt: skip
RANKED = 20  # requests of the rank-uniformity test
SIZES = (1, 4, 10, 30, 100, 300, 1000, 3000)
FEW = (1, 2, 4, 8, 16, 32)
PAPER_NOTE = (
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
RAW_SCORES = {
    "margin": "margin", "cross_entropy": "cross-entropy", "mismatch": "another token",
    "likelihood:0.02": "likelihood, σ = 0.02", "likelihood:0.08": "likelihood, σ = 0.08",
}  # fmt: skip
ACTIVATION_SCORES = {
    **{f"activation:orthogonal:{k}": f"Activation-DiFR, k = {k}" for k in COUNTS},
    "activation:gaussian:8": "Activation-DiFR, k = 8, Gaussian",
    **{f"toploc:{k}:1:exponents": f"TOPLOC, {k} values a token" for k in PROOF_COUNTS[:-1]},
}


def base(setting: Setting, new_tokens: int = 100, turns: int = 2, method: str = "gumbel") -> dict[str, Any]:
    """Return the requests that DiFR uses: temperature 1, top-k 50, top-p 0.95, and a seed each.

    By default each of 100 prompts is asked twice.

    Raises:
        InputError: the sampling method is unknown.
    """
    Sampling(method=method)
    return {
        **setting.where(),
        **setting.source(100, 48),
        "dtype": "bfloat16" if setting.dtype == "float32" else setting.dtype,
        "turns": turns, "new_tokens": new_tokens,
        "sampling": {"method": method, "temperature": 1.0, "top_k": 50, "top_p": 0.95},
    }  # fmt: skip


def token_scores(method: str, trials: int = 0) -> dict[str, str]:
    """Return scores of tokens with their labels; the inverse probability transform has no margin.

    Args:
        method: of sampling.
        trials: of the Monte Carlo score; 0 leaves it out.

    Raises:
        InputError: ``trials`` is below 0.
    """
    if trials < 0:
        raise InputError(f"trials {trials}: a whole number from 0")
    scores = {name: label for name, label in TOKEN_SCORES.items() if method != "ipt" or name != "margin"}
    return scores | ({f"{MONTE_CARLO}:{trials}": f"Monte Carlo, {trials} trials"} if trials else {})


def _list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(";") if part.strip())


def detected(
    spec: dict[str, Any],
    variants: tuple[str, ...],
    scores: dict[str, str],
    sizes: tuple[int, ...],
    keys: Mapping[str, Any] | None = None,
) -> list[Cell]:
    """Make cells of detection, one per variant and score; ``keys`` replace these two as labels of their rows."""
    return [
        Cell(
            "detection",
            {**spec, "variant": variant, "honest": list(HONEST), "score": score, "sizes": list(sizes)},
            keys or {"provider": variant, "score": label},
        )
        for variant in variants
        for score, label in scores.items()
    ]


def detection(
    setting: Setting,
    providers: str = "",
    turns: int = 2,
    new_tokens: int = 100,
    method: str = "gumbel",
    trials: int = 0,
) -> Experiment:
    """Measure from how many tokens Token-DiFR detects each deviation, beside cross-entropy (DiFR, figures 1 to 3).

    Args:
        providers: variants joined by ``;``, in place of the experiment's own.
        method: of sampling, gumbel, ipt or greedy.
        trials: of the Monte Carlo score; 0 leaves it out.
    """
    spec = base(setting, new_tokens, turns, method)
    variants = _list(providers) or (*OTHERS, "batch=7")
    return Experiment(
        "Token-DiFR: detection by number of tokens",
        detected(spec, variants, token_scores(method, trials), SIZES),
        {f"auc_{n}": f"{n} tokens" for n in SIZES},
        [
            SPLIT_NOTE,
            PAPER_NOTE,
            f"Honest: {', '.join(HONEST)}, less the one under test. Batch 7 is honest itself. Sampling: {method}.",
            _size_note(spec),
        ],
        curves=CURVES,
    )


def _size_note(spec: dict[str, Any]) -> str:
    times, new = spec["turns"], spec["new_tokens"]
    return f"{spec['limit']} prompts, each {times} times with another seed, {new} tokens an answer."


def areas(
    setting: Setting,
    providers: str = "",
    turns: int = 2,
    new_tokens: int = 100,
    scores: str = "margin;activation:orthogonal:8",
) -> Experiment:
    """Compare the whole area under the ROC curve with that up to 1 % false positives (DiFR, tables 2 and 3 in form).

    Args:
        scores: names joined by ``;``, of those of ``detection`` and ``activations``, whose cells are shared.
    """
    spec = base(setting, new_tokens, turns)
    known = TOKEN_SCORES | ACTIVATION_SCORES
    cells = []
    for score in _list(scores):
        if score not in known:
            raise InputError(f"no score {score!r}; known are {', '.join(known)}")
        sizes = SIZES if score in TOKEN_SCORES else FEW
        cells += detected(spec, _list(providers) or (*OTHERS, "batch=7"), {score: known[score]}, sizes)
    return Experiment(
        "Whole area under the ROC curve, and up to 1 % false positives",
        cells,
        {f"auc_{n}": f"{n} tokens" for n in sorted({*SIZES, *FEW})},
        [SPLIT_NOTE, PAPER_NOTE, _size_note(spec)],
        fold=_by_area,
        curves="tokens in a batch; area under the ROC curve",
    )


def _by_area(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Make two rows for each: its whole areas, and those up to 1 % false positives."""
    result = []
    for row in rows:
        for name, label in (("whole", "whole"), ("auc", "to 1 %")):
            figures = {
                f"auc_{key.removeprefix(f'{name}_')}": value
                for key, value in row["figures"].items()
                if key.startswith(f"{name}_")
            }
            keys = {"provider": row["keys"]["provider"], "score and area": f"{row['keys']['score']}, {label}"}
            result.append({**row, "keys": keys, "figures": figures})
    return result


def pooling(
    setting: Setting,
    providers: str = f"bug=2;bug=32;{ADVERSARY};kv=fp8+temperature=tuned",
    turns: int = 2,
    new_tokens: int = 100,
    score: str = "margin",
) -> Experiment:
    """Compare means with tail-focused means of one score, for providers with rare faults (DiFR, figure 6).

    Args:
        providers: variants joined by ``;``.
        score: of tokens.
    """
    if score not in TOKEN_SCORES:
        raise InputError(f"no score {score!r}; known are {', '.join(TOKEN_SCORES)}")
    spec = base(setting, new_tokens, turns)
    cells = []
    for variant in _list(providers):
        for which, label in POOLING_LABELS.items():
            more = {} if which == "best" else {"pooling": which}
            cells += detected(
                {**spec, **more}, (variant,), {score: ""}, SIZES, {"provider": variant, "pooling": label}
            )
    return Experiment(
        f"Pooling of tokens' scores: {TOKEN_SCORES[score]}",
        cells,
        {f"auc_{n}": f"{n} tokens" for n in SIZES},
        [
            SPLIT_NOTE, PAPER_NOTE, _size_note(spec),
            "Plain: clipped at the honest tokens' 99.999th percentile only. Clipped: at the best of four percentiles. "
            "Tail-focused: what is below the 99th or 99.99th counts nothing.",
        ],
        curves=CURVES,
    )  # fmt: skip


def score_tables(
    setting: Setting, providers: str = "", turns: int = 2, new_tokens: int = 100, scores: str = ""
) -> Experiment:
    """Measure the distribution of every score over each provider's tokens (DiFR, tables 4 to 8 in form).

    Args:
        scores: names joined by ``;``, in place of the tables' own.
    """
    spec = base(setting, new_tokens, turns)
    chosen = _list(scores) or tuple(RAW_SCORES)
    if unknown := [name for name in chosen if name not in RAW_SCORES]:
        raise InputError(f"no score {unknown[0]!r}; known are {', '.join(RAW_SCORES)}")
    cells = [
        Cell("statistics", {**spec, "variant": v, "score": name}, {"score": RAW_SCORES[name], "provider": v})
        for name in chosen
        for v in _list(providers) or (*HONEST, *OTHERS)
    ]
    return Experiment(
        "Distributions of scores",
        cells,
        {
            "mean": "mean", "sd": "deviation", "infinite": "∞",
            **{f"p{p:g}": f"{p:g}th percentile" for p in PERCENTILES},
        },
        [
            PAPER_NOTE,
            _size_note(spec),
            "∞: share of tokens that the verifier's filters leave out; they are in no other figure. Cross-entropy is "
            "taken before the filters, in nats. Likelihood: as DiFR's tables have it, noise on both logits.",
        ],
    )  # fmt: skip


def activations(setting: Setting, providers: str = "", turns: int = 2, new_tokens: int = 100) -> Experiment:
    """Measure detection from a few tokens by Activation-DiFR, beside TOPLOC, by numbers per token (DiFR, figure 4)."""
    spec = base(setting, new_tokens, turns)
    return Experiment(
        "Activation-DiFR: detection by number of tokens",
        detected(spec, _list(providers) or (*QUANTIZED, PRUNED, "seed=1", "batch=7"), ACTIVATION_SCORES, FEW),
        {f"auc_{n}": f"{n} tokens" for n in FEW},
        [SPLIT_NOTE, PAPER_NOTE,
         "Fingerprints of the state after the final norm, sent in bfloat16: 2k bytes a token. "
         "TOPLOC's score is how many of the values disagree in exponent or sign."],
        curves=CURVES,
    )  # fmt: skip


def fingerprint_pareto(
    setting: Setting, provider: str = "nf4", turns: int = 2, new_tokens: int = 100
) -> Experiment:
    """Compare fingerprint bytes with detection from 32 tokens, for Activation-DiFR and TOPLOC (DiFR, figures 7 to 10).

    Args:
        provider: the variant to be detected. Cells are those of ``activations``.
    """
    cells = detected(base(setting, new_tokens, turns), (provider,), ACTIVATION_SCORES, FEW)
    return Experiment(
        f"Bytes a token against detection in {WINDOW} tokens: {provider}",
        cells,
        {name: name for name in METHODS},
        [
            SPLIT_NOTE,
            PAPER_NOTE,
            f"Of {WINDOW} tokens so many carry a fingerprint of k numbers in bfloat16 (2k bytes), or a proof of k "
            "values (2 + 2k bytes). Shown is what no cheaper setting of the same method beats.",
        ],
        fold=_by_bytes,
        over="bytes a token",
    )


def fingerprint_cost(
    setting: Setting, provider: str = "kv=fp8", turns: int = 2, new_tokens: int = 100
) -> Experiment:
    """Find the fewest bytes per token that reach an AUC, for Activation-DiFR and TOPLOC (DiFR, table 1, figures 9, 10).

    Args:
        provider: the variant to be detected. Cells are those of ``activations``.
    """
    return Experiment(
        f"Bytes a token that detection needs: {provider}",
        detected(base(setting, new_tokens, turns), (provider,), ACTIVATION_SCORES, FEW),
        {name: f"{name}, bytes a token" for name in METHODS},
        [
            SPLIT_NOTE, PAPER_NOTE,
            f"Least over numbers k and over how many of {WINDOW} tokens carry a fingerprint (2k bytes, bfloat16) or a "
            "proof (2 + 2k bytes); a dash: no setting measured reaches it.",
        ],
        fold=_by_target,
        over="AUC",
    )  # fmt: skip


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
    """Return bytes per token, AUC, its figure and its row, for every setting of each method."""
    points: dict[str, list[Point]] = {m: [] for m in METHODS}
    for row in rows:
        score = str(row["keys"]["score"])
        method = next((m for m in METHODS if score.startswith(m)), None)
        if method is None or "Gaussian" in score:
            continue
        count = int("".join(c for c in score.removeprefix(method) if c.isdigit()))
        size = 2 * count + (2 if method == METHODS[1] else 0)
        for name, figure in row["figures"].items():
            if name.startswith("auc_"):
                tokens = int(name.removeprefix("auc_"))
                points[method].append((size * tokens / WINDOW, figure["value"], figure, {**row, "paper": {}}))
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


def providers(
    setting: Setting,
    providers: str = "",
    turns: int = 2,
    new_tokens: int = 100,
    method: str = "gumbel",
    ranked: int = RANKED,
) -> Experiment:
    """Measure every simulated provider's raw scores, and run the tests that need no seed.

    Args:
        providers, method: see ``detection``.
        ranked: requests of the rank-uniformity test.
    """
    spec = {**base(setting, new_tokens, turns, method), "against": "seed=2"}
    variants = _list(providers) or (*HONEST, *OTHERS)
    cells = [Cell("agreement", {**spec, "variant": v}, {"provider": v}) for v in variants]
    cells += [
        Cell("uniformity", {**spec, "variant": v, "requests": ranked}, {"provider": f"{v}, ranks"})
        for v in variants
    ]
    return Experiment(
        "Simulated providers: raw scores",
        cells,
        {
            "same_token": "same token", "margin": "mean margin", "margin_p99.9": "99.9th percentile",
            "filtered": "filtered tokens", "cross_entropy": "cross-entropy", "rank_uniformity_p": "rank uniformity, p",
            "mmd_p": "MMD, p", "mmd_by_prompt_p": "MMD by prompt, p",
        },
        [
            PAPER_NOTE,
            "Margins in logits, without filtered tokens (infinite). p of the MMD test (Hamming kernel) against an "
            "honest provider with other seeds (by prompt: only answers to the same prompt are compared), and of the "
            f"rank-uniformity test (Kolmogorov-Smirnov, {ranked} "
            "requests): small means that the distribution differs. Neither needs the seed, nor notices a wrong one.",
        ],
    )  # fmt: skip


def toploc_table(
    setting: Setting,
    providers: str = "",
    turns: int = 2,
    new_tokens: int = 100,
    limits: str = LIMITS[0],
) -> Experiment:
    """Check TOPLOC proofs of honest and dishonest providers (TOPLOC, tables 2 to 4 in form).

    Args:
        limits: published; or calibrated: the largest values of any honest proof, without the provider under test.
    """
    if limits not in LIMITS:
        raise InputError(f"limits {limits!r}: {' or '.join(LIMITS)}")
    spec = base(setting, new_tokens, turns)
    if limits == LIMITS[1]:
        spec["honest"] = list(HONEST)
    variants = _list(providers) or (*HONEST, *OTHERS)
    cells = [Cell("proofs", {**spec, "variant": v}, {"provider": v}) for v in variants]
    cells.append(Cell("proof-cost", {**spec, "variant": "honest"}, {"provider": "cost of a commitment"}))
    return Experiment(
        f"TOPLOC: proofs accepted with {limits} limits",
        cells,
        {
            "requests_accepted": "requests accepted", "proofs_accepted": "proofs accepted",
            "exponents": "values in disagreement", "fewest_exponents": "fewest", "most_exponents": "most",
            "mean_mantissa": "mantissa difference", "milliseconds": "ms a commitment",
            "slowest_milliseconds": "slowest", "of_decoding": "of the decoding time",
        },
        [
            PAPER_NOTE,
            f"By the published rule (paper): the {toploc.TOP} largest values of the prompt, and of each "
            f"{EVERY} tokens of the answer. Values disagree in exponent or "
            "sign, or are not among the largest of both sides.",
            "Limits: " + LIMIT_NOTES[limits],
            "TOPLOC checks the forward pass over the tokens that are claimed, not how they were drawn: providers that "
            "only sample otherwise pass by design.",
        ],
    )  # fmt: skip
