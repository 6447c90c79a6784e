"""Where each tensor goes in the pack's files, and putting it there. One row at a time."""

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path

import xxhash

from moepack.formats.digests import CHUNK_NBYTES, digest_bytes, read_range
from moepack.formats.errors import SourceError
from moepack.formats.geometry import align_up, lay_out_parts, tensor_nbytes
from moepack.formats.manifest import ExpertModule, Manifest, SharedTensor
from moepack.formats.pack import SHARED_NAME
from moepack.formats.progress import Advance, silent
from moepack.packer.checkpoint import Checkpoint, ExpertTensors
from moepack.packer.tensors import TensorBytes

__all__ = [
    "Layout",
    "Target",
    "digest_records",
    "digest_target",
    "lay_out",
    "targets_of",
    "write_tensor",
]


@dataclass(frozen=True, slots=True)
class Target:
    """The place of a tensor: `n_rows` runs of `row_nbytes` in a file, `row_stride` apart."""

    file: str
    offset: int
    row_nbytes: int
    n_rows: int
    row_stride: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.row_nbytes * self.n_rows

    def ranges(self) -> Iterator[tuple[int, int]]:
        """(offset, bytes) in tensor order, none larger than a row or CHUNK_NBYTES."""
        step = self.chunk_nbytes
        for row in range(self.n_rows):
            start = self.offset + row * self.row_stride
            for done in range(0, self.row_nbytes, step):
                yield start + done, min(step, self.row_nbytes - done)

    @property
    def chunk_nbytes(self) -> int:
        """Rows of experts go whole; the one row of a shared tensor in chunks."""
        return self.row_nbytes if self.n_rows > 1 else max(1, min(self.row_nbytes, CHUNK_NBYTES))


@dataclass(frozen=True, slots=True)
class Layout:
    """The pack's geometry, digests still missing: `targets` by parameter path, file sizes."""

    modules: tuple[ExpertModule, ...]
    shared: tuple[SharedTensor, ...]
    targets: Mapping[str, Target]
    file_nbytes: Mapping[str, int]

    @property
    def nbytes(self) -> int:
        """Bytes that the pack's weight files will have."""
        return sum(self.file_nbytes.values())


def lay_out(checkpoint: Checkpoint) -> Layout:
    """Where every tensor of the checkpoint goes."""
    modules = tuple(_lay_out_module(i, m) for i, m in enumerate(checkpoint.modules))
    shared = []
    offset = 0
    for name, t in checkpoint.shared.items():
        nbytes = tensor_nbytes(name, t.dtype, t.shape)
        shared.append(SharedTensor(name, t.dtype, t.shape, offset, nbytes, b""))
        offset = align_up(offset + nbytes)
    file_nbytes = {SHARED_NAME: offset} | {m.file: m.stride * m.n_experts for m in modules}
    return Layout(modules, tuple(shared), _targets(modules, shared), file_nbytes)


def targets_of(manifest: Manifest) -> dict[str, Target]:
    """Where each tensor of a pack lies, by parameter path."""
    return _targets(manifest.modules, manifest.shared)


def _targets(modules: Sequence[ExpertModule], shared: Sequence[SharedTensor]) -> dict[str, Target]:
    return {
        f"{m.path}.{part.name}": Target(m.file, part.offset, part.nbytes, m.n_experts, m.stride)
        for m in modules
        for part in m.parts
    } | {t.name: Target(SHARED_NAME, t.offset, t.nbytes, 1, t.nbytes) for t in shared}


def _lay_out_module(index: int, experts: ExpertTensors) -> ExpertModule:
    parts = lay_out_parts((name, t.dtype, t.shape[1:]) for name, t in experts.tensors.items())
    record_nbytes = sum(part.nbytes for part in parts)
    return ExpertModule(
        path=experts.path,
        class_name=experts.class_name,
        file=f"experts/{index:05d}.bin",
        n_experts=experts.n_experts,
        stride=align_up(record_nbytes),
        record_nbytes=record_nbytes,
        parts=parts,
        quantization=experts.quantization,
        digests=b"",
    )


def write_tensor(
    fd: int, target: Target, tensor: TensorBytes, writer: Executor, advance: Advance = silent
) -> bytes:
    """Write a tensor to its target; returns the xxh3-128 of its bytes in order.

    `writer`, of one thread, writes a row while the next one is read and digested here.
    """
    digest = xxhash.xxh3_128()
    rows = tensor.rows(target.chunk_nbytes)
    writing: Future[None] | None = None
    try:
        for offset, nbytes in target.ranges():
            row = next(rows, memoryview(b""))
            if len(row) != nbytes:
                raise SourceError(f"{target.file}: a tensor gave {len(row)} bytes, wanted {nbytes}")
            digest.update(row)
            if writing is not None:
                writing.result()
            writing = writer.submit(write_range, fd, row, offset)
            advance(nbytes)
    finally:
        if writing is not None:
            writing.result()  # its error, or nothing: no view is in use after this returns
    if next(rows, None) is not None:
        raise SourceError(f"{target.file}: a tensor gave more than {target.nbytes} bytes")
    return digest.digest()


def digest_target(path: Path, target: Target) -> bytes:
    """The digest that `write_tensor` gave, of the bytes that are in the file now."""
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(target.chunk_nbytes))
    with path.open("rb") as file:
        for offset, nbytes in target.ranges():
            read_range(file.fileno(), buffer[:nbytes], offset, path)
            digest.update(buffer[:nbytes])
    return digest.digest()


def digest_records(path: Path, module: ExpertModule, written: Mapping[str, bytes]) -> bytes:
    """The digests of a module's records, read back from its file.

    `written` holds each part's digest from when it was written: a byte that came back otherwise
    raises SourceError.
    """
    parts = {part.name: xxhash.xxh3_128() for part in module.parts}
    record = memoryview(bytearray(module.record_nbytes))
    digests = []
    with path.open("rb") as file:
        for expert in range(module.n_experts):
            read_range(file.fileno(), record, expert * module.stride, path)
            digests.append(digest_bytes(record))
            for part in module.parts:
                parts[part.name].update(record[part.offset : part.offset + part.nbytes])
    for name, digest in parts.items():
        if digest.digest() != written[f"{module.path}.{name}"]:
            raise SourceError(f"{path}: {name} reads back other bytes than were written; bad disk?")
    return b"".join(digests)


def write_range(fd: int, view: memoryview, offset: int) -> None:
    """Write all of `view` at `offset`; a short write is continued."""
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)
