"""Compute the attention of a pass: each request by itself, short chains side by side, or all as one product.

Each class makes its index tensors and masks once, for all layers of a pass.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hiddenlab.models.attention import Attention
from hiddenlab.models.request import Request

# Scores of one attention step are held in chunks of at most this many elements, so that memory does not grow
# with candidates × prefix. A GPU needs larger ones: starting its kernels takes longer than running them.
SCORE_ELEMENTS, CARD_SCORE_ELEMENTS = 1 << 22, 1 << 26


def score_elements(device: torch.device) -> int:
    """Return how many scores one attention step holds at most."""
    return CARD_SCORE_ELEMENTS if device.type == "cuda" else SCORE_ELEMENTS


def scaled(scores: Float[Tensor, "..."], attention: Attention) -> Float[Tensor, "..."]:
    """Scale the scores of a layer and apply its cap; in place where it has none."""
    scores *= attention.scaling
    if attention.softcap is None:
        return scores
    return torch.tanh(scores / attention.softcap) * attention.softcap


class Alike:
    """Short chains of one length behind prefixes of one length, which attend as one product.

    Only here the prefixes' keys and values are copied side by side: a call for each request would cost more.

    Args:
        starts: where each chain begins in the pass.
    """

    def __init__(self, requests: Sequence[Request], starts: Int[Tensor, " n"]) -> None:
        self.requests = list(requests)
        self.tokens, self.prefix = len(requests[0].tokens), requests[0].prefix.store.length
        self.here = torch.arange(self.tokens, device=starts.device)
        self.own = starts[:, None] + self.here
        self._hidden: dict[int | None, Tensor] = {}

    def hidden(self, window: int | None) -> Bool[Tensor, "t s"]:
        """Return which keys each token of a chain does not see."""
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
        output: Float[Tensor, "t h vwidth"],
        attention: Attention,
    ) -> None:
        """Compute the attention of the chains' tokens at one layer and write it into ``output``."""
        tokens, prefix, hidden = self.tokens, self.prefix, self.hidden(attention.window)
        heads, kv_heads, length = q.shape[0], k.shape[0], prefix + tokens
        step = max(1, score_elements(q.device) // (max(heads * tokens, kv_heads * q.shape[2]) * length))
        for part in range(0, len(self.requests), step):
            requests, own = self.requests[part : part + step], self.own[part : part + step].flatten()
            mine, new_keys, new_values = (
                x[:, own].unflatten(1, (len(requests), tokens)).transpose(0, 1) for x in (q, k, v)
            )
            keys = k.new_empty(len(requests), kv_heads, length, k.shape[2])
            values = v.new_empty(len(requests), kv_heads, length, v.shape[2])
            if prefix:
                for i, request in enumerate(requests):
                    keys[i, :, :prefix], values[i, :, :prefix] = request.prefix.store.view(layer)
            keys[:, :, prefix:], values[:, :, prefix:] = new_keys, new_values
            # Query heads of one key/value head stand beside each other.
            folded = mine.unflatten(1, (kv_heads, -1)).flatten(2, 3)
            scores = scaled((folded @ keys.transpose(2, 3)).float(), attention)
            scores = scores.unflatten(2, (-1, tokens)).masked_fill_(hidden, float("-inf"))
            mixed = scores.softmax(-1).to(v.dtype).flatten(2, 3) @ values
            output[own] = mixed.unflatten(2, (-1, tokens)).permute(0, 3, 1, 2, 4).reshape(len(own), heads, -1)


class Dense:
    """All requests of a pass as one product: scores of every token for all keys, with unseen keys masked.

    Most scores are of other prompts' keys and wasted. On a GPU a small pass still gains: the whole product takes as
    long as starting a few kernels, and each request alone takes dozens of them in every layer.

    Args:
        reach: how many tokens precede each packed token in its prompt.
    """

    def __init__(self, requests: Sequence[Request], reach: Int[Tensor, " t"]) -> None:
        self.requests = list(requests)
        prefixes = [request.prefix.store.length for request in requests]
        self.held = [request.prefix.store for request in requests if request.prefix.store.length]
        # Of each token: its prompt, the first token of its own branch (by place in the pass), and its depth there.
        prompts, branches, depths, shared = list[int](), list[int](), list[int](), list[bool]()
        for i, request in enumerate(requests):
            chain, start = len(request.tokens), len(prompts)
            for place in range(request.size):
                deep = (place - chain) % request.depth if place >= chain else 0
                prompts.append(i)
                depths.append(deep)
                branches.append(start + place - deep)
                shared.append(place < chain)
        before = [i for i, length in enumerate(prefixes) for _ in range(length)]
        places = [place for length in prefixes for place in range(length)]
        none = [-1] * len(before)
        table = torch.tensor(
            [
                [*before, *prompts],
                [*none, *branches],
                [*places, *depths],
                [*[1] * len(before), *map(int, shared)],
            ]
        ).to(reach.device)
        prompt, branch, depth, common = table
        keys, n = len(before), len(prompts)
        self.place = torch.cat([depth[:keys], reach])  # of every key in its own prompt
        self.reach, self.first = reach, reach - depth[keys:]
        same = prompt[keys:, None] == prompt[None]
        earlier = common.bool()[None] & (self.place[None] < self.first[:, None])
        own = (branch[keys:, None] == branch[None]) & (self.place[None] <= reach[:, None])
        self.seen = same & (earlier | own)
        self.tokens, self.keys = n, keys + n
        self._hidden: dict[int | None, Tensor] = {}

    def hidden(self, window: int | None) -> Bool[Tensor, "t s"]:
        """Return which keys each token does not see: the prefixes' keys in order, then those of the pass."""
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
        output: Float[Tensor, "t h vwidth"],
        attention: Attention,
    ) -> None:
        """Compute the attention of all packed tokens at one layer and write it into ``output``."""
        heads, kv_heads = q.shape[0], k.shape[0]
        held = [store.view(layer) for store in self.held]
        keys = torch.cat([*(each for each, _ in held), k], 1)
        values = torch.cat([*(each for _, each in held), v], 1)
        # A weight of 0 times NaN is NaN: a prompt that overflowed would corrupt others. Its own rows get NaN scores.
        nans = (values * 0).sum(-1)[:, None]
        values = values.nan_to_num(0, 0, 0)
        # Query heads of one key/value head stand beside each other.
        folded = q.reshape(kv_heads, -1, q.shape[2])
        scores = scaled((folded @ keys.transpose(1, 2) + nans).float(), attention)
        scores = scores.view(kv_heads, -1, self.tokens, self.keys)
        scores.masked_fill_(self.hidden(attention.window), float("-inf"))
        mixed = scores.softmax(-1).to(v.dtype).flatten(1, 2) @ values
        output.copy_(mixed.view(heads, self.tokens, -1).transpose(0, 1))


