"""What the live page is told, a few times a second: server-sent events.

`model` describes the model when it is loaded, `tick` what happened since the last: bytes of base64
hold how often each expert was used (255 at most) and, a bit each, which are in memory now. Counts
are of all models since the start, memory is in bytes, time in seconds.
"""

import asyncio
import json
import time
from base64 import b64encode
from collections.abc import AsyncGenerator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from moepack.runtime.machine import resident_memory
from moepack.tools.serving.answers import STREAM_HEADERS
from moepack.tools.serving.errors import ApiError
from moepack.tools.serving.loaded import Counts, Loaded
from moepack.tools.serving.usage import Watch
from moepack.tools.serving.worker import Worker

__all__ = ["MAX_PAGES", "LiveResponse", "live_events"]

Array = np.ndarray[Any, np.dtype[Any]]
NOTHING = np.empty(0, np.uint64)
TICK_S = 0.25
QUIET_TICKS = 8  # so many go untold while nothing happens
MAX_PAGES = 16


class LiveResponse(StreamingResponse):
    """Events for one page, which counts from now until the response ends.

    Raises ApiError for one page too many.
    """

    def __init__(self, worker: Worker, watch: Watch) -> None:
        if watch.n_pages >= MAX_PAGES:
            raise ApiError(429, f"{MAX_PAGES} pages look on already", code="pages")
        watch.n_pages += 1
        self._watch = watch
        super().__init__(
            live_events(worker), headers=STREAM_HEADERS, media_type="text/event-stream"
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See StreamingResponse."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._watch.n_pages -= 1


async def live_events(worker: Worker) -> AsyncGenerator[str]:
    """Events for one page, until the server is closed."""
    view = _View(worker)
    n_quiet = 0
    while not worker.is_closed:
        events, is_news = view.look()
        n_quiet = 0 if is_news else n_quiet + 1
        if n_quiet % QUIET_TICKS == 0:
            yield "".join(f"event: {n}\ndata: {json.dumps(d)}\n\n" for n, d in events)
        await asyncio.sleep(TICK_S)


@dataclass(frozen=True, slots=True)
class _Seen:
    """A copy of what a page shows. `number` is that of the loaded model, None without one.

    `activity`: requests running, requests waiting, the model that is being loaded.
    """

    number: int | None
    counts: Counts
    activity: tuple[int, int, str | None]
    uses: Array
    residents: Array


class _View:
    """What one page knows, so that it is told only what is new."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._seen: _Seen | None = None

    def look(self) -> tuple[list[tuple[str, dict[str, Any]]], bool]:
        """(events, whether they say anything new)."""
        before, now, model = self._seen, *self._worker.view(self._copy)
        self._seen = now
        events = []
        uses, has_moved, is_news = now.uses, True, True
        if before is None or now.number != before.number:
            events.append(("model", model))
        else:
            uses = now.uses - before.uses
            has_moved = not np.array_equal(now.residents, before.residents)
            is_news = (now.counts, now.activity) != (before.counts, before.activity)
        has_uses = bool(uses.any())
        n_running, n_waiting, loading = now.activity
        tick = {
            "time": time.monotonic(),
            "memory": resident_memory(),
            **asdict(now.counts),
            "running": n_running,
            "waiting": n_waiting,
            "loading": loading,
            "uses": _base64(np.minimum(uses, 255).astype(np.uint8)) if has_uses else None,
            "residents": _base64(np.packbits(now.residents)) if has_moved else None,
        }
        events.append(("tick", tick))
        return events, is_news or has_uses or has_moved

    def _copy(self, loaded: Loaded | None, counts: Counts) -> tuple[_Seen, dict[str, Any]]:
        """What is to be seen, and the model described if it is another than before."""
        worker = self._worker
        activity = (worker.n_running, worker.n_waiting, worker.loading)
        if loaded is None:
            return _Seen(None, counts, activity, NOTHING, NOTHING), {"model": None}
        uses = np.frombuffer(loaded.usage.counts, np.uint64).copy()
        seen = _Seen(loaded.number, counts, activity, uses, loaded.residents())
        is_known = self._seen is not None and self._seen.number == loaded.number
        return seen, {} if is_known else _description(loaded)


def _description(loaded: Loaded) -> dict[str, Any]:
    plan, modules = loaded.engine.plan, loaded.engine.pack.manifest.modules
    return {
        "model": loaded.name,
        "chat": loaded.has_chat_template,
        "plan": plan.as_map(),
        "modules": [
            {"path": module.path, "experts": module.n_experts, "slots": n_slots}
            for module, n_slots in zip(modules, plan.slots_per_layer, strict=True)
        ],
    }


def _base64(array: Array) -> str:
    return b64encode(array.tobytes()).decode()
