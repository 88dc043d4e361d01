"""Attack batches of prompts in the order of the protocol: release → recover → score."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from statistics import median
from typing import Any

import torch

from hiddenlab.config import AttackConfig
from hiddenlab.diagnosis import diagnose
from hiddenlab.errors import NotApplicableError
from hiddenlab.job import Case, Job, release
from hiddenlab.models import Request, TruncatedModel
from hiddenlab.models.request import packs
from hiddenlab.scoring import pieces_of, score, tokens_by_row
from hiddenlab.stages import are_replaced
from hiddenlab.summary import NOT_APPLICABLE, Sample
from hiddenlab.types import AttackResult, GroundTruth, Observation, ObservationInfo, Progress
from hiddenlab.utils.environment import peak_memory_mb

PREFILL_REPEATS = 3
MOST_DIAGNOSED = 3  # prompts of a run whose rows are looked at; a look costs some ten thousand tokens

Outcome = AttackResult | NotApplicableError
Measured = Callable[[Mapping[str, float | str]], None]  # takes what preparation measured, by name


class Work(ABC):
    """The prompts of a run with what attacks them: this process, or several workers.

    Attributes:
        config: with model, layer and stream resolved. inputs_sha256: of the inputs. prompts: how many there are.
        environment: fields of the record that are those of the workers in place of this process.
    """

    config: AttackConfig
    inputs_sha256: str
    prompts: int
    environment: Mapping[str, Any]

    @abstractmethod
    def attack(
        self, done: Collection[int], measured: Measured, progress: Progress
    ) -> Iterator[Sequence[Sample]]:
        """Attack the prompts that are not done, and yield their samples batch by batch.

        Args:
            done: indices of prompts. A batch that holds others is yielded whole where batches are independent.
            measured: called with what preparation measured.
        """

    @abstractmethod
    def peaks(self) -> dict[str, float | None]:
        """Return the most memory that a process held, in MB: its own and its device's."""


class InProcess(Work):
    """Work that this process does, see ``Work``."""

    environment: Mapping[str, Any] = {}

    def __init__(self, job: Job) -> None:
        self.job, self.config = job, job.config
        self.inputs_sha256, self.prompts = job.inputs_sha256, len(job.cases)

    def attack(
        self, done: Collection[int], measured: Measured, progress: Progress
    ) -> Iterator[Sequence[Sample]]:
        """Attack batch after batch."""
        for batch in batches(self.job, done):
            yield attack_batch(self.job, batch, measured, progress)

    def peaks(self) -> dict[str, float | None]:
        """Return those of this process."""
        return memory_peaks()


def batches(job: Job, done: Collection[int] = ()) -> list[list[Case]]:
    """Return the prompts that are not done in batches of neighbours with the same public facts.

    In an independent run the batches are those of the whole run. One that is done in part stands there whole: prompts
    of a batch are attacked together, and only together give the same result again.
    """
    size = min(job.attack.batch, job.config.batch or job.attack.batch)
    if job.config.independent:
        return [batch for batch in _batches(job.cases, size) if any(case.index not in done for case in batch)]
    return list(_batches([case for case in job.cases if case.index not in done], size))


def attack_batch(job: Job, batch: Sequence[Case], measured: Measured, progress: Progress) -> list[Sample]:
    """Release, recover and score a batch.

    The attack gets observations and the attacker's own model. Truths go directly from ``release`` to ``sample_of``.
    """
    released = [release(job, case) for case in batch]
    truths = [truth for _, truth in released]
    outcomes = recover(job, [observation for observation, _ in released], measured)
    prefills = time_prefill(job.model, _prompt_tokens(truths, outcomes))
    samples = []
    for case, (observation, truth), outcome, prefill in zip(batch, released, outcomes, prefills, strict=True):
        samples.append(sample_of(job.model, case, truth, outcome, prefill, observation.info.positions))
        if sentence := _diagnosed(job, case, outcome, progress):
            samples[-1]["diagnosis"] = sentence
    return samples


def fit(job: Job, info: ObservationInfo, measured: Measured) -> None:
    """Fit the attack to a channel, once.

    Raises:
        NotApplicableError: no observation of this channel can be attacked.
    """
    if info in job.fitted:
        return
    started = time.perf_counter()
    job.attack.fit(info, job.model, job.config.seed)
    measured(_measured(job, job.attack.measured, time.perf_counter() - started))
    job.fitted.append(info)


def recover(job: Job, observations: Sequence[Observation], measured: Measured) -> list[Outcome]:
    """Fit the attack to this channel, once, and recover a batch."""
    try:
        fit(job, observations[0].info, measured)
    except NotApplicableError as error:
        return [error] * len(observations)
    if job.config.independent:
        job.attack.reset()
    before = dict(job.attack.measured)
    try:
        return list(job.attack.recover_batch(observations))
    except NotApplicableError:  # perhaps not for all of them
        return [_recover_one(job, observation) for observation in observations]
    finally:
        # Some attacks prepare more when a prompt asks for it.
        if changed := {name: v for name, v in job.attack.measured.items() if before.get(name) != v}:
            measured(_measured(job, changed, float(changed.get("estimation_seconds", 0.0))))


def _measured(job: Job, values: Mapping[str, float | str], seconds: float) -> dict[str, float | str]:
    """Return what preparation measured, with the engine and the seconds it took."""
    reason = {"engine_reason": job.model.difference} if job.model.difference else {}
    return {**values, "engine": job.model.engine, "setup_seconds": seconds, **reason}


