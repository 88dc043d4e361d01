"""The experiments: each says which cells its table has; nothing is measured here.

The defaults fit a laptop; ``--scale paper`` asks for the paper's texts and numbers of prompts.
"""

from collections.abc import Sequence
from typing import Any

from defenses.cascade.cost import Shape, layer_bytes
from defenses.cascade.plan import AttnNode, Plan
from eval import paper
from eval.experiment import Cell, Experiment, Setting
from hiddenlab.errors import InputError
from hiddenlab.job import AttackSpec
from hiddenlab.slice.load import load_config, resolve_model

EXACT = {"exact": "exact prompts", "evaluated_tokens_per_token": "evaluated tokens per token"}
TEXT = {"rouge_l": "ROUGE-L", "token_accuracy": "token accuracy", "exact": "exact prompts"}
SHARDED = {"rouge_l": "ROUGE-L", "bleu": "BLEU", "token_accuracy": "token accuracy", "exact": "exact prompts"}
SHARD_TOKENS = 96  # the shortest prompt in which every node of the largest table holds tokens
GAP_BUDGET = 200_000
NOISY_BUDGET = 64

OTHER_MODEL = (
    "The paper's columns are of other models and texts (1,000 of FineWeb-Edu); they are comparable in kind, not "
    "digit by digit."
)
WHOLE = "No budget: a token that does not match is searched for in the whole vocabulary."
BUDGET = (
    "Channels that change values: at most {} candidates a token, the nearest taken where none matches. The paper "
    "searches its whole vocabulary there; a larger --set budget=N costs time."
)


def table_1(setting: Setting) -> Experiment:
    """Raw states: share of prompts recovered exactly, by layer (Table 1)."""
    return _exactness("Table 1: exact recovery from raw states", setting, ["identity"], paper.LAYERS)


def table_2(setting: Setting) -> Experiment:
    """Permuted states: share of prompts recovered exactly, by permutation and layer (Table 2)."""
    title = "Table 2: exact recovery from permuted states"
    return _exactness(title, setting, paper.PERMUTATIONS[1:], _small(setting))


def _exactness(title: str, setting: Setting, channels: Sequence[str], layers: Sequence[int]) -> Experiment:
    cells = [
        _attack(setting, {"channel": channel, "layer": layer}, layer, channel, paper={
            f"exact, {model}": paper.EXACT[channel][model].get(layer) for model in (paper.GEMMA, paper.LLAMA)
        })
        for channel in channels
        for layer in setting.at(layers)
    ]  # fmt: skip
    return Experiment(title, cells, EXACT, [OTHER_MODEL, WHOLE])


def table_8(setting: Setting, models: str = "") -> Experiment:
    """Mean time of an attack by model size (Table 8); name further models with --set models=A,B."""
    names = [setting.model, *(name for name in models.split(",") if name)]
    source = setting.source(limit=10, max_tokens=100)
    source["limit"] = setting.limit or 10
    cells = []
    for name in names:
        spec = AttackSpec(**{**setting.where(), "model": name}, **source, layer=_one(setting.layers))
        published = {"seconds a prompt": paper.ATTACK_SECONDS.get(name.rpartition("/")[2])}
        cells.append(Cell("attack", spec.to_json(), {"model": name}, published))
    return Experiment(
        "Table 8: time of an attack by model",
        cells,
        {"seconds_per_prompt": "seconds a prompt", "exact": "exact prompts"},
        [
            "The paper's seconds are of one GPU, ours of the machine in each record; only ours share a machine."
        ],
    )


def table_9_12(setting: Setting) -> Experiment:
    """Thresholds: calibrated as the paper does it and measured as we do, and what each gives (Tables 9 to 12)."""
    cells = []
    for channel in paper.PERMUTATIONS:
        for layer in setting.at((1, 11) if setting.scale == "small" else paper.LAYERS):
            for how in ("auto", "calibrated"):
                published = {
                    f"epsilon, {model}": paper.EPSILON[channel][model].get(layer)
                    if how == "calibrated"
                    else None
                    for model in (paper.GEMMA, paper.LLAMA)
                }
                keys = {"channel": channel, "layer": layer, "epsilon": how}
                cells.append(_attack(setting, keys, layer, channel, published, epsilon=how))
    return Experiment(
        "Tables 9 to 12: thresholds",
        cells,
        {"epsilon": "epsilon (median row, L1)", **EXACT},
        [
            "calibrated: the paper's ternary search, on 50 sequences of the attacker's own text. auto: the geometric "
            "middle between the noise floor and the nearest wrong candidate on the same sequences.",
            "Thresholds are in each model's own units, so the paper's columns show their order only.",
        ],
    )


