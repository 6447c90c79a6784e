"""The routes of the server, as an ASGI application."""

import asyncio
import hmac
import json
import secrets
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moepack.tools.answering import Sampling
from moepack.tools.serving.bodies import ChatBody, CompletionBody, SamplingBody, parse_body
from moepack.tools.serving.errors import ApiError, invalid
from moepack.tools.serving.generation import Event, Finished, Job
from moepack.tools.serving.metrics import Metrics
from moepack.tools.serving.parsing import ChatParser, Delta, Parser
from moepack.tools.serving.prompts import chat_tokens, completion_tokens
from moepack.tools.serving.replies import Reply
from moepack.tools.serving.worker import Worker

__all__ = ["Service", "events", "make_app"]

POLL_S = 0.5  # how often a client is looked after
KEEP_ALIVE_S = 5.0  # without text, between comments in a stream


class ClientGone(Exception):
    """The client has hung up."""


@dataclass(slots=True)
class Service:
    """What the routes share. `max_body` is in bytes, `context` in tokens of prompt and answer."""

    worker: Worker
    tokenizer: TokenizerWrapper
    model: str
    context: int
    max_body: int
    key: str | None
    created: int = field(default_factory=lambda: int(time.time()))
    tokenizing: threading.Lock = field(default_factory=threading.Lock)

    def as_model(self) -> dict[str, Any]:
        """The one model, as /v1/models lists it."""
        return {
            "id": self.model,
            "object": "model",
            "created": self.created,
            "owned_by": "moepack",
            "max_model_len": self.context,
        }

    def check_model(self, name: str | None) -> None:
        """Raises ApiError for the name of another model."""
        if name is not None and name != self.model:
            text = f"no model {name!r} here; this server has {self.model!r}"
            raise ApiError(404, text, param="model", code="model_not_found")


@dataclass(slots=True)
class Asked:
    """A request on its way: its job is in the queue, whose events come in `queue`."""

    job: Job
    queue: "asyncio.Queue[Event]"
    reply: Reply
    parser: Parser


def make_app(service: Service) -> ASGIApp:
    """The application."""
    metrics = Metrics(service.worker)

    async def health(request: Request) -> Response:
        try:
            service.worker.ready_engine()
        except ApiError as error:
            return JSONResponse({"status": error.code}, 503)
        return JSONResponse({"status": "ok"})

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [service.as_model()]})

    async def model(request: Request) -> Response:
        service.check_model(request.path_params["name"])
        return JSONResponse(service.as_model())

    async def show_metrics(request: Request) -> Response:
        return Response(metrics.page(), media_type=CONTENT_TYPE_LATEST)

    async def chat(request: Request) -> Response:
        return await _answer(service, request, ChatBody)

    async def complete(request: Request) -> Response:
        return await _answer(service, request, CompletionBody)

    routes = [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", complete, methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/health", health),
        Route("/metrics", show_metrics),
    ]
    handlers: dict[Any, Callable[[Request, Any], Awaitable[Response]]] = {
        ApiError: _show_api_error,
        HTTPException: _show_http_error,
        ClientDisconnect: _show_nothing,
        ClientGone: _show_nothing,
        Exception: _show_failure,
    }
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    paths = {route.path.split("{")[0].rstrip("/") for route in routes}
    return _counted(_guarded(app, service.key), metrics, paths)


async def events(
    queue: "asyncio.Queue[Event]",
    is_gone: Callable[[], Awaitable[bool]],
    keep_alive_s: float = KEEP_ALIVE_S,
) -> AsyncGenerator[Event | None]:
    """What a job emits, to the last; None when nothing came for `keep_alive_s` seconds.

    Raises ClientGone within moments of the client's leaving.
    """
    looked = heard = time.monotonic()
    while True:
        try:
            event = await asyncio.wait_for(queue.get(), min(POLL_S, keep_alive_s))
        except TimeoutError:
            event = None
        now = time.monotonic()
        if now - looked >= POLL_S:
            looked = now
            if await is_gone():
                raise ClientGone
        if event is None and now - heard < keep_alive_s:
            continue
        heard = now
        yield event
        if isinstance(event, Finished | ApiError):
            return


async def _answer(
    service: Service, request: Request, kind: type[ChatBody] | type[CompletionBody]
) -> Response:
    service.worker.ready_engine()
    data = await _read_body(request, service.max_body)
    body = parse_body(data, kind)
    service.check_model(body.model)
    asked = await _ask(service, body)
    try:
        if body.stream:
            headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
            stream = _stream(service, request, asked)
            return _Stream(service, asked, stream, headers)
        return JSONResponse(await _wait(request, asked))
    except BaseException:
        service.worker.cancel(asked.job)
        raise


class _Stream(StreamingResponse):
    """A stream of events whose job is cancelled however the response ends."""

    def __init__(
        self,
        service: Service,
        asked: Asked,
        content: AsyncIterator[str],
        headers: dict[str, str],
    ) -> None:
        super().__init__(content, headers=headers, media_type="text/event-stream")
        self._service = service
        self._job = asked.job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See StreamingResponse."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._service.worker.cancel(self._job)


