"""Compute what CompNodes and AttnNodes do, on tensors alone (paper, appendix G, Algorithms 7 to 9).

The pre-pass (Algorithm 7) is the model's own projections and rotary embedding, run by transformers on the node's
tokens; this file only decides which rows go where. Projection, residual and MLP after the post-pass are the model's own
as well.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hiddenlab.models.attention import Attention
from hiddenlab.sharding import AttnNode, Message, Plan, Positions, new_of


@dataclass(frozen=True)
class Rows:
    """The rows that a CompNode sends to an AttnNode in a layer, of the positions that ``Message`` names."""

    queries: Float[Tensor, "h a d"]
    keys: Float[Tensor, "kv b d"]
    values: Float[Tensor, "kv b dv"]

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.queries, self.keys, self.values

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

    maximum: Float[Tensor, "h a"]
    total: Float[Tensor, "h a"] | None
    output: Float[Tensor, "h a dv"]

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


def attention_pass(
    queries: Float[Tensor, "h a d"],
    keys: Float[Tensor, "kv b d"],
    values: Float[Tensor, "kv b dv"],
    visible: Bool[Tensor, "a b"] | None,
    attention: Attention,
) -> Partial:
    """Compute attention of queries over one key shard (Algorithm 8).

    Query heads are grouped over key/value heads, not repeated.

    Args:
        queries, keys, values: rows by head.
        visible: which keys each query sees; None for all.
        attention: how the layer attends.
    """
    heads, a, d = queries.shape
    kv, b, width = values.shape
    grouped = queries.reshape(kv, heads // kv * a, d)
    scores = (grouped @ keys.transpose(1, 2)).float().view(heads, a, b).mul_(attention.scaling)
    if attention.softcap is not None:
        scores = torch.tanh(scores / attention.softcap) * attention.softcap
    if visible is not None:
        scores.masked_fill_(~visible.to(scores.device), float("-inf"))
    # An empty shard is treated like one without visible keys.
    maximum = scores.amax(2) if b else scores.new_full((heads, a), float("-inf"))
    weights = scores.sub_(maximum.clamp(min=torch.finfo(scores.dtype).min)[..., None]).exp_()
    total = weights.sum(2)
    mixed = (weights.to(values.dtype).view(kv, heads // kv * a, b) @ values).view(heads, a, width)
    output = mixed / total.clamp(min=torch.finfo(total.dtype).tiny)[..., None].to(mixed.dtype)
    return Partial(maximum, total, output)


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


class AttnWorker:
    """An AttnNode's part of one request: no weights, only the rows it is sent, kept from pass to pass.

    Args:
        node: which AttnNode.
        compress: answer with one logsumexp per row.
        keep: keep keys and values for further passes (token-sharded KV caching, appendix Q).
    """

    def __init__(self, node: AttnNode, *, compress: bool = False, keep: bool = False) -> None:
        self.node, self.compress, self.keep = node, compress, keep
        self.messages: dict[int, Message] = {}
        self._shards: dict[int, _KeyShard] = {}
        self._blocks: list[_Block] = []
        self._masks: dict[tuple[bool, int | None, torch.device], list[Tensor | None]] = {}

    def begin(self, plan: Plan, since: int = 0, hidden: Positions = ()) -> None:
        """Start a pass over the positions from ``since`` on.

        Args:
            plan: for all tokens so far.
            since: first new position.
            hidden: padding, which no query may see.
        """
        self.messages = {message.comp: message for message in plan.messages(since, (self.node,))}
        self._hidden = frozenset(hidden)
        self._masks.clear()
        if since == 0:
            self._shards.clear()
        self._blocks = []
        queries = {comp: message.queries for comp, message in self.messages.items()}
        keys = {comp: message.keys for comp, message in self.messages.items()}
        for block in plan.blocks(self.node):
            if block.keys not in self._shards:
                self._shards[block.keys] = _KeyShard()
            self._shards[block.keys].expect(_pieces(keys, new_of(plan.splits[block.keys], since)))
            asked = _pieces(queries, new_of(plan.splits[block.queries], since))
            self._blocks.append(_Block(block.keys, tuple(asked)))

    def run(self, layer: int, rows: Mapping[int, Rows], attention: Attention) -> dict[int, list[Partial]]:
        """Compute attention of the new query rows of all CompNodes over all key rows so far.

        Returns:
            For each CompNode, one partial result per block, its rows in the order of the CompNode's positions.
        """
        held = {name: shard.take(layer, rows, self.keep) for name, shard in self._shards.items()}
        partials: dict[int, list[Partial]] = {comp: [] for comp in rows}
        some = next(iter(rows.values())).queries
        for block, visible in zip(self._blocks, self._visible(attention, some.device), strict=True):
            asked = [piece.pick(rows[piece.comp].queries) for piece in block.asked]
            queries = _cat(asked) if asked else some[:, :0]
            part = attention_pass(queries, *held[block.keys], visible, attention)
            part = part.compressed() if self.compress else part
            at = 0
            places = {}
            for piece in block.asked:
                places[piece.comp] = slice(at, at + len(piece.positions))
                at += len(piece.positions)
            for comp in rows:
                partials[comp].append(part.rows(places.get(comp, slice(0, 0))))
        return partials

    def _visible(self, attention: Attention, device: torch.device) -> list[Tensor | None]:
        """Return the mask of each block, made once per pass and kind of attention; None where all keys are seen."""
        kind = attention.causal, attention.window, device
        if kind not in self._masks:
            masks = self._masks[kind] = []
            for block in self._blocks:
                seen = block.positions, self._shards[block.keys].positions, self._hidden
                everything = attention.sees_all(*seen)
                masks.append(None if everything else attention.visible(*seen).to(device))
        return self._masks[kind]


@dataclass(frozen=True)
class _Piece:
    """Rows of one CompNode's message: their positions, and how they are picked from the message."""

    comp: int
    positions: Positions
    pick: "_Pick"


