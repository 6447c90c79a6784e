"""Shared weights: `shared.bin`, mapped, its tensors handed to MLX.

On Metal a tensor's whole pages are adopted in place; where the platform declines, and always on
the CPU backend, MLX copies, which is counted, and the mapping's pages are given back.
The Metal path was written from MLX's documentation and has not been run by its authors.
"""

import mmap
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from moepack.formats.digests import digest_bytes
from moepack.formats.errors import FormatError
from moepack.formats.manifest import SharedTensor
from moepack.formats.pack import Pack
from moepack.runtime.banks import MLX_DTYPES
from moepack.runtime.reading import repair_command

__all__ = ["SharedWeights", "load_shared"]

MAX_ADOPTED_NBYTES = 2**31 - 1  # MLX's DLPack import counts elements, here bytes, in 32 bits


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """Arrays by parameter path; how many of their bytes were adopted in place and copied."""

    arrays: dict[str, mx.array]
    adopted_nbytes: int
    copied_nbytes: int


def load_shared(pack: Pack, check: bool = True) -> SharedWeights:
    """All shared tensors of a pack as evaluated arrays, their digests compared if `check`.

    Raises FormatError naming a tensor that differs from its digest.
    """
    arrays: dict[str, mx.array] = {}
    adopted = copied = 0
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    if pack.manifest.shared_nbytes == 0:
        return SharedWeights({}, 0, 0)
    with pack.shared_file.open("rb") as file:
        # Private (copy on write), since NumPy exports only writable memory through DLPack.
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    for tensor in pack.manifest.shared:
        if check and not _is_right(mapping, tensor):
            raise FormatError(
                f"{pack.shared_file}: shared tensor {tensor.name} differs from its digest; "
                f"{repair_command(pack)}"
            )
        raw = _adopt(mapping, tensor) if can_adopt(on_gpu, tensor.nbytes) else None
        if raw is not None:
            adopted += tensor.nbytes
        else:
            raw = _copy(mapping, tensor)
            copied += tensor.nbytes
        arrays[tensor.name] = _typed(raw, tensor)
    return SharedWeights(arrays, adopted, copied)


def _is_right(mapping: mmap.mmap, tensor: SharedTensor) -> bool:
    """Whether the mapping has the bytes that the manifest has the digest of. Copies nothing."""
    with memoryview(mapping) as view:
        return digest_bytes(view[tensor.offset : tensor.offset + tensor.nbytes]) == tensor.digest


def can_adopt(on_gpu: bool, nbytes: int) -> bool:
    """Whether to ask MLX for an array on the mapping's own pages."""
    return on_gpu and 0 < nbytes <= MAX_ADOPTED_NBYTES


def _adopt(mapping: mmap.mmap, tensor: SharedTensor) -> mx.array | None:
    """A uint8 array on the mapping's pages, or None where the platform declines."""
    nbytes = -(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE  # tensors are padded to pages
    pages = np.frombuffer(mapping, dtype=np.uint8, count=nbytes, offset=tensor.offset)
    try:
        return mx.from_dlpack(pages, copy=False)[: tensor.nbytes]
    except ValueError:
        return None


def _copy(mapping: mmap.mmap, tensor: SharedTensor) -> mx.array:
    """A uint8 array with a copy of the bytes; the mapping's pages are dropped."""
    if tensor.nbytes == 0:
        return mx.zeros((0,), dtype=mx.uint8)
    view = np.frombuffer(mapping, dtype=np.uint8, count=tensor.nbytes, offset=tensor.offset)
    array = mx.array(view)
    mx.eval(array)
    del view
    mapping.madvise(mmap.MADV_DONTNEED, tensor.offset, tensor.nbytes)
    return array


def _typed(raw: mx.array, tensor: SharedTensor) -> mx.array:
    """`raw` bytes as the tensor they are; no copy."""
    dtype = MLX_DTYPES[tensor.dtype]
    typed = raw if dtype in (mx.uint8, mx.bool_) else raw.view(dtype)
    if dtype == mx.bool_:
        typed = raw.astype(mx.bool_)
    array = typed.reshape(tensor.shape)
    mx.eval(array)
    return array
