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
SOLVED = 3  # continuations that are solved for, in multiples of the hypotheses kept


def ordered(
    witness: Displaced, tokens: Int[Tensor, " n"], engines: Engines, spoken: float, share: float = 1.0
) -> tuple[Int[Tensor, " n"], Float[Tensor, "n d"]]:
    """Return the likeliest order of rows, by noise and language model.

    Args:
        tokens: of each row. spoken: weight of a nat of the language model. share: weight of the witness' score.

    Returns:
        Rows in their order, and the noised embedding of each, by row.
    """
    n, speaker = len(tokens), engines.speaker
    expected = -share * witness.trust * witness.expected
    if speaker is not None and n > 1:
        after = after_each(tokens, speaker).to(tokens.device)
        expected = expected + spoken * after.fill_diagonal_(float("-inf")).amax(0)
    heard = None if speaker is None else speaker.fork()
    beam = [Hypothesis(witness.model.prefix(), tuple(range(n)), heard, engines.opening)]
    noised = witness.begun[None]
    for place in range(n):
        said = torch.stack([_said(one, tokens, spoken) for one in beam])
        used = torch.tensor([one.used for one in beam], device=said.device)[:, None] + expected
        likely = (said + share * _told(witness, beam) - used).flatten()
        best = likely.topk(min(SOLVED * HYPOTHESES, int(likely.isfinite().sum()))).indices
        # Rows behind one hypothesis are solved for together, so they are sorted next to each other.
        best = best.sort().values
        parents, rows = best // n, best % n
        own, counts = parents.unique_consecutive(return_counts=True)
        embeddings, need = witness.behind([beam[i].prefix for i in own], rows.split(counts.tolist()))
        scores, used = said[parents, rows] + share * need, used[parents, rows]
        kept, grown, seen = list[int](), list[Hypothesis](), set()
        for k in (scores - used).argsort(descending=True).tolist():
            before, row = beam[int(parents[k])], int(rows[k])
            free, step = without(before.free, row), Step(int(tokens[row]), row, float("nan"), None, 0)
            steps = (*before.steps, step)
            # Of equivalent hypotheses keep the best: which of two rows of one token was used matters little.
            key = (
                tuple(tokens[list(free)].sort().values.tolist()),
                tuple(one.token for one in steps[-RECENT:]),
            )
            if key not in seen and len(kept) < HYPOTHESES:
                seen.add(key)
                kept.append(k)
                sums = float(scores[k]), float(used[k])
                grown.append(Hypothesis(before.prefix.fork(), free, before.spoken, None, (), steps, *sums))
        noised = noised[parents[kept]]
        noised[torch.arange(len(kept)), rows[kept]] = embeddings[kept]
        beam = grown
        if place + 1 < n:
            append([(one.prefix, embeddings[k]) for one, k in zip(beam, kept, strict=True)])
            listen(beam, engines.lm)
    return torch.tensor([step.row for step in beam[0].steps], device=tokens.device), noised[0]


def _said(one: Hypothesis, tokens: Int[Tensor, " n"], spoken: float) -> Float[Tensor, " n"]:
    """Return a hypothesis' score with each row, without the witness' part; minus infinity for rows it used."""
    out = torch.full(tokens.shape, float("-inf"), device=tokens.device)
    free = list(one.free)
    out[free] = one.score
    if one.following is not None:
        out[free] += spoken * one.following.to(out.device)[tokens[free]]
    return out


def _told(witness: Displaced, beam: list[Hypothesis]) -> Float[Tensor, "m n"]:
    """Return the witness' score of each row behind each hypothesis, with the embedding estimated from the row alone."""
    begun = witness.begun
    requests = [Request(one.prefix, begun[:0], branches=begun) for one in beam]
    answers = witness.model.run_all(requests, keep=False, show="attn")
    attended = torch.stack([one.branches for one in answers])
    return -witness.trust * witness.needed(attended.transpose(0, 1)).T


def append(noised: Sequence[tuple[Prefix, Float[Tensor, " d"]]]) -> None:
    """Continue each prefix, all of one truncated model, with a noised embedding."""
    if not noised:
        return
    model = noised[0][0].model
    requests = [Request(prefix, embedding[None].to(model.dtype)) for prefix, embedding in noised]
    for (prefix, _), answer in zip(noised, model.run_all(requests, together=True), strict=True):
        prefix.keep(answer, tokens=1)
