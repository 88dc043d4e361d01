"""Define experiments on token-sharding: what one node's rows reveal about the rest of a prompt."""

from dataclasses import replace
from itertools import product
from typing import Any

from hiddenlab.config import AttackConfig
from hiddenlab.errors import InputError
from hiddenlab.eval.cells import OTHER_MODEL, Cell, Experiment, Setting, attack_cell, split_specs
from hiddenlab.eval.tables import paper
from hiddenlab.job import build_attack
from hiddenlab.sharding import AttnNode, Plan
from hiddenlab.text import count_of

SHARDED = {
    "rouge_l": "ROUGE-L", "bleu": "BLEU", "missing_token_accuracy": "tokens that no row shows",
    "token_accuracy": "token accuracy", "exact": "exact prompts",
}  # fmt: skip
SHARD_TOKENS = 96  # the shortest prompt in which every node of the largest table holds tokens
GAP_BUDGET = 200_000
LAYOUTS = ("dealt", "neighbours")
NODE_STREAMS = ("resid", "qkv", "kv", "q", "k", "v")
ATTN_ROWS = (
    "AttnNodes get queries, keys and values; as in the paper (appendix M) the attacker is given the hidden states of "
    "the same rows."
)
NODES = (
    "CompNodes are from the middle of the plan. Where alpha times c does not divide the prompt's length, nodes before "
    f"them hold a cluster more. {ATTN_ROWS}"
)


def gap(setting: Setting, sizes: str = "1,2,3", after: int = 20, budget: int = GAP_BUDGET) -> Experiment:
    """Measure how many unknown tokens between known rows are recovered, and at what cost, by layer (Algorithm 3)."""
    cells = []
    missing = [_whole(text) for text in split_specs(sizes)]
    for layer in setting.at((1, 11, 21)):
        for size in missing:
            channel = f"drop-rows:size={size},after={after}"
            keys = {"layer": layer, "missing tokens": size}
            attack = f"missing-tokens:budget={budget},sums=false"  # searching is what is measured
            cells.append(
                attack_cell(setting, keys, layer, channel, attack=attack, max_tokens=after + size + 1)
            )
    return Experiment(
        "Generalized gap attack (Algorithm 3, which the paper does not run)",
        cells,
        {"exact": "gaps closed", "last_evaluated": "sequences tried", "seconds_per_prompt": "seconds"},
        [
            f"One gap a prompt, behind {after} known rows; at most {budget:,} sequences are tried. Enumerating "
            "would take V^(g+1) sequences for g missing tokens and the row behind them.",
            "The threshold rho of Definition 7.2 is the smallest gap that is not closed.",
        ],
    )  # fmt: skip


