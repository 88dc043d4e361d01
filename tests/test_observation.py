"""Observation files give back what was saved, hold no secret, and are refused when damaged or foreign."""

import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from hiddenlab.channels import Channel
from hiddenlab.errors import InputError
from hiddenlab.models import TruncatedModel, load_model
from hiddenlab.observation import (
    check_observation,
    load_observation,
    load_observations,
    save_observation,
    save_observations,
)
from hiddenlab.testing import json_values
from hiddenlab.types import Observation, ObservationInfo, Site

torch.set_num_threads(1)

PUBLIC = ObservationInfo(
    "a/model", (0.5, -0.25, 0.0), Site(3), channel=("seq-perm",), rows_permuted=True, facts={"a": [1, None]}
)
JSON = json_values()


def observation(rows: int = 4, width: int = 8, info: ObservationInfo = PUBLIC) -> Observation:
    return Observation(torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)), info)


@pytest.fixture
def models(tmp_path: Path) -> Callable[..., TruncatedModel]:
    def _slice(seed: int = 0, layer: int = 1, width: int = 64, dtype: str = "float32") -> TruncatedModel:
        folder = tmp_path / f"model-{seed}-{width}"
        if not folder.exists():
            torch.manual_seed(seed)
            config = LlamaConfig(
                vocab_size=97,
                hidden_size=width,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
            )
            LlamaForCausalLM(config).save_pretrained(folder)
        return load_model(str(folder), layer, dtype=dtype, device="cpu")

    return _slice


# ---- round trips


@settings(max_examples=30)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    sizes=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=12),
    model=st.text(),
    signature=st.lists(st.floats(-9, 9)),
    columns=st.sampled_from([None, "per-row", "shared"]),
    sigma=st.none() | st.floats(1e-9, 1e9),
    facts=st.dictionaries(st.text(), JSON, max_size=3),
)
def test_what_is_saved_is_loaded(
    tmp_path_factory: pytest.TempPathFactory,
    dtype: torch.dtype,
    sizes: list[tuple[int, int]],
    model: str,
    signature: list[float],
    columns: str | None,
    sigma: float | None,
    facts: dict[str, Any],
) -> None:
    info = ObservationInfo(
        model, tuple(signature), Site(2), channel=("a:b=1",), columns_permuted=columns, noise_sigma=sigma,
        prefix_tokens=2, provider_dtype="bfloat16", quantization="nf4", facts=facts,
    )  # fmt: skip
    saved = [
        Observation(torch.randn(size).to(dtype), replace(info, prefix_tokens=i))
        for i, size in enumerate(sizes)
    ]
    path = tmp_path_factory.mktemp("saved") / "several.safetensors"
    save_observations(saved, path)
    loaded = load_observations(path)
    assert [one.info for one in loaded] == [one.info for one in saved]
    for one, other in zip(loaded, saved, strict=True):
        assert one.states.dtype == dtype and torch.equal(one.states, other.states)


def test_one_observation_is_a_plain_safetensors_file(tmp_path: Path) -> None:
    path = tmp_path / "one.safetensors"
    one = observation()
    save_observation(one, path)
    assert torch.equal(load_observation(path).states, one.states)
    assert list(load_file(path)) == ["states.0"]
    save_observations([one, one], path)
    with pytest.raises(InputError, match="holds 2 observations"):
        load_observation(path)


def test_views_of_one_buffer_are_saved_apart(tmp_path: Path) -> None:
    path = tmp_path / "views.safetensors"
    buffer = torch.randn(6, 8)
    save_observations([Observation(buffer[:2], PUBLIC), Observation(buffer[1:].T, PUBLIC)], path)
    first, second = load_observations(path)
    assert torch.equal(first.states, buffer[:2]) and torch.equal(second.states, buffer[1:].T)


