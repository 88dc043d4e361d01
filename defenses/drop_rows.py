"""Release only some rows of the states: those of one token-sharding node, or all but a gap (paper, section 7)."""

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hiddenlab.errors import InputError
from hiddenlab.sharding import AttnNode, Plan, Positions
from hiddenlab.stages import Stage
from hiddenlab.text import count_of
from hiddenlab.types import ObservationInfo


class Shard(Stage):
    """Release the rows that one Cascade node holds under (c, δ)-sharding; all other rows stay with other nodes.

    By default the node is a CompNode (Hidden No More, sections 7.2.1 and 7.2.2). With ``queries`` and ``keys`` it is an
    AttnNode, and the rows are those of which it receives queries, keys or values under m-splitting (appendix M).

    Args:
        alpha: number of CompNodes.
        c: tokens of a cluster, so that δ = α·c.
        node: index of the CompNode, from 0.
        m: splits of each shard.
        queries, keys: indices of the AttnNode; give both or neither.

    Raises:
        InputError: there is no such node, or it holds no row of the prompt.
    """

    selects = True

    def __init__(
        self,
        alpha: int,
        c: int = 1,
        node: int = 0,
        m: int = 1,
        queries: int | None = None,
        keys: int | None = None,
    ) -> None:
        plan = Plan.clustered(1, c, alpha=alpha, m=m)
        self.alpha, self.c, self.m, self.node = alpha, c, m, node
        if (queries is None) != (keys is None):
            raise InputError("an AttnNode has queries and keys; give both, or neither for a CompNode")
        if not 0 <= node < plan.alpha:
            raise InputError(f"there is no CompNode {node}: alpha {alpha} gives 0 to {plan.alpha - 1}")
        if queries is None or keys is None:
            self.attn: AttnNode | None = None
            self.spec = f"shard:alpha={alpha},c={c},node={node}"
            return
        if not (0 <= queries < plan.beta and 0 <= keys < plan.beta):
            raise InputError(
                f"there is no AttnNode ({queries}, {keys}): both count from 0 to {plan.beta - 1}"
            )
        self.attn = AttnNode(queries, keys)
        self.spec = f"shard:alpha={alpha},c={c},m={m},queries={queries},keys={keys}"

    def positions(self, tokens: int) -> Positions:
        """Return the positions of a prompt that the node holds."""
        plan = Plan.clustered(tokens, self.c, alpha=self.alpha, m=self.m)
        return plan.shards[self.node] if self.attn is None else plan.held_by(self.attn)

    def states(
        self, states: Float[Tensor, "rows d"], generator: torch.Generator
    ) -> tuple[Float[Tensor, "rows2 d"], tuple[int, ...] | None, dict[str, Any]]:
        held = self.positions(len(states))
        if not held:
            raise InputError(
                f"{self.spec} covers nothing of a prompt of {count_of(len(states), 'token')}; give longer "
                f"prompts or a smaller plan"
            )
        return states[list(held)], held, {}

    def publish(self, info: ObservationInfo) -> ObservationInfo:
        return replace(
            info,
            facts={
                **info.facts,
                "shard": {"alpha": self.alpha, "c": self.c, "m": self.m, "attn": self.attn is not None},
            },
        )

    def __repr__(self) -> str:
        who = (
            f"CompNode {self.node}"
            if self.attn is None
            else f"AttnNode ({self.attn.queries}, {self.attn.keys})"
        )
        return f"{self.spec}: the attacker is {who} and knows the plan and the model; other rows are with other nodes"


class DropRows(Stage):
    """Release the first ``after`` rows, leave out ``size`` rows and release the next one (Hidden No More, appendix C).

    The result has one gap, at a known place.

    Args:
        size: rows that are left out.
        after: rows before the gap.

    Raises:
        InputError: ``size`` is below 1, ``after`` is negative, or a prompt ends before the gap does.
    """

    selects = True

    def __init__(self, size: int, after: int = 20) -> None:
        if size < 1 or after < 0:
            raise InputError(
                f"a gap needs a size of at least 1 and no less than 0 rows before it, not {size}, {after}"
            )
        self.size, self.after = size, after
        self.spec = f"drop-rows:size={size},after={after}"

    def states(
        self, states: Float[Tensor, "rows d"], generator: torch.Generator
    ) -> tuple[Float[Tensor, "rows2 d"], tuple[int, ...] | None, dict[str, Any]]:
        last = self.after + self.size
        if last >= len(states):
            raise InputError(
                f"{self.spec} needs prompts of at least {count_of(last + 1, 'token')}; one has {len(states)}"
            )
        held = (*range(self.after), last)
        return states[list(held)], held, {}

    def __repr__(self) -> str:
        return f"{self.spec}: the attacker sees the rows before a gap and the one behind it, and knows where it is"
