"""An expert module whose experts are on disk: takes the place of an mlx-lm SwitchGLU or SwitchMLP.

It answers a call `(x, indices)` by running the stock module on banks, with slot numbers in place
of expert numbers: the same kernels on the same bytes, so the same bits.

Invariants. Bookkeeping stays on the calling thread. A slot is overwritten only when every graph
that reads its bank has been evaluated: `_unevaluated` holds the outputs that may not have been.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from moepack.runtime.banks import Banks, byte_rows
from moepack.runtime.counters import Counters, LayerCounters
from moepack.runtime.policy import Policy
from moepack.runtime.reading import RecordReader, wait_for
from moepack.runtime.slots import SlotCache
from moepack.runtime.spreading import Ids, Spreader
from moepack.runtime.standing import StandIn
from moepack.runtime.waves import Wave, plan_waves

__all__ = ["Record", "StreamedExperts"]

# Told of every call: the distinct experts in the order they are looked up, how many (token, expert)
# pairs each has, the call's tokens, and whether it is of decoding.
Record = Callable[[Sequence[int], Sequence[int], int, bool], None]
# Outputs kept for the wait hold memory: a call of more tokens, or one call too many, waits at once.
MAX_LAZY_TOKENS = 16
MAX_LAZY_CALLS = 32


class StreamedExperts(StandIn):
    """Stands where `stock`, an expert module whose parameters are the banks' arrays, stood."""

    def __init__(
        self,
        stock: nn.Module,
        reader: RecordReader,
        banks: Banks,
        slots: SlotCache,
        spreader: Spreader,
    ) -> None:
        super().__init__(stock)
        # Underscored, so that nn.Module does not take them for parameters.
        self._reader = reader
        self._banks = banks
        self._slots = slots
        self._spreader = spreader
        self._unevaluated: list[mx.array] = []
        self.counters = LayerCounters(Counters(), Counters())
        self.record: Record | None = None
        # Called between the waves of a call, which may take long; what it raises ends the call.
        self.checkpoint: Callable[[], object] | None = None
        self.skips_prompts = False  # a call of several tokens answers NaN, and reads nothing

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        """As the stock module: x `(..., dim)`, indices `(..., k)` -> `(..., k, out)`.

        Waits for `indices`. Raises FormatError when a record cannot be read.
        """
        n_tokens = math.prod(indices.shape[:-1])
        if n_tokens == 1:
            return self._decode(x, indices)
        is_decode = indices.ndim >= 3 and indices.shape[-2] == 1  # a token of each sequence
        if self.skips_prompts and not is_decode:
            return mx.full((*indices.shape, x.shape[-1]), math.nan, dtype=x.dtype)
        counters = self.counters.decode if is_decode else self.counters.prefill
        started = time.perf_counter()
        picked = np.array(indices, copy=False)  # evaluates it: the one wait of a layer
        counters.wait_s += time.perf_counter() - started
        counters.calls += 1
        slots = self._slots
        flat = picked.reshape(-1)
        distinct, n_uses = np.unique(flat, return_counts=True)
        needed, counts = distinct.tolist(), n_uses.tolist()
        slots.policy.use_many(dict(zip(needed, counts, strict=True)), n_tokens)
        if self.record is not None:
            self.record(needed, counts, n_tokens, is_decode)
        if not slots.can_hold(needed):
            return self._run_waves(x, picked, needed, counters)
        misses = [e for e in needed if e not in slots.slot_of]
        counters.hits += len(needed) - len(misses)
        slots.use(needed)
        if misses:
            self._read(misses, needed, counters)
        y = self._run(x, self._slot_table()[flat].reshape(picked.shape))
        self._unevaluated.append(y)
        if n_tokens > MAX_LAZY_TOKENS or len(self._unevaluated) > MAX_LAZY_CALLS:
            self._wait_for_graphs()
        return y

    def _decode(self, x: mx.array, indices: mx.array) -> mx.array:
        """A call of one token: the path whose own time counts."""
        counters = self.counters.decode
        slots = self._slots
        slot_of = slots.slot_of
        ndim = indices.ndim
        flat = indices.reshape(-1)
        started = time.perf_counter()
        experts: Any = flat.tolist()  # evaluates them: the one wait of a layer
        waited = time.perf_counter()
        needed = experts
        if len({*experts}) < len(experts):  # some picked twice
            needed = list(dict.fromkeys(experts))
        slots.policy.use(needed)
        if self.record is not None:
            self.record(needed, [1] * len(needed), 1, True)
        ids = slots.use(needed)
        counters.calls += 1
        counters.hits += len(ids)
        counters.wait_s += waited - started
        if len(ids) < len(needed):
            misses = [e for e in needed if e not in slot_of]
            y = self._run_hits_first(x, experts, misses, ndim, counters)
        else:
            if len(ids) < len(experts):
                ids = [slot_of[e] for e in experts]
            counters.own_s += time.perf_counter() - waited
            y = self._spreader.run_token(self.stock, x, ids, ndim)
        mx.async_eval(y)  # the streams work while Python builds what follows
        self._unevaluated.append(y)
        if len(self._unevaluated) > MAX_LAZY_CALLS:
            self._wait_for_graphs()
        return y

    def _run_hits_first(
        self, x: mx.array, experts: list[int], misses: list[int], ndim: int, counters: Counters
    ) -> mx.array:
        """One token: what is resident is computed while what is not is read."""
        slots = self._slots
        self._wait_for_graphs()
        before = slots.n_evictions
        reserved = slots.reserve(misses, set(experts))
        futures = self._reader.start(misses, [self._banks.rows[slot] for slot in reserved])
        try:
            absent = set(misses)
            hits = [e for e in experts if e not in absent]
            ids = [slots.slot_of[e] for e in hits]
            parts = [self._spreader.run_token(self.stock, x, ids, ndim)] if hits else []
            mx.async_eval(parts)
            started = time.perf_counter()
            wait_for(futures)
        except BaseException:
            wait_quietly(futures)
            slots.cancel()
            raise
        counters.read_s += time.perf_counter() - started
        slots.fill(misses)
        counters.misses += len(misses)
        counters.evictions += slots.n_evictions - before
        counters.bytes_read += len(misses) * self._reader.module.record_nbytes
        late = [e for e in experts if e in absent]
        ids = [slots.slot_of[e] for e in late]
        parts.append(self._spreader.run_token(self.stock, x, ids, ndim, from_last=True))
        if not hits:
            return parts[0]
        order = hits + late
        places = mx.array([order.index(e) for e in experts], dtype=mx.uint32)
        return mx.take(mx.concatenate(parts, axis=-2), places, axis=-2)

    @property
    def n_experts(self) -> int:
        """How many experts the layer has on disk."""
        return self._slots.n_experts

    @property
    def reads_past_page_cache(self) -> bool:
        """Whether its records are read past the page cache."""
        return self._reader.is_direct

    @property
    def n_slots(self) -> int:
        """How many experts the layer can have in memory."""
        return self._slots.n_slots

    @property
    def residents(self) -> list[int]:
        """The experts in memory now, in order of last use. Any thread may ask."""
        return list(self._slots.slot_of)

    @property
    def number(self) -> int:
        """The layer's place in the pack."""
        return self._reader.layer

    @property
    def policy(self) -> Policy:
        """What decides which experts stay."""
        return self._slots.policy

    @property
    def pinned(self) -> frozenset[int]:
        """The experts that are never evicted."""
        return self._slots.pinned

    def pin(self, experts: Iterable[int]) -> None:
        """Never evict `experts` again: residents, no more than the engine's `pins`."""
        self._slots.pinned = frozenset(experts)

    def preload(self, experts: Sequence[int]) -> None:
        """Read absent experts into slots, outside any call and count. Raises FormatError."""
        misses = [e for e in experts if e not in self._slots.slot_of]
        if misses:
            self._read(misses, experts, Counters())

    def close(self) -> None:
        """Close the layer's file."""
        self._reader.close()

    def _read(self, misses: list[int], protected: Sequence[int], counters: Counters) -> None:
        """Read `misses` into slots, evicting none of `protected`."""
        started = time.perf_counter()
        self._wait_for_graphs()
        before = self._slots.n_evictions
        reserved = self._slots.reserve(misses, set(protected))
        try:
            self._reader.read_all(misses, [self._banks.rows[slot] for slot in reserved])
        except BaseException:
            self._slots.cancel()
            raise
        self._slots.fill(misses)
        counters.misses += len(misses)
        counters.evictions += self._slots.n_evictions - before
        counters.bytes_read += len(misses) * self._reader.module.record_nbytes
        counters.read_s += time.perf_counter() - started

    def _wait_for_graphs(self) -> None:
        if self._unevaluated:
            mx.eval(self._unevaluated)
            self._unevaluated.clear()

    def _run(self, x: mx.array, ids: Ids) -> mx.array:
        return self._spreader.run_experts(self.stock, x, ids)

    def _slot_table(self) -> "np.ndarray[Any, np.dtype[np.uint32]]":
        """Slot by expert number; meaningless for experts that are not resident."""
        table = np.zeros(self._slots.n_experts, dtype=np.uint32)
        for expert, slot in self._slots.slot_of.items():
            table[expert] = slot
        return table

    def _run_waves(
        self,
        x: mx.array,
        picked: "np.ndarray[Any, np.dtype[Any]]",
        needed: list[int],
        counters: Counters,
    ) -> mx.array:
        """Run a call whose experts cannot be in slots together; each is read at most once."""
        slots = self._slots
        waves = plan_waves(slots.slot_of, slots.n_slots, needed, slots.scores)
        runner = _WaveCall(self._run, x, picked, waves, slots.n_experts)
        self._wait_for_graphs()
        evictions = slots.n_evictions
        futures = self._start_wave(waves[0], counters)
        try:
            for wave, following in zip(waves, [*waves[1:], None], strict=True):
                if self.checkpoint is not None:
                    self.checkpoint()
                self._finish_reads(wave, futures, counters)
                futures = []
                y = runner.start(wave)
                if following is not None and following.is_read:
                    if not set(following.slots).isdisjoint(wave.slots):
                        mx.eval(y)
                    futures = self._start_wave(following, counters)
                runner.finish(wave, y)
        except BaseException:
            for future in futures:
                future.cancel()
            wait_quietly(futures)
            slots.cancel()
            raise
        counters.evictions += slots.n_evictions - evictions
        slots.use(e for wave in waves for e in wave.experts)
        return runner.result()

    def _start_wave(self, wave: Wave, counters: Counters) -> list["Future[None]"]:
        if not wave.is_read:
            counters.hits += len(wave.experts)
            return []
        counters.misses += len(wave.experts)
        counters.bytes_read += len(wave.experts) * self._reader.module.record_nbytes
        self._slots.reserve_slots(wave.experts, wave.slots)
        return self._reader.start(wave.experts, [self._banks.rows[s] for s in wave.slots])

    def _finish_reads(self, wave: Wave, futures: list["Future[None]"], counters: Counters) -> None:
        if not wave.is_read:
            return
        started = time.perf_counter()
        wait_for(futures)
        counters.read_s += time.perf_counter() - started
        self._slots.fill(wave.experts)


