"""Rows behind one layer, behind noise: an order from its beginning on, embeddings solved for as rows are placed.

What attention brings a row depends on the rows before it, and on the noise on them more than on their tokens. Behind
rows that are placed and solved for, what the next one needs is known; so hypotheses grow row by row, the likeliest
continuations are solved for behind each, and the language model reads along. Beginnings that used other rows are
compared by what each row needs over what it can be expected to need, and by what the language model says of its token
over the most that it says of it behind any other token of the prompt: otherwise what is cheap is used up first, and
what is dear is left for the end.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attacks.joint.ahead import after_each
from attacks.joint.beam import RECENT, listen, without
from attacks.joint.displaced import Displaced
from attacks.joint.explain import append
from attacks.joint.hypotheses import Engines, Hypothesis, Step
from hiddenlab.slice import Request

HYPOTHESES = 48  # kept
SOLVED = 3  # times as many continuations are solved for


def ordered(
    witness: Displaced, tokens: Int[Tensor, " n"], engines: Engines, spoken: float, share: float = 1.0
) -> tuple[Int[Tensor, " n"], Float[Tensor, "n d"]]:
    """The likeliest order of rows, by noise and language model.

    Args:
        tokens: of each row. spoken: what a nat of the language model counts for. share: of what the witness says that
            counts.

    Returns:
        Rows in their order, and the noised embedding of each, by row.
    """
    n, speaker = len(tokens), engines.speaker
    likely = torch.zeros(n, device=tokens.device)
    if speaker is not None and n > 1:
        after = after_each(tokens, speaker).to(tokens.device)
        likely = after.fill_diagonal_(float("-inf")).amax(0)
    expected = spoken * likely - share * witness.trust * witness.expected
    slice, opening = witness.slice, None if engines.opening is None else engines.opening
    begun = Hypothesis(slice.prefix(), tuple(range(n)), None if speaker is None else speaker.fork(), opening)
    beam, noised = [begun], witness.begun[None]
    for place in range(n):
        told = share * _told(witness, beam)
        for own, one in zip(told, beam, strict=True):
            own += one.score - one.used - expected
            if one.following is not None:
                own += spoken * one.following.to(own.device)[tokens]
            own[[step.row for step in one.steps]] = float("-inf")
        open = sum(len(one.free) for one in beam)
        best = told.flatten().topk(min(SOLVED * HYPOTHESES, open)).indices
        parents, rows = best // n, best % n
        which = [(parents == i).nonzero()[:, 0] for i in range(len(beam))]
        asked = [(one, chosen) for one, chosen in zip(beam, which, strict=True) if len(chosen)]
        prefixes = [one.prefix for one, _ in asked]
        embeddings, need = witness.behind(prefixes, [rows[chosen] for _, chosen in asked])
        back = torch.cat([chosen for _, chosen in asked]).argsort()
        embeddings, need = embeddings[back], need[back]
        scores = (share * need).tolist()
        for k, (parent, row) in enumerate(zip(parents.tolist(), rows.tolist(), strict=True)):
            scores[k] += beam[parent].score
            following = beam[parent].following
            if following is not None:
                scores[k] += spoken * float(following[tokens[row]])
        used = [
            beam[i].used + float(expected[row])
            for i, row in zip(parents.tolist(), rows.tolist(), strict=True)
        ]
        kept, seen, grown = list[int](), set(), list[Hypothesis]()
        for k in sorted(range(len(scores)), key=lambda k: used[k] - scores[k]):
            before, row = beam[int(parents[k])], int(rows[k])
            recent = [step.token for step in before.steps[1 - RECENT :]]
            key = tuple(sorted(tokens[list(without(before.free, row))].tolist())), (*recent, int(tokens[row]))
            if key in seen:
                continue
            seen.add(key)
            kept.append(k)
            step = Step(int(tokens[row]), row, float("nan"), None, 0)
            free, steps = without(before.free, row), (*before.steps, step)
            sums = scores[k], used[k]
            grown.append(Hypothesis(before.prefix.fork(), free, before.spoken, None, (), steps, *sums))
            if len(kept) == HYPOTHESES:
                break
        noised = noised[parents[kept]].clone()
        noised[torch.arange(len(kept)), rows[kept]] = embeddings[kept]
        beam = grown
        if place + 1 < n:
            append([(one.prefix, embeddings[k]) for one, k in zip(beam, kept, strict=True)])
            listen(beam, engines.model)
    return torch.tensor([step.row for step in beam[0].steps], device=tokens.device), noised[0]


def _told(witness: Displaced, beam: list[Hypothesis]) -> Float[Tensor, "m n"]:
    """What speaks for each row behind each hypothesis, its embedding being what it tells by itself."""
    begun = witness.begun
    requests = [Request(one.prefix, begun[:0], leaves=begun) for one in beam]
    answers = witness.slice.run_all(requests, keep=False, show="attn")
    attended = torch.stack([one.leaves for one in answers])
    return -witness.trust * witness.needed(attended.transpose(0, 1)).T
