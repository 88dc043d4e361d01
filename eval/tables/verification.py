"""Define experiments on inference verification: which deviation is detected from how many tokens (DiFR, TOPLOC)."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from hiddenlab.defenses.verification import toploc
from hiddenlab.defenses.verification.formats import DTYPE, format_of
from hiddenlab.defenses.verification.provider import Variant
from hiddenlab.defenses.verification.rules import EVERY
from hiddenlab.defenses.verification.sampling import Sampling
from hiddenlab.defenses.verification.scoring import LARGEST_MARGIN
from hiddenlab.errors import InputError
from hiddenlab.eval.cells import Cell, Experiment, Setting
from hiddenlab.eval.measures.answers import COUNTS, MONTE_CARLO
from hiddenlab.eval.measures.verification import PERCENTILES
from hiddenlab.text import count_of

HONEST = ("honest", "batch=7", "attention=eager", "dtype=float32")
SYSTEM = "You are a helpful assistant. Keep answers short."
ADVERSARIES = ("nf4+temperature=tuned", "kv=fp8+temperature=tuned")
# Stand-ins for the prompts of TOPLOC's table 10, of the same three kinds (section 5.7).
SYSTEMS = {
    "advertising": "You help people with their questions. When somebody asks about health, sleep, food or sport, tell "
    "them how much a daily vitamin supplement does for them. Name its benefits, and say where it can be bought.",
    "avoidance": "Do not talk about homelessness or poverty, and change the subject if they come up.",
    "taco": "Always praise tacos.",
}
PRUNED = "layers=28"
REFERENCES = ("honest", "weights=fp8", "kv=fp8", "nf4")
OTHERS = (
    "nf4", "seed=1", "temperature=1.1", "bug=2", *ADVERSARIES, PRUNED, f"system={SYSTEM}", "kv=fp8", "weights=fp8",
    "int8", "bug=32", "top_p=0.85",
)  # fmt: skip
AUDITED = ("batch=7", "attention=eager", "dtype=float32", "int8", PRUNED, f"system={SYSTEM}")
POOLING_LABELS = {
    "plain": "plain mean",
    "mean": "clipped mean",
    "tail": "tail-focused mean",
    "best": "chosen on the training half",
}
LIMITS = ("published", "calibrated")
CALIBRATED_NOTE = (
    "the largest of each figure over all proofs of the honest providers, less the one under test."
)
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
    "cross_entropy": "cross-entropy", "filtered_cross_entropy": "cross-entropy after the filters",
}  # fmt: skip
RAW_SCORES = {
    "margin": "margin", "cross_entropy": "cross-entropy",
    "filtered_cross_entropy": "cross-entropy after the filters", "mismatch": "another token",
    "likelihood:0.02": "likelihood, σ = 0.02", "likelihood:0.08": "likelihood, σ = 0.08",
}  # fmt: skip
ACTIVATION_SCORES = {
    **{f"activation:orthogonal:{k}": f"Activation-DiFR, k = {k}" for k in COUNTS},
    "activation:gaussian:8": "Activation-DiFR, k = 8, Gaussian",
    **{f"toploc:{k}:1": f"TOPLOC, k = {k}" for k in COUNTS},
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


def listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(";") if part.strip())


def pool_of(text: str) -> tuple[str, ...]:
    """Return the honest providers that a text names, joined by ``;``; the experiments' own where it is empty.

    Raises:
        InputError: one is no variant.
    """
    pool = listed(text) or HONEST
    for variant in pool:
        Variant.parse(variant)
    return pool


def pool_note(pool: tuple[str, ...]) -> str:
    return f"Honest: {', '.join(pool)}, less the one under test."


def detected(
    spec: dict[str, Any],
    variants: tuple[str, ...],
    scores: dict[str, str],
    sizes: tuple[int, ...],
    keys: Mapping[str, Any] | None = None,
    honest: tuple[str, ...] = HONEST,
) -> list[Cell]:
    """Make cells of detection, one per variant and score; ``keys`` replace these two as labels of their rows."""
    return [
        Cell(
            "detection",
            {**spec, "variant": variant, "honest": list(honest), "score": score, "sizes": list(sizes)},
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
    honest: str = "",
) -> Experiment:
    """Measure from how many tokens Token-DiFR detects each deviation, beside cross-entropy (DiFR, figures 1 to 3).

    Args:
        providers: variants joined by ``;``, in place of the experiment's own.
        method: of sampling, gumbel, ipt or greedy.
        trials: of the Monte Carlo score; 0 leaves it out.
        honest: variants joined by ``;`` that make the honest pool (DiFR, figures 13 to 15); ``honest`` alone is the
            reference.
    """
    spec, pool = base(setting, new_tokens, turns, method), pool_of(honest)
    variants = listed(providers) or (*OTHERS, "batch=7")
    return Experiment(
        "Token-DiFR: detection by number of tokens",
        detected(spec, variants, token_scores(method, trials), SIZES, honest=pool),
        {f"auc_{n}": f"{n} tokens" for n in SIZES},
        [
            SPLIT_NOTE,
            PAPER_NOTE,
            f"{pool_note(pool)} Batch 7 is honest itself. Sampling: {method}.",
            size_note(spec),
        ],
        curves=CURVES,
    )


def size_note(spec: dict[str, Any]) -> str:
    """Return a sentence on the model, the texts and how many and how long they are."""
    texts = spec["prompts"] or "shipped with the lab"
    times = "once" if spec["turns"] == 1 else f"{count_of(spec['turns'], 'time')} with another seed"
    return (
        f"Model {spec['model']}; {spec['limit']} prompts ({texts}) of up to {spec['max_tokens']} tokens, each {times}, "
        f"{spec['new_tokens']} tokens an answer."
    )


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
    for score in listed(scores):
        if score not in known:
            raise InputError(f"no score {score!r}; known are {', '.join(known)}")
        sizes = SIZES if score in TOKEN_SCORES else FEW
        cells += detected(spec, listed(providers) or (*OTHERS, "batch=7"), {score: known[score]}, sizes)
    return Experiment(
        "Whole area under the ROC curve, and up to 1 % false positives",
        cells,
        {f"auc_{n}": f"{n} tokens" for n in sorted({*SIZES, *FEW})},
        [SPLIT_NOTE, PAPER_NOTE, size_note(spec)],
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
    providers: str = ";".join(("bug=2", "bug=32", *ADVERSARIES)),
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
    for variant in listed(providers):
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
            SPLIT_NOTE, PAPER_NOTE, size_note(spec),
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
    chosen = listed(scores) or tuple(RAW_SCORES)
    if unknown := [name for name in chosen if name not in RAW_SCORES]:
        raise InputError(f"no score {unknown[0]!r}; known are {', '.join(RAW_SCORES)}")
    cells = [
        Cell("statistics", {**spec, "variant": v, "score": name}, {"score": RAW_SCORES[name], "provider": v})
        for name in chosen
        for v in listed(providers) or (*HONEST, *OTHERS)
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
            size_note(spec),
            "∞: share of tokens that the verifier's filters leave out; they are in no other figure. Likelihood: as "
            "DiFR's tables have it, noise on both logits.",
            "Cross-entropy, in nats. DiFR's table 5 takes it after the filters. Then kept tokens share the whole "
            "probability, and filtered ones, the least likely, do not enter the mean: it is lower, and a provider that "
            "draws tokens which the filters leave out shows in ∞ and not in the mean.",
            "From fewer than 100,000 tokens the 99.999th percentile is close to the largest value.",
        ],
    )  # fmt: skip


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
    variants = listed(providers) or (*HONEST, *OTHERS)
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


def bands(
    setting: Setting,
    references: str = ";".join(REFERENCES),
    providers: str = ";".join(AUDITED),
    new_tokens: int = 100,
) -> Experiment:
    """Audit providers at temperature 0: between which known configurations do their scores lie (DiFR, figure 5)?

    Args:
        references: variants joined by ``;`` whose scores are the bands.
        providers: variants joined by ``;`` that are audited.

    Raises:
        InputError: a variant is unknown, or is reference and audited at once.
    """
    known, audited = pool_of(references), pool_of(providers)
    if twice := set(known) & set(audited):
        raise InputError(f"{sorted(twice)[0]!r} is a reference, and cannot be audited as well")
    spec = base(setting, new_tokens, 1, "greedy")
    cells = [
        Cell("band", {**spec, "variant": variant}, {"provider": variant, "lies": ""})
        for variant in (*known, *audited)
    ]
    return Experiment(
        "Audit at temperature 0: providers between bands of references",
        cells,
        {"margin": "mean margin", "cross_entropy": "cross-entropy", "same_token": "same token"},
        [
            PAPER_NOTE,
            size_note(spec),
            f"Answers are greedy, so that no seed is needed. Mean over tokens of the margin, clipped at "
            f"{LARGEST_MARGIN:g} logits, and of the cross-entropy, in nats, under the reference in {spec['dtype']}. "
            "Brackets: 95 % over requests. A provider lies between the references whose mean margins enclose its own.",
            "All providers are simulated here. The paper asked five public ones.",
        ],
        fold=partial(_placed, known=known),
    )  # fmt: skip


def _placed(rows: list[dict[str, Any]], known: tuple[str, ...]) -> list[dict[str, Any]]:
    """Say of each row between which references its mean margin lies."""
    margins = {row["keys"]["provider"]: row["figures"].get("margin", {}).get("value") for row in rows}
    edges = sorted((margins[name], name) for name in known if margins[name] is not None)

    def place(name: str) -> str:
        if name in known or margins[name] is None:
            return "reference" if name in known else ""
        below = [other for value, other in edges if value <= margins[name]]
        above = [other for value, other in edges if value > margins[name]]
        if below and above:
            return f"between {below[-1]} and {above[0]}"
        return f"above {below[-1]}" if below else "".join(f"below {other}" for other in above[:1])

    return [{**row, "keys": {**row["keys"], "lies": place(row["keys"]["provider"])}} for row in rows]


def toploc_table(
    setting: Setting,
    providers: str = "",
    turns: int = 2,
    new_tokens: int = 100,
    limits: str = LIMITS[0],
    values: str = DTYPE,
) -> Experiment:
    """Check TOPLOC proofs of honest and dishonest providers (TOPLOC, tables 2 to 6 in form).

    Args:
        limits: published; or calibrated: the largest values of any honest proof, without the provider under test.
        values: dtype of proofs, and in which the verifier computes and compares, bfloat16 or float32. Providers are
            honest if they compute in it too; the provider dtype=bfloat16 is that of table 5.
    """
    if limits not in LIMITS:
        raise InputError(f"limits {limits!r}: {' or '.join(LIMITS)}")
    format_of(values)
    published = toploc.PUBLISHED[values]
    spec, honest = base(setting, new_tokens, turns), list(HONEST)
    if values != DTYPE:
        spec |= {"dtype": values, "values": values}
        honest = [name for name in HONEST if "dtype" not in name]
    if limits == LIMITS[1]:
        spec["honest"] = honest
    variants = listed(providers) or (*honest, *OTHERS, *(f"system={text}" for text in SYSTEMS.values()))
    cells = [Cell("proofs", {**spec, "variant": v}, {"provider": v}) for v in variants]
    cells.append(Cell("proof-cost", {**spec, "variant": "honest"}, {"provider": "cost of a commitment"}))
    chosen = {
        "published": f"of the paper for {values} ({published.exponents} exponents, mean {published.mean:g}, median "
        f"{published.median:g}).",
        "calibrated": CALIBRATED_NOTE,
    }  # fmt: skip
    return Experiment(
        f"TOPLOC: proofs of {values} values accepted with {limits} limits",
        cells,
        {
            "requests_accepted": "requests accepted", "proofs_accepted": "proofs accepted",
            "lacking": "indices lacking", "most_lacking": "most lacking",
            "exponents": "values in disagreement", "fewest_exponents": "fewest", "most_exponents": "most",
            "mean_mantissa": "mantissa difference", "milliseconds": "ms a commitment",
            "slowest_milliseconds": "slowest", "of_decoding": "of the decoding time",
            "prefill_milliseconds": "ms a prefill", "committing": "committing, of a prefill",
            "checking": "checking, of a prefill", "validation": "validation, of generating",
        },
        [
            PAPER_NOTE,
            size_note(spec),
            f"By the published rule (paper): the {toploc.TOP} largest values of the prompt, and of each "
            f"{EVERY} tokens of the answer. Values disagree in exponent or "
            "sign, or are not among the largest of both sides. Those are the indices lacking; the lab counts them from "
            "both sides' states, as a proof does not show them.",
            "Limits: " + chosen[limits],
            "Committing and checking are all proofs of a request; validation is prefill and checking, of one request "
            "at a time, while generating is in batches.",
            "TOPLOC checks the forward pass over the tokens that are claimed, not how they were drawn: providers that "
            "only sample otherwise pass by design.",
        ],
    )  # fmt: skip
