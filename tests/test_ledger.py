"""A ledger gives back what was written, and notices everything that anybody does to it."""

import json
import os
import random
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from hypothesis import given, settings
from hypothesis import strategies as st

from hiddenlab.defenses.verification.durable import LedgerError, sole_writer
from hiddenlab.defenses.verification.ledger import (
    Checkpoint,
    Inclusion,
    Ledger,
    read_checkpoint,
    read_inclusion,
    verify,
    verify_inclusion,
    write_statement,
)
from hiddenlab.defenses.verification.merkle import climb, merkle_path, merkle_root
from hiddenlab.defenses.verification.records import canonical
from hiddenlab.defenses.verification.repair import repair
from hiddenlab.defenses.verification.signing import create_key, public, read_key
from hiddenlab.errors import InputError

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OTHER = Ed25519PrivateKey.from_private_bytes(bytes(32))
NAME = public(KEY)


def written(path: Path, count: int, key: Ed25519PrivateKey = KEY) -> Ledger:
    ledger = Ledger.create(path, key)
    for i in range(count):
        ledger.append({"prompt": [i, i + 1], "text": "é\u2028\n", "seed": i * 2**61, "p": 0.1})
    return ledger


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[bytes], Ledger]:
    """The lines of a ledger of six records."""
    ledger = written(tmp_path_factory.mktemp("ledger") / "sample.jsonl", 6)
    return ledger.path.read_bytes().splitlines(keepends=True), ledger


# ---- honest use