def table_13(setting: Setting, budget: int = NOISY_BUDGET) -> Experiment:
    """Noise and quantization: the best layer's ROUGE-L by permutation, and the model's own loss (Table 13)."""
    cells = [cell for channel in paper.PERMUTATIONS for cell in _noised(setting, channel, budget)]
    cells += table_1(setting).cells
    cells += table_2(setting).cells
    cells += _utility(setting)
    return Experiment(
        "Table 13: noise and quantization, the weakest layer",
        cells,
        {
            **{f"rouge_l, {name}": f"ROUGE-L, {name}" for name in paper.PERMUTATIONS},
            "top1_agreement": "top-1 agreement",
            "kl": "KL",
        },
        [
            OTHER_MODEL,
            BUDGET.format(budget),
            "Each ROUGE-L is the largest over the measured layers, as in the paper.",
        ],
        fold=_weakest,
    )


def _weakest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row a method: for each permutation the layer with the largest ROUGE-L, and the utility."""
    out = []
    for method in ("identity", *paper.METHODS):
        figures: dict[str, Any] = {}
        for channel in paper.PERMUTATIONS:
            found = [
                row["figures"]["rouge_l"]
                for row in rows
                if row["keys"].get("channel") == channel
                and row["keys"].get("method", "identity") == method
                and "rouge_l" in row["figures"]
            ]
            if found:
                figures[f"rouge_l, {channel}"] = max(found, key=lambda figure: figure["value"])
        quality = [row["figures"] for row in rows if row["keys"].get("defense") == method]
        figures |= quality[0] if quality else {}
        published = {f"ROUGE-L, {name}": value for name, value in paper.BEST[method].items()}
        published["LiveBench, relative"] = paper.DOWNSTREAM[method]
        status = [row["status"] for row in rows if row["keys"].get("method", "identity") == method]
        reasons = [
            row["reason"] for row in rows if row["keys"].get("method", "identity") == method and row["reason"]
        ]
        out.append(
            {
                "keys": {"method": method}, "figures": figures, "paper": published,
                "status": "measured" if "measured" in status else "not run",
                "reason": next(iter(reasons), None), "commit": None, "cell": None,
            }
        )  # fmt: skip
    return out


def table_18(setting: Setting, budget: int = NOISY_BUDGET) -> Experiment:
    """ROUGE-L with noise or quantization, no permutation, by layer (Table 18)."""
    return _noise_table(18, setting, "identity", budget)


def table_19(setting: Setting, budget: int = NOISY_BUDGET) -> Experiment:
    """ROUGE-L with noise or quantization and permuted rows, by layer (Table 19)."""
    return _noise_table(19, setting, "seq-perm", budget)


def table_20(setting: Setting, budget: int = NOISY_BUDGET) -> Experiment:
    """ROUGE-L with noise or quantization and permuted coordinates, by layer (Table 20)."""
    return _noise_table(20, setting, "hidden-perm", budget)


def table_21(setting: Setting, budget: int = NOISY_BUDGET) -> Experiment:
    """ROUGE-L with noise or quantization and both permuted, by layer (Table 21)."""
    return _noise_table(21, setting, "2d-perm", budget)


def _noise_table(number: int, setting: Setting, channel: str, budget: int) -> Experiment:
    title = f"Table {number}: noise and quantization, {channel}"
    return Experiment(title, _noised(setting, channel, budget), TEXT, [OTHER_MODEL, BUDGET.format(budget)])


def _noised(setting: Setting, channel: str, budget: int) -> list[Cell]:
    return [
        _attack(
            setting,
            {"method": method, "channel": channel, "layer": layer},
            layer,
            f"{method}|{channel}",
            {f"ROUGE-L, {paper.GEMMA}": paper.NOISED[channel][method].get(layer)},
            budget=budget,
        )
        for method in paper.METHODS
        for layer in setting.at(_small(setting))
    ]


def table_17(setting: Setting, shapes: str = "bert-base,bert-large") -> Experiment:
    """Cascade's time by model size at alpha 2 (Table 17); name shapes or models with --set shapes=A,B."""
    cells = []
    for shape in shapes.split(","):
        options = {
            "model": shape,
            "alphas": "2",
            "backends": "tcp",
            "repeats": 100 if setting.scale == "paper" else 10,
        }
        cells.append(
            Cell("bench", {"bench": "cascade", "options": options}, {"model": shape},
                 {"seconds": paper.CASCADE_SECONDS.get(shape)})
        )  # fmt: skip
    return Experiment(
        "Table 17: Cascade by model size",
        cells,
        {"seconds": "seconds", "over_plain": "over the plain model"},
        ["Two CompNodes and four AttnNodes as processes of one machine; the paper has a machine for each."],
    )