def gap_plans(
    setting: Setting,
    grid: str = "1/2,1/3,1/4,2/2,2/3",
    attacks: str = "missing-tokens,beam-decoding",
    budget: int = 5000,
    streams: str = "resid",
    keys: int = 0,
) -> Experiment:
    """Measure how many tokens that a node does not hold are recovered, under small plans (c, alpha).

    The paper relies on these gaps.

    Args:
        grid: plans as ``c/alpha``, separated by commas.
        attacks: specs, separated by commas; ``infill`` is the learned one, given tokens of the node's rows (layer 0,
            as in the paper's Figure 2), whatever the layers: states add hardly anything to it.
        budget: of ``missing-tokens``, sequences per gap.
        streams: what is seen, separated by commas: ``resid``, states of CompNode 0, or what AttnNode (0, ``keys``) is
            sent at the next layer: ``qkv``, or of that ``q``, ``k``, ``v`` or ``kv`` alone.

    Raises:
        InputError: a plan, an attack or a stream is malformed.
        UnknownNameError: an attack is unknown.
    """
    known = {"missing-tokens": f"missing-tokens:budget={budget}", "infill": infill_spec(setting)}
    learned = [attack for attack in split_specs(attacks) if attack.partition(":")[0] == "infill"]
    masks = ["any" if "plan=any" in known.get(attack, attack) else "own" for attack in learned]
    searched = [attack for attack in split_specs(attacks) if attack not in learned]
    cells = []
    seen = split_specs(streams)
    if wrong := [stream for stream in seen if stream not in NODE_STREAMS]:
        raise InputError(f"a node sees one of {', '.join(NODE_STREAMS)}, not {wrong[0]!r}")
    combinations = [(0, "embed", attack) for attack in learned] + list(
        product(setting.at((1,)), seen, searched)
    )
    for c, alpha in _small_plans(grid):
        for layer, stream, attack in combinations:
            spec = known.get(attack, attack)
            build_attack(AttackConfig(attack=spec))  # refuse a wrong spec before anything runs
            node, at = "CompNode 0", "node=0"
            if stream in NODE_STREAMS[1:]:
                node, at, layer = f"AttnNode (0, {keys})", f"m=1,queries=0,keys={keys}", layer + 1
            where = {"node": node, "layer": layer, "stream": stream}
            channel = f"shard:alpha={alpha},c={c},{at}"
            labels = {**where, "c": c, "alpha": alpha, "attack": attack}
            cells.append(attack_cell(setting, labels, layer, channel, attack=spec, stream=stream))
    return Experiment(
        "Tokens that a node does not hold, under small (c, alpha)",
        cells,
        {
            "missing_token_accuracy": "tokens that no row shows",
            "token_accuracy": "token accuracy",
            "rouge_l": "ROUGE-L",
            "verified": "verified tokens",
            "exact": "exact",
            "seconds_per_prompt": "seconds a prompt",
        },
        [
            f"missing-tokens: at most {budget:,} sequences a gap. One that is not closed spoils what follows.",
            "AttnNodes are sent queries, keys and values of all their rows where (j, k) and (k, j) are one node.",
            "Tokens that no row shows: of those before the node's last row. Those behind it depend on nothing that "
            "the node sees; in the other figures, which are of the whole prompt, they count as wrong and unverified.",
            *(infill_notes(setting, *masks) if learned else []),
        ],
    )  # fmt: skip


