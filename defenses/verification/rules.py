"""Choose which values a TOPLOC proof commits to; provider and verifier agree on the rule by its name.

``paper`` is the published rule: the prompt is one chunk, and the k largest values of a chunk are taken. Language models
have massive activations: a few columns are far larger than all others, at every token. Such a column can take all k
places of a long prompt, one per token. Tokens beyond the k-th then have no value, and the values that are taken say
little, as the column hardly depends on the token.

``largest`` cuts the prompt into chunks like the answer; else it is the published rule.

``rows`` cuts the prompt like the answer, and divides the k places evenly among the tokens of a chunk. It takes of each
token the values that are largest for their column, after division by the column's scale. The scale is the column's root
mean square over states of fixed tokens (``WholeModel.scale``). Both sides compute it from the advertised model, without
the provider's word. As each token has its own values, it has its own limit too (``toploc.Thresholds``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int64, Num, UInt
from torch import Tensor

from hiddenlab.errors import InputError

EVERY = 32  # tokens of a chunk


@dataclass(frozen=True)
class Rule:
    """A way of choosing the values of a proof.

    Attributes:
        name: as it is written in a transcript.
        whole_prompt: the prompt is one chunk, however long.
        by_row: places are divided among the tokens of a chunk, and values are compared in units of their column's
            scale.
    """

    name: str
    whole_prompt: bool
    by_row: bool

    def chunks(
        self, prefill: Float[Tensor, "n d"], decode: Float[Tensor, "t d"], every: int = EVERY
    ) -> list[Float[Tensor, "_ d"]]:
        """Cut a request into chunks, one proof each: first the prompt, then the answer.

        Raises:
            InputError: no prompt, or chunks of no tokens.
        """
        if not len(prefill) or every < 1:
            raise InputError(
                f"a prompt of {len(prefill)} tokens, chunks of {every}: both must have at least 1"
            )
        first = len(prefill) if self.whole_prompt else every
        return [
            states[start : start + step]
            for states, step in ((prefill, first), (decode, every))
            for start in range(0, len(states), step)
        ]

    def choose(
        self, bits: UInt[np.ndarray, "rows d"], k: int, scale: Float[np.ndarray, " d"] | None = None
    ) -> Int64[np.ndarray, " k"]:
        """Return the flat indices (row · width + column), ascending, of the values that a chunk's proof commits to.

        The choice depends on the bits and on the scale alone; of equal values the first are taken. So devices and
        dtypes agree on it (``torch.topk`` leaves ties open).

        Args:
            bits: bfloat16 or float32 patterns of finite values. k: how many.
            scale: of the columns, positive; for rules by row.

        Raises:
            InputError: k is not from 1 to the number of values, or a rule by row has no scale for this width.
        """
        if not 1 <= k <= bits.size:
            raise InputError(f"k = {k}: this chunk has {bits.size} values, of which 1 to all can be taken")
        sizes = bits & (2 ** (8 * bits.itemsize - 1) - 1)  # without the sign
        if not self.by_row:
            return largest(sizes.ravel(), k)
        rows, width = bits.shape
        if scale is None or scale.shape != (width,) or not bool((np.isfinite(scale) & (scale > 0)).all()):
            raise InputError(f"the rule {self.name!r} needs a scale, positive, for each of {width} columns")
        # A bfloat16 pattern is the upper half of a float32 pattern.
        measured = (sizes.astype(np.uint32) << (32 - 8 * bits.itemsize)).view(np.float32) / scale.astype(
            np.float64
        )
        taken = [row * width + largest(measured[row], places) for row, places in enumerate(shares(k, rows))]
        return np.concatenate(taken)


def largest(values: Num[np.ndarray, " n"], count: int) -> Int64[np.ndarray, " count"]:
    """Return the places, ascending, of the largest values; of equal ones the first."""
    if not count:
        return np.zeros(0, dtype=np.int64)
    least = np.partition(values, values.size - count)[values.size - count]
    above = np.flatnonzero(values > least)
    equal = np.flatnonzero(values == least)[: count - above.size]
    return np.sort(np.concatenate((above, equal))).astype(np.int64)


def shares(k: int, rows: int) -> list[int]:
    """Divide k places among rows as evenly as possible; a smaller k is spread over the rows."""
    return np.diff(np.arange(rows + 1) * k // rows).tolist()


PAPER = Rule("paper", whole_prompt=True, by_row=False)
LARGEST = Rule("largest", whole_prompt=False, by_row=False)
ROWS = Rule("rows", whole_prompt=False, by_row=True)
RULES: Mapping[str, Rule] = {rule.name: rule for rule in (PAPER, LARGEST, ROWS)}
DEFAULT = ROWS.name


def rule_of(name: str) -> Rule:
    """Find a rule by its name.

    Raises:
        InputError: there is no such rule.
    """
    if name not in RULES:
        raise InputError(f"proofs by an unknown rule {name!r}; known are {', '.join(RULES)}")
    return RULES[name]
