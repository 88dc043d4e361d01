"""Run several searches at once by packing their forward calls into shared passes.

Each search is a generator that yields forward calls and gets answers back. One whose parts do not wait for each other
yields them as searches of their own (``Together``).
"""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hiddenlab.models import Request, TruncatedModel
from hiddenlab.types import Progress, silent


@dataclass
class ForwardCall:
    """A request to one engine: the truncated model under attack, its screen, or a proposing language model.

    Attributes:
        counts: whether the engine runs candidates, so that its positions count as evaluated.
    """

    engine: TruncatedModel
    request: Request
    counts: bool = True


@dataclass
class Cost:
    """The cost of one search so far: positions and passes that ran candidates, and seconds of everything."""

    evaluated: int = 0
    calls: int = 0
    seconds: float = 0.0


@dataclass
class Together:
    """Parts of a search that run side by side, in shared passes; it gets the list of their results back."""

    parts: Sequence["Search"]


Search = Generator[ForwardCall | Together, Any, Any]


@dataclass
class _Running:
    """A search on its way, or a part of one.

    Attributes:
        cost: of the whole search, which its parts share. ask: the call that it waits for. parts: those that it waits
            for instead. over: whether it has ended.
    """

    search: Search
    cost: Cost = field(default_factory=Cost)
    ask: ForwardCall | None = None
    parts: list["_Running"] = field(default_factory=list)
    over: bool = False
    result: Any = None

    def advance(self, answer: Any = None) -> None:
        """Go on to the next call, through parts that end without one."""
        try:
            asked = self.search.send(answer)
        except StopIteration as stop:
            self.ask, self.over, self.result = None, True, stop.value
            return
        self.ask = None
        if isinstance(asked, ForwardCall):
            self.ask = asked
        elif not isinstance(asked, Together):
            raise TypeError(f"a search yields a ForwardCall or Together, not {type(asked).__name__}")
        else:
            self.parts = [_Running(part, self.cost) for part in asked.parts]
            for part in self.parts:
                part.advance()
            self.join()

    def join(self) -> None:
        """Go on behind the parts where all have ended."""
        if all(part.over for part in self.parts):
            results, self.parts = [part.result for part in self.parts], []
            self.advance(results)

    def waiting(self) -> Iterator["_Running"]:
        """Yield what waits for an answer: the search itself, or parts of it."""
        if self.ask is not None:
            yield self
        for part in self.parts:
            yield from part.waiting()

    def settle(self) -> None:
        """Go on behind parts that have ended, the innermost first."""
        if self.parts:
            for part in self.parts:
                part.settle()
            self.join()


def run_batched(
    searches: Sequence[Search],
    progress: Progress = silent,
    share: float = 0.0,
    now: Callable[[], float] = time.perf_counter,
) -> list[tuple[Any, Cost]]:
    """Run searches to their ends and return each one's result and cost.

    Every round packs the pending calls of one engine into one forward pass (up to its token limit). A round's time is
    divided by the positions of each call, so that the seconds of all searches add up to the time that passed.

    Args:
        share: seconds already spent for all, divided evenly.
        now: the clock, in seconds; one that stands still leaves preparation out (``utils.clock``).
    """
    running = [_Running(search) for search in searches]
    for task in running:
        task.cost.seconds = share / len(running)
    started = now()
    for task in running:
        task.advance()
    _divide([task.cost for task in running], now() - started)
    while active := [(leaf, leaf.ask) for task in running for leaf in task.waiting() if leaf.ask is not None]:
        started = now()
        engine = active[0][1].engine
        batch = list[tuple[_Running, ForwardCall]]()
        size = 0
        for leaf, ask in active:
            if ask.engine is engine and (not batch or size + ask.request.size <= engine.max_pass_tokens):
                batch.append((leaf, ask))
                size += ask.request.size
        sizes = [ask.request.size for _, ask in batch]
        answers = engine.run([ask.request for _, ask in batch])
        for (leaf, ask), answer, asked in zip(batch, answers, sizes, strict=True):
            if ask.counts:
                leaf.cost.evaluated += asked
                leaf.cost.calls += 1
            leaf.advance(answer)
        for task in running:
            task.settle()
        served = [leaf.cost for leaf, _ in batch]
        _divide(served, now() - started, sizes)
        # Searches that were served go behind the others, so that engines take turns.
        running.sort(key=lambda task: any(task.cost is cost for cost in served))
        progress("attacking", sum(task.over for task in running), len(running))
    by_search = {id(entry.search): entry for entry in running}
    return [(by_search[id(search)].result, by_search[id(search)].cost) for search in searches]


def _divide(costs: Sequence[Cost], seconds: float, sizes: Sequence[int] | None = None) -> None:
    weights = sizes or [1] * len(costs)
    for cost, weight in zip(costs, weights, strict=True):
        cost.seconds += seconds * weight / sum(weights)
