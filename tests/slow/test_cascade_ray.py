"""Cascade on Ray gives what it gives in one process, also when nodes die or stall, and serves OpenAI's clients."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import ray
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from hiddenlab.defenses.cascade import cluster
from hiddenlab.defenses.cascade.backend import Cascade, Settings
from hiddenlab.defenses.cascade.cluster import RayCascade
from hiddenlab.defenses.cascade.command import Backend
from hiddenlab.defenses.cascade.cost import Shape, layer_bytes
from hiddenlab.defenses.cascade.generate import Cancellation, generate
from hiddenlab.defenses.cascade.load import load_cascade_model
from hiddenlab.defenses.cascade.local import LocalCascade
from hiddenlab.defenses.cascade.node_state import NodeError
from hiddenlab.errors import InputError
from hiddenlab.models.reading import quiet_transformers
from hiddenlab.sharding import Plan
from hiddenlab.testing import VOCABULARY, byte_tokenizer, save_tiny

TinyPath = Callable[..., str]
TIMEOUT = 3.0
PATIENCE = 60.0


@pytest.fixture(scope="module")
def path(tiny: TinyPath) -> str:
    return tiny("gemma2")


@pytest.fixture(scope="module")
def local(path: str) -> LocalCascade:
    return LocalCascade(load_cascade_model(path))


@pytest.fixture(scope="module")
def cascade(path: str) -> Iterator[RayCascade]:
    """Two CompNodes and four AttnNodes on a cluster of our own, of which half a CPU is left over."""
    assert not ray.is_initialized()
    started = RayCascade(path, 2, m=1, timeout=TIMEOUT, restarts=4, cpus=0.75)
    assert ray.is_initialized()
    # All of Ray listens on loopback too, though it prefers the machine's own address.
    everything = [psutil.Process(), *psutil.Process().children(recursive=True)]
    heard = {c.laddr.ip for one in everything for c in one.net_connections("tcp") if c.status == "LISTEN"}
    assert {address.removeprefix("::ffff:") for address in heard} == {"127.0.0.1"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            cluster, "PING_SECONDS", 1.5
        )  # half of the time that a stalled node costs is spent on it
        yield started
    started.shutdown()
    # It was started for us, so it goes with us; what others started stays (see the test of objects).
    assert not ray.is_initialized()


def prompt(n: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, (n,), generator=torch.Generator().manual_seed(seed))


def plan(n: int, alpha: int = 2) -> Plan:
    return Plan.clustered(n, 1, alpha=alpha)


def answer(cascade: Cascade, n: int, new: int = 6) -> list[int]:
    return list(generate(cascade, prompt(n, seed=n), plan(n), new_tokens=new))


def process(cascade: RayCascade, node: str) -> int:
    """Of a node, its process id."""
    return ray.get(cascade._actors[node].__ray_call__.remote(lambda self: os.getpid()))


# ---- answers


@pytest.mark.parametrize("n", [11, 2, 1])
def test_a_pass_gives_what_one_process_gives(cascade: RayCascade, local: LocalCascade, n: int) -> None:
    """Also where nodes have nothing to do, and under a mask."""
    assert cascade.facts.vocabulary == VOCABULARY
    # A cluster of our own is heard by this machine alone.
    assert {host for host, _ in cascade._addresses.values()} == {"127.0.0.1"}
    mask = torch.arange(n) < max(1, n - 2)
    for made in (plan(n), plan(n, alpha=1), Plan.by_hand([range(n // 2), range(n // 2, n)])):
        for hidden in (None, mask):
            difference = cascade.forward(prompt(n), made, mask=hidden) - local.forward(
                prompt(n), made, mask=hidden
            )
            assert float(difference[mask].abs().max()) <= 1e-5


def test_blocks_that_are_left_out_are_not_missed(cascade: RayCascade, local: LocalCascade, path: str) -> None:
    """Neither over TCP nor as Ray's objects; fewer bytes, to those of the formula."""
    halves = Plan.clustered(12, 6, alpha=2, causal=True)
    shape = Shape.of(load_cascade_model(path).config, element_bytes=4)

    def payload() -> int:
        return sum(one["sent_payload"] for one in cascade.counters().values())

    before = payload()
    out = cascade.forward(prompt(12), halves)
    assert payload() - before == shape.layers * layer_bytes(halves, shape)
    assert layer_bytes(halves, shape) == 0.75 * layer_bytes(replace(halves, causal=False), shape)
    expected = local.forward(prompt(12), plan(12))
    assert float((out - expected).abs().max()) <= 1e-5
    tokens = answer(local, 12)
    assert list(generate(cascade, prompt(12, seed=12), halves, new_tokens=6)) == tokens
    with RayCascade(path, 2, transport="objects", timeout=TIMEOUT, cpus=0.05, loopback=True) as objects:
        difference = objects.forward(prompt(12), halves) - expected
        assert float(difference.abs().max()) <= 1e-5
        assert list(generate(objects, prompt(12, seed=12), halves, new_tokens=6)) == tokens


