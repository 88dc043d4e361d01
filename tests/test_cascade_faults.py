"""A slow node is not a stalled one, restarts come back with time, and a port is taken before anything starts."""

import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hiddenlab.defenses.cascade.attn_host import AttnHost
from hiddenlab.defenses.cascade.faults import Restarts, Watch, stalled
from hiddenlab.defenses.cascade.generate import Cancellation, generate
from hiddenlab.defenses.cascade.load import load_cascade_model
from hiddenlab.defenses.cascade.local import LocalCascade
from hiddenlab.defenses.cascade.node_state import Head, NodeError
from hiddenlab.defenses.cascade.nodes import CompWorker, Partial, Rows
from hiddenlab.defenses.cascade.passes import Pass
from hiddenlab.defenses.cascade.port import free, reserved
from hiddenlab.defenses.cascade.remote import WireCascade
from hiddenlab.defenses.cascade.testing import Scripted
from hiddenlab.errors import InputError
from hiddenlab.sharding import AttnNode, Plan
from hiddenlab.testing import VOCABULARY

PATIENCE = 20.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_node_that_gets_on_is_not_stalled() -> None:
    """However long it takes; one that answers nothing is silent after the patience, and no sooner."""
    clock = Clock()
    watch = Watch(60.0, clock)
    began = clock.now
    for ticks in range(20):
        watch.ask("slow")
        clock.now += 50
        watch.answered("slow", ticks)
        assert watch.silent() == []
        assert not watch.still(began)
    watch.ask("slow")
    watch.ask("gone")
    clock.now += 59
    watch.ask("gone")  # asked again meanwhile: the first question counts
    watch.answered("slow", 100)
    assert watch.silent() == []
    clock.now += 1
    assert watch.silent() == ["gone"]
    assert not watch.still(began)
    watch.forget("gone")
    assert watch.silent() == []


def test_nodes_that_answer_and_do_nothing_stand_still() -> None:
    """Counted from the beginning of the work that waits: idle hours before it are no stall."""
    clock = Clock()
    watch = Watch(60.0, clock)
    watch.answered("a", 7)
    clock.now += 5000
    began = clock.now
    watch.answered("a", 7)
    assert not watch.still(began)
    clock.now += 59
    watch.answered("a", 7)
    assert not watch.still(began)
    clock.now += 1
    watch.answered("a", 7)
    assert watch.still(began)
    watch.answered("a", 8)
    assert not watch.still(began)


def test_restarts_come_back_after_an_hour() -> None:
    clock = Clock()
    restarts = Restarts(2, clock=clock)
    assert restarts.take()
    clock.now += 1800
    assert restarts.take()
    assert not restarts.take()
    assert restarts.left == 0
    clock.now += 1799
    assert not restarts.take()
    clock.now += 1
    assert restarts.left == 1
    assert restarts.take()
    assert not restarts.take()
    clock.now += 10_000
    assert restarts.left == 2
    assert not Restarts(0).take()


def state(*missing: int, computing: bool = False) -> dict[str, object]:
    return {"missing": list(missing), "computing": computing}


@pytest.mark.parametrize(
    ("waiting", "layers", "name"),
    [
        ({"A": state(0, 1), "B": state(1), "C": None}, {"CompNode 0": 3}, "CompNode 1"),
        ({"A": state(computing=True), "B": None}, {"CompNode 0": 3}, "A"),
        ({"A": state(1, computing=True)}, {}, "CompNode 1"),
        ({"A": None, "B": None}, {"CompNode 1": 5, "CompNode 0": 4}, "CompNode 0"),
        ({"A": None}, {}, None),
    ],
    ids=["missed by most", "computes", "missed before it computes", "nobody waits", "nothing says"],
)
def test_the_node_that_keeps_others_waiting_has_stalled(
    waiting: dict[str, dict[str, object] | None], layers: dict[str, int], name: str | None
) -> None:
    assert stalled(waiting, layers) == name


# ---- generations that are given up


def prompt(n: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (n,), generator=torch.Generator().manual_seed(n))


