"""Run more candidates for a position when the best candidate is not clearly ahead of those that were not run.

Where columns are shuffled, a probe's shortlist is too short for first tokens. More candidates are run where the best
one is not far enough ahead of all that were not run (``Learned.lead``). Whether a first token is right shows only in
the tokens after it: the right beginning may be second or third by then, with its right continuation among thousands. So
the additional candidates are shared between the best hypotheses, by how likely the candidates are that were not run
behind each.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hiddenlab.attacks.beam_decoding.features import Learned, unseen
from hiddenlab.attacks.beam_decoding.hypotheses import Decoding, Effort, Trial

WIDENING_FACTOR = 4  # factor by which the number of candidates grows each time
HYPOTHESES = 8  # hypotheses that may get more candidates
TOTAL_LIMIT_FACTOR = 2  # limit for all hypotheses of a token together, in multiples of the limit for one


@dataclass
class Widening:
    """A prompt whose next token may be among the candidates that were not run.

    Attributes:
        tried: candidates that were run, by hypothesis. widths: candidates run for each of the best hypotheses.
        most: limit of ``widths``. unrun: log-likelihood, ranked as hypotheses are, that the next token is among the
            candidates not run; minus infinity where no more are to be run.
        allowed: positions that may still be run here; a batch that exceeds it is the last.
    """

    decoding: Decoding
    tried: Sequence[Trial]
    widths: list[int]
    most: int
    unrun: list[float]
    allowed: int

    @classmethod
    def of(cls, decoding: Decoding, tried: Sequence[Trial], weights: Tensor, effort: Effort) -> "Widening":
        left = min(TOTAL_LIMIT_FACTOR * effort.most, effort.spare * decoding.view.length - decoding.widened)
        most = min(effort.most, decoding.view.wide.shape[1]) if decoding.view.wide is not None else 0
        widening = cls(decoding, tried, [effort.width] * min(HYPOTHESES, len(tried)), most, [], left)
        widening.unrun = [widening._unrun(i, weights) for i in range(len(widening.widths))]
        return widening

    @property
    def next(self) -> int:
        """Index of the hypothesis that gets more candidates next."""
        return max(range(len(self.unrun)), key=self.unrun.__getitem__)

    def wider(self) -> int:
        """Return how many candidates that hypothesis gets now."""
        return min(WIDENING_FACTOR * self.widths[self.next], self.most)

    def remains(self, learned: Learned) -> bool:
        """Return whether the best candidate is not reliable and others can be run."""
        open = self.allowed > 0 and self.unrun[self.next] > float("-inf")
        return open and self.lead(learned.weights) <= learned.lead

    def lead(self, weights: Tensor) -> float:
        """Return how far the best candidate of any hypothesis is ahead of those that were not run, in nats.

        The hypothesis with the likeliest candidates not run is compared. Hypotheses whose candidates were all run, that
        may get no more, or that rank beyond the first ``HYPOTHESES`` do not count.
        """
        pairs = zip(self.decoding.beam, self.tried, strict=True)
        best = max(
            hypothesis.score - hypothesis.used + float((trial.candidates.features @ weights).max())
            for hypothesis, trial in pairs
        )
        return best - max(self.unrun)

    def add(self, more: Trial | None, weights: Tensor) -> None:
        """Add the candidates that were run for the next hypothesis; None where all of them had been run before."""
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
        view, place, hypothesis = self.decoding.view, self.decoding.place, self.decoding.beam[i]
        ran = torch.cat(self.tried[i].tokens)
        return (
            hypothesis.score
            - hypothesis.used
            + unseen(view, place, hypothesis.free, hypothesis.following, weights, ran)
        )
