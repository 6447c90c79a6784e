"""Bytes of one tensor on their way into a pack: copied from a shard, or evaluated by MLX.

Both kinds hand out their bytes in order, in rows of a size the caller chooses, so memory is one
row for a copied tensor and one tensor for a derived one.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from moepack.formats.digests import read_range
from moepack.packer.source import TensorRange

__all__ = ["MLX_DTYPE_NAMES", "CopiedTensor", "DerivedTensor", "TensorBytes", "array_bytes"]

MLX_DTYPE_NAMES = {
    mx.bool_: "BOOL",
    mx.uint8: "U8",
    mx.int8: "I8",
    mx.uint16: "U16",
    mx.int16: "I16",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint32: "U32",
    mx.int32: "I32",
    mx.float32: "F32",
    mx.uint64: "U64",
    mx.int64: "I64",
    mx.float64: "F64",
    mx.complex64: "C64",
}


class TensorBytes(Protocol):
    """A tensor's dtype (as MLX holds it), shape, and a way to its bytes.

    `sources` names the tensors of the source that it is made of.
    """

    dtype: str
    shape: tuple[int, ...]
    sources: frozenset[str]

    def rows(self, row_nbytes: int) -> Iterator[memoryview]:
        """The tensor's bytes in order, `row_nbytes` at a time, the last possibly fewer.

        A view is valid until the next but one is asked for. May be called once.
        """
        ...


class CopiedTensor:
    """A tensor that the loader passed through unchanged: its bytes are a range of a shard."""

    def __init__(self, dtype: str, name: str, source: TensorRange) -> None:
        self.dtype = dtype
        self.sources = frozenset((name,))
        self.shape = source.shape
        self._source = source

    def rows(self, row_nbytes: int) -> Iterator[memoryview]:
        """See TensorBytes. Raises SourceError when the shard ends early."""
        path, offset, nbytes = self._source.path, self._source.offset, self._source.nbytes
        buffers = cycle(memoryview(bytearray(min(row_nbytes, nbytes))) for _ in range(2))
        fd = os.open(path, os.O_RDONLY)
        try:
            for done in range(0, nbytes, row_nbytes):
                row = next(buffers)[: min(row_nbytes, nbytes - done)]
                read_range(fd, row, offset + done, path)
                yield row
        finally:
            os.close(fd)

    def read_rows(self, numbers: Sequence[int], rows: Iterable[memoryview]) -> None:
        """Fill each of `rows` with one row of the first dimension, that of the same place's number.

        May be called any number of times. Raises SourceError when the shard ends early.
        """
        path, row_nbytes = self._source.path, self._source.nbytes // self.shape[0]
        fd = os.open(path, os.O_RDONLY)
        try:
            for number, row in zip(numbers, rows, strict=True):
                read_range(fd, row, self._source.offset + number * row_nbytes, path)
        finally:
            os.close(fd)


class DerivedTensor:
    """A tensor that mlx-lm computes from the source's: stacked, split, renormed, quantized."""

    def __init__(self, array: mx.array, sources: frozenset[str]) -> None:
        self.sources = sources
        self.dtype = MLX_DTYPE_NAMES[array.dtype]
        self.shape = tuple(array.shape)
        self._array: mx.array | None = array

    def rows(self, row_nbytes: int) -> Iterator[memoryview]:
        """See TensorBytes. Evaluates the array, and drops it at the end."""
        array, self._array = self._array, None
        if array is None:
            raise RuntimeError("a derived tensor's bytes can be had once")
        view = array_bytes(array)
        for done in range(0, len(view), row_nbytes):
            yield view[done : done + row_nbytes]
        del view, array
        mx.clear_cache()


def array_bytes(array: mx.array) -> memoryview:
    """The bytes of an array in row-major order; evaluates it, copies only if not contiguous."""
    flat: Any = mx.contiguous(array).reshape(-1)
    if flat.dtype == mx.bfloat16:  # NumPy has no bfloat16
        flat = flat.view(mx.uint16)
    mx.eval(flat)
    return np.array(flat, copy=False).view(np.uint8).data
