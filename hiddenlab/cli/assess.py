"""Say whether a defense holds against everything that the lab has (``hiddenlab assess``)."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from hiddenlab import options as o
from hiddenlab import registry
from hiddenlab.assessment import Assessment
from hiddenlab.attacker import Attacker
from hiddenlab.cli.attack import ready
from hiddenlab.cli.console import bars, only_json, print_json, stderr, stdout
from hiddenlab.cli.from_config import takes
from hiddenlab.cli.verdicts import BAD, GOOD, OPEN
from hiddenlab.config import ATTACK_OPTIONS, IMPORT_OPTIONS, AttackConfig
from hiddenlab.errors import NEEDS_CODE, InputError
from hiddenlab.summary import figure

INTERRUPTED = 130
LARGE = 1e6  # a perplexity of more is written with an exponent
STYLES = {"BROKEN": BAD, "LEAKS": BAD, "HELD": GOOD, "INCONCLUSIVE": OPEN}
UNKNOWN = "Without a truth there is no guess to compare with, and no attack without the defense; no defense can hold."
LEFT_OUT = (
    "prompt", "states", "defense", "attack", "independent", "batch", *ATTACK_OPTIONS, *IMPORT_OPTIONS,
)  # fmt: skip


@takes(AttackConfig, leave_out=LEFT_OUT)
@takes(Attacker, name="attacker")
def assess(
    config: AttackConfig,
    attacker: Attacker,
    defense: Annotated[
        list[str] | None,
        Argument(
            metavar="DEFENSE",
            help="The stages of one defense, in order, or joined by '+'; see 'hiddenlab list defenses'. One of your "
            "own: FILE.py:KEY=VALUE. 'identity' is none. With --observation only to name the file of its defense.",
        ),
    ] = None,
    minutes: Annotated[
        float,
        Option(
            "--minutes",
            metavar="M",
            rich_help_panel=o.SEARCH,
            help="For all attacks on all prompts; as much again may go to the same attacks without the defense.",
        ),
    ] = 10.0,
    out: o.OutOpt = None,
    runs_dir: o.RunsDirOpt = Path("runs"),
    no_record: o.NoRecordOpt = False,
    json: o.JsonOpt = False,
) -> None:
    """Say whether a defense holds: attack it with everything that applies, and give a verdict in one sentence.

    BROKEN and LEAKS end with exit code 1, HELD with 0, INCONCLUSIVE with 3. HELD means against these attacks within
    this time, and never that a defense is secure. After Ctrl-C the same command goes on.
    """
    if out is not None and no_record:
        raise InputError(
            "--out names a directory for the record, and --no-record asks for none; give one of them"
        )
    if config.observation is None and not defense:
        raise InputError(
            "name a DEFENSE ('hiddenlab list defenses'; 'identity' is none), or give --observation FILE"
        )
    config = ready(replace(config, defense=tuple(defense or ())))
    result = conduct(config, minutes, attacker, out=out, runs_dir=runs_dir, keep=not no_record, json=json)
    raise typer.Exit(result.findings["exit_code"])


def conduct(
    config: AttackConfig,
    minutes: float,
    attacker: Attacker,
    *,
    out: Path | None = None,
    runs_dir: Path = Path("runs"),
    keep: bool = True,
    json: bool = False,
    resume: Path | None = None,
) -> Assessment:
    """Assess a defense, show the verdict, and make a page of the record; with ``resume``, go on in that directory.

    Raises:
        HiddenlabError: see ``hiddenlab.eval.assess.command.assess``. typer.Exit: it was interrupted.
    """
    from hiddenlab.records import resume_command
    from hiddenlab.runner import Interrupted

    run = registry.resolve("eval", "assess")
    try:
        with only_json(json), bars() as progress:
            result: Assessment = run(
                config,
                minutes,
                out,
                attacker=attacker,
                runs_dir=runs_dir,
                keep=keep,
                resume=resume,
                progress=progress,
            )
    except Interrupted as stopped:
        if stopped.run is None or stopped.run.path is None:
            stderr().print("interrupted; nothing was recorded")
        else:
            stderr().print(
                f"interrupted; what was read is kept in {stopped.run.path}. The same command goes on, and so does: "
                + resume_command(stopped.run.record, stopped.run.path),
                soft_wrap=True,
            )
        raise typer.Exit(INTERRUPTED) from None
    if json:
        print_json(result.findings)
    else:
        show(result.findings)
    if result.path is not None:
        from hiddenlab.report.markdown import PAGE, write_report

        with only_json(json):
            write_report([result.path], result.path / "report")
        page = result.path / "report" / PAGE
        stderr().print(f"recorded in {result.path}; the page is {page}", soft_wrap=True)
    return result


def show(result: Mapping[str, Any]) -> None:
    """Print the verdict, the figures behind it, what each attack did, and the prompt that leaked most."""
    from hiddenlab.cli.show import table
    from hiddenlab.report.assessed import attacker

    screen = stdout()
    screen.print(result["sentence"], style=STYLES[result["status"]], soft_wrap=True)
    known, secrets, cost = result["truth"], result["secrets"], result["cost"]
    rows = [["leak beyond a guess" if known else "tokens verified", _interval(result["leak"])]]
    if known:
        rows += [
            ["the same, if the best attack were known", _interval(result["oracle"])],
            ["tokens read", figure("token_accuracy", result["token_accuracy"])],
            ["tokens guessed without rows", figure("token_accuracy", result["control"])],
            ["exact prompts", _interval(result["exact"])],
            ["ROUGE-L", figure("rouge_l", result["rouge_l"]["value"])],
        ]
        if (rare := result["rare_accuracy"]) is not None:
            rows.append(["rare tokens read", _interval(rare)])
    rows += map(list, attacker(result))
    if secrets is not None:
        rows.append(["planted secrets read", f"{secrets['read']} of {secrets['planted']}"])
    if "reason" not in cost:
        rows.append(["time of a release over plain", f"{cost['time_over_plain']:.2f} ×"])
        rows.append(["bytes of a release over plain", f"{cost['bytes_over_plain']:.2f} ×"])
    if (ran := result["shown_accuracy"]) is not None:
        rows.append(["tokens read that ran in place of the prompts'", figure("token_accuracy", ran)])
    utility = result["utility"]
    if "reason" not in utility:
        before, after = utility["clean_perplexity"]["value"], utility["perplexity"]["value"]
        rows.append(["perplexity without the defense, with it", f"{_number(before)}, {_number(after)}"])
        rows.append(["top-1 agreement", figure("token_accuracy", utility["top1_agreement"]["value"])])
    defense = " + ".join(result["defense"]) or "identity"
    title = f"{result['model']}, {result['stream']} at layer {result['layer']}, {defense}"
    screen.print(table(["figure", "value"], rows, (0,), title))
    did = [
        [
            one["attack"],
            one["status"],
            figure("token_accuracy", one["token_accuracy" if known else "verified"]),
            f"{one['seconds']:.0f}",
        ]
        for one in result["attacks"]
    ]
    screen.print(
        table(
            ["attack", "what it did", "tokens read" if known else "tokens verified", "seconds"],
            did,
            (0, 1),
            "the attacks, in order",
        )
    )
    if unused := [one["attack"] for one in result["attacks"] if one["reason"] == NEEDS_CODE]:
        screen.print(f"Not used, since {NEEDS_CODE}: {', '.join(unused)}.", soft_wrap=True)
    for one in result["attacks"]:
        if one["status"] == "crashed":
            screen.print(f"{one['attack']} crashed: {one['reason']}", soft_wrap=True)
    if result["undefended"]:
        told = ", ".join(
            f"{one['attack']} "
            + (f"{100 * one['leak']['value']:.0f} %" if one["status"] != "not applicable" else one["status"])
            for one in result["undefended"]
        )
        screen.print(f"Without the defense, in as much time: {told}.", soft_wrap=True)
    for name in ("utility", "cost"):
        if "reason" in result[name]:
            screen.print(f"{name.capitalize()} {result[name]['reason']}.", style="dim", soft_wrap=True)
    if not known:
        screen.print(UNKNOWN, style="dim", soft_wrap=True)
    if worst := result["leakiest"]:
        share = figure("token_accuracy", worst["token_accuracy" if known else "verified"])
        screen.print(
            f"The leakiest prompt, {worst['id']} ({worst['attack']}, {share} of its tokens"
            f"{'' if known else ' verified'}): {worst['recovered']}",
            soft_wrap=True,
        )


def _interval(estimate: Mapping[str, float]) -> str:
    return f"{_percent(estimate['value'])} ({_percent(estimate['low'])} to {_percent(estimate['high'])})"


def _number(value: float) -> str:
    return f"{value:.2f}" if value < LARGE else f"{value:.3g}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
