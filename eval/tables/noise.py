"""Define experiments on noise: what is recovered behind it, alone or with permutations, and its effect on the model."""

from typing import Any

from hiddenlab.channels import Channel
from hiddenlab.config import AttackConfig
from hiddenlab.errors import InputError
from hiddenlab.eval.cells import (
    MEASURED,
    NOT_RUN,
    OTHER_MODEL,
    Cell,
    Experiment,
    Setting,
    attack_cell,
    split_specs,
)
from hiddenlab.eval.measures.attack import FAR, NEAR, embedding_deviation
from hiddenlab.eval.tables import paper
from hiddenlab.eval.tables.attack import BUDGET, NOISY_BUDGET, utility_cell
from hiddenlab.job import build_attack
from hiddenlab.models.load import load_config, resolve_model

MATCHING, BEAM = "vocab-match", "beam-decoding"
NOISY = "gaussian:sigma=0.01,gaussian:sigma=0.1,random-prefix"
LAYERS = (1, 6, 11, 21)
SHUFFLED_ROWS = ("seq-perm", "2d-perm")
SIGMAS = "0.01,0.03,0.1,0.2,0.3,0.5"
OTHERS = ("random-prefix", "int8", "nf4")
DEPTH = 11
READ, COST, UNIT = "recovery", "utility", "embedding"  # what a cell of ``noise-utility`` measures

UNITS = (
    "sigma is in the units of the input embedding, whose coordinates have a standard deviation of 0.136 in the "
    "built-in model: sigma 0.01 is 0.07 of it, 0.1 is 0.74. The paper's Gemma has other units."
)
NOTHING_VERIFIED = "beam-decoding: it verifies nothing and reads every row, so that it needs no budget."


def noise(
    setting: Setting,
    channels: str = ",".join(paper.PERMUTATIONS),
    methods: str = NOISY,
    attacks: str = f"{MATCHING},{BEAM}",
    budget: int = NOISY_BUDGET,
    relative: str | float | None = None,
) -> Experiment:
    """Compare vocabulary matching and beam decoding behind noise and permutations, by layer.

    Args:
        channels: permutations behind the noise.
        methods: defenses.
        attacks: their specs. All three are separated by commas; a part such as ``rounds=0`` belongs to the spec before.
        budget: candidates per token of plain ``vocab-match``.
        relative: strengths of ``gaussian`` over the standard deviation of the model's own embeddings, separated by
            commas, in place of methods: the same noise for models whose embeddings have other units.

    Raises:
        InputError: the channel is unknown, or a spec is malformed.
        UnknownNameError: the method or attack is unknown.
    """
    asked = {attack: _options(attack, budget) for attack in split_specs(attacks)}
    behind, notes = _channels(channels), [UNITS]
    if relative is None:
        named: dict[str, dict[str, Any]] = {_canonical(spec): {} for spec in split_specs(methods)}
    else:
        if methods != NOISY:
            raise InputError("relative names strengths of gaussian; it and methods exclude each other")
        strengths, unit = _numbers(relative, "a relative strength"), embedding_deviation(setting.model)
        named = {}
        for over in strengths:
            # Four digits are precise enough, and make a strength the same cell on every machine.
            named.setdefault(
                _canonical(f"gaussian:sigma={float(f'{over * unit:.4g}')!r}"), {"over deviation": over}
            )
        notes = [f"over deviation: sigma over the embeddings' standard deviation, {unit:.4g} in this model."]
    cells = [
        attack_cell(
            setting,
            {"method": method, **keys, "channel": channel, "layer": layer, "attack": attack},
            layer,
            f"{method}+{channel}",
            _published(method, channel, layer),
            **options,
        )
        for method, keys in named.items()
        for channel in behind
        for layer in setting.at(LAYERS)
        for attack, options in asked.items()
    ]
    return Experiment(
        "Noise is not a defense: noise and permutations, by attack",
        cells,
        {
            "rouge_l": "ROUGE-L", "bag_of_tokens_recall": "tokens in any order", "token_accuracy": "token accuracy",
            "exact": "exact prompts", "evaluated_tokens_per_token": "evaluated tokens per token",
            "seconds_per_prompt": "seconds a prompt",
        },
        [
            OTHER_MODEL,
            "The paper's column is of its own attack, vocabulary matching, and stands beside every attack of ours.",
            *notes,
            *([f"{MATCHING}: {BUDGET.format(budget)}"] if MATCHING in asked else []),
            *([NOTHING_VERIFIED] if BEAM in asked else []),
        ],
    )  # fmt: skip


def noise_utility(setting: Setting, sigmas: str | float = SIGMAS, channel: str = "identity") -> Experiment:
    """Compare recovery of prompts with the quality of the model, by strength of the noise.

    Args:
        sigmas: of ``gaussian``, separated by commas. A random prefix and 8-bit and 4-bit providers are added.
        channel: the permutation behind the noise.

    Raises:
        InputError: a sigma is no positive number, the channel is unknown, or there are several layers.
    """
    behind = _channels(channel)
    if len(behind) > 1:
        raise InputError(f"this experiment takes one channel, not {channel!r}")
    channel = behind[0]
    layer = _one_layer(setting)
    defenses: dict[str, dict[str, Any]] = {}
    for value in _numbers(sigmas, "a sigma"):
        defenses[_canonical(f"gaussian:sigma={value!r}")] = {"defense": "gaussian", "sigma": value}
    defenses |= {name: {"defense": name} for name in OTHERS}
    cells = [Cell("embedding", {"model": setting.model}, {"part": UNIT})]
    for spec, keys in defenses.items():
        place = {**keys, "channel": channel, "layer": layer}
        published = _published(spec, channel, layer)
        cells += [
            attack_cell(setting, {"part": READ, **place}, layer, f"{spec}+{channel}", published, attack=BEAM),
            utility_cell(setting, spec, {"part": COST, **place}),
        ]
    return Experiment(
        "Noise is not a defense: what is read behind it, and what it costs the model",
        cells,
        {
            "rouge_l": "ROUGE-L", "bag_of_tokens_recall": "tokens in any order", "top1_agreement": "top-1 agreement",
            "kl": "KL from clean, nats", "perplexity": "perplexity", "clean_perplexity": "perplexity, clean",
            "sigma_over_deviation": "sigma over the embedding's standard deviation",
        },
        [
            OTHER_MODEL,
            "Recovery is beam decoding's at one layer; quality is the whole model's, teacher-forced on the prompts. "
            "Permutations do not change it: the provider undoes them.",
            UNITS,
        ],
        fold=_beside,
        against="top1_agreement",
    )  # fmt: skip


