"""Assess the strongest defense of a family that the model's quality allows, alone or behind a secret map."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hiddenlab.channels import Channel
from hiddenlab.config import AttackConfig
from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.eval.assess.cell import assessment
from hiddenlab.eval.assess.price import UTILITY_TOKENS, utility_of
from hiddenlab.eval.cells import Worded
from hiddenlab.job import prepare
from hiddenlab.registry import stages_of
from hiddenlab.types import Progress, silent

TEXTS = 20  # on which the strength is searched, of up to UTILITY_TOKENS tokens
HALVINGS = 6  # of the range of strengths: within 1/64 of it, on a scale of logarithms
RANGE = re.compile(r"([\d.e+-]+?)\.\.([\d.e+-]+)")


def strongest(spec: dict[str, Any], folder: Path, progress: Progress = silent) -> Worded:
    """Find the strongest defense of a family that keeps enough of the model's next tokens, and assess it.

    The noise alone is what costs quality: whoever holds the key undoes the map. So strength is searched without the
    map, by halving, which supposes that a stronger one never keeps more. It is searched on longer texts than those that
    are attacked: behind few tokens noise does more harm, and a stronger one is still of use for longer texts.

    Args:
        spec: family (a spec with a range of strengths, ``gaussian:sigma=0.001..1``, the weakest first; without a range
            there is one strength), map (``identity``, or stages joined by ``+``), loss (the share of next tokens that
            may differ), minutes, and the options of ``AttackConfig``.

    Raises:
        NotApplicableError: the weakest loses more than that, or what the model says behind it cannot be measured.
        HiddenlabError: the defense or the model cannot be used.
    """
    options = {
        name: value for name, value in spec.items() if name not in ("family", "map", "loss", "minutes")
    }
    config = AttackConfig.from_json(options)
    limit = max(TEXTS, config.limit or TEXTS)
    config = replace(config, attack="vocab-match", limit=limit, max_tokens=UTILITY_TOKENS)
    job = prepare(config, progress)
    measured = dict[str, Any]()

    def kept(stage: str) -> float:
        channel = Channel.parse([stage], files=True)
        found = utility_of(job.model, channel, job.cases, job.config.seed, progress)
        if "reason" in found:
            raise NotApplicableError(f"{stage}: {found['reason']}")
        measured[stage] = found["top1_agreement"]
        return float(measured[stage]["value"])

    stage = strongest_of(spec["family"], 1 - spec["loss"], kept)
    stages = [stage, *(one for one in stages_of(spec["map"]) if one != "identity")]
    found = assessment({**options, "defense": stages, "minutes": spec["minutes"]}, folder, progress)
    return Worded({**found.figures, "kept": measured[stage]}, {"strongest": stage, **found.words})


def strongest_of(family: str, least: float, kept: Callable[[str], float]) -> str:
    """Return the spec of the strongest stage of a family that keeps at least a share of the next tokens.

    Args:
        family: see ``strongest``. least: the share. kept: measures it for a spec.

    Raises:
        NotApplicableError: the weakest keeps less, or less than the strongest does.
    """
    at = specs_of(family)
    weakest = at(0.0)
    share = kept(weakest)
    if share < least:
        raise NotApplicableError(
            f"{weakest} keeps {share:.0%} of the next tokens, where {least:.0%} are asked for"
        )
    low, high = 0.0, 1.0
    if at(high) == weakest:
        return weakest
    most = kept(at(high))
    if most > share:
        raise NotApplicableError(
            f"{at(high)} keeps {most:.0%} of the next tokens and {weakest} {share:.0%}: give the weakest strength first"
        )
    if most >= least:
        return at(high)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if kept(at(middle)) >= least:
            low = middle
        else:
            high = middle
    return at(low)


def specs_of(family: str) -> Callable[[float], str]:
    """Return the spec of a family at a place from 0 (the weakest) to 1, evenly by logarithm.

    A range of whole numbers stays whole.

    Raises:
        InputError: it has several ranges, or one that is not of two numbers above 0.
    """
    name, colon, given = family.partition(":")  # a name may be that of a file in the folder above
    ranges = RANGE.findall(given)
    if not ranges and ".." not in given:
        return lambda _: family
    if len(ranges) != 1 or given.count("..") != 1 or "..." in given:
        raise InputError(f"{family!r} has to hold one range of strengths, such as gaussian:sigma=0.001..1")
    try:
        first, last = (float(end) for end in ranges[0])
    except ValueError:
        first = last = 0.0
    if not (first > 0 and last > 0 and math.isfinite(first) and math.isfinite(last)):
        raise InputError(f"the strengths of {family!r} have to be two numbers above 0")
    whole = all(end.isdigit() for end in ranges[0])

    def at(place: float) -> str:
        value = first * (last / first) ** place
        shown = str(round(value)) if whole else f"{value:.3g}"
        return name + colon + RANGE.sub(shown, given)

    return at
