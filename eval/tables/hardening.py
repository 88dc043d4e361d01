"""Define experiments on hardened Cascade: what a node reads behind layers that the client computes."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from hiddenlab.defenses.cascade.hardening import Hardening
from hiddenlab.errors import InputError
from hiddenlab.eval.cells import MEASURED, NOT_RUN, Cell, Experiment, Setting, attack_cell, split_specs
from hiddenlab.eval.measures.hardening import ATTENTION, SEES
from hiddenlab.eval.tables.sharding import shard_tokens, sums_cell
from hiddenlab.models.load import load_config, resolve_model
from hiddenlab.sharding import Plan, Positions

VARIANTS = (
    "none,secret-maps,masked-sums,client:first=1,last=1,client:first=2,last=2,client:first=4,last=4,"
    "client:first=8,last=8,client:first=4,last=4+noise:sigma=0.03,client:first=4,last=4+secret-maps+masked-sums,shares"
)
COST, LEAK, ROWS, SHARED = "cost", "leak", "rows", "shared"  # parts of a row
ON_CRYPTEN = "CrypTen"  # begins the key of the row of plain secret sharing
MPC_SECONDS = 1800.0  # for one prompt at most

# What nodes see, for the notes.
_SEEN = {
    "ends": "ends: a CompNode's rows at its first layer and behind its last one.",
    "layers": "layers: a CompNode's rows of {joined} layers, from before its first one to behind its last one, side by "
    "side for the regressions and the lens.",
    "attn": "attn: AttnNode (j, j) gets queries, keys and values of CompNode j's rows; those of the first layer name "
    "tokens, those of the last one say what comes next. Their rotation by position, which is known, is undone. The "
    "control is that of the CompNode.",
    "attn-pair": "attn-pair: AttnNode (i, j) gets queries of CompNode i's rows and keys and values of CompNode j's, "
    "the next one; each has regressions of its own. The control is that of both CompNodes' tokens.",
}

_NOTHING = {"value": 0.0, "low": 0.0, "high": 0.0, "n": 0}  # by construction, without a measurement


def hardening(
    setting: Setting, alpha: int = 4, c: int = 8, repeats: int = 5, variants: str = VARIANTS
) -> Experiment:
    """Set what CompNodes read of others' tokens under each hardening of a plan beside what the hardening costs.

    Args:
        alpha: number of CompNodes. c: tokens of a cluster. repeats: passes that are timed.
        variants: hardenings, separated by commas; ``none`` is the plan as it is.

    Raises:
        InputError: a hardening is malformed, or the node in the middle holds nothing.
    """
    cells, options = list[Cell](), setting.where() | _prompts(setting) | {"prompts": setting.prompts}
    ((_, node, _),) = _middle_nodes(options["max_tokens"], alpha, c)
    specs = split_specs(variants)
    hardenings = [None if spec == "none" else spec for spec in specs]
    cost = {**options, "alpha": alpha, "c": c, "hardenings": hardenings, "repeats": repeats}
    cells.append(Cell("hardened-cost", cost, {"part": COST}))
    for spec, hard in zip(specs, map(Hardening.parse, hardenings), strict=True):
        noise = 0.0 if hard.noise is None else hard.noise.sigma
        if hard.client is not None:
            leak = {"nodes": [node], "noise": noise, "first": hard.client.first, "last": hard.client.last}
            rows = {**options, "alpha": alpha, "c": c, **leak}
            cells.append(Cell("node-reading", rows, {"hardening": spec, "part": ROWS}))
        masked = hard.masked_sums is not None
        # Of noise behind masked sums no attack on sums was written.
        if hard.shares is None and not (noise and masked):
            keys = {"hardening": spec, "part": LEAK}
            first = 0 if hard.client is None else hard.client.first
            limited = replace(setting, limit=options["limit"])
            cells.append(sums_cell(limited, keys, alpha, c, 1, node, masked, first, noise))
    layers = int(load_config(resolve_model(setting.model)).num_hidden_layers)
    shared = {name: options[name] for name in ("model", "seed", "prompts", "max_tokens")} | {
        "limit": 1, "layers": layers - 1, "alpha": alpha, "c": c, "m": 1, "timeout": MPC_SECONDS,
    }  # fmt: skip
    key = f"{ON_CRYPTEN}, {layers - 1} of {layers} layers"
    cells.append(Cell("after-mpc", shared, {"hardening": key, "part": SHARED}))
    return Experiment(
        "What a hardening of Cascade hides, and what it costs",
        cells,
        {
            "missing_token_accuracy": "others' tokens", "over_plain": "time over plain",
            "by_rows": "others' tokens by rows alone, beyond the control", "held_token_accuracy": "own tokens",
            "megabytes": "MB a pass", "rounds_per_layer": "messages a layer", "client_share": "client's share of work",
            "largest_error": "largest error of a logit", "top1_agreement": "same next token",
        },
        [
            f"{_texts(setting, options)} alpha {alpha}, c {c}; the CompNode in the middle of the plan.",
            "Others' tokens are those before the node's last row that it does not hold, and the attack is "
            "partial-sums: on sums by key shard, which secret-maps leave as they are for CompNodes, who have the "
            "secret; or on the attention output that masked sums leave. It verifies what it reads, so that no control "
            "is subtracted. Behind noise it verifies nothing: compare with the control of shard-reading.",
            "By rows alone: shard-reading on the rows of the nodes' first and last layer, beside its control, which is "
            "what a language model guesses from the tokens that the node is meant to hold.",
            "On shares a node gets random numbers, by construction; nothing is measured, and 0 stands there. "
            "Both nodes together read everything.",
            f"Cost: one prompt, nodes of one process over TCP, {repeats} passes of all hardenings and the plain model "
            "in turn on one machine, whose cores all nodes share; megabytes are counted. On shares a message is a "
            "question to both nodes, which the client waits for.",
            "The client's share counts matrix products, the head's too where he computes it.",
            "CrypTen is plain secret sharing: two processes on loopback, one thread each, public weights, one prompt; "
            "all layers but the last. It hides everything from each party, by construction.",
        ],
        fold=partial(_both, specs),
        against="over_plain",
    )  # fmt: skip


def _both(specs: list[str], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Make one row for each hardening, of what it hides and what it costs."""
    cost, result = next(row for row in rows if row["keys"].get("part") == COST), []
    for i, spec in enumerate(specs):
        leaks = [row for row in rows if row["keys"] in ({"hardening": spec, "part": p} for p in (ROWS, LEAK))]
        read = dict[str, Any]()
        for row in leaks:
            figures = row["figures"]
            if row["keys"]["part"] == ROWS:
                figures = {
                    {"beyond_control": "by_rows", "missing_token_accuracy": ""}.get(name, name): figure
                    for name, figure in figures.items()
                }
            read |= {name: figure for name, figure in figures.items() if name}
        if Hardening.parse(None if spec == "none" else spec).shares is not None:
            read["missing_token_accuracy"] = _NOTHING
        spent = {
            name.rpartition(" ")[0]: figure
            for name, figure in cost["figures"].items()
            if name.rpartition(" ")[2] == str(i)
        }
        missing = [one["reason"] or "not measured yet" for one in (cost, *leaks) if one["status"] != MEASURED]
        commits = dict.fromkeys(
            commit for one in (cost, *leaks) for commit in (one["commit"] or "").split(", ") if commit
        )
        result.append(
            {
                **cost, "keys": {"hardening": spec}, "figures": {**spent, **read}, "commit": ", ".join(commits),
                "status": NOT_RUN if missing else MEASURED, "reason": "; ".join(missing) or None,
            }
        )  # fmt: skip
    for row in (one for one in rows if one["keys"].get("part") == SHARED):
        figures = dict(row["figures"])
        if figures:
            figures |= {"missing_token_accuracy": _NOTHING, "largest_error": figures["largest_logit_error"]}
        result.append({**row, "keys": {"hardening": row["keys"]["hardening"]}, "figures": figures})
    return result


