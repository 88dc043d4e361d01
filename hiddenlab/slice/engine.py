"""How tokens run through a model: one attention function, shared prefixes, many prompts packed in one pass.

A pass packs the requests of several prompts on one token axis. Each request holds a *chain* (tokens that follow
one another) and *leaves* (alternatives, each seeing the prefix, the chain up to its attachment, and itself; a leaf
may be several tokens long). A plain prefill is a chain without leaves; the branching of vocabulary matching (paper,
section 4.2 and appendix A) is leaves without a chain; its generalisation to gaps (Algorithm 3) is leaves of several
tokens; verifying a guess while trying alternatives at its weak places is a chain with leaves.

All Hugging Face architectures come through transformers' ``AttentionInterface``: the registered function gets
queries, keys and values after projection and rotary embedding, and attends to the prefix's keys and values where
they lie, one GEMM per key/value head with the tokens of a request folded into the query axis. Nothing of the
prefix is copied or repeated per candidate. Where asked to (``together``), short chains behind many prefixes of one
length, what a beam of hypotheses asks of a language model, are attended to in one product, their prefixes side by side.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hiddenlab.slice.door import Attention

if TYPE_CHECKING:
    from hiddenlab.slice import Slice

T = TypeVar("T")
ATTENTION_NAME = "hiddenlab"
# Scores of one attention step are held in chunks of at most this many elements, so that memory does not grow
# with candidates × prefix. A card needs larger ones: starting its kernels takes longer than running them.
SCORE_ELEMENTS, CARD_SCORE_ELEMENTS = 1 << 22, 1 << 26
# There a pass attends as one product if its scores are at most so many, those between different prompts included.
DENSE_DEVICES, DENSE_ELEMENTS = frozenset({"cuda"}), 1 << 25
# Chains of at most so many tokens attend together: of longer ones the products are large enough by themselves.
SHORT = 4
# Bytes of one prefix's keys and values: more of them take longer to put side by side than a call for each prefix takes.
SIDE_BY_SIDE = 1 << 18

_ACTIVE: ContextVar["PackedPass | GivenPass | None"] = ContextVar("hiddenlab_pass", default=None)


def score_elements(device: torch.device) -> int:
    """Scores that one attention step holds at most."""
    return CARD_SCORE_ELEMENTS if device.type == "cuda" else SCORE_ELEMENTS


class ShownError(Exception):
    """A pass has shown what it was run for, and what is left of it need not be computed."""


class KeyValueStore:
    """Keys and values of one prefix, per layer, in buffers that grow by doubling.

    Buffers are ``[k heads, capacity, head width]``; views of the first ``length`` positions are handed out.
    """

    def __init__(self) -> None:
        self.length = 0
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    def view(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the prefix at a layer, not copied."""
        return self._keys[layer][:, : self.length], self._values[layer][:, : self.length]

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write keys and values after the current length; ``length`` itself is moved by the caller."""
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
        """A copy that grows by itself."""
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
        chain: token ids that follow one another, or their embeddings ``[t, d]``.
        leaves: alternatives, ``[c]`` token ids or ``[c, g]`` for leaves of g tokens each (or embeddings, ``[c, d]``
            and ``[c, g, d]``); leaf i stands after ``attach[i]`` chain tokens.
        attach: for each leaf, how many chain tokens precede it; None means 0 for all.
    """

    prefix: "Prefix"
    chain: Tensor
    leaves: Tensor | None = None
    attach: Tensor | None = None
    reach: Tensor = field(init=False)
    depth: int = field(init=False, default=1)

    def __post_init__(self) -> None:
        steps = torch.arange(len(self.chain), device=self.chain.device)
        if self.leaves is None or len(self.leaves) == 0:
            self.leaves = None
            self.reach = steps
            return
        axes = 1 if self.leaves.is_floating_point() else 0  # a token id is a number, an embedding a row
        if self.leaves.ndim - axes == 2:
            self.depth = self.leaves.shape[1]
            self.leaves = self.leaves.flatten(0, 1)
        count = len(self.leaves) // self.depth
        attach = self.attach
        if attach is None:
            attach = torch.zeros(count, dtype=torch.long, device=steps.device)
        deeper = attach.to(steps.device)[:, None] + torch.arange(self.depth, device=steps.device)
        self.reach = torch.cat([steps, deeper.flatten()])

    @property
    def size(self) -> int:
        """Positions this request runs through the model."""
        return len(self.reach)

    @property
    def inputs(self) -> Tensor:
        """Chain and leaves on one axis."""
        return self.chain if self.leaves is None else torch.cat([self.chain, self.leaves])


