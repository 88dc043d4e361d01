"""Define experiments on private-inference schemes: their cost, and attacks on them (paper, appendices I and J)."""

import math
from typing import Any

from hiddenlab.errors import InputError
from hiddenlab.eval.cells import Cell, Experiment, Setting, attack_cell
from hiddenlab.eval.measures.protocols import CLOSED, PLAIN, REVEALING, SCHEMES
from hiddenlab.eval.tables.paper import PERMUTATIONS
from hiddenlab.eval.tables.sharding import infill_spec
from hiddenlab.registry import parse_numbers

SAME, NONE = "same", "none"  # a language model to help: of the attacked model's name, or none
FEW = 256  # candidates for a token where rows are a few projections
READS = {
    "exact": "exact prompts", "token_accuracy": "token accuracy", "seconds_per_prompt": "seconds a prompt"
}  # fmt: skip


def schemes(setting: Setting, generate: int = 8) -> Experiment:
    """Compare STIP, Centaur and PermLLM with the plain model: error, time, bytes and rounds."""
    if generate < 0:
        raise InputError(f"{generate} tokens to generate; a number from 0")
    cells = []
    for name in (PLAIN, *SCHEMES):
        on_shares = name in REVEALING
        limit = setting.limit or (10 if on_shares and setting.scale == "small" else setting.source()["limit"])
        spec = {
            "model": setting.model,
            "seed": setting.seed,
            **setting.source(),
            "limit": limit,
            "scheme": name,
        }
        cells.append(Cell("scheme", {**spec, "generate": 0}, {"scheme": name}))
        if name == "stip":
            wide = {**spec, "generate": 0, "dtype": "float64"}
            cells.append(Cell("scheme", wide, {"scheme": f"{name}, both in float64"}))
        if name == "stip" and generate:
            keys = {"scheme": f"{name}, generating {generate} tokens"}
            cells.append(Cell("scheme", {**spec, "generate": generate}, keys))
    return Experiment(
        "Private inference by permutation: cost and error",
        cells,
        {
            "largest_logit_error": "largest error of a logit", "transformers_error": "largest, to transformers",
            "top1_agreement": "same likeliest token",
            "same_generated": "same generated tokens", "seconds_per_prompt": "seconds a prompt",
            "over_plain": "over the plain model", "megabytes": "MB", "rounds": "rounds", "dealt_megabytes": "MB dealt",
        },
        [
            "Plain is the same step-by-step code in float32; its own error is against itself in float64. Centaur and "
            "PermLLM compute on 64-bit shares with 16 bits behind the point; all parties run one after the other in "
            "one process, links cost nothing.",
            "MB are what the parties send each other for one prompt; dealt is correlated randomness handed out "
            "beforehand by a trusted dealer; making it is part of the seconds. Rounds count one exchange each, without "
            "merging independent ones. On shares 10 prompts, else 50.",
        ],
    )  # fmt: skip


MATCHED = {
    "exact": "exact prompts", "token_accuracy": "token accuracy", "verified": "verified tokens",
    "evaluated_tokens_per_token": "evaluated tokens per token", "seconds_per_prompt": "seconds a prompt",
}  # fmt: skip


def closed_weights(setting: Setting) -> Experiment:
    """Attack STIP and Centaur as their server, with public, tied and fine-tuned embeddings (appendices I.2 and I.3)."""
    spec = {"model": setting.model, "seed": setting.seed, **setting.source()}
    knows: list[tuple[str, float, str]] = [
        ("public", 0.0, "the embedding"),
        ("tied", 0.0, "its view (tied head)"),
    ]
    for drift in (0.01, 0.1, 0.3, 1.0):
        knows.append(("base", drift, f"a base model's embedding, {drift:g} sd away"))
    cells = []
    for scheme in CLOSED:
        own = {} if scheme == CLOSED[0] else {"scheme": scheme}
        for embedding, drift, label in knows:
            keys = {"scheme": scheme, "the attacker has": label}
            more = {"embedding": embedding, "drift": drift, **own}
            cells.append(Cell("closed-weights", {**spec, **more}, keys))
    return Experiment(
        "STIP and Centaur with closed weights, read by their server",
        cells,
        READS,
        [
            "The attack gets the server's view as a file: the permuted output layer, and the vectors that users sent "
            "(STIP) or that it puts together at the first norm, rounded to fixed-point numbers (Centaur).",
            "Tied head: exact up to renaming. Recovered are the rows of the permuted vocabulary, one symbol for each "
            "token, and the embedding in the users' order; which symbol is which token: see 'substitution'.",
            "Base model: every value of the private embedding is moved by noise of so many standard deviations of "
            "the public one.",
        ],
    )


