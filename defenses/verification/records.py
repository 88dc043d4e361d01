"""The lines of a ledger: canonical JSON, hashed with SHA3-256 and signed with Ed25519.

A record holds an entry (any JSON object), its index, the hash of the line before, its own hash over these three, and
the signature of that hash. Only canonical lines are read, so that no two lines say the same.
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
    """The one way that a value is written: JSON with sorted names, no spaces, ASCII, no NaN.

    Raises:
        ValueError, TypeError, RecursionError: JSON cannot say it.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def parsed(line: bytes) -> dict[str, Any] | str:
    """The object of a line without its end, or what is wrong with it."""
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
    """An entry as it will be read back: names as text, tuples as lists.

    Raises:
        LedgerError: JSON cannot hold it, or two names become one.
    """
    try:
        written = canonical(dict(entry))
        value = loads(written, "the entry")
        if canonical(value) != written:  # of two equal names, one is lost
            raise ValueError("it does not come back as it was")
    except (ValueError, TypeError, RecursionError, InputError) as error:
        raise LedgerError(f"an entry that JSON cannot hold: {error}") from error
    return dict(value)


_LENGTHS = {"hash": 64, "previous": 64, "signature": 128}


def wrong_record(value: Mapping[str, Any], public_key: str) -> str:
    """What is wrong with a record by itself, or nothing."""
    if set(value) != {"entry", "index", *_LENGTHS} or type(value["index"]) is not int:
        return "not a record"
    if not isinstance(value["entry"], dict) or value["index"] < 0:
        return "not a record"
    for name, length in _LENGTHS.items():
        one = value[name]
        if not isinstance(one, str) or len(one) != length or set(one) - set("0123456789abcdef"):
            return f"not a record: its {name} has not {length} hexadecimal digits"
    body = {name: value[name] for name in ("entry", "index", "previous")}
    digest = hashed(b"record", canonical(body))
    if digest.hex() != value["hash"]:
        return "the record was edited: its hash is another"
    if not signed(public_key, value["signature"], b"record" + digest):
        return "the record is not signed with this key"
    return ""


def hashed(kind: bytes, data: bytes) -> bytes:
    """SHA3-256 of some bytes, other for every kind of bytes."""
    return hashlib.sha3_256(kind + b"\0" + data).digest()


def lines(path: Path) -> Iterator[bytes]:
    """Lines with their ends; one that is too long comes cut, without its end."""
    try:
        with opened(path) as file:
            while line := file.readline(LONGEST_LINE + 1):
                yield line
    except (OSError, ValueError, InputError) as error:
        raise LedgerError(f"cannot read the ledger {path}: {error}") from error
