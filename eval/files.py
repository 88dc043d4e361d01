"""Say what is in the files that a measurement names: code of the user's own, prompts, a model's folder."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from hiddenlab import registry
from hiddenlab.utils.digests import digest_of, digest_of_files

FILES = ("prompts", "model")  # keys of a spec whose values may be paths


def contents_of(spec: Mapping[str, Any]) -> dict[str, str]:
    """Return a digest for each file or folder that a spec of JSON values names; of a name that is no path none.

    Of a model, sizes and times stand for what is in its files, which may be large.
    """
    found = {}
    for key, text in _texts(spec):
        for name in [text] if key in FILES else registry.files_of(text):
            path = Path(name if key in FILES else name.partition("::")[0]).expanduser()
            with suppress(OSError, ValueError):  # a text that no path can be is a name
                if path.is_dir():
                    inside = sorted(one for one in path.iterdir() if one.is_file())
                    found[name] = digest_of([[one.name, *_state(one)] for one in inside])
                elif path.is_file():
                    found[name] = digest_of(_state(path)) if key == "model" else _content(path, *_state(path))
    return found


def _texts(spec: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in spec.items():
        for one in value if isinstance(value, list | tuple) else [value]:
            if isinstance(one, str) and one:
                yield key, one


def _state(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


@lru_cache(maxsize=64)
def _content(path: Path, size: int, time: int) -> str:
    """Return the digest of a file, which is read again when its size or time changes."""
    return digest_of_files([path])
