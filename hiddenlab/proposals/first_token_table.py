"""Look up the first token under permuted columns in a table of the states of all one-token prompts.

The first state depends on its token alone, and sorting its coordinates undoes any permutation of them. So the nearest
sorted state in a table of the whole vocabulary gives the token. Later states depend on the tokens before them: see
``sorted_states``.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.models import Prefix, TruncatedModel
from hiddenlab.types import Progress, silent

PART, ROWS = 8192, 128  # tokens and rows compared at once
LEAST = 1e-9  # smallest norm of a row, relative to the largest state, so that distances stay finite


@dataclass(frozen=True)
class SortedStates:
    """Sorted states of every token of a vocabulary.

    Attributes:
        table: in float16, in units of ``scale``. scale: largest magnitude of each row, since the states of first
            positions can be too large for float16.
    """

    table: Float[Tensor, "v d"]
    scale: Float[Tensor, " v"]

    def tensors(self) -> dict[str, Tensor]:
        """Return everything to save, by name."""
        return {"table": self.table, "scale": self.scale}

    def squares(self, rows: Float[Tensor, "rows d"]) -> Float[Tensor, "rows v"]:
        """Return squared L2 distances of rows, sorted here, to each token's state, in units of the row's norm.

        Computed by GEMM, so distances of a thousandth of the norm and less are lost in rounding.
        """
        rows = rows.float().sort(dim=1).values.to(self.table.device)
        norms = rows.norm(dim=1, keepdim=True).clamp(min=LEAST * self.scale.max())
        rows = rows / norms
        squares = torch.empty(len(rows), len(self.table), device=rows.device)
        for part, scale, place in zip(
            self.table.split(PART), self.scale.split(PART), squares.split(PART, dim=1), strict=True
        ):
            place.copy_(rows @ part.float().T).mul_(-2 * scale / norms)
        return squares.add_((self._lengths / norms).square()).add_(1)

    @cached_property
    def _lengths(self) -> Float[Tensor, " v"]:
        return torch.cat([part.float().norm(dim=1) for part in self.table.split(PART)]) * self.scale


@dataclass(frozen=True)
class FirstTokenTable(SortedStates):
    """Sorted states of every token at the first position."""

    @classmethod
    def make(cls, model: TruncatedModel, progress: Progress = silent) -> "FirstTokenTable":
        """Run every token alone through the truncated model."""
        return cls(*packed(sorted_states(model, model.prefix(), "collecting one-token states", progress)))

    def nearest(self, rows: Float[Tensor, "rows d"], k: int) -> Int[Tensor, " k"]:
        """Return the k tokens whose state, alone, is nearest (L2) to any of the rows, best first."""
        best = torch.stack([self.squares(part).amin(0) for part in rows.split(ROWS)]).amin(0)
        return best.topk(min(k, len(best)), largest=False).indices


def sorted_states(
    model: TruncatedModel, prefix: Prefix, stage: str, progress: Progress = silent
) -> Iterator[Float[Tensor, "_ d"]]:
    """Yield sorted states of every token behind a prefix, in float32, part by part."""
    parts = torch.arange(model.vocab_size, device=model.device).split(model.max_pass_tokens)
    for i, part in enumerate(parts):
        progress(stage, i * model.max_pass_tokens, model.vocab_size)
        yield prefix.branch(part).float().sort(dim=1).values
    progress(stage, model.vocab_size, model.vocab_size)


def packed(
    parts: Iterable[Float[Tensor, "_ d"]],
) -> tuple[Float[Tensor, "v d"], Float[Tensor, " v"]]:
    """Return table and scale of ``SortedStates``, from sorted states part by part."""
    tables, scales = [], []
    for states in parts:
        scale = states.abs().amax(1).clamp(min=1e-12)
        tables.append((states / scale[:, None]).half())
        scales.append(scale)
    return torch.cat(tables), torch.cat(scales)
