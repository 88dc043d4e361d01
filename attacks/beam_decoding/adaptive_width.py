"""When the best candidate is not to be believed, and behind which hypothesis to try more.

Where columns are shuffled, a probe's shortlist is too short for first tokens, so that how far the best candidate is
ahead of all that were not run decides whether more are (``Learned.lead``). What comes first shows only in what comes
after it: the right beginning may be the second or third by then, and its right continuation among thousands. So what is
tried is shared between the best hypotheses by what was not run behind each.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hiddenlab.attacks.beam_decoding.features import Learned, unseen
from hiddenlab.attacks.beam_decoding.hypotheses import Decoding, Effort, Tried

WIDER = 4  # by how much more is tried each time
HYPOTHESES = 8  # behind which more may be tried
DEAREST = 2  # times as many candidates as one hypothesis may get, for all hypotheses of a token together


@dataclass
class Doubt:
    """A prompt of which the next token may be among candidates that were not run.

    Attributes:
        tried: what was run, hypothesis by hypothesis. widths: candidates run for each of the best. most: of them.
        unrun: how likely it is that none of these comes next, counted as hypotheses are ranked; minus infinity where
            no more are to be run.
        allowed: positions that may still be run here; what exceeds it is the last.
    """

    decoding: Decoding
    tried: Sequence[Tried]
    widths: list[int]
    most: int
    unrun: list[float]
    allowed: int

    @classmethod
    def of(cls, decoding: Decoding, tried: Sequence[Tried], weights: Tensor, effort: Effort) -> "Doubt":
        left = min(DEAREST * effort.most, effort.spare * decoding.view.length - decoding.widened)
        most = min(effort.most, decoding.view.wide.shape[1]) if decoding.view.wide is not None else 0
        out = cls(decoding, tried, [effort.width] * min(HYPOTHESES, len(tried)), most, [], left)
        out.unrun = [out._unrun(i, weights) for i in range(len(out.widths))]
        return out

    @property
    def next(self) -> int:
        """The hypothesis behind which more is to be tried."""
        return max(range(len(self.unrun)), key=self.unrun.__getitem__)

    def wider(self) -> int:
        """How many candidates it gets now."""
        return min(WIDER * self.widths[self.next], self.most)

    def remains(self, learned: Learned) -> bool:
        """The best candidate is not to be believed, and there are others to try."""
        open = self.allowed > 0 and self.unrun[self.next] > float("-inf")
        return open and self.lead(learned.weights) <= learned.lead

    def lead(self, weights: Tensor) -> float:
        """How far the best candidate of any hypothesis is ahead of what was not run, in nats.

        Counted is the hypothesis that leaves most of it; those behind which all was run, or nothing more may be, and
        those beyond the first ``HYPOTHESES`` leave nothing.
        """
        pairs = zip(self.decoding.beam, self.tried, strict=True)
        best = max(one.score - one.used + float((x.candidates.features @ weights).max()) for one, x in pairs)
        return best - max(self.unrun)

    def add(self, more: Tried | None, weights: Tensor) -> None:
        """What was run of the candidates that came next, None where all of them had been."""
        i = self.next
        self.widths[i] = self.wider()
        if more is not None:
            self.tried[i].add(more)
            self.allowed -= more.evaluated
            self.decoding.widened += more.evaluated
            self.decoding.calls += 1
        self.unrun[i] = self._unrun(i, weights)

    def _unrun(self, i: int, weights: Tensor) -> float:
        if self.widths[i] >= self.most:
            return float("-inf")
        view, place, one = self.decoding.view, self.decoding.place, self.decoding.beam[i]
        ran = torch.cat(self.tried[i].tokens)
        return one.score - one.used + unseen(view, place, one.free, one.following, weights, ran)
