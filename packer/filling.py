"""Filling a pack's weight files: every tensor written, made durable, noted and read back.

The calling thread reads and digests. Others write rows, make files durable and read whole layers
back, each while the next tensors are read.
"""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from moepack.formats.manifest import ExpertModule, Shard
from moepack.formats.progress import Advance
from moepack.packer.journal import Journal
from moepack.packer.publishing import fsync_folder
from moepack.packer.shards import ShardStore
from moepack.packer.source import STUBS_NAME
from moepack.packer.steps import Step
from moepack.packer.tensors import TensorBytes
from moepack.packer.writing import Layout, digest_records, write_tensor

__all__ = ["fill"]

# Written tensors are made durable and noted at least this often: what a crash can cost.
SYNC_NBYTES = 2**30


def fill(
    layout: Layout,
    steps: Sequence[Step],
    tensors: Mapping[str, TensorBytes],
    staging: Path,
    store: ShardStore,
    journal: Journal,
    advance: Advance,
) -> dict[str, bytes]:
    """Write what the journal has not; returns each module's digests of records, by path."""
    with _Filling(layout, staging, store, journal) as filling:
        if not store.keeps_source:  # names are durable before a shard goes
            for folder in (staging / "experts", staging / STUBS_NAME, staging, staging.parent):
                fsync_folder(folder)
        for step in steps:
            missing = [name for name in step.tensors if name not in journal.tensors]
            if step.fetch is not None and step.fetch not in journal.shards:
                store.fetch(step.fetch)
            for name in step.tensors:
                if name in missing:
                    filling.write(name, tensors[name], advance)
                else:
                    advance(layout.targets[name].nbytes)
            filling.sync([store.release(s) for s in step.release if s not in journal.shards])
            for shard in step.release:
                store.discard(shard)
        return filling.digests()


class _Filling:
    """The files, open, and the threads that work on them."""

    def __init__(self, layout: Layout, staging: Path, store: ShardStore, journal: Journal) -> None:
        self._layout = layout
        self._staging = staging
        self._store = store
        self._journal = journal
        self._files: dict[str, BinaryIO] = {}
        self._fresh: dict[str, bytes] = {}  # digests of tensors written, by name, to be synced
        self._syncing: Future[None] | None = None
        self._digests: dict[str, Future[bytes]] = {}
        names = ("write", "sync", "digest")
        self._pools = [ThreadPoolExecutor(1, thread_name_prefix=name) for name in names]
        self._writer, self._syncer, self._digester = self._pools

    def __enter__(self) -> "_Filling":
        try:
            for name, nbytes in self._layout.file_nbytes.items():
                path = self._staging / name
                self._files[name] = path.open("r+b" if path.exists() else "x+b")
                self._files[name].truncate(nbytes)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close()

    def _close(self) -> None:
        for pool in self._pools:
            pool.shutdown(cancel_futures=True)
        for file in self._files.values():
            file.close()

    def write(self, name: str, tensor: TensorBytes, advance: Advance) -> None:
        """Write a tensor; make what was written durable when it is much."""
        targets = self._layout.targets
        fd = self._files[targets[name].file].fileno()
        self._fresh[name] = write_tensor(fd, targets[name], tensor, self._writer, advance)
        if sum(targets[fresh].nbytes for fresh in self._fresh) > SYNC_NBYTES:
            self.sync([])

    def sync(self, released: list[Shard]) -> None:
        """Make what was written durable, then note it, and shards that are needed no more.

        Returns before that is done where these shards stay.
        """
        self._settle()
        fresh, self._fresh = self._fresh, {}
        self._syncing = self._syncer.submit(self._make_durable, fresh, released)
        if not self._store.keeps_source:
            self._settle()

    def digests(self) -> dict[str, bytes]:
        """Of the records of every module, by path; all is written, and noted when this returns."""
        self._settle()
        return {path: digest.result() for path, digest in self._digests.items()}

    def _make_durable(self, fresh: Mapping[str, bytes], released: Sequence[Shard]) -> None:
        for name in {self._layout.targets[name].file for name in fresh}:
            os.fsync(self._files[name].fileno())
        self._journal.add(fresh, [(shard, self._store.keeps(shard.name)) for shard in released])

    def _settle(self) -> None:
        """Wait until what `sync` began is done, and begin to read back what is whole by it."""
        if self._syncing is None:
            return
        self._syncing.result()
        self._syncing = None
        for module in self._layout.modules:
            if module.path not in self._digests and (written := self._written(module)):
                path = self._staging / module.file
                digest = self._digester.submit(digest_records, path, module, written)
                self._digests[module.path] = digest

    def _written(self, module: ExpertModule) -> dict[str, bytes]:
        """The digests of a module's tensors by name, when all are noted; else nothing."""
        noted = self._journal.tensors
        names = [f"{module.path}.{part.name}" for part in module.parts]
        return {name: noted[name] for name in names} if noted.keys() >= set(names) else {}
