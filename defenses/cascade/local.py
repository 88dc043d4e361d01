"""Cascade in one process: every CompNode a thread with its own tokens, AttnNodes run where all have arrived.

The oracle of other backends, and what the tests compare with the plain model. All threads share one copy of the
weights; each runs the model's own forward on its tokens at their own positions, and meets the others only in the
attention function (docs/architecture.md).
"""

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from defenses.cascade.nodes import AttnWorker, CompWorker, Partial, Rows
from defenses.cascade.plan import AttnNode, Plan
from hiddenlab.errors import InputError
from hiddenlab.slice.door import Attention, open_door
from hiddenlab.slice.load import load_config, load_model, resolve_model

ATTENTION_NAME = "hiddenlab-cascade"

_ACTIVE: ContextVar["_Seat | None"] = ContextVar("hiddenlab_cascade", default=None)


@dataclass
class Traffic:
    """What went over the wire, in numbers (elements), and what each AttnNode received.

    Attributes:
        to_attn, to_comp: elements sent in stages A and B. received: for each AttnNode, the positions of the query
            rows and of the key and value rows, by layer.
    """

    to_attn: int = 0
    to_comp: int = 0
    received: dict[AttnNode, list[tuple[tuple[int, ...], tuple[int, ...]]]] = field(default_factory=dict)


class _Meeting:
    """Where the CompNodes of one forward pass meet once a layer."""

    def __init__(self, plan: Plan, compress: bool) -> None:
        self.attn = {node: AttnWorker(plan, node, compress=compress) for node in plan.attn_nodes}
        self.attn = {node: worker for node, worker in self.attn.items() if worker.messages}
        self.comps = [CompWorker(plan, i) for i, shard in enumerate(plan.shards) if shard]
        self.traffic = Traffic()
        self._sent: dict[int, Mapping[AttnNode, Rows]] = {}
        self._answers: dict[AttnNode, dict[int, list[Partial]]] = {}
        self._attention: Attention | None = None
        self.barrier = threading.Barrier(len(self.comps), action=self._attend)

    def exchange(
        self, comp: CompWorker, rows: Mapping[AttnNode, Rows], attention: Attention
    ) -> dict[AttnNode, list[Partial]]:
        """Send one CompNode's rows, wait for the others', and take the answers."""
        self._sent[comp.index] = rows
        self._attention = attention
        self.barrier.wait()
        # Nobody can overwrite the answers before all have come back for the next layer.
        return {message.attn: self._answers[message.attn][comp.index] for message in comp.messages}

    def _attend(self) -> None:
        assert self._attention is not None
        # The action runs in the thread that came last, outside of that thread's inference mode.
        with torch.inference_mode():
            for node, worker in self.attn.items():
                rows = {comp: self._sent[comp][node] for comp in worker.messages}
                self._answers[node] = worker.run(rows, self._attention)
                self._count(node, worker, rows)

    def _count(self, node: AttnNode, worker: AttnWorker, rows: Mapping[int, Rows]) -> None:
        traffic = self.traffic
        traffic.to_attn += sum(one.elements for one in rows.values())
        traffic.to_comp += sum(part.elements for parts in self._answers[node].values() for part in parts)
        messages = worker.messages.values()
        queries = tuple(sorted(p for message in messages for p in message.queries))
        keys = tuple(sorted(p for message in messages for p in message.keys))
        traffic.received.setdefault(node, []).append((queries, keys))


@dataclass
class _Seat:
    """One CompNode's place in a forward pass, found by the attention function."""

    meeting: _Meeting
    comp: CompWorker

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, attention: Attention) -> Tensor:
        answers = self.meeting.exchange(self.comp, self.comp.rows(q[0], k[0], v[0]), attention)
        return self.comp.merge(answers).transpose(0, 1)[None]


class LocalCascade:
    """A model run by the nodes of a plan, in one process.

    Args:
        model: loaded with ``attn_implementation="hiddenlab-cascade"``, see ``load_cascade_model``.
        compress: AttnNodes send one logsumexp a row in place of the paper's maximum and sum.
    """

    def __init__(self, model: nn.Module, *, compress: bool = False) -> None:
        self.model, self.compress = model, compress
        self.traffic = Traffic()

    @property
    def has_head(self) -> bool:
        """The model gives logits, not only hidden states."""
        return self.model.get_output_embeddings() is not None  # type: ignore[operator]

    def forward(self, tokens: Int[Tensor, " n"], plan: Plan) -> Float[Tensor, "n width"]:
        """Logits of a causal LM, or the last hidden states of a model without a head, for every token.

        ``traffic`` then holds what this pass sent.

        Raises:
            InputError: the plan is for another number of tokens, or the prompt longer than the model's context.
        """
        if len(tokens) != plan.tokens:
            raise InputError(f"the plan is for {plan.tokens} tokens, the prompt has {len(tokens)}")
        limit = getattr(self.model.config, "max_position_embeddings", None)
        if limit is not None and len(tokens) > limit:
            raise InputError(f"the prompt has {len(tokens)} tokens; the model's context holds {limit}")
        meeting = _Meeting(plan, self.compress)

        def run(comp: CompWorker) -> Tensor:
            token = _ACTIVE.set(_Seat(meeting, comp))
            try:
                return self._run(tokens, comp)
            except BaseException:
                # The others would wait for ever.
                meeting.barrier.abort()
                raise
            finally:
                _ACTIVE.reset(token)

        if len(meeting.comps) == 1:
            parts = [run(meeting.comps[0])]
        else:
            with ThreadPoolExecutor(len(meeting.comps)) as pool:
                futures = [pool.submit(run, comp) for comp in meeting.comps]
            errors = [error for future in futures if (error := future.exception()) is not None]
            # A thread that only waited in vain says nothing of the cause.
            for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
                raise error
            parts = [future.result() for future in futures]
        self.traffic = meeting.traffic
        out = parts[0].new_empty(len(tokens), parts[0].shape[1])
        for comp, part in zip(meeting.comps, parts, strict=True):
            out[list(comp.positions)] = part
        return out

    def _run(self, tokens: Tensor, comp: CompWorker) -> Tensor:
        positions = torch.tensor([comp.positions], device=tokens.device)
        # A thread starts outside of the caller's inference mode.
        with torch.inference_mode():
            output = self.model(
                input_ids=tokens[positions[0]][None], position_ids=positions, **self._options()
            )
        states = output.logits if hasattr(output, "logits") else output.last_hidden_state
        return states[0]  # type: ignore[no-any-return]

    def _options(self) -> dict[str, bool]:
        return {"use_cache": False} if getattr(self.model.config, "use_cache", False) else {}


def load_cascade_model(
    name: str, *, dtype: torch.dtype = torch.float32, device: str = "cpu", attention: str = ATTENTION_NAME
) -> nn.Module:
    """A model for ``LocalCascade``: a causal LM with its head, any other model without one.

    Args:
        attention: one of transformers' own gives the plain model, to compare with.

    Raises:
        InputError: the model is unknown.
    """
    open_door(ATTENTION_NAME, _ACTIVE, "a Cascade model is run through its backend, not by calling it")
    ref = resolve_model(name)
    config = load_config(ref)
    head = any("CausalLM" in kind or "LMHead" in kind for kind in config.architectures or ())
    return load_model(ref, config, head=head, dtype=dtype, device=torch.device(device), attention=attention)
