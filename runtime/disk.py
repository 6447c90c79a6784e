"""How fast the disk under a model answers: random reads of a record's size, measured once.

Uncached reads go around the page cache: by O_DIRECT on Linux, or where the file system refuses
that, by telling the cache to forget a block before it is read; by F_NOCACHE on macOS, where blocks
that are cached already may still come from the cache. The macOS path was written from documentation
and has not been run by its authors.
"""

import fcntl
import json
import mmap
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from itertools import cycle
from pathlib import Path
from threading import Lock
from typing import Any

from moepack.formats.errors import SourceError
from moepack.runtime.reading import ALIGNMENT, F_NOCACHE, READ_WORKERS, open_direct, wait_for
from moepack.runtime.user_cache import cache_folder, write_whole

__all__ = ["DiskFigures", "known_disk", "probe_disk"]

WORKERS = (1, 2, 4, 8, 16)
# Records larger than this are no faster to read; 16 of them are held at once.
MAX_BLOCK_NBYTES = 4 * 2**20
# What is read for one figure at most: of the disk, and of the page cache from these few blocks.
MAX_UNCACHED_NBYTES = 128 * 2**20
MAX_CACHED_NBYTES = 64 * 2**20
MAX_WARM_NBYTES = 32 * 2**20
SLICE_S = 0.15  # seconds for one figure; a read begun is waited for
ENOUGH = 0.95  # of the best figure: more workers than reach it are not worth having

Read = Callable[[int, mmap.mmap], None]  # a block at this offset, into this memory


@dataclass(frozen=True, slots=True)
class DiskFigures:
    """Bytes a second by number of workers, of random reads of `block_bytes` each.

    `device` is the number of the file system's device (st_dev), `method` how the page cache was
    gone around. Numbers of workers that a slow disk left no time for are missing.
    """

    device: int
    date: str
    version: str
    block_bytes: int
    method: str
    cached: Mapping[int, float]
    uncached: Mapping[int, float]
    best_workers: int

    @property
    def read_workers(self) -> int:
        """How many threads a run reads with: copies from the page cache want READ_WORKERS."""
        return max(READ_WORKERS, self.best_workers)

    @property
    def uncached_rate(self) -> float:
        """Bytes a second past the page cache with so many workers, or the next fewer measured."""
        return self.uncached[max((n for n in self.uncached if n <= self.read_workers), default=1)]

    def as_map(self) -> dict[str, Any]:
        """For JSON, which makes text of the numbers of workers."""
        return asdict(self)


def probe_disk(path: Path, nbytes: int) -> DiskFigures:
    """Figures for reads of `nbytes` at random places of the file `path`: measured, or remembered.

    They are kept by device and size, to the next power of two, in the user's cache folder; one that
    cannot be read or written, or is damaged, is as good as none. Raises SourceError naming the file
    when it cannot be read.
    """
    figures = known_disk(path, nbytes)
    if figures is None:
        block, device = _block_and_device(path, nbytes)
        figures = measure_disk(path, block)
        memory = memory_file(sys.platform, os.environ)
        _remember(memory, _remembered(memory) | {memory_key(device, block): figures.as_map()})
    return figures


def known_disk(path: Path, nbytes: int) -> DiskFigures | None:
    """What `probe_disk` remembers, or None: nothing is measured. Raises SourceError as it does."""
    block, device = _block_and_device(path, nbytes)
    known = _remembered(memory_file(sys.platform, os.environ))
    return figures_of(known.get(memory_key(device, block)), device)


def _block_and_device(path: Path, nbytes: int) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError as error:
        raise _unreadable(path, error) from error
    return block_nbytes(nbytes, status.st_size), status.st_dev


def measure_disk(path: Path, block: int) -> DiskFigures:
    """Read blocks of `block` bytes of the file, in about two seconds and less than a gigabyte.

    Raises SourceError.
    """
    with _opened(path, direct=True) as (fd, method), _opened(path, direct=False) as (plain, _):
        status = os.fstat(fd)
        rng = random.Random(0)
        offsets = random_offsets(status.st_size, block, rng)
        is_forgetful = method == "POSIX_FADV_DONTNEED"

        def read_uncached(offset: int, memory: mmap.mmap) -> None:
            if is_forgetful:
                os.posix_fadvise(fd, offset, block, os.POSIX_FADV_DONTNEED)
            _read(fd, path, offset, memory, block)

        def read_cached(offset: int, memory: mmap.mmap) -> None:
            _read(plain, path, offset, memory, block)

        uncached = _rates(read_uncached, offsets, block, MAX_UNCACHED_NBYTES)
        warm: list[int] = []

        def warm_up(offset: int, memory: mmap.mmap) -> None:
            read_cached(offset, memory)
            warm.append(offset)

        _timed(warm_up, offsets, block, 1, MAX_WARM_NBYTES)
        cached = _rates(read_cached, cycle(warm), block, MAX_CACHED_NBYTES)
    return DiskFigures(
        device=status.st_dev,
        date=date.today().isoformat(),
        version=version("moepack"),
        block_bytes=block,
        method=method,
        cached=cached,
        uncached=uncached,
        best_workers=best_worker_count(uncached),
    )


