"""Find the folder in which converted models, probes and other derived files are kept."""

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from hiddenlab.errors import InputError
from hiddenlab.utils.files import put_file

_LISTENING: list[set[Path]] = []  # of the blocks within ``asked_paths``


def cache_dir() -> Path:
    """Return the user's cache: ``$HIDDENLAB_CACHE``, ``$XDG_CACHE_HOME/hiddenlab`` or ``~/.cache/hiddenlab``.

    Raises:
        InputError: it is below the home of a user that does not exist.
    """
    own, shared = os.environ.get("HIDDENLAB_CACHE"), os.environ.get("XDG_CACHE_HOME", "~/.cache")
    try:
        return Path(own).expanduser() if own else Path(shared).expanduser() / "hiddenlab"
    except RuntimeError as error:
        raise InputError(f"there is no cache at {own or shared} ({error}); set HIDDENLAB_CACHE") from None


def cache_path(kind: str, name: str) -> Path:
    """Return the path of a file or folder of the cache, existing or writable.

    Called before the content is computed, so that no time is spent on what cannot be saved.

    Args:
        kind: a folder of the cache.

    Raises:
        InputError: it does not exist, and its folder cannot be made or written to.
    """
    path = cache_dir() / kind / name
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            if not os.access(path.parent, os.W_OK | os.X_OK):
                raise PermissionError(None, "no permission to write")
    except OSError as error:
        raise InputError(
            f"the cache {cache_dir()} cannot be used ({error.strerror or error}); set HIDDENLAB_CACHE to a directory "
            "that can be written"
        ) from None
    for paths in _LISTENING:
        paths.add(path)
    return path


@contextmanager
def asked_paths() -> Iterator[set[Path]]:
    """Collect the paths of the cache that are asked for within the block."""
    paths = set[Path]()
    _LISTENING.append(paths)
    try:
        yield paths
    finally:
        _LISTENING.remove(paths)


def from_cache(paths: Collection[Path], kinds: Collection[str]) -> dict[str, bytes]:
    """Return the contents of those paths that are files of some kinds, by their place in the cache."""
    home = cache_dir()
    places = {path.relative_to(home).as_posix(): path for path in paths if path.is_relative_to(home)}
    return {
        place: path.read_bytes()
        for place, path in places.items()
        if place.partition("/")[0] in kinds and path.is_file()
    }


def into_cache(files: Mapping[str, bytes]) -> None:
    """Write files of another process's cache into this one, each only where there is none; see ``from_cache``.

    Raises:
        InputError: the cache cannot be written.
    """
    for place, content in files.items():
        kind, _, name = place.partition("/")
        path = cache_path(kind, name)
        if not path.exists():
            try:
                put_file(path, content, private=True)
            except OSError as error:
                raise InputError(f"cannot write {path}: {error.strerror or error}") from None
