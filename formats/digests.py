"""Digests of what a pack holds, read back from disk: records, shared tensors, copied files.

A digest is xxh3-128: it finds damage, at memory speed; it is no defence against a forger.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from moepack.formats.errors import SourceError
from moepack.formats.geometry import align_up
from moepack.formats.pack import Pack
from moepack.formats.progress import Advance, silent

__all__ = ["Mismatch", "check_digests", "digest_bytes", "digest_file", "read_range", "wrong_files"]

CHUNK_NBYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One difference found. `layer` is the module's place in the pack; None: not in a module.

    `is_structural`: not other bytes, but other tensors, shapes or types than the source's.
    """

    module: str | None
    layer: int | None
    expert: int | None
    part: str | None
    reason: str
    is_structural: bool = False

    def __str__(self) -> str:
        if self.module is None:
            return f"{self.part}: {self.reason}"
        expert = f" expert {self.expert}" if self.expert is not None else ""
        part = f" {self.part}" if self.part else ""
        return f"layer {self.layer} ({self.module}){expert}{part}: {self.reason}"

    def as_map(self) -> dict[str, str | int | None]:
        """What `verify --json` lists."""
        return {key: getattr(self, key) for key in ("module", "layer", "expert", "part", "reason")}


def digest_bytes(data: bytes | bytearray | memoryview) -> bytes:
    """The 16-byte xxh3-128 digest of `data`."""
    return xxhash.xxh3_128_digest(data)


def digest_file(path: Path) -> bytes:
    """The 16-byte xxh3-128 digest of a whole file, read in chunks."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_NBYTES):
            digest.update(chunk)
    return digest.digest()


def read_range(fd: int, view: memoryview, offset: int, path: Path) -> None:
    """Fill `view` from `offset`. Raises SourceError on an I/O error or when the file ends first."""
    done = 0
    try:
        while done < len(view):
            n = os.preadv(fd, [view[done:]], offset + done)
            if n == 0:
                raise SourceError(f"{path}: ends at byte {offset + done:,}, the file was cut")
            done += n
    except SourceError:
        raise
    except OSError as error:
        raise SourceError(f"{path}: read failed at byte {offset + done:,} ({error})") from error


def wrong_files(pack: Pack) -> Iterator[str]:
    """The copied files that differ from their digests: config, tokenizer, template."""
    for file in pack.manifest.files:
        if digest_file(pack.path / file.name) != file.digest:
            yield file.name


def check_digests(pack: Pack, advance: Advance = silent) -> Iterator[Mismatch]:
    """Read the whole pack once and yield what differs from the manifest.

    `advance` is told of bytes as they are read.
    """
    manifest = pack.manifest
    for name in wrong_files(pack):
        yield Mismatch(None, None, None, name, "file differs from its digest")
    with pack.shared_file.open("rb") as shared:
        for tensor in manifest.shared:
            digest = xxhash.xxh3_128()
            buffer = memoryview(bytearray(min(tensor.nbytes, CHUNK_NBYTES)))
            for done in range(0, tensor.nbytes, CHUNK_NBYTES):
                view = buffer[: min(CHUNK_NBYTES, tensor.nbytes - done)]
                read_range(shared.fileno(), view, tensor.offset + done, pack.shared_file)
                digest.update(view)
                advance(len(view))
            if digest.digest() != tensor.digest:
                reason = "shared tensor differs from its digest"
                yield Mismatch(None, None, None, tensor.name, reason)
                continue
            end = tensor.offset + tensor.nbytes
            padding = memoryview(bytearray(align_up(end, manifest.alignment) - end))
            read_range(shared.fileno(), padding, end, pack.shared_file)
            if any(padding):
                reason = "padding after the shared tensor is not zero"
                yield Mismatch(None, None, None, tensor.name, reason)
    for layer, module in enumerate(manifest.modules):
        path = pack.expert_file(module)
        record = memoryview(bytearray(module.stride))
        zeros = bytes(module.stride - module.record_nbytes)
        with path.open("rb") as file_:
            for expert in range(module.n_experts):
                read_range(file_.fileno(), record, expert * module.stride, path)
                advance(module.record_nbytes)
                if digest_bytes(record[: module.record_nbytes]) != module.digest(expert):
                    reason = "record differs from its digest"
                    yield Mismatch(module.path, layer, expert, None, reason)
                elif record[module.record_nbytes :] != zeros:
                    reason = "padding after the record is not zero"
                    yield Mismatch(module.path, layer, expert, None, reason)
