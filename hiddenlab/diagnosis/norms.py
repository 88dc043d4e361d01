"""Tell rows that a norm of the model has just put out: every one of them has the length that this norm gives."""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hiddenlab.diagnosis.places import OUTPUT, Place
from hiddenlab.models import TruncatedModel
from hiddenlab.models.checkpoint import final_norm

SAME = 2e-3  # of a row's length: a norm's own output moves by less, half precision included
SCALE = 4.0  # a norm forgets the scale of what it takes in


@torch.inference_mode()
def moved_by_norm(model: TruncatedModel, place: Place, rows: Float[Tensor, "rows w"]) -> float:
    """Return how far the norm in front of a place moves rows, relative to their length; infinity without a norm there.

    A norm changes nothing but a row's scale (and mean), before it multiplies by its weights. So its output, divided by
    these weights, is what the norm gives back when it takes it in. Rows of other places move, and so do rows of a norm
    with other weights. No token is needed.
    """
    norm = _norm_at(model, place)
    if norm is None or (read := _weights_of(norm, rows.shape[1])) is None:
        return math.inf
    weight, bias = read
    seen = rows.to(weight.device).float()
    again = norm(((seen - bias) / weight).to(model.dtype)).float()
    return float(((again - seen).norm(dim=1) / seen.norm(dim=1).clamp(min=1e-12)).median())


def _norm_at(model: TruncatedModel, place: Place) -> nn.Module | None:
    """Return the module whose output lies at a place."""
    if place.site is not None and place.site.stream == "final_norm":
        found = final_norm(model.module)
        return None if found is None else found[1]
    if not place.name.startswith(OUTPUT):
        return None
    return model.module.get_submodule(place.name.removeprefix(OUTPUT))


def _weights_of(norm: nn.Module, width: int) -> tuple[Float[Tensor, " w"], Float[Tensor, " w"]] | None:
    """Return what a norm multiplies by and adds; None where the module is no norm of such rows.

    They are read off what it makes of a row of ones with alternating signs, which has mean 0 and length 1 a coordinate.
    """
    parameters = list(norm.parameters())
    if not parameters or any(p.shape != (width,) for p in parameters) or width % 2:
        return None
    signs = torch.ones(width, dtype=parameters[0].dtype, device=parameters[0].device)
    signs[1::2] = -1
    try:
        plus, minus, scaled = (norm(row[None])[0].float() for row in (signs, -signs, SCALE * signs))
    except (AttributeError, RuntimeError, TypeError, IndexError):  # it takes or gives something else
        return None
    weight, bias = (plus - minus) / 2 * signs.float(), (plus + minus) / 2
    forgets_scale = bool((scaled - plus).norm() <= SAME * plus.norm())
    return (weight, bias) if forgets_scale and bool((weight != 0).all()) else None
