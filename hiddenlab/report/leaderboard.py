"""Gather the tables of a leaderboard, which grows by one table at a time, and sort its rows by what leaks."""

from collections.abc import Mapping, Sequence
from typing import Any

from hiddenlab.report.data import Study
from hiddenlab.report.tables import grid
from hiddenlab.text import markdown, markdown_table

LEADERBOARD = "leaderboard"
BOARD_TITLE = "Leaderboard of defenses"
INTRODUCTION = """\
Each row is one assessment by `hiddenlab assess`: a defense, on one model, at one layer. The defense that leaks least
stands first. Of two that leak alike, the one stands first that keeps more of the model's next tokens. Rows of which
nothing follows (INCONCLUSIVE) stand last, whatever was read. A defense is of use where the leak is small and most next
tokens stay the same. A dash means not measured, or no attack. What the verdicts mean, what was recovered, and all
figures stand below.

- Each row is the mildest case for the defense: each prompt is released once, under a key of its own, and the attacker
  has no other text of that key. He knows the code and the public facts. `--key`, `--known` and `--releases` of
  `hiddenlab assess` give him more.
- The attack is the one that read most of the prompt that leaked most.
- The commit is the version of the lab that measured the row. Later versions may read more. So a leak is what at least
  comes back, and a row that says HELD is of that version's attacks.
- Time decides where attacks need more of it than they have. The commands behind the last table say how many minutes,
  prompts and processor threads a row had. A faster machine reads at least as much.
- To repeat a row, take the defense as it stands here: `hiddenlab assess DEFENSE --layer LAYER --limit 20 --max-tokens
  40 --threads 1 --stream STREAM` for the built-in model, with `--model MODEL --limit 10` for the other one. That
  measures with your version of the lab, which may read more than the row's commit did.
- Time and bytes over plain are of one release up to that layer, and not of a whole inference."""
SHORT = ("verdict", "leak", "top1_agreement", "attack")  # behind the keys that differ


def gathered(studies: Sequence[Study]) -> list[Study]:
    """Return studies with all tables of the leaderboard as one, the defense that leaks least first.

    Of two rows with the same labels, such as the same defense with more prompts, both stay. Rows of one leak are in the
    order of the model's agreement with itself behind the defense, the best first. Rows of which nothing follows come
    behind them, and rows without a leak last.
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


def short_table(table: Mapping[str, Any]) -> list[str]:
    """Return what a leaderboard says first, as a Markdown table: verdict, leak, utility, and which attack read most."""
    cells, rows = grid(table), table["rows"]
    keys = list(rows[0]["keys"]) if rows else []
    varying = [key for key in keys if len({str(row["keys"].get(key)) for row in rows}) > 1]
    wanted = [*varying, *(table["figures"].get(name, name) for name in SHORT)]
    head = [*(name for name in wanted if name in cells.header), "commit"]
    lines = [dict(zip(cells.header, line, strict=True)) for line in cells.rows]
    for line, row in zip(lines, rows, strict=True):
        line["commit"] = row.get("commit") or "–"
        if "attack" in line:  # without its parameters
            line["attack"] = line["attack"].partition(":")[0]
    shown = [[markdown(line[name]) for name in head] for line in lines]
    return markdown_table([markdown(name) for name in head], shown, len(head))


def is_board(experiment: str) -> bool:
    """Return whether a table of this name is the leaderboard, or a part of it."""
    return experiment == LEADERBOARD or experiment.startswith(f"{LEADERBOARD}-")


def _sorted(study: Study) -> Study:
    def place(row: dict[str, Any]) -> tuple[bool, bool, float, float]:
        leak, agreement = (row["figures"].get(name, {}).get("value") for name in ("leak", "top1_agreement"))
        nothing_follows = row.get("words", {}).get("verdict") == "INCONCLUSIVE"
        return leak is None, nothing_follows, round(leak or 0.0, 3), -(agreement or 0.0)

    return Study({**study.table, "rows": sorted(study.table["rows"], key=place)}, study.runs)
