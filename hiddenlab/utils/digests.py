"""Name things by their content."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def digest_of_files(paths: Iterable[Path]) -> str:
    """Return the hexadecimal digest of files in their order: SHA-256 over the SHA-256 of each."""
    digests = []
    for path in paths:
        with path.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").digest())
    return digest_of_digests(digests)


def digest_of_digests(digests: Iterable[bytes]) -> str:
    """Return what ``digest_of_files`` returns of files with these SHA-256."""
    return hashlib.sha256(b"".join(digests)).hexdigest()


def digest_of(value: Any) -> str:
    """Return sixteen hexadecimal digits that name a JSON value; the order of its keys does not matter."""
    text = json.dumps(value, sort_keys=True, default=list)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
