"""Banks: one MLX array per part, row i for slot i, and the writable views of those rows.

A view write changes the bytes that MLX's kernels read, without an MLX operation or a copy. The
rule that makes it safe, kept by `streamed.py`: no graph that reads a bank may be unevaluated when
one of its rows is overwritten.
"""

import math

import mlx.core as mx
import numpy as np

from moepack.formats.errors import FormatError
from moepack.formats.manifest import ExpertModule

__all__ = ["MLX_DTYPES", "PAGE_NBYTES", "Banks"]

PAGE_NBYTES = 4096

# By safetensors name. MLX has no 8-bit floats: it holds and reads their bytes as uint8.
MLX_DTYPES = {
    "BOOL": mx.bool_,
    "U8": mx.uint8,
    "I8": mx.int8,
    "F8_E4M3": mx.uint8,
    "F8_E5M2": mx.uint8,
    "U16": mx.uint16,
    "I16": mx.int16,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "U32": mx.uint32,
    "I32": mx.int32,
    "F32": mx.float32,
    "U64": mx.uint64,
    "I64": mx.int64,
    "F64": mx.float64,
    "C64": mx.complex64,
}


class Banks:
    """The arrays of one layer, `(n_slots, *part_shape)` each, and per slot one view per part.

    `rows[slot]` lists writable byte views in record order: a target for one `preadv`. They begin at
    multiples of PAGE_NBYTES where the parts' sizes are such multiples: a target for O_DIRECT too.
    """

    def __init__(self, module: ExpertModule, n_slots: int) -> None:
        self.arrays = {
            part.name: _zeros((n_slots, *part.shape), MLX_DTYPES[part.dtype])
            for part in module.parts
        }
        mx.eval(self.arrays)
        views = [byte_rows(self.arrays[part.name]) for part in module.parts]
        self.rows = [[memoryview(view[slot]) for view in views] for slot in range(n_slots)]


def _zeros(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """As mx.zeros, of memory that begins at a multiple of PAGE_NBYTES; MLX's is not aligned so."""
    nbytes = math.prod(shape) * dtype.size
    spacious = mx.zeros(nbytes + PAGE_NBYTES, dtype=mx.uint8)
    mx.eval(spacious)
    skipped = -np.array(spacious, copy=False).ctypes.data % PAGE_NBYTES
    return spacious[skipped : skipped + nbytes].view(dtype).reshape(shape)  # none of it copies


def byte_rows(array: mx.array) -> "np.ndarray[tuple[int, int], np.dtype[np.uint8]]":
    """A writable `(rows, bytes_per_row)` uint8 view of an evaluated, contiguous array's memory."""
    if array.dtype == mx.bfloat16:  # NumPy has no bfloat16
        array = array.view(mx.uint16)
    view = np.array(array, copy=False)
    if not (view.flags.writeable and view.flags.c_contiguous):
        raise FormatError(f"MLX gave no writable view of an array of shape {view.shape}")
    return view.reshape(view.shape[0], -1).view(np.uint8)
