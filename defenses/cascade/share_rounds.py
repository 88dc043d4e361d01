"""Find the rounds in which a model's linear maps are computed on shares: maps of one input go together."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hiddenlab.defenses.cascade.cost import Round
from hiddenlab.errors import InputError
from hiddenlab.models.attention import Attention, attending, register_attention
from hiddenlab.models.checkpoint import decoder_layers
from hiddenlab.models.load import empty_model, load_config, resolve_model
from hiddenlab.text import first_line

LINEAR = (nn.Linear, Conv1D)
ROWS = 5  # of the pass that finds the rounds
_ACTIVE: ContextVar["_Shapes | None"] = ContextVar("hiddenlab_share_rounds", default=None)


class _Shapes:
    """An attender that computes nothing: shapes are all that is asked."""

    def attend(self, layer: int | None, q: Tensor, k: Tensor, v: Tensor, attention: Attention) -> Tensor:
        return q.new_empty(1, q.shape[2], q.shape[1], v.shape[3])


def weight_of(module: nn.Module) -> Tensor:
    """Return the weight ``[out, in]`` of a linear map."""
    weight: Any = module.weight
    return weight.T if isinstance(module, Conv1D) else weight  # type: ignore[no-any-return]


def find_rounds(model: str) -> tuple[Round, ...]:
    """Return a model's rounds in the order of a pass; no weight is read.

    Raises:
        InputError: the model is unknown, or see ``rounds_of``.
    """
    ref = resolve_model(model)
    return rounds_of(empty_model(ref, load_config(ref)), model)


def rounds_of(model: nn.Module, name: str) -> tuple[Round, ...]:
    """Return the rounds of a model that lies on the device ``meta``.

    Raises:
        InputError: a layer has matrices that are no linear maps, or what nodes are asked would depend on the prompt:
            each map must be asked once in a pass, about every row.
    """
    layers = decoder_layers(model)
    linear = {path: part for path, part in layers.named_modules() if type(part) in LINEAR}
    inside = {id(part.weight) for part in linear.values()}
    others = [path for path, part in layers.named_parameters() if part.ndim > 1 and id(part) not in inside]
    if others:
        raise _refusal(name, f"{others[0]} is no linear layer")
    calls: list[tuple[str, Tensor]] = []

    def noted(path: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _, inputs: calls.append((path, inputs[0]))

    hooks = [part.register_forward_pre_hook(noted(path)) for path, part in linear.items()]
    attention = register_attention("hiddenlab-shapes", _ACTIVE, "this pass finds shapes alone")
    token = _ACTIVE.set(_Shapes())
    try:
        with torch.inference_mode(), torch.device("meta"), attending(model, attention):
            positions = torch.arange(ROWS)[None]
            model(input_ids=torch.zeros(1, ROWS, dtype=torch.long), position_ids=positions)
    except Exception as error:  # whatever an architecture does with the values of its states
        raise _refusal(name, f"a pass without weights fails: {first_line(error)}") from None
    finally:
        _ACTIVE.reset(token)
        for hook in hooks:
            hook.remove()
    if sorted(path for path, _ in calls) != sorted(linear):
        raise _refusal(name, "it does not use each linear layer once in a pass")
    if any(given.shape[:-1].numel() != ROWS for _, given in calls):
        raise _refusal(name, "a linear layer gets other rows than those of the prompt")
    groups: dict[int, list[str]] = {}
    for path, given in calls:  # which are all alive, so that no two inputs have one identity
        groups.setdefault(id(given), []).append(path)
    shapes = {path: weight_of(part).shape for path, part in linear.items()}
    return tuple(
        Round(tuple(paths), shapes[paths[0]][1], tuple(shapes[path][0] for path in paths))
        for paths in groups.values()
    )


def _refusal(name: str, why: str) -> InputError:
    return InputError(f"{name} cannot be computed on shares: {why}; leave --harden shares out")
