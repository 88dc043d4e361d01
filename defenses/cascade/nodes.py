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

from defenses.cascade.plan import AttnNode, Message, Plan, Positions
from hiddenlab.slice.door import Attention


@dataclass(frozen=True)
class Rows:
    """What a CompNode sends an AttnNode in a layer: rows of the positions that ``Message`` names."""

    queries: Float[Tensor, "h a d"]
    keys: Float[Tensor, "kv b d"]
    values: Float[Tensor, "kv b dv"]

    @property
    def elements(self) -> int:
        return self.queries.numel() + self.keys.numel() + self.values.numel()


@dataclass(frozen=True)
class Partial:
    """Attention of some rows over one key shard: row maximum m, sum e of exp(score - m), and output u.

    Rows that see no key of the shard have m = -inf, e = 0, u = 0. With ``total`` None, ``maximum`` is the
    logsumexp of the row's scores, which says the same in one number.
    """

    maximum: Float[Tensor, "h a"]
    total: Float[Tensor, "h a"] | None
    output: Float[Tensor, "h a dv"]

    def rows(self, index: Tensor) -> "Partial":
        """Some of the rows."""
        total = None if self.total is None else self.total[:, index]
        return Partial(self.maximum[:, index], total, self.output[:, index])

    def compressed(self) -> "Partial":
        """The same with one logsumexp a row."""
        if self.total is None:
            return self
        return replace(self, maximum=self.maximum + self.total.log(), total=None)

    @property
    def elements(self) -> int:
        extra = 0 if self.total is None else self.total.numel()
        return self.maximum.numel() + extra + self.output.numel()


def attention_pass(
    queries: Float[Tensor, "h a d"],
    keys: Float[Tensor, "kv b d"],
    values: Float[Tensor, "kv b dv"],
    visible: Bool[Tensor, "a b"],
    attention: Attention,
) -> Partial:
    """One block of an AttnNode (Algorithm 8); query heads are grouped over key/value heads, not repeated."""
    heads, a, d = queries.shape
    kv, b, width = values.shape
    grouped = queries.reshape(kv, heads // kv * a, d)
    scores = (grouped @ keys.transpose(1, 2)).float().view(heads, a, b) * attention.scaling
    if attention.softcap is not None:
        scores = torch.tanh(scores / attention.softcap) * attention.softcap
    scores = scores.masked_fill(~visible.to(scores.device), float("-inf"))
    # No key at all (an empty shard) is like no visible key.
    maximum = scores.amax(2) if b else scores.new_full((heads, a), float("-inf"))
    weights = (scores - maximum.clamp(min=torch.finfo(scores.dtype).min)[..., None]).exp()
    total = weights.sum(2)
    mixed = (weights.to(values.dtype).view(kv, heads // kv * a, b) @ values).view(heads, a, width)
    output = mixed / total.clamp(min=torch.finfo(total.dtype).tiny)[..., None].to(mixed.dtype)
    return Partial(maximum, total, output)


def post_pass(parts: Sequence[Partial]) -> Float[Tensor, "h a dv"]:
    """Merge the partial outputs of all key shards (Algorithm 9): a softmax over shards. No visible key gives 0."""
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
    """An AttnNode: no weights, only the rows it is sent. It knows the plan and the kind of attention."""

    def __init__(self, plan: Plan, node: AttnNode, *, compress: bool = False) -> None:
        self.plan, self.node, self.compress = plan, node, compress
        self.messages = {message.comp: message for message in plan.messages() if message.attn == node}

    def run(self, rows: Mapping[int, Rows], attention: Attention) -> dict[int, list[Partial]]:
        """Attention over the rows of all CompNodes.

        Returns:
            For each CompNode, a partial result a block, its rows in the order of the CompNode's positions.
        """
        order = sorted(rows)
        queries = torch.cat([rows[comp].queries for comp in order], 1)
        keys = torch.cat([rows[comp].keys for comp in order], 1)
        values = torch.cat([rows[comp].values for comp in order], 1)
        query_place = _places(p for comp in order for p in self.messages[comp].queries)
        key_place = _places(p for comp in order for p in self.messages[comp].keys)
        owner = {p: comp for comp in order for p in self.messages[comp].queries}
        out: dict[int, list[Partial]] = {comp: [] for comp in order}
        for block in self.plan.blocks(self.node):
            asked, shown = self.plan.splits[block.queries], self.plan.splits[block.keys]
            k = torch.tensor([key_place[p] for p in shown], dtype=torch.long)
            part = attention_pass(
                queries[:, torch.tensor([query_place[p] for p in asked], dtype=torch.long)],
                keys[:, k],
                values[:, k],
                attention.visible(asked, shown),
                attention,
            )
            part = part.compressed() if self.compress else part
            for comp in order:
                mine = [i for i, p in enumerate(asked) if owner[p] == comp]
                out[comp].append(part.rows(torch.tensor(mine, dtype=torch.long)))
        return out


class CompWorker:
    """A CompNode's part of an attention layer: cut its rows up for the AttnNodes, and merge what comes back."""

    def __init__(self, plan: Plan, index: int) -> None:
        self.plan, self.index = plan, index
        self.positions = plan.shards[index]
        self._place = _places(self.positions)
        self.messages: list[Message] = [message for message in plan.messages() if message.comp == index]

    def rows(
        self,
        queries: Float[Tensor, "h n d"],
        keys: Float[Tensor, "kv n d"],
        values: Float[Tensor, "kv n dv"],
    ) -> dict[AttnNode, Rows]:
        """What each AttnNode is sent of the node's own rows."""
        out = {}
        for message in self.messages:
            q, k = self._index(message.queries), self._index(message.keys)
            out[message.attn] = Rows(queries[:, q], keys[:, k], values[:, k])
        return out

    def merge(self, answers: Mapping[AttnNode, Sequence[Partial]]) -> Float[Tensor, "h n dv"]:
        """The node's rows of the attention output, from all AttnNodes that answered it."""
        by_split: dict[int, list[Partial]] = {}
        for message in self.messages:
            for block, part in zip(self.plan.blocks(message.attn), answers[message.attn], strict=True):
                if part.maximum.shape[1]:
                    by_split.setdefault(block.queries, []).append(part)
        merged, order = [], []
        for split, parts in by_split.items():
            merged.append(post_pass(parts))
            order += [p for p in self.plan.splits[split] if p in self._place]
        out = torch.cat(merged, 1)
        return out[:, torch.tensor([order.index(p) for p in self.positions], dtype=torch.long)]

    def _index(self, positions: Positions) -> Tensor:
        return torch.tensor([self._place[p] for p in positions], dtype=torch.long)


def _places(positions: Iterable[int]) -> dict[int, int]:
    return {p: i for i, p in enumerate(positions)}
