"""Axes, masks and rounding of imported states: whatever the form, the same rows come in, or one line says why not."""

import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import hiddenlab as hl
from hiddenlab.errors import HiddenlabError, InputError
from hiddenlab.imports import ModelShape, Reading, read_states
from hiddenlab.testing import byte_tokenizer
from tests.marks import slow_cases
from tests.test_imports import npy, read, run, same

SHAPE = ModelShape("m", layers=5, width=48, heads=6, kv_heads=3, head_width=8, vocabulary=99)
TEXT = "My password is hunter2"
# What each axis may be; sizes that tell the axes apart.
ORDERS = {
    "resid": [
        "tokens width", "width tokens", "batch tokens width", "tokens batch width", "batch width tokens",
        "layers tokens width", "layers batch tokens width", "batch layers tokens width", "tokens layers width",
    ],
    "k": [
        "tokens width", "batch tokens width", "heads tokens head", "batch heads tokens head",
        "batch tokens heads head", "layers batch heads tokens head",
    ],
}  # fmt: skip


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Any]:
    """A batch with its mask, and an order of axes that some program may use."""
    stream = draw(st.sampled_from(sorted(ORDERS)))
    axes = tuple(draw(st.sampled_from(ORDERS[stream])).split())
    longest = draw(st.integers(9, 12))
    count = draw(st.integers(2, 4)) if "batch" in axes else 1
    lengths = [longest, *draw(st.lists(st.integers(1, longest), min_size=count - 1, max_size=count - 1))]
    return {
        "stream": stream, "axes": axes, "lengths": lengths, "side": draw(st.sampled_from(["left", "right"])),
        "named": draw(st.booleans()), "layer": draw(st.integers(1, SHAPE.layers - 1)),
    }  # fmt: skip


