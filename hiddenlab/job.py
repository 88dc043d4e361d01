"""Check the options of a run and load what it needs, before any record exists."""

import hashlib
import inspect
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, cast

import torch

from hiddenlab import registry
from hiddenlab.base import Attack
from hiddenlab.channels import Channel
from hiddenlab.code_files import load_named
from hiddenlab.config import ATTACK_OPTIONS, AttackConfig
from hiddenlab.diagnosis import Diagnosis, diagnose
from hiddenlab.errors import HiddenlabError, InputError, NotApplicableError
from hiddenlab.imports import Imported
from hiddenlab.inputs import Inputs, imported_states, read_inputs, read_prompts
from hiddenlab.models import TruncatedModel, load_model
from hiddenlab.models.load import checked_layer, load_config, resolve_model
from hiddenlab.models.tokens import most_tokens
from hiddenlab.observation import check_observation
from hiddenlab.options import Stream
from hiddenlab.prompts import Prompt
from hiddenlab.row_facts import extra_rows
from hiddenlab.text import count_of
from hiddenlab.types import LAST_STREAMS, GroundTruth, Observation, ObservationInfo, Progress, silent
from hiddenlab.utils.random import generator


@dataclass(frozen=True)
class Case:
    """One prompt to attack: its truth where that is known, its observation where that comes from a file.

    ``prompt`` is what the truth was made of; None where that comes from a file.
    """

    index: int
    id: str
    truth: GroundTruth | None
    observation: Observation | None = None
    prompt: Prompt | None = None


@dataclass
class Job:
    """A checked run: the attacker's truncated model, the channel, the attack, and what to attack.

    ``fitted`` are the channels that the attack was prepared for, ``diagnosed`` what was found of the rows of some
    prompts, by index.
    """

    config: AttackConfig
    model: TruncatedModel
    channel: Channel
    attack: Attack
    cases: list[Case]
    fitted: list[ObservationInfo] = field(default_factory=list)
    diagnosed: dict[int, Diagnosis | None] = field(default_factory=dict)

    @property
    def inputs_sha256(self) -> str:
        """A digest of the inputs, which shows whether a file or a data set has changed since."""
        digest = hashlib.sha256()
        for case in self.cases:
            tokens = None if case.truth is None else case.truth.tokens
            digest.update(json.dumps([case.index, tokens]).encode())
            if case.observation is not None:
                digest.update(case.observation.states.cpu().float().numpy().tobytes())
        return digest.hexdigest()


def prepare(config: AttackConfig, progress: Progress = silent, inputs: Inputs | None = None) -> Job:
    """Check a configuration and load what it needs.

    Args:
        inputs: what ``read_inputs`` returned; None reads it now.

    Raises:
        HiddenlabError: anything in it is unknown, out of range, unreadable or does not fit together.
    """
    config = config.checked()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    attack = build_attack(config, progress)
    if config.observation is None and not config.states:
        Channel.parse(config.defense, files=True)  # an unknown one is said before anything is read
    inputs = read_inputs(config) if inputs is None else inputs
    observations, secrets = inputs.observations, inputs.secrets
    if config.states:
        brought = import_states(config, progress, inputs.imported)
        truths = brought.truths if secrets is None else secrets
        cases = _given(brought.observations, truths, brought.config, brought.model, attack.any_width)
        job = Job(brought.config, brought.model, Channel([]), attack, cases)
        job.diagnosed |= brought.diagnosed
        return job
    if config.observation is None:
        channel = Channel.parse(config.defense, files=True)
    else:
        channel = Channel([])  # saved states passed their channel already
        _check_defense(config.defense, observations[0].info.channel)
    # A file of somebody else may name a model, but must not make this machine contact the hub.
    local_only = bool(observations) and config.model is None
    if observations:
        config = _with_public(config, observations[0].info)
    config = _with_site(config)
    progress("loading the model", 0, 1)
    model = _load(config, local_only)
    channel.provider_model(model)  # loaded now and kept, so that errors come early
    progress("loading the model", 1, 1)
    cases = (
        _given(observations, secrets, config, model, attack.any_width)
        if observations
        else cases_of(inputs.texts, model, config.max_tokens)
    )
    return Job(config, model, channel, attack, cases)


