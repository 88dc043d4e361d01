"""Break nodes of a Cascade on Ray, one after the other, in every way: ``hiddenlab bench cascade-faults``."""

import os
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from hiddenlab.defenses.cascade.command import Backend
from hiddenlab.defenses.cascade.generate import generate
from hiddenlab.defenses.cascade.node_state import Head, NodeError
from hiddenlab.defenses.cascade.nodes import Rows
from hiddenlab.errors import InputError
from hiddenlab.sharding import Plan
from hiddenlab.types import Progress, silent

# What happens when a node handles rows of one layer.
FAULTS = {
    "killed": "its process ends",
    "stalled": "it waits for ever",
    "slow": "it waits for two thirds of the time-out",
    "fails": "it raises an error",
    "garbage": "it writes bytes that are no message",
    "row missing": "a row of what it handles is missing",
    "NaN": "a number of what it handles is NaN",
    "wrong numbers": "the numbers that it handles are shuffled: well-formed, and wrong",
}
NODES = ("CompNode 1", "AttnNode (0, 1)")
PHASES = ("prompt", "new token")


def bench(
    model: str = "builtin",
    faults: str = ",".join(FAULTS),
    layers: str = "1,middle,last",
    restarts: int = 1_000_000,
    prompt_tokens: int = 12,
    new_tokens: int = 4,
    timeout: float = 6.0,
    seed: int = 0,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Run the same generation again and again, and break one node in each: which answer, or which error, comes out?

    Two CompNodes and three AttnNodes run on this machine. A fault hits a CompNode or an AttnNode, while the prompt is
    read or while a new token is made, in one layer.

    Args:
        faults: of ``FAULTS``, by comma.
        layers: from 1; ``middle``, ``last``, or ``all``.
        restarts: lost nodes that may be replaced; 0 replaces none, and faults become errors.
        prompt_tokens, new_tokens: of the generation.
        timeout: seconds without progress after which a node counts as stalled.

    Returns:
        ``rows``, one per fault, node and phase: cases (layers), those with the same answer, those with an error that
        names a node, those with an error that names none, those with another answer and no error, and the longest
        seconds beyond a run without a fault.
    """
    from hiddenlab.models.load import load_config, resolve_model

    chosen = [name.strip() for name in faults.split(",") if name.strip()]
    if unknown := set(chosen) - set(FAULTS):
        raise InputError(f"unknown fault {sorted(unknown)[0]!r}; known are {', '.join(FAULTS)}")
    depth = int(load_config(resolve_model(model)).num_hidden_layers)
    at = _layers(layers, depth)
    nodes = Backend(kind="ray", model=model, compress=True, timeout=timeout, restarts=restarts)
    generator = torch.Generator().manual_seed(seed)
    plan = Plan.clustered(prompt_tokens, 1, alpha=2, symmetric=True)
    cases = [(fault, node, phase) for fault in chosen for node in NODES for phase in PHASES]
    rows: list[dict[str, Any]] = []
    with nodes.start(2, 1, True, progress) as cascade:
        tokens = torch.randint(0, cascade.facts.vocabulary, (prompt_tokens,), generator=generator)

        def answer() -> tuple[list[int], float]:
            started = time.perf_counter()
            found = list(generate(cascade, tokens, plan, new_tokens=new_tokens))
            return found, time.perf_counter() - started

        answer()
        expected, usual = answer()
        for done, (fault, node, phase) in enumerate(cases):
            row: dict[str, Any] = {"fault": fault, "node": node, "while": phase, "cases": len(at)}
            row |= dict.fromkeys(("same_answer", "named_error", "other_error", "other_answer"), 0)
            longest = 0.0
            for layer in at:
                _arm(cascade, node, _Fault(fault, layer - 1, phase == PHASES[0], timeout))
                started = time.perf_counter()
                try:
                    found, _ = answer()
                    row["same_answer" if found == expected else "other_answer"] += 1
                except NodeError as error:
                    row["named_error" if error.node is not None else "other_error"] += 1
                longest = max(longest, time.perf_counter() - started - usual)
                if restarts == 0:
                    cascade.shutdown()
                    cascade = nodes.start(2, 1, True)
                else:
                    _disarm(cascade)
                    if answer()[0] != expected:
                        raise NodeError(
                            f"after {fault} at {node} in layer {layer} the nodes answer differently"
                        )
            rows.append(row | {"seconds_lost": longest})
            progress("faults", done + 1, len(cases))
    return {
        "rows": rows,
        "model": model,
        "layers": at,
        "restarts": restarts,
        "timeout": timeout,
        "seed": seed,
    }


def _layers(text: str, depth: int) -> list[int]:
    names = {"middle": depth // 2 + 1, "last": depth}
    found: list[int] = []
    for part in (part.strip() for part in text.split(",")):
        if part == "all":
            found += range(1, depth + 1)
        elif part in names or (part.isdecimal() and 1 <= int(part) <= depth):
            found.append(names.get(part) or int(part))
        else:
            raise InputError(f"layers are 1 to {depth}, 'middle', 'last' or 'all', not {part!r}")
    return sorted(set(found))


@dataclass(frozen=True)
class _Fault:
    """What happens to a node once, in one layer.

    Attributes:
        kind: see ``FAULTS``. layer: from 0. prompt: while the prompt is read, else while a new token is made.
        timeout: of the nodes, in seconds.
    """

    kind: str
    layer: int
    prompt: bool
    timeout: float

    def rows(self, rows: Rows) -> Rows:
        """Return what becomes of rows, where the node itself goes on."""
        if self.kind == "slow":
            time.sleep(self.timeout * 2 / 3)
        if self.kind == "row missing":
            return Rows(rows.queries, rows.keys[:, 1:], rows.values[:, 1:])
        if self.kind == "NaN":
            return replace(rows, values=torch.full_like(rows.values, float("nan")))
        if self.kind == "wrong numbers":
            return replace(rows, values=rows.values.flip(2))
        return rows

    def strike(self) -> None:
        """End, stop or fail."""
        if self.kind == "killed":
            os._exit(1)
        if self.kind == "stalled":
            time.sleep(1e6)
        if self.kind == "fails":
            raise MemoryError("no room")


def _arm(cascade: Any, node: str, fault: _Fault) -> None:
    """Make a node break once."""
    import ray

    comp = node.startswith("Comp")
    ray.get(cascade._actors[node].__ray_call__.remote(_arm_comp if comp else _arm_attn, fault))


def _disarm(cascade: Any) -> None:
    """Mend every node that still runs; a fault that found no work must not hit a later case."""
    import ray

    calls = [actor.__ray_call__.remote(_mend) for actor in cascade._actors.values()]
    ray.wait(calls, num_returns=len(calls), timeout=10.0)


def _arm_comp(node: Any, fault: _Fault) -> None:
    """Break the way in which a CompNode hands its rows to the wire. Runs at the node."""
    post = node._plain = node.carrier.post
    due = _Due(fault)

    def broken(attn: Any, head: Head, rows: Rows) -> None:
        if due(head) and (rows.keys.shape[1] or fault.kind not in ("row missing", "NaN", "wrong numbers")):
            _mend(node)
            fault.strike()
            if fault.kind == "garbage":
                _write_garbage(node.hub)
            rows = fault.rows(rows)
        post(attn, head, rows)

    node.carrier.post = broken


def _arm_attn(node: Any, fault: _Fault) -> None:
    """Break the way in which an AttnNode takes rows. Runs at the node."""
    attend = node._plain = node.host._attend
    due = _Due(fault)

    def broken(running: Any, head: Head, arrived: Any) -> Any:
        if due(replace(head, passes=running.passes)):
            _mend(node)
            fault.strike()
            if fault.kind == "garbage":
                _write_garbage(node.hub)
            arrived = {comp: (fault.rows(rows), reply) for comp, (rows, reply) in arrived.items()}
        return attend(running, head, arrived)

    node.host._attend = broken


class _Due:
    """Whether a message belongs to the layer and phase in which a fault is due."""

    def __init__(self, fault: _Fault) -> None:
        self.fault, self.prompt = fault, True

    def __call__(self, head: Head) -> bool:
        if head.passes is not None:
            self.prompt = head.passes[0].since == 0
        return head.layer == self.fault.layer and self.prompt == self.fault.prompt


def _mend(node: Any) -> None:
    """Undo ``_arm``. Runs at the node."""
    node.__dict__.pop("_plain", None)
    if hasattr(node, "carrier"):
        node.carrier.__dict__.pop("post", None)
    else:
        node.host.__dict__.pop("_attend", None)


def _write_garbage(hub: Any) -> None:
    for connection, lock in list(hub._peers.values()):
        with lock:
            connection.sendall(b"\xff" * 64)
