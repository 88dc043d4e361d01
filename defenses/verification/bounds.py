"""Compute bounds on what a compromised server can smuggle out, and on how much has to be inspected.

Source of every statement: Rinberg et al. 2025, "Verifying LLM Inference to Detect Model Weight Exfiltration". All
information is in bits. Where the paper's printed statement and its proof disagree, both values are computed here and
the docstring says why.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum

from scipy.special import betainc

from hiddenlab.errors import InputError

_LARGEST = 2**53  # beyond it, doubles skip whole numbers


class Risk(IntEnum):
    """The classes of a token (Algorithm 7), with their numbers."""

    SAFE = 0
    SUSPICIOUS = 1
    DANGEROUS = 2


# ---- information theory


def entropy(p: float) -> float:
    """Return the binary entropy h(p) in bits.

    Raises:
        InputError: p is no probability.
    """
    _probability("p", p)
    return -sum(x * math.log2(x) for x in (p, 1 - p) if x > 0)


def divergence(p: float, q: float) -> float:
    """Return the Kullback-Leibler divergence of Bernoulli(p) from Bernoulli(q) in nats; infinite where q excludes p.

    Raises:
        InputError: p or q is no probability.
    """
    _probability("p", p)
    _probability("q", q)
    total = 0.0
    for x, y in ((p, q), (1 - p, 1 - q)):
        if x > 0:
            total += x * math.log(x / y) if y > 0 else math.inf
    return max(0.0, total)


def symmetric_capacity(symbols: int, error: float) -> float:
    """Return the capacity, in bits per use, of a symmetric channel that errs with probability `error` (Theorem 2.4).

    log q − h(e) − e·log(q−1): each of the other symbols is equally likely in an error. The paper calls its argument the
    probability that the symbol is "uniformly random". The formula holds for the probability that it is *wrong*; a
    random symbol is right once in q times.

    Raises:
        InputError: there are no symbols, or the error is no probability.
    """
    _whole("symbols", symbols, 1)
    _probability("error", error)
    if symbols == 1:
        return 0.0
    return max(0.0, math.log2(symbols) - entropy(error) - error * math.log2(symbols - 1))


def uses_needed(bits: float, capacity: float, error: float = 0.0) -> float:
    """Return the least number of uses of a channel that sends `bits` with at most that probability of a wrong message.

    Theorem 2.4 (Fano): n ≥ (log q − h(ε) − ε·log(q−1)) / C with log q = bits; infinite for a capacity of 0.

    Raises:
        InputError: negative bits or capacity, or an error that is no probability.
    """
    _amount("bits", bits)
    _amount("capacity", capacity)
    _probability("error", error)
    # log(q − 1) without q itself, which no double can hold when the message is a model's weights.
    others = bits + math.log1p(-(2.0**-bits)) / math.log(2) if bits > 1 else 0.0
    needed = max(0.0, bits - entropy(error) - error * others)
    if needed == 0:
        return 0.0
    return needed / capacity if capacity > 0 else math.inf


# ---- rates of an adversary who is not caught


def support_rate(sizes: Sequence[int]) -> float:
    """Return the bits per token that tokens from the warden's admissible sets can carry: the mean of log₂|A_t|.

    Theorem 4.1 as section 6 applies it; |A_t| is the number of admissible tokens at position t. It holds for a receiver
    who knows the seed. A position without admissible tokens carries nothing.

    Raises:
        InputError: no positions, or a negative size.
    """
    if not sizes:
        raise InputError("a rate needs the admissible sets of at least one token")
    for size in sizes:
        _whole("size of an admissible set", size, 0)
    return math.fsum(math.log2(size) for size in sizes if size > 1) / len(sizes)


def response_rate(log2_support: float, tokens: int, rate: float) -> float:
    """Return the bits per token of responses that an FSSL policy with limit `rate` lets pass (Theorem 4.1).

    min(log₂|Supp| / tokens, rate). `log2_support` counts the responses whose surprisal is at most `rate` bits per
    token. There are at most 2^(rate·tokens) of them, as their probabilities sum to at most 1.

    Raises:
        InputError: no tokens, or a negative amount.
    """
    _amount("log2_support", log2_support)
    _amount("rate", rate)
    _whole("tokens", tokens, 1)
    return min(log2_support / tokens, rate)


def hidden_seed_rate_printed(free: float, permitted: int) -> float:
    """Return the rate of Theorem 4.2 as printed: log q − h(1−p) − (1−p)·log(q−1), at least 0.

    It is kept for comparison only and is no bound. It takes 1−p for the channel's error, although a token over which
    the sender has no control still is the wanted one with probability 1/q. At p = 0, q = 2 it allows 1 bit per token,
    where nothing can be sent. At p = 0.5, q = 4 it forbids what its own channel carries (0.45 bits, not 0.21).

    Args:
        free: p, the share of positions at which more than one token is permitted.
        permitted: q, the number of tokens that are permitted there.

    Raises:
        InputError: p is no probability, or q is below 2.
    """
    _free(free, permitted)
    return symmetric_capacity(permitted, 1 - free)


def hidden_seed_rate(free: float, permitted: int) -> float:
    """Return the corrected rate of Theorem 4.2: log q − h(e) − e·log(q−1) with e = (1−p)(q−1)/q.

    The error e is that of the proof's channel, which gives the sender's symbol with probability p and else a uniform
    one of q. It needs the theorem's assumptions: a receiver without the seed, and a sender who commits to each token
    before the next random number exists. A sender who knows in advance which positions are free reaches p·log q (memory
    with known defects), which is what `searching_rate` allows. The theorem also assumes that forced and free tokens
    look alike; a receiver who can tell them apart is bounded by p·log q only.

    Args and Raises: see `hidden_seed_rate_printed`.
    """
    _free(free, permitted)
    return symmetric_capacity(permitted, (1 - free) * (permitted - 1) / permitted)


def searching_rate(free: float, slack: float, permitted: int) -> float:
    """Return the rate of Theorem 4.3: (p + ε)·log q bits per token, for an adversary who searches O(k) continuations.

    Continuations have k tokens. `searching_risk` bounds the probability that a number of queries finds more free
    positions than p + ε.

    Raises:
        InputError: p or ε is no probability, or q is below 2.
    """
    _free(free, permitted)
    _probability("slack", slack)
    return min(1.0, free + slack) * math.log2(permitted)


def searching_risk(free: float, wanted: float, tokens: int, queries: int) -> float:
    """Bound the probability that some queried response of k tokens has p'·k free positions (Lemma 4.4).

    N·exp(−k·D(p'‖p)), a union bound over N queries with Chernoff's bound; 1 where that is vacuous, as for p' ≤ p.

    Raises:
        InputError: p or p' is no probability, or there is less than one token or query.
    """
    _probability("free", free)
    _probability("wanted", wanted)
    _whole("tokens", tokens, 1)
    _whole("queries", queries, 1)
    if wanted <= free:
        return 1.0
    exponent = math.log(queries) - tokens * divergence(wanted, free)
    return min(1.0, math.exp(min(0.0, exponent)))


# ---- the game and what has to be inspected


def game_bound(
    bits: float, capacity: float, messages: int, inspections: int, alarms: int, false_positive_rate: float
) -> float:
    """Bound the probability that any adversary wins the exfiltration game (end of section 4.6); at most 1.

    (M − B_I)/M + 2^(C−n) + exp(−B_I·D(B_A/B_I ‖ α)): the decisive message is not inspected, or the rest is guessed, or
    false alarms use up the budget. `capacity` C is log₂M plus what all messages can carry unflagged; the warden is
    assumed to flag every message that carries more. The last term needs α < B_A/B_I and counts as 1 without it.

    Args:
        bits: n, length of the secret.
        capacity: C.
        messages: M.
        inspections: B_I, at most M.
        alarms: B_A, at most B_I.
        false_positive_rate: α, of an inspected honest message.

    Raises:
        InputError: an amount is below 0, there are no messages, or a budget is too large.
    """
    _amount("bits", bits)
    _amount("capacity", capacity)
    _probability("false_positive_rate", false_positive_rate)
    _whole("messages", messages, 1)
    _whole("inspections", inspections, 0)
    _whole("alarms", alarms, 0)
    if inspections > messages or alarms > inspections:
        raise InputError(
            f"{alarms} alarms, {inspections} inspections, {messages} messages: each at most the next"
        )
    missed = (messages - inspections) / messages
    guessed = 2.0 ** min(0.0, capacity - bits)
    spent = 1.0
    if inspections and false_positive_rate < alarms / inspections:
        spent = math.exp(-inspections * divergence(alarms / inspections, false_positive_rate))
    return min(1.0, missed + guessed + spent)


def required_samples(share: float, confidence: float, needed: int = 1) -> int:
    """Return the fewest draws that hold `needed` malicious messages with that confidence (appendix C.2).

    The least n with P(Bin(n, share) ≥ needed) ≥ confidence, exactly, by bisection. The paper prints 460 for 1 %, 99 %
    and one message; 459 suffice.

    Raises:
        InputError: a share or confidence is outside (0, 1], needed is below 1, or more than 2⁵³ draws are needed.
    """
    for name, value in (("share", share), ("confidence", confidence)):
        _probability(name, value)
        if value == 0:
            raise InputError(f"{name} 0: must be above 0")
    _whole("needed", needed, 1)
    if share == 1:
        return needed
    if confidence == 1:
        raise InputError(
            "no number of draws is certain to hold a malicious message: a confidence below 1, please"
        )
    high = needed
    while _at_least(needed, high, share) < confidence:
        high *= 2
        if high > _LARGEST:
            raise InputError(f"more than 2^53 draws for a share of {share}")
    low = max(needed, high // 2)
    while low < high:
        middle = (low + high) // 2
        if _at_least(needed, middle, share) >= confidence:
            high = middle
        else:
            low = middle + 1
    return low


def _at_least(needed: int, draws: int, share: float) -> float:
    """Return P(Bin(draws, share) ≥ needed) as an incomplete beta function.

    scipy's binomial tail stops at 32-bit draws.
    """
    return float(betainc(needed, draws - needed + 1, share))


# ---- three classes


def extractable(risk: Risk, admissible: int, rank_cutoff: int, vocabulary: int) -> float:
    """Return the bits that one token of a class can carry: log₂ of |A|, of R, or of the vocabulary (section 6.1).

    Raises:
        InputError: the count that the class needs is below 1.
    """
    counts = {Risk.SAFE: admissible, Risk.SUSPICIOUS: rank_cutoff, Risk.DANGEROUS: vocabulary}
    _whole(f"number of tokens that a {risk.name.lower()} one may be", counts[risk], 1)
    return math.log2(counts[risk])


def slowdown(bits_per_token: float, vocabulary: int) -> float:
    """Return how many times longer an exfiltration takes than with free choice of all tokens; infinite at 0 bits.

    Raises:
        InputError: negative bits, or a vocabulary below 2.
    """
    _amount("bits_per_token", bits_per_token)
    _whole("vocabulary", vocabulary, 2)
    return math.log2(vocabulary) / bits_per_token if bits_per_token else math.inf


# ---- what may be asked


def _probability(name: str, value: float) -> None:
    if not 0 <= value <= 1:  # NaN too
        raise InputError(f"{name} {value}: must lie between 0 and 1")


def _amount(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise InputError(f"{name} {value}: must be a finite number from 0")


def _whole(name: str, value: int, least: int) -> None:
    if not least <= value <= _LARGEST:
        shown = value if abs(value) <= _LARGEST else "that large"
        raise InputError(f"{name} {shown}: must be a whole number from {least}, at most 2^53")


def _free(free: float, permitted: int) -> None:
    _probability("free", free)
    _whole("permitted", permitted, 2)
