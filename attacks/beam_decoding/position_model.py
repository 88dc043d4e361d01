"""Predict the position of each row of a shuffled prompt from the row alone.

A regression predicts a position (its logarithm) from a row. Regression shrinks to the mean on uninformative rows: used
directly, it would place every row in the middle and penalise the right row at the first places, which matter most. So a
second model, a multinomial logit over ranges of positions, learns on other texts how likely each position is given the
prediction's powers and the row itself.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from hiddenlab.channels import Channel
from hiddenlab.matching.distance import Matcher
from hiddenlab.models import TruncatedModel
from hiddenlab.proposals.corpus import Corpus
from hiddenlab.proposals.probe import Expert
from hiddenlab.utils.random import generator

TOKENS, WINDOW = 12_000, 64  # of the attacker's own texts, half of them for either model
RIDGE = 300.0  # penalty of the regression
# Where ranges of positions begin; the last has no end.
EDGES = (0, 1, 2, 3, 4, 5, 6, 8, 10, 13, 17, 22, 28, 36, 46)
POWERS = 3  # powers of the regression's prediction
POWER_SCALE = 5.0  # scale of these powers: they are penalised less than the row's coordinates
LOGIT_PENALTY = 1e-3  # penalty of the logit's weights
STEPS = 100  # of the optimiser


@dataclass(frozen=True)
class PositionModel:
    """The trained model of row positions.

    Attributes:
        expert: standardises rows. slope, level: of the regression on the logarithm of one plus the position.
        middle, spread: mean and standard deviation of the prediction's powers. weights: of the logit, with its
            intercepts last. usual: logarithm of each range's count in the training rows.
    """

    expert: Expert
    slope: Float[Tensor, " d"]
    level: float
    middle: Float[Tensor, " powers"]
    spread: Float[Tensor, " powers"]
    weights: Float[Tensor, "features ranges"]
    usual: Float[Tensor, " ranges"]

    def __call__(self, rows: Float[Tensor, "rows d"], length: int) -> Float[Tensor, "rows length"]:
        """Return the log-likelihood of each position of a prompt, relative to all positions being alike."""
        coordinates = self.expert.features(rows)
        powers = _powers(coordinates @ self.slope + self.level)
        logits = _features(coordinates, powers, self.middle, self.spread) @ self.weights
        # The frequencies of other texts are removed: those texts had another length.
        told = (logits - self.usual)[:, _ranges(length, rows.device)]
        return told.log_softmax(1) + math.log(length)

    @classmethod
    def learn(cls, rows: Float[Tensor, "rows d"], places: Float[Tensor, " rows"]) -> "PositionModel":
        """Learn from rows and their positions: the regression on the first half, its calibration on the other."""
        expert = Expert.of(rows)
        coordinates, target, half = expert.features(rows), places.log1p(), len(rows) // 2
        known, level = coordinates[:half], float(target[:half].mean())
        gram = known.T @ known + RIDGE * torch.eye(known.shape[1], device=rows.device)
        slope = torch.linalg.solve(gram, known.T @ (target[:half] - level))
        powers = _powers(coordinates[half:] @ slope + level)
        middle, spread = powers.mean(0), powers.std(0).clamp(min=1e-6)
        features = _features(coordinates[half:], powers, middle, spread)
        ranges = _ranges(1 + int(places.max()), rows.device)[places[half:].long()]
        usual = torch.bincount(ranges, minlength=len(EDGES)).clamp(min=1).log()
        return cls(expert, slope, level, middle, spread, _logit(features, ranges), usual)


def learn_position_model(
    model: TruncatedModel, channel: Channel, matcher: Matcher, seed: int
) -> PositionModel:
    """Learn a position model from the attacker's own texts, released as the provider does."""
    corpus = Corpus(model, seed + 3)
    windows = [corpus.text_window(WINDOW).tolist() for _ in range(TOKENS // WINDOW)]
    released = channel.release_batch(model, windows, generator(seed, "joint", "clock"))
    rows = torch.cat([matcher.prepare(observation.states.to(model.device)) for observation, _ in released])
    orders = [
        range(len(w)) if s.row_order is None else s.row_order
        for w, (_, s) in zip(windows, released, strict=True)
    ]
    places = torch.tensor([place for order in orders for place in order], device=model.device).float()
    return PositionModel.learn(rows, places)


def _powers(reading: Float[Tensor, " rows"]) -> Float[Tensor, "rows powers"]:
    return torch.stack([reading**k for k in range(1, 1 + POWERS)], 1)


def _features(
    coordinates: Float[Tensor, "rows d"],
    powers: Float[Tensor, "rows powers"],
    middle: Float[Tensor, " powers"],
    spread: Float[Tensor, " powers"],
) -> Float[Tensor, "rows features"]:
    unit = coordinates / coordinates.shape[1] ** 0.5
    return torch.cat([POWER_SCALE * (powers - middle) / spread, unit, torch.ones_like(powers[:, :1])], 1)


def _ranges(length: int, device: torch.device) -> Int[Tensor, " length"]:
    """Return the range index of each position of a prompt."""
    edges = torch.tensor(EDGES, device=device)
    return torch.bucketize(torch.arange(length, device=device), edges, right=True) - 1


def _logit(features: Tensor, ranges: Tensor) -> Float[Tensor, "features ranges"]:
    """Fit the weights under which the ranges are likeliest."""
    with torch.inference_mode(False), torch.enable_grad():
        known, right = features.clone(), ranges.clone()
        weights = torch.zeros(known.shape[1], len(EDGES), device=known.device, requires_grad=True)
        optimiser = torch.optim.LBFGS([weights], max_iter=STEPS, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            optimiser.zero_grad()
            value = cross_entropy(known @ weights, right) + LOGIT_PENALTY * weights[:-1].square().sum()
            value.backward()
            return value

        optimiser.step(loss)
    return weights.detach().clone()
