"""Predict which of two rows of a shuffled prompt stood before the other, from the two rows alone.

A row changes with its position, and attention leaves traces of earlier tokens in it. Where noise hides the position of
a single row, two rows still show which is the later one, and all pairs of a prompt together show the order of its
parts. The log-odds of a pair are a difference of one number a row plus an antisymmetric form of low rank,

    odds(i before j) = u(j) - u(i) + a(j)·b(i) - a(i)·b(j)

trained on all pairs of rows of the attacker's own texts, released as by the provider. The parameters with the lowest
loss on held-out texts are kept.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from hiddenlab.proposals.probe import Expert
from hiddenlab.types import Progress, silent

LENGTH = 64  # tokens of each training text
SURE = 5.0  # log-odds of a pair are no larger, so that no single pair decides an order


@dataclass(frozen=True)
class PairwiseOrderSettings:
    """The training settings, part of the cache key.

    Attributes:
        length: of the texts. rank: of the antisymmetric form. steps, batch (texts), learning_rate, decay: of the
            optimisation. kept_back: share of the texts that are held out. every: steps between evaluations on them.
        sorted_states: rows are sorted coordinates (columns permuted). seed: of texts, batches and initialisation.
    """

    length: int = LENGTH
    rank: int = 64
    steps: int = 1000
    batch: int = 32
    learning_rate: float = 2e-3
    decay: float = 1.0
    kept_back: float = 0.1
    every: int = 50
    sorted_states: bool = False
    seed: int = 0


def pairwise_order_settings(sorted_states: bool) -> PairwiseOrderSettings:
    """Return the settings that work best (docs/log/022-pairs-of-rows.md)."""
    return PairwiseOrderSettings(sorted_states=sorted_states)


@dataclass
class PairwiseOrder:
    """Log-odds of the order of two rows.

    Attributes:
        expert: standardises rows. parameters: ``slope`` is u; ``after`` and ``before`` give a and b, as maps from a
            standardised row.
    """

    expert: Expert
    parameters: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, rows: Float[Tensor, "n d"]) -> Float[Tensor, "n n"]:
        """Return the log-odds that each row (first axis) stood before each of the others (second axis).

        Pairs that share a row are not independent: in prompts longer than the training texts each pair has less weight.
        """
        share = min(1.0, LENGTH / max(1, len(rows)))
        return share * self._odds(self.expert.features(rows.float())).clamp(-SURE, SURE)

    def _odds(self, features: Float[Tensor, "*texts n d"]) -> Float[Tensor, "*texts n n"]:
        p = self.parameters
        single = features @ p["slope"]
        pair = (features @ p["before"]) @ (features @ p["after"]).transpose(-1, -2)
        return (single[..., None, :] - single[..., :, None]) + pair - pair.transpose(-1, -2)

    def tensors(self) -> dict[str, Tensor]:
        """Return everything to save, by name."""
        return {"mean": self.expert.mean, "scale": self.expert.scale, **self.parameters}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> "PairwiseOrder":
        """Rebuild from the result of ``tensors``."""
        rest = dict(tensors)
        return cls(Expert(rest.pop("mean"), rest.pop("scale")), rest)

    @classmethod
    def learn(
        cls,
        texts: Sequence[Float[Tensor, "n d"]],
        settings: PairwiseOrderSettings,
        progress: Progress = silent,
    ) -> "PairwiseOrder":
        """Learn from the rows of texts of one length, in their order."""
        generator = torch.Generator().manual_seed(settings.seed)
        with torch.inference_mode(False), torch.enable_grad():
            rows = torch.stack(list(texts)).float()
            flat = rows.flatten(0, 1)
            expert = Expert.of(flat)
            features = expert.features(flat).view_as(rows)
            width = rows.shape[2]

            def drawn(*shape: int) -> Tensor:
                return (torch.randn(*shape, generator=generator) * scale).to(rows.device).requires_grad_()

            # Features have the length sqrt(d): the odds of all pairs start at a small share of a nat.
            scale = 0.15 / math.sqrt(width) / settings.rank**0.25
            own = cls(expert, {"slope": torch.zeros(width, device=rows.device, requires_grad=True)})
            own.parameters |= {name: drawn(width, settings.rank) for name in ("before", "after")}
            optimiser = torch.optim.AdamW(
                own.parameters.values(), lr=settings.learning_rate, weight_decay=settings.decay
            )
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, settings.steps)
            kept_back = max(1, int(settings.kept_back * len(rows)))
            validation, training = features[:kept_back], features[kept_back:]
            with torch.no_grad():
                best, least = own._copied(), own._loss(validation)
            for step in range(settings.steps):
                pick = torch.randint(0, len(training), (settings.batch,), generator=generator).to(rows.device)
                optimiser.zero_grad()
                own._loss(training[pick]).backward()  # type: ignore[no-untyped-call]
                optimiser.step()
                schedule.step()
                if (step + 1) % settings.every == 0:
                    with torch.no_grad():
                        loss = own._loss(validation)
                    if loss < least:
                        best, least = own._copied(), loss
                    progress("learning which row comes first", step + 1, settings.steps)
        return best

    def _loss(self, features: Float[Tensor, "texts n d"]) -> Float[Tensor, ""]:
        """Return the mean negative log-likelihood of the true order of a pair."""
        n = features.shape[1]
        first, second = torch.triu_indices(n, n, 1, device=features.device)
        return F.softplus(-self._odds(features)[:, first, second]).mean()

    def _copied(self) -> "PairwiseOrder":
        return PairwiseOrder(self.expert, {name: p.detach().clone() for name, p in self.parameters.items()})
