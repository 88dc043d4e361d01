"""Define experiments on hardened Cascade: what a node reads behind layers that the client computes."""

from collections.abc import Iterator
from typing import Any

from hiddenlab.errors import InputError
from hiddenlab.eval.cells import MEASURED, NOT_RUN, Cell, Experiment, Setting, attack_cell, split_specs
from hiddenlab.eval.tables.sharding import shard_tokens
from hiddenlab.sharding import Plan, Positions

READ, CONTROL = "read", "control"  # the two parts of a row
CONTROLLED = "missing_token_accuracy"


def hardened_shards(setting: Setting, alphas: str | int = "2,4,8", c: int = 8) -> Experiment:
    """Measure what a CompNode reads behind the client's first layers, by layers and plan (``--harden client``).

    Layers (``--layers``) are the client's first ones: states behind them are what the node gets first.

    Args:
        alphas: numbers of CompNodes, separated by commas. c: tokens of a cluster.

    Raises:
        InputError: an alpha is no whole number from 2, or the node in the middle holds nothing.
    """
    cells, options = list[Cell](), _prompts(setting)
    for alpha, node, held in _middle_nodes(options["max_tokens"], alphas, c):
        channel = f"shard:alpha={alpha},c={c},node={node}"
        plan = {"alpha": alpha, "c": c, "rows held": f"{len(held)} of {held[-1] + 1}"}
        for layer in setting.at((1, 2, 4, 8)):
            keys = {"client layers": layer, **plan, "part": READ}
            cells.append(attack_cell(setting, keys, layer, channel, attack="shard-reading", **options))
        keys = {**plan, "part": CONTROL}
        cells.append(attack_cell(setting, keys, 0, channel, attack="shard-reading:reach=0", **options))
    return Experiment(
        "What a CompNode reads behind the client's first layers",
        cells,
        {
            "held_token_accuracy": "own tokens right", CONTROLLED: "others' tokens right",
            "control_token_accuracy": "others' tokens, control", "beyond_control": "beyond the control",
            "seconds_per_prompt": "seconds a prompt",
        },
        [
            _texts(setting, options),
            "The CompNode is the one in the middle of the plan. Others' tokens are those before its "
            "last row that it has no row of; rows held are of as many positions.",
            "The attack reads the states behind the client's layers by regressions on own text, and a language model "
            "(the same) fills in. The control is the same attack on the node's embeddings, where no row is asked "
            "about tokens before it: what a language model guesses from the tokens that the node is meant to hold.",
            "Beyond the control is (attack - control) / (1 - control). Its interval is the attack's; the control's "
            "figure is taken as exact.",
            "The states are those after the client's layers alone. A node also gets its rows at later layers, and what "
            "attention brings them.",
        ],
        fold=_beyond,
    )  # fmt: skip


def secret_coordinates(setting: Setting, alphas: str | int = "4,8", c: int = 8) -> Experiment:
    """Measure what an AttnNode reads from scores of rows with themselves, behind secret coordinates (``secret-maps``).

    Layers (``--layers``) are those that the client computes before; 0 is none.

    Args:
        alphas: numbers of CompNodes, separated by commas. c: tokens of a cluster.

    Raises:
        InputError: an alpha is no whole number from 2, or the node in the middle holds nothing.
    """
    cells, options = list[Cell](), _prompts(setting)
    for alpha, node, held in _middle_nodes(options["max_tokens"], alphas, c):
        channel = f"shard:alpha={alpha},c={c},m=1,queries={node},keys={node}"
        for layer in setting.at((0, 1, 2, 6)):
            keys = {"client layers": layer, "alpha": alpha, "c": c, "rows": len(held)}
            cells.append(
                attack_cell(setting, keys, layer + 1, channel, attack="self-scores", stream="qkv", **options)
            )
    return Experiment(
        "What scores of rows with themselves tell an AttnNode behind secret coordinates",
        cells,
        {"held_token_accuracy": "own tokens right", "seconds_per_prompt": "seconds a prompt"},
        [
            _texts(setting, options),
            "AttnNode (j, j) in the middle of the plan gets queries and keys of its rows in "
            "secret coordinates, which leave scores as they are; so the attack sees rows without them here "
            "(tests/test_self_scores.py holds both against each other).",
            "Behind no layer of the client the scores of each token stand in a table; behind others a regression on "
            "own text reads them, without a language model. Other scores and values are not looked at.",
        ],
    )  # fmt: skip


def _prompts(setting: Setting) -> dict[str, Any]:
    """Return how many prompts there are, and how long they are at most."""
    return {"max_tokens": shard_tokens(setting), "limit": setting.source(limit=20)["limit"]}


def _texts(setting: Setting, options: dict[str, Any]) -> str:
    """Return the note on the model, the prompts and the attacker's own text."""
    return (
        f"Model {setting.model}; {options['limit']} prompts ({setting.prompts or 'the shipped ones'}) of up to "
        f"{options['max_tokens']} tokens; regressions on 12,000 rows of the attacker's own text, the documentation and "
        "source of Python's standard library."
    )


def _middle_nodes(tokens: int, alphas: str | int, c: int) -> Iterator[tuple[int, int, Positions]]:
    """Yield for each number of CompNodes that number, the node in the middle, and the positions that it holds.

    Raises:
        InputError: an alpha is no whole number from 2, or the node holds nothing.
    """
    for alpha in map(_alpha, split_specs(str(alphas))):
        node = alpha // 2
        held = Plan.clustered(tokens, c, alpha=alpha).shards[node]
        if not held:
            raise InputError(
                f"CompNode {node} of {alpha} holds no token of {tokens}; take smaller alphas or c"
            )
        yield alpha, node, held


def _alpha(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise InputError(f"an alpha is a whole number from 2, not {text!r}")
    return int(text)


def _beyond(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Make one row for each layer and plan, with the control's figure and what the attack reads beyond it."""
    controls = {_plan(row): row for row in rows if row["keys"]["part"] == CONTROL}
    result = []
    for row in (row for row in rows if row["keys"]["part"] == READ):
        control = controls[_plan(row)]
        figures, guessed = dict(row["figures"]), control["figures"].get(CONTROLLED)
        if guessed is not None:
            figures["control_token_accuracy"] = guessed
            if guessed["value"] < 1 and CONTROLLED in figures:
                figures["beyond_control"] = {
                    name: value if name == "n" else (value - guessed["value"]) / (1 - guessed["value"])
                    for name, value in figures[CONTROLLED].items()
                }
        missing = [
            f"{name}: {part['reason'] or 'not measured yet'}"
            for name, part in ((READ, row), (CONTROL, control))
            if part["status"] != MEASURED
        ]
        keys = {name: value for name, value in row["keys"].items() if name != "part"}
        result.append(
            {
                **row, "keys": keys, "figures": figures, "status": NOT_RUN if missing else MEASURED,
                "reason": "; ".join(missing) or None,
            }
        )  # fmt: skip
    return result


def _plan(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["keys"]["alpha"], row["keys"]["c"]
