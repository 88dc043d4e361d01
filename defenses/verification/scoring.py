"""Score transcripts with Token-DiFR, and give a verdict calibrated by honest ones: ``hiddenlab verify score``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hiddenlab.defenses.verification import difr, speculative
from hiddenlab.defenses.verification.causal_lm import WholeModel
from hiddenlab.defenses.verification.closed_form import FLOOR, NoiseOn
from hiddenlab.defenses.verification.command import FORMAT, Made, verifier_for
from hiddenlab.defenses.verification.detect import clipping
from hiddenlab.defenses.verification.difr import Verifier
from hiddenlab.defenses.verification.sampling import GREEDY
from hiddenlab.defenses.verification.transcript import Transcript, read_transcripts
from hiddenlab.errors import InputError
from hiddenlab.models.load import BUILTIN
from hiddenlab.types import Progress, silent
from hiddenlab.utils.random import generator

LARGEST_MARGIN = 3.0  # where margins are clipped without honest tokens to calibrate
LARGEST_LIKELIHOOD = -math.log(FLOOR)  # the inverse transform's own floor
PREFERRED = ("margin", "likelihood", "mismatch")  # a verdict uses the first that all requests have
SCORES = (*PREFERRED, "monte_carlo", "cross_entropy")


def score(
    path: Path, *, honest: Path | None = None, model: str | None = None, dtype: str = "bfloat16",
    device: str = "auto", key: str | None = None, key_form: str = "adaptive", false_positives: float = 0.01,
    draft: str | None = None, ahead: int = 4, sigma: float = difr.SIGMA, noise_on: NoiseOn = "both",
    ipt_sigma: float = difr.IPT_SIGMA, trials: int = 0, score_name: str | None = None, progress: Progress = silent,
) -> Made:  # fmt: skip
    """Score transcripts with Token-DiFR, and give a verdict where honest transcripts calibrate it.

    Answers that were decoded speculatively need the ``draft`` model and how many tokens it was ``ahead``. Their scores
    are whether the verifier, in the recorded mode, draws the same token, and with ``trials`` how often it does so with
    noise on the logits of both models (DiFR, appendix F).

    The verdict compares mean scores, clipped at the 99.9th percentile of all, by a permutation test of requests.
    ``least_p`` is the smallest p that so many requests can give: with few of them there is never a verdict. Without a
    verdict, ``undecided`` says what is missing; else it is None.

    Args:
        sigma: of honest noise in logits, for the likelihood and the Monte Carlo score (DiFR, appendices A and B.1).
        noise_on: both logits of a comparison, or one (see ``closed_form.pairwise``).
        ipt_sigma: of honest noise in probability, where tokens were drawn by the inverse transform (B.2).
        trials: of the Monte Carlo score; 0 leaves it out.
        score_name: of the verdict, one of ``SCORES``; default the first of ``PREFERRED`` that all requests have: the
            inverse transform has no margin, and speculative answers have no likelihood.

    Raises:
        InputError: a file cannot be read or replayed, or is compared with itself; a share is outside (0, 1); noise or
            trials are out of range; or the requests do not have the score.
    """
    if not 0 < false_positives < 1:
        raise InputError(f"a share of {false_positives} of the honest to be flagged; between 0 and 1")
    if not (0 < sigma < math.inf and 0 < ipt_sigma < math.inf) or trials < 0:
        raise InputError(
            f"sigma {sigma}, ipt-sigma {ipt_sigma}, {trials} trials: above 0, above 0, and from 0"
        )
    if score_name is not None and score_name not in SCORES:
        raise InputError(f"no score {score_name!r}; known are {', '.join(SCORES)}")
    if draft is not None and score_name in ("margin", "likelihood"):
        raise InputError("speculative answers have no margin and no likelihood: take mismatch or monte_carlo")
    if score_name == "monte_carlo" and not trials:
        raise InputError("a verdict by the Monte Carlo score needs trials")
    if honest is not None and honest.resolve() == path.resolve():
        raise InputError(
            f"{path} is compared with itself, which tells nothing; --honest names trusted transcripts"
        )
    transcripts = read_transcripts(path)
    reference = None if honest is None else read_transcripts(honest)
    _alike([*transcripts, *(reference or [])])
    verifier = verifier_for([*transcripts, *(reference or [])], model, dtype, device, key, key_form)
    drafting = None if draft is None else speculative.load_draft(draft, model or BUILTIN, dtype, device)
    token_judge = _trusting(verifier, sigma, noise_on, ipt_sigma, trials)
    judge = token_judge if drafting is None else _drafting(verifier, drafting, ahead, sigma, trials)
    parts = _scored(transcripts, judge, "requests scored", progress)
    own = None if reference is None else _scored(reference, judge, "honest requests scored", progress)
    name = _by(score_name, [*parts, *(own or [])])
    rows = [
        {"id": transcript.id, **_figures(scores)}
        for transcript, scores in zip(transcripts, parts, strict=True)
    ]
    made: Made = {"format": FORMAT, "summary": _figures(_joined(parts)), "requests": rows, "verdict": None}
    made["undecided"] = (
        "no verdict without honest transcripts of the same sampling, which say what is normal; give them with --honest"
    )
    if reference is not None and own is not None:
        made["honest"] = _figures(_joined(own))
        made["honest_requests"] = [
            {"id": transcript.id, **_figures(scores)}
            for transcript, scores in zip(reference, own, strict=True)
        ]
        made["verdict"] = _verdict(name, own, parts, false_positives)
        made["undecided"] = _undecided(made["verdict"], len(own), len(parts), false_positives)
    return made


def _undecided(verdict: Made, honest: int, other: int, level: float) -> str | None:
    """Return what is missing for a verdict; None where there is one."""
    if verdict["diverges"] is not None:
        return None
    return (
        f"no verdict: {honest} honest requests and {other} to be judged cannot give a p below "
        f"{verdict['least_p']:.3g}, and --false-positives asks for one below {level:g}; compare more requests"
    )


def _alike(transcripts: Sequence[Transcript]) -> None:
    """Check that requests have the same sampling but for the seed, as scores of honest tokens depend on it.

    Raises:
        InputError: they do not.
    """
    # Greedy tokens depend on no other field of the sampling.
    kinds = {
        GREEDY if transcript.sampling.greedy else replace(transcript.sampling, seed=0)
        for transcript in transcripts
    }
    if len(kinds) > 1:
        first, second = sorted(map(str, kinds))[:2]
        raise InputError(f"requests that were sampled differently cannot be compared: {first} and {second}")


def _by(score_name: str | None, parts: Sequence[dict[str, np.ndarray]]) -> str:
    shared = set.intersection(*(set(part) for part in parts))
    if score_name is None:
        return next(name for name in PREFERRED if name in shared)
    if score_name not in shared:
        have = ", ".join(name for name in SCORES if name in shared)
        raise InputError(f"not all requests have the score {score_name!r}; all have {have}")
    return score_name


def _trusting(
    verifier: Verifier, sigma: float, noise_on: NoiseOn, ipt_sigma: float, trials: int
) -> Callable[[Transcript], dict[str, Tensor]]:
    """Return a function that scores the tokens of a request that was decoded token by token."""

    def judge(transcript: Transcript) -> dict[str, Tensor]:
        replay = verifier.replay(transcript)
        scores = difr.token_scores(replay, sigma, noise_on=noise_on, ipt_sigma=ipt_sigma)
        if trials:
            scores["monte_carlo"] = difr.monte_carlo(replay, sigma, _draws(transcript), trials=trials)
        return scores

    return judge


def _draws(transcript: Transcript) -> torch.Generator:
    """Return a request's own generator, so that its score does not depend on the rest of the file."""
    return generator(transcript.sampling.seed, "trials", transcript.id)


