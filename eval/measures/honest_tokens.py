"""Measure what honest servers send: where their answers part, how likely their tokens are, and what else was likely."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.defenses.verification.causal_lm import load_whole
from hiddenlab.defenses.verification.closed_form import FLOOR, fssl_ipt, logit_rank
from hiddenlab.defenses.verification.difr import Replay, Verifier, draws
from hiddenlab.defenses.verification.likelihood import GumbelPositions, gumbel_positions
from hiddenlab.defenses.verification.sampling import Sampling, StreamNoise, probabilities
from hiddenlab.errors import InputError
from hiddenlab.eval.cells import Figures
from hiddenlab.eval.measures.adversaries import SAMPLES
from hiddenlab.eval.measures.answers import answered
from hiddenlab.eval.measures.attack import as_figures, exactly
from hiddenlab.eval.measures.intervals import mean, share
from hiddenlab.eval.measures.warden import ANSWERS, narrowed, stored
from hiddenlab.types import Progress, silent

LAST = 20  # place of a histogram that holds all further values
PLACES = 10  # tokens of a posterior that are shown
MEDIAN, OPEN, ALL = "median", "most open", "all"  # positions, by the entropy of the sampler's distribution


# ---- answers of several servers


def next_tokens(answers: Iterable[Sequence[int]]) -> dict[tuple[int, ...], set[int]]:
    """Join answers in a prefix tree: return every prefix that goes on, with the distinct tokens that follow it.

    The number of these tokens is the prefix's fork factor (Rinberg et al. 2025, section 2.3).
    """
    tree: dict[tuple[int, ...], set[int]] = defaultdict(set)
    for answer in answers:
        for place, token in enumerate(answer):
            tree[tuple(answer[:place])].add(token)
    return dict(tree)


def forks(spec: dict[str, Any], folder: Path, progress: Progress = silent) -> Figures:
    """Measure where the answers of honest servers to the same request and seed part (figure 2).

    Args:
        spec: as ``answers.answered``; servers: variants.

    Returns:
        ``forks``, the share of prefixes after which servers differ; ``answers``, distinct ones a request; ``agreed``,
        tokens before a request's first fork; and ``children_K``, the share of prefixes with K next tokens.
    """
    home = folder.parent.parent
    outputs = [
        [one.output for one in answered({**spec, "variant": server}, home, progress).transcripts]
        for server in spec["servers"]
    ]
    requests = list(zip(*outputs, strict=True))
    factors, agreed = [], []
    for answers in requests:
        tree = next_tokens(answers)
        factors.append(Counter(map(len, tree.values())))
        agreed.append(min((len(p) for p, tokens in tree.items() if len(tokens) > 1), default=len(answers[0])))
    counts = {
        f"children_{k}": [row[k] / row.total() for row in factors]
        for k in range(1, 1 + max(map(max, factors)))
    }
    estimates = {name: mean(values) for name, values in counts.items()}
    estimates |= {
        "forks": mean([1 - value for value in counts["children_1"]]),
        "answers": mean([len(set(answers)) for answers in requests]),
        "agreed": mean(agreed),
    }
    return as_figures(estimates) | {
        "prefixes": exactly(float(sum(row.total() for row in factors)), len(requests))
    }


# ---- scores of tokens


def all_scores(positions: GumbelPositions) -> Float[Tensor, "n v"]:
    """Return the log-likelihood of every token at every position."""
    n, width = positions.logits.shape
    rows = torch.arange(n).repeat_interleave(width)
    return positions.pairs(rows, torch.arange(width).repeat(n)).view(n, width)


def score_rank(scores: Float[Tensor, "n v"], own: Float[Tensor, " n"], missing: int = 0) -> Int[Tensor, " n"]:
    """Return the rank of each position's own token by score, from 1; among equal scores it comes last.

    The paper finds such tokens "tied for last place" (section 6.1).

    Args:
        scores: of all tokens but ``missing`` ones, which cannot be drawn.
        own: score of the claimed token.
    """
    return (scores >= own[:, None]).sum(1) + torch.where(own == -torch.inf, missing, 0)


def _gumbel(
    replay: Replay, noise_sd: float, seed: int, whole: bool = False
) -> tuple[GumbelPositions, Tensor]:
    """Return an answer's positions and its tokens' columns, which are by falling logit unless they are ``whole``."""
    logits, gumbel, tokens = replay.logits, replay.gumbel, replay.tokens
    if not whole:
        evidence = narrowed(replay, noise_sd, PLACES)
        logits, gumbel, tokens = evidence.logits, evidence.gumbel, evidence.tokens
    assert gumbel is not None
    positions = gumbel_positions(
        logits, gumbel, replay.sampling, noise_sd=noise_sd, samples=SAMPLES,
        generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip
    return positions, tokens


def ipt_posterior(
    logits: Float[Tensor, "n v"], uniform: Float[Tensor, " n"], sampling: Sampling, noise_sd: float
) -> Float[Tensor, "n v"]:
    """Return Algorithm 3's mass of every token, without its ε, as shares of one."""
    mass = fssl_ipt(probabilities(logits, sampling), uniform, noise_sd=noise_sd).exp() - FLOOR
    return _as_shares(mass.clamp_min(0.0))


def _as_shares(mass: Float[Tensor, "n v"]) -> Float[Tensor, "n v"]:
    return mass / mass.sum(1, keepdim=True)


