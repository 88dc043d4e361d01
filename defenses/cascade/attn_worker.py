"""Compute an AttnNode's part of a batch: attention of new query rows over its key shards (paper, Algorithm 8)."""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from hiddenlab.defenses.cascade.key_cache import EMPTY, Bank, Held, KeyCache, Writes, span
from hiddenlab.defenses.cascade.masked_sums import BlockMasks, SumKeys
from hiddenlab.defenses.cascade.nodes import Answer, Partial, Pick, Rows, attention_pass, cat
from hiddenlab.defenses.cascade.passes import Pass
from hiddenlab.models.attention import Attention
from hiddenlab.sharding import AttnNode, Positions, new_of


class ForgottenError(Exception):
    """Earlier rows of a request are missing, since the node was started anew."""


@dataclass(frozen=True)
class _Asked:
    """The queries of one request in a block: where their rows come from and go to, and which keys they see.

    Attributes:
        rows: places among all query rows. to: places among the block's rows. positions: of the queries.
        keys: places of the new keys where none are kept. held: the kept keys, or None.
        key_positions: of the keys. hidden: padding.
    """

    rows: Sequence[int]
    to: Sequence[int]
    positions: Positions
    keys: Sequence[int] | None
    held: Held | None
    key_positions: Positions
    hidden: frozenset[int]


class _Segment:
    """The queries of one request, as one product."""

    def __init__(self, asked: _Asked, sizes: tuple[int, int], block: int) -> None:
        self._asked = asked
        self._rows = Pick(asked.rows, sizes[0])
        self._keys = None if asked.keys is None else Pick(asked.keys, sizes[1])
        self.to = Pick(asked.to, block)

    def visible(self, attention: Attention) -> Bool[Tensor, "a b"] | None:
        """Return which keys each query sees; None for all."""
        seen = self._asked.positions, self._asked.key_positions, self._asked.hidden
        return None if attention.sees_all(*seen) else attention.visible(*seen)

    def run(
        self, layer: int, rows: Tensor, new: tuple[Tensor, Tensor], mask: Tensor | None, how: Attention
    ) -> Partial:
        """Return the partial outputs, in the order of ``to``."""
        if self._keys is not None:
            keys, values = self._keys(new[0]), self._keys(new[1])
        elif (held := self._asked.held) is None:
            keys, values = new[0][:, :0], new[1][:, :0]
        else:
            keys, values = (there[held.place, :, : held.length] for there in held.bank.layer(layer, *new))
        return attention_pass(self._rows(rows), keys, values, mask, how)


class _Group:
    """One new query each of requests whose keys lie in one bank, as one product for all of them."""

    def __init__(
        self, bank: Bank, group: Sequence[tuple[Held, _Asked]], sizes: tuple[int, int], block: int
    ) -> None:
        ordered = sorted(group, key=lambda pair: pair[0].place)
        places = [held.place for held, _ in ordered]
        self._bank = bank
        self._length = max(held.length for held, _ in ordered)
        self._span = span(places)
        low, high = self._span or (0, 0)
        self._places = Pick([p - low for p in places], high - low)
        self._rows = Pick([asked.rows[0] for _, asked in ordered], sizes[0])
        self._positions = torch.tensor([asked.positions[0] for _, asked in ordered])
        self.to = Pick([asked.to[0] for _, asked in ordered], block)

    def visible(self, attention: Attention) -> Bool[Tensor, "s 1 b"] | None:
        """Return which keys each query sees; None for all."""
        keys, queries = self._bank.positions, self._positions
        if self._span is None:
            keys = keys[self._places.index(keys.device)]
        else:
            keys = keys[slice(*self._span)]
            queries = torch.zeros(len(keys), dtype=torch.long)
            queries[self._places.index(keys.device)] = self._positions
        keys = keys[:, : self._length]
        seen = attention.visible_at(queries[:, None], keys) & (keys != EMPTY)[:, None]
        return None if bool(seen.all()) else seen

    def run(
        self, layer: int, rows: Tensor, new: tuple[Tensor, Tensor], mask: Tensor | None, how: Attention
    ) -> Partial:
        """Return the partial outputs, in the order of ``to``."""
        there = self._bank.layer(layer, *new)
        queries = self._rows(rows).transpose(0, 1)
        if self._span is None:
            index = self._places.index(rows.device)
            keys, values = there[0][index], there[1][index]
        else:
            keys, values = (tensor[slice(*self._span)] for tensor in there)
            if not self._places.everything:
                spread = queries.new_zeros(len(keys), *queries.shape[1:])
                spread[self._places.index(rows.device)] = queries
                queries = spread
        part = attention_pass(
            queries[:, :, None], keys[:, :, : self._length], values[:, :, : self._length], mask, how
        )
        tensors = [tensor[:, :, 0].transpose(0, 1) for tensor in part.tensors]
        return Partial.of([self._places(tensor) if self._span else tensor for tensor in tensors])


