"""A short truncated model of ``make fuzz``, and every input that once failed; the campaign itself takes minutes."""

from pathlib import Path

import pytest

from tests.fuzz.campaign import Tally, case, judge, one_case, run, shrunk
from tests.fuzz.readers import Target, targets

CASES = sorted(path for path in (Path(__file__).parent / "fuzz" / "cases").iterdir() if path.suffix != ".md")
MODELS = "model, "  # which take long


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory, _own_cache: Path) -> dict[str, Target]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HIDDENLAB_CACHE", str(_own_cache))
        return {target.name: target for target in targets(tmp_path_factory.mktemp("fuzz"))}


def test_valid_files_are_accepted(readers: dict[str, Target]) -> None:
    for target in readers.values():
        for seed in target.seeds:
            assert not judge(target, seed), target.name
            target.read(seed)


def test_mutated_files_are_refused_in_one_line_or_read_as_the_reference_reads_them(
    readers: dict[str, Target],
) -> None:
    quick = [target for target in readers.values() if not target.name.startswith(MODELS)]
    found = run(quick, seed=1, cases=40, minutes=None, save=None)
    assert {name: dict(tally.faults) for name, tally in found.items() if tally.faults} == {}
    assert all(tally.cases == 40 for tally in found.values())


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.name)
def test_inputs_that_once_failed(readers: dict[str, Target], path: Path) -> None:
    name = path.name.rpartition("-")[0].replace("_", " ").replace("+", "/")
    assert not judge(readers[name], path.read_bytes())


# ---- the campaign finds what it is there to find


def test_the_same_numbers_give_the_same_case(readers: dict[str, Target]) -> None:
    target = readers["truth"]
    assert case(target, 3, 5) == case(target, 3, 5)
    assert len({case(target, 3, i) for i in range(20)}) > 10


def test_faults_are_told_apart_saved_and_shrunk(tmp_path: Path) -> None:
    def crash(data: bytes) -> None:
        if b"x" in data:
            raise KeyError("x")

    def wrong(data: bytes) -> str:
        return data.decode(errors="replace")

    crashing = Target("crashing", (b"abxcd" * 9,), crash)
    assert judge(crashing, b"ab") == "" and judge(crashing, b"x") == "KeyError in test_fuzz.py:crash"
    assert shrunk(crashing, b"abxcdxx", judge(crashing, b"abxcdxx")) == b"x"
    signed = Target("signed", (b"good",), wrong, same=True)
    assert judge(signed, b"good") == "" and "signed" in judge(signed, b"bad")
    strict = Target("strict", (b"1",), wrong, reference=lambda data: "1")
    assert judge(strict, b"1") == "" and "other content" in judge(strict, b"2")
    tally = Tally()
    for i in range(40):
        one_case(crashing, 0, i, tally, tmp_path)
    assert tally.faults and [p.read_bytes() for p in tmp_path.glob("crashing-????????")] == [b"x"]


def test_a_reader_that_hangs_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fuzz.campaign.SLOW_SECONDS", 0.2)

    def hang(data: bytes) -> None:
        while True:
            pass

    assert judge(Target("hanging", (b"",), hang), b"") == "hang"
