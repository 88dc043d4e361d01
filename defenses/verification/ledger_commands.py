"""Record transcripts in a signed ledger, prove that one is in it, and check such proofs.

Commands: ``hiddenlab verify record``, ``prove`` and ``included``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hiddenlab.defenses.verification.command import FORMAT, Made
from hiddenlab.defenses.verification.durable import WAIT, LedgerError, sole_writer
from hiddenlab.defenses.verification.ledger import (
    Checkpoint,
    Ledger,
    read_checkpoint,
    read_inclusion,
    verify_inclusion,
    write_statement,
)
from hiddenlab.defenses.verification.ledger import (
    prove as prove_record,
)
from hiddenlab.defenses.verification.records import canonical, lines, parsed
from hiddenlab.defenses.verification.signing import create_key, public, read_key
from hiddenlab.defenses.verification.transcript import Transcript, read_transcripts
from hiddenlab.errors import InputError
from hiddenlab.types import Progress, silent
from hiddenlab.utils.files import write_file
from hiddenlab.utils.schema import read_bytes


def record(
    path: Path,
    ledger: Path,
    key_file: Path,
    checkpoint: Path | None = None,
    wait: float = WAIT,
    progress: Progress = silent,
) -> Made:
    """Append transcripts to a signed ledger; ledger and key are made where they do not exist.

    No other process writes to the ledger from the reading of the checkpoint to the writing of the new one. Requests
    that are in the ledger already, word for word, are not appended again (``already``), so an interrupted command can
    be repeated.

    Args:
        path: the transcripts.
        ledger: file of the ledger.
        key_file: file of the private key.
        checkpoint: file of the last checkpoint. If it exists, the ledger has to continue from there; the new one is
            written to it. Give a copy to whoever has to notice that records vanish.
        wait: seconds to wait for another process that writes to the ledger.

    Raises:
        InputError: a file cannot be read or written, two files are one, the ledger is invalid or does not match the
            checkpoint, or somebody else writes to it for too long.
    """
    _apart(path, ledger, key_file, *([] if checkpoint is None else [checkpoint]))
    if not 0 <= wait < math.inf:
        raise InputError(f"a wait of {wait} seconds; a number from 0")
    for place in (ledger, key_file, checkpoint):
        if place is not None and not place.resolve().parent.is_dir():
            raise InputError(f"cannot write {place}: the directory {place.parent} does not exist")
    transcripts = read_transcripts(path)
    with sole_writer(ledger, wait, progress):
        return _recorded(transcripts, ledger, key_file, checkpoint, progress)


def _recorded(
    transcripts: Sequence[Transcript],
    ledger: Path,
    key_file: Path,
    checkpoint: Path | None,
    progress: Progress,
) -> Made:
    before = None if checkpoint is None or not checkpoint.exists() else _checkpoint(checkpoint)
    if before is not None and not ledger.exists():
        raise InputError(f"{checkpoint} is of a ledger with {before.size} records; {ledger} does not exist")
    if not key_file.exists():
        create_key(key_file)
    key = read_key(key_file)
    book = Ledger.open(ledger, key, before) if ledger.exists() else Ledger.create(ledger, key)
    standing, appended = entries(ledger), 0
    for i, transcript in enumerate(transcripts):
        if canonical(transcript.to_json()) not in standing:
            book.append(transcript.to_json())
            appended += 1
        progress("requests recorded", i + 1, len(transcripts))
    now = book.checkpoint()
    if checkpoint is not None:
        write_file(checkpoint, write_statement(now) + "\n")
    return {
        "format": FORMAT, "ledger": str(ledger), "records": len(book), "appended": appended,
        "already": len(transcripts) - appended,
        "public_key": public(key), "checkpoint": asdict(now),
    }  # fmt: skip


def prove(
    ledger: Path,
    request: str,
    checkpoint: Path,
    public_key: str,
    out: Path,
    transcripts: Path | None = None,
    progress: Progress = silent,
) -> Made:
    """Write a proof that a request is in a ledger, for somebody who has the checkpoint but not the ledger.

    Args:
        request: its id. transcripts: a file with it, where several requests of the ledger have that id.

    Raises:
        InputError: the ledger is not valid or not the checkpoint's, no such request is under it, or several are, or
            ``out`` exists.
    """
    if out.exists():
        raise InputError(f"{out} exists; name another file")
    point = _checkpoint(checkpoint)
    own = [
        transcript
        for transcript in ([] if transcripts is None else read_transcripts(transcripts))
        if transcript.id == request
    ]
    if transcripts is not None and not own:
        raise InputError(f"{transcripts} holds no request {request!r}")
    exact = {canonical(transcript.to_json()) for transcript in own}

    def wanted(entry: Mapping[str, Any]) -> bool:
        return canonical(entry) in exact if exact else entry.get("id") == request

    line, proof = prove_record(ledger, public_key, point, wanted)
    made = {"format": FORMAT, "record": line, "proof": asdict(proof)}
    write_file(out, canonical(made).decode() + "\n")
    return {
        "format": FORMAT, "file": str(out), "request": request, "record": proof.index, "under": point.size,
        "hashes": len(proof.path),
    }  # fmt: skip


def included(
    path: Path,
    checkpoint: Path,
    public_key: str,
    transcripts: Path | None = None,
    progress: Progress = silent,
) -> Made:
    """Check a proof of inclusion against a checkpoint, and against transcripts where they are given.

    Returns:
        ``valid``, the ``reason``, and the ``request`` that the record is of (only where it is valid).

    Raises:
        InputError: a file cannot be read, or the checkpoint file holds none.
    """
    point = _checkpoint(checkpoint)
    none = {"format": FORMAT, "valid": False, "request": None}
    value = parsed(_read(path).strip().encode(errors="replace"))
    if isinstance(value, str) or set(value) != {"format", "record", "proof"}:
        return none | {"reason": "no proof of inclusion"}
    line = value["record"]
    try:
        proof = read_inclusion(canonical(value["proof"]).decode())
    except LedgerError as error:
        return none | {"reason": str(error)}
    if type(value["format"]) is not int or value["format"] != FORMAT or not isinstance(line, str):
        return none | {"reason": f"not a proof of format {FORMAT}"}
    verdict = verify_inclusion(line, proof, point, public_key)
    if not verdict.valid:
        return none | {"reason": verdict.reason}
    whole = parsed(line.encode())
    if isinstance(whole, str):  # a line end, say, that the ledger's own lines have
        return none | {"reason": whole}
    entry = whole["entry"]
    if transcripts is not None and canonical(entry) not in {
        canonical(transcript.to_json()) for transcript in read_transcripts(transcripts)
    }:
        return none | {"reason": f"the record is of no request in {transcripts}"}
    return {"format": FORMAT, "valid": True, "request": entry.get("id"), "reason": verdict.reason}


def entries(ledger: Path) -> set[bytes]:
    """Return the entries of a verified ledger in canonical form."""
    read = (parsed(line.removesuffix(b"\n")) for line in lines(ledger))
    return {canonical(value["entry"]) for value in read if isinstance(value, dict) and "entry" in value}


def _apart(*paths: Path) -> None:
    """Check that all paths are different files.

    Raises:
        InputError: two of them are one file.
    """
    resolved = [path.resolve() for path in paths]
    for i, path in enumerate(resolved):
        if path in resolved[:i]:
            raise InputError(
                f"{paths[i]} is named twice; transcripts, ledger, key and checkpoint are files apart"
            )


def read_point(path: Path | None) -> Checkpoint | None:
    """Read the checkpoint in a file; None without a file."""
    return None if path is None else _checkpoint(path)


def _checkpoint(path: Path) -> Checkpoint:
    return read_checkpoint(_read(path))


def _read(path: Path) -> str:
    return read_bytes(path).decode(errors="replace")
