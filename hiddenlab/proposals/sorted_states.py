"""Rank tokens under permuted columns by their mean sorted states behind the attacker's own texts.

Sorting a state's coordinates undoes any permutation of them. Behind one fixed text a token's sorted state predicts
little of its sorted state behind another. The mean over a few texts, compared in L2, predicts much in shallow layers
and something in middle ones, also in addition to a network that was trained on a sample of texts and tokens. No paper
describes this (docs/log/014-states-behind-texts.md has figures).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.models import TruncatedModel
from hiddenlab.proposals.first_token_table import SortedStates, packed, sorted_states
from hiddenlab.types import Progress, silent

LENGTH = 24  # tokens of each text
MOST, FEWEST = 4, 2  # texts
LEAST = 1e-6  # squared distances are no smaller, so that their logarithm is bounded
# Weights that are tried for a distance and for the probe: the best pair on the attacker's own rows is taken.
OF_DISTANCE = (0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0)
OF_PROBE = (0.0, 0.25, 0.5, 0.75, 1.0)
PART = 64  # rows scored at once


@dataclass(frozen=True)
class Contexts:
    """Mean sorted states of every token, and the weights of their distances and of a probe.

    Attributes:
        states: mean over the attacker's own texts. weights: of a probe's log-probability, and of minus the logarithm of
            the squared distance.
    """

    states: SortedStates
    weights: tuple[float, float] = (1.0, 0.0)

    @classmethod
    def make(
        cls, model: TruncatedModel, texts: Sequence[Int[Tensor, " _"]], progress: Progress = silent
    ) -> "Contexts":
        """Run every token behind each text and average the sorted states."""
        total = torch.zeros(model.vocab_size, model.width, device=model.device)
        for i, text in enumerate(texts):
            prefix = model.prefix()
            prefix.extend(text.to(model.device))
            stage = f"collecting states behind texts, {i + 1} of {len(texts)}"
            parts = sorted_states(model, prefix, stage, progress)
            for mean, part in zip(total.split(model.max_pass_tokens), parts, strict=True):
                mean += part / len(texts)
        return cls(SortedStates(*packed(total.split(model.max_pass_tokens))))

    @property
    def useful(self) -> bool:
        """Whether distances have any weight."""
        return self.weights[1] > 0

    def with_probe(
        self, rows: Float[Tensor, "rows d"], log_probs: Float[Tensor, "rows v"]
    ) -> Float[Tensor, "rows v"]:
        """Return log-probabilities by a probe and by these states together."""
        return (self.weights[0] * log_probs + self.weights[1] * self._nearness(rows)).log_softmax(-1)

    def weighed(
        self,
        log_probs: Callable[[Tensor], Tensor],
        rows: Float[Tensor, "rows d"],
        tokens: Int[Tensor, " rows"],
        prior: Float[Tensor, " v"],
    ) -> "Contexts":
        """Return these states with the weights under which some rows' tokens are likeliest.

        Args:
            log_probs: the probe's. prior: logits of token frequencies that neither should learn, as in training the
                probe.
        """
        losses = torch.zeros(len(OF_PROBE), len(OF_DISTANCE), device=rows.device)
        for part, own in zip(rows.split(PART), tokens.split(PART), strict=True):
            said, near = log_probs(part), self._nearness(part)
            for i, of_probe in enumerate(OF_PROBE):
                for j, of_distance in enumerate(OF_DISTANCE):
                    logits = of_probe * said + of_distance * near + prior
                    losses[i, j] += F.cross_entropy(logits, own, reduction="sum")
        i, j = divmod(int(losses.argmin()), len(OF_DISTANCE))
        return replace(self, weights=(OF_PROBE[i], OF_DISTANCE[j]))

    def _nearness(self, rows: Float[Tensor, "rows d"]) -> Float[Tensor, "rows v"]:
        return -self.states.squares(rows).clamp_(min=LEAST).log_()
