"""Attack the same prompts behind several defenses (``hiddenlab compare``)."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from hiddenlab import options as o
from hiddenlab.cli.attack import JSON_FORMAT, payload, ready, say_ended, say_engine, showing
from hiddenlab.cli.console import print_json, stderr, stdout
from hiddenlab.cli.from_config import takes
from hiddenlab.config import IMPORT_OPTIONS, AttackConfig
from hiddenlab.errors import InputError
from hiddenlab.registry import check_name, parse_spec, stages_of
from hiddenlab.summary import NOT_APPLICABLE, figure, not_applicable
from hiddenlab.text import count_of
from hiddenlab.utils.schema import LARGEST

if TYPE_CHECKING:
    from hiddenlab.runner import Run

BASELINE = "identity"  # every state, in order: what no defense means
PICTURE = "compare.png"
PANELS = {"exact": "exact prompts, %", "rouge_l": "ROUGE-L", "token_accuracy": "right tokens, %"}
SHOWN = ("exact", "token_accuracy", "rouge_l", "verified", "attack_seconds")
BUDGET = 256  # candidates a token, where none is given: behind noise no candidate may match, and all would be tried
OF_FILES = ("observation", "states", "truth", *IMPORT_OPTIONS)


@takes(AttackConfig, leave_out=("defense", "budget", "independent", *OF_FILES))
def compare(
    config: AttackConfig,
    defense: Annotated[
        list[str],
        Option(
            "--defense",
            metavar="SPEC",
            rich_help_panel=o.DEFENSE,
            help="A defense to compare; stages of one defense are joined by '+': gaussian:sigma=0.01+seq-perm. "
            "See 'hiddenlab list defenses'. One of your own: FILE.py:KEY=VALUE. "
            "No defense at all is always the first row.",
        ),
    ],
    budget: Annotated[
        int | None,
        Option(
            metavar="N",
            min=1,
            max=LARGEST,
            rich_help_panel=o.SEARCH,
            help=f"Candidates a token at most; default: {BUDGET} for vocab-match, no cap for others.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        Option(
            "--out",
            metavar="DIR",
            rich_help_panel=o.OUTPUT,
            help="Where the runs and the picture are written, a new directory; default: one in --runs-dir.",
        ),
    ] = None,
    runs_dir: o.RunsDirOpt = Path("runs"),
    no_record: o.NoRecordOpt = False,
    json: o.JsonOpt = False,
) -> None:
    """Attack the same prompts behind several defenses, and show one table and one picture.

    Vocabulary matching tries at most 256 candidates a token here, so that a strong defense ends in time; --budget
    changes that.
    """
    if out is not None and no_record:
        raise InputError(
            "--out names a directory for the runs, and --no-record asks for none; give one of them"
        )
    if budget is None and parse_spec(config.attack)[0] == AttackConfig().attack:
        budget = BUDGET
    config = ready(replace(config, budget=budget))
    defenses = _stages(defense)
    for spec in chain(*defenses):
        check_name("defenses", spec)
    folder = None if no_record else out or _new_folder(runs_dir)
    runs = _conduct(config, defenses, folder, json)
    names = ["+".join(run.record.spec["defense"]) or BASELINE for run in runs]
    if json:
        shown = [{"defense": name, **payload(run)} for name, run in zip(names, runs, strict=True)]
        print_json({"format": JSON_FORMAT, "runs": shown})
    else:
        _show(names, runs)
    if folder is not None:
        _draw(names, runs, folder / PICTURE)
        stderr().print(
            f"recorded in {folder}, with a picture, {PICTURE}; 'hiddenlab report {folder}/[0-9]*' makes a page of it",
            soft_wrap=True,
        )
    reasons = [not_applicable(run.samples) for run in runs]
    if None not in reasons:
        raise InputError(f"{config.attack} could not be applied to any prompt: {reasons[0]}")


def _new_folder(runs_dir: Path) -> Path:
    """Return a free name for the runs; a comparison of the same second may have the first one."""
    path = first = runs_dir / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-compare"
    number = 1
    while path.exists():
        number += 1
        path = first.with_name(f"{first.name}-{number}")
    return path


def _stages(given: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the stages of each defense, the baseline first."""
    defenses = [tuple(stages_of(spec)) for spec in given]
    baseline: list[tuple[str, ...]] = [()]
    return baseline + [stages for stages in defenses if stages != (BASELINE,)]


