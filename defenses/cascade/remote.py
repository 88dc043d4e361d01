"""Run nodes that exchange messages over TCP: convert passes and rows to messages, and wait for answers."""

import secrets
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from hiddenlab.defenses.cascade.attn_host import AttnHost, Reply
from hiddenlab.defenses.cascade.backend import ModelFacts, NodeCascade, Settings, in_threads
from hiddenlab.defenses.cascade.comp_host import CompHost
from hiddenlab.defenses.cascade.cost import Link
from hiddenlab.defenses.cascade.hardening import WHOLE, Section
from hiddenlab.defenses.cascade.load import load_cascade_model
from hiddenlab.defenses.cascade.masked_sums import SumKeys, SumSecret
from hiddenlab.defenses.cascade.node_state import (
    GIVEN_UP,
    Carrier,
    Head,
    NodeError,
    attn_name,
    comp_name,
    remember,
)
from hiddenlab.defenses.cascade.node_views import Seen
from hiddenlab.defenses.cascade.nodes import Answer, Rows, answer_of
from hiddenlab.defenses.cascade.passes import Batch, Pass
from hiddenlab.defenses.cascade.secret_maps import Secret
from hiddenlab.defenses.cascade.wire import LOCAL, Address, Endpoint, Hub, WireError
from hiddenlab.models.attention import Attention
from hiddenlab.sharding import AttnNode, Plan


def head_to_json(head: Head) -> dict[str, Any]:
    """Convert a head to plain data."""
    data = {**vars(head), "attention": vars(head.attention)}
    if head.passes is not None:
        data["passes"] = [{**vars(work), "plan": work.plan.describe()} for work in head.passes]
    return data


def head_from_json(data: Mapping[str, Any], before: Mapping[str, Plan] = MappingProxyType({})) -> Head:
    """Convert plain data to a head.

    Args:
        data: what ``head_to_json`` gave.
        before: plans of requests' last passes that were seen here; growing one is cheaper than making a new one.
    """
    passes = data["passes"]
    if passes is not None:
        passes = tuple(_pass(work, before.get(work["request"])) for work in passes)
    return Head(**{**data, "attention": Attention(**data["attention"]), "passes": passes})


def _pass(data: Mapping[str, Any], before: Plan | None) -> Pass:
    described = data["plan"]
    plan = Plan.described(described) if before is None else before.grown(described["tokens"])
    return Pass(**{**data, "plan": plan, "hidden": tuple(data["hidden"])})


class Mailbox:
    """Answers that arrived, by batch, step and sender, until they are collected.

    Args:
        timeout: seconds to wait for an answer without progress; None waits until told otherwise.
        progress: a number that changes while the nodes work. A slow node is waited for, a stalled one is not.
    """

    def __init__(self, timeout: float | None, progress: Callable[[], int] = lambda: 0) -> None:
        self.timeout, self.progress = timeout, progress
        self._ready = threading.Condition()
        self._answers: dict[tuple[str, int, str], list[Answer] | NodeError] = {}
        self._lost: set[str] = set()
        self._aborted: dict[str, None] = {}

    def put(self, batch: str, step: int, sender: str, parts: list[Answer] | NodeError) -> None:
        with self._ready:
            if batch not in self._aborted:
                self._answers[batch, step, sender] = parts
                self._ready.notify_all()

    def get(self, head: Head, sender: str) -> list[Answer]:
        """Wait for an answer.

        Raises:
            NodeError: the sender is lost or failed, does not answer in time, or the batch was given up.
        """
        key = head.batch, head.step, sender
        with self._ready:
            while True:
                before = self.progress()
                notified = self._ready.wait_for(
                    lambda: key in self._answers or sender in self._lost or head.batch in self._aborted,
                    self.timeout,
                )
                if notified or self.progress() == before:
                    break
            if key in self._answers:
                answer = self._answers.pop(key)
                if isinstance(answer, NodeError):
                    raise answer
                return answer
            if head.batch in self._aborted:
                raise NodeError(GIVEN_UP)
            if sender in self._lost:
                raise NodeError(f"{sender} died in layer {head.layer + 1}", sender)
            raise NodeError(
                f"{sender} did not answer in layer {head.layer + 1}: nothing got on for {self.timeout:g} s",
                sender,
            )

    def aborted(self, batch: str) -> bool:
        """Return whether a batch was given up."""
        return batch in self._aborted

    def lose(self, sender: str, lost: bool = True) -> None:
        with self._ready:
            (self._lost.add if lost else self._lost.discard)(sender)
            self._ready.notify_all()

    def abort(self, batch: str) -> None:
        """Wake whoever waits in this batch, and drop answers that still arrive for it."""
        with self._ready:
            remember(self._aborted, batch)
            for key in [key for key in self._answers if key[0] == batch]:
                del self._answers[key]
            self._ready.notify_all()


