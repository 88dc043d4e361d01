"""Batches of an independent run depend on themselves alone: on no other batch, on no order, on no process."""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from hiddenlab.batch import InProcess, Measured, Work, attack_batch, batches
from hiddenlab.cli import app
from hiddenlab.config import AttackConfig
from hiddenlab.errors import InputError, WorkersLostError
from hiddenlab.eval.parallel import Crew
from hiddenlab.job import prepare
from hiddenlab.records import read_run
from hiddenlab.runner import Workers, run
from hiddenlab.summary import Sample
from hiddenlab.types import Progress, silent
from hiddenlab.utils.cache import asked_paths, cache_path, from_cache, into_cache

TIMES = ("seconds", "prefill_seconds")
TEXTS = [
    "the quick brown fox",
    "jumps over 13 dogs",
    "0123456789",
    "what a day!",
    "zebra zebra",
    "(a, b) = c",
    "no",
]


def untimed(samples: Sequence[Sample]) -> list[Sample]:
    """The samples without what a clock says."""
    return [{name: value for name, value in sample.items() if name not in TIMES} for sample in samples]


@pytest.fixture
def config(tiny: Callable[..., str], tmp_path: Path) -> AttackConfig:
    (tmp_path / "prompts.txt").write_text("\n".join(TEXTS))
    return AttackConfig(
        prompts=str(tmp_path / "prompts.txt"), model=tiny("llama", tokenizer=True), layer=2, batch=2, max_tokens=5,
        independent=True, device="cpu",
    )  # fmt: skip


def attacked(config: AttackConfig, order: Callable[[list[Any]], list[Any]]) -> list[Sample]:
    """The samples of a run by one attack, its batches in some order."""
    job, samples = prepare(config), list[Sample]()
    for batch in order(batches(job)):
        samples += attack_batch(job, batch, lambda _: None, silent)
    return untimed(sorted(samples, key=lambda sample: sample["index"]))


