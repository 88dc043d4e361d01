"""Run an attack on prompts, here or over several workers, and record what comes back."""

import gc
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from hiddenlab.batch import InProcess, Work
from hiddenlab.config import AttackConfig
from hiddenlab.errors import InputError, WorkersLostError
from hiddenlab.job import check_layers, prepare, prepare_defenses, prepare_layers
from hiddenlab.records import Recorder, RunRecord, check_new, check_writable, resume_command
from hiddenlab.summary import Sample, figures_of, summarise
from hiddenlab.text import coloured, count_of, html
from hiddenlab.types import Progress, silent

LONGEST_NAME = 100  # letters of a defense in the name of its folder; file systems end at 255
NOT_INDEPENDENT = (
    "{} was started without workers and without --independent: its prompts learn from each other, in order; leave out "
    "--workers and --address"
)


class Workers(ABC):
    """Processes that attack the prompts of a run, each with a model of its own."""

    @abstractmethod
    def prepare(self, config: AttackConfig, progress: Progress) -> Work:
        """Check a configuration, and load what it needs in a worker; see ``hiddenlab.job.prepare``."""


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
    workers: Workers | None = None,
    progress: Progress = silent,
    show: Callable[[Sample], None] | None = None,
) -> Run:
    """Attack every prompt of a configuration and record the results, as ``hiddenlab attack`` does.

    Args:
        config: every option that can change a result.
        out: the run's directory, a new one; None makes one in ``runs_dir``. keep: false writes nothing.
        resume: continue the run in this directory.
        workers: attack batches in several processes (``hiddenlab.eval.spread``); the run is then an independent one,
            which gives the same without workers.
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
        if workers is None:
            work: Work = InProcess(prepare(config, progress))
        else:
            if resume is not None and not config.independent:
                raise InputError(NOT_INDEPENDENT.format(resume))
            work = workers.prepare(replace(config, independent=True), progress)
        if resume is None:
            recorder = _created(work, None if out is None else Path(out), Path(runs_dir), keep)
        else:
            recorder = Recorder.resume(Path(resume), work.inputs_sha256)
        attack_all(work, recorder, progress=progress, show=show)
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
    workers: Workers | None = None,
    progress: Progress = silent,
    show: Callable[[Sample], None] | None = None,
    ended: Callable[[Run], None] | None = None,
) -> list[Run]:
    """Attack every prompt of a configuration at several layers of its model; each layer has a run of its own.

    The model is loaded once, and the states that first probes need come from the same passes for all layers; with
    ``workers`` it is loaded anew for each layer.

    Args:
        config: its ``layer`` is not read. layers: 1 is the first.
        out: the directory of the runs; each layer makes a new folder there. None makes one for each run in
            ``runs_dir``. keep: false writes nothing.
        workers, progress, show: see ``run``. ended: called with each run as soon as it has ended.

    Raises:
        HiddenlabError: see ``run``. Interrupted: from the keyboard; its ``run`` is that of the layer at work.
    """
    folder = None if out is None else Path(out)
    if folder is not None and layers != "all":
        _check_folders(folder, layers)
    try:
        if workers is None:
            layers, jobs = prepare_layers(config, layers, progress)
            works: Iterator[Work] = map(InProcess, jobs)
        else:
            config, layers = check_layers(config, layers)
            each = (replace(config, layer=layer, independent=True) for layer in layers)
            works = (workers.prepare(own, progress) for own in each)
        if folder is not None:
            _check_folders(folder, layers)
    except KeyboardInterrupt:
        raise Interrupted(None, (), () if layers == "all" else layers) from None
    folders = [None if folder is None else _folder(folder, layer) for layer in layers]
    return _run_each(
        works, layers, folders, runs_dir=runs_dir, keep=keep, progress=progress, show=show, ended=ended
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
    return _run_each(
        map(InProcess, jobs), defenses, folders, keep=keep, progress=progress, show=show, ended=ended
    )


def _run_each(
    works: Iterator[Work],
    names: Sequence[Any],
    folders: Sequence[Path | None],
    *,
    runs_dir: str | Path = "runs",
    keep: bool,
    progress: Progress,
    show: Callable[[Sample], None] | None,
    ended: Callable[[Run], None] | None,
) -> list[Run]:
    """Attack and record several runs, one after another.

    Args:
        names: what ``Interrupted.left`` calls them. folders: of their records; None makes one in ``runs_dir``.

    Raises:
        HiddenlabError: see ``run``. Interrupted: from the keyboard.
    """
    runs: list[Run] = []
    recorder: Recorder | None = None
    try:
        for work, folder in zip(works, folders, strict=True):
            recorder = _created(work, folder, Path(runs_dir), keep)
            attack_all(work, recorder, progress=progress, show=show)
            runs.append(_ended(recorder))
            recorder = None
            if ended is not None:
                ended(runs[-1])
            del work
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


def _created(work: Work, out: Path | None, runs_dir: Path, keep: bool) -> Recorder:
    record = RunRecord(
        verb="attack",
        spec=work.config.to_json(),
        seeds={"seed": work.config.seed},
        inputs_sha256=work.inputs_sha256,
        prompts=work.prompts,
    )
    return Recorder.create(record, out=out, runs_dir=runs_dir, keep=keep, environment=work.environment)


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
    work: Work,
    recorder: Recorder,
    *,
    progress: Progress = silent,
    show: Callable[[Sample], None] | None = None,
) -> None:
    """Attack the prompts that the record does not hold yet (``hiddenlab.batch``), and record each batch.

    Raises:
        RecordError: the disk is full.
    """
    done = {sample["index"] for sample in recorder.samples}
    try:
        progress("prompts", len(done), work.prompts)
        for samples in work.attack(frozenset(done), partial(_record_setup, recorder), progress):
            for sample in samples:
                if sample["index"] in done:
                    continue
                recorder.append(sample)
                done.add(sample["index"])
                if show is not None:
                    show(sample)
            progress("prompts", len(done), work.prompts)
    except KeyboardInterrupt:
        recorder.close("interrupted", summary_of(recorder, work))
        raise
    except BaseException as error:
        _close_failed(recorder, work, error)
        if isinstance(error, WorkersLostError) and recorder.path is not None:
            way = f"'{resume_command(recorder.record, recorder.path)}' goes on, with or without workers"
            raise WorkersLostError(f"{error}; {way}") from None
        raise
    recorder.close("finished", summary_of(recorder, work))


def _record_setup(recorder: Recorder, measured: Mapping[str, float | str]) -> None:
    """Record what preparation measured; seconds add up over the parts of a resumed run, channels and workers."""
    before = recorder.record.setup
    spent = {
        name: value + (earlier if isinstance(earlier := before.get(name), float) else 0.0)
        for name, value in measured.items()
        if name.endswith("seconds") and isinstance(value, float)
    }
    recorder.record.setup = {**before, **measured, **spent}
    recorder.save()


def _ended(recorder: Recorder) -> Run:
    return Run(recorder.record, recorder.samples, recorder.path)


def summary_of(recorder: Recorder, work: Work) -> dict[str, Any]:
    """Return the aggregates of a run's samples, with what was measured once for all of them."""
    setup = recorder.record.setup
    return {
        **summarise(recorder.samples),
        "probe_seconds": setup.get("probe_seconds"),
        "setup_seconds": setup.get("setup_seconds"),
        **work.peaks(),
    }


def _close_failed(recorder: Recorder, work: Work, error: BaseException) -> None:
    try:
        recorder.close("failed", summary_of(recorder, work), f"{type(error).__name__}: {error}")
    except Exception:  # report the first error
        return
