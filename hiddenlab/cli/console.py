"""What the verbs share: consoles, progress bars on stderr, one JSON object on stdout."""

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from hiddenlab.record import finite

SLOW_SECONDS = 1.0


def stdout() -> Console:
    """A console on the present standard output."""
    return Console(file=sys.stdout)


def stderr() -> Console:
    """A console on the present standard error."""
    return Console(file=sys.stderr, stderr=True)


def print_json(value: Any) -> None:
    """Print one JSON object and nothing else; NaN and infinity become null, and any locale can print it."""
    sys.stdout.write(json.dumps(finite(value), allow_nan=False) + "\n")
    sys.stdout.flush()


@contextlib.contextmanager
def only_json(active: bool) -> Iterator[None]:
    """Send whatever a library prints meanwhile to stderr, so that stdout holds nothing but the JSON."""
    if not active:
        yield
        return
    with contextlib.redirect_stdout(sys.stderr):
        yield


class Bars:
    """A progress callback ``(what, done, total)``: bars on a terminal, a line per slow task elsewhere.

    What stands behind a tab in ``what`` is a detail that changes (a loss, say), shown beside the bar.
    """

    def __init__(self) -> None:
        self._console = stderr()
        self._live: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._since: dict[str, float] = {}

    def __call__(self, what: str, done: int, total: int) -> None:
        what, _, detail = what.partition("\t")
        start = self._since.setdefault(what, time.monotonic())
        if self._console.is_terminal:
            self._draw(what, detail, done, total)
        elif done >= total and time.monotonic() - start > SLOW_SECONDS:
            self._console.print(
                f"{what}: {done}/{total} in {time.monotonic() - start:.1f} s", highlight=False
            )
        if done >= total:
            del self._since[what]

    def _draw(self, what: str, detail: str, done: int, total: int) -> None:
        if self._live is None:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
            )
            self._live = Progress(*columns, console=self._console, transient=True)
            self._live.start()
        if what not in self._tasks:
            self._tasks[what] = self._live.add_task(what, total=total)
        shown = f"{what}, {detail}" if detail else what
        self._live.update(self._tasks[what], description=shown, completed=done, total=total)
        if done >= total:
            self._live.remove_task(self._tasks.pop(what))

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Take the bars away while something else is printed, which may go to the same terminal."""
        if self._live is not None:
            self._live.stop()
        yield
        if self._live is not None:
            self._live.start()

    def close(self) -> None:
        """Take the bars away."""
        if self._live is not None:
            self._live.stop()
            self._live = None


@contextlib.contextmanager
def bars() -> Iterator[Bars]:
    """Progress bars for a block."""
    found = Bars()
    try:
        yield found
    finally:
        found.close()
