"""Fit a probe in closed form, from few states, and let it take in more at any time.

A ridge regression maps a state to its token's whitened embedding. Some directions of the embedding can be read from a
state far better than others. So cosines are taken after the directions were weighted by a power of the inverse
covariance of the errors: on encyclopedia text at layer 11 of the built-in model this lifts the share of tokens that
rank first from 0.65 to 0.87, with 4,800 states (docs/log/039-closed-form-probe.md; no paper describes it).

All that the regression needs are sums over states. Rows of tokens that an attack has verified are added to them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hiddenlab.proposals.probe import (
    Expert,
    Probe,
    ProbeSettings,
    calibrate,
    norm_border,
    whitened_table,
    whitening,
)

RIDGE = 100.0
POWERS = (0.5, 1.0, 1.5, 2.0)  # of the inverse error covariance; the one that fits rows held out best is used
SMALLEST = 1e-5  # of the largest variance of an error: smaller ones count as this
SAMPLED = 2048  # tokens among which powers are compared
HELD = 256  # rows that set power and temperature
FIRST_SCALE, STEPS = 30.0, 8  # inverse temperature around which so many are tried


def errors_without_own(
    features: Float[Tensor, "rows d"],
    targets: Float[Tensor, "rows e"],
    gram: Float[Tensor, "d d"],
    weights: Float[Tensor, "d e"],
) -> Float[Tensor, "rows e"]:
    """Return by how much a regression misses each of its own rows when that row is left out.

    Args:
        gram: of the features, regularised. weights: of the regression.
    """
    # The share that a row has in its own prediction makes its error smaller.
    share = (features * torch.linalg.solve(gram, features.T).T).sum(1, keepdim=True).clamp(max=0.99)
    return (targets - features @ weights) / (1 - share)


def metric_of(errors: Float[Tensor, "e e"], power: float) -> Float[Tensor, "e e"]:
    """Return a matrix that weights directions by a power of the inverse covariance of errors.

    Args:
        errors: their sum of outer products.
    """
    variances, directions = torch.linalg.eigh(errors)
    return directions * variances.clamp(min=SMALLEST * float(variances.max())).pow(-power / 2)


class RidgeReader:
    """Rank all tokens for rows of one place, by one regression and a fixed power of its errors.

    Args:
        rows, targets: states and whitened embeddings of their tokens.
    """

    POWER = 1.5

    def __init__(self, rows: Float[Tensor, "rows d"], targets: Float[Tensor, "rows e"]) -> None:
        sums = Sums.start(rows, targets.shape[1])
        self._expert, features = sums.expert, sums.expert.features(rows)
        sums.add(features, targets)
        weights = sums.weights()
        errors = errors_without_own(features, targets, sums.regularised(), weights)
        self._metric = metric_of(errors.T @ errors, self.POWER)
        self._weights = weights @ self._metric
        self._lengths: Tensor | None = None

    def scores(self, rows: Float[Tensor, "rows d"], table: Float[Tensor, "v e"]) -> Float[Tensor, "rows v"]:
        """Return each token's cosine with the prediction, times the prediction's length.

        Args:
            table: the whitened embeddings of all tokens, the same in every call.
        """
        square = self._metric @ self._metric.T
        if self._lengths is None:
            self._lengths = ((table @ square) * table).sum(1).clamp(min=1e-30).sqrt()
        directions = self._expert.features(rows) @ self._weights @ self._metric.T
        return directions @ table.T / self._lengths


@dataclass
class Sums:
    """What the regression of one group of rows is computed from.

    Attributes:
        mean, scale: by which rows are standardised; they stay as they were at the start. gram, cross: sums of outer
            products of features with features, and with their tokens' embeddings.
    """

    mean: Float[Tensor, " d"]
    scale: Float[Tensor, " d"]
    gram: Float[Tensor, "d d"]
    cross: Float[Tensor, "d e"]

    @classmethod
    def start(cls, rows: Float[Tensor, "rows d"], width: int) -> "Sums":
        """Return empty sums that standardise rows like these."""
        expert = Expert.of(rows)
        d = rows.shape[1]
        return cls(expert.mean, expert.scale, rows.new_zeros(d, d), rows.new_zeros(d, width))

    @property
    def expert(self) -> Expert:
        return Expert(self.mean, self.scale)

    def add(self, features: Float[Tensor, "rows d"], targets: Float[Tensor, "rows e"]) -> None:
        self.gram += features.T @ features
        self.cross += features.T @ targets

    def regularised(self) -> Float[Tensor, "d d"]:
        return self.gram + RIDGE * torch.eye(len(self.gram), device=self.gram.device)

    def weights(self) -> Float[Tensor, "d e"]:
        """Return the map from features to embeddings."""
        return torch.linalg.solve(self.regularised(), self.cross)


class GrowingProbe:
    """Ridge regressions that take in more states, and the probe that they make.

    Attributes:
        groups: sums of the rows below and above ``border``, a log norm. errors: sum of outer products of the errors of
            ``count`` rows, each predicted without itself. held, held_tokens: rows that set power and temperature.
        added: rows that came after the start.
    """

    def __init__(
        self,
        settings: ProbeSettings,
        groups: Sequence[Sums],
        border: float,
        errors: Float[Tensor, "e e"],
        held: Float[Tensor, "h d"],
        held_tokens: Int[Tensor, " h"],
        mean: Float[Tensor, " e"],
        matrix: Float[Tensor, "e e"],
        added: int = 0,
    ) -> None:
        self.settings = settings
        self.groups = list(groups)
        self.border, self.errors = border, errors
        self.held, self.held_tokens = held, held_tokens
        self.mean, self.matrix = mean, matrix
        self.added = added
        self._weights: list[Tensor] | None = None

    @classmethod
    def start(
        cls,
        states: Float[Tensor, "rows d"],
        tokens: Int[Tensor, " rows"],
        table: Float[Tensor, "v e"],
        settings: ProbeSettings,
    ) -> "GrowingProbe":
        """Fit the attacker's own states.

        Args:
            states: one row for each token, unsorted. table: input embeddings.
        """
        mean, matrix = whitening(table)
        rows, tokens = states.float(), tokens.to(states.device)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(settings.seed))
        cut = min(HELD, len(rows) // 10)
        held, kept = (part.to(rows.device) for part in (order[:cut], order[cut:]))
        border = norm_border(rows.norm(dim=1))
        long = rows.norm(dim=1).log() > border
        errors = rows.new_zeros(table.shape[1], table.shape[1])
        groups = []
        for mask in [~long, long] if bool(long.any()) else [~long]:
            own = kept[mask[kept]]
            sums = Sums.start(rows[own], table.shape[1])
            features = sums.expert.features(rows[own])
            targets = whitened_table(table[tokens[own]], mean, matrix)
            sums.add(features, targets)
            missed = errors_without_own(features, targets, sums.regularised(), sums.weights())
            errors += missed.T @ missed
            groups.append(sums)
        return cls(settings, groups, border, errors, rows[held], tokens[held], mean, matrix)

    def add(
        self,
        states: Float[Tensor, "rows d"],
        tokens: Int[Tensor, " rows"],
        table: Float[Tensor, "v e"],
    ) -> None:
        """Take in more rows; their errors are those before they were taken in."""
        rows = states.float()
        targets = whitened_table(table[tokens], self.mean, self.matrix)
        for sums, weights, mask in zip(self.groups, self.weights(), self._masks(rows), strict=True):
            features = sums.expert.features(rows[mask])
            missed = targets[mask] - features @ weights
            self.errors += missed.T @ missed
            sums.add(features, targets[mask])
        self.added += len(rows)
        self._weights = None

    def weights(self) -> list[Float[Tensor, "d e"]]:
        """Return each group's map from features to whitened embeddings."""
        if self._weights is None:
            self._weights = [sums.weights() for sums in self.groups]
        return self._weights

    def probe(self, table: Float[Tensor, "v e"]) -> Probe:
        """Return the probe that all rows so far make, its temperature set; give it the table with ``parents``.

        Args:
            table: input embeddings.
        """
        generator = torch.Generator().manual_seed(self.settings.seed)
        drawn = torch.randperm(len(table), generator=generator)[:SAMPLED].to(table.device)
        sample, places = torch.cat([self.held_tokens, drawn]).unique(return_inverse=True)
        sampled = whitened_table(table[sample], self.mean, self.matrix)
        best, least = None, math.inf
        for power in POWERS:
            metric = metric_of(self.errors, power)
            probe = self._with(metric)
            loss = self._calibrate(probe, places[: len(self.held)], F.normalize(sampled @ metric, dim=1))
            best, least = (probe, loss) if loss < least else (best, least)
        assert best is not None
        self._calibrate(best, self.held_tokens, whitened_table(table, best.mean, best.matrix))
        return best

    def _calibrate(self, probe: Probe, tokens: Int[Tensor, " h"], targets: Float[Tensor, "c e"]) -> float:
        """Set the temperature of each map, and return the loss of all rows held out."""
        loss = 0.0
        for mask, expert in zip(self._masks(self.held), probe.experts, strict=True):
            if bool(mask.any()):
                loss += calibrate(expert, self.held[mask], tokens[mask], targets, steps=STEPS)
        return loss

    def _masks(self, rows: Float[Tensor, "rows d"]) -> list[Bool[Tensor, " rows"]]:
        """Return which rows belong to each group."""
        if len(self.groups) == 1:
            return [torch.ones(len(rows), dtype=torch.bool, device=rows.device)]
        long = rows.norm(dim=1).log() > self.border
        return [~long, long]

    def _with(self, metric: Float[Tensor, "e e"]) -> Probe:
        """Return a probe whose embeddings are transformed by ``metric``, its temperature not set."""
        experts = []
        for sums, weights in zip(self.groups, self.weights(), strict=True):
            linear = weights @ metric
            bias, scale = linear.new_zeros(linear.shape[1]), linear.new_tensor(FIRST_SCALE).log()
            experts.append(
                Expert(sums.mean, sums.scale, {"linear": linear, "bias": bias, "log_scale": scale})
            )
        return Probe(self.settings, experts, self.border, self.mean, self.matrix @ metric)

    def tensors(self) -> dict[str, Tensor]:
        """Return everything to save, by name."""
        tensors = {
            "border": torch.tensor(self.border), "errors": self.errors, "held": self.held,
            "held_tokens": self.held_tokens, "mean": self.mean, "matrix": self.matrix,
            "added": torch.tensor(self.added),
        }  # fmt: skip
        for i, sums in enumerate(self.groups):
            named = {"mean": sums.mean, "scale": sums.scale, "gram": sums.gram, "cross": sums.cross}
            tensors |= {f"group.{i}.{name}": value for name, value in named.items()}
        return tensors

    @classmethod
    def from_tensors(cls, settings: ProbeSettings, tensors: dict[str, Tensor]) -> "GrowingProbe":
        """Rebuild from ``tensors``."""
        groups = list[Sums]()
        while f"group.{len(groups)}.mean" in tensors:
            start = f"group.{len(groups)}."
            groups.append(Sums(*(tensors[start + name] for name in ("mean", "scale", "gram", "cross"))))
        return cls(
            settings, groups, float(tensors["border"]), tensors["errors"], tensors["held"], tensors["held_tokens"],
            tensors["mean"], tensors["matrix"], int(tensors["added"]),
        )  # fmt: skip
