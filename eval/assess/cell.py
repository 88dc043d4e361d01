"""Measure a cell of the leaderboard: one assessment of one defense (``hiddenlab assess``)."""

import json
from pathlib import Path
from typing import Any

from hiddenlab.config import AttackConfig
from hiddenlab.eval.assess.belief import Belief
from hiddenlab.eval.assess.command import assess
from hiddenlab.eval.assess.ensemble import ATTACKS, Step, attack_all
from hiddenlab.eval.assess.readings import readings_of, right_of, truth_of
from hiddenlab.eval.assess.session import release_all
from hiddenlab.eval.cells import Figures, Worded
from hiddenlab.eval.measures.attack import as_figures, exactly
from hiddenlab.eval.measures.intervals import ratio
from hiddenlab.job import prepare
from hiddenlab.stages import are_replaced
from hiddenlab.types import Progress, silent
from hiddenlab.utils.files import write_file

ASSESSMENT = "assessment.json"  # the whole of it, beside the cell's result
SHOWN = 60  # characters of the recovered text


def assessment(spec: dict[str, Any], folder: Path, progress: Progress = silent) -> Worded:
    """Assess a defense; figures are those of ``hiddenlab assess --json``, the verdict and the best attack are words.

    Args:
        spec: minutes, and the options of ``AttackConfig``.

    Raises:
        HiddenlabError: the defense or the model cannot be used.
    """
    options = {name: value for name, value in spec.items() if name != "minutes"}
    config = AttackConfig.from_json(options)
    found = assess(config, minutes=spec["minutes"], keep=False, progress=progress).findings
    write_file(folder / ASSESSMENT, json.dumps(found, ensure_ascii=False, indent=1) + "\n")
    prompts, utility, cost = found["prompts"], found["utility"], found["cost"]
    figures = {
        "leak": found["leak"],
        "exact": found["exact"],
        "control": exactly(found["control"], prompts),
        "time_over_plain": exactly(cost["time_over_plain"], prompts),
        "bytes_over_plain": exactly(cost["bytes_over_plain"], prompts),
        "minutes": exactly(sum(one["seconds"] for one in found["attacks"]) / 60, 1),
    }
    if (secrets := found["secrets"]) is not None:
        figures["secrets_read"] = exactly(secrets["read"], secrets["planted"])
    figures |= {name: utility[name] for name in ("perplexity", "kl", "top1_agreement") if name in utility}
    worst = found["leakiest"]
    words = {"verdict": found["status"]}
    if worst is not None and worst["token_accuracy"] > found["control"]:
        words |= {"attack": worst["attack"], "recovered": _short(worst["recovered"] or "")}
    return Worded(figures, words)


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


def against(spec: dict[str, Any], folder: Path, progress: Progress = silent) -> Figures:
    """Give one attack and the whole ensemble the same rows and the same time, and measure what each reads.

    Args:
        spec: single (the one attack), minutes, and the options of ``AttackConfig``.

    Raises:
        HiddenlabError: the defense or the model cannot be used.
    """
    options = {name: value for name, value in spec.items() if name not in ("minutes", "single")}
    config = AttackConfig.from_json(options | {"attack": "vocab-match"})
    job = prepare(config, progress)
    rows = [shown for shown, _ in release_all(job.model, job.channel, job.cases, config.seed)]
    belief, seconds = Belief(job.model, are_replaced(rows[0].info)), 60 * spec["minutes"]
    lengths = [len(truth_of(case).tokens) for case in job.cases]
    (alone,) = attack_all(rows, job.model, config.seed, seconds, progress, [Step(spec["single"])])
    single = [right_of(alone.results.get(i), case) for i, case in enumerate(job.cases)]
    attempts = attack_all(
        rows, job.model, config.seed, seconds, progress, ATTACKS, belief.weigh, belief.convinces
    )
    read = [one.right for one in readings_of(job.model, job.cases, rows, attempts, belief)]
    gained = [a - b for a, b in zip(read, single, strict=True)]
    return as_figures(
        {
            name: ratio(right, lengths)
            for name, right in (("ensemble", read), ("single", single), ("gained", gained))
        }
    ) | {
        "single_minutes": exactly(alone.seconds / 60, 1),
        "ensemble_minutes": exactly(sum(one.seconds for one in attempts) / 60, 1),
    }
