"""Predict every token's state behind unknown text, with the covariance of what the text changes.

Behind one fixed text a token's state is known. Behind another text a linear map of it is expected, and what remains is
nearly Gaussian. Map and covariance are fitted on rows of known tokens. So an attacker who sees only part of a state
(its part in a known space, or its norm) can say how well each token explains that part. No paper describes this.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.models import TruncatedModel
from hiddenlab.proposals.first_token_table import packed
from hiddenlab.proposals.ridge import KnownRows
from hiddenlab.types import Progress, silent

PART = 8192  # tokens at once
RIDGE = 0.01  # of the mean variance of a coordinate
SMALLEST = 1e-3  # of the mean variance: what is added to every variance of the errors
SINKS = 4.0  # rows this many times as long as the median are left out: attention sinks are like no other rows


@dataclass(frozen=True)
class ExpectedStates:
    """The expected state of every token, in coordinates in which errors have unit covariance.

    Attributes:
        table, scale: expected states, whitened; rows of ``table`` (float16) are in units of ``scale``.
        root, whitening: symmetric roots of the covariance of errors and of its inverse.
        lengths: squared norm of each expected state, not whitened. spread: standard deviation of the error of a row's
            log norm.
        first, first_scale: states of all one-token prompts, packed like ``table``. first_norms: their norms, in
            double precision.
    """

    table: Float[Tensor, "v d"]
    scale: Float[Tensor, " v"]
    root: Float[Tensor, "d d"]
    whitening: Float[Tensor, "d d"]
    lengths: Float[Tensor, " v"]
    spread: Float[Tensor, ""]
    first: Float[Tensor, "v d"]
    first_scale: Float[Tensor, " v"]
    first_norms: Float[Tensor, " v"]

    @classmethod
    def make(
        cls,
        model: TruncatedModel,
        known: KnownRows,
        text: Int[Tensor, " n"],
        progress: Progress = silent,
        *,
        exact: TruncatedModel | None = None,
    ) -> "ExpectedStates":
        """Run every token behind a text and alone, and fit what is expected to rows of known tokens.

        Args:
            model: as exact as ``known``. exact: the model whose first rows are observed, if that is another.
        """
        behind = _every_token(model, text, "collecting states behind a text", progress)
        alone = _every_token(exact or model, text[:0], "collecting one-token states", progress)
        states, tokens = known.states.double(), known.tokens.long()
        usual = states.norm(dim=1) < SINKS * states.norm(dim=1).median()
        states, own = states[usual], behind[tokens[usual]].double()
        mean, center = states.mean(0), own.mean(0)
        weights = _ridge(own - center, states - mean)
        errors = states - mean - (own - center) @ weights
        covariance = errors.T @ errors / len(errors)
        unit = torch.eye(len(covariance), device=covariance.device, dtype=covariance.dtype)
        variances, directions = torch.linalg.eigh(covariance + SMALLEST * covariance.diagonal().mean() * unit)
        root, whitening = (directions * variances.pow(power) @ directions.T for power in (0.5, -0.5))
        parts = [((part.double() - center) @ weights + mean) for part in behind.split(PART)]
        lengths = torch.cat([part.square().sum(1) for part in parts]).float()
        whitened = ((part @ whitening).float() for part in parts)
        likely = (lengths[tokens[usual]].double() + variances.sum()).log() / 2
        spread = (states.norm(dim=1).log() - likely).square().mean().sqrt()
        return cls(
            *packed(whitened), root.float(), whitening.float(), lengths, spread.float(),
            *packed(alone.split(PART)), alone.double().norm(dim=1),
        )  # fmt: skip

    def along(self, directions: Float[Tensor, "d k"], *, whitened: bool = False) -> Float[Tensor, "v k"]:
        """Return the inner products of expected states with some directions.

        Args:
            whitened: of the whitened states, in place of the states themselves.
        """
        directions = directions if whitened else self.root @ directions
        halves = zip(self.table.split(PART), self.scale.split(PART), strict=True)
        return torch.cat([(part.float() @ directions) * scale[:, None] for part, scale in halves])

    @cached_property
    def covariance(self) -> Float[Tensor, "d d"]:
        """Return the covariance of errors."""
        return self.root @ self.root

    @cached_property
    def whitened_lengths(self) -> Float[Tensor, " v"]:
        """Return the squared norm of each whitened expected state."""
        return torch.cat([part.square().sum(1) for part in self._parts(self.table, self.scale)])

    def alone(self) -> Iterator[Float[Tensor, "_ d"]]:
        """Yield the states of one-token prompts, in double precision, part by part."""
        for part, norms in zip(
            self._parts(self.first, self.first_scale), self.first_norms.split(PART), strict=True
        ):
            # Directions may be rounded; norms of first rows, which are alike in deep layers, must not be.
            yield part.double() * (norms / part.double().norm(dim=1).clamp(min=1e-30))[:, None]

    @staticmethod
    def _parts(table: Float[Tensor, "v d"], scale: Float[Tensor, " v"]) -> Iterator[Float[Tensor, "_ d"]]:
        for part, own in zip(table.split(PART), scale.split(PART), strict=True):
            yield part.float() * own[:, None]


def _every_token(
    model: TruncatedModel, text: Int[Tensor, " n"], stage: str, progress: Progress
) -> Float[Tensor, "v d"]:
    """Return the state of every token behind a text, in float32."""
    prefix = model.prefix()
    if len(text):
        prefix.extend(text.to(model.device))
    states, step = list[Tensor](), model.max_pass_tokens
    for part in torch.arange(model.vocab_size, device=model.device).split(step):
        progress(stage, len(states) * step, model.vocab_size)
        states.append(prefix.branch(part).float())
    progress(stage, model.vocab_size, model.vocab_size)
    return torch.cat(states)


def _ridge(inputs: Float[Tensor, "n d"], targets: Float[Tensor, "n d"]) -> Float[Tensor, "d d"]:
    gram = inputs.T @ inputs
    unit = torch.eye(len(gram), device=gram.device, dtype=gram.dtype)
    return torch.linalg.solve(gram + RIDGE * gram.diagonal().mean() * unit, inputs.T @ targets)
