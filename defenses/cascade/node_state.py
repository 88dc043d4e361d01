"""Keep the state of CompNodes and AttnNodes between messages, for every backend.

A request is one prompt with everything generated after it. It consists of passes: the first over the prompt, then one
over each new token. In a pass a CompNode runs the model's own forward on its new tokens. In each layer's attention it
posts its rows to AttnNodes and collects their answers. AttnNodes only react to what they are sent.
"""

import threading
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hiddenlab.defenses.cascade.node_views import Seen, record_attn, record_layers, record_partials
from hiddenlab.defenses.cascade.nodes import AttnWorker, CompWorker, Partial, Rows
from hiddenlab.errors import HiddenlabError
from hiddenlab.models.attention import Attention, register_attention
from hiddenlab.sharding import AttnNode, Plan, Positions

ATTENTION_NAME = "hiddenlab-cascade"
GIVEN_UP = "the request was given up"
UNSEEN = "it attends by code of its own, not by transformers' attention functions, so that nothing can be sent apart"

_ACTIVE: ContextVar["_Seat | None"] = ContextVar("hiddenlab_cascade", default=None)


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

    def __reduce__(self) -> tuple[Any, ...]:
        return _node_error, (*self.args, self.forgot)

    def __str__(self) -> str:
        return str(self.args[0])


def _node_error(message: str, node: str | None, forgot: bool) -> NodeError:
    return NodeError(message, node, forgot=forgot)


@dataclass(frozen=True)
class Pass:
    """One forward pass of a request.

    Attributes:
        request: its name.
        plan: for all tokens so far, including the new ones.
        number: of the pass, from 0.
        since: first new position.
        keep: keep keys and values for further passes.
        last: only the last position's output is wanted.
        hidden: padding, which no token sees.
    """

    request: str
    plan: Plan
    number: int = 0
    since: int = 0
    keep: bool = False
    last: bool = False
    hidden: Positions = ()

    def inputs(self, index: int, tokens: Tensor) -> Tensor | None:
        """Return a CompNode's share of the new tokens' ids or embeddings; None where it has none."""
        mine = [p - self.since for p in self.plan.shards[index] if p >= self.since]
        return tokens[mine] if mine else None


@dataclass(frozen=True)
class Head:
    """The header of a CompNode's rows: their pass and layer, and how the layer attends.

    Attributes:
        step: attention calls before this one in the pass.
        work: the pass, in its first message only.
    """

    request: str
    number: int
    step: int
    layer: int
    attention: Attention
    work: Pass | None = None


@runtime_checkable
class Carrier(Protocol):
    """A carrier of a CompNode's messages."""

    def post(self, node: AttnNode, head: Head, rows: Rows) -> None:
        """Send rows; do not wait for an answer."""
        ...

    def collect(self, node: AttnNode, head: Head) -> list[Partial]:
        """Wait for the answer to what was posted.

        Raises:
            NodeError: it does not come.
        """
        ...


@dataclass
class Times:
    """The time of a CompNode's passes, in seconds, by activity.

    Attributes:
        compute: in the model.
        send: handing rows to the carrier.
        wait: until the answers arrived.
        merge: of partial outputs.
    """

    compute: float = 0.0
    send: float = 0.0
    wait: float = 0.0
    merge: float = 0.0


class CompHost:
    """A CompNode: the model's weights, and the passes that run on them.

    Args:
        model: see ``load_cascade_model``.
        index: of the CompNode.
        wire: dtype of numbers on the wire; None leaves them as they are.

    Attributes:
        ticks: grows with every layer of every pass.
        layers: the layer in which each running request is, from 1.
    """

    def __init__(self, model: nn.Module, index: int, *, wire: torch.dtype | None = None) -> None:
        self.model, self.index, self.wire = model, index, wire
        self.times = Times()
        self.ticks = 0
        self.layers: dict[str, int] = {}

    def run(
        self,
        work: Pass,
        inputs: Int[Tensor, " n"] | Float[Tensor, "n d"],
        carrier: Carrier,
        seen: Seen | None = None,
    ) -> Float[Tensor, "rows width"]:
        """Return logits (last hidden states where the model has no head) of the node's new tokens.

        With ``work.last``, return only those of the prompt's last position, and no rows where another node holds it.

        Raises:
            NodeError: an answer does not come.
        """
        comp = CompWorker(work.plan, self.index, work.since)
        seat = _Seat(self, work, comp, carrier, seen)
        token = _ACTIVE.set(seat)
        started = time.perf_counter()
        try:
            # A new thread does not inherit the caller's inference mode.
            with (
                torch.inference_mode(),
                record_layers(seen, self.model, comp.positions, lambda: _ACTIVE.get() is seat),
            ):
                output = self._forward(work, comp, inputs)
                if not seat.step:
                    raise HiddenlabError(UNSEEN)
                seat.finish()
                return output
        finally:
            _ACTIVE.reset(token)
            self.layers.pop(work.request, None)
            self.times.compute += time.perf_counter() - started - seat.away

    def _forward(self, work: Pass, comp: CompWorker, inputs: Tensor) -> Tensor:
        device = self.model.get_input_embeddings().weight.device  # type: ignore[operator]
        positions = torch.tensor([comp.positions], device=device) + first_position(self.model)
        options: dict[str, Any] = {"position_ids": positions}
        options["inputs_embeds" if inputs.is_floating_point() else "input_ids"] = inputs.to(device)[None]
        if getattr(self.model.config, "use_cache", False):
            options["use_cache"] = False
        if not work.last:
            output = self.model(**options)
            return output.logits[0] if hasattr(output, "logits") else output.last_hidden_state[0]
        if comp.positions[-1] != work.plan.tokens - 1:
            # Skip the head, whose output is not wanted. The last layer runs, because others need its keys.
            states = self.model.base_model(**options).last_hidden_state  # type: ignore[operator, union-attr]
            return states[0, :0]
        if has_head(self.model):
            return self.model(**options, logits_to_keep=1).logits[0]
        return self.model(**options).last_hidden_state[0, -1:]


