"""Search the Cascade plans of at most a given cost for the one that leaks least."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from hiddenlab.defenses.cascade.cost import Link, Shape, layer_bytes, layer_seconds
from hiddenlab.sharding import Plan

MOST_NODES = 1024  # CompNodes of a plan that is searched


@dataclass(frozen=True)
class Choice:
    """A plan that was searched.

    Attributes:
        alpha, c, m, symmetric: of the plan. bytes: of a pass through all layers.
        order: plans that leak less come first: by the share of the prompt that reaches a CompNode and an AttnNode, then
            by cost.
    """

    alpha: int
    c: int
    m: int
    symmetric: bool
    bytes: int
    order: tuple[float, ...]

    def plan(self, tokens: int) -> Plan:
        """Return the plan."""
        return Plan.clustered(tokens, self.c, alpha=self.alpha, m=self.m, symmetric=self.symmetric)

    @property
    def options(self) -> str:
        """The options that ask ``cascade plan`` and ``cascade run`` for it."""
        return f"--alpha {self.alpha} --c {self.c} --m {self.m}" + " --symmetric" * self.symmetric


def best_plan(
    tokens: int,
    shape: Shape,
    link: Link,
    most_bytes: float | None,
    most_seconds: float | None,
    mode: str = "paper",
) -> tuple[Choice | None, int]:
    """Return the (c, δ)-sharding that leaks least within a cost, and how many were compared.

    What reaches a node counts as read, since what was not measured may be readable. Plans are compared by the share of
    the prompt that reaches a CompNode that holds tokens, on average; then an AttnNode; then by bytes. The worst node
    cannot decide: under every plan all tokens reach the node that holds the last one.

    Args:
        tokens: of the prompt. shape, link: see ``cost``.
        most_bytes, most_seconds: of a pass through all layers; None is no limit.
        mode: of the answers, see ``layer_bytes``.

    Returns:
        None where no plan is within the cost.
    """
    choices = sorted(_choices(tokens, shape, most_bytes, mode), key=lambda choice: choice.order)
    for choice in choices:
        if most_seconds is None:
            return choice, len(choices)
        if shape.layers * layer_seconds(choice.plan(tokens), shape, link, mode) <= most_seconds:
            return choice, len(choices)
    return None, len(choices)


def _choices(tokens: int, shape: Shape, most_bytes: float | None, mode: str) -> Iterator[Choice]:
    for alpha in _numbers(min(tokens, MOST_NODES)):
        for m, symmetric in product((1, 2, 4, 8), (False, True)):
            sizes = {c for c in (1, 2, 4, 8, 16, 32, 64) if c * alpha <= tokens} | {-(-tokens // alpha)}
            for c in sorted(sizes):
                made = Plan.clustered(tokens, c, alpha=alpha, m=m, symmetric=symmetric)
                cost = shape.layers * layer_bytes(made, shape, mode)
                if most_bytes is not None and cost > most_bytes:
                    break
                yield Choice(
                    alpha, c, m, symmetric, cost, (*mean_shares(made), float(cost), float(not symmetric))
                )


def _numbers(most: int) -> list[int]:
    """Return 1, 2, 3, 4, 6, 8, 12, 16 … up to a number."""
    powers = [2**i for i in range(most.bit_length())]
    return sorted(n for n in {*powers, *(3 * p for p in powers)} if n <= most)


def mean_shares(plan: Plan) -> tuple[float, float]:
    """Return the mean share of the prompt that reaches a CompNode with tokens, and an AttnNode with rows."""
    comps = [shard[-1] + 1 for shard in plan.shards if shard]
    lasts = sorted(split[-1] + 1 if split else 0 for split in plan.splits)
    # Of all pairs the later one counts; a symmetric plan has each pair once.
    weights = [i + 1 if plan.symmetric else 2 * i + 1 for i in range(len(lasts))]
    held = [(last, weight) for last, weight in zip(lasts, weights, strict=True) if last]
    attns = sum(last * weight for last, weight in held) / sum(weight for _, weight in held)
    return sum(comps) / len(comps) / plan.tokens, attns / plan.tokens


def described(choice: Choice, tokens: int) -> dict[str, Any]:
    """Return a choice as plain data: the options that ask for it, its nodes, its cost and what reaches its nodes."""
    made = choice.plan(tokens)
    return {
        "options": choice.options, "alpha": choice.alpha, "c": choice.c, "m": choice.m, "symmetric": choice.symmetric,
        "comp_nodes": made.alpha, "attn_nodes": len(made.attn_nodes), "bytes": choice.bytes,
        "mean_share_at_comp_node": choice.order[0], "mean_share_at_attn_node": choice.order[1],
    }  # fmt: skip
