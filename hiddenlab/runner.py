"""A run, read as the protocol: release → recover → score → record."""

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import torch

from hiddenlab import registry
from hiddenlab.errors import NotApplicableError
from hiddenlab.job import Case, Job, generator, release
from hiddenlab.models import Request, TruncatedModel
from hiddenlab.models.request import packs
from hiddenlab.records import Recorder
from hiddenlab.summary import NOT_APPLICABLE, Sample, summarise
from hiddenlab.types import AttackResult, BatchAttack, GroundTruth, Observation, Progress, silent
from hiddenlab.utils.environment import peak_memory_mb

PREFILL_REPEATS = 3
DEFAULT_BATCH = 32  # prompts attacked together, where neither the attack nor the user says how many
MISSING = -1  # stands for a token that was not recovered, and equals none

Outcome = AttackResult | NotApplicableError


def run_attack(
    job: Job, recorder: Recorder, *, progress: Progress = silent, show: Callable[[Sample], None] | None = None
) -> dict[str, Any]:
    """Attack the prompts that the record does not hold yet, and return the summary of all.

    The attack gets observations and the attacker's truncated model. Secrets pass it by: from ``release`` to ``score``.

    Raises:
        RecordError: the disk is full.
    """
    todo = _not_recorded(job, recorder)
    try:
        progress("prompts", len(job.cases) - len(todo), len(job.cases))
        for batch in _batches(todo, _at_once(job)):
            released = [release(job, case) for case in batch]
            observations = [observation for observation, _ in released]
            secrets = [secret for _, secret in released]
            outcomes = recover(job, observations, recorder)
            prefills = time_prefill(job.model, _prompt_tokens(secrets, outcomes))
            for case, (observation, secret), outcome, prefill in zip(
                batch, released, outcomes, prefills, strict=True
            ):
                sample = score(job.model, case, secret, outcome, prefill, observation.info.positions)
                recorder.append(sample)
                if show is not None:
                    show(sample)
            progress("prompts", len(recorder.samples), len(job.cases))
    except KeyboardInterrupt:
        recorder.close("interrupted", summary_of(recorder))
        raise
    except BaseException as error:
        _close_failed(recorder, error)
        raise
    summary = summary_of(recorder)
    recorder.close("finished", summary)
    return summary


def recover(job: Job, observations: Sequence[Observation], recorder: Recorder) -> list[Outcome]:
    """Set the attack up for this channel, once, and let it recover a batch."""
    try:
        _set_up(job, observations[0], recorder)
    except NotApplicableError as error:
        return [error] * len(observations)
    random = generator(job.spec.seed, "attack")
    if isinstance(job.attack, BatchAttack) and len(observations) > 1:
        try:
            return list(job.attack.recover_batch(observations, job.model, random))
        except NotApplicableError:
            pass  # perhaps not for all of them
    return [_recover_one(job, observation) for observation in observations]


def _recover_one(job: Job, observation: Observation) -> Outcome:
    try:
        return job.attack.recover(observation, job.model, generator(job.spec.seed, "attack"))
    except NotApplicableError as error:
        return error


def _set_up(job: Job, observation: Observation, recorder: Recorder) -> None:
    setup = getattr(job.attack, "setup", None)
    if setup is None or observation.info in job.setups:
        return
    start = time.perf_counter()
    measured = setup(observation, job.model, generator(job.spec.seed, "setup")) or {}
    measured = {**measured, "setup_seconds": time.perf_counter() - start}
    # Seconds add up over the parts of a resumed run; other figures are those of the last setup.
    before = {name: value for name, value in recorder.record.setup.items() if name.endswith("seconds")}
    spent = {
        name: value + (before.get(name) or 0.0)
        for name, value in measured.items()
        if name.endswith("seconds")
    }
    recorder.record.setup = {**recorder.record.setup, **measured, **spent}
    recorder.save()
    job.setups.append(observation.info)


def score(
    model: TruncatedModel,
    case: Case,
    secret: GroundTruth | None,
    outcome: Outcome,
    prefill: float | None,
    shown: Sequence[int] | None = None,
) -> Sample:
    """One line of the record; None is what was not measured, for want of a truth or a fitting attack.

    Args:
        shown: positions that have a row, None where all have. Of the tokens before the last of them that have none
            the record says how many there are (``missing_tokens``) and how many were found (``missing_tokens_right``).
    """
    truth = None if secret is None else list(secret.tokens)
    sample: Sample = {
        "index": case.index,
        "id": case.id,
        "status": "attacked",
        "text": None if truth is None else model.text(truth),
        "truth_ids": truth,
        **dict.fromkeys(("recovered", "exact", "token_accuracy", "bag_of_tokens_recall", "rouge_l", "bleu")),
    }
    if isinstance(outcome, NotApplicableError):
        return {**sample, "status": NOT_APPLICABLE, "reason": str(outcome)}
    tokens, ids = outcome.tokens, outcome.ids
    sample["recovered"] = model.text(ids)
    places = _places(outcome, truth)
    if truth is not None:
        # Tokens that were not recovered count as wrong, and those behind them are compared at their own places.
        aligned = dict(zip(places, ids, strict=True))
        metric = registry.resolve("metrics", "text")
        sample |= metric(
            truth_ids=truth,
            recovered_ids=[aligned.get(place, MISSING) for place in range(max(aligned, default=-1) + 1)],
            truth_text=sample["text"],
            recovered_text=sample["recovered"],
        )
        if shown is not None and max(shown, default=0) < len(truth):
            unseen = set(range(max(shown, default=0))) - set(shown)
            right = sum(aligned.get(place) == truth[place] for place in unseen)
            sample |= {"missing_tokens": len(unseen), "missing_tokens_right": right}
    count = len(ids) if truth is None else len(truth)
    return {
        **sample,
        "tokens": count,
        # Of the same tokens as the accuracy: one that was not recovered is neither right nor verified.
        "verified": sum(t.verified for t in tokens) / max(1, count),
        "evaluated_tokens": outcome.evaluated_tokens,
        "forward_calls": outcome.forward_calls,
        "seconds": outcome.seconds,
        "prefill_seconds": prefill,
        "epsilon": outcome.epsilon,
        "stop_reason": outcome.stop_reason,
        "recovered_ids": ids,
        "positions": outcome.positions,
        "spans": _spans(model, outcome, places, truth),
        "per_token": {
            name: [getattr(t, name) for t in tokens]
            for name in ("row", "distance", "margin", "evaluated", "verified")
        },
    }


