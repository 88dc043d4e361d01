"""Compute which node holds which tokens in Cascade, without tensors (paper, section 7.1, appendices M, O, P, Q).

Positions count from 0; the paper counts from 1. ``R_i`` are the positions of CompNode i, ``S_j`` those of query and key
shard j; AttnNode (j, k) computes the attention of the queries ``S_j`` over the keys ``S_k``.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from hiddenlab.errors import InputError

Positions = tuple[int, ...]
MOST_SHARDS = 1 << 16  # α · m; a spec from a file must not fill the memory


@dataclass(frozen=True, order=True)
class AttnNode:
    """An attention node: its query shard and its key shard."""

    queries: int
    keys: int


@dataclass(frozen=True)
class Message:
    """The rows that one CompNode and one AttnNode send each other in one layer.

    Attributes:
        comp, attn: the two nodes. queries, keys: positions whose query rows, and whose key and value rows, the CompNode
            sends. answers: positions whose partial attention comes back, one entry for each row and block.
    """

    comp: int
    attn: AttnNode
    queries: Positions
    keys: Positions
    answers: Positions


@dataclass(frozen=True)
class Plan:
    """A sharding of ``tokens`` positions over CompNodes and AttnNodes.

    Attributes:
        shards: ``R_i``, the positions of each CompNode. splits: ``S_j``, the positions of each query and key shard.
        symmetric: AttnNodes (j, k) and (k, j) are one node, which learns nothing that either would not
            (appendix Q): β(β + 1)/2 in place of β².
        causal: the model's tokens see none behind them, so that blocks without a visible key are left out (``asked``).
            Results are the same; a model whose tokens see later ones refuses such a plan.
        dealt: c and δ of a (c, δ)-sharding. m: into how many splits ``split`` cut each shard; None for splits by
            hand, with which a plan cannot grow.

    Raises:
        InputError: shards or splits do not partition the positions.
    """

    tokens: int
    shards: tuple[Positions, ...]
    splits: tuple[Positions, ...]
    symmetric: bool = False
    dealt: tuple[int, int] | None = None
    m: int | None = None
    causal: bool = False

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise InputError(f"a plan needs at least 1 token, not {self.tokens}")
        _check_partition(self.tokens, self.shards, "CompNode")
        _check_partition(self.tokens, self.splits, "query and key shard")

    @classmethod
    def clustered(
        cls,
        tokens: int,
        c: int,
        *,
        alpha: int | None = None,
        delta: int | None = None,
        m: int = 1,
        symmetric: bool = False,
        causal: bool = False,
    ) -> "Plan":
        """Build a (c, δ)-sharding: clusters of c tokens, dealt to the CompNodes in turn (Definition 7.1), m-split.

        Args:
            c: tokens of a cluster. alpha: CompNodes, so that δ = α·c. delta: distance from one cluster of a node to its
                next, so that α = ⌈δ/c⌉; give one of both. m: splits of each shard, see ``split``. symmetric, causal: of
                the plan.

        Raises:
            InputError: a number below 1, not exactly one of alpha and delta, or more than 65,536 shards.
        """
        if (alpha is None) == (delta is None):
            raise InputError("give either alpha (CompNodes) or delta (distance between a node's clusters)")
        for name, value in (("c", c), ("alpha", alpha), ("delta", delta), ("m", m)):
            if value is not None and value < 1:
                raise InputError(f"{name} must be at least 1, not {value}")
        distance = alpha * c if alpha is not None else delta
        assert distance is not None
        nodes = -(-distance // c)
        if nodes * m > MOST_SHARDS:
            raise InputError(f"{nodes} CompNodes with {m} splits each are more than {MOST_SHARDS} shards")
        held: list[list[int]] = [[] for _ in range(nodes)]
        for t in range(tokens):
            held[t % distance // c].append(t)
        shards = tuple(map(tuple, held))
        return cls(tokens, shards, split(shards, m), symmetric, (c, distance), m, causal)

    @classmethod
    def by_hand(
        cls, shards: Sequence[Sequence[int]], *, m: int = 1, symmetric: bool = False, causal: bool = False
    ) -> "Plan":
        """Build a plan from positions written by hand, one sequence for each CompNode, m-split.

        Raises:
            InputError: they do not partition the positions from 0 on.
        """
        if m < 1:
            raise InputError(f"m must be at least 1, not {m}")
        held = tuple(tuple(sorted(shard)) for shard in shards)
        return cls(sum(map(len, held)), held, split(held, m), symmetric, None, m, causal)

    def grown(self, tokens: int) -> "Plan":
        """Return the plan of a longer sequence in which every node keeps what it holds (generation, appendix Q).

        (c, δ)-sharding continues its pattern. With shards by hand each new token goes to the CompNode whose last token
        is furthest back.

        Raises:
            InputError: fewer tokens than before, or splits by hand.
        """
        if tokens == self.tokens:
            return self
        if tokens < self.tokens:
            raise InputError(f"a plan for {self.tokens} tokens cannot shrink to {tokens}")
        if self.m is None:
            raise InputError("a plan with query and key shards by hand cannot grow; give shards and m")
        shards, splits = list(self.shards), list(self.splits)
        for t in range(self.tokens, tokens):
            if self.dealt is not None:
                i = t % self.dealt[1] // self.dealt[0]
            else:
                i = min(range(len(shards)), key=lambda i: shards[i][-1] if shards[i] else -1)
            j = self.m * i + len(shards[i]) % self.m
            splits[j] += (t,)
            shards[i] += (t,)
        # The plan was valid before: checking all positions again would cost more than adding the new ones.
        plan = object.__new__(Plan)
        for name, value in vars(self).items():
            object.__setattr__(plan, name, value)
        for name, value in (("tokens", tokens), ("shards", tuple(shards)), ("splits", tuple(splits))):
            object.__setattr__(plan, name, value)
        return plan

    @property
    def alpha(self) -> int:
        """The number of CompNodes."""
        return len(self.shards)

    @property
    def beta(self) -> int:
        """The number of query and key shards."""
        return len(self.splits)

    @cached_property
    def attn_nodes(self) -> tuple[AttnNode, ...]:
        """All attention nodes: β², or β(β + 1)/2 where symmetric."""
        return tuple(
            AttnNode(j, k) for j in range(self.beta) for k in range(j if self.symmetric else 0, self.beta)
        )

    def blocks(self, node: AttnNode) -> tuple[AttnNode, ...]:
        """Return the (query shard, key shard) blocks that a node computes."""
        if self.symmetric and node.queries != node.keys:
            return node, AttnNode(node.keys, node.queries)
        return (node,)

    def asked(self, block: AttnNode, since: int = 0) -> Positions:
        """Return the new positions whose queries a block answers: none where all of its keys lie behind them.

        Only a causal plan leaves such blocks out (appendix Q, "Synchronization"). No other place decides it.
        """
        queries, keys = new_of(self.splits[block.queries], since), self.splits[block.keys]
        hidden = self.causal and queries and (not keys or keys[0] > queries[-1])
        return () if hidden else queries

    def given(self, node: AttnNode, since: int = 0, keep: bool = False) -> tuple[Positions, Positions]:
        """Return the new positions whose query rows, and whose key and value rows, an attention node is sent.

        Args:
            since: first position that is new.
            keep: later queries may need the keys of blocks that are left out now, so they are sent all the same.
        """
        blocks = [(block, self.asked(block, since)) for block in self.blocks(node)]
        queries = {p for _, rows in blocks for p in rows}
        wanted = [block.keys for block, rows in blocks if rows or keep or not self.causal]
        keys = {p for shard in wanted for p in new_of(self.splits[shard], since)}
        return tuple(sorted(queries)), tuple(sorted(keys))

    def held_by(self, node: AttnNode) -> Positions:
        """Return the positions of which an attention node receives any row: ``S_j ∪ S_k``, or none (``asked``)."""
        queries, keys = self.given(node)
        return tuple(sorted({*queries, *keys}))

    @cached_property
    def left_out(self) -> tuple[AttnNode, ...]:
        """The blocks that a pass over the whole prompt leaves out."""
        if not self.causal:
            return ()
        every = (block for node in self.attn_nodes for block in self.blocks(node))
        return tuple(block for block in every if not self.asked(block))

    def describe(self) -> dict[str, Any]:
        """Return the plan as plain data for ``described``; a few numbers where it was dealt."""
        description: dict[str, Any] = {
            "tokens": self.tokens, "symmetric": self.symmetric, "m": self.m, "causal": self.causal,
        }  # fmt: skip
        if self.dealt is not None:
            return description | {"dealt": list(self.dealt)}
        return description | {
            "shards": [list(s) for s in self.shards],
            "splits": [list(s) for s in self.splits],
        }

    @classmethod
    def described(cls, data: Mapping[str, Any]) -> "Plan":
        """Rebuild a plan from the result of ``describe``."""
        if dealt := data.get("dealt"):
            c, delta = dealt
            options = {name: data[name] for name in ("m", "symmetric", "causal")}
            return cls.clustered(data["tokens"], c, delta=delta, **options)
        shards, splits = (tuple(tuple(part) for part in data[name]) for name in ("shards", "splits"))
        return cls(data["tokens"], shards, splits, data["symmetric"], None, data["m"], data["causal"])

    def messages(
        self, since: int = 0, nodes: Sequence[AttnNode] | None = None, keep: bool = False
    ) -> Iterator[Message]:
        """Yield the messages between each pair of nodes in a layer (Algorithm 2); pairs without rows are left out.

        Args:
            since: first position that is new; the rows of earlier ones were sent before and are kept.
            nodes: only with these AttnNodes.
            keep: see ``given``.
        """
        owner = {p: i for i, shard in enumerate(self.shards) for p in new_of(shard, since)}
        new = [bool(new_of(split, since)) for split in self.splits]
        for node in self.attn_nodes if nodes is None else nodes:
            if not (new[node.queries] or new[node.keys]):
                continue
            queries, keys = self.given(node, since, keep)
            answers = [p for block in self.blocks(node) for p in self.asked(block, since)]
            for comp in sorted({owner[p] for p in (*queries, *keys)}):
                yield Message(
                    comp,
                    node,
                    tuple(p for p in queries if owner[p] == comp),
                    tuple(p for p in keys if owner[p] == comp),
                    tuple(p for p in answers if owner[p] == comp),
                )

    def violations(self, rho: int) -> list[str]:
        """Return where the plan breaks Theorem 7.3's condition that gaps in a CompNode's shard hold at least ρ tokens.

        The condition is necessary, not sufficient: partial attention at the first layer revealed the tokens under every
        plan that was measured (``attacks/partial_sums``, docs/log/007-cascade-partial-sums.md).

        Args:
            rho: the vocab-matching threshold (Definition 7.2): one more than the unknown tokens in a row that an
                attacker can search.
        """
        violations = []
        for i, shard in enumerate(self.shards):
            for before, after in gaps(shard):
                missing = after - before - 1
                if missing < rho:
                    violations.append(
                        f"CompNode {i} holds tokens {before} and {after}, with a gap of {missing} between them; "
                        f"at least {rho} are needed"
                    )
        return violations


def split(shards: Sequence[Positions], m: int) -> tuple[Positions, ...]:
    """Split each shard into m (appendix M): S_{mi+x} holds every m-th position of sorted R_i from its x-th on.

    The paper writes a stride of δ over the sorted shard; its worked example has a stride of m = c, used here.
    """
    return tuple(tuple(sorted(shard))[x::m] for shard in shards for x in range(m))


def new_of(positions: Positions, since: int) -> Positions:
    """Return the positions from ``since`` on, given ascending ones."""
    return positions[bisect_left(positions, since) :]


def gaps(positions: Positions) -> list[tuple[int, int]]:
    """Return the pairs of neighbouring held positions with missing ones between them."""
    return [(a, b) for a, b in pairwise(positions) if b > a + 1]


def smallest_gap(positions: Positions) -> int | None:
    """Return how many tokens are missing in the smallest gap between clusters; None where there is no gap."""
    return min((b - a - 1 for a, b in gaps(positions)), default=None)


def recoverable(positions: Positions, rho: int) -> int:
    """Return how many tokens vocabulary matching recovers for the holder of unidirectional states at some positions.

    The attack goes from left to right; a held state after g unknown tokens takes up to V^(g+1) forward passes and then
    gives those tokens too (appendix C), until a step needs an exponent of ρ or more. Theorem 7.3 covers gaps between
    clusters only: the first cluster of the node that holds position 0 is open under every plan.
    """
    known = 0
    for position in positions:
        if position - known + 1 >= rho:
            break
        known = position + 1
    return known


def _check_partition(tokens: int, parts: Sequence[Positions], what: str) -> None:
    owner: dict[int, int] = {}
    for i, part in enumerate(parts):
        if any(b <= a for a, b in pairwise(part)):
            raise InputError(f"{what} {i} does not hold its tokens in ascending order, each once")
        for position in part:
            if not 0 <= position < tokens:
                raise InputError(f"{what} {i} holds token {position}; there are tokens 0 to {tokens - 1}")
            if position in owner:
                raise InputError(f"token {position} is held by {what} {owner[position]} and by {what} {i}")
            owner[position] = i
    if missing := sorted(set(range(tokens)) - set(owner)):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InputError(f"no {what} holds token {missing[0]}{more}")


ROOM = 4  # directions of each key/value head in which a wrong token must show, where tokens are read in order


def rows_for_span(rows: int, per_row: int, known: int, unknown: int, width: int, room: int = 1) -> int:
    """Return how many of some rows' attention outputs name the tokens that they mix; 0 where none do.

    Each row gives an equation for each query head of a key/value head, of which there must be as many as unknown
    tokens. It also brings a mix of known value vectors, of unknown share. The unknown value vectors and these mixes
    must leave directions in which a wrong token shows (``attacks/partial_sums``).

    Args:
        rows: that see the same unknown tokens. per_row: query heads of a key/value head. known, unknown: tokens that
            they see. width: of a value vector. room: how many directions must be left.
    """
    for used in range(rows, 0, -1):
        if unknown <= used * per_row and unknown + min(known, used * per_row) <= width - room:
            return used
    return 0
