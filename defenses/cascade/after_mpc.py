"""Run the first layers on secret shares, and the rest on Cascade's CompNodes (Hidden No More, appendix H).

The parties of any protocol with additive sharing send each CompNode its own rows of their shares of the hidden states;
the CompNode adds them up. So no CompNode holds tokens, and none sees states before the layer where sharing ends.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from hiddenlab.defenses.cascade.backend import Cascade
from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.models import decoder_layers
from hiddenlab.sharding import Plan


def without_first(model: nn.Module, layers: int) -> nn.Module:
    """Remove a model's first layers in place; its input vectors are then the states after them.

    Recorded layers count from there.

    Args:
        model: a decoder.
        layers: how many to remove.

    Raises:
        InputError: it has no more layers than that.
        NotApplicableError: it adds position vectors to its inputs.
    """
    blocks = decoder_layers(model)
    if not 0 <= layers < len(blocks):
        raise InputError(
            f"the model has {len(blocks)} layers; between 0 and {len(blocks) - 1} can be left to others"
        )
    if layers and any("wpe" in name or "position_embed" in name for name, _ in model.named_parameters()):
        raise NotApplicableError(
            "this model adds position vectors to whatever comes in; it cannot start in the middle"
        )
    del blocks[:layers]
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            module.layer_idx = int(module.layer_idx) - layers  # type: ignore[arg-type,assignment]
    config: Any = model.config
    config.num_hidden_layers = len(blocks)
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == len(blocks) + layers:
            setattr(config, name, value[layers:])
    return model


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
    cascade: Cascade, shares: Sequence[Int[Tensor, "n d"]], fraction: int, plan: Plan
) -> Tensor:
    """Run a model's remaining layers (``without_first``) on the nodes of a plan.

    Raises:
        see ``rows_from_shares`` and ``Cascade.forward_rows``.
    """
    return cascade.forward_rows(rows_from_shares(shares, fraction, plan), plan)
