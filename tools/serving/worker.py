"""The one thread that loads models and runs them, and the queue before it."""

import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import click

from moepack.formats.errors import MoepackError
from moepack.runtime.machine import release_memory
from moepack.tools.serving.errors import ApiError, not_loaded
from moepack.tools.serving.generation import Event, Job
from moepack.tools.serving.loaded import Counts, Loaded

__all__ = ["Worker"]

T = TypeVar("T")


class Worker:
    """First come, first served, one at a time: so an answer is the one that it is alone.

    One model is in memory. `load` gives the one of a name, when the one before it has been given
    back; `first` is loaded at the start. `max_queue` jobs may wait, those that are still being
    prepared among them; `on_failure` is called from the thread when `first` did not load, with
    `failure` set.
    """

    def __init__(
        self,
        load: Callable[[str], Loaded],
        first: str | None,
        max_queue: int,
        on_failure: Callable[[], object],
    ) -> None:
        self._load = load
        self._first = first
        self._max_queue = max_queue
        self._on_failure = on_failure
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._n_preparing = 0
        self._running: Job | None = None
        self._thread = threading.Thread(target=self._run, name="moepack-generate", daemon=True)
        self._loaded: Loaded | None = None
        self._returned = Counts()  # of models that were given back
        self.loading: str | None = first
        self.is_closed = False
        self.failure: BaseException | None = None

    def start(self) -> None:
        """Begin to load, or to wait for jobs."""
        self._thread.start()

    @property
    def n_waiting(self) -> int:
        """Jobs that wait for their turn, or are being prepared."""
        return len(self._waiting) + self._n_preparing

    @property
    def n_running(self) -> int:
        """1 while a job runs, or what it needs is loaded."""
        return int(self._running is not None)

    def view(self, look: Callable[[Loaded | None, Counts], T]) -> T:
        """What `look` makes of the loaded model and the counts since the start.

        Meanwhile the model is not given back; so `look` is quick and keeps nothing of it.
        """
        with self._changed:
            counts = self._returned
            if self._loaded is not None:
                counts += self._loaded.counts()
            return look(self._loaded, counts)

    def check_ready(self) -> None:
        """Raises ApiError while the first model is being loaded, and once closed."""
        if self.is_closed:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        if self._first is not None:
            raise ApiError(503, "the model is being loaded", code="loading")

    @contextmanager
    def place(self) -> Iterator[None]:
        """A place in the queue, for a job that is being prepared. Raises as `submit`."""
        with self._changed:
            self._check_room(self.n_waiting)
            self._n_preparing += 1
        try:
            yield
        finally:
            with self._changed:
                self._n_preparing -= 1

    def submit(self, job: Job) -> None:
        """Put a job in the queue. Raises ApiError when it is full, or the server not ready."""
        with self._changed:
            self._check_room(len(self._waiting))  # whoever prepared it leaves its place
            self._waiting.append(job)
            self._changed.notify_all()

    def _check_room(self, n_waiting: int) -> None:
        self.check_ready()
        if n_waiting >= self._max_queue + 1 - self.n_running:
            raise ApiError(429, "too many requests wait already; try again later", code="queue")

    def cancel(self, job: Job) -> None:
        """Nobody waits for this job any more: it leaves the queue, or stops at its next layer."""
        job.is_cancelled.set()
        with self._changed:
            if job in self._waiting:
                self._waiting.remove(job)

    def close(self) -> None:
        """Take no more jobs, and end those that there are with an error."""
        with self._changed:
            self.is_closed = True
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
        if self._first is not None:
            try:
                self._turn_to(self._first)
            except BaseException as error:
                self.failure = error
                self._on_failure()
                return
            self._first = None
        while (job := self._next()) is not None:
            end = self._answer(job)
            self._running = None  # before its owner, who may ask again at once, is told
            if end is not None:
                job.emit(end)
        if self._loaded is not None:
            self._loaded.close()

    def _next(self) -> Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self.is_closed or self._waiting)
            if self.is_closed:
                return None
            self._running = self._waiting.popleft()
            return self._running

    def _answer(self, job: Job) -> Event | None:
        """The last event of a job; None for one that was cancelled."""
        try:
            if self._loaded is None or self._loaded.name != job.model:
                self._turn_to(job.model)
            assert self._loaded is not None
            end = self._loaded.generation.run(job)
            self._loaded.save_if_due()
            return end
        except ApiError as error:
            return error
        except Exception as error:
            click.echo(traceback.format_exc(), err=True, nl=False)
            kind = type(error).__name__
            return ApiError(500, f"the model failed ({kind}); the server's log says how")

    def _turn_to(self, name: str) -> None:
        """Give the loaded model back, its memory too, and load another. Raises what `load` raises.

        But for the first one: then ApiError, and the log says why.
        """
        self.loading = name
        if self._loaded is not None:
            self._loaded.close()
            with self._changed:
                self._returned += self._loaded.counts()
                self._loaded = None
        release_memory()
        reason = None
        try:
            loaded = self._load(name)
        except (MoepackError, OSError) as error:  # a pack's files may be gone by now
            if self._first is not None:
                raise
            reason = str(error)
        finally:
            self.loading = None
        if reason is not None:  # outside of `except`: an error holds what its frames hold
            raise not_loaded(name, reason)
        with self._changed:
            self._loaded = loaded
