"""Run Cascade in one process: each CompNode is a thread, and the last sender's thread computes for an AttnNode.

It is the reference for other backends, and the tests compare it with the plain model. All threads share one copy of the
weights. Each runs the model's own forward on its tokens at their own positions, and exchanges rows with the others only
in the attention function (docs/internals/cascade.md).
"""

import threading
from collections.abc import Mapping
from dataclasses import asdict

from torch import Tensor, nn

from hiddenlab.defenses.cascade.attn_host import AttnHost
from hiddenlab.defenses.cascade.backend import ModelFacts, NodeCascade, Settings, in_threads
from hiddenlab.defenses.cascade.comp_host import CompHost
from hiddenlab.defenses.cascade.masked_sums import SumSecret
from hiddenlab.defenses.cascade.node_state import GIVEN_UP, Head, NodeError, comp_name
from hiddenlab.defenses.cascade.node_views import Seen
from hiddenlab.defenses.cascade.nodes import Answer, Rows
from hiddenlab.defenses.cascade.passes import Batch
from hiddenlab.defenses.cascade.secret_maps import Secret
from hiddenlab.sharding import AttnNode


class _Mail:
    """The answers to one CompNode in one batch, from whichever thread computed them."""

    def __init__(self, cascade: "LocalCascade", comp: int, failed: threading.Event) -> None:
        self.cascade, self.comp, self.failed = cascade, comp, failed
        self.ready = threading.Condition()
        self._answers: dict[tuple[AttnNode, int], list[Answer] | Exception] = {}

    def post(self, node: AttnNode, head: Head, rows: Rows) -> None:
        def reply(parts: list[Answer] | Exception) -> None:
            with self.ready:
                self._answers[node, head.step] = parts
                self.ready.notify_all()

        self.cascade.attn_host(node).receive(self.comp, head, rows, reply)

    def collect(self, node: AttnNode, head: Head) -> list[Answer]:
        key = node, head.step
        with self.ready:
            self.ready.wait_for(lambda: key in self._answers or self.failed.is_set())
            if key not in self._answers:
                raise NodeError(GIVEN_UP)
            answer = self._answers.pop(key)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def abort(self) -> None:
        with self.ready:
            self.ready.notify_all()


class LocalCascade(NodeCascade):
    """A model run by the nodes of a plan, in one process.

    Args:
        model: see ``load_cascade_model``.
        settings: how the nodes work.
        name: of the model, for what is recorded.
        secret: see ``CompHost``. masks: of which AttnNodes derive their keys, where the settings ask for masked sums.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: Settings | None = None,
        *,
        name: str = "model",
        secret: Secret | None = None,
        masks: SumSecret | None = None,
    ) -> None:
        self.model, self.settings = model, settings or Settings()
        self._secret, self._masks = secret, masks
        super().__init__(record=self.settings.record)
        self.facts = ModelFacts.of(name, model)
        self._comps: dict[int, CompHost] = {}
        self._attns: dict[AttnNode, AttnHost] = {}
        self._seen: dict[tuple[int, str], Seen] = {}
        self._lock = threading.Lock()

    def attn_host(self, node: AttnNode) -> AttnHost:
        """Return the AttnNode with that name; make it when first needed."""
        with self._lock:
            if node not in self._attns:
                settings = self.settings
                self._attns[node] = AttnHost(
                    node,
                    compress=settings.compress,
                    wire=settings.wire,
                    record=settings.record,
                    masks=self._masks,
                )
            return self._attns[node]

    def comp_host(self, index: int) -> CompHost:
        """Return the CompNode with that index; make it when first needed."""
        with self._lock:
            if index not in self._comps:
                settings = self.settings
                self._comps[index] = CompHost(
                    self.model, index, wire=settings.wire, secret=self._secret, slack=settings.slack
                )
            return self._comps[index]

    def _run(self, batch: Batch, shares: Mapping[int, Tensor]) -> dict[int, Tensor]:
        failed = threading.Event()
        mail = {i: _Mail(self, i, failed) for i in shares}

        def run(i: int) -> Tensor:
            seen = self._seen_by(i, batch.passes[0].request) if self.settings.record else None
            return self.comp_host(i).run(batch, shares[i], mail[i], seen)

        def give_up() -> None:
            failed.set()
            for mailbox in mail.values():
                mailbox.abort()

        return in_threads(run, shares, give_up)

    def _seen_by(self, comp: int, request: str) -> Seen:
        with self._lock:
            return self._seen.setdefault((comp, request), Seen(comp_name(comp), request))

    def _abort(self, batch: str) -> None:
        for host in list(self._attns.values()):
            host.abort(batch)

    def _forget(self, request: str) -> None:
        for host in list(self._attns.values()):
            host.close(request)

    def counters(self) -> dict[str, dict[str, float]]:
        counts = {comp_name(i): asdict(host.times) for i, host in sorted(self._comps.items())}
        return counts | {host.name: asdict(host.counters) for _, host in sorted(self._attns.items())}

    def seen(self) -> list[Seen]:
        with self._lock:
            views = [*self._seen.values(), *(view for host in self._attns.values() for view in host.seen)]
            self._seen.clear()
            for host in self._attns.values():
                host.seen.clear()
        return views
