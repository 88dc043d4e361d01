"""Run nodes that exchange messages over TCP: convert passes and rows to messages, and wait for answers."""

import secrets
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from hiddenlab.defenses.cascade.backend import Cascade, ModelFacts, Settings, comp_name, in_threads
from hiddenlab.defenses.cascade.cost import Link
from hiddenlab.defenses.cascade.load import load_cascade_model
from hiddenlab.defenses.cascade.node_state import (
    GIVEN_UP,
    AttnHost,
    Carrier,
    CompHost,
    Head,
    NodeError,
    Pass,
    Reply,
    attn_name,
)
from hiddenlab.defenses.cascade.node_views import Seen
from hiddenlab.defenses.cascade.nodes import Partial, Rows
from hiddenlab.defenses.cascade.wire import Address, Hub, WireError
from hiddenlab.models.attention import Attention
from hiddenlab.sharding import AttnNode, Plan


def head_to_json(head: Head) -> dict[str, Any]:
    """Convert a head to plain data."""
    work = head.work
    data = {**vars(head), "attention": vars(head.attention)}
    if work is not None:
        data["work"] = {**vars(work), "plan": work.plan.describe()}
    return data


def head_from_json(data: Mapping[str, Any], before: Plan | None = None) -> Head:
    """Convert plain data to a head.

    Args:
        data: what ``head_to_json`` gave.
        before: plan of the request's last pass that was seen here; growing it is cheaper than making a new one.
    """
    work = data["work"]
    if work is not None:
        described = work["plan"]
        plan = before.grown(described["tokens"]) if before is not None else Plan.described(described)
        work = Pass(**{**work, "plan": plan, "hidden": tuple(work["hidden"])})
    return Head(**{**data, "attention": Attention(**data["attention"]), "work": work})


class Mailbox:
    """Answers that arrived, by request, pass, step and sender, until they are collected.

    Args:
        timeout: seconds to wait for an answer without progress; None waits until told otherwise.
        progress: a number that changes while the nodes work. A slow node is waited for, a stalled one is not.
    """

    def __init__(self, timeout: float | None, progress: Callable[[], int] = lambda: 0) -> None:
        self.timeout, self.progress = timeout, progress
        self._ready = threading.Condition()
        self._answers: dict[tuple[str, int, int, str], list[Partial] | NodeError] = {}
        self._lost: set[str] = set()
        self._aborted: dict[str, None] = {}

    def put(
        self, request: str, number: int, step: int, sender: str, parts: list[Partial] | NodeError
    ) -> None:
        with self._ready:
            if request not in self._aborted:
                self._answers[request, number, step, sender] = parts
                self._ready.notify_all()

    def get(self, head: Head, sender: str) -> list[Partial]:
        """Wait for an answer.

        Raises:
            NodeError: the sender is lost or failed, does not answer in time, or the request was aborted.
        """
        key = head.request, head.number, head.step, sender
        with self._ready:
            while True:
                before = self.progress()
                notified = self._ready.wait_for(
                    lambda: key in self._answers or sender in self._lost or head.request in self._aborted,
                    self.timeout,
                )
                if notified or self.progress() == before:
                    break
            if key in self._answers:
                answer = self._answers.pop(key)
                if isinstance(answer, NodeError):
                    raise answer
                return answer
            if head.request in self._aborted:
                raise NodeError(GIVEN_UP)
            if sender in self._lost:
                raise NodeError(f"{sender} died in layer {head.layer + 1}", sender)
            raise NodeError(
                f"{sender} did not answer in layer {head.layer + 1}: nothing got on for {self.timeout:g} s",
                sender,
            )

    def aborted(self, request: str) -> bool:
        """Return whether the request was given up."""
        return request in self._aborted

    def lose(self, sender: str, lost: bool = True) -> None:
        with self._ready:
            (self._lost.add if lost else self._lost.discard)(sender)
            self._ready.notify_all()

    def abort(self, request: str) -> None:
        """Wake whoever waits for this request, and drop answers that still arrive for it."""
        with self._ready:
            self._aborted[request] = None
            while len(self._aborted) > 4096:
                del self._aborted[next(iter(self._aborted))]
            for key in [key for key in self._answers if key[0] == request]:
                del self._answers[key]
            self._ready.notify_all()