@settings(max_examples=80)
@given(case=batches())
def test_any_order_of_axes_gives_the_same_rows(
    case: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    stream, axes, lengths, layer = (case[name] for name in ("stream", "axes", "lengths", "layer"))
    width, longest = SHAPE.width_of(stream), max(lengths)
    states = torch.randn(SHAPE.layers + 1, len(lengths), longest, width)
    mask = torch.zeros(len(lengths), longest, dtype=torch.long)
    for row, length in zip(mask, lengths, strict=True):
        row[: length if case["side"] == "right" else None] = 1
        row[: longest - length if case["side"] == "left" else 0] = 0
    expected = [s[m.bool()] for s, m in zip(states[layer], mask, strict=True)]
    sizes = {"layers": SHAPE.layers + 1, "batch": len(lengths), "tokens": longest}
    apart = states.unflatten(-1, (SHAPE.heads_of(stream), SHAPE.head_width)) if "heads" in axes else states
    order = ["layers", "batch", "tokens", *(["heads", "head"] if "heads" in axes else ["width"])]
    first = 1 if stream == "k" else 0  # there are no keys before the first layer
    array = apart[first:] if "layers" in axes else apart[layer : layer + 1]
    array = array.permute(
        [*[order.index(axis) for axis in axes], *[i for i, a in enumerate(order) if a not in axes]]
    )
    array = array.reshape(array.shape[: len(axes)])
    path = tmp_path_factory.mktemp("layout") / "x.safetensors"
    save_file({"x": array.contiguous(), "attention_mask": mask}, path)
    # Three axes of which the first may be layers or prompts, and orders that no program uses, are named.
    usual = axes not in {("tokens", "layers", "width"), ("layers", "tokens", "width")}
    named = case["named"] or not usual
    reading = Reading(layer=layer, stream=stream, axes=",".join(axes) if named else None)
    imported = read_states([path], SHAPE, reading)
    assert same(imported, *expected) and sizes["tokens"] == longest
    assert f"read as [{', '.join(axes)}]: {len(lengths)} prompt" in imported.notes[1]
    assert ("padding" in imported.notes[1]) == (min(lengths) < longest)


def test_what_can_be_read_in_two_ways_is_asked(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((6, 7, 48), np.float32))  # six prompts, or six states of one
    with pytest.raises(
        InputError, match=r"could be \[batch, tokens, width\] or \[layers, tokens, width\]; .*--axes"
    ):
        read(tmp_path / "x.npy", SHAPE, layer=2)
    assert len(read(tmp_path / "x.npy", SHAPE, layer=2, axes="batch,tokens,width").prompts) == 6
    assert len(read(tmp_path / "x.npy", SHAPE, layer=2, axes="layers,tokens,width").prompts) == 1
    np.save(tmp_path / "k.npy", np.zeros((2, 3, 3, 8), np.float32))  # three tokens, or three heads
    with pytest.raises(InputError, match=r"could be \[batch, heads, tokens, head\] or"):
        read(tmp_path / "k.npy", SHAPE, layer=2, stream="k")
    np.save(tmp_path / "b.npy", np.zeros((2, 7, 48), np.float32))
    notes = read(tmp_path / "b.npy", SHAPE, layer=2).notes
    assert any("no attention mask: every row is taken for a token" in note for note in notes)


@pytest.mark.parametrize(
    ("sizes", "reading", "match"),
    [
        ((7, 24), {}, r"is no resid of m: m is 48 wide in resid.*--stream k or v would fit"),
        ((7, 99), {}, r"--stream logits would fit"),
        ((1, 3, 7, 8), {}, r"--stream k or v \(its heads side by side\) would fit"),
        ((7, 48), {"stream": "k"}, r"24 wide in k \(3 heads of 8\)"),
        ((7, 50), {}, r"48 wide in resid, and has 5 layers$"),
        ((48,), {}, r"holds no states \[tokens, width\]"),
        ((2, 2, 2, 2, 7, 48), {}, r"is no resid"),
        ((7, 48), {"axes": "tokens"}, "should name tokens, and either width"),
        ((7, 48), {"axes": "tokens,wide"}, "knows no axis 'wide'"),
        ((7, 48), {"axes": "tokens,tokens,width"}, "twice"),
        ((7, 48), {"axes": "batch,tokens,width"}, "has 2 axes, and batch,tokens,width names 3"),
        ((48, 7), {"axes": "tokens,width"}, "48 wide"),
        ((7, 48), {"layer": None}, "does not say which layer"),
        ((7, 48), {"tensor": "y"}, "holds no 'y'; it holds array"),
        ((7, 48), {"format": "vllm"}, "does not look like vllm"),
        ((7, 48), {"first_position": 2**20 - 3}, "last row would stand at"),
        ((4, 7, 48), {"axes": "layers,tokens,width"}, "states of 4 layers and does not say which"),
        ((4, 7, 48), {"axes": "layers,tokens,width", "layers": (1, 2)}, "names 2 layers"),
    ],
)  # fmt: skip
def test_misfits_are_one_line(sizes: Any, reading: dict[str, Any], match: str, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros(sizes, np.float32))
    with pytest.raises(InputError, match=match) as caught:
        read(tmp_path / "x.npy", SHAPE, **{"layer": 2, **reading})
    assert "\n" not in str(caught.value)


def test_masks_and_ids_that_contradict(tmp_path: Path) -> None:
    states = torch.zeros(2, 5, 48)
    path = tmp_path / "x.safetensors"
    for beside, match in (
        ({"attention_mask": torch.ones(2, 4, dtype=torch.long)}, r"mask is \[2, 4\]"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 1, 1], [0, 0, 0, 0, 0]])}, "without a token"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 0, 1, 1, 1]])}, "gaps"),
        ({"attention_mask": torch.full((2, 5), 2)}, "other values than 0 and 1"),
        ({"input_ids": torch.zeros(3, 5, dtype=torch.long)}, "of 3 prompts, and the states of 2"),
        ({"input_ids": torch.full((2, 5), -1)}, "not between 0"),
        ({"input_ids": torch.zeros(2, 4, dtype=torch.long)}, "they contradict"),
    ):
        save_file({"states": states, **beside}, path)
        with pytest.raises(InputError, match=match):
            read(path, SHAPE, layer=2)


def test_several_files(tmp_path: Path) -> None:
    for i, length in enumerate((3, 4)):
        np.save(tmp_path / f"{i}.npy", np.random.default_rng(i).normal(size=(length, 48)).astype(np.float32))
    both = [tmp_path / "0.npy", tmp_path / "1.npy"]
    assert [len(rows.states) for rows in read_states(both, SHAPE, Reading(layer=2)).prompts] == [3, 4]
    with pytest.raises(InputError, match="is named twice"):
        read_states([*both, tmp_path / "." / "0.npy"], SHAPE, Reading(layer=2))
    with pytest.raises(InputError, match="--ids goes with one file"):
        read_states(both, SHAPE, Reading(layer=2, ids="ids.npy"))
    np.save(tmp_path / "1.npy", np.zeros((4, 48), np.float16))
    np.save(tmp_path / "0.npy", np.random.default_rng(0).normal(size=(3, 48)))
    with pytest.raises(InputError, match=r"rounded in different ways \(dtype:float16 and identity\)"):
        read_states(both, SHAPE, Reading(layer=2))
    assert len(read_states(both, SHAPE, Reading(layer=2, channel=("seq-perm",))).prompts) == 2
    save_file({"model.layers.0": torch.zeros(3, 48)}, tmp_path / "0.safetensors")
    save_file({"model.layers.1": torch.zeros(3, 48)}, tmp_path / "1.safetensors")
    with pytest.raises(InputError, match="import files of one layer and stream"):
        read_states([tmp_path / "0.safetensors", tmp_path / "1.safetensors"], SHAPE)


