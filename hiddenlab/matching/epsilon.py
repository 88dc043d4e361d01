"""Measure the distance threshold within which a candidate counts as a match, on the attacker's own sequences.

Thresholds are relative to the norm of the observed row, since the rounding errors of large states are large too.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hiddenlab.channels import Channel, in_order
from hiddenlab.errors import InputError
from hiddenlab.matching.distance import Matcher
from hiddenlab.matching.invariants import FRAMES
from hiddenlab.models import Request, TruncatedModel
from hiddenlab.models.choice import CODE, remembered
from hiddenlab.models.load import parse_dtype
from hiddenlab.proposals.corpus import Corpus, language_reference
from hiddenlab.proposals.probe import norm_border
from hiddenlab.proposals.store import identity_of
from hiddenlab.stages import is_own
from hiddenlab.types import ObservationInfo
from hiddenlab.utils.schema import CLOSED

FALSE_WEIGHT = 10.0  # cost of accepting a wrong candidate, relative to missing a right one
LIKELY_TWINS = 12  # of a token, at most
NEAR_TOKENS = 4  # hard negatives a position: tokens with nearby embeddings
WINDOWS, WINDOWS_PER_PASS, WINDOW = 50, 8, 32  # the last in tokens
# A few windows are enough where the nearest wrong candidate is so many times as far as the farthest right one.
FEW_WINDOWS, CLEAR = 12, 100.0
ROOM = 16.0  # for candidates by an invariant, in largest distances of right ones
ENOUGH_FALSE = 10  # wrong candidates within the threshold needed to measure their share directly
ENOUGH_SINKS = 16  # rows needed to measure a threshold for attention sinks
# Behind noise, the rest of a row that counts at least: in usual distances of right candidates, and as a share of it.
REST, MOST_REST = 8.0, 0.5
MOST = 0.5  # of right candidates are within a threshold that proves anything


@dataclass(frozen=True)
class Apart:
    """How far from their rows right and wrong candidates come, where noise makes them overlap.

    Attributes:
        right, wrong: means of the log of relative distances at each position from the second on. spread: their common
            standard deviation within a position.
        least: share of a row that its rest beyond the known rows has at least (``LEAST_REST``), behind this noise.
    """

    __pydantic_config__ = CLOSED

    right: tuple[float, ...]
    wrong: tuple[float, ...]
    spread: float
    least: float

    @classmethod
    def of(cls, sample: "Sample", least: float) -> "Apart":
        """Learn from positions of windows, but the first ones."""
        places, at = sample.places.unique(return_inverse=True)
        means, errors = list[tuple[float, ...]](), list[Tensor]()
        for distances in (sample.right[:, None], sample.wrong):
            logs = distances.clamp(min=1e-30).log()
            mean = torch.stack([logs[at == i].mean() for i in range(len(places))])
            errors.append((logs - mean[at, None]).flatten())
            means.append(tuple(mean.tolist()))
        return cls(means[0], means[1], float(torch.cat(errors).std()), least)

    def evidence(self, position: int, distances: Float[Tensor, " c"]) -> Float[Tensor, " c"]:
        """Return how much likelier each relative distance is of a right candidate than of a wrong one, in nats.

        Nearer than right candidates usually come is no better: in few numbers wrong ones are near by chance.

        Args:
            position: of the row, from 0; the first is told like the second, and those behind the measured ones like the
                last.
        """
        at = min(max(position - 1, 0), len(self.right) - 1)
        right, wrong = self.right[at], self.wrong[at]
        middle, logs = (right + wrong) / 2, distances.clamp(min=1e-30).log()
        return (middle - logs.clamp(min=right)) * max(wrong - right, 0.0) / self.spread**2

    def most(self, position: int) -> float:
        """Return how much likelier the nearest candidate can be right than wrong, in nats: what the row can tell."""
        return float(self.evidence(position, torch.zeros(1)))


@dataclass(frozen=True)
class Threshold:
    """A relative threshold, and the measurements that it was chosen from.

    Attributes:
        relative: share of the row's norm. floor: largest relative distance of a right candidate. gap: smallest relative
            distance of a wrong one. absolute: used instead where the user gave a number, or it was searched as in the
            paper. sinks: used in place of ``relative`` for rows whose log norm is above ``border``.
        chance: share of wrong candidates within the threshold in the measurement, all of them tokens with near
            embeddings (where epsilon was searched: those that the attack tries).
        reach: share of right candidates within it in the measurement.
        found: share of tokens found with it, where epsilon was searched. beyond: share of those whose token stood
            behind all candidates that the search ran. apart: of an invariant behind noise.
    """

    __pydantic_config__ = CLOSED

    relative: float
    floor: float
    gap: float
    absolute: float | None = None
    sinks: float | None = None
    border: float = 0.0
    chance: float = 0.0
    reach: float = 1.0
    found: float | None = None
    beyond: float | None = None
    apart: Apart | None = None

    @property
    def separable(self) -> bool:
        """Whether right and wrong candidates did not overlap in the measurement."""
        return self.floor < self.gap

    @property
    def doubt(self) -> float:
        """The chance of a wrong candidate within the threshold, over that of a right one; 1 where a match says nothing.

        Noise may be so strong that wrong candidates come as near as right ones do. A threshold below both then lets
        hardly any right candidate pass. What does pass, of all that are tried, is a wrong one as likely as not.
        """
        return self.chance / self.reach if self.reach >= MOST else 1.0

    def seen_on(self, sample: "Sample") -> "Threshold":
        """Return the threshold with the chances that a wrong and a right candidate are within it, of a sample."""
        limits = torch.full_like(sample.norms, self.relative)
        if self.sinks is not None:
            limits[sample.norms.log() > self.border] = self.sinks
        chance = chance_within(sample.wrong / limits[:, None].clamp(min=1e-30))
        return replace(self, chance=chance, reach=float((sample.right <= limits).float().mean()))

    def measured_by(self, matcher: Matcher) -> Matcher:
        """Return the matcher whose distances it was measured by: behind noise another one than without."""
        return matcher if self.apart is None else replace(matcher, least=self.apart.least)

    def limits(self, matcher: Matcher, rows: Float[Tensor, "rows d"]) -> Float[Tensor, " rows"]:
        """Return the distance within which each row counts as matched, in the matcher's norm."""
        if self.absolute is not None:
            return torch.full((len(rows),), self.absolute, device=rows.device)
        norms = matcher.norms(rows)
        if self.sinks is None:
            return self.relative * norms
        return torch.where(norms.log() > self.border, self.sinks, self.relative) * norms


