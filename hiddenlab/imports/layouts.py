"""Bring an array of any axes to rows of prompts: [batch, tokens, width], for each layer that it holds."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float, Shaped
from torch import Tensor

from hiddenlab.errors import InputError
from hiddenlab.models.load import ModelRef, load_config

AXES = ("layers", "batch", "tokens", "heads", "width", "head")
_STATE_LAYOUTS = {
    2: ("tokens width",),
    3: ("batch tokens width", "layers tokens width"),
    4: ("layers batch tokens width",),
}
_STATE_LAYOUTS_RARE = {
    2: ("width tokens",),
    3: ("tokens batch width", "batch width tokens", "width batch tokens"),
    4: ("batch layers tokens width", "tokens layers batch width", "batch tokens layers width"),
}
_HEAD_LAYOUTS = {
    3: ("heads tokens head", "tokens heads head"),
    4: ("batch heads tokens head", "batch tokens heads head"),
    5: ("layers batch heads tokens head",),
}
HEADED = ("k", "v", "q", "attn")


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model, from its configuration; no weights are read.

    Attributes:
        rotary: positions are turned into queries and keys. last_is_normed: the last of transformers' hidden states is
            the one after the final norm.
    """

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    vocabulary: int
    rotary: bool = True
    last_is_normed: bool = True

    @classmethod
    def of(cls, ref: ModelRef) -> "ModelShape":
        """Read a model's sizes.

        Raises:
            InputError: there is no such model, or its configuration says no sizes.
        """
        config, name = load_config(ref), ref.name

        def size(field: str, default: int) -> int:
            value = getattr(config, field, None)
            return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else default

        width, heads = size("hidden_size", 0), size("num_attention_heads", 1)
        if not width:
            raise InputError(f"the configuration of {name} does not say how wide its states are")
        rotary: Any = getattr(config, "rope_parameters", None) or getattr(config, "rope_theta", None)
        return cls(
            name, size("num_hidden_layers", 0), width, heads, size("num_key_value_heads", heads),
            size("head_dim", width // heads), size("vocab_size", 0), bool(rotary),
            getattr(config, "tie_last_hidden_states", None) is not False,
        )  # fmt: skip

    def heads_of(self, stream: str) -> int:
        """Return how many heads a stream has."""
        return self.kv_heads if stream in ("k", "v") else self.heads

    def width_of(self, stream: str) -> int:
        """Return how wide a row of a stream is."""
        keys = self.kv_heads * self.head_width
        inner = {"k": keys, "v": keys, "kv": 2 * keys, "q": self.heads * self.head_width}
        inner |= {"attn": inner["q"], "qkv": inner["q"] + 2 * keys, "logits": self.vocabulary}
        return inner.get(stream, self.width)


def parse_axes(text: str) -> tuple[str, ...]:
    """Return the names of axes in a text such as ``layers,tokens,width``.

    Raises:
        InputError: an unknown name, one that stands twice, or no tokens or width among them.
    """
    names = tuple(name.strip() for name in text.split(","))
    if unknown := [name for name in names if name not in AXES]:
        raise InputError(f"--axes knows no axis {unknown[0]!r}; known are {', '.join(AXES)}")
    if len(set(names)) < len(names):
        raise InputError(f"--axes {text!r} names an axis twice")
    wide = "width" in names and not {"heads", "head"} & set(names)
    if "tokens" not in names or not (wide or ({"heads", "head"} <= set(names) and "width" not in names)):
        raise InputError(f"--axes {text!r} should name tokens, and either width, or heads and head")
    return names


def axes_of(
    array: Shaped[Tensor, "..."],
    stream: str,
    shape: ModelShape,
    *,
    name: str,
    known: tuple[str, ...] | None = None,
    layer_counts: Collection[int] = (),
    mask: Shaped[Tensor, "batch tokens"] | None = None,
) -> tuple[str, ...]:
    """Find out which axis of an array is what, by the sizes of the model.

    Args:
        stream: what the array holds. name: for messages.
        known: the axes, where the user or the file says them; they are only checked.
        layer_counts: how many layers a layers axis may have. mask: which tokens are no padding.

    Raises:
        InputError: no layout fits, or several do.
    """
    sizes = list(array.shape)
    where = f"{name} {sizes}"

    def fits(axes: tuple[str, ...]) -> bool:
        size = dict(zip(axes, sizes, strict=True))
        return (
            size.get("width", shape.width_of(stream)) == shape.width_of(stream)
            and size.get("heads", shape.heads_of(stream)) == shape.heads_of(stream)
            and size.get("head", shape.head_width) == shape.head_width
            and ("layers" not in size or known is not None or size["layers"] in layer_counts)
            and (mask is None or [size.get("batch", 1), size["tokens"]] == list(mask.shape))
            # A batch of prompts of one token each is one prompt with its axes in another order.
            and not (known is None and size["tokens"] == 1 and size.get("batch", 1) > 1)
        )

    if known is not None:
        if len(known) != len(sizes):
            raise InputError(f"{where} has {len(sizes)} axes, and {','.join(known)} names {len(known)}")
        if not fits(known):
            raise InputError(f"{where} is not {_shown(known)}: {_wanted(stream, shape)}{_mask_said(mask)}")
        return known
    tables = [_STATE_LAYOUTS, _STATE_LAYOUTS_RARE]
    if stream in HEADED:
        tables[0] = {n: _STATE_LAYOUTS.get(n, ()) + _HEAD_LAYOUTS.get(n, ()) for n in range(2, 6)}
    for table in tables:
        layouts = [axes for text in table.get(len(sizes), ()) if fits(axes := tuple(text.split()))]
        if len(layouts) > 1:
            readings = " or ".join(_shown(axes) for axes in layouts)
            raise InputError(
                f"{where} could be {readings}; say which with --axes, such as --axes {','.join(layouts[0])}"
            )
        if layouts:
            other = ("batch", "layers", "tokens", "width")
            if layouts[0] == ("layers", "batch", "tokens", "width") and fits(other) and sizes[0] == sizes[1]:
                raise InputError(
                    f"{where} could be {_shown(layouts[0])} or {_shown(other)}; say which with --axes, such as --axes "
                    f"{','.join(layouts[0])}"
                )
            return layouts[0]
    raise InputError(f"{where} is no {stream} of {shape.name}: {_misfit(sizes, stream, shape, mask)}")


def arranged(
    array: Shaped[Tensor, "..."], axes: Sequence[str]
) -> Shaped[Tensor, "layers batch tokens width"]:
    """Return an array with its axes in one order; heads are put side by side, what is missing has size 1."""
    order = [axis for axis in AXES if axis in axes]
    array = array.permute([axes.index(axis) for axis in order])
    if "heads" in order:
        array = array.flatten(-2)  # they are the last two
    for place, axis in enumerate(("layers", "batch")):
        if axis not in order:
            array = array.unsqueeze(place)
    return array


def without_padding(
    batch: Float[Tensor, "batch tokens width"], mask: Shaped[Tensor, "batch tokens"] | None
) -> list[Float[Tensor, "rows width"]]:
    """Return each prompt's rows, those that the mask leaves out dropped."""
    if mask is None:
        return list(batch)
    return [rows[kept] for rows, kept in zip(batch, mask.bool(), strict=True)]


def padding_said(mask: Shaped[Tensor, "batch tokens"] | None) -> str:
    """Say on which side padding was dropped; empty where there was none.

    Raises:
        InputError: the mask is none: other values than 0 and 1, a prompt without a token, gaps.
    """
    if mask is None:
        return ""
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise InputError("the attention mask holds other values than 0 and 1")
    sides = set()
    for kept in mask.bool():
        places = kept.nonzero().flatten()
        if not len(places):
            raise InputError("the attention mask leaves a prompt without a token")
        if len(places) != int(places[-1] - places[0]) + 1:
            raise InputError("the attention mask has gaps within a prompt, and is no mask of padding")
        sides |= {"left"} if places[0] > 0 else set()
        sides |= {"right"} if int(places[-1]) < len(kept) - 1 else set()
    return f", padding on the {' and the '.join(sorted(sides))} dropped" if sides else ""


def _shown(axes: Sequence[str]) -> str:
    return f"[{', '.join(axes)}]"


def _wanted(stream: str, shape: ModelShape) -> str:
    wide = f"{shape.name} is {shape.width_of(stream)} wide in {stream}"
    if stream in HEADED:
        return f"{wide} ({shape.heads_of(stream)} heads of {shape.head_width})"
    return f"{wide}, and has {shape.layers} layers"


def _mask_said(mask: Tensor | None) -> str:
    return "" if mask is None else f"; the attention mask is {list(mask.shape)}"


def _misfit(sizes: Sequence[int], stream: str, shape: ModelShape, mask: Tensor | None) -> str:
    """Say what would fit in place of a stream that does not."""
    if len(sizes) < 2 or len(sizes) > 6:
        return f"it has {len(sizes)} axes, and states have tokens and width at least"
    others: dict[int, list[str]] = {}
    for other in ("resid", "k", "q", "kv", "logits"):
        if other != stream and shape.width_of(other) != shape.width_of(stream):
            others.setdefault(shape.width_of(other), []).append(other)
    names = {"k": "k or v", "q": "q or attn"}
    hints = [
        f"--stream {names.get(other, other)} would fit"
        for width, streams in others.items()
        if width in sizes
        for other in streams
    ]
    if stream not in HEADED and sizes[-1] == shape.head_width and {shape.kv_heads, shape.heads} & set(sizes):
        hints = ["--stream k or v (its heads side by side) would fit"]
    said = "; ".join(hints[:2])
    return f"{_wanted(stream, shape)}{_mask_said(mask)}" + (f"; {said}" if said else "")
