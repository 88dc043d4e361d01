"""Run a model over the nodes of a plan, or serve it: ``hiddenlab cascade run`` and ``serve``."""

import re
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hiddenlab.defenses.cascade.cost import Link, Shape, sent
from hiddenlab.defenses.cascade.exposure import (
    NOT_MEASURED,
    NOT_PRIVATE,
    attack_on,
    verdicts,
)
from hiddenlab.defenses.cascade.hardening import NOT_HARDENED, WHOLE, Hardening, Section
from hiddenlab.defenses.cascade.planning import make_plan
from hiddenlab.errors import InputError
from hiddenlab.sharding import Plan
from hiddenlab.types import Progress, silent
from hiddenlab.utils.clock import timed

NO_RAY = "Ray is not installed; pip install 'hiddenlab[ray]'"

if TYPE_CHECKING:
    from hiddenlab.defenses.cascade.backend import Cascade
    from hiddenlab.defenses.cascade.defaults import Defaults


@dataclass(frozen=True)
class Backend:
    """Where the nodes run, and how; see ``RayCascade``.

    Attributes:
        kind: ``local`` (threads of this process), ``wire`` (the same, with TCP between them) or ``ray``.
        model, dtype, device: of the CompNodes.
        compress, wire, record: see ``backend.Settings``.
        bandwidth, latency: of a simulated network, in bytes per second and seconds.
        folder: of the cluster's files; see ``membership.enter``.
        harden: spec of a hardening, see ``hardening``.
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
    folder: str | None = None
    tls: bool = True
    concurrent: int = 16
    harden: str | None = None

    @property
    def hardening(self) -> Hardening:
        """The hardening of the plan.

        Raises:
            UnknownNameError, InputError: see ``Hardening.parse``.
        """
        return Hardening.parse(self.harden)

    def link(self) -> Link | None:
        """Return the simulated network, or None."""
        return None if self.bandwidth is None else Link(self.bandwidth, self.latency)

    def entered(self) -> "Backend":
        """Make this process a member of the cluster, before Ray is imported; its folder gives the address.

        Raises:
            InputError: see ``membership.enter``.
        """
        if self.address is None and self.folder is None:
            return self
        address = _with_ray("hiddenlab.defenses.cascade.membership").enter(self.address, self.folder)
        return replace(self, address=address, folder=None)

    def start(self, alpha: int, m: int, symmetric: bool, progress: Progress = silent) -> "Cascade":
        """Start the nodes of α CompNodes and β = mα key shards.

        Raises:
            InputError: the backend does not have an option, or see ``RayCascade``.
        """
        from hiddenlab.defenses.cascade.client_layers import BetweenClientLayers, check_sections
        from hiddenlab.defenses.cascade.load import load_cascade_model
        from hiddenlab.defenses.cascade.local import LocalCascade
        from hiddenlab.models.load import load_config, parse_dtype, resolve_model

        client = self.hardening.client
        if self.hardening.shares is not None:
            return self._share_nodes(progress)
        if client is None:
            return self._nodes(WHOLE, alpha, m, symmetric, progress)
        config = load_config(resolve_model(self.model))
        first, middle, last = client.sections(int(config.num_hidden_layers))
        check_sections(self.model, config)
        dtype = parse_dtype(self.dtype)
        own = [
            LocalCascade(load_cascade_model(self.model, dtype=dtype, section=section), name=self.model)
            for section in (first, last)
        ]
        nodes = self._nodes(middle, alpha, m, symmetric, progress)
        return BetweenClientLayers(own[0], nodes, own[1], self.hardening.noise)

    def check(self) -> None:
        """Check what does not depend on the model.

        Raises:
            InputError: the kind is unknown, or does not have an option.
        """
        if self.kind not in ("local", "wire", "ray"):
            raise InputError(f"unknown backend {self.kind!r}; known are local, wire, ray")
        if self.kind != "ray" and (self.address is not None or self.folder is not None):
            raise InputError("a cluster's address and folder go with --backend ray")
        if self.kind == "local" and self.bandwidth is not None:
            raise InputError("a simulated network goes with --backend wire or ray")
        if self.hardening.shares is None:
            return
        if self.wire is not None:
            raise InputError("shares are whole numbers of 64 bits; leave --wire out with --harden shares")
        if self.record:
            raise InputError(
                "a share is a random number, so that --record would save nothing to attack; leave it out"
            )
        if self.kind == "ray" and self.bandwidth is not None:
            raise InputError("with --harden shares a simulated network goes with --backend wire")

    def _share_nodes(self, progress: Progress) -> "Cascade":
        """Start two nodes that compute on shares."""
        from functools import partial

        from hiddenlab.defenses.cascade.share_nodes import LocalPeer, WirePeer
        from hiddenlab.defenses.cascade.shared_linear import SharedLinear, load_client, local_shares
        from hiddenlab.models.load import parse_dtype

        self.check()
        dtype = parse_dtype(self.dtype)
        client, rounds = load_client(self.model, dtype)
        if self.kind != "ray":
            peer = LocalPeer if self.kind == "local" else partial(WirePeer, link=self.link())
            return local_shares(
                client, self.model, rounds, peer, device=self.device, timeout=self.timeout
            )  # fmt: skip
        entered = self.entered()
        peers = _with_ray("hiddenlab.defenses.cascade.ray_shares").start_peers(
            self.model, dtype=dtype, device=self.device, address=entered.address, tls=self.tls, threads=self.threads,
            cpus=self.cpus, gpus=self.gpus, strategy=self.strategy, progress=progress,
        )  # fmt: skip
        return SharedLinear(client, self.model, rounds, peers, timeout=self.timeout)

    def _nodes(self, section: Section, alpha: int, m: int, symmetric: bool, progress: Progress) -> "Cascade":
        """Start nodes that run a section of the model."""
        from hiddenlab.defenses.cascade.backend import Settings
        from hiddenlab.defenses.cascade.load import load_cascade_model
        from hiddenlab.defenses.cascade.local import LocalCascade
        from hiddenlab.defenses.cascade.masked_sums import SumSecret
        from hiddenlab.defenses.cascade.remote import WireCascade
        from hiddenlab.models.load import parse_dtype

        maps = self.hardening.secret_maps
        dtype = parse_dtype(self.dtype)
        wire = None if self.wire is None else parse_dtype(self.wire)
        secret = None if maps is None else maps.secret(dtype, dtype if wire is None else wire)
        sums = self.hardening.masked_sums
        masks = None if sums is None else SumSecret()
        settings = Settings(self.compress, wire, self.record, None if sums is None else sums.slack)
        self.check()
        if self.kind != "ray":
            loaded = load_cascade_model(self.model, dtype=dtype, device=self.device, section=section)
            if self.kind == "local":
                return LocalCascade(loaded, settings, name=self.model, secret=secret, masks=masks)
            return WireCascade(
                loaded, alpha, m=m, symmetric=symmetric, settings=settings, name=self.model, link=self.link(),
                timeout=self.timeout, secret=secret, masks=masks,
            )  # fmt: skip
        entered = self.entered()
        return _with_ray("hiddenlab.defenses.cascade.cluster").RayCascade(
            self.model, alpha, m=m, symmetric=symmetric, settings=settings, section=section, secret=secret,
            masks=masks, address=entered.address,
            transport=self.transport, timeout=self.timeout, restarts=self.restarts, threads=self.threads,
            cpus=self.cpus, gpus=self.gpus, dtype=dtype, device=self.device, strategy=self.strategy,
            loopback=self.loopback, tls=self.tls, concurrent=self.concurrent, link=self.link(), progress=progress,
        )  # fmt: skip


def _with_ray(module: str) -> Any:
    """Import a module that needs Ray.

    Raises:
        InputError: Ray is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name not in ("ray", "fastapi", "grpc", "prometheus_client", "psutil"):
            raise
        raise InputError(NO_RAY) from None


