"""Write what must not be lost: one writer at a time, files whole or not at all, on the disk before anybody is told."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from hiddenlab.errors import InputError

Told = Callable[[str, int, int], None]  # hiddenlab.core's Progress, without torch, which no ledger needs


class LedgerError(InputError):
    """A ledger, key or entry that cannot be used as asked."""


WAIT = 60.0  # seconds for which a second writer waits
PRIVATE, SHARED = 0o600, 0o666  # before the user's umask


@contextmanager
def sole_writer(path: Path, wait: float = WAIT, progress: Told | None = None) -> Iterator[None]:
    """Keep all other writers away from a file, in this process and in others; who comes second waits.

    The lock is a file ``.NAME.lock`` beside it, which stays there: a lock file that is removed can be held twice. The
    system lets go of the lock when its process ends, however it ends. Who holds it may take it again.

    Args:
        wait: seconds. progress: is told, in a line, that somebody has to be waited for.

    Raises:
        LedgerError: the other writer was not done in time, or no lock can be made there.
    """
    place = path.resolve()
    if not place.parent.is_dir():  # the lock's library would make it
        raise LedgerError(f"cannot write {path}: the directory {path.parent} does not exist")
    try:
        lock = FileLock(place.with_name(f".{place.name}.lock"), is_singleton=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            if progress is not None:
                progress(f"another process is writing to {path}; waiting up to {wait:g} s for it", 0, 0)
            lock.acquire(timeout=wait)
    except Timeout:
        raise LedgerError(
            f"another process is writing to {path}, and was not done in {wait:g} s; nothing was written, try again "
            "when it is done, or wait longer with --wait SECONDS"
        ) from None
    except OSError as error:
        raise LedgerError(f"cannot lock {path} for writing: {error.strerror or error}") from None
    try:
        yield
    finally:
        lock.release()


def write_new(path: Path, data: bytes, mode: int = SHARED) -> None:
    """Write a file that does not exist yet; it appears with its whole content, and never with other rights.

    Raises:
        OSError: it exists (``FileExistsError``), or cannot be written; then nothing is left behind.
    """
    work = _written(path, data, mode)
    try:
        os.link(work, path)
    finally:
        work.unlink()
    _sync_directory(path)


def write_over(path: Path, data: bytes) -> None:
    """Write a file in the place of what may be there: the path holds the old content or the new one, whole.

    Raises:
        OSError: it cannot be written; then what was there stays.
    """
    work = _written(path, data, SHARED)
    try:
        work.replace(path)
    finally:
        work.unlink(missing_ok=True)
    _sync_directory(path)


def _written(path: Path, data: bytes, mode: int) -> Path:
    """A file of another name beside, with the content, on the disk."""
    work = path.with_name(f".{path.name[:100]}.{secrets.token_hex(6)}.tmp")
    handle = os.open(work, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with open(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        work.unlink(missing_ok=True)
        raise
    return work


def _sync_directory(path: Path) -> None:
    """Put a new name on the disk too."""
    handle = os.open(path.resolve().parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # file systems that have no such thing
            raise
    finally:
        os.close(handle)
