"""Classify tokens as safe, suspicious or dangerous, measure what each class lets through, and choose thresholds.

Source: Rinberg et al. 2025, section 6, Algorithm 7, figures 10, 13 to 15, 17 and 18. `bounds.extractable` has the same
rule for one token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hiddenlab.defenses.verification.bounds import Risk
from hiddenlab.defenses.verification.closed_form import logit_rank
from hiddenlab.defenses.verification.likelihood import ACTIVE, SAMPLES, gumbel_positions
from hiddenlab.defenses.verification.sampling import Sampling
from hiddenlab.errors import InputError


def classify(
    scores: Float[Tensor, " n"], ranks: Int[Tensor, " n"], threshold: float, rank_cutoff: int
) -> Int[Tensor, " n"]:
    """Return each token's `Risk` (Algorithm 7).

    Safe from the threshold up; below it suspicious to rank R, then dangerous.

    Section 6.1 calls every rank above R dangerous, however likely; Algorithm 7 only if the token is also below the
    threshold. This follows the algorithm, since the section argues about tokens that the score wrongly rejects.

    Args:
        scores: log-likelihoods.
        ranks: by logit, from 1.
        threshold: log τ.
        rank_cutoff: R, 0 for two classes.

    Raises:
        InputError: the numbers of ranks and scores differ, the cutoff is negative, or a score or threshold is NaN.
    """
    if len(scores) != len(ranks) or rank_cutoff < 0:
        raise InputError(
            f"{len(scores)} scores, {len(ranks)} ranks, cutoff {rank_cutoff}: as many, and from 0"
        )
    if bool(scores.isnan().any()) or math.isnan(threshold):
        raise InputError("a score or threshold that is no number")
    below = torch.where(ranks > rank_cutoff, int(Risk.DANGEROUS), int(Risk.SUSPICIOUS))
    return torch.where(scores >= threshold, int(Risk.SAFE), below)


def extractable_bits(
    risks: Int[Tensor, " n"], sizes: Int[Tensor, " n"], rank_cutoff: int, vocabulary: int
) -> Float[Tensor, " n"]:
    """Return the bits that each token can carry: log₂ of |A_t| if safe, of R if suspicious, else of the vocabulary.

    Raises:
        InputError: other classes, a safe token of an empty set, or a cutoff or vocabulary that fits no class.
    """
    safe, suspicious = risks == Risk.SAFE, risks == Risk.SUSPICIOUS
    if len(risks) != len(sizes) or bool(((risks < 0) | (risks > 2)).any()):
        raise InputError("classes are 0, 1, 2, one for each admissible set")
    if bool((sizes[safe] < 1).any()) or (bool(suspicious.any()) and rank_cutoff < 1) or vocabulary < 1:
        raise InputError("a safe token is in its own admissible set; a suspicious one has a rank from 1 to R")
    counts = torch.where(safe, sizes, torch.where(suspicious, rank_cutoff, vocabulary))
    return counts.double().log2()


# ---- the choice of thresholds


@dataclass(frozen=True)
class Evidence:
    """Honest tokens of one request with what a verifier knows about them.

    Attributes:
        logits: the verifier's. gumbel: the request's noise. tokens: what was sent. sampling: of the request.
    """

    logits: Float[Tensor, "n v"]
    gumbel: Float[Tensor, "n v"]
    tokens: Int[Tensor, " n"]
    sampling: Sampling


@dataclass(frozen=True)
class Point:
    """One setting of the warden, measured on honest tokens.

    Attributes:
        noise_sd: σ. threshold: log τ. rank_cutoff: R. tokens: how many were measured.
        false_positive_rate: share of tokens that is dangerous. suspicious: share that is suspicious.
        bits: mean extractable information per token, as the paper has it: every honest token counts by its class. An
            adversary may put more tokens into a class, so this bounds him only together with all classes' rates.
        safe_bits: mean log₂|A_t|, the most that tokens which are all safe can carry.
        quiet_bits: mean log₂|A_t ∪ {rank ≤ R}|, the most that tokens of which none is dangerous can carry.
        share: `bits` of log₂ of the vocabulary.
    """

    noise_sd: float
    threshold: float
    rank_cutoff: int
    tokens: int
    false_positive_rate: float
    suspicious: float
    bits: float
    safe_bits: float
    quiet_bits: float
    share: float


def pareto(
    evidence: Iterable[Evidence],
    noise_sds: Sequence[float],
    thresholds: Sequence[float],
    rank_cutoffs: Sequence[int],
    *,
    samples: int = SAMPLES,
    active: int = ACTIVE,
    seed: int = 0,
) -> list[Point]:
    """Measure the false positive rate on honest tokens and the extractable bits for every (σ, log τ, R) of a grid.

    One pass over the evidence, so that it may be a generator; every σ sees the same draws, scaled.

    Raises:
        InputError: an empty grid or no tokens, several vocabularies, or what `gumbel_positions` refuses.
    """
    if not noise_sds or not thresholds or not rank_cutoffs or min(rank_cutoffs) < 0:
        raise InputError("a grid needs noise, thresholds and rank cutoffs (from 0)")
    grid = [(sd, t, r) for sd in noise_sds for t in thresholds for r in rank_cutoffs]
    sums = torch.zeros(len(grid), 5, dtype=torch.float64)
    generators = [torch.Generator().manual_seed(seed) for _ in noise_sds]
    count = vocabulary = 0
    for request in evidence:
        if vocabulary not in (0, request.logits.shape[1]):
            raise InputError(
                f"vocabularies of {vocabulary} and {request.logits.shape[1]} tokens in one measurement"
            )
        count, vocabulary = count + len(request.tokens), request.logits.shape[1]
        rows: list[tuple[float, ...]] = []
        for sd, generator in zip(noise_sds, generators, strict=True):
            rows += _measure(request, sd, thresholds, rank_cutoffs, samples, active, generator)
        sums += torch.tensor(rows, dtype=torch.float64)
    if not count:
        raise InputError("no honest tokens to measure")
    whole = math.log2(vocabulary)
    points = []
    for (sd, threshold, cutoff), mean in zip(grid, (sums / count).tolist(), strict=True):
        false, suspicious, bits, safe, quiet = mean
        share = bits / whole if whole else 0.0
        points.append(Point(sd, threshold, cutoff, count, false, suspicious, bits, safe, quiet, share))
    return points


def _measure(
    evidence: Evidence,
    noise_sd: float,
    thresholds: Sequence[float],
    rank_cutoffs: Sequence[int],
    samples: int,
    active: int,
    generator: torch.Generator,
) -> list[tuple[float, ...]]:
    """Return sums over one request's tokens, in the order of the grid and of `Point`."""
    positions = gumbel_positions(
        evidence.logits,
        evidence.gumbel,
        evidence.sampling,
        noise_sd=noise_sd,
        generator=generator,
        samples=samples,
        active=active,
    )
    scores, ranks = positions.score(evidence.tokens), logit_rank(evidence.logits, evidence.tokens)
    leading = _leading(evidence.logits, max(rank_cutoffs))
    # Sets only shrink as the threshold rises: score the tokens of the largest once, and compare.
    lowest = positions.admissible(min(thresholds))
    values = positions.logits.new_full(lowest.shape, -math.inf)
    values[lowest] = positions.pairs(*lowest.nonzero(as_tuple=True)).clamp_min(min(thresholds))
    rows: list[tuple[float, ...]] = []
    for threshold in thresholds:
        admitted = values >= threshold
        sizes = admitted.sum(1)
        # A score depends in its last digits on what it is computed with; decide about the honest token here.
        safe = admitted.gather(1, evidence.tokens.long()[:, None])[:, 0]
        settled = torch.where(
            safe, scores.clamp_min(threshold), scores.masked_fill(scores >= threshold, -math.inf)
        )
        for cutoff in rank_cutoffs:
            risks = classify(settled, ranks, threshold, cutoff)
            bits = extractable_bits(risks, sizes, cutoff, evidence.logits.shape[1])
            quiet = _union(admitted, leading[:, :cutoff])
            rows.append((
                float((risks == Risk.DANGEROUS).sum()), float((risks == Risk.SUSPICIOUS).sum()), float(bits.sum()),
                float(_log2(sizes).sum()), float(_log2(quiet).sum()),
            ))  # fmt: skip
    return rows


