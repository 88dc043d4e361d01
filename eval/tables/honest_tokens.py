"""Define experiments on what honest servers send: where answers fork, scores of tokens, and what a warden's τ calls."""

from hiddenlab.defenses.verification.difr import IPT_SIGMA
from hiddenlab.defenses.verification.provider import BATCH
from hiddenlab.errors import InputError
from hiddenlab.eval.cells import Cell, Experiment, Setting
from hiddenlab.eval.measures.adversaries import SAMPLES
from hiddenlab.eval.measures.honest_tokens import ALL, LAST, MEDIAN, OPEN, PLACES
from hiddenlab.eval.tables.exfiltration import SIGMAS, THRESHOLDS, numbers, warden_spec
from hiddenlab.eval.tables.verification import base, listed, pool_of, size_note
from hiddenlab.report.tables import Scale

SERVERS = "honest;batch=1;batch=3;attention=eager;dtype=float32"
MANY: tuple[Scale, Scale] = ("linear", "log")  # a histogram's rare values are the ones that matter
TOKENS = {"score": "score, as −log", "rank": "rank by score", "logit_rank": "rank by logit"}
POSITIONS = {MEDIAN: "median position", OPEN: "most open position"}
POSITION_NOTE = (
    "Of all positions of the honest answers, the median one and the most open one are those where the entropy of the "
    "sampler's distribution is the median, and the largest."
)


def fork_factors(
    setting: Setting,
    servers: str = SERVERS,
    methods: str = "gumbel;greedy",
    turns: int = 1,
    new_tokens: int = 60,
) -> Experiment:
    """Count how often honest servers that compute differently part ways from one prompt and one seed.

    Exfiltration paper, figure 2, which asks a closed model 1,000 times.

    Args:
        servers: variants joined by ``;``, such as batch=1, attention=eager, dtype=float32 or threads=2.
        methods: of sampling, joined by ``;``: gumbel, ipt, greedy.
    """
    pool = pool_of(servers)
    if len(pool) < 2:
        raise InputError("servers differ only where there are several: join variants by ;")
    first, *others = pool
    groups = {f"all {len(pool)}": pool, **{f"{first}, {other}": (first, other) for other in others}}
    specs = {method: base(setting, new_tokens, turns, method) for method in listed(methods)}
    if not specs:
        raise InputError("methods are gumbel, ipt or greedy, joined by ;")
    spec = next(iter(specs.values()))
    cells = [
        Cell("honest-forks", {**own, "servers": list(group)}, {"sampling": method, "servers": name})
        for method, own in specs.items()
        for name, group in groups.items()
    ]
    return Experiment(
        "Where honest servers' answers to one prompt and seed fork",
        cells,
        {
            "forks": "prefixes that fork", "agreed": "tokens before the first fork", "answers": "distinct answers",
            "prefixes": "prefixes", **{f"children_{k}": f"{k} next" for k in range(1, len(pool) + 1)},
        },
        [
            f"Servers: {', '.join(pool)}. They are given the same prompt, seed and sampling, and differ by rounding "
            f"alone; where nothing else is said, they compute in {spec['dtype']}, up to {BATCH} requests at once. A "
            "request's answers are joined in a prefix tree: 'K next' is the share of its prefixes that K different "
            "tokens follow, a mean over requests.",
            f"{size_note(spec)} Sampling: temperature 1, top-k 50, top-p 0.95; greedy without "
            "them.",
            "The paper's figure 2 is of 20,000 answers of GPT-4o-mini to one prompt at temperature 0.7, joined by "
            "words. These are of a few servers whose differences are known.",
        ],
        curves="next tokens of a prefix; share of prefixes",
        scales=MANY,
    )  # fmt: skip


def score_distributions(
    setting: Setting, sigmas: str = SIGMAS, turns: int = 1, new_tokens: int = 60
) -> Experiment:
    """Count scores, ranks of scores and logit ranks of honest tokens, and scores of all tokens at one position.

    Exfiltration paper, figures 9, 11 and 12.

    Args:
        sigmas: of the score's noise, joined by commas.
    """
    spec = {**base(setting, new_tokens, turns), "variant": "honest", "sampler": "gumbel"}
    deviations = _deviations(sigmas)
    # A logit rank is of no σ; any cell's will do.
    cells = [
        Cell(
            "honest-scores", {**spec, "noise_sd": sd, "shown": shown},
            {"of honest tokens": label, "noise": "any" if shown == "logit_rank" else f"σ = {sd:g}"},
        )
        for shown, label in TOKENS.items()
        for sd in (deviations[:1] if shown == "logit_rank" else deviations)
    ] + [
        Cell(
            "honest-scores", {**spec, "noise_sd": sd, "shown": shown},
            {"of honest tokens": f"scores of all tokens, {label}", "noise": f"σ = {sd:g}"},
        )
        for shown, label in POSITIONS.items()
        for sd in deviations
    ]  # fmt: skip
    return Experiment(
        "Scores and ranks of honest tokens",
        cells,
        {f"at_{k}": f"{k}" if k < LAST else f"{k} and more" for k in range(LAST + 1)},
        [
            f"{size_note(spec)} Generated in batches in {spec['dtype']}, replayed alone. Sampling: temperature 1, "
            "top-k 50, top-p 0.95.",
            f"Scores are FSSL-GM (Algorithm 4) with {SAMPLES} draws, as natural logarithms without their sign, rounded "
            "down: 0 is a token that the seed makes likely. Ranks count from 0, as in the paper's figure 9; among "
            "equal scores a token comes last. Shares of tokens, with Wilson's intervals.",
            f"{POSITION_NOTE} Rows of these count all tokens of the vocabulary at this position.",
            "The paper has 500 answers of up to 500 tokens of Qwen3-30B-A3B, and shows σ = 1.",
        ],
        curves=f"−log of the score, or rank from 0 ({LAST}: and more); share of tokens",
        scales=MANY,
    )


