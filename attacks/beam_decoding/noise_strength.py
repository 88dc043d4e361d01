"""How strong is noise of which the attacker is not told the strength? Estimated from what a decoded prompt leaves over.

Decoded under some supposed strength, most tokens are right where noise leaves a chance at all; how far their plain
states are from the rows says how strong it is, whatever was supposed. So decoding and estimate take turns, until the
strength supposed is the one that is found. Strengths supposed are few, so that what was trained for one serves again.
A wrong token changes all plain states behind it, and so does an unknown prefix: noise is then taken for stronger than
it is.
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

LADDER = tuple(m * 10.0**e for e in range(-5, 2) for m in (1, 3))  # strengths that are supposed
FIRST = 0.25  # times the embedding's standard deviation: supposed at first
FINE = 4  # strengths measured between neighbours of the ladder
RELEASES = 4  # of the decoded prompt, at each of them
NEARER = 0.25  # share of the rows that is nearer than what is compared
ROUNDS = 5  # of decoding and estimate at most


def nearest_step(strength: float) -> float:
    """The step of the ladder that is nearest, by ratio."""
    return min(LADDER, key=lambda one: abs(math.log(one / strength)))


def first_step(model: TruncatedModel) -> float:
    """What is supposed before anything is known: noise that is felt, but hides little."""
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
    """The strength at which the decoded prompt's own rows would lie as far from plain states as the observed ones do.

    The nearer rows are compared (a quantile), so that those behind the first wrong token need not count. A prompt that
    explains nothing gives much too strong a noise.

    Args:
        rows: as observed, prepared by the matcher. places: of their tokens in the prompt. tokens: as decoded.
        channel: with the stage of unknown strength.
    """
    plain = matcher.view(model.encode(tokens))
    unit = matcher.norms(plain)

    def away(own: Tensor, at: Tensor) -> float:
        return float((matcher.pairs(candidates=own, observed=plain[at]) / unit[at]).quantile(NEARER))

    seen, everywhere = away(rows, places), torch.arange(len(tokens), device=tokens.device)
    drawn = generator(seed, "joint", "strength")

    def expected(strength: float) -> float:
        released = channel.supposed(strength).release_batch(model, [tokens.tolist()] * RELEASES, drawn)
        own = [matcher.prepare(in_order(one, secret).to(plain.device)) for one, secret in released]
        return sum(away(one, everywhere) for one in own) / RELEASES

    return _inverse(expected, seen)


def _inverse(expected: Callable[[float], float], seen: float) -> float:
    """Where a growing function of strength reaches what was seen, between the ends of the ladder."""
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


def settle(first: float, found: Callable[[float], float]) -> tuple[float, float]:
    """Suppose, decode, estimate, until the step supposed is the one found.

    Args:
        found: the strength found under a supposed one.

    Returns:
        The step that is supposed in the end, and the strength found there. Where estimates go in circles, the
        stronger step: noise supposed too weak makes a decoder trust what it should not.
    """
    supposed, seen = first, dict[float, float]()
    while supposed not in seen and len(seen) < ROUNDS:
        seen[supposed] = found(supposed)
        supposed = nearest_step(seen[supposed])
    steps = list(seen)
    supposed = max(steps[steps.index(supposed) :]) if supposed in seen else steps[-1]
    return supposed, seen[supposed]
