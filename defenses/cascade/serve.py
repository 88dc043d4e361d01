"""Serve the HTTP interface on Ray Serve, with its nodes on the same Ray cluster: ``hiddenlab cascade serve``."""

import logging
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.serve.config import HTTPOptions
from ray.serve.context import _get_global_client

from hiddenlab.defenses.cascade.api import digest, make_app
from hiddenlab.defenses.cascade.command import Backend
from hiddenlab.defenses.cascade.defaults import load_defaults
from hiddenlab.defenses.cascade.ray_connection import connect
from hiddenlab.defenses.cascade.service import Limits, Service
from hiddenlab.errors import HiddenlabError, InputError
from hiddenlab.models.load import load_tokenizer, resolve_model
from hiddenlab.sharding import Plan

APP = "hiddenlab-cascade"
LISTENS = 60.0  # seconds until requests have to be answered
TOO_MANY = 1000  # requests beside the running ones, which are refused at once
SERVE_CPUS = 1.0  # that Ray reserves for the replica, in addition to the nodes'


@serve.deployment(ray_actor_options={"num_cpus": SERVE_CPUS})
@serve.ingress()
class _Replica:
    """The only replica: it drives the nodes, and so sees prompts and answers as any driver does."""

    def __init__(
        self,
        backend: dict[str, Any],
        sharding: dict[str, Any],
        c: int,
        keys: Sequence[str],
        limits: dict[str, Any],
        origins: Sequence[str],
    ) -> None:
        nodes = Backend(**backend)
        ref = resolve_model(nodes.model)
        tokenizer = load_tokenizer(ref)
        self.cascade = nodes.start(**sharding)

        def plan(tokens: int) -> Plan:
            return Plan.clustered(tokens, c, causal=self.cascade.facts.causal, **sharding)

        self.origins = origins
        self.service = Service(
            self.cascade, plan, tokenizer, name=nodes.model, keys=keys, limits=Limits(**limits),
            defaults=load_defaults(ref, tokenizer),
        )  # fmt: skip

    def __serve_build_asgi_app__(self) -> FastAPI:
        return make_app(self.service, self.origins)

    def __del__(self) -> None:
        if cascade := getattr(self, "cascade", None):
            cascade.shutdown()


def start(
    backend: Backend,
    *,
    alpha: int,
    c: int = 1,
    m: int = 1,
    symmetric: bool = True,
    host: str = "127.0.0.1",
    port: int = 8000,
    keys: Sequence[str] = (),
    limits: Limits | None = None,
    origins: Sequence[str] = (),
) -> bool:
    """Start nodes and server, and return once requests are answered.

    Args:
        backend: of kind ``ray``.
        host, port: where the server listens.
        keys: of which requests must show one; empty for none.
        limits: of requests.
        origins: of web pages that may ask, see ``make_app``.
    The other arguments are those of ``Plan``.

    Returns:
        True where the cluster was started here.

    Raises:
        InputError: the plan, the model, the cluster or its resources do not allow it.
        HiddenlabError: nothing listens after a minute.
    """
    ref = resolve_model(backend.model)
    if (tokenizer := load_tokenizer(ref)) is None:
        raise InputError(f"{backend.model} has no tokenizer; put one beside its weights")
    load_defaults(ref, tokenizer)  # what is wrong with them is said before nodes start
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    backend.check()
    if backend.hardening.shares is not None and (alpha, c, m, symmetric) != (2, 1, 1, True):
        raise InputError("--harden shares has two nodes and no plan: leave --alpha, --c, --m and --full out")
    counts = backend.hardening.counts(Plan.clustered(alpha, 1, alpha=alpha, m=m, symmetric=symmetric))
    nodes, weighty = sum(counts.values()), counts.get("share_nodes", alpha)  # those with weights take gpus
    own = connect(
        backend.address, nodes + 1, nodes * backend.cpus + SERVE_CPUS, weighty * backend.gpus, backend.tls
    )
    try:
        serve.start(http_options=HTTPOptions(host=host, port=port))
        client = _get_global_client()
        assert client is not None
        there = client.http_config
        if (there.host, there.port) != (host, port):
            raise InputError(
                f"Ray Serve runs on that cluster already and listens at {there.host}:{there.port}; give these as "
                "--host and --port, or another cluster"
            )
        sharding = {"alpha": alpha, "m": m, "symmetric": symmetric}
        limits = limits or Limits()
        settings = asdict(backend) | {"address": None, "loopback": own, "concurrent": limits.running}
        # More than may run at once, so that a request too many is refused at once and does not wait in Ray's queue.
        replica = _Replica.options(max_ongoing_requests=limits.running + TOO_MANY)  # type: ignore[attr-defined]
        app = replica.bind(settings, sharding, c, [digest(key) for key in keys], asdict(limits), origins)
        serve.run(app, name=APP, route_prefix="/")
        _wait_for_requests(host, port)
    except BaseException:
        stop(own)
        raise
    return own


def _wait_for_requests(host: str, port: int) -> None:
    """Wait until the server answers; Ray reports the application as running before that."""
    near = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    until = time.monotonic() + LISTENS
    while True:
        try:
            with direct.open(f"http://{near}:{port}/-/healthz", timeout=LISTENS):
                return
        except OSError as error:  # refused, or answered with an error: no routes yet
            if time.monotonic() > until:
                raise HiddenlabError(f"the server at {host}:{port} does not answer: {error}") from None
            time.sleep(0.1)


def stop(own: bool) -> None:
    """Stop the server and its nodes, and Ray where it was started here."""
    if not ray.is_initialized():
        return
    if own:
        # Everything on this cluster was started here and ends with it. Stopping each part would hang if one was killed.
        ray.shutdown()
    else:
        serve.delete(APP)
