"""From the options of a run to something that runs: all is checked here, before any record exists."""

import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field

from hiddenlab import registry
from hiddenlab.channels import Channel
from hiddenlab.errors import InputError
from hiddenlab.models import TruncatedModel, load_model
from hiddenlab.models.load import load_config, resolve_model
from hiddenlab.observation import check_observation, load_observations
from hiddenlab.prompts import load_prompts
from hiddenlab.types import LAST_STREAMS, Attack, GroundTruth, Observation, ObservationInfo, Progress, silent
from hiddenlab.utils.files import write_file
from hiddenlab.utils.schema import (
    CLOSED,
    Count,
    Positive,
    Seed,
    Threads,
    TokenId,
    check,
    parse,
    read_bytes,
)

TRUTH_FORMAT = 1


@dataclass(frozen=True)
class AttackSpec:
    """Every option of ``hiddenlab attack`` that can change its result; ``rerun`` starts from it.

    ``prompt`` holds the text where it came as an argument or on standard input. None means the default;
    model, layer and stream are resolved before the spec is recorded.
    """

    __pydantic_config__ = CLOSED

    attack: str = "vocab-match"
    prompt: str | None = None
    prompts: str | None = None
    column: str | None = None
    limit: Positive | None = None
    max_tokens: Positive | None = None
    observation: str | None = None
    truth: str | None = None
    model: str | None = None
    layer: int | None = None
    stream: str | None = None
    defense: tuple[str, ...] = ()
    search: str | None = None
    proposal: str | None = None
    distance: str | None = None
    epsilon: str | None = None
    budget: Positive | None = None
    batch: Positive | None = None
    seed: Seed = 0
    device: str = "auto"
    device_map: str | None = None
    dtype: str = "float32"
    threads: Threads | None = None

    def to_json(self) -> dict[str, Any]:
        """All options by name."""
        return {**asdict(self), "defense": list(self.defense)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], where: str = "the spec") -> "AttackSpec":
        """Rebuild a recorded spec.

        Args:
            where: names the spec's place in an error.

        Raises:
            InputError: an option is unknown to this version, or has a value that it cannot have.
        """
        return check(dict(data), cls, where)


@dataclass(frozen=True)
class Case:
    """One prompt to attack: its truth where that is known, its observation where that came from a file."""

    index: int
    id: str
    truth: GroundTruth | None
    observation: Observation | None = None


@dataclass
class Job:
    """A checked run: the attacker's truncated model, the channel, the attack, and what to attack."""

    spec: AttackSpec
    model: TruncatedModel
    channel: Channel
    attack: Attack
    cases: list[Case]
    setups: list[ObservationInfo] = field(default_factory=list)

    @property
    def inputs_sha256(self) -> str:
        """A digest of what is attacked, to notice that a file or a data set has changed since."""
        digest = hashlib.sha256()
        for case in self.cases:
            tokens = None if case.truth is None else case.truth.tokens
            digest.update(json.dumps([case.index, tokens]).encode())
            if case.observation is not None:
                digest.update(case.observation.states.cpu().float().numpy().tobytes())
        return digest.hexdigest()


def prepare(spec: AttackSpec, progress: Progress = silent) -> Job:
    """Check a spec and load what it needs.

    Raises:
        HiddenlabError: anything in it is unknown, out of range, unreadable or does not fit together.
    """
    if spec.threads is not None:
        torch.set_num_threads(spec.threads)
    attack = build_attack(spec, progress)
    observations: list[Observation] = []
    if spec.observation is None:
        channel = Channel.parse(spec.defense)
    else:
        channel = Channel([])  # the states passed theirs already, which may be known to their provider alone
        observations = load_observations(Path(spec.observation))
    secrets = None if spec.truth is None else load_truth(Path(spec.truth))
    # A file of somebody else may name a model, but not make this machine ask the hub for it.
    local_only = bool(observations) and spec.model is None
    if observations:
        spec = _with_public(spec, observations[0].info)
    sources = [] if observations else _texts(spec)
    spec = _with_site(spec)
    progress("loading the model", 0, 1)
    model = _load(spec, local_only)
    channel.provider_model(model)  # which it keeps; what cannot be loaded should fail now
    progress("loading the model", 1, 1)
    cases = _given(observations, secrets, spec, model) if observations else _prompts(sources, spec, model)
    return Job(spec, model, channel, attack, cases)


