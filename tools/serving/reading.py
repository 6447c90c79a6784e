"""The bodies of requests on their way in, within a bound of memory, and until the server ends."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from starlette.requests import Request

from moepack.tools.serving.errors import ApiError
from moepack.tools.serving.worker import Worker

__all__ = ["BodyReader", "unless_closed"]

T = TypeVar("T")
POLL_S = 0.1  # how often it is looked whether the server ends
BODIES = 4  # of the greatest length, that are held at once


class BodyReader:
    """Reads bodies of at most `limit` bytes; all that are held at once have BODIES times that."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._n_held = 0

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytearray]:
        """The body, held until the end of the block.

        Raises ApiError as soon as it is known to be too long, or one too many.
        """
        text = f"the body is longer than {self._limit:,} bytes"
        error = ApiError(413, text, code="body_too_large")
        stated = request.headers.get("content-length", "")
        if stated.isdecimal() and int(stated) > self._limit:
            raise error
        data, n_held = bytearray(), 0
        try:
            async for piece in request.stream():
                if len(data) + len(piece) > self._limit:
                    raise error
                if self._n_held + len(piece) > BODIES * self._limit:
                    raise ApiError(429, "too much is being sent; try again later", code="queue")
                self._n_held += len(piece)
                n_held += len(piece)
                data += piece
            yield data
        finally:
            self._n_held -= n_held


async def unless_closed(worker: Worker, work: Coroutine[Any, Any, T]) -> T:
    """What `work` gives. Raises what it raises, and ApiError as soon as the server ends."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait((task,), timeout=POLL_S))[0]:
            worker.check_ready()
        return task.result()
    finally:
        task.cancel()