@dataclass
class _Block:
    """One (query shard, key shard) block of a batch.

    Attributes:
        parts: products, each of some of its rows.
        rows: number of query rows. slices: those of each CompNode.
        queries: their places among all query rows. masks: of the answer; None sends it as it is.
    """

    parts: list[_Segment | _Group]
    rows: int
    slices: Mapping[int, slice]
    queries: Pick
    masks: BlockMasks | None


class AttnWorker:
    """An AttnNode's computation: no weights, only the rows it is sent, kept from pass to pass where that is asked for.

    Args:
        node: which AttnNode.
        compress: answer with one logsumexp per row.
        masks: keys of masked sums; None answers with partial results.
    """

    def __init__(self, node: AttnNode, *, compress: bool = False, masks: SumKeys | None = None) -> None:
        self.node, self.compress, self.masks = node, compress, masks
        self._caches: dict[int, KeyCache] = {}

    def begin(self, passes: Sequence[Pass], batch: str) -> "AttnBatch":
        """Start a batch.

        Args:
            batch: its name.

        Raises:
            ForgottenError: earlier rows of a request are missing.
        """
        shards = {block.keys for block in passes[0].plan.blocks(self.node)}
        for work in passes:
            for shard in shards:
                split = work.plan.splits[shard]
                before = len(split) - len(new_of(split, work.since))
                held = self._caches.setdefault(shard, KeyCache()).held(work.request)
                if before != (held.length if held is not None else 0):
                    raise ForgottenError(work.request)
        return AttnBatch(self, passes, self._caches, batch)

    def close(self, request: str) -> None:
        """Forget a request."""
        for cache in self._caches.values():
            cache.forget(request)


