"""Provide what the verbs share: consoles, progress bars on stderr, one JSON object on stdout."""

import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment
from rich.text import Text

from hiddenlab.errors import HiddenlabError
from hiddenlab.records import finite
from hiddenlab.text import printable
from hiddenlab.utils.cache import cache_path

LONGEST_LOG = 2**20  # bytes
SLOW_SECONDS = 1.0
QUIET_SECONDS = 60.0  # between lines of one task, where there is no terminal
FIRST_SIGN = 10.0  # seconds until a task without news says that it runs, where there is no terminal


class SafeConsole(Console):
    """A console that prints texts of files, models and peers literally, without markup or escape sequences."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, highlight=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Render as rich does, with control characters shown as symbols."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def stdout() -> SafeConsole:
    """Make a console on the present standard output."""
    return SafeConsole(file=sys.stdout)


def stderr() -> SafeConsole:
    """Make a console on the present standard error."""
    return SafeConsole(file=sys.stderr, stderr=True)


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


def _rate(each: float) -> str:
    """Return how many are done in a second, or in a minute where that is less than one."""
    return f"{each:.1f} a second" if each >= 1 else f"{60 * each:.1f} a minute"


class _RateColumn(ProgressColumn):
    """Shows how many are done in a second or a minute; nothing before the first two are."""

    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else _rate(task.speed), style="dim")


@contextlib.contextmanager
def logged() -> Iterator[Callable[[str], None]]:
    """Send log lines of libraries to the log file of the cache, ``log/hiddenlab.log``; yield what writes a line there.

    A line that cannot be written is lost: it is about a library, and no reason to stop.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its own handler writes to the terminal
    handler = _ToFile(logging.WARNING)
    logging.getLogger().addHandler(handler)
    try:
        yield handler.write
    finally:
        logging.getLogger().removeHandler(handler)


class _ToFile(logging.Handler):
    """Appends lines to the log file, which begins anew when it is long."""

    def emit(self, record: logging.LogRecord) -> None:
        self.write(f"{record.name}: {record.getMessage()}")

    def write(self, line: str) -> None:
        try:
            path = cache_path("log", "hiddenlab.log")
            if path.exists() and path.stat().st_size > LONGEST_LOG:
                path.replace(path.with_suffix(".old"))
            when = time.strftime("%Y-%m-%d %H:%M:%S")
            with open(path, "a", encoding="utf-8", errors="backslashreplace", opener=_private) as file:
                file.write(f"{when} {printable(' '.join(line.split()))}\n")
        except (OSError, HiddenlabError):
            pass


def _private(name: str, flags: int) -> int:
    return os.open(name, flags, 0o600)


@dataclass
class _Running:
    """A task without a bar: its start, what was done then, its last report, when a line was printed."""

    start: float
    first: int
    detail: str = ""
    done: int = 0
    total: int = 0
    said: float | None = None

    def line(self, now: float) -> str:
        """Return how far it is, with an estimate once something was done since the start."""
        passed = now - self.start
        counted = f"{self.done}/{self.total}, {self.detail or 'running'}" if self.done else "running"
        if self.done <= self.first:
            return f"{counted}, {passed:.0f} s"
        each = passed / (self.done - self.first)
        rate = f"{_rate(1 / each)}, " if passed > SLOW_SECONDS else ""
        left = each * (self.total - self.done)
        return f"{counted}, {rate}{passed:.0f} s, about {left:.0f} s left"


class Bars:
    """A progress callback ``(what, done, total)``: bars on a terminal, elsewhere a line a minute and one at the end.

    Elsewhere a task that reports nothing says so too: after ten seconds, and then every minute.

    Text behind a tab in ``what`` is a detail that changes (a loss, say), shown beside the bar. Where there is nothing
    to count (a total of 0), ``what`` is a line that is shown at once. What was given up (a ``done`` below 0) is not
    shown any more.
    """

    def __init__(self) -> None:
        self._console = stderr()
        self._live: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._running: dict[str, _Running] = {}
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._watcher: threading.Thread | None = None

    def __call__(self, what: str, done: int, total: int) -> None:
        if total == 0:
            self._console.print(what, highlight=False, soft_wrap=True, markup=False)
            return
        what, _, detail = what.partition("\t")
        if done < 0:
            self._forget(what)
            return
        if self._console.is_terminal:
            self._draw(what, detail, done, total)
            return
        with self._lock:
            self._say(what, detail, done, total)
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, name="progress", daemon=True)
            self._watcher.start()

    def _say(self, what: str, detail: str, done: int, total: int) -> None:
        now = time.monotonic()
        task = self._running.get(what)
        if (
            task is None or done < task.done
        ):  # begun, or begun again: what was given up says nothing of the time left
            self._running.pop(what, None)  # the task that began last stands last
            task = self._running[what] = _Running(now, done)
        task.detail, task.done, task.total = detail, done, total
        if done >= total:
            if now - task.start > SLOW_SECONDS:
                self._console.print(f"{what}: {done}/{total} in {now - task.start:.1f} s")
            del self._running[what]
        elif done > 0 and now - (task.start if task.said is None else task.said) > QUIET_SECONDS:
            self._tell(what, task, now)

    def _tell(self, what: str, task: "_Running", now: float) -> None:
        self._console.print(f"{what}: {task.line(now)}", soft_wrap=True, markup=False)
        task.said = now

    def _forget(self, what: str) -> None:
        with self._lock:
            self._running.pop(what, None)
        if self._live is not None and what in self._tasks:
            self._live.remove_task(self._tasks.pop(what))

    def _watch(self) -> None:
        """Tell of tasks that have not reported for long. Runs in a thread of its own."""
        while not self._closed.wait(FIRST_SIGN / 4):
            now = time.monotonic()
            with self._lock:
                # The task that began last is the one that runs.
                for what, task in list(self._running.items())[-1:]:
                    silent = now - (task.start if task.said is None else task.said)
                    if silent > (FIRST_SIGN if task.said is None else QUIET_SECONDS):
                        self._tell(what, task, now)

    def _draw(self, what: str, detail: str, done: int, total: int) -> None:
        if self._live is None:
            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                _RateColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
            )
            self._live = Progress(*columns, console=self._console, transient=True)
            self._live.start()
        if what not in self._tasks:
            self._tasks[what] = self._live.add_task(what, total=total)
        elif any(task.id == self._tasks[what] and done < task.completed for task in self._live.tasks):
            self._live.reset(self._tasks[what])  # begun again
        shown = f"{what}, {detail}" if detail else what
        self._live.update(self._tasks[what], description=shown, completed=done, total=total)
        if done >= total:
            self._live.remove_task(self._tasks.pop(what))

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Hide the bars while something else is printed, which may go to the same terminal."""
        if self._live is not None:
            self._live.stop()
        yield
        if self._live is not None:
            self._live.start()

    def close(self) -> None:
        """Remove the bars."""
        self._closed.set()
        if self._live is not None:
            self._live.stop()
            self._live = None


@contextlib.contextmanager
def bars() -> Iterator[Bars]:
    """Show progress bars for a block."""
    progress = Bars()
    try:
        yield progress
    finally:
        progress.close()
