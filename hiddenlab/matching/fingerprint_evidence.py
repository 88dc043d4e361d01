"""Score states by how well they agree with a published fingerprint: TOPLOC, Activation-DiFR or log-probabilities.

``evidence_of`` reads an observation and returns log-likelihood ratios; ``attacks.fingerprint_inversion`` searches with
them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.models import TruncatedModel
from hiddenlab.observation import same_signature
from hiddenlab.projections import projection_of
from hiddenlab.types import Observation

PATTERNS = 65497  # values that TOPLOC's polynomial takes about evenly where nothing was committed
HALVES = ("bfloat16", "float16")
# Typical differences between a provider in half precision and an attacker in another: units of bfloat16's last bit and
# share of an inner product's size, both near those of the built-in model, and nats, a guess.
HALF_ULPS, HALF_SHARE, HALF_NATS = 2.0, 0.015, 0.06
# Densities of unrelated projection values, in units of a random direction's, and of unrelated log-probabilities, in
# nats; probability that a shown value is related to the state.
SPREAD, NATS, TRUST = 1 / 6, 1 / 10, 0.99
SAME_ULPS, SAME_SHARE, SAME_NATS = 0.5, 1e-3, 1e-3


@runtime_checkable
class Evidence(Protocol):
    """Scores states against one observation."""

    def score(self, row: int, states: Float[Tensor, "c d"]) -> Float[Tensor, " c"]:
        """Return the log-likelihood ratio of each state for one row: that it is the released one against any other."""
        ...

    @property
    def most(self) -> float:
        """The largest value that ``score`` can return."""
        ...

    @property
    def calibrated(self) -> bool:
        """Whether wrong tokens score no higher than unrelated states, so that the ratio can be used directly."""
        ...


@dataclass(frozen=True)
class Proofs:
    """TOPLOC evidence: agreement of a state's largest coordinates with the polynomial's values at their indices.

    Attributes:
        codes: bfloat16 patterns of the values, as signed ordinals (see ``ordinals``). top: coordinates compared, the
            largest of each state. trust: share of these that was committed. slack: typical difference of a committed
            value from the attacker's, in units of the last bit.
    """

    codes: Int[Tensor, "rows d"]
    top: int
    trust: float
    slack: float
    # The largest coordinates of wrong tokens' states are mostly the same ones, of nearly the same size.
    calibrated: ClassVar[bool] = False

    def score(self, row: int, states: Float[Tensor, "c d"]) -> Float[Tensor, " c"]:
        largest = states.float().abs().topk(self.top, dim=1).indices
        own = ordinals(states.bfloat16()).gather(1, largest)
        gaps = (own - self.codes[row].to(own.device)[largest]).abs().float()
        return agreement(gaps, self.slack, 1 / PATTERNS, self.trust).sum(1)

    @property
    def most(self) -> float:
        return self.top * full_agreement(self.slack, 1 / PATTERNS, self.trust)


@dataclass(frozen=True)
class Projected:
    """Activation-DiFR evidence: inner products of the state with directions that the attacker knows or has learned.

    Attributes:
        shown: the fingerprints. directions: of the projection. error: typical difference of an inner product, as a
            share of its typical size.
    """

    shown: Float[Tensor, "rows k"]
    directions: Float[Tensor, "d k"]
    error: float
    calibrated: ClassVar[bool] = True

    def score(self, row: int, states: Float[Tensor, "c d"]) -> Float[Tensor, " c"]:
        states = states.float()
        gaps = (states @ self.directions.to(states.device) - self.shown[row].to(states.device)).abs()
        # In units of a random direction's inner product; those of a wrong state spread over about six of them.
        size = torch.linalg.vector_norm(states, dim=1, keepdim=True) / states.shape[1] ** 0.5
        return agreement(gaps / size.clamp(min=1e-9), self.error, SPREAD, TRUST).sum(1)

    @property
    def most(self) -> float:
        return self.shown.shape[1] * full_agreement(self.error, SPREAD, TRUST)


@dataclass(frozen=True)
class Likelihoods:
    """Log-probability evidence: agreement of the shown top-k values with the candidate state's for the same tokens.

    Attributes:
        values: as shown, nats. ids: the tokens they are of. error: typical difference, nats.
    """

    values: Float[Tensor, "rows k"]
    ids: Int[Tensor, "rows k"]
    error: float
    calibrated: ClassVar[bool] = False  # wrong tokens' predictions resemble each other

    def score(self, row: int, states: Float[Tensor, "c v"]) -> Float[Tensor, " c"]:
        own = states.float().log_softmax(1)[:, self.ids[row].to(states.device)]
        return agreement((own - self.values[row].to(own.device)).abs(), self.error, NATS, TRUST).sum(1)

    @property
    def most(self) -> float:
        return self.values.shape[1] * full_agreement(self.error, NATS, TRUST)


def agreement(
    gaps: Float[Tensor, "c places"], slack: float, chance: float, trust: float
) -> Float[Tensor, "c places"]:
    """Return the log-likelihood ratio of differences: a related value has Laplace errors, an unrelated one any value.

    Args:
        gaps: absolute differences. slack: mean of honest ones. chance: density of unrelated values. trust: probability
            that a value is related.
    """
    density = (-gaps / slack).exp() / (2 * slack)
    return (1 - trust + trust * density / chance).log()


def full_agreement(slack: float, chance: float, trust: float) -> float:
    """Return ``agreement`` for a difference of 0: the largest that one coordinate can contribute."""
    return float(agreement(torch.zeros(1, 1), slack, chance, trust))


def ordinals(values: Tensor) -> Int[Tensor, "*shape"]:
    """Return bfloat16 numbers as integers in the same order: a difference of 1 is one unit of the last bit."""
    bits = values.view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


def learn_projection(
    states: Float[Tensor, "m d"], fingerprints: Float[Tensor, "_ k"], ridge: float = 0.0
) -> Float[Tensor, "d k"]:
    """Learn the directions of a fixed secret projection from positions whose tokens are known.

    The attacker's own requests give such positions: he computes the states himself and receives their fingerprints.
    Least squares in float64, of smallest norm while there are fewer positions than dimensions.

    Args:
        ridge: weight of the directions' squared norm, as a share of the states' mean square; above 0 where the
            provider's states differ from the attacker's.

    Raises:
        InputError: no positions, another number of states than fingerprints, or a negative ridge.
    """
    if not len(states) or len(states) != len(fingerprints) or ridge < 0:
        raise InputError(f"{len(states)} states, {len(fingerprints)} fingerprints, ridge {ridge}")
    x, y = states.detach().double().cpu(), fingerprints.detach().double().cpu()
    if ridge:
        weight = math.sqrt(ridge) * float(x.square().mean().sqrt())
        x = torch.cat([x, weight * torch.eye(x.shape[1], dtype=x.dtype)])
        y = torch.cat([y, y.new_zeros(states.shape[1], y.shape[1])])
    return torch.linalg.lstsq(x, y, driver="gelsd").solution.float()


def evidence_of(
    observation: Observation,
    model: TruncatedModel,
    directions: Float[Tensor, "d k"] | None = None,
    error: float | None = None,
) -> Evidence:
    """Return the evidence that an observation shows; its form follows from the public facts.

    Args:
        directions: of a projection that the attacker learned, in place of one that the facts name. error: of their
            inner products, see ``Projected``.

    Raises:
        InputError: an observation that the truncated model cannot have produced, or facts that do not fit its rows.
        NotApplicableError: rows or coordinates out of order, or an observation of whole states.
    """
    info, rows = observation.info, observation.states
    if not same_signature(info.signature, model.signature):
        raise InputError(f"the observation comes from other weights than those of {model.ref.name}")
    if info.site != model.site:
        raise InputError(
            f"the observation was taken from {info.site}, the truncated model gives {model.site}"
        )
    if info.rows_permuted or info.columns_permuted is not None or info.prefix_tokens:
        raise NotApplicableError("fingerprints are compared in order, from the first token on")
    if info.positions is not None and info.positions != tuple(range(len(rows))):
        raise NotApplicableError("every token before a row must be known; this observation has gaps")
    half = info.provider_dtype in HALVES or str(model.dtype).removeprefix("torch.") in HALVES
    kinds = [name for name in ("toploc", "logprobs", "projection") if name in info.facts]
    if directions is None and len(kinds) != 1:
        raise NotApplicableError("the observation shows no fingerprints; vocab-match is for whole states")
    if directions is not None:
        _fits(rows, directions.shape[1])
        return Projected(rows.float(), directions, error or (HALF_SHARE if half else SAME_SHARE))
    projection = projection_of(info)
    if projection is not None:
        _fits(rows, projection.count)
        basis = projection(torch.eye(model.width))
        return Projected(rows.float(), basis, HALF_SHARE if half else SAME_SHARE)
    k = _count(info.facts[kinds[0]])
    if kinds == ["logprobs"]:
        _fits(rows, 2 * k)
        ids = rows[:, k:].long()
        if bool((ids < 0).any() | (ids >= model.vocab_size).any()):
            raise InputError("the observation shows log-probabilities of tokens outside the vocabulary")
        return Likelihoods(rows[:, :k].float(), ids, HALF_NATS if half else SAME_NATS)
    _fits(rows, model.width)
    share = k / len(rows)
    top = min(model.width, math.ceil(2 * share) + 2)
    return Proofs(ordinals(rows.bfloat16()), top, min(0.9, share / top), HALF_ULPS if half else SAME_ULPS)


def _fits(rows: Tensor, width: int) -> None:
    if rows.shape[1] != width:
        raise InputError(f"the observation is {rows.shape[1]} wide; its public facts say {width}")


def _count(fact: object) -> int:
    k = fact.get("k") if isinstance(fact, Mapping) else None
    if not isinstance(k, int) or isinstance(k, bool) or k < 1:
        raise InputError(f"the facts of a fingerprint say how many values k it has, not {fact!r}")
    return k
