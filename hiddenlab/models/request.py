"""Define the engine's requests and answers: prefixes with keys and values, chains and branches."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

if TYPE_CHECKING:
    from hiddenlab.models import TruncatedModel

T = TypeVar("T")


class KeyValueStore:
    """Keys and values of one prefix, per layer, in buffers that grow by doubling.

    Buffers are ``[k heads, capacity, head width]``; views of the first ``length`` positions are handed out.
    """

    def __init__(self) -> None:
        self.length = 0
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    def view(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of the prefix at a layer, not copied."""
        return self._keys[layer][:, : self.length], self._values[layer][:, : self.length]

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write keys and values after the current length; the caller updates ``length`` itself."""
        end = self.length + keys.shape[1]
        for store, new in ((self._keys, keys), (self._values, values)):
            buffer = store.get(layer)
            if buffer is None or buffer.shape[1] < end:
                capacity = max(end, 64 if buffer is None else 2 * buffer.shape[1])
                grown = new.new_empty(new.shape[0], capacity, new.shape[2])
                if buffer is not None:
                    grown[:, : self.length] = buffer[:, : self.length]
                store[layer] = buffer = grown
            buffer[:, self.length : end] = new

    def follow(self, other: "KeyValueStore", dtype: torch.dtype) -> None:
        """Append what ``other`` holds beyond this length, in another dtype."""
        for layer in other._keys:
            keys, values = (x[:, self.length :].to(dtype) for x in other.view(layer))
            self.append(layer, keys, values)
        self.length = other.length

    def fork(self) -> "KeyValueStore":
        """Return a copy that grows independently."""
        copy = KeyValueStore()
        copy.length = self.length
        copy._keys = {layer: buffer.clone() for layer, buffer in self._keys.items()}
        copy._values = {layer: buffer.clone() for layer, buffer in self._values.items()}
        return copy


@dataclass
class Request:
    """Tokens to run after one prefix.

    Attributes:
        prefix: the committed tokens before them.
        tokens: token ids that follow one another, or their embeddings ``[t, d]``.
        branches: alternatives, ``[c]`` token ids or ``[c, g]`` for branches of g tokens each (or embeddings, ``[c, d]``
            and ``[c, g, d]``); branch i stands after ``parents[i]`` chain tokens.
        parents: for each branch, how many chain tokens precede it; None means 0 for all.
    """

    prefix: "Prefix"
    tokens: Tensor
    branches: Tensor | None = None
    parents: Tensor | None = None
    reach: Tensor = field(init=False)
    depth: int = field(init=False, default=1)

    def __post_init__(self) -> None:
        steps = torch.arange(len(self.tokens), device=self.tokens.device)
        if self.branches is None or len(self.branches) == 0:
            self.branches = None
            self.reach = steps
            return
        axes = 1 if self.branches.is_floating_point() else 0  # a token id is a number, an embedding a row
        if self.branches.ndim - axes == 2:
            self.depth = self.branches.shape[1]
            self.branches = self.branches.flatten(0, 1)
        count = len(self.branches) // self.depth
        parents = self.parents
        if parents is None:
            parents = torch.zeros(count, dtype=torch.long, device=steps.device)
        deeper = parents.to(steps.device)[:, None] + torch.arange(self.depth, device=steps.device)
        self.reach = torch.cat([steps, deeper.flatten()])

    @property
    def size(self) -> int:
        """The number of positions this request runs through the model."""
        return len(self.reach)

    @property
    def inputs(self) -> Tensor:
        """Chain and branches on one axis."""
        return self.tokens if self.branches is None else torch.cat([self.tokens, self.branches])


def packs(items: Iterable[T], size: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Yield groups of neighbours with at most ``limit`` positions, in order; a larger item goes alone."""
    pack: list[T] = []
    held = 0
    for item in items:
        if pack and held + size(item) > limit:
            yield pack
            pack, held = [], 0
        pack.append(item)
        held += size(item)
    if pack:
        yield pack


@dataclass
class Answer:
    """States of one request, and what is needed to keep some of its tokens as prefix.

    Attributes:
        states: one for each chain token. branches: one for each branch token, branch by branch.
    """

    states: Float[Tensor, "t d"]
    branches: Float[Tensor, "c d"]
    request: Request
    _kept: dict[int, tuple[Tensor, Tensor]]
    _start: int

    def keys_values(self, layer: int, columns: Tensor | slice) -> tuple[Tensor, Tensor]:
        keys, values = self._kept[layer]
        end = self._start + self.request.size
        return keys[:, self._start : end][:, columns], values[:, self._start : end][:, columns]

    def layers(self) -> list[int]:
        return sorted(self._kept)


@dataclass
class Prefix:
    """Committed tokens of one prompt and their keys and values.

    Attributes:
        offset: number of positions before the first token (an unknown prefix embedding takes one).
        inputs: what was committed, part by part, token ids or embeddings; kept for the plain engine alone.
    """

    model: "TruncatedModel"
    tokens: list[int] = field(default_factory=list)
    store: KeyValueStore = field(default_factory=KeyValueStore)
    offset: int = 0
    inputs: list[Tensor] = field(default_factory=list)
    _branch: Answer | None = None

    @property
    def length(self) -> int:
        """The number of positions held, embeddings without a token included."""
        return self.store.length

    def fork(self) -> "Prefix":
        """Return the same tokens, to be continued in another way; keys and values are copied."""
        return Prefix(self.model, list(self.tokens), self.store.fork(), self.offset, list(self.inputs))

    def follow(self, other: "Prefix") -> None:
        """Append what ``other`` holds beyond this length; it may be of the same model in another dtype."""
        self.store.follow(other.store, self.model.dtype)
        self.inputs = list(other.inputs)

    def extend(self, tokens: Int[Tensor, " t"]) -> Float[Tensor, "t d"]:
        """Append tokens and return their states."""
        answer = self.model.run([Request(self, tokens)])[0]
        self.keep(answer, tokens=len(tokens))
        return answer.states

    def branch(self, candidates: Int[Tensor, " c"]) -> Float[Tensor, "c d"]:
        """Return states of alternatives for the next position; ``commit`` makes one of them part of the prefix."""
        empty = candidates[:0]
        limit = self.model.max_pass_tokens
        parts = []
        for start in range(0, len(candidates), limit):
            request = Request(self, empty, branches=candidates[start : start + limit])
            parts.append(self.model.run([request], keep=len(candidates) <= limit)[0])
        self._branch = parts[0] if len(parts) == 1 else None
        self._candidates = candidates
        return torch.cat([part.branches for part in parts])

    def commit(self, i: int) -> None:
        """Append candidate i of the last ``branch``."""
        if self._branch is None:
            self.extend(self._candidates[i : i + 1])
        else:
            self.keep(self._branch, branch=i)
        self._branch = None

    def keep(self, answer: Answer, *, tokens: int = 0, branch: int | None = None) -> None:
        """Append the first ``tokens`` tokens of an answered request, and then one of its whole branches."""
        request = answer.request
        parts = [slice(0, tokens)] if tokens else []
        if branch is not None:
            start = len(request.tokens) + branch * request.depth
            parts.append(slice(start, start + request.depth))
        if not parts:
            return
        for part in parts:
            for layer in answer.layers():
                self.store.append(layer, *answer.keys_values(layer, part))
            self.store.length += part.stop - part.start
            if self.model.engine == "plain":
                self.inputs.append(request.inputs[part])
        if not request.inputs.is_floating_point():
            self.tokens += torch.cat([request.inputs[part] for part in parts]).tolist()
        self._branch = None