def prepare_layers(
    config: AttackConfig, layers: Sequence[int] | Literal["all"], progress: Progress = silent
) -> tuple[list[int], Iterator[Job]]:
    """Return the numbers of several layers, and a checked run for each, made when it is its turn.

    They share the model's weights and its prompts.

    Raises:
        HiddenlabError: see ``prepare``; or a layer is out of range, stands twice, or the states come from a file.
    """
    config, layers = check_layers(config, layers)
    deepest = prepare(replace(config, layer=max(layers)), progress)
    models = {layer: deepest.model.shallower(layer) for layer in sorted(layers)}
    shown, _ = release(deepest, deepest.cases[0])
    deepest.attack.expect(shown.info, list(models.values()))

    def jobs() -> Iterator[Job]:
        for number, layer in enumerate(layers, 1):
            progress(f"layer {layer} ({number} of {len(layers)})", 0, 0)
            own = replace(deepest.config, layer=layer)
            yield Job(own, models[layer], deepest.channel, build_attack(own, progress), deepest.cases)

    return layers, jobs()


def check_layers(
    config: AttackConfig, layers: Sequence[int] | Literal["all"]
) -> tuple[AttackConfig, list[int]]:
    """Return a checked configuration for several layers, and their numbers.

    Raises:
        InputError: a layer is out of range or stands twice, or the states are of one layer alone.
    """
    config = replace(config, layer=None).checked()
    if layers != "all":
        layers = _numbered(layers)
    if config.states or config.observation is not None:
        raise InputError("states of a file are of one layer; give one --layer")
    if config.stream in (*LAST_STREAMS, "embed"):
        raise InputError(f"the stream {config.stream} exists at one layer; leave out --layer")
    total = _count_layers(config)
    if layers == "all":
        return config, list(range(1, total + 1))
    checked_layer(config.model or "builtin", total, max(layers), "resid")
    return config, list(layers)


def prepare_defenses(
    config: AttackConfig, defenses: Sequence[Sequence[str]], progress: Progress = silent
) -> Iterator[Job]:
    """Return a checked run for each of several defenses, made when it is its turn; they share model and prompts.

    No attack learns from the prompts: behind the next defense it would know rows of the same prompts already.

    Raises:
        HiddenlabError: see ``prepare``; a defense stands twice, or the states come from a file. The defenses are
            checked before a model is loaded.
    """
    named = ["+".join(stages) or "identity" for stages in defenses]
    for stages in defenses:
        Channel.parse(tuple(stages), files=True)
    if twice := next((name for name in named if named.count(name) > 1), None):
        raise InputError(f"the defense {twice} is given twice")
    if config.states or config.observation is not None:
        raise InputError("states of a file lie behind one defense; compare needs prompts")
    first = prepare(replace(config, defense=tuple(defenses[0])), progress)
    first.attack.learns = False

    def jobs() -> Iterator[Job]:
        for number, stages in enumerate(defenses):
            own = replace(first.config, defense=tuple(stages))
            progress(f"{named[number]} ({number + 1} of {len(defenses)})", 0, 0)
            if number == 0:
                yield first
                continue
            channel = Channel.parse(own.defense, files=True)
            channel.provider_model(first.model)
            attack = build_attack(own, progress)
            attack.learns = False
            yield Job(own, first.model, channel, attack, first.cases)

    return jobs()


@dataclass(frozen=True)
class Brought:
    """What files of other programs hold, for one truncated model.

    Attributes:
        config: with the site and the channel that the files say. truths: by prompt, None where a file holds no ids.
        diagnosed: what the first prompt's rows are, where it was looked; by index.
    """

    config: AttackConfig
    model: TruncatedModel
    observations: list[Observation]
    truths: list[GroundTruth | None]
    diagnosed: dict[int, Diagnosis | None]


def import_states(
    config: AttackConfig, progress: Progress = silent, imported: Imported | None = None
) -> Brought:
    """Read the states that another program saved (``config.states``), and load the model whose states they are.

    Every decision is reported through ``progress`` as a line.

    Args:
        imported: what the files hold, where they were read already.

    Raises:
        HiddenlabError: a file cannot be read, or does not fit the model; see ``hiddenlab.imports.read_states``.
    """
    config = replace(config.checked(), model="builtin" if config.model is None else config.model)
    assert config.model is not None
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    imported = imported_states(config) if imported is None else imported
    for note in imported.notes:
        progress(note, 0, 0)
    if any(truth is not None for truth in imported.truths):
        progress("the token ids are the truth: they score the attack, which does not see them", 0, 0)
    site, channel = imported.site, imported.prompts[0].channel
    config = replace(config, layer=site.layer, stream=cast(Stream, site.stream), defense=channel)
    progress("loading the model", 0, 1)
    model = _load(config)
    Channel.parse(channel).provider_model(model)  # loaded now and kept, so that errors come early
    progress("loading the model", 1, 1)
    observations = imported.observations(model)
    for observation in observations:
        check_observation(observation, model)
    diagnosed = {0: _looked_at(observations, model, config, progress)} if config.check else {}
    return Brought(config, model, observations, imported.truths, diagnosed)


