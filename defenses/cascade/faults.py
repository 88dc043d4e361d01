"""Decide when a node counts as stalled, and limit how often lost nodes are replaced."""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

Clock = Callable[[], float]
HOUR = 3600.0


class Watch:
    """A watch that tells slow nodes from stalled ones, by numbers that grow while a node works.

    A node is silent if it has left a question unanswered for ``patience`` seconds. The nodes are still if no number has
    grown for as long. Anything less is slowness, however long a pass takes.

    Args:
        patience: seconds.
        clock: monotonic clock, in seconds.
    """

    def __init__(self, patience: float, clock: Clock = time.monotonic) -> None:
        self.patience, self._clock = patience, clock
        self._ticks: dict[str, int] = {}
        self._asked: dict[str, float] = {}
        self._moved = clock()

    def ask(self, name: str) -> None:
        """Note that a node was asked, where no earlier question to it is open."""
        self._asked.setdefault(name, self._clock())

    def answered(self, name: str, ticks: int) -> None:
        """Note a node's answer, the number of its progress."""
        self._asked.pop(name, None)
        if self._ticks.get(name) != ticks:
            self._ticks[name], self._moved = ticks, self._clock()

    def forget(self, name: str) -> None:
        """Note that a node was replaced."""
        self._ticks.pop(name, None)
        self._asked.pop(name, None)
        self._moved = self._clock()

    def silent(self) -> list[str]:
        """Return the nodes that were asked and have not answered for too long."""
        now = self._clock()
        return [name for name, asked in self._asked.items() if now - asked >= self.patience]

    def still(self, since: float) -> bool:
        """Return whether no number has grown for too long.

        Args:
            since: start of the work that waits, by the same clock; standing still before that is no fault.
        """
        return self._clock() - max(self._moved, since) >= self.patience


class Restarts:
    """A limit on replacements within a sliding window of time.

    Args:
        limit: replacements within ``window`` seconds.
        clock: monotonic clock, in seconds.
    """

    def __init__(self, limit: int, *, window: float = HOUR, clock: Clock = time.monotonic) -> None:
        self.limit, self.window, self._clock = limit, window, clock
        self._taken: deque[float] = deque()
        self._lock = threading.Lock()

    @property
    def left(self) -> int:
        """The number of replacements left now."""
        with self._lock:
            return self._left()

    def take(self) -> bool:
        """Take one replacement; return False where none is left."""
        with self._lock:
            if self._left() < 1:
                return False
            self._taken.append(self._clock())
            return True

    def _left(self) -> int:
        now = self._clock()
        while self._taken and now - self._taken[0] >= self.window:
            self._taken.popleft()
        return self.limit - len(self._taken)


def most_missed(waiting: Mapping[str, Mapping[str, object] | None]) -> int | None:
    """Return the CompNode whose rows most AttnNodes wait for; None where none waits.

    Args:
        waiting: the state of each AttnNode, see ``AttnHost.waiting``.
    """
    missing = [i for state in waiting.values() if state is not None for i in state["missing"]]  # type: ignore[attr-defined]
    return max(sorted(set(missing)), key=missing.count) if missing else None
