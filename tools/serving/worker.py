"""The one thread that loads the model and runs it, and the queue before it."""

import threading
import traceback
from collections import deque
from collections.abc import Callable

import click

from moepack.runtime.loading import Engine
from moepack.tools.serving.errors import ApiError
from moepack.tools.serving.generation import Event, Generation, Job

__all__ = ["Worker"]


class Worker:
    """First come, first served, one at a time: so an answer is the one that it is alone.

    `load` gives the engine and what runs jobs on it. `max_queue` jobs may wait; `on_failure` is
    called from the thread when loading failed, with `failure` set.
    """

    def __init__(
        self,
        load: Callable[[], tuple[Engine, Generation]],
        max_queue: int,
        on_failure: Callable[[], object],
    ) -> None:
        self._load = load
        self._max_queue = max_queue
        self._on_failure = on_failure
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="moepack-generate", daemon=True)
        self.engine: Engine | None = None
        self.generation: Generation | None = None
        self.failure: BaseException | None = None

    def start(self) -> None:
        """Begin to load."""
        self._thread.start()

    @property
    def n_waiting(self) -> int:
        """Jobs that wait for their turn."""
        return len(self._waiting)

    @property
    def n_running(self) -> int:
        """1 while a job runs."""
        return int(self._running is not None)

    def ready_engine(self) -> Engine:
        """The loaded engine. Raises ApiError before that, and once closed."""
        if self._is_closed:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        if self.engine is None:
            raise ApiError(503, "the model is being loaded", code="loading")
        return self.engine

    def submit(self, job: Job) -> None:
        """Put a job in the queue. Raises ApiError when it is full, or the model is not there."""
        with self._changed:
            self.ready_engine()
            n_free = self._max_queue + 1 - self.n_running
            if len(self._waiting) >= n_free:
                raise ApiError(429, "too many requests wait already; try again later", code="queue")
            self._waiting.append(job)
            self._changed.notify_all()

    def cancel(self, job: Job) -> None:
        """Nobody waits for this job any more: it leaves the queue, or stops at its next layer."""
        job.is_cancelled.set()
        with self._changed:
            if job in self._waiting:
                self._waiting.remove(job)

    def close(self) -> None:
        """Take no more jobs, and end those that there are with an error."""
        with self._changed:
            self._is_closed = True
            jobs = [*self._waiting, *([self._running] if self._running else [])]
            self._waiting.clear()
            self._changed.notify_all()
        for job in jobs:
            job.is_cancelled.set()
            job.emit(ApiError(503, "the server is shutting down", code="shutting_down"))

    def join(self, timeout: float) -> bool:
        """Wait `timeout` seconds for the thread; whether it has ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            engine, generation = self._load()
        except BaseException as error:
            self.failure = error
            self._on_failure()
            return
        self.engine, self.generation = engine, generation
        while (job := self._next()) is not None:
            end: Event | None
            try:
                end = generation.run(job)
            except Exception as error:
                click.echo(traceback.format_exc(), err=True, nl=False)
                kind = type(error).__name__
                end = ApiError(500, f"the model failed ({kind}); the server's log says how")
            self._running = None  # before its owner, who may ask again at once, is told
            if end is not None:
                job.emit(end)

    def _next(self) -> Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._waiting)
            if self._is_closed:
                return None
            self._running = self._waiting.popleft()
            return self._running
