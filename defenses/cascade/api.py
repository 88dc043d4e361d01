"""An OpenAI-compatible HTTP interface over a Cascade: completions, chat, streaming, health and metrics."""

import asyncio
import hashlib
import hmac
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import anyio
import prometheus_client as prometheus
import torch
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, StrictInt, model_validator
from starlette.concurrency import iterate_in_threadpool, run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from defenses.cascade.backend import Cascade
from defenses.cascade.generate import Sampling, generate
from defenses.cascade.hosts import NodeError
from defenses.cascade.plan import Plan
from hiddenlab.errors import InputError

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics")
MAX_STOPS, MAX_STOP_LENGTH = 4, 200
NOT_OFFERED = (
    "logprobs",
    "echo",
    "suffix",
    "best_of",
    "tools",
    "functions",
    "response_format",
    "logit_bias",
    "frequency_penalty",
    "presence_penalty",
)


@dataclass(frozen=True)
class Limits:
    """What one request may ask for. body: bytes of it. tokens: of prompt and answer together. waiting: requests."""

    body: int = 1 << 20
    tokens: int = 4096
    running: int = 16


class _Body(BaseModel):
    """What completions and chat have in common."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        """A null is as if the field were not there."""
        return {k: v for k, v in data.items() if v is not None} if isinstance(data, dict) else data

    model: str
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None
    n: Literal[1] = 1
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    stop: str | list[str] | None = None


class CompletionBody(_Body):
    prompt: str | list[Annotated[StrictInt, Field(ge=0, lt=2**31)]]


class Turn(BaseModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[dict[str, Any]]

    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        if any(part.get("type") != "text" for part in self.content):
            raise InputError("only text can be read; a message holds a part of another type")
        return "".join(str(part.get("text", "")) for part in self.content)


class ChatBody(_Body):
    messages: Annotated[list[Turn], Field(min_length=1)]
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None


@dataclass
class Answer:
    """A text as it grows: pieces that are whole characters, until a stop text, a stop token or the limit."""

    pieces: Iterator[str]
    prompt_tokens: int
    tokens: int = 0
    finish: str = "length"


class Service:
    """Requests over one Cascade.

    Args:
        plan: of a prompt with so many tokens. tokenizer: of the model. name: under which the model is served.
        key: digest of the key that requests must show, or None.
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
        self._slots = asyncio.Semaphore(self.limits.running)

    def ids(self, text: str | Sequence[int]) -> torch.Tensor:
        """Token ids of a prompt.

        Raises:
            InputError: it is empty.
        """
        found = self._tokenize(text) if isinstance(text, str) else list(text)
        if not found:
            raise InputError("the prompt is empty; give at least one token")
        return torch.tensor(found, dtype=torch.long)

    def _tokenize(self, text: str, **options: Any) -> list[int]:
        try:
            return list(self.tokenizer(text, **options)["input_ids"])
        except (TypeError, UnicodeError):
            raise InputError("the text holds half of a surrogate pair, which is no character") from None

    def chat_ids(self, messages: Sequence[Turn]) -> torch.Tensor:
        """Token ids of a conversation in the model's own form.

        Raises:
            InputError: the model has no chat template, or it refuses these messages.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            raise InputError(f"{self.name} has no chat template; use /v1/completions")
        turns = [
            {"role": "system" if message.role == "developer" else message.role, "content": message.text()}
            for message in messages
        ]
        try:
            text = self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # templates are programs of the model's makers
            raise InputError(f"the model's chat template refuses these messages: {error}") from None
        return torch.tensor(self._tokenize(text, add_special_tokens=False), dtype=torch.long)

    def answer(self, body: _Body, ids: torch.Tensor, wanted: int | None) -> Answer:
        """Start an answer; nothing runs before its first piece is asked for.

        Raises:
            InputError: the request asks for what cannot be given.
        """
        if body.model != self.name:
            raise HTTPException(404, f"the model {body.model!r} is not served here; {self.name!r} is")
        for field in NOT_OFFERED:
            if (body.model_extra or {}).get(field):
                raise InputError(f"{field} is not offered")
        stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
        if len(stops) > MAX_STOPS or any(not 0 < len(stop) <= MAX_STOP_LENGTH for stop in stops):
            raise InputError(f"stop takes up to {MAX_STOPS} texts of 1 to {MAX_STOP_LENGTH} characters")
        if int(ids.max()) >= self.cascade.facts.vocabulary:
            raise InputError(
                f"a token id is outside of the vocabulary, 0 to {self.cascade.facts.vocabulary - 1}"
            )
        context = min(self.limits.tokens, self.cascade.facts.context or self.limits.tokens)
        if len(ids) >= context:
            raise InputError(
                f"the prompt has {len(ids)} tokens; prompt and answer may have {context} together"
            )
        new = min(wanted or context, context - len(ids))
        seed = body.seed if body.seed is not None else int.from_bytes(uuid.uuid4().bytes[:4], "big")
        sampling = Sampling(body.temperature, body.top_k, body.top_p, seed)
        found = Answer(iter(()), len(ids))
        found.pieces = self._pieces(found, ids, new, sampling, stops)
        return found

    def _pieces(
        self, answer: Answer, ids: torch.Tensor, new: int, sampling: Sampling, stops: Sequence[str]
    ) -> Iterator[str]:
        ends = {self.tokenizer.eos_token_id} - {None}
        found: list[int] = []
        given = ""
        longest = max((len(stop) for stop in stops), default=0)
        tokens = generate(
            self.cascade, ids, self.plan(len(ids)), new_tokens=new, sampling=sampling, stop=ends
        )
        try:
            for token in tokens:
                found.append(token)
                answer.tokens = len(found)
                if token in ends:
                    answer.finish = "stop"
                    break
                text = self.tokenizer.decode(found, skip_special_tokens=True)
                cut = min((at for stop in stops if (at := text.find(stop)) >= 0), default=-1)
                if cut >= 0:
                    answer.finish = "stop"
                    if cut > len(given):
                        yield text[len(given) : cut]
                    return
                # The end may be part of a character, or the beginning of a stop text.
                safe = len(text.rstrip("\ufffd")) - max(0, longest - 1)
                if safe > len(given):
                    yield text[len(given) : safe]
                    given = text[:safe]
            text = self.tokenizer.decode(found, skip_special_tokens=True)
            if len(text) > len(given):
                yield text[len(given) :]
        finally:
            tokens.close()  # type: ignore[attr-defined]

    async def slot(self) -> Callable[[], None]:
        """A place among the running requests, and how to give it back.

        Raises:
            HTTPException: all are taken.
        """
        if self._slots.locked():
            raise HTTPException(429, f"{self.limits.running} requests are running; try again later")
        await self._slots.acquire()
        self.running.inc()
        started = time.perf_counter()
        given = False

        def release() -> None:
            nonlocal given
            if not given:
                given = True
                self._slots.release()
                self.running.dec()
                self.seconds.observe(time.perf_counter() - started)

        return release


def digest(key: str) -> str:
    """What a server keeps of its key."""
    return hashlib.sha256(key.encode()).hexdigest()


def make_app(service: Service) -> FastAPI:
    """The HTTP interface of a service."""
    app = FastAPI(title="hiddenlab cascade", docs_url=None, redoc_url=None)
    app.add_middleware(_Guard, service=service)

    @app.exception_handler(InputError)
    async def wrong_input(request: Request, error: InputError) -> Response:
        return _problem(400, str(error))

    @app.exception_handler(NodeError)
    async def lost_node(request: Request, error: NodeError) -> Response:
        return _problem(503, str(error), kind="server_error")

    @app.exception_handler(RequestValidationError)
    async def wrong_body(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        return _problem(400, f"{where}: {first['msg']}" if where else str(first["msg"]), param=where or None)

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        return _problem(error.status_code, str(error.detail))

    @app.get("/health")
    async def health() -> Response:
        nodes = await run_in_threadpool(service.cascade.healthy)
        well = all(state == "ok" for state in nodes.values())
        return JSONResponse({"status": "ok" if well else "degraded", "nodes": nodes}, 200 if well else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(
            prometheus.generate_latest(service.registry), media_type=prometheus.CONTENT_TYPE_LATEST
        )

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        entry = {"id": service.name, "object": "model", "created": service.created, "owned_by": "hiddenlab"}
        return {"object": "list", "data": [entry]}

    @app.post("/v1/completions")
    async def completions(body: CompletionBody) -> Response:
        ids = await run_in_threadpool(service.ids, body.prompt)
        answer = service.answer(body, ids, body.max_tokens or 16)
        return await _respond(service, body, answer, "text_completion")

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody) -> Response:
        ids = await run_in_threadpool(service.chat_ids, body.messages)
        answer = service.answer(body, ids, body.max_completion_tokens or body.max_tokens)
        return await _respond(service, body, answer, "chat.completion")

    return app


class _Guard:
    """Refuses who may not ask or asks too much, before anything reads the request, and counts every answer."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        # Each path that is counted is kept for ever: strangers' paths share one entry.
        path, status = scope["path"] if scope["path"] in PATHS else "other", 500
        body: list[Message] = []

        async def again() -> Message:
            return body.pop() if body else await receive()

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            refused, content = await self._read(Request(scope, receive))
            body.append({"type": "http.request", "body": content, "more_body": False})
            await (refused or self.app)(scope, again, noted)
        except ClientDisconnect:
            status = 499  # as nginx calls it: the client went away
        finally:
            self.service.requests.labels(path, str(status)).inc()

    async def _read(self, request: Request) -> tuple[Response | None, bytes]:
        """An answer to who is refused, and the request's body."""
        service = self.service
        if service.key is not None and request.url.path.startswith("/v1/"):
            scheme, _, shown = request.headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(digest(shown), service.key):
                return _problem(401, "this server wants its API key as 'Authorization: Bearer …'"), b""
        # Counted as it comes: a length that is announced need not be true.
        content = bytearray()
        async for chunk in request.stream():
            content += chunk
            if len(content) > service.limits.body:
                return _problem(413, f"the request is larger than {service.limits.body} bytes"), b""
        return None, bytes(content)


