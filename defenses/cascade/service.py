"""Answer requests over one Cascade: check them, limit how many run, and generate each answer in its own thread."""

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import prometheus_client as prometheus
import torch
from starlette.exceptions import HTTPException

from hiddenlab.defenses.cascade.backend import Cascade
from hiddenlab.defenses.cascade.bodies import Body, RequestError, Turn
from hiddenlab.defenses.cascade.chat import Chat, tokenize
from hiddenlab.defenses.cascade.generate import Cancellation, Sampling, generate
from hiddenlab.errors import InputError
from hiddenlab.sharding import Plan
from hiddenlab.text import count_of

RETRY_SECONDS = 1  # until a refused client may ask again
# The pieces of an answer as they are generated; then None, or the error that ended it.
Pieces: TypeAlias = "asyncio.Queue[str | BaseException | None]"


@dataclass(frozen=True)
class Limits:
    """The limits of one request, and of how many run.

    Attributes:
        body: bytes of a request.
        tokens: of prompt and answer together.
        running: requests at once.
        new_tokens: of an answer, at most.
        default_new_tokens: of an answer where the request does not say.
    """

    body: int = 1 << 20
    tokens: int = 4096
    running: int = 16
    new_tokens: int = 1024
    default_new_tokens: int = 256

    def __post_init__(self) -> None:
        if min(self.body, self.running, self.new_tokens, self.default_new_tokens) < 1 or self.tokens < 2:
            raise InputError("limits must be at least 1, prompt and answer together at least 2 tokens")
        if self.default_new_tokens > self.new_tokens:
            raise InputError(
                f"an answer has {count_of(self.default_new_tokens, 'token')} by default, and may have "
                f"{self.new_tokens}; "
                "lower the default or raise the limit"
            )


@dataclass
class Answer:
    """A growing text in pieces of whole characters, until a stop text, a stop token or the limit."""

    pieces: Iterator[str]
    prompt_tokens: int
    cancellation: Cancellation
    tokens: int = 0
    finish: str = "length"
    ended: bool = False


