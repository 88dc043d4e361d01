"""Recover prompts from hidden states (``hiddenlab attack``)."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hiddenlab import options as o
from hiddenlab.cli.console import bars, only_json, print_json, stderr, stdout
from hiddenlab.cli.from_config import takes
from hiddenlab.config import AttackConfig
from hiddenlab.errors import InputError
from hiddenlab.records import check_new
from hiddenlab.summary import Sample, advice, not_applicable
from hiddenlab.text import count_of

if TYPE_CHECKING:
    from hiddenlab.runner import Run

JSON_FORMAT = 1


@takes(AttackConfig)
def attack(
    config: AttackConfig,
    out: o.OutOpt = None,
    runs_dir: o.RunsDirOpt = Path("runs"),
    no_record: o.NoRecordOpt = False,
    json: o.JsonOpt = False,
) -> None:
    """Recover prompts from the hidden states of a model, raw or behind defenses."""
    _check_record(out, no_record)
    run = conduct(with_stdin(config.checked()), out=out, runs_dir=runs_dir, keep=not no_record, json=json)
    if json:
        print_json(payload(run))
    if (reason := not_applicable(run.samples)) is not None:
        raise InputError(f"{config.attack} could not be applied to any prompt: {reason}")


def conduct(
    config: AttackConfig,
    *,
    out: Path | None = None,
    runs_dir: Path = Path("runs"),
    keep: bool = True,
    json: bool = False,
    resume: Path | None = None,
) -> "Run":
    """Run a configuration and show it unless ``json``; with ``resume``, continue the run in that directory.

    Raises:
        HiddenlabError: see ``hiddenlab.runner.run``. typer.Exit: it was interrupted.
    """
    from hiddenlab.cli.show import sample_line, summary_table, title
    from hiddenlab.runner import Interrupted, run

    screen = stdout()
    try:
        with only_json(json), bars() as progress:

            def show(sample: Sample) -> None:
                if not json:
                    with progress.aside():
                        screen.print(sample_line(sample), soft_wrap=True)

            made = run(config, out, runs_dir=runs_dir, keep=keep, resume=resume, progress=progress, show=show)
    except Interrupted as stopped:
        _say_interrupted(stopped.run)
        raise typer.Exit(130) from None
    _say_engine(made.record.setup)
    if not json and not_applicable(made.samples) is None:
        screen.print(title(made.record.spec), soft_wrap=True)
        screen.print(summary_table(made.summary))
        for line in advice(made.samples):
            screen.print(line, style="yellow", soft_wrap=True, markup=False, highlight=False)
    if made.path is not None:
        stderr().print(f"recorded in {made.path}", soft_wrap=True)
    return made


def _say_engine(setup: Mapping[str, Any]) -> None:
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


def with_stdin(config: AttackConfig) -> AttackConfig:
    """Read a prompt from standard input into the configuration, so that the run can be repeated."""
    if "-" not in (config.prompt, config.prompts):
        return config
    from hiddenlab.prompts import load_prompts

    return replace(config, prompt=load_prompts("-")[0].text, prompts=None)


def _check_record(out: Path | None, no_record: bool) -> None:
    if out is not None and no_record:
        raise InputError(
            "--out names a directory for the record, and --no-record asks for none; give one of them"
        )
    if out is not None:
        check_new(out)


def _say_interrupted(run: "Run | None") -> None:
    if run is None or run.path is None:
        stderr().print("interrupted; nothing was recorded")
        return
    stderr().print(
        f"interrupted; recorded: {len(run.samples)} of {count_of(run.record.prompts, 'prompt')}. Continue with: "
        f"hiddenlab rerun {run.path} --resume",
        soft_wrap=True,
    )
