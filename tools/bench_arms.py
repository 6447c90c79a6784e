"""What `moepack bench` measures: the arms that fit into memory, and one measurement of each kind.

An arm is the model loaded in one way. Every arm has an engine of its own, so that none finds its
slots filled by another; they share no weights, so what fits is worked out before anything loads.

Cold means that the page cache was told to forget the experts' files before each token, and was
seen to: on Linux alone, where mincore tells what is in it.
"""

import ctypes
import gc
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils
from mlx_lm.generate import generate_step, generation_stream

from moepack.formats.manifest import Manifest
from moepack.formats.pack import Pack
from moepack.formats.sizes import format_size
from moepack.runtime.counters import Counters
from moepack.runtime.loading import Engine, load_engine
from moepack.runtime.memory import RESIDENT_PREFILL_STEP, SLACK, MemoryPlan, Needs, plan_memory

__all__ = [
    "ARMS",
    "Arm",
    "Fit",
    "cached_share",
    "decode_seconds",
    "drop_pages",
    "fit_arms",
    "load_arm",
    "load_seconds",
    "prefill_seconds",
    "prompt_nbytes",
    "read_seconds",
    "vocabulary",
    "warm_pages",
]

# In the order they are shown, and that in which they get memory.
ARMS = ("mlx-lm", "resident", "all-hits", "quarter", "floor", "quarter-cold", "floor-cold")
ORDER_OF_NEED = ("floor", "quarter", "resident", "mlx-lm", "floor-cold", "quarter-cold", "all-hits")
READ_NBYTES = 8 * 2**20  # of a file read from end to end, at once


@dataclass(frozen=True, slots=True)
class Arm:
    """A loaded model. `engine` is None for mlx-lm's own; `prefill_step` in tokens a call."""

    name: str
    model: nn.Module
    engine: Engine | None
    prefill_step: int

    @property
    def is_cold(self) -> bool:
        """Whether its experts are to come from the disk."""
        return self.name.endswith("-cold")

    @property
    def is_streamed(self) -> bool:
        """Whether moepack looks experts up while it runs."""
        return self.engine is not None and bool(self.engine.layers)

    @property
    def reads_past_page_cache(self) -> bool:
        """How experts are read, where any are."""
        return self.engine is not None and self.engine.reads_past_page_cache

    def caches_only(self) -> AbstractContextManager[None]:
        """As mlx-lm's own laziness has it: see Engine."""
        return nullcontext() if self.engine is None else self.engine.caches_only()

    def decode_counters(self) -> Counters:
        """What was counted so far, over layers."""
        return self.engine.counters()[1] if self.engine is not None else Counters()


@dataclass(frozen=True, slots=True)
class Fit:
    """The plans of the arms that fit, and why others are left out.

    `problem_of_another`: why one more floor engine does not fit; None when it does.
    """

    plans: dict[str, MemoryPlan]
    left_out: dict[str, str]
    problem_of_another: str | None


