"""Reading records from a cold disk: as the runtime does, and as fast as the disk lets anyone.

All arms read whole records at random places in the same batches, one batch a layer and token, as
many reads under way as an engine has threads, and wait for each batch. `raw` reads into a buffer;
`reader` is the runtime's, which scatters a record into its slot; `checked` compares each with its
digest too, as the runtime does the first time it reads an expert.
"""

import mmap
import os
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from moepack.formats.pack import Pack
from moepack.runtime.banks import Banks
from moepack.runtime.reading import RecordReader, open_direct
from moepack.tools.bench_arms import drop_pages

__all__ = ["ARMS", "read_rates"]

ARMS = ("raw", "reader", "checked")


def read_rates(
    pack: Pack, n_records: int, n_tokens: int, seed: int, n_workers: int, *, past_page_cache: bool
) -> dict[str, float]:
    """Bytes a second of each of ARMS, token by token in turn.

    `n_workers` threads read. `n_records` are dealt out to `n_tokens`, and within each to the
    layers. Pages are dropped before each turn, which is not counted.
    """
    rng = random.Random(seed)
    modules = pack.manifest.modules
    paths = [pack.expert_file(module) for module in modules]
    seconds = dict.fromkeys(ARMS, 0.0)
    nbytes = 0
    with ThreadPoolExecutor(n_workers, thread_name_prefix="moepack-read") as pool:
        arms: dict[str, _RuntimeReads | _RawReads] = {
            "raw": _RawReads(pack, pool, past_page_cache),
            "reader": _RuntimeReads(pack, pool, past_page_cache, "never"),
            "checked": _RuntimeReads(pack, pool, past_page_cache, "always"),
        }
        try:
            for token, n in enumerate(deal(n_records, n_tokens)):
                batches = [
                    rng.sample(range(module.n_experts), min(size, module.n_experts))
                    for module, size in zip(modules, deal(n, len(modules)), strict=True)
                ]
                nbytes += sum(
                    len(batch) * module.record_nbytes
                    for batch, module in zip(batches, modules, strict=True)
                )
                for turn in range(len(ARMS)):
                    name = ARMS[(token + turn) % len(ARMS)]
                    drop_pages(paths)
                    started = time.perf_counter()
                    for layer, batch in enumerate(batches):
                        if batch:
                            arms[name].read(layer, batch)
                    seconds[name] += time.perf_counter() - started
        finally:
            for arm in arms.values():
                arm.close()
    return {name: nbytes / seconds[name] for name in ARMS}


def deal(n: int, n_hands: int) -> list[int]:
    """`n` as `n_hands` whole numbers that are as equal as they can be."""
    return [n * (i + 1) // n_hands - n * i // n_hands for i in range(n_hands)]


class _RuntimeReads:
    """A reader a layer, as an engine has, and slots for the largest batch."""

    def __init__(
        self, pack: Pack, pool: ThreadPoolExecutor, past_page_cache: bool, check: str
    ) -> None:
        modules = pack.manifest.modules
        self._readers = [
            RecordReader(pack, layer, pool, direct=past_page_cache, check=check)
            for layer in range(len(modules))
        ]
        self._banks: dict[tuple[str, ...], Banks] = {}
        self._modules = modules

    def read(self, layer: int, experts: Sequence[int]) -> None:
        """Into the first slots."""
        self._readers[layer].read_all(experts, self._rows(layer, len(experts)))

    def _rows(self, layer: int, n: int) -> list[list[memoryview]]:
        """Slots for `n` records, shared by layers of one geometry."""
        module = self._modules[layer]
        key = tuple(f"{part.name} {part.dtype} {part.shape}" for part in module.parts)
        if key not in self._banks or len(self._banks[key].rows) < n:
            self._banks[key] = Banks(module, n)
        return self._banks[key].rows[:n]

    def close(self) -> None:
        """Close the files."""
        for reader in self._readers:
            reader.close()


class _RawReads:
    """`preadv` of a record into a buffer of the thread's own, and nothing else."""

    def __init__(self, pack: Pack, pool: ThreadPoolExecutor, past_page_cache: bool) -> None:
        self._pool = pool
        self._modules = pack.manifest.modules
        flags = os.O_RDONLY | os.O_CLOEXEC
        self._files = []
        for path in map(pack.expert_file, self._modules):
            direct = open_direct(path, flags) if past_page_cache else None
            self._files.append(os.open(path, flags) if direct is None else direct)
        self._largest = max(module.stride for module in self._modules)
        self._local = threading.local()

    def read(self, layer: int, experts: Sequence[int]) -> None:
        """One thread a record; this thread reads one of them."""
        futures = [self._pool.submit(self._read, layer, expert) for expert in experts[1:]]
        self._read(layer, experts[0])
        for future in futures:
            future.result()

    def _read(self, layer: int, expert: int) -> None:
        module = self._modules[layer]
        if not hasattr(self._local, "view"):
            self._local.view = memoryview(mmap.mmap(-1, self._largest))  # page-aligned
        view = self._local.view[: module.stride]  # whole pages, as O_DIRECT wants
        assert os.preadv(self._files[layer], [view], expert * module.stride) == module.stride

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            os.close(file)