def measured(spec: dict[str, Any], home: Path, progress: Progress = silent) -> dict[str, Tensor]:
    """Return what is known of honest answers' tokens, once for all cells of a σ.

    Args:
        spec: as ``answered``; sampler: gumbel, ipt, or none for the distribution without a seed; noise_sd.

    Returns:
        ``entropy`` of the sampler's distribution, in bits; ``by_logit`` and ``by_share``: of the ``PLACES`` tokens with
        the highest logits, and of those with the largest shares, the shares in the distribution under the request's
        seed; for gumbel also ``score``, ``rank`` and ``logit_rank`` of the token sent. One row a token.
    """
    key = {name: spec[name] for name in (*ANSWERS, "dtype", "sampler", "noise_sd")}

    def make() -> dict[str, Tensor]:
        transcripts = answered(spec, home, progress).transcripts
        verifier = Verifier(load_whole(spec["model"], dtype=spec["dtype"], device=spec["device"]))
        parts = []
        for i, transcript in enumerate(transcripts):
            replay = verifier.replay(transcript)
            asked = replace(transcript, sampling=replace(transcript.sampling, method="ipt"))
            uniform = draws(asked, replay.logits.shape[1], StreamNoise)[1]
            assert uniform is not None
            parts.append(_of_answer(replay, uniform, spec, i))
            progress("answers scored", i + 1, len(transcripts))
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    return stored(home, "honest-tokens", key, make)


def _of_answer(replay: Replay, uniform: Tensor, spec: dict[str, Any], seed: int) -> dict[str, Tensor]:
    shares = probabilities(replay.logits, replay.sampling).double()
    found = {"entropy": torch.special.entr(shares).sum(1) / torch.tensor(2.0).log()}
    if spec["sampler"] == "gumbel":
        positions, tokens = _gumbel(replay, spec["noise_sd"], seed)
        scores = all_scores(positions)
        own = scores.gather(1, tokens[:, None])[:, 0]
        found |= {
            "score": own,
            "rank": score_rank(scores, own, replay.logits.shape[1] - scores.shape[1]),
            "logit_rank": logit_rank(replay.logits, replay.tokens),
        }
        by_logit = _as_shares(scores.exp())
    else:
        if spec["sampler"] == "ipt":
            shares = ipt_posterior(replay.logits, uniform, replay.sampling, spec["noise_sd"]).double()
        order = replay.logits.sort(dim=1, descending=True, stable=True).indices
        by_logit = shares.gather(1, order)
    by_share = by_logit.sort(dim=1, descending=True).values
    return found | {"by_logit": by_logit[:, :PLACES].clone(), "by_share": by_share[:, :PLACES].clone()}


def position_of(entropy: Float[Tensor, " n"], which: str) -> int:
    """Return the place of the position whose entropy is the median, or the largest; the first of equal ones."""
    order = entropy.sort(stable=True, descending=which == OPEN).indices
    return int(order[0 if which == OPEN else (len(order) - 1) // 2])


def scores(spec: dict[str, Any], folder: Path, progress: Progress = silent) -> Figures:
    """Measure a histogram over honest tokens, or over all tokens at one position (figures 9, 11 and 12).

    Args:
        spec: as ``measured``; shown: score, rank or logit_rank of honest tokens, or a position, whose tokens' scores
            are shown.

    Returns:
        ``at_K``, the share with K; the last of all from there on. Scores count as −log, rounded down; ranks from 0.
    """
    home = folder.parent.parent
    found = measured(spec, home, progress)
    shown = spec["shown"]
    if shown in (MEDIAN, OPEN):
        values = -_scores_at(position_of(found["entropy"], shown), spec, home)
    else:
        values = -found["score"] if shown == "score" else found[shown] - 1
    # A likelihood is an estimate, and may exceed 1 by rounding.
    bins = values.double().clamp(0, LAST).floor()
    return as_figures({f"at_{k}": share((bins == k).tolist()) for k in range(LAST + 1)})


def _scores_at(place: int, spec: dict[str, Any], home: Path) -> Float[Tensor, " v"]:
    """Return the scores of the whole vocabulary at a position of the honest answers, counted over all of them."""
    for i, transcript in enumerate(answered(spec, home).transcripts):
        if place < len(transcript.output):
            verifier = Verifier(load_whole(spec["model"], dtype=spec["dtype"], device=spec["device"]))
            positions, _ = _gumbel(verifier.replay(transcript), spec["noise_sd"], i, whole=True)
            tokens = torch.arange(positions.logits.shape[1])
            return positions.pairs(torch.full_like(tokens, place), tokens)
        place -= len(transcript.output)
    raise InputError("the honest answers have no such position")


def posterior(spec: dict[str, Any], folder: Path, progress: Progress = silent) -> Figures:
    """Measure which tokens honest noise leaves under a request's seed (figure 5).

    Args:
        spec: as ``measured``; shown: a position, or ``ALL``.

    Returns:
        ``place_K``: at a position, the share of the token with the K-th highest logit; of all, the mean of the K-th
        largest share. ``others``: of all other tokens together.
    """
    found = measured(spec, folder.parent.parent, progress)
    rows = found["by_share"]
    if spec["shown"] != ALL:
        place = position_of(found["entropy"], spec["shown"])
        rows = found["by_logit"][place : place + 1]
    estimates = {f"place_{k}": mean(column) for k, column in enumerate(rows.T.tolist(), 1)}
    return as_figures(estimates | {"others": mean((1 - rows.sum(1)).clamp_min(0.0).tolist())})