@dataclass(frozen=True)
class _Block:
    """One (query shard, key shard) block of a pass: the key shard, and who asks for which rows."""

    keys: int
    asked: tuple[_Piece, ...]

    @property
    def positions(self) -> Positions:
        return tuple(p for piece in self.asked for p in piece.positions)


class _KeyShard:
    """Keys and values of one shard, in order of arrival, which does not matter to attention."""

    def __init__(self) -> None:
        self.positions: list[int] = []
        self._new: list[_Piece] = []
        self._before = 0
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def expect(self, pieces: Sequence[_Piece]) -> None:
        """Start a pass that brings these rows."""
        self._new, self._before = list(pieces), len(self.positions)
        self.positions += [p for piece in pieces for p in piece.positions]

    def take(self, layer: int, rows: Mapping[int, Rows], keep: bool) -> tuple[Tensor, Tensor]:
        """Return all keys and values of a layer, including the new ones."""
        some = next(iter(rows.values()))
        if not self._new:
            if layer in self._kept:
                keys, values = self._kept[layer]
                return keys[:, : self._before], values[:, : self._before]
            return some.keys[:, :0], some.values[:, :0]
        keys = _cat([piece.pick(rows[piece.comp].keys) for piece in self._new])
        values = _cat([piece.pick(rows[piece.comp].values) for piece in self._new])
        if not keep:
            return keys, values
        kept = self._kept.get(layer)
        self._kept[layer] = (
            _appended(kept and kept[0], keys, self._before),
            _appended(kept and kept[1], values, self._before),
        )
        n = len(self.positions)
        return self._kept[layer][0][:, :n], self._kept[layer][1][:, :n]


def _appended(buffer: Tensor | None, rows: Tensor, at: int) -> Tensor:
    """Write rows to a buffer after its first ``at`` rows; the buffer doubles when it is full."""
    n = at + rows.shape[1]
    if buffer is None or buffer.shape[1] < n:
        grown = rows.new_empty(rows.shape[0], max(n + 16, 2 * at), rows.shape[2])
        if buffer is not None and at:
            grown[:, :at] = buffer[:, :at]
        buffer = grown
    buffer[:, at:n] = rows
    return buffer


def _pieces(messages: Mapping[int, Positions], wanted: Positions) -> list[_Piece]:
    """Find the messages that rows of these positions come from."""
    pieces = []
    for comp in sorted(messages):
        place = _places(messages[comp])
        mine = tuple(p for p in wanted if p in place)
        if mine:
            pieces.append(_Piece(comp, mine, _Pick([place[p] for p in mine], len(place))))
    return pieces


class CompWorker:
    """A CompNode's part of a pass: it splits its rows among AttnNodes, and merges their answers.

    Attributes:
        positions: of its shard, from ``since`` on.
        messages: what it sends, one per AttnNode.
    """

    def __init__(self, plan: Plan, index: int, since: int = 0) -> None:
        self.plan, self.index = plan, index
        self.positions = new_of(plan.shards[index], since)
        place = _places(self.positions)
        self.messages = [message for message in plan.messages(since) if message.comp == index]
        self._queries = [_Pick([place[p] for p in m.queries], len(place)) for m in self.messages]
        self._keys = [_Pick([place[p] for p in m.keys], len(place)) for m in self.messages]
        # For each query shard with rows of this node, which answers (AttnNode, block) are merged for it.
        self._parts: dict[int, list[tuple[AttnNode, int]]] = {}
        for message in self.messages:
            for i, block in enumerate(plan.blocks(message.attn)):
                if any(p in place for p in new_of(plan.splits[block.queries], since)):
                    self._parts.setdefault(block.queries, []).append((message.attn, i))
        order = [p for split in self._parts for p in new_of(plan.splits[split], since) if p in place]
        back = _places(order)
        self._back = _Pick([back[p] for p in self.positions], len(order))

    def rows(
        self,
        queries: Float[Tensor, "h n d"],
        keys: Float[Tensor, "kv n d"],
        values: Float[Tensor, "kv n dv"],
    ) -> dict[AttnNode, Rows]:
        """Return the node's own rows for each AttnNode."""
        return {
            message.attn: Rows(query(queries), key(keys), key(values))
            for message, query, key in zip(self.messages, self._queries, self._keys, strict=True)
        }

    def merge(self, answers: Mapping[AttnNode, Sequence[Partial]]) -> Float[Tensor, "h n dv"]:
        """Merge the answers of all AttnNodes into the node's rows of the attention output."""
        merged = [
            post_pass([answers[node][block] for node, block in parts]) for parts in self._parts.values()
        ]
        return self._back(_cat(merged))


def _places(positions: Iterable[int]) -> dict[int, int]:
    return {p: i for i, p in enumerate(positions)}


class _Pick:
    """A choice of rows by their places, whose index is copied to the rows' device once.

    Args:
        places: of the rows.
        total: number of rows; if all are taken in order, rows are passed on unchanged.
    """

    def __init__(self, places: Sequence[int], total: int) -> None:
        everything = list(places) == list(range(total))
        self._index = None if everything else torch.tensor(places, dtype=torch.long)

    def __call__(self, rows: Float[Tensor, "h n d"]) -> Float[Tensor, "h m d"]:
        if self._index is None:
            return rows
        if self._index.device != rows.device:
            self._index = self._index.to(rows.device)
        return rows[:, self._index]


def _cat(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), 1)