@pytest.mark.parametrize(
    ("attack", "defense"),
    [
        ("vocab-match", ()),
        pytest.param("vocab-match", ("hidden-perm",), marks=pytest.mark.slow),
        ("vocab-match:without=screening", ("seq-perm",)),
        pytest.param("missing-tokens", ("drop-rows:size=1,after=3",), marks=pytest.mark.slow),
        pytest.param("sipit", (), marks=pytest.mark.slow),
        ("nearest", ()),
        pytest.param(
            "beam-decoding:beam=2,width=4,batch=2",
            ("unknown-gaussian:sigma=0.05",),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_order_of_batches_changes_nothing(
    config: AttackConfig, attack: str, defense: tuple[str, ...], small_probes: None
) -> None:
    own = replace(
        config, attack=attack, defense=defense, batch=None if attack != "vocab-match" else 2, limit=4
    )
    forward, backward = attacked(own, list), attacked(own, lambda given: given[::-1])
    assert [sample["status"] for sample in forward] == ["attacked"] * 4
    assert forward == backward


@pytest.mark.slow
def test_a_dependent_run_learns(config: AttackConfig) -> None:
    """What the test above compares does change where prompts learn from each other."""
    own = replace(config, independent=False)
    assert attacked(own, list) != attacked(own, lambda given: given[::-1])
    assert attacked(config, list) == attacked(config, list)  # whatever others learned meanwhile


@pytest.mark.slow
def test_a_run_that_stopped_within_a_batch_goes_on_with_the_whole_batch(
    config: AttackConfig, tmp_path: Path
) -> None:
    whole = run(config, tmp_path / "whole")
    cut = run(config, tmp_path / "cut").path
    assert cut is not None
    lines = (cut / "samples.jsonl").read_text().splitlines(keepends=True)
    (cut / "samples.jsonl").write_text("".join([lines[4], *lines[:3]]))  # as workers may have left it
    record = json.loads((cut / "record.json").read_text())
    (cut / "record.json").write_text(json.dumps({**record, "status": "interrupted"}))
    assert [sample["index"] for sample in read_run(cut)[1]] == [0, 1, 2, 4]
    shown: list[int] = []
    again = run(config, resume=cut, show=lambda sample: shown.append(sample["index"]))
    assert shown == [3, 5, 6]
    assert untimed(again.samples) == untimed(whole.samples)
    assert [json.loads(line)["index"] for line in (cut / "samples.jsonl").open()] == list(range(7))


class Elsewhere(Work):
    """Work whose batches come back to front; after ``lasts`` of them every worker is lost."""

    environment: Mapping[str, Any] = {"threads": 7}

    def __init__(self, config: AttackConfig, lasts: int) -> None:
        self.inner, self.lasts = InProcess(prepare(config)), lasts
        self.config, self.prompts = self.inner.config, self.inner.prompts
        self.inputs_sha256 = self.inner.inputs_sha256

    def attack(
        self, done: Collection[int], measured: Measured, progress: Progress
    ) -> Iterator[Sequence[Sample]]:
        found = list(self.inner.attack(done, measured, progress))
        yield from found[::-1][: self.lasts]
        if self.lasts < len(found):
            raise WorkersLostError("every worker was lost: worker 1 on 10.0.0.7 was lost")

    def peaks(self) -> dict[str, float | None]:
        return {"peak_memory_mb": 3.0, "peak_device_memory_mb": None}


class Fake(Workers):
    def __init__(self, lasts: int = 99) -> None:
        self.lasts = lasts

    def prepare(self, config: AttackConfig, progress: Progress) -> Work:
        return Elsewhere(config, self.lasts)


@pytest.mark.slow
def test_samples_get_the_order_of_the_prompts(config: AttackConfig, tmp_path: Path) -> None:
    own = replace(config, independent=False)  # workers make it independent
    made = run(own, tmp_path / "run", workers=Fake())
    assert made.record.spec["independent"] and made.record.threads == 7
    assert made.summary["peak_memory_mb"] == 3.0
    assert [sample["index"] for sample in made.samples] == list(range(7))
    assert untimed(read_run(tmp_path / "run")[1]) == untimed(run(config, keep=False).samples)


@pytest.mark.slow
def test_when_every_worker_is_lost_the_record_goes_on(config: AttackConfig, tmp_path: Path) -> None:
    path = tmp_path / "run"
    with pytest.raises(
        WorkersLostError, match=rf"10\.0\.0\.7 was lost; 'hiddenlab rerun {path} --resume' goes on"
    ):
        run(config, path, workers=Fake(lasts=2))
    record, samples = read_run(path)
    assert record.status == "failed" and "every worker was lost" in (record.error or "")
    assert [sample["index"] for sample in samples] == [4, 5, 6]
    assert untimed(run(config, resume=path).samples) == untimed(run(config, keep=False).samples)


def test_files_of_one_cache_reach_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIDDENLAB_CACHE", str(tmp_path / "one"))
    with asked_paths() as paths:
        cache_path("probes", "a").write_bytes(b"1")
        cache_path("models", "m").write_bytes(b"2")
        cache_path("probes", "missing")
    cache_path("probes", "later").write_bytes(b"3")
    files = from_cache(paths, ("probes",))
    assert files == {"probes/a": b"1"}
    monkeypatch.setenv("HIDDENLAB_CACHE", str(tmp_path / "two"))
    into_cache(files)
    assert cache_path("probes", "a").read_bytes() == b"1"
    assert cache_path("probes", "a").stat().st_mode & 0o777 == 0o600
    into_cache({"probes/a": b"other"})  # what is there stays
    assert cache_path("probes", "a").read_bytes() == b"1"


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Result]:
    monkeypatch.chdir(tmp_path)
    return lambda *args: CliRunner().invoke(app, list(args))


def test_a_run_that_learned_is_not_shared(config: AttackConfig, invoke: Callable[..., Result]) -> None:
    run(replace(config, independent=False, limit=1), "run")
    for more in ((), ("--resume",)):
        result = invoke("rerun", "run", "--workers", "2", *more)
        assert result.exit_code == 2
        assert "its prompts learn from each other, in order; leave out --workers" in result.stderr
    with pytest.raises(InputError, match="without --independent"):
        run(replace(config, independent=False, limit=1), resume="run", workers=Fake())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("attack", "a", "--attack", "nonsense", "--workers", "2"), "unknown attack 'nonsense'"),
        (("attack", "a", "--defense", "nonsense", "--workers", "2"), "unknown defense 'nonsense'"),
        (("attack", "--prompts", "none.txt", "--workers", "2"), "none.txt"),
        (("attack", "a", "--device", "cuda:1", "--workers", "2"), "each worker has a card of its own"),
        (("attack", "a", "--address", "127.0.0.1:9"), "no Ray cluster answers at 127.0.0.1:9"),
        (
            ("eval", "schemes", "--address", "127.0.0.1:9", "--limit", "1"),
            "no Ray cluster answers at 127.0.0.1:9",
        ),
        (("bench", "first", "--workers", "2"), "bench first measures in one process"),
        (("bench", "attack", "--address", "127.0.0.1:9"), "no Ray cluster answers at 127.0.0.1:9"),
    ],
)
def test_wrong_requests(
    tiny: Callable[..., str], invoke: Callable[..., Result], words: tuple[str, ...], says: str
) -> None:
    own = ("--model", tiny("llama", tokenizer=True))
    result = invoke(*words, *own)
    assert result.exit_code == 2, result.output
    assert says in result.stderr and "Traceback" not in result.output
    assert not (Path("runs") / "eval" / "cells").exists() and result.stdout == ""


def test_without_ray(config: AttackConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(InputError, match=r"pip install 'hiddenlab\[ray\]'"):
        Crew(None, 2).start()
