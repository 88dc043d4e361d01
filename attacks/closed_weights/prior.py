"""Name symbols with a language model's predictions at every place where they occur (appendix I.3).

Neighbour statistics compare how a kind is used overall, which says little about a symbol that was seen five times. Here
every occurrence counts by itself. For each symbol and candidate token these log-probabilities are added:

- of the token behind the text to its left in the request, as named now, by a public language model,
- of the neighbours beside the token, by pairs in the attacker's own text,
- of how often the token is seen, by its frequency.

Symbols and tokens are assigned one to one again, and the next round reads the requests with the new names. Wrong names
in a context mislead, and can support each other: the language model alone drives requests to one repeated phrase. Its
predictions are therefore mixed with the plain frequency, by the confidence in the names of the last tokens.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from hiddenlab.attacks.closed_weights.substitution import assign
from hiddenlab.errors import InputError
from hiddenlab.models import Request, TruncatedModel
from hiddenlab.types import Progress, silent

Numbers = NDArray[np.int64]
Shares = NDArray[np.float64]

PASS_REQUESTS = 50
EACH = 20  # occurrences of a symbol after which its requests are read last
RECENT = (0.5, 0.3, 0.2)  # weights of the last name, the one before … in a context's confidence
TRUST = (0.03, 0.9)  # least and most share of the language model in a token's probability
# Occurrences are not independent: without it confidence is too high (docs/log/009-verification-and-leaks.md).
TEMPERATURE = 3.0
STEP = 0.5  # share of a round's change that is applied: otherwise two names could swap forever
SMOOTHING = 20.0  # pseudo-count of pairs for each token, spread by frequency
LEFT_PAIRS = 0.5  # weight of left neighbours, which the language model has read already


@dataclass(frozen=True)
class _Texts:
    """Texts with their kinds numbered, most frequent first.

    Attributes:
        kinds: what the numbers stand for. rows: the numbers by text. counts: of each. pairs: how often number j stands
            right behind number i (sparse).
    """

    kinds: tuple[int, ...]
    rows: tuple[Numbers, ...]
    counts: Shares
    pairs: Any

    @classmethod
    def of(cls, texts: Sequence[Sequence[int]]) -> "_Texts":
        from scipy.sparse import coo_array

        counts = Counter(kind for text in texts for kind in text)
        kinds = tuple(kind for kind, _ in counts.most_common())
        place = {kind: i for i, kind in enumerate(kinds)}
        rows = tuple(np.array([place[kind] for kind in text], dtype=np.int64) for text in texts)
        follow = Counter(pair for row in rows for pair in pairwise(row.tolist()))
        where = np.array(list(follow), dtype=np.int64).reshape(-1, 2).T
        values = np.array(list(follow.values()), dtype=np.float32)
        pairs = coo_array((values, (where[0], where[1])), shape=(len(kinds), len(kinds))).tocsr()
        return cls(kinds, rows, np.array([counts[kind] for kind in kinds], dtype=float), pairs)


def refine(
    cipher: Sequence[Sequence[int]],
    reference: Sequence[Sequence[int]],
    named: dict[int, int],
    language_model: TruncatedModel,
    *,
    seeds: dict[int, int] | None = None,
    rounds: int = 4,
    requests: int = 1000,
    progress: Progress = silent,
) -> dict[int, int]:
    """Name symbols again, and those that have no name yet, with a public language model.

    Args:
        cipher: symbols by request. reference: tokens of the attacker's own texts; its kinds are the candidates.
        named: symbols named so far, one to one (see ``solve``). language_model: with the stream ``logits``.
        seeds: known names, by symbol. rounds: of reading and naming. requests: read by the language model each round.

    Returns:
        Symbol to token, one to one; where there are more symbols than candidates, those that fit worst have no name.

    Raises:
        InputError: the language model gives no logits, or does not know the tokens.
    """
    if language_model.site.stream != "logits":
        raise InputError(f"the prior needs a language model's logits, not {language_model.site}")
    symbols, tokens = _Texts.of(cipher), _Texts.of(reference)
    if not symbols.kinds or not tokens.kinds:
        return dict(named)
    if max(tokens.kinds) >= language_model.vocab_size:
        raise InputError(f"the texts have tokens that {language_model.ref.name} does not know")
    fixed = _numbered(symbols, tokens, seeds or {})
    match = _completed(symbols, tokens, {**named, **(seeds or {})})
    statistics = _Statistics(symbols, tokens)
    sure = _sureness(statistics.scores(match, np.full(len(match), 0.5)), match)
    scores: Shares | None = None
    for step in range(rounds):
        chosen = _chosen(symbols.rows, sure, requests)
        fresh = statistics.scores(match, sure)
        fresh += _read(language_model, symbols, tokens, chosen, match, sure, progress)
        scores = fresh if scores is None else scores + STEP * (fresh - scores)
        progress("rounds of the prior", step + 1, rounds)
        match = assign(scores, fixed)
        sure = _sureness(scores, match)
    return {symbols.kinds[i]: tokens.kinds[j] for i, j in enumerate(match.tolist()) if j >= 0}


def _numbered(symbols: _Texts, tokens: _Texts, names: dict[int, int]) -> dict[int, int]:
    """Return the names as numbers of both texts, as far as the texts contain them."""
    place = {kind: j for j, kind in enumerate(tokens.kinds)}
    return {
        i: place[names[kind]]
        for i, kind in enumerate(symbols.kinds)
        if kind in names and names[kind] in place
    }


def _completed(symbols: _Texts, tokens: _Texts, named: dict[int, int]) -> Numbers:
    """Return a token for each symbol; those without a name get the free tokens, in the order of frequency."""
    match = np.full(len(symbols.kinds), -1)
    for i, j in _numbered(symbols, tokens, named).items():
        match[i] = j
    free = np.setdiff1d(np.arange(len(tokens.kinds)), match)
    without = np.flatnonzero(match < 0)[: len(free)]
    match[without] = free[: len(without)]
    return match


class _Statistics:
    """Log-likelihoods of each symbol and token by frequencies and pairs of the attacker's own text."""

    def __init__(self, symbols: _Texts, tokens: _Texts) -> None:
        self.symbols = symbols
        self.shares = tokens.counts / tokens.counts.sum()
        # Occurrences as a Poisson process (a frequent token is unlikely to be seen so seldom), beside one of an unknown
        # token just as frequent as the symbol: where candidates do not suffice, who has the least to gain gets none.
        expected, counts = symbols.counts.sum() * self.shares, symbols.counts[:, None]
        self.often = counts * np.log(expected / counts) - expected + counts
        self.right, self.left = (_ratios(pairs, self.shares) for pairs in (tokens.pairs, tokens.pairs.T))

    def scores(self, match: Numbers, sure: Shares) -> Shares:
        """Return log-likelihoods, symbol by token, with neighbours as they are named now, weighted by confidence."""
        scores: Shares = self.often.copy()
        pairs = self.symbols.pairs
        for weight, follow, ratios in ((1.0, pairs, self.right), (LEFT_PAIRS, pairs.T, self.left)):
            trust = np.where(match < 0, 0.0, sure)[:, None].astype(np.float32)
            log_ratios = np.log1p(trust * (ratios.T[match] - 1))
            scores += weight * (follow @ log_ratios)
        return scores


