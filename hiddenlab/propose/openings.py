"""The first token under permuted columns: the states of all one-token prompts, made once and looked up.

The first state depends on nothing but its token, and sorting its coordinates undoes any permutation of them, so
that the nearest sorted state in a table of the whole vocabulary names the token. Later states depend on the tokens
before them, which is why no such table helps there (eval/LOG.md).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.core import Progress, silent
from hiddenlab.slice import Slice


@dataclass(frozen=True)
class Openings:
    """Sorted states of every token at the first position.

    Attributes:
        table: in float16, as fractions of ``scale``. scale: largest magnitude of each row, since the states of
            first positions can be too large for float16.
    """

    table: Float[Tensor, "v d"]
    scale: Float[Tensor, " v"]

    @classmethod
    def make(cls, slice: Slice, progress: Progress = silent) -> "Openings":
        """Run every token alone through the slice."""
        tokens = torch.arange(slice.vocab_size, device=slice.device)
        prefix, tables, scales = slice.prefix(), [], []
        for part in tokens.split(slice.max_pass_tokens):
            progress("collecting one-token states", int(part[0]), slice.vocab_size)
            states = prefix.branch(part).float().sort(dim=1).values
            scale = states.abs().amax(1).clamp(min=1e-12)
            tables.append((states / scale[:, None]).half())
            scales.append(scale)
        progress("collecting one-token states", slice.vocab_size, slice.vocab_size)
        return cls(torch.cat(tables), torch.cat(scales))

    def tensors(self) -> dict[str, Tensor]:
        """Everything to save, by name."""
        return {"table": self.table, "scale": self.scale}

    def nearest(self, rows: Float[Tensor, "rows d"], k: int) -> Int[Tensor, " k"]:
        """The k tokens whose state, alone, comes nearest (L2) to any of the rows, best first."""
        rows = rows.float().sort(dim=1).values.to(self.table.device)
        # Squared distances in units of the row's norm, by GEMM: they only order candidates.
        norms = rows.norm(dim=1).clamp(min=1e-12)
        best = torch.full((len(self.table),), float("inf"), device=rows.device)
        for start in range(0, len(self.table), 8192):
            part = self.table[start : start + 8192].float() * self.scale[start : start + 8192, None]
            squares = part.square().sum(1)[:, None] - 2 * part @ rows.T + norms.square()
            best[start : start + 8192] = (squares / norms.square()).amin(1)
        return best.topk(min(k, len(best)), largest=False).indices
