"""Attacks and experiments over Ray workers give what one process gives, also when workers or machines are lost."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from hiddenlab.config import AttackConfig
from hiddenlab.defenses.cascade.membership import own_addresses
from hiddenlab.errors import HiddenlabError, InputError, WorkersLostError
from hiddenlab.eval.bench.attack import bench
from hiddenlab.eval.parallel import Crew
from hiddenlab.eval.spread import AttackWorkers
from hiddenlab.records import read_run
from hiddenlab.runner import run, run_layers
from hiddenlab.summary import Sample
from hiddenlab.types import Progress, silent

TIMES = ("seconds", "prefill_seconds")
WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven"]


def untimed(samples: Sequence[Sample]) -> list[Sample]:
    return [{name: value for name, value in sample.items() if name not in TIMES} for sample in samples]


@pytest.fixture(scope="module")
def config(tiny: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> AttackConfig:
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("\n".join(f"{word} plus {i * 7} is it" for i, word in enumerate(WORDS)))
    return AttackConfig(
        prompts=str(path), model=tiny("llama", tokenizer=True), layer=2, batch=2, max_tokens=12, threads=1,
        independent=True, device="cpu",
    )  # fmt: skip


@pytest.fixture(scope="module")
def alone(config: AttackConfig) -> list[Sample]:
    """What one process gives."""
    return untimed(run(config, keep=False).samples)


def actors(of: int | None = None) -> list[psutil.Process]:
    """The processes of workers below a process, this one by default."""
    found = []
    for child in psutil.Process(of).children(recursive=True):
        try:
            if " ".join(child.cmdline()).startswith("ray::_Actor"):
                found.append(child)
        except psutil.Error:
            continue
    return found


def test_a_lost_worker_loses_nothing(
    config: AttackConfig, alone: list[Sample], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []

    def progress(what: str, done: int, total: int) -> None:
        said.extend([what] if total == 0 else [])

    shown: list[int] = []

    def show(sample: Sample) -> None:
        shown.append(sample["index"])
        if len(shown) == 4:
            actors()[0].kill()

    assert not ray.is_initialized()
    with AttackWorkers(count=2) as workers:
        made = run(config, tmp_path / "two", workers=workers, progress=progress, show=show)
        assert untimed(made.samples) == alone == untimed(read_run(tmp_path / "two")[1])
        assert sorted(shown) == list(range(len(WORDS)))
        assert (made.record.setup["workers"], made.record.setup["workers_lost"]) == (2, 1)
        assert any("was lost" in line and "the others go on with its work" in line for line in said)
        # The same workers attack another layer, as those of --layer 1,3 do; one is left.
        (deep,) = run_layers(replace(config, limit=4), [3], tmp_path / "layers", workers=workers)
        assert untimed(deep.samples) == untimed(run(replace(config, layer=3, limit=4), keep=False).samples)
        # And now the last one.
        with pytest.raises(WorkersLostError, match=r"every worker was lost: .*--resume' goes on"):
            run(config, tmp_path / "none", workers=workers, show=lambda _: [left.kill() for left in actors()])
        record, samples = read_run(tmp_path / "none")
        assert record.status == "failed" and 0 < len(samples) < len(WORDS)
    assert not ray.is_initialized() and not actors()
    assert capfd.readouterr() == ("", "")  # Ray has its own words for it
    assert untimed(run(config, resume=tmp_path / "none").samples) == alone


def _fail(state: dict[str, Any], note: Progress, task: int) -> int:
    """Fail as a task may."""
    if task == 1:
        raise ValueError("a fault\nof two lines")
    raise InputError("a wish that cannot be met")


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A cluster of two machines, as processes of this one."""
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.add_node(num_cpus=1)
    yield made
    ray.shutdown()
    made.shutdown()


