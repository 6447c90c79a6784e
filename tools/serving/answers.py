"""From a request for text to its answer, whole or as a stream of events."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from anyio import CapacityLimiter, to_thread
from mlx_lm.tokenizer_utils import TokenizerWrapper
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from moepack.tools.answering import Sampling
from moepack.tools.serving.bodies import ChatBody, CompletionBody, parse_body
from moepack.tools.serving.catalog import Catalog
from moepack.tools.serving.errors import ApiError, too_long
from moepack.tools.serving.generation import Event, Finished, Job
from moepack.tools.serving.parsing import ChatParser, Delta, Parser
from moepack.tools.serving.prompts import chat_tokens, completion_tokens
from moepack.tools.serving.reading import BodyReader, unless_closed
from moepack.tools.serving.replies import Reply
from moepack.tools.serving.worker import Worker

__all__ = ["STREAM_HEADERS", "ClientGone", "Service", "answer", "events"]

POLL_S = 0.25  # how often a client is looked after
KEEP_ALIVE_S = 5.0  # without text, between comments in a stream
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class ClientGone(Exception):
    """The client has hung up."""


@dataclass(frozen=True, slots=True)
class Service:
    """What the routes share. `preparing`: how many requests are made ready at once."""

    worker: Worker
    catalog: Catalog
    reader: BodyReader
    preparing: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(1))


@dataclass(slots=True)
class Asked:
    """A request on its way: its job is in the queue, whose events come in `queue`."""

    job: Job
    queue: "asyncio.Queue[Event]"
    reply: Reply
    parser: Parser
    is_stream: bool


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


async def answer(
    service: Service, request: Request, kind: type[ChatBody] | type[CompletionBody]
) -> Response:
    """The response to a request for text. Raises ApiError, ClientGone."""
    service.worker.check_ready()
    asked = await unless_closed(service.worker, _ask(service, request, kind))
    try:
        if asked.is_stream:
            return _Stream(service, asked, _stream(request, asked))
        return JSONResponse(await _wait(request, asked))
    except BaseException:
        service.worker.cancel(asked.job)
        raise


class _Stream(StreamingResponse):
    """A stream of events whose job is cancelled however the response ends."""

    def __init__(self, service: Service, asked: Asked, content: AsyncIterator[str]) -> None:
        super().__init__(content, headers=STREAM_HEADERS, media_type="text/event-stream")
        self._service = service
        self._job = asked.job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See StreamingResponse."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._service.worker.cancel(self._job)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What is kept of a request: a body may be long, and wait long for its turn."""

    model: str
    tokens: list[int]
    parser: Parser
    sampling: Sampling
    seed: int | None
    stops: tuple[str, ...]
    is_stream: bool
    includes_usage: bool


def _prepare(
    catalog: Catalog, data: bytearray, kind: type[ChatBody] | type[CompletionBody]
) -> _Prepared:
    """A body made ready for the queue. Raises ApiError."""
    body = parse_body(data, kind)
    model = catalog.chosen(body.model)

    def tokenize(tokenizer: TokenizerWrapper, most: int | None) -> tuple[list[int], Parser]:
        if isinstance(body, ChatBody):
            tokens = chat_tokens(tokenizer, body, most)
            return tokens, ChatParser(tokenizer, tokens, body.usable_tools, body.stream)
        return completion_tokens(tokenizer, body, most), Parser()

    tokens, parser = catalog.with_tokenizer(model, tokenize)
    n_left = catalog.context - len(tokens)
    if n_left < 1:
        raise too_long(
            f"the prompt has {len(tokens):,} tokens; with an answer, {catalog.context:,} fit",
            "messages" if isinstance(body, ChatBody) else "prompt",
        )
    sampling = Sampling(
        max_tokens=body.token_limit or -1,
        temp=body.temperature,
        top_p=body.top_p,
        top_k=max(0, body.top_k),
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
    ).within(n_left)
    return _Prepared(
        model,
        tokens,
        parser,
        sampling,
        body.seed,
        body.stops,
        body.stream,
        body.stream and body.includes_usage,
    )


async def _ask(
    service: Service, request: Request, kind: type[ChatBody] | type[CompletionBody]
) -> Asked:
    """Put a request in the queue. Raises ApiError, ClientDisconnect."""
    async with service.reader.read(request) as data:
        with service.worker.place():
            ready = await to_thread.run_sync(
                _prepare,
                service.catalog,
                data,
                kind,
                abandon_on_cancel=True,  # the server ends
                limiter=service.preparing,
            )
            return _submit(service, ready, is_chat=kind is ChatBody)


def _submit(service: Service, ready: _Prepared, *, is_chat: bool) -> Asked:
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[Event]()

    def emit(event: Event) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(queue.put_nowait, event)

    job = Job(ready.model, ready.tokens, ready.sampling, ready.seed, ready.stops, emit)
    reply = Reply(
        id=f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}",
        is_chat=is_chat,
        model=ready.model,
        created=int(time.time()),
        n_prompt=len(ready.tokens),
        includes_usage=ready.includes_usage,
    )
    service.worker.submit(job)
    return Asked(job, queue, reply, ready.parser, ready.is_stream)


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


async def _stream(request: Request, asked: Asked) -> AsyncIterator[str]:
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
