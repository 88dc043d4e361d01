"""Plan which node would hold which tokens, at which cost, and run a model that way: ``hiddenlab cascade``."""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hiddenlab.defenses.cascade.cost import STATISTICS, Link, Shape, layer_bytes, layer_seconds, rounds
from hiddenlab.errors import InputError
from hiddenlab.sharding import Plan, gaps, recoverable, smallest_gap
from hiddenlab.types import Progress, silent

if TYPE_CHECKING:
    from hiddenlab.defenses.cascade.backend import Cascade


def plan(
    tokens: int,
    alpha: int | None = None,
    c: int = 1,
    delta: int | None = None,
    m: int = 1,
    shards: str | None = None,
    symmetric: bool = False,
    rho: int = 3,
    model: str = "builtin",
    element_bytes: int = 2,
    bandwidth: float = 2.5e8,
    latency: float = 0.38e-3,
) -> dict[str, Any]:
    """Make a plan and compute its security and cost figures.

    Args:
        tokens: length of the prompt.
        shards: positions written by hand, ``0,1,4;2,3,5``, in place of (c, δ)-sharding.
        rho: threshold of vocabulary matching in Theorem 7.3.
        model: gives the shape for the cost.
        element_bytes: bytes of a number on the wire.
        bandwidth: bytes per second.
        latency: seconds, one way.
        alpha, c, delta, m, symmetric: see ``Plan.clustered``.

    Returns:
        ``plan`` (settings and node counts), ``rows`` (one per CompNode), ``attn`` (over all AttnNodes), ``holders``
        (the CompNode of each token), ``violations`` of Theorem 7.3 and ``cost``.

    Raises:
        InputError: the plan does not exist, or the model is unknown.
    """
    from hiddenlab.models.load import load_config, resolve_model

    if rho < 1 or element_bytes < 1:
        raise InputError("rho and the bytes of an element must be at least 1")
    link = Link(bandwidth, latency)
    made = make_plan(tokens, alpha, c, delta, m, shards, symmetric)
    shape = Shape.of(load_config(resolve_model(model)), element_bytes)
    held = [made.held_by(node) for node in made.attn_nodes]
    closest = [gap for gap in map(smallest_gap, held) if gap is not None]
    cost: dict[str, Any] = {"layers": shape.layers, "messages_per_layer": rounds(made)}
    for mode in STATISTICS:
        cost[f"bytes_per_layer_{mode}"] = layer_bytes(made, shape, mode)
        cost[f"bytes_{mode}"] = shape.layers * layer_bytes(made, shape, mode)
    cost["seconds_per_layer"] = layer_seconds(made, shape, link)
    cost["seconds"] = shape.layers * layer_seconds(made, shape, link)
    owner = {position: i for i, shard in enumerate(made.shards) for position in shard}
    return {
        "plan": {
            "tokens": tokens,
            "alpha": made.alpha,
            "beta": made.beta,
            "m": m,
            "symmetric": symmetric,
            "comp_nodes": made.alpha,
            "attn_nodes": len(made.attn_nodes),
            "rho": rho,
            "model": model,
        },
        "rows": [
            {
                "node": f"CompNode {i}",
                "tokens": len(shard),
                "clusters": len(gaps(shard)) + bool(shard),
                "smallest_gap": smallest_gap(shard),
                "recoverable_tokens": recoverable(shard, rho),
            }
            for i, shard in enumerate(made.shards)
        ],
        "attn": {
            "most_tokens": max(map(len, held)),
            "smallest_gap": min(closest, default=None),
            "most_recoverable_tokens": max(recoverable(positions, rho) for positions in held),
        },
        "holders": [owner[position] for position in range(made.tokens)],
        "violations": made.violations(rho),
        "cost": cost,
    }