def capture_all(spec: AttackSpec, progress: Progress = silent) -> list[tuple[Observation, GroundTruth]]:
    """What the channel of a spec releases of each of its prompts, the same as an attack run would see.

    Raises:
        HiddenlabError: see ``prepare``.
    """
    if spec.threads is not None:
        torch.set_num_threads(spec.threads)
    channel = Channel.parse(spec.defense)
    texts = _texts(spec)
    spec = _with_site(spec)
    model = _load(spec)
    channel.provider_model(model)
    released = []
    cases = _prompts(texts, spec, model)
    for case in cases:
        released.append(_release(channel, model, case, spec.seed))
        progress("prompts", len(released), len(cases))
    return released


def build_attack(spec: AttackSpec, progress: Progress = silent) -> Attack:
    """The attack with those of the options that it declares.

    Raises:
        InputError: an option was given that it does not have.
    """
    name, _ = registry.parse_spec(spec.attack)
    parameters = inspect.signature(registry.resolve("attacks", name)).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = ("search", "proposal", "distance", "epsilon", "budget")
    given = {key: getattr(spec, key) for key in named if getattr(spec, key) is not None}
    if not anything and (strange := [f"--{key}" for key in given if key not in parameters]):
        raise InputError(
            f"the attack {name} has no option {', '.join(strange)}; it takes {', '.join(parameters)}"
        )
    offered = {"seed": spec.seed, "progress": progress}
    if spec.batch is not None:
        offered["batch"] = spec.batch
    taken = {key: value for key, value in offered.items() if anything or key in parameters}
    attack: Attack = registry.build("attacks", spec.attack, **given, **taken)
    return attack


