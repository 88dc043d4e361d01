"""Start, join, show and stop the machines of a Ray cluster (``hiddenlab cascade up``, ``join``, ``status``)."""

import importlib.util
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from hiddenlab.defenses.cascade import membership
from hiddenlab.defenses.cascade.membership import BESIDE, ClusterFolder, Member, Ports
from hiddenlab.errors import HiddenlabError, InputError

START_SECONDS = 90.0  # until 'ray start' has started
STOP_SECONDS = 15.0  # until processes that were asked to end are killed
ANSWER_SECONDS = 60.0  # until a machine must have said its versions
STARTED = "Ray runtime started"


def ports(first: int, workers: str, tensors: str) -> Ports:
    """Read the ports of a machine as the command line gives them.

    Raises:
        InputError: they are no ports, or overlap.
    """
    return Ports(first, membership.parse_ports(workers), membership.parse_ports(tensors))


def up(
    host: str,
    folder: str | None = None,
    tls: bool = True,
    ports: Ports = Ports(),  # noqa: B008 (frozen)
    cpus: int | None = None,
    gpus: int | None = None,
) -> dict[str, Any]:
    """Start the first machine of a cluster, with an authority, certificates and a token of its own.

    Args:
        host: address of this machine, under which the others reach it.
        folder: of the cluster's files; see ``membership.default_folder``.
        tls: encrypt everything between machines.
        ports: at which it listens.
        cpus, gpus: that Ray may give away; None counts them.

    Returns:
        ``address``, ``host``, ``tls``, ``folder``, ``copy`` (files that another machine needs), ``open`` (ports that
        machines must reach at each other) and ``listeners`` (see ``listeners``).

    Raises:
        InputError: the address is not of this machine, a node runs here already, or a port is taken.
        HiddenlabError: Ray does not start.
    """
    membership.check_own(host)
    home = ClusterFolder(folder)
    _check_none(home)
    home.create(tls)
    address = f"{host}:{ports.first}"
    # Ray's autoscaler is of no use here, and would listen on every interface.
    head = [
        "--head",
        f"--port={ports.first}",
        "--include-dashboard=false",
        f"--dashboard-host={host}",
        "--no-monitor",
    ]
    _start(home, Member(host, address, tls, secrets.token_hex(8)), ports, head, cpus, gpus)
    return {
        "address": address,
        "host": host,
        "tls": tls,
        "folder": str(home.path),
        "copy": [str(path) for path in home.needed(tls)],
        "open": ports.between(),
        "listeners": listeners(host, ports, True, tls),
    }


def join(
    address: str,
    folder: str | None = None,
    host: str | None = None,
    ports: Ports = Ports(),  # noqa: B008 (frozen)
    cpus: int | None = None,
    gpus: int | None = None,
) -> dict[str, Any]:
    """Add this machine to a cluster, with the files that ``up`` made there.

    Args:
        address: of the cluster, ``HOST:PORT``.
        host: address of this machine; None takes the one from which it reaches the cluster.
        The others are those of ``up``.

    Returns:
        See ``up``.

    Raises:
        InputError: files are missing, the cluster does not answer or refuses this machine, or a port is taken.
        HiddenlabError: Ray does not start.
    """
    host = host or membership.toward(address)
    membership.check_own(host)
    home = ClusterFolder(folder)
    _check_none(home)
    if not home.found():
        raise InputError(
            f"{home.path} has no token; copy the files that 'hiddenlab cascade up' named, or give --folder"
        )
    tls = (home.path / membership.AUTHORITY[0]).exists()
    if tls:
        home.certify(host)
    os.environ.update(home.environment(host, tls))
    from hiddenlab.defenses.cascade.ray_connection import check_reachable

    check_reachable(address)
    _start(
        home, Member(host, address, tls, secrets.token_hex(8)), ports, [f"--address={address}"], cpus, gpus
    )
    return {
        "address": address, "host": host, "tls": tls, "folder": str(home.path), "open": ports.between(),
        "listeners": listeners(host, ports, False, tls),
    }  # fmt: skip


def listeners(host: str, ports: Ports, head: bool, tls: bool) -> list[dict[str, str]]:
    """Return the ports at which a machine listens: at which address, and how they are protected.

    Ray has no option for the address of its gRPC servers. Its HTTP servers have no TLS.
    """
    grpc = "TLS, token" if tls else "token"
    rows = [("cluster (GCS)", ports.first, "every interface", grpc)] if head else []
    protection = {
        "runtime environments": (host, "token"), "agent, HTTP": (f"{host}, 127.0.0.1", "token"),
        "Ray client": (f"{host}, 127.0.0.1", grpc),
    }  # fmt: skip
    for what, distance in BESIDE.items():
        if head or what != "Ray client":
            rows.append((what, ports.first + distance, *protection.get(what, ("every interface", grpc))))
    spans = [("workers", ports.workers, "every interface", grpc)]
    spans.append(("Cascade nodes", ports.tensors, host, "TLS, key" if tls else "key"))
    return [
        {"what": what, "ports": str(port), "at": at, "protected by": by} for what, port, at, by in rows
    ] + [
        {"what": what, "ports": f"{low}-{high}", "at": at, "protected by": by}
        for what, (low, high), at, by in spans
    ]