@dataclass(frozen=True)
class Backend:
    """Where the nodes run, and how; see ``RayCascade``.

    Attributes:
        kind: ``local`` (threads of this process), ``wire`` (the same, with TCP between them) or ``ray``.
        model, dtype, device: of the CompNodes.
        compress, wire, record: see ``backend.Settings``.
        bandwidth, latency: of a simulated network, in bytes per second and seconds.
    The others are those of ``RayCascade``.
    """

    kind: str = "local"
    model: str = "builtin"
    dtype: str = "float32"
    device: str = "cpu"
    compress: bool = False
    wire: str | None = None
    record: bool = False
    address: str | None = None
    transport: str = "tcp"
    timeout: float = 60.0
    restarts: int = 0
    threads: int = 1
    cpus: float = 1.0
    gpus: float = 0.0
    bandwidth: float | None = None
    latency: float = 0.0
    strategy: str = "SPREAD"
    loopback: bool | None = None
    concurrent: int = 16

    def link(self) -> Link | None:
        """Return the simulated network, or None."""
        return None if self.bandwidth is None else Link(self.bandwidth, self.latency)

    def start(self, alpha: int, m: int, symmetric: bool, progress: Progress = silent) -> "Cascade":
        """Start the nodes of α CompNodes and β = mα key shards.

        Raises:
            InputError: the backend does not have an option, or see ``RayCascade``.
        """
        from hiddenlab.defenses.cascade.backend import Settings
        from hiddenlab.defenses.cascade.load import load_cascade_model
        from hiddenlab.defenses.cascade.local import LocalCascade
        from hiddenlab.defenses.cascade.remote import WireCascade
        from hiddenlab.models.load import parse_dtype

        dtype = parse_dtype(self.dtype)
        wire = None if self.wire is None else parse_dtype(self.wire)
        settings = Settings(self.compress, wire, self.record)
        if self.kind not in ("local", "wire", "ray"):
            raise InputError(f"unknown backend {self.kind!r}; known are local, wire, ray")
        if self.kind != "ray" and self.address is not None:
            raise InputError("a cluster's address goes with --backend ray")
        if self.kind == "local" and self.bandwidth is not None:
            raise InputError("a simulated network goes with --backend wire or ray")
        if self.kind != "ray":
            loaded = load_cascade_model(self.model, dtype=dtype, device=self.device)
            if self.kind == "local":
                return LocalCascade(loaded, settings, name=self.model)
            return WireCascade(
                loaded, alpha, m=m, symmetric=symmetric, settings=settings, name=self.model, link=self.link(),
                timeout=self.timeout,
            )  # fmt: skip
        return _with_ray("hiddenlab.defenses.cascade.cluster").RayCascade(
            self.model, alpha, m=m, symmetric=symmetric, settings=settings, address=self.address,
            transport=self.transport, timeout=self.timeout, restarts=self.restarts, threads=self.threads,
            cpus=self.cpus, gpus=self.gpus, dtype=dtype, device=self.device, strategy=self.strategy,
            loopback=self.loopback, concurrent=self.concurrent, link=self.link(), progress=progress,
        )  # fmt: skip


def _with_ray(module: str) -> Any:
    """Import a module that needs Ray.

    Raises:
        InputError: Ray is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name not in ("ray", "fastapi", "prometheus_client"):
            raise
        raise InputError("Ray is not installed; pip install 'hiddenlab[ray]'") from None


def serve(
    backend: Backend,
    *,
    ready: Callable[[], None] = lambda: None,
    key: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    limits: dict[str, int] | None = None,
    **options: Any,
) -> None:
    """Serve a model over HTTP until interrupted; see ``serve.start`` for the options.

    Args:
        backend: where the nodes run.
        ready: called once requests are answered.
        key: that requests must show.
        host, port: where the server listens.
        limits: see ``service.Limits``.

    Raises:
        InputError: another program listens at that port, or see ``serve.start``.
    """
    from hiddenlab.defenses.cascade.port import reserved

    with reserved(host, port):
        bounds = _with_ray("hiddenlab.defenses.cascade.service").Limits(**(limits or {}))
        serving = _with_ray("hiddenlab.defenses.cascade.serve")
        own = serving.start(backend, key=key, limits=bounds, host=host, port=port, **options)
        # Service managers stop a program by SIGTERM. Set the handler now, since Ray sets its own when it starts.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            ready()
            while True:
                # A signal that another thread receives does not wake this one, so wake regularly to see it.
                time.sleep(0.5)
        finally:
            serving.stop(own)


def run(
    prompt: str,
    backend: Backend,
    alpha: int | None = None,
    c: int = 1,
    delta: int | None = None,
    m: int = 1,
    shards: str | None = None,
    symmetric: bool = False,
    compare: bool = False,
    repeats: int = 3,
    new_tokens: int = 0,
    sampling: dict[str, Any] | None = None,
    record: str | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Run one forward pass of a prompt over the nodes of a plan, or a generation.

    Args:
        prompt: its text.
        backend: where the nodes run.
        compare: run the plain model as well.
        repeats: passes that are timed, after one that is not.
        new_tokens: generate so many, in place of a forward pass.
        sampling: see ``generate.Sampling``.
        record: folder for what each node saw.
    The other arguments are those of ``plan``.

    Returns:
        ``tokens``, ``comp_nodes``, ``attn_nodes``, ``seconds`` (median), ``nodes`` (counters of each node). For a pass:
        ``next_token`` (None for a model without a head). For a generation: ``text``, ``new_tokens`` and
        ``seconds_per_token``. With ``compare``: ``plain_seconds``, ``over_plain`` and ``max_difference`` or
        ``same_tokens``. With ``record``: ``seen``.

    Raises:
        InputError: the plan does not exist, the model is unknown, or the prompt is empty or too long.
        NodeError: a node died or stalled.
    """
    from hiddenlab.defenses.cascade.node_views import save_seen
    from hiddenlab.models.load import load_tokenizer, resolve_model
    from hiddenlab.models.tokens import token_ids
    from hiddenlab.records import check_new

    tokenizer = load_tokenizer(resolve_model(backend.model))
    if tokenizer is None:
        raise InputError(f"{backend.model} has no tokenizer; put one beside its weights")
    ids = torch.tensor(token_ids(tokenizer, prompt, backend.model), dtype=torch.long)
    made = make_plan(len(ids), alpha, c, delta, m, shards, symmetric)
    if record is not None:
        check_new(Path(record))
    backend = replace(backend, record=record is not None)
    with backend.start(made.alpha, m, symmetric, progress) as cascade:
        if new_tokens:
            result = _generation(cascade, tokenizer, ids, made, new_tokens, sampling or {}, progress)
        else:
            result = _pass(cascade, tokenizer, ids, made, 0 if record else repeats)
        result = {"tokens": len(ids), "comp_nodes": made.alpha, "attn_nodes": len(made.attn_nodes)} | result
        result["nodes"] = cascade.counters()
        if record is not None:
            facts, answer = cascade.facts, result["output"] if new_tokens else []
            result["seen"] = save_seen(
                cascade.seen(), Path(record), model=facts.name, signature=facts.signature, dtype=facts.dtype,
                tokens=[*ids.tolist(), *answer],
            )  # fmt: skip
        head = cascade.facts.head
    if compare:
        result |= _compared(backend, ids, head, result, repeats)
    result.pop("output", None)
    return result


