"""Serve a Cascade over an OpenAI-compatible HTTP interface: completions, chat, streaming, health and metrics."""

import asyncio
import hashlib
import hmac
import threading
from collections.abc import Sequence
from typing import Any

import anyio
import prometheus_client as prometheus
from anyio.lowlevel import checkpoint_if_cancelled
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hiddenlab.defenses.cascade.bodies import Body, ChatBody, CompletionBody, RequestError, parse
from hiddenlab.defenses.cascade.node_state import NodeError
from hiddenlab.defenses.cascade.replies import Form, failed, problem
from hiddenlab.defenses.cascade.service import Answer, Service
from hiddenlab.errors import InputError

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics")
GONE = 499  # as nginx calls it: the client went away


def digest(key: str) -> str:
    """Return the SHA-256 digest of a key; a server keeps only this."""
    return hashlib.sha256(key.encode()).hexdigest()


def make_app(service: Service, origins: Sequence[str] = ()) -> FastAPI:
    """Make the HTTP interface of a service.

    Args:
        origins: of web pages whose scripts may ask it, such as ``https://chat.example``; ``*`` for any.
    """
    app = FastAPI(title="hiddenlab cascade", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(_Guard, service=service)
    if origins:
        # Added last, it comes first: a browser asks for permission without a key, and reads refusals too.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["Retry-After"],
        )

    @app.exception_handler(InputError)
    async def wrong_input(request: Request, error: InputError) -> Response:
        return problem(400, str(error))

    @app.exception_handler(NodeError)
    async def lost_node(request: Request, error: NodeError) -> Response:
        return problem(503, str(error), kind="server_error")

    @app.exception_handler(RequestError)
    async def wrong_body(request: Request, error: RequestError) -> Response:
        return problem(400, str(error), param=error.field)

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        return problem(error.status_code, str(error.detail), headers=error.headers)

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        return problem(500, failed(error), kind="server_error")

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

    entry = {"id": service.name, "object": "model", "created": service.created, "owned_by": "hiddenlab"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [entry]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return entry

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answered(parse(CompletionBody, await _json(request)))

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await answered(parse(ChatBody, await _json(request)))

    async def answered(body: Body) -> Response:
        service.check(body)
        prompts = await run_in_threadpool(service.ids, body)
        return _Reply(service, body, service.answers(body, prompts))

    return app


async def _json(request: Request) -> bytes:
    """Return the body of a request if its header says JSON; other sites' pages cannot send that header unasked."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(415, "send the request as JSON, with the header 'Content-Type: application/json'")
    return await request.body()


def _counted(path: str) -> str:
    if path.startswith("/v1/models/"):
        return "/v1/models"
    return path if path in PATHS else "other"


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
        path, status, finished = _counted(scope["path"]), 500, False
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
        if service.keys and request.url.path.startswith("/v1/"):
            scheme, _, shown = request.headers.get("authorization", "").partition(" ")
            # Every key is compared, so that the time does not tell which one it is.
            fits = [hmac.compare_digest(digest(shown), key) for key in service.keys]
            if scheme.lower() != "bearer" or not any(fits):
                return problem(401, "this server wants its API key as 'Authorization: Bearer …'"), b""
        # Counted while it arrives, because the announced length may be wrong.
        content = bytearray()
        async for chunk in request.stream():
            content += chunk
            if len(content) > service.limits.body:
                return problem(413, f"the request is larger than {service.limits.body} bytes"), b""
        return None, bytes(content)


class _Reply(Response):
    """Answers, streamed or whole; whatever ends the reply early also ends the answers."""

    def __init__(self, service: Service, body: Body, answers: Sequence[Answer]) -> None:
        self.service, self.body_, self.answers = service, body, answers
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answers = self.answers
        await checkpoint_if_cancelled()  # the client may have left while its prompt was read
        queue = self.service.begin(answers)
        form = Form(self.body_, self.service.name, self.service.texts)
        try:
            if self.body_.stream:
                events = form.events(answers, queue)
                await StreamingResponse(events, media_type="text/event-stream")(scope, receive, send)
            else:
                await (await form.whole(answers, queue))(scope, receive, send)
        finally:
            for answer in answers:
                if not answer.ended:
                    # It may take a moment to tell every node.
                    threading.Thread(target=answer.cancellation.cancel, daemon=True).start()
