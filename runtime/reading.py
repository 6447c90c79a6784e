"""Reading records: one positional read per expert, scattered straight into the rows of a slot.

Worker threads only move bytes into views handed to them, and compare them with their digest; they
never touch MLX or the slot maps.

Reads go through the page cache, or past it where it could not hold the files anyway: then filling
and emptying it costs more than it gives (tools/EXPERIMENTS.md). Past it, Linux (O_DIRECT) reads
straight into a slot whose parts are whole pages, else into an aligned buffer of the thread's own,
copied from there; macOS (F_NOCACHE) reads as ever. The macOS path was written from its
documentation and has not been run by its authors.
"""

import errno
import fcntl
import mmap
import os
import shlex
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import xxhash

from moepack.formats.errors import FormatError
from moepack.formats.manifest import ExpertModule
from moepack.formats.pack import Pack
from moepack.runtime.banks import PAGE_NBYTES

__all__ = [
    "CHECKS",
    "READ_WORKERS",
    "RecordReader",
    "bypasses_page_cache",
    "needs_buffer",
    "open_direct",
    "repair_command",
]

CHECKS = ("first", "always", "never")  # which reads of a record are compared with its digest

READ_WORKERS = 4  # threads that read, at least
SECTOR_NBYTES = 512
# O_DIRECT wants offsets, lengths and memory to be multiples of the device's block, at most this.
ALIGNMENT = PAGE_NBYTES
O_DIRECT = int(getattr(os, "O_DIRECT", 0))  # of Linux; Python has the name there only
F_NOCACHE = 48  # of macOS <sys/fcntl.h>; Python's fcntl has it there alone
# Below this share of the files in it, the page cache is slower than none: 0.88 ms a record of 1 MB
# through an emptied one, 0.15 ms from it, 0.56 ms past it.
WORTH_CACHING = 0.45


def bypasses_page_cache(expert_nbytes: int, free_nbytes: int) -> bool:
    """Whether to read past the page cache, if `free_nbytes` are all it can grow to."""
    return free_nbytes < WORTH_CACHING * expert_nbytes


def needs_buffer(module: ExpertModule) -> bool:
    """Whether reads of a module past the page cache go by a buffer of each thread's."""
    return sys.platform != "darwin" and any(part.nbytes % ALIGNMENT for part in module.parts)


def repair_command(pack: Pack) -> str:
    """What to type about a pack with wrong bytes in it."""
    return f"moepack repair {shlex.quote(str(pack.path))} SOURCE"


