"""Keep inference records in an append-only ledger: hash-chained and signed, with proofs that a record is in it.

The first line of the file names format and key; each further line is a record (see `records`). A `Checkpoint`, kept
elsewhere, fixes the length, the last hash and the Merkle root at one time. Without one, a ledger that was cut off, or
rewritten by the owner of the key, looks like a short one. Its purpose: Rinberg et al. 2025, appendix D.2.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from hiddenlab.defenses.verification.durable import LedgerError, sole_writer
from hiddenlab.defenses.verification.merkle import climb, merkle_path, merkle_root
from hiddenlab.defenses.verification.records import (
    LONGEST_LINE,
    canonical,
    checked,
    hashed,
    lines,
    parsed,
    wrong_record,
)
from hiddenlab.defenses.verification.signing import public, signed
from hiddenlab.errors import InputError
from hiddenlab.text import count_of
from hiddenlab.utils.files import write_file

FORMAT = "hiddenlab-ledger"
VERSION = 1
INCOMPLETE = "the line is not complete; 'hiddenlab verify repair' drops a torn end"


@dataclass(frozen=True)
class Verdict:
    """Whether something is valid, and if not, why.

    Attributes:
        valid: true only if everything was checked for which the verifier gave the means.
        reason: one line.
        records: number of records that were read before the decision.
        end_checked: whether a checkpoint confirmed the ledger's length.
    """

    valid: bool
    reason: str
    records: int = 0
    end_checked: bool = False


@dataclass(frozen=True)
class Checkpoint:
    """The length, last hash and Merkle root of a ledger at one time, signed with its key. Hashes are hexadecimal."""

    size: int
    head: str
    root: str
    signature: str

    def authentic(self, public_key: str) -> bool:
        """Return whether that key signed it."""
        fields = asdict(self)
        return signed(public_key, fields.pop("signature"), _statement(fields))


@dataclass(frozen=True)
class Inclusion:
    """A proof that the record at `index` is among the first `size`: sibling hashes from the leaf up."""

    index: int
    size: int
    path: tuple[str, ...]


# ---- writing


class Ledger:
    """A ledger that is being written, made by `Ledger.create` or `Ledger.open`.

    Each call keeps other writers away while it lasts. To keep them away over several calls, hold the ledger meanwhile
    (`durable.sole_writer`).

    Args:
        path: of the file.
        key: private key that signs.
        leaves: hashes of all records so far.
        head: hash of the last line.
        size: of the file in bytes.
    """

    def __init__(self, path: Path, key: Ed25519PrivateKey, leaves: list[bytes], head: str, size: int) -> None:
        self.path, self._key, self._leaves, self._head, self._size = path, key, leaves, head, size

    def __len__(self) -> int:
        return len(self._leaves)

    @classmethod
    def create(cls, path: Path, key: Ed25519PrivateKey) -> Ledger:
        """Start an empty ledger, and write it to the disk.

        Raises:
            LedgerError: the file exists, or cannot be written.
        """
        line = canonical({"format": FORMAT, "public_key": public(key), "version": VERSION}) + b"\n"
        try:
            with sole_writer(path):
                write_file(path, line, new=True)
        except InputError as error:
            raise LedgerError(f"cannot start a ledger: {error}") from None
        return cls(path, key, [], hashed(b"header", line[:-1]).hex(), len(line))

    @classmethod
    def open(cls, path: Path, key: Ed25519PrivateKey, checkpoint: Checkpoint | None = None) -> Ledger:
        """Verify a ledger and open it to append to it.

        Raises:
            LedgerError: it cannot be read, or is not valid.
        """
        chain, size = Chain(public(key)), 0
        with sole_writer(path):  # so that no half-written record is read
            for line in lines(path):
                chain.take(line)
                size += len(line)
        verdict = chain.verdict(checkpoint)
        if not verdict.valid:
            raise LedgerError(f"{path} is not continued: {verdict.reason}")
        return cls(path, key, chain.leaves, chain.head, size)

    def append(self, entry: Mapping[str, Any]) -> int:
        """Append one entry, write it to the disk and return its index.

        If it cannot be written completely, the part that was written is removed.

        Raises:
            LedgerError: JSON does not give the entry back unchanged, or somebody else changed the file.
        """
        body = {"entry": checked(entry), "index": len(self), "previous": self._head}
        digest = hashed(b"record", canonical(body))
        signature = self._key.sign(b"record" + digest).hex()
        line = canonical({**body, "hash": digest.hex(), "signature": signature}) + b"\n"
        if len(line) > LONGEST_LINE:
            raise LedgerError(
                f"an entry of {count_of(len(line), 'byte')}; at most {LONGEST_LINE} are possible"
            )
        try:
            with sole_writer(self.path), self.path.open("r+b", buffering=0) as file:
                if file.seek(0, os.SEEK_END) != self._size:
                    raise LedgerError(f"{self.path} was changed since it was opened; open it anew")
                try:
                    rest = memoryview(line)
                    while rest:
                        rest = rest[file.write(rest) :]
                    os.fsync(file.fileno())
                except BaseException:
                    with suppress(OSError):
                        file.truncate(self._size)
                    raise
        except OSError as error:
            raise LedgerError(f"cannot write to {self.path}: {error.strerror}") from error
        self._leaves.append(digest)
        self._head, self._size = digest.hex(), self._size + len(line)
        return len(self) - 1

    def checkpoint(self) -> Checkpoint:
        """Return a signed checkpoint; whoever holds it notices if the ledger is cut or rewritten later."""
        fields: dict[str, Any] = {
            "size": len(self),
            "head": self._head,
            "root": merkle_root(self._leaves).hex(),
        }
        return Checkpoint(**fields, signature=self._key.sign(_statement(fields)).hex())

    def prove(self, index: int) -> Inclusion:
        """Prove that a record is under the root of the present checkpoint.

        Raises:
            LedgerError: no such record.
        """
        if not 0 <= index < len(self):
            raise LedgerError(f"no record {index}; the ledger has {len(self)}")
        return Inclusion(index, len(self), tuple(h.hex() for h in merkle_path(self._leaves, index)))


# ---- verifying


def verify(path: Path, public_key: str, checkpoint: Checkpoint | None = None) -> Verdict:
    """Check a whole ledger: every hash, signature and link against the key, and its end against a checkpoint.

    A checkpoint may be older than the ledger; what was appended since is checked like the rest. Without one, records
    that are missing at the end cannot be noticed, and the verdict says so.

    Raises:
        LedgerError: the file cannot be read.
    """
    chain = Chain(public_key)
    for line in lines(path):
        chain.take(line)
    return chain.verdict(checkpoint)


def prove(
    path: Path, public_key: str, checkpoint: Checkpoint, wanted: Callable[[Mapping[str, Any]], bool]
) -> tuple[str, Inclusion]:
    """Find the one wanted entry under a checkpoint, and return its line with a proof of inclusion.

    No private key is needed.

    Raises:
        LedgerError: the file cannot be read, is not valid or does not match the checkpoint; or not exactly one such
            entry is under it.
    """
    chain = Chain(public_key)
    records: list[tuple[bytes, int]] = []
    for line in lines(path):
        chain.take(line)
        if 0 < len(chain.leaves) <= checkpoint.size and not chain.wrong:
            value = parsed(line.removesuffix(b"\n"))
            if isinstance(value, dict) and wanted(value["entry"]):
                records.append((line, len(chain.leaves) - 1))
    verdict = chain.verdict(checkpoint)
    if not verdict.valid:
        raise LedgerError(f"nothing of {path} can be proven: {verdict.reason}")
    if len(records) != 1:
        several = f"{len(records)} such records (name the one meant by --transcripts FILE)"
        many = several if records else "no such record"
        raise LedgerError(f"{many} among the {checkpoint.size} of {path} under the checkpoint")
    ((line, index),) = records
    siblings = merkle_path(chain.leaves[: checkpoint.size], index)
    proof = Inclusion(index, checkpoint.size, tuple(h.hex() for h in siblings))
    return line.decode().removesuffix("\n"), proof


def verify_inclusion(
    record: bytes | str, proof: Inclusion, checkpoint: Checkpoint, public_key: str
) -> Verdict:
    """Check that a record (one line of a ledger) is where a proof puts it under a signed checkpoint."""
    line = record.encode(errors="replace") if isinstance(record, str) else record
    value = parsed(line.removesuffix(b"\n"))
    if not checkpoint.authentic(public_key):
        return Verdict(False, "the checkpoint is not signed with this key")
    if isinstance(value, str):
        return Verdict(False, value)
    if wrong := wrong_record(value, public_key):
        return Verdict(False, wrong)
    if value["index"] != proof.index or proof.size != checkpoint.size:
        return Verdict(False, "the proof is for another record or another checkpoint")
    root = climb(bytes.fromhex(value["hash"]), proof.index, proof.size, _hashes(proof.path))
    if root is None or root.hex() != checkpoint.root:
        return Verdict(False, "the proof does not lead to the checkpoint's root")
    return Verdict(True, "the record is in the ledger", 1, True)


class Chain:
    """A check of a ledger's lines in order, which keeps the first fault."""

    def __init__(self, public_key: str) -> None:
        self.public_key, self.wrong, self.head = public_key, "", ""
        self.leaves: list[bytes] = []
        self.heads: list[str] = []  # heads[n] is the head after n records

    def take(self, line: bytes) -> None:
        if self.wrong:
            return
        number = len(self.heads) + 1
        wrong = self._header(line) if number == 1 else self._record(line)
        if wrong:
            self.wrong = f"line {number}: {wrong}"

    def _header(self, line: bytes) -> str:
        value = parsed(line.removesuffix(b"\n")) if line.endswith(b"\n") else "no line end"
        if isinstance(value, str):
            return value
        if value.get("format") != FORMAT or value.get("version") != VERSION or len(value) != 3:
            return f"not the header of a ledger of version {VERSION}"
        if value.get("public_key") != self.public_key:
            return "the ledger is another key's"
        self.head = hashed(b"header", line[:-1]).hex()
        self.heads.append(self.head)
        return ""

    def _record(self, line: bytes) -> str:
        value = parsed(line.removesuffix(b"\n")) if line.endswith(b"\n") else INCOMPLETE
        if isinstance(value, str):
            return value
        if wrong := wrong_record(value, self.public_key):
            return wrong
        if value["index"] != len(self.leaves):
            return f"record {value['index']} in the place of record {len(self.leaves)}"
        if value["previous"] != self.head:
            return "the record does not follow the one before"
        self.head = value["hash"]
        self.heads.append(self.head)
        self.leaves.append(bytes.fromhex(self.head))
        return ""

    def verdict(self, checkpoint: Checkpoint | None) -> Verdict:
        """Return the verdict once all lines are taken."""
        count = len(self.leaves)
        if self.wrong or not self.heads:
            return Verdict(False, self.wrong or "the file is empty", count)
        if checkpoint is None:
            return Verdict(
                True,
                f"{count_of(count, 'record')}; without a checkpoint, missing ones at the end go unnoticed",
                count,
            )
        if not checkpoint.authentic(self.public_key):
            return Verdict(False, "the checkpoint is not signed with this key", count)
        if not 0 <= checkpoint.size <= count:
            return Verdict(
                False,
                f"{count_of(count, 'record')}, of {checkpoint.size} when the checkpoint was made",
                count,
            )
        root = merkle_root(self.leaves[: checkpoint.size]).hex()
        if self.heads[checkpoint.size] != checkpoint.head or root != checkpoint.root:
            return Verdict(False, "another ledger than the checkpoint's: records were rewritten", count)
        return Verdict(
            True, f"{count_of(count, 'record')}, {checkpoint.size} of them under the checkpoint", count, True
        )


