"""Estimate the missing tokens of many places at once by expectation propagation.

Where dozens of tokens are missing, a beam over the places (``sum_search``) loses the right one within a few: the sum of
the places not chosen yet is too far from a normal distribution. Here no place is decided for good. Each holds a list of
tokens and their probabilities. Mean and covariance of its contribution replace those of a random token when other
places are scored, and are taken out again when its own tokens are (expectation propagation with normal messages: Minka,
2001; in multiuser detection, soft interference cancellation). Likelihoods start flat, since the normal approximation is
overconfident, and sharpen from sweep to sweep. Lists are rebuilt for the places that fit least.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.attacks.missing_tokens.sum_search import JITTER, Search, Sums, Whitening
from hiddenlab.types import Progress, silent

SWEEPS, REBUILD_INTERVAL = 10, 3  # sweeps over the places, and sweeps between two rebuilds of lists
HEAT = 16.0  # by which log-likelihoods are divided at first; 1 in the end
# Weight of a random token's covariance in that of each place, first and last.
FIRST_WEIGHT, LAST_WEIGHT = 0.2, 1e-4
DAMPING = 0.3  # weight of the previous sweep's probabilities
LIST_SIZE, KEPT = 512, 64  # tokens of a list, and how many of the likeliest are kept when it is rebuilt
MIN_PROBABILITY = 1e-9  # smallest probability of tokens that count
DIRECTIONS = 256  # directions along which the vocabulary is scored
# Residual that sums may leave, as share of a row, first and last.
FIRST_TOLERANCE, LAST_TOLERANCE = 3e-3, 3e-4
REBUILD_DIVISOR = 3  # one place of so many gets a new list: those that fit least


@dataclass
class _Belief:
    """The tokens that a place may have, with their probabilities, contributions and weights."""

    tokens: Int[Tensor, " c"]
    share: Float[Tensor, " c"]
    parts: Float[Tensor, "c y"]
    weights: Float[Tensor, "c h"]

    def mean(self) -> Float[Tensor, " y"]:
        return self.share @ self.parts.double()

    def spread(self) -> Float[Tensor, "c y"]:
        """Return the weighted deviations of the contributions; their product with themselves is the covariance."""
        some = self.share > MIN_PROBABILITY
        return (self.parts[some].double() - self.mean()) * self.share[some].sqrt()[:, None]


class Beliefs:
    """The estimated distribution of tokens at all places of a search."""

    def __init__(self, search: Search, progress: Progress = silent) -> None:
        self.progress = progress
        self.search, self.places = search, list(search.places)
        self.any = search.covariance(self.places)  # of what any tokens contribute
        self.held: dict[int, _Belief] = {}
        self.misfit = dict.fromkeys(self.places, 0.0)

    def settle(self) -> Sums:
        """Return the sums of the likeliest tokens, those that explain the rows best first, in order of the places."""
        self._list(self.places, HEAT, FIRST_WEIGHT, FIRST_TOLERANCE)
        sums = self._likeliest()
        for sweep in range(1, SWEEPS + 1):
            self.progress("weighing missing tokens", sweep - 1, SWEEPS)
            done = (sweep - 1) / (SWEEPS - 1)
            heat, random_weight = HEAT ** (1 - done), FIRST_WEIGHT * (LAST_WEIGHT / FIRST_WEIGHT) ** done
            tolerance = FIRST_TOLERANCE * (LAST_TOLERANCE / FIRST_TOLERANCE) ** done
            self._weigh(heat, random_weight, tolerance)
            if sweep % REBUILD_INTERVAL == 0:
                sums = self._likeliest()
                if self.search.explained(sums):
                    break
                least = sorted(self.places, key=self.misfit.__getitem__, reverse=True)
                self._list(least[: -(-len(least) // REBUILD_DIVISOR)], heat, random_weight, tolerance)
        self.progress("weighing missing tokens", SWEEPS, SWEEPS)
        return sums if self.search.explained(sums) else self._likeliest()

    def _likeliest(self) -> Sums:
        sums = self.search.initial
        for place in self.places:
            belief = self.held[place]
            sums = self.search.with_token(sums, place, belief.tokens[belief.share.argmax()][None])
        return self.search.rearranged(sums)

    def _missed(self, random_weight: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the estimate of the sum of all places: residual, its covariance, mass, and the mass' covariance."""
        search = self.search
        left, mass = search.initial.left[0].clone(), search.initial.mass[0].clone()
        covariance, spread = random_weight * self.any, torch.zeros(len(mass), len(mass)).to(self.any)
        for place in self.places:
            moments, belief = search.moments[place], self.held.get(place)
            if belief is None:
                left -= moments.part
                mass += moments.weight
                spread += moments.weights
                continue
            left -= belief.mean()
            rows = belief.spread()
            covariance.addmm_(rows.T, rows, alpha=1 - random_weight)
            usual = belief.share @ belief.weights.double()
            mass += usual
            off = (belief.weights.double() - usual) * belief.share.sqrt()[:, None]
            spread += off.T @ off + random_weight * moments.weights
        return left, covariance, mass, spread

    def _list(self, places: Sequence[int], heat: float, random_weight: float, tolerance: float) -> None:
        """Rebuild the lists of some places from the whole vocabulary, given the estimates of all others."""
        search = self.search
        left, covariance, mass, spread = self._missed(random_weight if self.held else 1.0)
        for i, place in enumerate(places):
            self.progress("listing missing tokens", i, len(places))
            belief, moments = self.held.get(place), search.moments[place]
            if belief is None:
                own, mean = search.varies(place), moments.part
            else:
                rows, mean = belief.spread(), belief.mean()
                own = (1 - random_weight) * rows.T @ rows
            whitened = search.whitening(mass, covariance - own, tolerance, spread)
            directions = search.most_telling(whitened, [place], DIRECTIONS)
            target = ((left + mean) @ directions.T).float()
            table = search.along(place, directions)
            score = search.prior.float() + table @ target - table.square().sum(1) / 2
            tokens = score.topk(min(LIST_SIZE, search.size)).indices
            if belief is not None:
                kept = belief.tokens[belief.share.topk(min(KEPT, len(belief.tokens))).indices]
                tokens = torch.cat([kept, tokens]).unique()
            self.held[place] = _Belief(
                tokens, (score[tokens] / heat).double().softmax(0),
                search.parts(place, tokens), search.weights(place, tokens),
            )  # fmt: skip
        self.progress("listing missing tokens", len(places), len(places))

    def _weigh(self, heat: float, random_weight: float, tolerance: float) -> None:
        """Update the probabilities of all places' tokens, each given the estimates of the others."""
        left, covariance, mass, spread = self._missed(random_weight)
        whitened = self.search.whitening(mass, covariance, tolerance, spread)
        missed = whitened(left[None])[0]
        for place, belief in self.held.items():
            score, self.misfit[place] = self._log_likelihoods(belief, whitened, missed, 1 - random_weight)
            share = ((self.search.prior[belief.tokens] + score) / heat).softmax(0)
            belief.share = DAMPING * belief.share + (1 - DAMPING) * share

    def _log_likelihoods(
        self, belief: _Belief, whitened: Whitening, missed: Float[Tensor, " x"], counted: float
    ) -> tuple[Float[Tensor, " c"], float]:
        """Return the log-likelihoods of a place's tokens, up to a constant, and the misfit of the best.

        Args:
            whitened: by the covariance of all places, this one included. missed: whitened residual of the sum.
            counted: share of the place's own covariance that is in it, and is taken out (Woodbury's identity).
        """
        parts = whitened(belief.parts.double() - belief.mean())
        inner, along = parts @ parts.T, parts @ missed
        root = (belief.share * counted * (belief.share > MIN_PROBABILITY)).sqrt()
        rest = torch.eye(len(root)).to(inner) - root[:, None] * inner * root
        rest.diagonal().add_(JITTER)
        own = root[:, None] * (inner - along[:, None])
        lower = torch.linalg.cholesky(rest)
        taken = torch.linalg.solve_triangular(lower, own, upper=False).square().sum(0)
        score = -(inner.diagonal() - 2 * along + taken) / 2
        return score, -float(score.max())
