"""Define the experiments on vocabulary matching, noise and quantization that reproduce the paper's tables.

Each says which cells its table has; nothing is measured here. The defaults fit a laptop; ``--scale paper`` asks for the
paper's texts and numbers of prompts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hiddenlab.config import AttackConfig
from hiddenlab.errors import InputError
from hiddenlab.eval.cells import OTHER_MODEL, Cell, Experiment, Setting, attack_cell
from hiddenlab.eval.tables import paper
from hiddenlab.eval.tables.sharding import infill_spec

EXACT = {"exact": "exact prompts", "evaluated_tokens_per_token": "evaluated tokens per token"}
TEXT = {"rouge_l": "ROUGE-L", "token_accuracy": "token accuracy", "exact": "exact prompts"}
NOISY_BUDGET = 64
SLOW_LIMIT = 4

BUDGET_OF_ALL = (
    "At most {} candidates a token, the nearest taken where none matches; the paper has no such limit."
)
WHOLE = "No budget: a token that does not match is searched for in the whole vocabulary."
OTHER_SEARCH = (
    "The paper's columns are of another search: greedy, in the order of the attacked model's own predictions, the "
    "first candidate within an epsilon that a ternary search on 50 texts chose. Ours is speculative, in the order of a "
    "probe and the language model, epsilon measured."
)
PRINTED = (
    "The attack 'paper' is the paper's own, as printed (preset=paper): greedy, in the order of the attacked model's "
    "predictions, the first candidate within epsilon; epsilon by ternary search over this attack on {} texts of "
    "Python's documentation, where the paper takes 50 of FineWeb."
)
ALGORITHMS = {"identity": 1, "seq-perm": 4, "hidden-perm": 5, "2d-perm": 6}  # the paper's, by permutation
ATTACKS = ("ours", "paper", "both")
LAYERS_OF_PAPER = ", ".join(map(str, paper.LAYERS))
BUDGET = (
    "Channels that change values: at most {} candidates a token, the nearest taken where none matches. The paper "
    "searches its whole vocabulary there; a larger --set budget=N costs time."
)


@dataclass(frozen=True)
class _Attacks:
    """Which attacks a table runs, for how many candidates a token.

    Args:
        asked: one of ``ATTACKS``; None is ours, and the paper's at the paper's scale.
        budget: candidates for one position at most; None or 0 is the whole vocabulary.
        texts: on which the paper's epsilon is searched.
    """

    setting: Setting
    asked: str | None = None
    budget: int | None = None
    texts: int = 50

    def __post_init__(self) -> None:
        if self.asked is not None and self.asked not in ATTACKS:
            raise InputError(
                f"no attack of this table is called {self.asked!r}; known are {', '.join(ATTACKS)}"
            )
        if self.texts < 1:
            raise InputError(f"epsilon is searched on at least 1 text, not {self.texts}")
        if self.budget is not None and self.budget < 0:
            raise InputError(f"the budget must be 0 (the whole vocabulary) or more, not {self.budget}")

    @property
    def names(self) -> tuple[str, ...]:
        if self.asked == "both":
            return ("ours", "paper")
        return (self.asked or ("paper" if self.setting.scale == "paper" else "ours"),)

    def cells(
        self, keys: dict[str, Any], layer: int, permutation: str, method: str, published: Mapping[str, Any]
    ) -> list[Cell]:
        """Make a cell for each attack on a permutation behind a method."""
        made = []
        for name in self.names:
            label = name if name == "ours" else f"paper, Algorithm {ALGORITHMS[permutation]}"
            options = (
                {}
                if name == "ours"
                else {"attack": f"vocab-match:preset=paper,calibration_texts={self.texts}"}
            )
            named = {**keys, "attack": label, "budget": self.budget or "vocabulary"}
            channel = f"{method}+{permutation}"
            made.append(
                attack_cell(
                    self.setting, named, layer, channel, published, budget=self.budget or None, **options
                )
            )
        return made

    @property
    def notes(self) -> list[str]:
        printed = [PRINTED.format(self.texts)] if "paper" in self.names else []
        return [*printed, *([OTHER_SEARCH] if "ours" in self.names else [])]


def table_1(
    setting: Setting, attack: str | None = None, budget: int | None = None, texts: int = 50
) -> Experiment:
    """Measure the share of prompts recovered exactly from raw hidden states, by layer (Table 1).

    Args:
        attack: ours, paper (as printed) or both. Default: ours, and the paper's at --scale paper.
        budget: candidates a token at most. Default: the whole vocabulary.
        texts: of the attacker's own, on which the paper's attack searches its epsilon.
    """
    attacks = _Attacks(setting, attack, budget, texts)
    return _exactness("Table 1: exact recovery from raw states", attacks, ["identity"], paper.LAYERS)


def table_2(
    setting: Setting,
    channels: str = ",".join(paper.PERMUTATIONS[1:]),
    attack: str | None = None,
    budget: int | None = None,
    texts: int = 50,
) -> Experiment:
    """Measure the share of prompts recovered exactly from permuted states, by permutation and layer (Table 2).

    Args:
        channels: permutations, separated by commas.
        attack: ours, paper (as printed) or both. Default: ours, and the paper's at --scale paper.
        budget: candidates a token at most. Default: the whole vocabulary.
        texts: of the attacker's own, on which the paper's attack searches its epsilon.
    """
    names = channels.split(",")
    for name in names:
        if name not in paper.PERMUTATIONS:
            raise InputError(
                f"no permutation of Table 2 is called {name!r}; they are {', '.join(paper.PERMUTATIONS)}"
            )
    title = "Table 2: exact recovery from permuted states"
    return _exactness(title, _Attacks(setting, attack, budget, texts), names, _small(setting))


def _exactness(title: str, attacks: _Attacks, channels: Sequence[str], layers: Sequence[int]) -> Experiment:
    cells = []
    for channel in channels:
        for layer in attacks.setting.at(layers):
            published = {
                f"exact, {model}": paper.EXACT[channel][model].get(layer)
                for model in (paper.GEMMA, paper.LLAMA)
            }
            cells += attacks.cells(
                {"channel": channel, "layer": layer}, layer, channel, "identity", published
            )
    limit = BUDGET_OF_ALL.format(attacks.budget) if attacks.budget else WHOLE
    return Experiment(title, cells, EXACT, [OTHER_MODEL, *attacks.notes, limit])


def table_8(setting: Setting, models: str = "") -> Experiment:
    """Measure the mean time of an attack by model size (Table 8); name further models with --set models=A,B."""
    names = [setting.model, *(name for name in models.split(",") if name)]
    source = setting.source(limit=10, max_tokens=100)
    source["limit"] = setting.limit or 10
    cells = []
    for name in names:
        spec = AttackConfig(**{**setting.where(), "model": name}, **source, layer=_one(setting.layers))
        published = {"seconds a prompt": paper.published(paper.ATTACK_SECONDS, name)}
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


def table_9_12(setting: Setting, texts: int = 50, budget: int | None = None) -> Experiment:
    """Measure thresholds: by ternary search over the paper's attack, by permutation (Tables 9 to 12), and as ours are.

    Args:
        texts: of the attacker's own, on which epsilon is searched.
        budget: candidates a token at most. Default: as many as the search of epsilon runs, 1,024.
    """
    _Attacks(setting, "paper", budget, texts)  # refuses numbers that make no sense
    cells = []
    for channel in paper.PERMUTATIONS:
        for layer in setting.at((1, 6, 11) if setting.scale == "small" else paper.LAYERS):
            published = {
                f"epsilon, {model}": paper.EPSILON[channel][model].get(layer)
                for model in (paper.GEMMA, paper.LLAMA)
            }
            spec = {
                **setting.where(), "layer": layer, "defense": [] if channel == "identity" else [channel],
                "texts": texts, "budget": budget or None,
            }  # fmt: skip
            number = f"{9 + paper.PERMUTATIONS.index(channel)}"
            cells.append(
                Cell("thresholds", spec, {"table": number, "channel": channel, "layer": layer}, published)
            )
    return Experiment(
        "Tables 9 to 12: thresholds by the paper's search, and ours",
        cells,
        {
            "epsilon": "epsilon", "right": "plateau from", "edge": "plateau to", "found": "tokens found",
            "beyond": "beyond", "auto": "epsilon auto",
        },
        [
            f"All distances are L1, sorted where coordinates are permuted. Ours are of {texts} texts of Python's "
            "documentation, the paper's of 50 of FineWeb.",
            "The search runs the paper's attack as printed, its Algorithm 1, 4, 5 or 6 by permutation. The attack "
            "finds as many tokens with every epsilon of a plateau: from the farthest right token to the upper end, "
            "which the ternary search finds. The paper does not say where its search ends on it; epsilon is the "
            "geometric middle.",
            "A plateau from 0 means that the attacker's passes gave the very states of the provider. The middle is "
            "then counted from the rounding of float32.",
            "Tokens found: right ones before the first wrong one of each text, as a share of all positions. Beyond: "
            "the share of positions whose right token is not among the first 1,024 candidates. There the search only "
            "sees whether a wrong one is taken.",
            "epsilon auto: what our own attack measures, for a row of median length; it is relative to each row.",
            "Thresholds are in each model's own units, so the paper's columns show their order only.",
        ],
    )  # fmt: skip


def table_13(
    setting: Setting, attack: str | None = None, budget: int | None = None, texts: int = 50
) -> Experiment:
    """Compare noise and quantization: the best layer's ROUGE-L by permutation, and the model's own loss (Table 13).

    Args:
        attack: ours, paper (as printed) or both. Default: ours, and the paper's at --scale paper.
        budget: candidates a token at most behind noise; 0 is the whole vocabulary. Default: 64, and the whole
            vocabulary at --scale paper.
        texts: of the attacker's own, on which the paper's attack searches its epsilon.
    """
    layers = setting.at(_small(setting))
    attacks = _noise_attacks(setting, attack, budget, texts)
    plain = replace(attacks, budget=None)
    cells = [cell for channel in paper.PERMUTATIONS for cell in _noised(attacks, channel)]
    cells += _exactness("", plain, paper.PERMUTATIONS, layers).cells
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
            *attacks.notes,
            _budget_note(attacks),
            f"Each ROUGE-L is {how}; each of the paper's is the largest over layers {LAYERS_OF_PAPER}.",
        ],
        fold=_weakest,
    )


def _weakest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Make one row per method and attack: for each permutation the layer with the largest ROUGE-L, and the utility."""
    result = []
    names = dict.fromkeys(_name_of(row["keys"]) for row in rows if "attack" in row["keys"])
    for method, name in ((method, name) for method in ("identity", *paper.METHODS) for name in names):
        figures: dict[str, Any] = {}
        missing: list[str] = []
        of = [
            row
            for row in rows
            if "attack" in row["keys"]
            and (row["keys"].get("method", "identity"), _name_of(row["keys"])) == (method, name)
        ]
        for channel in paper.PERMUTATIONS:
            at = [row for row in of if row["keys"]["channel"] == channel]
            values = [row["figures"]["rouge_l"] for row in at if "rouge_l" in row["figures"]]
            missing += [
                f"{channel}, layer {row['keys']['layer']}: {row['reason'] or 'not measured yet'}"
                for row in at
                if "rouge_l" not in row["figures"]
            ]
            if values:
                figures[f"rouge_l, {channel}"] = max(values, key=lambda figure: figure["value"])
        quality = [row for row in rows if row["keys"].get("defense") == method]
        figures |= quality[0]["figures"] if quality else {}
        published = {f"ROUGE-L, {name}": value for name, value in paper.BEST[method].items()}
        published["LiveBench, relative"] = paper.DOWNSTREAM[method]
        measured = [row for row in (*of, *quality) if row["status"] == "measured"]
        commits = dict.fromkeys(row["commit"] for row in measured if row["commit"])
        result.append(
            {
                "keys": {"method": method, "attack": name, "budget": of[0]["keys"]["budget"]},
                "figures": figures, "paper": published, "status": "measured" if measured else "not run",
                "reason": "; ".join(missing) or None, "commit": ", ".join(commits) or None, "cell": None,
            }
        )  # fmt: skip
    return result


