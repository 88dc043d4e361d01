"""Define the experiments on vocabulary matching, noise and quantization that reproduce the paper's tables.

Each says which cells its table has; nothing is measured here. The defaults fit a laptop; ``--scale paper`` asks for the
paper's texts and numbers of prompts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hiddenlab.config import AttackConfig
from hiddenlab.errors import InputError
from hiddenlab.eval.cells import OTHER_MODEL, Cell, Experiment, Setting, attack_cell
from hiddenlab.eval.tables import paper
from hiddenlab.eval.tables.sharding import infill_spec

EXACT = {"exact": "exact prompts", "evaluated_tokens_per_token": "evaluated tokens per token"}
TEXT = {"rouge_l": "ROUGE-L", "token_accuracy": "token accuracy", "exact": "exact prompts"}
SHUFFLED_ROWS = ("seq-perm", "2d-perm")
NOISY_BUDGET = 64
SLOW_LIMIT = 4

WHOLE = "No budget: a token that does not match is searched for in the whole vocabulary."
OTHER_SEARCH = (
    "The paper's columns are of another search: greedy, in the order of the attacked model's own predictions, the "
    "first candidate within an epsilon that a ternary search on 50 texts chose. Ours is speculative, in the order of a "
    "probe and the language model, epsilon measured."
)
LAYERS_OF_PAPER = ", ".join(map(str, paper.LAYERS))
BUDGET = (
    "Channels that change values: at most {} candidates a token, the nearest taken where none matches. The paper "
    "searches its whole vocabulary there; a larger --set budget=N costs time."
)


def table_1(setting: Setting) -> Experiment:
    """Measure the share of prompts recovered exactly from raw hidden states, by layer (Table 1)."""
    return _exactness("Table 1: exact recovery from raw states", setting, ["identity"], paper.LAYERS)


def table_2(setting: Setting, channels: str = ",".join(paper.PERMUTATIONS[1:])) -> Experiment:
    """Measure the share of prompts recovered exactly from permuted states, by permutation and layer (Table 2)."""
    names = channels.split(",")
    for name in names:
        if name not in paper.PERMUTATIONS:
            raise InputError(
                f"no permutation of Table 2 is called {name!r}; they are {', '.join(paper.PERMUTATIONS)}"
            )
    title = "Table 2: exact recovery from permuted states"
    return _exactness(title, setting, names, _small(setting))


def _exactness(title: str, setting: Setting, channels: Sequence[str], layers: Sequence[int]) -> Experiment:
    cells = [
        attack_cell(setting, {"channel": channel, "layer": layer}, layer, channel, paper={
            f"exact, {model}": paper.EXACT[channel][model].get(layer) for model in (paper.GEMMA, paper.LLAMA)
        })
        for channel in channels
        for layer in setting.at(layers)
    ]  # fmt: skip
    return Experiment(title, cells, EXACT, [OTHER_MODEL, OTHER_SEARCH, WHOLE])


def table_8(setting: Setting, models: str = "") -> Experiment:
    """Measure the mean time of an attack by model size (Table 8); name further models with --set models=A,B."""
    names = [setting.model, *(name for name in models.split(",") if name)]
    source = setting.source(limit=10, max_tokens=100)
    source["limit"] = setting.limit or 10
    cells = []
    for name in names:
        spec = AttackConfig(**{**setting.where(), "model": name}, **source, layer=_one(setting.layers))
        published = {"seconds a prompt": paper.ATTACK_SECONDS.get(name.rpartition("/")[2])}
        cells.append(Cell("attack", spec.to_json(), {"model": name}, published))
    return Experiment(
        "Table 8: time of an attack by model",
        cells,
        {"seconds_per_prompt": "seconds a prompt", "exact": "exact prompts"},
        [
            "The paper's seconds are of one GPU, ours of the machine in each record; only ours share a machine.",
            OTHER_SEARCH,
        ],
    )


def table_9_12(setting: Setting) -> Experiment:
    """Compare measured matching thresholds with those of a search like the paper's ternary search (Tables 9 and 11)."""
    cells = []
    for channel in paper.PERMUTATIONS:
        for layer in setting.at((1, 11) if setting.scale == "small" else paper.LAYERS):
            for epsilon in ("auto", "calibrated"):
                published = {
                    f"epsilon, {model}": paper.EPSILON[channel][model].get(layer)
                    if epsilon == "calibrated" and channel not in SHUFFLED_ROWS
                    else None
                    for model in (paper.GEMMA, paper.LLAMA)
                }
                keys = {"channel": channel, "layer": layer, "epsilon": epsilon}
                cells.append(attack_cell(setting, keys, layer, channel, published, epsilon=epsilon))
    return Experiment(
        "Tables 9 and 11: thresholds, measured and by a surrogate of the paper's search",
        cells,
        {"epsilon": "epsilon (median row, L1)", **EXACT},
        [
            "auto: the geometric middle between the noise floor and the nearest wrong candidate on 50 sequences of the "
            "attacker's own text.",
            "calibrated: a surrogate of the paper's ternary search, on the same sequences. The paper chooses the "
            "epsilon with which its attack does best on 50 texts of FineWeb. The surrogate runs no attack: it scores "
            "every position by itself, the right token among four near ones in a drawn order.",
            "Tables 10 and 12 (rows shuffled) are not measured: a threshold is measured on rows in their order, so "
            "that it would be that of Table 9 or 11 again. Their rows here say what that threshold gives.",
            "Thresholds are in each model's own units, so the paper's columns show their order only.",
        ],
        fold=_of_rows_in_order,
    )