def test_a_running_cluster(
    config: AttackConfig, alone: list[Sample], cluster: Cluster, tmp_path: Path
) -> None:
    started: list[tuple[int, int]] = []

    def progress(what: str, done: int, total: int) -> None:
        started.extend([(done, total)] if what == "starting workers" else [])

    with AttackWorkers(cluster.address) as workers:  # one for each machine
        made = run(config, tmp_path / "run", workers=workers, progress=progress)
    assert started[-1] == (2, 2) and untimed(made.samples) == alone
    assert not ray.is_initialized()
    with Crew(cluster.address, 1) as crew:
        crew.start()
        with pytest.raises(InputError, match="a wish that cannot be met"):
            list(crew.share(_fail, [0]))
        with pytest.raises(HiddenlabError, match=r"^worker 1 on [0-9.]+ failed: ValueError: a fault$"):
            list(crew.share(_fail, [1]))
        # Not at the layer of the other tests: quick attacks use a trained probe where the cache holds one.
        layers = bench(config.model or "", [3, 4], limit=1, max_tokens=5, greedy_limit=0, crew=crew)
        assert [(row["layer"], row["exact"]) for row in layers["rows"]] == [(3, 1.0), (4, 1.0)]
    with Crew(cluster.address, 3) as crew, pytest.raises(InputError, match="3 CPUs"):
        crew.start(silent)


def test_an_interrupted_command_goes_on(config: AttackConfig, alone: list[Sample], tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = [
        "attack",
        "--prompts",
        str(config.prompts),
        "--model",
        str(config.model),
        "--layer",
        "2",
        "--batch",
        "2",
    ]
    words += ["--max-tokens", "12", "--threads", "1", "--device", "cpu", "--workers", "2", "--out", str(out)]
    command = [sys.executable, "-m", "hiddenlab"]
    started = subprocess.Popen(
        [*command, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    samples = out / "samples.jsonl"
    while started.poll() is None and not (samples.exists() and samples.read_bytes()):
        time.sleep(0.02)
    below = psutil.Process(started.pid).children(recursive=True) if started.poll() is None else []
    os.killpg(started.pid, signal.SIGINT)  # as a terminal does: to every process of the command
    _, errors = started.communicate(timeout=120)
    psutil.wait_procs(below, timeout=30)
    assert not [process for process in below if process.is_running() and process.status() != "zombie"]
    if started.returncode == 0:  # the last samples came at once
        pytest.skip("the run had ended before the signal")
    assert started.returncode == 130, errors
    assert f"Continue with: hiddenlab rerun {out} --resume" in errors and "Traceback" not in errors
    assert json.loads((out / "record.json").read_text())["status"] == "interrupted"
    again = subprocess.run(
        [*command, "rerun", str(out), "--resume", "--workers", "1", "--json"], capture_output=True, text=True,
        check=True, timeout=300,
    )  # fmt: skip
    assert untimed(json.loads(again.stdout)["samples"]) == json.loads(json.dumps(alone))
    same = subprocess.run(
        [*command, "rerun", str(out), "--no-record"], capture_output=True, text=True, timeout=300
    )
    assert same.returncode == 0 and "same results: 12 recorded prompts" in same.stdout, (
        same.stdout + same.stderr
    )


def test_workers_of_a_cluster_with_certificates(
    config: AttackConfig, alone: list[Sample], tmp_path: Path
) -> None:
    """The command takes the token and certificates from where ``cascade up`` left them."""
    hosts = sorted(host for host in own_addresses() if "." in host and not host.startswith("127."))
    if not hosts:
        pytest.skip("this machine has no address but loopback")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    environment["HIDDENLAB_CLUSTER"] = str(tmp_path / "cluster")

    def command(*arguments: str) -> str:
        result = subprocess.run(
            [sys.executable, "-m", "hiddenlab", *arguments],
            env=environment, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        return result.stdout

    ports = ["--port", "26379", "--worker-ports", "27000-27099", "--tensor-ports", "27100-27199"]
    command("cascade", "up", "--host", hosts[0], "--cpus", "1", *ports)
    try:
        said = command(
            "attack", "--prompts", str(config.prompts), "--model", str(config.model), "--layer", "2", "--batch", "2",
            "--max-tokens", "12", "--threads", "1", "--device", "cpu", "--independent", "--workers", "1",
            "--address", f"{hosts[0]}:26379", "--no-record", "--json",
        )  # fmt: skip
    finally:
        command("cascade", "down")
    found = json.loads(said)["samples"]
    assert [s["recovered_ids"] for s in found] == [s["recovered_ids"] for s in alone]
