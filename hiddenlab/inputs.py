"""Read the prompts, observations and truths that a run names, without the weights of its model."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hiddenlab import registry
from hiddenlab.config import AttackConfig
from hiddenlab.errors import InputError
from hiddenlab.imports import Imported, ModelShape, Reading, read_states
from hiddenlab.models.load import resolve_model
from hiddenlab.observation import load_site
from hiddenlab.prompts import Prompt, load_prompts
from hiddenlab.truths import load_truth
from hiddenlab.types import GroundTruth, Observation


@dataclass(frozen=True)
class Inputs:
    """What a run reads before it needs the model's weights: a process can read it, and others attack it.

    Attributes:
        texts: prompts. observations: of ``--observation``. imported: of ``--states``, with the resolved configuration.
        secrets: of ``--truth``.
    """

    texts: Sequence[Prompt] = ()
    observations: Sequence[Observation] = ()
    imported: Imported | None = None
    secrets: Sequence[GroundTruth | None] | None = None


def read_inputs(config: AttackConfig) -> Inputs:
    """Read the files and data sets that a checked configuration names.

    Raises:
        HiddenlabError: one cannot be read, or holds nothing of use.
    """
    secrets = None if config.truth is None else load_truth(Path(config.truth))
    if config.states:
        return Inputs(imported=imported_states(config), secrets=secrets)
    if config.observation is not None:
        return Inputs(
            observations=load_site(Path(config.observation), config.layer, config.stream), secrets=secrets
        )
    return Inputs(texts=read_prompts(config))


def read_prompts(config: AttackConfig) -> list[Prompt]:
    """Return the prompt, or the prompts of the file or data set, that a configuration names.

    Raises:
        HiddenlabError: they cannot be read, or there are none.
    """
    if config.prompt is None:
        return load_prompts(
            config.prompts, column=config.column, limit=config.limit, template=config.template
        )
    if not config.prompt.strip():
        raise InputError("the prompt is empty; give at least one token")
    return [Prompt("p001", config.prompt, "PROMPT")]


def imported_states(config: AttackConfig) -> Imported:
    """Return what files of states hold (``config.states``); of the model only the sizes are needed.

    Raises:
        HiddenlabError: a file cannot be read, or does not fit the model; see ``hiddenlab.imports.read_states``.
    """
    name = "builtin" if config.model is None else config.model
    reading = Reading(
        config.layer, config.stream, config.format, config.tensor, config.axes,
        _numbers("--layers", config.layers), config.first_position, config.skip_rows,
        _numbers("--split", config.split), config.ids, config.mask, config.defense,
    )  # fmt: skip
    ref = resolve_model(name, trust_remote_code=config.trust_remote_code)
    return read_states(config.states, ModelShape.of(ref), reading)


def _numbers(option: str, text: str | None) -> tuple[int, ...]:
    return () if text is None else tuple(registry.parse_numbers(option, text, least=0))
