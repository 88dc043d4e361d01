"""Run a model whose linear maps two nodes compute on additive shares; the client does all else (``--harden shares``).

The client runs the plain model. In place of each linear map of its layers stands a question to the nodes: he writes the
rows as integers x, draws a random mask r, and sends r to one node (as a seed) and x - r to the other. Each multiplies
what it got with the weights, and the two answers add to x times the weights, modulo 2^64. A node by itself gets numbers
that are random whatever x is. Row sizes, biases, attention, norms and the head stay with the client.
"""

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hiddenlab.defenses.cascade.backend import Cascade, ModelFacts
from hiddenlab.defenses.cascade.client_layers import CLIENT
from hiddenlab.defenses.cascade.comp_host import first_position, has_head
from hiddenlab.defenses.cascade.cost import Round
from hiddenlab.defenses.cascade.fixed_point import SEED_BYTES, decoded, encoded, mask_of, powers_of
from hiddenlab.defenses.cascade.hardening import SHARE_NODES
from hiddenlab.defenses.cascade.load import first_difference
from hiddenlab.defenses.cascade.node_state import GIVEN_UP, NodeError
from hiddenlab.defenses.cascade.node_views import Seen
from hiddenlab.defenses.cascade.passes import Pass
from hiddenlab.defenses.cascade.share_nodes import LocalPeer, Peer, ShareNode, matrices_of
from hiddenlab.defenses.cascade.share_rounds import rounds_of, weight_of
from hiddenlab.errors import HiddenlabError, InputError
from hiddenlab.models.attention import EAGER
from hiddenlab.models.checkpoint import decoder_layers, replaced
from hiddenlab.models.choice import CODE, Verdict, facts_of, remembered
from hiddenlab.models.load import empty_model, load_config, load_module, resolve_model
from hiddenlab.models.self_check import TWIN_TOLERANCE
from hiddenlab.models.twin import LENGTHS, TRAINED_POSITIONS, build_twin
from hiddenlab.text import first_line

_RUN: ContextVar["_Run | None"] = ContextVar("hiddenlab_shares", default=None)


class OnShares(nn.Module):
    """A linear map that the nodes compute; the client adds its bias."""

    def __init__(self, name: str, bias: Tensor | None) -> None:
        super().__init__()
        self.name, self.bias = name, bias

    def forward(self, x: Float[Tensor, "*n i"]) -> Float[Tensor, "*n o"]:
        run = _RUN.get()
        if run is None:
            raise RuntimeError("a model on shares is run through its backend, not by calling it")
        output = run.product(self.name, x)
        return output if self.bias is None else output + self.bias


@dataclass
class _Request:
    """What the client keeps of a request: transformers' cache of keys and values."""

    cache: Any
    closed: bool = False


@dataclass
class _Run:
    """One pass."""

    cascade: "SharedLinear"
    request: _Request
    ready: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def product(self, name: str, x: Tensor) -> Tensor:
        """Return the rows times a map's weights; the first map of a round asks for all of them."""
        if name not in self.ready:
            self.ready |= {other: (x, output) for other, output in self.cascade.ask(name, x, self.request)}
        given, output = self.ready.pop(name)
        if given is not x:
            raise HiddenlabError(f"the layer {name} got other rows than the layers that it is asked with")
        return output


