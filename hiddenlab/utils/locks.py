"""Let one process at a time make a file of the cache, so that none is made twice."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from hiddenlab.errors import InputError


@contextmanager
def one_at_a_time(path: Path, waiting: str, progress: Callable[[str, int, int], None]) -> Iterator[None]:
    """Hold the lock of a file while it is made; of two processes that need it the second waits for the first.

    Args:
        path: of the file; its lock lies in ``locks`` beside the file's folder.
        waiting: what ``progress`` is told of the wait.

    Raises:
        InputError: nothing can be written there.
    """
    lock = FileLock(path.parent.parent / "locks" / f"{path.parent.name}-{path.stem}.lock")
    try:
        Path(lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        progress(waiting, 0, 1)
        lock.acquire()
        progress(waiting, 1, 1)
    except OSError as error:
        raise InputError(f"cannot write into {path.parent}: {error.strerror or error}") from None
    try:
        yield
    finally:
        lock.release()