def has_head(model: nn.Module) -> bool:
    """Return whether the model gives logits, not only hidden states."""
    return model.get_output_embeddings() is not None  # type: ignore[operator]


def first_position(model: nn.Module) -> int:
    """Return the number of a prompt's first position: 0, or where the model counts from behind its padding, as RoBERTa.

    Such a model's table of positions has a row for padding. Its padding token takes no position.
    """
    for name, part in model.named_modules():
        if "position" in name and (row := getattr(part, "padding_idx", None)) is not None:
            return int(row) + 1
    return 0


@dataclass
class _Seat:
    """The state of one CompNode in a pass, which the attention function looks up."""

    host: CompHost
    work: Pass
    comp: CompWorker
    carrier: Carrier
    seen: Seen | None
    step: int = 0
    away: float = 0.0
    owed: Head | None = None

    def attend(self, layer: int | None, q: Tensor, k: Tensor, v: Tensor, attention: Attention) -> Tensor:
        layer = self.step if layer is None else layer
        times, started = self.host.times, time.perf_counter()
        work = self.work if self.step == 0 else None
        head = Head(self.work.request, self.work.number, self.step, layer, attention, work)
        self.step += 1
        self.host.ticks += 1
        self.host.layers[head.request] = layer + 1
        wire = self.host.wire
        for node, rows in self.comp.rows(q[0], k[0], v[0]).items():
            self.carrier.post(node, head, rows.to(None, wire))
        sent = time.perf_counter()
        self.finish()
        self.owed = head
        answers = {m.attn: self.carrier.collect(m.attn, head) for m in self.comp.messages if m.answers}
        if self.seen is not None:
            record_partials(self.seen, self.work.plan, self.comp, layer, answers)
        waited = time.perf_counter()
        attended = self.comp.merge(answers).to(q).transpose(0, 1)[None]
        merged = time.perf_counter()
        times.send += sent - started
        times.wait += waited - sent
        times.merge += merged - waited
        self.away += merged - started
        return attended

    def finish(self) -> None:
        """Take the receipts of nodes that only store what they were sent, one layer late, so that nobody waits."""
        if self.owed is not None:
            for message in self.comp.messages:
                if not message.answers:
                    self.carrier.collect(message.attn, self.owed)
            self.owed = None


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


Reply = Callable[[list[Partial] | Exception], None]


@dataclass
class _Open:
    """The state of a request at an AttnNode."""

    worker: AttnWorker
    plan: Plan
    number: int = -1
    arrived: dict[tuple[int, int], dict[int, tuple[Rows, Reply]]] = field(default_factory=dict)
    seen: Seen | None = None


