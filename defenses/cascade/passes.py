"""Describe what nodes compute together: a pass of one request, and a batch of passes of several requests.

A request is one prompt with everything generated after it. It consists of passes: the first over the prompt, then one
over each new token.
"""

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from hiddenlab.sharding import AttnNode, Message, Plan, Positions, new_of


@dataclass(frozen=True)
class Pass:
    """One forward pass of a request.

    Attributes:
        request: its name.
        plan: for all tokens so far, including the new ones.
        number: of the pass, from 0.
        since: first new position.
        keep: keep keys and values for further passes.
        last: only the last position's output is wanted.
        hidden: padding, which no token sees.
    """

    request: str
    plan: Plan
    number: int = 0
    since: int = 0
    keep: bool = False
    last: bool = False
    hidden: Positions = ()

    def new(self, index: int) -> Positions:
        """Return the new positions that a CompNode holds."""
        return new_of(self.plan.shards[index], self.since) if index < self.plan.alpha else ()

    def messages(self, nodes: Sequence[AttnNode] | None = None) -> Iterator[Message]:
        """Yield the messages of a layer of this pass, only with some AttnNodes where they are given."""
        return self.plan.messages(self.since, nodes, self.keep)

    def asked(self, block: AttnNode) -> Positions:
        """Return the new positions whose queries a block answers."""
        return self.plan.asked(block, self.since)

    def inputs(self, index: int, tokens: Tensor) -> Tensor | None:
        """Return a CompNode's share of the new tokens' ids or embeddings; None where it has none."""
        mine = [p - self.since for p in self.new(index)]
        return tokens[mine] if mine else None

    def wanted(self, index: int) -> list[int]:
        """Return which of a CompNode's new rows are wanted as output, by their places."""
        mine = self.new(index)
        if not self.last:
            return list(range(len(mine)))
        return [len(mine) - 1] if mine and mine[-1] == self.plan.tokens - 1 else []


@dataclass(frozen=True)
class Batch:
    """Passes of several requests that the nodes compute together.

    Their plans have the same number of query and key shards, and are all symmetric or all not.

    Attributes:
        name: that no other batch has.
        passes: one for each request.
    """

    name: str
    passes: tuple[Pass, ...]

    def at(self, index: int) -> Iterator[tuple[int, Pass]]:
        """Yield the passes in which a CompNode has new rows, with their places in the batch."""
        for place, work in enumerate(self.passes):
            if work.new(index):
                yield place, work

    @property
    def requests(self) -> frozenset[str]:
        return frozenset(work.request for work in self.passes)

    @classmethod
    def of(cls, *passes: Pass) -> "Batch":
        """Make a batch with a new name."""
        return cls(new_name(), passes)


def new_name() -> str:
    """Return a name that no other request or batch has."""
    return uuid.uuid4().hex[:12]
