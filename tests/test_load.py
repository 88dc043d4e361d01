"""Finding and loading models: what is not whole or not understood is refused, and never loads as random weights."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hiddenlab.errors import InputError
from hiddenlab.slice import load_slice
from hiddenlab.slice.load import resolve_model

TinyPath = Callable[..., str]


def test_local_only_never_asks_the_hub(
    tiny: TinyPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("a connection was made"))
    for name in ("nobody/nothing", "nothing", "not a name"):
        with pytest.raises(InputError, match=f"{name}.* is not on this machine; name it with --model"):
            resolve_model(name, local_only=True)
    assert resolve_model(tiny("llama"), local_only=True).path == tiny("llama")
    # One that was downloaded before is on this machine.
    home = tmp_path / "models--somebody--something"
    shutil.copytree(tiny("llama"), home / "snapshots" / "abc")
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("abc")
    ref = resolve_model("somebody/something", local_only=True)
    assert ref.name == "somebody/something"
    assert load_slice(ref.path, 1).signature == load_slice(tiny("llama"), 1).signature
