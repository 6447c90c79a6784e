"""A source on the Hugging Face hub, packed without a local copy: one shard on disk at a time.

Headers are fetched first, by ranges, and written as stubs, from which the model is understood.
Then each shard's data is fetched into its stub, packed, and given back as a hole.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import HfApi, HfFileSystem

from moepack.formats.errors import SourceError
from moepack.formats.manifest import Shard
from moepack.packer.shards import digest_shard
from moepack.packer.source import (
    COPIED_PATTERNS,
    MAX_HEADER_NBYTES,
    SourceFolder,
    most_header_nbytes,
    open_folder,
    snapshot,
    write_stub,
)

__all__ = ["HubShards", "open_hub_source"]


def open_hub_source(
    repository: str, revision: str | None, stubs: Path
) -> tuple[SourceFolder, "HubShards"]:
    """The checked source, its shards stubs in the folder `stubs`, and the store that fills them.

    Raises SourceError.
    """
    try:
        folder = Path(snapshot(repository, revision, COPIED_PATTERNS))
        commit = folder.name
        info = HfApi().model_info(repository, revision=commit, files_metadata=True)
        files = {
            entry.rfilename: (entry.size or 0, entry.lfs.sha256 if entry.lfs else None)
            for entry in info.siblings or []
            if entry.rfilename.endswith(".safetensors") and "/" not in entry.rfilename
        }
        stubs.parent.mkdir(exist_ok=True)
        stubs.mkdir(exist_ok=True)
        for stub in stubs.iterdir():
            if stub.name not in files:
                stub.unlink()
        remote = HfFileSystem()
        for name, (nbytes, _) in files.items():
            header = _fetch_header(remote, f"{repository}@{commit}/{name}", nbytes)
            if not _is_stub(stubs / name, header, nbytes):
                write_stub(stubs / name, header, nbytes)
    except SourceError:
        raise
    except Exception as error:  # the hub's errors, and those of whatever HTTP client it uses
        raise SourceError(f"{repository}: {_reason(error)}") from error
    source = open_folder(folder, repository, commit, stubs=stubs)
    return source, HubShards(source, files)


def _fetch_header(remote: HfFileSystem, path: str, nbytes: int) -> bytes:
    """The first bytes of a safetensors file, up to its data."""
    with remote.open(path, "rb", block_size=2**18) as file:
        prefix = file.read(8)
        size = int.from_bytes(prefix, "little")
        n_data = nbytes - 8 - size
        if (
            len(prefix) < 8
            or n_data < 0
            or size > min(MAX_HEADER_NBYTES, most_header_nbytes(n_data))
        ):
            raise SourceError(f"{path}: not a safetensors file")
        return bytes(prefix + file.read(size))


def _is_stub(path: Path, header: bytes, nbytes: int) -> bool:
    """Whether there is a stub already, and of this very shard."""
    if not path.is_file() or path.stat().st_size != nbytes:
        return False
    with path.open("rb") as file:
        return file.read(len(header)) == header


class HubShards:
    """See ShardStore. Every fetched shard is checked against the sha256 that the hub states."""

    keeps_source = False  # what was fetched is not fetched again

    def __init__(self, source: SourceFolder, files: Mapping[str, tuple[int, str | None]]) -> None:
        self._source = source
        self._files = files
        self._paths = {path.name: path for path in source.shards}
        self._fetched: dict[str, Shard] = {}

    def keeps(self, name: str) -> bool:
        """See ShardStore."""
        return False

    def fetch(self, name: str) -> None:
        """See ShardStore: downloads into the stub, which lazy arrays have open already."""
        stub = self._paths[name]
        path = f"{self._source.name}@{self._source.revision}/{name}"
        try:
            with stub.open("r+b") as file:
                HfFileSystem().get_file(path, outfile=file)
                file.flush()
                os.fsync(file.fileno())
        except Exception as error:  # as above
            raise SourceError(
                f"{path}: {_reason(error)}; run the same command again to go on from here"
            ) from error
        nbytes, wanted = self._files[name]
        shard = digest_shard(stub)
        if shard.nbytes != nbytes or (wanted is not None and shard.sha256 != wanted):
            raise SourceError(f"{path}: sha256 is {shard.sha256}, the hub states {wanted}")
        self._fetched[name] = shard

    def release(self, name: str) -> Shard:
        """See ShardStore."""
        return self._fetched[name]

    def discard(self, name: str) -> None:
        """See ShardStore: the stub becomes a hole again."""
        stub = self._paths[name]
        header = self._source.headers[name]
        with stub.open("r+b") as file:
            file.truncate(len(header))
            file.truncate(self._files[name][0])

    def freed_nbytes(self) -> Mapping[str, int]:
        """See ShardStore."""
        return {name: nbytes for name, (nbytes, _) in self._files.items()}

    def fetched_nbytes(self) -> Mapping[str, int]:
        """See ShardStore."""
        return self.freed_nbytes()

    def close(self) -> None:
        """See ShardStore: nothing goes on."""


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