def table_22(setting: Setting) -> Experiment:
    """What noise and quantization cost the model itself (Tables 13 and 22, with quantities a small model can show)."""
    return Experiment(
        "Table 22: the defended model's own quality",
        [*_utility(setting), *_livebench(setting)],
        {"perplexity": "perplexity", "kl": "KL from clean, nats", "top1_agreement": "top-1 agreement"},
        ["Teacher-forced on the prompts. Permutations change nothing here: the provider undoes them."],
    )


def _utility(setting: Setting) -> list[Cell]:
    source = setting.source(limit=100, max_tokens=200)
    return [
        Cell(
            "utility",
            {**setting.where(), **source, "defense": [] if method == "identity" else [method]},
            {"defense": method},
            {"LiveBench": paper.LIVEBENCH[method]},
        )
        for method in ("identity", *paper.METHODS)
    ]


def _livebench(setting: Setting) -> list[Cell]:
    spec = {**setting.where(), **setting.source(limit=20), "prompts": "hf:livebench/reasoning::test:turns"}
    return [Cell("utility", {**spec, "defense": []}, {"defense": "identity, on LiveBench's questions"})]


def baselines(setting: Setting, sipit_budget: int = 4096) -> Experiment:
    """Speculative search beside greedy search, SipIt and the nearest embedding: candidates, time, exactness."""
    # name, whether it is too slow for many prompts on a laptop, and how it is asked for
    attacks: tuple[tuple[str, bool, dict[str, Any]], ...] = (
        ("speculative, probe+lm", False, {}),
        ("greedy, lm (paper)", True, {"search": "greedy", "proposal": "lm"}),
        ("SipIt, gradient", True, {"attack": f"sipit:budget={sipit_budget}"}),
        ("nearest embedding", False, {"attack": "nearest"}),
    )
    cells = []
    for layer in setting.at((1, 11)):
        for label, slow, options in attacks:
            limit = setting.source()["limit"]
            if slow and setting.scale == "small":
                limit = min(limit, 4)
            keys = {"attack": label, "layer": layer}
            cells.append(_attack(setting, keys, layer, "identity", limit=limit, **options))
    return Experiment(
        "Searches and inversion baselines on raw states",
        cells,
        {
            "evaluated_tokens_per_token": "evaluated tokens per token", "seconds_per_prompt": "seconds a prompt",
            "exact": "exact prompts", "token_accuracy": "token accuracy",
        },
        [
            "Evaluated tokens count every position run through the slice, gradient steps included (a gradient costs "
            "about three evaluations of time).",
            "Seconds are comparable where the cells ran alone on one machine; each record names it.",
            "Greedy search and SipIt run on the first few prompts at the small scale.",
        ],
    )  # fmt: skip


def gap(setting: Setting, sizes: str = "1,2,3", after: int = 20, budget: int = GAP_BUDGET) -> Experiment:
    """Unknown tokens between known rows: how many the attack closes, at what cost, by layer (Algorithm 3)."""
    cells = []
    for layer in setting.at((1, 11, 21)):
        for size in sizes.split(","):
            channel = f"gap:size={size},after={after}"
            keys = {"layer": layer, "missing tokens": int(size)}
            attack = f"gap:budget={budget}"
            cells.append(
                _attack(setting, keys, layer, channel, attack=attack, max_tokens=after + int(size) + 1)
            )
    return Experiment(
        "Generalized gap attack (Algorithm 3, which the paper does not run)",
        cells,
        {"exact": "gaps closed", "last_evaluated": "sequences tried", "seconds_per_prompt": "seconds"},
        [
            f"One gap a prompt, behind {after} known rows; at most {budget:,} sequences are tried. Enumerating the gap "
            "would take V^g sequences for g missing tokens.",
            "The threshold rho of Definition 7.2 is the smallest gap that is not closed.",
        ],
    )  # fmt: skip


