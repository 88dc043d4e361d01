"""Run many prompts in one forward pass, with one attention function and shared prefixes.

A pass packs the requests of several prompts on one token axis. Each request holds a *chain* (tokens that follow one
another) and *branches* (alternatives, each seeing the prefix, the chain up to its attachment, and itself; a branch may
be several tokens long). A plain prefill is a chain without branches; the branching of vocabulary matching (paper,
section 4.2 and appendix A) is branches without a chain; its generalisation to gaps (Algorithm 3) is branches of several
tokens; verifying a guess while trying alternatives at its unsure places is a chain with branches.

All Hugging Face architectures come through transformers' ``AttentionInterface``: the registered function gets queries,
keys and values after projection and rotary embedding. It attends to the prefix's keys and values in place, with one
GEMM per key/value head and the tokens of a request folded into the query axis. Nothing of the prefix is copied or
repeated per candidate. With ``together``, short chains behind many prefixes of one length (what a beam of hypotheses
needs of a language model) attend in one product, their prefixes side by side. On a GPU small passes attend as one
product. ``packed_attention`` holds these three forms, ``request`` the requests and answers.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.errors import HiddenlabError
from hiddenlab.models.attention import Attention
from hiddenlab.models.packed_attention import Alike, Alone, Dense
from hiddenlab.models.request import Request

ATTENTION_NAME = "hiddenlab"
# On a GPU a pass attends as one product if its scores are at most so many, those between different prompts included.
DENSE_DEVICES, DENSE_ELEMENTS = frozenset({"cuda"}), 1 << 25
# Chains of at most so many tokens attend together: the products of longer ones are large enough alone.
SHORT = 4
# Bytes of one prefix's keys and values at most: copying more of them takes longer than a call for each prefix.
SIDE_BY_SIDE = 1 << 18

_ACTIVE: ContextVar["PackedPass | GivenPass | None"] = ContextVar("hiddenlab_pass", default=None)
_BEFORE: ContextVar[Callable[[], None] | None] = ContextVar("hiddenlab_before_a_pass", default=None)


@contextmanager
def before_passes(call: Callable[[], None]) -> Iterator[None]:
    """Call something before each pass of any model, within the block and this thread; what it raises ends the pass."""
    held = _BEFORE.set(call)
    try:
        yield
    finally:
        _BEFORE.reset(held)


def announce() -> None:
    """Say that a pass is about to run; see ``before_passes``."""
    call = _BEFORE.get()
    if call is not None:
        call()


class ShownError(Exception):
    """Signals that a pass has captured the stream it was run for, so that the rest need not be computed."""


class PackedPass:
    """One forward pass over the packed tokens of several requests; the attention function calls its ``attend``.

    Attributes:
        together: short chains behind prefixes of one length attend in one product; last digits depend on the others.
        show: layer index and inner stream (q, k … attn) to keep in ``shown``, ``[t, heads · width]``, or None.
        attention: how the last layer that ran attends.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        keep: bool,
        show: tuple[int, str] | None = None,
        together: bool = False,
    ) -> None:
        self.requests = list(requests)
        self.keep = keep
        self.show = show
        self.shown: Tensor | None = None
        self.attention: Attention | None = None
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        self.together = together
        self._reach: dict[torch.device, Tensor] = {}
        self._parts: dict[tuple[int, int, torch.device], list[Alone | Alike | Dense]] = {}
        self.starts = [0]
        for request in self.requests:
            self.starts.append(self.starts[-1] + request.size)

    def _own(self, i: int) -> slice:
        return slice(self.starts[i], self.starts[i + 1])

    def _alike(self, size: int) -> list[list[int]]:
        """Group requests by index: those with equally short chains and equally long prefixes share one product.

        Args:
            size: bytes of one position's keys and values.
        """
        groups: dict[tuple[int, ...], list[int]] = {}
        for i, request in enumerate(self.requests):
            chain, prefix = len(request.tokens), request.prefix.store.length
            short = (
                request.branches is None and 0 < chain <= SHORT and size * (prefix + chain) <= SIDE_BY_SIDE
            )
            # A token alone attends to itself, whatever stands beside it: no digit depends on the others.
            alike = short and (self.together or chain + prefix == 1) and not torch.is_grad_enabled()
            groups.setdefault((chain, prefix) if alike else (-1 - i,), []).append(i)
        return list(groups.values())

    def _dense(self, heads: int, device: torch.device) -> bool:
        """Return whether all requests attend as one product, which is faster where kernel starts dominate."""
        keys = self.starts[-1] + sum(request.prefix.store.length for request in self.requests)
        few = heads * self.starts[-1] * keys <= DENSE_ELEMENTS
        return device.type in DENSE_DEVICES and few and not torch.is_grad_enabled()

    def _parted(self, heads: int, size: int, device: torch.device) -> "list[Alone | Alike | Dense]":
        """Return the groups that attend separately; their index tensors are made once for all layers on a device."""
        if (heads, size, device) not in self._parts:
            reach = self._reaches(device)
            if self._dense(heads, device):
                return self._parts.setdefault((heads, size, device), [Dense(self.requests, reach)])
            groups = self._alike(size)
            grouped = [self.starts[i] for group in groups if len(group) > 1 for i in group]
            starts = torch.tensor(grouped, device=device) if grouped else reach[:0]
            parts: list[Alone | Alike | Dense] = []
            for group in groups:
                if len(group) > 1:
                    own, starts = starts[: len(group)], starts[len(group) :]
                    parts.append(Alike([self.requests[i] for i in group], own))
                else:
                    (i,) = group
                    parts.append(Alone(self.requests[i], self._own(i), reach[self._own(i)]))
            self._parts[heads, size, device] = parts
        return self._parts[heads, size, device]

    def _reaches(self, device: torch.device) -> Int[Tensor, " t"]:
        """Return how many tokens precede each packed token in its own prompt, including its prefix."""
        if device not in self._reach:
            reach = torch.cat([request.reach + request.prefix.length for request in self.requests])
            self._reach[device] = reach.to(device)
        return self._reach[device]

    def positions(self, device: torch.device) -> Int[Tensor, "1 t"]:
        """Return the position of every packed token within its own prompt."""
        reach, offsets = self._reaches(device), [request.prefix.offset for request in self.requests]
        if any(offsets):
            reach = torch.cat([reach[self._own(i)] + offset for i, offset in enumerate(offsets)])
        return reach[None]

    def attend(
        self,
        layer: int | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attention: Attention,
    ) -> Tensor:
        """Compute the attention of all packed tokens at one layer.

        Args:
            layer: the module's layer index, under which the prefix's keys and values are stored.
            q: ``[1, h, t, width]`` queries; k, v: ``[1, k, t, width]`` keys and values of the new tokens only.
            attention: how the layer attends.

        Returns:
            ``[1, t, h, width]``.

        Raises:
            ShownError: this was the layer to be shown, which is the last of the truncated model.
            HiddenlabError: the layers do not know their numbers.
        """
        if layer is None:
            raise HiddenlabError("its layers do not know their numbers, by which keys and values are kept")
        if self.keep:
            self.kept[layer] = (k[0], v[0])
        self.attention = attention
        output = q.new_empty(1, q.shape[2], q.shape[1], v.shape[-1])
        size = k.element_size() * k.shape[1] * (k.shape[3] + v.shape[3])
        for part in self._parted(q.shape[1], size, q.device):
            part.attend(layer, q[0], k[0], v[0], output[0], attention)
        if self.show is not None and self.show[0] == layer:
            self.shown = output[0].flatten(1) if self.show[1] == "attn" else _beside(self.show[1], q, k, v)
            raise ShownError
        return output


def _beside(stream: str, q: Tensor, k: Tensor, v: Tensor) -> Float[Tensor, "t w"]:
    """Return those of a pass' queries, keys and values that a stream's name lists, all heads side by side."""
    parts = {"q": q, "k": k, "v": v}
    return torch.cat([parts[letter][0].transpose(0, 1).flatten(1) for letter in stream], 1)


@dataclass
class GivenPass:
    """A pass whose attention output at the first layer is given; that layer's queries, keys and values are ignored.

    Attributes:
        attended: the given output, ``[t, h · width]``. show: stream of the second layer (``q``, ``k`` … ``qkv``) to
            keep in ``shown``, or None.
    """

    attended: Tensor
    show: str | None = None
    shown: Tensor | None = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, attention: Attention) -> Tensor:
        """Return the given attention output as ``[1, t, h, width]``.

        Raises:
            ShownError: this was the second layer.
        """
        if layer == 0:
            return self.attended.unflatten(1, (q.shape[1], v.shape[3]))[None]
        assert self.show is not None
        self.shown = _beside(self.show, q, k, v)
        raise ShownError
