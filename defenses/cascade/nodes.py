"""What CompNodes and AttnNodes compute, on tensors alone (paper, appendix G, Algorithms 7 to 9).

The pre-pass (Algorithm 7) is the model's own projections and rotary embedding, run by transformers on the node's
tokens; what is left of it here is which rows go where. Projection, residual and MLP after the post-pass are the
model's own as well.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from defenses.cascade.plan import AttnNode, Message, Plan, Positions, new_of
from hiddenlab.slice.door import Attention


@dataclass(frozen=True)
class Rows:
    """What a CompNode sends an AttnNode in a layer: rows of the positions that ``Message`` names."""

    queries: Float[Tensor, "h a d"]
    keys: Float[Tensor, "kv b d"]
    values: Float[Tensor, "kv b dv"]

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.queries, self.keys, self.values

    def to(self, device: str | None = None, dtype: torch.dtype | None = None) -> "Rows":
        """The same elsewhere, or in another dtype."""
        if device is None and dtype is None:
            return self
        return Rows(*(tensor.to(device=device, dtype=dtype) for tensor in self.tensors))

    @property
    def elements(self) -> int:
        return sum(tensor.numel() for tensor in self.tensors)


@dataclass(frozen=True)
class Partial:
    """Attention of some rows over one key shard: row maximum m, sum e of exp(score - m), and output u.

    Rows that see no key of the shard have m = -inf, e = 0, u = 0. With ``total`` None, ``maximum`` is the
    logsumexp of the row's scores, which says the same in one number.
    """

    maximum: Float[Tensor, "h a"]
    total: Float[Tensor, "h a"] | None
    output: Float[Tensor, "h a dv"]

    def rows(self, index: Tensor | None) -> "Partial":
        """Some of the rows; None is all of them."""
        if index is None:
            return self
        total = None if self.total is None else self.total[:, index]
        return Partial(self.maximum[:, index], total, self.output[:, index])

    def compressed(self) -> "Partial":
        """The same with one logsumexp a row."""
        if self.total is None:
            return self
        return replace(self, maximum=self.maximum + self.total.log(), total=None)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.maximum, self.output) if self.total is None else (self.maximum, self.total, self.output)

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "Partial":
        """The inverse of ``tensors``."""
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
    """One block of an AttnNode (Algorithm 8); query heads are grouped over key/value heads, not repeated.

    Args:
        visible: which keys each query sees; None for all.
    """
    heads, a, d = queries.shape
    kv, b, width = values.shape
    grouped = queries.reshape(kv, heads // kv * a, d)
    scores = (grouped @ keys.transpose(1, 2)).float().view(heads, a, b).mul_(attention.scaling)
    if attention.softcap is not None:
        scores = torch.tanh(scores / attention.softcap) * attention.softcap
    if visible is not None:
        scores.masked_fill_(~visible.to(scores.device), float("-inf"))
    # No key at all (an empty shard) is like no visible key.
    maximum = scores.amax(2) if b else scores.new_full((heads, a), float("-inf"))
    weights = scores.sub_(maximum.clamp(min=torch.finfo(scores.dtype).min)[..., None]).exp_()
    total = weights.sum(2)
    mixed = (weights.to(values.dtype).view(kv, heads // kv * a, b) @ values).view(heads, a, width)
    output = mixed / total.clamp(min=torch.finfo(total.dtype).tiny)[..., None].to(mixed.dtype)
    return Partial(maximum, total, output)


def post_pass(parts: Sequence[Partial]) -> Float[Tensor, "h a dv"]:
    """Merge the partial outputs of all key shards (Algorithm 9): a softmax over shards. No visible key gives 0."""
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
        node: which. compress: answer with one logsumexp a row. keep: keep keys and values for further passes
            (token-sharded KV caching, appendix Q).
    """

    def __init__(self, node: AttnNode, *, compress: bool = False, keep: bool = False) -> None:
        self.node, self.compress, self.keep = node, compress, keep
        self.messages: dict[int, Message] = {}
        self._held: list[int] = []
        self._cache: dict[int, tuple[Tensor, Tensor]] = {}
        self._blocks: list[_Block] = []
        self._masks: dict[tuple[bool, int | None], list[Tensor | None]] = {}

    def begin(self, plan: Plan, since: int = 0, hidden: Positions = ()) -> None:
        """Start a pass over the positions from ``since`` on.

        Args:
            hidden: padding, which no query may see.
        """
        self.messages = {message.comp: message for message in plan.messages(since, (self.node,))}
        self._hidden = frozenset(hidden)
        self._masks.clear()
        order = sorted(self.messages)
        query_place = _places(p for comp in order for p in self.messages[comp].queries)
        owner = {p: comp for comp in order for p in self.messages[comp].queries}
        if since == 0:
            self._held.clear()
        self._held += [p for comp in order for p in self.messages[comp].keys]
        key_place = _places(self._held)
        self._blocks = []
        for block in plan.blocks(self.node):
            asked, shown = new_of(plan.splits[block.queries], since), plan.splits[block.keys]
            answered = {
                comp: _index([i for i, p in enumerate(asked) if owner[p] == comp], len(asked))
                for comp in order
            }
            queries = _index([query_place[p] for p in asked], len(query_place))
            keys = _index([key_place[p] for p in shown], len(self._held))
            self._blocks.append(_Block(asked, shown, queries, keys, answered))

    def run(self, layer: int, rows: Mapping[int, Rows], attention: Attention) -> dict[int, list[Partial]]:
        """Attention of the new query rows of all CompNodes over all key rows so far.

        Returns:
            For each CompNode, a partial result a block, its rows in the order of the CompNode's positions.
        """
        order = sorted(rows)
        queries = _cat([rows[comp].queries for comp in order])
        held = self._cache.get(layer)
        before_k, before_v = ([held[0]], [held[1]]) if held is not None else ([], [])
        keys = _cat([*before_k, *(rows[comp].keys for comp in order)])
        values = _cat([*before_v, *(rows[comp].values for comp in order)])
        if self.keep:
            self._cache[layer] = keys, values
        out: dict[int, list[Partial]] = {comp: [] for comp in order}
        for block, visible in zip(self._blocks, self._visible(attention), strict=True):
            k, v = _pick(keys, block.keys), _pick(values, block.keys)
            part = attention_pass(_pick(queries, block.queries), k, v, visible, attention)
            part = part.compressed() if self.compress else part
            for comp in order:
                out[comp].append(part.rows(block.answered[comp]))
        return out

    def _visible(self, attention: Attention) -> list[Tensor | None]:
        """The mask of each block, None where everything is seen; made once a pass and kind of attention."""
        kind = attention.causal, attention.window
        if kind not in self._masks:
            self._masks[kind] = [
                _partly(attention.visible(block.asked, block.shown, self._hidden)) for block in self._blocks
            ]
        return self._masks[kind]