def order(setting: Setting, sigmas: str | float = "0,0.01,0.1", channel: str = "seq-perm") -> Experiment:
    """Measure how well the order of shuffled rows is recovered from the rows alone, by noise and layer.

    No tokens and no language model are used.

    Args:
        sigmas: of ``gaussian``, separated by commas; 0 for none.
        channel: the permutation behind the noise.

    Raises:
        InputError: a sigma is no number from 0, or the channel is unknown or does not shuffle rows.
    """
    behind = _channels(channel)
    if len(behind) > 1 or behind[0] not in SHUFFLED_ROWS:
        raise InputError(f"this experiment takes one channel of {', '.join(SHUFFLED_ROWS)}, not {channel!r}")
    cells = []
    for sigma in dict.fromkeys(_numbers(sigmas, "a sigma")):
        noised = [_canonical(f"gaussian:sigma={sigma!r}")] if sigma else []
        for layer in setting.at(LAYERS):
            spec = {
                **setting.where(), **setting.source(), "layer": layer, "defense": [*noised, *behind]
            }  # fmt: skip
            cells.append(Cell("order", spec, {"sigma": sigma, "channel": behind[0], "layer": layer}))
    return Experiment(
        "What shuffled rows tell of their order by themselves",
        cells,
        {
            "pairs": "pairs in their order", "near_pairs": f"pairs up to {NEAR} positions apart",
            "far_pairs": f"pairs more than {FAR} apart", "places_off": "positions off, sorted",
        },
        [
            "Which of two rows stood first, learned from the attacker's own texts; chance is one half. Sorted by what "
            "all their pairs say, rows are so many positions off: of n in random order (n² − 1) / 3n, 16.7 of 50.",
            UNITS,
        ],
    )  # fmt: skip


def _beside(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Make one row per defense: recovery, degradation, and noise in units of the embedding's own deviation."""
    unit = next(row for row in rows if row["keys"]["part"] == UNIT)
    costs = {_place(row): row for row in rows if row["keys"]["part"] == COST}
    result = []
    for read in (row for row in rows if row["keys"]["part"] == READ):
        cost, keys = costs[_place(read)], dict(_place(read))
        parts = {READ: read, COST: cost} | ({UNIT: unit} if "sigma" in keys else {})
        figures = {**read["figures"], **cost["figures"]}
        if "sigma" in keys and (deviation := unit["figures"].get("embedding_deviation")):
            over = keys["sigma"] / deviation["value"]
            figures["sigma_over_deviation"] = {"value": over, "low": over, "high": over, "n": deviation["n"]}
        missing = [
            f"{name}: {part['reason'] or 'not measured yet'}"
            for name, part in parts.items()
            if part["status"] != MEASURED
        ]
        result.append(
            {
                **read, "keys": keys, "figures": figures, "paper": {**read["paper"], **cost["paper"]},
                "status": MEASURED if MEASURED in (read["status"], cost["status"]) else NOT_RUN,
                "reason": "; ".join(missing) or None,
            }
        )  # fmt: skip
    return result


def _place(row: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return the row's keys, without what it measures."""
    return tuple((key, value) for key, value in row["keys"].items() if key != "part")


def _canonical(method: str) -> str:
    """Return a method in the spelling of its stages, so that one method is one cell however it is written."""
    return "+".join(Channel.parse([method]).specs)


def _numbers(text: str | float, what: str) -> list[float]:
    """Split strengths at commas; a single one arrives as a number from the command line."""
    numbers = []
    for part in str(text).split(","):
        try:
            numbers.append(float(part))
        except ValueError:
            raise InputError(f"{what} is a number, not {part!r}") from None
    return numbers


def _channels(text: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in paper.PERMUTATIONS:
            raise InputError(
                f"no permutation of Tables 18 to 21 is called {name!r}; they are {', '.join(paper.PERMUTATIONS)}"
            )
    return names


def _options(attack: str, budget: int) -> dict[str, Any]:
    """Return an attack's options for its cells; only vocabulary matching has a budget, as in Tables 18 to 21.

    Raises:
        InputError: the spec is malformed, or the attack has no such parameter.
        UnknownNameError: there is no such attack.
    """
    options: dict[str, Any] = {"attack": attack}
    if attack == MATCHING:
        options["budget"] = budget
    build_attack(AttackConfig(**options))  # raise errors before anything is measured
    return options


def _published(method: str, channel: str, layer: int) -> dict[str, Any]:
    return {f"ROUGE-L, {paper.GEMMA}": paper.NOISED[channel].get(method, {}).get(layer)}


def _one_layer(setting: Setting) -> int:
    """Return the layer asked for, else the default, or the middle of a shallower model."""
    total = int(load_config(resolve_model(setting.model)).num_hidden_layers)
    layers = setting.at((DEPTH,)) or (max(1, total // 2),)
    if len(layers) > 1:
        raise InputError("this experiment takes one layer")
    return layers[0]
