"""Mask what AttnNodes answer, so that a CompNode learns only the sum over all key shards (secure aggregation).

For each query row and head an AttnNode computes E = Σ exp(s - M) and U = Σ exp(s - M) v over its key shard, with a
reference M that the CompNode sends. It multiplies both by a random factor that all AttnNodes of the row share, and adds
a mask for each other AttnNode of the row: one of the two adds it, the other subtracts it. The CompNode adds up all
answers. Masks cancel, and U / E is the attention output. The factor hides E itself: with E a CompNode subtracts its own
keys' share, and reads the rest as it reads partial results (docs/internals/cascade.md).
"""

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.defenses.cascade.passes import Pass
from hiddenlab.defenses.cascade.secret_maps import KEY_BYTES, Stream
from hiddenlab.defenses.cascade.wide import RANGE, Wide, fixed, real
from hiddenlab.models.attention import Attention
from hiddenlab.sharding import AttnNode, Plan

STEP = 4.0  # nats; references are multiples of it, so that they tell little of the score that they come from
HIDDEN = 8.0  # nats; the shared factor is between 1 and e to this power


class TooLargeError(Exception):
    """Sums do not fit into the numbers that are sent."""


@dataclass(frozen=True)
class Masked:
    """A masked answer: 128-bit numbers E and U of each head and row, upper halves before lower ones."""

    sums: Int[Tensor, "h a n"]

    @property
    def count(self) -> int:
        """The number of rows."""
        return self.sums.shape[1]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.sums,)

    @property
    def elements(self) -> int:
        return self.sums.numel()

    def rows(self, index: slice) -> "Masked":
        """Return some of the rows."""
        return Masked(self.sums[:, index])

    def to(self, dtype: torch.dtype) -> "Masked":
        """Return the same: no other dtype holds these numbers."""
        return self

    def wide(self) -> Wide:
        """Return E and U as numbers, side by side."""
        return Wide(*self.sums.chunk(2, -1))


def references(
    queries: Float[Tensor, "h n d"], keys: Float[Tensor, "kv n d"], attention: Attention, slack: float
) -> Float[Tensor, "h n"]:
    """Return M for each row and head: the score of the row with itself, rounded to ``STEP``, and the slack.

    Args:
        queries, keys: of the same rows.
        slack: nats.
    """
    grouped = queries.unflatten(0, (keys.shape[0], -1)).float()
    scores = (grouped * keys[:, None].float()).sum(-1).flatten(0, 1) * attention.scaling
    if attention.softcap is not None:
        scores = torch.tanh(scores / attention.softcap) * attention.softcap
    return ((scores + slack) / STEP).round() * STEP


def merged(answers: Sequence[Masked]) -> Float[Tensor, "h a dv"]:
    """Add up the answers of all blocks, and return the attention output; rows without a visible key are 0."""
    total = answers[0].wide()
    for answer in answers[1:]:
        total += answer.wide()
    sums = real(total)
    exponentials, output = sums[..., :1], sums[..., 1:]
    return torch.where(exponentials > 0, output / exponentials, torch.zeros_like(output)).float()


@runtime_checkable
class SumKeys(Protocol):
    """The keys that an AttnNode masks with."""

    def pair(self, block: AttnNode, other: AttnNode) -> bytes:
        """Return the key that two blocks of the same queries share."""
        ...

    def factor(self, queries: int) -> bytes:
        """Return the key that all blocks of a query shard share."""
        ...

    def own(self, block: AttnNode) -> bytes:
        """Return the key that no other block has."""
        ...