def packs(items: Iterable[T], size: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Neighbours of together at most ``limit`` positions, in order; what is larger by itself goes alone."""
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
        chain: a state a chain token. leaves: a state a leaf token, the tokens of one leaf after another.
    """

    chain: Float[Tensor, "t d"]
    leaves: Float[Tensor, "c d"]
    request: Request
    _kept: dict[int, tuple[Tensor, Tensor]]
    _start: int

    def keys_values(self, layer: int, columns: Tensor | slice) -> tuple[Tensor, Tensor]:
        keys, values = self._kept[layer]
        end = self._start + self.request.size
        return keys[:, self._start : end][:, columns], values[:, self._start : end][:, columns]

    def layers(self) -> list[int]:
        return sorted(self._kept)


class PackedPass:
    """One forward pass over the packed tokens of several requests; the attention function asks it to attend.

    Attributes:
        together: short chains behind prefixes of one length attend in one product; last digits depend on the others.
        show: layer index and inner stream (q, k … attn) to keep in ``shown``, ``[t, heads · width]``, or None.
        attention: how the last layer that ran attends.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        keep: bool,
        show: tuple[int, str] | None = None,
        together: bool = False,
    ) -> None:
        self.requests = list(requests)
        self.keep = keep
        self.show = show
        self.shown: Tensor | None = None
        self.attention: Attention | None = None
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        self.together = together
        self._reach: dict[torch.device, Tensor] = {}
        self._parts: dict[tuple[int, int, torch.device], list[_Alone | _Alike | _Dense]] = {}
        self.starts = [0]
        for request in self.requests:
            self.starts.append(self.starts[-1] + request.size)

    def _own(self, i: int) -> slice:
        return slice(self.starts[i], self.starts[i + 1])

    def _alike(self, size: int) -> list[list[int]]:
        """Requests by index, those together that one product can serve: as short, behind a prefix as long.

        Args:
            size: bytes of one position's keys and values.
        """
        groups: dict[tuple[int, ...], list[int]] = {}
        for i, one in enumerate(self.requests):
            chain, prefix = len(one.chain), one.prefix.store.length
            short = one.leaves is None and 0 < chain <= SHORT and size * (prefix + chain) <= SIDE_BY_SIDE
            alike = self.together and short and not torch.is_grad_enabled()
            groups.setdefault((chain, prefix) if alike else (-1 - i,), []).append(i)
        return list(groups.values())

    def _dense(self, heads: int, device: torch.device) -> bool:
        """Whether all requests attend as one product, which is faster where starting a kernel is what costs."""
        keys = self.starts[-1] + sum(one.prefix.store.length for one in self.requests)
        few = heads * self.starts[-1] * keys <= DENSE_ELEMENTS
        return device.type in DENSE_DEVICES and few and not torch.is_grad_enabled()

    def _parted(self, heads: int, size: int, device: torch.device) -> "list[_Alone | _Alike | _Dense]":
        """What attends by itself; its index tensors are made once for all layers on one device."""
        if (heads, size, device) not in self._parts:
            reach = self._reaches(device)
            if self._dense(heads, device):
                return self._parts.setdefault((heads, size, device), [_Dense(self.requests, reach)])
            groups = self._alike(size)
            grouped = [self.starts[i] for group in groups if len(group) > 1 for i in group]
            starts = torch.tensor(grouped, device=device) if grouped else reach[:0]
            parts: list[_Alone | _Alike | _Dense] = []
            for group in groups:
                if len(group) > 1:
                    own, starts = starts[: len(group)], starts[len(group) :]
                    parts.append(_Alike([self.requests[i] for i in group], own))
                else:
                    (i,) = group
                    parts.append(_Alone(self.requests[i], self._own(i), reach[self._own(i)]))
            self._parts[heads, size, device] = parts
        return self._parts[heads, size, device]

    def _reaches(self, device: torch.device) -> Int[Tensor, " t"]:
        """How many tokens precede each packed token in its own prompt, those that its prefix holds included."""
        if device not in self._reach:
            reach = torch.cat([one.reach + one.prefix.length for one in self.requests])
            self._reach[device] = reach.to(device)
        return self._reach[device]

    def positions(self, device: torch.device) -> Int[Tensor, "1 t"]:
        """Position of every packed token within its own prompt."""
        reach, offsets = self._reaches(device), [one.prefix.offset for one in self.requests]
        if any(offsets):
            reach = torch.cat([reach[self._own(i)] + offset for i, offset in enumerate(offsets)])
        return reach[None]

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attention: Attention,
    ) -> Tensor:
        """Attention of all packed tokens at one layer.

        Args:
            layer: the module's layer index, under which the prefix's keys and values are stored.
            q: ``[1, h, t, width]`` queries; k, v: ``[1, k, t, width]`` keys and values of the new tokens only.
            attention: how the layer attends.

        Returns:
            ``[1, t, h, width]``.

        Raises:
            ShownError: this was the layer to be shown, which is the last of the slice.
        """
        if self.keep:
            self.kept[layer] = (k[0], v[0])
        self.attention = attention
        out = q.new_empty(1, q.shape[2], q.shape[1], v.shape[-1])
        size = k.element_size() * k.shape[1] * (k.shape[3] + v.shape[3])
        for part in self._parted(q.shape[1], size, q.device):
            part.attend(layer, q[0], k[0], v[0], out[0], attention)
        if self.show is not None and self.show[0] == layer:
            self.shown = out[0].flatten(1) if self.show[1] == "attn" else _beside(self.show[1], q, k, v)
            raise ShownError
        return out


def _beside(stream: str, q: Tensor, k: Tensor, v: Tensor) -> Float[Tensor, "t w"]:
    """Queries, keys and values of a pass, those that a stream's name lists, all heads side by side."""
    parts = {"q": q, "k": k, "v": v}
    return torch.cat([parts[one][0].transpose(0, 1).flatten(1) for one in stream], 1)


@dataclass
class GivenPass:
    """A pass whose first layer's attention was computed before; that layer's queries, keys and values are ignored.

    Attributes:
        attended: what it gives, ``[t, h · width]``. show: stream of the second layer (``q``, ``k`` … ``qkv``) to keep
            in ``shown``, or None.
    """

    attended: Tensor
    show: str | None = None
    shown: Tensor | None = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, attention: Attention) -> Tensor:
        """What was given, as ``[1, t, h, width]``.

        Raises:
            ShownError: this was the second layer.
        """
        if layer == 0:
            return self.attended.unflatten(1, (q.shape[1], v.shape[3]))[None]
        assert self.show is not None
        self.shown = _beside(self.show, q, k, v)
        raise ShownError