# ---- checkpoints and proofs as text


def write_statement(value: Checkpoint | Inclusion) -> str:
    """Write a checkpoint or a proof as one line of JSON."""
    return canonical(asdict(value)).decode()


def read_checkpoint(text: str) -> Checkpoint:
    """Read a checkpoint from what `write_statement` gave.

    Raises:
        LedgerError: the text is something else.
    """
    value = _fields(text, {"size": int, "head": str, "root": str, "signature": str}, "checkpoint")
    return Checkpoint(**value)


def read_inclusion(text: str) -> Inclusion:
    """Read a proof of inclusion from what `write_statement` gave.

    Raises:
        LedgerError: the text is something else.
    """
    value = _fields(text, {"index": int, "size": int, "path": list}, "proof of inclusion")
    if not all(isinstance(digest, str) for digest in value["path"]):
        raise LedgerError("not a proof of inclusion: its path is no list of hashes")
    return Inclusion(value["index"], value["size"], tuple(value["path"]))


def _fields(text: str, types: Mapping[str, type], what: str) -> dict[str, Any]:
    value = parsed(text.strip().encode(errors="replace"))
    if isinstance(value, str):
        raise LedgerError(f"not a {what}: {value}")
    if {name: type(part) for name, part in value.items()} != dict(types):
        raise LedgerError(f"not a {what}: it needs {', '.join(types)}")
    return value


def _hashes(path: tuple[str, ...]) -> list[bytes]:
    """Decode the hashes of a proof; invalid ones become empty, so that they match nothing."""
    good = all(len(digest) == 64 and not set(digest) - set("0123456789abcdef") for digest in path)
    return [bytes.fromhex(digest) if good else b"" for digest in path]


def _statement(fields: Mapping[str, Any]) -> bytes:
    return b"checkpoint" + canonical(fields)
