"""Join a Ray cluster, or start one on this machine; errors state why that fails."""

import math
import os
import socket
from typing import Any

import psutil
import ray

from hiddenlab.errors import InputError
from hiddenlab.text import first_line

LOOPBACK = "127.0.0.1"
NODE_BYTES = 350e6  # memory of a node's process beside weights, measured


def connect(address: str | None, nodes: int, cpus: float, gpus: float) -> bool:
    """Join a cluster, or start one on this machine with as many (logical) CPUs as there are nodes.

    Returns:
        True where it was started here.
    """
    # The error of the node at fault reaches the user; Ray would also print those of the other nodes.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    # Ray reports no usage statistics of a private deployment unless its owner enables them.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if ray.is_initialized():
        own = False
    else:
        quiet: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
        own = address is None
        if own:
            memory = psutil.virtual_memory().available
            if nodes * NODE_BYTES > memory:
                raise InputError(
                    f"{nodes} nodes take about {nodes * NODE_BYTES / 1e9:.1f} GB before any weights, "
                    f"{memory / 1e9:.1f} GB are free; {nodes - int(memory / NODE_BYTES)} nodes too many"
                )
            logical = max(1, math.ceil(cpus))
            # "local" prevents joining RAY_ADDRESS or another Ray on this machine by accident.
            ray.init(address="local", num_cpus=logical, _node_ip_address=LOOPBACK, **quiet)
        else:
            check_reachable(address)
            try:
                ray.init(address=address, **quiet)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise InputError(f"no Ray cluster answers at {address}: {first_line(error)}") from None
    for kind, needed in (("CPU", cpus), ("GPU", gpus)):
        if needed > free_resources(kind) + 1e-6:
            free = free_resources(kind)
            if own:
                ray.shutdown()
            raise InputError(
                f"the nodes need {needed:g} {kind}s, the cluster has {free:g} free: {needed - free:g} are missing"
            )
    return own


def check_reachable(address: str | None) -> None:
    """Check that a Ray cluster listens at an address; Ray itself would try for many minutes.

    Raises:
        InputError: nothing listens at that host and port.
    """
    host, _, port = (address or "").rpartition("//")[2].rpartition(":")
    if not host:
        return  # "auto" and the like: Ray knows where to look
    try:
        socket.create_connection((host, int(port)), timeout=5.0).close()
    except (OSError, ValueError) as error:
        raise InputError(f"no Ray cluster answers at {address}: {error}") from None


def free_resources(kind: str) -> float:
    return float(ray.available_resources().get(kind, 0.0))