# ---- rounded numbers


def rounded(states: torch.Tensor, kind: str) -> tuple[dict[str, torch.Tensor], tuple[str, ...]]:
    """States as a program keeps them in few bits, and the stages that say so."""
    if kind in ("bfloat16", "float16"):
        return {"x": states.to(getattr(torch, kind))}, (f"dtype:{kind}",)
    if kind == "bfloat16 as float32":
        return {"x": states.bfloat16().float()}, ("dtype:bfloat16",)
    by, dtype = kind.split()
    over: Any = {"tensor": (0, 1), "row": 1, "column": 0, "none": None}[by]
    largest = 127 if dtype == "int8" else torch.finfo(getattr(torch, dtype)).max
    stages = ("dtype:bfloat16", f"round:dtype={dtype},scale={by}")
    if over is None:
        return {"x": states.to(getattr(torch, dtype))}, stages
    scale = states.abs().amax(over, keepdim=True) / largest
    scaled = states / scale
    numbers = (scaled.round() if dtype == "int8" else scaled).to(getattr(torch, dtype))
    return {"x": numbers, "x_scale": scale.squeeze() if by != "row" else scale}, stages


ROUNDINGS = (
    "bfloat16", "bfloat16 as float32", "float16", "row int8", "tensor int8", "column int8", "none float8_e5m2",
    "none float8_e4m3fn", "tensor float8_e5m2", "row float8_e4m3fn",
)  # fmt: skip


@pytest.mark.parametrize("kind", ROUNDINGS)
def test_rounded_numbers_come_in_exactly_and_say_how(kind: str, tmp_path: Path) -> None:
    arrays, stages = rounded(torch.randn(5, 48), kind)
    save_file(
        {name: array.contiguous() for name, array in arrays.items()}, path := tmp_path / "x.safetensors"
    )
    (rows,) = read(path, SHAPE, layer=2).prompts
    assert rows.channel == stages
    assert torch.equal(rows.states.float(), arrays["x"].float() * arrays.get("x_scale", torch.tensor(1.0)))
    assert read(path, SHAPE, layer=2, channel=("seq-perm",)).prompts[0].channel == ("seq-perm",)


@pytest.mark.slow
@pytest.mark.usefixtures("small_probes")
@pytest.mark.parametrize("kind", ["row float8_e4m3fn", *slow_cases(*ROUNDINGS[:-1])])
def test_rounded_states_are_attacked_with_their_rounding(
    kind: str, tiny: Callable[..., str], tmp_path: Path
) -> None:
    model = hl.load_model(tiny("llama", tokenizer=True), 1, device="cpu")
    tokens = byte_tokenizer()(TEXT)["input_ids"]
    arrays, stages = rounded(model.encode(torch.tensor(tokens)), kind)
    save_file(
        {name: array.contiguous() for name, array in arrays.items()}, path := tmp_path / "x.safetensors"
    )
    observation = hl.Observation.from_file(path, model)
    assert hl.attack(observation, model, proposal="vocab").ids == tokens
    # The attacker's own release through these stages is as far from the file's rows as their rounding explains.
    released, _ = hl.channel(*stages).release(model, TEXT)
    distance = (
        released.states.float() - observation.states.float()
    ).norm() / observation.states.float().norm()
    assert distance < 0.06 and released.info == observation.info


def test_scales_that_do_not_fit(tmp_path: Path) -> None:
    numbers = torch.ones(3, 48, dtype=torch.int8)
    path = tmp_path / "x.safetensors"
    for arrays, match in (
        ({"x": numbers}, r"whole numbers \(int8\) and no scale.*x_scale"),
        ({"x": numbers, "x_scale": torch.ones(5)}, r"has the shape \[5\]"),
        ({"x": numbers, "x_scale": torch.zeros(3)}, "not positive"),
        ({"x": numbers, "scale": torch.tensor(float("nan"))}, "not positive"),
        ({"x": numbers.long()}, r"whole numbers \(int64\)"),
        ({"x": numbers.long(), "x_scale": torch.ones(3)}, "int8 with a scale is read"),
    ):
        save_file(arrays, path)
        with pytest.raises(InputError, match=match):
            read(path, SHAPE, layer=2)
    save_file({"x": numbers, "scale": torch.tensor(0.5)}, path)
    assert same(read(path, SHAPE, layer=2), torch.full((3, 48), 0.5))


# ---- hostile files