def _looked_at(
    observations: Sequence[Observation], model: TruncatedModel, config: AttackConfig, progress: Progress
) -> Diagnosis | None:
    """Return what the first prompt's rows are, before anything is searched; None where a defense changed them.

    Raises:
        InputError: they are certainly no states of the site that they claim, or not in this layout.
    """
    try:
        diagnosis = diagnose(observations[0], model, seed=config.seed, progress=progress)
    except NotApplicableError:
        return None
    if diagnosis.certain:
        sentence = diagnosis.sentence
        if diagnosis.fault == "padding" and len(observations) > 1:  # each prompt has its own
            row = diagnosis.starts[0]
            sentence = f"the first of {len(observations)} prompts begins in row {row}, behind padding: give --mask FILE"
        raise InputError(f"{config.states[0]}: {sentence}, or --no-check if you know better")
    progress(diagnosis.sentence, 0, 0)
    return diagnosis


def capture_all(config: AttackConfig, progress: Progress = silent) -> list[tuple[Observation, GroundTruth]]:
    """Release every prompt of a configuration through its channel; an attack run sees the same states.

    Raises:
        HiddenlabError: see ``prepare``.
    """
    config = config.checked()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    channel = Channel.parse(config.defense, files=True)
    texts = read_prompts(config)
    config = _with_site(config)
    model = _load(config)
    channel.provider_model(model)
    released = []
    cases = cases_of(texts, model, config.max_tokens)
    for case in cases:
        released.append(_release(channel, model, case, config.seed))
        progress("prompts", len(released), len(cases))
    return released


def build_attack(config: AttackConfig, progress: Progress = silent) -> Attack:
    """Build the attack with those of the options that it declares.

    Raises:
        InputError: an option was given that it does not have.
    """
    load_named("attacks", config.attack)
    name, _ = registry.parse_spec(config.attack)
    parameters = inspect.signature(registry.resolve("attacks", name)).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    given = {key: value for key in ATTACK_OPTIONS if (value := getattr(config, key)) is not None}
    if not takes_any and (unknown := [f"--{key}" for key in given if key not in parameters]):
        raise InputError(
            f"the attack {name} has no option {', '.join(unknown)}; it takes {', '.join(parameters) or 'none'}"
        )
    if config.batch is not None and (takes_any or "batch" in parameters):
        given["batch"] = config.batch
    attack = registry.build("attacks", config.attack, **given)
    if not isinstance(attack, Attack):
        raise HiddenlabError(
            f"{type(attack).__name__} is no attack: it does not extend hiddenlab.base.Attack"
        )
    attack.progress = progress
    attack.learns = not config.independent
    return attack


def release(job: Job, case: Case) -> tuple[Observation, GroundTruth | None]:
    """Return what the defense shows of one prompt, and its truth."""
    if case.observation is not None:
        return case.observation, case.truth
    return _release(job.channel, job.model, case, job.config.seed)


def _release(
    channel: Channel, model: TruncatedModel, case: Case, seed: int
) -> tuple[Observation, GroundTruth]:
    assert case.truth is not None
    return channel.release(model, case.truth.tokens, generator(seed, "release", case.index))


def cases_of(prompts: Sequence[Prompt], model: TruncatedModel, max_tokens: int | None = None) -> list[Case]:
    """Return prompts as cases with their truth.

    Raises:
        InputError: a prompt is longer than the model takes, or cannot be tokenized.
    """
    longest = most_tokens(model.module)
    cases = []
    for index, prompt in enumerate(prompts):
        tokens = model.tokenize(prompt, max_tokens)
        if longest is not None and len(tokens) > longest:
            raise InputError(
                f"prompt {prompt.id} has {count_of(len(tokens), 'token')}, and {model.ref.name} takes "
                f"{longest}; use --max-tokens"
            )
        cases.append(Case(index, prompt.id, GroundTruth(tuple(tokens)), prompt=prompt))
    return cases


