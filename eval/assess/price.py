"""Measure what a defense costs: the model's own quality, and time and bytes of a release."""

import math
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from hiddenlab.channels import Channel
from hiddenlab.errors import NotApplicableError
from hiddenlab.eval.assess.readings import truth_of
from hiddenlab.eval.assess.session import release_all
from hiddenlab.eval.measures.attack import degradation, name_of
from hiddenlab.job import Case
from hiddenlab.models import TruncatedModel
from hiddenlab.stages import changes_states
from hiddenlab.types import Progress

UTILITY_TOKENS = 128  # of each text


def utility_of(
    model: TruncatedModel, channel: Channel, cases: Sequence[Case], seed: int, progress: Progress
) -> dict[str, Any]:
    """Return what a defense does to the model's own answers, for who may undo it, or why that was not measured."""
    texts = [list(truth_of(case).tokens[:UTILITY_TOKENS]) for case in cases]
    try:
        changes_rows = any(map(changes_states, channel.defenses))
        passed = model if changes_rows else model.sibling(stream="logits", dtype=name_of(model.dtype))
        figures = degradation(passed, channel, texts, seed, progress)
    except NotApplicableError as error:
        return {"reason": f"not measured: {error}"}
    if not all(math.isfinite(value) for figure in figures.values() for value in figure.values()):
        return {"reason": "not measured: what the model says behind the defense are no finite numbers"}
    return dict(figures)


def cost_of(
    model: TruncatedModel, channel: Channel, cases: Sequence[Case], seed: int, progress: Progress
) -> dict[str, Any]:
    """Return time and bytes of a release, over one without the defense."""
    seconds: dict[str, list[float]] = {"defended": [], "plain": []}
    sizes: dict[str, int] = {"defended": 0, "plain": 0}
    for number, case in enumerate(cases):
        for name, one in (("plain", Channel([])), ("defended", channel)):
            begun = time.perf_counter()
            ((observation, _),) = release_all(model, one, [case], seed)
            if model.device.type == "cuda":
                torch.cuda.synchronize(model.device)
            seconds[name].append(time.perf_counter() - begun)
            sizes[name] += observation.states.nbytes
        progress("measuring the cost of a release", number + 1, len(cases))
    return {
        "time_over_plain": median(seconds["defended"]) / median(seconds["plain"]),
        "bytes_over_plain": sizes["defended"] / sizes["plain"],
    }
