"""Measure a cell of the leaderboard: one assessment of one defense (``hiddenlab assess``)."""

import json
from pathlib import Path
from typing import Any

from hiddenlab.config import AttackConfig
from hiddenlab.eval.assess.command import assess
from hiddenlab.eval.cells import Worded
from hiddenlab.eval.measures.attack import exactly
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
        "secrets_read": exactly(found["secrets"]["read"], found["secrets"]["planted"]),
        "control": exactly(found["control"], prompts),
        "time_over_plain": exactly(cost["time_over_plain"], prompts),
        "bytes_over_plain": exactly(cost["bytes_over_plain"], prompts),
        "minutes": exactly(sum(one["seconds"] for one in found["attacks"]) / 60, 1),
    }
    figures |= {name: utility[name] for name in ("perplexity", "kl", "top1_agreement") if name in utility}
    worst = found["leakiest"]
    words = {"verdict": found["status"]}
    if worst is not None and worst["token_accuracy"] > found["control"]:
        words |= {"attack": worst["attack"], "recovered": _short(worst["recovered"] or "")}
    return Worded(figures, words)


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
