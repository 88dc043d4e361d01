"""Find the folder in which converted models, probes and other derived files are kept."""

import os
from pathlib import Path

from hiddenlab.errors import InputError


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
    return path
