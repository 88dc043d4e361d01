"""Run Centaur and PermLLM: linear parts on additive shares, non-linear parts in the clear but permuted."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hiddenlab.defenses.protocols.decoder import Linear, Norm, Weights
from hiddenlab.defenses.protocols.forward import activation, apply_norm, normalise, walk
from hiddenlab.defenses.protocols.ring import FRACTION, Ring, Shared
from hiddenlab.defenses.protocols.stip import DEVELOPER, SERVER, USER, Developer
from hiddenlab.defenses.protocols.stip import User as StipUser
from hiddenlab.defenses.protocols.transcript import Transcript
from hiddenlab.errors import InputError

HELPER = "helper"
MASKED = -1024.0  # added to scores that must not count: its exponential is 0 in float32


class _OnShares:
    """Common operations of both schemes: order and shape, sums, and products of shared values."""

    ring: Ring

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> Float[Tensor, "n v"]:
        """Return the logits of a prompt, as the user gets them."""
        return self._walk(tokens, None)  # type: ignore[no-any-return]

    @torch.inference_mode()
    def show(self, tokens: Sequence[int], depth: int) -> None:
        """Run a prompt through the first layers only, so that ``transcript`` records what the parties learn there."""
        self._walk(tokens, depth)

    def _walk(self, tokens: Sequence[int], depth: int | None) -> Any:
        """Run a prompt and return its logits for the user; None if only the first layers are run."""
        raise NotImplementedError

    def local(self, change: Callable[[Tensor], Tensor], x: Shared) -> Shared:
        return x.map(change)

    def add(self, a: Shared, b: Shared) -> Shared:
        return a + b

    def shift(self, x: Shared, by: Tensor) -> Shared:
        return self.ring.shift(x, self.ring.encode(by))

    def scale(self, x: Shared, by: Tensor | float) -> Shared:
        factor = self.ring.encode(torch.as_tensor(by))
        return self.ring.by_public(x, factor, torch.mul)

    def product(self, a: Shared, b: Shared) -> Shared:
        return self.ring.product(a, b)

    def times(self, a: Shared, b: Shared) -> Shared:
        return self.ring.product(a, b, torch.mul)


class Centaur(_OnShares):
    """Centaur: a permuted model on shares, whose non-linear parts one holder reconstructs (Luo et al. 2024).

    The holders are the developer and the server. Appendix I.1 has the developer reconstruct; but he knows π and would
    see plain states, so here it is the server. The user shares Xπ and so has the embedding (I.3; I.1 says that the
    scheme wants to hide it from him). At norms and activations the server sees values in Θ′'s own order of dimensions,
    the same for every prompt. At the softmax the keys of a layer are in an order that the developer draws each time;
    the number of rows in which a key is masked still reveals its place.

    Args:
        weights: of the model.
        fraction: bits behind the point.
        seed: of all random draws.
    """

    parties = (DEVELOPER, SERVER, USER)

    def __init__(self, weights: Weights, fraction: int = FRACTION, seed: int = 0) -> None:
        developer = Developer(weights, seed)
        self.permuted = developer.permuted()
        self.user = StipUser(weights.inputs(range(len(weights.head.weight))), developer.keys)
        self.transcript = Transcript(self.parties)
        self.ring = Ring(self.transcript, (DEVELOPER, SERVER), fraction=fraction, seed=seed)
        self._orders = torch.Generator().manual_seed(seed + 1)

    def _walk(self, tokens: Sequence[int], depth: int | None) -> Any:
        shared = self.ring.share(self.user.encrypt(tokens), USER)
        answer = walk(self.permuted, shared, self, depth=depth)[0]
        return None if answer is None else self.user.decrypt(answer)

    def linear(self, x: Shared, linear: Linear) -> Shared:
        weight = self.ring.encode(linear.weight).T
        product = self.ring.by_public(x, weight)
        return product if linear.bias is None else self.shift(product, linear.bias)

    def norm(self, x: Shared, norm: Norm, layer: int, where: str) -> Shared:
        seen = self.ring.reveal(x, SERVER, where, layer)
        return self.ring.share(apply_norm(normalise(seen, norm), norm), SERVER)

    def softmax(self, scores: Shared, visible: Bool[Tensor, "n k"], layer: int) -> Shared:
        order = torch.randperm(visible.shape[1], generator=self._orders)
        masked = self.shift(scores, torch.where(visible, 0.0, MASKED))
        hidden = self.ring.by_owner(masked, lambda t: t[..., order], DEVELOPER)
        chances = self.ring.reveal(hidden, SERVER, "softmax", layer).softmax(-1)
        back = order.argsort()
        return self.ring.by_owner(self.ring.share(chances, SERVER), lambda t: t[..., back], DEVELOPER)

    def activate(self, x: Shared, kind: str, layer: int) -> Shared:
        return self.ring.share(activation(self.ring.reveal(x, SERVER, "activation", layer), kind), SERVER)

    def output(self, x: Shared, head: Linear) -> Tensor:
        return self.ring.reveal(self.linear(x, head), USER, "logits", len(self.permuted.blocks) + 1)


class PermLLM(_OnShares):
    """PermLLM: private weights on shares, non-linear parts under fresh permutations (Zheng et al. 2024; section 5.1).

    The server owns the weights and draws the permutations; the other holder sees permuted values. At norms and the
    softmax each row has its own order and the rows are shuffled (factorized-2D); at activations all numbers are
    shuffled. Under a causal mask, the number of masked entries still reveals the place of a shuffled row of the
    softmax.

    Args:
        weights: of the model.
        second: the other holder: ``user``, as the scheme intends, or ``helper``, a server that takes the user's work,
            where the paper's attack applies.
        fraction: bits behind the point.
        seed: of all random draws.
    """

    def __init__(
        self, weights: Weights, second: str = HELPER, fraction: int = FRACTION, seed: int = 0
    ) -> None:
        if second not in (USER, HELPER):
            raise InputError(f"the second holder is {USER!r} or {HELPER!r}, not {second!r}")
        self.weights, self.second = weights, second
        self.parties = tuple(dict.fromkeys((SERVER, second, USER)))
        self.transcript = Transcript(self.parties)
        self.ring = Ring(self.transcript, (SERVER, second), fraction=fraction, seed=seed)
        self._orders = torch.Generator().manual_seed(seed + 1)

    def _walk(self, tokens: Sequence[int], depth: int | None) -> Any:
        shared = self.ring.share(self.weights.inputs(tokens), USER)
        return walk(self.weights, shared, self, depth=depth)[0]

    def linear(self, x: Shared, linear: Linear) -> Shared:
        weight = self.ring.encode(linear.weight).T
        product = self.ring.by_private(x, weight, SERVER)
        return product if linear.bias is None else self.shift(product, linear.bias)

    def norm(self, x: Shared, norm: Norm, layer: int, where: str) -> Shared:
        hat = self._permuted(x, lambda seen: normalise(seen, norm), where, layer)
        weight = self.ring.encode(norm.weight)
        product = self.ring.by_private(hat, weight, SERVER, torch.mul)
        return product if norm.bias is None else self.shift(product, norm.bias)

    def softmax(self, scores: Shared, visible: Bool[Tensor, "n k"], layer: int) -> Shared:
        masked = self.shift(scores, torch.where(visible, 0.0, MASKED))
        shape = masked.first.shape
        rows = masked.map(lambda t: t.flatten(0, 1))
        probabilities = self._permuted(rows, lambda seen: seen.softmax(-1), "softmax", layer)
        return probabilities.map(lambda t: t.view(shape))

    def activate(self, x: Shared, kind: str, layer: int) -> Shared:
        shape = x.first.shape
        flat = x.map(lambda t: t.reshape(1, -1))
        return self._permuted(flat, lambda seen: activation(seen, kind), "activation", layer).map(
            lambda t: t.view(shape)
        )

    def output(self, x: Shared, head: Linear) -> Tensor:
        return self.ring.reveal(self.linear(x, head), USER, "logits", len(self.weights.blocks) + 1)

    def _permuted(self, x: Shared, function: Callable[[Tensor], Tensor], label: str, layer: int) -> Shared:
        """Apply a row-wise function in the clear, with shuffled rows and each row's numbers in its own order."""
        count, width = x.first.shape
        columns = torch.rand(count, width, generator=self._orders, dtype=torch.float64).argsort(1)
        rows = torch.randperm(count, generator=self._orders)
        ring, back = self.ring, columns.argsort(1)
        hidden = ring.by_owner(x, lambda t: t.gather(1, columns)[rows], SERVER)
        value = function(ring.reveal(hidden, self.second, label, layer))
        return ring.by_owner(
            ring.share(value, self.second), lambda t: t[rows.argsort()].gather(1, back), SERVER
        )
