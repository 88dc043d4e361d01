"""Choose the arrays of one layer and stream among those that a file holds."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from hiddenlab.errors import InputError
from hiddenlab.imports.containers import WHOLE, Contents
from hiddenlab.imports.formats import Part, Recognised, in_file_order, listing
from hiddenlab.imports.layouts import HEADED, ModelShape, axes_of, parse_axes
from hiddenlab.types import LAST_STREAMS, Site


@dataclass(frozen=True)
class Reading:
    """What the user says of the files, where they do not say it themselves.

    Attributes:
        layer, stream: the wanted site. format: a source, or ``auto``. tensor: which of a file's arrays.
        axes: of the array, such as ``layers,tokens,width``. layers: which layers a layers axis holds, such as ``2,18``.
        first_position: where the first row stands in its prompt. skip_rows: rows of padding before it.
        split: rows in which further prompts begin, counted after those. ids, mask: files with token ids and attention
            mask.
        channel: the stages that the states passed; empty takes them from the numbers.
    """

    layer: int | None = None
    stream: str | None = None
    format: str = "auto"
    tensor: str | None = None
    axes: str | None = None
    layers: tuple[int, ...] = ()
    first_position: int | None = None
    skip_rows: int = 0
    split: tuple[int, ...] = ()
    ids: str | None = None
    mask: str | None = None
    channel: tuple[str, ...] = ()


@dataclass(frozen=True)
class Choice:
    """One array of a site: the part, its axes, and which entry of its layers axis."""

    part: Part
    axes: tuple[str, ...] | None = None
    entry: int | None = None


def choices_in(
    contents: Contents, recognised: Recognised, shape: ModelShape, reading: Reading
) -> list[Choice]:
    """Return the arrays to choose from, those with a layers axis once for each layer."""
    parts = list(recognised.parts)
    if reading.tensor is not None:
        parts = [part for part in parts if reading.tensor in part.names]
        if not parts:
            if reading.tensor not in contents.arrays:
                raise InputError(
                    f"{contents.path} holds no {reading.tensor!r}; it holds {listing(contents.arrays)}"
                )
            parts = [Part((reading.tensor,))]
    choices: list[Choice] = []
    for part in parts:
        if part.layer is not None:
            choices.append(Choice(part))
            continue
        stream = part.stream or reading.stream or "resid"
        axes = axes_in(part.names[0], part, stream, contents, recognised, shape, reading)
        if "layers" not in axes:
            choices.append(Choice(part, axes))
            continue
        count = contents.arrays[part.names[0]].shape[axes.index("layers")]
        for entry, site in enumerate(_sites(count, part, stream, shape, reading)):
            choices.append(Choice(replace(part, layer=site.layer, stream=site.stream), axes, entry))
    return choices


def axes_in(
    name: str,
    part: Part,
    stream: str,
    contents: Contents,
    recognised: Recognised,
    shape: ModelShape,
    reading: Reading,
) -> tuple[str, ...]:
    counts = {shape.layers} if stream in HEADED else {shape.layers, shape.layers + 1}
    counts = {len(reading.layers)} if reading.layers else counts
    mask = recognised.mask
    return axes_of(
        contents.arrays[name],
        stream,
        shape,
        name=str(contents.path) if name == WHOLE else f"{contents.path}, {name}",
        known=parse_axes(reading.axes) if reading.axes else part.axes,
        layer_counts=counts,
        mask=None if mask is None or len(part.names) > 1 else batched(mask),
    )


def batched(array: Tensor) -> Tensor:
    """Return ids or a mask as [batch, tokens]."""
    return array if array.ndim == 2 else array[None]


def _sites(count: int, part: Part, stream: str, shape: ModelShape, reading: Reading) -> list[Site]:
    """Return what the entries of a layers axis are.

    Raises:
        InputError: nobody says it.
    """
    kind = "resid" if stream in (*LAST_STREAMS, "embed") else stream
    if reading.layers:
        if len(reading.layers) != count:
            raise InputError(f"--layers names {len(reading.layers)} layers, and {part} has {count} of them")
        layers: Sequence[int] = reading.layers
    elif kind in HEADED and count == shape.layers:
        layers = range(1, count + 1)
    elif kind not in HEADED and count == shape.layers + 1:  # the tuple of transformers, whatever saved it
        layers = range(count)
        if shape.last_is_normed:
            layers = layers[:-1]
    elif count == 1 and reading.layer is not None:
        layers = [reading.layer]
    else:
        raise InputError(
            f"{part} holds the states of {count} layers and does not say which; name them in order with --layers, such "
            f"as --layers {','.join(map(str, range(1, min(count, 3) + 1)))} (l is the state after l layers)"
        )
    sites = [Site(layer, "embed" if layer == 0 else kind) for layer in layers]
    return sites if len(sites) == count else [*sites, Site(shape.layers, "final_norm")]


def of_site(
    choices: Sequence[Choice], path: Path, shape: ModelShape, reading: Reading
) -> tuple[Site, list[Choice]]:
    """Choose the arrays of one layer and stream.

    Raises:
        InputError: the file does not hold what is asked for, or holds several sites and none is asked for.
    """
    layer, stream = reading.layer, reading.stream
    if layer is None:
        layer = shape.layers if stream in LAST_STREAMS else 0 if stream == "embed" else None
    if all(choice.part.layer is None for choice in choices):
        if layer is None:
            raise InputError(
                f"{path} does not say which layer its states are of; give --layer L (the state after L layers), or "
                "--stream final_norm or embed"
            )
        return Site(layer, stream or ("embed" if layer == 0 else "resid")), list(choices)
    asked = [
        choice
        for choice in choices
        if layer in (None, choice.part.layer) and stream in (None, choice.part.stream)
    ]
    if not asked:
        raise InputError(f"{path} {_lacking(choices, layer, stream, shape)}")
    # The default stream, as everywhere.
    wanted = asked
    if stream is None and "resid" in _streams(asked):
        wanted = [choice for choice in asked if choice.part.stream == "resid"]
    sites = {Site(choice.part.layer or 0, choice.part.stream or "resid") for choice in wanted}
    if len(sites) > 1:
        option = "--layer" if len({site.layer for site in sites}) > 1 else "--stream"
        raise InputError(f"{path} holds {_sites_said(asked)}; choose with {option}")
    return sites.pop(), _usable(wanted, path)


def _lacking(choices: Sequence[Choice], layer: int | None, stream: str | None, shape: ModelShape) -> str:
    """Say that a file lacks a site, and what it holds instead."""
    hint = ""
    if layer == shape.layers and stream == "resid" and "final_norm" in _streams(choices):
        hint = "; the last entry is after the final norm, ask for it with --stream final_norm"
    if stream == "kv" and {"k", "v"} <= _streams(choices):
        hint = "; import keys and values by themselves, with --stream k or --stream v"
    missing = f"{stream or 'states'} at layer {layer}" if layer is not None else f"the stream {stream}"
    return f"does not hold {missing}; it holds {_sites_said(choices)}{hint}"


def _usable(choices: Sequence[Choice], path: Path) -> list[Choice]:
    """Return the arrays of one site that are states of it, one for each prompt.

    Raises:
        InputError: none is; or several are of the same prompts.
    """
    usable = [choice for choice in choices if not choice.part.unusable]
    if not usable:
        raise InputError(f"{path}, {choices[0].part.names[0]}: {choices[0].part.unusable}")
    if len({choice.part.prompt for choice in usable}) < len(usable):
        names = listing([choice.part.names[0] for choice in usable])
        raise InputError(f"{path} holds several arrays of {usable[0].part}: {names}; choose with --tensor")
    return usable


def _streams(choices: Sequence[Choice]) -> set[str | None]:
    return {choice.part.stream for choice in choices}


def _sites_said(choices: Sequence[Choice]) -> str:
    """List what there is, layers of one stream together."""
    layers: dict[str, list[int]] = {}
    for part in in_file_order([choice.part for choice in choices]):
        if part.layer is not None and part.layer not in layers.setdefault(part.stream or "resid", []):
            layers[part.stream or "resid"].append(part.layer)
    return "; ".join(f"{stream} at layer {_ranges(numbers)}" for stream, numbers in layers.items())


def _ranges(numbers: Sequence[int]) -> str:
    if len(numbers) > 2 and list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers[:20])) + (" …" if len(numbers) > 20 else "")
