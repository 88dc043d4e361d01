"""Call the HTTP interface in process, without Ray or a socket, for tests and for campaigns of malformed requests."""

import asyncio
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hiddenlab.defenses.cascade.backend import Cascade, ModelFacts
from hiddenlab.defenses.cascade.node_state import NodeError
from hiddenlab.defenses.cascade.node_views import Seen
from hiddenlab.defenses.cascade.passes import Pass
from hiddenlab.defenses.cascade.service import Service
from hiddenlab.sharding import Plan
from hiddenlab.testing import VOCABULARY, byte_tokenizer

NAME = "tiny/model"
TEMPLATE = (
    "{% for message in messages %}{% if message.content == 'refuse' %}{{ raise_exception('not this') }}{% endif %}"
    "[{{ message.role }}]{{ message.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
PATIENCE = 20.0


class Scripted(Cascade):
    """The smallest Cascade: it answers every request with the same script.

    Attributes:
        script: token ids of the answer, repeated.
        asked: tokens of every pass.
        requests, closed: names of requests, one per pass, and those that were closed.
        states: of nodes, for ``healthy``.
        wait: passes wait while it is not set.
        fail_at: the pass in which a node is lost.
    """

    def __init__(self) -> None:
        self.facts = ModelFacts(NAME, True, True, 512, VOCABULARY, None, (), "float32")
        self.script: list[int] = [120]
        self.asked: list[Tensor] = []
        self.requests: list[str] = []
        self.closed: list[str] = []
        self.states: dict[str, str] = {}
        self.wait = threading.Event()
        self.wait.set()
        self.fail_at: int | None = None
        self.recovered = 0

    def says(self, text: str, *then: int) -> None:
        """Answer with a text, then with these tokens."""
        self.script = [*byte_tokenizer()(text)["input_ids"], *then]

    def step(self, work: Pass, tokens: Tensor) -> Tensor:
        self._check(work, tokens)
        self.asked.append(tokens)
        self.requests.append(work.request)
        assert self.wait.wait(PATIENCE)
        if work.number == self.fail_at:
            raise NodeError("AttnNode (0, 1) died in layer 3", "AttnNode (0, 1)")
        logits = torch.zeros(1, VOCABULARY)
        logits[0, self.script[work.number % len(self.script)]] = 1.0
        return logits

    def recover(self, error: NodeError) -> bool:
        self.recovered += 1
        return False

    def close(self, request: str) -> None:
        self.closed.append(request)

    def counters(self) -> dict[str, dict[str, Any]]:
        return {}

    def seen(self) -> list[Seen]:
        return []

    def healthy(self) -> dict[str, str]:
        return self.states


def make_service(
    cascade: Cascade | None = None, *, template: str | None = TEMPLATE, tokenizer: Any = None, **options: Any
) -> Service:
    """Make a service over a Cascade; by default over one that answers ``xxx…`` at once.

    Args:
        cascade: the nodes.
        template: of conversations; None leaves the model without one.
        tokenizer: in place of the byte-level one, with its own template.
        options: see ``Service``.
    """
    if tokenizer is None:
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = template
    return Service(
        cascade or Scripted(),
        lambda tokens: Plan.clustered(tokens, 1, alpha=2),
        tokenizer,
        name=NAME,
        **options,
    )


@dataclass
class Reply:
    """A client's view of an answer; ``status`` is 0 where the server sent nothing."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


async def asend(
    app: Any,
    path: str,
    body: bytes = b"",
    *,
    method: str = "POST",
    headers: Mapping[str, str] | None = None,
    leave_after: float | None = None,
) -> Reply:
    """Send one request to the app, body as it is, and wait for the whole answer.

    Args:
        app: of ``make_app``. headers: beside the content type of JSON, which they may replace.
        leave_after: seconds after which the client hangs up.

    Raises:
        Exception: whatever the app raises; a request must never make it.
    """
    reply, given = Reply(), False
    sent = {"content-type": "application/json"} | dict(headers or {})
    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
        "method": method, "scheme": "http", "path": path, "raw_path": path.encode("utf-8", "replace"),
        "root_path": "", "query_string": b"", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
        "headers": [(name.lower().encode(), value.encode()) for name, value in sent.items()],
    }  # fmt: skip

    async def receive() -> dict[str, Any]:
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": body, "more_body": False}
        await asyncio.sleep(PATIENCE if leave_after is None else leave_after)
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            reply.status = message["status"]
            reply.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            reply.body += message.get("body", b"")

    await app(scope, receive, send)
    return reply


def send(app: Any, path: str, body: bytes = b"", **options: Any) -> Reply:
    """Run ``asend`` from outside of an event loop."""
    return asyncio.run(asend(app, path, body, **options))