def status(address: str | None = None, folder: str | None = None) -> dict[str, Any]:
    """Return the machines of a cluster.

    Returns:
        ``address``, ``tls`` and ``machines``: of each ``host``, ``state``, versions of ``ray``, ``python`` and
        ``hiddenlab``, ``cpus``, ``free_cpus``, ``gpus``, ``free_gpus``. What a machine did not say is None.

    Raises:
        InputError: no node runs here, or the cluster does not answer.
    """
    address = membership.enter(address, folder) if address or folder else ClusterFolder().enter()
    from hiddenlab.defenses.cascade import ray_connection, secured

    return {
        "address": address, "tls": secured.enabled(),
        "machines": ray_connection.machines(address, ANSWER_SECONDS),
    }  # fmt: skip


def down(folder: str | None = None) -> dict[str, Any]:
    """Stop the nodes that ``up`` and ``join`` started here from a folder; other Ray processes go on.

    Returns:
        ``stopped``: of each node ``host``, ``address`` and ``processes``.
    """
    home, stopped = ClusterFolder(folder), []
    for member in home.members():
        count = _stop(member)
        home.forget(member)
        stopped.append({"host": member.host, "address": member.address, "processes": count})
    return {"stopped": stopped, "folder": str(home.path)}


def _check_none(home: ClusterFolder) -> None:
    for member in home.members():
        if membership.processes(member.mark):
            raise InputError(
                f"a node of {member.address} runs here already; 'hiddenlab cascade down --folder {home.path}' stops it"
            )
        home.forget(member)


def _start(
    home: ClusterFolder, member: Member, ports: Ports, role: list[str], cpus: int | None, gpus: int | None
) -> None:
    """Run ``ray start`` in the background, and wait until it has started."""
    membership.check_free(
        member.host, [ports.first + i for i in range(len(BESIDE) + 1) if i or "--head" in role]
    )
    if member.tls:
        home.certify(member.host)
    command = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        "--block",
        f"--node-ip-address={member.host}",
    ]
    command += role
    for option, what in (
        ("object-manager-port", "object manager"), ("node-manager-port", "node manager"),
        ("runtime-env-agent-port", "runtime environments"), ("dashboard-agent-grpc-port", "agent, gRPC"),
        ("dashboard-agent-listen-port", "agent, HTTP"), ("ray-client-server-port", "Ray client"),
    ):  # fmt: skip
        command.append(f"--{option}={ports.first + BESIDE[what]}")
    command += [f"--min-worker-port={ports.workers[0]}", f"--max-worker-port={ports.workers[1]}"]
    command += [f"--num-cpus={cpus}"] * (cpus is not None) + [f"--num-gpus={gpus}"] * (gpus is not None)
    environment = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "RAY_AUTH_TOKEN")}
    environment |= home.environment(member.host, member.tls) | {
        membership.NODE: member.mark,
        membership.TENSOR_PORTS: f"{ports.tensors[0]}-{ports.tensors[1]}",
        # The titles of Ray's processes would overwrite the environment, by which they are found again.
        "SPT_NOENV": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Metrics would be served to everybody, on every interface; there is no option for the dashboard's address.
        "RAY_enable_metrics_collection": "0",
        "DASHBOARD_METRIC_PORT": "-1",
        "PYTHONPATH": os.pathsep.join(filter(None, [_root(), os.environ.get("PYTHONPATH", "")])),
    }
    path = home.log(member.host)
    home.write(member)
    with open(path, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as log:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    until = time.monotonic() + START_SECONDS
    try:
        while STARTED not in path.read_text(errors="replace"):
            if process.poll() is not None or time.monotonic() > until:
                raise HiddenlabError(f"Ray does not start: {_reason(path)}; more in {path}")
            time.sleep(0.1)
    except BaseException:
        _stop(member)
        home.forget(member)
        raise


def _root() -> str:
    """Return the folder that workers need on their path to import this package; empty where it is installed."""
    spec = importlib.util.find_spec("hiddenlab")
    assert spec is not None and spec.origin is not None
    root = Path(spec.origin).parents[1]
    return "" if root.name == "site-packages" else str(root)


def _reason(path: Path) -> str:
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "error" in line]
    return (errors or lines or ["it said nothing"])[-1]


def _stop(member: Member) -> int:
    """Ask a node's processes to end, kill those that do not, and return how many there were."""
    found = membership.processes(member.mark)
    count = len(found)
    # 'ray start --block' ends its processes in order; it is the oldest.
    for process in sorted(found, key=lambda one: one.create_time())[:1]:
        process.terminate()
    _, left = psutil.wait_procs(found, timeout=STOP_SECONDS)
    for process in {*left, *membership.processes(member.mark)}:
        process.kill()
    psutil.wait_procs(left, timeout=STOP_SECONDS)
    return count