def hardened_shards(
    setting: Setting,
    alphas: str | int = "2,4,8",
    c: int = 8,
    client: str = "1/1,2/2,4/4,8/8",
    nodes: str | int = "1,2",
    noise: float = 0.0,
    sees: str = "ends",
    joined: int = 4,
) -> Experiment:
    """Measure what nodes read between the client's first and last layers, by layers and plan (``--harden client``).

    Args:
        alphas: numbers of CompNodes, separated by commas. c: tokens of a cluster.
        client: first and last layers of the client, as FIRST/LAST, separated by commas; LAST 0 leaves late rows out.
        nodes: how many CompNodes put together what they see, separated by commas.
        noise: standard deviation of noise at the client's embeddings.
        sees: what is seen, separated by commas: ``ends`` (CompNodes: rows at their first and behind their last layer),
            ``layers`` (CompNodes: rows of layers between too), ``attn`` (AttnNodes (j, j): queries, keys and values at
            the nodes' first and last layer), ``attn-pair`` (one AttnNode (i, j)).
        joined: how many layers ``layers`` puts side by side.

    Raises:
        InputError: an alpha is no whole number from 2, the node in the middle holds nothing, layers, nodes or joined
            are no such numbers, or nodes see nothing of that name.
    """
    cells, options = list[Cell](), setting.where() | _prompts(setting) | {"prompts": setting.prompts}
    ends = [_ends(text) for text in split_specs(client)]
    together = [_whole(text, "a number of nodes", 1) for text in split_specs(str(nodes))]
    views = split_specs(sees)
    if unknown := [view for view in views if view not in SEES]:
        raise InputError(f"nodes see {', '.join(SEES[:-1])} or {SEES[-1]}, not {unknown[0]!r}")
    joined = _whole(str(joined), "a number of layers side by side", 2)
    for alpha, node, _ in _middle_nodes(options["max_tokens"], alphas, c):
        # An AttnNode (i, j) is one node, but gets rows of two.
        for view, count in [
            *((view, n) for view in views if view != "attn-pair" for n in together if n < alpha),
            *((view, 2) for view in views if view == "attn-pair"),
        ]:
            nodes_seen = [(node + i) % alpha for i in range(count)]
            rows = sum(
                len(Plan.clustered(options["max_tokens"], c, alpha=alpha).shards[i]) for i in nodes_seen
            )
            for first, last in ends:
                keys = {
                    "first layers": first,
                    "last layers": last,
                    "alpha": alpha,
                    "c": c,
                    "nodes": 1 if view == "attn-pair" else count,
                    "rows held": f"{rows} of {options['max_tokens']}",
                }
                keys |= {"sees": view} if views != ["ends"] else {}
                spec = {
                    "alpha": alpha,
                    "c": c,
                    "nodes": nodes_seen,
                    "first": first,
                    "last": last,
                    "noise": noise,
                }
                # Cells of rows at the ends alone keep the names that they had before there were others.
                spec |= {"sees": view} if view != "ends" else {}
                spec |= {"joined": joined} if view == "layers" else {}
                cells.append(Cell("node-reading", {**options, **spec}, keys))
    who = "nodes" if set(views) & set(ATTENTION) else "CompNodes"
    return Experiment(
        f"What {who} read between the client's layers",
        cells,
        {
            "beyond_control": "beyond the control", "missing_token_accuracy": "others' tokens right",
            "control_token_accuracy": "others' tokens, control", "held_token_accuracy": "own tokens right",
            "seconds_per_prompt": "seconds a prompt",
        },
        [
            _texts(setting, options) + (f" Noise of {noise:g} at the client's embeddings." if noise else ""),
            "The CompNode is the one in the middle of the plan; where there are two, the next one puts its rows to "
            "it. Others' tokens are those before the last row that they have no row of; rows held are of a prompt "
            "of full length.",
            "The attack reads the states behind the client's first layers by regressions on own text. The states "
            "before the client's last layers say which token the model expects next (a tuned lens), and a language "
            "model fills in. The control is the same attack on the nodes' embeddings, where no row is asked about "
            "other tokens: what a language model guesses from the tokens that the nodes are meant to hold.",
            "Beyond the control is (attack - control) / (1 - control), with both of the same prompts.",
            *(_SEEN[view].format(joined=joined) for view in views if views != ["ends"]),
            "What attention brings the nodes between is not looked at"
            + (", nor are layers between the first and the last." if views == ["ends"] else "."),
        ],
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
    for alpha in (_whole(text, "an alpha", 2) for text in split_specs(str(alphas))):
        node = alpha // 2
        held = Plan.clustered(tokens, c, alpha=alpha).shards[node]
        if not held:
            raise InputError(
                f"CompNode {node} of {alpha} holds no token of {tokens}; take smaller alphas or c"
            )
        yield alpha, node, held


def _whole(text: str, what: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise InputError(f"{what} is a whole number from {least}, not {text!r}")
    return int(text)


def _ends(text: str) -> tuple[int, int]:
    """Return the client's first and last layers of ``FIRST/LAST``."""
    first, _, last = text.partition("/")
    return _whole(first, "FIRST of FIRST/LAST", 1), _whole(last, "LAST of FIRST/LAST", 0)
