"""Run STIP: one server runs a permuted model on permuted vectors (Yuan et al. 2024; paper, appendix I.1)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.defenses.protocols.decoder import Block, Weights, take, take_norm
from hiddenlab.defenses.protocols.forward import Cache, Plain, walk
from hiddenlab.defenses.protocols.transcript import Transcript
from hiddenlab.errors import InputError

DEVELOPER, SERVER, USER = "developer", "server", "user"


@dataclass(frozen=True)
class Keys:
    """The developer's secret permutations: of the hidden dimensions (π) and of the output vocabulary (π_c).

    ``permuted[i] = plain[order[i]]``.
    """

    hidden: Int[Tensor, " d"]
    vocabulary: Int[Tensor, " v"]


def permute_weights(weights: Weights, keys: Keys, generator: torch.Generator) -> Weights:
    """Permute rows and columns of all weights, so that the model computes on permuted vectors (Θ′).

    Hidden dimensions follow π everywhere. The inner dimensions of each MLP and the value dimensions of each head have
    their own orders. Queries and keys keep theirs: they cancel in their product, and rotary embedding ties them. The
    result has no token embedding, which only the user gets.
    """
    d = keys.hidden
    return replace(
        weights,
        embedding=None,
        positions=None if weights.positions is None else weights.positions[:, d],
        blocks=tuple(_permute_block(block, weights, d, generator) for block in weights.blocks),
        final=take_norm(weights.final, d),
        head=take(weights.head, rows=keys.vocabulary, columns=d),
    )


def _permute_block(block: Block, weights: Weights, d: Tensor, generator: torch.Generator) -> Block:
    inner = torch.randperm(block.up.weight.shape[0], generator=generator)
    size = weights.head_dim
    orders = torch.stack([torch.randperm(size, generator=generator) for _ in range(weights.kv_heads)])
    values = (orders + size * torch.arange(weights.kv_heads)[:, None]).flatten()
    groups = weights.heads // weights.kv_heads
    mixed = (orders.repeat_interleave(groups, 0) + size * torch.arange(weights.heads)[:, None]).flatten()
    return Block(
        norm1=take_norm(block.norm1, d), q=take(block.q, columns=d), k=take(block.k, columns=d),
        v=take(block.v, rows=values, columns=d), o=take(block.o, rows=d, columns=mixed),
        norm2=take_norm(block.norm2, d), up=take(block.up, rows=inner, columns=d),
        gate=None if block.gate is None else take(block.gate, rows=inner, columns=d),
        down=take(block.down, rows=d, columns=inner),
    )  # fmt: skip


class Developer:
    """The owner of the model: draws π and π_c, gives them to the user and the permuted model to the server."""

    def __init__(self, weights: Weights, seed: int = 0) -> None:
        self.weights = weights
        self._generator = torch.Generator().manual_seed(seed)
        self.keys = Keys(
            torch.randperm(weights.width, generator=self._generator),
            torch.randperm(len(weights.head.weight), generator=self._generator),
        )

    def permuted(self) -> Weights:
        """Return the permuted model Θ′."""
        return permute_weights(self.weights, self.keys, self._generator)


class Server:
    """The party that runs Θ′ on what the user sends, and learns neither Θ nor π."""

    def __init__(self, permuted: Weights) -> None:
        self.permuted = permuted
        self._caches: dict[int, Cache[Tensor]] = {}

    def answer(self, request: int, vectors: Float[Tensor, "n d"]) -> Float[Tensor, "n v"]:
        """Return permuted logits; keys and values of a request are kept for its next tokens."""
        cache = self._caches.setdefault(request, Cache())
        return walk(self.permuted, vectors, Plain(), cache)[0]  # type: ignore[no-any-return]

    def forget(self, request: int) -> None:
        """End a request."""
        self._caches.pop(request, None)


class User:
    """The party with the token embedding and both keys: permutes vectors, and restores the order of logits."""

    def __init__(self, embedding: Float[Tensor, "v d"], keys: Keys) -> None:
        self.embedding, self.keys = embedding, keys

    def encrypt(self, tokens: Sequence[int]) -> Float[Tensor, "n d"]:
        """Return the permuted vectors Xπ of tokens.

        Raises:
            InputError: there are no tokens, or one is outside of the vocabulary.
        """
        if not tokens or not 0 <= min(tokens) <= max(tokens) < len(self.embedding):
            raise InputError(f"tokens must be numbers below {len(self.embedding)}, and at least one")
        return self.embedding[torch.tensor(list(tokens))][:, self.keys.hidden]

    def decrypt(self, logits: Float[Tensor, "n v"]) -> Float[Tensor, "n v"]:
        """Return logits in the order of the vocabulary."""
        ordered = torch.empty_like(logits)
        ordered[:, self.keys.vocabulary] = logits
        return ordered


class Stip:
    """The three parties of STIP together, and the messages between them.

    The scheme is exact: permutations are orthogonal, so logits differ from the plain model's by float rounding only.
    """

    parties = (DEVELOPER, SERVER, USER)

    def __init__(self, weights: Weights, seed: int = 0) -> None:
        developer = Developer(weights, seed)
        self.transcript = Transcript(self.parties)
        self.server = Server(developer.permuted())
        embedding = weights.inputs(range(len(weights.head.weight)))
        self.user = User(embedding, developer.keys)
        self._requests = 0

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> Float[Tensor, "n v"]:
        """Return the logits of a prompt, as the user gets them."""
        self._requests += 1
        logits = self._exchange(self._requests, tokens)
        self.server.forget(self._requests)
        return logits

    @torch.inference_mode()
    def generate(self, tokens: Sequence[int], new: int) -> list[int]:
        """Generate ``new`` tokens greedily, with a message each way for every token."""
        self._requests += 1
        generated: list[int] = []
        step = list(tokens)
        try:
            for _ in range(new):
                step = [int(self._exchange(self._requests, step)[-1].argmax())]
                generated += step
        finally:
            self.server.forget(self._requests)
        return generated

    def ask(self, tokens: Sequence[int]) -> Float[Tensor, "n d"]:
        """Send the user's message alone, and return what the server sees before it computes anything."""
        vectors = self.user.encrypt(tokens)
        self.transcript.send(USER, SERVER, vectors)
        self.transcript.turn()
        return self.transcript.learn(SERVER, "inputs", 0, vectors)

    def _exchange(self, request: int, tokens: Sequence[int]) -> Float[Tensor, "n v"]:
        vectors = self.ask(tokens)
        logits = self.server.answer(request, vectors)
        self.transcript.send(SERVER, USER, logits)
        self.transcript.turn()
        return self.user.decrypt(
            self.transcript.learn(USER, "logits", len(self.server.permuted.blocks) + 1, logits)
        )