def _leading(logits: Float[Tensor, "n v"], count: int) -> Int[Tensor, "n r"]:
    """Return the tokens of rank 1 to `count`, ranked as `logit_rank` does."""
    return logits.sort(dim=1, descending=True, stable=True).indices[:, :count]


def _union(admitted: Bool[Tensor, "n v"], leading: Int[Tensor, "n r"]) -> Int[Tensor, " n"]:
    """Return how many tokens are admissible or leading."""
    return admitted.sum(1) + leading.shape[1] - admitted.gather(1, leading).sum(1)


def _log2(sizes: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Return the bits of a choice; a position without admissible tokens carries none."""
    return sizes.clamp_min(1).double().log2()


def frontier(points: Iterable[Point], *, most_suspicious: float = 1.0) -> list[Point]:
    """Return the points that no other beats in both false positive rate and bits, by rising false positive rate.

    Args:
        points: from `pareto`. most_suspicious: leave out settings with a larger share of suspicious tokens (the
            paper's figure 10 takes 0.005).
    """
    best = math.inf
    kept = []
    fit = [p for p in points if p.suspicious <= most_suspicious]
    for point in sorted(fit, key=lambda p: (p.false_positive_rate, p.bits)):
        if point.bits < best:
            kept.append(point)
            best = point.bits
    return kept
