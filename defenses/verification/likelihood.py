"""Estimate how likely an honest server would have sent a token with a given seed: FSSL-GM, for Gumbel-max sampling.

Honest servers compute slightly different logits. The score is the natural logarithm of the probability that such noise
makes the sampler choose the token, given the verifier's own logits and the request's random numbers. Rows are positions
of one teacher-forced prefill. Source: Rinberg et al. 2025, sections 4.4 to 6, Algorithm 4; `closed_form` has the scores
that need no Monte Carlo.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from scipy.special import ndtri_exp
from torch import Tensor

from hiddenlab.defenses.verification.sampling import Sampling, kept
from hiddenlab.errors import InputError

SAMPLES = 256
ACTIVE = 32

# Gaussian tails beyond so many standard deviations do not change a double.
_REACH = 9.0
_CHUNK = 1 << 21  # numbers held at once
_ANCHORS = 32


# ---- Gumbel-max: Algorithm 4


@dataclass(frozen=True)
class GumbelPositions:
    """The quantities that Algorithm 4 computes for every position before any token is claimed.

    Made by `gumbel_positions`.

    One row of `draws` serves all tokens of its position, so the score of a claimed token and its place in the
    admissible set never disagree.

    Attributes:
        logits: the verifier's. scores: ℓ + T·g, of filtered tokens too. boundary: of the filter, −∞ without one.
        rivals: the active set, best first. rival_scores: theirs, −∞ where fewer tokens could pass the filter.
        rival_floors: boundary less the rival's logit; noise below it removes the rival.
        draws: the claimed token's noise, highest first. noise_sd: its standard deviation, in logits.
        fallback: column of the best rival that the filter keeps (0 where none is active).
    """

    logits: Float[Tensor, "n v"]
    scores: Float[Tensor, "n v"]
    boundary: Float[Tensor, " n"]
    rivals: Int[Tensor, "n s"]
    rival_scores: Float[Tensor, "n s"]
    rival_floors: Float[Tensor, "n s"]
    draws: Float[Tensor, "n m"]
    noise_sd: float
    fallback: Int[Tensor, " n"]

    def score(self, tokens: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
        """Return the log-likelihood of one claimed token per position (Algorithm 4).

        Raises:
            InputError: the number of tokens is not that of positions, or a token is outside the vocabulary.
        """
        check_tokens(tokens, self.logits)
        return self.pairs(torch.arange(len(tokens), device=tokens.device), tokens.long())

    def pairs(self, rows: Int[Tensor, " p"], tokens: Int[Tensor, " p"]) -> Float[Tensor, " p"]:
        """Return the log-likelihood of any (position, token) pairs, computed in pieces that fit memory."""
        size = max(1, _CHUNK // max(1, self.draws.shape[1] * self.rivals.shape[1]))
        parts = [self._some(r, t) for r, t in zip(rows.split(size), tokens.split(size), strict=True)]
        return torch.cat(parts) if parts else self.logits.new_zeros(0)

    def _some(self, rows: Int[Tensor, " p"], tokens: Int[Tensor, " p"]) -> Float[Tensor, " p"]:
        # A token does not compete with itself; the printed factor for it would halve the likelihood of a certain token.
        products = self._products(rows, self.scores[rows, tokens], tokens)
        passes = self.logits[rows, tokens][:, None] + self.draws[rows] > self.boundary[rows][:, None]
        return products.masked_fill(~passes, -math.inf).logsumexp(1) - math.log(self.draws.shape[1])

    def _products(
        self, rows: Int[Tensor, " p"], own: Float[Tensor, " p"], without: Int[Tensor, " p"]
    ) -> Float[Tensor, "p m"]:
        """Return for each draw the log-probability that all other rivals stay behind or are filtered (line 18)."""
        draws = self.draws[rows]
        # Rivals are sorted; those far below even the lowest draw have a factor of 1.
        within = self.rival_scores[rows] > (own + draws.amin(1) - _REACH * self.noise_sd)[:, None]
        width = int(within.sum(1).max()) if len(rows) else 0
        lead = (own[:, None] + draws)[:, :, None] - self.rival_scores[rows, None, :width]
        lead = torch.maximum(lead, self.rival_floors[rows, None, :width])
        itself = (self.rivals[rows, :width] == without[:, None])[:, None, :]
        return torch.special.log_ndtr(lead / self.noise_sd).masked_fill(itself, 0.0).sum(2)

    def admissible(self, threshold: float) -> Bool[Tensor, "n v"]:
        """Find every token whose log-likelihood is at least `threshold`, without scoring every token.

        A token is out if one rival leads it by more than the largest draw and the threshold's quantile allow, since one
        factor bounds a product of factors. Consider the others whose logit no draw takes below the filter's boundary.
        Their likelihood falls with ℓ + T·g: each factor does, and of two active tokens the worse meets the better. So
        their set ends at one place, which bisection finds. `_border` treats those at the boundary.

        Raises:
            InputError: the threshold is not a negative finite logarithm.
        """
        if not -math.inf < threshold < 0:
            raise InputError(
                f"threshold {threshold}: the natural logarithm of a likelihood, finite and below 0"
            )
        maybe = self._maybe(threshold)
        inside = self.logits + self.draws.amin(1)[:, None] > self.boundary[:, None]
        result = self._leading(maybe & inside, threshold)
        border = maybe & ~inside
        for row in border.any(1).nonzero()[:, 0].tolist():
            tokens = border[row].nonzero()[:, 0]
            result[row, tokens] = self._border(row, tokens, threshold)
        return result

    def choices(self, threshold: float) -> list[tuple[int, ...]]:
        """Return the admissible set of every position as token ids, the likeliest first.

        Raises: see `admissible`.
        """
        rows, tokens = self.admissible(threshold).nonzero(as_tuple=True)
        order = self.pairs(rows, tokens).argsort(descending=True, stable=True)
        sets: list[list[int]] = [[] for _ in range(len(self.logits))]
        for row, token in zip(rows[order].tolist(), tokens[order].tolist(), strict=True):
            sets[row].append(token)
        return [tuple(ids) for ids in sets]

    def _border(self, row: int, tokens: Int[Tensor, " p"], threshold: float) -> Bool[Tensor, " p"]:
        """Decide which tokens reach the threshold where some draws take them below the filter's boundary.

        The draws that count are then the highest k. For a token that is not active, the likelihood rises with its
        score and with k; so the k needed at a few scores decides for nearly all, and only the rest are scored.
        """
        own = self.scores[row, tokens]
        unclear = torch.ones_like(tokens, dtype=torch.bool)
        sure = torch.zeros_like(unclear)
        if len(tokens) > 2 * _ANCHORS:
            anchors = own.sort().values[torch.linspace(0, len(own) - 1, _ANCHORS).long()]
            nobody = torch.full((_ANCHORS,), -1, device=tokens.device)
            curves = self._products(torch.full_like(nobody, row), anchors, nobody).logcumsumexp(1)
            needed = 1 + (curves - math.log(self.draws.shape[1]) < threshold).sum(1)
            passing = (self.logits[row, tokens][:, None] + self.draws[row] > self.boundary[row]).sum(1)
            below = (torch.searchsorted(anchors, own, right=True) - 1).clamp_min(0)
            above = torch.searchsorted(anchors, own).clamp_max(_ANCHORS - 1)
            active = torch.isin(tokens, self.rivals[row])
            sure = (passing >= needed[below]) & ~active
            unclear = ((passing >= needed[above]) | active) & ~sure
        pending = tokens[unclear]
        sure[unclear] = self.pairs(torch.full_like(pending, row), pending) >= threshold
        return sure

    def _maybe(self, threshold: float) -> Bool[Tensor, "n v"]:
        """Find the tokens that the bound by one rival does not rule out."""
        pick = self.fallback[:, None]
        rival, floor = self.rival_scores.gather(1, pick), self.rival_floors.gather(1, pick)
        top = self.draws.amax(1)[:, None]
        least = self.noise_sd * float(ndtri_exp(threshold))
        slack = 1e-9 * (1 + abs(least))  # rounding must not drop a token that is exactly at the threshold
        maybe = (self.scores >= rival - top + least - slack) | (floor >= least - slack)
        maybe.scatter_(1, self.rivals.gather(1, pick), True)
        return maybe & (self.logits + top > self.boundary[:, None])

    def _leading(self, among: Bool[Tensor, "n v"], threshold: float) -> Bool[Tensor, "n v"]:
        """Find the longest run of best-scored tokens that reach the threshold, by bisection in all rows at once."""
        high = among.sum(1)
        result = torch.zeros_like(among)
        most = int(high.max()) if len(high) else 0
        if not most:
            return result
        # Among equal scores (greedy sampling of rounded logits) the active ones come first: they have one rival less.
        ahead = torch.nextafter(self.scores.gather(1, self.rivals), self.scores.new_tensor(math.inf))
        keys = self.scores.scatter(1, self.rivals, ahead).masked_fill(~among, -math.inf)
        order = keys.topk(most, dim=1).indices
        low = torch.zeros_like(high)
        while bool((open_rows := low < high).any()):
            rows = open_rows.nonzero()[:, 0]
            middle = (low + high + 1)[rows] // 2
            good = self.pairs(rows, order[rows, middle - 1]) >= threshold
            low[rows[good]] = middle[good]
            high[rows[~good]] = middle[~good] - 1
        run = torch.arange(most, device=low.device) < low[:, None]
        return result.scatter_(1, order, run)


def gumbel_positions(
    logits: Float[Tensor, "n v"],
    gumbel: Float[Tensor, "n v"],
    sampling: Sampling,
    *,
    noise_sd: float,
    generator: torch.Generator,
    samples: int = SAMPLES,
    active: int = ACTIVE,
) -> GumbelPositions:
    """Compute lines 4 to 8 of Algorithm 4 for all positions, and the draws of its loop.

    This differs from the printed algorithm in two points. The print makes the boundary the *lowest* logit that fails
    the filter, which would filter next to nothing. Here it is midway between the lowest that passes and the highest
    that fails: at either of the two, noise would move that token across half of the time, however far the other is. And
    the active set holds only tokens that noise can bring past the boundary. Others have a factor of 1; in the set, they
    would displace the sampler's real winner under a narrow filter.

    Args:
        logits: the verifier's, before temperature and filters.
        gumbel: the request's noise, the same shape.
        sampling: of the request, by Gumbel-max or greedy.
        noise_sd: σ, standard deviation of the noise on logits.
        generator: of the draws, on the CPU.
        samples: M, draws per position.
        active: s, rivals per position.

    Raises:
        InputError: the sampler is another one, shapes or parameters do not fit, or logits are NaN or +∞.
    """
    if sampling.method == "ipt":
        raise InputError(
            "FSSL-GM is for Gumbel-max sampling; for the inverse probability transform see fssl_ipt"
        )
    if logits.shape != gumbel.shape or not logits.shape[1]:
        raise InputError(f"noise of shape {tuple(gumbel.shape)} for logits of shape {tuple(logits.shape)}")
    if not 0 < noise_sd < math.inf or samples < 1 or active < 1:
        raise InputError(f"noise_sd {noise_sd}, samples {samples}, active {active}: all above 0")
    if bool(logits.isnan().any()) or bool((logits == math.inf).any()) or not bool(gumbel.isfinite().all()):
        raise InputError("logits or Gumbel noise that are no numbers")
    keep = kept(logits, sampling)
    wide = logits.double()
    scores = wide + (0.0 if sampling.greedy else sampling.temperature) * gumbel.double()
    # −∞ if the filter removes nothing, or only tokens of probability 0.
    boundary = (wide.masked_fill(keep, -math.inf).amax(1) + wide.masked_fill(~keep, math.inf).amin(1)) / 2
    boundary = boundary.nan_to_num(nan=-math.inf, neginf=-math.inf)
    able = wide > (boundary - _REACH * noise_sd)[:, None]
    rival_scores, rivals = scores.masked_fill(~able, -math.inf).topk(min(active, logits.shape[1]), dim=1)
    real = rival_scores > -math.inf
    floors = torch.where(real, boundary[:, None] - wide.gather(1, rivals), math.inf)
    draws = torch.randn((len(logits), samples), dtype=torch.float64, generator=generator) * noise_sd
    draws = draws.sort(dim=1, descending=True).values
    return GumbelPositions(
        wide, scores, boundary, rivals, rival_scores, floors, draws.to(logits.device), float(noise_sd),
        (keep.gather(1, rivals) & real).int().argmax(1),
    )  # fmt: skip


def fssl_gm(
    logits: Float[Tensor, "n v"],
    gumbel: Float[Tensor, "n v"],
    tokens: Int[Tensor, " n"],
    sampling: Sampling,
    *,
    noise_sd: float,
    generator: torch.Generator,
    samples: int = SAMPLES,
    active: int = ACTIVE,
) -> Float[Tensor, " n"]:
    """Return the FSSL-GM score of claimed tokens: log of Algorithm 4's estimate, −∞ where it is 0.

    Args and Raises: see `gumbel_positions` and `GumbelPositions.score`.
    """
    positions = gumbel_positions(
        logits, gumbel, sampling, noise_sd=noise_sd, generator=generator, samples=samples, active=active
    )
    return positions.score(tokens)


def admissible(
    logits: Float[Tensor, "n v"],
    gumbel: Float[Tensor, "n v"],
    sampling: Sampling,
    threshold: float,
    *,
    noise_sd: float,
    generator: torch.Generator,
    samples: int = SAMPLES,
    active: int = ACTIVE,
) -> Bool[Tensor, "n v"]:
    """Find the admissible set A_t = {i : FSSL-GM_t(i) ≥ τ} of every position (section 6); `threshold` is log τ.

    Args and Raises: see `gumbel_positions` and `GumbelPositions.admissible`.
    """
    positions = gumbel_positions(
        logits, gumbel, sampling, noise_sd=noise_sd, generator=generator, samples=samples, active=active
    )
    return positions.admissible(threshold)


def check_tokens(tokens: Int[Tensor, " k"], logits: Float[Tensor, "n v"]) -> None:
    """Check that there is one token per position, and that it is in the vocabulary.

    Raises:
        InputError: otherwise.
    """
    n, v = logits.shape
    if len(tokens) != n:
        raise InputError(f"{len(tokens)} tokens for {n} positions")
    if n and not 0 <= int(tokens.min()) <= int(tokens.max()) < v:
        raise InputError(f"tokens from {int(tokens.min())} to {int(tokens.max())} for a vocabulary of {v}")
