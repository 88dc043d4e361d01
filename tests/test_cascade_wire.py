"""Tensors over TCP arrive as they were sent, from nobody else and not too early; remote nodes compute as local ones."""

import hashlib
import hmac
import json
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hiddenlab.defenses.cascade.attn_host import AttnHost
from hiddenlab.defenses.cascade.backend import Cascade, Settings
from hiddenlab.defenses.cascade.cost import Link, Shape, layer_bytes, sent
from hiddenlab.defenses.cascade.generate import generate
from hiddenlab.defenses.cascade.load import load_cascade_model
from hiddenlab.defenses.cascade.local import LocalCascade
from hiddenlab.defenses.cascade.node_state import Head, NodeError, attn_name, comp_name
from hiddenlab.defenses.cascade.nodes import Partial, Rows
from hiddenlab.defenses.cascade.passes import Pass
from hiddenlab.defenses.cascade.remote import Mailbox, RemoteAttn, WireCascade, head_from_json, head_to_json
from hiddenlab.defenses.cascade.wire import Hub, WireError
from hiddenlab.errors import InputError
from hiddenlab.eval.bench.cascade import bench
from hiddenlab.models.attention import Attention
from hiddenlab.sharding import AttnNode, Plan
from hiddenlab.testing import VOCABULARY
from tests.waiting import eventually

TinyPath = Callable[..., str]
KEY = b"the cluster's key"
PATIENCE = 20.0  # seconds until a test that waits for something that should happen gives up
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class End(Hub):
    """A hub that keeps what comes, and when."""

    def __init__(self, name: str, key: bytes = KEY, link: Link | None = None) -> None:
        self.came: queue.Queue[tuple[str, dict[str, Any], list[Tensor]]] = queue.Queue()
        self.times: list[float] = []
        self.losses: queue.Queue[str] = queue.Queue()
        super().__init__(name, key, self._take, self.losses.put, link=link)

    def _take(self, sender: str, head: dict[str, Any], tensors: list[Tensor]) -> None:
        self.times.append(time.monotonic())
        self.came.put((sender, head, tensors))

    def next(self) -> tuple[str, dict[str, Any], list[Tensor]]:
        return self.came.get(timeout=PATIENCE)


@pytest.fixture
def end() -> Iterator[Callable[..., End]]:
    """Hubs that are closed after the test."""
    made: list[End] = []

    def make(*args: Any, **options: Any) -> End:
        made.append(End(*args, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


# ---- messages


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[End, End]]:
    one, other = End("one"), End("other")
    one.connect({"other": other.address})
    yield one, other
    one.close()
    other.close()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@settings(max_examples=80)
@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=4), st.booleans()), max_size=5
    ),
    st.dictionaries(st.text(), JSON, max_size=3),
    st.booleans(),
)
def test_what_is_sent_arrives(
    pair: tuple[End, End], kinds: list[tuple[torch.dtype, list[int], bool]], head: dict[str, Any], back: bool
) -> None:
    """Every dtype, shape and memory layout, none and empty ones too, bit by bit; its bytes are counted exactly."""
    sender, receiver = pair[::-1] if back else pair
    tensors = []
    for dtype, shape, turned in kinds:
        one = torch.randn(shape).to(dtype)
        if one.ndim:
            one[..., :1] = float("-inf")
        tensors.append(one.T if turned and one.ndim == 2 else one)
    before = sender.sent.payload, sender.sent.framing, sender.sent.messages
    sender.send(receiver.name, head, tensors)
    name, found_head, found = receiver.next()
    assert (name, found_head) == (sender.name, head)
    assert [one.dtype for one in found] == [one.dtype for one in tensors]
    assert [one.shape for one in found] == [one.shape for one in tensors]
    assert all(torch.equal(one, other) for one, other in zip(found, tensors, strict=True))
    bytes_of = {torch.float64: 8, torch.float32: 4, torch.float16: 2, torch.bfloat16: 2}
    assert sender.sent.payload - before[0] == sum(bytes_of[one.dtype] * one.numel() for one in tensors)
    assert sender.sent.framing > before[1]
    assert sender.sent.messages == before[2] + 1


def test_many_and_large_tensors_in_one_message(pair: tuple[End, End]) -> None:
    """More buffers than a system call takes, and more bytes than a socket holds."""
    tensors = [torch.full((3,), float(i)) for i in range(1100)] + [torch.randn(3, 1 << 20)]
    pair[0].send("other", {"n": 1}, tensors)
    found = pair[1].next()[2]
    assert len(found) == len(tensors)
    assert all(torch.equal(one, other) for one, other in zip(found, tensors, strict=True))


