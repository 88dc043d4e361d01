"""Order rows behind one noised layer with a beam, solving for each row's embedding as it is placed.

What attention adds to a row depends on the rows before it, and on their noise more than on their tokens. Behind rows
that are placed and solved for, the noise that the next row needs is known. So hypotheses grow row by row: the likeliest
continuations are solved for behind each, and the language model scores them. Hypotheses that used different rows are
compared by what each row needs minus what it can be expected to need, and by the language model's score of its token
minus the highest score behind any other token of the prompt. Otherwise the cheap rows would be used first and the
costly ones left for the end.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.attacks.beam_decoding.beam import RECENT, listen, without
from hiddenlab.attacks.beam_decoding.future_cost import after_each
from hiddenlab.attacks.beam_decoding.hypotheses import Engines, Hypothesis, Step
from hiddenlab.attacks.beam_decoding.order_linearized import Displaced
from hiddenlab.models import Prefix, Request

HYPOTHESES = 96  # kept
SOLVED_FACTOR = 3  # continuations that are solved for, in multiples of the hypotheses kept


def ordered(
    scorer: Displaced, tokens: Int[Tensor, " n"], engines: Engines, lm_weight: float, share: float = 1.0
) -> tuple[Int[Tensor, " n"], Float[Tensor, "n d"]]:
    """Return the likeliest order of rows, by noise and language model.

    Args:
        tokens: of each row. lm_weight: weight of a nat of the language model. share: weight of the scorer's score.

    Returns:
        Rows in their order, and the noised embedding of each, by row.
    """
    n, speaker = len(tokens), engines.speaker
    expected = -share * scorer.trust * scorer.expected
    if speaker is not None and n > 1:
        after = after_each(tokens, speaker).to(tokens.device)
        expected = expected + lm_weight * after.fill_diagonal_(float("-inf")).amax(0)
    lm_prefix = None if speaker is None else speaker.fork()
    beam = [Hypothesis(scorer.model.prefix(), tuple(range(n)), lm_prefix, engines.opening)]
    noised = scorer.initial[None]
    for place in range(n):
        base = torch.stack([_base_scores(hypothesis, tokens, lm_weight) for hypothesis in beam])
        used = torch.tensor([hypothesis.used for hypothesis in beam], device=base.device)[:, None] + expected
        likely = (base + share * _estimated_scores(scorer, beam) - used).flatten()
        best = likely.topk(min(SOLVED_FACTOR * HYPOTHESES, int(likely.isfinite().sum()))).indices
        # Rows behind one hypothesis are solved for together, so they are sorted next to each other.
        best = best.sort().values
        parents, rows = best // n, best % n
        own, counts = parents.unique_consecutive(return_counts=True)
        embeddings, need = scorer.behind([beam[i].prefix for i in own], rows.split(counts.tolist()))
        scores, used = base[parents, rows] + share * need, used[parents, rows]
        kept, grown, seen = list[int](), list[Hypothesis](), set()
        for k in (scores - used).argsort(descending=True).tolist():
            before, row = beam[int(parents[k])], int(rows[k])
            free, step = without(before.free, row), Step(int(tokens[row]), row, float("nan"), None, 0)
            steps = (*before.steps, step)
            # Of equivalent hypotheses keep the best: which of two rows of one token was used matters little.
            key = (
                tuple(tokens[list(free)].sort().values.tolist()),
                tuple(earlier.token for earlier in steps[-RECENT:]),
            )
            if key not in seen and len(kept) < HYPOTHESES:
                seen.add(key)
                kept.append(k)
                sums = float(scores[k]), float(used[k])
                grown.append(Hypothesis(before.prefix.fork(), free, before.lm_prefix, None, (), steps, *sums))
        noised = noised[parents[kept]]
        noised[torch.arange(len(kept)), rows[kept]] = embeddings[kept]
        beam = grown
        if place + 1 < n:
            append([(hypothesis.prefix, embeddings[k]) for hypothesis, k in zip(beam, kept, strict=True)])
            listen(beam, engines.lm)
    return torch.tensor([step.row for step in beam[0].steps], device=tokens.device), noised[0]


def _base_scores(hypothesis: Hypothesis, tokens: Int[Tensor, " n"], lm_weight: float) -> Float[Tensor, " n"]:
    """Return a hypothesis' score with each row, without the scorer's part; minus infinity for rows it used."""
    scores = torch.full(tokens.shape, float("-inf"), device=tokens.device)
    free = list(hypothesis.free)
    scores[free] = hypothesis.score
    if hypothesis.following is not None:
        scores[free] += lm_weight * hypothesis.following.to(scores.device)[tokens[free]]
    return scores


def _estimated_scores(scorer: Displaced, beam: list[Hypothesis]) -> Float[Tensor, "m n"]:
    """Return the scorer's score of each row behind each hypothesis, with the embedding estimated from the row alone."""
    initial = scorer.initial
    requests = [Request(hypothesis.prefix, initial[:0], branches=initial) for hypothesis in beam]
    answers = scorer.model.run_all(requests, keep=False, show="attn")
    attended = torch.stack([answer.branches for answer in answers])
    return -scorer.trust * scorer.needed(attended.transpose(0, 1)).T


def append(noised: Sequence[tuple[Prefix, Float[Tensor, " d"]]]) -> None:
    """Continue each prefix, all of one truncated model, with a noised embedding."""
    if not noised:
        return
    model = noised[0][0].model
    requests = [Request(prefix, embedding[None].to(model.dtype)) for prefix, embedding in noised]
    for (prefix, _), answer in zip(noised, model.run_all(requests, together=True), strict=True):
        prefix.keep(answer, tokens=1)
