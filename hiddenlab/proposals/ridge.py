"""Rank tokens for a state by a ridge regression, whose well predicted directions count for more.

The regression maps a state to its token's whitened embedding. Some directions of the embedding can be read from a state
far better than others. So cosines are taken after directions were weighted by a power of the inverse covariance of the
errors (docs/log/039-closed-form-probe.md has figures; no paper describes it).
"""

import torch
from jaxtyping import Float
from torch import Tensor

from hiddenlab.proposals.probe import ridge_expert

RIDGE = 100.0
POWER = 1.5  # of the inverse error covariance
SMALLEST = 1e-5  # of the largest variance of an error: smaller ones count as this


class RidgeReader:
    """Rank all tokens for rows of one place.

    Args:
        rows, targets: states of known tokens, and the whitened embeddings of these.
    """

    def __init__(self, rows: Float[Tensor, "rows d"], targets: Float[Tensor, "rows e"]) -> None:
        self._expert = ridge_expert(rows, targets, RIDGE)
        weights = self._expert.parameters["linear"]
        errors = errors_without_own(self._expert.features(rows), targets, weights)
        metric = metric_of(errors, POWER)
        self._square = metric @ metric.T
        self._weights = weights @ self._square
        self._lengths: Tensor | None = None

    def scores(self, rows: Float[Tensor, "rows d"], table: Float[Tensor, "v e"]) -> Float[Tensor, "rows v"]:
        """Return each token's weighted cosine with the prediction, times the prediction's length.

        Args:
            table: the whitened embeddings of all tokens, the same in every call.
        """
        if self._lengths is None:
            self._lengths = ((table @ self._square) * table).sum(1).clamp(min=1e-30).sqrt()
        return self._expert.features(rows) @ self._weights @ table.T / self._lengths


def errors_without_own(
    features: Float[Tensor, "rows d"], targets: Float[Tensor, "rows e"], weights: Float[Tensor, "d e"]
) -> Float[Tensor, "rows e"]:
    """Return by how much a ridge regression misses each of its own rows when that row is left out.

    Args:
        weights: of the regression on all rows.
    """
    gram = features.T @ features + RIDGE * torch.eye(features.shape[1], device=features.device)
    # The share that a row has in its own prediction makes its error smaller.
    share = (features * torch.linalg.solve(gram, features.T).T).sum(1, keepdim=True).clamp(max=0.99)
    return (targets - features @ weights) / (1 - share)


def metric_of(errors: Float[Tensor, "rows e"], power: float) -> Float[Tensor, "e e"]:
    """Return a matrix that weights directions by a power of the inverse covariance of errors."""
    variances, directions = torch.linalg.eigh(errors.T @ errors)
    return directions * variances.clamp(min=SMALLEST * float(variances.max())).pow(-power / 2)
