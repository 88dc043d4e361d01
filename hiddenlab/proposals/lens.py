"""Say which token comes next by a state of an earlier layer: the tuned lens (Belrose et al., 2023, arXiv 2303.08112).

A regression maps the state to what the model has behind its last norm, and the model's own head names the token.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.proposals.probe import Expert, ridge_expert
from hiddenlab.proposals.ridge import RIDGE, likeliest_scale


@dataclass(frozen=True)
class TunedLens:
    """Predicts the next token from a state.

    Attributes:
        expert: the regression to the states behind the last norm, less their mean. mean: theirs. head: of the model.
        scale: the inverse temperature of scores. right: share of held-out rows whose next token scores best.
    """

    expert: Expert
    mean: Float[Tensor, " e"]
    head: Float[Tensor, "v e"]
    scale: float = 1.0
    right: float = 0.0

    @classmethod
    def fit(
        cls,
        rows: Float[Tensor, "rows d"],
        finals: Float[Tensor, "rows e"],
        head: Float[Tensor, "v e"],
        held: Float[Tensor, "some d"],
        following: Int[Tensor, " some"],
    ) -> "TunedLens":
        """Compute the regression, and the temperature that is likeliest on held-out rows.

        Args:
            rows, finals: states of the same positions, at the earlier layer and behind the last norm.
            head: the output embedding of each token. held, following: held-out rows, and the token behind each.
        """
        mean = finals.mean(0)
        bare = cls(ridge_expert(rows, finals - mean, RIDGE), mean, head)
        scores = bare.scores(held)
        unit = float(scores.abs().max().clamp(min=1e-30))
        right = float((scores.argmax(1) == following).float().mean())
        return cls(bare.expert, mean, head, likeliest_scale(scores / unit, following) / unit, right)

    def scores(self, rows: Float[Tensor, "rows d"]) -> Float[Tensor, "rows v"]:
        """Return each token's logit, before the temperature."""
        return (self.expert.features(rows) @ self.expert.parameters["linear"] + self.mean) @ self.head.T

    def log_probs(self, rows: Float[Tensor, "rows d"]) -> Float[Tensor, "rows v"]:
        """Return the log-probability of each token behind each row."""
        return torch.log_softmax(self.scores(rows) * self.scale, -1)
