"""The strongest noise that keeps the model useful is found, and assessed."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hiddenlab.channels import Channel
from hiddenlab.config import AttackConfig
from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.eval.assess import command
from hiddenlab.eval.assess.ensemble import Step
from hiddenlab.eval.assess.price import utility_of
from hiddenlab.eval.assess.trade import specs_of, strongest_of
from hiddenlab.eval.cells import Setting, conduct
from hiddenlab.eval.tables.leaderboard import trade_off
from hiddenlab.job import prepare
from hiddenlab.types import silent


@pytest.mark.slow
def test_the_strongest_noise_that_keeps_the_model_useful_is_assessed(
    tiny: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "ATTACKS", (Step("nearest"),))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the first of them\nanother one\na third text\nand one more\n")
    asked = {"model": tiny("llama", tokenizer=True), "prompts": str(prompts), "limit": 4, "max_tokens": 8}
    families = "gaussian:sigma=0.0000001..1000,gaussian:sigma=500..1000,gaussian:sigma=1e-9..2e-9,round:int8"
    made = trade_off(Setting(layers=(1,), **asked), families, "identity,seq-perm+orthogonal", minutes=0.2)
    rows = conduct("trade-off", made, tmp_path)["rows"]
    found = {(row["keys"]["noise"], row["keys"]["secret map"]): row for row in rows}
    alone, behind, none, *_ = rows
    assert alone["words"]["strongest"] == behind["words"]["strongest"]
    sigma = float(alone["words"]["strongest"].partition("sigma=")[2])
    assert 1e-7 < sigma < 1 and alone["figures"]["kept"]["value"] >= 0.9
    # It is sought on all of the texts, and not on the eight tokens of each that are attacked.
    job = prepare(AttackConfig(**(asked | {"max_tokens": 128}), layer=1))
    assert max(len(case.truth.tokens) for case in job.cases if case.truth) > 8
    same = utility_of(job.model, Channel.parse([alone["words"]["strongest"]]), job.cases, 0, silent)
    assert same["top1_agreement"] == alone["figures"]["kept"]
    # A little more is too much.
    more = utility_of(job.model, Channel.parse([f"gaussian:sigma={sigma * 2}"]), job.cases, 0, silent)
    assert more["top1_agreement"]["value"] < 0.9
    assert none["status"] == "not run" and "gaussian:sigma=500 keeps" in none["reason"]
    assert found["gaussian:sigma=1e-9..2e-9", "identity"]["words"]["strongest"] == "gaussian:sigma=2e-09"
    assert found["round:int8", "identity"]["words"]["strongest"] == "round:int8"
    with pytest.raises(InputError, match="loss is from 0"):
        trade_off(Setting(layers=(1,), **asked), loss=1)


@given(low=st.floats(1e-9, 1e9), high=st.floats(1e-9, 1e9), border=st.floats(0, 1))
def test_the_strongest_strength_is_found_by_halving(low: float, high: float, border: float) -> None:
    """Beside every strength tried one by one."""
    at = specs_of(f"a:b=1,c={low!r}..{high!r}")
    places = {at(place / 64): place / 64 for place in range(64, -1, -1)}  # of two alike the first
    kept = lambda spec: 1.0 if places[spec] <= border else 0.5  # noqa: E731
    assert strongest_of(f"a:b=1,c={low!r}..{high!r}", 0.9, kept) in {
        spec for spec, place in places.items() if place == max(p for p in places.values() if p <= border)
    }


@pytest.mark.parametrize(
    "family", ["a:b=1..2,c=3..4", "a:b=0..1", "a:b=..1", "a:b=x..y", "a:b=1e400..1", "a:b=-1..1", "a:b=1...2"]
)
def test_ranges_that_are_none_are_refused(family: str) -> None:
    with pytest.raises(InputError, match=r"range of strengths|above 0"):
        specs_of(family)


def test_a_range_that_begins_with_the_strongest_is_refused() -> None:
    kept = {"a:b=0.02": 0.92, "a:b=0.01": 0.97}
    with pytest.raises(NotApplicableError, match="give the weakest strength first"):
        strongest_of("a:b=0.02..0.01", 0.9, kept.__getitem__)


def test_families_and_maps_may_be_files_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from hiddenlab.stages import Stage\nclass {0}(Stage):\n    def __init__(self, b: float = 1.0) -> None:\n"
    code += "        self.spec = f'{1}:b={{b!r}}'\n"
    (tmp_path / "noise.py").write_text(code.format("Noise", "own-noise"))
    (tmp_path / "secret.py").write_text(code.format("Secret", "own-secret"))
    (tmp_path / "inside").mkdir()
    monkeypatch.chdir(tmp_path / "inside")
    made = trade_off(Setting(layers=(1,)), "../noise.py:b=0.1..1", "../secret.py:b=2")
    assert [cell.spec["family"] for cell in made.cells] == ["../noise.py:b=0.1..1"]
    assert specs_of("../noise.py:b=0.1..1")(1.0) == "../noise.py:b=1"
    Channel.parse(["../noise.py:b=0.5", "../secret.py:b=2"])  # both are known
    with pytest.raises(InputError, match="there is no file"):
        trade_off(Setting(layers=(1,)), "nowhere.py:b=0.1..1")
    with pytest.raises(InputError, match="names nothing"):
        trade_off(Setting(layers=(1,)), maps="")
