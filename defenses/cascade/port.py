"""Reserve a port of this machine before anything starts on it.

Ray's proxies share a port silently (SO_REUSEPORT): two servers would answer in turn.
"""

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from filelock import FileLock, Timeout

from hiddenlab.errors import InputError
from hiddenlab.utils.cache import cache_path

TRIES = 20  # ports above a taken one that are tried for the message


@contextmanager
def reserved(host: str, port: int) -> Iterator[None]:
    """Reserve a port against other servers of this program, once nobody listens on it.

    Raises:
        InputError: somebody listens there, or another server of this program is starting (the message names a free
            port); or the address is not this machine's.
    """
    lock = FileLock(cache_path("ports", f"{port}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise InputError(_advice(host, port)) from None
    try:
        if not free(host, port):
            raise InputError(_advice(host, port))
        yield
    finally:
        lock.release()


def free(host: str, port: int) -> bool:
    """Return whether nobody listens at an address of this machine.

    Raises:
        InputError: it is no address of this machine, or may not be used.
    """
    try:
        ((family, kind, _, _, address), *_) = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        with socket.socket(family, kind) as probe:
            # With this option, connections that just ended do not count; a listener does, even if it shares its port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return False
        raise InputError(f"cannot listen at {host}:{port}: {error.strerror or error}") from None
    except UnicodeError:
        raise InputError(f"cannot listen at {host[:80]!r}: that is no name of a host") from None
    return True


def _advice(host: str, port: int) -> str:
    other = next((p for p in range(port + 1, min(port + TRIES, 65535) + 1) if free(host, p)), None)
    advice = "choose another with --port" if other is None else f"--port {other} is free"
    return f"another program listens at {host}:{port}; {advice}"
