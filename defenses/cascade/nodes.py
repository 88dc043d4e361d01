"""Compute what CompNodes and AttnNodes do, on tensors alone (Hidden No More, appendix G, Algorithms 7 to 9).

The pre-pass (Algorithm 7) is the model's own projections and rotary embedding, run by transformers on the node's
tokens; this file only decides which rows go where. Projection, residual and MLP after the post-pass are the model's own
as well.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hiddenlab.defenses.cascade.masked_sums import Masked, merged
from hiddenlab.defenses.cascade.passes import Pass
from hiddenlab.models.attention import Attention
from hiddenlab.sharding import AttnNode, new_of


@dataclass(frozen=True)
class Rows:
    """The rows that a CompNode sends to an AttnNode in a layer, of the positions that ``Message`` names.

    Attributes:
        references: of the queries, where sums are masked (``masked_sums``).
    """

    queries: Float[Tensor, "h a d"]
    keys: Float[Tensor, "kv b d"]
    values: Float[Tensor, "kv b dv"]
    references: Float[Tensor, "h a"] | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        rows = self.queries, self.keys, self.values
        return rows if self.references is None else (*rows, self.references)

    def to(self, device: str | None = None, dtype: torch.dtype | None = None) -> "Rows":
        """Return the rows on another device, or in another dtype."""
        if device is None and dtype is None:
            return self
        return Rows(*(tensor.to(device=device, dtype=dtype) for tensor in self.tensors))

    @property
    def elements(self) -> int:
        return sum(tensor.numel() for tensor in self.tensors)


@dataclass(frozen=True)
class Partial:
    """The attention of some rows over one key shard: row maximum m, sum e of exp(score - m), and output u.

    Rows that see no key of the shard have m = -inf, e = 0, u = 0. If ``total`` is None, ``maximum`` is the logsumexp of
    the row's scores, which replaces both numbers.
    """

    maximum: Float[Tensor, "*s h a"]
    total: Float[Tensor, "*s h a"] | None
    output: Float[Tensor, "*s h a dv"]

    def rows(self, index: slice) -> "Partial":
        """Return some of the rows."""
        total = None if self.total is None else self.total[:, index]
        return Partial(self.maximum[:, index], total, self.output[:, index])

    def compressed(self) -> "Partial":
        """Replace maximum and sum by one logsumexp per row."""
        if self.total is None:
            return self
        return replace(self, maximum=self.maximum + self.total.log(), total=None)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.maximum, self.output) if self.total is None else (self.maximum, self.total, self.output)

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "Partial":
        """Make a partial from its ``tensors``."""
        return cls(tensors[0], tensors[1] if len(tensors) == 3 else None, tensors[-1])

    @property
    def elements(self) -> int:
        return sum(tensor.numel() for tensor in self.tensors)

    @property
    def count(self) -> int:
        """The number of rows."""
        return self.output.shape[-2]

    def to(self, dtype: torch.dtype) -> "Partial":
        """Return the answer in another dtype."""
        return Partial.of([tensor.to(dtype) for tensor in self.tensors])


Answer: TypeAlias = Partial | Masked


def answer_of(tensors: Sequence[Tensor]) -> Answer:
    """Make an answer from its ``tensors``."""
    return Masked(tensors[0]) if len(tensors) == 1 else Partial.of(tensors)


def picked(answer: Answer, pick: "Pick") -> Answer:
    """Return the rows of an answer that a ``Pick`` chooses."""
    return answer if pick.everything else answer_of([pick(tensor) for tensor in answer.tensors])


def attention_pass(
    queries: Float[Tensor, "*s h a d"],
    keys: Float[Tensor, "*s kv b d"],
    values: Float[Tensor, "*s kv b dv"],
    visible: Bool[Tensor, "*s a b"] | None,
    attention: Attention,
) -> Partial:
    """Compute attention of queries over one key shard (Algorithm 8), of one sequence or of several of the same shape.

    Query heads are grouped over key/value heads, not repeated.

    Args:
        queries, keys, values: rows by head.
        visible: which keys each query sees; None for all.
        attention: how the layer attends.
    """
    *several, heads, a, d = queries.shape
    kv, b, width = values.shape[-3:]
    grouped = queries.reshape(*several, kv, heads // kv * a, d)
    scores = (grouped @ keys.transpose(-1, -2)).float().view(*several, heads, a, b).mul_(attention.scaling)
    if attention.softcap is not None:
        scores = torch.tanh(scores / attention.softcap) * attention.softcap
    if visible is not None:
        scores.masked_fill_(~visible.to(scores.device).unsqueeze(-3), float("-inf"))
    # An empty shard is treated like one without visible keys.
    maximum = scores.amax(-1) if b else scores.new_full((*several, heads, a), float("-inf"))
    weights = scores.sub_(maximum.clamp(min=torch.finfo(scores.dtype).min)[..., None]).exp_()
    total = weights.sum(-1)
    mixed = weights.to(values.dtype).view(*several, kv, heads // kv * a, b) @ values
    mixed = mixed.view(*several, heads, a, width)
    # In the dtype of the outputs, whose smallest number may be larger than that of the sums: no row divides by 0.
    output = mixed / total.clamp(min=torch.finfo(mixed.dtype).tiny)[..., None].to(mixed.dtype)
    return Partial(maximum, total, output)


def joined(answers: Sequence[Answer]) -> Float[Tensor, "h a dv"]:
    """Merge the answers of all key shards, masked or not."""
    partials = [answer for answer in answers if isinstance(answer, Partial)]
    return post_pass(partials) if partials else merged([one for one in answers if isinstance(one, Masked)])


def post_pass(parts: Sequence[Partial]) -> Float[Tensor, "h a dv"]:
    """Merge the partial outputs of all key shards by a softmax over shards (Algorithm 9).

    Rows without a visible key are 0.
    """
    if len(parts) == 1:
        return parts[0].output
    maxima = torch.stack([part.maximum for part in parts])
    peak = maxima.amax(0).clamp(min=torch.finfo(maxima.dtype).min)
    weights = (maxima - peak).exp()
    totals = [part.total for part in parts]
    if all(total is not None for total in totals):
        weights = weights * torch.stack([total for total in totals if total is not None])
    outputs = torch.stack([part.output for part in parts])
    share = weights / weights.sum(0).clamp(min=torch.finfo(weights.dtype).tiny)
    return (share[..., None].to(outputs.dtype) * outputs).sum(0)


class CompWorker:
    """A CompNode's part of a batch: it splits its rows among AttnNodes, and merges their answers.

    Rows of the batch's passes lie one behind the other, in the order of the batch.

    Args:
        passes: of the batch.
        index: of the CompNode.

    Attributes:
        positions: of its rows, in the order of the rows; from 0 in each pass.
        messages: for each AttnNode that it sends rows to, whether answers come back.
        answers: for each AttnNode that answers, the number of rows in each block.
    """

    def __init__(self, passes: Sequence[Pass], index: int) -> None:
        self.index = index
        self.positions: list[int] = []
        queries: dict[AttnNode, list[int]] = {}
        keys: dict[AttnNode, list[int]] = {}
        answered: dict[AttnNode, list[list[int]]] = {}  # rows of each block, in the order in which it answers
        # The rows that the same blocks answer are merged together: all of a query shard, but for blocks left out.
        groups: dict[tuple[tuple[AttnNode, int], ...], list[int]] = {}
        for work in passes:
            mine, plan = work.new(index), work.plan
            if not mine:
                continue
            place = {p: len(self.positions) + i for i, p in enumerate(mine)}
            self.positions += mine
            parts: dict[int, list[tuple[AttnNode, int]]] = {}  # blocks that answer, by query shard
            for message in work.messages():
                if message.comp != index:
                    continue
                node, blocks = message.attn, plan.blocks(message.attn)
                queries.setdefault(node, []).extend(place[p] for p in message.queries)
                keys.setdefault(node, []).extend(place[p] for p in message.keys)
                for i, block in enumerate(blocks if message.answers else ()):
                    rows = [place[p] for p in work.asked(block) if p in place]
                    answered.setdefault(node, [[] for _ in blocks])[i].extend(rows)
                    if rows:
                        parts.setdefault(block.queries, []).append((node, i))
            for j, those in parts.items():
                rows = [place[p] for p in new_of(plan.splits[j], work.since) if p in place]
                groups.setdefault(tuple(those), []).extend(rows)
        total = len(self.positions)
        self.messages = {node: bool(rows) for node, rows in queries.items()}
        self._queries = {node: Pick(rows, total) for node, rows in queries.items()}
        self._keys = {node: Pick(rows, total) for node, rows in keys.items()}
        self.answers = {node: [*map(len, answered[node])] for node, asks in self.messages.items() if asks}
        at = {
            (node, i): {row: at for at, row in enumerate(rows)}
            for node in self.answers
            for i, rows in enumerate(answered[node])
        }
        self._groups = [
            [(node, i, Pick([at[node, i][row] for row in rows], len(at[node, i]))) for node, i in those]
            for those, rows in groups.items()
        ]
        order = [row for rows in groups.values() for row in rows]
        back = {row: i for i, row in enumerate(order)}
        self._back = Pick([back[row] for row in range(total)], total)

    def rows(
        self,
        queries: Float[Tensor, "h n d"],
        keys: Float[Tensor, "kv n d"],
        values: Float[Tensor, "kv n dv"],
        references: Float[Tensor, "h n"] | None = None,
    ) -> dict[AttnNode, Rows]:
        """Return the node's own rows for each AttnNode."""
        return {
            node: Rows(
                query(queries),
                self._keys[node](keys),
                self._keys[node](values),
                None if references is None else query(references),
            )
            for node, query in self._queries.items()
        }

    def merge(self, answers: Mapping[AttnNode, Sequence[Answer]]) -> Float[Tensor, "h n dv"]:
        """Merge the answers of all AttnNodes into the node's rows of the attention output."""
        outputs = [
            joined([picked(answers[node][i], pick) for node, i, pick in parts]) for parts in self._groups
        ]
        return self._back(cat(outputs))


class Pick:
    """A choice of rows by their places, whose index is copied to the rows' device once.

    Args:
        places: of the rows.
        total: number of rows; if all are taken in order, rows are passed on unchanged.
    """

    def __init__(self, places: Sequence[int], total: int) -> None:
        first, count = (places[0], len(places)) if places else (0, 0)
        together = list(places) == list(range(first, first + count))
        self.everything = together and count == total
        self._range = slice(first, first + count) if together else None
        self._index = torch.tensor(places, dtype=torch.long)

    def index(self, device: torch.device) -> Int[Tensor, " m"]:
        """Return the places on a device."""
        if self._index.device != device:
            self._index = self._index.to(device)
        return self._index

    def __call__(self, rows: Float[Tensor, "h n *d"]) -> Float[Tensor, "h m *d"]:
        if self.everything:
            return rows
        return rows[:, self._range if self._range is not None else self.index(rows.device)]


def cat(parts: Sequence[Tensor]) -> Tensor:
    """Join rows, which lie on the second axis."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), 1)