class _WaveCall:
    """One call taken apart by waves and put together again in router order."""

    def __init__(
        self,
        run: Callable[[mx.array, Ids], mx.array],
        x: mx.array,
        picked: "np.ndarray[Any, np.dtype[Any]]",
        waves: Sequence[Wave],
        n_experts: int,
    ) -> None:
        self._run = run
        self._shape = picked.shape
        self._k = picked.shape[-1]
        self._x = x.reshape(-1, x.shape[-1])
        self._flat = picked.reshape(-1)
        wave_of = np.zeros(n_experts, dtype=np.int32)
        for number, wave in enumerate(waves):
            wave_of[list(wave.experts)] = number
        numbers = wave_of[self._flat]
        order = np.argsort(numbers, kind="stable")  # pairs of a token and an expert, by wave
        bounds = np.searchsorted(numbers[order], np.arange(len(waves) + 1))
        self._pairs = {
            wave: order[bounds[number] : bounds[number + 1]] for number, wave in enumerate(waves)
        }
        self._n_experts = n_experts
        self._out: mx.array | None = None
        self._rows: Any = None

    def start(self, wave: Wave) -> mx.array:
        """Begin computing the pairs of a wave; its experts are in their slots."""
        table = np.zeros(self._n_experts, dtype=np.uint32)
        table[list(wave.experts)] = wave.slots
        pairs = self._pairs[wave]
        tokens = mx.array((pairs // self._k).astype(np.uint32))
        y = self._run(self._x[tokens], table[self._flat[pairs]][:, None])
        mx.async_eval(y)
        return y

    def finish(self, wave: Wave, y: mx.array) -> None:
        """Wait for a wave and put its rows where the router wants them."""
        y = mx.contiguous(y.reshape(-1, y.shape[-1]))
        mx.eval(y)
        if self._out is None:
            self._out = mx.zeros((len(self._flat), y.shape[-1]), dtype=y.dtype)
            mx.eval(self._out)
            self._rows = byte_rows(self._out)
        self._rows[self._pairs[wave]] = byte_rows(y)

    def result(self) -> mx.array:
        """`(..., k, out)`, every row written."""
        assert self._out is not None
        return self._out.reshape(*self._shape, -1)


def wait_quietly(futures: Sequence["Future[None]"]) -> None:
    """Wait until no read is under way; their errors do not matter any more."""
    for future in futures:
        if not future.cancelled():
            future.exception()