@dataclass(frozen=True)
class Sample:
    """Relative distances of right and wrong candidates at positions of the attacker's own sequences.

    Attributes:
        norms: of the observed rows, in the matcher's norm. places: of the positions in their sequences, from 0.
    """

    right: Float[Tensor, " n"]
    wrong: Float[Tensor, "n c"]
    norms: Float[Tensor, " n"]
    places: Int[Tensor, " n"]

    def where(self, which: Bool[Tensor, " n"]) -> "Sample":
        """Return the selected positions."""
        return Sample(self.right[which], self.wrong[which], self.norms[which], self.places[which])


def chance_within(apart: Float[Tensor, "..."]) -> float:
    """Return the chance that a wrong candidate is within the threshold.

    Where too few are, the chance is extrapolated from the nearest tenth, as a power of distance: wrong rows of k
    numbers are within t with a chance that falls as t to the k.

    Args:
        apart: distances of wrong candidates, in thresholds.
    """
    apart = apart.flatten().double()
    if len(apart) == 0:
        return 0.0
    chance = float((apart <= 1).double().mean())
    nearest, near = (float(apart.kthvalue(1 + int(q * (len(apart) - 1))).values) for q in (0.01, 0.1))
    if chance * len(apart) < ENOUGH_FALSE and near > 1 and 0 < nearest < near:
        chance = max(chance, 0.1 * math.exp(-math.log(near) * math.log(10) / math.log(near / nearest)))
    return chance


def threshold_for(
    model: TruncatedModel, info: ObservationInfo, matcher: Matcher, seed: int, epsilon: str
) -> Threshold:
    """Return the threshold of a channel, from the cache or measured now.

    A few windows are enough where right and wrong candidates lie far apart.

    Args:
        epsilon: ``auto`` or a number.
    """
    number = parse_epsilon(epsilon)
    if number is not None:
        return Threshold(math.nan, math.nan, math.nan, absolute=number)

    def measured() -> Threshold:
        resolution = max(torch.finfo(model.dtype).eps, torch.finfo(parse_dtype(info.provider_dtype)).eps)
        few = _auto(measure(model, info, matcher, seed, few=True), resolution, matcher)
        if max(few.floor, resolution) * CLEAR < few.gap and few.doubt < 1:
            return few
        found = _auto(sample := measure(model, info, matcher, seed), resolution, matcher)
        if matcher.invariant is None or found.doubt < 1:
            return found
        noised = replace(matcher, least=min(MOST_REST, REST * float(sample.right.median())))
        return replace(found, apart=Apart.of(measure(model, info, noised, seed), noised.least))

    return kept_threshold(model, info, matcher, measured, {"epsilon": epsilon, "seed": seed})


