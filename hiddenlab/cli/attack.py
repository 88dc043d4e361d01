"""Recover prompts from hidden states (``hiddenlab attack``)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from hiddenlab import options as o
from hiddenlab.cli.console import Bars, bars, only_json, print_json, stderr, stdout
from hiddenlab.cli.from_config import takes
from hiddenlab.cli.workers import AddressOpt, WorkersOpt, attack_workers
from hiddenlab.config import AttackConfig
from hiddenlab.errors import InputError
from hiddenlab.registry import check_name, parse_numbers
from hiddenlab.summary import Sample, advice, conclusion, not_applicable
from hiddenlab.text import count_of

if TYPE_CHECKING:
    from hiddenlab.runner import Run

JSON_FORMAT = 1


@takes(AttackConfig, leave_out=("layer",))
def attack(
    config: AttackConfig,
    layer: o.SomeLayersOpt = None,
    workers: WorkersOpt = None,
    address: AddressOpt = None,
    out: o.OutOpt = None,
    runs_dir: o.RunsDirOpt = Path("runs"),
    no_record: o.NoRecordOpt = False,
    json: o.JsonOpt = False,
) -> None:
    """Recover prompts from the hidden states of a model, raw or behind defenses.

    What the figures at the end mean stands in docs/how-to/read-results.md.
    """
    if out is not None and no_record:
        raise InputError(
            "--out names a directory for the record, and --no-record asks for none; give one of them"
        )
    layers = _parse_layers(layer)
    if isinstance(layers, int | None):
        config = replace(config, layer=layers)
    config, keep = ready(config), not no_record
    spread: dict[str, Any] = {"workers": workers, "address": address}
    if isinstance(layers, int | None):
        runs = [conduct(config, out=out, runs_dir=runs_dir, keep=keep, json=json, **spread)]
        found = payload(runs[0])
    else:
        runs = conduct_layers(config, layers, out=out, runs_dir=runs_dir, keep=keep, json=json, **spread)
        found = {"format": JSON_FORMAT, "runs": [payload(run) for run in runs]}
    if json:
        print_json(found)
    reasons = [not_applicable(run.samples) for run in runs]
    if None not in reasons:
        raise InputError(f"{config.attack} could not be applied to any prompt: {reasons[0]}")


def _parse_layers(text: str | None) -> "int | list[int] | Literal['all'] | None":
    """Return what ``--layer`` names: nothing, one layer, several, or all."""
    if text is None or text.strip().lower() == "all":
        return None if text is None else "all"
    try:
        layers = parse_numbers("--layer", text, least=0)
    except InputError as error:
        raise InputError(f"{error}, or 'all'") from None
    return layers[0] if len(layers) == 1 else layers


def conduct(
    config: AttackConfig,
    *,
    out: Path | None = None,
    runs_dir: Path = Path("runs"),
    keep: bool = True,
    json: bool = False,
    resume: Path | None = None,
    workers: int | None = None,
    address: str | None = None,
) -> "Run":
    """Run a configuration and show it unless ``json``; with ``resume``, continue the run in that directory.

    Args:
        workers, address: see ``hiddenlab.cli.workers``.

    Raises:
        HiddenlabError: see ``hiddenlab.runner.run``. typer.Exit: it was interrupted.
    """
    from hiddenlab.runner import run

    with showing(json) as (progress, show), attack_workers(workers, address) as spread:
        made = run(
            config,
            out,
            runs_dir=runs_dir,
            keep=keep,
            resume=resume,
            workers=spread,
            progress=progress,
            show=show,
        )
    say_engine(made.record.setup)
    say_ended(made, json)
    return made


def conduct_layers(
    config: AttackConfig,
    layers: "Sequence[int] | Literal['all']",
    *,
    out: Path | None = None,
    runs_dir: Path = Path("runs"),
    keep: bool = True,
    json: bool = False,
    workers: int | None = None,
    address: str | None = None,
) -> "list[Run]":
    """Run a configuration at several layers and show each run unless ``json``, and at last all in one table.

    Raises:
        HiddenlabError: see ``hiddenlab.runner.run_layers``. typer.Exit: it was interrupted.
    """
    from hiddenlab.cli.show import layers_table
    from hiddenlab.runner import run_layers

    naming = showing(json, lambda left: f"--layer {','.join(map(str, left))}")
    with naming as (progress, show), attack_workers(workers, address) as spread:

        def ended(run: "Run") -> None:
            with progress.aside():
                say_ended(run, json, figures=False)

        runs = run_layers(
            config, layers, out, runs_dir=runs_dir, keep=keep, workers=spread, progress=progress, show=show,
            ended=ended,
        )  # fmt: skip
    say_engine(runs[-1].record.setup)
    if not json and any(not_applicable(run.samples) is None for run in runs):
        stdout().print(
            layers_table(runs[-1].record.spec, [(r.record.spec["layer"], r.summary) for r in runs])
        )
    return runs


@contextmanager
def showing(
    json: bool, said: Callable[[Sequence[Any]], str] = str
) -> Iterator[tuple[Bars, Callable[[Sample], None]]]:
    """Give what shows progress and each prompt's sample; an interruption ends the command with its exit code.

    Args:
        said: how to name the runs that were not begun.

    Raises:
        typer.Exit: it was interrupted.
    """
    from hiddenlab.cli.show import sample_line
    from hiddenlab.runner import Interrupted

    try:
        with only_json(json), bars() as progress:

            def show(sample: Sample) -> None:
                if not json:
                    with progress.aside():
                        stdout().print(sample_line(sample), soft_wrap=True)

            yield progress, show
    except Interrupted as stopped:
        if stopped.run is not None or not stopped.ended:
            _say_interrupted(stopped.run)
        if stopped.left:
            finished = f"; finished: {len(stopped.ended)}" if stopped.ended else ""
            stderr().print(f"not begun: {said(stopped.left)}{finished}", soft_wrap=True)
        raise typer.Exit(130) from None


def say_ended(run: "Run", json: bool, figures: bool = True, where: bool = True) -> None:
    """Show the figures of a run and advice unless ``json``, and where it is recorded."""
    from hiddenlab.cli.show import summary_table, title

    if not json and not_applicable(run.samples) is None:
        screen = stdout()
        if figures:
            screen.print(title(run.record.spec), soft_wrap=True)
            screen.print(summary_table(run.summary))
        for line in advice(run.samples):
            screen.print(line, style="yellow", soft_wrap=True)
        if figures:
            screen.print(conclusion(run.samples), style="bold", soft_wrap=True)
            if stronger := _stronger(run):
                screen.print(stronger, soft_wrap=True)
    if run.path is not None and where:
        page = f"; 'hiddenlab report {run.path}' makes a page of it" if figures else ""
        stderr().print(f"recorded in {run.path}{page}", soft_wrap=True)


def _stronger(run: "Run") -> str | None:
    """Return which attack to try next, where the usual one met a defense that it could not fully read."""
    spec, verified = run.record.spec, run.summary.get("verified")
    if spec["attack"] != "vocab-match" or not spec["defense"] or verified is None or verified > 0.99:
        return None
    return "Next: '--attack beam-decoding' weighs all evidence, and often reads more behind noise and permutations."


def say_engine(setup: Mapping[str, Any]) -> None:
    """Say which engine ran the model, wherever that is not the packed one."""
    if setup.get("engine") == "plain":
        reason = (
            f"packed passes fail: {setup['engine_reason']}" if "engine_reason" in setup else "--engine plain"
        )
        note = f"the plain engine ran the model, one sequence for each candidate; {reason}"
        stderr().print(note, soft_wrap=True)


def payload(run: "Run") -> dict[str, Any]:
    """Return the object that ``--json`` prints."""
    return {
        "format": JSON_FORMAT,
        "spec": run.record.spec,
        "summary": run.record.summary,
        "samples": run.samples,
    }


def ready(config: AttackConfig) -> AttackConfig:
    """Return a configuration checked as far as that takes no torch, so that a slip is told at once.

    A prompt on standard input is read into it, so that the run can be repeated.

    Raises:
        InputError: see ``AttackConfig.checked``; an attack or defense is unknown, or a file is not there.
    """
    config = config.checked()
    check_name("attacks", config.attack)
    for spec in config.defense:
        check_name("defenses", spec)
    for kind, file in (("observation", config.observation), ("truth", config.truth)):
        if file is not None and not Path(file).exists():
            raise InputError(f"no {kind} file at {file}")
    if "-" not in (config.prompt, config.prompts):
        return config
    from hiddenlab.prompts import load_prompts

    return replace(config, prompt=load_prompts("-")[0].text, prompts=None)


def _say_interrupted(run: "Run | None") -> None:
    from hiddenlab.records import resume_command

    if run is None or run.path is None:
        stderr().print("interrupted; nothing was recorded")
        return
    stderr().print(
        f"interrupted; recorded: {len(run.samples)} of {count_of(run.record.prompts, 'prompt')}. Continue with: "
        + resume_command(run.record, run.path),
        soft_wrap=True,
    )
