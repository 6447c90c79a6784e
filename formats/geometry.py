"""Sizes and offsets: where a record and its parts lie. Pure arithmetic, no files.

A record is all parts of one expert, back to back; records stand at a fixed stride.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from moepack.formats.errors import FormatError

__all__ = [
    "ALIGNMENT",
    "DTYPE_NBYTES",
    "Part",
    "align_up",
    "lay_out_parts",
    "tensor_nbytes",
]

ALIGNMENT = 16_384  # Apple silicon's page; a multiple of every Linux page and disk sector in use.
MAX_NBYTES = 2**63 - 1  # offsets are signed 64-bit in every system call that takes them

# Names and sizes as in the safetensors format; sub-byte types never reach a pack.
DTYPE_NBYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor inside a record: `shape` is one expert's, `offset` counts from the record."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def align_up(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """The smallest multiple of `alignment` that is at least `nbytes`."""
    return -(-nbytes // alignment) * alignment


def tensor_nbytes(where: str, dtype: str, shape: Iterable[int]) -> int:
    """Bytes of a dense tensor. Raises FormatError for an unknown dtype or more than 2^63 bytes."""
    if dtype not in DTYPE_NBYTES:
        raise FormatError(f"{where}: dtype {dtype!r} is not one of {', '.join(DTYPE_NBYTES)}")
    nbytes = math.prod(shape, start=DTYPE_NBYTES[dtype])
    if nbytes > MAX_NBYTES:
        raise FormatError(f"{where}: {nbytes} bytes do not fit a 64-bit offset")
    return nbytes


def lay_out_parts(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> tuple[Part, ...]:
    """Parts in name order, back to back, from (name, dtype, per-expert shape)."""
    parts: list[Part] = []
    offset = 0
    for name, dtype, shape in sorted(tensors):
        nbytes = tensor_nbytes(name, dtype, shape)
        parts.append(Part(name, dtype, shape, offset, nbytes))
        offset += nbytes
    return tuple(parts)
