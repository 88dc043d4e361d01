"""Write and check the records of a ledger: canonical JSON, hashed with SHA3-256 and signed with Ed25519.

A record holds an entry (any JSON object), its index, the hash of the line before, its own hash over these three, and
the signature of that hash. Only canonical lines are read, so that no two lines have the same meaning.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hiddenlab.defenses.verification.durable import LedgerError
from hiddenlab.defenses.verification.signing import signed
from hiddenlab.errors import InputError
from hiddenlab.utils.schema import loads, opened

LONGEST_LINE = 1 << 26  # bytes; a longer one is no record


def canonical(value: Any) -> bytes:
    """Encode a value in its only canonical form: JSON with sorted names, no spaces, ASCII, no NaN.

    Raises:
        ValueError, TypeError, RecursionError: JSON cannot hold the value.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def parsed(line: bytes) -> dict[str, Any] | str:
    """Parse a line without its line end; return its object, or a text that says what is wrong."""
    if len(line) > LONGEST_LINE:
        return "the line is too long"
    try:
        value = loads(line, "the line")
    except InputError as error:
        return str(error)
    if not isinstance(value, dict):
        return "the line is no JSON object"
    return value if canonical(value) == line else "the line is not in canonical form"


def checked(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry as it will be read back: names as text, tuples as lists.

    Raises:
        LedgerError: JSON cannot hold it, or two names become one.
    """
    try:
        written = canonical(dict(entry))
        value = loads(written, "the entry")
        if canonical(value) != written:  # of two equal names, JSON keeps one
            raise ValueError("it does not come back as it was")
    except (ValueError, TypeError, RecursionError, InputError) as error:
        raise LedgerError(f"an entry that JSON cannot hold: {error}") from error
    return dict(value)


_LENGTHS = {"hash": 64, "previous": 64, "signature": 128}


def wrong_record(value: Mapping[str, Any], public_key: str) -> str:
    """Return what is wrong with a record by itself, or an empty text."""
    if set(value) != {"entry", "index", *_LENGTHS} or type(value["index"]) is not int:
        return "not a record"
    if not isinstance(value["entry"], dict) or value["index"] < 0:
        return "not a record"
    for name, length in _LENGTHS.items():
        digits = value[name]
        if not isinstance(digits, str) or len(digits) != length or set(digits) - set("0123456789abcdef"):
            return f"not a record: its {name} has not {length} hexadecimal digits"
    body = {name: value[name] for name in ("entry", "index", "previous")}
    digest = hashed(b"record", canonical(body))
    if digest.hex() != value["hash"]:
        return "the record was edited: its hash is another"
    if not signed(public_key, value["signature"], b"record" + digest):
        return "the record is not signed with this key"
    return ""


def hashed(kind: bytes, data: bytes) -> bytes:
    """Return the SHA3-256 hash of bytes, separated by kind."""
    return hashlib.sha3_256(kind + b"\0" + data).digest()


def lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file with their ends; a line that is too long is cut and has no end."""
    try:
        with opened(path) as file:
            while line := file.readline(LONGEST_LINE + 1):
                yield line
    except (OSError, ValueError, InputError) as error:
        raise LedgerError(f"cannot read the ledger {path}: {error}") from error