class AttnHost:
    """An AttnNode: keeps the rows of each request, and answers once all rows of a layer have arrived.

    The thread that brings the last rows computes.

    Args:
        node: which AttnNode.
        compress: answer with one logsumexp per row.
        wire: dtype of numbers on the wire.
        record: keep everything received, see ``seen``.
        device: where it computes; None is where the rows are.
    """

    def __init__(
        self,
        node: AttnNode,
        *,
        compress: bool = False,
        wire: torch.dtype | None = None,
        record: bool = False,
        device: str | None = None,
    ) -> None:
        self.node, self.compress, self.wire, self.record = node, compress, wire, record
        self.name = attn_name(node)
        self.device = device
        self.counters = Counters()
        self.ticks = 0  # grows with every message received and every layer computed
        self.seen: list[Seen] = []
        self._open: dict[str, _Open] = {}
        self._closed: dict[str, None] = {}
        self._lock = threading.Lock()

    def receive(self, comp: int, head: Head, rows: Rows, reply: Reply) -> None:
        """Take a CompNode's rows; once all have sent, call ``reply`` for every CompNode that asked."""
        with self._lock:
            self.ticks += 1
            closed = head.request in self._closed
            state = None if closed else self._request(head)
            arrived = {} if state is None else self._arrived(state, comp, head, rows, reply)
        if closed:
            reply(NodeError(GIVEN_UP))
            return
        if state is None:
            # Without the earlier rows, the answer would be wrong but look right.
            text = f"{self.name} was started anew and does not know the earlier tokens of this request"
            reply(NodeError(text, self.name, forgot=True))
            return
        if not arrived:
            return
        try:
            answers = self._attend(state, head, arrived)
        except Exception as error:
            # Every waiting CompNode gets the error; the node itself continues.
            for _, answer in arrived.values():
                answer(NodeError(f"{self.name} failed in layer {head.layer + 1}: {error}", self.name))
            return
        for sender, (_, answer) in arrived.items():
            # A CompNode without queries gets a receipt, since no further pass may begin before this one is done.
            self.ticks += 1
            parts = answers[sender] if state.worker.messages[sender].answers else []
            if self.wire is not None:
                parts = [Partial.of([t.to(self.wire) for t in part.tensors]) for part in parts]
            self.counters.elements_out += sum(part.elements for part in parts)
            answer(parts)

    def _arrived(
        self, state: _Open, comp: int, head: Head, rows: Rows, reply: Reply
    ) -> dict[int, tuple[Rows, Reply]]:
        """Keep a CompNode's rows; return all CompNodes' rows if these were the last, else none.

        The caller has to hold the lock.
        """
        arrived = state.arrived.setdefault((head.number, head.step), {})
        arrived[comp] = (rows, reply)
        self.counters.elements_in += rows.elements
        if len(arrived) < len(state.worker.messages):
            return {}
        del state.arrived[head.number, head.step]
        if head.step == 0:
            worked = any(message.answers for message in state.worker.messages.values())
            self.counters.passes += worked
            self.counters.stored += not worked
        return arrived

    def _attend(
        self, state: _Open, head: Head, arrived: Mapping[int, tuple[Rows, Reply]]
    ) -> dict[int, list[Partial]]:
        with torch.inference_mode():
            taken = {sender: sent.to(self.device) for sender, (sent, _) in arrived.items()}
            if state.seen is not None:
                record_attn(state.seen, state.worker.messages, head.layer, taken)
            return state.worker.run(head.layer, taken, head.attention)

    def _request(self, head: Head) -> _Open | None:
        """Return the request of a message and begin its pass; None where earlier rows are missing."""
        state = self._open.get(head.request)
        if head.work is not None and (state is None or head.number > state.number):
            work = head.work
            if state is None:
                shards = [work.plan.splits[block.keys] for block in work.plan.blocks(self.node)]
                if any(shard and shard[0] < work.since for shard in shards):
                    return None
                worker = AttnWorker(self.node, compress=self.compress, keep=work.keep)
                state = self._open[head.request] = _Open(worker, work.plan)
                if self.record:
                    state.seen = Seen(self.name, work.request)
                    self.seen.append(state.seen)
            state.plan, state.number = work.plan, head.number
            state.worker.begin(work.plan, work.since, work.hidden)
        return state

    def plan(self, request: str) -> Plan | None:
        """Return the plan of a request's last pass; None where nothing of it arrived."""
        state = self._open.get(request)
        return None if state is None else state.plan

    def waiting(self, request: str) -> dict[str, Any] | None:
        """Return the oldest layer of which a request misses rows: ``step`` and ``missing`` CompNodes; None if none."""
        with self._lock:
            state = self._open.get(request)
            if state is None or not state.arrived:
                return None
            (_, step), arrived = min(state.arrived.items())
            return {"step": step, "missing": sorted(set(state.worker.messages) - set(arrived))}

    def close(self, request: str) -> None:
        """Forget a request; answer whoever waits for it, or still asks, that it was given up."""
        with self._lock:
            state = self._open.pop(request, None)
            self._closed[request] = None
            while len(self._closed) > 4096:
                del self._closed[next(iter(self._closed))]
            waiting = (
                []
                if state is None
                else [reply for arrived in state.arrived.values() for _, reply in arrived.values()]
            )
            if state is not None:
                state.arrived.clear()
        for reply in waiting:
            reply(NodeError(GIVEN_UP))


def attn_name(node: AttnNode) -> str:
    """Return the name of an AttnNode in messages, errors and counters."""
    return f"AttnNode ({node.queries}, {node.keys})"


def register_cascade_attention() -> None:
    """Register the attention function through which CompNodes post their rows."""
    register_attention(
        ATTENTION_NAME, _ACTIVE, "a Cascade model is run through its backend, not by calling it"
    )