def fit_arms(
    manifest: Manifest,
    needs: Needs,
    bound: int,
    source_nbytes: int | None,
    cold_problem: str | None,
) -> Fit:
    """Which arms fit into `bound` bytes together; one without room leaves it to those after it.

    `source_nbytes` of weights are what mlx-lm loads; None: no source. `cold_problem`: why nothing
    can be made cold.
    """

    def plan_of(cache: int | str) -> MemoryPlan:
        return plan_memory(
            manifest.modules, needs, available=bound, memory=None, expert_cache=cache
        )

    floor = plan_of("floor")
    quarter = plan_of(max(-(-manifest.expert_nbytes // 4), floor.slots))
    by_cache = {"floor": floor, "quarter": quarter}
    plans: dict[str, MemoryPlan] = {}
    left_out: dict[str, str] = {}
    left = int(bound / SLACK) - (needs.fixed - needs.shared)
    workspace = 0
    for name in ORDER_OF_NEED:
        if name == "mlx-lm" and source_nbytes is None:
            left_out[name] = "no --source was given"
            continue
        if name.endswith("-cold") and cold_problem is not None:
            left_out[name] = cold_problem
            continue
        plan = by_cache.get(name.removesuffix("-cold")) or plan_of("all")
        weights = plan.shared + plan.slots
        if name == "mlx-lm" and source_nbytes is not None:
            weights = source_nbytes
        nbytes = weights + max(0, plan.prefill - workspace)
        if nbytes > left:
            left_out[name] = _too_little(nbytes, left, bound)
            continue
        plans[name] = plan
        left -= nbytes
        workspace = max(workspace, plan.prefill)
    another = floor.shared + floor.slots
    return Fit(
        {name: plans[name] for name in ARMS if name in plans},
        {name: left_out[name] for name in ARMS if name in left_out},
        _too_little(another, left, bound) if another > left else None,
    )


def _too_little(nbytes: int, left: int, bound: int) -> str:
    return (
        f"it needs {format_size(nbytes)}; of {format_size(bound)} other arms leave "
        f"{format_size(max(0, left))}"
    )


def load_arm(name: str, pack: Pack, plan: MemoryPlan, context: int, source: Path | None) -> Arm:
    """Load one arm, which was found to fit. `source`: the checkpoint, for mlx-lm."""
    if name == "mlx-lm":
        assert source is not None
        model, _ = mlx_lm.utils.load_model(source)
        return Arm(name, model, None, RESIDENT_PREFILL_STEP)
    caches = {"resident": "all", "all-hits": "all", "floor": "floor", "floor-cold": "floor"}
    engine = load_engine(
        pack,
        expert_cache=caches.get(name, plan.slots),
        context=context,
        prefill_step=plan.prefill_step,
        keep_streaming=name != "resident",
    )
    if name == "all-hits":
        for layer in engine.layers:
            layer.preload(range(layer.n_experts))
    return Arm(name, engine.model, engine, plan.prefill_step)


def decode_seconds(
    model: nn.Module, forced: list[int], before_token: Callable[[], None] | None = None
) -> float:
    """Seconds to decode these tokens by mlx-lm's generate_step, each forced.

    Every call of the model that was begun is waited for. What `before_token` takes is not counted:
    it runs while nothing is computed, and once as much may have been read as for two tokens.
    """
    # generate_step computes a token more than it gives.
    steps: Iterator[Any] = generate_step(
        mx.array(forced[:1]), model, max_tokens=len(forced) - 1, sampler=_forcing(forced)
    )
    uncounted = 0.0
    if before_token is not None:
        before_token()
    started = time.perf_counter()
    for _ in steps:
        if before_token is not None:
            mx.synchronize(generation_stream)
            stopped = time.perf_counter()
            before_token()
            uncounted += time.perf_counter() - stopped
    mx.synchronize(generation_stream)
    return time.perf_counter() - started - uncounted


def prefill_seconds(model: nn.Module, prompt: list[int], step: int) -> float:
    """Seconds from a prompt to its first token, in chunks of `step` tokens."""
    steps: Iterator[Any] = generate_step(
        mx.array(prompt), model, max_tokens=0, prefill_step_size=step
    )
    started = time.perf_counter()
    for _ in steps:  # none: it ends when the first token is there
        pass
    mx.synchronize(generation_stream)
    return time.perf_counter() - started


def _forcing(tokens: list[int]) -> Callable[[mx.array], mx.array]:
    """A sampler that says the given tokens, still depending on what the model computed."""
    remaining = iter([*tokens[1:], *tokens])

    def sampler(logprobs: mx.array) -> mx.array:
        token: mx.array = mx.depends(mx.array([next(remaining)]), logprobs)
        return token

    return sampler


def vocabulary(arms: Sequence[Arm]) -> int:
    """How many tokens there are to draw."""
    return next(arm.engine.vocabulary for arm in arms if arm.engine is not None)


def prompt_nbytes(arm: Arm) -> tuple[int, int]:
    """Bytes that prefill read so far, and of the experts asked for, once per chunk and layer."""
    if arm.engine is None or not arm.is_streamed:
        return 0, 0
    read = touched = 0
    for layer, module in zip(arm.engine.layers, arm.engine.pack.manifest.modules, strict=True):
        counters = layer.counters.prefill
        read += counters.bytes_read
        touched += (counters.hits + counters.misses) * module.record_nbytes
    return read, touched


def load_seconds(pack: Pack) -> float:
    """Seconds to load an engine with the fewest slots, which is dropped again."""
    gc.collect()
    started = time.perf_counter()
    engine = load_engine(pack, expert_cache="floor")
    elapsed = time.perf_counter() - started
    for layer in engine.layers:
        layer.close()
    del engine
    gc.collect()
    return elapsed


def drop_pages(paths: Sequence[Path]) -> None:
    """Tell the page cache to forget these files. On Linux; it keeps what is not on disk yet."""
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def warm_pages(paths: Sequence[Path]) -> None:
    """Read these files from end to end, so that the page cache has them."""
    read_seconds(paths)


def read_seconds(paths: Sequence[Path]) -> float:
    """Seconds to read these files from end to end, in order."""
    block = bytearray(READ_NBYTES)
    started = time.perf_counter()
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass
    return time.perf_counter() - started


def cached_share(paths: Sequence[Path]) -> float | None:
    """The share of these files' pages that are in the page cache; None where nothing tells."""
    if sys.platform != "linux":
        return None
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    n_pages = n_cached = 0
    for path in paths:
        nbytes = path.stat().st_size
        if nbytes == 0:
            continue
        states = ctypes.create_string_buffer(-(-nbytes // mmap.PAGESIZE))
        with path.open("rb") as file:
            # Private, so that it may be writable, which ctypes wants; no page is touched.
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        start = ctypes.c_char.from_buffer(mapping)
        failed = mincore(ctypes.addressof(start), nbytes, states)
        del start
        mapping.close()
        if failed:
            return None
        n_pages += len(states)
        n_cached += sum(state & 1 for state in states.raw)
    return n_cached / n_pages if n_pages else None
