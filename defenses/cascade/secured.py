"""Encrypt the connections between nodes by mutual TLS, with the certificates that Ray itself uses (``RAY_TLS_*``)."""

import os
import select
import socket
import ssl
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hiddenlab.errors import InputError

FLAG = "RAY_USE_TLS"
FILES = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")
RECORD = 16384  # bytes of one TLS record
GATHER = 1 << 18  # bytes of small buffers that are joined before they are encrypted


@dataclass(frozen=True)
class Tls:
    """Mutual TLS of a node: both ends show a certificate of the cluster's authority.

    Attributes:
        client: for connections that this node opens; it also checks the other's address.
        server: for connections that it accepts.
    """

    client: ssl.SSLContext
    server: ssl.SSLContext

    @classmethod
    def of(cls, certificate: str | Path, key: str | Path, authority: str | Path) -> "Tls":
        """Read the files of a node.

        Raises:
            InputError: one cannot be read, or is no certificate or key.
        """
        try:
            contexts = []
            for purpose in (ssl.Purpose.SERVER_AUTH, ssl.Purpose.CLIENT_AUTH):
                context = ssl.create_default_context(purpose, cafile=str(authority))
                context.load_cert_chain(certificate, key)
                context.minimum_version = ssl.TLSVersion.TLSv1_3
                context.verify_mode = ssl.CERT_REQUIRED
                contexts.append(context)
        except (OSError, ValueError) as error:
            raise InputError(
                f"no certificate can be read from {certificate}, {key} and {authority}: {error}"
            ) from None
        return cls(*contexts)

    @classmethod
    def of_environment(cls) -> "Tls":
        """Read the files that ``RAY_TLS_SERVER_CERT``, ``RAY_TLS_SERVER_KEY`` and ``RAY_TLS_CA_CERT`` name.

        Raises:
            InputError: one is not set or cannot be read.
        """
        missing = [name for name in FILES if not os.environ.get(name)]
        if missing or not enabled():
            raise InputError(
                f"this node has no certificate ({', '.join(missing or [FLAG])} not set); start it with 'hiddenlab "
                "cascade join'"
            )
        return cls.of(*(os.environ[name] for name in FILES))

    def call(self, connection: socket.socket, host: str) -> "Secured":
        """Open TLS on a connection to an address.

        Raises:
            OSError: the other side has no certificate for that address, or refuses ours.
        """
        return Secured(self.client.wrap_socket(connection, server_hostname=host))

    def answer(self, connection: socket.socket) -> "Secured":
        """Open TLS on a connection that was accepted.

        Raises:
            OSError: the other side has no certificate of this cluster.
        """
        return Secured(self.server.wrap_socket(connection, server_side=True))


def enabled() -> bool:
    """Return whether this process's environment asks Ray for TLS."""
    return os.environ.get(FLAG, "0").lower() in ("1", "true")


def explain(error: OSError) -> str:
    """Return the cause of a failed connection in words of clusters and certificates."""
    text = str(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        if "address" in error.verify_message.lower() or "hostname" in error.verify_message.lower():
            return f"its certificate is for another address ({error.verify_message})"
        return f"its certificate is not of this cluster ({error.verify_message})"
    if isinstance(error, ssl.SSLError):
        reason = (error.reason or text).lower()
        if "alert" in reason:
            return f"it refuses our certificate, which is not of its cluster ({reason.replace('_', ' ')})"
        return f"it does not speak TLS ({reason.replace('_', ' ')})"
    return text


class Secured:
    """A TLS connection with the methods of a socket that nodes use; one thread may read while others write.

    OpenSSL's connection must not be used by two threads at once. So it is not blocking, and is used under a lock that
    nobody holds while he waits for the network.
    """

    def __init__(self, connection: ssl.SSLSocket) -> None:
        self._connection, self._lock = connection, threading.Lock()
        self._timeout, self._closed = connection.gettimeout(), False
        self._file = connection.fileno()
        connection.setblocking(False)

    def sendmsg(self, buffers: Sequence[memoryview]) -> int:
        """Encrypt and send some of the buffers' bytes, and return how many."""
        first = buffers[0]
        if len(first) < RECORD and len(buffers) > 1:
            some, size = [], 0
            for buffer in buffers:
                if size + len(buffer) > GATHER:
                    break
                some.append(buffer)
                size += len(buffer)
            first = memoryview(b"".join(some))
        return self._until_done(lambda: self._connection.send(first))

    def sendall(self, data: bytes) -> None:
        """Encrypt and send everything."""
        view = memoryview(data)
        while view:
            view = view[self.sendmsg([view]) :]

    def recv_into(self, view: memoryview, size: int = 0) -> int:
        """Read and decrypt up to so many bytes; 0 where the connection ended."""
        try:
            return self._until_done(lambda: self._connection.recv_into(view, size or len(view)))
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            return 0

    def _until_done(self, step: Any) -> int:
        while True:
            with self._lock:
                # Closed, Python's TLS socket would go on in plain text.
                if self._closed:
                    raise OSError("the connection is closed")
                try:
                    return int(step())
                except ssl.SSLWantReadError:
                    event = select.POLLIN
                except ssl.SSLWantWriteError:
                    event = select.POLLOUT
            poll = select.poll()
            poll.register(self._file, event)
            if not poll.poll(None if self._timeout is None else 1000 * self._timeout):
                raise TimeoutError("timed out")

    def settimeout(self, seconds: float | None) -> None:
        """Limit how long a call waits for the network."""
        self._timeout = seconds

    def setsockopt(self, *option: Any) -> None:
        """Set an option of the socket."""
        self._connection.setsockopt(*option)

    def shutdown(self, how: int) -> None:
        """End both directions; who waits in another thread wakes up."""
        with self._lock:
            if not self._closed:
                self._closed = True
                with suppress(OSError):
                    self._connection.shutdown(how)

    def close(self) -> None:
        """Close the socket."""
        with self._lock:
            self._closed = True
            self._connection.close()
