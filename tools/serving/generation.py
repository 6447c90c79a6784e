"""One request after another through the model, on the thread that loaded it."""

import secrets
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.generate import stream_generate
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from moepack.runtime.loading import Engine
from moepack.tools.answering import Sampling
from moepack.tools.prefixes import Prefixes, cache_nbytes, cut_back
from moepack.tools.serving.errors import ApiError, invalid
from moepack.tools.serving.stops import StopFinder
from moepack.tools.serving.usage import Usage, watch_experts

__all__ = ["Event", "Finished", "Generation", "Job", "Totals"]

TOKENS_PER_CHECK = 64  # of memory, while an answer grows


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of an answer of `n_tokens`; `n_cached` tokens of the prompt were not run again."""

    reason: str
    n_tokens: int
    n_cached: int


Event = str | Finished | ApiError  # a piece of text; the two others are the last


@dataclass(eq=False, slots=True)
class Job:
    """A prompt for a model, how to answer it, and who is told.

    `emit` is called on the generation thread.
    """

    model: str
    tokens: list[int]
    sampling: Sampling
    seed: int | None
    stops: tuple[str, ...]
    emit: Callable[[Event], None]
    is_cancelled: threading.Event = field(default_factory=threading.Event)


@dataclass(slots=True)
class Totals:
    """Tokens since the start; `cached` of those of prompts were not run again."""

    prompt: int = 0
    cached: int = 0
    generated: int = 0


class Cancelled(Exception):
    """Nobody waits for the answer any more."""


class Generation:
    """Answers jobs. Everything but `totals` belongs to the thread that made it."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: TokenizerWrapper,
        context: int,
        prefill_step: int,
        usage: Usage,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._context = context
        self.prefill_step = prefill_step
        self._usage = usage
        self._prefixes = Prefixes(engine.plan.kv)
        self._job: Job | None = None
        self.totals = Totals()
        watch_experts(engine, usage, self._check)

    def run(self, job: Job) -> Finished | None:
        """Answer, telling the job's owner the text; return the end, None of a cancelled job.

        Raises ApiError for tokens that the model does not have.
        """
        self._job = job
        try:
            return self._answer(job)
        except Cancelled:
            return None
        finally:
            self._job = None
            self._usage.forget()

    def _answer(self, job: Job) -> Finished:
        engine, prefixes, n_prompt = self._engine, self._prefixes, len(job.tokens)
        self._check()
        if max(job.tokens) >= engine.vocabulary:
            raise invalid(f"prompt: tokens are 0 to {engine.vocabulary - 1}", "prompt")
        mx.random.seed(secrets.randbits(64) if job.seed is None else job.seed % 2**64)
        kept, n_cached = prefixes.take(job.tokens)
        cache: list[Any] = make_prompt_cache(engine.model) if kept is None else kept
        prefixes.make_room(self._nbytes(cache, n_prompt))
        self.totals.prompt += n_prompt
        self.totals.cached += n_cached
        stops = StopFinder(job.stops)
        said: list[int] = []
        reason: str | None = None
        n_read = n_cached

        def on_prompt(n_done: int, n_all: int) -> None:
            nonlocal n_read
            n_read = n_cached + n_done
            self._check()

        responses = stream_generate(
            engine.model,
            self._tokenizer,
            mx.array(job.tokens[n_cached:]),
            prefill_step_size=self.prefill_step,
            prompt_cache=cache,
            prompt_progress_callback=on_prompt,
            **job.sampling.generate_options(engine.vocabulary, job.tokens[:n_cached]),
        )
        try:
            with engine.caches_only(), closing(responses):
                for response in responses:
                    self._check()
                    said.append(response.token)
                    self.totals.generated += 1
                    self._usage.settle()
                    text, is_stopped = stops.feed(response.text)
                    reason = "stop" if is_stopped else response.finish_reason
                    if reason is not None and not is_stopped:
                        text += stops.flush()
                    if text:
                        job.emit(text)
                    if reason is not None:
                        break
                    if len(said) % TOKENS_PER_CHECK == 0:
                        prefixes.make_room(self._nbytes(cache, n_prompt + len(said)))
        except Cancelled:  # whoever asks the same again, more patiently, goes on from there
            if n_read > 0 and cut_back(cache, n_read):
                prefixes.put(job.tokens[:n_read], n_read, cache)
            raise
        # By the time a token is given, mlx-lm has run it already: the cache holds it.
        prefixes.put([*job.tokens, *said], n_prompt, cache)
        return Finished(reason or "length", len(said), n_cached)

    def _nbytes(self, cache: list[Any], n_tokens: int) -> int:
        """Bytes of a cache, soon, when it holds so many tokens."""
        share = min(1.0, (n_tokens + 4 * TOKENS_PER_CHECK) / self._context)
        return max(cache_nbytes(cache), int(share * self._engine.plan.kv))

    def _check(self) -> None:
        """Called before each layer of a long prompt, which takes long, and before each token."""
        if self._job is not None and self._job.is_cancelled.is_set():
            raise Cancelled