def kept_threshold(
    model: TruncatedModel,
    info: ObservationInfo,
    matcher: Matcher,
    measured: Callable[[], Threshold],
    key: Mapping[str, object],
    code: Sequence[Path] = (),
) -> Threshold:
    """Return the threshold of a channel from the cache, or measure and keep it.

    Behind stages of a plugin it is always measured: nobody says when a plugin's code has changed, and a threshold of
    other code would verify wrongly.

    Args:
        key: what it depends on beside model, channel and matcher. code: folders of the code that measures it, beside
            those of this package's models, matching and defenses.
    """
    stages = Channel.parse(info.channel).defenses
    if any(map(is_own, stages)):
        return measured()
    here = Path(__file__).parent
    code = (*CODE, here, here.parent / "proposals", here.parent, here.parent / "defenses", *code)
    key = {
        "model": identity_of(model, []), "device": model.device.type,
        "engine": model.engine, "quantization": model.quantization, "info": asdict(info), "matcher": matcher.name,
        **key,
    }  # fmt: skip
    return remembered("epsilon", key, Threshold, measured, code)


def measure(
    model: TruncatedModel, info: ObservationInfo, matcher: Matcher, seed: int, *, few: bool = False
) -> Sample:
    """Release the attacker's own windows through the channel and match them as the attack does.

    The windows are released by the channel (another pass shape, dtype or quantization, noise …) and evaluated by the
    truncated model with hard negatives beside every right token.

    Args:
        few: take few windows, of texts that are at hand.
    """
    corpus = Corpus(model, seed + 1, language_reference if few else None)
    windows = [corpus.window()[:WINDOW] for _ in range(FEW_WINDOWS if few else WINDOWS)]
    channel = Channel.parse(list(info.channel))
    generator = torch.Generator().manual_seed(seed)
    released = channel.release_batch(model, [w.tolist() for w in windows], generator)
    embedding = model.embedding.detach()
    lengths = embedding.float().norm(dim=1)
    requests, observed = [], []
    for window, (observation, truth) in zip(windows, released, strict=True):
        window = window.to(model.device)
        states = in_order(observation, truth).to(model.device)
        bound = matcher.bound(states)
        observed.append((bound, bound.prepare(states)))
        near = near_tokens(window, embedding, lengths, NEAR_TOKENS)
        parents = torch.arange(len(window), device=model.device).repeat_interleave(NEAR_TOKENS)
        prefix = model.prefix(offset=info.prefix_tokens)
        requests.append(Request(prefix, window, branches=near.flatten(), parents=parents))
    right, wrong, units, places = [], [], [], []
    for start in range(0, len(requests), WINDOWS_PER_PASS):
        part = model.run(requests[start : start + WINDOWS_PER_PASS], keep=False)
        for answer, (bound, rows) in zip(part, observed[start:], strict=False):
            beside = answer.branches.unflatten(0, (len(rows), NEAR_TOKENS))
            along, others = bound.along(answer.states, beside)
            # By its invariant a first row is compared with all tokens, and the nearest is taken, whatever its distance.
            later = slice(0 if matcher.invariant is None else 1, None)
            places.append(torch.arange(len(rows), device=rows.device)[later])
            rows, along, others = rows[later], along[later], others[later]
            norms = matcher.norms(rows)
            right.append(matcher.pairs(candidates=along, observed=rows) / norms)
            wide = rows.repeat_interleave(NEAR_TOKENS, dim=0)
            distances = matcher.pairs(candidates=others.flatten(0, 1), observed=wide)
            wrong.append(distances.view(-1, NEAR_TOKENS) / norms[:, None])
            units.append(norms)
    return Sample(torch.cat(right), torch.cat(wrong), torch.cat(units), torch.cat(places))


