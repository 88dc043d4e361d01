"""Run a recorded spec again, or continue an interrupted run (``hiddenlab rerun``)."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from hiddenlab import options as o
from hiddenlab.attacker import Attacker
from hiddenlab.cli.attack import conduct, payload
from hiddenlab.cli.console import print_json, stderr, stdout
from hiddenlab.cli.workers import AddressOpt, WorkersOpt
from hiddenlab.config import AttackConfig
from hiddenlab.errors import InputError
from hiddenlab.records import RunRecord, check_new, foreign_code, read_run, resume_command
from hiddenlab.summary import Sample
from hiddenlab.text import count_of

DIFFERENT = 1
VERBS = ("attack", "assess")
COMPARED, COSTS = ("status", "recovered_ids"), ("evaluated_tokens", "forward_calls")


def rerun(
    run: Annotated[Path, Argument(metavar="RUN", help="A run directory.")],
    resume: Annotated[
        bool, Option("--resume", help="Continue this run where it stopped, in its directory.")
    ] = False,
    out: o.OutOpt = None,
    runs_dir: Annotated[
        Path | None, Option("--runs-dir", metavar="DIR", help="Default: where RUN is.")
    ] = None,
    no_record: o.NoRecordOpt = False,
    download: Annotated[
        bool, Option("--download", help="Let the hub give models and data sets that are not here yet.")
    ] = False,
    trust_remote_code: Annotated[
        bool,
        Option(
            "--trust-remote-code",
            help="Run the code that the run ran: of its model's checkpoint, or of a file with a defense or attack. "
            "It can do whatever you can. Default: refuse it.",
        ),
    ] = False,
    workers: WorkersOpt = None,
    address: AddressOpt = None,
    json: o.JsonOpt = False,
) -> None:
    """Run a recorded spec again and compare (exit code 1 if results differ), or resume an interrupted run."""
    record, samples = read_run(run)
    if record.verb not in VERBS:
        raise InputError(f"{run} is a run of {record.verb!r}; only runs of 'attack' can be run again")
    if record.verb == "assess" and not resume:
        raise InputError(
            f"{run} is a run of 'assess', which --resume goes on with; its command runs it again"
        )
    config = AttackConfig.from_json(record.spec)
    if not trust_remote_code and (code := foreign_code(record)):
        raise InputError(
            f"{run} ran code of {', '.join(code)}; if you trust it, give --trust-remote-code here, too"
        )
    spread: dict[str, Any] = {"workers": workers, "address": address}
    if (workers or address) and not record.spec.get("independent"):
        from hiddenlab.runner import NOT_INDEPENDENT

        raise InputError(NOT_INDEPENDENT.format(run))
    if not download:
        _stay_local()
    if resume:
        _resume(run, record, samples, json, spread, given=bool(out or runs_dir or no_record))
        return
    if not samples:
        raise InputError(
            f"{run} holds no prompts to compare with; '{resume_command(record, run)}' goes on with it"
        )
    if record.status == "finished" and len(samples) != record.prompts:
        raise InputError(
            f"{run} is damaged: it is finished and holds {len(samples)} of {count_of(record.prompts, 'prompt')}"
        )
    if out is not None:
        check_new(out)
    again = conduct(
        config, out=out, runs_dir=runs_dir or run.resolve().parent, keep=not no_record, json=json, **spread
    )
    learned = not config.independent and "regression" in (
        record.setup.get("probe"),
        again.record.setup.get("probe"),
    )
    changes = differences(samples, again.samples, costs=not learned)
    if record.inputs_sha256 != again.record.inputs_sha256:
        changes.insert(0, {"id": "inputs", "what": ["the prompts or observations are others"]})
    if json:
        print_json({**payload(again), "same": not changes, "compared": len(samples), "differences": changes})
    else:
        _say(changes, len(samples), learned)
    if changes:
        raise typer.Exit(DIFFERENT)


def _stay_local() -> None:
    """Keep the libraries from contacting the hub: the record may be somebody else's, and names what is loaded."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE = True


def differences(
    before: Sequence[Sample], after: Sequence[Sample], *, costs: bool = True
) -> list[dict[str, Any]]:
    """Return the differences between two runs of one spec, without times, over the prompts that the first reached.

    Args:
        costs: compare how much was evaluated, too. A probe that learns from every attack makes the second run cheaper.
    """
    compared = COMPARED + COSTS if costs else COMPARED
    changes = []
    second = {sample["index"]: sample for sample in after}
    for sample in before:
        other = second.get(sample["index"], {})
        if names := [name for name in compared if sample.get(name) != other.get(name)]:
            changes.append({"id": sample["id"], "what": names})
    return changes


def _resume(
    run: Path, record: RunRecord, samples: list[Sample], json: bool, spread: dict[str, Any], *, given: bool
) -> None:
    if given:
        raise InputError(
            "--resume continues in the run's own directory; leave out --out, --runs-dir and --no-record"
        )
    if record.status == "finished":
        stderr().print(f"{run} is finished: {count_of(record.prompts, 'prompt')}; nothing to resume")
        if json:
            whole = {"format": 1, "spec": record.spec, "summary": record.summary, "samples": samples}
            print_json(record.summary if record.verb == "assess" else whole)
        if record.verb == "assess" and record.summary is not None:  # the code of its verdict
            raise typer.Exit(int(record.summary["exit_code"]))
        return
    if record.verb == "assess":
        from hiddenlab.cli.assess import conduct as assess

        minutes = record.setup.get("minutes")
        if not isinstance(minutes, float | int):
            raise InputError(f"{run} is damaged: it does not say how many minutes it may take")
        has = {name: value for name, value in record.setup.items() if name != "minutes"}
        attacker = Attacker.from_json(has, f"{run}, setup")
        result = assess(AttackConfig.from_json(record.spec), minutes, attacker, json=json, resume=run)
        raise typer.Exit(result.findings["exit_code"])
    run_again = conduct(AttackConfig.from_json(record.spec), json=json, resume=run, **spread)
    if json:
        print_json(payload(run_again))


def _say(changes: Sequence[dict[str, Any]], compared: int, learned: bool) -> None:
    screen = stdout()
    if not changes:
        screen.print(
            f"same results: {count_of(compared, 'recorded prompt')} came out as before", style="green"
        )
        return
    screen.print(f"different results for {len(changes)} of {count_of(compared, 'prompt')}:", style="red")
    for change in changes[:10]:
        screen.print(f"  {change['id']}: {', '.join(change['what'])}")
    if learned:
        screen.print(
            "The first probe learns from every attack; attacks with '--independent' or '--setup full' do not depend on "
            "earlier ones.",
            soft_wrap=True,
        )
