"""Run an attack on prompts in the order of the protocol: release → recover → score → record."""

import gc
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch

from hiddenlab.config import AttackConfig
from hiddenlab.diagnosis import diagnose
from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.job import Case, Job, prepare, prepare_defenses, prepare_layers, release
from hiddenlab.models import Request, TruncatedModel
from hiddenlab.models.request import packs
from hiddenlab.records import Recorder, RunRecord, check_new, check_writable
from hiddenlab.scoring import missing_tokens, pieces_of, score
from hiddenlab.summary import NOT_APPLICABLE, Sample, figures_of, summarise
from hiddenlab.text import coloured, count_of, html
from hiddenlab.types import AttackResult, GroundTruth, Observation, Progress, silent
from hiddenlab.utils.environment import peak_memory_mb

PREFILL_REPEATS = 3
LONGEST_NAME = 100  # letters of a defense in the name of its folder; file systems end at 255
MOST_DIAGNOSED = 3  # prompts of a run whose rows are looked at; a look costs some ten thousand tokens

Outcome = AttackResult | NotApplicableError


@dataclass(frozen=True)
class Run:
    """A run that has ended: its record, one sample for each prompt, and its directory, if any.

    Attributes:
        samples: one dictionary for each prompt, the lines of ``samples.jsonl``.
        path: the run's directory; None where nothing was written.
    """

    record: RunRecord
    samples: list[Sample]
    path: Path | None

    @property
    def summary(self) -> dict[str, Any]:
        """The figures over all prompts; None stands for what was not measured."""
        return self.record.summary or {}

    def __repr__(self) -> str:
        where = "not recorded" if self.path is None else self.path
        return f"Run({count_of(len(self.samples), 'prompt')}, {self.record.status}, {where})"

    def _repr_html_(self) -> str:
        rows = []
        for sample in self.samples:
            shown = coloured(sample["spans"]) if "spans" in sample else html(str(sample.get("reason", "")))
            rows.append(f"<tr><td>{html(sample['id'])}</td><td style='text-align:left'>{shown}</td></tr>")
        figures = "".join(
            f"<tr><td>{name}</td><td>{value}</td></tr>" for name, value in figures_of(self.summary)
        )
        return f"<table>{''.join(rows)}</table><table>{figures}</table>"


def run(
    config: AttackConfig,
    out: str | Path | None = None,
    *,
    runs_dir: str | Path = "runs",
    keep: bool = True,
    resume: str | Path | None = None,
    progress: Progress = silent,
    show: Callable[[Sample], None] | None = None,
) -> Run:
    """Attack every prompt of a configuration and record the results, as ``hiddenlab attack`` does.

    Args:
        config: every option that can change a result.
        out: the run's directory, a new one; None makes one in ``runs_dir``. keep: false writes nothing.
        resume: continue the run in this directory.
        progress: where progress is reported. show: called with each prompt's sample as soon as it is recorded.

    Raises:
        HiddenlabError: anything in the configuration is unknown, out of range, unreadable or does not fit together, or
            the record cannot be written.
        Interrupted: from the keyboard; its ``run`` holds what is recorded.
    """
    recorder: Recorder | None = None
    if out is not None:
        check_new(Path(out))
    elif keep and resume is None:
        check_writable(Path(runs_dir))
    try:
        job = prepare(config, progress)
        if resume is None:
            recorder = _created(job, None if out is None else Path(out), Path(runs_dir), keep)
        else:
            recorder = Recorder.resume(Path(resume), job.inputs_sha256)
        attack_all(job, recorder, progress=progress, show=show)
    except KeyboardInterrupt:
        raise Interrupted(None if recorder is None else _ended(recorder)) from None
    return _ended(recorder)


def run_layers(
    config: AttackConfig,
    layers: Sequence[int] | Literal["all"] = "all",
    out: str | Path | None = None,
    *,
    runs_dir: str | Path = "runs",
    keep: bool = True,
    progress: Progress = silent,
    show: Callable[[Sample], None] | None = None,
    ended: Callable[[Run], None] | None = None,
) -> list[Run]:
    """Attack every prompt of a configuration at several layers of its model; each layer has a run of its own.

    The model is loaded once, and the states that first probes need come from the same passes for all layers.

    Args:
        config: its ``layer`` is not read. layers: 1 is the first.
        out: the directory of the runs; each layer makes a new folder there. None makes one for each run in
            ``runs_dir``. keep: false writes nothing.
        progress, show: see ``run``. ended: called with each run as soon as it has ended.

    Raises:
        HiddenlabError: see ``run``. Interrupted: from the keyboard; its ``run`` is that of the layer at work.
    """
    folder = None if out is None else Path(out)
    if folder is not None and layers != "all":
        _check_folders(folder, layers)
    try:
        layers, jobs = prepare_layers(config, layers, progress)
        if folder is not None:
            _check_folders(folder, layers)
    except KeyboardInterrupt:
        raise Interrupted(None, (), () if layers == "all" else layers) from None
    folders = [None if folder is None else _folder(folder, layer) for layer in layers]
    return _run_each(
        jobs, layers, folders, runs_dir=runs_dir, keep=keep, progress=progress, show=show, ended=ended
    )


