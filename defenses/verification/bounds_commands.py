"""Evaluate what the exfiltration paper proves, in numbers: ``hiddenlab verify bounds`` and ``sampling-rate``."""

import math
from collections.abc import Sequence
from typing import Any

from hiddenlab.defenses.verification import bounds as theory
from hiddenlab.defenses.verification.command import FORMAT, Made
from hiddenlab.errors import InputError
from hiddenlab.text import count_of
from hiddenlab.types import Progress, silent

MOST = 2**53  # tokens or queries that a double can count
LEAST_SHARE = 1e-9  # smallest of the shares listed around the one asked for


def bounds(
    *, free: float, permitted: int, slack: float = 0.01, messages: int = 10_000, inspections: int = 1000,
    alarms: int = 20, false_positives: float = 0.01, capacity: float = 100.0, bits: float = 120.0,
    tokens: int = 1000, queries: int = 1_000_000, error: float = 0.01, rate: float | None = None,
    progress: Progress = silent,
) -> Made:  # fmt: skip
    """Evaluate the exfiltration theorems (Rinberg et al. 2025) in numbers.

    Args:
        free: p, share of positions with more than one permitted token.
        permitted: q, number of permitted tokens there.
        slack: ε of Theorem 4.3.
        tokens, queries: k and N of Lemma 4.4, the length of an answer and how many the adversary searches.
        error: of Theorem 2.4, the largest share of messages that arrive wrong.
        rate: of Theorem 4.1, the most bits per token that the warden's policy lets pass; default: no limit.
        messages, inspections, alarms, false_positives, capacity, bits: M, B_I, B_A, α, C and n of the game.
    """
    if not 1 <= max(tokens, queries) <= MOST:
        raise InputError(f"{count_of(tokens, 'token')}, {queries} queries: up to {MOST:,} each")
    corrected, most = theory.hidden_seed_rate(free, permitted), free * math.log2(permitted)
    return {
        "format": FORMAT,
        "theorem_2_4_tokens": theory.uses_needed(bits, corrected, error),
        "theorem_4_1": theory.response_rate(tokens * most, tokens, most if rate is None else rate),
        "theorem_4_2_printed": theory.hidden_seed_rate_printed(free, permitted),
        "theorem_4_2_corrected": corrected,
        "theorem_4_3": theory.searching_rate(free, slack, permitted),
        "lemma_4_4": theory.searching_risk(free, min(1.0, free + slack), tokens, queries),
        "game": theory.game_bound(bits, capacity, messages, inspections, alarms, false_positives),
    }


def sampling_rate(
    *,
    share: float,
    confidence: float = 0.99,
    needed: int = 1,
    levels: Sequence[float] = (),
    traffic: int | None = None,
    progress: Progress = silent,
) -> Made:
    """Return how many messages have to be verified to find so many dishonest ones (exfiltration paper, appendix C.2).

    ``shares`` holds the same for shares around the one asked for, by factors of two, and for each confidence of
    ``levels`` (figure 4): messages, or percent of ``traffic`` messages where that is given; None: more than there are.
    """

    def inspected(dishonest: float, level: float) -> int | float | None:
        drawn = theory.required_samples(dishonest, level, needed)
        return drawn if traffic is None else 100 * drawn / traffic if drawn <= traffic else None

    wanted = [share * 2.0**step for step in range(-4, 5)]
    unit = "messages" if traffic is None else "percent"
    rows: list[dict[str, Any]] = [
        {
            "share": dishonest,
            "messages": theory.required_samples(dishonest, confidence, needed),
            **{f"{unit}_at_{level:g}": inspected(dishonest, level) for level in levels},
        }
        for dishonest in wanted
        if LEAST_SHARE <= dishonest <= 1
    ]
    return {
        "format": FORMAT, "messages": theory.required_samples(share, confidence, needed), "shares": rows
    }  # fmt: skip