class Alone:
    """A request whose tokens attend over its prefix, its chain and themselves.

    Args:
        own: its places in the pass. reach: how many tokens precede each of its tokens in its prompt.
    """

    def __init__(self, request: Request, own: slice, reach: Int[Tensor, " t"]) -> None:
        self.request, self.own = request, own
        # A chain token is treated as a branch of one token at its place.
        chain, depth = len(request.tokens), request.depth
        parts = [(1, slice(0, len(reach)))]
        if depth > 1:
            parts = [(1, slice(0, chain)), (depth, slice(chain, len(reach)))]
        self.parts = [
            Leaves(request, which, size, reach[which]) for size, which in parts if which.start < which.stop
        ]

    def attend(
        self,
        layer: int,
        q: Float[Tensor, "h t width"],
        k: Float[Tensor, "k t width"],
        v: Float[Tensor, "k t vwidth"],
        output: Float[Tensor, "t h vwidth"],
        attention: Attention,
    ) -> None:
        """Compute the attention of the request's tokens at one layer and write it into ``output``."""
        q, k, v, output = q[:, self.own], k[:, self.own], v[:, self.own], output[self.own]
        chain = len(self.request.tokens)
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
            part.attend(q[:, own], k[:, own], v[:, own], shared_k, shared_v, output[own], attention)


class Leaves:
    """Leaves of one request, ``depth`` tokens each, one after another.

    Args:
        which: the tokens' places in the request. reach: how many tokens precede each of them in its prompt.
    """

    def __init__(self, request: Request, which: slice, depth: int, reach: Int[Tensor, " t"]) -> None:
        self.which, self.depth, self.reach = which, depth, reach
        self.shared = request.prefix.store.length + len(request.tokens)
        self.chained = len(request.tokens) > 0
        self.first = (
            reach.view(-1, depth)[:, :1].expand(-1, depth).flatten()
        )  # where each token's branch begins
        self._hidden: dict[int | None, Tensor] = {}
        self._later: dict[int | None, Tensor] = {}

    def hidden(self, a: int, b: int, window: int | None) -> Bool[Tensor, "t s"] | None:
        """Return which shared keys the tokens from a to b do not see; None where they see all of them."""
        if not self.chained and (window is None or self.shared + self.depth <= window):
            return None
        if window in self._hidden:
            return self._hidden[window][a:b]
        keys = torch.arange(self.shared, device=self.reach.device)
        hidden = keys[None] >= self.first[a:b, None]
        if window is not None:
            hidden = hidden | (self.reach[a:b, None] - keys[None] >= window)
        if b - a == len(self.reach):
            # Kept for the other layers if it is no larger than a chunk.
            self._hidden[window] = hidden
        return hidden

    def later(self, window: int | None) -> Bool[Tensor, "g g"]:
        """Return which tokens of its own branch a token does not see."""
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
        output: Float[Tensor, "t h vwidth"],
        attention: Attention,
    ) -> None:
        """Compute attention over the shared keys before each token and over its own branch, into ``output``."""
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
            scores = scaled(scores, attention)
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
            output[a:b] = mixed.permute(2, 0, 1, 3).reshape(b - a, heads, -1)