class HubCarrier:
    """A carrier of a CompNode's messages over its hub."""

    def __init__(self, hub: Hub, mailbox: Mailbox) -> None:
        self.hub, self.mailbox = hub, mailbox

    def post(self, node: AttnNode, head: Head, rows: Rows) -> None:
        if self.mailbox.aborted(head.batch):
            raise NodeError(GIVEN_UP)
        try:
            self.hub.send(attn_name(node), head_to_json(head), rows.tensors)
        except WireError as error:
            raise NodeError(
                f"{attn_name(node)} is lost in layer {head.layer + 1}: {error}", attn_name(node)
            ) from None

    def collect(self, node: AttnNode, head: Head) -> list[Answer]:
        return self.mailbox.get(head, attn_name(node))


class RemoteComp:
    """A CompNode that communicates over a hub.

    Args:
        index: of the CompNode.
        model: name of the model.
        section: of the model, which it runs.
        secret: see ``CompHost``.
        loaded: its weights, where they are in this process already.
        timeout: see ``Mailbox``.
        endpoint: where it listens.
    """

    def __init__(
        self,
        index: int,
        model: str,
        settings: Settings,
        key: bytes,
        *,
        endpoint: Endpoint = LOCAL,
        link: Link | None = None,
        timeout: float | None = None,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        section: Section = WHOLE,
        secret: Secret | None = None,
        loaded: nn.Module | None = None,
    ) -> None:
        loaded = loaded or load_cascade_model(model, dtype=dtype, device=device, section=section)
        self.index, self.settings = index, settings
        self.host = CompHost(loaded, index, wire=settings.wire, secret=secret, slack=settings.slack)
        self.facts = ModelFacts.of(model, loaded)
        self.mailbox = Mailbox(timeout)
        # A layer can take minutes, so each of its modules counts as progress.
        branches = [module for module in loaded.modules() if next(module.children(), None) is None]
        self._hooks = [branch.register_forward_hook(self._tick) for branch in branches]
        self.hub = Hub(comp_name(index), key, self._receive, self.mailbox.lose, endpoint=endpoint, link=link)
        self.carrier: Carrier = HubCarrier(self.hub, self.mailbox)
        self._seen: dict[str, Seen] = {}

    def connect(self, peers: Mapping[str, Address]) -> None:
        self.hub.connect(peers)
        for peer in peers:
            self.mailbox.lose(peer, False)

    def run(self, batch: Batch, inputs: Tensor) -> Tensor:
        """Run a batch (see ``CompHost.run``)."""
        seen = None
        if self.settings.record:
            request = batch.passes[0].request
            seen = self._seen.setdefault(request, Seen(comp_name(self.index), request))
        if self.mailbox.aborted(batch.name):
            raise NodeError(GIVEN_UP)
        return self.host.run(batch, inputs, self.carrier, seen).cpu()

    def _tick(self, *_: Any) -> None:
        self.host.ticks += 1

    def progress(self) -> int:
        """Return a number that grows while any pass makes progress."""
        return self.host.ticks

    def layer(self, batch: str) -> int | None:
        """Return the layer, from 1, that a batch is in; None where it does not run."""
        return self.host.layers.get(batch)

    def abort(self, batch: str) -> None:
        self.mailbox.abort(batch)

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
        parts: list[Answer] | NodeError = []
        if head.get("failed"):
            parts = NodeError(head["failed"], head["node"], forgot=head["forgot"])
        elif size:
            parts = [answer_of(tensors[i : i + size]) for i in range(0, len(tensors), size)]
        self.mailbox.put(head["batch"], head["step"], sender, parts)