def _conduct(
    config: AttackConfig, defenses: Sequence[tuple[str, ...]], folder: Path | None, json: bool
) -> "list[Run]":
    from hiddenlab.runner import run_defenses

    with showing(json, _not_begun) as (progress, _):

        def ended(run: "Run") -> None:
            with progress.aside():
                say_ended(run, json, figures=False, where=False)

        runs = run_defenses(
            replace(config, defense=()),
            defenses,
            folder,
            keep=folder is not None,
            progress=progress,
            ended=ended,
        )
    say_engine(runs[-1].record.setup)
    return runs


def _not_begun(left: Sequence[Sequence[str]]) -> str:
    return " ".join(f"--defense {'+'.join(stages) or BASELINE}" for stages in left)


def _show(names: Sequence[str], runs: "Sequence[Run]") -> None:
    """Print one table, a sentence for each defense, and what the table does not say."""
    from hiddenlab.cli.show import table
    from hiddenlab.summary import FIGURES

    spec, screen = runs[0].record.spec, stdout()
    measured = [name for name in SHOWN if any(run.summary.get(name) is not None for run in runs)]
    rows = [
        [name, *(figure(key, run.summary.get(key)) for key in measured)]
        for name, run in zip(names, runs, strict=True)
    ]
    title = f"{spec['model']}, {spec['stream']} at layer {spec['layer']}, {spec['attack']}"
    screen.print(table(["defense", *(FIGURES[key][0] for key in measured)], rows, (0,), title))
    for name, run in zip(names, runs, strict=True):
        screen.print(_sentence(name, run), soft_wrap=True)
    # What the attack's own spec says comes before the option.
    budget = parse_spec(spec["attack"])[1].get("budget", spec["budget"])
    if budget is not None:
        screen.print(f"At most {budget} candidates a token were tried (--budget).", style="dim")
    screen.print(
        "A defense that withstands this attack may fall to another one: see 'hiddenlab list attacks'. "
        "What a defense costs the model is measured by 'hiddenlab eval noise-utility' and 'table-22'.",
        style="dim",
    )


def _sentence(name: str, run: "Run") -> str:
    """Say what came back behind one defense."""
    if reason := not_applicable(run.samples):
        return f"{name}: not attacked, {reason}"
    done = [sample for sample in run.samples if sample["status"] != NOT_APPLICABLE]
    exact = sum(bool(sample["exact"]) for sample in done)
    tokens = sum(sample["tokens"] for sample in done)
    right = sum(round(sample["token_accuracy"] * sample["tokens"]) for sample in done)
    left_out = len(run.samples) - len(done)
    unused = f" {count_of(left_out, 'prompt')} could not be attacked." if left_out else ""
    return (
        f"{name}: {exact} of {count_of(len(done), 'prompt')} came back exactly, "
        f"{figure('token_accuracy', right / tokens)} of all their tokens.{unused}"
    )


def _draw(names: Sequence[str], runs: "Sequence[Run]", path: Path) -> None:
    """Draw a bar for each defense; what was not measured is left out."""
    from hiddenlab.report.bars import draw_bars

    rows: list[dict[str, Any]] = [
        {"defense": name, **{key: _shown(key, run.summary.get(key)) for key in PANELS}}
        for name, run in zip(names, runs, strict=True)
    ]
    spec = runs[0].record.spec
    title = f"What {spec['attack']} recovers at layer {spec['layer']} of {spec['model']}, by defense"
    draw_bars(rows, "defense", PANELS, title, path, logarithmic=False)


def _shown(key: str, value: float | None) -> float | None:
    return value if value is None or key == "rouge_l" else 100 * value
