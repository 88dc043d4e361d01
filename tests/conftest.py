"""One thread (two are slower where other processes are busy), a cache of the tests' own, seeds."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

from hiddenlab.attacks.beam_decoding import distortion_model
from hiddenlab.models import TruncatedModel, load_model
from hiddenlab.testing import save_tiny, small_training

SLOW = Path(__file__).parent / "slow"

torch.set_num_threads(1)
# Ray's processes are nice by default, and starve beside the rest of the suite.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
# How long an example takes says something of the machine, and nothing of the code.
hypothesis.settings.register_profile("hiddenlab", deadline=None)
hypothesis.settings.load_profile("hiddenlab")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all of tests/slow; elsewhere a slow case stands beside its quick ones, and is marked there."""
    for item in items:
        if SLOW in item.path.parents:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Nothing that a test trains or converts touches the user's cache."""
    before, base = os.environ.get("HIDDENLAB_CACHE"), tmp_path_factory.getbasetemp()
    # The processes of one run share it: what one of them trains, the others load.
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache"
    folder.mkdir(exist_ok=True)
    os.environ["HIDDENLAB_CACHE"] = str(folder)
    yield folder
    if before is None:
        del os.environ["HIDDENLAB_CACHE"]
    else:
        os.environ["HIDDENLAB_CACHE"] = before


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Path of a tiny model: ``tiny("llama", tokenizer=True)``; each variant is made once a session."""
    made: dict[str, str] = {}

    def path(architecture: str, seed: int = 0, **options: Any) -> str:
        key = f"{architecture} {seed} {sorted(options.items())}"
        if key not in made:
            made[key] = save_tiny(architecture, tmp_path_factory.mktemp(architecture), seed, **options)
        return made[key]

    return path


@pytest.fixture(scope="session")
def tiny_model(tiny: Callable[..., str]) -> Callable[..., TruncatedModel]:
    """A tiny model's truncated model in float32 on the CPU: ``tiny_model("llama", 2)``; loaded once a session."""
    loaded: dict[tuple[str, int | None, str], TruncatedModel] = {}

    def load(architecture: str, layer: int | None = None, stream: str = "resid") -> TruncatedModel:
        key = (architecture, layer, stream)
        if key not in loaded:
            loaded[key] = load_model(tiny(architecture), layer, stream=stream, device="cpu")
        return loaded[key]

    return load


@pytest.fixture
def small_probes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A training allowance for tiny models, in place of the one for real ones."""
    monkeypatch.setattr(distortion_model, "TOKENS", 600)
    with small_training():
        yield
