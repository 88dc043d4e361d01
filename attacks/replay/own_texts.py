"""Release the attacker's own texts of one length, and learn from them which row is of which position."""

from collections.abc import Sequence
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hiddenlab.channels import Channel
from hiddenlab.errors import NotApplicableError
from hiddenlab.matching.epsilon import near_tokens
from hiddenlab.models import TruncatedModel
from hiddenlab.proposals.corpus import Corpus

# Relative rounding error of rows: equal releases in passes of different shapes differ by no more.
RESOLUTION = 64 * torch.finfo(torch.float32).eps
# Of rows in half precision few numbers are rounded to another neighbour: the error is this part of the resolution.
FLIPPED = 8
CLEAR = 4.0  # nearest wrong tokens are so many times as far as rounding brings right ones
TEXTS = 6  # of which own states and released rows are compared


def as_rows(states: Tensor) -> Float[Tensor, "n d"]:
    """Return released rows as numbers to compare."""
    return states.detach().float().cpu()


class OwnTexts:
    """The attacker's own texts of one length, behind a channel that draws nothing fresh.

    Args:
        corpus: draws the texts. length: in tokens. extra: rows of a release that are no token's.

    Attributes:
        text: one of them. resolution: relative rounding error of released rows, by how their numbers are kept.
    """

    def __init__(
        self, channel: Channel, model: TruncatedModel, corpus: Corpus, length: int, extra: int = 0
    ) -> None:
        self.channel, self.model, self.length, self.extra = channel, model, length, extra
        self.resolution = RESOLUTION
        self._corpus = corpus
        self.text = self.another()

    def another(self) -> Int[Tensor, " n"]:
        """Return a text of the length."""
        return self._corpus.text_of(self.length)

    @cached_property
    def near(self) -> Int[Tensor, " n"]:
        """For each token of ``text`` the one with the nearest embedding."""
        table = self.model.embedding.detach()
        own = self.text.to(table.device)
        return near_tokens(own, table, table.float().norm(dim=1), 1)[:, 0].cpu()

    def release(self, texts: Sequence[Int[Tensor, " n"]], seed: int = 0) -> list[Float[Tensor, "more d"]]:
        """Return the rows that the defense releases of texts.

        Args:
            seed: of the generator that the defense is given, and of which it uses nothing.
        """
        drawn = torch.Generator().manual_seed(seed)
        released = self.channel.release_batch(self.model, [text.tolist() for text in texts], drawn)
        own = [observation.states for observation, _ in released]
        if own[0].dtype.itemsize < 4:
            self.resolution = torch.finfo(own[0].dtype).eps / FLIPPED
        return [as_rows(states) for states in own]

    def cut(self, position: int) -> Int[Tensor, " n"]:
        """Return ``text`` with near tokens in place of its own from a position on."""
        return torch.cat([self.text[:position], self.near[position:]])

    @cached_property
    def places(self) -> tuple[tuple[int, ...], Float[Tensor, " n"]]:
        """The row of each position, and the distance within which a row of it is the same.

        Replacing all tokens from a position on changes the rows from that position on, and no other.

        Raises:
            NotApplicableError: rows depend on later tokens, or show nothing of their own.
        """
        n = self.length
        texts = [self.text, *(self.cut(p) for p in range(n)), self.text]
        released = torch.stack(self.release(texts))
        base, cuts, again = released[0], released[1:-1], released[-1]
        apart = (cuts - base).norm(dim=2)  # cut, row
        rounding = torch.maximum(4 * (again - base).norm(dim=1), self.resolution * base.norm(dim=1))
        changed: Bool[Tensor, "n rows"] = apart > rounding
        of_row = changed.sum(0) - 1  # the position of each row; -1 where it is no token's
        told = changed == (torch.arange(n)[:, None] <= of_row)
        row_of = of_row.argsort(stable=True)[self.extra :]
        in_order = sorted(of_row.tolist()) == [-1] * self.extra + list(range(n))
        limits = limits_between(rounding[row_of], apart[torch.arange(n), row_of]) if in_order else None
        if limits is None or not bool(told.all()):
            raise NotApplicableError("released rows depend on later tokens, or show nothing of their own")
        return tuple(row_of.tolist()), limits


def limits_between(floor: Float[Tensor, " n"], gap: Float[Tensor, " n"]) -> Float[Tensor, " n"] | None:
    """Return limits between how far rounding brings right tokens and how far near wrong ones are; None without room.

    Another token of the vocabulary may be nearer than the nearest to the own text's. So the smallest room of all
    positions counts for each, and the limit is in the middle of it by ratio.
    """
    floor = floor.clamp(min=1e-30)
    room = float((gap / floor).min())
    return floor * room**0.5 if room >= CLEAR else None
