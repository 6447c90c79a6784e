"""The page of the format names what the code knows."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from formats_strategies import as_map, sample_manifest

from moepack.formats.geometry import DTYPE_NBYTES
from moepack.formats.manifest import MAX_MANIFEST_NBYTES
from moepack.formats.validate import MAX_EXPERTS, MODES

PAGE = (Path(__file__).parents[2] / "formats" / "README.md").read_text(encoding="utf-8")
NAMED_BY_A_MODEL = {"tensors", "files", "quantization", "options", "dropped", "renamed"}


def field_names(value: Any, key: str = "") -> Iterator[str]:
    """The manifest's own field names, in order, each as often as it occurs."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if key not in NAMED_BY_A_MODEL:
                yield name
            yield from field_names(inner, name if key not in NAMED_BY_A_MODEL else "")
    elif isinstance(value, list):
        for inner in value:
            yield from field_names(inner)


FIELD_NAMES = list(dict.fromkeys(field_names(as_map(sample_manifest()))))


def test_the_sample_has_the_fields_of_every_kind_of_map() -> None:
    assert {"magic", "tensors", "digest", "record_nbytes", "group_size", "sha256"} <= set(
        FIELD_NAMES
    )
    assert not {"config.json", "q_bits", "vision.weight"} & set(FIELD_NAMES)


@pytest.mark.parametrize("name", FIELD_NAMES)
def test_every_field_is_on_the_page(name: str) -> None:
    assert f"`{name}`" in PAGE


@pytest.mark.parametrize("name", [*DTYPE_NBYTES, *MODES])
def test_every_dtype_and_mode_is_on_the_page(name: str) -> None:
    assert f"`{name}`" in PAGE


def test_the_limits_are_on_the_page() -> None:
    assert f"1 to {MAX_EXPERTS:,}" in PAGE
    assert f"at most {MAX_MANIFEST_NBYTES // 2**20} MiB" in PAGE


def test_the_page_lists_the_fields_in_the_order_they_are_written() -> None:
    rows = [line.split("`")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    whole = as_map(sample_manifest())
    tables = [list(whole), list(whole["shared"]), list(whole["modules"][0]), list(whole["source"])]
    for names in tables:
        assert any(rows[i : i + len(names)] == names for i in range(len(rows)))


def test_the_page_has_at_most_100_columns() -> None:
    assert max(map(len, PAGE.splitlines())) <= 100
