"""GGUF files become safetensors in the cache, whole or not at all; a cache that cannot be used is said to be so."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from hiddenlab.attacks.infill.text import own_text
from hiddenlab.attacks.infill.train import checkpoint_path
from hiddenlab.cli import app
from hiddenlab.errors import InputError
from hiddenlab.models import load_model
from hiddenlab.models.gguf import converted
from hiddenlab.proposals import store
from hiddenlab.testing import LAYERS, write_tiny_gguf
from hiddenlab.types import ObservationInfo, silent

IDS = torch.tensor([17, 250, 3, 3, 99, 180, 41, 7, 256, 299, 5, 64])


def states(path: Path, layer: int | None, stream: str = "resid") -> Tensor:
    return load_model(str(path), layer, stream=stream, device="cpu").encode(IDS)


def refused(match: str, path: Path) -> None:
    with pytest.raises(InputError, match=match) as caught:
        load_model(str(path), 1, device="cpu")
    assert "\n" not in str(caught.value)


# ---- GGUF files


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HIDDENLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.slow
def test_all_parts_of_a_split_gguf_are_read(tmp_path: Path, own_cache: Path) -> None:
    write_tiny_gguf(tmp_path / "whole.gguf")
    write_tiny_gguf(tmp_path / "model.gguf", split_max_tensors=15)
    files = sorted(tmp_path.glob("model-*.gguf"))
    assert [file.name for file in files] == [f"model-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for layer in (1, 2, LAYERS):
        expected = states(tmp_path / "whole.gguf", layer)
        assert all(torch.equal(states(file, layer), expected) for file in (files[0], files[2]))
    logits = states(tmp_path / "whole.gguf", None, "logits")
    assert torch.equal(states(files[1], None, "logits"), logits)
    assert not [path for path in (own_cache / "models").iterdir() if path.name.startswith(".")]
    files[1].unlink()
    for file in (files[0], files[2]):
        refused(f"one of 3 parts of a model, of which {files[1].name} is missing", file)


def test_gguf_files_that_are_damaged_or_lack_tensors(tmp_path: Path, own_cache: Path) -> None:
    write_tiny_gguf(tmp_path / "lacks.gguf", drop="blk.1.ffn_up")
    refused("lacks.gguf does not give .*layers.1.mlp.up_proj.weight", tmp_path / "lacks.gguf")
    write_tiny_gguf(tmp_path / "cut.gguf")
    whole = (tmp_path / "cut.gguf").read_bytes()
    for size in (0, 3, 100, len(whole) // 2, len(whole) - 100):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        refused("cannot read the GGUF file .*cut.gguf.*incomplete, copy it again", tmp_path / "cut.gguf")
    write_tiny_gguf(tmp_path / "parts.gguf", split_max_tensors=15)
    part = tmp_path / "parts-00002-of-00003.gguf"
    part.write_bytes(part.read_bytes()[:200])
    refused("cannot read .*parts-0000", part)
    assert not list((own_cache / "models").iterdir())  # nothing of them is kept


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
def test_two_gguf_files_of_one_name_and_size_are_two_models(tmp_path: Path) -> None:
    for i in range(2):
        (tmp_path / str(i)).mkdir()
        write_tiny_gguf(tmp_path / str(i) / "model.gguf", seed=i)
        write_tiny_gguf(tmp_path / str(i) / "parts.gguf", seed=i, split_max_tensors=15)
    sizes = [[file.stat().st_size for file in sorted((tmp_path / str(i)).iterdir())] for i in range(2)]
    assert sizes[0] == sizes[1]
    first, second = (states(tmp_path / str(i) / "model.gguf", 1) for i in range(2))
    assert float((first - second).abs().max()) > 0.1
    # Another last part alone is another model, too.
    last = "parts-00003-of-00003.gguf"
    before = converted(tmp_path / "0" / last)
    shutil.copy(tmp_path / "1" / last, tmp_path / "0" / last)
    assert converted(tmp_path / "0" / last) != before


# ---- the cache


def test_caches_that_cannot_be_used(
    tiny: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    write_tiny_gguf(tmp_path / "model.gguf")
    model = load_model(tiny("llama", tokenizer=True), 1, device="cpu")
    info = ObservationInfo(model.ref.name, model.signature, model.site)
    uses: list[Callable[[], Any]] = [
        lambda: converted(tmp_path / "model.gguf"),
        lambda: store.probe_for(model, info),
        lambda: store.pairwise_order_for(model, replace(info, rows_permuted=True)),
        lambda: own_text(model, 1, 4, 0, silent),
        lambda: checkpoint_path({"a": 1}),
    ]
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        monkeypatch.setenv("HIDDENLAB_CACHE", str(place))
        for use in uses:
            with pytest.raises(InputError, match=f"the cache {place} cannot be used .*set HIDDENLAB_CACHE"):
                use()
    # Nobody may write there; root may everywhere.
    monkeypatch.setenv("HIDDENLAB_CACHE", str(tmp_path / "closed"))
    monkeypatch.setattr("os.access", lambda *_: False)
    for use in uses:
        with pytest.raises(InputError, match="no permission to write"):
            use()


def test_the_command_line_says_so_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    write_tiny_gguf(tmp_path / "model.gguf")
    monkeypatch.setenv("HIDDENLAB_CACHE", str(tmp_path / "file"))
    done = CliRunner().invoke(app, ["attack", "x", "--model", str(tmp_path / "model.gguf"), "--no-record"])
    assert done.exit_code == 2
    assert "set HIDDENLAB_CACHE to a directory" in " ".join(done.output.split())