@dataclass(frozen=True)
class _Block:
    """One (query shard, key shard) block of a pass: its positions, and where their rows lie; None is 'all'."""

    asked: Positions
    shown: Positions
    queries: Tensor | None
    keys: Tensor | None
    answered: Mapping[int, Tensor | None]


class CompWorker:
    """A CompNode's part of a pass: cut its rows up for the AttnNodes, and merge what comes back.

    Attributes:
        positions: of its shard, those from ``since`` on. messages: what it sends, one an AttnNode.
    """

    def __init__(self, plan: Plan, index: int, since: int = 0) -> None:
        self.plan, self.index = plan, index
        self.positions = new_of(plan.shards[index], since)
        place = _places(self.positions)
        self.messages = [message for message in plan.messages(since) if message.comp == index]
        self._queries = [_index([place[p] for p in m.queries], len(place)) for m in self.messages]
        self._keys = [_index([place[p] for p in m.keys], len(place)) for m in self.messages]
        # For each query shard with rows of this node, which answers (AttnNode, block) are merged for it.
        self._parts: dict[int, list[tuple[AttnNode, int]]] = {}
        for message in self.messages:
            for i, block in enumerate(plan.blocks(message.attn)):
                if any(p in place for p in new_of(plan.splits[block.queries], since)):
                    self._parts.setdefault(block.queries, []).append((message.attn, i))
        order = [p for split in self._parts for p in new_of(plan.splits[split], since) if p in place]
        back = _places(order)
        self._back = _index([back[p] for p in self.positions], len(order))

    def rows(
        self,
        queries: Float[Tensor, "h n d"],
        keys: Float[Tensor, "kv n d"],
        values: Float[Tensor, "kv n dv"],
    ) -> dict[AttnNode, Rows]:
        """What each AttnNode is sent of the node's own rows."""
        return {
            message.attn: Rows(_pick(queries, q), _pick(keys, k), _pick(values, k))
            for message, q, k in zip(self.messages, self._queries, self._keys, strict=True)
        }

    def merge(self, answers: Mapping[AttnNode, Sequence[Partial]]) -> Float[Tensor, "h n dv"]:
        """The node's rows of the attention output, from all AttnNodes that answered it."""
        merged = [
            post_pass([answers[node][block] for node, block in parts]) for parts in self._parts.values()
        ]
        return _pick(_cat(merged), self._back)


def _places(positions: Iterable[int]) -> dict[int, int]:
    return {p: i for i, p in enumerate(positions)}


def _index(places: Sequence[int], total: int) -> Tensor | None:
    """Rows to pick as an index, None where it is all of them in order."""
    return None if list(places) == list(range(total)) else torch.tensor(places, dtype=torch.long)


def _pick(rows: Tensor, index: Tensor | None) -> Tensor:
    return rows if index is None else rows[:, index]


def _cat(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), 1)


def _partly(visible: Tensor) -> Tensor | None:
    return None if bool(visible.all()) else visible