def near_tokens(
    tokens: Int[Tensor, " n"], embedding: Float[Tensor, "v d"], lengths: Float[Tensor, " v"], count: int
) -> Int[Tensor, "n k"]:
    """Return the tokens with the nearest embeddings (by cosine), but neither the token itself nor its twins.

    Padded vocabularies hold many tokens with one embedding.

    Args:
        lengths: of the embeddings, in float32.
    """
    dots = (embedding[tokens] @ embedding.T).float()
    close = max(1e-4, 4 * torch.finfo(embedding.dtype).eps)
    # Most tokens have few twins, so that a few more than wanted are looked at; the whole vocabulary where they are not.
    cosines = dots / lengths.clamp(min=1e-12)
    for many in (min(count + LIKELY_TWINS, len(embedding)), len(embedding)):
        near = cosines.topk(many, dim=1)
        both = lengths[tokens, None].square() + lengths[near.indices].square()
        twins = both - 2 * dots.gather(1, near.indices) <= close * both
        best = near.values.masked_fill(twins, float("-inf")).topk(count, dim=1)
        if bool((best.values > float("-inf")).all()):
            break
    return near.indices.gather(1, best.indices)


def _auto(sample: Sample, resolution: float, matcher: Matcher) -> Threshold:
    """Return the threshold of a sample; by an invariant no more than ``ROOM`` times as far as right candidates come.

    Behind few known rows an invariant is few numbers, in which wrong candidates of a large vocabulary come far nearer
    than those of a sample do. And the space that noised rows span holds a prompt's later tokens as well as the next. So
    where right and wrong overlap, or leave less than that room between them, or most right candidates are farther than
    any threshold may be (``Frame.farthest``), nothing is certain.
    """
    found = auto_threshold(sample, resolution)
    if matcher.invariant is None:
        return found
    if ROOM * found.floor > found.gap:
        return replace(found, chance=1.0)
    frame = FRAMES[matcher.invariant]
    room = max(ROOM * found.floor, frame.rounding * resolution)
    return replace(found, relative=min(found.relative, room, frame.farthest)).seen_on(sample)


def auto_threshold(sample: Sample, resolution: float) -> Threshold:
    """Return the geometric mean of the noise floor and the gap to the nearest wrong candidate.

    Where they overlap (noise, coarse numbers) no threshold is right for all. Attention sinks then get one of their
    own: in many models the states of first positions, and of repeats of the first token, are ten times longer than
    others and nearly the same for every token, so that one threshold would be far too narrow for all other rows.

    Args:
        resolution: relative rounding error of one operation in the coarser dtype of both sides.
    """
    floor, gap = float(sample.right.max()), float(sample.wrong.min())
    border = math.inf if floor < gap else norm_border(sample.norms, ENOUGH_SINKS)
    if math.isinf(border):
        return Threshold(_middle(sample, resolution), floor, gap).seen_on(sample)
    long = sample.norms.log() > border
    rest, sinks = (_middle(sample.where(which), resolution) for which in (~long, long))
    return Threshold(rest, floor, gap, sinks=sinks, border=border).seen_on(sample)


def _middle(sample: Sample, resolution: float) -> float:
    """Return a threshold between right and wrong distances; where they overlap, the one with the fewest errors.

    Wrong acceptances have more weight.
    """
    nearest = sample.wrong.amin(1)
    floor, gap = float(sample.right.max()), float(nearest.min())
    if floor < gap:
        # A floor measured on few windows is no bound (and is zero where both sides happened to run passes of one
        # shape): leave it room, but stay below half the gap.
        middle = math.sqrt(max(floor, resolution) * gap)
        return min(max(middle, 4 * floor), max(gap / 2, floor))
    grid = torch.cat([sample.right, nearest]).sort().values
    missed = (sample.right[None] > grid[:, None]).float().mean(1)
    false = (nearest[None] <= grid[:, None]).float().mean(1)
    return float(grid[(missed + FALSE_WEIGHT * false).argmin()])


def parse_epsilon(text: str) -> float | None:
    """Return the number of a numeric epsilon, None for ``auto`` and ``calibrated``.

    Raises:
        InputError: anything else, or a number that is not positive.
    """
    if text in ("auto", "calibrated"):
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0 or math.isinf(value):
        raise InputError(f"epsilon {text!r} is neither auto, calibrated nor a positive number")
    return value
