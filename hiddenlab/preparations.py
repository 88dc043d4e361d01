"""Say which observations one preparation of an attack serves, and what it is prepared for."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby, islice

from hiddenlab.channels import SELECTION_FACTS, Channel
from hiddenlab.stages import REPLACED, SUPPOSED
from hiddenlab.types import Observation, ObservationInfo


def as_whole(info: ObservationInfo) -> ObservationInfo:
    """Return the public facts as if every row had been shown and no token replaced.

    So one preparation serves any choice of rows. Rows are matched with the tokens that they are of; what those stood
    for is another question.
    """
    facts = {
        name: value
        for name, value in info.facts.items()
        if name not in (*SELECTION_FACTS, REPLACED, SUPPOSED)
    }
    return replace(
        info,
        positions=None,
        channel=Channel.parse(info.channel).of_shown_tokens().specs,
        facts=facts,
    )


def suppose(info: ObservationInfo, strength: float) -> ObservationInfo:
    """Return the public facts with an assumed strength in the stage of unknown strength."""
    channel = Channel.parse(info.channel)
    supposed = channel.supposed(strength)
    info = replace(info, channel=supposed.specs)
    for before, stage in zip(channel.defenses, supposed.defenses, strict=True):
        info = info if before is stage else stage.publish(info)
    return info


def by_channel(observations: Iterable[Observation], size: int) -> Iterator[list[Observation]]:
    """Yield groups of neighbouring observations that one preparation serves, at most ``size`` in each."""
    for _, same in groupby(observations, key=lambda observation: as_whole(observation.info)):
        while group := list(islice(same, size)):
            yield group
