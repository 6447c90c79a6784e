"""The shards of a source while a pack is made of them: kept, consumed, or fetched one by one.

Digests of whole shards (sha256, as the hub states them) are taken beside the writing.
"""

import fcntl
import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from moepack.formats.errors import SourceError
from moepack.formats.manifest import Shard

__all__ = ["ConsumedShards", "LocalShards", "ShardStore", "digest_shard"]


class ShardStore(Protocol):
    """How shards come and go. `keeps_source`: a failed convert loses nothing by starting over."""

    keeps_source: bool

    def keeps(self, name: str) -> bool:
        """Whether the shard will still be there after it was discarded."""

    def fetch(self, name: str) -> None:
        """Have the shard's bytes at its path. Raises SourceError."""

    def release(self, name: str) -> Shard:
        """What the manifest says of the shard; it will not be read again."""

    def discard(self, name: str) -> None:
        """Give the disk space of a released shard back, after its release was noted."""

    def freed_nbytes(self) -> Mapping[str, int]:
        """What discarding each shard gives back."""

    def fetched_nbytes(self) -> Mapping[str, int]:
        """What fetching each shard takes."""

    def close(self) -> None:
        """Stop what goes on beside the writing."""


class LocalShards:
    """Shards of a folder, left as they are."""

    keeps_source = True

    def __init__(self, shards: tuple[Path, ...]) -> None:
        self._paths = {path.name: path for path in shards}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="sha256")
        self._digests: dict[str, Future[Shard]] = {}

    def keeps(self, name: str) -> bool:
        """See ShardStore."""
        return True

    def fetch(self, name: str) -> None:
        """See ShardStore: begins its digest."""
        if name not in self._paths:
            raise SourceError(f"{name}: the shard is gone; its bytes are not in the pack yet")
        self._digests[name] = self._pool.submit(digest_shard, self._paths[name])

    def release(self, name: str) -> Shard:
        """See ShardStore."""
        return self._digests[name].result()

    def discard(self, name: str) -> None:
        """See ShardStore: nothing is given back."""

    def freed_nbytes(self) -> Mapping[str, int]:
        """See ShardStore."""
        return {}

    def fetched_nbytes(self) -> Mapping[str, int]:
        """See ShardStore."""
        return {}

    def close(self) -> None:
        """See ShardStore."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class ConsumedShards(LocalShards):
    """Shards of a folder, deleted once everything in them is in the pack, on disk and digested.

    Only those in `restorable` are: of the others, some bytes are not in the pack.
    """

    keeps_source = False

    def __init__(self, shards: tuple[Path, ...], restorable: frozenset[str]) -> None:
        super().__init__(shards)
        self._restorable = restorable
        for path in shards:
            # Its bytes may belong to someone else too: another snapshot, another folder.
            if path.name in restorable and (path.is_symlink() or path.stat().st_nlink != 1):
                raise SourceError(f"{path}: is a link; --consume takes plain files only")
        folders = {path.parent for path in shards}
        for folder in folders:
            if not os.access(folder, os.W_OK):
                raise SourceError(f"{folder}: --consume may not delete files in this folder")
        self._locks = [_lock(folder) for folder in folders]

    def keeps(self, name: str) -> bool:
        """See ShardStore."""
        return name not in self._restorable

    def discard(self, name: str) -> None:
        """See ShardStore: the file goes."""
        path = self._paths.get(name)
        if path is not None and path.exists() and not self.keeps(name):
            with path.open("r+b") as file:
                path.unlink()  # first: an emptied shard would stand in the way of its stub
                file.truncate(0)  # MLX may still hold it open, and with it the space

    def close(self) -> None:
        """See ShardStore: others may consume the folder now."""
        super().close()
        for lock in self._locks:
            os.close(lock)

    def freed_nbytes(self) -> Mapping[str, int]:
        """See ShardStore."""
        return {
            name: path.stat().st_size
            for name, path in self._paths.items()
            if path.exists() and not self.keeps(name)
        }


def _lock(folder: Path) -> int:
    """An open file descriptor that keeps other converts from consuming this folder."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise SourceError(f"{folder}: another convert is consuming it") from error
    return lock


def digest_shard(path: Path) -> Shard:
    """Name, size and sha256 of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Shard(path.name, path.stat().st_size, digest)
