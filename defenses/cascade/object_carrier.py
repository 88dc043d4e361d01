"""Carry messages between nodes through Ray's object store, the paper's form: a slow twin of TCP."""

from collections.abc import Callable
from typing import Any

import ray

from hiddenlab.defenses.cascade.node_state import GIVEN_UP, Head, NodeError, attn_name
from hiddenlab.defenses.cascade.nodes import Answer, Rows
from hiddenlab.sharding import AttnNode


class ObjectCarrier:
    """A carrier for which each message is a Ray call, and each tensor an object in Ray's store."""

    def __init__(self, index: int, aborted: Callable[[str], bool]) -> None:
        self.index, self.aborted = index, aborted
        self.attns: dict[AttnNode, Any] = {}
        self._pending: dict[tuple[str, int, AttnNode], Any] = {}

    def post(self, node: AttnNode, head: Head, rows: Rows) -> None:
        call = self.attns[node].answer.remote(self.index, head, ray.put(rows.to("cpu")))
        self._pending[head.batch, head.step, node] = call

    def collect(self, node: AttnNode, head: Head) -> list[Answer]:
        name, where = attn_name(node), f"in layer {head.layer + 1}"
        call = self._pending.pop((head.batch, head.step, node))
        try:
            # The driver watches the nodes; this loop only has to notice when the batch is given up.
            while not ray.wait([call], timeout=0.5)[0]:
                if self.aborted(head.batch):
                    raise NodeError(GIVEN_UP)
            return ray.get(call)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            raise (
                cause if isinstance(cause, NodeError) else NodeError(f"{name} failed {where}: {cause}", name)
            ) from None
        except ray.exceptions.RayActorError:
            raise NodeError(f"{name} died {where}", name) from None

    def forget(self, batch: str) -> None:
        """Drop the calls of a batch that failed; Ray would keep their answers."""
        for key in [key for key in list(self._pending) if key[0] == batch]:
            self._pending.pop(key, None)