def _name_of(keys: Mapping[str, Any]) -> str:
    return str(keys["attack"]).split(",")[0]


def table_18(
    setting: Setting, attack: str | None = None, budget: int | None = None, texts: int = 50
) -> Experiment:
    """Measure ROUGE-L of prompts recovered behind noise or quantization, without permutation, by layer (Table 18).

    Args:
        attack, budget, texts: see table-13.
    """
    return _noise_table(18, _noise_attacks(setting, attack, budget, texts), "identity")


def table_19(
    setting: Setting, attack: str | None = None, budget: int | None = None, texts: int = 50
) -> Experiment:
    """Measure ROUGE-L of prompts recovered behind noise or quantization with permuted rows, by layer (Table 19).

    Args:
        attack, budget, texts: see table-13.
    """
    return _noise_table(19, _noise_attacks(setting, attack, budget, texts), "seq-perm")


def table_20(
    setting: Setting, attack: str | None = None, budget: int | None = None, texts: int = 50
) -> Experiment:
    """Measure ROUGE-L of prompts recovered behind noise or quantization with permuted coordinates (Table 20).

    Args:
        attack, budget, texts: see table-13.
    """
    return _noise_table(20, _noise_attacks(setting, attack, budget, texts), "hidden-perm")


def table_21(
    setting: Setting, attack: str | None = None, budget: int | None = None, texts: int = 50
) -> Experiment:
    """Measure ROUGE-L of prompts recovered behind noise or quantization with both permutations, by layer (Table 21).

    Args:
        attack, budget, texts: see table-13.
    """
    return _noise_table(21, _noise_attacks(setting, attack, budget, texts), "2d-perm")


