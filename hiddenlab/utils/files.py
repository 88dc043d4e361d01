"""Write files and folders atomically and durably, with secrets readable by their owner alone."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hiddenlab.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

PRIVATE, SHARED = 0o600, 0o666  # before the user's umask


def write_file(path: Path, content: str | bytes, *, private: bool = False, new: bool = False) -> None:
    """Write a file atomically: the path holds the whole content or what was there before.

    Args:
        private: the file holds a secret; only its owner may read it, from the first byte on.
        new: refuse to replace a file.

    Raises:
        InputError: it cannot be written, or ``new`` is set and it exists.
    """
    with _errors(path):
        put_file(path, content.encode() if isinstance(content, str) else content, private=private, new=new)


def put_file(path: Path, data: bytes, *, private: bool = False, new: bool = False) -> None:
    """Write a file as ``write_file`` does, for who says himself what went wrong.

    Raises:
        OSError: it cannot be written.
    """

    def write(work: Path) -> None:
        handle = os.open(work, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE if private else SHARED)
        with open(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(handle)

    _put(path, write, new)


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file atomically, readable by its owner alone: hidden states reveal the prompt.

    Raises:
        InputError: it cannot be written.
    """
    from safetensors.torch import save_file

    def write(work: Path) -> None:
        os.close(os.open(work, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE))
        save_file(dict(tensors), work, metadata=dict(metadata))
        work.chmod(PRIVATE)  # where safetensors made the file anew

    with _errors(path):
        _put(path, write, new=False)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder, which gets its name when the block ends; where another process was first, it is gone.

    Nothing is left of it where the block fails.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name[:100]}-"))
    try:
        yield work
        with suppress(OSError):
            work.rename(path)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _put(path: Path, write: Callable[[Path], None], new: bool) -> None:
    """Write a temporary file beside the path, then rename it.

    An existing path must be a regular file: a link may lead anywhere, and a device or a pipe must not be replaced.
    """
    if path.is_symlink():
        raise InputError(f"cannot write {path}: it is a link; name the file itself")
    if path.exists() and not path.is_file():
        raise InputError(f"cannot write {path}: it is no regular file")
    work = path.with_name(f".{path.name[:100]}.{secrets.token_hex(6)}.tmp")
    try:
        write(work)
        if new:
            os.link(work, path)  # fails where something is there
        else:
            os.replace(work, path)
        _sync_directory(path)
    finally:
        with suppress(OSError):
            work.unlink(missing_ok=True)


@contextmanager
def _errors(path: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError, ValueError) as error:
        raise InputError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from None


def _sync_directory(path: Path) -> None:
    """Flush a directory, so that a new name is on the disk too."""
    handle = os.open(path.resolve().parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # file systems that cannot flush directories
            raise
    finally:
        os.close(handle)
