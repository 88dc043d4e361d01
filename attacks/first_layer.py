"""The first layer's queries, keys and values, which depend on one token each."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.slice import Slice
from hiddenlab.slice.door import Attention


class FirstLayer:
    """Queries, keys and values of the first layer, of any token at any position.

    Through the slice's streams, so for any architecture: at the first layer they depend on nothing else.
    """

    def __init__(self, slice: Slice) -> None:
        self.q, self.k, self.v, self.embed = (
            slice.sibling(0 if stream == "embed" else 1, stream=stream, dtype="float32")
            for stream in ("q", "k", "v", "embed")
        )
        some = torch.arange(min(4, slice.vocab_size), device=slice.device)
        # Learned positions are added to the embedding and so move the values; rotary ones do not.
        self.moves = not torch.allclose(self._at(self.v, some, 0), self._at(self.v, some, 7), atol=1e-5)
        self._values: dict[int, Tensor] = {}

    def counters(self) -> tuple[int, int]:
        """Positions and passes run so far."""
        slices = (self.q, self.k, self.v, self.embed)
        return sum(s.evaluated_tokens for s in slices), sum(s.forward_calls for s in slices)

    @property
    def attention(self) -> Attention:
        how = self.v.attention  # it has run: the values were tabulated
        assert how is not None
        return how

    @staticmethod
    def _at(slice: Slice, tokens: Int[Tensor, " c"], position: int) -> Float[Tensor, "c w"]:
        return slice.prefix(offset=position).branch(tokens)

    def own_tokens(self, rows: Float[Tensor, "rows d"], positions: Sequence[int]) -> list[int]:
        """Tokens of embeddings as they enter the first layer: what a learned position adds is taken off first."""
        table = self.embed.embed(torch.arange(self.embed.vocab_size, device=rows.device)).float()
        zero = torch.zeros(1, dtype=torch.long, device=rows.device)
        added = torch.cat([self._at(self.embed, zero, p) for p in positions]) - table[:1]
        return [int(torch.cdist(row[None], table).argmin()) for row in rows - added]

    def along(self, slice: Slice, known: dict[int, int]) -> Float[Tensor, "n w"]:
        """Rows of all positions of a prompt of which some tokens are known; the others' rows mean nothing."""
        tokens = torch.zeros(max(known) + 1, dtype=torch.long, device=slice.device)
        for position, token in known.items():
            tokens[position] = token
        return slice.encode(tokens)

    def values(self, position: int) -> Float[Tensor, "v w"]:
        """Value vectors of the whole vocabulary at a position."""
        key = position if self.moves else 0
        if key not in self._values:
            if self.moves:
                self._values.clear()  # one table at a time: each is as large as the vocabulary
            self._values[key] = self._at(self.v, torch.arange(self.v.vocab_size, device=self.v.device), key)
        return self._values[key]

    def keys(self, tokens: Int[Tensor, " c"], position: int) -> Float[Tensor, "c w"]:
        """Keys of some tokens at a position."""
        return self._at(self.k, tokens, position)