def gap_plans(setting: Setting, budget: int = 5000) -> Experiment:
    """What the gap attack gets from a CompNode's states under small (c, alpha), whose gaps the paper counts on."""
    cells = []
    for layer in setting.at((1,)):
        for c, alpha in ((1, 2), (1, 3), (1, 4), (2, 2), (2, 3)):
            keys = {"layer": layer, "c": c, "alpha": alpha, "missing tokens": (alpha - 1) * c}
            channel, attack = f"shard:alpha={alpha},c={c},node=0", f"gap:budget={budget}"
            cells.append(_attack(setting, keys, layer, channel, attack=attack))
    return Experiment(
        "The gap attack on (c, delta)-sharding",
        cells,
        {
            "token_accuracy": "token accuracy",
            "rouge_l": "ROUGE-L",
            "verified": "verified tokens",
            "exact": "exact",
        },
        [
            f"CompNode 0's rows; at most {budget:,} sequences a gap. A gap that is not closed spoils what follows it.",
            "Tokens behind the node's last row depend on nothing that it sees and count as wrong.",
        ],
    )


def partial_sums(setting: Setting) -> Experiment:
    """Partial attention at the first layer: how much of the other nodes' tokens a CompNode reads (Theorem 7.3, P.2)."""
    tokens = setting.max_tokens or SHARD_TOKENS
    cells = []
    for alpha, c, m in ((4, 4, 1), (8, 8, 1), (8, 8, 4), (12, 8, 8)):
        source = {**setting.source(), "max_tokens": tokens}
        spec = {**setting.where(), **source, "alpha": alpha, "c": c, "m": m, "node": alpha - 1}
        keys = {"alpha": alpha, "c": c, "m": m, "node": f"CompNode {alpha - 1}"}
        cells.append(Cell("partial-sums", spec, keys))
    return Experiment(
        "What m, e and u of the first layer tell a CompNode",
        cells,
        {
            "exact": "prompts read in full up to its last row",
            "token_accuracy": "others' tokens right",
            "verified": "verified",
            "wrong_verified": "verified but wrong",
            "missing": "tokens it does not hold",
            "seconds_per_prompt": "seconds",
        },
        [
            f"Prompts of {tokens} tokens; tokens that other nodes hold, before the node's last row.",
            "The paper argues that finding them is a subset-sum problem, intractable for c of 8 or more (appendix P.2, "
            "assumption B2); it recommends alpha, c of 8 and m of 4.",
            "Rows are what AttnNodes answer, computed with their own function; float32 on the wire.",
        ],
    )


def figure_2(setting: Setting) -> Experiment:
    """Layer 0: how much of a prompt infilling gives a CompNode, by clusters and nodes (Figure 2)."""
    cells = [_infilled(setting, 0, alpha, c) for c in (1, 4, 8) for alpha in (4, 8, 12)]
    return Experiment(
        "Figure 2: infilling from a CompNode's tokens",
        cells,
        SHARDED,
        [
            *_infill_notes(setting),
            "The paper prints this figure as curves of ModernBERT-large, without numbers.",
        ],
    )


def table_5(setting: Setting) -> Experiment:
    """Deeper layers: ROUGE-L of learned reconstruction from a CompNode's states (Tables 5 and 14)."""
    cells = []
    for layer in setting.at((1,)):
        for c in (1, 4, 8):
            for alpha in (4, 8, 12):
                published = {
                    f"ROUGE-L, {paper.GEMMA}": paper.SHARD_ROUGE.get((c, alpha)),
                    f"BLEU, {paper.GEMMA}": paper.SHARD_BLEU.get((c, alpha)),
                }
                cells.append(_infilled(setting, layer, alpha, c, published if layer == 1 else {}))
    return Experiment(
        "Tables 5 and 14: learned reconstruction from a CompNode's states",
        cells,
        SHARDED,
        _infill_notes(setting),
    )


def table_15(setting: Setting) -> Experiment:
    """Learned reconstruction by layer, for c = alpha = 4 and 8 (Table 15)."""
    cells = [
        _infilled(setting, layer, n, n, {f"ROUGE-L, {paper.GEMMA}": paper.SHARD_LAYERS[n].get(layer)})
        for n in (4, 8)
        for layer in setting.at((1, 11, 21))
    ]
    title = "Table 15: learned reconstruction by layer"
    return Experiment(title, cells, SHARDED, _infill_notes(setting))


def table_16(setting: Setting) -> Experiment:
    """Learned reconstruction from an AttnNode's rows, by m (Table 16)."""
    cells = [
        _infilled(setting, layer, 8, 8, {f"ROUGE-L, {paper.GEMMA}": paper.SHARD_SPLITS[m]}, m=m, attn=True)
        for m in (2, 3, 4)
        for layer in setting.at((1,))
    ]
    title = "Table 16: learned reconstruction from an AttnNode's rows"
    return Experiment(title, cells, SHARDED, _infill_notes(setting))


