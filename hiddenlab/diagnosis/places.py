"""Name every place inside a model that has one vector for each token, and read the vectors there in one pass."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hiddenlab.models import TruncatedModel, decoder_layers
from hiddenlab.models.attention import EAGER, attending, unchanged_rotary
from hiddenlab.models.self_check import uncounted
from hiddenlab.types import Site

OUTPUT = "the output of "  # what begins the name of a module's output
INNER_DEPTH = 2  # modules this deep inside a layer are read: a layer's attention, and its projections


@dataclass(frozen=True)
class Place:
    """A place inside a model.

    Attributes:
        name: what lies there, in the words of the model's own modules. layer: of the layer that it belongs to; 1 is the
            first. site: what the lab calls it, None where no attack reads it.
    """

    name: str
    layer: int
    site: Site | None = None

    def __str__(self) -> str:
        return self.name if self.site is None else f"{self.site} ({self.name})"


Visit = Callable[[Place, Float[Tensor, "b n w"]], None]


@torch.inference_mode()
def read_places(model: TruncatedModel, tokens: Int[Tensor, "b n"], visit: Visit) -> None:
    """Run sequences of one length by the model's own forward pass and show what lies at every place.

    Places come in the order of the computation, a layer's output before what other modules take in; keys, values and
    the state after the final norm come last.

    Args:
        model: places of the layers that it has are shown. visit: called with each place and its vectors ``[b, n, w]``.
    """
    module = model.module
    with ExitStack() as stack:
        for name in (uncounted(model), attending(module, EAGER), unchanged_rotary(module)):
            stack.enter_context(name)
        stack.enter_context(_hooks(module, tuple(tokens.shape), visit))
        output = module(input_ids=tokens.to(model.device), use_cache=True)
    layers = len(decoder_layers(module))
    whole = layers == module.config.num_hidden_layers  # type: ignore[union-attr]
    if whole and (final := getattr(output, "last_hidden_state", None)) is not None:
        visit(Place("the state after the final norm", layers, Site(layers, "final_norm")), final)
    for i, (keys, values) in enumerate(_cached(output), 1):
        if keys.shape[2] != tokens.shape[1]:
            continue  # a window's keys
        k, v = (part.transpose(1, 2).flatten(2) for part in (keys, values))
        visit(Place(f"the keys of layer {i} after the rotary embedding", i, Site(i, "k")), k)
        visit(Place(f"the values of layer {i}", i, Site(i, "v")), v)
        visit(Place(f"keys and values of layer {i} side by side", i, Site(i, "kv")), torch.cat([k, v], dim=2))


def _cached(output: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield keys and values ``[b, heads, n, width]`` of each layer, as far as the model's cache holds such."""
    for layer in getattr(getattr(output, "past_key_values", None), "layers", []):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if not isinstance(keys, Tensor) or not isinstance(values, Tensor):
            return
        if keys.ndim != 4 or keys.shape[:3] != values.shape[:3]:
            return
        yield keys, values


@contextmanager
def _hooks(module: nn.Module, shape: tuple[int, ...], visit: Visit) -> Iterator[None]:
    """Show the inputs and outputs of the layers and of the modules inside them."""
    names = {part: name for name, part in module.named_modules()}
    handles = []

    def show(place: Place, value: Any) -> None:
        value = value[0] if isinstance(value, (tuple, list)) and value else value
        if (
            isinstance(value, Tensor)
            and value.ndim == 3
            and value.shape[:2] == shape
            and value.is_floating_point()
        ):
            visit(place, value)

    def inputs_of(place: Place) -> Callable[..., None]:
        return lambda part, args, options: show(place, args[0] if args else options.get("hidden_states"))

    def outputs_of(place: Place) -> Callable[..., None]:
        return lambda part, args, output: show(place, output)

    try:
        for i, layer in enumerate(decoder_layers(module), 1):
            name = names[layer]
            if i == 1:
                embeddings = Place(f"the input of {name}", 0, Site(0, "embed"))
                handles.append(layer.register_forward_pre_hook(inputs_of(embeddings), with_kwargs=True))
            after = Place(f"{OUTPUT}{name}", i, Site(i, "resid"))
            handles.append(layer.register_forward_hook(outputs_of(after)))
            for inner, part in layer.named_modules():
                if not inner or inner.count(".") >= INNER_DEPTH or isinstance(part, nn.ModuleList):
                    continue
                whole = f"{name}.{inner}"
                handles.append(
                    part.register_forward_pre_hook(
                        inputs_of(Place(f"the input of {whole}", i)), with_kwargs=True
                    )
                )
                handles.append(part.register_forward_hook(outputs_of(Place(f"{OUTPUT}{whole}", i))))
        yield
    finally:
        for handle in handles:
            handle.remove()