class HubCarrier:
    """A carrier of a CompNode's messages over its hub."""

    def __init__(self, hub: Hub, mailbox: Mailbox) -> None:
        self.hub, self.mailbox = hub, mailbox

    def post(self, node: AttnNode, head: Head, rows: Rows) -> None:
        if self.mailbox.aborted(head.request):
            raise NodeError(GIVEN_UP)
        try:
            self.hub.send(attn_name(node), head_to_json(head), rows.tensors)
        except WireError as error:
            raise NodeError(
                f"{attn_name(node)} is lost in layer {head.layer + 1}: {error}", attn_name(node)
            ) from None

    def collect(self, node: AttnNode, head: Head) -> list[Partial]:
        return self.mailbox.get(head, attn_name(node))


class RemoteComp:
    """A CompNode that communicates over a hub.

    Args:
        index: of the CompNode.
        model: name of the model.
        loaded: its weights, where they are in this process already.
        timeout: see ``Mailbox``.
        host: address to listen on.
    """

    def __init__(
        self,
        index: int,
        model: str,
        settings: Settings,
        key: bytes,
        *,
        host: str = "127.0.0.1",
        link: Link | None = None,
        timeout: float | None = None,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        loaded: nn.Module | None = None,
    ) -> None:
        loaded = loaded or load_cascade_model(model, dtype=dtype, device=device)
        self.index, self.settings = index, settings
        self.host = CompHost(loaded, index, wire=settings.wire)
        self.facts = ModelFacts.of(model, loaded)
        self.mailbox = Mailbox(timeout)
        # A layer can take minutes, so each of its modules counts as progress.
        branches = [module for module in loaded.modules() if next(module.children(), None) is None]
        self._hooks = [branch.register_forward_hook(self._tick) for branch in branches]
        self.hub = Hub(comp_name(index), key, self._receive, self.mailbox.lose, host=host, link=link)
        self.carrier: Carrier = HubCarrier(self.hub, self.mailbox)
        self._seen: dict[str, Seen] = {}

    def connect(self, peers: Mapping[str, Address]) -> None:
        self.hub.connect(peers)
        for peer in peers:
            self.mailbox.lose(peer, False)

    def run(self, work: Pass, inputs: Tensor) -> Tensor:
        """Run a pass (see ``CompHost.run``)."""
        seen = None
        if self.settings.record:
            seen = self._seen.setdefault(work.request, Seen(comp_name(self.index), work.request))
        if self.mailbox.aborted(work.request):
            raise NodeError(GIVEN_UP)
        return self.host.run(work, inputs, self.carrier, seen).cpu()

    def _tick(self, *_: Any) -> None:
        self.host.ticks += 1

    def progress(self) -> int:
        """Return a number that grows while any pass makes progress."""
        return self.host.ticks

    def layer(self, request: str) -> int | None:
        """Return the layer, from 1, that the pass of a request is in; None where none runs."""
        return self.host.layers.get(request)

    def abort(self, request: str) -> None:
        self.mailbox.abort(request)

    def close(self) -> None:
        """Close the connections, and leave the model as it was."""
        self.hub.close()
        for hook in self._hooks:
            hook.remove()

    def counters(self) -> dict[str, Any]:
        return {**asdict(self.host.times), **_sent(self.hub)}

    def seen(self) -> list[Seen]:
        views, self._seen = list(self._seen.values()), {}
        return views

    def _receive(self, sender: str, head: dict[str, Any], tensors: list[Tensor]) -> None:
        size = head["size"]
        parts: list[Partial] | NodeError = []
        if head.get("failed"):
            parts = NodeError(head["failed"], sender, forgot=head["forgot"])
        elif size:
            parts = [Partial.of(tensors[i : i + size]) for i in range(0, len(tensors), size)]
        self.mailbox.put(head["request"], head["number"], head["step"], sender, parts)


