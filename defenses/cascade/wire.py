"""Send tensors from node to node over TCP, with authentication, framing and an optional simulated network.

A frame is twelve bytes (length of head and of payload), a JSON head, and the tensors' bytes; nothing is unpickled. Both
ends of a connection prove that they know the cluster's key (HMAC-SHA256 over a nonce of the other's) before anything
else is read. Between machines everything goes through mutual TLS (``secured``).
"""

import hashlib
import hmac
import json
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hiddenlab.defenses.cascade.cost import Link
from hiddenlab.defenses.cascade.secured import Secured, Tls, explain

_LENGTHS = struct.Struct("!IQ")
_NONCE, _DIGEST, _NAME = 32, 32, 256
_MAX_HEAD = 1 << 26
_ALIGN = 16
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
    "int64": torch.int64,  # of masked sums and shares
    "uint8": torch.uint8,
}
HANDSHAKE_SECONDS = 10.0

Address = tuple[str, int]
Connection = socket.socket | Secured
Receive = Callable[[str, dict[str, Any], list[Tensor]], None]
Lost = Callable[[str], None]


class WireError(OSError):
    """A peer is unknown, gone, or speaks another protocol."""


@dataclass
class Bytes:
    """The traffic that a hub sent.

    Attributes:
        payload: bytes of tensors.
        framing: bytes of everything else.
        messages: number of messages.
    """

    payload: int = 0
    framing: int = 0
    messages: int = 0


@dataclass(frozen=True)
class Endpoint:
    """Where a hub listens, and how its connections are protected.

    Attributes:
        host: address to listen on.
        ports: the first free one is taken; 0 lets the operating system choose.
        tls: mutual TLS for every connection; None sends in clear.
    """

    host: str = "127.0.0.1"
    ports: Sequence[int] = (0,)
    tls: Tls | None = None

    def listen(self) -> socket.socket:
        """Listen at the first free port.

        Raises:
            WireError: none is free.
        """
        for port in self.ports:
            with suppress(OSError):
                return socket.create_server((self.host, port), backlog=1024)
        raise WireError(f"none of the ports {self.ports[0]} to {self.ports[-1]} is free at {self.host}")


LOCAL = Endpoint()


