"""Time calls, and searches without what they prepare on the way; decide when a preparation is worth its price."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

T = TypeVar("T")


def timed(call: Callable[[], T], repeats: int) -> tuple[T, float]:
    """Return the first result, and the median time of the calls after it (of the first where there are none)."""
    started = time.perf_counter()
    first = call()
    if not repeats:
        return first, time.perf_counter() - started
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return first, median(seconds)


@dataclass
class Clock:
    """A clock that stands still while something is prepared.

    Attributes:
        preparing: seconds of preparation so far.
    """

    preparing: float = 0.0
    _depth: int = 0

    def now(self) -> float:
        """Return seconds since some moment, without preparation."""
        return time.perf_counter() - self.preparing

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Count the seconds of the block as preparation; blocks may be nested."""
        started = time.perf_counter()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self.preparing += time.perf_counter() - started


@dataclass
class Rental:
    """Do without a preparation until what that costs has added up to its price.

    Who decides so never pays more than twice what the best decision costs, however long the work goes on (the ski
    rental problem).

    Attributes:
        price: of the preparation. spent: on doing without it, in the same unit.
    """

    price: float
    spent: float = 0.0

    def due(self, cost: float) -> bool:
        """Add the cost of doing without once more; return whether the preparation is worth its price now."""
        self.spent += cost
        return self.spent >= self.price

    def restart(self) -> None:
        """Count from zero again; what is prepared already may stay, and is used when it is due again."""
        self.spent = 0.0