class RemoteAttn:
    """An AttnNode that communicates over a hub; it has no weights, and no rows but those it is sent.

    ``masks``: its own keys of masked sums.
    """

    def __init__(
        self,
        node: AttnNode,
        settings: Settings,
        key: bytes,
        *,
        endpoint: Endpoint = LOCAL,
        link: Link | None = None,
        device: str = "cpu",
        masks: SumKeys | None = None,
    ) -> None:
        self.host = AttnHost(
            node,
            compress=settings.compress,
            wire=settings.wire,
            record=settings.record,
            device=device,
            masks=masks,
        )
        self.hub = Hub(self.host.name, key, self._receive, lambda peer: None, endpoint=endpoint, link=link)

    def progress(self) -> int:
        """Return a number that grows while any pass makes progress."""
        return self.host.ticks

    def answer(self, comp: int, head: Head, rows: Rows) -> list[Answer]:
        """Take rows and wait for the answer, for carriers that call a method.

        Raises:
            NodeError: the node failed, or the batch was given up.
        """
        came = threading.Event()
        answers: list[list[Answer] | Exception] = []

        def reply(parts: list[Answer] | Exception) -> None:
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
        head = head_from_json(data, self.host.plans)
        self.host.receive(int(sender.split()[-1]), head, Rows(*tensors), self._reply(sender, head))

    def _reply(self, sender: str, head: Head) -> Reply:
        def reply(parts: list[Answer] | Exception) -> None:
            about: dict[str, Any] = {"batch": head.batch, "step": head.step, "size": 0}
            if isinstance(parts, Exception):
                node = parts.node if isinstance(parts, NodeError) else self.host.name
                about |= {"failed": str(parts), "node": node, "forgot": getattr(parts, "forgot", False)}
                parts = []
            tensors = [tensor for part in parts for tensor in part.tensors]
            if parts:
                about["size"] = len(parts[0].tensors)
            with suppress(WireError):  # the CompNode is gone, and the driver will notice
                self.hub.send(sender, about, tensors)

        return reply


class WireCascade(NodeCascade):
    """All nodes in one process, with TCP between them, to count bytes and to test without Ray.

    Args:
        model: see ``load_cascade_model``; all CompNodes share it.
        alpha, m, symmetric: as in ``Plan``.
        endpoint: where each node listens, and whether with TLS.
        secret: see ``CompHost``. masks: see ``LocalCascade``; each AttnNode gets its own keys alone.
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
        endpoint: Endpoint = LOCAL,
        timeout: float = 60.0,
        secret: Secret | None = None,
        masks: SumSecret | None = None,
    ) -> None:
        settings, key = settings or Settings(), secrets.token_bytes(32)
        super().__init__(record=settings.record)
        shape = Plan.clustered(alpha, 1, alpha=alpha, m=m, symmetric=symmetric)
        nodes = shape.attn_nodes
        self.facts = ModelFacts.of(name, model)
        self.started = alpha, frozenset(map(attn_name, nodes))
        own = {node: None if masks is None else masks.keys_of(node, shape) for node in nodes}
        self.attns = [
            RemoteAttn(node, settings, key, endpoint=endpoint, link=link, masks=own[node]) for node in nodes
        ]
        self.comps = [
            RemoteComp(
                i,
                name,
                settings,
                key,
                endpoint=endpoint,
                link=link,
                timeout=timeout,
                secret=secret,
                loaded=model,
            )
            for i in range(alpha)
        ]
        for comp in self.comps:
            comp.mailbox.progress = self._progress
            comp.connect({attn.host.name: attn.hub.address for attn in self.attns})

    def _run(self, batch: Batch, shares: Mapping[int, Tensor]) -> dict[int, Tensor]:
        return in_threads(
            lambda i: self.comps[i].run(batch, shares[i]), shares, lambda: self._abort(batch.name)
        )

    def _progress(self) -> int:
        return sum(node.progress() for nodes in (self.comps, self.attns) for node in nodes)

    def _abort(self, batch: str) -> None:
        for comp in self.comps:
            comp.abort(batch)
        for attn in self.attns:
            attn.host.abort(batch)

    def _forget(self, request: str) -> None:
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
