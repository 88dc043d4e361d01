"""Keep what makes a machine a member of a cluster in one folder: token, authority, certificates and running node."""

import ipaddress
import json
import os
import secrets
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from hiddenlab.defenses.cascade.certificates import make_authority, make_certificate
from hiddenlab.errors import InputError
from hiddenlab.utils.files import write_file

AUTHORITY = ("authority.pem", "authority.key")
TOKEN = "token"
DEFAULT = "HIDDENLAB_CLUSTER"  # environment variable with the folder
NODE = "HIDDENLAB_CASCADE_NODE"  # marks the processes that one 'up' or 'join' started
TENSOR_PORTS = "HIDDENLAB_CASCADE_PORTS"  # tells a machine's Cascade nodes where they may listen
BESIDE = {  # Ray's listeners, by their distance from the port of the cluster
    "object manager": 1,
    "node manager": 2,
    "runtime environments": 3,
    "agent, gRPC": 4,
    "agent, HTTP": 5,
    "Ray client": 6,
}


@dataclass(frozen=True)
class Ports:
    """The ports of a machine, all pinned.

    Attributes:
        first: of the cluster; six of Ray's others follow it.
        workers, tensors: first and last port of Ray's workers, and of the connections between Cascade nodes.
    """

    first: int = 6379
    workers: tuple[int, int] = (10000, 10999)
    tensors: tuple[int, int] = (11000, 11999)

    def __post_init__(self) -> None:
        spans = [(self.first, self.first + max(BESIDE.values())), self.workers, self.tensors]
        for low, high in spans:
            if not 1024 <= low <= high <= 65535:
                raise InputError(f"ports {low}-{high}: give ports from 1024 to 65535, the lower one first")
        spans.sort()
        for (_, high), (low, _) in pairwise(spans):
            if low <= high:
                raise InputError(f"port {low} is given twice; keep cluster, workers and tensors apart")

    def between(self) -> list[str]:
        """Return the ports that machines of a cluster must reach at each other."""
        return [
            f"{self.first}-{self.first + 2}", f"{self.workers[0]}-{self.workers[1]}",
            f"{self.tensors[0]}-{self.tensors[1]}",
        ]  # fmt: skip


def parse_ports(text: str) -> tuple[int, int]:
    """Parse ``10000-10999``.

    Raises:
        InputError: it is no such range.
    """
    low, _, high = text.partition("-")
    if not (low.isdecimal() and high.isdecimal()):
        raise InputError(f"{text!r} is no range of ports; write for instance 10000-10999")
    return int(low), int(high)


@dataclass(frozen=True)
class Member:
    """A node that ``up`` or ``join`` started on this machine.

    Attributes:
        host: its address. address: of the cluster, ``HOST:PORT``. tls: whether everything is encrypted.
        mark: the value of ``HIDDENLAB_CASCADE_NODE`` in the environment of its processes.
    """

    host: str
    address: str
    tls: bool
    mark: str