def _diagnosed(job: Job, case: Case, outcome: Outcome, progress: Progress) -> str | None:
    """Return what the rows of a file are where none was verified, for the first few prompts of a run, or where tokens
    were replaced.
    """
    observation = case.observation
    if observation is not None and isinstance(outcome, AttackResult) and are_replaced(observation.info):
        return (
            "a defense replaced tokens before the model ran: a verified token is one that ran, and need not be the "
            "prompt's"
        )
    if (
        observation is None
        or not isinstance(outcome, AttackResult)
        or any(t.verified for t in outcome.tokens)
    ):
        return None
    if job.attack.any_width or not job.config.check:
        return None
    # Which prompts of an independent run come first is not known.
    few = case.index if job.config.independent else len(job.diagnosed)
    if case.index not in job.diagnosed and few < MOST_DIAGNOSED:
        job.diagnosed[case.index] = None
        with suppress(NotApplicableError):
            job.diagnosed[case.index] = diagnose(
                observation, job.model, seed=job.config.seed, progress=progress
            )
    diagnosis = job.diagnosed.get(case.index)
    if diagnosis is None:
        return None
    if diagnosis.fault is None:
        return (
            f"{diagnosis.sentence}, and yet no token is verified: the rows were changed afterwards (noise, rounding); "
            "say how with --defense"
        )
    return diagnosis.sentence


def _recover_one(job: Job, observation: Observation) -> Outcome:
    try:
        return job.attack.recover(observation)
    except NotApplicableError as error:
        return error


def sample_of(
    model: TruncatedModel,
    case: Case,
    truth: GroundTruth | None,
    outcome: Outcome,
    prefill: float | None,
    shown: Sequence[int] | None = None,
) -> Sample:
    """Return one line of the record; None stands for what was not measured, for lack of a truth or a fitting attack.

    Args:
        shown: positions that have a row, None where all have. The record then counts the tokens with
            and without a row up to the last one, and how many of each were found (``tokens_by_row``).
    """
    if truth is not None and truth.text is None:
        truth = replace(truth, text=model.text(truth.tokens))
    sample: Sample = {
        "index": case.index,
        "id": case.id,
        "status": "attacked",
        "text": None if truth is None else truth.text,
        "truth_ids": None if truth is None else list(truth.tokens),
        **dict.fromkeys(("recovered", "exact", "token_accuracy", "bag_of_tokens_recall", "rouge_l", "bleu")),
    }
    if isinstance(outcome, NotApplicableError):
        return {**sample, "status": NOT_APPLICABLE, "reason": str(outcome)}
    tokens, ids = outcome.tokens, outcome.ids
    sample["recovered"] = outcome.text
    # Over the same tokens as the accuracy: one that was not recovered is neither right nor verified.
    sample["verified"] = sum(t.verified for t in tokens) / max(1, len(ids))
    if truth is not None:
        figures = asdict(score(outcome, truth))
        if (accuracy := figures.pop("shown_accuracy")) is not None:
            sample |= {"shown_accuracy": accuracy, "shown_ids": list(truth.shown)}
        sample |= figures
        sample |= tokens_by_row(outcome, truth, shown)
    return {
        **sample,
        "tokens": len(ids if truth is None else truth.tokens),
        "evaluated_tokens": outcome.evaluated_tokens,
        "forward_calls": outcome.forward_calls,
        "seconds": outcome.seconds,
        "prefill_seconds": prefill,
        "epsilon": outcome.epsilon,
        "stop_reason": outcome.stop_reason,
        "recovered_ids": ids,
        "positions": outcome.positions,
        "spans": list(pieces_of(model, outcome, truth)),
        "per_token": {
            name: [getattr(t, name) for t in tokens]
            for name in ("row", "distance", "margin", "evaluated", "verified")
        },
    }


def time_prefill(model: TruncatedModel, prompts: Sequence[Sequence[int] | None]) -> list[float | None]:
    """Measure the seconds of one plain forward of the prompts together, divided by tokens; None for None.

    They run in passes of up to ``model.max_pass_tokens`` tokens, once to warm up, then three times for the median.
    """
    known = [torch.tensor(list(tokens)) for tokens in prompts if tokens]
    times = []
    for _ in range(1 + PREFILL_REPEATS if known else 0):
        _synchronize(model)
        start = time.perf_counter()
        for tokens in packs(known, len, model.max_pass_tokens):
            model.run([Request(model.prefix(), t) for t in tokens], keep=False)
        _synchronize(model)
        times.append(time.perf_counter() - start)
    per_token = median(times[1:]) / sum(map(len, known)) if known else 0.0
    return [per_token * len(tokens) if tokens else None for tokens in prompts]


def _synchronize(model: TruncatedModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


def _prompt_tokens(
    truths: Sequence[GroundTruth | None], outcomes: Sequence[Outcome]
) -> list[Sequence[int] | None]:
    """Return the tokens to time a prefill with: the true ones, otherwise the recovered ones, which are as many."""
    prompts: list[Sequence[int] | None] = []
    for truth, outcome in zip(truths, outcomes, strict=True):
        if isinstance(outcome, NotApplicableError):
            prompts.append(None)
        else:
            prompts.append(outcome.ids if truth is None else truth.tokens)
    return prompts


def memory_peaks() -> dict[str, float | None]:
    """Return the most memory that this process held, in MB: its own and its device's."""
    device = torch.cuda.max_memory_allocated() / 1e6 if torch.cuda.is_available() else None
    return {"peak_memory_mb": peak_memory_mb(), "peak_device_memory_mb": device}


def _batches(cases: Sequence[Case], size: int) -> Iterator[list[Case]]:
    """Yield groups of neighbours with the same public facts, at most ``size`` in each."""
    batch: list[Case] = []
    for case in cases:
        if batch and (len(batch) == size or _public(case) != _public(batch[0])):
            yield batch
            batch = []
        batch.append(case)
    if batch:
        yield batch


def _public(case: Case) -> object:
    return None if case.observation is None else case.observation.info
