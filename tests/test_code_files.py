"""A defense or attack in a file of the user's own is named by that file, and runs nowhere else."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import hiddenlab as hl
from hiddenlab import registry
from hiddenlab.channels import Channel
from hiddenlab.cli import app
from hiddenlab.errors import InputError, UnknownNameError

EXAMPLES = Path(__file__).resolve().parent / "plugin" / "hiddenlab_example"
TWO = """
from hiddenlab.stages import Stage

class Zero(Stage):
    spec = "own-zero"
    def states(self, states, generator):
        return states * 0, None, {}

class Half(Zero):
    spec = "own-half"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the example's two files under names of their own."""
    (tmp_path / "round_it.py").write_text(
        (EXAMPLES / "rounding.py").read_text().replace("decimal:", "own-decimal:")
    )
    (tmp_path / "near_it.py").write_text((EXAMPLES / "nearest.py").read_text())
    (tmp_path / "two.py").write_text(TWO)
    monkeypatch.chdir(tmp_path)
    for kind in registry.PLUGIN_KINDS:
        monkeypatch.setitem(registry._SESSION, kind, {})  # a test's names end with it
    return tmp_path


@pytest.mark.slow
def test_compare_attack_and_rerun_take_files(folder: Path, tiny: Callable[..., str]) -> None:
    model = tiny("llama", tokenizer=True)
    run = CliRunner().invoke(
        app,
        [
            "compare", "abc", "--model", model, "--layer", "1", "--attack", "near_it.py", "--no-record", "--json",
            "--defense", "round_it.py:decimals=1+seq-perm",
        ],
    )  # fmt: skip
    assert run.exit_code == 0, run.output
    assert [one["defense"] for one in json.loads(run.stdout)["runs"]] == [
        "identity",
        "round_it.py:decimals=1+seq-perm",
    ]
    spec = ["--model", model, "--layer", "1", "--defense", "round_it.py:1", "--attack", "near_it.py"]
    run = CliRunner().invoke(app, ["attack", "abc", *spec, "--out", "made", "--json"])
    assert run.exit_code == 0, run.output
    run = CliRunner().invoke(app, ["rerun", "made", "--no-record", "--json"])
    assert run.exit_code == 2 and "ran code of near_it.py, round_it.py; if you trust it" in run.stderr
    run = CliRunner().invoke(app, ["rerun", "made", "--no-record", "--json", "--trust-remote-code"])
    assert run.exit_code == 0 and json.loads(run.stdout)["same"]


@pytest.mark.slow
def test_saved_rows_are_attacked_where_the_file_is_named(folder: Path, tiny: Callable[..., str]) -> None:
    model = tiny("llama", tokenizer=True)
    made = ["abc", "--model", model, "--layer", "1", "--defense", "round_it.py:1", "-o", "rows.safetensors"]
    run = CliRunner().invoke(app, ["capture", *made])
    assert run.exit_code == 0, run.output
    rows = ["--observation", "rows.safetensors", "--json"]

    def fresh(*arguments: str) -> tuple[int, str, str]:
        registry._SESSION["defenses"].clear()  # as a process that did not capture
        run = CliRunner().invoke(app, list(arguments))
        return run.exit_code, run.stdout, " ".join(run.stderr.split())

    for verb in (["attack", "--no-record"], ["assess", "--no-record", "--minutes", "1"]):
        code, _, told = fresh(*verb, *rows)
        assert code == 2 and "unknown defense 'own-decimal'" in told and "beside --observation" in told
    code, _, told = fresh("attack", "--no-record", *rows, "--defense", "round_it.py:2")
    assert code == 2 and "passed own-decimal:decimals=1 and not own-decimal:decimals=2" in told
    code, said, told = fresh("attack", "--out", "made", *rows, "--defense", "round_it.py:1")
    assert code == 0 and json.loads(said)["spec"]["defense"] == ["round_it.py:1"], told
    code, said, told = fresh("rerun", "made", "--no-record", "--json", "--trust-remote-code")
    assert code == 0 and json.loads(said)["same"], told