def test_a_ledger_is_valid_and_grows(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    ledger = Ledger.create(path, KEY)
    empty = ledger.checkpoint()
    assert verify(path, NAME, empty).valid and len(ledger) == 0
    assert ledger.append({"id": "x"}) == 0 and ledger.append({}) == 1
    early = ledger.checkpoint()
    again = Ledger.open(path, KEY, early)
    assert again.append({"tokens": (1, 2), "n": None, "deep": {"b": [True], "a": 1e-300}}) == 2
    for checkpoint in (empty, early, again.checkpoint()):
        verdict = verify(path, NAME, checkpoint)
        assert verdict.valid and verdict.records == 3 and verdict.end_checked
    plain = verify(path, NAME)
    assert plain.valid and not plain.end_checked and "unnoticed" in plain.reason
    with pytest.raises(LedgerError, match="open it anew"):
        ledger.append({"id": "behind the back"})
    assert json.loads(path.read_text().splitlines()[3])["entry"]["tokens"] == [1, 2]


def test_every_record_has_a_proof(sample: tuple[list[bytes], Ledger]) -> None:
    lines, ledger = sample
    checkpoint = read_checkpoint(write_statement(ledger.checkpoint()))
    for i in range(6):
        proof = read_inclusion(write_statement(ledger.prove(i)))
        assert verify_inclusion(lines[i + 1], proof, checkpoint, NAME).valid
        assert verify_inclusion(lines[i + 1].decode(), proof, checkpoint, NAME).valid
        for j in range(6):
            if j != i:
                assert not verify_inclusion(lines[j + 1], proof, checkpoint, NAME).valid
    with pytest.raises(LedgerError, match="no record 6"):
        ledger.prove(6)


# ---- tampering


def edited(lines: list[bytes]) -> list[bytes]:
    value = json.loads(lines[3])
    value["entry"]["p"] = 0.2
    return [*lines[:3], canonical(value) + b"\n", *lines[4:]]


def capitals(line: bytes) -> bytes:
    value = json.loads(line)
    return canonical({**value, "hash": value["hash"].upper()}) + b"\n"


def signed_anew(lines: list[bytes], tmp: Path, key: Ed25519PrivateKey) -> list[bytes]:
    """The whole ledger written again, with one entry changed."""
    ledger = Ledger.create(tmp / f"{random.random()}.jsonl", key)
    for i, line in enumerate(lines[1:]):
        ledger.append({**json.loads(line)["entry"], **({"p": 0.2} if i == 2 else {})})
    return ledger.path.read_bytes().splitlines(keepends=True)


TAMPER: dict[str, tuple[Callable[[list[bytes], Path], list[bytes]], str]] = {
    "edited": (lambda x, t: edited(x), "edited"),
    "removed": (lambda x, t: [*x[:3], *x[4:]], "in the place of"),
    "reordered": (lambda x, t: [*x[:3], x[4], x[3], *x[5:]], "in the place of"),
    "doubled": (lambda x, t: [*x[:4], *x[3:]], "in the place of"),
    "truncated": (lambda x, t: x[:-2], "of 6 when the checkpoint"),
    "emptied": (lambda x, t: x[:1], "of 6 when the checkpoint"),
    "cut within a line": (lambda x, t: [*x[:-1], x[-1][:-9]], "not complete"),
    "without the last line's end": (lambda x, t: [*x[:-1], x[-1][:-1]], "not complete"),
    "no header": (lambda x, t: x[1:], "header"),
    "nothing": (lambda x, t: [], "empty"),
    "inserted, other key": (lambda x, t: [*x[:3], signed_anew(x, t, OTHER)[3], *x[3:]], "not signed"),
    "appended from another ledger": (lambda x, t: [*x, signed_anew(x, t, KEY)[-1]], "in the place of"),
    "swapped with another ledger": (
        lambda x, t: [*x[:4], signed_anew(x, t, KEY)[4], *x[5:]],
        "does not follow",
    ),
    "written again, other key": (lambda x, t: signed_anew(x, t, OTHER), "another key"),
    "other key under the header": (lambda x, t: [x[0], *signed_anew(x, t, OTHER)[1:]], "not signed"),
    "written again, same key": (lambda x, t: signed_anew(x, t, KEY), "rewritten"),
    "spaces": (lambda x, t: [*x[:3], x[3].replace(b",", b", ", 1), *x[4:]], "canonical"),
    "a doubled name": (lambda x, t: [*x[:3], b'{"entry":{},' + x[3][1:], *x[4:]], "stands twice"),
    "a blank line": (lambda x, t: [*x[:3], b"\n", *x[3:]], "JSON"),
    "no UTF-8": (lambda x, t: [*x[:3], b"\xff\xfe\n", *x[3:]], "not UTF-8 text"),
    "a list": (lambda x, t: [*x[:3], b"[]\n", *x[3:]], "no JSON object"),
    "infinite": (lambda x, t: [*x[:3], b'{"a":1e999}\n', *x[3:]], "JSON"),
    "deep": (lambda x, t: [*x[:3], b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"], "nested too deeply"),
    "a long number": (lambda x, t: [*x[:3], b'{"a":' + b"9" * 5000 + b"}\n"], "JSON"),
    "another object": (lambda x, t: [*x[:3], b'{"a":1}\n', *x[3:]], "not a record"),
    "an index that is true": (
        lambda x, t: [*x[:2], x[2].replace(b'"index":1', b'"index":true')],
        "not a record",
    ),
    "capital digits": (lambda x, t: [*x[:2], capitals(x[2]), *x[3:]], "hexadecimal digits"),
    "another version": (lambda x, t: [x[0].replace(b'"version":1', b'"version":2'), *x[1:]], "version"),
}


@pytest.mark.parametrize("name", TAMPER)
def test_tampering_is_found(sample: tuple[list[bytes], Ledger], tmp_path: Path, name: str) -> None:
    lines, ledger = sample
    change, reason = TAMPER[name]
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"".join(change(lines, tmp_path)))
    verdict = verify(path, NAME, ledger.checkpoint())
    assert not verdict.valid and reason in verdict.reason, verdict
    with pytest.raises(LedgerError, match="not continued"):
        Ledger.open(path, KEY, ledger.checkpoint())


@settings(max_examples=150)
@given(data=st.data())
def test_no_byte_can_change(
    sample: tuple[list[bytes], Ledger], tmp_path_factory: Any, data: st.DataObject
) -> None:
    lines, ledger = sample
    whole = b"".join(lines)
    place = data.draw(st.integers(0, len(whole) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda b: b != whole[place]))
    path = tmp_path_factory.getbasetemp() / "byte.jsonl"
    path.write_bytes(whole[:place] + bytes([byte]) + whole[place + 1 :])
    assert not verify(path, NAME, ledger.checkpoint()).valid


@settings(max_examples=60)
@given(junk=st.binary(max_size=300))
def test_junk_is_not_valid(tmp_path_factory: Any, junk: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "junk.jsonl"
    path.write_bytes(junk)
    assert not verify(path, NAME).valid


def test_checkpoints_cannot_be_made_up(sample: tuple[list[bytes], Ledger], tmp_path: Path) -> None:
    _, ledger = sample
    good = ledger.checkpoint()
    assert not good.authentic(public(OTHER)) and not good.authentic("no key")
    others = written(tmp_path / "other.jsonl", 6, OTHER).checkpoint()
    for bad in (
        replace(good, size=5), replace(good, root=others.root), replace(good, head=others.head), others,
        replace(good, signature="zz"), replace(good, signature=""), replace(good, size=-1),
    ):  # fmt: skip
        assert not verify(ledger.path, NAME, bad).valid
        assert not verify_inclusion(b"{}", Inclusion(0, 6, ()), bad, NAME).valid
    assert not verify(ledger.path, "not a key").valid


def test_proofs_cannot_be_made_up(sample: tuple[list[bytes], Ledger], tmp_path: Path) -> None:
    lines, ledger = sample
    checkpoint, proof = ledger.checkpoint(), ledger.prove(2)
    foreign = written(tmp_path / "foreign.jsonl", 6, OTHER)
    same = signed_anew(lines, tmp_path, KEY)[3]
    for bad in (
        replace(proof, index=3), replace(proof, size=7), replace(proof, path=proof.path[:-1]),
        replace(proof, path=(*proof.path, proof.path[0])), replace(proof, path=proof.path[::-1]),
        replace(proof, path=("",) * len(proof.path)), replace(proof, path=("xy",) * len(proof.path)),
        replace(proof, path=()), replace(proof, index=-1), ledger.prove(3), foreign.prove(2),
    ):  # fmt: skip
        verdict = verify_inclusion(lines[3], bad, checkpoint, NAME)
        assert not verdict.valid and "proof" in verdict.reason
    for line in (
        edited(lines)[3],
        same,
        foreign.path.read_bytes().splitlines()[3],
        b"",
        b"\xff",
        "\ud800",
        b"[]",
    ):
        assert not verify_inclusion(line, proof, checkpoint, NAME).valid
    with pytest.raises(LedgerError, match="not a proof"):
        read_inclusion('{"index":0,"path":[1],"size":1}')
    for text in ("", "{}", "null", '{"head":1,"root":"","signature":"","size":1}', "[" * 10_000):
        with pytest.raises(LedgerError, match="not a checkpoint"):
            read_checkpoint(text)


# ---- trees


def slow_root(leaves: list[bytes]) -> bytes:
    """RFC 9162, section 2.1.1, as it defines it: split at the largest power of two below the size."""
    from hashlib import sha3_256

    if len(leaves) <= 1:
        return sha3_256(b"\0" + leaves[0]).digest() if leaves else sha3_256(b"").digest()
    half = 1
    while half * 2 < len(leaves):
        half *= 2
    return sha3_256(b"\1" + slow_root(leaves[:half]) + slow_root(leaves[half:])).digest()


def test_trees() -> None:
    for size in range(18):
        leaves = [bytes([i, size]) for i in range(size)]
        root = merkle_root(leaves)
        assert root == slow_root(leaves)
        for i in range(size):
            path = merkle_path(leaves, i)
            assert climb(leaves[i], i, size, path) == root and len(path) <= (size - 1).bit_length()
            assert all(climb(leaves[i], j, size, path) != root for j in range(size) if j != i)
            assert climb(leaves[i], i, size, [*path, root]) != root
    assert climb(b"", 0, 0, []) is None and climb(b"", 0, 10**5000, [b""] * 3) is None
    # An inner node is no leaf.
    pair = [b"a", b"b"]
    assert merkle_root([merkle_root(pair)]) != merkle_root(pair)


# ---- what cannot be used


def test_entries_that_json_cannot_hold(tmp_path: Path) -> None:
    ledger = written(tmp_path / "a.jsonl", 1)
    loop: dict[str, Any] = {}
    loop["a"] = loop
    for entry in (
        {"a": float("nan")},
        {"a": {1, 2}},
        {"a": b"x"},
        loop,
        {"a": {1: 0, "1": 0}},
        {"a": 10**5000},
    ):
        with pytest.raises(LedgerError, match="cannot hold"):
            ledger.append(entry)
    assert verify(ledger.path, NAME, ledger.checkpoint()).records == 1


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    ledger = written(tmp_path / "a.jsonl", 1)
    for call in (
        lambda: Ledger.create(ledger.path, KEY), lambda: Ledger.create(tmp_path / "no" / "a", KEY),
        lambda: Ledger.open(tmp_path / "none", KEY), lambda: verify(tmp_path / "none", NAME),
        lambda: verify(tmp_path, NAME), lambda: Ledger.open(ledger.path, OTHER),
    ):  # fmt: skip
        with pytest.raises(LedgerError):
            call()
    ledger.path.unlink()
    with pytest.raises(LedgerError, match="cannot write"):
        ledger.append({})
    assert issubclass(LedgerError, InputError)


def test_keys(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    name = create_key(path)
    assert public(read_key(path)) == name and len(name) == 64
    with pytest.raises(LedgerError, match="no key was made"):
        create_key(path)
    with pytest.raises(LedgerError, match="cannot read the key"):
        read_key(tmp_path / "none")
    (tmp_path / "junk").write_text("junk")
    with pytest.raises(LedgerError, match="no unencrypted private key"):
        read_key(tmp_path / "junk")
    curve = generate_private_key(SECP256R1())
    (tmp_path / "ec").write_bytes(curve.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    with pytest.raises(LedgerError, match="another kind"):
        read_key(tmp_path / "ec")
    assert isinstance(written(tmp_path / "l", 1).checkpoint(), Checkpoint)


# ---- several writers


ROOT = Path(__file__).resolve().parents[1]
WRITER = """
import io
import sys
import time
from pathlib import Path
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hiddenlab.defenses.verification.ledger import Ledger

class Slow(io.FileIO):  # between looking at a ledger and writing to it, others have time
    def seek(self, *place):
        found = super().seek(*place)
        time.sleep(0.01)
        return found

plain = Path.open
Path.open = lambda path, mode="r", *how, **more: Slow(path, mode) if mode == "r+b" else plain(path, mode, *how, **more)
key, path, name = Ed25519PrivateKey.from_private_bytes(bytes(range(32))), Path(sys.argv[1]), sys.argv[2]
print("ready", flush=True)
sys.stdin.readline()
done = 0
while done < 10:
    try:
        Ledger.open(path, key).append({"writer": name, "number": done})
        done += 1
    except Exception as error:
        if "open it anew" not in str(error):  # another one wrote in between
            raise
"""
HOLDER = """
import sys
from pathlib import Path
from hiddenlab.defenses.verification.durable import sole_writer
with sole_writer(Path(sys.argv[1])):
    print("ready", flush=True)
    sys.stdin.readline()
"""


def started(program: str, *words: object) -> "subprocess.Popen[str]":
    """A process of its own that has said that it is ready; it goes on when it is written a line."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, *map(str, words)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", 0).path
    writers = [started(WRITER, path, name) for name in "abcd"]
    for one in writers:
        assert one.stdin is not None
        one.stdin.write("\n")
        one.stdin.flush()
    assert [one.wait(timeout=300) for one in writers] == [0] * 4
    verdict = verify(path, NAME)
    assert verdict.valid and verdict.records == 40, verdict
    entries = [json.loads(line)["entry"] for line in path.read_text().splitlines()[1:]]
    for name in "abcd":  # each writer's own, in its own order
        assert [one["number"] for one in entries if one["writer"] == name] == list(range(10))


def test_a_second_writer_waits_and_says_so(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", 1).path
    said: list[str] = []

    def progress(what: str, done: int, total: int) -> None:
        said.append(what)
        assert holder.stdin is not None
        holder.stdin.write("\n")  # now it ends
        holder.stdin.flush()

    holder = started(HOLDER, path)
    with pytest.raises(LedgerError, match=r"another process is writing to .*--wait"), sole_writer(path, 0.1):
        pass
    with sole_writer(path, 60.0, progress):
        assert holder.wait(timeout=60) == 0
        Ledger.open(path, KEY).append({"id": "after"})  # who holds it may take it again
    assert len(said) == 1 and "another process is writing" in said[0]
    holder = started(HOLDER, path)
    holder.kill()
    holder.wait()
    with sole_writer(path, 0.0):  # the dead hold nothing
        assert len(Ledger.open(path, KEY)) == 2


def test_what_cannot_be_written_whole_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = written(tmp_path / "a.jsonl", 2)
    before = ledger.path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(LedgerError, match="No space left"):
            ledger.append({"id": "lost"})
        with pytest.raises(LedgerError, match="No space left"):
            Ledger.create(tmp_path / "b.jsonl", KEY)
        with pytest.raises(LedgerError, match="No space left"):
            create_key(tmp_path / "key.pem")
    assert ledger.path.read_bytes() == before
    assert ledger.append({"id": "next"}) == 2 and verify(ledger.path, NAME, ledger.checkpoint()).valid
    assert [one.name for one in tmp_path.iterdir() if not one.name.endswith(".lock")] == ["a.jsonl"]


def test_a_key_is_never_readable_by_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    make = os.open

    def watched(path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
        handle = make(path, flags, mode, **more)
        seen.append(stat.S_IMODE(os.fstat(handle).st_mode) if flags & os.O_CREAT else 0)
        return handle

    monkeypatch.setattr(os, "open", watched)
    before = os.umask(0)
    try:
        create_key(tmp_path / "key.pem")
    finally:
        os.umask(before)
    assert max(seen) == 0o600  # from the moment when the file was made
    assert stat.S_IMODE((tmp_path / "key.pem").stat().st_mode) == 0o600


# ---- torn ends


def test_a_torn_end_is_dropped_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    ledger = written(path, 2)
    point = tmp_path / "point.json"
    point.write_text(write_statement(ledger.checkpoint()) + "\n")
    ledger.append({"id": "torn"})
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    with pytest.raises(LedgerError, match="verify repair"):
        Ledger.open(path, KEY)
    found = repair(path, NAME, point)
    start = whole[:-1].rindex(b"\n") + 1
    assert found["records"] == 2 and found["end_checked"] and not found["added"]
    assert found["dropped_from"] == start and found["dropped_bytes"] == len(whole) - start - 40
    assert path.read_bytes() == whole[:start]
    assert Path(found["dropped_file"]).read_bytes() == whole[start:-40]
    assert Ledger.open(path, KEY).append({"id": "next"}) == 2
    # Nothing is torn now, and a copy is never overwritten.
    assert repair(path, NAME, point)["dropped_bytes"] == 0
    content = path.read_bytes() + b"torn again"
    path.write_bytes(content)
    with pytest.raises(InputError, match="--dropped"):
        repair(path, NAME)
    assert path.read_bytes() == content
    assert repair(path, NAME, dropped=tmp_path / "other")["dropped_bytes"] == 10
    assert (tmp_path / "other").read_bytes() == b"torn again"


def test_no_whole_record_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    ledger = written(path, 4)
    point = tmp_path / "point.json"
    point.write_text(write_statement(ledger.checkpoint()) + "\n")
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    path.write_bytes(whole[:-1])  # the line end alone is missing
    assert repair(path, NAME, point) | {"reason": ""} == {
        "format": 1, "ledger": str(path), "records": 4, "dropped_bytes": 0, "dropped_from": None, "dropped_file": None,
        "added": True, "end_checked": True, "reason": "",
    }  # fmt: skip
    assert path.read_bytes() == whole
    refused = {
        whole[:-40]: "of 4 when the checkpoint",  # others were told of the record that is torn
        b"".join(lines[:-1]): "of 4 when the checkpoint",
        b"".join(edited(lines)): "edited",
        b"".join(edited(lines)[:-1]) + b"torn": "edited",
        b"".join(lines[:-1]) + b"torn\n": "line 5",  # it has an end: nobody was interrupted
        b"".join(lines) + lines[-1][:-1]: "in the place of",  # whole, and wrong
        lines[0][:-9]: "empty",
        b"": "empty",
    }
    for content, reason in refused.items():
        path.write_bytes(content)
        with pytest.raises(LedgerError, match=reason):
            repair(path, NAME, point)
        assert path.read_bytes() == content
    with pytest.raises(LedgerError, match="another key"):
        repair(path.parent / written(tmp_path / "b.jsonl", 1).path.name, public(OTHER))
    assert not list(tmp_path.glob("*.dropped"))
