"""The folder in which converted models, probes and other derived files are kept."""

import os
from pathlib import Path

from hiddenlab.errors import InputError


def cache_dir() -> Path:
    """The user's cache: ``$HIDDENLAB_CACHE``, else ``$XDG_CACHE_HOME/hiddenlab``, else ``~/.cache/hiddenlab``.

    Raises:
        InputError: it is below the home of a user that there is not.
    """
    own, shared = os.environ.get("HIDDENLAB_CACHE"), os.environ.get("XDG_CACHE_HOME", "~/.cache")
    try:
        return Path(own).expanduser() if own else Path(shared).expanduser() / "hiddenlab"
    except RuntimeError as error:
        raise InputError(f"there is no cache at {own or shared} ({error}); set HIDDENLAB_CACHE") from None


def cache_path(kind: str, name: str) -> Path:
    """Where a file or folder of the cache is, or will be: what is not there yet can be written.

    It is asked for before what goes there is made, so that nobody waits for what cannot be kept.

    Args:
        kind: a folder of the cache.

    Raises:
        InputError: it is not there, and its folder cannot be made or written to.
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
    return path
