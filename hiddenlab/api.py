"""Attack observations in one call, from a notebook or a script."""

from collections.abc import Sequence
from typing import Any, overload

from hiddenlab import registry
from hiddenlab.assessment import Assessment
from hiddenlab.attacker import Attacker
from hiddenlab.base import Attack
from hiddenlab.channels import Channel
from hiddenlab.code_files import load_named
from hiddenlab.errors import InputError
from hiddenlab.models import TruncatedModel
from hiddenlab.prompts import Prompt
from hiddenlab.stages import Defense
from hiddenlab.types import AttackResult, Observation, Progress, silent


def channel(*stages: str | Defense) -> Channel:
    """Build the channel between provider and attacker from defenses, applied from left to right.

    Without stages it releases states unchanged.

    Args:
        stages: specs such as ``"gaussian:sigma=0.01"`` (see ``hiddenlab list defenses``), files of your own such as
            ``"rounding.py:decimals=2"``, whose code then runs, or defense objects.

    Raises:
        InputError: an unknown name, or a missing or malformed parameter.
    """
    return Channel.parse(stages, files=True)


@overload
def attack(
    observation: Observation,
    model: TruncatedModel,
    attack: str | Attack = ...,
    *,
    seed: int = ...,
    **options: Any,
) -> AttackResult: ...
@overload
def attack(
    observation: Sequence[Observation],
    model: TruncatedModel,
    attack: str | Attack = ...,
    *,
    seed: int = ...,
    **options: Any,
) -> list[AttackResult]: ...
def attack(
    observation: Observation | Sequence[Observation],
    model: TruncatedModel,
    attack: str | Attack = "vocab-match",
    *,
    seed: int = 0,
    **options: Any,
) -> AttackResult | list[AttackResult]:
    """Recover the prompt behind an observation, or the prompts behind several of one channel.

    Args:
        observation: released states with their public facts. model: the attacker's own truncated model.
        attack: a spec such as ``"vocab-match:search=greedy"`` (see ``hiddenlab list attacks``), a file of your own
            such as ``"mine.py"``, whose code then runs, or an attack object.
        seed: of everything that the attack draws.
        options: of the attack, where it is given by a spec.

    Returns:
        What was recovered: ``result.text``, ``result.verified``, and ``result.tokens`` with all details. For a list of
        observations, a list.

    Raises:
        InputError: the observation does not fit the model, or an option is unknown.
        NotApplicableError: the attack needs something that the observation lacks.
    """
    several = [observation] if isinstance(observation, Observation) else list(observation)
    if not several:
        return []
    if isinstance(attack, str):
        load_named("attacks", attack)
        chosen: Attack = registry.build("attacks", attack, **_known(attack, options))
    elif options:
        raise InputError(f"give {', '.join(options)} to the attack object itself")
    else:
        chosen = attack
    results = chosen.fit(several[0].info, model, seed).recover_batch(several)
    return results[0] if isinstance(observation, Observation) else results


def assess(
    defense: Channel | str | Defense | Sequence[str | Defense],
    model: TruncatedModel,
    prompts: str | Sequence[str | Prompt] | None = None,
    *,
    max_tokens: int | None = None,
    minutes: float = 10.0,
    seed: int = 0,
    progress: Progress = silent,
    **attacker: Any,
) -> Assessment:
    """Say whether a defense holds: attack it with everything that applies, as ``hiddenlab assess`` does.

    Nothing is recorded. An assessment takes up to twice the minutes, and a few more for utility and cost.

    Args:
        defense: a channel, or its stages: specs, files of your own, or defense objects.
        model: the attacker's own truncated model, which also releases the prompts.
        prompts: texts of your own; None takes the first twenty of the shipped ones. max_tokens: of each prompt.
        minutes: for all attacks on all prompts together. seed: of everything that is drawn.
        progress: where progress is reported. attacker: what he has beside the rows, as options of ``hiddenlab assess``:
            ``key="session", known=3``. ``attacks=["mine.py"]`` are attacks of his own, by file or name.

    Returns:
        The verdict; printed, it is one sentence. ``status`` is one word, ``findings`` holds all figures.

    Raises:
        InputError: an unknown defense, no prompts, a prompt too long for the model, minutes not above 0, or an
            unknown option of the attacker.
    """
    if not isinstance(defense, Channel):
        stages = [defense] if isinstance(defense, str) or not isinstance(defense, Sequence) else defense
        defense = channel(*stages)
    if "attacks" in attacker:
        attacker["attacks"] = _named(attacker["attacks"])
    made: Assessment = registry.resolve("eval", "assess-channel")(
        defense,
        model,
        prompts,
        max_tokens=max_tokens,
        minutes=minutes,
        seed=seed,
        progress=progress,
        attacker=Attacker.from_json(attacker),
    )
    return made


def _named(attacks: Any) -> list[str]:
    """Return the names of an attacker's own attacks; an assessment builds an attack several times."""
    given = [attacks] if isinstance(attacks, str) or not isinstance(attacks, Sequence) else list(attacks)
    if not all(isinstance(one, str) for one in given):
        raise InputError(
            "attacks of hl.assess are named: give attacks=['FILE.py'], or a name of 'hiddenlab list attacks'"
        )
    return given


def _known(spec: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options, all of which the attack must have; a misspelt one would otherwise be ignored silently."""
    name, _ = registry.parse_spec(spec)
    known = registry.parameters("attacks", name)
    if unknown := [key for key in options if key not in known]:
        raise InputError(f"the attack {name} has no option {unknown[0]!r}; it takes {', '.join(known)}")
    return options
