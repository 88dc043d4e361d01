"""Draw at random the positions that a node of a token-sharded scheme holds, for training (paper, Definition 7.1)."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hiddenlab.sharding import Plan
from hiddenlab.types import ObservationInfo

CLUSTERS = (1, 2, 4, 8)
NODES = (2, 3, 4, 6, 8, 12)
SPLITS = (1, 1, 2, 4)  # CompNodes and unsplit AttnNodes are half of what any plan shows


@dataclass(frozen=True)
class Shards:
    """A family of views: every node of one (c, δ)-sharding, or of all common ones.

    Attributes:
        alpha, c, m: of the plan; all None for any plan, ``alpha`` of 1 for the view of every row. attn: AttnNodes'
            views, otherwise CompNodes'.
    """

    alpha: int | None = None
    c: int | None = None
    m: int | None = None
    attn: bool = False

    @classmethod
    def of(cls, info: ObservationInfo) -> "Shards":
        """Return the plan that an observation was shown under; every row, or any plan, where it does not say."""
        facts: Mapping[str, Any] = info.facts.get("shard") or {}
        if not {"alpha", "c", "m", "attn"} <= set(facts):
            return cls() if "tokens" in info.facts else cls(1, 1, 1)
        return cls(int(facts["alpha"]), int(facts["c"]), int(facts["m"]), bool(facts["attn"]))

    @property
    def whole(self) -> bool:
        """Whether every row is shown, so that nothing is missing and training learns to read states."""
        return self.alpha == 1 and not (self.attn and self.m != 1)

    def draw(self, tokens: int, random: random.Random) -> list[int]:
        """Draw the positions of a text that a node holds, ascending; never none, and all only for ``alpha`` of 1."""
        if self.whole:
            return list(range(tokens))
        while True:
            alpha, c = self.alpha or random.choice(NODES), self.c or random.choice(CLUSTERS)
            attn = self.attn if self.alpha else random.random() < 0.5
            m = (self.m or random.choice(SPLITS)) if attn else 1
            held: set[int] = set()
            for _ in range(2 if attn else 1):
                shard = Plan.clustered(tokens, c, alpha=alpha).shards[random.randrange(alpha)]
                held.update(shard[random.randrange(m) :: m])
            if 0 < len(held) < tokens:
                return sorted(held)
            if self.alpha and self.alpha * self.c > tokens:  # type: ignore[operator]
                return sorted(held)[: tokens - 1] or [0]


def missing(tokens: int, held: Sequence[int]) -> list[int]:
    """Return the positions that are not held."""
    return sorted(set(range(tokens)) - set(held))