def test_generations_at_once_are_kept_apart(cascade: RayCascade, local: LocalCascade) -> None:
    """Prompts of several lengths from several threads: each gets its own answer."""
    with ThreadPoolExecutor(5) as pool:
        found = list(pool.map(lambda n: answer(cascade, n), range(3, 13)))
    expected = [answer(local, n) for n in range(3, 13)]
    assert found == expected
    assert len(set(map(tuple, expected))) > 5


def test_plans_for_other_nodes_are_refused(cascade: RayCascade) -> None:
    """Before anything runs."""

    def messages() -> list[int]:
        return [one["messages"] for one in cascade.counters().values()]

    cascade.forward(prompt(6), plan(6))
    before = messages()
    for options in ({"alpha": 3}, {"alpha": 2, "m": 2}):
        with pytest.raises(
            InputError, match=r"the plan needs \d CompNodes and \d+ AttnNodes; running are 2 and 4"
        ):
            cascade.forward(prompt(6), Plan.clustered(6, 1, **options))
    with pytest.raises(InputError, match="the plan is for 5 tokens, the prompt has 6"):
        cascade.forward(prompt(6), plan(5))
    with pytest.raises(InputError, match="the model's context holds 512"):
        cascade.forward(prompt(513), plan(513))
    with pytest.raises(InputError, match="outside of the vocabulary"):
        cascade.forward(torch.tensor([0, 300]), plan(2))
    assert messages() == before


def test_what_a_cluster_lacks_is_said(cascade: RayCascade, path: str) -> None:
    with pytest.raises(InputError, match=r"need 12 CPUs, the cluster has 0.5 free: 11.5 are missing"):
        RayCascade(path, 3)
    assert answer(cascade, 4)


def test_nodes_need_no_cpu_of_their_own(cascade: RayCascade, local: LocalCascade, path: str) -> None:
    """Ray then reserves its smallest share, and places them all the same."""
    with RayCascade(path, 1, cpus=0.0, loopback=True) as free:
        difference = free.forward(prompt(4), plan(4, 1)) - local.forward(prompt(4), plan(4, 1))
        assert float(difference.abs().max()) <= 1e-5
    with pytest.raises(InputError, match="cpus and gpus must be at least 0"):
        RayCascade(path, 1, cpus=-1.0)


# ---- nodes that are lost


def test_an_attnnode_that_dies_is_replaced(cascade: RayCascade, local: LocalCascade) -> None:
    """Once, for all requests that it had rows of: whether they were running or between two tokens."""
    expected = [answer(local, n, 8) for n in (7, 9)]
    left = cascade.restarts.left
    first, second = (generate(cascade, prompt(n, seed=n), plan(n), new_tokens=8) for n in (7, 9))
    found = [list(islice(first, 3)), list(islice(second, 2))]
    os.kill(process(cascade, "AttnNode (1, 0)"), signal.SIGKILL)
    found[0] += first
    assert found[0] == expected[0]
    assert cascade.restarts.left == left - 1
    found[1] += second
    assert found[1] == expected[1]
    assert cascade.restarts.left == left - 1
    assert set(cascade.healthy().values()) == {"ok"}