@dataclass(frozen=True)
class SumSecret:
    """What the client draws, and all keys come from; CompNodes are given none of them."""

    key: bytes = field(default_factory=lambda: secrets.token_bytes(KEY_BYTES), repr=False)

    def pair(self, block: AttnNode, other: AttnNode) -> bytes:
        return self._of("pair", block.queries, *sorted((block.keys, other.keys)))

    def factor(self, queries: int) -> bytes:
        return self._of("factor", queries)

    def own(self, block: AttnNode) -> bytes:
        return self._of("own", block.queries, block.keys)

    def keys_of(self, node: AttnNode, plan: Plan) -> "NodeKeys":
        """Return the keys of one AttnNode, which tell nothing of other pairs' keys.

        Args:
            plan: any with these AttnNodes.
        """
        pairs, factors, owns = {}, {}, {}
        for block in plan.blocks(node):
            for k in range(plan.beta):
                if k != block.keys:
                    other = AttnNode(block.queries, k)
                    pairs[block, other] = self.pair(block, other)
            factors[block.queries], owns[block] = self.factor(block.queries), self.own(block)
        return NodeKeys(pairs, factors, owns)

    def _of(self, *name: object) -> bytes:
        text = "\0".join(map(str, name)).encode()
        return hashlib.shake_256(self.key + text).digest(KEY_BYTES)


@dataclass(frozen=True, repr=False)
class NodeKeys:
    """The keys of one AttnNode."""

    pairs: Mapping[tuple[AttnNode, AttnNode], bytes]
    factors: Mapping[int, bytes]
    owns: Mapping[AttnNode, bytes]

    def pair(self, block: AttnNode, other: AttnNode) -> bytes:
        return self.pairs[block, other]

    def factor(self, queries: int) -> bytes:
        return self.factors[queries]

    def own(self, block: AttnNode) -> bytes:
        return self.owns[block]


class BlockMasks:
    """Mask the answers of one block in one batch.

    Args:
        keys: of the AttnNode.
        block: whose answers.
        batch: its name, which no other batch has: with layer and request it names a mask, so that none is used twice.
        rows: for each pass that asks the block, the places of its rows among the block's.
    """

    def __init__(
        self, keys: SumKeys, block: AttnNode, batch: str, rows: Sequence[tuple[Pass, Sequence[int]]]
    ) -> None:
        self._batch, self._block = batch, block
        self._factor, self._own = keys.factor(block.queries), keys.own(block)
        self._parts: list[tuple[str, Tensor, list[tuple[bool, bytes]]]] = []
        for work, places in rows:
            others = [AttnNode(block.queries, k) for k in range(work.plan.beta) if k != block.keys]
            # Whoever answers a row follows from the plan, so that all agree on the masks.
            pairs = [(block.keys < o.keys, keys.pair(block, o)) for o in others if work.asked(o)]
            self._parts.append((work.request, torch.tensor(places, dtype=torch.long), pairs))

    def answer(
        self,
        step: int,
        references: Float[Tensor, "h a"],
        maximum: Float[Tensor, "h a"],
        total: Float[Tensor, "h a"],
        output: Float[Tensor, "h a dv"],
    ) -> Masked:
        """Return the masked answer.

        Args:
            step: attention calls before this one in the batch.
            references: M of each row. maximum, total, output: the partial result, see ``Partial``.

        Raises:
            TooLargeError: a number is beyond the range.
        """
        sums = output.new_empty(*output.shape[:2], 2 * output.shape[2] + 2, dtype=torch.long)
        weights = total.double() * (maximum.double() - references.double()).exp()
        for request, places, pairs in self._parts:
            index = places.to(output.device)
            name = "\0".join((self._batch, request, str(step))).encode()
            part = weights[:, index] * self._shared(name, weights.shape[0], len(places)).to(weights.device)
            numbers = torch.cat([part[..., None], output[:, index].double() * part[..., None]], -1)
            if not bool((numbers.abs() < RANGE / (len(pairs) + 1)).all()):
                raise TooLargeError
            shape = 2, *numbers.shape
            wide = fixed(numbers, _uniform(self._own, name, shape, numbers.device))
            for adds, key in pairs:
                mask = _uniform(key, name, shape, numbers.device)
                wide += mask if adds else -mask
            sums[:, index] = torch.cat(wide, -1)
        return Masked(sums)

    def _shared(self, name: bytes, heads: int, rows: int) -> Float[Tensor, "h a"]:
        """Return the factors of rows, which all blocks that answer them share."""
        drawn = Stream(b"\0".join((self._factor, name))).between_ones(heads, rows)
        return ((drawn + 1) * (HIDDEN / 2)).exp()


def _uniform(key: bytes, name: bytes, shape: tuple[int, ...], device: torch.device) -> Wide:
    return Wide(*Stream(b"\0".join((key, name))).words(*shape).to(device))