@pytest.mark.parametrize("kind", ["local", "wire"])
def test_a_generation_is_cancelled_within_a_pass(tiny: Callable[..., str], kind: str) -> None:
    """From another thread, in the middle of a layer that would never end; others go on over the same nodes."""
    model, made = load_cascade_model(tiny("llama")), Plan.clustered(6, 1, alpha=2)
    cascade = LocalCascade(model) if kind == "local" else WireCascade(model, 2, timeout=PATIENCE)
    expected = list(generate(cascade, prompt(6), made, new_tokens=4))
    comp = cascade.comp_host(1) if isinstance(cascade, LocalCascade) else cascade.comps[1].host
    cancellation, entered, go_on = Cancellation(), threading.Event(), threading.Event()
    plain = comp.run

    def stuck(*args: object) -> Tensor:
        entered.set()
        assert go_on.wait(PATIENCE)
        return plain(*args)  # type: ignore[arg-type]

    comp.run = stuck  # type: ignore[method-assign, assignment]
    found: list[int] = []
    thread = threading.Thread(
        target=lambda: found.extend(
            generate(cascade, prompt(6), made, new_tokens=4, cancellation=cancellation)
        )
    )
    thread.start()
    assert entered.wait(PATIENCE)
    cancellation.cancel()
    go_on.set()
    thread.join(PATIENCE)
    assert not thread.is_alive() and found == []
    comp.run = plain  # type: ignore[method-assign]
    assert list(generate(cascade, prompt(6), made, new_tokens=4)) == expected
    cascade.shutdown()


def test_a_cancelled_generation_makes_no_further_pass() -> None:
    scripted, cancellation = Scripted(), Cancellation()
    tokens = generate(
        scripted, prompt(4), Plan.clustered(4, 1, alpha=1), new_tokens=9, cancellation=cancellation
    )
    assert [next(tokens), next(tokens)] == scripted.script * 2
    cancellation.cancel()
    assert list(tokens) == []
    assert len(scripted.asked) == 2
    assert set(scripted.closed) == set(scripted.requests)


def test_what_a_cancelled_generation_lost_is_not_run_again() -> None:
    """The node is not replaced for it: nobody waits for its answer."""
    cancellation = Cancellation()

    class Losing(Scripted):
        def step(self, work: Pass, tokens: Tensor) -> Tensor:
            cancellation.cancel()
            raise NodeError("CompNode 0 died", "CompNode 0")

    losing = Losing()
    made = Plan.clustered(4, 1, alpha=1)
    assert list(generate(losing, prompt(4), made, new_tokens=9, cancellation=cancellation)) == []
    assert losing.recovered == 0


def test_a_slow_wire_is_waited_for(tiny: Callable[..., str]) -> None:
    """A layer may take longer than the timeout, as long as its products get on."""
    model, made = load_cascade_model(tiny("llama")), Plan.clustered(6, 1, alpha=2)
    expected = LocalCascade(model).forward(prompt(6), made)
    with WireCascade(model, 2, timeout=0.3) as cascade:
        slow = next(m for m in model.modules() if next(m.children(), None) is None)
        plain = cascade.comps[1].host.run

        def late(*args: object) -> Tensor:
            for _ in range(8):
                time.sleep(0.15)
                cascade.comps[1]._tick()
            return plain(*args)  # type: ignore[arg-type]

        cascade.comps[1].host.run = late  # type: ignore[method-assign, assignment]
        assert torch.allclose(cascade.forward(prompt(6), made), expected, atol=1e-5)
        assert slow._forward_hooks
    assert not slow._forward_hooks


# ---- the port


@pytest.fixture
def listener() -> Iterator[int]:
    """A port on which somebody listens who would share it."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield int(server.getsockname()[1])


def test_a_port_that_is_taken_is_refused_with_a_free_one(listener: int) -> None:
    """Also by one who would share it; the port that is named can be taken."""
    for host in ("127.0.0.1", "0.0.0.0", "localhost"):
        with (
            pytest.raises(
                InputError, match=rf"another program listens at {host}:{listener}; --port \d+ is free"
            ) as e,
            reserved(host, listener),
        ):
            pytest.fail("taken twice")
    with reserved("127.0.0.1", int(str(e.value).split("--port ")[1].split()[0])):
        pass


def test_two_servers_that_start_at_once_do_not_get_one_port() -> None:
    """Nothing listens yet: the first is still starting. Afterwards the port is free at once."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
    started, over = os.pipe()
    child = os.fork()
    if child == 0:
        with reserved("127.0.0.1", port):
            os.write(over, b"x")
            time.sleep(PATIENCE)
        os._exit(0)
    assert os.read(started, 1) == b"x"
    with pytest.raises(InputError, match="another program listens"), reserved("127.0.0.1", port):
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with reserved("127.0.0.1", port):
        pass