class SharedLinear(Cascade):
    """A model whose linear maps nodes compute on shares.

    Args:
        model: the whole model; its linear maps are left out.
        name: of the model.
        rounds: of the model.
        peers: the two nodes.
        timeout: seconds to wait for an answer; None waits for ever.
        draw: draws the seed of a mask, 32 bytes that nobody else may know.
    """

    def __init__(
        self,
        model: nn.Module,
        name: str,
        rounds: Sequence[Round],
        peers: Sequence[Peer],
        *,
        timeout: float | None = None,
        draw: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self.facts, self.peers, self.timeout = ModelFacts.of(name, model), tuple(peers), timeout
        self._rounds, self._draw = {one.names[0]: (i, one) for i, one in enumerate(rounds)}, draw
        layers = decoder_layers(model)
        self._powers: dict[str, Tensor] = {}
        for one in rounds:
            for path in one.names:
                module = layers.get_submodule(path)
                self._powers[path] = powers_of(weight_of(module))
                layers = replaced(layers, path.split("."), OnShares(path, module.bias))  # type: ignore[assignment, arg-type]
        where = next(path for path, part in model.named_modules() if part is decoder_layers(model))
        self._model: Any = replaced(model, where.split("."), layers)
        self._requests: dict[str, _Request] = {}
        self._lock, self._compute, self._wait = threading.Lock(), 0.0, 0.0

    def step(self, work: Pass, tokens: Tensor) -> Float[Tensor, "n width"]:
        self._check(work, tokens)
        request = self._request_of(work)
        started, token = time.perf_counter(), _RUN.set(_Run(self, request))
        try:
            with torch.inference_mode():
                return self._forward(work, tokens, request)
        finally:
            _RUN.reset(token)
            with self._lock:
                self._compute += time.perf_counter() - started

    def _request_of(self, work: Pass) -> _Request:
        """Return what is kept of a request, and keep it from its first pass on.

        Raises:
            NodeError: it was closed.
        """
        from transformers import DynamicCache

        with self._lock:
            if not work.since:
                self._requests[work.request] = _Request(
                    DynamicCache(config=self._model.config) if work.keep else None
                )
            request = self._requests.get(work.request)
        if request is None or (work.since and request.cache.get_seq_length() != work.since):
            raise NodeError(GIVEN_UP)
        return request

    def _forward(self, work: Pass, tokens: Tensor, request: _Request) -> Tensor:
        positions = torch.arange(work.since, work.plan.tokens)[None] + first_position(self._model)
        options: dict[str, Any] = {"position_ids": positions}
        options["inputs_embeds" if tokens.is_floating_point() else "input_ids"] = tokens.cpu()[None]
        if request.cache is not None:
            options |= {"past_key_values": request.cache, "use_cache": True}
        elif getattr(self._model.config, "use_cache", False):
            options["use_cache"] = False
        if work.hidden:
            seen = torch.ones(1, work.plan.tokens, dtype=torch.long)
            seen[0, list(work.hidden)] = 0
            options["attention_mask"] = seen
        if has_head(self._model):
            return self._model(**options, **({"logits_to_keep": 1} if work.last else {})).logits[0]  # type: ignore[no-any-return]
        states = self._model(**options).last_hidden_state[0]
        return states[-1:] if work.last else states  # type: ignore[no-any-return]

    def ask(self, name: str, x: Float[Tensor, "*n i"], request: _Request) -> list[tuple[str, Tensor]]:
        """Let the nodes compute the round that begins with a map; return the outputs of its maps by their names.

        Raises:
            NodeError: the states are not finite, a node does not answer, or the request was closed.
        """
        number, asked = self._rounds[name]
        rows, where = x.reshape(-1, x.shape[-1]), f"in layer {asked.layer + 1}"
        if not bool(rows.isfinite().all()):
            raise NodeError(f"the states {where} are not finite")
        whole, step = encoded(rows)
        seed = torch.frombuffer(bytearray(self._draw(SEED_BYTES)), dtype=torch.uint8)
        given = (seed, whole - mask_of(seed, *whole.shape))
        started = time.perf_counter()
        answers = [peer.ask(number, len(rows), share) for peer, share in zip(self.peers, given, strict=True)]
        parts = [self._taken(peer, answer, where) for peer, answer in zip(self.peers, answers, strict=True)]
        with self._lock:
            waited = time.perf_counter() - started
            self._wait, self._compute = self._wait + waited, self._compute - waited
        if request.closed:
            raise NodeError(GIVEN_UP)
        if any(part.shape != (len(rows), sum(asked.outs)) for part in parts):
            raise NodeError(f"a node sent other rows than asked for {where}")
        total = (parts[0] + parts[1]).split(asked.outs, 1)
        return [
            (path, decoded(part, step, self._powers[path]).to(x.dtype).view(*x.shape[:-1], -1))
            for path, part in zip(asked.names, total, strict=True)
        ]

    def _taken(self, peer: Peer, answer: "Future[Tensor]", where: str) -> Tensor:
        try:
            return answer.result(self.timeout)
        except TimeoutError:
            raise NodeError(
                f"{peer.name} stalled {where} (no answer for {self.timeout:g} s)", peer.name
            ) from None
        except Exception as error:  # of whatever carries messages
            raise NodeError(f"{peer.name} failed {where}: {first_line(error)}", peer.name) from None

    def close(self, request: str) -> None:
        with self._lock:
            if (known := self._requests.pop(request, None)) is not None:
                known.closed = True

    def counters(self) -> dict[str, dict[str, Any]]:
        own = {"compute": self._compute, "wait": self._wait}
        return {CLIENT: own} | {peer.name: peer.counters() for peer in self.peers}

    def seen(self) -> list[Seen]:
        return []

    def healthy(self) -> dict[str, str]:
        return {peer.name: peer.healthy() for peer in self.peers}

    def shutdown(self) -> None:
        for peer in self.peers:
            peer.close()


def load_client(model: str, dtype: torch.dtype) -> tuple[nn.Module, tuple[Round, ...]]:
    """Load the client's model, with its head where it has one, and return it with its rounds.

    Once for each configuration a small random copy is compared with its own forward pass.

    Raises:
        InputError: the model is unknown, or cannot be computed on shares.
    """
    ref = resolve_model(model)
    config = load_config(ref)
    rounds = rounds_of(empty_model(ref, config), model)
    head = any("CausalLM" in kind or "LMHead" in kind for kind in config.architectures or ())
    facts, code = {"config": facts_of(config), "head": head}, (*CODE, Path(__file__).parent)
    verdict = remembered("cascade-shares", facts, Verdict, lambda: _on_shares(config, head), code)
    if verdict.difference:
        raise InputError(f"{model} cannot be computed on shares: {verdict.difference}")
    module = load_module(ref, config, head=head, dtype=dtype, device=torch.device("cpu"), attention=EAGER)
    return module, rounds


def local_shares(
    model: nn.Module,
    name: str,
    rounds: Sequence[Round],
    peer: Callable[[ShareNode], Peer] = LocalPeer,
    *,
    device: str = "cpu",
    **options: Any,
) -> SharedLinear:
    """Run a loaded model with both nodes in this process; they share one copy of the weights.

    Args:
        model, rounds: see ``load_client``. peer: makes a node reachable. device: of the nodes.
        options: of ``SharedLinear``.

    Raises:
        InputError: the device is unknown, or a weight is not finite.
    """
    matrices = matrices_of(decoder_layers(model), rounds, device)
    peers = [peer(ShareNode(i, rounds, matrices)) for i in range(SHARE_NODES)]
    return SharedLinear(model, name, rounds, peers, **options)


def _on_shares(config: Any, head: bool) -> Verdict:
    try:
        twin: Any = build_twin(config, head=head)
        with torch.device("meta"):
            empty = type(twin)._from_config(twin.config)
        cascade = local_shares(twin, "twin", rounds_of(empty, "a small random copy"))
    except InputError as error:
        return Verdict(difference=str(error))
    n = max(LENGTHS)
    with cascade:
        found = first_difference(cascade, twin, n, n - TRAINED_POSITIONS + 2, TWIN_TOLERANCE)
    return Verdict(difference=f"a small random copy gives something else so ({found})" if found else "")