class RemoteAttn:
    """An AttnNode that communicates over a hub; it has no weights, and no rows but those it is sent."""

    def __init__(
        self,
        node: AttnNode,
        settings: Settings,
        key: bytes,
        *,
        host: str = "127.0.0.1",
        link: Link | None = None,
        device: str = "cpu",
    ) -> None:
        self.host = AttnHost(
            node, compress=settings.compress, wire=settings.wire, record=settings.record, device=device
        )
        self.hub = Hub(self.host.name, key, self._receive, lambda peer: None, host=host, link=link)

    def progress(self) -> int:
        """Return a number that grows while any pass makes progress."""
        return self.host.ticks

    def answer(self, comp: int, head: Head, rows: Rows) -> list[Partial]:
        """Take rows and wait for the answer, for carriers that call a method.

        Raises:
            NodeError: the node failed, or the request was given up.
        """
        came = threading.Event()
        answers: list[list[Partial] | Exception] = []

        def reply(parts: list[Partial] | Exception) -> None:
            answers.append(parts)
            came.set()

        self.host.receive(comp, head, rows, reply)
        came.wait()
        if isinstance(answers[0], Exception):
            raise answers[0]
        return answers[0]

    def counters(self) -> dict[str, Any]:
        return {**asdict(self.host.counters), **_sent(self.hub)}

    def seen(self) -> list[Seen]:
        views, self.host.seen = self.host.seen, []
        return views

    def _receive(self, sender: str, data: dict[str, Any], tensors: list[Tensor]) -> None:
        head = head_from_json(data, self.host.plan(data["request"]))
        self.host.receive(int(sender.split()[-1]), head, Rows(*tensors), self._reply(sender, head))

    def _reply(self, sender: str, head: Head) -> Reply:
        def reply(parts: list[Partial] | Exception) -> None:
            about: dict[str, Any] = {
                "request": head.request,
                "number": head.number,
                "step": head.step,
                "size": 0,
            }
            if isinstance(parts, Exception):
                about |= {"failed": str(parts), "forgot": getattr(parts, "forgot", False)}
                parts = []
            tensors = [tensor for part in parts for tensor in part.tensors]
            if parts:
                about["size"] = len(parts[0].tensors)
            with suppress(WireError):  # the CompNode is gone, and the driver will notice
                self.hub.send(sender, about, tensors)

        return reply


class WireCascade(Cascade):
    """All nodes in one process, with TCP between them, to count bytes and to test without Ray.

    Args:
        model: see ``load_cascade_model``; all CompNodes share it.
        alpha, m, symmetric: as in ``Plan``.
    """

    def __init__(
        self,
        model: nn.Module,
        alpha: int,
        *,
        m: int = 1,
        symmetric: bool = False,
        settings: Settings | None = None,
        name: str = "model",
        link: Link | None = None,
        timeout: float = 60.0,
    ) -> None:
        settings, key = settings or Settings(), secrets.token_bytes(32)
        nodes = Plan.clustered(alpha, 1, alpha=alpha, m=m, symmetric=symmetric).attn_nodes
        self.facts = ModelFacts.of(name, model)
        self.started = alpha, frozenset(map(attn_name, nodes))
        self.attns = [RemoteAttn(node, settings, key, link=link) for node in nodes]
        self.comps = [
            RemoteComp(i, name, settings, key, link=link, timeout=timeout, loaded=model) for i in range(alpha)
        ]
        for comp in self.comps:
            comp.mailbox.progress = self._progress
            comp.connect({attn.host.name: attn.hub.address for attn in self.attns})

    def _run(self, work: Pass, shares: Mapping[int, Tensor]) -> dict[int, Tensor]:
        return in_threads(
            lambda i: self.comps[i].run(work, shares[i]), shares, lambda: self.close(work.request)
        )

    def _progress(self) -> int:
        return sum(node.progress() for nodes in (self.comps, self.attns) for node in nodes)

    def close(self, request: str) -> None:
        for comp in self.comps:
            comp.abort(request)
        for attn in self.attns:
            attn.host.close(request)

    def counters(self) -> dict[str, dict[str, Any]]:
        counts = {comp_name(comp.index): comp.counters() for comp in self.comps}
        return counts | {attn.host.name: attn.counters() for attn in self.attns}

    def seen(self) -> list[Seen]:
        return [view for nodes in (self.comps, self.attns) for node in nodes for view in node.seen()]

    def shutdown(self) -> None:
        for comp in self.comps:
            comp.close()
        for attn in self.attns:
            attn.hub.close()


def _sent(hub: Hub) -> dict[str, int]:
    return {"sent_payload": hub.sent.payload, "sent_framing": hub.sent.framing, "messages": hub.sent.messages}