def _of_rows_in_order(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows, without an epsilon where rows were shuffled; it was not measured on shuffled ones."""
    return [
        {**row, "figures": {k: v for k, v in row["figures"].items() if k != "epsilon"}}
        if row["keys"]["channel"] in SHUFFLED_ROWS
        else row
        for row in rows
    ]


def table_13(setting: Setting, budget: int = NOISY_BUDGET) -> Experiment:
    """Compare noise and quantization: the best layer's ROUGE-L by permutation, and the model's own loss (Table 13)."""
    layers = setting.at(_small(setting))
    cells = [cell for channel in paper.PERMUTATIONS for cell in _noised(setting, channel, budget)]
    cells += _exactness("", setting, paper.PERMUTATIONS, layers).cells
    cells += _utility(setting)
    asked = ", ".join(map(str, layers))
    which = f"the weakest of layers {asked}" if len(layers) > 1 else f"layer {asked}"
    how = "the largest over the layers asked for" if len(layers) > 1 else f"of layer {asked} alone"
    return Experiment(
        f"Table 13: noise and quantization, {which}",
        cells,
        {
            **{f"rouge_l, {name}": f"ROUGE-L, {name}" for name in paper.PERMUTATIONS},
            "top1_agreement": "top-1 agreement",
            "kl": "KL",
        },
        [
            OTHER_MODEL,
            OTHER_SEARCH,
            BUDGET.format(budget),
            f"Each ROUGE-L is {how}; each of the paper's is the largest over layers {LAYERS_OF_PAPER}.",
        ],
        fold=_weakest,
    )


def _weakest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Make one row per method: for each permutation the layer with the largest ROUGE-L, and the utility."""
    result = []
    for method in ("identity", *paper.METHODS):
        figures: dict[str, Any] = {}
        missing: list[str] = []
        for channel in paper.PERMUTATIONS:
            at = [
                row
                for row in rows
                if row["keys"].get("channel") == channel and row["keys"].get("method", "identity") == method
            ]
            values = [row["figures"]["rouge_l"] for row in at if "rouge_l" in row["figures"]]
            missing += [
                f"{channel}, layer {row['keys']['layer']}: {row['reason'] or 'not measured yet'}"
                for row in at
                if "rouge_l" not in row["figures"]
            ]
            if values:
                figures[f"rouge_l, {channel}"] = max(values, key=lambda figure: figure["value"])
        quality = [row["figures"] for row in rows if row["keys"].get("defense") == method]
        figures |= quality[0] if quality else {}
        published = {f"ROUGE-L, {name}": value for name, value in paper.BEST[method].items()}
        published["LiveBench, relative"] = paper.DOWNSTREAM[method]
        status = [row["status"] for row in rows if row["keys"].get("method", "identity") == method]
        result.append(
            {
                "keys": {"method": method}, "figures": figures, "paper": published,
                "status": "measured" if "measured" in status else "not run",
                "reason": "; ".join(missing) or None, "commit": None, "cell": None,
            }
        )  # fmt: skip
    return result


def table_18(setting: Setting, budget: int = NOISY_BUDGET) -> Experiment:
    """Measure ROUGE-L of prompts recovered behind noise or quantization, without permutation, by layer (Table 18)."""
    return _noise_table(18, setting, "identity", budget)


def table_19(setting: Setting, budget: int = NOISY_BUDGET) -> Experiment:
    """Measure ROUGE-L of prompts recovered behind noise or quantization with permuted rows, by layer (Table 19)."""
    return _noise_table(19, setting, "seq-perm", budget)


def table_20(setting: Setting, budget: int = NOISY_BUDGET) -> Experiment:
    """Measure ROUGE-L of prompts recovered behind noise or quantization with permuted coordinates (Table 20)."""
    return _noise_table(20, setting, "hidden-perm", budget)


def table_21(setting: Setting, budget: int = NOISY_BUDGET) -> Experiment:
    """Measure ROUGE-L of prompts recovered behind noise or quantization with both permutations, by layer (Table 21)."""
    return _noise_table(21, setting, "2d-perm", budget)


def _noise_table(number: int, setting: Setting, channel: str, budget: int) -> Experiment:
    title = f"Table {number}: noise and quantization, {channel}"
    notes = [OTHER_MODEL, OTHER_SEARCH, BUDGET.format(budget)]
    return Experiment(title, _noised(setting, channel, budget), TEXT, notes)


def _noised(setting: Setting, channel: str, budget: int) -> list[Cell]:
    return [
        attack_cell(
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
    """Measure Cascade's time by model size at alpha 2 (Table 17); name shapes or models with --set shapes=A,B."""
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
    """Measure how noise and quantization degrade the model itself: perplexity, KL, top-1 (compare Tables 13 and 22)."""
    return Experiment(
        "Table 22: the defended model's own quality",
        [*_utility(setting), *_livebench(setting)],
        {"perplexity": "perplexity", "kl": "KL from clean, nats", "top1_agreement": "top-1 agreement"},
        [
            "Teacher-forced on the prompts. Permutations change nothing here: the provider undoes them.",
            "The paper's column is Gemma-2-2B-IT's average score on LiveBench, which is none of the figures beside it.",
        ],
    )


def _utility(setting: Setting) -> list[Cell]:
    return [utility_cell(setting, method, {"defense": method}) for method in ("identity", *paper.METHODS)]


def utility_cell(
    setting: Setting, method: str, keys: Mapping[str, Any], published: Mapping[str, Any] | None = None
) -> Cell:
    """Make a cell that measures how a method degrades the model itself.

    ``published`` is the paper's LiveBench score, where it has the method.
    """
    if published is None:
        published = {"LiveBench": paper.LIVEBENCH[method]} if method in paper.LIVEBENCH else {}
    source = setting.source(limit=100, max_tokens=200)
    return Cell(
        "utility",
        {**setting.where(), **source, "defense": [] if method == "identity" else [method]},
        keys,
        published,
    )


def _livebench(setting: Setting) -> list[Cell]:
    """Make cells of LiveBench's questions as text: perplexity and agreement on them, not the scores of its judges."""
    asked = replace(
        setting, prompts="hf:livebench/reasoning::test:turns", limit=setting.source(limit=20)["limit"]
    )
    return [
        utility_cell(asked, method, {"defense": f"{method}, on LiveBench's questions"}, {})
        for method in ("identity", *paper.METHODS)
    ]


def baselines(setting: Setting, sipit_budget: int = 4096, inverter_steps: int = 200) -> Experiment:
    """Compare speculative search with greedy search, SipIt, the nearest embedding and a trained inverter.

    Args:
        sipit_budget: most tokens that SipIt verifies for one position.
        inverter_steps: of training, at the small scale.
    """
    inverter = infill_spec(setting) + (f",steps={inverter_steps}" if setting.scale == "small" else "")
    # name, whether it is too slow for many prompts on a laptop, and how it is asked for
    attacks: tuple[tuple[str, bool, dict[str, Any]], ...] = (
        ("speculative, probe+lm", False, {}),
        ("greedy, lm (paper)", True, {"search": "greedy", "proposal": "lm"}),
        ("SipIt, gradient", True, {"attack": f"sipit:budget={sipit_budget}"}),
        ("nearest embedding", False, {"attack": "nearest"}),
        ("transformer inverter", False, {"attack": inverter}),
    )
    cells = []
    for layer in setting.at((1, 11)):
        for label, slow, options in attacks:
            limit = setting.source()["limit"]
            if slow and setting.scale == "small" and setting.limit is None:
                limit = SLOW_LIMIT
            keys = {"attack": label, "layer": layer}
            cells.append(attack_cell(setting, keys, layer, "identity", limit=limit, **options))
    return Experiment(
        "Searches and inversion baselines on raw states",
        cells,
        {
            "evaluated_tokens_per_token": "evaluated tokens per token", "seconds_per_prompt": "seconds a prompt",
            "exact": "exact prompts", "token_accuracy": "token accuracy",
        },
        [
            "Evaluated tokens count every position run through the model, gradient steps included (a gradient costs "
            "about three evaluations of time).",
            "Seconds are comparable where the cells ran alone on one machine; each record names it.",
            f"Greedy search and SipIt run on the first {SLOW_LIMIT} prompts at the small scale, unless --limit says "
            "how many.",
            "The inverter is a LoRA-tuned copy of the model that reads states (Wan et al., Morris et al.) and verifies "
            "nothing: it evaluates no candidates. Its training is in its record.",
        ],
    )  # fmt: skip


def _small(setting: Setting) -> tuple[int, ...]:
    return (1, 6, 11) if setting.scale == "small" else paper.LAYERS


def _one(layers: tuple[int, ...] | None) -> int | None:
    if layers is not None and len(layers) > 1:
        raise InputError("this experiment takes one layer")
    return None if layers is None else layers[0]