async def _ask(service: Service, body: SamplingBody) -> Asked:
    """Put a request in the queue. Raises ApiError."""
    tokens = await run_in_threadpool(_tokens, service, body)
    n_left = service.context - len(tokens)
    if n_left < 1:
        raise invalid(
            f"the prompt has {len(tokens):,} tokens; with an answer, {service.context:,} fit",
            "messages" if isinstance(body, ChatBody) else "prompt",
            "context_length_exceeded",
        )
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[Event]()

    def emit(event: Event) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(queue.put_nowait, event)

    sampling = Sampling(
        max_tokens=min(body.token_limit or n_left, n_left),
        temp=body.temperature,
        top_p=body.top_p,
        top_k=max(0, body.top_k),
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
    )
    job = Job(tokens, sampling, body.seed, body.stops, emit)
    parser = Parser()
    if isinstance(body, ChatBody):
        parser = ChatParser(service.tokenizer, tokens, body.tools, body.stream)
    reply = Reply(
        id=f"{'chatcmpl' if isinstance(body, ChatBody) else 'cmpl'}-{secrets.token_hex(12)}",
        is_chat=isinstance(body, ChatBody),
        model=service.model,
        created=int(time.time()),
        n_prompt=len(tokens),
        includes_usage=body.stream and body.includes_usage,
    )
    service.worker.submit(job)
    return Asked(job, queue, reply, parser)


def _tokens(service: Service, body: SamplingBody) -> list[int]:
    with service.tokenizing:
        if isinstance(body, ChatBody):
            return chat_tokens(service.tokenizer, body)
        assert isinstance(body, CompletionBody)
        vocabulary = service.worker.ready_engine().vocabulary
        return completion_tokens(service.tokenizer, body, vocabulary)


async def _wait(request: Request, asked: Asked) -> dict[str, Any]:
    """The whole answer. Raises ApiError, ClientGone."""
    deltas: list[Delta] = []
    async for event in events(asked.queue, request.is_disconnected):
        if isinstance(event, str):
            deltas += asked.parser.feed(event)
        elif isinstance(event, ApiError):
            raise event
        elif event is not None:
            held, reason = asked.parser.end(event.reason)
            return asked.reply.whole([*deltas, *held], event, reason)
    raise AssertionError("events end with the answer")


async def _stream(service: Service, request: Request, asked: Asked) -> AsyncIterator[str]:
    """The answer as server-sent events, to `[DONE]`; an error on the way is one of them."""
    reply, parser = asked.reply, asked.parser
    if reply.is_chat:
        yield _data(reply.chunk({"role": "assistant", "content": ""}))
    async with aclosing(events(asked.queue, request.is_disconnected)) as coming:
        try:
            async for event in coming:
                if event is None:
                    yield ": keep-alive\n\n"
                elif isinstance(event, str):
                    for delta in parser.feed(event):
                        yield _data(reply.chunk(delta))
                elif isinstance(event, ApiError):
                    yield _data(event.as_map())
                else:
                    held, reason = parser.end(event.reason)
                    for delta in held:
                        yield _data(reply.chunk(delta))
                    for chunk in reply.last_chunks(event, reason):
                        yield _data(chunk)
        except ClientGone:
            return
    yield "data: [DONE]\n\n"


def _data(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"


async def _read_body(request: Request, limit: int) -> bytes:
    """Raises ApiError as soon as it is known to be longer than `limit` bytes."""
    error = ApiError(413, f"the body is longer than {limit:,} bytes", code="body_too_large")
    stated = request.headers.get("content-length", "")
    if stated.isdecimal() and int(stated) > limit:
        raise error
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > limit:
            raise error
    return bytes(data)


def _guarded(app: ASGIApp, key: str | None) -> ASGIApp:
    """With a key, all but /health needs it: `Authorization: Bearer KEY`."""
    if key is None:
        return app
    wanted = f"Bearer {key}".encode()

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, wanted):
                error = ApiError(401, "a wrong API key, or none", code="invalid_api_key")
                response = JSONResponse(error.as_map(), 401, {"www-authenticate": "Bearer"})
                await response(scope, receive, send)
                return
        await app(scope, receive, send)

    return guarded


def _counted(app: ASGIApp, metrics: Metrics, paths: set[str]) -> ASGIApp:
    """Count what is answered, by path and status; paths that are not there are one."""

    async def counted(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        path = scope["path"]
        known = next((p for p in sorted(paths, key=len)[::-1] if _begins(path, p)), "other")

        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                metrics.requests.labels(known, str(message["status"])).inc()
            await send(message)

        await app(scope, receive, send_counted)

    return counted


def _begins(path: str, known: str) -> bool:
    return path == known or (known == "/v1/models" and path.startswith("/v1/models/"))


async def _show_api_error(request: Request, error: ApiError) -> Response:
    headers = {413: {"connection": "close"}, 429: {"retry-after": "1"}, 503: {"retry-after": "5"}}
    return JSONResponse(error.as_map(), error.status, headers.get(error.status))


async def _show_http_error(request: Request, error: HTTPException) -> Response:
    """Of the router: no such path, or not with this method."""
    text = f"{request.method} {request.url.path}: {error.detail}"
    return JSONResponse(ApiError(error.status_code, text).as_map(), error.status_code)


async def _show_nothing(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody is there to read it


async def _show_failure(request: Request, error: Exception) -> Response:
    text = f"unexpected {type(error).__name__}; the server's log says where"
    return JSONResponse(ApiError(500, text).as_map(), 500)
