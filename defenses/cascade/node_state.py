"""Name what CompNodes and AttnNodes exchange, and the error that says which of them failed."""

import math
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from hiddenlab.defenses.cascade.nodes import Answer, Rows
from hiddenlab.defenses.cascade.passes import Pass
from hiddenlab.errors import HiddenlabError
from hiddenlab.models.attention import Attention
from hiddenlab.sharding import AttnNode

GIVEN_UP = "the request was given up"
REMEMBERED = 4096  # batches given up, of which late messages may still arrive


class NodeError(HiddenlabError):
    """A node died, stalled or failed.

    Attributes:
        node: its name, ``CompNode 1`` or ``AttnNode (0, 2)``, or None where it is unknown.
        forgot: the node works, but was replaced and does not know what was sent to the one before it.
        replaced: how often that node had been replaced when the pass began.
    """

    def __init__(self, message: str, node: str | None = None, *, forgot: bool = False) -> None:
        super().__init__(message, node)
        self.node, self.forgot = node, forgot
        self.replaced = 0

    def copy(self) -> "NodeError":
        """Return the same error for another thread to raise."""
        error = NodeError(str(self), self.node, forgot=self.forgot)
        error.replaced = self.replaced
        return error

    def __reduce__(self) -> tuple[Any, ...]:
        return _node_error, (*self.args, self.forgot)

    def __str__(self) -> str:
        return str(self.args[0])


def _node_error(message: str, node: str | None, forgot: bool) -> NodeError:
    return NodeError(message, node, forgot=forgot)


@dataclass(frozen=True)
class Head:
    """The header of a CompNode's rows: their batch and layer, and how the layer attends.

    Attributes:
        batch: its name.
        step: attention calls before this one in the batch.
        passes: of the batch, in its first message only.
    """

    batch: str
    step: int
    layer: int
    attention: Attention
    passes: tuple[Pass, ...] | None = None


@runtime_checkable
class Carrier(Protocol):
    """A carrier of a CompNode's messages."""

    def post(self, node: AttnNode, head: Head, rows: Rows) -> None:
        """Send rows; do not wait for an answer."""
        ...

    def collect(self, node: AttnNode, head: Head) -> list[Answer]:
        """Wait for the answer to what was posted.

        Raises:
            NodeError: it does not come.
        """
        ...


def all_finite(rows: Tensor) -> bool:
    """Return whether no number is infinite or NaN.

    A sum says so, in one pass. Rows on a card were not sent over a wire, and asking would make the card wait.
    """
    if rows.device.type != "cpu":
        return True
    return math.isfinite(float(rows.sum(dtype=torch.float32 if rows.element_size() < 4 else None)))


def remember(names: dict[str, None], name: str) -> None:
    """Add a name to the names that were given up, of which only the last ones matter."""
    names[name] = None
    while len(names) > REMEMBERED:
        del names[next(iter(names))]


def comp_name(index: int) -> str:
    """Return the name of a CompNode in messages, errors and counters."""
    return f"CompNode {index}"


def attn_name(node: AttnNode) -> str:
    """Return the name of an AttnNode in messages, errors and counters."""
    return f"AttnNode ({node.queries}, {node.keys})"