def _whole(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise InputError(f"a size is a whole number from 1, not {text!r}")
    return int(text)


def _pairs(grid: str, form: str, example: str) -> list[tuple[int, int]]:
    """Return pairs of whole numbers, which are written with a slash and separated by commas."""
    pairs = []
    for text in split_specs(grid):
        first, slash, second = text.partition("/")
        if not (slash and first.isdecimal() and second.isdecimal() and int(first) and int(second)):
            raise InputError(f"a pair of the grid is {form}, such as {example}, not {text!r}")
        pairs.append((int(first), int(second)))
    return pairs


def _small_plans(grid: str) -> list[tuple[int, int]]:
    pairs = _pairs(grid, "c/alpha", "1/3")
    if any(alpha < 2 for _, alpha in pairs):
        raise InputError(f"alpha must be at least 2 for tokens to be missing; the grid is {grid!r}")
    return pairs


def partial_sums(setting: Setting, masked: bool = False, first: int = 0, noise: float = 0.0) -> Experiment:
    """Measure how many of other nodes' tokens a CompNode reads from its first layer's attention (Theorem 7.3, P.2).

    Args:
        masked: what masked sums leave a CompNode, the attention output, in place of sums by key shard.
        first: how many layers the client computes before; 0 for none.
        noise: standard deviation of the noise that the client adds to his embeddings, before layers of his.

    Raises:
        InputError: noise without layers of the client, or with masked sums.
    """
    if noise < 0 or (noise and (masked or not first)):
        raise InputError("noise is above 0, needs first of at least 1, and is read without masked")
    tokens, plans = shard_tokens(setting), ((4, 4, 1), (8, 8, 1), (8, 8, 4), (12, 8, 8))
    if masked:
        plans = ((2, 8, 1), (4, 2, 1), (4, 8, 1), (8, 1, 1))
    cells, layer = [], first + 1
    for alpha, c, m in plans:
        keys = {"alpha": alpha, "c": c, "m": m, "node": f"CompNode {alpha - 1}"}
        cells.append(sums_cell(setting, keys, alpha, c, m, alpha - 1, masked, first, noise))
    what, rule = (
        f"m, e and u of layer {layer} tell",
        (
            "The paper argues that finding them is a subset-sum problem, intractable for c of 8 or more (appendix P.2, "
            "assumption B2); it recommends alpha, c of 8 and m of 4."
        ),
    )
    if masked:
        what, rule = (
            f"the attention output of layer {layer} tells",
            (
                "Masked sums leave a CompNode this output alone; the paper has no such defense. The attack needs at "
                "least as many rows behind a gap, times query heads of a key/value head, as the gap has tokens."
            ),
        )
    return Experiment(
        f"What {what} a CompNode",
        cells,
        {
            "missing_exact": "prompts read in full up to its last row",
            "missing_token_accuracy": "others' tokens right",
            "missing_verified": "verified",
            "missing_wrong_verified": "verified but wrong",
            "missing": "tokens it does not hold",
            "seconds_per_prompt": "seconds",
        },
        [
            f"{f'Model {setting.model}. ' if masked else ''}Prompts of {tokens} tokens. Every column is of the tokens "
            "that other nodes hold before the node's last row; what stands behind that row does not reach it.",
            rule,
            *(
                [
                    f"The client computes {count_of(first, 'layer')} before"
                    + (f", behind noise of {noise:g} at his embeddings" if noise else "")
                    + "; tokens are read one after another."
                ]
                if first
                else []
            ),
            "Rows are what AttnNodes answer, computed with their own function; float32 on the wire.",
        ],
    )


def sums_cell(
    setting: Setting,
    keys: dict[str, Any],
    alpha: int,
    c: int,
    m: int,
    node: int,
    masked: bool = False,
    first: int = 0,
    noise: float = 0.0,
) -> Cell:
    """Make the cell of what a CompNode reads of the others' tokens in m, e and u of the first layer of the nodes.

    Args:
        masked, first, noise: see ``partial_sums``.
    """
    source = {**setting.source(), "max_tokens": shard_tokens(setting)}
    spec = {**setting.where(), **source, "alpha": alpha, "c": c, "m": m, "node": node}
    special = {"masked": masked, "first": first, "noise": noise}
    changed = {name: value for name, value in special.items() if value}
    return Cell("partial-sums", spec | changed, keys)


def shard_tokens(setting: Setting) -> int:
    """Return the number of tokens of a sharded prompt."""
    return int(setting.source(max_tokens=SHARD_TOKENS)["max_tokens"])


def figure_2(setting: Setting, masked: str = "", tuned: bool = True) -> Experiment:
    """Measure how much of a prompt infilling recovers from a CompNode's tokens, by clusters and nodes (Figure 2).

    Args:
        masked: a masked language model to tune (the paper's is answerdotai/ModernBERT-large), in place of the model
            itself with a bidirectional mask.
        tuned: false takes the masked language model as it is, as the paper does.

    Raises:
        InputError: other layers than 0 were asked for, or an untuned model that is not a masked one.
    """
    if not tuned and not masked:
        raise InputError(
            "tuned=false needs a masked language model, --set masked=NAME; the decoder itself must be tuned"
        )
    if setting.layers not in (None, (0,)):
        raise InputError("figure-2 is of layer 0; table-5 has the deeper ones")
    how = (f",masked={masked}" if masked else "") + ("" if tuned else ",steps=0")
    cells = [infilled(setting, 0, alpha, c, how=how) for c in (1, 4, 8) for alpha in (4, 8, 12)]
    return Experiment(
        "Figure 2: infilling from a CompNode's tokens",
        cells,
        SHARDED,
        [
            *infill_notes(setting),
            NODES,
            "The paper prints this figure as curves of ModernBERT-large, without numbers.",
        ],
    )


def table_5(setting: Setting) -> Experiment:
    """Measure ROUGE-L of learned reconstruction from a CompNode's states, by c and alpha (Tables 5 and 14)."""
    cells = []
    for layer in setting.at((1,)):
        for c in (1, 4, 8):
            for alpha in (4, 8, 12):
                published = {
                    f"ROUGE-L, {paper.GEMMA}": paper.SHARD_ROUGE.get((c, alpha)),
                    f"BLEU, {paper.GEMMA}": paper.SHARD_BLEU.get((c, alpha)),
                }
                cells.append(infilled(setting, layer, alpha, c, published if layer == 1 else {}))
    return Experiment(
        "Tables 5 and 14: learned reconstruction from a CompNode's states",
        cells,
        SHARDED,
        [*infill_notes(setting), NODES],
    )


def table_15(setting: Setting, sizes: str = "4,8", masks: str = "") -> Experiment:
    """Measure learned reconstruction from a CompNode's states by layer, for c = alpha = 4 and 8 (Table 15).

    Args:
        sizes: values of c = alpha, separated by commas.
        masks: of which plans an infiller learns, separated by commas: ``own``, the attacked one's alone as in the
            paper, or ``any``, of all common ones; nothing is the choice of the scale.

    Raises:
        InputError: a size is no whole number from 1, or an infiller learns of other plans.
    """
    numbers, chosen = [_whole(text) for text in split_specs(sizes)], split_specs(masks)
    if wrong := [name for name in chosen if name not in ("", "own", "any")]:
        raise InputError(
            f"an infiller learns of the own plan or of any: masks=own, any or both, not {wrong[0]!r}"
        )
    cells = []
    for n, plans, layer in product(numbers, chosen, setting.at((1, 11, 21))):
        published = {f"ROUGE-L, {paper.GEMMA}": paper.SHARD_LAYERS.get(n, {}).get(layer)}
        cell = infilled(setting, layer, n, n, published, plans=plans)
        cells.append(replace(cell, keys={**cell.keys, **({"masks": plans} if plans else {})}))
    title = "Table 15: learned reconstruction by layer"
    return Experiment(title, cells, SHARDED, [*infill_notes(setting, *chosen), NODES])


def table_16(setting: Setting) -> Experiment:
    """Measure learned reconstruction from an AttnNode's rows, by the number of splits m (Table 16)."""
    cells = [
        infilled(setting, layer, 8, 8, {f"ROUGE-L, {paper.GEMMA}": paper.SHARD_SPLITS[m]}, m=m, attn=True)
        for m in (2, 3, 4)
        for layer in setting.at((1,))
    ]
    title = "Table 16: learned reconstruction from an AttnNode's rows"
    return Experiment(title, cells, SHARDED, [*infill_notes(setting), NODES])


def table_17(
    setting: Setting,
    shapes: str = "bert-base,bert-large",
    grid: str = "2/1",
    backend: str = "tcp",
    layouts: str = "dealt",
) -> Experiment:
    """Measure Cascade's time by model size, nodes and splits (Table 17; appendix M for splits).

    Args:
        shapes: shapes or models, separated by commas. The paper's are at alpha 2 without splits.
        grid: numbers of CompNodes and splits of each one's rows, as ``alpha/m``, separated by commas.
        backend: ``tcp`` (a process for each node, on Ray) or ``wire`` (threads that talk over sockets).
        layouts: how the 128 tokens lie, separated by commas: ``dealt`` in turn as in the paper, or ``neighbours``: each
            node holds one stretch, and blocks of keys behind their queries are left out, so that nodes wait only for
            what they need (appendix Q, "Synchronization").

    Raises:
        InputError: the grid is malformed, or a layout is unknown.
    """
    cells, chosen = [], split_specs(layouts)
    if wrong := [layout for layout in chosen if layout not in LAYOUTS]:
        raise InputError(f"a layout is one of {', '.join(LAYOUTS)}, not {wrong[0]!r}")
    for shape, (alpha, m), layout in product(shapes.split(","), _pairs(grid, "alpha/m", "2/1"), chosen):
        options: dict[str, Any] = {
            "model": shape,
            "alphas": str(alpha),
            "backends": backend,
            "repeats": 100 if setting.scale == "paper" else 10,
        }
        options |= {} if m == 1 else {"m": m}
        options |= {} if layout == "dealt" else {"c": -(-128 // alpha), "causal": True}
        papers = (alpha, m, layout) == (2, 1, "dealt")
        published = paper.published(paper.CASCADE_SECONDS, shape) if papers else None
        keys = {"model": shape, "alpha": alpha, "m": m} | ({} if chosen == ["dealt"] else {"layout": layout})
        cells.append(Cell("bench", {"bench": "cascade", "options": options}, keys, {"seconds": published}))
    figures = {
        "nodes": "nodes",
        "seconds": "seconds",
        "over_plain": "over the plain model",
        "mb_on_wire": "MB",
    }
    notes = ["All nodes are on one machine; the paper has a machine for each."]
    if chosen != ["dealt"]:
        figures |= {
            "over_all_blocks": "over the same with all blocks",
            "first_node_seconds": "seconds of CompNode 0",
            "first_node_all_blocks": "of CompNode 0 with all blocks",
        }
        notes.append(
            "128 tokens. Neighbours: each CompNode holds one stretch. Blocks in which no query sees a key are "
            "neither sent nor computed nor waited for; the same plan with all blocks is timed in the same loop."
        )
        notes.append(
            "Ratios are of one loop; seconds of two rows are not, and depend on the machine's other work."
        )
    return Experiment("Table 17: Cascade by model size", cells, figures, notes)


def infilled(
    setting: Setting,
    layer: int,
    alpha: int,
    c: int,
    published: dict[str, Any] | None = None,
    m: int = 1,
    attn: bool = False,
    how: str = "",
    plans: str = "",
) -> Cell:
    """Make the cell of the learned attack on a node in the middle of the plan.

    ``rows held`` is of prompts that are not shorter; ``how`` are further options of the attack; ``plans`` see
    ``infill_spec``.
    """
    tokens = shard_tokens(setting)
    plan = Plan.clustered(tokens, c, alpha=alpha, m=m, symmetric=True)
    channel = f"shard:alpha={alpha},c={c},node={alpha // 2}"
    keys: dict[str, Any] = {"layer": layer, "c": c, "alpha": alpha}
    held = plan.shards[alpha // 2]
    if attn:
        node = AttnNode(0, m * alpha // 2)
        channel = f"shard:alpha={alpha},c={c},m={m},queries={node.queries},keys={node.keys}"
        keys["m"] = m
        held = plan.held_by(node)
    keys["rows held"] = f"{len(held)} of {tokens}"
    attack = infill_spec(setting, plans) + how
    return attack_cell(setting, keys, layer, channel, published, attack=attack, max_tokens=tokens)


def infill_spec(setting: Setting, plans: str = "") -> str:
    """Return the spec of the learned attack.

    Args:
        plans: ``own`` or ``any``, see ``table_15``. The paper trains a model for every plan; by default, on a laptop,
            one model per layer serves all plans.
    """
    if setting.scale == "paper":
        return f"infill:preset=paper,plan={plans or 'own'}"
    return f"infill:preset=small,plan={plans or 'any'}"


def infill_notes(setting: Setting, *plans: str) -> list[str]:
    """Return what to say of infillers that learn of these plans; see ``table_15``."""
    if setting.scale == "paper":
        return [OTHER_MODEL, "Infillers are trained on FineWeb-Edu."]
    trained = {
        "own": "An infiller for each plan, masked by it alone, trained on text that the model sampled itself: a lower "
        "bound of what training for longer, on real text gives.",
        "any": "One infiller a layer, trained on text that the model sampled itself, masked by all common plans: a "
        "lower bound of what training for one plan, for longer, on real text gives.",
    }
    return [
        OTHER_MODEL,
        *(trained[one] for one in dict.fromkeys(one or "any" for one in plans or ("any",))),
        "Held tokens count, but for the column of tokens that no row shows (those before the node's last row).",
    ]