class AttnBatch:
    """An AttnNode's part of one batch.

    Rows of a CompNode lie one pass behind the other, in the order of the batch, each pass by position.

    Attributes:
        sizes: for each CompNode, how many query rows and key rows it sends in a layer.
        asked: passes that ask something. stored: passes of which keys are only kept.
    """

    def __init__(
        self, worker: AttnWorker, passes: Sequence[Pass], caches: Mapping[int, KeyCache], batch: str
    ) -> None:
        self.compress, self.masked = worker.compress, worker.masks is not None
        self._step = -1  # of the last answer
        node, blocks = worker.node, passes[0].plan.blocks(worker.node)
        counts: dict[int, list[int]] = {}  # of each CompNode: queries and keys so far
        local: list[tuple[dict[int, tuple[int, int]], dict[int, tuple[int, int]]]] = []
        for work in passes:
            queries: dict[int, tuple[int, int]] = {}
            keys: dict[int, tuple[int, int]] = {}
            for message in work.messages((node,)):
                count = counts.setdefault(message.comp, [0, 0])
                for place, positions, rows in ((0, message.queries, queries), (1, message.keys, keys)):
                    for p in positions:
                        rows[p] = message.comp, count[place]
                        count[place] += 1
            local.append((queries, keys))
        self.asked = sum(bool(queries) for queries, _ in local)
        self.stored = sum(bool(keys) and not queries for queries, keys in local)
        self.sizes = {comp: (count[0], count[1]) for comp, count in sorted(counts.items())}
        # Where each CompNode's rows begin once those of all CompNodes are joined.
        begins: dict[int, tuple[int, int]] = {}
        total = 0, 0
        for comp, (asked_rows, new_rows) in self.sizes.items():
            begins[comp] = total
            total = total[0] + asked_rows, total[1] + new_rows
        query_at = [{p: begins[comp][0] + i for p, (comp, i) in places.items()} for places, _ in local]
        key_at = [{p: begins[comp][1] + i for p, (comp, i) in places.items()} for _, places in local]
        held: dict[tuple[str, int], Held | None] = {}
        self._writes: list[Writes] = []
        for shard in {block.keys for block in blocks}:
            writes = []
            for work, at in zip(passes, key_at, strict=True):
                if work.keep:
                    fresh = new_of(work.plan.splits[shard], work.since)
                    kept = held[work.request, shard] = caches[shard].expect(work.request, fresh)
                    if kept is not None and fresh:
                        writes.append((kept, [at[p] for p in fresh]))
            self._writes.append(Writes(writes, total[1]))
        self._blocks = []
        for block in blocks:
            # The rows of a block: by CompNode, then pass, then position.
            order = sorted(
                (local[place][0][p][0], place, p)
                for place, work in enumerate(passes)
                for p in work.asked(block)
            )
            to = {(place, p): i for i, (_, place, p) in enumerate(order)}
            owners = [comp for comp, _, _ in order]
            slices = {c: slice(bisect_left(owners, c), bisect_right(owners, c)) for c in self.sizes}
            parts: list[_Segment | _Group] = []
            single: dict[int, list[tuple[Held, _Asked]]] = {}
            for place, work in enumerate(passes):
                asked = work.asked(block)
                if not asked:
                    continue
                split = work.plan.splits[block.keys]
                kept = held.get((work.request, block.keys))
                one = _Asked(
                    [query_at[place][p] for p in asked],
                    [to[place, p] for p in asked],
                    asked,
                    None if work.keep else [key_at[place][p] for p in split],
                    kept,
                    split,
                    frozenset(work.hidden),
                )
                if kept is not None and len(asked) == 1 and not work.hidden:
                    single.setdefault(kept.bank.capacity, []).append((kept, one))
                else:
                    parts.append(_Segment(one, total, len(order)))
            parts += [_Group(group[0][0].bank, group, total, len(order)) for group in single.values()]
            masks = None
            if worker.masks is not None:
                asking = [
                    (work, [to[place, p] for p in work.asked(block)])
                    for place, work in enumerate(passes)
                    if work.asked(block)
                ]
                masks = BlockMasks(worker.masks, block, batch, asking)
            at_queries = Pick([query_at[place][p] for _, place, p in order], total[0])
            self._blocks.append(_Block(parts, len(order), slices, at_queries, masks))
        self._masks: dict[tuple[bool, int | None, torch.device], list[list[Tensor | None]]] = {}

    def run(
        self, step: int, layer: int, rows: Mapping[int, Rows], attention: Attention
    ) -> dict[int, list[Answer]]:
        """Compute attention of the new query rows of all CompNodes over all key rows so far.

        Args:
            step: attention calls before this one in the batch.

        Returns:
            For each CompNode, one answer per block, its rows in the order of the batch and of its positions.

        Raises:
            TooLargeError: see ``BlockMasks.answer``. ValueError: a step that was answered, whose masks would repeat.
        """
        if step <= self._step:
            raise ValueError(f"attention call {step} of this batch was answered before")
        self._step = step
        sent = [rows[comp] for comp in self.sizes]
        queries = cat([one.queries for one in sent])
        new = cat([one.keys for one in sent]), cat([one.values for one in sent])
        for writes in self._writes:
            writes.keep(layer, *new)
        references = (
            cat([one.references for one in sent if one.references is not None]) if self.masked else None
        )
        answers: dict[int, list[Answer]] = {comp: [] for comp in self.sizes}
        for block, masks in zip(self._blocks, self._visible(attention, queries.device), strict=True):
            parts = [
                (part.to, part.run(layer, queries, new, mask, attention))
                for part, mask in zip(block.parts, masks, strict=True)
            ]
            if not parts:
                joined = attention_pass(queries[:, :0], new[0][:, :0], new[1][:, :0], None, attention)
            elif len(parts) == 1 and parts[0][0].everything:
                joined = parts[0][1]
            else:
                tensors = [t.new_empty(t.shape[0], block.rows, *t.shape[2:]) for t in parts[0][1].tensors]
                for to, part in parts:
                    for there, tensor in zip(tensors, part.tensors, strict=True):
                        there[:, to.index(tensor.device)] = tensor
                joined = Partial.of(tensors)
            answer: Answer = joined.compressed() if self.compress and not self.masked else joined
            if block.masks is not None:
                assert references is not None and joined.total is not None
                own = joined.maximum, joined.total, joined.output
                answer = block.masks.answer(step, block.queries(references), *own)
            for comp, mine in block.slices.items():
                answers[comp].append(answer.rows(mine))
        return answers

    def _visible(self, attention: Attention, device: torch.device) -> list[list[Tensor | None]]:
        """Return the masks of each block's products, made once per batch and kind of attention."""
        kind = attention.causal, attention.window, device
        if kind not in self._masks:
            made = self._masks[kind] = []
            for block in self._blocks:
                masks = [part.visible(attention) for part in block.parts]
                made.append([None if mask is None else mask.to(device) for mask in masks])
        return self._masks[kind]
