"""Measure inference verification: detection, cost, and the baselines that need no seed."""

from pathlib import Path
from typing import Any

import numpy as np

from hiddenlab.defenses.verification import toploc
from hiddenlab.defenses.verification.causal_lm import load_whole
from hiddenlab.defenses.verification.detect import detect, mmd_test
from hiddenlab.defenses.verification.formats import DTYPE
from hiddenlab.defenses.verification.rules import EVERY
from hiddenlab.defenses.verification.scoring import LARGEST_MARGIN
from hiddenlab.errors import InputError
from hiddenlab.eval.cells import Figures
from hiddenlab.eval.measures.answers import answered, pooled, scored, uniform_ranks
from hiddenlab.eval.measures.attack import as_figures, exactly
from hiddenlab.eval.measures.intervals import mean, ratio, share
from hiddenlab.types import Progress, silent

SPLITS = 5
TIMED = 20  # requests whose prefill is timed
PERCENTILES = (90.0, 99.0, 99.9, 99.99, 99.999)


def _home(folder: Path) -> Path:
    """Return the folder in which answers and scores are kept, beside the cells."""
    return folder.parent.parent


def _honest(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Return specs of the honest providers that calibrate: all that are named but the one under test."""
    return [{**spec, "variant": v} for v in spec["honest"] if v != spec["variant"]]


def detection(spec: dict[str, Any], folder: Path, progress: Progress = silent) -> Figures:
    """Measure standardised AUC at 1 % false positives by batch size, over five divisions of the tokens.

    Args:
        spec: as ``answers.answered``; honest (variants), score, sizes; pooling (see ``detect.poolings``).

    Returns:
        For each size N ``auc_N``, ``whole_N`` (the whole area) and ``tail_N``: the share of divisions in which a
        tail-focused mean was chosen.
    """
    home = _home(folder)
    honest = pooled(_honest(spec), home, spec["score"], progress)
    other = pooled([spec], home, spec["score"], progress)
    figures: Figures = {}
    for size in spec["sizes"]:
        if size > min(len(honest), len(other)) // 2:
            continue
        outcomes = [
            detect(
                honest, other, size, np.random.default_rng([spec["seed"], split]), which=spec.get("pooling", "best")
            )
            for split in range(SPLITS)
        ]  # fmt: skip
        tails = [float(any(pool.floor > 0 for pool in outcome.pooling)) for outcome in outcomes]
        for name, values in (
            ("auc", [outcome.auc_low_fpr for outcome in outcomes]),
            ("whole", [outcome.auc for outcome in outcomes]), ("tail", tails),
        ):  # fmt: skip
            figures[f"{name}_{size}"] = {
                "value": float(np.mean(values)), "low": min(values), "high": max(values), "n": len(other)
            }  # fmt: skip
    if not figures:
        raise InputError(
            f"{len(other)} scores of {spec['score']} are too few for a batch of {min(spec['sizes'])}"
        )
    return figures


def agreement(spec: dict[str, Any], folder: Path, progress: Progress = silent) -> Figures:
    """Measure a provider's raw scores (DiFR, appendix I), and run the MMD test, which needs no seed.

    Args:
        spec: as ``answers.answered``; against: a variant to compare distributions with.
    """
    home = _home(folder)
    scores = scored(spec, home, progress)
    shape = (len(scores["length"]), -1)
    estimates = {
        "same_token": mean((scores["mismatch"].reshape(shape) == 0).mean(1).tolist()),
        "cross_entropy": mean(scores["cross_entropy"].reshape(shape).mean(1).tolist()),
    }
    figures: Figures = {}
    if "margin" in scores:
        margins = scores["margin"]
        finite = np.isfinite(margins)
        kept = np.where(finite, margins, 0.0).reshape(shape)
        estimates["margin"] = ratio(kept.sum(1).tolist(), finite.reshape(shape).sum(1).tolist())
        estimates["filtered"] = mean((~finite).reshape(shape).mean(1).tolist())
        figures["margin_p99.9"] = exactly(float(np.percentile(margins[finite], 99.9)), int(finite.sum()))
    figures |= as_figures(estimates)
    rows = scores["drawn"].reshape(shape)
    other_rows = scored({**spec, "variant": spec["against"]}, home, progress)["drawn"].reshape(shape)
    figures["mmd_p"] = exactly(mmd_test(rows, other_rows, np.random.default_rng(spec["seed"])), len(rows))
    if spec["turns"] > 1:
        of = [i // spec["turns"] for i in range(len(rows))]
        p = mmd_test(rows, other_rows, np.random.default_rng(spec["seed"]), prompts=of)
        figures["mmd_by_prompt_p"] = exactly(p, len(rows))
    return figures


def statistics(spec: dict[str, Any], folder: Path, progress: Progress = silent) -> Figures:
    """Measure one score's distribution over a provider's tokens: mean, deviation, percentiles (DiFR, tables 4 to 8).

    Args:
        spec: as ``answers.answered``; score.
    """
    values = pooled([spec], _home(folder), spec["score"], progress)
    finite = values[np.isfinite(values)]
    if not len(finite):
        raise InputError(f"no token has a finite {spec['score']}")
    summary = {"infinite": float(1 - len(finite) / len(values)), "mean": finite.mean(), "sd": finite.std()}
    summary |= {f"p{p:g}": np.percentile(finite, p) for p in PERCENTILES}
    return {name: exactly(float(value), len(values)) for name, value in summary.items()}


def band(spec: dict[str, Any], folder: Path, progress: Progress = silent) -> Figures:
    """Measure a provider's mean score, with intervals over requests, as bands of an audit (DiFR, appendix D, figure 5).

    Args:
        spec: as ``answers.answered``.

    Returns:
        ``margin`` (each token's clipped at ``LARGEST_MARGIN`` logits), ``cross_entropy`` (nats), ``same_token``.
    """
    scores = scored(spec, _home(folder), progress)
    shape = (len(scores["length"]), -1)
    tokens = {
        "margin": np.minimum(scores["margin"], LARGEST_MARGIN), "cross_entropy": scores["cross_entropy"],
        "same_token": 1 - scores["mismatch"],
    }  # fmt: skip
    return as_figures({name: mean(values.reshape(shape).mean(1).tolist()) for name, values in tokens.items()})


def uniformity(spec: dict[str, Any], folder: Path, progress: Progress = silent) -> Figures:
    """Run the rank-uniformity test, a Kolmogorov-Smirnov test on the ranks of tokens that needs no seed.

    Args:
        spec: as ``answers.answered``; requests: how many.
    """
    from scipy.stats import kstest

    result = kstest(uniform_ranks(spec, _home(folder), spec["requests"], progress), "uniform")
    return {"rank_uniformity_p": exactly(float(result.pvalue), spec["requests"])}


def proofs(spec: dict[str, Any], folder: Path, progress: Progress = silent) -> Figures:
    """Measure shares of TOPLOC proofs and requests accepted, by the published rule, and how close they come to limits.

    Args:
        spec: as ``answers.answered``; honest: variants that set the limits in place of the published ones, at the
            largest value of any of their proofs, the variant under test left out.
    """
    scores = scored(spec, _home(folder), progress)
    name = f"toploc:{toploc.TOP}:{EVERY}"
    accepted = scores[f"{name}:accepted"]
    if "honest" in spec:
        seen = [scored(honest_spec, _home(folder), progress) for honest_spec in _honest(spec)]
        parts = [f"{name}:{part}" for part in ("exponents", "mean", "median")]
        limits = {part: max(float(honest_scores[part].max()) for honest_scores in seen) for part in parts}
        accepted = np.logical_and.reduce([scores[part] <= limits[part] for part in parts])
    per_request = accepted.reshape(len(scores["length"]), -1)
    figures = as_figures(
        {
            "proofs_accepted": share([bool(a) for a in accepted]),
            "requests_accepted": share(np.atleast_1d(per_request.all(1)).tolist()),
            "exponents": mean(scores[f"{name}:exponents"].tolist()),
            "lacking": mean(scores[f"{name}:lacking"].tolist()),
        }
    )
    figures["most_lacking"] = exactly(float(scores[f"{name}:lacking"].max()), len(accepted))
    figures["most_exponents"] = exactly(float(scores[f"{name}:exponents"].max()), len(accepted))
    figures["fewest_exponents"] = exactly(float(scores[f"{name}:exponents"].min()), len(accepted))
    finite = scores[f"{name}:mean"][np.isfinite(scores[f"{name}:mean"])]
    if len(finite):
        figures["mean_mantissa"] = as_figures({"m": mean(finite.tolist())})["m"]
    return figures


def proof_cost(spec: dict[str, Any], folder: Path, progress: Progress = silent) -> Figures:
    """Measure times of commitments and of checks, and their share of generation and of a prefill.

    Args:
        spec: as ``answers.answered``.

    Returns:
        ``milliseconds`` of one commitment to 32 tokens, and ``of_decoding``, its share of the time of generation, which
        may be of an earlier run. Of whole requests, with times of this run: ``prefill_milliseconds``, of the verifier's
        pass; and as parts of it ``committing`` and ``checking``, all proofs of the request; ``validation``: pass and
        checks over the time of generation.
    """
    import time

    answers = answered(spec, _home(folder), progress)
    chunks = [rows[:EVERY] for rows in answers.outputs if len(rows) >= EVERY]
    if not chunks:
        raise InputError(f"no answer has {EVERY} tokens")
    dtype = str(spec.get("values", DTYPE))
    for chunk in chunks[:5]:
        toploc.commit(chunk, dtype=dtype)
    durations = []
    for chunk in chunks:
        started = time.perf_counter()
        toploc.commit(chunk, dtype=dtype)
        durations.append(time.perf_counter() - started)
    tokens = sum(len(rows) for rows in answers.outputs)
    decode = answers.seconds / tokens * EVERY
    verifier = load_whole(spec["model"], dtype=spec["dtype"], device=spec["device"])
    times: list[tuple[float, float, float]] = []
    for transcript in (answers.transcripts[0], *answers.transcripts[:TIMED]):  # the first warms up
        before = time.perf_counter()
        states, _ = verifier.prefill((*transcript.prompt, *transcript.output), len(transcript.output))
        sides = (states[: len(transcript.prompt)], states[len(transcript.prompt) - 1 : -1])
        ran = time.perf_counter()
        proofs = toploc.commit_all(*sides, dtype=dtype)
        committed = time.perf_counter()
        toploc.verify_all(*sides, proofs, toploc.PUBLISHED[dtype])
        times.append((ran - before, committed - ran, time.perf_counter() - committed))
    prefills, commits, checks = (list(part) for part in zip(*times[1:], strict=True))
    generation = answers.seconds / len(answers.transcripts)
    figures = as_figures(
        {
            "milliseconds": mean([1e3 * t for t in durations]),
            "of_decoding": mean([t / decode for t in durations]),
            "prefill_milliseconds": mean([1e3 * t for t in prefills]),
            "committing": ratio(commits, prefills),
            "checking": ratio(checks, prefills),
            "validation": mean([(a + b) / generation for a, b in zip(prefills, checks, strict=True)]),
        }
    )
    figures["slowest_milliseconds"] = exactly(1e3 * max(durations), len(durations))
    figures["tokens_per_second"] = exactly(tokens / answers.seconds, tokens)
    return figures
