"""Collect what is known of a prompt at a gap, and choose the rows that are used to solve for its tokens."""

from collections.abc import Sequence, Set
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from hiddenlab.attacks.missing_tokens.attention_sums import ROWS, Shown
from hiddenlab.proposals.probe import Probe
from hiddenlab.types import TokenPrediction

PER_ROW = 4  # missing tokens for each row that is used at first
ROWS_TOGETHER = 4  # rows that are used together where tokens were left open


@dataclass(frozen=True)
class View:
    """What is known when the search reaches a gap.

    Attributes:
        states: the rows. positions: of the rows. found: tokens so far. probe: predicts rows' own tokens.
        open: positions of tokens that no row shows, in gaps that were not closed.
    """

    states: Float[Tensor, "rows d"]
    positions: Sequence[int]
    found: Sequence[TokenPrediction]
    probe: Probe
    open: Set[int]

    @property
    def first_unknown(self) -> int:
        """Position of the first token that is not known."""
        return min(self.open, default=len(self.found))

    def _known(self, last: int) -> dict[int, int]:
        """Return tokens by position, up to a row: those of rows, as the probe predicts them, and of closed gaps."""
        rows = [row for row in range(last + 1) if self.positions[row] >= self.first_unknown]
        named = self.probe.log_probs(self.states[rows]).argmax(1).tolist()
        read = {self.positions[row]: token for row, token in zip(rows, named, strict=True)}
        return {p: prediction.token for p, prediction in enumerate(self.found) if p not in self.open} | read

    def rows(self, row: int) -> tuple[dict[int, int], list[list[Shown]]]:
        """Return the tokens known up to a row, its own included, and the sets of rows to use, in the order to try them.

        Behind open gaps all rows that see the gap are used together. Otherwise the row and those that follow without a
        gap are used: few rows take less time but resolve fewer tokens; where they fail, more are used.
        """
        last = row
        while last + 1 < len(self.positions) and self.positions[last + 1] == self.positions[last] + 1:
            last += 1
        known, end = self._known(last), self.positions[row]
        first = min(self.open, default=end)
        shown = [
            Shown(self.states[i], known[p], p, {q: t for q, t in known.items() if q < p})
            for i, p in enumerate(self.positions[: last + 1])
            if p >= first
        ]
        before = {p: t for p, t in known.items() if p <= end}
        if self.open:
            return before, [shown[-ROWS_TOGETHER:]]
        enough = -(-(end - len(self.found)) // PER_ROW)
        return before, [
            shown[:count] for count in sorted({min(count, len(shown)) for count in (enough, ROWS)})
        ]