def _noise_attacks(setting: Setting, attack: str | None, budget: int | None, texts: int) -> _Attacks:
    """Return the attacks of a table on noise; a budget of None is the default of the scale."""
    if budget is None and setting.scale == "small":
        budget = NOISY_BUDGET
    return _Attacks(setting, attack, budget, texts)


def _budget_note(attacks: _Attacks) -> str:
    return BUDGET.format(attacks.budget) if attacks.budget else WHOLE


def _noise_table(number: int, attacks: _Attacks, channel: str) -> Experiment:
    title = f"Table {number}: noise and quantization, {channel}"
    notes = [OTHER_MODEL, *attacks.notes, _budget_note(attacks)]
    return Experiment(title, _noised(attacks, channel), TEXT, notes)


def _noised(attacks: _Attacks, channel: str) -> list[Cell]:
    cells = []
    for method in paper.METHODS:
        for layer in attacks.setting.at(_small(attacks.setting)):
            published = {f"ROUGE-L, {paper.GEMMA}": paper.NOISED[channel][method].get(layer)}
            keys = {"method": method, "channel": channel, "layer": layer}
            cells += attacks.cells(keys, layer, channel, method, published)
    return cells


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
        ("greedy, lm", True, {"search": "greedy", "proposal": "lm"}),
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