def posterior(
    setting: Setting,
    sigmas: str = "0.1,1",
    ipt_sigma: float = IPT_SIGMA,
    turns: int = 1,
    new_tokens: int = 60,
) -> Experiment:
    """Show which tokens honest noise leaves once the seed is fixed, under both ways of sampling.

    Exfiltration paper, figure 5.

    Args:
        sigmas: of the noise on logits (Gumbel-max), joined by commas.
        ipt_sigma: of the noise on cumulative probabilities (inverse probability transform).
    """
    spec = {**base(setting, new_tokens, turns), "variant": "honest"}
    if not 0 < ipt_sigma < 1:
        raise InputError("ipt_sigma is above 0 and below 1: a standard deviation of a probability")
    distributions = {
        "no seed": ("none", 0.0),
        **{f"Gumbel-max, σ = {sd:g}": ("gumbel", sd) for sd in _deviations(sigmas)},
        f"inverse transform, σ = {ipt_sigma:g}": ("ipt", ipt_sigma),
    }
    cells = [
        Cell(
            "honest-posterior",
            {**spec, "sampler": sampler, "noise_sd": sd, "shown": shown},
            {"position": label, "distribution": name},
        )
        for shown, label in {**POSITIONS, ALL: "mean of all positions"}.items()
        for name, (sampler, sd) in distributions.items()
    ]
    return Experiment(
        "Tokens that honest noise leaves under a fixed seed",
        cells,
        {**{f"place_{k}": f"token {k}" for k in range(1, PLACES + 1)}, "others": "all others"},
        [
            f"{size_note(spec)} Sampling: temperature 1, top-k 50, top-p 0.95. 'No seed' is the distribution that the "
            "sampler draws from. The others say what it would draw from the same logits with the request's seed, if "
            "honest noise of σ were added: Algorithm 4 of all tokens, and Algorithm 3, as shares of their sum. The "
            "numbers of the inverse transform are those of the same seed.",
            f"{POSITION_NOTE} There, tokens are by falling logit; in the mean of all, each position's by falling "
            f"share. Where a seed picks a token beyond the first {PLACES}, the share is that of all others.",
        ],
        curves="token, by falling logit or share; share",
    )


def thresholds(
    setting: Setting,
    requests: int = 40,
    turns: int = 2,
    new_tokens: int = 100,
    sigmas: str = SIGMAS,
    thresholds: str = THRESHOLDS,
) -> Experiment:
    """Measure false positives and extractable information by the threshold on scores, one curve per σ.

    Exfiltration paper, figure 13; false positives are the distribution function of figure 12.

    Args:
        requests: honest answers.
        sigmas, thresholds: see ``exfiltration-pareto``; there are no ranks.
    """
    spec = warden_spec(setting, requests, 1.0, turns, new_tokens, (sigmas, thresholds, "0"), 1.0)
    cells = [
        Cell(
            "exfiltration-thresholds",
            {**spec, "noise_sd": sd, "shown": shown},
            {"shown": label, "noise": f"σ = {sd:g}"},
        )
        for shown, label in (
            ("false_positives", "honest tokens below the threshold"),
            ("safe_bits", "bits a token, of the vocabulary's"),
        )
        for sd in spec["noise_sds"]
    ]
    return Experiment(
        "False positives and extractable information by threshold",
        cells,
        {f"at_{threshold:g}": f"log τ = {threshold:g}" for threshold in spec["thresholds"]},
        [
            f"{requests} honest answers of {new_tokens} tokens, generated in batches, replayed alone. "
            f"{size_note(spec)}",
            "Bits: log₂ of the number of tokens that score at least τ, a mean over positions, as a share of log₂ of "
            "the vocabulary (the paper's appendix G.3). Intervals: of tokens over tokens (Wilson), of bits over "
            "answers.",
        ],
        curves="log τ; share",
        scales=MANY,
    )


def _deviations(text: str) -> list[float]:
    """Read σ, joined by commas."""
    found = numbers("sigmas", text, float)
    if min(found) <= 0:
        raise InputError("sigmas are above 0")
    return found