def _given(
    observations: Sequence[Observation],
    truths: Sequence[GroundTruth | None] | None,
    config: AttackConfig,
    model: TruncatedModel,
    any_width: bool,
) -> list[Case]:
    longest = most_tokens(model.module)
    for observation in observations:
        check_observation(observation, model, any_width=any_width)
        last = (observation.info.positions or (len(observation.states) - 1,))[
            -1
        ] + observation.info.prefix_tokens
        if longest is not None and last >= longest:
            raise InputError(
                f"the observation has {count_of(last + 1, 'token')}, and {model.ref.name} takes {longest}"
            )
    truths = [None] * len(observations) if truths is None else truths
    states = config.observation or ", ".join(config.states)
    fitting = (truth is None or _fits(truth, seen) for truth, seen in zip(truths, observations, strict=False))
    if config.truth is not None and (len(truths) != len(observations) or not all(fitting)):
        raise InputError(
            f"{config.truth} is not the truth of {states}: its tokens, or their order, do not fit the rows"
        )
    for i, truth in enumerate(truths):
        if truth is not None and (token := max(*truth.tokens, *truth.shown)) >= model.vocab_size:
            raise InputError(
                f"{config.truth or states}: secrets[{i}].tokens holds {token}, and {model.ref.name} has "
                f"{count_of(model.vocab_size, 'token')}; it is the truth of another model"
            )
    cases = [
        Case(index, f"p{index + 1:03d}", truth, observation)
        for index, (truth, observation) in enumerate(zip(truths, observations, strict=True))
    ]
    return cases[: config.limit]


def _fits(truth: GroundTruth, observation: Observation) -> bool:
    """Return whether an observation can be of this prompt, by its length; of a shard, by its last row."""
    places, order = observation.info.positions, truth.row_order
    extra, tokens = extra_rows(observation.info), list(range(len(truth.tokens)))
    if observation.info.rows_permuted and sorted(order or ())[-len(tokens) :] != tokens:
        return False
    if places is None:
        return len(truth.tokens) == len(observation.states) - extra
    return len(places) == len(observation.states) and places[-1] < len(truth.tokens)


def _with_public(config: AttackConfig, info: ObservationInfo) -> AttackConfig:
    """Take model, layer, stream and the channel's specs from the observation where they are not given."""
    return replace(
        config,
        model=info.model if config.model is None else config.model,
        layer=info.site.layer if config.layer is None else config.layer,
        stream=cast(Stream, info.site.stream) if config.stream is None else config.stream,
        defense=config.defense or info.channel,
    )


def _check_defense(given: Sequence[str], passed: Sequence[str]) -> None:
    """Load the code of the defense that saved states passed, where the user names its file.

    A recorded run names the channel of its file, which needs no more.

    Raises:
        InputError: it is another defense; see ``Channel.parse``.
    """
    if not given or tuple(given) == tuple(passed):
        return
    named = Channel.parse(given, files=True).specs
    if named != tuple(passed):
        there = " | ".join(passed) or "no defense"
        raise InputError(
            f"--observation brings its own states, which passed {there} and not {' | '.join(named)}; leave out "
            "--defense, or name the file of the one that they passed"
        )


def _with_site(config: AttackConfig) -> AttackConfig:
    """Fill in the defaults: the built-in model, and its middle layer (the last for streams after the final norm)."""
    model, stream, layer = (
        "builtin" if config.model is None else config.model,
        config.stream or "resid",
        config.layer,
    )
    if layer is None:
        total = _count_layers(config)
        layer = total if stream in LAST_STREAMS else 0 if stream == "embed" else max(1, total // 2)
    return replace(config, model=model, stream=stream, layer=layer)


def _numbered(layers: object) -> list[int]:
    """Return layers as a list, checked.

    Raises:
        InputError: they are no list of numbers from 1 on, each once.
    """
    given = list(layers) if isinstance(layers, Iterable) and not isinstance(layers, str) else []
    if not given or any(type(layer) is not int or layer < 1 for layer in given) or len({*given}) < len(given):
        raise InputError(
            f"layers {str(layers)[:60]!r}: give 'all', or a list of numbers from 1 on, each once"
        )
    return given


def _count_layers(config: AttackConfig) -> int:
    """Return how many layers the whole model has."""
    name = "builtin" if config.model is None else config.model
    ref = resolve_model(name, trust_remote_code=config.trust_remote_code)
    return int(getattr(load_config(ref), "num_hidden_layers", 0))


def _load(config: AttackConfig, local_only: bool = False) -> TruncatedModel:
    assert config.model is not None
    assert config.stream is not None
    return load_model(
        config.model,
        config.layer,
        stream=config.stream,
        dtype=config.dtype,
        device=config.device,
        device_map=config.device_map,
        local_only=local_only,
        engine=config.engine,
        trust_remote_code=config.trust_remote_code,
    )
