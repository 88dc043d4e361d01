"""Run the passes of requests over the nodes of a plan: the common part of all Cascade backends (paper, Algorithm 2)."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from hiddenlab.defenses.cascade.batching import MOST_PASSES, Batcher
from hiddenlab.defenses.cascade.comp_host import first_position, has_head, is_causal
from hiddenlab.defenses.cascade.node_state import GIVEN_UP, NodeError, attn_name
from hiddenlab.defenses.cascade.node_views import Seen
from hiddenlab.defenses.cascade.passes import Batch, Pass, new_name
from hiddenlab.errors import InputError
from hiddenlab.models import signature_of
from hiddenlab.sharding import Plan
from hiddenlab.text import count_of


@dataclass(frozen=True)
class Settings:
    """The settings of a backend's nodes.

    Attributes:
        compress: AttnNodes send one logsumexp per row in place of the paper's maximum and sum.
        wire: dtype of numbers on the wire; None sends them as computed.
        record: nodes keep what they saw.
        slack: of masked sums, in nats; None sends partial results. With it neither ``compress`` nor ``wire`` concerns
            answers.
    """

    compress: bool = False
    wire: torch.dtype | None = None
    record: bool = False
    slack: float | None = None


@dataclass(frozen=True)
class ModelFacts:
    """The facts about a model that a driver knows without its weights.

    Attributes:
        head: it gives logits. causal: no token sees a later one. context: most tokens of a prompt.
        vocabulary: number of token ids.
        padding: a token that takes no position, so that no prompt may hold it; None where every token takes one.
        signature: of the embedding table. dtype: of the weights.
    """

    name: str
    head: bool
    causal: bool
    context: int | None
    vocabulary: int
    padding: int | None
    signature: tuple[float, ...]
    dtype: str

    @classmethod
    def of(cls, name: str, model: nn.Module) -> "ModelFacts":
        config: Any = model.config
        embedding = model.get_input_embeddings().weight  # type: ignore[operator]
        first, places = first_position(model), getattr(config, "max_position_embeddings", None)
        return cls(
            name,
            has_head(model),
            is_causal(model),
            None if places is None else places - first,
            embedding.shape[0],
            first - 1 if first else None,
            signature_of(embedding),
            str(embedding.dtype).removeprefix("torch."),
        )


class Cascade(ABC):
    """A model run by nodes; the driver handles only the user's own tokens and the result.

    Several threads may ask for passes at once.

    Attributes:
        facts: of the model.
        started: number of CompNodes, and names of AttnNodes, where they exist independent of plans.
    """

    facts: ModelFacts
    started: tuple[int, frozenset[str]] | None = None

    def forward(
        self,
        tokens: Int[Tensor, " n"] | Float[Tensor, "n d"],
        plan: Plan,
        *,
        mask: Bool[Tensor, " n"] | None = None,
    ) -> Float[Tensor, "n width"]:
        """Return logits of a causal LM, or last hidden states of a model without a head, for every token.

        Args:
            tokens: ids, or embeddings that the user computed.
            plan: for so many tokens.
            mask: False for padding, which no token sees; rows of padding are meaningless.

        Raises:
            InputError: the plan is for another number of tokens, an id is outside of the vocabulary, or the prompt is
                longer than the model's context.
            NodeError: a node died or stalled.
        """
        hidden = () if mask is None else tuple((~mask).nonzero()[:, 0].tolist())
        while True:
            work = Pass(new_name(), plan, hidden=hidden)
            try:
                return self.step(work, tokens)
            except NodeError as error:
                if not self.recover(error):
                    raise
            finally:
                self.close(work.request)

    @abstractmethod
    def step(self, work: Pass, tokens: Tensor) -> Float[Tensor, "n width"]:
        """Run one pass over new tokens; with ``work.last`` return only the last position's row.

        Raises:
            see ``forward``.
        """

    @abstractmethod
    def close(self, request: str) -> None:
        """Make every node forget a request; a pass of it that another thread waits for ends with a NodeError."""

    def _check(self, work: Pass, tokens: Tensor) -> None:
        expected = work.plan.tokens - work.since
        if len(tokens) != expected:
            raise InputError(f"the plan is for {count_of(expected, 'token')}, the prompt has {len(tokens)}")
        if self.facts.context is not None and work.plan.tokens > self.facts.context:
            raise InputError(
                f"the prompt has {count_of(work.plan.tokens, 'token')}; the model's context holds {self.facts.context}"
            )
        if not tokens.is_floating_point() and not bool(
            ((tokens >= 0) & (tokens < self.facts.vocabulary)).all()
        ):
            raise InputError(f"a token id is outside of the vocabulary, 0 to {self.facts.vocabulary - 1}")
        padding = self.facts.padding
        if padding is not None and not tokens.is_floating_point() and padding in tokens.tolist():
            raise InputError(
                f"token {padding} is padding, which takes no position in this model; leave it out"
            )
        plan = work.plan
        if self.started is not None:
            alpha, attns = self.started
            if plan.alpha > alpha or not {attn_name(node) for node in plan.attn_nodes} <= attns:
                raise InputError(
                    f"the plan needs {count_of(plan.alpha, 'CompNode')} and {len(plan.attn_nodes)} "
                    f"AttnNodes; running are {alpha} "
                    f"and {len(attns)}"
                )

    @abstractmethod
    def counters(self) -> dict[str, dict[str, Any]]:
        """Return each node's counters since the start, by name."""

    @abstractmethod
    def seen(self) -> list[Seen]:
        """Return what nodes saw, where they record, and remove it from them."""

    def recover(self, error: NodeError) -> bool:
        """Replace a lost node where that is allowed; the request can then be run again from its tokens."""
        return False

    def healthy(self) -> dict[str, str]:
        """Return ``ok`` or the fault of each node that runs by itself."""
        return {}

    def shutdown(self) -> None:  # noqa: B027 (nothing to stop is the common case)
        """Stop the nodes."""

    def __enter__(self) -> "Cascade":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


