"""Estimate the unknown strength of embedding noise from the residuals of a decoded prompt.

Decoded under an assumed strength, most tokens are right unless noise hides everything. The distance of their plain
states from the rows tells the strength, whatever was assumed. Decoding and estimate alternate until the assumed
strength is the estimated one. Only a few strengths are assumed, so that what was trained for one is used again. A wrong
token changes all plain states behind it, and so does an unknown prefix: the noise is then overestimated.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.channels import Channel, in_order
from hiddenlab.matching.distance import Matcher
from hiddenlab.models import TruncatedModel
from hiddenlab.utils.random import generator

LADDER = tuple(m * 10.0**e for e in range(-5, 2) for m in (1, 3))  # strengths that are assumed
FIRST = 0.25  # first assumed strength, in standard deviations of the embedding
FINE = 4  # strengths measured between neighbours of the ladder
RELEASES = 4  # releases of the decoded prompt at each strength
QUANTILE = 0.25  # quantile of the rows' distances that is compared
ROUNDS = 5  # of decoding and estimate at most


def nearest_step(strength: float) -> float:
    """Return the step of the ladder that is nearest, by ratio."""
    return min(LADDER, key=lambda step: abs(math.log(step / strength)))


def first_step(model: TruncatedModel) -> float:
    """Return the strength assumed first: strong enough to matter, weak enough to hide little."""
    return nearest_step(FIRST * float(model.embedding.float().std()))


def strength_of(
    rows: Float[Tensor, "r d"],
    places: Int[Tensor, " r"],
    tokens: Int[Tensor, " n"],
    channel: Channel,
    matcher: Matcher,
    model: TruncatedModel,
    seed: int,
) -> float:
    """Return the strength at which the decoded prompt's own releases lie as far from plain states as the observed rows.

    A quantile of the nearer rows is compared, so that rows behind the first wrong token need not count. A prompt that
    explains nothing gives a strength that is much too high.

    Args:
        rows: as observed, prepared by the matcher. places: of their tokens in the prompt. tokens: as decoded.
        channel: with the stage of unknown strength.
    """
    plain = matcher.view(model.encode(tokens))
    unit = matcher.norms(plain)

    def away(own: Tensor, at: Tensor) -> float:
        return float((matcher.pairs(candidates=own, observed=plain[at]) / unit[at]).quantile(QUANTILE))

    seen, everywhere = away(rows, places), torch.arange(len(tokens), device=tokens.device)
    drawn = generator(seed, "joint", "strength")

    def expected(strength: float) -> float:
        released = channel.supposed(strength).release_batch(model, [tokens.tolist()] * RELEASES, drawn)
        own = [
            matcher.prepare(in_order(observation, truth).to(plain.device)) for observation, truth in released
        ]
        return sum(away(states, everywhere) for states in own) / RELEASES

    return _inverse(expected, seen)


def _inverse(expected: Callable[[float], float], seen: float) -> float:
    """Find the strength, between the ends of the ladder, at which a growing function reaches ``seen``."""
    low, high = 0, len(LADDER) - 1
    known: dict[int, float] = {}

    def at(step: int) -> float:
        if step not in known:
            known[step] = expected(LADDER[step])
        return known[step]

    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if at(middle) <= seen else (low, middle)
    ratio = LADDER[high] / LADDER[low]
    strengths = [LADDER[low] * ratio ** (i / FINE) for i in range(FINE + 1)]
    values = [at(low), *map(expected, strengths[1:-1]), at(high)]
    for i in range(FINE):
        if seen < values[i + 1]:
            whole = math.log(values[i + 1] / max(values[i], 1e-30))
            share = 0.0 if seen <= values[i] else math.log(seen / values[i]) / whole
            return strengths[i] * (strengths[i + 1] / strengths[i]) ** share
    return strengths[-1]


def settle(first: float, estimate: Callable[[float], float]) -> tuple[float, float]:
    """Assume a strength, decode and estimate, until the assumed step is the estimated one.

    Args:
        estimate: returns the strength estimated under an assumed one.

    Returns:
        The step assumed last, and the strength estimated there. Where estimates go in circles, the stronger step: under
            too weak a noise the decoder trusts wrong evidence.
    """
    supposed, seen = first, dict[float, float]()
    while supposed not in seen and len(seen) < ROUNDS:
        seen[supposed] = estimate(supposed)
        supposed = nearest_step(seen[supposed])
    steps = list(seen)
    supposed = max(steps[steps.index(supposed) :]) if supposed in seen else steps[-1]
    return supposed, seen[supposed]