def plan(setting: Setting, alpha: int = 8, c: int = 8, m: int = 4, budget: int = 2000) -> Experiment:
    """Security of one plan: every attack that applies to each kind of node's view, worst first.

    Nodes at the start, in the middle and at the end of the prompt are looked at: the others see rows of the same kind.
    """
    for name, value in (("alpha", alpha), ("c", c), ("m", m)):
        if not isinstance(value, int) or value < 1:
            raise InputError(f"{name} must be a whole number of at least 1, not {value!r}")
    tokens = setting.source(max_tokens=SHARD_TOKENS)["max_tokens"]
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
    cells = []
    for who, channel, held in views:
        if not held:
            continue  # a plan for longer prompts: this node would have nothing of these
        for layer in (0, *setting.at((1, 11))):
            attacks = [("infill", _infill_spec(setting))]
            if layer:
                attacks += [("vocab-match", "vocab-match"), ("gap", f"gap:budget={budget}")]
            for label, attack in attacks:
                keys = {"node": who, "layer": layer, "attack": label, "rows held": len(held)}
                cells.append(_attack(setting, keys, layer, channel, attack=attack, max_tokens=tokens))
    shape = Shape.of(load_config(resolve_model(setting.model)), 2)
    megabytes = shape.layers * layer_bytes(whole, shape, "paper") / 1e6
    return Experiment(
        f"Security of a plan: alpha {alpha}, c {c}, m {m}, {tokens} tokens",
        cells,
        SHARDED,
        [
            f"{alpha} CompNodes and {len(whole.attn_nodes)} AttnNodes (symmetric); {megabytes:.1f} MB a pass by "
            "Equation 1 at two bytes an element.",
            f"The gap search tries {budget:,} sequences a gap at most; matching ends at a node's first gap.",
            *_infill_notes(setting),
        ],
        fold=_worst_first,
    )


def _worst_first(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Nodes by the best that any attack gets from them, and within a node the best attack first."""

    def got(row: dict[str, Any]) -> float:
        return float(row["figures"].get("rouge_l", {}).get("value") or 0.0)

    worst: dict[str, float] = {}
    for row in rows:
        node = row["keys"]["node"]
        worst[node] = max(worst.get(node, 0.0), got(row))
    return sorted(rows, key=lambda row: (-worst[row["keys"]["node"]], row["keys"]["node"], -got(row)))


def _infilled(
    setting: Setting,
    layer: int,
    alpha: int,
    c: int,
    published: dict[str, Any] | None = None,
    m: int = 1,
    attn: bool = False,
) -> Cell:
    """The learned attack on a node in the middle of the plan."""
    channel = f"shard:alpha={alpha},c={c},node={alpha // 2}"
    keys: dict[str, Any] = {"layer": layer, "c": c, "alpha": alpha}
    if attn:
        channel = f"shard:alpha={alpha},c={c},m={m},queries=0,keys={m * alpha // 2}"
        keys["m"] = m
    tokens = setting.source(max_tokens=SHARD_TOKENS)["max_tokens"]
    return _attack(setting, keys, layer, channel, published, attack=_infill_spec(setting), max_tokens=tokens)


def _infill_spec(setting: Setting) -> str:
    """The paper trains a model for every plan; on a laptop one model a layer serves all plans."""
    return "infill:preset=paper,plan=own" if setting.scale == "paper" else "infill:preset=small,plan=any"


def _infill_notes(setting: Setting) -> list[str]:
    if setting.scale == "paper":
        return [OTHER_MODEL, "One model for each layer and plan, trained on FineWeb-Edu."]
    return [
        OTHER_MODEL,
        "One infiller a layer, trained on text that the model sampled itself, masked by all common plans: a lower "
        "bound of what training for one plan, for longer, on real text gives.",
        "Held tokens count: they are part of what the node can read.",
    ]


def _attack(
    setting: Setting,
    keys: dict[str, Any],
    layer: int,
    channel: str = "identity",
    paper: dict[str, Any] | None = None,
    **options: Any,
) -> Cell:
    """An attack's cell; the channel's stages are joined by ``|``, options are those of ``AttackSpec``."""
    defense = tuple(stage for stage in channel.split("|") if stage != "identity")
    site = {"layer": layer, "stream": "resid" if layer else "embed"}
    spec = AttackSpec(**{**setting.where(), **setting.source(), **site, "defense": defense, **options})
    return Cell("attack", spec.to_json(), keys, paper or {})


def _small(setting: Setting) -> tuple[int, ...]:
    return (1, 6, 11) if setting.scale == "small" else paper.LAYERS


def _one(layers: tuple[int, ...] | None) -> int | None:
    if layers is not None and len(layers) > 1:
        raise InputError("this experiment takes one layer")
    return None if layers is None else layers[0]
