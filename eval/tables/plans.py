"""Define experiments on whole plans of Cascade: the security of one, and of many against their cost."""

from typing import Any

from hiddenlab.defenses.cascade.cost import Shape, layer_bytes
from hiddenlab.errors import InputError
from hiddenlab.eval.cells import Cell, Experiment, Setting, attack_cell
from hiddenlab.eval.tables.sharding import (
    ATTN_ROWS,
    NODES,
    SHARDED,
    infill_notes,
    infill_spec,
    infilled,
    shard_tokens,
    sums_cell,
)
from hiddenlab.models.load import load_config, resolve_model
from hiddenlab.sharding import AttnNode, Plan

GRID = tuple((c, alpha, m) for c in (1, 4, 8) for alpha in (4, 8, 12) for m in (1, 4))
COST = "MB a pass"


def plan(
    setting: Setting, alpha: int = 8, c: int = 8, m: int = 4, budget: int = 2000, sums: bool = False
) -> Experiment:
    """Run every applicable attack on each kind of node of one Cascade plan, and list the worst nodes first.

    Nodes at the start, in the middle and at the end of the prompt are attacked; the others see rows of the same kind.

    Args:
        alpha, c, m: of the plan.
        budget: of ``missing-tokens``, sequences per gap.
        sums: whether it also solves for missing tokens at layer 1, which takes minutes per prompt where dozens are
            missing (``gap-plans`` measures it by itself).
    """
    _check(alpha=alpha, c=c, m=m)
    tokens = shard_tokens(setting)
    whole = Plan.clustered(tokens, c, alpha=alpha, m=m, symmetric=True)
    comps = sorted({0, alpha // 2, alpha - 1})
    attns = sorted({AttnNode(0, 0), AttnNode(0, whole.beta // 2), AttnNode(whole.beta // 2, whole.beta - 1)})
    views = [(f"CompNode {i}", f"shard:alpha={alpha},c={c},node={i}", whole.shards[i]) for i in comps]
    views += [
        (
            f"AttnNode ({n.queries}, {n.keys})",
            f"shard:alpha={alpha},c={c},m={m},queries={n.queries},keys={n.keys}",
            whole.held_by(n),
        )
        for n in attns
    ]
    cells, search = [], f"missing-tokens:budget={budget},sums={str(sums).lower()}"
    for i in comps:
        if i and whole.shards[i]:
            keys = {
                "node": f"CompNode {i}",
                "layer": 1,
                "attack": "partial-sums",
                "rows held": len(whole.shards[i]),
            }
            cells.append(sums_cell(setting, keys, alpha, c, m, i))
    for who, channel, held in views:
        for layer in (0, *setting.at((1, 11))):
            attacks = [("infill", infill_spec(setting))]
            if layer:
                attacks += [("vocab-match", "vocab-match"), ("missing-tokens", search)]
            for label, attack in attacks:
                keys = {"node": who, "layer": layer, "attack": label, "rows held": len(held)}
                cells.append(attack_cell(setting, keys, layer, channel, attack=attack, max_tokens=tokens))
    megabytes = _megabytes(setting, whole)
    return Experiment(
        f"Security of a plan: alpha {alpha}, c {c}, m {m}, {tokens} tokens",
        cells,
        SHARDED,
        [
            f"{alpha} CompNodes and {len(whole.attn_nodes)} AttnNodes (symmetric); {megabytes:.1f} MB a pass by "
            "Equation 1 at two bytes an element.",
            f"The search for missing tokens tries {budget:,} sequences a gap at most, and only what its priors propose "
            "for gaps of more than eight tokens; matching ends at a node's first gap.",
            *(
                ["Behind layer 1 missing tokens can be solved for, which was left out: see gap-plans."]
                * (not sums)
            ),
            *infill_notes(setting),
            ATTN_ROWS,
        ],
        fold=_worst_first,
    )


def _worst_first(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sort nodes by the best attack on them, and the attacks on a node by their result."""

    def score(row: dict[str, Any]) -> float:
        return float(row["figures"].get("rouge_l", {}).get("value") or 0.0)

    worst: dict[str, float] = {}
    for row in rows:
        node = row["keys"]["node"]
        worst[node] = max(worst.get(node, 0.0), score(row))
    return sorted(rows, key=lambda row: (-worst[row["keys"]["node"]], row["keys"]["node"], -score(row)))


def plans(setting: Setting, grid: str = "") -> Experiment:
    """Compare the security and the traffic of many Cascade plans (c, alpha, m), for a middle node and the last one.

    Args:
        grid: plans as ``c/alpha/m,c/alpha/m,...``, in place of the built-in ones.

    Raises:
        InputError: a plan is malformed, or does not fit the prompts.
    """
    tokens = shard_tokens(setting)
    chosen = [_parse(text) for text in grid.split(",")] if grid else GRID
    layers = setting.at((1,))
    cells: list[Cell] = []
    for c, alpha, m in chosen:
        if c * alpha > tokens:
            raise InputError(f"c {c} and alpha {alpha} need prompts of {c * alpha} tokens, not {tokens}")
        whole = Plan.clustered(tokens, c, alpha=alpha, m=m, symmetric=True)
        keys = {
            "c": c, "alpha": alpha, "m": m, "nodes": alpha + len(whole.attn_nodes),
            COST: round(_megabytes(setting, whole), 1),
        }  # fmt: skip
        for layer in (0, *layers):
            cell = infilled(setting, layer, alpha, c)
            cells.append(Cell(cell.measure, cell.spec, {**keys, "view": f"CompNode, layer {layer}"}))
        for layer in layers:
            cell = infilled(setting, layer, alpha, c, m=m, attn=True)
            cells.append(Cell(cell.measure, cell.spec, {**keys, "view": f"AttnNode, layer {layer}"}))
        cells.append(sums_cell(setting, {**keys, "view": "CompNode, partial sums"}, alpha, c, m, alpha - 1))
    views = list(dict.fromkeys(cell.keys["view"] for cell in cells))
    return Experiment(
        "Security against cost of plans",
        cells,
        {f"rouge_l, {view}": f"ROUGE-L, {view}" for view in views},
        [
            f"Prompts of {tokens} tokens; bytes of a pass by Equation 1 at two bytes an element; nodes with the "
            "symmetric assignment.",
            "Partial sums: what CompNode alpha - 1 reads in m, e and u of the first layer. ROUGE-L is of the whole "
            "prompt in every column. Tokens behind a node's last row do not reach it and count as wrong: of 96 tokens "
            "with c and alpha of 8 they are 32 for that node.",
            *infill_notes(setting),
            NODES,
        ],
        fold=_by_plan,
        over=COST,
    )


def _by_plan(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Make one row per plan, with the ROUGE-L of every view."""
    merged: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        keys = dict(row["keys"])
        view = keys.pop("view")
        own = {**row, "keys": keys, "figures": {}, "paper": {}, "reason": None, "cell": None}
        entry = merged.setdefault(tuple(keys.values()), own)
        if "rouge_l" in row["figures"]:
            entry["figures"][f"rouge_l, {view}"] = row["figures"]["rouge_l"]
            entry["status"] = row["status"]
        else:
            missing = f"{view}: {row['reason'] or 'not measured yet'}"
            entry["reason"] = "; ".join(filter(None, [entry["reason"], missing]))
    return list(merged.values())


def _parse(text: str) -> tuple[int, int, int]:
    try:
        c, alpha, m = (int(part) for part in text.split("/"))
    except ValueError:
        raise InputError(f"a plan of the grid is c/alpha/m, such as 8/8/4, not {text!r}") from None
    _check(alpha=alpha, c=c, m=m)
    return c, alpha, m


def _check(**numbers: int) -> None:
    for name, value in numbers.items():
        if not isinstance(value, int) or value < 1:
            raise InputError(f"{name} must be a whole number of at least 1, not {value!r}")


def _megabytes(setting: Setting, plan: Plan) -> float:
    """Return the megabytes of a pass through all layers (Equation 1), with two bytes per element."""
    shape = Shape.of(load_config(resolve_model(setting.model)), 2)
    return shape.layers * layer_bytes(plan, shape, "paper") / 1e6