def test_the_release_is_that_of_the_object(
    folder: Path, tiny_model: Callable[..., hl.TruncatedModel]
) -> None:
    model = tiny_model("llama", 1)
    observation, _ = hl.channel("round_it.py:decimals=1").release(model, [1, 2, 3])
    plain, _ = hl.channel().release(model, [1, 2, 3])
    assert torch.equal(observation.states, plain.states.round(decimals=1))
    # The attacker builds the channel again from what the observation says.
    assert observation.info.channel == ("own-decimal:decimals=1",)
    assert Channel.parse(observation.info.channel).specs == observation.info.channel
    assert hl.attack(observation, model, "near_it.py").stop_reason == "complete"


def test_one_of_several_classes_is_named(folder: Path) -> None:
    with pytest.raises(InputError, match=r"two.py has several .*Zero, Half.*name one: two.py::Zero"):
        hl.channel("two.py")
    assert hl.channel("two.py::Half").specs == ("own-half",)
    with pytest.raises(InputError, match=r"two.py has no defense Third; it has Zero, Half"):
        hl.channel("two.py::Third")
    with pytest.raises(InputError, match=r"two.py has no attack; see docs/how-to/own-attack.md"):
        hl.run(hl.AttackConfig(prompt="abc", attack="two.py"), keep=False)


def test_what_a_file_may_not_be(folder: Path) -> None:
    (folder / "broken.py").write_text("import not_there_at_all")
    with pytest.raises(InputError, match=r"broken.py cannot be run: ModuleNotFoundError: .*not_there_at_all"):
        hl.channel("broken.py:1")
    (folder / "broken.py").write_text(TWO)  # mended, in the same process
    assert hl.channel("broken.py::Zero").specs == ("own-zero",)
    with pytest.raises(InputError, match=r"there is no file nowhere.py"):
        hl.channel("nowhere.py")
    with pytest.raises(InputError, match=r"round_it.py has no parameter 'sigma'; it takes decimals"):
        hl.channel("round_it.py:sigma=1")


def test_faults_of_own_code_are_told_by_their_place(folder: Path, tiny: Callable[..., str]) -> None:
    spec = [
        "abc",
        "--model",
        tiny("llama", tokenizer=True),
        "--layer",
        "1",
        "--no-record",
        "--attack",
        "near_it.py",
    ]
    begin = (
        "from hiddenlab.stages import Stage\nclass Own(Stage):\n"
        "    spec = 'own-fault'\n    def states(self, s, g):\n"
    )
    for code, says in (
        ("        return absent", r"own\.py, line 5: NameError: name 'absent' is not defined"),
        ("        return s", "defense own-fault must return three things"),
        ("        return s[:, :3], None, {}", "released rows of 3 numbers in place of .*publish"),
        ("        return s / 0, None, {}", "the defense own-fault released NaN or infinity"),
    ):
        (folder / "own.py").write_text(begin + code)
        run = CliRunner().invoke(app, ["attack", *spec, "--defense", "own.py"])
        assert run.exit_code == 2 and re.search(says, " ".join(run.stderr.split())), run.stderr
    (folder / "own.py").write_text("from hiddenlab.stages import Stage\nclass Own(Stage):\n    pass")
    (folder / "half.py").write_text(
        "from hiddenlab.stages import Stage\nclass Half(Stage):\n    spec = 'own-forgets'\n"
        "    def __init__(self, strength: float = 1.0) -> None:\n        self.strength = strength"
    )
    assert hl.channel("half.py").specs == ("own-forgets",)
    with pytest.raises(
        InputError, match=r"'own-forgets', builds another defense than 'half.py:strength=2' does"
    ):
        hl.channel("half.py:strength=2")
    with pytest.raises(InputError, match="Own has no name: set its attribute spec"):
        hl.channel("own.py")
    with pytest.raises(InputError, match=r"Identity is a class; give an object of it, Identity\(…\)"):
        hl.channel(registry.resolve("defenses", "identity"))  # type: ignore[arg-type]


def test_code_named_in_a_file_of_others_does_not_run(folder: Path) -> None:
    (folder / "evil.py").write_text("open('ran', 'w')\n" + TWO)
    with pytest.raises(
        UnknownNameError, match=r"the defense evil.py::Zero is code in a file, which runs only"
    ):
        Channel.parse(("evil.py::Zero",))  # as where an observation is read
    assert not (folder / "ran").exists()