def machines() -> Any:
    """Return the module that starts, joins, shows and stops machines.

    Raises:
        InputError: Ray is not installed.
    """
    if find_spec("ray") is None:
        raise InputError(NO_RAY)
    return _with_ray("hiddenlab.defenses.cascade.machines")


def serve(
    backend: Backend,
    *,
    ready: Callable[[], None] = lambda: None,
    keys: Sequence[str] = (),
    host: str = "127.0.0.1",
    port: int = 8000,
    origins: Sequence[str] = (),
    limits: dict[str, int] | None = None,
    **options: Any,
) -> None:
    """Serve a model over HTTP until interrupted; see ``serve.start`` for the options.

    Args:
        backend: where the nodes run.
        ready: called once requests are answered.
        keys: of which requests must show one; empty for none.
        host, port: where the server listens.
        origins: of web pages that may ask, see ``api.make_app``.
        limits: see ``service.Limits``.

    Raises:
        InputError: another program listens at that port, an origin is none, or see ``serve.start``.
    """
    from hiddenlab.defenses.cascade.port import reserved

    for origin in origins:
        if origin != "*" and not re.fullmatch(r"https?://[^/\s?#@]+", origin):
            raise InputError(
                f"{origin!r} is no origin; write for instance --cors https://chat.example, or --cors '*'"
            )
    with reserved(host, port):
        backend = backend.entered()
        bounds = _with_ray("hiddenlab.defenses.cascade.service").Limits(**(limits or {}))
        serving = _with_ray("hiddenlab.defenses.cascade.serve")
        own = serving.start(
            backend, keys=keys, limits=bounds, host=host, port=port, origins=list(origins), **options
        )
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
        ``tokens``, ``comp_nodes``, ``attn_nodes`` (or ``share_nodes``), ``seconds`` (median), ``nodes`` (what each
        node did: in one pass, as the mean of all passes, or in the whole generation). For a pass: ``next_token`` (None
        for a model without a head). For a generation: ``text``, ``new_tokens`` and ``seconds_per_token``. With
        ``compare``: ``plain_seconds``, ``over_plain`` and ``max_difference`` or ``same_tokens``. With ``record``:
        ``seen``, ``worst`` (the verdict on the node that reads most) and ``attack`` (the command that reads what it
        saw; None where no node saw anything).

    Raises:
        InputError: the plan does not exist, the model is unknown, or the prompt is empty or too long.
        NodeError: a node died or stalled.
    """
    from hiddenlab.defenses.cascade.defaults import load_defaults
    from hiddenlab.defenses.cascade.node_views import save_seen
    from hiddenlab.models.load import load_tokenizer, resolve_model
    from hiddenlab.models.tokens import token_ids
    from hiddenlab.records import check_new

    ref = resolve_model(backend.model)
    tokenizer = load_tokenizer(ref)
    if tokenizer is None:
        raise InputError(f"{backend.model} has no tokenizer; put one beside its weights")
    defaults = load_defaults(ref, tokenizer)
    ids = torch.tensor(token_ids(tokenizer, prompt, backend.model), dtype=torch.long)
    made = make_plan(len(ids), alpha, c, delta, m, shards, symmetric, backend.hardening)
    if record is not None:
        check_new(Path(record))
    backend = replace(backend, record=record is not None)
    with backend.start(made.alpha, m, symmetric, progress) as cascade:
        # What nodes are sent of a recorded answer is what its whole plan says, which the verdicts on them are about.
        made = replace(made, causal=cascade.facts.causal and not (record and new_tokens))
        if new_tokens:
            result = _generation(
                cascade, tokenizer, ids, made, new_tokens, sampling or {}, defaults, progress
            )
        elif record is None:
            result = _pass(cascade, tokenizer, ids, made, repeats)
        else:
            with _watched(cascade, backend, made, progress):
                result = _pass(cascade, tokenizer, ids, made, 0)
        result = {"tokens": len(ids), **backend.hardening.counts(made)} | result
        result.setdefault("nodes", cascade.counters())
        if record is not None:
            facts, answer = cascade.facts, result["output"] if new_tokens else []
            result["seen"] = save_seen(
                cascade.seen(), Path(record), model=facts.name, signature=facts.signature, dtype=facts.dtype,
                channel=backend.hardening.channel, tokens=[*ids.tolist(), *answer], progress=progress,
            )  # fmt: skip
            grown = made.grown(len(ids) + max(0, len(answer) - 1))  # no node computes on the last token
            result |= _worst(grown, Path(record), backend)
        head = cascade.facts.head
    if compare:
        result |= _compared(backend, ids, head, result, repeats, new_tokens, sorted(defaults.stop))
    result.pop("output", None)
    return result


@contextmanager
def _watched(cascade: "Cascade", backend: Backend, made: Plan, progress: Progress) -> Iterator[None]:
    """Report how many of the numbers that AttnNodes receive in a pass have arrived, once a second.

    Nodes in processes of their own are not asked: a busy one answers late.
    """
    from hiddenlab.models.load import load_config, resolve_model

    if backend.kind == "ray":
        yield
        return
    shape = Shape.of(load_config(resolve_model(backend.model)), element_bytes=1)
    total = backend.hardening.node_layers(shape.layers) * sum(
        sent(made, shape, backend.hardening.answers)[0].values()
    )
    what, done = "nodes compute and record, numbers exchanged", threading.Event()

    def watch() -> None:
        while not done.wait(1.0):
            arrived = sum(int(counts.get("elements_in", 0)) for counts in cascade.counters().values())
            progress(what, min(arrived, total), total)

    thread = threading.Thread(target=watch, daemon=True)
    progress(what, 0, total)
    thread.start()
    try:
        yield
        progress(what, total, total)
    finally:
        done.set()
        thread.join()


def _worst(made: Plan, folder: Path, backend: Backend) -> dict[str, Any]:
    """Return the verdict on the node that reads most, and the command that attacks what it saw."""
    from hiddenlab.defenses.cascade.node_views import file_name
    from hiddenlab.models.load import load_config, resolve_model

    hardening, shape = backend.hardening, Shape.of(load_config(resolve_model(backend.model)))
    found = (one for one in verdicts(made, (), hardening, shape.value_heads) if one.own)
    ranks = {NOT_PRIVATE: 2, NOT_MEASURED: 0}
    worst = max(found, key=lambda one: (ranks.get(one.status, 1), one.read), default=None)
    if worst is None:
        return {"worst": None, "attack": None}
    if hardening != NOT_HARDENED and worst.status == NOT_MEASURED:
        return {"worst": worst.to_json(), "attack": None}
    attack, layer, stream = attack_on(made, worst, hardening.first_layer)
    return {
        "worst": worst.to_json(),
        "attack": f"hiddenlab attack --observation {shlex.quote(str(folder / file_name(worst.node)))} "
        f"--layer {layer} --stream {stream} --attack {attack} "
        f"--truth {shlex.quote(str(folder / 'truth.json'))}",
    }


def _pass(cascade: "Cascade", tokenizer: Any, ids: Tensor, made: Plan, repeats: int) -> dict[str, Any]:
    output, seconds = timed(lambda: cascade.forward(ids, made), repeats)
    nodes = {
        name: {what: _whole(number / (repeats + 1)) for what, number in counts.items()}
        for name, counts in cascade.counters().items()
    }
    token = tokenizer.decode(int(output[-1].argmax())) if cascade.facts.head else None
    return {"next_token": token, "seconds": seconds, "output": output, "nodes": nodes}


def _whole(number: float) -> int | float:
    return int(number) if number == int(number) else number


def _generation(
    cascade: "Cascade",
    tokenizer: Any,
    ids: Tensor,
    made: Plan,
    new_tokens: int,
    sampling: dict[str, Any],
    defaults: "Defaults",
    progress: Progress,
) -> dict[str, Any]:
    from hiddenlab.defenses.cascade.generate import generate

    tokens: list[int] = []
    started = time.perf_counter()
    first = 0.0
    for token in generate(
        cascade, ids, made, new_tokens=new_tokens, sampling=defaults.greedy(**sampling), stop=defaults.stop
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
    backend: Backend,
    ids: Tensor,
    head: bool,
    result: dict[str, Any],
    repeats: int,
    new_tokens: int,
    stop: list[int],
) -> dict[str, Any]:
    """Run the plain model in this process, and compare output and time."""
    from hiddenlab.defenses.cascade.load import load_cascade_model
    from hiddenlab.models.load import parse_dtype

    plain: Any = load_cascade_model(backend.model, dtype=parse_dtype(backend.dtype), attention="sdpa")
    with torch.inference_mode():
        if "new_tokens" in result:
            # The stop tokens of generation_config.json are its own; others, it would not take from the tokenizer.
            limits = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": stop or None}
            started = time.perf_counter()
            tokens = plain.generate(ids[None], **limits)[0, len(ids) :].tolist()
            seconds = time.perf_counter() - started
            same = {"same_tokens": tokens == result["output"]}
        else:
            output, seconds = timed(lambda: plain(input_ids=ids[None]), max(1, repeats))
            expected = output.logits if head else output.last_hidden_state
            same = {"max_difference": float((result["output"] - expected[0]).abs().max())}
    return {"plain_seconds": seconds, "over_plain": result["seconds"] / seconds} | same