def _ratios(pairs: Any, shares: Shares) -> NDArray[np.float32]:
    """Return how many times more often than elsewhere a neighbour (column) stands beside a token (row)."""
    total = np.asarray(pairs.sum(axis=1)).reshape(-1, 1)
    seen = pairs.toarray() / (total + SMOOTHING) / shares
    ratios: NDArray[np.float32] = (seen + SMOOTHING / (total + SMOOTHING)).astype(np.float32)
    return ratios


def _sureness(scores: Shares, match: Numbers) -> Shares:
    """Return the tempered probability of each symbol's name among all candidates."""
    names = np.maximum(match, 0)[:, None]
    best = scores.max(axis=1, keepdims=True)
    weights = np.exp((scores - best) / TEMPERATURE)
    own = np.take_along_axis(weights, names, 1)[:, 0] / weights.sum(axis=1)
    return np.where(match < 0, 0.0, own)


def _chosen(rows: Sequence[Numbers], sure: Shares, most: int) -> list[int]:
    """Return the requests to read: the most confident first, those of symbols already read often last."""
    met = np.zeros(len(sure))
    first: list[int] = []
    later: list[int] = []
    for i in np.argsort(
        [-float(sure[row].mean()) if len(row) else 0.0 for row in rows], kind="stable"
    ).tolist():
        new = bool((met[rows[i]] < EACH).any())
        (first if new else later).append(i)
        if new:
            np.add.at(met, rows[i], 1)
    return [i for i in first + later if len(rows[i]) > 1][:most]


def _read(
    language_model: TruncatedModel,
    symbols: _Texts,
    tokens: _Texts,
    chosen: Sequence[int],
    match: Numbers,
    sure: Shares,
    progress: Progress,
) -> Shares:
    """Sum, over a symbol's places, how much more probable each token is than by frequency, in logarithms."""
    device = language_model.device
    candidates = torch.tensor(tokens.kinds, device=device)
    usual = torch.from_numpy(tokens.counts / tokens.counts.sum()).float().log()
    totals = torch.zeros(len(symbols.kinds), len(tokens.kinds))
    for at in range(0, len(chosen), PASS_REQUESTS):
        rows = [symbols.rows[i] for i in chosen[at : at + PASS_REQUESTS]]
        named = [torch.from_numpy(np.maximum(match[row[:-1]], 0)).to(device) for row in rows]
        passes = [Request(language_model.prefix(), candidates[ids]) for ids in named]
        for row, answer in zip(rows, language_model.run(passes, keep=False), strict=True):
            likely = answer.states.float().log_softmax(1)[:, candidates].cpu()
            totals.index_add_(0, torch.from_numpy(row[1:]), _mixed(likely - usual, sure[row[:-1]]))
        progress("requests read", min(at + PASS_REQUESTS, len(chosen)), len(chosen))
    return totals.double().numpy()


def _mixed(ratios: Float[Tensor, "n c"], sure: Shares) -> Float[Tensor, "n c"]:
    """Return log ratios to the frequency, after a mixture with it by the confidence in the last tokens."""
    weights = np.array(RECENT[: len(sure)])
    reach = np.convolve(np.ones_like(sure), weights)[: len(sure)]
    context = np.convolve(sure, weights)[: len(sure)] / reach
    trust = torch.from_numpy(np.clip(TRUST[1] * context, *TRUST)).float()[:, None]
    return torch.logaddexp(torch.log1p(-trust), trust.log() + ratios)
