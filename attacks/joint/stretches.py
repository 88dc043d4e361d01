"""Rows in unknown order, a third time: stretches of a decoded prompt are decoded anew from their own rows.

The beam chooses among all rows that are left, and what it lost early never comes back; a single part that moves
(``moves``) mends no two mistakes that hide each other. Of the dozen rows of a stretch the same beam loses much less.
What it finds there is compared with the order as it was by all that speaks for the whole prompt.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from attacks.joint.beam import Decoding, Effort, Engines, Hypothesis, decode
from attacks.joint.evidence import Learned
from attacks.joint.moves import Arrangement, unordered
from hiddenlab.core import Progress, silent
from hiddenlab.slice import Request

LENGTH = 12  # rows of a stretch
BEHIND = 40.0  # nats by which hypotheses may be behind: what a stretch is worth shows at its end


def redo_stretches(
    decodings: Sequence[Decoding],
    engines: Engines,
    learned: Learned,
    effort: Effort,
    turns: int,
    progress: Progress = silent,
) -> None:
    """Decode stretches of prompts anew whose rows are in unknown order, as long as that brings a likelier order.

    Args:
        turns: at most. Stretches of every second one begin in the middle of those before it.
    """
    effort = replace(effort, behind=max(BEHIND, effort.behind))
    open = [Arrangement(one, engines, learned.weights) for one in unordered(decodings)] if turns else []
    every = list(open)
    for turn in range(turns):
        longest = max((len(one.order) for one in open), default=0)
        starts = range(-(turn % 2) * (LENGTH // 2), longest, LENGTH)
        better: set[int] = set()
        for done, start in enumerate(starts):
            first, here = max(0, start), [one for one in open if len(one.order) - max(0, start) > 1]
            begun = [_begun(one, first, min(start + LENGTH, len(one.order))) for one in here]
            decode(begun, engines, learned, effort)
            for one, new in zip(here, begun, strict=True):
                one.decoding.evaluated += new.evaluated
                one.decoding.calls += new.calls
                if one.accept(_orders(one, new, first)):
                    better.add(id(one))
            progress("decoding stretches", turn * len(starts) + done + 1, turns * len(starts))
        # The first two turns together are one look at every place and its neighbours.
        open = [one for one in open if turn == 0 or id(one) in better]
        if not open:
            break
    for one in every:
        one.settle()


def _begun(one: Arrangement, first: int, end: int) -> Decoding:
    """A decoding of the places from ``first`` to ``end``, behind the tokens before them, of the tokens there."""
    parts, engines, view = one.parts, one.engines, one.decoding.view
    order, device = one.order.tolist(), view.shown.device

    def of_rows(values: Tensor) -> Tensor:
        return values.new_zeros(len(view.shown)).index_copy(0, parts.rows, values)[:, None]

    rows = replace(
        view, ids=of_rows(parts.tokens), columns=of_rows(parts.columns), wide=None, openers=None, length=end,
        scores=torch.zeros(len(view.shown), 1, device=device),
    )  # fmt: skip
    before, prefix = parts.tokens[one.order[:first]], parts.before.fork()
    spoken, following = None, engines.opening
    if engines.speaker is not None:
        spoken = engines.speaker.fork()
    if first:
        prefix.extend(before)
        if spoken is not None:
            (heard,) = spoken.slice.run([Request(spoken, before.to(spoken.slice.device))])
            spoken.keep(heard, chain=first)
            following = heard.chain[-1].float().log_softmax(-1)
    hypothesis = Hypothesis(
        prefix, tuple(parts.rows[one.order[first:end]].tolist()), spoken, following,
        tuple(parts.columns[one.order[:first]].tolist()),
        tuple(one.decoding.beam[0].steps[k] for k in order[:first]),
    )  # fmt: skip
    return Decoding(rows, [hypothesis], first, before=one.decoding.before, ahead=one.decoding.ahead)


def _orders(one: Arrangement, found: Decoding, first: int) -> Int[Tensor, "m n"]:
    """The whole prompt's order for each way that was found to order a stretch."""
    places = {row: k for k, row in enumerate(one.parts.rows.tolist())}
    order, end = one.order.tolist(), found.view.length
    stretches = [[places[step.row] for step in hypothesis.steps[first:]] for hypothesis in found.beam]
    return torch.tensor([order[:first] + new + order[end:] for new in stretches], device=one.order.device)
