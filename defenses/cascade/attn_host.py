"""Keep an AttnNode's state between messages, for every backend: it only reacts to what it is sent."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hiddenlab.defenses.cascade.attn_worker import AttnBatch, AttnWorker, ForgottenError
from hiddenlab.defenses.cascade.masked_sums import SumKeys, TooLargeError
from hiddenlab.defenses.cascade.node_state import (
    GIVEN_UP,
    Head,
    NodeError,
    all_finite,
    attn_name,
    comp_name,
    remember,
)
from hiddenlab.defenses.cascade.node_views import Seen, record_attn
from hiddenlab.defenses.cascade.nodes import Answer, Rows
from hiddenlab.defenses.cascade.passes import Pass
from hiddenlab.sharding import AttnNode, Plan

KEPT_BATCHES = 4  # one runs at a time, and those before it were given up or are done


@dataclass
class Counters:
    """The counters of an AttnNode.

    Attributes:
        passes: passes in which it computed attention.
        stored: passes in which it only kept keys and values.
        elements_in, elements_out: numbers received and answered.
    """

    passes: int = 0
    stored: int = 0
    elements_in: int = 0
    elements_out: int = 0


Reply = Callable[[list[Answer] | Exception], None]


def _ignore(parts: list[Answer] | Exception) -> None:
    """Answer nobody: the CompNode has its receipt."""


@dataclass
class _Running:
    """The state of a batch at an AttnNode.

    Attributes:
        comps: CompNodes that send rows in each layer.
        asked: some of them ask for an answer.
        begun: None until all rows of the first layer are here.
        arrived: by step and CompNode.
        computing: attention is being computed.
    """

    passes: tuple[Pass, ...]
    comps: frozenset[int]
    asked: bool
    begun: AttnBatch | None = None
    computing: bool = False
    arrived: dict[int, dict[int, tuple[Rows, Reply]]] = field(default_factory=dict)


class AttnHost:
    """An AttnNode: keeps the rows of each request, and answers once all rows of a batch's layer have arrived.

    The thread that brings the last rows computes.

    Args:
        node: which AttnNode.
        compress: answer with one logsumexp per row.
        wire: dtype of numbers on the wire.
        record: keep everything received, see ``seen``. Batches then have one pass.
        device: where it computes; None is where the rows are.
        masks: keys of masked sums; None answers with partial results.
    """

    def __init__(
        self,
        node: AttnNode,
        *,
        compress: bool = False,
        wire: torch.dtype | None = None,
        record: bool = False,
        device: str | None = None,
        masks: SumKeys | None = None,
    ) -> None:
        self.node, self.wire, self.record = node, wire, record
        self.name = attn_name(node)
        self.device = device
        self.counters = Counters()
        self.ticks = 0  # grows with every message received and every layer computed
        self.seen: list[Seen] = []
        self.plans: dict[str, Plan] = {}  # of the last pass of each request that is kept
        self._worker = AttnWorker(node, compress=compress, masks=masks)
        self._computing = threading.Lock()  # over the worker
        self._running: dict[str, _Running] = {}
        self._aborted: dict[str, None] = {}
        self._lock = threading.Lock()  # over everything else

    def receive(self, comp: int, head: Head, rows: Rows, reply: Reply) -> None:
        """Take a CompNode's rows; once all have sent, call ``reply`` for every CompNode that asked."""
        with self._lock:
            self.ticks += 1
            aborted = head.batch in self._aborted
            running = None if aborted else self._batch(head)
            receipt = running is not None and running.asked and not rows.queries.shape[1]
            arrived = {}
            if running is not None:
                arrived = self._arrived(running, comp, head, rows, _ignore if receipt else reply)
        if receipt:
            # Whoever asks ends the batch no sooner than its rows are used, so that nobody else need wait for that.
            reply([])
        if aborted:
            reply(NodeError(GIVEN_UP))
        elif running is None:
            reply(self._forgot())
        elif arrived:
            self._answer(running, head, arrived)

    def _answer(self, running: _Running, head: Head, arrived: Mapping[int, tuple[Rows, Reply]]) -> None:
        running.computing = True
        try:
            answers = self._attend(running, head, arrived)
        except Exception as error:
            # Every waiting CompNode gets the error; the node itself continues.
            fault = error
            if not isinstance(error, NodeError):
                fault = NodeError(f"{self.name} failed in layer {head.layer + 1}: {error}", self.name)
            for _, reply in arrived.values():
                reply(fault)
            return
        finally:
            running.computing = False
        for sender, (rows, reply) in arrived.items():
            # Where nobody asks, all get a receipt, since no further batch may begin before this one is done.
            self.ticks += 1
            parts = answers[sender] if rows.queries.shape[1] else []
            if self.wire is not None:
                parts = [part.to(self.wire) for part in parts]
            self.counters.elements_out += sum(part.elements for part in parts)
            reply(parts)

    def _batch(self, head: Head) -> _Running | None:
        """Return the batch of a message, and begin it with its first; None where that never arrived.

        The caller has to hold the lock.
        """
        running = self._running.get(head.batch)
        if running is None and head.passes is not None:
            messages = [message for work in head.passes for message in work.messages((self.node,))]
            comps, asked = frozenset(one.comp for one in messages), any(one.queries for one in messages)
            running = self._running[head.batch] = _Running(head.passes, comps, asked)
            self.plans |= {work.request: work.plan for work in head.passes if work.keep}
            if self.record:
                (work,) = head.passes
                if not any(seen.request == work.request for seen in self.seen):
                    self.seen.append(Seen(self.name, work.request))
            while len(self._running) > KEPT_BATCHES:
                del self._running[next(iter(self._running))]
        return running

    def _arrived(
        self, running: _Running, comp: int, head: Head, rows: Rows, reply: Reply
    ) -> dict[int, tuple[Rows, Reply]]:
        """Keep a CompNode's rows; return all CompNodes' rows if these were the last, else none.

        The caller has to hold the lock.
        """
        arrived = running.arrived.setdefault(head.step, {})
        arrived[comp] = (rows, reply)
        self.counters.elements_in += rows.elements
        if len(arrived) < len(running.comps):
            return {}
        del running.arrived[head.step]
        return arrived

    def _attend(
        self, running: _Running, head: Head, arrived: Mapping[int, tuple[Rows, Reply]]
    ) -> dict[int, list[Answer]]:
        taken = {sender: sent.to(self.device) for sender, (sent, _) in arrived.items()}
        with torch.inference_mode(), self._computing:
            if head.batch in self._aborted:
                raise NodeError(GIVEN_UP)
            if running.begun is None:
                try:
                    running.begun = self._worker.begin(running.passes, head.batch)
                except ForgottenError:
                    raise self._forgot() from None
                self.counters.passes += running.begun.asked
                self.counters.stored += running.begun.stored
            self._check(running.begun, head, {sender: sent for sender, (sent, _) in arrived.items()})
            if self.record:
                (work,) = running.passes
                seen = next(seen for seen in self.seen if seen.request == work.request)
                messages = {m.comp: m for m in work.messages((self.node,))}
                record_attn(seen, messages, head.layer, taken)
            try:
                return running.begun.run(head.step, head.layer, taken, head.attention)
            except TooLargeError:
                # No node is at fault, and none must be replaced.
                raise NodeError(
                    f"{self.name} cannot mask its sums of layer {head.layer + 1}: some scores are too far above those "
                    "of rows with themselves; raise --harden masked-sums:slack, at most 16, or leave masked-sums out"
                ) from None

    @staticmethod
    def _check(begun: AttnBatch, head: Head, rows: Mapping[int, Rows]) -> None:
        """Refuse rows that would give a wrong answer, or damage what is kept of other requests."""
        for comp, (queries, keys) in begun.sizes.items():
            sent, name = rows[comp], comp_name(comp)
            counts = [tensor.shape[1] for tensor in sent.tensors]
            if counts != [queries, keys, keys] + [queries] * begun.masked:
                if (sent.references is None) == begun.masked:
                    form = "masked sums" if begun.masked else "partial results"
                    raise NodeError(
                        f"{name} asks for another form of answer, where this node has {form}", name
                    )
                raise NodeError(
                    f"{name} sent {counts[0]} query and {counts[1]} key rows in layer {head.layer + 1}, where "
                    f"{queries} and {keys} belong to this batch",
                    name,
                )
            if not all(map(all_finite, sent.tensors)):
                raise NodeError(f"{name} sent numbers that are not finite in layer {head.layer + 1}", name)

    def _forgot(self) -> NodeError:
        # Without the earlier rows, the answer would be wrong but look right.
        text = f"{self.name} was started anew and does not know the earlier tokens of this request"
        return NodeError(text, self.name, forgot=True)

    def waiting(self, batch: str) -> dict[str, Any] | None:
        """Return what a batch waits for here: the CompNodes that are ``missing``, or that the node is ``computing``.

        None where it waits for nothing here.
        """
        with self._lock:
            running = self._running.get(batch)
            if running is None or not (running.arrived or running.computing):
                return None
            arrived = running.arrived[min(running.arrived)] if running.arrived else running.comps
            return {"missing": sorted(running.comps - set(arrived)), "computing": running.computing}

    def abort(self, batch: str) -> None:
        """Give a batch up; answer whoever waits for it, or still asks, that it was given up."""
        with self._lock:
            remember(self._aborted, batch)
            running = self._running.pop(batch, None)
            waiting = (
                []
                if running is None
                else [reply for arrived in running.arrived.values() for _, reply in arrived.values()]
            )
        for reply in waiting:
            reply(NodeError(GIVEN_UP))

    def close(self, request: str) -> None:
        """Forget a request."""
        with self._lock:
            self.plans.pop(request, None)
        with torch.inference_mode(), self._computing:
            self._worker.close(request)
