"""Put several releases of one prompt together, as an attacker does who sees it again and again."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from hiddenlab.channels import SELECTION_FACTS, Channel
from hiddenlab.errors import NotApplicableError
from hiddenlab.input_noise import are_clipped
from hiddenlab.models import TruncatedModel
from hiddenlab.stages import SUPPOSED, Defense, Mixing, Replacement, averaged, changes_states
from hiddenlab.types import GroundTruth, Observation, ObservationInfo
from hiddenlab.utils.random import Draws, generator

FACT = "releases"  # of a prompt that was released several times: how often, and what of that the rows are
Reads = Literal["mean", "same", "first"]
KEY = 0  # of the attacker's own releases, where a key serves several
FEWEST = 16  # tokens of the attacker's own text: an order of so many rows is not repeated by chance
RIGHT = 0.99  # share of its rows that are matched rightly through the noise, or no mean is taken


def together(shown: Sequence[Observation], model: TruncatedModel, shared_key: bool, seed: int) -> Observation:
    """Return what several releases of one prompt say together: their mean, as one release behind weaker noise.

    The attacker knows the stages (``Stage.averaged`` says what the mean is of), and tries on a text of his own whether
    the others release the same rows each time. Rows that come in another order each time are matched, by the assignment
    of least squared distance, where that finds the order of his own text through the noise.

    Args:
        model: of the attacker. shared_key: whether the releases passed under one key. seed: of his own text.

    Returns:
        An observation whose fact ``releases`` says what it is: ``mean``; ``same`` where all are equal, so that more of
        them say no more; ``first`` where no mean is known, since something that is no noise was drawn anew, or noise
        hides which rows belong together. That of a mean holds the first release as well.
    """
    first, count = shown[0], len(shown)
    if all(torch.equal(one.states, first.states) for one in shown):
        return _said(first, count, "same")
    stages = Channel.parse(first.info.channel).defenses
    mean = [averaged(stage, count) for stage in stages]
    kept = [stage for stage, weaker in zip(stages, mean, strict=True) if weaker is stage]
    length = int(first.info.facts.get("tokens", len(first.states)))  # where rows are left out it is told
    alike = len(kept) < len(stages) and all(one.info == first.info for one in shown)
    alike = (
        alike
        and not _clipped_behind_noise(stages, kept, first.info)
        and not _bent(stages, kept, model, seed, length)
        and not _drawn_tokens(kept, model)
    )
    if not alike or not (how := _repeats(stages, kept, model, shared_key, seed, length)):
        return _said(first, count, "first")
    rows = [one.states.double() for one in shown]
    if how == "shuffled":
        rows = [rows[0], *(one[_matched(one, rows[0])] for one in rows[1:])]
    plain = ObservationInfo(
        first.info.model, first.info.signature, first.info.site,
        provider_dtype=first.info.provider_dtype, quantization=first.info.quantization,
    )  # fmt: skip
    info = Channel(mean).published(plain)
    seen = {name: first.info.facts[name] for name in (*SELECTION_FACTS, SUPPOSED) if name in first.info.facts}
    info = replace(info, positions=first.info.positions, facts={**info.facts, **seen})
    return _said(Observation(torch.stack(rows).mean(0).float(), info, first.known, first), count, "mean")


def reads(info: ObservationInfo) -> Reads | None:
    """Return what of several releases rows are; None of a single one."""
    said: dict[str, Any] | None = info.facts.get(FACT)
    return None if said is None else said["read"]


def _said(observation: Observation, count: int, read: Reads) -> Observation:
    facts = {**observation.info.facts, FACT: {"seen": count, "read": read}}
    return replace(observation, info=replace(observation.info, facts=facts))


def _repeats(
    stages: Sequence[Defense],
    kept: Sequence[Defense],
    model: TruncatedModel,
    shared_key: bool,
    seed: int,
    length: int,
) -> str | None:
    """Return how stages repeat what they release: "same", or "shuffled"; None where they do neither.

    Args:
        kept: those among them that add no noise. length: of the prompt, in tokens.
    """
    text = torch.randint(
        model.vocab_size, (max(length, FEWEST),), generator=generator(seed, "repeated text")
    ).tolist()
    key = KEY if shared_key else None

    def twice(through: Sequence[Defense]) -> list[tuple[Observation, GroundTruth]]:
        channel = Channel(through)
        return [channel.release(model, text, generator(seed, "repeated", n), key) for n in range(2)]

    try:
        one, other = (shown.states.double() for shown, _ in twice(kept))
        if one.shape != other.shape:
            return None
        if torch.allclose(one, other):
            return "same"
        if not torch.allclose(one, other[_matched(other, one)]):
            return None
        (first, truth), (second, again) = twice(stages)
    except NotApplicableError:
        return None
    if truth.row_order is None or again.row_order is None:
        return None
    found = torch.tensor(again.row_order)[_matched(second.states.double(), first.states.double())]
    right = (found == torch.tensor(truth.row_order)).double().mean()
    return "shuffled" if right >= RIGHT else None


def _bent(
    stages: Sequence[Defense], kept: Sequence[Defense], model: TruncatedModel, seed: int, length: int
) -> bool:
    """Return whether a stage behind noise makes something else of a mean than the mean of what it makes of each.

    Rounding does, and whatever keeps some coordinates or directions alone. Rows of the attacker's own tell.

    Args:
        kept, length: see ``_repeats``.
    """
    noise = [place for place, stage in enumerate(stages) if stage not in kept]
    outside = all(changes_states(stages[place]) for place in noise)  # else the noise is on the inputs
    own = generator(seed, "own rows")
    one, other = (torch.randn(max(length, FEWEST), model.width, generator=own) for _ in range(2))
    middle = (one + other) / 2
    for place, stage in enumerate(stages):
        if stage not in kept or not changes_states(stage) or (outside and place < noise[0]):
            continue
        made = []
        for rows in (one, other, middle):
            draws = Draws.seeded(0, KEY).for_stage(place, "states")
            released = (
                stage.mixed(rows, [], draws) if isinstance(stage, Mixing) else stage.states(rows, draws)
            )
            made.append(released[0])
        one, other, middle = made
        if not torch.allclose((one + other) / 2, middle, rtol=1e-3, atol=1e-3):
            return True
    return False


def _clipped_behind_noise(stages: Sequence[Defense], kept: Sequence[Defense], info: ObservationInfo) -> bool:
    """Return whether a stage scales embeddings down that noise made too long, each release by another factor.

    Args:
        kept: see ``_repeats``. info: of the release.
    """
    clean, noised = ObservationInfo(info.model, info.signature, info.site), False
    for stage in stages:
        if noised and are_clipped(stage.publish(clean)):
            return True
        noised = noised or (stage not in kept and not changes_states(stage))
    return False


def _drawn_tokens(kept: Sequence[Defense], model: TruncatedModel) -> bool:
    """Return whether a stage draws other tokens in each release: a token may be shown as several."""
    for stage in kept:
        if not isinstance(stage, Replacement):
            continue
        vocabulary = Channel(kept).vocabulary(model)
        try:
            if len(stage.origins(int(vocabulary.ordinary()[0]), 2, vocabulary)) > 1:
                return True
        except NotApplicableError:  # a bijection, whose key repeats
            continue
    return False


def _matched(rows: Float[Tensor, "n d"], to: Float[Tensor, "n d"]) -> Int[Tensor, " n"]:
    """Return which of the rows belongs to each of others."""
    return torch.tensor(linear_sum_assignment(torch.cdist(to, rows).square().cpu().numpy())[1])
