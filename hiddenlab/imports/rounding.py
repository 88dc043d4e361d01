"""Give numbers of 8 bits their scale back, and tell from the numbers how they were rounded."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from hiddenlab.errors import InputError
from hiddenlab.imports.containers import WHOLE

FLOAT8 = {torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e5m2: "float8_e5m2"}
HALVES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
SCALES = ("{}_scale", "{}.scale", "{}_scales", "{}.scales", "{}_scale_inv", "{}.scale_inv")


@dataclass(frozen=True)
class Rounded:
    """Numbers as float32, or in the half precision in which they were saved, and the stages that rounded them.

    Attributes:
        stages: specs of a channel. said: for the user, empty where there is nothing to say.
    """

    values: Tensor
    stages: tuple[str, ...] = ()
    said: str = ""


def scale_of(name: str, arrays: dict[str, Tensor]) -> str | None:
    """Return the name of the scale that stands beside an array."""
    names = [form.format(name) for form in SCALES]
    prefix, _, _ = name.rpartition(".")
    alone = [f"{prefix}.{word}" if prefix else word for word in ("scale", "scales")]
    # A scale without a name is that of the only array of whole numbers or 8-bit floats.
    if sum(needs_scale(array) for array in arrays.values()) == 1:
        names += alone
    return next((known for known in names if known in arrays and arrays[known].is_floating_point()), None)


def needs_scale(array: Tensor) -> bool:
    """Return whether numbers may come with a scale: 8-bit integers of two axes or more, 8-bit floats."""
    return array.ndim >= 2 and (
        array.dtype == torch.int8 or (array.itemsize == 1 and array.is_floating_point())
    )


def restored(name: str, arrays: dict[str, Tensor], where: str) -> Rounded:
    """Return an array as floating-point numbers, multiplied with its scale.

    Raises:
        InputError: whole numbers without a scale; a scale that fits no axis; an unknown type of 8 bits.
    """
    array, scale = arrays[name], scale_of(name, arrays)
    shown = where if name == WHOLE else f"{where}, {name}"
    if array.is_floating_point() and array.itemsize > 1:
        return Rounded(array)
    if array.is_floating_point() and array.dtype not in FLOAT8:
        raise InputError(
            f"{shown} has the type {array.dtype}; of 8-bit floats {', '.join(FLOAT8.values())} are read"
        )
    if not array.is_floating_point() and scale is None:
        raise InputError(
            f"{shown} holds whole numbers ({_name(array.dtype)}) and no scale beside them; save the scale as "
            f"{'scale' if name == WHOLE else name + '_scale'} in the same file, or the states as floats"
        )
    kind = FLOAT8.get(array.dtype, "int8")
    if not array.is_floating_point() and array.dtype != torch.int8:
        raise InputError(f"{shown} holds {_name(array.dtype)}; of whole numbers int8 with a scale is read")
    values, by = array.float(), "none"
    if scale is not None:
        factor, by = _fitting(arrays[scale].float(), array, f"{where}, {scale}")
        values = values * factor
    said = f"{kind} numbers" + ("" if scale is None else f" with {scale}, one for each {by}")
    return Rounded(values, ("dtype:bfloat16", f"round:dtype={kind},scale={by}"), said)


def _fitting(scale: Tensor, array: Tensor, where: str) -> tuple[Tensor, str]:
    """Return a scale in the shape of its array, and what each of its numbers belongs to.

    Raises:
        InputError: it has another shape than one number, one for each token or one for each coordinate.
    """
    rows, width = list(array.shape[:-1]), array.shape[-1]
    if not bool(torch.isfinite(scale).all()) or bool((scale <= 0).any()):
        raise InputError(f"{where} holds a scale that is not positive")
    if scale.numel() == 1:
        return scale.reshape(()), "tensor"
    if list(scale.shape) == rows == [width]:
        raise InputError(
            f"{where} could belong to the {width} tokens or to the {width} coordinates; save it as [{width}, 1] or as "
            f"[1, {width}]"
        )
    if list(scale.shape) == rows:
        return scale.unsqueeze(-1), "row"
    if list(scale.shape) == [*rows, 1]:
        return scale, "row"
    if scale.numel() == width and scale.shape[-1] == width:
        return scale.reshape(width), "column"
    raise InputError(
        f"{where} has the shape {list(scale.shape)}, and the numbers {list(array.shape)}; one scale, one for each "
        "token and one for each coordinate are read"
    )


def told(array: Float[Tensor, "..."]) -> Rounded:
    """Return floating-point numbers with the dtype in which their model ran, as far as the numbers tell."""
    if array.dtype in HALVES:
        return Rounded(array, (f"dtype:{HALVES[array.dtype]}",))
    values = array.float()
    if (half := _hidden_half(values)) is None:
        return Rounded(values)
    said = f"every number fits into {HALVES[half]}: the model ran in it, or the states were rounded"
    return Rounded(values.to(half), (f"dtype:{HALVES[half]}",), said)


def _hidden_half(values: Float[Tensor, "..."]) -> torch.dtype | None:
    """Return the half precision that loses nothing of these numbers; None where both do."""
    finite = values[torch.isfinite(values)]
    if not len(finite) or not bool(finite.any()):
        return None
    return next((half for half in HALVES if torch.equal(finite.to(half).float(), finite)), None)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
