"""Decide when a node counts as stalled, and limit how often lost nodes are replaced."""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from hiddenlab.defenses.cascade.node_state import comp_name

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


def stalled(waiting: Mapping[str, Mapping[str, Any] | None], layers: Mapping[str, int]) -> str | None:
    """Return the node that keeps a batch waiting in which all stand still; None where nothing says which.

    It is the CompNode whose rows most AttnNodes miss. Where none is missed, it is an AttnNode that computes. Where none
    computes, all that was sent is answered, and a CompNode does not go on.

    Args:
        waiting: the state of each AttnNode, see ``AttnHost.waiting``.
        layers: the layer of each CompNode that runs the batch.
    """
    states = {name: state for name, state in waiting.items() if state is not None}
    missing = [i for state in states.values() for i in state["missing"]]
    if missing:
        return comp_name(max(sorted(set(missing)), key=missing.count))
    computing = [name for name, state in states.items() if state["computing"]]
    return min(computing, default=None) or min(layers, key=lambda name: (layers[name], name), default=None)
