"""JSON of others is read strictly, texts of others are printed as texts, files are written whole, secrets privately."""

import io
import json
import os
import re
import stat
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
from hypothesis import given
from pydantic import Field
from rich.table import Table
from typer.testing import CliRunner

from hiddenlab.cli import app
from hiddenlab.cli.console import Bars, SafeConsole
from hiddenlab.errors import HiddenlabError, InputError
from hiddenlab.observation import load_observation, save_observation
from hiddenlab.report.tables import table_page
from hiddenlab.testing import json_values, save_tiny
from hiddenlab.text import markdown, printable, visible
from hiddenlab.truths import load_truth, save_truth
from hiddenlab.types import GroundTruth, Observation, ObservationInfo, Site
from hiddenlab.utils import schema
from hiddenlab.utils.files import write_file
from tests.waiting import eventually


@dataclass(frozen=True)
class Inner:
    __pydantic_config__ = schema.CLOSED

    layer: schema.Layer


@dataclass(frozen=True)
class Form:
    __pydantic_config__ = schema.CLOSED

    inner: Inner
    numbers: tuple[schema.Finite, ...] = ()
    sigma: Annotated[schema.Finite, Field(gt=0)] | None = None
    more: Any = None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"inner": {"layer": -1}}', "f.json: inner.layer should be greater than or equal to 0, and is -1"),
        ('{"inner": {"layer": true}}', "inner.layer should be a valid integer, and is True"),
        ('{"inner": {"layer": "1"}}', "inner.layer should be a valid integer, and is '1'"),
        ('{"inner": {"layer": 1}, "numbers": [1, null]}', "numbers[1] should be a valid number, and is None"),
        ('{"inner": {"layer": 1}, "sigma": 0}', "sigma should be greater than 0, and is 0"),
        ('{"inner": {"layer": 1}, "x": 0}', "f.json: x is unknown"),
        ('{"numbers": []}', "f.json: inner is missing"),
        ('{"inner": {"layer": 1}, "inner": {"layer": 2}}', "the name 'inner' stands twice"),
        ('{"inner": {"layer": 1}, "more": NaN}', "NaN is no number in JSON"),
        ('{"inner": {"layer": 1}, "more": 1e400}', "beyond the range of float64"),
        ('{"inner": {"layer": 1}, "more": 99999999999999999999}', "beyond 64 bits"),
        ('{"inner": {"layer": 1}, "more": "\\ud800"}', "f.json: a text holds half of a surrogate pair"),
        ('{"inner": {"layer": 1}, "more": ' + "[" * 300 + "]" * 300 + "}", "nested too deeply"),
        ("[" * 100_000, "nested too deeply"),
        ("[]", "should be an object"),
        ("", "f.json is no valid JSON"),
        (b"\xff", "f.json is not UTF-8 text"),
        ('{"inner": {"layer": "\x1b[31m' + "x" * 500 + '"}}', "f.json is no valid JSON"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_one_line_with_file_and_field(text: str | bytes, says: str) -> None:
    with pytest.raises(InputError, match=re.escape(says)) as caught:
        schema.parse(text, Form, "f.json")
    assert str(caught.value).isprintable() and len(str(caught.value)) < 500


@given(value=json_values())
def test_what_json_can_say_is_read_as_it_is(value: Any) -> None:
    assert schema.loads(json.dumps(value), "x") == value
    assert schema.parse(json.dumps({"inner": {"layer": 1}, "more": value}), Form, "x").more == value


def test_lines_have_numbers_and_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "l.jsonl"
    path.write_text('{"layer": 1}\n\n{"layer": 2}')
    assert list(schema.lines(path)) == [(1, b'{"layer": 1}'), (2, b""), (3, b'{"layer": 2}')]
    monkeypatch.setattr(schema, "LONGEST_LINE", 10)
    with pytest.raises(InputError, match="line 1 is longer"):
        list(schema.lines(path))
    monkeypatch.setattr(schema, "LONGEST_FILE", 10)
    with pytest.raises(InputError, match="is larger than 10 bytes"):
        schema.read_bytes(path)
    os.mkfifo(tmp_path / "pipe")
    for irregular in (Path("/dev/zero"), tmp_path / "pipe"):
        with pytest.raises(InputError, match="is no regular file"):
            schema.read_bytes(irregular)
    for wrong in (tmp_path, tmp_path / "none", Path("a\0b")):
        with pytest.raises(InputError, match="cannot read"):
            schema.read_bytes(wrong)
        with pytest.raises(InputError, match="cannot read"):
            list(schema.lines(wrong))


def test_versions(tmp_path: Path) -> None:
    schema.check_format({"format": 1}, 1, "x")
    for value in ({}, [], {"format": True}, {"format": "1"}, {"format": 0}):
        with pytest.raises(InputError, match="names no format version"):
            schema.check_format(value, 1, "x")
    with pytest.raises(InputError, match="reads up to 1; install a newer one"):
        schema.check_format({"format": 2}, 1, "x")


# ---- texts of others

HOSTILE = "\x1b]0;owned\x07\x1b[31m[bold]\u202eevil\u200f\u061c\u2028<script>\x9b"


def test_control_characters_are_shown_and_letters_are_kept() -> None:
    assert visible("a\tb\nc\x1b\x7f\u202e\u200f\u061c\ufeff\u2028\x9b") == "a⇥b↵c␛␡" + "\ufffd" * 6
    for kept in ("plain", "é שלום مرحبا", "می\u200cخواهم", "👩\u200d💻"):
        assert visible(kept) == kept
    assert printable("a\n\x1b") == "a\n␛"
    assert markdown("a|<b>\n") == "a\\|&lt;b&gt;↵"


def test_nothing_of_a_file_reaches_the_terminal_raw() -> None:
    out = io.StringIO()
    console = SafeConsole(file=out, width=200)
    table = Table(title=HOSTILE)
    table.add_column(HOSTILE)
    table.add_row(HOSTILE)
    console.print(table)
    console.print(f"error: {HOSTILE}", soft_wrap=True)
    shown = out.getvalue()
    assert not set(shown) & set("\x1b\x07\u202e\u200f\u061c\u2028\x9b") and shown.count("[bold]") == 4


def test_styles_are_still_drawn() -> None:
    out = io.StringIO()
    SafeConsole(file=out, force_terminal=True, color_system="standard").print("x", style="red")
    assert "\x1b[31mx" in out.getvalue()


def test_progress_and_messages_are_texts(capsys: pytest.CaptureFixture[str]) -> None:
    assert str(HiddenlabError(HOSTILE)).startswith("␛]0;owned")
    bars = Bars()
    bars("[bold]x\x1b", 0, 1)
    bars._running["[bold]x\x1b"].start -= 2
    bars("[bold]x\x1b", 1, 1)
    assert "[bold]x␛: 1/1" in capsys.readouterr().err
    bars.close()


def test_a_line_of_a_task_without_a_terminal_says_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that is printed between two reports, which come more rarely than lines are due."""
    monkeypatch.setattr("hiddenlab.cli.console.FIRST_SIGN", 0.02)
    bars = Bars()
    bars("training", 5, 10)
    eventually(lambda: "training: 5/10, running, 0 s" in capsys.readouterr().err)
    bars._running["training"].start -= 20
    bars("training\tloss 2", 7, 10)
    bars._running["training"].said = time.monotonic() - 61
    eventually(lambda: re.search(r"training: 7/10, loss 2, .*20 s, about 30 s left", capsys.readouterr().err))
    bars.close()


def test_the_clock_of_a_task_that_begins_again_begins_again(capsys: pytest.CaptureFixture[str]) -> None:
    """An attack that ran out of its share of the time trains anew later; the first try says nothing of the rest."""
    bars = Bars()
    bars("training", 0, 100)
    bars("training", 50, 100)
    bars._running["training"].start -= 500
    bars("training", 10, 100)
    bars._running["training"].start -= 20
    bars._running["training"].said = time.monotonic() - 61
    bars("training", 20, 100)
    assert re.search(r"training: 20/100, running, .*20 s, about 160 s left", capsys.readouterr().err)
    bars.close()


def test_tables_are_escaped_in_markdown() -> None:
    figures = {"exact": {"value": 0.5, "low": 0.5, "high": 0.5, "n": 1}}
    row = {"keys": {"c": HOSTILE}, "figures": figures, "paper": {}, "status": "measured", "reason": HOSTILE}
    table = {
        "title": HOSTILE, "figures": {"exact": HOSTILE}, "rows": [row | {"commit": HOSTILE}], "notes": [HOSTILE],
        "command": f"`{HOSTILE}`",
    }  # fmt: skip
    shown = table_page(table)
    assert printable(shown) == shown and shown.count("<script>") == 1  # within the code span of the command


# ---- the command line on files of others


def observed(folder: Path, **info: Any) -> Path:
    path = folder / "o.safetensors"
    given = {"model": "builtin", "signature": (0.5,), "site": Site(1), **info}
    save_observation(Observation(torch.ones(2, 4), ObservationInfo(**given)), path)
    return path


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def test_an_observation_does_not_make_the_attack_ask_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(*_: object, **__: object) -> None:
        raise AssertionError("a connection")

    monkeypatch.setattr("socket.socket.connect", connect)
    path = observed(tmp_path, model="evil/pickle-model")
    code, out = run("attack", "--observation", str(path), "--no-record")
    assert code == 2 and "not on this machine" in out and "--model" in out


def test_names_of_files_do_not_reach_the_terminal_raw(tmp_path: Path) -> None:
    path = observed(tmp_path, model=f"evil/{HOSTILE}")
    code, out = run("attack", "--observation", str(path), "--no-record")
    assert code == 2 and "\x1b" not in out and "\u202e" not in out


def test_numbers_of_specs_are_bounded(tmp_path: Path) -> None:
    model = save_tiny("llama", tmp_path / "model", tokenizer=True)
    for spec in ("shard:alpha=200000000,c=1,node=0", "shard:alpha=9,c=9,m=200000000,queries=0,keys=0"):
        path = observed(tmp_path, model=model, channel=(spec,), positions=(0, 1), facts={"tokens": 9})
        code, out = run("attack", "--observation", str(path), "--no-record")
        assert code == 2, out
    code, out = run(
        "attack", "hello", "--model", model, "--layer", "1", "--no-record",
        "--defense", "shard:alpha=200000000,c=1,node=0",
    )  # fmt: skip
    assert code == 2 and "more than 65536 shards" in " ".join(out.split())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_states_in_eight_bits_are_read(tmp_path: Path, dtype: torch.dtype) -> None:
    states = torch.tensor([[1.0, -2.0], [0.5, 4.0]]).to(dtype)
    save_observation(Observation(states, ObservationInfo("m", (0.5,), Site(1))), tmp_path / "o")
    assert load_observation(tmp_path / "o").states.float().tolist() == [[1.0, -2.0], [0.5, 4.0]]
    with pytest.raises(InputError, match="NaN or infinity"):
        Observation(torch.tensor([[float("nan")]]).to(dtype), ObservationInfo("m", (0.5,), Site(1)))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            '{"format": 1, "secrets": [{"tokens": [-1], "row_order": null}]}',
            r"secrets\[0\].tokens\[0\] should be",
        ),
        ('{"format": 1, "secrets": [{"tokens": [Infinity]}]}', "Infinity is no number"),
        ('{"format": 1, "secrets": [{"tokens": []}]}', "tokens should have at least 1 item"),
        ('{"format": 1, "secrets": [{"tokens": [1, 2], "row_order": [0, 0]}]}', "names a row twice"),
        ('{"format": 2, "secrets": []}', "install a newer one"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_truths_are_checked(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(InputError, match=f"t.json.*{says}"):
        load_truth(tmp_path / "t.json")


def test_secrets_and_states_are_for_their_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        save_truth([GroundTruth((1, 2))], tmp_path / "t.json")
        save_observation(Observation(torch.ones(1, 2), ObservationInfo("m", (0.5,), Site(1))), tmp_path / "o")
        write_file(tmp_path / "plain", "x")
    finally:
        os.umask(before)
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in tmp_path.iterdir()}
    assert modes == {"t.json": 0o600, "o": 0o600, "plain": 0o666}


def test_files_are_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_file(tmp_path / "a", "one")
    with pytest.raises(InputError, match=r"cannot write .*exists"):
        write_file(tmp_path / "a", "two", new=True)

    def fail(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(InputError, match="No space left"):
        write_file(tmp_path / "a", "three")
    assert (tmp_path / "a").read_text() == "one" and os.listdir(tmp_path) == ["a"]
    with pytest.raises(InputError, match="cannot write"):
        write_file(tmp_path / "none" / "b", "x")


def test_prompts_that_are_no_text_are_refused() -> None:
    code, out = run("attack", "\udcff", "--no-record")
    assert code == 2 and "is not UTF-8 text" in out


def test_any_encoding_of_the_terminal_will_do(tmp_path: Path) -> None:
    text = [
        "-c",
        "from hiddenlab.cli.console import *; from hiddenlab.cli.program import *; accept_any_text(); "
        "stdout().print('2 × é'); stderr().print('é')",
    ]
    done = subprocess.run(
        [sys.executable, *text],
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "2 \\xd7 \\xe9" in done.stdout and "\\xe9" in done.stderr