def substitution(
    setting: Setting, size: int = 1500, prior: str = SAME, rounds: int = 4, read: int = 1000
) -> Experiment:
    """Measure how many tokens requests alone reveal, by number of requests, for private embeddings (appendix I.3).

    Embeddings and head are untied.
    """
    cells = []
    priors: dict[str, dict[str, Any]] = {"neighbours": {}}
    if prior != NONE:
        name = setting.model if prior == SAME else prior
        more = {"prior": name, "rounds": rounds, "read": read, "device": setting.device}
        priors["neighbours, then a language model"] = more
    for requests in (100, 1000, 10_000):
        for label, more in priors.items():
            spec = {
                "model": setting.model, "seed": setting.seed, "requests": requests,
                "request_tokens": setting.max_tokens or 20, "size": size, **more,
            }  # fmt: skip
            cells.append(Cell("substitution", spec, {"requests": requests, "named by": label}))
    return Experiment(
        "Closed weights, embedding not tied: a substitution of tokens broken by statistics",
        cells,
        {"token_accuracy": "tokens named", "kinds_named": "kinds named", "exact": "exact requests"},
        [
            f"Requests of {setting.max_tokens or 20} tokens and the attacker's own text are of different modules of "
            f"Python's standard library. Neighbour statistics name at most {size:,} kinds, so that rarer ones are "
            "missed; the language model names all, among the kinds of the attacker's text.",
            "The attacker uses nothing of the private model, not even the permuted weights that the server has: "
            "private is the embedding. The language model is a public one; where it is the attacked model's namesake, "
            "it stands for the public model that the private one was made from.",
            f"In each of {rounds} rounds it reads {read:,} requests at most, as they are named by then.",
        ],
    )


def permuted_model(setting: Setting, channels: str = "identity,hidden-perm", budget: int = 0) -> Experiment:
    """Match states with STIP's permuted model alone, where weights are closed and the head is tied (appendix I.3).

    Args:
        channels: what is shuffled of the states beyond STIP's own order, joined by commas.
        budget: candidates for a position, 0 for all.
    """
    cells = []
    asked = dict.fromkeys(part.strip() for part in channels.split(","))
    if unknown := [channel for channel in asked if channel not in PERMUTATIONS]:
        raise InputError(f"unknown channel {unknown[0]!r}; known are {', '.join(PERMUTATIONS)}")
    for channel in asked:
        for layer in setting.at((1, 11)):
            spec = {
                "model": setting.model, "seed": setting.seed, "device": setting.device, **setting.source(),
                "layer": layer, "channel": channel, "budget": budget or None,
            }  # fmt: skip
            cells.append(Cell("permuted-model", spec, {"states": channel, "layer": layer}))
    return Experiment(
        "STIP with closed weights: states matched with the permuted model",
        cells,
        MATCHED,
        [
            "The attacker has the permuted model without its token embedding, the vectors that users sent, and states "
            "behind the layer, in the one order of coordinates that STIP gives them (identity), or shuffled further. "
            "From the first two it rebuilds the permuted vocabulary, from the third it reads the prompts.",
            "Exact up to renaming: a symbol for each token. Which symbol is which token: see 'substitution'.",
        ],
    )


def revealed(setting: Setting, budget: int = 0) -> Experiment:
    """Match the permuted states that Centaur and PermLLM show to a party, where weights are open (appendix I.2)."""
    cells = []
    for name, how in REVEALING.items():
        for layer in setting.at((1, 11)):
            source = setting.source()
            if how.channel == "2d-perm" and setting.scale == "small" and not setting.limit:
                source["limit"] = 10
            spec: dict[str, Any] = {
                "model": setting.model, "seed": setting.seed, "device": setting.device, **source, "scheme": name,
                "layer": layer, "budget": budget or None,
            }  # fmt: skip
            keys = {"scheme": name, "who": how.party, "states": how.channel, "layer": layer}
            cells.append(Cell("revealed", spec, keys))
    return Experiment(
        "What non-linearities reveal",
        cells,
        MATCHED,
        [
            "States as the protocol itself reveals them at the norm behind the layer, its fixed-point rounding "
            "included; the threshold is four times the largest rounding seen on four prompts of the attacker's own.",
        ],
    )  # fmt: skip