def run_defenses(
    config: AttackConfig,
    defenses: Sequence[Sequence[str]],
    out: str | Path | None = None,
    *,
    keep: bool = True,
    progress: Progress = silent,
    show: Callable[[Sample], None] | None = None,
    ended: Callable[[Run], None] | None = None,
) -> list[Run]:
    """Attack the same prompts of a configuration behind several defenses; each has a run of its own.

    The attacker's model and the prompts are loaded once.

    Args:
        config: its ``defense`` is not read. defenses: stages of each, as in ``AttackConfig.defense``.
        out: the directory of the runs; each defense makes a new folder there. None with ``keep`` false.
        progress, show, ended: see ``run_layers``.

    Raises:
        HiddenlabError: see ``run``; or a defense is given twice. Interrupted: see ``run_layers``; ``left`` holds the
            defenses that were not begun.
    """
    names = ["+".join(stages) or "identity" for stages in defenses]
    folders: list[Path | None] = [None] * len(defenses)
    if out is not None and keep:
        check_new(Path(out))
        folders = [
            Path(out) / f"{number:02}-{re.sub(r'[^a-z0-9=.+-]+', '-', name)[:LONGEST_NAME]}"
            for number, name in enumerate(names, 1)
        ]
    try:
        jobs = prepare_defenses(config, defenses, progress)
    except KeyboardInterrupt:
        raise Interrupted(None, (), defenses) from None
    return _run_each(jobs, defenses, folders, keep=keep, progress=progress, show=show, ended=ended)


def _run_each(
    jobs: Iterator[Job],
    names: Sequence[Any],
    folders: Sequence[Path | None],
    *,
    runs_dir: str | Path = "runs",
    keep: bool,
    progress: Progress,
    show: Callable[[Sample], None] | None,
    ended: Callable[[Run], None] | None,
) -> list[Run]:
    """Attack and record several jobs, one after another.

    Args:
        names: what ``Interrupted.left`` calls the jobs. folders: of their records; None makes one in ``runs_dir``.

    Raises:
        HiddenlabError: see ``run``. Interrupted: from the keyboard.
    """
    runs: list[Run] = []
    recorder: Recorder | None = None
    try:
        for job, folder in zip(jobs, folders, strict=True):
            recorder = _created(job, folder, Path(runs_dir), keep)
            attack_all(job, recorder, progress=progress, show=show)
            runs.append(_ended(recorder))
            recorder = None
            if ended is not None:
                ended(runs[-1])
            del job
            gc.collect()  # an attack's tables, which refer to each other
    except KeyboardInterrupt:
        left = names[len(runs) + (recorder is not None) :]
        raise Interrupted(None if recorder is None else _ended(recorder), runs, left) from None
    return runs


def _folder(out: Path, layer: int) -> Path:
    return out / f"layer-{layer:02}"


def _check_folders(out: Path, layers: Iterable[int]) -> None:
    """Check that the folders of layers are new; those of other layers may be there.

    Raises:
        InputError: one holds something, or ``out`` is no directory.
    """
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} exists and is not a directory; name a new one")
    for layer in layers:
        if type(layer) is int:  # anything else is refused elsewhere
            check_new(_folder(out, layer))


def _created(job: Job, out: Path | None, runs_dir: Path, keep: bool) -> Recorder:
    record = RunRecord(
        verb="attack",
        spec=job.config.to_json(),
        seeds={"seed": job.config.seed},
        inputs_sha256=job.inputs_sha256,
        prompts=len(job.cases),
    )
    return Recorder.create(record, out=out, runs_dir=runs_dir, keep=keep)


