"""Say whether a defense holds against everything that the lab has (``hiddenlab assess``)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

import typer
from typer import Argument, Option

from hiddenlab import options as o
from hiddenlab import registry
from hiddenlab.cli.compare import stages_of
from hiddenlab.cli.console import bars, only_json, print_json, stdout
from hiddenlab.cli.from_config import takes
from hiddenlab.cli.verdicts import BAD, GOOD, OPEN
from hiddenlab.config import ATTACK_OPTIONS, IMPORT_OPTIONS, AttackConfig
from hiddenlab.registry import check_name
from hiddenlab.summary import figure

STYLES = {"BROKEN": BAD, "LEAKS": BAD, "HELD": GOOD, "INCONCLUSIVE": OPEN}
LEFT_OUT = (
    "prompt", "observation", "states", "truth", "defense", "attack", "independent", "batch", *ATTACK_OPTIONS,
    *IMPORT_OPTIONS,
)  # fmt: skip


@takes(AttackConfig, leave_out=LEFT_OUT)
def assess(
    config: AttackConfig,
    defense: Annotated[
        list[str],
        Argument(
            metavar="DEFENSE",
            help="The stages of one defense, in order, or joined by '+'; see 'hiddenlab list defenses'. One of your "
            "own: FILE.py:KEY=VALUE. 'identity' is none.",
        ),
    ],
    minutes: Annotated[
        float,
        Option(
            "--minutes",
            metavar="M",
            rich_help_panel=o.SEARCH,
            help="For all attacks on all prompts; as much again may go to the same attacks without the defense.",
        ),
    ] = 10.0,
    json: o.JsonOpt = False,
) -> None:
    """Say whether a defense holds: attack it with everything that applies, and give a verdict in one sentence.

    BROKEN and LEAKS end with exit code 1, HELD with 0, INCONCLUSIVE with 3. HELD means against these attacks within
    this time, and never that a defense is secure.
    """
    stages = tuple(stage for spec in defense for stage in stages_of(spec))
    for spec in stages:
        check_name("defenses", spec)
    run = registry.resolve("eval", "assess")
    with only_json(json), bars() as progress:
        result = run(replace(config, defense=stages), minutes=minutes, progress=progress)
    if json:
        print_json(result)
    else:
        show(result)
    raise typer.Exit(result["exit_code"])


def show(result: Mapping[str, Any]) -> None:
    """Print the verdict, the figures behind it, what each attack did, and the prompt that leaked most."""
    from hiddenlab.cli.show import table

    screen = stdout()
    screen.print(result["sentence"], style=STYLES[result["status"]], soft_wrap=True)
    leak, secrets = result["leak"], result["secrets"]
    rows = [
        ["leak beyond a guess", _interval(leak)],
        ["the same, best attack of each prompt told", _interval(result["oracle"])],
        ["tokens read", figure("token_accuracy", result["token_accuracy"])],
        ["tokens guessed without rows", figure("token_accuracy", result["control"])],
        ["exact prompts", _interval(result["exact"])],
        ["ROUGE-L", figure("rouge_l", result["rouge_l"]["value"])],
        ["planted secrets read", f"{secrets['read']} of {secrets['planted']}"],
        ["time of a release over plain", f"{result['cost']['time_over_plain']:.2f} ×"],
        ["bytes of a release over plain", f"{result['cost']['bytes_over_plain']:.2f} ×"],
    ]
    utility = result["utility"]
    if "reason" not in utility:
        before, after = utility["clean_perplexity"]["value"], utility["perplexity"]["value"]
        rows.append(["perplexity, before and behind", f"{before:.2f}, {after:.2f}"])
        rows.append(["top-1 agreement", figure("token_accuracy", utility["top1_agreement"]["value"])])
    title = (
        f"{result['model']}, {result['stream']} at layer {result['layer']}, {' + '.join(result['defense'])}"
    )
    screen.print(table(["figure", "value"], rows, (0,), title))
    did = [
        [
            one["attack"],
            one["status"],
            "–" if one["token_accuracy"] is None else figure("token_accuracy", one["token_accuracy"]),
            f"{one['seconds']:.0f}",
        ]
        for one in result["attacks"]
    ]
    screen.print(
        table(["attack", "what it did", "tokens read", "seconds"], did, (0, 1), "the attacks, in order")
    )
    for one in result["attacks"]:
        if one["status"] == "crashed":
            screen.print(f"{one['attack']} crashed: {one['reason']}", soft_wrap=True)
    if result["undefended"]:
        told = ", ".join(
            f"{one['attack']} {100 * one['leak']['value']:.0f} %" for one in result["undefended"]
        )
        screen.print(f"Without the defense, in as much time: {told}.", soft_wrap=True)
    if "reason" in utility:
        screen.print(f"Utility {utility['reason']}.", style="dim", soft_wrap=True)
    if worst := result["leakiest"]:
        screen.print(
            f"The leakiest prompt, {worst['id']} ({worst['attack']}, "
            f"{figure('token_accuracy', worst['token_accuracy'])} of its tokens): {worst['recovered']}",
            soft_wrap=True,
        )


def _interval(estimate: Mapping[str, float]) -> str:
    return f"{_percent(estimate['value'])} ({_percent(estimate['low'])} to {_percent(estimate['high'])})"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