def summary_of(recorder: Recorder) -> dict[str, Any]:
    """The aggregates of a run's samples, with what was measured once for all of them."""
    setup = recorder.record.setup
    return {
        **summarise(recorder.samples),
        "probe_seconds": setup.get("probe_seconds"),
        "setup_seconds": setup.get("setup_seconds"),
        "peak_memory_mb": peak_memory_mb(),
        "peak_device_memory_mb": torch.cuda.max_memory_allocated() / 1e6
        if torch.cuda.is_available()
        else None,
    }


def time_prefill(model: TruncatedModel, prompts: Sequence[Sequence[int] | None]) -> list[float | None]:
    """Seconds of one plain forward of the prompts together, shared out by their tokens; None for None.

    They go in passes of up to ``model.max_pass_tokens`` tokens, once to warm up, then three times for the
    median.
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
    secrets: Sequence[GroundTruth | None], outcomes: Sequence[Outcome]
) -> list[Sequence[int] | None]:
    """The tokens to time a prefill with: the true ones, else the recovered ones, which are as many."""
    prompts: list[Sequence[int] | None] = []
    for secret, outcome in zip(secrets, outcomes, strict=True):
        if isinstance(outcome, NotApplicableError):
            prompts.append(None)
        else:
            prompts.append(outcome.ids if secret is None else secret.tokens)
    return prompts


def _places(recovery: AttackResult, truth: Sequence[int] | None) -> Sequence[int]:
    """Where in the truth each recovered token stands; the truth of one node's rows holds these alone."""
    if recovery.positions is None or (truth is not None and len(truth) == len(recovery.tokens)):
        return range(len(recovery.tokens))
    return recovery.positions


def _spans(
    model: TruncatedModel, recovery: AttackResult, places: Sequence[int], truth: Sequence[int] | None
) -> list[tuple[str, str]]:
    """The recovered text in pieces with a status: exact, wrong, unverified, missing, or verified without a truth.

    Several tokens may share one character; such a piece has the worst of their statuses.
    """
    order = ("verified", "exact", "unverified", "wrong")
    spans: list[tuple[str, str]] = []
    ids, start, read, status = recovery.ids, 0, 0, "verified"
    expected = 0
    for index, (place, token) in enumerate(zip(places, recovery.tokens, strict=True)):
        if place > expected:
            spans.append((f"⟨{place - expected}⟩", "missing"))
            start = read = index  # text does not join across a gap
        expected = place + 1
        status = max(status, _status(token.token, token.verified, truth, place), key=order.index)
        before, after = model.text(ids[start:read]), model.text(ids[start : index + 1])
        if after.endswith("\ufffd") and index + 1 < len(ids) and places[index + 1] == expected:
            continue
        spans.append((after[len(before) :], status))
        start, read, status = read, index + 1, "verified"
    return spans


def _status(token: int, verified: bool, truth: Sequence[int] | None, place: int) -> str:
    if truth is not None and (place >= len(truth) or truth[place] != token):
        return "wrong"
    if not verified:
        return "unverified"
    return "verified" if truth is None else "exact"


def _at_once(job: Job) -> int:
    """Prompts that are attacked together: no more than the attack takes at once, which would delay their record."""
    if not isinstance(job.attack, BatchAttack):
        return 1
    sizes = (getattr(job.attack, "batch", None), job.spec.batch)
    return min((one for one in sizes if isinstance(one, int) and one > 0), default=DEFAULT_BATCH)


def _batches(cases: Sequence[Case], size: int) -> Iterator[list[Case]]:
    """Neighbours with the same public facts, at most ``size`` together."""
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


def _not_recorded(job: Job, recorder: Recorder) -> list[Case]:
    done = {sample["index"] for sample in recorder.samples}
    return [case for case in job.cases if case.index not in done]


def _close_failed(recorder: Recorder, error: BaseException) -> None:
    try:
        recorder.close("failed", summary_of(recorder), f"{type(error).__name__}: {error}")
    except Exception:  # the first error is the one to tell
        return
