"""Run the passes of many requests together: continuous batching.

One batch runs at a time. Passes that are asked for meanwhile wait, and form the next batch, first come, first served.
Some of them begin a prompt, others continue an answer.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from hiddenlab.defenses.cascade.node_state import GIVEN_UP, NodeError
from hiddenlab.defenses.cascade.passes import Batch, Pass

MOST_TOKENS = 2048  # new tokens of a batch, unless one pass alone has more
MOST_PASSES = 64
PATIENCE = 0.02  # seconds that a batch waits for the next token of requests that the last one answered

# The rows of each CompNode, packed in the order of the passes.
Shares: TypeAlias = "dict[int, Tensor]"


@dataclass(eq=False)
class _Ticket:
    """A pass that waits or runs, and what came of it."""

    work: Pass
    shares: Mapping[int, Tensor]
    parts: dict[int, Tensor] = field(default_factory=dict)
    error: BaseException | None = None
    done: bool = False

    @property
    def tokens(self) -> int:
        return self.work.plan.tokens - self.work.since

    @property
    def kind(self) -> tuple[int, bool, bool]:
        """What passes of one batch have in common."""
        floating = any(share.is_floating_point() for share in self.shares.values())
        return self.work.plan.beta, self.work.plan.symmetric, floating


class Batcher:
    """A meeting place of threads that each want a pass.

    One of the waiting threads runs the batch for all of them; there is no thread beside theirs.

    Args:
        run: runs a batch on rows packed by CompNode, and returns each CompNode's wanted rows.
        abort: makes ``run`` end early.
        close: makes the nodes forget a request.
        most_passes: of a batch.
    """

    def __init__(
        self,
        run: Callable[[Batch, Shares], dict[int, Tensor]],
        abort: Callable[[str], None],
        close: Callable[[str], None],
        most_passes: int = MOST_PASSES,
    ) -> None:
        self._run, self._abort, self._close, self._most_passes = run, abort, close, most_passes
        self._changed = threading.Condition()
        self._waiting: list[_Ticket] = []
        self._running: list[_Ticket] = []
        self._batch: Batch | None = None
        self._leaving: set[str] = set()  # closed while their batch runs
        self._expected: set[str] = set()  # whose next token is awaited
        self._until = 0.0

    def step(self, work: Pass, shares: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Run a pass, together with others that wait.

        Args:
            work: the pass.
            shares: rows of its new tokens, by CompNode.

        Returns:
            The wanted rows of each CompNode.

        Raises:
            NodeError: a node was lost, or the request was closed.
        """
        ticket = _Ticket(work, shares)
        with self._changed:
            self._waiting.append(ticket)
            self._expected.discard(work.request)
            self._changed.notify_all()
        while not ticket.done:
            if (batch := self._next(ticket)) is not None:
                self._lead(batch)
        if ticket.error is not None:
            raise ticket.error
        return ticket.parts

    def _next(self, ticket: _Ticket) -> Batch | None:
        """Wait until the pass is done, or until it is this thread's turn to run a batch."""
        with self._changed:
            while not ticket.done:
                if self._batch is None:
                    left = self._until - time.monotonic() if self._expected else 0.0
                    if left <= 0:
                        return self._form()
                    self._changed.wait(left)
                else:
                    self._changed.wait()
        return None

    def _form(self) -> Batch:
        """Take the passes of the next batch. The caller has to hold the lock; some pass waits."""
        first = self._waiting[0]
        tokens = 0
        for ticket in self._waiting:
            if ticket.kind != first.kind:
                continue
            if self._running and (
                tokens + ticket.tokens > MOST_TOKENS or len(self._running) == self._most_passes
            ):
                break
            self._running.append(ticket)
            tokens += ticket.tokens
        self._waiting = [ticket for ticket in self._waiting if ticket not in self._running]
        self._batch = Batch.of(*(ticket.work for ticket in self._running))
        return self._batch

    def _lead(self, batch: Batch) -> None:
        """Run a batch and give each pass its rows, or all of them the error."""
        running = self._running
        parts: dict[int, Tensor] = {}
        error: BaseException | None = None
        try:
            parts = self._run(batch, _packed(running))
        except BaseException as raised:
            error = raised
        leaving: set[str] = set()
        try:
            if error is None:
                _unpack(running, parts)
        except BaseException as raised:
            error = raised
        with self._changed:
            for ticket in running:
                if ticket.work.request in self._leaving:
                    ticket.error = NodeError(GIVEN_UP)
                elif error is not None:
                    ticket.error = error.copy() if isinstance(error, NodeError) else error
                ticket.done = True
            leaving, self._leaving = self._leaving, set()
            self._expected = {
                ticket.work.request for ticket in running if ticket.work.keep and ticket.error is None
            }
            self._until = time.monotonic() + PATIENCE
            self._running, self._batch = [], None
            self._changed.notify_all()
        for request in leaving:
            self._close(request)

    def close(self, request: str) -> None:
        """Forget a request, at the nodes too; a pass of it that waits or runs ends with a NodeError.

        Others in its batch go on. A batch of which all requests are closed ends early.
        """
        batch = None
        with self._changed:
            self._expected.discard(request)
            for ticket in [ticket for ticket in self._waiting if ticket.work.request == request]:
                self._waiting.remove(ticket)
                ticket.error, ticket.done = NodeError(GIVEN_UP), True
            runs = self._batch is not None and request in self._batch.requests
            if runs and self._batch is not None:
                self._leaving.add(request)
                if self._leaving >= self._batch.requests:
                    batch = self._batch.name
            self._changed.notify_all()
        if not runs:
            self._close(request)
        if batch is not None:
            self._abort(batch)


def _packed(tickets: list[_Ticket]) -> Shares:
    """Join the rows of several passes, for each CompNode that has any."""
    comps = sorted({comp for ticket in tickets for comp in ticket.shares})
    return {
        comp: torch.cat([ticket.shares[comp] for ticket in tickets if comp in ticket.shares])
        for comp in comps
    }


def _unpack(tickets: list[_Ticket], parts: Mapping[int, Tensor]) -> None:
    """Give each pass its wanted rows of every CompNode."""
    for comp, rows in parts.items():
        at = 0
        for ticket in tickets:
            if comp in ticket.shares:
                count = len(ticket.work.wanted(comp))
                ticket.parts[comp] = rows[at : at + count]
                at += count
