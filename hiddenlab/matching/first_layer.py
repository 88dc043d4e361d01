"""Compute the first layer's queries, keys and values, which depend on one token and its position alone."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.models import TruncatedModel
from hiddenlab.models.attention import Attention

TABLES = 2**30  # bytes of vocabulary tables that are held, each for keys and values; at least one table


class AttentionHeads(ABC):
    """How a layer's query heads score keys, and share key/value heads."""

    heads: int

    @property
    @abstractmethod
    def groups(self) -> int:
        """Query heads of one key/value head."""

    @property
    @abstractmethod
    def value_width(self) -> int:
        """Numbers of a value vector of one head."""

    @property
    @abstractmethod
    def attention(self) -> Attention:
        """How the layer attends."""

    @abstractmethod
    def counters(self) -> tuple[int, int]:
        """Return the positions and passes run so far."""

    def scored(self, queries: Float[Tensor, "h r d"], keys: Float[Tensor, "c w"]) -> Float[Tensor, "h r c"]:
        """Return the attention scores before softmax, for queries of every head and tokens with these keys."""
        scores = torch.einsum("hrd,chd->hrc", queries, self.spread(keys)) * self.attention.scaling
        if (cap := self.attention.softcap) is not None:
            scores = torch.tanh(scores / cap) * cap
        return scores

    def by_head(self, rows: Float[Tensor, "r w"]) -> Float[Tensor, "h r d"]:
        """Return rows of queries, head by head."""
        return rows.unflatten(1, (self.heads, -1)).transpose(0, 1)

    def spread(self, values: Float[Tensor, "c w"]) -> Float[Tensor, "c h d"]:
        """Return value vectors for every query head; query heads of one key/value head share them."""
        return values.unflatten(1, (self.heads // self.groups, -1)).repeat_interleave(self.groups, 1)


class FirstLayer(AttentionHeads):
    """Queries, keys and values of the first layer, of any token at any position.

    They are computed through the model's streams, so this works for any architecture.
    """

    def __init__(self, model: TruncatedModel) -> None:
        self.q, self.k, self.v, self.embed = (
            model.sibling(0 if stream == "embed" else 1, stream=stream, dtype="float32")
            for stream in ("q", "k", "v", "embed")
        )
        ids = torch.arange(min(4, model.vocab_size), device=model.device)
        # Learned positions are added to the embedding and so move the values; rotary ones do not.
        self.moves = not torch.allclose(self._at(self.v, ids, 0), self._at(self.v, ids, 7), atol=1e-5)
        self._values: dict[int, Tensor] = {}
        self._keys: dict[int, Tensor] = {}
        self.heads = int(model.module.config.num_attention_heads)  # type: ignore[union-attr,arg-type]

    def counters(self) -> tuple[int, int]:
        models = (self.q, self.k, self.v, self.embed)
        return sum(s.evaluated_tokens for s in models), sum(s.forward_calls for s in models)

    @property
    def attention(self) -> Attention:
        attention = self.v.attention  # set, since the values were computed before
        assert attention is not None
        return attention

    @staticmethod
    def _at(model: TruncatedModel, tokens: Int[Tensor, " c"], position: int) -> Float[Tensor, "c w"]:
        return model.prefix(offset=position).branch(tokens)

    def own_tokens(self, rows: Float[Tensor, "rows d"], positions: Sequence[int]) -> list[int]:
        """Return the tokens of embeddings at the first layer's input; learned positions are subtracted first."""
        table = self.embed.embed(torch.arange(self.embed.vocab_size, device=rows.device)).float()
        zero = torch.zeros(1, dtype=torch.long, device=rows.device)
        added = torch.cat([self._at(self.embed, zero, p) for p in positions]) - table[:1]
        return [int(torch.cdist(row[None], table).argmin()) for row in rows - added]

    def along(self, model: TruncatedModel, known: dict[int, int]) -> Float[Tensor, "n w"]:
        """Return rows of all positions of a prompt with some known tokens; rows of other positions are meaningless."""
        tokens = torch.zeros(max(known) + 1, dtype=torch.long, device=model.device)
        for position, token in known.items():
            tokens[position] = token
        return model.encode(tokens)

    def values(self, position: int, tokens: Int[Tensor, " c"] | None = None) -> Float[Tensor, "c w"]:
        """Return value vectors of tokens, or of the whole vocabulary where None, at a position."""
        if tokens is not None and self.moves:
            return self._at(self.v, tokens, position)
        table = self._table(self._values, self.v, position if self.moves else 0)
        return table if tokens is None else table[tokens]

    def _table(self, held: dict[int, Tensor], model: TruncatedModel, position: int) -> Float[Tensor, "v w"]:
        """Return a stream of the whole vocabulary; few tables are held at once, since each is large."""
        if position not in held:
            table = self._at(model, torch.arange(model.vocab_size, device=model.device), position)
            while held and (len(held) + 1) * table.nbytes > TABLES:
                del held[next(iter(held))]
            held[position] = table
        return held[position]

    def keys(self, tokens: Int[Tensor, " c"], position: int) -> Float[Tensor, "c w"]:
        """Return keys of some tokens at a position."""
        return self._at(self.k, tokens, position)

    @cached_property
    def turns(self) -> bool:
        """Whether scores depend only on the distance between key and query (rotary positions)."""
        ids = torch.arange(min(4, self.k.vocab_size), device=self.k.device)
        first, second = (
            self.scored(self.by_head(self._at(self.q, ids, place + 3)), self._at(self.k, ids, place))
            for place in (0, 7)
        )
        return torch.allclose(first, second, rtol=1e-4, atol=1e-5)

    def scores(
        self, token: int, position: int, place: int, tokens: Int[Tensor, " c"] | None = None
    ) -> Float[Tensor, "h c"]:
        """Return the attention scores before softmax of a token at its position for others at an earlier place.

        Args:
            tokens: None is the whole vocabulary.
        """
        if not bool(self.attention.visible([position], [place])):
            count = self.k.vocab_size if tokens is None else len(tokens)
            return torch.full((self.heads, count), float("-inf"), device=self.k.device)
        # Where only the distance matters, one table serves all places.
        shift = place if self.turns else 0
        query = self._at(self.q, torch.tensor([token], device=self.q.device), position - shift)
        if tokens is None or self.turns:
            keys = self._table(self._keys, self.k, place - shift)
            keys = keys if tokens is None else keys[tokens]
        else:
            keys = self.keys(tokens, place)
        return self.scored(self.by_head(query), keys)[:, 0]

    @cached_property
    def groups(self) -> int:
        return self.q.width // self.k.width

    @property
    def value_width(self) -> int:
        return self.v.width * self.groups // self.heads
