"""Writing a pack's files and digesting what is written. One tensor, or one row of it, at a time."""

import os
from pathlib import Path

import xxhash

from moepack.formats.digests import CHUNK_NBYTES
from moepack.formats.errors import SourceError
from moepack.formats.geometry import ALIGNMENT, align_up, lay_out_parts, tensor_nbytes
from moepack.formats.manifest import ExpertModule, SharedTensor
from moepack.formats.progress import Advance
from moepack.packer.checkpoint import ExpertTensors
from moepack.packer.tensors import TensorBytes

__all__ = ["lay_out_module", "planned_nbytes", "write_experts", "write_shared"]


def lay_out_module(index: int, experts: ExpertTensors) -> ExpertModule:
    """The module's geometry, digests still missing."""
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


def planned_nbytes(modules: list[ExpertModule], shared: dict[str, TensorBytes]) -> int:
    """Bytes that the pack's weight files will have."""
    return sum(m.stride * m.n_experts for m in modules) + sum(
        align_up(tensor_nbytes(name, t.dtype, t.shape)) for name, t in shared.items()
    )


def write_experts(
    path: Path, layout: ExpertModule, experts: ExpertTensors, advance: Advance
) -> bytes:
    """Write one module's records to `path`, fsynced; returns their digests, in expert order.

    Part by part, so that each source tensor is read once from end to end.
    """
    digests = [xxhash.xxh3_128() for _ in range(layout.n_experts)]
    with path.open("xb", buffering=0) as file:
        os.truncate(file.fileno(), layout.stride * layout.n_experts)
        for part in layout.parts:  # in offset order, as the digests need them
            n_rows = 0
            for expert, row in enumerate(experts.tensors[part.name].rows(part.nbytes)):
                if len(row) != part.nbytes or expert >= layout.n_experts:
                    raise SourceError(
                        f"{layout.path} {part.name}: expert {expert} has a wrong size"
                    )
                write_range(file.fileno(), row, expert * layout.stride + part.offset)
                digests[expert].update(row)
                advance(len(row))
                n_rows += 1
            if n_rows != layout.n_experts:
                raise SourceError(
                    f"{layout.path} {part.name}: {n_rows} experts, wanted {layout.n_experts}"
                )
        os.fsync(file.fileno())
    return b"".join(digest.digest() for digest in digests)


def write_shared(
    path: Path, tensors: dict[str, TensorBytes], advance: Advance
) -> tuple[SharedTensor, ...]:
    """Write the shared weights to `path`, fsynced, each tensor at the next aligned offset."""
    written = []
    offset = 0
    with path.open("xb", buffering=0) as file:
        for name, tensor in tensors.items():
            nbytes = tensor_nbytes(name, tensor.dtype, tensor.shape)
            digest = xxhash.xxh3_128()
            done = 0
            for row in tensor.rows(CHUNK_NBYTES):
                write_range(file.fileno(), row, offset + done)
                digest.update(row)
                advance(len(row))
                done += len(row)
            if done != nbytes:
                raise SourceError(f"{name}: {done} bytes, its shape wants {nbytes}")
            written.append(
                SharedTensor(name, tensor.dtype, tensor.shape, offset, nbytes, digest.digest())
            )
            offset = align_up(offset + nbytes, ALIGNMENT)
        os.truncate(file.fileno(), offset)
        os.fsync(file.fileno())
    return tuple(written)


def write_range(fd: int, view: memoryview, offset: int) -> None:
    """Write all of `view` at `offset`; a short write is continued."""
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)
