"""Run the first layers on secret shares, and the rest on Cascade's CompNodes (Hidden No More, appendix H).

The parties of any protocol with additive sharing send each CompNode its own rows of their shares of the hidden states;
the CompNode adds them up. So no CompNode holds tokens, and none sees states before the layer where sharing ends.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from hiddenlab.defenses.cascade.backend import NodeCascade
from hiddenlab.errors import InputError
from hiddenlab.sharding import Plan


def rows_from_shares(shares: Sequence[Int[Tensor, "n d"]], fraction: int, plan: Plan) -> dict[int, Tensor]:
    """Add up every party's shares into the rows of each CompNode.

    Args:
        shares: fixed-point integers of each party, modulo 2⁶⁴.
        fraction: bits behind the point.
        plan: of the prompt.

    Returns:
        The float32 rows of each CompNode that holds any.

    Raises:
        InputError: there are no shares, or they are of another prompt.
    """
    if not shares or any(share.shape != shares[0].shape or len(share) != plan.tokens for share in shares):
        raise InputError(f"the shares are not all of a prompt of {plan.tokens} tokens")
    rows = {}
    for i, shard in enumerate(plan.shards):
        if shard:
            total = torch.stack([share[list(shard)] for share in shares]).sum(0)
            rows[i] = (total.double() / 2**fraction).float()
    return rows


def forward_after(
    cascade: NodeCascade, shares: Sequence[Int[Tensor, "n d"]], fraction: int, plan: Plan
) -> Tensor:
    """Run a model's remaining layers on the nodes of a plan, whose model has only these (``hardening.Section``).

    Raises:
        see ``rows_from_shares`` and ``NodeCascade.forward_rows``.
    """
    return cascade.forward_rows(rows_from_shares(shares, fraction, plan), plan)