def test_connections_that_ended_do_not_hold_a_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
        client = socket.create_connection(("127.0.0.1", port))
        server.accept()[0].close()  # the side that closes first waits on
        client.close()
    assert free("127.0.0.1", port)


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_an_address_that_is_not_ours_is_refused(host: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"cannot listen at {host}:8000"), reserved(host, 8000):
        pass


# ---- rows that no working node sends


def damaged(rows: Rows, how: str) -> Rows:
    q, k, v = rows.tensors
    return {
        "a row missing": Rows(q, k[:, 1:], v[:, 1:]),
        "a query too many": Rows(torch.cat([q, q[:, :1]], 1), k, v),
        "NaN": Rows(q, k, v.clone().index_fill_(1, torch.tensor([0]), float("nan"))),
        "infinite": Rows(q, k.clone().index_fill_(1, torch.tensor([0]), float("inf")), v),
    }[how]


@pytest.mark.parametrize("kind", ["local", "wire"])
@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("a row missing", r"CompNode 1 sent 3 query and 2 key rows in layer 2, where 3 and 3 belong"),
        ("a query too many", r"CompNode 1 sent 4 query and 3 key rows in layer 2, where 3 and 3 belong"),
        ("NaN", r"CompNode 1 sent numbers that are not finite in layer 2"),
        ("infinite", r"CompNode 1 sent numbers that are not finite in layer 2"),
    ],
)
def test_damaged_rows_of_a_compnode_are_refused_by_name(
    tiny: Callable[..., str], monkeypatch: pytest.MonkeyPatch, kind: str, how: str, says: str
) -> None:
    """And do not reach the requests after it."""
    model, made = load_cascade_model(tiny("llama")), Plan.clustered(6, 1, alpha=2)
    with LocalCascade(model) if kind == "local" else WireCascade(model, 2, timeout=PATIENCE) as cascade:
        expected = cascade.forward(prompt(6), made)
        plain, calls = CompWorker.rows, Counter[int]()

        def rows(self: CompWorker, *args: Any) -> dict[AttnNode, Rows]:
            calls[self.index] += 1
            sent = plain(self, *args)
            if self.index == 1 and calls[1] == 2:
                return {
                    node: damaged(one, how) if node.queries == node.keys else one
                    for node, one in sent.items()
                }
            return sent

        with monkeypatch.context() as patch:
            patch.setattr(CompWorker, "rows", rows)
            with pytest.raises(NodeError, match=says) as caught:
                cascade.forward(prompt(6), made)
        assert caught.value.node == "CompNode 1"
        assert torch.equal(cascade.forward(prompt(6), made), expected)


@pytest.mark.parametrize("kind", ["local", "wire"])
@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (
            lambda part: part.rows(slice(1, None)),
            r"AttnNode \(0, 1\) sent other rows than asked for in layer 2",
        ),
        (
            lambda part: Partial(part.maximum, part.total, part.output * float("nan")),
            r"AttnNode \(0, 1\) sent numbers that are not finite in layer 2",
        ),
        (
            lambda part: Partial(part.maximum * float("nan"), part.total, part.output),
            r"AttnNode \(0, 1\) sent numbers that are not finite in layer 2",
        ),
        (
            lambda part: Partial(torch.full_like(part.maximum, float("inf")), part.total, part.output),
            r"AttnNode \(0, 1\) sent numbers that are not finite in layer 2",
        ),
    ],
    ids=["a row missing", "NaN", "NaN as maximum", "infinite maximum"],
)
def test_damaged_answers_of_an_attnnode_are_refused_by_name(
    tiny: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    spoil: Callable[[Partial], Partial],
    says: str,
) -> None:
    model, made = load_cascade_model(tiny("llama")), Plan.clustered(6, 1, alpha=2)
    with LocalCascade(model) if kind == "local" else WireCascade(model, 2, timeout=PATIENCE) as cascade:
        expected = cascade.forward(prompt(6), made)
        attend = AttnHost._attend

        def spoiled(self: AttnHost, running: Any, head: Head, arrived: Any) -> dict[int, list[Partial]]:
            answers = attend(self, running, head, arrived)
            if self.node == AttnNode(0, 1) and head.layer == 1:
                answers[0] = [spoil(part) for part in answers[0]]
            return answers

        with monkeypatch.context() as patch:
            patch.setattr(AttnHost, "_attend", spoiled)
            with pytest.raises(NodeError, match=says) as caught:
                cascade.forward(prompt(6), made)
        assert caught.value.node == "AttnNode (0, 1)"
        assert torch.equal(cascade.forward(prompt(6), made), expected)