class _Alike:
    """Short chains of one length behind prefixes of one length, which attend as one product.

    Unlike elsewhere the prefixes' keys and values are copied side by side: what a call for each request costs is more.

    Args:
        starts: where each chain begins in the pass.
    """

    def __init__(self, requests: Sequence[Request], starts: Int[Tensor, " n"]) -> None:
        self.requests = list(requests)
        self.tokens, self.prefix = len(requests[0].chain), requests[0].prefix.store.length
        self.here = torch.arange(self.tokens, device=starts.device)
        self.own = starts[:, None] + self.here
        self._hidden: dict[int | None, Tensor] = {}

    def hidden(self, window: int | None) -> Bool[Tensor, "t s"]:
        """Which keys each token of a chain does not see."""
        if window not in self._hidden:
            keys = torch.arange(self.prefix + self.tokens, device=self.here.device)
            ahead = keys[None] - self.prefix - self.here[:, None]  # how far each key is ahead of each query
            self._hidden[window] = ahead > 0 if window is None else (ahead > 0) | (ahead <= -window)
        return self._hidden[window]

    def attend(
        self,
        layer: int,
        q: Float[Tensor, "h t width"],
        k: Float[Tensor, "k t width"],
        v: Float[Tensor, "k t vwidth"],
        out: Float[Tensor, "t h vwidth"],
        attention: Attention,
    ) -> None:
        """Attention of the chains' tokens at one layer, written into ``out``."""
        tokens, prefix, hidden = self.tokens, self.prefix, self.hidden(attention.window)
        heads, kv_heads, length = q.shape[0], k.shape[0], prefix + tokens
        step = max(1, score_elements(q.device) // (max(heads * tokens, kv_heads * q.shape[2]) * length))
        for part in range(0, len(self.requests), step):
            some, own = self.requests[part : part + step], self.own[part : part + step].flatten()
            mine, new_keys, new_values = (
                x[:, own].unflatten(1, (len(some), tokens)).transpose(0, 1) for x in (q, k, v)
            )
            keys = k.new_empty(len(some), kv_heads, length, k.shape[2])
            values = v.new_empty(len(some), kv_heads, length, v.shape[2])
            if prefix:
                for i, one in enumerate(some):
                    keys[i, :, :prefix], values[i, :, :prefix] = one.prefix.store.view(layer)
            keys[:, :, prefix:], values[:, :, prefix:] = new_keys, new_values
            # Query heads of one key/value head stand beside each other.
            folded = mine.unflatten(1, (kv_heads, -1)).flatten(2, 3)
            scores = (folded @ keys.transpose(2, 3)).float() * attention.scaling
            if attention.softcap is not None:
                scores = torch.tanh(scores / attention.softcap) * attention.softcap
            scores = scores.unflatten(2, (-1, tokens)).masked_fill_(hidden, float("-inf"))
            mixed = scores.softmax(-1).to(v.dtype).flatten(2, 3) @ values
            out[own] = mixed.unflatten(2, (-1, tokens)).permute(0, 3, 1, 2, 4).reshape(len(own), heads, -1)


class _Dense:
    """All requests of a pass as one product: every token's scores for all keys, those that it does not see masked.

    Most scores are of other prompts' keys and wasted. On a card a small pass still gains: the product of all takes as
    long as starting a few kernels, and each request by itself takes dozens of them in every layer.

    Args:
        reach: how many tokens precede each packed token in its prompt.
    """

    def __init__(self, requests: Sequence[Request], reach: Int[Tensor, " t"]) -> None:
        self.requests = list(requests)
        prefixes = [one.prefix.store.length for one in requests]
        self.held = [one.prefix.store for one in requests if one.prefix.store.length]
        # Of each token: its prompt, the first token of its own leaf (by place in the pass), and how deep in it it is.
        prompts, leaves, depths, shared = list[int](), list[int](), list[int](), list[bool]()
        for i, one in enumerate(requests):
            chain, start = len(one.chain), len(prompts)
            for place in range(one.size):
                deep = (place - chain) % one.depth if place >= chain else 0
                prompts.append(i)
                depths.append(deep)
                leaves.append(start + place - deep)
                shared.append(place < chain)
        before = [i for i, length in enumerate(prefixes) for _ in range(length)]
        places = [place for length in prefixes for place in range(length)]
        none = [-1] * len(before)
        table = torch.tensor(
            [
                [*before, *prompts],
                [*none, *leaves],
                [*places, *depths],
                [*[1] * len(before), *map(int, shared)],
            ]
        ).to(reach.device)
        prompt, leaf, depth, common = table
        keys, n = len(before), len(prompts)
        self.place = torch.cat([depth[:keys], reach])  # of every key in its own prompt
        self.reach, self.first = reach, reach - depth[keys:]
        same = prompt[keys:, None] == prompt[None]
        earlier = common.bool()[None] & (self.place[None] < self.first[:, None])
        own = (leaf[keys:, None] == leaf[None]) & (self.place[None] <= reach[:, None])
        self.seen = same & (earlier | own)
        self.tokens, self.keys = n, keys + n
        self._hidden: dict[int | None, Tensor] = {}

    def hidden(self, window: int | None) -> Bool[Tensor, "t s"]:
        """Which keys each token does not see: the prefixes', one after another, then those of the pass."""
        if window not in self._hidden:
            seen = self.seen
            if window is not None:
                seen = seen & (self.reach[:, None] - self.place[None] < window)
            self._hidden[window] = ~seen
        return self._hidden[window]

    def attend(
        self,
        layer: int,
        q: Float[Tensor, "h t width"],
        k: Float[Tensor, "k t width"],
        v: Float[Tensor, "k t vwidth"],
        out: Float[Tensor, "t h vwidth"],
        attention: Attention,
    ) -> None:
        """Attention of all packed tokens at one layer, written into ``out``."""
        heads, kv_heads = q.shape[0], k.shape[0]
        held = [store.view(layer) for store in self.held]
        keys = torch.cat([*(each for each, _ in held), k], 1)
        values = torch.cat([*(each for _, each in held), v], 1)
        # A weight of 0 times NaN is NaN: a prompt that overflowed would spoil the others. Its own rows see NaN scores.
        spoilt = (values * 0).sum(-1)[:, None]
        values = values.nan_to_num(0, 0, 0)
        # Query heads of one key/value head stand beside each other.
        folded = q.reshape(kv_heads, -1, q.shape[2])
        scores = (folded @ keys.transpose(1, 2) + spoilt).float() * attention.scaling
        if attention.softcap is not None:
            scores = torch.tanh(scores / attention.softcap) * attention.softcap
        scores = scores.view(kv_heads, -1, self.tokens, self.keys)
        scores.masked_fill_(self.hidden(attention.window), float("-inf"))
        mixed = scores.softmax(-1).to(v.dtype).flatten(1, 2) @ values
        out.copy_(mixed.view(heads, self.tokens, -1).transpose(0, 1))


class _Alone:
    """A request whose tokens attend over its prefix, its chain and themselves.

    Args:
        own: its places in the pass. reach: how many tokens precede each of its tokens in its prompt.
    """

    def __init__(self, request: Request, own: slice, reach: Int[Tensor, " t"]) -> None:
        self.request, self.own = request, own
        # A chain token is a leaf of one token that stands where it stands.
        chain, depth = len(request.chain), request.depth
        parts = [(1, slice(0, len(reach)))]
        if depth > 1:
            parts = [(1, slice(0, chain)), (depth, slice(chain, len(reach)))]
        self.parts = [
            _Leaves(request, which, size, reach[which]) for size, which in parts if which.start < which.stop
        ]

    def attend(
        self,
        layer: int,
        q: Float[Tensor, "h t width"],
        k: Float[Tensor, "k t width"],
        v: Float[Tensor, "k t vwidth"],
        out: Float[Tensor, "t h vwidth"],
        attention: Attention,
    ) -> None:
        """Attention of the request's tokens at one layer, written into ``out``."""
        q, k, v, out = q[:, self.own], k[:, self.own], v[:, self.own], out[self.own]
        chain = len(self.request.chain)
        shared_k, shared_v = k[:, :chain], v[:, :chain]
        if self.request.prefix.store.length:
            prefix_k, prefix_v = self.request.prefix.store.view(layer)
            if torch.is_grad_enabled() and prefix_k.is_inference():
                prefix_k, prefix_v = prefix_k.clone(), prefix_v.clone()  # autograd saves no inference tensors
            if chain:
                shared_k, shared_v = torch.cat([prefix_k, shared_k], 1), torch.cat([prefix_v, shared_v], 1)
            else:
                shared_k, shared_v = prefix_k, prefix_v
        for part in self.parts:
            own = part.which
            part.attend(q[:, own], k[:, own], v[:, own], shared_k, shared_v, out[own], attention)


class _Leaves:
    """Leaves of one request, ``depth`` tokens each, one after another.

    Args:
        which: the tokens' places in the request. reach: how many tokens precede each of them in its prompt.
    """

    def __init__(self, request: Request, which: slice, depth: int, reach: Int[Tensor, " t"]) -> None:
        self.which, self.depth, self.reach = which, depth, reach
        self.shared = request.prefix.store.length + len(request.chain)
        self.chained = len(request.chain) > 0
        self.first = (
            reach.view(-1, depth)[:, :1].expand(-1, depth).flatten()
        )  # where each token's leaf begins
        self._hidden: dict[int | None, Tensor] = {}
        self._later: dict[int | None, Tensor] = {}

    def hidden(self, a: int, b: int, window: int | None) -> Bool[Tensor, "t s"] | None:
        """Which shared keys the tokens from a to b do not see; None where they see all of them."""
        if not self.chained and (window is None or self.shared + self.depth <= window):
            return None
        if window in self._hidden:
            return self._hidden[window][a:b]
        keys = torch.arange(self.shared, device=self.reach.device)
        hidden = keys[None] >= self.first[a:b, None]
        if window is not None:
            hidden = hidden | (self.reach[a:b, None] - keys[None] >= window)
        if b - a == len(self.reach):
            # Kept for the other layers, where it is no larger than a chunk.
            self._hidden[window] = hidden
        return hidden

    def later(self, window: int | None) -> Bool[Tensor, "g g"]:
        """Which tokens of its own leaf a token does not see."""
        if window not in self._later:
            later = torch.ones(self.depth, self.depth, dtype=torch.bool, device=self.reach.device).triu(1)
            if window is not None:
                later |= torch.ones_like(later).tril(-window)
            self._later[window] = later
        return self._later[window]

    def attend(
        self,
        q: Float[Tensor, "h t width"],
        k: Float[Tensor, "k t width"],
        v: Float[Tensor, "k t vwidth"],
        shared_k: Float[Tensor, "k s width"],
        shared_v: Float[Tensor, "k s vwidth"],
        out: Float[Tensor, "t h vwidth"],
        attention: Attention,
    ) -> None:
        """Attention over the shared keys before each token and over its own leaf, written into ``out``."""
        heads, tokens, width = q.shape
        kv_heads, groups = k.shape[0], heads // k.shape[0]
        shared, depth, window = self.shared, self.depth, attention.window
        step = depth * max(1, score_elements(q.device) // (heads * (shared + depth) * depth))
        for a in range(0, tokens, step):
            b = min(a + step, tokens)
            part = q[:, a:b].reshape(kv_heads, groups * (b - a), width)
            own_k, own_v = (x[:, None, a:b].unflatten(2, (-1, depth)) for x in (k, v))
            scores = q.new_empty(kv_heads, groups, b - a, shared + depth, dtype=torch.float32)
            scores[..., :shared] = (part @ shared_k.transpose(1, 2)).view(kv_heads, groups, b - a, shared)
            queries = part.view(kv_heads, groups, -1, depth, width)
            own = (queries * own_k).sum(-1, True) if depth == 1 else queries @ own_k.transpose(-1, -2)
            scores[..., shared:] = own.flatten(2, 3)
            scores *= attention.scaling
            if attention.softcap is not None:
                scores = torch.tanh(scores / attention.softcap) * attention.softcap
            if (hidden := self.hidden(a, b, window)) is not None:
                scores[..., :shared].masked_fill_(hidden, float("-inf"))
            if depth > 1:
                scores[..., shared:].unflatten(2, (-1, depth)).masked_fill_(self.later(window), float("-inf"))
            weights = scores.softmax(-1).to(v.dtype)
            mixed = (weights[..., :shared].reshape(kv_heads, groups * (b - a), shared) @ shared_v).view(
                kv_heads, groups, b - a, -1
            )
            inner = weights[..., shared:].unflatten(2, (-1, depth))
            mixed = mixed + (inner * own_v if depth == 1 else inner @ own_v).flatten(2, 3)
            out[a:b] = mixed.permute(2, 0, 1, 3).reshape(b - a, heads, -1)


@dataclass
class Prefix:
    """Committed tokens of one prompt and their keys and values.

    ``offset`` is the number of positions before the first token (an unknown prefix embedding takes one).
    """

    slice: "Slice"
    tokens: list[int] = field(default_factory=list)
    store: KeyValueStore = field(default_factory=KeyValueStore)
    offset: int = 0
    _branch: Answer | None = None

    @property
    def length(self) -> int:
        """Positions held, embeddings without a token included."""
        return self.store.length

    def fork(self) -> "Prefix":
        """The same tokens, to be continued in another way; keys and values are copied."""
        return Prefix(self.slice, list(self.tokens), self.store.fork(), self.offset)

    def extend(self, tokens: Int[Tensor, " t"]) -> Float[Tensor, "t d"]:
        """Append tokens and return their states."""
        answer = self.slice.run([Request(self, tokens)])[0]
        self.keep(answer, chain=len(tokens))
        return answer.chain

    def branch(self, candidates: Int[Tensor, " c"]) -> Float[Tensor, "c d"]:
        """States of alternatives for the next position; ``commit`` makes one of them part of the prefix."""
        empty = candidates[:0]
        limit = self.slice.max_pass_tokens
        parts = []
        for start in range(0, len(candidates), limit):
            request = Request(self, empty, leaves=candidates[start : start + limit])
            parts.append(self.slice.run([request], keep=len(candidates) <= limit)[0])
        self._branch = parts[0] if len(parts) == 1 else None
        self._candidates = candidates
        return torch.cat([part.leaves for part in parts])

    def commit(self, i: int) -> None:
        """Append candidate i of the last ``branch``."""
        if self._branch is None:
            self.extend(self._candidates[i : i + 1])
        else:
            self.keep(self._branch, leaf=i)
        self._branch = None

    def keep(self, answer: Answer, *, chain: int = 0, leaf: int | None = None) -> None:
        """Append the first ``chain`` tokens of an answered request, and then one of its leaves, whole."""
        request = answer.request
        parts = [slice(0, chain)] if chain else []
        if leaf is not None:
            start = len(request.chain) + leaf * request.depth
            parts.append(slice(start, start + request.depth))
        if not parts:
            return
        for part in parts:
            for layer in answer.layers():
                self.store.append(layer, *answer.keys_values(layer, part))
            self.store.length += part.stop - part.start
        if not request.inputs.is_floating_point():
            self.tokens += torch.cat([request.inputs[part] for part in parts]).tolist()
        self._branch = None
