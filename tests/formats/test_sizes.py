"""Byte sizes as people write and read them."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moepack.formats.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("8", 8 * 10**9),
        ("8GB", 8 * 10**9),
        ("8G", 8 * 10**9),
        ("8gb", 8 * 10**9),
        ("8 GB", 8 * 10**9),
        ("  8GB\n", 8 * 10**9),
        ("8GiB", 8 * 2**30),
        ("512MB", 512 * 10**6),
        ("512MiB", 512 * 2**20),
        ("64kB", 64_000),
        ("64KiB", 65_536),
        ("1.5TB", 1_500_000_000_000),
        ("2TiB", 2 * 2**40),
        ("0.5", 500_000_000),
        ("100B", 100),
        ("0", 0),
    ],
)
def test_a_size_is_read_in_its_unit(text: str, wanted: int) -> None:
    assert parse_size(text) == wanted


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "GB",
        "-1GB",
        "+1GB",
        "8 G B",
        "8PB",
        "8GBs",
        "1e9",
        "0x10",
        ".5GB",
        "5.GB",
        "1,5GB",
        "nan",
        "inf",
        "8GB 8GB",
        "8\x00GB",
        "9" * 16,
        "9" * 100_000,
    ],
)
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size; write it as 8GB, 8GiB, 512MB or 8"):
        parse_size(text)


@given(st.integers(0, 2**63))
def test_an_integer_is_bytes(nbytes: int) -> None:
    assert parse_size(nbytes) == nbytes


@given(st.text() | st.from_regex(r"[\d.]{0,20} ?[KMGTkmgtiBb]{0,3}", fullmatch=True))
def test_any_text_is_a_size_or_a_value_error(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert parse_size(text) >= 0


@pytest.mark.parametrize(
    ("nbytes", "wanted"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1_769_472, "1.77 MB"),
        (19_900_000, "19.9 MB"),
        (512_000_000, "512 MB"),
        (999_400_000, "999 MB"),
        (999_600_000, "1 GB"),
        (8 * 10**9, "8 GB"),
        (1_500_000_000_000, "1.5 TB"),
    ],
)
def test_a_size_is_written_with_three_digits(nbytes: int, wanted: str) -> None:
    assert format_size(nbytes) == wanted


@given(st.integers(0, 999 * 10**12))
def test_a_written_size_reads_back_within_half_a_percent(nbytes: int) -> None:
    assert abs(parse_size(format_size(nbytes)) - nbytes) <= nbytes * 0.0051
