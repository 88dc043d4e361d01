"""Join a Ray cluster, or start one on this machine; errors state why that fails."""

import json
import math
import os
import platform
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import psutil
import ray
from ray._private import ray_constants
from ray._private.grpc_utils import init_grpc_channel
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hiddenlab import __version__
from hiddenlab.defenses.cascade import secured
from hiddenlab.defenses.cascade.node_state import NodeError
from hiddenlab.errors import InputError
from hiddenlab.text import first_line

LOOPBACK = "127.0.0.1"
NODE_BYTES = 350e6  # memory of a node's process beside weights, measured
CONNECT_SECONDS = 5.0
FREE_SECONDS = 10.0  # longest wait for what nodes that were just stopped still hold
ROUNDING = 1e-6  # of Ray's sums of fractions
QUIET: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
OWN_CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
FEWEST_CPUS = 1e-4  # Ray's smallest share; with none at all it would not place a node


def connect(address: str | None, nodes: int, cpus: float, gpus: float, tls: bool = True) -> bool:
    """Join a cluster, or start one on this machine with as many (logical) CPUs as there are nodes.

    Args:
        tls: refuse a cluster of several machines that does not encrypt.

    Returns:
        True where it was started here.

    Raises:
        InputError: it cannot be reached, refuses this machine, does not encrypt, or has too little.
    """
    # The error of the node at fault reaches the user; Ray would also print those of the other nodes.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    # Ray reports no usage statistics of a private deployment unless its owner enables them.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if ray.is_initialized():
        own = False
        check_encrypted(tls)
    else:
        own = address is None
        if own:
            memory = psutil.virtual_memory().available
            if nodes * NODE_BYTES > memory:
                raise InputError(
                    f"{nodes} nodes take about {nodes * NODE_BYTES / 1e9:.1f} GB before any weights, "
                    f"{memory / 1e9:.1f} GB are free; {nodes - int(memory / NODE_BYTES)} nodes too many"
                )
            logical = max(1, math.ceil(cpus))
            with _loopback():
                # "local" prevents joining RAY_ADDRESS or another Ray on this machine by accident.
                ray.init(address="local", num_cpus=logical, _node_ip_address=LOOPBACK, **QUIET)
        else:
            join(address or "")
            try:
                check_encrypted(tls)
            except InputError:
                ray.shutdown()
                raise
    for kind, needed in (("CPU", cpus), ("GPU", gpus)):
        free = _free_soon(kind, needed)
        if needed > free + ROUNDING:
            if own:
                ray.shutdown()
            raise InputError(
                f"the nodes need {needed:g} {kind}s, the cluster has {free:g} free: {needed - free:g} are missing"
            )
    return own


@contextmanager
def _loopback() -> Iterator[None]:
    """Keep a cluster on the loopback address.

    Ray replaces 127.0.0.1 by the machine's own address and then listens on every interface, unless it runs on a system
    for single machines.
    """
    before, named = ray_constants.ENABLE_RAY_CLUSTER, os.environ.get(OWN_CLUSTERS)
    ray_constants.ENABLE_RAY_CLUSTER, os.environ[OWN_CLUSTERS] = False, "0"
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
        os.environ.pop(OWN_CLUSTERS)
        if named is not None:
            os.environ[OWN_CLUSTERS] = named


def join(address: str) -> None:
    """Join the cluster at an address as a driver.

    Raises:
        InputError: it cannot be reached, or refuses this machine.
    """
    check_reachable(address)
    try:
        ray.init(address=address, **QUIET)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise InputError(f"no Ray cluster answers at {address}: {first_line(error)}") from None


def check_encrypted(tls: bool) -> None:
    """Check that a cluster of several machines encrypts what they send each other, where that is asked.

    Raises:
        InputError: it does not.
    """
    hosts = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    if tls and len(hosts) > 1 and not secured.enabled():
        raise InputError(
            f"the cluster has {len(hosts)} machines and sends everything in clear; start it with 'hiddenlab cascade "
            "up', or give --no-tls where the network is private"
        )


def check_reachable(address: str | None) -> None:
    """Check that a Ray cluster answers at an address and accepts this machine; Ray itself would try for many minutes.

    Raises:
        InputError: nothing listens there, it has other certificates, it refuses the token, or it has other versions.
    """
    host, _, port = (address or "").rpartition("//")[2].rpartition(":")
    if not host:
        return  # "auto" and the like: Ray knows where to look
    try:
        connection = socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS)
    except (OSError, ValueError, OverflowError) as error:
        raise InputError(
            f"no Ray cluster answers at {address}: {error}; check the address, the firewall, and that the cluster runs"
        ) from None
    with connection:
        _check_tls(connection, host, address or "")
    channel = init_grpc_channel(f"{host}:{port}")
    try:
        request: Any = gcs_service_pb2.InternalKVGetRequest(key=b"CLUSTER_METADATA", namespace=b"cluster")  # type: ignore[attr-defined]
        store = gcs_service_pb2_grpc.InternalKVGcsServiceStub(channel)
        answer = store.InternalKVGet(request, timeout=CONNECT_SECONDS)
        _check_versions(address or "", json.loads(answer.value or b"{}"))
    except grpc.RpcError as error:
        if error.code() == grpc.StatusCode.UNAUTHENTICATED:
            raise InputError(
                f"the cluster at {address} refuses this machine's token; use the folder of that cluster (--folder), or "
                "copy its files again"
            ) from None
        raise InputError(f"no Ray cluster answers at {address}: {first_line(error.details())}") from None
    finally:
        channel.close()