class RecordReader:
    """Reads the records of one module. `layer` is the module's place in the pack, for messages.

    `is_direct`: reads go past the page cache, as asked and where the file system can. The rows read
    into are those of Banks. `check` is one of CHECKS.
    """

    def __init__(
        self,
        pack: Pack,
        layer: int,
        pool: ThreadPoolExecutor,
        direct: bool = False,
        check: str = "first",
    ) -> None:
        self.module: ExpertModule = pack.manifest.modules[layer]
        self.layer = layer
        self._path = pack.expert_file(self.module)
        self._remedy = repair_command(pack)
        self._pool = pool
        # By expert, whether its next read is checked. Two threads never read one expert at a time.
        self._is_due = bytearray([check != "never"]) * self.module.n_experts
        self._stays_due = check == "always"
        self._fd = -1
        try:
            self._fd, self.is_direct = _open(self._path, direct)
        except OSError as error:
            raise FormatError(f"{self._path}: {error.strerror}") from error
        self._needs_buffer = self.is_direct and needs_buffer(self.module)

    def close(self) -> None:
        """Close the file. Reads after this fail."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()

    def start(
        self, experts: Sequence[int], rows: Sequence[list[memoryview]]
    ) -> list["Future[None]"]:
        """Begin reading record `experts[i]` into `rows[i]`, all in parallel."""
        return [
            self._pool.submit(self.read, expert, row)
            for expert, row in zip(experts, rows, strict=True)
        ]

    def read_all(self, experts: Sequence[int], rows: Sequence[list[memoryview]]) -> None:
        """Read all and return; this thread reads one of them. Raises FormatError."""
        futures = self.start(experts[1:], rows[1:])
        try:
            self.read(experts[0], rows[0])
        finally:
            wait_for(futures)

    def read(self, expert: int, row: list[memoryview]) -> None:
        """Read one record and check it where that is due; a wrong one is read once more.

        Raises FormatError naming layer, expert and file.
        """
        self._read(expert, row)
        if not self._is_due[expert]:
            return
        if not self._is_right(expert, row):
            self._forget(expert)
            self._read(expert, row)
            if not self._is_right(expert, row):
                raise FormatError(
                    f"layer {self.layer} expert {expert}: {self._path}: the record, read twice, "
                    f"differs from its digest; {self._remedy}"
                )
        self._is_due[expert] = self._stays_due

    def _is_right(self, expert: int, row: list[memoryview]) -> bool:
        """Whether a slot holds the bytes that the manifest has the digest of."""
        digest = xxhash.xxh3_128()
        for view in row:
            digest.update(view)
        return digest.digest() == self.module.digest(expert)

    def _forget(self, expert: int) -> None:
        """Have the page cache drop a record, where it can be told to: the next read is the disk's.

        A part that is being written, or mapped by someone, stays.
        """
        if sys.platform != "darwin" and not self.is_direct:
            stride = self.module.stride
            os.posix_fadvise(self._fd, expert * stride, stride, os.POSIX_FADV_DONTNEED)

    def _read(self, expert: int, row: list[memoryview]) -> None:
        if self._needs_buffer:
            view = _aligned_buffer(self.module.stride)
            self._fill([view], expert, len(view))
            buffer = np.frombuffer(view, np.uint8)
            start = 0
            for target in row:  # by NumPy, which lets other threads run meanwhile
                np.copyto(np.frombuffer(target, np.uint8), buffer[start : start + len(target)])
                start += len(target)
        else:
            self._fill(row, expert, self.module.record_nbytes)

    def _fill(self, row: list[memoryview], expert: int, wanted: int) -> None:
        """Fill views with the first `wanted` bytes at a record's place."""
        offset = expert * self.module.stride
        try:
            done = os.preadv(self._fd, row, offset)
            while done < wanted:
                # Past the page cache a read begins at a sector.
                start = done - done % SECTOR_NBYTES if self.is_direct else done
                n = start - done + os.preadv(self._fd, _after(row, start), offset + start)
                if n <= 0:
                    raise FormatError(
                        f"layer {self.layer} expert {expert}: {self._path} ends at byte "
                        f"{offset + done:,}, wanted {offset + wanted:,}; {self._remedy}"
                    )
                done += n
        except OSError as error:
            raise FormatError(
                f"layer {self.layer} expert {expert}: {self._path}: read failed ({error.strerror})"
            ) from error


_buffers = threading.local()  # one buffer a thread, for all layers


def _aligned_buffer(nbytes: int) -> memoryview:
    """This thread's buffer, page-aligned, of `nbytes`."""
    if len(getattr(_buffers, "view", b"")) < nbytes:
        _buffers.view = memoryview(mmap.mmap(-1, nbytes))
    view: memoryview = _buffers.view[:nbytes]
    return view


def _open(path: Path, direct: bool) -> tuple[int, bool]:
    """(an open file, whether it is read past the page cache)."""
    flags = os.O_RDONLY | os.O_CLOEXEC
    if direct and (fd := open_direct(path, flags)) is not None:
        return fd, True
    fd = os.open(path, flags)
    if direct and sys.platform == "darwin":
        fcntl.fcntl(fd, F_NOCACHE, 1)
        return fd, True
    return fd, False


def open_direct(path: Path, flags: int) -> int | None:
    """The file opened with O_DIRECT and read from; None where that is not to be had."""
    if not O_DIRECT or sys.platform == "darwin" or path.stat().st_size < ALIGNMENT:
        return None
    try:
        fd = os.open(path, flags | O_DIRECT)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return None
        raise
    try:
        os.preadv(fd, [memoryview(mmap.mmap(-1, ALIGNMENT))], 0)
    except OSError as error:
        os.close(fd)
        if error.errno == errno.EINVAL:
            return None
        raise
    return fd


def wait_for(futures: Sequence["Future[None]"]) -> None:
    """Wait for all, then raise the first error, if any: no view is in use after this returns."""
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise errors[0]


def _after(row: list[memoryview], done: int) -> list[memoryview]:
    """The views that remain when `done` bytes are there."""
    rest = []
    for view in row:
        if done < len(view):
            rest.append(view[done:])
        done = max(0, done - len(view))
    return rest