def hostile(folder: Path) -> dict[str, Path]:
    """Files that are damaged, lie about their size, or want to run code."""

    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {folder / 'run'}",)

    def write(name: str, data: bytes) -> Path:
        (folder / name).write_bytes(data)
        return folder / name

    import pickle

    torch.save({"x": Evil()}, folder / "evil.pt")
    np.save(folder / "objects.npy", np.array([Evil(), 1], dtype=object), allow_pickle=True)
    good = npy(np.zeros((3, 48), np.float32))
    with zipfile.ZipFile(folder / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", npy(np.zeros((4000, 48 * 160), np.float32)))
    torch.save({"x": torch.zeros(1).expand(10**9, 48)}, folder / "expanded.pt")
    torch.save({"x": torch.zeros(3, 48).to_sparse()}, folder / "sparse.pt")
    torch.save({"x": torch.zeros(3, 48, dtype=torch.complex64)}, folder / "complex.pt")
    deep: Any = torch.zeros(3, 48)
    for _ in range(60):
        deep = [deep]
    torch.save(deep, folder / "deep.pt")
    save_file({"x\ny\x1b[2J": torch.zeros(3, 5)}, folder / "newline.safetensors")
    save_file({"x": torch.full((3, 48), float("nan"))}, folder / "nan.safetensors")
    return {
        "empty": write("empty", b""),
        "nothing": folder / "nothing",
        "folder": folder,
        "noise": write("noise", bytes(range(256)) * 4),
        "words": write("words", b"hello there\n"),
        "pickle": write("pickle", pickle.dumps(Evil())),
        "cut": write("cut.npy", good[:-5]),
        "huge": write("huge.npy", good.replace(b"(3, 48)", b"(3000000000, 48)")[: len(good)]),
        "negative": write("negative.npy", good.replace(b"(3, 48), ", b"(-3, 48),")),
        "version": write("version.npy", good[:6] + b"\x09" + good[7:]),
        "header": write("header.npy", good.replace(b"'shape'", b"'shapf'")),
        "raw": write("raw.npy", good.replace(b"<f4", b"|V4")),
        "text numbers": write("strings.npy", npy(np.array(["a", "b"]))),
        "safetensors": write("cut.safetensors", (10**6).to_bytes(8, "little") + b"{}"),
        "claims": write("claims.safetensors", b"\xff\xff\xff\xff\xff\xff\xff\x00{" + b"x" * 50),
        "ragged": write("ragged.json", b"[[1, 2], [3]]"),
        "deep json": write("deep.json", b"[" * 100_000 + b"]" * 100_000),
        "nan json": write("nan.json", b"[[NaN, 1]]"),
        "strings": write("strings.json", b'{"a": "b"}'),
        "parquet": write("x.parquet", b"PAR1" + b"\0" * 50 + b"PAR1"),
        "arrow": write("x.arrow", b"ARROW1\0\0" + b"\1" * 90),
        "zip": write("x.zip", b"PK\x03\x04" + b"\0" * 90),
        "zstd": write("x.zst", b"(\xb5/\xfd" + b"\0" * 90),
        "unequal": write("unequal.txt", b"1 2 3\n1 2\n"),
        **{name: folder / name for name in (
            "evil.pt", "objects.npy", "bomb.npz", "expanded.pt", "sparse.pt", "complex.pt", "deep.pt",
            "newline.safetensors", "nan.safetensors",
        )},
    }  # fmt: skip


def test_hostile_files_are_one_line(tiny: Callable[..., str], tmp_path: Path) -> None:
    model = hl.load_model(tiny("llama"), 2, device="cpu")
    for name, path in hostile(tmp_path).items():
        with pytest.raises(HiddenlabError) as caught:
            read_states([path], SHAPE, Reading(layer=2)).observations(model)
        message = str(caught.value)
        assert "\n" not in message and "\x1b" not in message and message.isprintable(), name
        assert len(message) < 600, (name, message)
    assert not (tmp_path / "run").exists()
    code, said = run(
        "import",
        str(tmp_path / "cut.npy"),
        "--model",
        tiny("llama"),
        "--layer",
        "2",
        "-o",
        str(tmp_path / "o"),
    )
    assert code == 2 and said.startswith("error: ") and "truncated" in said


def test_options_that_go_together(tiny: Callable[..., str], tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((3, 64), np.float32))
    file, model = str(tmp_path / "x.npy"), tiny("llama", tokenizer=True)
    for arguments, match in (
        (("attack", "a", "--axes", "tokens,width"), "--axes goes with --states FILE"),
        (("attack", "a", "--states", file), "--states brings its own states; leave out a PROMPT"),
        (("attack", "--states", file, "--observation", file), "not both"),
        (("attack", "--states", file, "--model", model), "does not say which layer"),
        (("import", file, "--model", model, "--layer", "2", "-o", file), "is one of the files to import"),
        (
            ("import", file, "--model", model, "--layer", "2", "--layers", "1,x", "-o", "o"),
            "is no list of numbers",
        ),
        (("import", file, "--model", model, "--layer", "9", "-o", "o"), "out of range"),
    ):
        code, said = run(*arguments)
        assert code == 2 and match in said, said