class Interrupted(KeyboardInterrupt):
    """A run was interrupted from the keyboard.

    Attributes:
        run: what is recorded of it; None where nothing is.
        ended, left: of several layers or defenses, the runs that ended before it, and those that were to come after it.
    """

    def __init__(self, run: Run | None, ended: Sequence[Run] = (), left: Sequence[Any] = ()) -> None:
        super().__init__()
        self.run, self.ended, self.left = run, tuple(ended), tuple(left)


def attack_all(
    job: Job, recorder: Recorder, *, progress: Progress = silent, show: Callable[[Sample], None] | None = None
) -> None:
    """Attack the prompts that the record does not hold yet: release, recover, score, record.

    The attack gets observations and the attacker's own model. Truths go directly from ``release`` to ``sample_of``.

    Raises:
        RecordError: the disk is full.
    """
    done = {sample["index"] for sample in recorder.samples}
    todo = [case for case in job.cases if case.index not in done]
    try:
        progress("prompts", len(done), len(job.cases))
        for batch in _batches(todo, min(job.attack.batch, job.config.batch or job.attack.batch)):
            released = [release(job, case) for case in batch]
            truths = [truth for _, truth in released]
            outcomes = recover(job, [observation for observation, _ in released], recorder)
            prefills = time_prefill(job.model, _prompt_tokens(truths, outcomes))
            for case, (observation, truth), outcome, prefill in zip(
                batch, released, outcomes, prefills, strict=True
            ):
                sample = sample_of(job.model, case, truth, outcome, prefill, observation.info.positions)
                if sentence := _diagnosed(job, case, outcome, progress):
                    sample["diagnosis"] = sentence
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
    recorder.close("finished", summary_of(recorder))


def recover(job: Job, observations: Sequence[Observation], recorder: Recorder) -> list[Outcome]:
    """Fit the attack to this channel, once, and recover a batch."""
    info = observations[0].info
    try:
        if info not in job.fitted:
            started = time.perf_counter()
            job.attack.fit(info, job.model, job.config.seed)
            _record_setup(job, recorder, job.attack.measured, time.perf_counter() - started)
            job.fitted.append(info)
    except NotApplicableError as error:
        return [error] * len(observations)
    before = dict(job.attack.measured)
    try:
        return list(job.attack.recover_batch(observations))
    except NotApplicableError:  # perhaps not for all of them
        return [_recover_one(job, observation) for observation in observations]
    finally:
        # Some attacks prepare more when a prompt asks for it.
        if changed := {name: v for name, v in job.attack.measured.items() if before.get(name) != v}:
            _record_setup(job, recorder, changed, float(changed.get("estimation_seconds", 0.0)))


def _diagnosed(job: Job, case: Case, outcome: Outcome, progress: Progress) -> str | None:
    """Return what the rows of a file are where none was verified; for the first few prompts of a run."""
    observation = case.observation
    if (
        observation is None
        or not isinstance(outcome, AttackResult)
        or any(t.verified for t in outcome.tokens)
    ):
        return None
    if job.attack.any_width or not job.config.check:
        return None
    if case.index not in job.diagnosed and len(job.diagnosed) < MOST_DIAGNOSED:
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


def _record_setup(job: Job, recorder: Recorder, values: Mapping[str, float | str], seconds: float) -> None:
    """Record what preparation measured; seconds add up over the parts of a resumed run and over channels."""
    measured = {**values, "engine": job.model.engine, "setup_seconds": seconds}
    if job.model.difference:
        measured["engine_reason"] = job.model.difference
    before = recorder.record.setup
    spent = {
        name: value + float(before.get(name) or 0.0)
        for name, value in measured.items()
        if name.endswith("seconds") and isinstance(value, float)
    }
    recorder.record.setup = {**before, **measured, **spent}
    recorder.save()


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
        shown: positions that have a row, None where all have. The record counts the tokens without a row before the
            last shown one (``missing_tokens``), and how many of them were found (``missing_tokens_right``).
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
        sample |= asdict(score(outcome, truth))
        if (hidden := missing_tokens(outcome, truth, shown)) is not None:
            sample["missing_tokens"], sample["missing_tokens_right"] = hidden
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


def _ended(recorder: Recorder) -> Run:
    return Run(recorder.record, recorder.samples, recorder.path)


def summary_of(recorder: Recorder) -> dict[str, Any]:
    """Return the aggregates of a run's samples, with what was measured once for all of them."""
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


def _close_failed(recorder: Recorder, error: BaseException) -> None:
    try:
        recorder.close("failed", summary_of(recorder), f"{type(error).__name__}: {error}")
    except Exception:  # report the first error
        return
