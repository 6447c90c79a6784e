"""Reading records: one positional read per expert, scattered straight into the rows of a slot.

Worker threads only move bytes into views handed to them; they never touch MLX or the slot maps.
"""

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from moepack.formats.errors import FormatError
from moepack.formats.manifest import ExpertModule
from moepack.formats.pack import Pack

__all__ = ["RecordReader"]


class RecordReader:
    """Reads the records of one module. `layer` is the module's place in the pack, for messages."""

    def __init__(self, pack: Pack, layer: int, pool: ThreadPoolExecutor) -> None:
        self.module: ExpertModule = pack.manifest.modules[layer]
        self.layer = layer
        self._path = pack.expert_file(self.module)
        self._pool = pool
        self._fd = -1
        try:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise FormatError(f"{self._path}: {error.strerror}") from error

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
        """Read one record. Raises FormatError naming layer, expert and file."""
        offset = expert * self.module.stride
        wanted = self.module.record_nbytes
        try:
            done = os.preadv(self._fd, row, offset)
            while done < wanted:
                n = os.preadv(self._fd, _after(row, done), offset + done)
                if n == 0:
                    raise FormatError(
                        f"layer {self.layer} expert {expert}: {self._path} ends at byte "
                        f"{offset + done:,}, wanted {offset + wanted:,}; convert again"
                    )
                done += n
        except OSError as error:
            raise FormatError(
                f"layer {self.layer} expert {expert}: {self._path}: read failed ({error.strerror})"
            ) from error


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