class Service:
    """A service that answers requests over one Cascade.

    Args:
        cascade: the nodes.
        plan: makes the plan of a prompt with so many tokens.
        tokenizer: of the model.
        name: under which the model is served.
        key: digest of the key that requests must show, or None.
        limits: of requests.
    """

    def __init__(
        self,
        cascade: Cascade,
        plan: Callable[[int], Plan],
        tokenizer: Any,
        *,
        name: str,
        key: str | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.cascade, self.plan, self.tokenizer, self.name = cascade, plan, tokenizer, name
        self.key, self.limits = key, limits or Limits()
        self.created = int(time.time())
        self.registry = prometheus.CollectorRegistry()
        self.requests = prometheus.Counter(
            "cascade_requests", "Requests by path and status", ["path", "status"], registry=self.registry
        )
        self.tokens = prometheus.Counter("cascade_tokens", "Tokens by kind", ["kind"], registry=self.registry)
        self.seconds = prometheus.Histogram(
            "cascade_request_seconds", "Time of a request, to its last token", registry=self.registry
        )
        self.running = prometheus.Gauge("cascade_running", "Requests being answered", registry=self.registry)
        facts = cascade.facts
        self.context = min(self.limits.tokens, facts.context or self.limits.tokens)
        self.chat = Chat(tokenizer, name, self.context)
        self.taken = 0
        self._threads = ThreadPoolExecutor(self.limits.running, thread_name_prefix="answer")

    def ids(self, prompt: str | Sequence[int]) -> torch.Tensor:
        """Return the token ids of a raw prompt; control tokens in its text keep their meaning.

        Raises:
            InputError: it is empty, too long or holds an id that is no token.
        """
        return self._checked(tokenize(self.tokenizer, prompt) if isinstance(prompt, str) else list(prompt))

    def chat_ids(self, messages: Sequence[Turn]) -> torch.Tensor:
        """Return the token ids of a conversation in the model's format; control tokens in messages are plain text.

        Raises:
            InputError: see ``Chat.ids``, or it is too long.
        """
        roles = {"developer": "system"}
        return self._checked(
            self.chat.ids(
                [
                    {"role": roles.get(message.role, message.role), "content": message.text()}
                    for message in messages
                ]
            )
        )

    def _checked(self, ids: list[int]) -> torch.Tensor:
        if not ids:
            raise InputError("the prompt is empty; give at least one token")
        if max(ids) >= self.cascade.facts.vocabulary:
            raise InputError(
                f"a token id is outside of the vocabulary, 0 to {self.cascade.facts.vocabulary - 1}"
            )
        if len(ids) >= self.context:
            raise InputError(
                f"the prompt has {count_of(len(ids), 'token')}; prompt and answer may have {self.context} together"
            )
        return torch.tensor(ids, dtype=torch.long)

    def check(self, body: Body) -> None:
        """Refuse requests for another model or a longer answer before any work.

        Raises:
            HTTPException: the model is another.
            RequestError: the answer may not be so long.
        """
        if body.model != self.name:
            raise HTTPException(404, f"the model {body.model!r} is not served here; {self.name!r} is")
        if body.wanted is not None and body.wanted > self.limits.new_tokens:
            field = "max_tokens" if body.max_tokens is not None else "max_completion_tokens"
            raise RequestError(
                f"{field}: an answer may have {count_of(self.limits.new_tokens, 'token')} here", field
            )

    def answer(self, body: Body, ids: torch.Tensor) -> Answer:
        """Return an answer whose pieces are computed as they are asked for."""
        new = min(body.wanted or self.limits.default_new_tokens, self.context - len(ids))
        seed = body.seed if body.seed is not None else int.from_bytes(uuid.uuid4().bytes[:4], "big")
        sampling = Sampling(body.temperature, body.top_k, body.top_p, seed)
        answer = Answer(iter(()), len(ids), Cancellation())
        answer.pieces = self._pieces(answer, ids, new, sampling, body.stops)
        return answer

    def _pieces(
        self, answer: Answer, ids: torch.Tensor, new: int, sampling: Sampling, stops: Sequence[str]
    ) -> Iterator[str]:
        ends = {self.tokenizer.eos_token_id} - {None}
        generated: list[int] = []
        given = ""
        longest = max((len(stop) for stop in stops), default=0)
        tokens = generate(
            self.cascade, ids, self.plan(len(ids)), new_tokens=new, sampling=sampling, stop=ends,
            cancellation=answer.cancellation,
        )  # fmt: skip
        try:
            for token in tokens:
                generated.append(token)
                answer.tokens = len(generated)
                if token in ends:
                    answer.finish = "stop"
                    break
                text = self.tokenizer.decode(generated, skip_special_tokens=True)
                cut = min((at for stop in stops if (at := text.find(stop)) >= 0), default=-1)
                if cut >= 0:
                    answer.finish = "stop"
                    if cut > len(given):
                        yield text[len(given) : cut]
                    return
                # The text may end with part of a character, or with the beginning of a stop text.
                safe = len(text.rstrip("\ufffd")) - max(0, longest - 1)
                if safe > len(given):
                    yield text[len(given) : safe]
                    given = text[:safe]
            text = self.tokenizer.decode(generated, skip_special_tokens=True)
            if len(text) > len(given):
                yield text[len(given) :]
        finally:
            tokens.close()  # type: ignore[attr-defined]

    def begin(self, answer: Answer) -> Pieces:
        """Start to generate an answer in its own thread.

        Its place among the running requests is free again once that thread has ended. A client that leaves cancels the
        answer; until it has stopped, others are refused. There is no queue.

        Returns:
            The pieces as they come; then None, or the error that ended it.

        Raises:
            HTTPException: all places are taken.
        """
        if self.taken >= self.limits.running:
            raise HTTPException(
                429,
                f"{self.limits.running} requests are running; try again later",
                {"Retry-After": str(RETRY_SECONDS)},
            )
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue[str | BaseException | None]()
        self.taken += 1
        self.running.set(self.taken)
        started = time.perf_counter()

        def end(error: BaseException | None) -> None:
            answer.ended = True
            self.taken -= 1
            self.running.set(self.taken)
            self.seconds.observe(time.perf_counter() - started)
            self.tokens.labels("prompt").inc(answer.prompt_tokens)
            self.tokens.labels("completion").inc(answer.tokens)
            pieces.put_nowait(error)

        def work() -> None:
            failure: BaseException | None = None
            try:
                for piece in answer.pieces:
                    loop.call_soon_threadsafe(pieces.put_nowait, piece)
            except BaseException as error:  # after any error, the place must be freed
                failure = error
            with suppress(RuntimeError):  # the server has ended meanwhile
                loop.call_soon_threadsafe(end, failure)

        self._threads.submit(work)
        return pieces
