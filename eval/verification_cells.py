"""What cells of the verification experiments measure: detection, cost, and the distributional baselines."""

from pathlib import Path
from typing import Any

import numpy as np

from defenses.verification import toploc
from defenses.verification.detect import detect, mmd_test
from eval.answers import answered, pooled, scored, uniform_ranks
from eval.experiment import Figures
from eval.intervals import mean, ratio, share
from eval.measures import as_figures, exactly
from hiddenlab.core import Progress, silent
from hiddenlab.errors import InputError

SPLITS = 5


def _home(folder: Path) -> Path:
    """Where answers and scores are kept: beside the cells."""
    return folder.parent.parent


def _honest(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Specs of the honest providers that calibrate: all named but the one under test."""
    return [{**spec, "variant": v} for v in spec["honest"] if v != spec["variant"]]


def detection(spec: dict[str, Any], folder: Path, progress: Progress = silent) -> Figures:
    """Standardised AUC at 1 % false positives by batch size, over five divisions of the tokens into halves.

    Args:
        spec: as ``eval.answers.answered``; honest (variants), score, sizes.
    """
    home = _home(folder)
    honest = pooled(_honest(spec), home, spec["score"], progress)
    other = pooled([spec], home, spec["score"], progress)
    figures: Figures = {}
    for size in spec["sizes"]:
        if size > min(len(honest), len(other)) // 2:
            continue
        found = [
            detect(honest, other, size, np.random.default_rng([spec["seed"], split])).auc_low_fpr
            for split in range(SPLITS)
        ]
        figures[f"auc_{size}"] = {
            "value": float(np.mean(found)), "low": min(found), "high": max(found), "n": len(other)
        }  # fmt: skip
    if not figures:
        raise InputError(
            f"{len(other)} scores of {spec['score']} are too few for a batch of {min(spec['sizes'])}"
        )
    return figures


def agreement(spec: dict[str, Any], folder: Path, progress: Progress = silent) -> Figures:
    """A provider's raw scores (DiFR, appendix I), and the MMD test, which needs no seed.

    Args:
        spec: as ``eval.answers.answered``; against: a variant to compare distributions with.
    """
    home = _home(folder)
    scores = scored(spec, home, progress)
    shape = (len(scores["length"]), -1)
    out = {
        "same_token": mean((scores["mismatch"].reshape(shape) == 0).mean(1).tolist()),
        "cross_entropy": mean(scores["cross_entropy"].reshape(shape).mean(1).tolist()),
    }
    figures: Figures = {}
    if "margin" in scores:
        margins = scores["margin"]
        finite = np.isfinite(margins)
        kept = np.where(finite, margins, 0.0).reshape(shape)
        out["margin"] = ratio(kept.sum(1).tolist(), finite.reshape(shape).sum(1).tolist())
        out["filtered"] = mean((~finite).reshape(shape).mean(1).tolist())
        figures["margin_p99.9"] = exactly(float(np.percentile(margins[finite], 99.9)), int(finite.sum()))
    figures |= as_figures(out)
    rows = scores["drawn"].reshape(shape)
    theirs = scored({**spec, "variant": spec["against"]}, home, progress)["drawn"].reshape(shape)
    figures["mmd_p"] = exactly(mmd_test(rows, theirs, np.random.default_rng(spec["seed"])), len(rows))
    return figures


def uniformity(spec: dict[str, Any], folder: Path, progress: Progress = silent) -> Figures:
    """The rank-uniformity test, which needs no seed: Kolmogorov-Smirnov on the ranks of tokens.

    Args:
        spec: as ``eval.answers.answered``; requests: how many.
    """
    from scipy.stats import kstest

    found = kstest(uniform_ranks(spec, _home(folder), spec["requests"], progress), "uniform")
    return {"rank_uniformity_p": exactly(float(found.pvalue), spec["requests"])}


def proofs(spec: dict[str, Any], folder: Path, progress: Progress = silent) -> Figures:
    """TOPLOC as published: shares of proofs and of requests accepted, and how near the thresholds they came.

    Args:
        spec: as ``eval.answers.answered``.
    """
    scores = scored(spec, _home(folder), progress)
    name = f"toploc:{toploc.TOP}:{toploc.EVERY}"
    accepted = scores[f"{name}:accepted"]
    per_request = accepted.reshape(len(scores["length"]), -1)
    figures = as_figures(
        {
            "proofs_accepted": share([bool(a) for a in accepted]),
            "requests_accepted": share(np.atleast_1d(per_request.all(1)).tolist()),
            "exponents": mean(scores[f"{name}:exponents"].tolist()),
        }
    )
    figures["most_exponents"] = exactly(float(scores[f"{name}:exponents"].max()), len(accepted))
    figures["fewest_exponents"] = exactly(float(scores[f"{name}:exponents"].min()), len(accepted))
    finite = scores[f"{name}:mean"][np.isfinite(scores[f"{name}:mean"])]
    if len(finite):
        figures["mean_mantissa"] = as_figures({"m": mean(finite.tolist())})["m"]
    return figures


def proof_cost(spec: dict[str, Any], folder: Path, progress: Progress = silent) -> Figures:
    """Milliseconds of one commitment to 32 tokens, and the share of the time in which the tokens were generated.

    Args:
        spec: as ``eval.answers.answered``.
    """
    import time

    found = answered(spec, _home(folder), progress)
    chunks = [rows[: toploc.EVERY] for rows in found.outputs if len(rows) >= toploc.EVERY]
    if not chunks:
        raise InputError(f"no answer has {toploc.EVERY} tokens")
    for chunk in chunks[:5]:
        toploc.commit(chunk)
    took = []
    for chunk in chunks:
        started = time.perf_counter()
        toploc.commit(chunk)
        took.append(time.perf_counter() - started)
    tokens = sum(len(rows) for rows in found.outputs)
    decode = found.seconds / tokens * toploc.EVERY
    figures = as_figures(
        {"milliseconds": mean([1e3 * t for t in took]), "of_decoding": mean([t / decode for t in took])}
    )
    figures["slowest_milliseconds"] = exactly(1e3 * max(took), len(took))
    figures["tokens_per_second"] = exactly(tokens / found.seconds, tokens)
    return figures