class Hub:
    """A node's network endpoint: it listens, connects, sends, and hands over what arrives.

    Args:
        name: of the node.
        key: shared by the nodes of one cluster.
        receive: called with the sender's name, head and tensors, in the thread of that connection.
        lost: called when a peer's connection ends.
        endpoint: where it listens, and whether with TLS.
        link: simulate a network of this bandwidth and latency: messages of a node share its bandwidth, and each is
            handed over at send time + latency + bytes / bandwidth.
    """

    def __init__(
        self,
        name: str,
        key: bytes,
        receive: Receive,
        lost: Lost,
        *,
        endpoint: Endpoint = LOCAL,
        link: Link | None = None,
    ) -> None:
        self.name, self.link, self.sent = name, link, Bytes()
        self._key, self._receive, self._lost = key, receive, lost
        self._peers: dict[str, tuple[Connection, threading.Lock]] = {}
        self._lock = threading.Lock()
        self._free = 0.0  # time at which the simulated link has sent everything
        self._open = True
        self._tls, self._server = endpoint.tls, endpoint.listen()
        self.address: Address = (endpoint.host, int(self._server.getsockname()[1]))
        threading.Thread(target=self._accept, name=f"{name} accepts", daemon=True).start()

    def connect(self, peers: Mapping[str, Address]) -> None:
        """Connect to nodes by name.

        Raises:
            WireError: one cannot be reached or does not know the key.
        """
        for peer, address in peers.items():
            try:
                plain = socket.create_connection(address, timeout=HANDSHAKE_SECONDS)
                connection = plain if self._tls is None else self._tls.call(plain, address[0])
                self._greet(connection, peer)
            except (OSError, ValueError) as error:
                cause = explain(error) if isinstance(error, OSError) else error
                raise WireError(
                    f"{self.name} cannot connect to {peer} at {address[0]}:{address[1]}: {cause}"
                ) from None
            self._serve(peer, connection)

    def send(self, peer: str, head: Mapping[str, Any], tensors: Sequence[Tensor] = ()) -> None:
        """Send a message; return when the operating system has it.

        Raises:
            WireError: there is no connection to that node, or it broke.
        """
        with self._lock:
            if peer not in self._peers:
                raise WireError(f"{self.name} has no connection to {peer}")
            connection, lock = self._peers[peer]
        tensors = [tensor.detach().cpu().contiguous() for tensor in tensors]
        size = sum(tensor.nbytes for tensor in tensors)
        text: dict[str, Any] = {
            "head": head,
            "tensors": [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors],
        }
        if self.link is not None:
            text["due"] = self._due(size)
        encoded = json.dumps(text, separators=(",", ":")).encode()
        buffers: list[Any] = [b""]
        padded = 0
        for tensor in tensors:
            buffers.append(tensor.flatten().view(torch.uint8).numpy().data)
            padded += tensor.nbytes
            if gap := -padded % _ALIGN:
                buffers.append(bytes(gap))
                padded += gap
        buffers[0] = _LENGTHS.pack(len(encoded), padded) + encoded
        with self._lock:
            # Counted first: whoever ends a pass with this message finds it in the counters.
            self.sent.payload += size
            self.sent.framing += len(buffers[0]) + padded - size
            self.sent.messages += 1
        try:
            with lock:
                _send_all(connection, buffers)
        except OSError as error:
            raise WireError(f"the connection from {self.name} to {peer} broke: {error}") from None

    def close(self) -> None:
        """Close every connection."""
        self._open = False
        _close(self._server)
        with self._lock:
            peers, self._peers = list(self._peers.values()), {}
        for connection, _ in peers:
            _close(connection)

    def _due(self, size: int) -> float:
        """Return when a message sent now is handed over, by the machine's clock, which its processes share."""
        assert self.link is not None
        with self._lock:
            self._free = max(self._free, time.monotonic()) + size / self.link.bandwidth
            return self._free + self.link.latency

    def _accept(self) -> None:
        while self._open:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._welcome, args=(connection,), daemon=True).start()

    def _greet(self, connection: Connection, peer: str) -> None:
        """Prove the key as the side that connects, and check that the other side knows it."""
        theirs, mine = _read(connection, _NONCE), os.urandom(_NONCE)
        name = self.name.encode()
        connection.sendall(struct.pack("!H", len(name)) + name + mine + self._proof(theirs, name))
        if not hmac.compare_digest(_read(connection, _DIGEST), self._proof(mine, peer.encode())):
            raise ValueError("it does not know this cluster's key")

    def _welcome(self, plain: socket.socket) -> None:
        plain.settimeout(HANDSHAKE_SECONDS)
        connection: Connection = plain
        try:
            if self._tls is not None:
                connection = self._tls.answer(plain)
            nonce = os.urandom(_NONCE)
            connection.sendall(nonce)
            (length,) = struct.unpack("!H", _read(connection, 2))
            if length > _NAME:
                raise ValueError("no name is that long")
            name = bytes(_read(connection, length))
            theirs, proof = _read(connection, _NONCE), _read(connection, _DIGEST)
            if not hmac.compare_digest(proof, self._proof(nonce, name)):
                raise ValueError("it does not know this cluster's key")
            peer = name.decode()
            # Greet only once messages can be sent back.
            self._serve(peer, connection, greeting=self._proof(theirs, self.name.encode()))
        except (OSError, ValueError):
            _close(connection)

    def _proof(self, nonce: bytes | bytearray, name: bytes) -> bytes:
        return hmac.digest(self._key, bytes(nonce) + name, hashlib.sha256)

    def _serve(self, peer: str, connection: Connection, greeting: bytes = b"") -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            before = self._peers.get(peer)
            self._peers[peer] = connection, threading.Lock()
        if before is not None:
            _close(before[0])  # a node that was started again
        if greeting:
            connection.sendall(greeting)
        threading.Thread(
            target=self._listen, args=(peer, connection), name=f"{self.name} hears {peer}", daemon=True
        ).start()

    def _listen(self, peer: str, connection: Connection) -> None:
        try:
            while True:
                head_size, size = _LENGTHS.unpack(_read(connection, _LENGTHS.size))
                if head_size > _MAX_HEAD:
                    raise ValueError("no head is that long")
                text = json.loads(_read(connection, head_size))
                tensors = _tensors(text["tensors"], _read(connection, size))
                if (wait := text.get("due", 0.0) - time.monotonic()) > 0:
                    time.sleep(wait)
                self._receive(peer, text["head"], tensors)
        except Exception as error:  # a malformed message ends only its sender's connection
            if not isinstance(error, OSError):
                logging.getLogger(__name__).warning("%s drops %s: %r", self.name, peer, error)
        with self._lock:
            current = self._peers.get(peer)
            if current is not None and current[0] is connection:
                del self._peers[peer]
                if self._open:
                    # Report under the lock; later, the name might belong to a node that was started again.
                    self._lost(peer)
        _close(connection)


def _tensors(described: Sequence[Any], payload: bytearray) -> list[Tensor]:
    """Return the tensors of a payload, without a copy."""
    tensors, at = [], 0
    for dtype, shape in described:
        count = 1
        for size in shape:
            count *= int(size)
        if count:
            flat = torch.frombuffer(payload, dtype=_DTYPES[dtype], count=count, offset=at)
        else:
            flat = torch.empty(0, dtype=_DTYPES[dtype])
        tensors.append(flat.view(shape))
        at += flat.nbytes + -flat.nbytes % _ALIGN
    return tensors


def _send_all(connection: Connection, buffers: list[Any]) -> None:
    """Send all buffers in as few system calls as possible, without joining them first."""
    views = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
    while views:
        sent = connection.sendmsg(views[:512])
        while views and sent >= len(views[0]):
            sent -= len(views[0])
            views.pop(0)
        if sent:
            views[0] = views[0][sent:]


def _read(connection: Connection, size: int) -> bytearray:
    """Read so many bytes.

    Raises:
        WireError: the connection ended before.
    """
    buffer = bytearray(size)
    view, got = memoryview(buffer), 0
    while got < size:
        n = connection.recv_into(view[got:], size - got)
        if n == 0:
            raise WireError("the connection ended")
        got += n
    return buffer


def _close(connection: Connection) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