class ClusterFolder:
    """The folder of a cluster.

    ``authority.pem``, ``authority.key`` and ``token`` make a machine a member; they are what one copies. Files of one
    machine carry its address: ``node-HOST.pem``, ``node-HOST.key``, ``node-HOST.json``, ``node-HOST.log``. All are
    readable by their owner alone.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = Path(path).expanduser() if path else default_folder()

    def found(self) -> bool:
        """Return whether a cluster's files are here."""
        return (self.path / TOKEN).exists()

    def create(self, tls: bool) -> None:
        """Make a token, and an authority where asked; keep those that are here.

        Raises:
            InputError: the folder cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise InputError(f"the folder {self.path} cannot be made: {error.strerror or error}") from None
        if not self.found():
            write_file(self.path / TOKEN, secrets.token_hex(32), private=True)
        if tls and not (self.path / AUTHORITY[1]).exists():
            for name, content in zip(AUTHORITY, make_authority(), strict=True):
                write_file(self.path / name, content, private=True)

    def needed(self, tls: bool) -> list[Path]:
        """Return the files that another machine needs to join."""
        return [self.path / name for name in ((*AUTHORITY, TOKEN) if tls else (TOKEN,))]

    def certify(self, host: str) -> None:
        """Make the certificate of a node anew.

        Raises:
            InputError: the authority's files are missing or damaged.
        """
        missing = [path.name for path in self.needed(True) if not path.exists()]
        if missing:
            raise InputError(
                f"{self.path} lacks {', '.join(missing)}; copy the files from the machine of 'hiddenlab cascade up'"
            )
        certificate, authority = AUTHORITY
        made = make_certificate(
            ((self.path / certificate).read_bytes(), (self.path / authority).read_bytes()), host
        )
        for ending, content in zip(("pem", "key"), made, strict=True):
            write_file(self._of(host, ending), content, private=True)

    def _of(self, host: str, ending: str) -> Path:
        return self.path / f"node-{host.replace(':', '_')}.{ending}"

    def log(self, host: str) -> Path:
        """Return the file with what ``ray start`` says."""
        return self._of(host, "log")

    def write(self, member: Member) -> None:
        """Note a running node."""
        write_file(self._of(member.host, "json"), json.dumps(asdict(member)), private=True)

    def forget(self, member: Member) -> None:
        """Remove the note of a node that ended."""
        self._of(member.host, "json").unlink(missing_ok=True)

    def members(self) -> list[Member]:
        """Return the nodes that were started from this folder on this machine."""
        here, found = own_addresses(), []
        for path in sorted(self.path.glob("node-*.json")):
            try:
                member = Member(**json.loads(path.read_text()))
            except (OSError, ValueError, TypeError):
                raise InputError(f"{path} is damaged; delete it") from None
            if member.host in here:
                found.append(member)
        return found

    def environment(self, host: str, tls: bool) -> dict[str, str]:
        """Return the environment in which Ray runs as a member."""
        given = {
            "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str((self.path / TOKEN).absolute()),
            "RAY_USE_TLS": str(int(tls)),
        }  # fmt: skip
        if tls:
            given |= {
                "RAY_TLS_SERVER_CERT": str(self._of(host, "pem").absolute()),
                "RAY_TLS_SERVER_KEY": str(self._of(host, "key").absolute()),
                "RAY_TLS_CA_CERT": str((self.path / AUTHORITY[0]).absolute()),
            }
        return given

    def enter(self, address: str | None = None) -> str:
        """Make this process a member, before Ray is imported, and return the cluster's address.

        Args:
            address: of the cluster; None takes that of the node that runs here.

        Raises:
            InputError: no node of that cluster was started here, or Ray was imported before.
        """
        members = [one for one in self.members() if address in (None, one.address)]
        if not members:
            what = f"the cluster at {address}" if address else "a cluster"
            raise InputError(
                f"no node of {what} was started here from {self.path}; run 'hiddenlab cascade up' or 'join' first"
            )
        member = members[0]
        wanted = self.environment(member.host, member.tls)
        changed = any(os.environ.get(name) != value for name, value in wanted.items())
        os.environ.pop("RAY_AUTH_TOKEN", None)  # it would be used in place of the file
        os.environ.update(wanted)
        if changed and "ray" in sys.modules:
            # Ray reads these once, when it is imported.
            raise InputError("Ray was imported before the cluster's folder was read; read it first")
        return member.address


def enter(address: str | None, folder: str | None) -> str | None:
    """Make this process a member of the cluster that the options name, and return the cluster's address.

    A folder that is named is used. The default folder is used where it holds a node of the cluster at ``address``.
    Otherwise the environment stays as the user set it.

    Args:
        address, folder: as given on the command line.

    Raises:
        InputError: see ``ClusterFolder.enter``.
    """
    if folder is not None:
        return ClusterFolder(folder).enter(address)
    if address is not None:
        usual = ClusterFolder()
        if any(member.address == address for member in usual.members()):
            return usual.enter(address)
    return address


def default_folder() -> Path:
    """Return ``$HIDDENLAB_CLUSTER``, or ``hiddenlab/cluster`` below ``$XDG_CONFIG_HOME`` or ``~/.config``."""
    own = os.environ.get(DEFAULT)
    try:
        if own:
            return Path(own).expanduser()
        return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "hiddenlab" / "cluster"
    except RuntimeError as error:
        raise InputError(f"there is no home folder ({error}); give --folder") from None


def own_addresses() -> set[str]:
    """Return the addresses of this machine."""
    found = (one.address.partition("%")[0] for all_of in psutil.net_if_addrs().values() for one in all_of)
    return {address for address in found if _is_ip(address)}


def check_own(host: str) -> None:
    """Check that an address is one of this machine's.

    Raises:
        InputError: it is not, or it is loopback, which other machines cannot reach.
    """
    if not _is_ip(host):
        raise InputError(f"{host!r} is no IP address; this machine has {', '.join(_reachable())}")
    if ipaddress.ip_address(host).is_loopback:
        raise InputError(f"{host} is this machine alone; for other machines it has {', '.join(_reachable())}")
    if host not in own_addresses():
        raise InputError(f"{host} is no address of this machine; it has {', '.join(_reachable())}")


def check_free(host: str, ports: Sequence[int]) -> None:
    """Check that ports are free.

    Raises:
        InputError: another program listens at one.
    """
    for port in ports:
        try:
            socket.create_server((host, port)).close()
        except OSError:
            raise InputError(
                f"another program listens at {host}:{port}; end it, or give another --port"
            ) from None


def toward(address: str) -> str:
    """Return the address of this machine from which it reaches another.

    Raises:
        InputError: there is no way to it.
    """
    host, _, port = address.rpartition(":")
    with suppress(OSError, ValueError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))
        return str(probe.getsockname()[0])
    raise InputError(f"this machine has no way to {address}; write HOST:PORT, for instance 10.77.0.1:6379")


def tensor_ports() -> Sequence[int]:
    """Return the ports at which Cascade nodes of this machine may listen; 0 where any will do."""
    text = os.environ.get(TENSOR_PORTS)
    if not text:
        return (0,)
    low, high = parse_ports(text)
    return range(low, high + 1)


def processes(mark: str) -> list[psutil.Process]:
    """Return the processes that carry a node's mark in their environment."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(NODE) == mark:
                found.append(process)
    return found


def describe(member: Member) -> dict[str, Any]:
    """Return what is shown of a member."""
    return {"host": member.host, "address": member.address, "tls": member.tls}


def _reachable() -> list[str]:
    return sorted(a for a in own_addresses() if not ipaddress.ip_address(a).is_loopback) or [
        "none but loopback"
    ]


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
