"""Keep a CompNode's state between messages, for every backend.

In a batch a CompNode runs the model's own forward on its new tokens, of all passes at once. In each layer's attention
it posts its rows to AttnNodes and collects their answers.
"""

import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hiddenlab.defenses.cascade.masked_sums import Masked, references
from hiddenlab.defenses.cascade.node_state import Carrier, Head, NodeError, all_finite, attn_name
from hiddenlab.defenses.cascade.node_views import Seen, record_layers, record_merged, record_partials
from hiddenlab.defenses.cascade.nodes import Answer, CompWorker, Partial
from hiddenlab.defenses.cascade.passes import Batch
from hiddenlab.defenses.cascade.secret_maps import LayerMaps, Secret, SecretMaps
from hiddenlab.errors import HiddenlabError, InputError
from hiddenlab.models.attention import Attention, register_attention
from hiddenlab.sharding import AttnNode

ATTENTION_NAME = "hiddenlab-cascade"
UNSEEN = "it attends by code of its own, not by transformers' attention functions, so that nothing can be sent apart"

_ACTIVE: ContextVar["_Seat | None"] = ContextVar("hiddenlab_cascade", default=None)


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
    """A CompNode: the model's weights, and the batches that run on them.

    Args:
        model: see ``load_cascade_model``.
        index: of the CompNode.
        wire: dtype of numbers on the wire; None leaves them as they are.
        secret: of the maps under which AttnNodes get rows; None sends rows as they are.
        slack: see ``Settings``.

    Attributes:
        ticks: grows with every layer of every batch.
        layers: the layer in which each running batch is, from 1.
    """

    def __init__(
        self,
        model: nn.Module,
        index: int,
        *,
        wire: torch.dtype | None = None,
        secret: Secret | None = None,
        slack: float | None = None,
    ) -> None:
        self.model, self.index, self.wire, self.slack = model, index, wire, slack
        self.maps = None if secret is None else SecretMaps(secret)
        self.times = Times()
        self.ticks = 0
        self.layers: dict[str, int] = {}

    def run(
        self,
        batch: Batch,
        inputs: Int[Tensor, " n"] | Float[Tensor, "n d"],
        carrier: Carrier,
        seen: Seen | None = None,
    ) -> Float[Tensor, "rows width"]:
        """Return logits (last hidden states where the model has no head) of the rows that the batch's passes want.

        Args:
            batch: of which this node holds new tokens.
            inputs: ids or embeddings of its new tokens, in the order of the passes.
            carrier: of its messages.
            seen: what it saw, of a batch of one pass.

        Raises:
            NodeError: an answer does not come.
        """
        comp = CompWorker(batch.passes, self.index)
        seat = _Seat(self, batch, comp, carrier, seen)
        token = _ACTIVE.set(seat)
        started = time.perf_counter()
        try:
            # A new thread does not inherit the caller's inference mode.
            with (
                torch.inference_mode(),
                record_layers(seen, self.model, tuple(comp.positions), lambda: _ACTIVE.get() is seat),
            ):
                output = self._forward(batch, comp, inputs)
                if not seat.step:
                    raise HiddenlabError(UNSEEN)
                seat.finish()
                return output
        finally:
            _ACTIVE.reset(token)
            self.layers.pop(batch.name, None)
            self.times.compute += time.perf_counter() - started - seat.away

    def _forward(self, batch: Batch, comp: CompWorker, inputs: Tensor) -> Tensor:
        device = self.model.get_input_embeddings().weight.device  # type: ignore[operator]
        positions = torch.tensor([comp.positions], device=device) + first_position(self.model)
        options: dict[str, Any] = {"position_ids": positions}
        options["inputs_embeds" if inputs.is_floating_point() else "input_ids"] = inputs.to(device)[None]
        if getattr(self.model.config, "use_cache", False):
            options["use_cache"] = False
        wanted, at = [], 0
        for _, work in batch.at(self.index):
            wanted += [at + row for row in work.wanted(self.index)]
            at += len(work.new(self.index))
        if wanted == list(range(at)):
            output = self.model(**options)
            return output.logits[0] if has_head(self.model) else output.last_hidden_state[0]
        index = torch.tensor(wanted, dtype=torch.long, device=device)
        if not wanted or not has_head(self.model):
            # Skip the head where its output is not wanted. The last layer runs, because others need its keys.
            states = self.model.base_model(**options).last_hidden_state  # type: ignore[operator, union-attr]
            return states[0, index]
        return self.model(**options, logits_to_keep=index).logits[0]


