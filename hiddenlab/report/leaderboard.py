"""Gather the tables of a leaderboard, which grows by one table at a time, and sort its rows by what leaks."""

from collections.abc import Sequence
from typing import Any

from hiddenlab.report.data import Study

LEADERBOARD = "leaderboard"


def gathered(studies: Sequence[Study]) -> list[Study]:
    """Return studies with all tables of the leaderboard as one, the defense that leaks least first.

    Of two rows with the same labels, such as the same defense with more prompts, both stay. Rows of one leak are in the
    order of the model's agreement with itself behind the defense, the best first. A row without a leak comes last.
    """
    parts = [study for study in studies if is_board(study.table["experiment"])]
    if len(parts) < 2:
        return [_sorted(study) if study in parts else study for study in studies]
    tables = [study.table for study in parts]
    whole: dict[str, Any] = {
        **tables[0],
        "experiment": LEADERBOARD,
        "rows": [row for table in tables for row in table["rows"]],
        "command": "; ".join(table["command"] for table in tables),
    }
    for name in ("versions", "notes"):
        whole[name] = list(dict.fromkeys(text for table in tables for text in table.get(name, ())))
    board = _sorted(Study(whole, [run for study in parts for run in study.runs]))
    first = studies.index(parts[0])
    others = [study for study in studies if study not in parts]
    return [*others[:first], board, *others[first:]]


def is_board(experiment: str) -> bool:
    """Return whether a table of this name is the leaderboard, or a part of it."""
    return experiment == LEADERBOARD or experiment.startswith(f"{LEADERBOARD}-")


def _sorted(study: Study) -> Study:
    def place(row: dict[str, Any]) -> tuple[float, float]:
        leak, agreement = (row["figures"].get(name, {}).get("value") for name in ("leak", "top1_agreement"))
        return float("inf") if leak is None else round(leak, 3), -(agreement or 0.0)

    return Study({**study.table, "rows": sorted(study.table["rows"], key=place)}, study.runs)