class NodeCascade(Cascade):
    """Nodes of a plan, which run the passes of several requests together (``batching``).

    Args:
        record: nodes record what they see, one request at a time.
    """

    def __init__(self, *, record: bool = False) -> None:
        self._batcher = Batcher(self._run, self._abort, self._forget, 1 if record else MOST_PASSES)

    def step(self, work: Pass, tokens: Tensor) -> Float[Tensor, "n width"]:
        self._check(work, tokens)
        shares = {i: work.inputs(i, tokens) for i in range(work.plan.alpha)}
        there = {i: share for i, share in shares.items() if share is not None}
        return self._joined(work, self._batcher.step(work, there))

    def forward_rows(self, rows: Mapping[int, Float[Tensor, "r d"]], plan: Plan) -> Float[Tensor, "n width"]:
        """Run a pass in which each CompNode already has its own rows of input vectors (see ``forward``).

        Nobody holds the whole prompt.

        Args:
            rows: by CompNode, those of its positions.
            plan: of the prompt.

        Raises:
            InputError: the rows are not those of the plan.
            NodeError: a node died or stalled.
        """
        wanted = {i: len(shard) for i, shard in enumerate(plan.shards) if shard}
        if {i: len(part) for i, part in rows.items()} != wanted:
            raise InputError("each CompNode needs the rows of its own positions, and no others")
        work = Pass(new_name(), plan)
        try:
            return self._joined(work, self._batcher.step(work, rows))
        finally:
            self.close(work.request)

    def _joined(self, work: Pass, parts: Mapping[int, Tensor]) -> Float[Tensor, "n width"]:
        """Join the nodes' outputs in the order of the prompt."""
        if work.last:
            return next(part for part in parts.values() if len(part))
        width = next(iter(parts.values()))
        joined = width.new_empty(work.plan.tokens - work.since, width.shape[1])
        for i, part in parts.items():
            joined[[p - work.since for p in work.plan.shards[i] if p >= work.since]] = part
        return joined

    @abstractmethod
    def _run(self, batch: Batch, shares: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Run a batch on the CompNodes that have new tokens, and return their wanted rows, packed as the inputs."""

    @abstractmethod
    def _abort(self, batch: str) -> None:
        """Make every node give a running batch up; its ``_run`` ends with a NodeError."""

    @abstractmethod
    def _forget(self, request: str) -> None:
        """Make every node forget a request of which no pass runs."""

    def close(self, request: str) -> None:
        self._batcher.close(request)


def in_threads(
    run: Callable[[int], Tensor], comps: Iterable[int], give_up: Callable[[], None]
) -> dict[int, Tensor]:
    """Run CompNodes of this process at once; if one fails, stop the others and raise the cause.

    Args:
        run: a CompNode's pass.
        comps: indices of the CompNodes.
        give_up: wakes CompNodes that would wait for ever, which then raise a NodeError.
    """

    def guarded(i: int) -> Tensor:
        try:
            return run(i)
        except BaseException:
            give_up()
            raise

    order = list(comps)
    if len(order) == 1:
        return {i: guarded(i) for i in order}
    with ThreadPoolExecutor(len(order)) as pool:
        futures = {i: pool.submit(guarded, i) for i in order}
    errors = [error for future in futures.values() if (error := future.exception()) is not None]
    if errors:
        # Other errors are the cause; of NodeErrors those that name a node, last those of nodes told to give up.
        def rank(error: BaseException) -> int:
            if not isinstance(error, NodeError):
                return 0
            return 1 if error.node else 3 if str(error) == GIVEN_UP else 2

        raise min(errors, key=rank)
    return {i: future.result() for i, future in futures.items()}
