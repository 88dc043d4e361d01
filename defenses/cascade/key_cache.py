"""Keep keys and values of many requests at an AttnNode, so that one product covers a token of each of them.

Token-sharded KV caching (paper, appendix Q). Requests of similar length share a *bank*: one tensor for each layer, with
a place for each request. A request that outgrows its bank moves to the next one, which is twice as long.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.defenses.cascade.nodes import Pick

SHORTEST = 64  # keys of the smallest bank
EMPTY = torch.iinfo(torch.int64).max  # position of a place without a key: no query sees it


class Bank:
    """Keys and values of requests with at most ``capacity`` keys.

    Attributes:
        capacity: keys of a place.
        positions: of the keys of each place.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.positions: Int[Tensor, "places capacity"] = torch.full((0, capacity), EMPTY)
        self._free: list[int] = []
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def take(self) -> int:
        """Return a free place; make more where there is none."""
        if not self._free:
            before = len(self.positions)
            after = max(1, 2 * before)
            self.positions = _longer(self.positions, after, EMPTY)
            self._free = list(range(before, after))
        # The lowest, so that places in use lie close to each other.
        place = min(self._free)
        self._free.remove(place)
        return place

    def give_back(self, place: int) -> None:
        """Free a place; without any in use the bank lets its memory go."""
        self.positions[place] = EMPTY
        self._free.append(place)
        if len(self._free) == len(self.positions):
            self._layers.clear()
            self.positions, self._free = self.positions[:0], []

    def layer(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values ``[places, heads, capacity, width]``; rows like these decide the shape."""
        there, places = self._layers.get(layer), len(self.positions)
        if there is None:
            # Zeros, since a place that no query sees is multiplied by 0, and anything may stand in empty memory.
            there = (
                keys.new_zeros(places, keys.shape[0], self.capacity, keys.shape[2]),
                values.new_zeros(places, values.shape[0], self.capacity, values.shape[2]),
            )
        elif len(there[0]) < places:
            there = _longer(there[0], places, 0), _longer(there[1], places, 0)
        self._layers[layer] = there
        return there


@dataclass
class Held:
    """The keys of one request: their bank and place, and how many are known before and after the running batch."""

    bank: Bank
    place: int
    length: int = 0
    before: int = 0
    moved_from: tuple[Bank, int] | None = None


class Writes:
    """New rows of a batch: which request each belongs to, prepared once for all layers.

    Args:
        rows: for each request with new keys, their places among the new rows of the batch.
        total: number of new rows.
    """

    def __init__(self, rows: Sequence[tuple[Held, Sequence[int]]], total: int) -> None:
        self._moved = [held for held, _ in rows if held.moved_from is not None]
        self._several = [(held, Pick(places, total)) for held, places in rows if len(places) > 1]
        single: dict[int, list[tuple[Held, int]]] = {}
        for held, places in rows:
            if len(places) == 1:
                single.setdefault(held.bank.capacity, []).append((held, places[0]))
        self._single = [
            (
                group[0][0].bank,
                Pick([held.place for held, _ in group], 0),
                Pick([held.before for held, _ in group], 0),
                Pick([place for _, place in group], total),
            )
            for group in single.values()
        ]

    def keep(self, layer: int, keys: Float[Tensor, "kv b d"], values: Float[Tensor, "kv b dv"]) -> None:
        """Keep a layer's new rows."""
        new = keys, values
        for held in self._moved:
            assert held.moved_from is not None
            old, place = held.moved_from
            for there, before in zip(held.bank.layer(layer, *new), old.layer(layer, *new), strict=True):
                there[held.place, :, : held.before] = before[place, :, : held.before]
        for held, pick in self._several:
            for there, rows in zip(held.bank.layer(layer, *new), new, strict=True):
                there[held.place, :, held.before : held.length] = pick(rows)
        for bank, places, at, pick in self._single:
            to = places.index(keys.device), at.index(keys.device)
            for there, rows in zip(bank.layer(layer, *new), new, strict=True):
                there[to[0], :, to[1]] = pick(rows).transpose(0, 1)


@dataclass
class KeyCache:
    """The keys and values of one key shard, of all requests that are kept."""

    _banks: dict[int, Bank] = field(default_factory=dict)
    _held: dict[str, Held] = field(default_factory=dict)

    def held(self, request: str) -> Held | None:
        """Return what is kept of a request, or None."""
        return self._held.get(request)

    def expect(self, request: str, positions: Sequence[int]) -> Held | None:
        """Make room for new keys of a request, in every layer; None where it has no keys at all."""
        held = self._held.get(request)
        if held is not None:
            self._leave(held)
            held.before = held.length
        if not positions:
            return held
        length = len(positions) + (held.length if held else 0)
        if held is None or length > held.bank.capacity:
            bank = self._bank(length)
            moved = Held(bank, bank.take())
            if held is not None:
                moved.length = moved.before = held.length
                moved.moved_from = held.bank, held.place
                bank.positions[moved.place, : held.length] = held.bank.positions[held.place, : held.length]
            held = self._held[request] = moved
        held.bank.positions[held.place, held.length : length] = torch.tensor(positions)
        held.length = length
        return held

    def forget(self, request: str) -> None:
        """Give the memory of a request back."""
        if (held := self._held.pop(request, None)) is not None:
            self._leave(held)
            held.bank.give_back(held.place)

    def _bank(self, length: int) -> Bank:
        capacity = max(SHORTEST, 1 << (length - 1).bit_length())
        return self._banks.setdefault(capacity, Bank(capacity))

    def _leave(self, held: Held) -> None:
        if held.moved_from is not None:
            bank, place = held.moved_from
            bank.give_back(place)
            held.moved_from = None


def span(places: Sequence[int]) -> tuple[int, int] | None:
    """Return the range of neighbouring places that is worth a pass over all of it; None where most are not wanted."""
    low, high = min(places), max(places) + 1
    return (low, high) if high - low <= 2 * len(places) else None


def _longer(rows: Tensor, length: int, fill: int) -> Tensor:
    longer = rows.new_full((length, *rows.shape[1:]), fill)
    longer[: len(rows)] = rows
    return longer