def _drafting(
    verifier: Verifier, draft: WholeModel, ahead: int, sigma: float, trials: int
) -> Callable[[Transcript], dict[str, Tensor]]:
    """Return a function that scores the tokens of a request that was decoded speculatively."""

    def speculated(transcript: Transcript) -> dict[str, Tensor]:
        replayed = speculative.replay(transcript, verifier.model, draft)
        surprise = difr.surprise(replayed.target, torch.tensor(transcript.output), transcript.sampling)
        scores = {
            "mismatch": speculative.mismatch(replayed, ahead, verifier.noise),
            "cross_entropy": surprise,
        }
        if trials:
            scores["monte_carlo"] = speculative.monte_carlo(
                replayed, ahead, sigma, _draws(transcript), trials=trials, noise=verifier.noise
            )
        return scores

    return speculated


def _scored(
    transcripts: Sequence[Transcript],
    judge: Callable[[Transcript], dict[str, Tensor]],
    what: str,
    progress: Progress,
) -> list[dict[str, np.ndarray]]:
    rows = []
    for i, transcript in enumerate(transcripts):
        scores = judge(transcript)
        rows.append({name: value.double().numpy() for name, value in scores.items()})
        progress(what, i + 1, len(transcripts))
    return rows


def _joined(parts: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    shared = set.intersection(*(set(part) for part in parts))
    return {name: np.concatenate([part[name] for part in parts]) for name in sorted(shared)}


def _figures(scores: dict[str, np.ndarray]) -> Made:
    figures: Made = {
        "tokens": len(scores["mismatch"]), "same_token": float(1 - scores["mismatch"].mean()),
        "cross_entropy": float(scores["cross_entropy"].mean()), "mean_margin": None, "filtered": None,
        "likelihood": None, "monte_carlo": None,
    }  # fmt: skip
    if "margin" in scores:
        finite = np.isfinite(scores["margin"])
        figures["mean_margin"] = float(np.minimum(scores["margin"], LARGEST_MARGIN).mean())
        figures["filtered"] = int((~finite).sum())
    if "likelihood" in scores:
        figures["likelihood"] = float(np.minimum(scores["likelihood"], LARGEST_LIKELIHOOD).mean())
    if "monte_carlo" in scores:
        figures["monte_carlo"] = float(scores["monte_carlo"].mean())
    return figures


def _verdict(
    name: str,
    honest: Sequence[dict[str, np.ndarray]],
    other: Sequence[dict[str, np.ndarray]],
    level: float,
    draws: int = 10_000,
) -> Made:
    """Test by permutation of whole requests whether the scores differ; ``diverges`` is None where there are too few.

    The p-value is the share of random divisions that differ as much. Requests are exchanged, not tokens, because the
    tokens of a request share their text.
    """
    pooling = clipping(np.concatenate([part[name] for part in (*honest, *other)]))
    sums = np.array([[pooling(part[name]).sum(), len(part[name])] for part in (*honest, *other)])
    n = len(honest)

    def apart(order: np.ndarray) -> np.ndarray:
        first, second = sums[order[..., :n]].sum(-2), sums[order[..., n:]].sum(-2)
        return second[..., 0] / second[..., 1] - first[..., 0] / first[..., 1]

    observed = apart(np.arange(len(sums))[None])
    rng = np.random.default_rng(0)
    orders = np.stack([rng.permutation(len(sums)) for _ in range(draws)])
    p = float((1 + (apart(orders) >= observed - 1e-12).sum()) / (draws + 1))
    least = max(1 / (draws + 1), 1 / math.comb(len(sums), n))
    means = [float(part[:, 0].sum() / part[:, 1].sum()) for part in (sums[:n], sums[n:])]
    return {
        "diverges": p < level if least < level else None, "score": name, "mean": means[1], "honest_mean": means[0],
        "p": p, "least_p": least, "clipped_at": pooling.top,
    }  # fmt: skip
