"""Lock a file, so that one process at a time writes to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from hiddenlab.errors import InputError

# The same as hiddenlab.types.Progress, whose import would load torch.
ProgressCallback = Callable[[str, int, int], None]


class LedgerError(InputError):
    """A ledger, key or entry cannot be used as asked."""


WAIT = 60.0  # seconds for which a second writer waits


@contextmanager
def sole_writer(path: Path, wait: float = WAIT, progress: ProgressCallback | None = None) -> Iterator[None]:
    """Keep all other writers away from a file, in this process and in others; a second writer waits.

    The lock is a file ``.NAME.lock`` beside it, which is not removed: a lock file that is removed can be held twice.
    The system releases the lock when its process ends. The holder may take it again.

    Args:
        path: the file.
        wait: seconds to wait for another writer.
        progress: is told, in a line, that another writer is waited for.

    Raises:
        LedgerError: the other writer was not done in time, or no lock can be made there.
    """
    place = path.resolve()
    if not place.parent.is_dir():  # otherwise the lock's library would create it
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