def test_requests_that_lose_the_same_node_replace_it_once(cascade: RayCascade, local: LocalCascade) -> None:
    lost = process(cascade, "AttnNode (0, 1)")
    left = cascade.restarts.left
    os.kill(lost, signal.SIGSTOP)
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(answer, cascade, n) for n in (5, 6, 7)]
        time.sleep(0.5)  # until all of them wait for the node; where one comes later, less is tested
        os.kill(lost, signal.SIGKILL)
        assert [one.result(PATIENCE) for one in waiting] == [answer(local, n) for n in (5, 6, 7)]
    assert cascade.restarts.left == left - 1


def test_a_compnode_that_stalls_is_replaced(cascade: RayCascade, local: LocalCascade) -> None:
    stopped = process(cascade, "CompNode 1")
    left = cascade.restarts.left
    tokens = generate(cascade, prompt(8, seed=8), plan(8), new_tokens=6)
    found = [next(tokens)]
    os.kill(stopped, signal.SIGSTOP)
    found += tokens
    assert found == answer(local, 8)
    assert cascade.restarts.left == left - 1
    assert process(cascade, "CompNode 1") != stopped
    psutil.wait_procs([psutil.Process(stopped)] if psutil.pid_exists(stopped) else [], timeout=PATIENCE)
    assert not psutil.pid_exists(stopped)


def test_a_slow_node_is_waited_for(cascade: RayCascade, local: LocalCascade) -> None:
    """One layer takes longer than the timeout; the node is neither killed nor asked again."""
    slow, left = process(cascade, "CompNode 1"), cascade.restarts.left

    def slowed(self: Any, seconds: float) -> None:
        branches = [m for m in self.host.model.base_model.layers[1].modules() if not list(m.children())]
        self.slow = [
            branch.register_forward_pre_hook(lambda *_: time.sleep(seconds)) for branch in branches[:5]
        ]

    def as_before(self: Any) -> None:
        for hook in self.slow:
            hook.remove()

    actor = cascade._actors["CompNode 1"]
    ray.get(actor.__ray_call__.remote(slowed, 0.4 * TIMEOUT))
    began = time.monotonic()
    out = cascade.forward(prompt(8), plan(8))
    assert time.monotonic() - began > 1.9 * TIMEOUT
    ray.get(actor.__ray_call__.remote(as_before))
    assert float((out - local.forward(prompt(8), plan(8))).abs().max()) <= 1e-5
    assert process(cascade, "CompNode 1") == slow
    assert cascade.restarts.left == left