def block_nbytes(nbytes: int, file_nbytes: int) -> int:
    """The size of the blocks to read for records of `nbytes`: whole pages, if the file has one."""
    wanted = -(-min(nbytes, MAX_BLOCK_NBYTES) // ALIGNMENT) * ALIGNMENT
    return min(max(wanted, ALIGNMENT), file_nbytes // ALIGNMENT * ALIGNMENT or file_nbytes)


def random_offsets(file_nbytes: int, block: int, rng: random.Random) -> Iterator[int]:
    """Places of blocks that end in the file, without end, each a multiple of ALIGNMENT."""
    n_places = (file_nbytes - block) // ALIGNMENT + 1
    while True:
        yield rng.randrange(n_places) * ALIGNMENT


def best_worker_count(rates: Mapping[int, float]) -> int:
    """The fewest workers that are about as fast as any number of them."""
    enough = ENOUGH * max(rates.values())
    return min(n for n, rate in rates.items() if rate >= enough)


def memory_key(device: int, block: int) -> str:
    """What figures are kept by: `DEVICE/SIZE`, the size being the next power of two."""
    return f"{device}/{1 << max(block - 1, 0).bit_length()}"


def memory_file(platform: str, environment: Mapping[str, str]) -> Path | None:
    """Where figures are kept; None when the user has no home."""
    folder = cache_folder(platform, environment)
    return folder and folder / "disks.json"


def figures_of(entry: object, device: int) -> DiskFigures | None:
    """The figures of a remembered entry; None when it is none, damaged, or of another version."""
    if not isinstance(entry, dict):
        return None
    try:
        figures = DiskFigures(
            **entry
            | {
                name: {int(n): float(rate) for n, rate in entry[name].items()}
                for name in ("cached", "uncached")
            }
        )
    except (TypeError, ValueError, KeyError, AttributeError):
        return None
    rates = [*figures.cached.values(), *figures.uncached.values()]
    is_sound = (
        figures.device == device
        and figures.version == version("moepack")
        and all(isinstance(text, str) for text in (figures.date, figures.method))
        and isinstance(figures.block_bytes, int)
        and bool(figures.cached)
        and 1 in figures.uncached
        and figures.best_workers in figures.uncached
        and all(0 < rate < float("inf") for rate in rates)
    )
    return figures if is_sound else None


def _remembered(memory: Path | None) -> dict[str, Any]:
    """What is kept, not checked entry by entry."""
    try:
        known = json.loads(memory.read_text(encoding="utf-8")) if memory is not None else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return known if isinstance(known, dict) else {}


def _remember(memory: Path | None, known: Mapping[str, Any]) -> None:
    """Keep this, whole or not at all."""
    if memory is None:
        return
    with suppress(OSError):
        write_whole(memory, json.dumps(known, indent=1) + "\n")


@contextmanager
def _opened(path: Path, *, direct: bool) -> Iterator[tuple[int, str]]:
    """(file descriptor, how reads go around the page cache, or `none`)."""
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        other = open_direct(path, flags) if direct else None
        fd = os.open(path, flags) if other is None else other
    except OSError as error:
        raise _unreadable(path, error) from error
    method = "O_DIRECT" if other is not None else "none"
    try:
        if direct and other is None and sys.platform == "darwin":
            fcntl.fcntl(fd, F_NOCACHE, 1)
            method = "F_NOCACHE"
        elif direct and other is None and hasattr(os, "posix_fadvise"):
            method = "POSIX_FADV_DONTNEED"
        yield fd, method
    finally:
        os.close(fd)


def _rates(read: Read, offsets: Iterator[int], block: int, most: int) -> dict[int, float]:
    """Bytes a second by number of workers; where one takes too long, more are not tried."""
    rates: dict[int, float] = {}
    for n_workers in WORKERS:
        n_read, seconds = _timed(read, offsets, block, n_workers, most)
        rates[n_workers] = n_read / max(seconds, 1e-9)
        if seconds > 2 * SLICE_S:
            break
    return rates


def _timed(
    read: Read, offsets: Iterator[int], block: int, n_workers: int, most: int
) -> tuple[int, float]:
    """(bytes read, seconds): a slice of time or `most` bytes, but a block a worker at least."""
    lock = Lock()
    left = max(most // block, n_workers)
    n_done = 0
    started = 0.0

    def take() -> int | None:
        """The next block's offset; None when there was enough."""
        nonlocal left
        with lock:
            is_late = time.perf_counter() - started > SLICE_S
            if left == 0 or (is_late and n_done > 0):
                return None
            left -= 1
            return next(offsets)

    def work(memory: mmap.mmap) -> None:
        nonlocal n_done
        while (offset := take()) is not None:
            read(offset, memory)
            with lock:
                n_done += 1

    memories = [mmap.mmap(-1, block) for _ in range(n_workers)]  # page-aligned
    for memory in memories:
        memory[:] = bytes(block)  # there before the clock runs
    with ThreadPoolExecutor(n_workers, thread_name_prefix="moepack-probe") as pool:
        started = time.perf_counter()
        wait_for([pool.submit(work, memory) for memory in memories])
    return n_done * block, time.perf_counter() - started


def _read(fd: int, path: Path, offset: int, memory: mmap.mmap, nbytes: int) -> None:
    """Fill the first `nbytes` of `memory`. Raises SourceError."""
    view = memoryview(memory)[:nbytes]
    done = 0
    try:
        while done < nbytes:
            n = os.preadv(fd, [view[done:]], offset + done)
            if n == 0:
                raise SourceError(
                    f"{path}: ends at byte {offset + done:,}, wanted {offset + nbytes:,}"
                )
            done += n
    except SourceError:
        raise
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> SourceError:
    return SourceError(f"{path}: read failed ({error.strerror or error})")
