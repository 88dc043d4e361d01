"""Rank tokens for a state by a ridge regression, whose well predicted directions count for more.

The regression maps a state to its token's whitened embedding. Some directions of the embedding can be read from a state
far better than others. So cosines are taken after directions were weighted by a power of the inverse covariance of the
errors (docs/log/039-closed-form-probe.md has figures; no paper describes it).

It needs few states and no training steps. So it serves at once where no trained probe is at hand, and every verified
token makes it better.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.proposals.probe import (
    Probe,
    ProbeSettings,
    norm_border,
    ridge_expert,
    whitened_table,
)
from hiddenlab.proposals.text_rows import TextRows

RIDGE = 100.0
POWER = 1.5  # of the inverse error covariance
PROBE_POWER = 2.0  # the same where rows are known to be of one place: best on the built-in model
SMALLEST = 1e-5  # of the largest variance of an error: smaller ones count as this
CALIBRATED = 32  # rows that set the temperature of sinks
# Inverse temperatures between which the likeliest is searched, in how many steps at most, and how near is enough.
SCALES, SCALE_STEPS, SCALE_CLOSE = (1.0, 1000.0), 20, 1e-3
SCALED = 32  # rows that are scaled at once, as each takes the vocabulary
# A regression is computed again when there are so many times as many rows, or half as many new verified rows as old
# ones and at least so many: prompts resemble each other more than the attacker's own texts do.
REFIT, FEWEST_NEW = 1.25, 100
MOST_ROWS = 20_000  # rows that are kept
FEWEST_ROWS = 256  # from which a regression is computed
MARKED = 8  # coordinates that tell rows of one token apart


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


@dataclass
class KnownRows:
    """States of known tokens: the attacker's own, and those of tokens that an attack verified.

    Attributes:
        states: one row for each token. own: how many of the first rows are the attacker's own.
    """

    states: Float[Tensor, "rows d"]
    tokens: Int[Tensor, " rows"]
    own: int

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def verified(self) -> int:
        """How many rows an attack verified."""
        return len(self) - self.own

    def attackers_own(self) -> "KnownRows":
        """Return the rows that no attack verified."""
        return KnownRows(self.states[: self.own], self.tokens[: self.own], self.own)

    def outgrown(self, fitted: int) -> bool:
        """Return whether a regression of the first ``fitted`` rows is to be computed again."""
        return len(self) >= min(REFIT * fitted, fitted + max(FEWEST_NEW, (fitted - self.own) // 2))

    def add(self, states: Float[Tensor, "new d"], tokens: Int[Tensor, " new"]) -> None:
        """Add verified rows that are not there yet; beyond ``MOST_ROWS`` the oldest verified ones go."""
        held = set(_marks(self.states, self.tokens))
        fresh = torch.tensor([mark not in held for mark in _marks(states, tokens)], dtype=torch.bool)
        states, tokens = states[fresh.to(states.device)], tokens[fresh.to(tokens.device)]
        states = torch.cat([self.states, states.to(self.states)])
        tokens = torch.cat([self.tokens, tokens.to(self.tokens)])
        surplus = max(0, len(tokens) - MOST_ROWS)
        kept = torch.ones(len(tokens), dtype=torch.bool, device=tokens.device)
        kept[self.own : self.own + surplus] = False
        self.states, self.tokens = states[kept], tokens[kept]


def _marks(states: Float[Tensor, "rows d"], tokens: Int[Tensor, " rows"]) -> list[tuple[float | int, ...]]:
    """Return what tells rows apart, as the cache rounds them."""
    few = states[:, :MARKED].bfloat16().float().cpu()
    return [(token, *row) for token, row in zip(tokens.tolist(), few.tolist(), strict=True)]


def ridge_probe(
    known: KnownRows,
    text: TextRows,
    table: Float[Tensor, "v e"],
    mean: Float[Tensor, " e"],
    matrix: Float[Tensor, "e e"],
) -> Probe:
    """Return a probe in closed form.

    The weights of directions become part of the whitening, so that plain cosines rank as ``RidgeReader`` does.

    Args:
        text: rows that set the temperature. table: the input embeddings of all tokens. mean, matrix: its whitening.
    """
    targets = whitened_table(table[known.tokens], mean, matrix)
    rows = known.states.float()
    border = norm_border(rows.norm(dim=1))
    far = rows.norm(dim=1).log() > border
    fitted, errors = [], []
    for mask in [~far] if not bool(far.any()) else [~far, far]:
        expert = ridge_expert(rows[mask], targets[mask], RIDGE)
        weights = expert.parameters["linear"]
        fitted.append((expert, mask))
        errors.append(errors_without_own(expert.features(rows[mask]), targets[mask], weights))
    # Sinks are few and alike: their errors say nothing of other rows.
    metric = metric_of(errors[0], PROBE_POWER)
    probe = Probe(ProbeSettings(), [expert for expert, _ in fitted], border, mean, matrix @ metric)
    for expert in probe.experts:
        expert.parameters["linear"] = expert.parameters["linear"] @ metric
    weighted = probe.screened_by(rows).with_table(table).table
    for (expert, mask), missed in zip(fitted, errors, strict=True):
        if expert is probe.experts[0]:
            held, tokens = text.states[:, 1:].flatten(0, 1).float(), text.tokens[:, 1:].flatten()
            directions = expert.direction(expert.features(held))
        else:  # text has few of them: each is read as if it were not among the rows
            places = torch.arange(0, len(missed), -(-len(missed) // CALIBRATED), device=missed.device)
            directions = F.normalize((targets[mask][places] - missed[places]) @ metric, dim=1)
            tokens = known.tokens[mask][places]
        scale = likeliest_scale(directions @ weighted.T, tokens.to(directions.device))
        expert.parameters["log_scale"] = torch.tensor(math.log(scale), device=directions.device)
    return probe


def likeliest_scale(cosines: Float[Tensor, "rows v"], tokens: Int[Tensor, " rows"]) -> float:
    """Return the inverse temperature at which the tokens of rows are likeliest, by Newton's method within a bracket.

    The logarithm of the likelihood is concave in it: its slope is what the right tokens' cosines have above the mean,
    and its curvature is their variance.
    """
    # What is added to a row of cosines changes no likelihood; so no exponential is too large.
    cosines = cosines - cosines.amax(1, keepdim=True)
    right = float(cosines.gather(1, tokens[:, None]).mean())
    low, high = SCALES
    scale = math.sqrt(low * high)
    buffer = torch.empty_like(cosines[:SCALED])  # the vocabulary's exponentials, in memory that is used again
    for _ in range(SCALE_STEPS):
        means, squares = [], []
        for part in cosines.split(SCALED):
            chances = torch.mul(part, scale, out=buffer[: len(part)]).exp_()
            total = chances.sum(1)
            means.append(chances.mul_(part).sum(1) / total)
            squares.append(chances.mul_(part).sum(1) / total)
        mean = torch.cat(means)
        slope = right - float(mean.mean())
        low, high = (scale, high) if slope > 0 else (low, scale)
        spread = float((torch.cat(squares) - mean.square()).mean())
        better = scale + slope / max(spread, 1e-12)
        # Where the curvature is nearly nothing, the step leads far away.
        better = better if low < better < high else math.sqrt(low * high)
        if abs(better - scale) < SCALE_CLOSE * scale:
            return better
        scale = better
    return scale


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
