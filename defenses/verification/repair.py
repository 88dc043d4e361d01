"""Drop the incomplete last line of a ledger that an interrupted write left: ``hiddenlab verify repair``."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from hiddenlab.defenses.verification.command import FORMAT, Made
from hiddenlab.defenses.verification.durable import WAIT, LedgerError, sole_writer
from hiddenlab.defenses.verification.ledger import Chain
from hiddenlab.defenses.verification.ledger_commands import read_point
from hiddenlab.defenses.verification.records import LONGEST_LINE, lines, parsed
from hiddenlab.errors import InputError
from hiddenlab.text import count_of
from hiddenlab.types import Progress, silent
from hiddenlab.utils.files import write_file


@dataclass(frozen=True)
class Tail:
    """The bytes after a ledger's last line end.

    Attributes:
        content: the bytes.
        start: offset of the first one.
    """

    content: bytes
    start: int

    @property
    def whole(self) -> bool:
        """Whether it is a complete object that lacks only its line end."""
        return isinstance(parsed(self.content), dict)


def repair(
    ledger: Path,
    public_key: str,
    checkpoint: Path | None = None,
    dropped: Path | None = None,
    wait: float = WAIT,
    progress: Progress = silent,
) -> Made:
    """Drop a ledger's incomplete last line, keep a copy of what was dropped, and change nothing else.

    A last record that is complete but for its line end gets one and stays. A ledger with any other fault is refused.

    Args:
        ledger: its file.
        public_key: of the ledger, hexadecimal.
        checkpoint: file of the last checkpoint. If it counts more records than are complete, nothing is changed.
        dropped: a new file for the dropped bytes; default: the ledger's name and ``.dropped``.
        wait: seconds to wait for another process that writes to the ledger.

    Returns:
        ``records`` in the ledger now, ``dropped_bytes``, the offset of the first (``dropped_from``), their file
        (``dropped_file``), whether a line end was ``added``, whether a checkpoint confirmed the ``records``
        (``end_checked``), and a summary in one line, ``reason``.

    Raises:
        InputError: a file cannot be read or written, the ledger has another fault, or records of the checkpoint are
            missing.
    """
    if not 0 <= wait < math.inf:
        raise InputError(f"a wait of {wait} seconds; a number from 0")
    if not ledger.is_file():
        raise InputError(f"there is no ledger {ledger}")
    copy = ledger.with_name(ledger.name + ".dropped") if dropped is None else dropped
    point = read_point(checkpoint)
    with sole_writer(ledger, wait, progress):
        chain, tail = _read(ledger, public_key)
        added = tail.whole
        if added:
            chain.take(tail.content + b"\n")
        verdict = chain.verdict(point)
        if not verdict.valid:
            raise LedgerError(f"{ledger} is not repaired, and was not changed: {verdict.reason}")
        torn = len(tail.content) and not added
        if torn and copy.exists():
            raise InputError(f"{copy} exists; name another file with --dropped")
        try:
            if torn:
                write_file(copy, tail.content, private=True, new=True)
            if tail.content:
                _end(ledger, tail, b"\n" if added else b"")
        except OSError as error:
            raise InputError(f"cannot repair {ledger}: {error.strerror or error}") from None
    if torn:
        note = (
            f"dropped an incomplete line of {count_of(len(tail.content), 'byte')}, from byte "
            f"{tail.start} on, kept in {copy}"
        )
    else:
        note = "the last record lacked its line end, nothing else" if added else "no line is torn"
    return {
        "format": FORMAT, "ledger": str(ledger), "records": verdict.records,
        "dropped_bytes": len(tail.content) if torn else 0, "dropped_from": tail.start if torn else None,
        "dropped_file": str(copy) if torn else None, "added": added, "end_checked": verdict.end_checked,
        "reason": f"{note}; {verdict.reason}",
    }  # fmt: skip


def _read(ledger: Path, public_key: str) -> tuple[Chain, Tail]:
    """Read the chain of all complete lines, and what follows them."""
    chain, size, tail = Chain(public_key), 0, b""
    for line in lines(ledger):
        if tail:  # the last piece had no line end, so this line is too long
            raise LedgerError(
                f"{ledger} has a line of more than {LONGEST_LINE} bytes; no record is that long"
            )
        if line.endswith(b"\n"):
            chain.take(line)
            size += len(line)
        else:
            tail = line
    return chain, Tail(tail, size)


def _end(ledger: Path, tail: Tail, end: bytes) -> None:
    """Append a line end after the tail, or without one cut the tail off."""
    with ledger.open("r+b", buffering=0) as file:
        if end:
            file.seek(0, os.SEEK_END)
            file.write(end)
        else:
            file.truncate(tail.start)
        os.fsync(file.fileno())