def theorem_j1(setting: Setting, draws: int = 100_000) -> Experiment:
    """Measure how far apart one random direction keeps two states, beside the bound of Theorem J.1."""
    cells = []
    for layer in setting.at((1, 11)):
        for k in (1 / 256, 1 / 64, 1 / 32, 1 / 16):
            spec = {
                "model": setting.model, "seed": setting.seed, "device": setting.device, **setting.source(),
                "layer": layer, "k": k, "draws": draws,
            }  # fmt: skip
            cells.append(Cell("theorem-j1", spec, {"layer": layer, "k": f"1/{round(1 / k)}"}))
    return Experiment(
        "Theorem J.1: states apart in one random direction",
        cells,
        {"apart": "pairs apart by k times their L1 distance", "apart_bound": "at least, by the theorem"},
        [
            f"{draws:,} pairs of states of the prompts' tokens, a Gaussian direction of unit variance for each."
        ],
    )


def theorem_j3(setting: Setting, correlation: float = 0.95, draws: int = 4000) -> Experiment:
    """Show that less distance correlation may leave a variable readable, and more may not (Theorem J.3).

    Args:
        correlation: of the two normal variables, above 0.945 and below 1.
        draws: of each pair.
    """
    if not 0.945 < correlation < 1:
        raise InputError(f"the theorem needs a correlation above 0.945 and below 1, not {correlation}")
    if draws < 2:
        raise InputError(f"draws must be at least 2, not {draws}")
    cells = [
        Cell(
            "theorem-j3",
            {"delta": delta, "correlation": correlation, "draws": draws, "seed": setting.seed},
            {"delta": delta},
        )
        for delta in (0.1, 0.3, 0.6)
    ]
    return Experiment(
        "Theorem J.3: distance correlation does not order what can be read",
        cells,
        {
            "normal_discorr": "distance correlation, W and X", "normal_read": "W read within delta",
            "normal_bound": "expected at most", "folded_discorr": "distance correlation, Y and |Y|",
            "folded_read": "Y read within delta",
        },
        [
            f"W and X are standard normal with correlation {correlation}; the best estimate of W from X is their "
            "correlation times X. Y is uniform between -delta and delta; 0 is within delta of it, whatever |Y| is.",
        ],
        over="delta",
    )  # fmt: skip


def projections(setting: Setting, budget: int = FEW, noise: str = "0,0.01,0.1") -> Experiment:
    """Match vocabulary on a few random projections of each state, by their number and noise (theorem J.1)."""
    cells = []
    for layer in setting.at((1, 11)):
        for count in (1, 2, 4, 8, 16, 64):
            for sigma in _sigmas(noise):
                stage = f"project:count={count}" + (f",sigma={sigma}" if sigma else "")
                keys = {"projections": count, "noise, of a projection's size": sigma, "layer": layer}
                cells.append(attack_cell(setting, keys, layer, stage, budget=budget))
    return Experiment(
        "Matching on random one-dimensional projections",
        cells,
        {
            "exact": "exact prompts", "token_accuracy": "token accuracy", "verified": "verified tokens",
            "evaluated_tokens_per_token": "evaluated tokens per token",
        },
        [
            f"The attacker knows the directions. At most {budget:,} candidates a token, the nearest taken where none "
            "matches.",
            "The paper leaves this to further work (appendix J.1).",
        ],
    )  # fmt: skip


def _sigmas(text: str) -> list[float]:
    """Split noise levels at commas.

    Raises:
        InputError: one of them is no number from 0.
    """
    try:
        sigmas = [float(part) for part in str(text).split(",")]
    except ValueError:
        sigmas = [math.nan]
    if not all(0 <= sigma < math.inf for sigma in sigmas):
        raise InputError(f"noise {text!r}: numbers from 0, joined by commas")
    return sigmas


def distance_correlation(setting: Setting, budget: int = 4096, draws: int = 20) -> Experiment:
    """Compare distance correlation with recovery; the first does not predict the second (appendix J)."""
    cells = []
    (layer,) = setting.at((1,))[:1]
    shown = ("linear", "projection", "identity", "seq-perm", "hidden-perm:shared", "hidden-perm", "2d-perm")
    for channel in (*shown, "project:count=1", "project:count=8"):
        spec = {
            "model": setting.model, "seed": setting.seed, "device": setting.device, **setting.source(), "layer": layer,
            "shown": channel, "draws": draws,
        }  # fmt: skip
        keys = {"shown": LABELS.get(channel, channel)}
        cells.append(Cell("discorr", spec, keys))
        if channel not in LABELS:
            # Many tokens match one direction; a longer search would only find more of them.
            few = FEW if channel.startswith("project") else budget
            cells.append(attack_cell(setting, keys, layer, channel, budget=few))
    return Experiment(
        f"Distance correlation and recovery, layer {layer}",
        cells,
        {
            "discorr": "distance correlation, squared",
            "exact": "exact prompts",
            "token_accuracy": "token accuracy",
        },
        [
            "Distance correlation of what is shown with the input embeddings, squared and bias-corrected, over 500 "
            "tokens a value; its interval is over draws of tokens and maps, those of recovery are over prompts.",
            "The two maps of the embeddings are the sides of Equation 3, on which the schemes' authors rest; what is "
            "not attacked has no recovery.",
        ],
        fold=_by_shown,
    )