def test_messages_of_several_threads_stay_whole(pair: tuple[End, End]) -> None:
    """And each thread's in order; every message takes several system calls."""

    def talk(thread: int) -> None:
        for i in range(8):
            pair[0].send("other", {"thread": thread, "i": i}, [torch.full((10 + i,), float(thread))] * 1100)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(talk, range(4)))
    came: dict[int, list[int]] = {}
    for _ in range(32):
        _, head, tensors = pair[1].next()
        came.setdefault(head["thread"], []).append(head["i"])
        assert len(tensors) == 1100
        expected = torch.full((10 + head["i"],), float(head["thread"]))
        assert all(torch.equal(one, expected) for one in tensors)
    assert came == {thread: list(range(8)) for thread in range(4)}


def test_a_node_talks_to_several_others(end: Callable[..., End]) -> None:
    hub, peers = end("hub"), [end(f"peer {i}") for i in range(3)]
    hub.connect({peer.name: peer.address for peer in peers})
    for i, peer in enumerate(peers):
        hub.send(peer.name, {"to": i})
        peer.send("hub", {"from": i})
    assert [peer.next()[:2] for peer in peers] == [("hub", {"to": i}) for i in range(3)]
    assert {hub.next()[0] for _ in peers} == {peer.name for peer in peers}
    with pytest.raises(WireError, match="hub has no connection to peer 7"):
        hub.send("peer 7", {})


# ---- who may connect


def proof(key: bytes, nonce: bytes, name: str) -> bytes:
    return hmac.new(key, nonce + name.encode(), hashlib.sha256).digest()


def read(connection: socket.socket, size: int) -> bytes:
    """So many bytes, or fewer where the connection ends."""
    found = b""
    with suppress(ConnectionError):
        while len(found) < size and (more := connection.recv(size - len(found))):
            found += more
    return found


def introduce(address: tuple[str, int], name: str, key: bytes = KEY) -> tuple[socket.socket, bytes]:
    """Greet a hub without any code of the hub's; the connection, and what it answered."""
    connection = socket.create_connection(address, timeout=PATIENCE)
    theirs, mine = read(connection, 32), os.urandom(32)
    said = name.encode()
    connection.sendall(struct.pack("!H", len(said)) + said + mine + proof(key, theirs, name))
    return connection, read(connection, 32)


def test_the_handshake_is_as_documented(end: Callable[..., End]) -> None:
    """Both sides prove that they know the key, for a nonce of the other's and under their own names."""
    hub = end("hub")
    connection = socket.create_connection(hub.address, timeout=PATIENCE)
    theirs, mine = read(connection, 32), os.urandom(32)
    connection.sendall(struct.pack("!H", 5) + b"guest" + mine + proof(KEY, theirs, "guest"))
    assert read(connection, 32) == proof(KEY, mine, "hub")
    head = json.dumps({"head": {"a": 1}, "tensors": []}).encode()
    connection.sendall(struct.pack("!IQ", len(head), 0) + head)
    assert hub.next() == ("guest", {"a": 1}, [])
    connection.close()


def test_a_wrong_key_is_refused(end: Callable[..., End]) -> None:
    hub, stranger = end("hub"), end("stranger", b"another key")
    for one, other in ((stranger, hub), (hub, stranger)):
        with pytest.raises(WireError, match=f"{one.name} cannot connect to {other.name} at 127.0.0.1:"):
            one.connect({other.name: other.address})
        for side, peer in ((one, other), (other, one)):
            with pytest.raises(WireError, match="has no connection to"):
                side.send(peer.name, {})
    connection, answer = introduce(hub.address, "guest", b"another key")
    assert answer == b""
    connection.close()
    assert hub.came.empty() and hub.losses.empty()


def test_a_server_that_cannot_prove_the_key_is_refused(end: Callable[..., End]) -> None:
    """The side that connects is careful as well: also with a name other than the one that it called."""
    hub, other = end("hub"), end("other")
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        refused = pool.submit(hub.connect, {"impostor": server.getsockname()[:2]})
        connection, _ = server.accept()
        connection.sendall(os.urandom(32))
        assert len(read(connection, 2 + 3 + 32 + 32)) == 69
        connection.sendall(os.urandom(32))
        with pytest.raises(WireError, match="it does not know this cluster's key"):
            refused.result(PATIENCE)
        connection.close()
    with pytest.raises(WireError, match="it does not know this cluster's key"):
        hub.connect({"someone else": other.address})
    with pytest.raises(WireError, match="no connection"):
        hub.send("someone else", {})


