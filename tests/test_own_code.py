"""Code that a checkpoint brings runs where the user asks for it, and nowhere else."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hiddenlab.cli import app
from hiddenlab.config import AttackConfig
from hiddenlab.errors import InputError
from hiddenlab.models import load_model
from hiddenlab.records import RECORD
from hiddenlab.testing import LAYERS, PlainModel

TinyPath = Callable[..., str]
IDS = torch.tensor([17, 250, 3, 3, 99, 180, 41, 7])
CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel, PreTrainedTokenizerFast

with open({ran!r}, "a") as file:
    file.write("x")

class OwnConfig(LlamaConfig):
    model_type = {kind!r}

class OwnModel(LlamaModel):
    config_class = OwnConfig

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""
MAP = {
    "AutoConfig": "own.OwnConfig",
    "AutoModel": "own.OwnModel",
    "AutoModelForCausalLM": "own.OwnForCausalLM",
}


@pytest.fixture
def own(tiny: TinyPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Makes a copy of a tiny model that brings its own code, which leaves a file behind when it runs."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))

    def make(
        kind: str = "own_llama", auto_map: dict[str, str] | None = None, tokenizer: bool = False
    ) -> Path:
        folder = tmp_path / f"model-{kind}-{tokenizer}"
        shutil.copytree(tiny("llama", tokenizer=True), folder)
        (folder / "own.py").write_text(CODE.format(ran=str(tmp_path / "ran"), kind=kind))
        name = "tokenizer_config.json" if tokenizer else "config.json"
        values = json.loads((folder / name).read_text())
        if tokenizer:
            values |= {
                "tokenizer_class": "OwnTokenizer",
                "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]},
            }
        else:
            values |= {"model_type": kind, "auto_map": MAP if auto_map is None else auto_map}
        (folder / name).write_text(json.dumps(values))
        return folder

    return make


def refused(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 2 and isinstance(done.exception, SystemExit), (done.output, done.exception)
    return " ".join(done.output.split())


def test_it_does_not_run_unasked(own: Callable[..., Path], tmp_path: Path) -> None:
    for path, file in ((own(), "config.json"), (own("llama", tokenizer=True), "tokenizer_config.json")):
        told = refused("attack", "hi", "--model", str(path), "--layer", "1", "--no-record")
        assert f"brings its own code (auto_map in its {file})" in told and "--trust-remote-code" in told
    # Where transformers knows the architecture, its code is used.
    path = own("llama")
    assert torch.equal(
        load_model(str(path), 2, device="cpu").encode(IDS), load_model(str(path), 2).encode(IDS)
    )
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "names", [("AutoConfig", "AutoModel", "AutoModelForCausalLM"), ("AutoConfig", "AutoModelForCausalLM")]
)
def test_it_runs_where_it_is_trusted(
    own: Callable[..., Path], tiny: TinyPath, tmp_path: Path, names: tuple[str, ...]
) -> None:
    path = own(auto_map={name: MAP[name] for name in names})
    model = load_model(str(path), 2, device="cpu", trust_remote_code=True)
    assert (tmp_path / "ran").exists()
    # Nothing is known of its borders.
    assert model.engine == "plain" and "for lack of a small copy" in model.difference
    plain = PlainModel(tiny("llama"))
    assert float((model.encode(IDS) - plain.states(IDS.tolist(), 2)).abs().max()) < 1e-4
    whole = model.sibling(None, stream="logits")
    assert float((whole.encode(IDS) - plain.states(IDS.tolist(), LAYERS, "logits")).abs().max()) < 1e-4


def test_its_tokenizer_runs_where_it_is_trusted(own: Callable[..., Path], tmp_path: Path) -> None:
    model = load_model(str(own("llama", tokenizer=True)), 1, device="cpu", trust_remote_code=True)
    assert type(model.tokenizer).__name__ == "OwnTokenizer" and (tmp_path / "ran").exists()
    assert model.text(model.tokenize("hi")) == "hi"


@pytest.mark.slow
@pytest.mark.usefixtures("small_probes")
def test_a_record_does_not_make_it_run(
    own: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "hiddenlab.proposals.corpus.standard_library_texts", lambda: ["some text\n" * 40] * 20
    )
    path, run = own(), tmp_path / "run"
    options = ["attack", "hi", "--model", str(path), "--layer", "1", "--proposal", "vocab", "--out", str(run)]
    done = CliRunner().invoke(app, [*options, "--trust-remote-code"])
    assert done.exit_code == 0, done.output
    assert json.loads((run / RECORD).read_text())["spec"]["trust_remote_code"] is True
    (tmp_path / "ran").unlink()
    for more in ([], ["--resume"]):
        assert "give --trust-remote-code here" in refused("rerun", str(run), *more)
    assert not (tmp_path / "ran").exists()
    assert CliRunner().invoke(app, ["rerun", str(run), "--no-record", "--trust-remote-code"]).exit_code == 0


def test_an_observation_does_not_make_it_run() -> None:
    with pytest.raises(InputError, match="goes with --model; no code runs of a model that a file names"):
        AttackConfig(observation="states.safetensors", trust_remote_code=True).checked()
