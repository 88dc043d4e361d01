"""Hook a model for one pass: capture the states of a site, or begin behind layers that were left out."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from hiddenlab.models.checkpoint import decoder_layers
from hiddenlab.types import Site


@contextmanager
def capturing(module: nn.Module, site: Site, keep: Callable[[Any], None]) -> Iterator[None]:
    """Call ``keep`` with the states at a site; a permanent hook would keep the model in memory by a cycle.

    Streams other than ``resid`` and ``embed`` are not captured here.
    """

    def outputs(_: nn.Module, __: Any, output: Any) -> None:
        keep(output[0] if isinstance(output, (tuple, list)) else output)

    def inputs(_: nn.Module, given: Any, options: Any) -> None:
        keep(given[0] if given else options["hidden_states"])

    layers = decoder_layers(module)
    if site.stream == "resid":
        hook = layers[site.layer - 1].register_forward_hook(outputs)
    elif site.stream == "embed":
        hook = layers[0].register_forward_pre_hook(inputs, with_kwargs=True)
    else:
        hook = None
    try:
        yield
    finally:
        if hook is not None:
            hook.remove()


@contextmanager
def holding(module: nn.Module, layers: Sequence[int]) -> Iterator[dict[int, Any]]:
    """Hold what several layers gave in the last pass, by the layer's number; 1 is the first."""
    held: dict[int, Any] = {}

    def holder(layer: int) -> Callable[[nn.Module, Any, Any], None]:
        def hold(_: nn.Module, __: Any, output: Any) -> None:
            held[layer] = output[0] if isinstance(output, (tuple, list)) else output

        return hold

    there = decoder_layers(module)
    hooks = [there[layer - 1].register_forward_hook(holder(layer)) for layer in layers]
    try:
        yield held
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def beginning_behind(module: nn.Module, left_out: int, states: Tensor | None) -> Iterator[None]:
    """Give states to the first layer that is not left out, whatever the model does with its inputs before.

    Args:
        left_out: how many of the first layers are left out. states: not read where it is 0.
    """
    if not left_out:
        yield
        return
    hook = decoder_layers(module)[left_out - 1].register_forward_hook(lambda *_: states)
    try:
        yield
    finally:
        hook.remove()
