"""Arithmetic of sizes and offsets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moepack.formats.errors import FormatError
from moepack.formats.geometry import (
    ALIGNMENT,
    DTYPE_NBYTES,
    MAX_NBYTES,
    Part,
    align_up,
    lay_out_parts,
    tensor_nbytes,
)


@given(st.integers(0, 2**80), st.integers(1, 2**24))
def test_align_up_gives_the_smallest_multiple_not_below(nbytes: int, alignment: int) -> None:
    aligned = align_up(nbytes, alignment)
    assert aligned % alignment == 0
    assert nbytes <= aligned < nbytes + alignment


@pytest.mark.parametrize(
    ("nbytes", "wanted"), [(0, 0), (1, 16_384), (16_384, 16_384), (16_385, 32_768)]
)
def test_align_up_uses_16384_bytes_unless_told(nbytes: int, wanted: int) -> None:
    assert ALIGNMENT == 16_384
    assert align_up(nbytes) == wanted


@pytest.mark.parametrize(
    ("dtype", "shape", "wanted"),
    [
        ("U8", (), 1),
        ("BF16", (3, 5), 30),
        ("U32", (7,), 28),
        ("C64", (2, 2), 32),
        ("F32", (4, 0, 9), 0),
        ("U8", (MAX_NBYTES,), MAX_NBYTES),
    ],
)
def test_tensor_nbytes_is_the_product_of_shape_and_item(
    dtype: str, shape: tuple[int, ...], wanted: int
) -> None:
    assert tensor_nbytes("t", dtype, shape) == wanted


@pytest.mark.parametrize("dtype", ["", "bf16", "F4", "F6_E2M3", "float32"])
def test_tensor_nbytes_refuses_an_unknown_dtype_by_name(dtype: str) -> None:
    with pytest.raises(FormatError, match="shared tensor x: dtype") as caught:
        tensor_nbytes("shared tensor x", dtype, (1,))
    assert repr(dtype) in str(caught.value)


@pytest.mark.parametrize(
    ("dtype", "shape"), [("U8", (2**63,)), ("F32", (2**31, 2**31)), ("C64", (2**64 - 1,) * 32)]
)
def test_tensor_nbytes_refuses_more_than_63_bits(dtype: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(FormatError, match=r"tensor y: \d+ bytes do not fit a 64-bit offset"):
        tensor_nbytes("tensor y", dtype, shape)


def test_parts_are_laid_out_in_name_order_back_to_back() -> None:
    parts = lay_out_parts([("b", "U32", (2,)), ("a.weight", "U8", (3,)), ("a.scales", "F16", ())])
    assert parts == (
        Part("a.scales", "F16", (), 0, 2),
        Part("a.weight", "U8", (3,), 2, 3),
        Part("b", "U32", (2,), 5, 8),
    )


def test_item_sizes_are_those_of_safetensors() -> None:
    assert {
        n: sorted(d for d, size in DTYPE_NBYTES.items() if size == n) for n in (1, 2, 4, 8)
    } == {
        1: ["BOOL", "F8_E4M3", "F8_E5M2", "I8", "U8"],
        2: ["BF16", "F16", "I16", "U16"],
        4: ["F32", "I32", "U32"],
        8: ["C64", "F64", "I64", "U64"],
    }
    assert set(DTYPE_NBYTES.values()) == {1, 2, 4, 8}