def _check_tls(connection: socket.socket, host: str, address: str) -> None:
    if secured.enabled():
        context = secured.Tls.of_environment().client
    else:
        # Only to see whether the other side speaks TLS; nothing is sent over this connection.
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with context.wrap_socket(connection, server_hostname=host) as wrapped:
            if secured.enabled():
                wrapped.recv(1)  # the other side speaks first, once it has accepted our certificate
    except OSError as error:
        if secured.enabled():
            raise InputError(
                f"the cluster at {address} cannot be joined: {secured.explain(error)}; use the folder of that cluster "
                "(--folder), or copy its files again"
            ) from None
        return
    if not secured.enabled():
        raise InputError(
            f"the cluster at {address} asks for certificates; give the folder of its files (--folder), or set "
            "RAY_USE_TLS and RAY_TLS_*"
        )


def _check_versions(address: str, cluster: dict[str, Any]) -> None:
    there = cluster.get("ray_version"), str(cluster.get("python_version", ""))
    here = ray.__version__, platform.python_version()
    if there[0] and (there[0] != here[0] or there[1].split(".")[:2] != here[1].split(".")[:2]):
        raise InputError(
            f"the cluster at {address} runs Ray {there[0]} with Python {there[1]}, this machine Ray {here[0]} with "
            f"Python {here[1]}; install the same on both"
        )


def machines(address: str | None, patience: float) -> list[dict[str, Any]]:
    """Return the machines of a cluster; see ``machines.status``."""
    join(address or "auto")
    try:
        nodes = ray.nodes()
        free = ray._private.state.available_resources_per_node()
        ask = ray.remote(num_cpus=0)(_versions)
        calls = {
            node["NodeID"]: ask.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            ).remote()
            for node in nodes
            if node["Alive"]
        }
        ray.wait(list(calls.values()), num_returns=max(1, len(calls)), timeout=patience)
        rows = []
        for node in sorted(nodes, key=lambda one: (not one["Alive"], one["NodeManagerAddress"])):
            key, total = node["NodeID"], node["Resources"]
            state = "gone"
            versions: dict[str, Any] = dict.fromkeys(("ray", "python", "hiddenlab"))
            if key in calls:
                try:
                    state, versions = "ready", ray.get(calls[key], timeout=0)
                except ray.exceptions.GetTimeoutError:
                    state = f"silent for {patience:g} s"
                except ray.exceptions.RayError as error:
                    state = first_line(error)
            rows.append(
                {"host": node["NodeManagerAddress"], "state": state}
                | versions
                | {
                    "cpus": total.get("CPU", 0.0), "free_cpus": free.get(key, {}).get("CPU", 0.0),
                    "gpus": total.get("GPU", 0.0), "free_gpus": free.get(key, {}).get("GPU", 0.0),
                }
            )  # fmt: skip
        return rows
    finally:
        ray.shutdown()


def _versions() -> dict[str, Any]:
    return {"ray": ray.__version__, "python": platform.python_version(), "hiddenlab": __version__}


def free_resources(kind: str) -> float:
    return float(ray.available_resources().get(kind, 0.0))


def _free_soon(kind: str, needed: float) -> float:
    """Wait until so much of a resource is free, and return what is.

    Ray gives back what stopped nodes held only seconds later, so a cluster that is large enough is asked again.
    """
    end = time.monotonic() + FREE_SECONDS
    large_enough = ray.cluster_resources().get(kind, 0.0) + ROUNDING >= needed
    while (free := free_resources(kind)) + ROUNDING < needed and large_enough and time.monotonic() < end:
        time.sleep(0.1)
    return free


def start_up(name: str, call: Any) -> Any:
    """Wait until a node is up, and return its answer.

    Raises:
        InputError: the model cannot be loaded there.
        NodeError: the node died at once.
    """
    try:
        return ray.get(call)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, InputError):
            raise InputError(str(cause)) from None
        raise NodeError(f"{name} did not start: {cause}", name) from None
    except ray.exceptions.RayActorError as error:
        text = str(error).strip().splitlines()
        reason = next(
            (line for line in reversed(text) if "InputError" in line), text[0] if text else "it died"
        )
        if "InputError" in reason:
            raise InputError(reason.partition("InputError: ")[2] or reason) from None
        raise NodeError(f"{name} did not start: {reason}", name) from None