def test_a_request_that_is_given_up_costs_no_node(cascade: RayCascade, local: LocalCascade) -> None:
    """Its pass ends soon, though a node does not answer; that node is not replaced for nobody."""
    stopped = process(cascade, "AttnNode (0, 1)")
    left, cancellation = cascade.restarts.left, Cancellation()
    os.kill(stopped, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(
                list, generate(cascade, prompt(9), plan(9), new_tokens=5, cancellation=cancellation)
            )
            time.sleep(0.5)
            cancellation.cancel()
            assert running.result(0.9 * TIMEOUT) == []
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert answer(cascade, 9) == answer(local, 9)
    assert process(cascade, "AttnNode (0, 1)") == stopped
    assert cascade.restarts.left == left


@pytest.mark.parametrize(("sent", "says"), [(signal.SIGKILL, "died"), (signal.SIGSTOP, "stalled")])
def test_without_restarts_the_lost_node_is_named(
    cascade: RayCascade, local: LocalCascade, sent: int, says: str
) -> None:
    """With layer and tokens; requests that do not need it are not hurt, and it can be replaced later."""
    left, limit = cascade.restarts.left, cascade.restarts.limit
    cascade.restarts.limit = 0
    lost = process(cascade, "AttnNode (1, 1)")
    tokens = generate(cascade, prompt(5), plan(5), new_tokens=6)
    next(tokens)
    os.kill(lost, sent)
    try:
        with pytest.raises(
            NodeError, match=rf"^AttnNode \(1, 1\) {says} in layer 1\b.*; it holds tokens 1, 3"
        ) as caught:
            list(tokens)
        assert caught.value.node == "AttnNode (1, 1)"
        difference = cascade.forward(prompt(6), plan(6, alpha=1)) - local.forward(prompt(6), plan(6, alpha=1))
        assert float(difference.abs().max()) <= 1e-5
        states = cascade.healthy()
        unwell = "died" if says == "died" else "did not answer within 1.5 s"
        assert states.pop("AttnNode (1, 1)") == f"AttnNode (1, 1) {unwell}"
        assert set(states.values()) == {"ok"}
    finally:
        if sent == signal.SIGSTOP:
            os.kill(lost, signal.SIGCONT)
        cascade.restarts.limit = limit
    # A node that only stalled goes on; one that died is replaced for the next request.
    assert answer(cascade, 5) == answer(local, 5)
    assert cascade.restarts.left == left - (sent == signal.SIGKILL)


# ---- other clusters


def test_objects_carry_the_same(cascade: RayCascade, local: LocalCascade, path: str) -> None:
    """The paper's form, on the cluster that already runs and goes on afterwards; dead nodes are replaced here too."""
    settings = Settings(compress=True, record=True)
    with RayCascade(
        path, 1, transport="objects", settings=settings, timeout=TIMEOUT, restarts=1, cpus=0.25, loopback=True
    ) as objects:
        assert {host for host, _ in objects._addresses.values()} == {"127.0.0.1"}
        difference = objects.forward(prompt(7), plan(7, 1)) - local.forward(prompt(7), plan(7, 1))
        assert float(difference.abs().max()) <= 1e-5
        seen = {one.node: {p for entry in one.entries for p in entry.positions} for one in objects.seen()}
        assert seen == {"CompNode 0": set(range(7)), "AttnNode (0, 0)": set(range(7))}
        tokens = generate(objects, prompt(7, seed=7), plan(7, 1), new_tokens=6)
        found = list(islice(tokens, 2))
        os.kill(process(objects, "AttnNode (0, 0)"), signal.SIGKILL)
        found += tokens
        assert found == answer(local, 7)
        assert objects.restarts.left == 0
    assert ray.is_initialized()
    assert answer(cascade, 4) == answer(local, 4)


@pytest.mark.parametrize(
    ("spec", "transport"), [("client:first=1,last=1", "tcp"), ("masked-sums+secret-maps", "objects")]
)
def test_a_hardened_cluster_gives_the_same(local: LocalCascade, path: str, spec: str, transport: str) -> None:
    nodes = Backend(
        kind="ray", model=path, harden=spec, transport=transport, cpus=0.1, loopback=True, timeout=TIMEOUT
    )
    with nodes.start(2, 1, True) as hardened:
        tokens, made = prompt(9), Plan.clustered(9, 1, alpha=2, symmetric=True)
        assert torch.allclose(hardened.forward(tokens, made), local.forward(tokens, made), atol=1e-4)
        found, expected = (list(generate(c, tokens, made, new_tokens=4)) for c in (hardened, local))
        assert found == expected
        assert set(hardened.healthy().values()) == {"ok"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"transport": "pigeons"}, "unknown transport 'pigeons'; known are tcp, objects"),
        ({"alpha": 0}, "alpha, m and threads must be at least 1"),
        ({"timeout": 0.0}, "timeout above 0"),
        ({"model": "/no/such/model"}, "no model at '/no/such/model'"),
    ],
    ids=str,
)
def test_clusters_that_cannot_be_are_refused(
    cascade: RayCascade, path: str, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(InputError, match=says):
        RayCascade(**{"model": path, "alpha": 1, "cpus": 0.25} | options)
    assert ray.is_initialized()


def test_an_address_where_nobody_answers_is_named() -> None:
    """Soon: Ray itself would try for minutes. In a process of its own, which has no cluster yet."""
    script = (
        "from hiddenlab.defenses.cascade.ray_connection import connect; connect('127.0.0.1:1', 1, 1.0, 0.0)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE)
    assert re.search(r"InputError: no Ray cluster answers at 127.0.0.1:1", result.stderr)


# ---- the server


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture
def another_ray() -> Iterator[str]:
    """Address of a cluster that somebody else runs on this machine."""
    script = (
        "import ray, signal, time; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "ray.init(address='local', num_cpus=1, include_dashboard=False, log_to_driver=False); "
        "print('at', ray.get_runtime_context().gcs_address, flush=True); time.sleep(600)"
    )
    other = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    try:
        yield next(line.split()[1] for line in other.stdout if line.startswith("at "))
    finally:
        other.send_signal(signal.SIGINT)
        other.wait(PATIENCE)


def served_model(folder: Path) -> tuple[str, Any]:
    """A tiny model with a tokenizer that has a chat template."""
    model = save_tiny("llama", folder / "model", tokenizer=True)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}assistant: "
    )
    tokenizer.save_pretrained(model)
    return model, tokenizer