def _pass(cascade: "Cascade", tokenizer: Any, ids: Tensor, made: Plan, repeats: int) -> dict[str, Any]:
    output, seconds = timed(lambda: cascade.forward(ids, made), repeats)
    token = tokenizer.decode(int(output[-1].argmax())) if cascade.facts.head else None
    return {"next_token": token, "seconds": seconds, "output": output}


def _generation(
    cascade: "Cascade",
    tokenizer: Any,
    ids: Tensor,
    made: Plan,
    new_tokens: int,
    sampling: dict[str, Any],
    progress: Progress,
) -> dict[str, Any]:
    from hiddenlab.defenses.cascade.generate import Sampling, generate

    stop = [i for i in {tokenizer.eos_token_id} if i is not None]
    tokens: list[int] = []
    started = time.perf_counter()
    first = 0.0
    for token in generate(
        cascade, ids, made, new_tokens=new_tokens, sampling=Sampling(**sampling), stop=stop
    ):
        tokens.append(token)
        first = first or time.perf_counter() - started
        progress("generating", len(tokens), new_tokens)
    seconds = time.perf_counter() - started
    return {
        "text": tokenizer.decode(tokens, skip_special_tokens=True),
        "new_tokens": len(tokens),
        "seconds": seconds,
        "seconds_to_first": first,
        "seconds_per_token": (seconds - first) / (len(tokens) - 1) if len(tokens) > 1 else None,
        "output": tokens,
    }


def _compared(
    backend: Backend, ids: Tensor, head: bool, result: dict[str, Any], repeats: int
) -> dict[str, Any]:
    """Run the plain model in this process, and compare output and time."""
    from hiddenlab.defenses.cascade.load import load_cascade_model
    from hiddenlab.models.load import parse_dtype

    plain: Any = load_cascade_model(backend.model, dtype=parse_dtype(backend.dtype), attention="sdpa")
    with torch.inference_mode():
        if "new_tokens" in result:
            count = result["new_tokens"]
            started = time.perf_counter()
            tokens = plain.generate(ids[None], max_new_tokens=count, do_sample=False)[0, len(ids) :].tolist()
            seconds = time.perf_counter() - started
            same = {"same_tokens": tokens == result["output"]}
        else:
            output, seconds = timed(lambda: plain(input_ids=ids[None]), max(1, repeats))
            expected = output.logits if head else output.last_hidden_state
            same = {"max_difference": float((result["output"] - expected[0]).abs().max())}
    return {"plain_seconds": seconds, "over_plain": result["seconds"] / seconds} | same


def timed(call: Callable[[], Any], repeats: int) -> tuple[Any, float]:
    """Return the first result, and the median time of the calls after it (of the first where there are none)."""
    started = time.perf_counter()
    first = call()
    if not repeats:
        return first, time.perf_counter() - started
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return first, median(seconds)


def make_plan(
    tokens: int, alpha: int | None, c: int, delta: int | None, m: int, shards: str | None, symmetric: bool
) -> Plan:
    """Make a plan by (c, δ)-sharding, or from shards given by hand.

    Raises:
        InputError: the plan does not exist, or both were given.
    """
    if shards is None:
        return Plan.clustered(tokens, c, alpha=alpha, delta=delta, m=m, symmetric=symmetric)
    if alpha is not None or delta is not None:
        raise InputError("give either shards by hand or the numbers of a (c, δ)-sharding")
    made = Plan.by_hand(parse_shards(shards), m=m, symmetric=symmetric)
    if made.tokens != tokens:
        raise InputError(f"the shards hold {made.tokens} tokens, not {tokens}")
    return made


def parse_shards(text: str) -> list[list[int]]:
    """Parse ``0,1,4;2,3,5`` into the positions of each CompNode.

    Raises:
        InputError: a part is no number.
    """
    try:
        return [
            [int(position) for position in part.split(",") if position.strip()] for part in text.split(";")
        ]
    except ValueError:
        raise InputError(
            f"--shards {text!r} is no list of positions; write for instance --shards '0,1,4;2,3,5'"
        ) from None