def _sound(part: Answer) -> bool:
    """Return whether an answer can be merged; a maximum (or logsumexp) of -inf says that a row sees no key."""
    if isinstance(part, Masked):
        return True
    totals = part.total is None or all_finite(part.total)
    return (
        totals
        and all_finite(part.output)
        and not bool((part.maximum.isnan() | part.maximum.isposinf()).any())
    )


def is_causal(model: nn.Module) -> bool:
    """Return whether no token sees a later one, by what the parts that attend say of themselves."""
    return all(getattr(part, "is_causal", True) for part in model.modules())


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
    """The state of one CompNode in a batch, which the attention function looks up."""

    host: CompHost
    batch: Batch
    comp: CompWorker
    carrier: Carrier
    seen: Seen | None
    step: int = 0
    away: float = 0.0
    owed: Head | None = None

    def attend(self, layer: int | None, q: Tensor, k: Tensor, v: Tensor, attention: Attention) -> Tensor:
        layer = self.step if layer is None else layer
        if not attention.causal and any(work.plan.causal for work in self.batch.passes):
            raise InputError(
                f"tokens see later ones in layer {layer + 1}; the plan needs causal=False, so that no block is left out"
            )
        times, started = self.host.times, time.perf_counter()
        passes = self.batch.passes if self.step == 0 else None
        head = Head(self.batch.name, self.step, layer, attention, passes)
        self.step += 1
        self.host.ticks += 1
        self.host.layers[head.batch] = layer + 1
        wire, maps = self.host.wire, self._maps(layer, k[0], v[0])
        self.finish()
        ready = time.perf_counter()
        own = (q[0], k[0], v[0]) if maps is None else maps.hidden(q[0], k[0], v[0])
        slack = self.host.slack
        bounds = None if slack is None else references(q[0], k[0], attention, slack)
        for node, rows in self.comp.rows(*own, bounds).items():
            self.carrier.post(node, head, rows.to(None, wire))
        sent = time.perf_counter()
        self.owed = head
        answers = {
            node: self.carrier.collect(node, head) for node, answers in self.comp.messages.items() if answers
        }
        waited = time.perf_counter()
        output = self._merged(answers, layer)
        if maps is not None:
            output = maps.restored(output)
        if self.seen is not None and slack is not None:
            record_merged(self.seen, self.comp.positions, layer, output)
        elif self.seen is not None:
            record_partials(self.seen, self.batch.passes[0], self.comp.positions, layer, answers, maps)
        attended = output.to(q).transpose(0, 1)[None]
        merged = time.perf_counter()
        times.send += sent - ready
        times.wait += ready - started + waited - sent
        times.merge += merged - waited
        self.away += merged - started
        return attended

    def _maps(self, layer: int, keys: Tensor, values: Tensor) -> LayerMaps | None:
        """Return the secret maps of the layer; None where rows are sent as they are."""
        if self.host.maps is None:
            return None
        works = [work for _, work in self.batch.at(self.host.index)]
        return LayerMaps(
            [self.host.maps.of(work.request, layer, keys, values) for work in works],
            [len(work.new(self.host.index)) for work in works],
        )

    def _merged(self, answers: Mapping[AttnNode, list[Answer]], layer: int) -> Tensor:
        """Merge the answers.

        Raises:
            NodeError: a node answered in another shape, or with numbers that are not finite.
        """
        form = Partial if self.host.slack is None else Masked
        for node, parts in answers.items():
            if not all(isinstance(part, form) for part in parts):
                raise NodeError(f"{attn_name(node)} answers in another form than asked for", attn_name(node))
            if [part.count for part in parts] != self.comp.answers[node]:
                raise NodeError(
                    f"{attn_name(node)} sent other rows than asked for in layer {layer + 1}", attn_name(node)
                )
        merged = self.comp.merge(answers)
        if not all_finite(merged):
            # Each check takes time, so who sent what is not finite is looked for only now.
            for node, parts in answers.items():
                if not all(map(_sound, parts)):
                    raise NodeError(
                        f"{attn_name(node)} sent numbers that are not finite in layer {layer + 1}",
                        attn_name(node),
                    )
            raise NodeError(f"the attention of layer {layer + 1} is not finite")
        return merged

    def finish(self) -> None:
        """Take the receipts of nodes that were not asked, one layer late, so that nobody waits.

        It comes before the next layer's rows are sent, which some carriers could else bring first.
        """
        if self.owed is not None:
            for node, answers in self.comp.messages.items():
                if not answers:
                    self.carrier.collect(node, self.owed)
            self.owed = None


def register_cascade_attention() -> None:
    """Register the attention function through which CompNodes post their rows."""
    register_attention(
        ATTENTION_NAME, _ACTIVE, "a Cascade model is run through its backend, not by calling it"
    )