@pytest.mark.parametrize("beside", [False, True])
def test_openais_client_is_served(tmp_path: Path, beside: bool, request: pytest.FixtureRequest) -> None:
    """``hiddenlab cascade serve``, from its start until Ctrl-C, with the client that others use.

    Also beside another Ray that the environment names: the server has a cluster of its own. A second server on its
    port is refused.
    """
    model, tokenizer = served_model(tmp_path)
    port = free_port()
    command = ["-m", "hiddenlab", "cascade", "serve", "--alpha", "1", "--model", model, "--port", str(port)]
    command += ["--api-key-env", "SERVED_KEY", "--cpus", "0.5", "--timeout", "20"]
    environment = os.environ | {"SERVED_KEY": "sk-1"}
    if beside:
        environment["RAY_ADDRESS"] = request.getfixturevalue("another_ray")
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", *command],
            env=environment,
            stdout=log,
            stderr=log,
            # What a shell runs in the background ignores interrupts, and so would what the tests start there.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    children: list[psutil.Process] = []
    try:
        until = time.monotonic() + 2 * PATIENCE
        while "serving" not in (tmp_path / "log").read_text():
            assert server.poll() is None and time.monotonic() < until, (tmp_path / "log").read_text()
            time.sleep(0.2)
        children = psutil.Process(server.pid).children(recursive=True)
        check_served(model, port, tokenizer)
        check_hang_ups(model, port)
        second = subprocess.run(
            [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=PATIENCE
        )
        assert second.returncode == 2
        assert re.fullmatch(
            rf".*another program listens at 127\.0\.0\.1:{port}; --port \d+ is free\n",
            second.stderr,
            re.DOTALL,
        )
        assert "Traceback" not in second.stderr and "serving" not in second.stdout
        server.send_signal(signal.SIGINT)
        assert ended(server, tmp_path / "log") == 130
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        assert psutil.wait_procs(children, timeout=PATIENCE)[1] == []
    finally:
        for one in (server, *children):
            if isinstance(one, subprocess.Popen) or one.is_running():
                one.kill()
        server.wait(PATIENCE)


def test_a_run_beside_another_ray_has_a_cluster_of_its_own(another_ray: str, tmp_path: Path) -> None:
    """``hiddenlab cascade run --backend ray``, whatever the environment says; the other goes on."""
    model, _ = served_model(tmp_path)
    command = [
        "-m",
        "hiddenlab",
        "cascade",
        "run",
        "Tell me.",
        "--alpha",
        "2",
        "--backend",
        "ray",
        "--model",
        model,
    ]
    result = subprocess.run(
        [sys.executable, *command, "--json"],
        env=os.environ | {"RAY_ADDRESS": another_ray}, capture_output=True, text=True, timeout=2 * PATIENCE,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    # Three nodes' CPUs would not fit into the other cluster, which has one.
    assert json.loads(result.stdout)["comp_nodes"] == 2
    host, port = another_ray.rsplit(":", 1)
    socket.create_connection((host, int(port)), timeout=PATIENCE).close()


def ended(server: subprocess.Popen[bytes], log: Path) -> int:
    """The exit code of a server that was asked to end; where it does not, what it said and where it stands."""
    try:
        return server.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        server.send_signal(signal.SIGABRT)
        server.wait(PATIENCE)
        pytest.fail(log.read_text())


def test_a_server_is_free_after_hang_ups_and_turns_away_the_rest(tmp_path: Path) -> None:
    """``hiddenlab bench serving``: every request gets an answer or a 429 that says when to come again."""
    model, _ = served_model(tmp_path)
    command = ["-m", "hiddenlab", "bench", "serving", "--model", model, "--json", "--set", "alpha=1"]
    command += ["--set", "running=4", "--set", "requests=40", "--set", "long=450", "--set", "repeats=2"]
    result = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=4 * PATIENCE)
    assert result.returncode == 0, result.stderr
    idle, left, many = json.loads(result.stdout)["rows"]
    assert [row["other_statuses"] for row in (idle, left, many)] == [0, 0, 0]
    assert left["answered"] == 3
    assert many["answered"] + many["sent_away"] == 40
    assert many["answered"] >= 4
    assert many["without_retry_after"] == 0


def check_hang_ups(model: str, port: int) -> None:
    """More clients than places hang up; their work ends, and who asks then is answered."""
    url = f"http://127.0.0.1:{port}"
    key = {"Authorization": "Bearer sk-1", "Content-Type": "application/json"}
    for stream in (False, True):
        clients = []
        for _ in range(16):
            client = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
            body = {"model": model, "prompt": "Go on.", "temperature": 0, "max_tokens": 500, "stream": stream}
            client.request("POST", "/v1/completions", json.dumps(body), key)
            clients.append(client)
        time.sleep(0.5)
        for client in clients:
            client.close()
        until = time.monotonic() + PATIENCE
        while "cascade_running 0.0" not in urllib.request.urlopen(f"{url}/metrics").read().decode():
            assert time.monotonic() < until
            time.sleep(0.1)
    text = urllib.request.urlopen(f"{url}/metrics").read().decode()
    # Had they all been answered, it would be 32 times 500.
    made = re.search(r'cascade_tokens_total\{kind="completion"\} (\S+)', text)
    assert made is not None and float(made[1]) < 8000, text


def check_served(model: str, port: int, tokenizer: Any) -> None:
    with quiet_transformers(), torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

        def expected(text: str) -> str:
            ids = torch.tensor([tokenizer(text)["input_ids"]])
            out = plain.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
            return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)

        told, asked = expected("Tell me."), expected("user: Ja?\nassistant: ")
    url = f"http://127.0.0.1:{port}/v1"
    with openai.OpenAI(base_url=url, api_key="sk-1", max_retries=0) as client:
        assert [one.id for one in client.models.list()] == [model]
        whole = client.completions.create(model=model, prompt="Tell me.", max_tokens=12, temperature=0)
        assert whole.choices[0].text == told
        assert whole.usage is not None and whole.usage.prompt_tokens == len("Tell me.")
        chunks = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "Ja?"}], max_tokens=12, temperature=0, stream=True
        )  # fmt: skip
        pieces = [chunk.choices[0] for chunk in chunks]
        assert "".join(piece.delta.content or "" for piece in pieces) == asked
        assert [piece.finish_reason for piece in pieces if piece.finish_reason] in (["length"], ["stop"])
        with pytest.raises(openai.NotFoundError, match="is not served here"):
            client.completions.create(model="another", prompt="x")
        with pytest.raises(openai.BadRequestError, match="the prompt is empty"):
            client.completions.create(model=model, prompt="")
        with pytest.raises(openai.AuthenticationError, match="wants its API key"):
            client.with_options(api_key="sk-2").models.list()