class _Stream(StreamingResponse):
    """A streamed answer that is given up where its client went away, even before its first event."""

    def __init__(self, events: AsyncIterator[str], end: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self.end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            with anyio.CancelScope(shield=True):
                await run_in_threadpool(self.end)


async def _respond(service: Service, body: _Body, answer: Answer, kind: str) -> Response:
    release = await service.slot()

    def end() -> None:
        # The nodes forget the request; a piece that is being made has been waited for.
        answer.pieces.close()  # type: ignore[attr-defined]
        release()
        service.tokens.labels("prompt").inc(answer.prompt_tokens)
        service.tokens.labels("completion").inc(answer.tokens)

    about = {
        "id": f"{'chatcmpl' if kind.startswith('chat') else 'cmpl'}-{uuid.uuid4().hex[:24]}",
        "created": int(time.time()),
        "model": service.name,
    }
    if body.stream:
        usage = bool((body.stream_options or {}).get("include_usage"))
        return _Stream(_events(answer, about, kind, usage), end)
    try:
        text = await run_in_threadpool(lambda: "".join(answer.pieces))
    finally:
        end()
    choice: dict[str, Any] = {"index": 0, "finish_reason": answer.finish, "logprobs": None}
    if kind == "chat.completion":
        choice["message"] = {"role": "assistant", "content": text}
    else:
        choice["text"] = text
    return JSONResponse(about | {"object": kind, "choices": [choice], "usage": _usage(answer)})


async def _events(answer: Answer, about: dict[str, Any], kind: str, usage: bool) -> AsyncIterator[str]:
    """Server-sent events of a streamed answer."""
    chat = kind == "chat.completion"
    about = about | {"object": "chat.completion.chunk" if chat else kind}

    def event(text: str | None, finish: str | None = None, role: bool = False) -> str:
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish, "logprobs": None}
        if chat:
            choice["delta"] = ({"role": "assistant"} if role else {}) | (
                {} if text is None else {"content": text}
            )
        else:
            choice["text"] = text or ""
        return _event(about | {"choices": [choice]})

    try:
        if chat:
            yield event("", role=True)
        async for piece in iterate_in_threadpool(answer.pieces):
            yield event(piece)
        yield event(None, answer.finish)
        if usage:
            yield _event(about | {"choices": [], "usage": _usage(answer)})
        yield "data: [DONE]\n\n"
    except (InputError, NodeError) as error:
        yield _event(json.loads(bytes(_problem(503, str(error), kind="server_error").body)))


def _event(data: Any) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


def _usage(answer: Answer) -> dict[str, int]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.tokens,
        "total_tokens": answer.prompt_tokens + answer.tokens,
    }


def _problem(
    status: int, message: str, *, kind: str = "invalid_request_error", param: str | None = None
) -> JSONResponse:
    """An error as OpenAI's clients read it."""
    message = message.encode("utf-8", "replace").decode()  # it may quote what is no text
    return JSONResponse(
        {"error": {"message": message, "type": kind, "param": param, "code": None}}, status_code=status
    )