def test_a_greeting_that_was_overheard_opens_nothing(end: Callable[..., End]) -> None:
    hub = end("hub")
    connection = socket.create_connection(hub.address, timeout=PATIENCE)
    nonce = read(connection, 32)
    greeting = struct.pack("!H", 5) + b"guest" + bytes(32) + proof(KEY, nonce, "guest")
    connection.sendall(greeting)
    assert len(read(connection, 32)) == 32
    again = socket.create_connection(hub.address, timeout=PATIENCE)
    assert read(again, 32) != nonce
    again.sendall(greeting)
    assert read(again, 32) == b""
    for one in (connection, again):
        one.close()


@settings(max_examples=25)
@given(st.binary(max_size=400))
def test_garbage_on_the_port_does_no_harm(pair: tuple[End, End], garbage: bytes) -> None:
    for hub in pair:
        with socket.create_connection(hub.address, timeout=PATIENCE) as connection:
            read(connection, 32)
            with suppress(OSError):  # it may have hung up before the end
                connection.sendall(garbage)
                connection.shutdown(socket.SHUT_WR)
            assert read(connection, 1) == b""
    pair[0].send("other", {"still": "here"}, [torch.ones(2)])
    assert pair[1].next()[:2] == ("one", {"still": "here"})
    assert pair[0].losses.empty() and pair[1].losses.empty()


def frame(text: Any, payload: bytes = b"") -> bytes:
    head = json.dumps(text).encode()
    return struct.pack("!IQ", len(head), len(payload)) + head + payload


@pytest.mark.parametrize(
    "garbage",
    [
        b"no frame" * 20,
        struct.pack("!IQ", 1 << 31, 0),
        struct.pack("!IQ", 3, 0) + b"{{{",
        struct.pack("!IQ", 2, 0) + b"\xff\xfe",
        frame([]),
        frame({"head": {}}),
        frame({"tensors": []}),
        frame({"head": {}, "tensors": [["int7", [1]]]}, bytes(16)),
        frame({"head": {}, "tensors": [["float32", [5]]]}, bytes(16)),
        frame({"head": {}, "tensors": [["float32", ["x"]]]}, bytes(16)),
        frame({"head": {}, "tensors": [["float32", [-2, 2]]]}, bytes(16)),
        frame({"head": {}, "tensors": [["float32", [0, -2]]]}, bytes(16)),
        frame({"head": {}, "tensors": []})[:4] + struct.pack("!Q", 1 << 63) + frame({"head": {}, "tensors": []})[12:],
    ],
    ids=[
        "noise", "long head", "no JSON", "no text", "list", "no tensors", "no head", "dtype", "too short", "sizes",
        "negative size", "negative and empty", "long payload",
    ],
)  # fmt: skip
def test_a_peer_that_sends_no_frames_is_lost_and_no_other(end: Callable[..., End], garbage: bytes) -> None:
    """A node of the cluster that went mad is dropped: its connection is closed, and the loss is told."""
    hub, other = end("hub"), end("other")
    hub.connect({"other": other.address})
    connection, answer = introduce(hub.address, "mad")
    assert len(answer) == 32
    connection.sendall(garbage)
    assert hub.losses.get(timeout=PATIENCE) == "mad"
    assert read(connection, 1) == b""
    connection.close()
    with pytest.raises(WireError, match="no connection to mad"):
        hub.send("mad", {})
    other.send("hub", {"sound": True})
    assert hub.next() == ("other", {"sound": True}, [])
    assert hub.losses.empty()


# ---- lost and found


def test_an_unreachable_node_is_named(end: Callable[..., End]) -> None:
    hub = end("hub")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()[:2]
    with pytest.raises(WireError, match=f"hub cannot connect to gone at 127.0.0.1:{address[1]}"):
        hub.connect({"gone": address})


def test_a_peer_that_ends_is_reported_lost(end: Callable[..., End]) -> None:
    """To both kinds of side, the one that called and the one that was called; who closes himself is told nothing."""
    first, hub, last = end("first"), end("hub"), end("last")
    first.connect({"hub": hub.address})
    hub.connect({"last": last.address})
    eventually(lambda: len(hub._peers) == 2)
    hub.close()
    assert first.losses.get(timeout=PATIENCE) == "hub"
    assert last.losses.get(timeout=PATIENCE) == "hub"
    with pytest.raises(WireError, match="first has no connection to hub"):
        first.send("hub", {})
    assert hub.losses.empty()
    with pytest.raises(WireError):
        first.connect({"hub": hub.address})