def test_a_file_holds_no_trace_of_the_secret(models: Callable[..., TruncatedModel], tmp_path: Path) -> None:
    model, channel = (
        models(),
        Channel.parse(["gaussian:sigma=0.1", "random-prefix", "hidden-perm", "seq-perm"]),
    )
    tokens = [[7, 13, 42, 96, 5], [8, 8, 8, 8, 8]]
    released = [
        channel.release(model, prompt, torch.Generator().manual_seed(i)) for i, prompt in enumerate(tokens)
    ]
    texts = []
    for i, (one, secret) in enumerate(released):
        path = tmp_path / f"{i}.safetensors"
        save_observation(one, path)
        with safe_open(path, "pt") as file:
            assert list(file.keys()) == ["states.0"] and list(file.metadata()) == ["hiddenlab"]
            texts.append(file.metadata()["hiddenlab"])
        content = path.read_bytes()
        assert str(secret.details["seed"]).encode() not in content
        assert secret.details["seed"].to_bytes(8, "little") not in content
        for word in (b"seed", b"row_order", b'columns"', b'tokens":['):
            assert word not in content
        header = int.from_bytes(content[:8], "little")
        assert len(content) == 8 + header + one.states.numel() * 4  # nothing after the states
    # The metadata is the same whatever the prompt and the seed were.
    assert texts[0] == texts[1]
    assert set(json.loads(texts[0])) == {"format", "observations"}


# ---- writing


def test_writing_replaces_at_once_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "o.safetensors"
    save_observation(observation(2), path)
    save_observation(observation(3), path)
    assert len(load_observation(path).states) == 3 and os.listdir(tmp_path) == ["o.safetensors"]

    def full(tensors: dict[str, Tensor], target: Path, metadata: dict[str, str]) -> None:
        target.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(InputError, match=r"cannot write .*No space left"):
        save_observation(observation(4), path)
    assert len(load_observation(path).states) == 3 and os.listdir(tmp_path) == ["o.safetensors"]


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    for facts in ({"x": object()}, {"x": float("nan")}):
        with pytest.raises(InputError, match="cannot be written as JSON"):
            save_observation(observation(info=replace(PUBLIC, facts=facts)), tmp_path / "o.safetensors")
    with pytest.raises(InputError, match="no observations"):
        save_observations([], tmp_path / "o.safetensors")
    assert os.listdir(tmp_path) == []
    with pytest.raises(InputError, match="cannot write"):
        save_observation(observation(), tmp_path / "missing" / "o.safetensors")


# ---- reading what is damaged or foreign


def write(
    path: Path, states: dict[str, Tensor] | None = None, text: str | None = None, **changes: Any
) -> Path:
    """A file as another program might write it: the right form but for the changes given."""
    facts = json.loads(json.dumps(asdict(PUBLIC))) | changes
    facts = {key: value for key, value in facts.items() if value != "drop"}
    text = json.dumps({"format": 1, "observations": [facts]}) if text is None else text
    save_file(states or {"states.0": torch.ones(2, 3)}, path, {"hiddenlab": text} if text else None)
    return path


def test_the_form_described_is_read(tmp_path: Path) -> None:
    assert load_observation(write(tmp_path / "o", noise_sigma="drop", facts="drop")).info == replace(
        PUBLIC, facts={}
    )


@settings(max_examples=60)
@given(cut=st.integers(0, 10**6))
def test_a_truncated_file_is_refused(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("cut") / "o.safetensors"
    save_observation(observation(), path)
    content = path.read_bytes()
    path.write_bytes(content[: cut % len(content)])
    with pytest.raises(InputError, match="truncated or no observation file"):
        load_observations(path)


@settings(max_examples=60)
@given(content=st.binary(max_size=64))
def test_any_other_file_is_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("any") / "o.safetensors"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        load_observations(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "its metadata has no entry 'hiddenlab'"),
        ("{", "is no valid JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("[]", "names no format version"),
        ('{"observations": []}', "names no format version"),
        ('{"format": "1", "observations": []}', "names no format version"),
        ('{"format": true, "observations": []}', "names no format version"),
        ('{"format": 2, "observations": []}', "has format 2, this hiddenlab reads up to 1"),
        ('{"format": 1}', "observations is missing"),
        ('{"format": 1, "observations": []}', "observations should have at least 1 item"),
        ('{"format": 1, "observations": [3]}', r"observations\[0\] should be an object"),
    ],
)
def test_foreign_and_newer_metadata_is_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        load_observations(write(tmp_path / "o.safetensors", text=text))


