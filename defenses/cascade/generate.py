"""Generate text over Cascade nodes with token-sharded KV caching (Hidden No More, appendix Q).

After the prompt's pass, each new token is one pass of one CompNode and of the β AttnNodes that hold its query row. Its
keys and values are kept at the nodes where later queries need them.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.defenses.cascade.backend import Cascade
from hiddenlab.defenses.cascade.node_state import NodeError
from hiddenlab.defenses.cascade.passes import Pass, new_name
from hiddenlab.defenses.cascade.sampling import Sampling
from hiddenlab.errors import InputError
from hiddenlab.sharding import Plan


class Cancellation:
    """A handle that ends a generation from another thread, within a layer of the running pass."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancelled = False
        self._close: Callable[[], None] = lambda: None

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    def cancel(self) -> None:
        """End the generation; do not wait until it has ended."""
        with self._lock:
            self._cancelled, close = True, self._close
        close()

    def watch(self, close: Callable[[], None]) -> bool:
        """Register how the running request is closed; return False if it need not begin."""
        with self._lock:
            self._close = close
            return not self._cancelled


def generate(
    cascade: Cascade,
    tokens: Int[Tensor, " n"],
    plan: Plan,
    *,
    new_tokens: int,
    sampling: Sampling | None = None,
    stop: Iterable[int] = (),
    cancellation: Cancellation | None = None,
    observe: Callable[[int, Float[Tensor, " v"]], None] | None = None,
) -> Iterator[int]:
    """Yield new token ids, each as soon as it is known; a stop token is the last of them.

    If the backend may replace a lost node, all tokens so far are run again; what was yielded remains.

    Args:
        cascade: the nodes.
        tokens: ids of the prompt.
        plan: of the prompt; it grows with the answer.
        new_tokens: at most so many, and never beyond the context.
        sampling: default: greedy.
        stop: ids that end the answer.
        cancellation: ends it early, without an error; lost nodes are then neither replaced nor run again.
        observe: is called with each token and the logits that the model gave, before the token is yielded.

    Raises:
        InputError: the model has no head, or the prompt leaves no room in its context.
        NodeError: a node is lost.
    """
    if not cascade.facts.head:
        raise InputError(f"{cascade.facts.name} has no language-model head; it cannot generate")
    if new_tokens < 1:
        raise InputError(f"at least 1 new token must be asked for, not {new_tokens}")
    context = cascade.facts.context
    if context is not None and len(tokens) >= context:
        raise InputError(
            f"the prompt has {len(tokens)} tokens; the model's context holds {context}, answer included"
        )
    ends = frozenset(stop)
    choose = (sampling or Sampling()).chooser(len(tokens), ends)
    total = len(tokens) + new_tokens if context is None else min(len(tokens) + new_tokens, context)
    everything = tokens.to("cpu", copy=True)
    cancellation = cancellation or Cancellation()
    work = Pass(new_name(), plan, keep=True, last=True)
    try:
        while cancellation.watch(partial(cascade.close, work.request)):
            try:
                (logits,) = cascade.step(work, everything[work.since :])
            except NodeError as error:
                if cancellation.cancelled:
                    return
                if not cascade.recover(error):
                    raise
                cascade.close(work.request)
                # The lost node's part of the cache is gone, so run all known tokens again.
                work = Pass(new_name(), work.plan, keep=True, last=True)
                continue
            token = choose(everything, logits)
            if observe is not None:
                observe(token, logits)
            everything = torch.cat([everything, torch.tensor([token])])
            yield token
            if token in ends or len(everything) >= total:
                return
            grown = work.plan.grown(len(everything))
            work = Pass(work.request, grown, work.number + 1, len(everything) - 1, keep=True, last=True)
    finally:
        cascade.close(work.request)
