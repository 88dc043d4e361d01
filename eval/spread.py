"""Attack the prompts of a run over Ray workers, each with a model of its own; results are those of one process."""

import gc
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hiddenlab.batch import Measured, Work, attack_batch, batches, fit, memory_peaks
from hiddenlab.channels import Channel
from hiddenlab.config import AttackConfig
from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.eval.parallel import Crew
from hiddenlab.inputs import Inputs, read_inputs
from hiddenlab.job import Job, build_attack, prepare, release
from hiddenlab.runner import Workers
from hiddenlab.summary import Sample
from hiddenlab.types import Progress, silent
from hiddenlab.utils.cache import asked_paths, from_cache, into_cache

SHARED = (
    "probes",
    "texts",
    "infill",
)  # folders of the cache whose files the first worker gives to the others


@dataclass(frozen=True)
class Given:
    """What the workers get of a run. ``mark`` tells it from other runs."""

    mark: str
    config: AttackConfig
    inputs: Inputs


@dataclass(frozen=True)
class Prepared:
    """What a worker says of a run: the resolved configuration, its inputs, and the prompts of each batch, by index."""

    config: AttackConfig
    inputs_sha256: str
    batches: list[list[int]]


@dataclass(frozen=True)
class Fitted:
    """What the first worker's attack is fitted to: what was measured, the kind of probe, and files of the cache."""

    measured: list[dict[str, float | str]]
    probe: float | str | None
    files: dict[str, bytes]


class AttackWorkers(Workers):
    """Workers that share the batches of attack runs, for ``hiddenlab.run(config, workers=…)``; a context manager.

    The first worker prepares the attack; the others get the probes that it trained. Samples are those of one process
    with ``independent``, bit by bit where the processors are alike and as many threads are used.

    Args:
        address: of a running Ray cluster (``auto`` finds it); None starts workers on this machine.
        count: of workers; None is one for each card of the cluster, or for each machine where there is no card.
    """

    def __init__(self, address: str | None = None, count: int | None = None) -> None:
        self.address, self.count = address, count
        self._crew: Crew | None = None

    def __enter__(self) -> "AttackWorkers":
        return self

    def __exit__(self, *_: object) -> None:
        if self._crew is not None:
            self._crew.close()
            self._crew = None

    def prepare(self, config: AttackConfig, progress: Progress = silent) -> Work:
        """Read the inputs here, and load the model in the first worker.

        Raises:
            HiddenlabError: see ``hiddenlab.job.prepare`` and ``Crew.start``.
        """
        config = config.checked()
        build_attack(config)  # a wrong request is refused before any worker starts
        if config.observation is None and not config.states:
            Channel.parse(config.defense, files=True)
        inputs = read_inputs(config)
        if self._crew is None:
            self._crew = Crew(self.address, self.count, threads=config.threads, device=config.device)
        self._crew.start(progress)
        given = self._crew.put(Given(secrets.token_hex(8), config, inputs))
        prepared = self._crew.first(_prepare, given, progress=progress)
        self._crew.begin(_prepare, given)
        return _Spread(self._crew, given, prepared)


class _Spread(Work):
    """The batches of a run, shared among workers."""

    def __init__(self, crew: Crew, given: Any, prepared: Prepared) -> None:
        self._crew, self._given, self._batches = crew, given, prepared.batches
        self.config, self.inputs_sha256 = prepared.config, prepared.inputs_sha256
        self.prompts = sum(map(len, prepared.batches))
        self.environment: Mapping[str, Any] = {"hardware": crew.facts["hardware"], "threads": crew.threads}
        self._peaks: dict[str, float | None] = {}

    def attack(
        self, done: Collection[int], measured: Measured, progress: Progress
    ) -> Iterator[Sequence[Sample]]:
        """Let the first worker prepare the attack, then share the batches."""
        crew = self._crew
        todo = [batch for batch in self._batches if not set(done).issuperset(batch)]
        if not todo:
            return
        workers, lost_before, lost = float(crew.workers), len(crew.lost), 0
        measured({"workers": workers, "workers_lost": 0.0})
        fitted: Fitted = crew.first(_fit, self._given, progress=progress)
        for values in fitted.measured:
            measured(values)
        before = (_join, self._given, crew.put(fitted))
        for _, (samples, found, peaks) in crew.share(_attack, todo, before=before, progress=progress):
            for values in found:
                measured(values)
            if len(crew.lost) - lost_before > lost:
                lost = len(crew.lost) - lost_before
                measured({"workers_lost": float(lost)})
            for name, value in peaks.items():
                self._peaks[name] = max(filter(None, (self._peaks.get(name), value)), default=None)
            yield samples

    def peaks(self) -> dict[str, float | None]:
        """Return those of the largest worker."""
        return {**dict.fromkeys(("peak_memory_mb", "peak_device_memory_mb")), **self._peaks}


# What follows runs in a worker; its state holds the job of the present run.


def _job(state: dict[str, Any], note: Progress, given: Given) -> Job:
    if state.get("mark") != given.mark:
        state.clear()
        gc.collect()  # the model of the run before
        state["job"] = prepare(given.config, note, given.inputs)
        state["mark"] = given.mark
    job: Job = state["job"]
    return job


def _prepare(state: dict[str, Any], note: Progress, given: Given) -> Prepared:
    """Load the model, and say what there is to attack."""
    job = _job(state, note, given)
    return Prepared(job.config, job.inputs_sha256, [[case.index for case in batch] for batch in batches(job)])


def _fit(state: dict[str, Any], note: Progress, given: Given) -> Fitted:
    """Fit the attack to the channel of the first prompt."""
    job = _job(state, note, given)
    measured: list[dict[str, float | str]] = []
    with asked_paths() as paths:
        _fit_first(job, measured)
    return Fitted(measured, job.attack.measured.get("probe"), from_cache(paths, SHARED))


def _fit_first(job: Job, measured: list[dict[str, float | str]]) -> None:
    try:
        fit(job, release(job, job.cases[0])[0].info, lambda values: measured.append(dict(values)))
    except NotApplicableError:
        return  # every sample will say so


def _join(state: dict[str, Any], note: Progress, given: Given, fitted: Fitted) -> None:
    """Take over what the first worker prepared."""
    into_cache(fitted.files)
    job = _job(state, note, given)
    _fit_first(job, [])
    if (probe := job.attack.measured.get("probe")) != fitted.probe:
        raise InputError(
            f"the cache of one worker holds a {probe} probe for these states, that of the first one a {fitted.probe} "
            "one; set HIDDENLAB_CACHE to one folder for all workers, or to a new one for each"
        )


def _attack(
    state: dict[str, Any], note: Progress, indices: list[int]
) -> tuple[list[Sample], list[dict[str, float | str]], dict[str, float | None]]:
    """Attack a batch."""
    job: Job = state["job"]
    measured: list[dict[str, float | str]] = []
    batch = [job.cases[index] for index in indices]
    samples = attack_batch(job, batch, lambda values: measured.append(dict(values)), note)
    return samples, measured, memory_peaks()
