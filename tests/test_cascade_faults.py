"""A slow node is not a stalled one, restarts come back with time, and a port is taken before anything starts."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hiddenlab.defenses.cascade.faults import Restarts, Watch, most_missed
from hiddenlab.defenses.cascade.generate import Cancellation, generate
from hiddenlab.defenses.cascade.load import load_cascade_model
from hiddenlab.defenses.cascade.local import LocalCascade
from hiddenlab.defenses.cascade.node_state import NodeError, Pass
from hiddenlab.defenses.cascade.port import free, reserved
from hiddenlab.defenses.cascade.remote import WireCascade
from hiddenlab.defenses.cascade.testing import Scripted
from hiddenlab.errors import InputError
from hiddenlab.sharding import Plan
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


def test_the_compnode_that_most_wait_for_is_missed() -> None:
    assert most_missed({"a": None, "b": None}) is None
    waiting = {"a": {"step": 1, "missing": [0, 1]}, "b": {"step": 1, "missing": [1]}, "c": None}
    assert most_missed(waiting) == 1


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
