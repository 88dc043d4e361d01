"""Machines that hold other weights or settings under one name are told apart; copies are not."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hiddenlab.errors import InputError
from hiddenlab.models.load import resolve_model
from hiddenlab.models.same_checkpoint import check_same, checkpoint_digest
from hiddenlab.testing import save_tiny


def digest(folder: Path | str) -> str:
    return checkpoint_digest(resolve_model(str(folder)))


def test_a_copy_has_the_digest_of_its_model(tiny: Callable[..., str], tmp_path: Path) -> None:
    path = tiny("llama")
    shutil.copytree(path, tmp_path / "copy")
    assert digest(tmp_path / "copy") == digest(path)


def test_another_step_of_training_has_another_digest(tiny: Callable[..., str], tmp_path: Path) -> None:
    path = tiny("llama")
    shutil.copytree(path, tmp_path / "trained")
    file, drawn = tmp_path / "trained" / "model.safetensors", torch.Generator().manual_seed(0)
    tensors = {
        name: x + 1e-4 * torch.randn(x.shape, generator=drawn).to(x) for name, x in load_file(file).items()
    }
    save_file(tensors, file, {"format": "pt"})
    assert digest(tmp_path / "trained") != digest(path)


def test_other_settings_have_another_digest(tmp_path: Path) -> None:
    for theta, folder in ((10_000.0, "one"), (500_000.0, "other")):
        save_tiny(
            "llama", tmp_path / folder, 0, rope_parameters={"rope_type": "default", "rope_theta": theta}
        )
    weights = [load_file(tmp_path / folder / "model.safetensors") for folder in ("one", "other")]
    assert all(torch.equal(x, weights[1][name]) for name, x in weights[0].items())
    assert digest(tmp_path / "one") != digest(tmp_path / "other")


def test_a_checkpoint_of_several_files_counts_each(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    one = save_tiny("llama", tmp_path / "one", 0)
    model = AutoModelForCausalLM.from_pretrained(one)
    model.save_pretrained(tmp_path / "parts", max_shard_size="100KB")
    files = sorted((tmp_path / "parts").glob("*.safetensors"))
    assert len(files) > 1
    before = digest(tmp_path / "parts")
    tensors = load_file(files[-1])
    save_file({name: x + 1 for name, x in tensors.items()}, files[-1], {"format": "pt"})
    assert digest(tmp_path / "parts") != before
    files[-1].unlink()
    with pytest.raises(InputError, match=f"{files[-1].name}, which is missing"):
        digest(tmp_path / "parts")


def test_the_machine_that_differs_is_named() -> None:
    check_same("m", {"the client": "a", "CompNode 0": "a"})
    with pytest.raises(
        InputError, match="CompNode 1 holds another checkpoint under the name m than the client"
    ):
        check_same("m", {"the client": "a", "CompNode 0": "a", "CompNode 1": "b"})