LABELS = {"linear": "embeddings, x W π (square)", "projection": "embeddings, x w (one direction)"}


def _by_shown(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Make one row for what is shown, from the cell of its correlation and that of the attack on it."""
    merged: dict[str, dict[str, Any]] = {}
    for row in rows:
        entry = merged.setdefault(row["keys"]["shown"], {**row, "figures": {}, "cell": None})
        entry["figures"] |= row["figures"]
        entry["status"] = "measured" if entry["figures"] else row["status"]
        entry["reason"] = entry["reason"] or row["reason"]
    return list(merged.values())


def after_mpc(
    setting: Setting, alpha: int = 4, c: int = 4, m: int = 1, learned: str = "1,11", timeout: float = 600.0
) -> Experiment:
    """Run the first layers under CrypTen and the rest on CompNodes: measure the cost, and attack what they see.

    Args:
        learned: layers at which the learned attack is run too (an infiller for each is trained first).
    """
    cells = []
    tokens = setting.max_tokens or 48
    node = f"shard:alpha={alpha},c={c},node={alpha // 2}"
    deep = parse_numbers("learned", str(learned)) if learned != "" else []
    for layer in setting.at((1, 2, 4, 11)):
        spec = {
            "model": setting.model, "seed": setting.seed, "prompts": setting.source()["prompts"],
            "max_tokens": tokens, "layers": layer, "timeout": timeout,
        }  # fmt: skip
        cost = {**spec, "limit": setting.limit or 3, "alpha": alpha, "c": c, "m": m}
        cells.append(Cell("after-mpc", cost, {"layers on shares": layer}))
        attacks = [
            ("all CompNodes, vocab-match", "identity", "vocab-match", True),
            ("one CompNode, missing tokens", node, "missing-tokens:budget=2000", True),
        ]
        if layer in deep:
            attacks.append(("one CompNode, infilling", node, infill_spec(setting), False))
        for label, channel, attack, tolerant in attacks:
            more = {
                "device": setting.device, "limit": setting.limit or 10, "channel": channel, "attack": attack,
                "tolerant": tolerant,
            }  # fmt: skip
            cells.append(
                Cell("after-mpc-attack", {**spec, **more}, {"layers on shares": layer, "read by": label})
            )
    return Experiment(
        "Cascade behind secret sharing (appendix H)",
        cells,
        {
            "mpc_seconds": "seconds on shares", "megabytes": "MB", "state_error": "a prompt's largest error of a state",
            "logit_error": "of a logit", "largest_logit_error": "of a logit, all prompts",
            "top1_agreement": "same likeliest token",
            "exact": "exact prompts", "token_accuracy": "token accuracy",
            "missing_token_accuracy": "missing tokens found",
            "verified": "verified tokens",
        },
        [
            f"Prompts of {tokens} tokens; alpha {alpha}, c {c}, m {m}; 3 prompts for the cost, 10 for attacks where no "
            "limit is given. Layers on shares: CrypTen, two processes on loopback, public weights, triples from its "
            "trusted first party (not counted).",
            "Attacks read the very numbers that CompNodes add up, CrypTen's approximations included; how far these "
            "move a row was measured by the attacker on prompts of its own. All CompNodes: what they see together; "
            f"one: node {alpha // 2}, whose own tokens are 1 in {alpha}.",
        ],
    )  # fmt: skip


def unique_rows(setting: Setting, models: str = "") -> Experiment:
    """Count the tokens whose embedding equals another's once its numbers are sorted (appendix I.3).

    A server that holds a permuted head tells tokens apart by their sorted embeddings. Tokens that are equal there stay
    mixed up.

    Args:
        models: further models, separated by commas.
    """
    names = [setting.model, *(name for name in models.split(",") if name)]
    return Experiment(
        "Embeddings that are equal once sorted",
        [Cell("unique-rows", {"model": name}, {"model": name}) for name in names],
        {
            "rows": "tokens", "equal": "equal to another", "equal_sorted": "equal once sorted",
            "equal_only_sorted": "equal only once sorted",
        },
        [
            "The paper finds no equal rows in Gemma, Llama and Mistral models. Exactly equal numbers are counted. "
            "Tokens that training never touched may share one embedding; they are equal as they are.",
        ],
    )  # fmt: skip