def generator(seed: int, *what: object) -> torch.Generator:
    """A generator of its own for each purpose, so that no result depends on what else is run."""
    digest = hashlib.sha256(json.dumps([seed, *map(str, what)]).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def release(job: Job, case: Case) -> tuple[Observation, GroundTruth | None]:
    """What the defense shows of one prompt, and what it keeps to itself."""
    if case.observation is not None:
        return case.observation, case.truth
    return _release(job.channel, job.model, case, job.spec.seed)


def _release(
    channel: Channel, model: TruncatedModel, case: Case, seed: int
) -> tuple[Observation, GroundTruth]:
    assert case.truth is not None
    return channel.release(model, case.truth.tokens, generator(seed, "release", case.index))


@dataclass(frozen=True)
class _Truth:
    """One prompt of a truth file."""

    __pydantic_config__ = CLOSED

    tokens: Annotated[tuple[TokenId, ...], Field(min_length=1)]
    row_order: tuple[Count, ...] | None = None

    def secret(self) -> GroundTruth:
        return GroundTruth(self.tokens, self.row_order)


@dataclass(frozen=True)
class _Truths:
    """A truth file."""

    __pydantic_config__ = CLOSED

    format: int
    secrets: Annotated[list[_Truth], Field(min_length=1)]


def save_truth(secrets: Sequence[GroundTruth], path: Path) -> None:
    """Write tokens and row orders as JSON, for scoring an attack on saved observations later; its owner alone may read.

    Raises:
        InputError: the file cannot be written.
    """
    rows = [{"tokens": s.tokens, "row_order": s.row_order} for s in secrets]
    write_file(path, json.dumps({"format": TRUTH_FORMAT, "secrets": rows}) + "\n", private=True)


def load_truth(path: Path) -> list[GroundTruth]:
    """Read what ``save_truth`` wrote.

    Raises:
        InputError: the file cannot be read, is no truth file, or names rows that its prompts do not have.
    """
    stored = parse(read_bytes(path), _Truths, str(path), TRUTH_FORMAT)
    secrets = [row.secret() for row in stored.secrets]
    for i, secret in enumerate(secrets):
        order = secret.row_order or ()
        if len(set(order)) < len(order) or max(order, default=0) >= len(secret.tokens):
            raise InputError(f"{path}: secrets[{i}].row_order names a row twice, or one that there is not")
    return secrets


def _texts(spec: AttackSpec) -> list[tuple[str, str]]:
    if spec.prompt is None:
        return [(p.id, p.text) for p in load_prompts(spec.prompts, column=spec.column, limit=spec.limit)]
    if not spec.prompt.strip():
        raise InputError("the prompt is empty; give at least one token")
    return [("p001", spec.prompt)]


def _prompts(texts: Sequence[tuple[str, str]], spec: AttackSpec, model: TruncatedModel) -> list[Case]:
    longest = _longest(model)
    cases = []
    for index, (id, text) in enumerate(texts):
        tokens = model.tokenize(text, spec.max_tokens)
        if longest is not None and len(tokens) > longest:
            raise InputError(
                f"prompt {id} has {len(tokens)} tokens, and {spec.model} takes {longest}; use --max-tokens"
            )
        cases.append(Case(index, id, GroundTruth(tuple(tokens))))
    return cases


def _longest(model: TruncatedModel) -> int | None:
    """Tokens that the model takes, None where it does not say."""
    longest = getattr(model.module.config, "max_position_embeddings", None)
    return longest if isinstance(longest, int) and longest > 0 else None


def _given(
    observations: Sequence[Observation],
    secrets: Sequence[GroundTruth] | None,
    spec: AttackSpec,
    model: TruncatedModel,
) -> list[Case]:
    longest = _longest(model)
    for observation in observations:
        check_observation(observation, model)
        last = (observation.info.positions or (len(observation.states) - 1,))[-1]
        if longest is not None and last >= longest:
            raise InputError(f"the observation has {last + 1} tokens, and {model.ref.name} takes {longest}")
    truths: Sequence[GroundTruth | None] = [None] * len(observations)
    if secrets is not None:
        if len(secrets) != len(observations) or not all(map(_fits, secrets, observations)):
            raise InputError(
                f"{spec.truth} is not the truth of {spec.observation}: its tokens, or their order, do not fit the rows"
            )
        for i, secret in enumerate(secrets):
            if (token := max(secret.tokens)) >= model.vocab_size:
                raise InputError(
                    f"{spec.truth}: secrets[{i}].tokens holds {token}, and {model.ref.name} has "
                    f"{model.vocab_size} tokens; it is the truth of another model"
                )
        truths = secrets
    cases = [
        Case(index, f"p{index + 1:03d}", truth, observation)
        for index, (truth, observation) in enumerate(zip(truths, observations, strict=True))
    ]
    return cases[: spec.limit]


def _fits(secret: GroundTruth, observation: Observation) -> bool:
    """Whether an observation can be of this prompt, by its length; of a shard, by its last row."""
    places, order = observation.info.positions, secret.row_order
    if observation.info.rows_permuted and sorted(order or ()) != list(range(len(secret.tokens))):
        return False
    if places is None:
        return len(secret.tokens) == len(observation.states)
    return len(places) == len(observation.states) and places[-1] < len(secret.tokens)


def _with_public(spec: AttackSpec, info: ObservationInfo) -> AttackSpec:
    """Model, layer and stream from the observation, where they were not given, and the channel's specs."""
    return replace(
        spec,
        model=info.model if spec.model is None else spec.model,
        layer=info.site.layer if spec.layer is None else spec.layer,
        stream=spec.stream or info.site.stream,
        defense=info.channel,
    )


def _with_site(spec: AttackSpec) -> AttackSpec:
    """The defaults: the built-in model, its middle layer (the last for what comes after the final norm)."""
    model, stream, layer = "builtin" if spec.model is None else spec.model, spec.stream or "resid", spec.layer
    if layer is None:
        total = int(getattr(load_config(resolve_model(model)), "num_hidden_layers", 0))
        layer = total if stream in LAST_STREAMS else 0 if stream == "embed" else max(1, total // 2)
    return replace(spec, model=model, stream=stream, layer=layer)


def _load(spec: AttackSpec, local_only: bool = False) -> TruncatedModel:
    assert spec.model is not None
    assert spec.stream is not None
    return load_model(
        spec.model,
        spec.layer,
        stream=spec.stream,
        dtype=spec.dtype,
        device=spec.device,
        device_map=spec.device_map,
        local_only=local_only,
    )