@pytest.mark.parametrize(
    "changes",
    [
        {"model": 3}, {"model": "drop"}, {"signature": "abc"}, {"signature": ["a"]}, {"signature": "drop"},
        {"site": "resid"}, {"site": {"layer": "6"}}, {"site": {"layer": 6, "stream": "soup"}},
        {"site": "drop"}, {"site": {"layer": 6, "depth": 1}}, {"site": {"layer": -1}},
        {"site": {"layer": 6, "stream": [1]}},
        {"channel": "seq-perm"}, {"channel": [1]}, {"rows_permuted": 1}, {"rows_permuted": None},
        {"columns_permuted": "some"}, {"columns_permuted": []}, {"noise_sigma": 0}, {"noise_sigma": "1"},
        {"noise_sigma": True}, {"prefix_tokens": -1}, {"prefix_tokens": 1.5}, {"provider_dtype": "int3"},
        {"provider_dtype": None}, {"quantization": "int3"}, {"facts": []}, {"tokens": [1, 2]},
    ],
    ids=str,
)  # fmt: skip
def test_malformed_public_facts_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(
        InputError, match=next(iter(changes)) if "drop" not in changes.values() else "is missing"
    ):
        load_observations(write(tmp_path / "o.safetensors", **changes))


@pytest.mark.parametrize(
    ("states", "says"),
    [
        ({"states.0": torch.full((2, 3), float("nan"))}, "NaN or infinity .first in row 0"),
        ({"states.0": torch.tensor([[1.0], [float("inf")]])}, "NaN or infinity .first in row 1"),
        ({"states.0": torch.ones(3)}, r"floating-point rows × width, not float32 \(3,\)"),
        ({"states.0": torch.ones(2, 3, dtype=torch.int64)}, "not int64"),
        ({"states.0": torch.ones(0, 3)}, "no rows"),
        ({"weights": torch.ones(2, 3)}, "should hold the tensors"),
        ({"states.0": torch.ones(2, 3), "order": torch.ones(2)}, "and no more"),
    ],
)
def test_unusable_states_are_refused(tmp_path: Path, states: dict[str, Tensor], says: str) -> None:
    with pytest.raises(InputError, match=says):
        load_observations(write(tmp_path / "o.safetensors", states))


def test_a_path_without_a_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(InputError, match="no observation file at"):
            load_observations(path)


# ---- whose observation it is


def test_an_observation_fits_its_own_model_in_every_dtype(models: Callable[..., TruncatedModel]) -> None:
    model = models()
    for spec in ("identity", "dtype:bfloat16", "dtype:float16", "int8"):
        one, _ = Channel.parse([spec]).release(model, [1, 2], torch.Generator())
        check_observation(one, model)
        check_observation(one, models(dtype="bfloat16"))


def test_an_observation_of_something_else_is_refused(models: Callable[..., TruncatedModel]) -> None:
    one, _ = Channel.parse([]).release(models(), [1, 2], torch.Generator())
    with pytest.raises(InputError, match=r"64 wide .* is 32 wide"):
        check_observation(one, models(width=32))
    with pytest.raises(InputError, match="comes from other weights"):
        check_observation(one, models(seed=1))
    with pytest.raises(
        InputError, match=r"resid at layer 1, .* resid at layer 2; use --layer 1 --stream resid"
    ):
        check_observation(one, models(layer=2))
    unsigned = Observation(one.states, replace(one.info, signature=()))
    with pytest.raises(InputError, match="other weights"):
        check_observation(unsigned, models())
