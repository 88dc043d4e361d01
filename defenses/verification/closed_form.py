"""Score claimed tokens in closed form: FSSL-IPT, the pairwise shortcut for Gumbel-max, and the logit rank.

All likelihoods are natural logarithms. Sources: Rinberg et al. 2025, Algorithm 3 and section 6.1; Karvonen et al. 2025
(DiFR), appendices A and B.2.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.defenses.verification.likelihood import check_tokens
from hiddenlab.defenses.verification.sampling import Sampling, kept
from hiddenlab.errors import InputError

FLOOR = 1e-12  # ε of Algorithm 3
NoiseOn = Literal["both", "one"]


# ---- the pairwise shortcut


def margins(
    logits: Float[Tensor, "n v"], gumbel: Float[Tensor, "n v"], sampling: Sampling
) -> Float[Tensor, "n v"]:
    """Return every token's distance Δ ≥ 0 in ℓ + T·g from the sampler's choice; infinite for filtered tokens."""
    scores = logits.double() + (0.0 if sampling.greedy else sampling.temperature) * gumbel.double()
    scores = scores.masked_fill(~kept(logits, sampling), -math.inf)
    return scores.amax(1, keepdim=True) - scores


def pairwise(
    margin: Float[Tensor, "*shape"], noise_sd: float, *, noise_on: NoiseOn = "both"
) -> Float[Tensor, "*shape"]:
    """Return the log-probability that noise moves a token above the verifier's choice, ignoring all other tokens.

    Args:
        margin: Δ, how far the token's ℓ + T·g is below the choice's.
        noise_sd: σ, of one logit.
        noise_on: "both" logits, log Φ(−Δ/(√2·σ)), which matches the DiFR paper's tables 7 and 8; or "one",
            log Φ(−Δ/σ), which is the paper's printed formula.

    Raises:
        InputError: no such option, or noise that is not above 0.
    """
    if noise_on not in get_args(NoiseOn):
        raise InputError(f"noise_on {noise_on!r}: one of {', '.join(get_args(NoiseOn))}")
    if not 0 < noise_sd < math.inf:
        raise InputError(f"noise_sd {noise_sd}: must be above 0")
    return torch.special.log_ndtr(
        -margin.double() / (noise_sd * (math.sqrt(2) if noise_on == "both" else 1.0))
    )


# ---- inverse probability transform: Algorithm 3


def fssl_ipt(
    probability: Float[Tensor, "n v"],
    uniform: Float[Tensor, " n"],
    *,
    noise_sd: float,
    floor: float = FLOOR,
) -> Float[Tensor, "n v"]:
    """Return the FSSL-IPT score of every token (Algorithm 3).

    log(Φ((b−u)/σ) − Φ((a−u)/σ) + ε), where [a, b] is the token's interval of the cumulative distribution.

    Args:
        probability: what the sampler draws from, after temperature and filters.
        uniform: the request's numbers u.
        noise_sd: σ, on the scale of probabilities.
        floor: ε; no score is below its logarithm.

    Raises:
        InputError: a parameter is not above 0, the numbers of rows differ, or rows are no distributions.
    """
    if not 0 < noise_sd < math.inf or not 0 < floor < 1:
        raise InputError(f"noise_sd {noise_sd} must be above 0, floor {floor} between 0 and 1")
    if len(uniform) != len(probability):
        raise InputError(f"{len(uniform)} uniform numbers for {len(probability)} positions")
    wide = probability.double()
    if bool(((wide < 0) | ((wide.sum(1) - 1).abs() > 1e-3)[:, None] | wide.isnan()).any()):
        raise InputError("rows of probabilities must be non-negative and sum to 1")
    upper = wide.cumsum(1)
    lower = torch.cat((torch.zeros_like(upper[:, :1]), upper[:, :-1]), 1)
    return ipt_interval(lower, upper, uniform[:, None], noise_sd=noise_sd, floor=floor)


def ipt_interval(
    lower: Float[Tensor, "*shape"],
    upper: Float[Tensor, "*shape"],
    uniform: Float[Tensor, "*_"],
    *,
    noise_sd: float,
    floor: float = FLOOR,
) -> Float[Tensor, "*shape"]:
    """Return the FSSL-IPT score of intervals of the cumulative distribution (lines 7 to 9 of Algorithm 3)."""
    a, b = ((edge.double() - uniform.double()) / noise_sd for edge in (lower, upper))
    # Above the mean both values are near 1; mirroring them keeps the digits of their difference.
    flip = a > 0
    a, b = torch.where(flip, -b, a), torch.where(flip, -a, b)
    mass = torch.special.ndtr(b) - torch.special.ndtr(a)
    return (mass.clamp_min(0.0) + floor).log()


# ---- rank


def logit_rank(logits: Float[Tensor, "n v"], tokens: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
    """Return the rank of each claimed token by raw logit, before temperature and filters; the highest has rank 1.

    Equal logits are ranked by id, so that exactly R tokens have a rank of at most R, as log₂R bits suppose. (The
    paper's figure 9 counts from 0, its cutoff from 1.)

    Raises:
        InputError: another number of tokens than positions, or a token outside the vocabulary.
    """
    check_tokens(tokens, logits)
    own = logits.gather(1, tokens.long()[:, None])
    ids = torch.arange(logits.shape[1], device=logits.device)
    return 1 + ((logits > own) | ((logits == own) & (ids < tokens[:, None]))).sum(1)
