"""Serve a Cascade over an OpenAI-compatible HTTP interface: completions, chat, streaming, health and metrics."""

import asyncio
import hashlib
import hmac
import json
import threading
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

import anyio
import prometheus_client as prometheus
from anyio.lowlevel import checkpoint_if_cancelled
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hiddenlab.defenses.cascade.bodies import Body, ChatBody, CompletionBody, RequestError, parse
from hiddenlab.defenses.cascade.node_state import NodeError
from hiddenlab.defenses.cascade.service import Answer, Pieces, Service
from hiddenlab.errors import HiddenlabError, InputError

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics")
GONE = 499  # as nginx calls it: the client went away


def digest(key: str) -> str:
    """Return the SHA-256 digest of a key; a server keeps only this."""
    return hashlib.sha256(key.encode()).hexdigest()


def make_app(service: Service) -> FastAPI:
    """Make the HTTP interface of a service."""
    app = FastAPI(title="hiddenlab cascade", docs_url=None, redoc_url=None)
    app.add_middleware(_Guard, service=service)

    @app.exception_handler(InputError)
    async def wrong_input(request: Request, error: InputError) -> Response:
        return _problem(400, str(error))

    @app.exception_handler(NodeError)
    async def lost_node(request: Request, error: NodeError) -> Response:
        return _problem(503, str(error), kind="server_error")

    @app.exception_handler(RequestError)
    async def wrong_body(request: Request, error: RequestError) -> Response:
        return _problem(400, str(error), param=error.field)

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        return _problem(error.status_code, str(error.detail), headers=error.headers)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return _problem(500, _failed(error), kind="server_error")

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
    async def completions(request: Request) -> Response:
        body = parse(CompletionBody, await _json(request))
        service.check(body)
        ids = await run_in_threadpool(service.ids, body.prompt)
        return _Reply(service, body, service.answer(body, ids), "text_completion")

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = parse(ChatBody, await _json(request))
        service.check(body)
        ids = await run_in_threadpool(service.chat_ids, body.messages)
        return _Reply(service, body, service.answer(body, ids), "chat.completion")

    return app


async def _json(request: Request) -> bytes:
    """Return the body of a request if its header says JSON; other sites' pages cannot send that header unasked."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(415, "send the request as JSON, with the header 'Content-Type: application/json'")
    return await request.body()


class _Guard:
    """A check that refuses unauthorized or too large requests before they are parsed, and counts every answer.

    When a client disconnects, the work for it ends, whether it waits for a thread or computes.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        # Counted paths are kept for ever, so unknown paths share one entry.
        path, status, finished = scope["path"] if scope["path"] in PATHS else "other", 500, False
        body: list[Message] = []

        async def again() -> Message:
            if not body:
                await anyio.sleep_forever()  # this class receives the client's further messages
            return body.pop()

        async def noted(message: Message) -> None:
            nonlocal status, finished
            if message["type"] == "http.response.start":
                status = message["status"]
            finished = message["type"] == "http.response.body" and not message.get("more_body", False)
            try:
                await send(message)
            except OSError:  # the client is gone
                raise ClientDisconnect from None

        async def listen() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            if not finished:
                present.cancel()

        try:
            refused, content = await self._read(Request(scope, receive))
            body.append({"type": "http.request", "body": content, "more_body": False})
            with anyio.CancelScope() as present:
                listener = asyncio.create_task(listen())
                try:
                    await (refused or self.app)(scope, again, noted)
                finally:
                    listener.cancel()
            if present.cancelled_caught:
                status = GONE
        except ClientDisconnect:
            status = GONE
        except asyncio.CancelledError:
            status = GONE
            raise
        finally:
            self.service.requests.labels(path, str(status)).inc()

    async def _read(self, request: Request) -> tuple[Response | None, bytes]:
        """Read a request's body; return a refusal or None, and the body."""
        service = self.service
        if service.key is not None and request.url.path.startswith("/v1/"):
            scheme, _, shown = request.headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(digest(shown), service.key):
                return _problem(401, "this server wants its API key as 'Authorization: Bearer …'"), b""
        # Counted while it arrives, because the announced length may be wrong.
        content = bytearray()
        async for chunk in request.stream():
            content += chunk
            if len(content) > service.limits.body:
                return _problem(413, f"the request is larger than {service.limits.body} bytes"), b""
        return None, bytes(content)


class _Reply(Response):
    """An answer, streamed or whole; whatever ends the reply early also ends the answer."""

    def __init__(self, service: Service, body: Body, answer: Answer, kind: str) -> None:
        self.service, self.body_, self.answer, self.kind = service, body, answer, kind
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer, kind = self.answer, self.kind
        await checkpoint_if_cancelled()  # the client may have left while its prompt was read
        queue = self.service.begin(answer)
        about = {
            "id": f"{'chatcmpl' if kind.startswith('chat') else 'cmpl'}-{uuid.uuid4().hex[:24]}",
            "created": int(time.time()),
            "model": self.service.name,
        }
        try:
            if self.body_.stream:
                options = self.body_.stream_options
                events = _events(answer, queue, about, kind, options is not None and options.include_usage)
                await StreamingResponse(events, media_type="text/event-stream")(scope, receive, send)
                return
            text = "".join([piece async for piece in _pieces(queue)])
            choice: dict[str, Any] = {"index": 0, "finish_reason": answer.finish, "logprobs": None}
            if kind == "chat.completion":
                choice["message"] = {"role": "assistant", "content": text}
            else:
                choice["text"] = text
            whole = about | {"object": kind, "choices": [choice], "usage": _usage(answer)}
            await JSONResponse(whole)(scope, receive, send)
        finally:
            if not answer.ended:
                # It may take a moment to tell every node.
                threading.Thread(target=answer.cancellation.cancel, daemon=True).start()


async def _pieces(queue: Pieces) -> AsyncIterator[str]:
    while (piece := await queue.get()) is not None:
        if isinstance(piece, BaseException):
            raise piece
        yield piece


async def _events(
    answer: Answer,
    queue: Pieces,
    about: dict[str, Any],
    kind: str,
    usage: bool,
) -> AsyncIterator[str]:
    """Yield the server-sent events of a streamed answer."""
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
        async for piece in _pieces(queue):
            yield event(piece)
        yield event(None, answer.finish)
        if usage:
            yield _event(about | {"choices": [], "usage": _usage(answer)})
        yield "data: [DONE]\n\n"
    except Exception as error:  # the answer has begun, so the client gets any error within the stream
        text = str(error) if isinstance(error, HiddenlabError) else _failed(error)
        yield _event(json.loads(bytes(_problem(503, text, kind="server_error").body)))


def _failed(error: Exception) -> str:
    """Return what a client is told of a server fault: the kind of error, and nothing about its content."""
    return f"the server failed: {type(error).__name__}"


def _event(data: Any) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


def _usage(answer: Answer) -> dict[str, int]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.tokens,
        "total_tokens": answer.prompt_tokens + answer.tokens,
    }


def _line(text: str) -> str:
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


def _problem(
    status: int,
    message: str,
    *,
    kind: str = "invalid_request_error",
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """Return an error in the form that OpenAI's clients read, on one line."""
    return JSONResponse(
        {"error": {"message": _line(message), "type": kind, "param": param and _line(param), "code": None}},
        status_code=status,
        headers=headers and dict(headers),
    )
