"""Run several searches at once by packing their forward calls into shared passes.

Each search is a generator that yields forward calls and gets answers back.
"""

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hiddenlab.models import Answer, Request, TruncatedModel
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


Search = Generator[ForwardCall, Answer, Any]


@dataclass
class _Running:
    search: Search
    cost: Cost = field(default_factory=Cost)
    ask: ForwardCall | None = None
    result: Any = None

    def advance(self, answer: Answer | None) -> None:
        try:
            self.ask = next(self.search) if answer is None else self.search.send(answer)
        except StopIteration as stop:
            self.ask, self.result = None, stop.value


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
        task.advance(None)
    _divide(running, now() - started)
    while active := [entry for entry in running if entry.ask is not None]:
        started = now()
        engine = active[0].ask.engine  # type: ignore[union-attr]
        batch: list[_Running] = []
        size = 0
        for task in active:
            assert task.ask is not None
            if task.ask.engine is engine and (
                not batch or size + task.ask.request.size <= engine.max_pass_tokens
            ):
                batch.append(task)
                size += task.ask.request.size
        sizes = [member.ask.request.size for member in batch]  # type: ignore[union-attr]
        answers = engine.run([member.ask.request for member in batch])  # type: ignore[union-attr]
        for task, answer, asked in zip(batch, answers, sizes, strict=True):
            if task.ask is not None and task.ask.counts:
                task.cost.evaluated += asked
                task.cost.calls += 1
            task.advance(answer)
        _divide(batch, now() - started, sizes)
        # Searches that were served go behind the others, so that engines take turns.
        running.sort(key=lambda entry: id(entry) in {id(b) for b in batch})
        progress("attacking", sum(entry.ask is None for entry in running), len(running))
    by_search = {id(entry.search): entry for entry in running}
    return [(by_search[id(search)].result, by_search[id(search)].cost) for search in searches]


def _divide(batch: Sequence[_Running], seconds: float, sizes: Sequence[int] | None = None) -> None:
    weights = sizes or [1] * len(batch)
    for task, weight in zip(batch, weights, strict=True):
        task.cost.seconds += seconds * weight / sum(weights)