def test_a_node_started_again_is_found_at_its_new_address(end: Callable[..., End]) -> None:
    hub, node = end("hub"), end("node")
    hub.connect({"node": node.address})
    node.close()
    assert hub.losses.get(timeout=PATIENCE) == "node"
    again = end("node")
    hub.connect({"node": again.address})
    hub.send("node", {"to": "again"}, [torch.ones(3)])
    assert again.next()[:2] == ("hub", {"to": "again"})
    again.send("hub", {"from": "again"})
    assert hub.next()[:2] == ("node", {"from": "again"})
    assert hub.losses.empty()


def test_a_node_that_comes_back_takes_its_own_place(end: Callable[..., End]) -> None:
    """While the connection of its former self still stands: that one ends, and nobody is reported lost."""
    hub, before, after = end("hub"), end("node"), end("node")
    before.connect({"hub": hub.address})
    after.connect({"hub": hub.address})
    hub.send("node", {"for": "the second"})
    assert after.next()[:2] == ("hub", {"for": "the second"})
    assert before.losses.get(timeout=PATIENCE) == "hub"
    after.send("hub", {"from": "the second"})
    assert hub.next()[:2] == ("node", {"from": "the second"})
    assert before.came.empty() and hub.losses.empty()


# ---- a simulated network


def test_messages_of_a_node_share_its_bandwidth(end: Callable[..., End]) -> None:
    """Each is due when the link has sent what was given it before, and one latency later; read off the frames."""
    bandwidth, latency = 1e4, 0.25
    hub = end("hub", link=Link(bandwidth, latency))
    connections = [introduce(hub.address, f"peer {i}")[0] for i in range(2)]
    eventually(lambda: len(hub._peers) == 2)
    sizes = [40_000, 4, 120_000, 0, 8_000]
    began = time.monotonic()
    for i, size in enumerate(sizes):
        hub.send(f"peer {i % 2}", {"i": i}, [torch.zeros(size // 4)])
    ended = time.monotonic()
    due = []
    for i in range(len(sizes)):
        head, payload = struct.unpack("!IQ", read(connections[i % 2], 12))
        text = json.loads(read(connections[i % 2], head))
        assert len(read(connections[i % 2], payload)) == payload
        assert text["head"] == {"i": i}
        due.append(text["due"])
    # The first finds a free link, the others one that is busy for four seconds and more.
    assert ended - began < 4
    assert began <= due[0] - latency - sizes[0] / bandwidth <= ended
    for before, after, size in zip(due, due[1:], sizes[1:], strict=False):
        assert after - before == pytest.approx(size / bandwidth, abs=1e-6)
    for one in connections:
        one.close()


def test_a_free_link_does_not_make_up_for_lost_time(end: Callable[..., End]) -> None:
    """A message after a pause takes as long as the first."""
    hub = end("hub", link=Link(1e5, 0.0))
    connection, _ = introduce(hub.address, "peer")
    eventually(lambda: "peer" in hub._peers)
    for _ in range(2):
        began = time.monotonic()
        hub.send("peer", {}, [torch.zeros(500)])
        head, payload = struct.unpack("!IQ", read(connection, 12))
        due = json.loads(read(connection, head))["due"]
        read(connection, payload)
        assert began + 0.02 <= due <= time.monotonic() + 0.02
        time.sleep(0.03)
    connection.close()


def test_nothing_is_handed_over_before_it_is_due(end: Callable[..., End]) -> None:
    bandwidth, latency = 1e6, 0.03
    hub, peers = end("hub", link=Link(bandwidth, latency)), [end("a"), end("b")]
    hub.connect({peer.name: peer.address for peer in peers})
    sizes = [40_000, 20_000, 400, 60_000]
    began = time.monotonic()
    for i, size in enumerate(sizes):
        hub.send("ab"[i % 2], {"i": i}, [torch.zeros(size // 4)])
    arrived = {}
    for peer in peers:
        for place in range(2):
            _, head, _ = peer.next()
            arrived[head["i"]] = peer.times[place]
    for i in range(4):
        assert arrived[i] >= began + sum(sizes[: i + 1]) / bandwidth + latency
    assert [peer.came.empty() for peer in peers] == [True, True]


# ---- the mailbox


def head_of(batch: str = "b", step: int = 0, layer: int = 0) -> Head:
    return Head(batch, step, layer, Attention(1.0))


def partial_of(value: float) -> Partial:
    return Partial(torch.full((1, 1), value), None, torch.full((1, 1, 1), value))


def test_an_answer_waits_for_its_own_collector() -> None:
    """By batch, step and sender; each is given once."""
    mailbox = Mailbox(0.02)
    keys = [(b, s, a) for b in "xy" for s in (0, 3) for a in ("A", "B")]
    for i, key in enumerate(keys):
        mailbox.put(*key, [partial_of(float(i))])
    for i, (batch, step, sender) in reversed(list(enumerate(keys))):
        (found,) = mailbox.get(head_of(batch, step), sender)
        assert float(found.maximum) == i
    with pytest.raises(NodeError):
        mailbox.get(head_of("x"), "A")


def test_who_does_not_answer_in_time_is_named() -> None:
    mailbox = Mailbox(0.02)
    mailbox.put("b", 1, "B", [])
    began = time.monotonic()
    with pytest.raises(
        NodeError, match=r"^A did not answer in layer 3: nothing got on for 0.02 s$"
    ) as caught:
        mailbox.get(head_of(step=1, layer=2), "A")
    assert time.monotonic() - began >= 0.02
    assert caught.value.node == "A"


def test_a_slow_answer_is_waited_for() -> None:
    """As long as anything gets on; only standing still is a stall."""
    worked = 0

    def progress() -> int:
        nonlocal worked
        worked += worked < 5
        if worked == 5:
            mailbox.put("b", 0, "A", [])
        return worked

    mailbox = Mailbox(0.02, progress)
    assert mailbox.get(head_of(), "A") == []
    assert worked == 5
    with pytest.raises(NodeError, match="nothing got on"):
        mailbox.get(head_of(step=1), "A")


def waiting(call: Callable[[], Any]) -> tuple[ThreadPoolExecutor, Any]:
    """A call that another thread is waiting in by now."""
    pool = ThreadPoolExecutor(1)
    entered = threading.Event()

    def run() -> Any:
        entered.set()
        return call()

    future = pool.submit(run)
    entered.wait(PATIENCE)
    time.sleep(0.02)
    return pool, future


@pytest.mark.parametrize(
    ("happens", "says", "node"),
    [
        (lambda box: box.lose("A"), "A died in layer 2", "A"),
        (lambda box: box.abort("b"), "the request was given up", None),
        (lambda box: box.put("b", 0, "A", NodeError("A is full", "A")), "A is full", "A"),
    ],
    ids=["lost", "aborted", "failed"],
)
def test_whoever_waits_hears_of_the_end(
    happens: Callable[[Mailbox], None], says: str, node: str | None
) -> None:
    mailbox = Mailbox(10 * PATIENCE)
    pool, future = waiting(lambda: mailbox.get(head_of(layer=1), "A"))
    assert not future.done()
    happens(mailbox)
    with pytest.raises(NodeError, match=says) as caught:
        future.result(PATIENCE)
    assert caught.value.node == node
    pool.shutdown()


def test_an_answer_wakes_its_collector_and_other_losses_do_not() -> None:
    mailbox = Mailbox(10 * PATIENCE)
    pool, future = waiting(lambda: mailbox.get(head_of(), "A"))
    mailbox.lose("B")
    mailbox.abort("another")
    mailbox.put("b", 0, "B", [])
    mailbox.put("b", 1, "A", [])
    time.sleep(0.02)
    assert not future.done()
    mailbox.put("b", 0, "A", [partial_of(4.0)])
    assert float(future.result(PATIENCE)[0].maximum) == 4
    pool.shutdown()


def test_an_answer_that_came_before_the_loss_counts() -> None:
    mailbox = Mailbox(0.02)
    mailbox.put("b", 0, "A", [])
    mailbox.lose("A")
    assert mailbox.get(head_of(), "A") == []
    with pytest.raises(NodeError, match="A died"):
        mailbox.get(head_of(), "A")
    mailbox.lose("A", False)
    with pytest.raises(NodeError, match="did not answer"):
        mailbox.get(head_of(), "A")


def test_what_still_comes_of_an_aborted_batch_is_dropped() -> None:
    mailbox = Mailbox(0.02)
    mailbox.put("b", 0, "A", [])
    mailbox.abort("b")
    mailbox.put("b", 1, "A", [])
    assert mailbox._answers == {}
    for step in (0, 1):
        with pytest.raises(NodeError, match="given up"):
            mailbox.get(head_of(step=step), "A")


# ---- heads


@given(
    st.tuples(st.text(), st.integers(0, 99), st.integers(0, 99)),
    st.tuples(
        st.floats(1e-3, 9), st.booleans(), st.none() | st.integers(1, 99), st.none() | st.floats(1e-3, 99)
    ),
    st.none()
    | st.tuples(
        st.integers(1, 9), st.integers(0, 9), st.booleans(), st.booleans(), st.sets(st.integers(0, 8))
    ),
    st.sampled_from(["dealt", "by hand", "grown", "splits by hand"]),
)
def test_a_head_as_json_is_the_same_head(
    names: tuple[str, int, int],
    how: tuple[float, bool, int | None, float | None],
    work: tuple[int, int, bool, bool, set[int]] | None,
    kind: str,
) -> None:
    begun: tuple[Pass, ...] | None = None
    if work is not None:
        tokens, since, keep, last, hidden = work
        plan = {
            "dealt": lambda: Plan.clustered(tokens, 2, alpha=2, m=2, symmetric=keep),
            "by hand": lambda: Plan.by_hand([range(0, tokens, 2), range(1, tokens, 2), []], m=2),
            "grown": lambda: Plan.by_hand([range(tokens)]).grown(tokens + 3),
            "splits by hand": lambda: Plan(tokens, (tuple(range(tokens)),), ((), tuple(range(tokens)))),
        }[kind]()
        begun = (Pass("r", plan, names[1], since, keep, last, tuple(sorted(hidden))), Pass("s", plan))
    head = Head(*names, Attention(*how), begun)
    assert head_from_json(json.loads(json.dumps(head_to_json(head)))) == head


# ---- nodes over real connections


def wired(path: str, like: Plan, **options: Any) -> WireCascade:
    """The nodes of a plan, each with a hub of its own."""
    assert like.m is not None
    return WireCascade(
        load_cascade_model(path),
        like.alpha,
        m=like.m,
        symmetric=like.symmetric,
        **{"timeout": PATIENCE} | options,
    )


def start_again(network: WireCascade, node: AttnNode) -> None:
    """A new AttnNode in the place of one that ended, as a backend that may restart nodes would make it."""
    (at,) = (i for i, attn in enumerate(network.attns) if attn.host.node == node)
    network.attns[at].hub.close()
    network.attns[at] = RemoteAttn(node, Settings(), network.attns[at].hub._key)
    for comp in network.comps:
        comp.connect({attn_name(node): network.attns[at].hub.address})


def prompt(n: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, (n,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "compress", "symmetric"), [
    ("gemma2", False, False), ("gemma2", True, True), ("llama", True, True), ("bert", False, False)
])  # fmt: skip
def test_remote_nodes_give_what_local_ones_give(
    tiny: TinyPath, architecture: str, compress: bool, symmetric: bool
) -> None:
    path, options = tiny(architecture), Settings(compress=compress)
    made = Plan.clustered(11, 2, alpha=2, m=2, symmetric=symmetric)
    local = LocalCascade(load_cascade_model(path), options)
    with wired(path, made, settings=options) as network:
        for n in (11, 3, 1):
            fits = Plan.clustered(n, 2, alpha=2, m=2, symmetric=symmetric)
            difference = network.forward(prompt(n), fits) - local.forward(prompt(n), fits)
            assert float(difference.abs().max()) <= 1e-5
        halves = Plan.clustered(11, 6, alpha=2, m=2, symmetric=symmetric, causal=local.facts.causal)
        difference = network.forward(prompt(11), halves) - local.forward(prompt(11), made)
        assert float(difference.abs().max()) <= 1e-5
        mask = torch.tensor([True] * 8 + [False] * 3)
        difference = network.forward(prompt(11), made, mask=mask) - local.forward(prompt(11), made, mask=mask)
        assert float(difference[mask].abs().max()) <= 1e-5
        if network.facts.head:
            expected = list(generate(local, prompt(11), made, new_tokens=5))
            for plan in (made, halves):
                assert list(generate(network, prompt(11), plan, new_tokens=5)) == expected


@pytest.mark.slow
def test_concurrent_requests_are_kept_apart(tiny: TinyPath) -> None:
    path = tiny("gemma2")
    local = LocalCascade(load_cascade_model(path))

    def plan(n: int) -> Plan:
        return Plan.clustered(n, 1, alpha=2, symmetric=True)

    with wired(path, plan(2)) as network, ThreadPoolExecutor(4) as pool:

        def answer(cascade: Cascade, n: int) -> list[int]:
            return list(generate(cascade, prompt(n, seed=n), plan(n), new_tokens=4))

        found = list(pool.map(lambda n: answer(network, n), range(2, 10)))
        assert found == [answer(local, n) for n in range(2, 10)]


@pytest.mark.slow
@pytest.mark.parametrize("c", [2, 5])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("compress", "mode"), [(False, "paper"), (True, "logsumexp")])
def test_the_bytes_on_the_wire_are_equation_1(
    tiny: TinyPath, compress: bool, mode: str, symmetric: bool, c: int
) -> None:
    """To the byte, in all and for every node; two messages for each pair of nodes that talk in a layer."""
    path, made = tiny("llama"), Plan.clustered(13, c, alpha=3, m=2, symmetric=symmetric, causal=True)
    assert bool(made.left_out) == (c == 5)
    with wired(path, made, settings=Settings(compress=compress, wire=torch.bfloat16)) as network:
        out = network.forward(prompt(13), made)
        # Receipts of the last layer may still be on their way out of the counters.
        messages = 4 * 2 * len(list(made.messages()))
        eventually(lambda: sum(one["messages"] for one in network.counters().values()) == messages)
        found = {name: one["sent_payload"] for name, one in network.counters().items()}
        exact = LocalCascade(network.comps[0].host.model).forward(prompt(13), made)
    shape = Shape.of(load_cascade_model(path).config, element_bytes=2)
    assert sum(found.values()) == shape.layers * layer_bytes(made, shape, mode)
    by_comp, by_attn = sent(made, shape, mode)
    expected = {comp_name(i): shape.layers * size for i, size in by_comp.items()}
    expected |= {attn_name(node): shape.layers * size for node, size in by_attn.items()}
    assert found == dict.fromkeys(found, 0) | expected
    # Half the bytes cost some accuracy, and no more than that.
    assert 0 < float((out - exact).norm() / exact.norm()) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_the_bench_counts_a_plan_apart_from_the_same_with_all_blocks(tiny: TinyPath, causal: bool) -> None:
    path = tiny("llama")
    found = bench(
        path, max_tokens=16, alphas="2,4", backends="wire", c=4, causal=causal, repeats=2, threads=1
    )
    for alpha, row in zip((2, 4), found["rows"], strict=True):
        shape = Shape.of(load_cascade_model(path).config, element_bytes=4)
        made = Plan.clustered(16, 4, alpha=alpha, causal=causal)
        assert bool(made.left_out) == (causal and alpha == 4)
        assert row["mb_on_wire"] == pytest.approx(shape.layers * layer_bytes(made, shape) / 1e6)
        assert row["max_difference"] <= 1e-4
        assert (
            {"over_all_blocks", "first_node_all_blocks"} <= set(row)
            if causal
            else "over_all_blocks" not in row
        )


def test_recording_nodes_saw_what_the_plan_says(tiny: TinyPath) -> None:
    made = Plan.by_hand([[0, 3, 4, 9], [1, 2, 5, 6, 7, 8]], m=2)
    with wired(tiny("gemma2"), made, settings=Settings(record=True)) as network:
        network.forward(prompt(10), made)
        seen = network.seen()
        assert network.seen() == []
    held = {comp_name(i): set(shard) for i, shard in enumerate(made.shards)}
    held |= {attn_name(node): set(made.held_by(node)) for node in made.attn_nodes}
    assert {one.node: {p for entry in one.entries for p in entry.positions} for one in seen} == held
    queries = {
        one.node: {p for entry in one.entries if entry.site.stream == "q" for p in entry.positions}
        for one in seen
    }
    for node in made.attn_nodes:
        assert queries[attn_name(node)] == set(made.splits[node.queries])


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_simulated_network_changes_no_answer(tiny: TinyPath, symmetric: bool) -> None:
    path, made = tiny("gemma2"), Plan.clustered(6, 1, alpha=2, symmetric=symmetric)
    expected = LocalCascade(load_cascade_model(path)).forward(prompt(6), made)
    with wired(path, made, link=Link(1e7, 0.004)) as network:
        began = time.monotonic()
        out = network.forward(prompt(6), made)
        # Four layers, there and back.
        assert time.monotonic() - began >= 4 * 2 * 0.004
    assert float((out - expected).abs().max()) <= 1e-5


# ---- nodes that fail


def test_a_failure_of_an_attnnode_is_told_to_who_waits(
    tiny: TinyPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Across the wire, under its own name; the node lives on."""
    path, made = tiny("llama"), Plan.clustered(7, 1, alpha=2)
    attend = AttnHost._attend

    def fail(self: AttnHost, running: Any, head: Head, arrived: Any) -> Any:
        if self.node == AttnNode(0, 1) and head.layer == 2:
            raise MemoryError("no room")
        return attend(self, running, head, arrived)

    with wired(path, made) as network:
        expected = network.forward(prompt(7), made)
        with monkeypatch.context() as patch:
            patch.setattr(AttnHost, "_attend", fail)
            with pytest.raises(NodeError, match=r"AttnNode \(0, 1\) failed in layer 3: no room") as caught:
                network.forward(prompt(7), made)
        assert caught.value.node == "AttnNode (0, 1)"
        assert torch.equal(network.forward(prompt(7), made), expected)


def test_a_lost_attnnode_is_named_and_found_again(tiny: TinyPath) -> None:
    path, made = tiny("llama"), Plan.clustered(7, 1, alpha=2)
    lost = AttnNode(1, 0)
    with wired(path, made) as network:
        expected = network.forward(prompt(7), made)
        next(attn for attn in network.attns if attn.host.node == lost).hub.close()
        with pytest.raises(NodeError, match=r"AttnNode \(1, 0\) (is lost|died) in layer 1") as caught:
            network.forward(prompt(7), made)
        assert caught.value.node == "AttnNode (1, 0)"
        start_again(network, lost)
        assert torch.equal(network.forward(prompt(7), made), expected)


def test_a_silent_attnnode_is_named_after_the_timeout(
    tiny: TinyPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Plan.clustered(5, 1, alpha=1)
    with wired(tiny("llama"), made, timeout=0.3) as network:
        monkeypatch.setattr(network.attns[0].host, "receive", lambda *_: None)
        with pytest.raises(
            NodeError, match=r"AttnNode \(0, 0\) did not answer in layer 1: nothing got on for 0.3 s"
        ):
            network.forward(prompt(5), made)


def test_a_replaced_attnnode_does_not_hurt_other_requests(tiny: TinyPath) -> None:
    """A generation goes on after a node that it had spoken to was replaced; the node says what it does not know.

    It stays connected: other requests over the same connections get their answers meanwhile.
    """
    path, made = tiny("llama"), Plan.clustered(5, 1, alpha=2)
    replaced = AttnNode(0, 0)
    with wired(path, made) as network:
        expected = network.forward(prompt(5), made)
        tokens = generate(network, prompt(5), made, new_tokens=6)
        next(tokens)
        start_again(network, replaced)
        with pytest.raises(NodeError, match=r"AttnNode \(0, 0\)") as caught:
            list(tokens)
        assert "died" not in str(caught.value)
        assert torch.equal(network.forward(prompt(5), made), expected)


@pytest.mark.parametrize(
    "other", [{"alpha": 3}, {"alpha": 2, "m": 2}, {"alpha": 2, "symmetric": True}], ids=str
)
def test_a_plan_for_other_nodes_is_refused(tiny: TinyPath, other: dict[str, Any]) -> None:
    """Before anything runs; one for fewer of these nodes is none."""
    made = Plan.clustered(6, 1, alpha=2)
    with wired(tiny("llama"), made, timeout=0.5) as network:
        fits = Plan.clustered(6, 1, alpha=1)
        assert torch.allclose(network.forward(prompt(6), made), network.forward(prompt(6), fits), atol=1e-5)
        before = [one.hub.sent.messages for one in network.comps]
        if other.get("symmetric"):
            # Its nodes are among those that run, and each does what the plan says.
            out = network.forward(prompt(6), Plan.clustered(6, 1, **other))
            assert torch.allclose(out, network.forward(prompt(6), made), atol=1e-5)
            return
        with pytest.raises(InputError, match="the plan needs"):
            network.forward(prompt(6), Plan.clustered(6, 1, **other))
        assert [one.hub.sent.messages for one in network.comps] == before


def test_an_attnnode_that_is_called_waits_until_the_batch_is_given_up() -> None:
    """For carriers without a hub: the call waits for the rows of all CompNodes, or for the end of the batch."""
    made = Plan.clustered(4, 1, alpha=2)
    attn = RemoteAttn(AttnNode(0, 1), Settings(), KEY)
    rows = [
        Rows(torch.randn(2, 2, 3), torch.randn(1, 0, 3), torch.randn(1, 0, 3)),
        Rows(torch.randn(2, 0, 3), torch.randn(1, 2, 3), torch.randn(1, 2, 3)),
    ]
    attention = Attention(1.0, causal=False)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(attn.answer, 0, Head("b", 0, 0, attention, (Pass("r", made),)), rows[0])
        until(lambda: attn.host.waiting("b") == {"missing": [1], "computing": False})
        assert attn.answer(1, Head("b", 0, 0, attention, (Pass("r", made),)), rows[1]) == []
        (part,) = first.result(PATIENCE)
        assert attn.host.waiting("b") is None
        scores = rows[0].queries @ rows[1].keys.transpose(1, 2)
        assert torch.allclose(part.output, scores.softmax(-1) @ rows[1].values, atol=1e-6)
        second = pool.submit(attn.answer, 0, Head("b", 1, 1, attention), rows[0])
        until(lambda: attn.host.waiting("b") == {"missing": [1], "computing": False})
        attn.host.abort("b")
        with pytest.raises(NodeError, match="given up"):
            second.result(PATIENCE)
    with pytest.raises(NodeError, match="given up"):
        attn.answer(1, Head("b", 1, 1, attention), rows[1])
    attn.hub.close()


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)
