"""The manifest's bytes: round trip, and every way they can lie."""

import contextlib
import time
import tracemalloc
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from formats_strategies import as_map, manifests, sample_manifest, seal
from hypothesis import given, settings
from hypothesis import strategies as st

from moepack.formats.codec import decode, encode
from moepack.formats.errors import FormatError
from moepack.formats.manifest import CopiedFile, Manifest

SAMPLE = encode(sample_manifest())

# First bytes of msgpack types other than the ones a flipped bit gives.
TYPE_BYTES = bytes.fromhex("7f 80 90 a0 c0 c1 c2 c4 c7 ca cb cc d1 d9 dc de ff")

# Put in the place of every value of the sample's map, one at a time.
STRANGE_VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    511,
    10**9,
    2**31,
    2**53 + 1,
    2**63 - 1,
    2**63,
    2**64 - 1,
    -(2**63),
    1.0,
    float("nan"),
    float("inf"),
    "",
    "x",
    "../x",
    "x" * 1025,
    "\x1b[2J",
    b"",
    b"x" * 16,
    [],
    [1],
    [[]],
    [{}],
    [2**63, 2**63],
    [-1, -1],
    [1] * 33,
    ["x"],
    {},
    {"": 1},
    {"x": {}},
    {"x": None},
    {b"x": 1},
    {b"x": {}},
    msgpack.ExtType(5, b"x"),
    msgpack.Timestamp(1),
]


def decoded_or_refused(data: bytes) -> Manifest | None:
    """The manifest, or None for a FormatError. Any other exception is the test's failure."""
    with contextlib.suppress(FormatError):
        return decode(data)
    return None


def refusal(data: bytes) -> str | None:
    """The text of the FormatError, or None when `data` is read."""
    try:
        manifest = decode(data)
    except FormatError as error:
        return str(error)
    assert isinstance(manifest, Manifest)
    return None


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value inside nested maps and lists, the outermost left out."""
    if path:
        yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from paths_of(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from paths_of(inner, (*path, index))


def changed(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """The sample's map with one value replaced."""
    whole = as_map(sample_manifest())
    holder: Any = whole
    for step in path[:-1]:
        holder = holder[step]
    holder[path[-1]] = deepcopy(value)
    return whole


def without(path: tuple[Any, ...]) -> dict[str, Any]:
    """The sample's map with one entry left out."""
    whole = as_map(sample_manifest())
    holder: Any = whole
    for step in path[:-1]:
        holder = holder[step]
    del holder[path[-1]]
    return whole


PATHS = list(paths_of(as_map(sample_manifest())))
FIELDS = [
    path
    for path in PATHS
    if isinstance(path[-1], str)
    and path[:-1]
    not in [
        ("shared", "tensors"),
        ("files",),
        ("quantization",),
        ("source", "options"),
        ("source", "dropped"),
        ("source", "renamed"),
    ]
    and path[-2:-1] != ("quantization",)
]


def dotted(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


# --- round trip ---


@settings(max_examples=60)
@given(manifests())
def test_decode_inverts_encode(manifest: Manifest) -> None:
    assert decode(encode(manifest)) == manifest


@settings(max_examples=60)
@given(manifests())
def test_encode_inverts_decode_byte_for_byte(manifest: Manifest) -> None:
    data = encode(manifest)
    assert encode(decode(data)) == data


def test_the_order_of_mappings_does_not_change_the_bytes() -> None:
    manifest = sample_manifest()
    source = manifest.source
    turned = replace(
        manifest,
        modules=tuple(
            replace(m, quantization=dict(reversed(m.quantization.items())))
            for m in manifest.modules
        ),
        source=replace(source, options=dict(reversed(source.options.items()))),
    )
    assert encode(turned) == SAMPLE


@pytest.mark.parametrize("path", PATHS, ids=dotted)
def test_pack_id_covers_every_value(path: tuple[Any, ...]) -> None:
    whole = changed(path, "another")
    if path != ("pack_id",):
        assert msgpack.unpackb(seal(whole))["pack_id"] != sample_manifest().pack_id
    with pytest.raises(FormatError):
        decode(msgpack.packb(whole))


def test_a_wrong_pack_id_is_refused() -> None:
    with pytest.raises(FormatError, match="manifest: pack_id is 'f00d' but its content gives"):
        decode(msgpack.packb(changed(("pack_id",), "f00d")))


def test_the_order_of_fields_in_the_file_does_not_matter() -> None:
    turned = dict(reversed(as_map(sample_manifest()).items()))
    assert decode(msgpack.packb(turned)) == sample_manifest()


@pytest.mark.parametrize(
    "manifest",
    [
        pytest.param(replace(sample_manifest(), version=(2, 0)), id="version 2.0"),
        pytest.param(
            replace(
                sample_manifest(),
                shared=tuple(replace(t, digest=t.digest[:15]) for t in sample_manifest().shared),
            ),
            id="shared digest of 15 bytes",
        ),
        pytest.param(
            replace(sample_manifest(), files=(CopiedFile("config.json", 1, bytes(17)),)),
            id="file digest of 17 bytes",
        ),
        pytest.param(
            replace(sample_manifest(), files=(CopiedFile("config.json", 1, bytes(16)),) * 2),
            id="a copied file twice",
        ),
        pytest.param(
            replace(sample_manifest(), files=(CopiedFile("\udcff.json", 1, bytes(16)),)),
            id="a name that is not UTF-8",
        ),
        pytest.param(
            replace(
                sample_manifest(),
                shared=tuple(
                    replace(t, shape=tuple(-n for n in t.shape)) if len(t.shape) == 2 else t
                    for t in sample_manifest().shared
                ),
            ),
            id="negative dimensions",
        ),
        pytest.param(
            replace(
                sample_manifest(),
                shared=tuple(
                    replace(t, shape=(*t.shape, *[1] * 32)) for t in sample_manifest().shared
                ),
            ),
            id="34 dimensions",
        ),
        pytest.param(
            replace(
                sample_manifest(),
                source=replace(sample_manifest().source, options={"q_bits": 2**64}),
            ),
            id="an option of 65 bits",
        ),
    ],
)
def test_encode_refuses_what_decode_would(manifest: Manifest) -> None:
    with pytest.raises(FormatError):
        encode(manifest)


# --- damage ---


def test_a_file_cut_at_any_byte_is_refused() -> None:
    for n in range(len(SAMPLE)):
        with pytest.raises(FormatError):
            decode(SAMPLE[:n])


@pytest.mark.parametrize("tail", [b"\x00", b"\xc0", b"\x80", SAMPLE])
def test_bytes_after_the_map_are_refused(tail: bytes) -> None:
    with pytest.raises(FormatError, match="not a msgpack document"):
        decode(SAMPLE + tail)


def test_a_changed_byte_is_refused_or_leaves_all_but_the_minor_version() -> None:
    sample = sample_manifest()
    for i, old in enumerate(SAMPLE):
        # An integer has several encodings; the value is what counts.
        for new in {*TYPE_BYTES, *(old ^ 1 << bit for bit in range(8))} - {old}:
            manifest = decoded_or_refused(SAMPLE[:i] + bytes([new]) + SAMPLE[i + 1 :])
            if manifest is not None:
                assert replace(manifest, version=(1, 0)) == sample


@given(st.binary(max_size=200))
def test_any_bytes_are_a_format_error(data: bytes) -> None:
    assert decoded_or_refused(data) is None


@given(st.data())
def test_any_splice_of_a_manifest_is_refused_or_equal(data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(SAMPLE)))
    stop = data.draw(st.integers(start, min(start + 40, len(SAMPLE))))
    spliced = SAMPLE[:start] + data.draw(st.binary(max_size=40)) + SAMPLE[stop:]
    manifest = decoded_or_refused(spliced)
    assert manifest is None or replace(manifest, version=(1, 0)) == sample_manifest()


# --- a forger, who knows how to make a pack_id ---


@pytest.mark.parametrize("path", PATHS, ids=dotted)
def test_a_strange_value_is_refused_or_kept_as_it_is(path: tuple[Any, ...]) -> None:
    for value in STRANGE_VALUES:
        whole = changed(path, value)
        if (manifest := decoded_or_refused(seal(whole))) is not None:
            read = as_map(manifest)
            for stated in (whole, read):
                del stated["pack_id"]
            assert read == whole


@pytest.mark.parametrize("path", FIELDS, ids=dotted)
def test_a_missing_field_is_refused_by_name(path: tuple[Any, ...]) -> None:
    whole = without(path)
    data = msgpack.packb(whole) if path == ("pack_id",) else seal(whole)
    with pytest.raises(FormatError, match=f"field '{path[-1]}' is missing"):
        decode(data)


@pytest.mark.parametrize(
    "path", [p for p in PATHS if isinstance(p[-1], str) and p != ("pack_id",)], ids=dotted
)
def test_a_key_of_bytes_is_refused(path: tuple[Any, ...]) -> None:
    whole = as_map(sample_manifest())
    holder: Any = whole
    for step in path[:-1]:
        holder = holder[step]
    holder[path[-1].encode()] = holder.pop(path[-1])
    with pytest.raises(FormatError):
        decode(seal(whole))


@pytest.mark.parametrize(
    "path",
    [
        (),
        ("shared",),
        ("shared", "tensors", "model.embed_tokens.weight"),
        ("modules", 0),
        ("modules", 1, "parts", 0),
        ("modules", 0, "quantization", "up_proj"),
        ("quantization", "model.layers.0.mlp.gate"),
        ("source",),
        ("source", "shards", 0),
        ("files", "config.json"),
    ],
    ids=dotted,
)
def test_an_unknown_field_is_refused_in_1_0_and_ignored_in_1_1(path: tuple[Any, ...]) -> None:
    whole = changed((*path, "novelty"), {"x": [1, 2]})
    with pytest.raises(FormatError, match="unknown field 'novelty'"):
        decode(seal(whole))
    whole["version"] = [1, 1]
    assert decode(seal(whole)) == replace(sample_manifest(), version=(1, 1))


def test_pack_id_of_a_later_minor_version_is_not_checked() -> None:
    whole = changed(("pack_id",), "made otherwise")
    whole["version"] = [1, 7]
    assert decode(msgpack.packb(whole)).version == (1, 7)


@pytest.mark.parametrize("magic", ["", "MOEPACK", "moepack2", "safetensors"])
def test_another_magic_is_refused(magic: str) -> None:
    with pytest.raises(FormatError, match=f"magic is '{magic}', not 'moepack'"):
        decode(seal(changed(("magic",), magic)))


@pytest.mark.parametrize("version", [[0, 9], [2, 0], [2**64 - 1, 0], [1], [1, 0, 0], []], ids=str)
def test_another_major_version_is_refused(version: list[int]) -> None:
    stated = ".".join(map(str, version))
    with pytest.raises(FormatError, match=f"version is {stated}, this moepack reads 1.x; update"):
        decode(seal(changed(("version",), version)))


@pytest.mark.parametrize("version", [[1, 0], [1, 1]], ids=str)
def test_an_unknown_required_feature_is_refused_in_any_version(version: list[int]) -> None:
    whole = changed(("requires",), ["compressed_records"])
    whole["version"] = version
    with pytest.raises(FormatError, match="requires 'compressed_records', unknown here; update"):
        decode(seal(whole))


@pytest.mark.parametrize(
    "inner",
    [("magic",), ("modules", 0, "path"), ("shared", "tensors", "model.embed_tokens.weight")],
    ids=dotted,
)
def test_a_key_that_occurs_twice_is_refused_by_name(inner: tuple[Any, ...]) -> None:
    key = msgpack.packb(inner[-1])
    holder: Any = as_map(sample_manifest())
    for step in inner[:-1]:
        holder = holder[step]
    assert len(holder) < 16  # so that its header is one byte
    plain = msgpack.packb(holder)
    twice = bytes([plain[0] + 1]) + plain[1:] + key + msgpack.packb(holder[inner[-1]])
    assert SAMPLE.count(plain) == 1
    with pytest.raises(FormatError, match=f"key '{inner[-1]}' occurs twice"):
        decode(SAMPLE.replace(plain, twice))


@pytest.mark.parametrize(
    "value", [None, 1, "moepack", b"moepack", [], [["magic", "moepack"]]], ids=repr
)
def test_a_document_that_is_no_map_is_refused(value: object) -> None:
    with pytest.raises(FormatError, match="a map was expected"):
        decode(msgpack.packb(value))


# --- cost of a hostile file ---


@pytest.mark.parametrize("nested", [b"\x91", b"\x81\xa1x", b"\xdc\x00\x01", b"\x81\x91"])
def test_a_megabyte_of_nesting_is_refused(nested: bytes) -> None:
    with pytest.raises(FormatError, match="not a msgpack document"):
        decode(nested * (10**6 // len(nested)))


@pytest.mark.parametrize(
    "header", ["dd", "df", "db", "c6", "c9"], ids=["array", "map", "text", "bytes", "ext"]
)
def test_a_claimed_length_beyond_the_file_allocates_nothing(header: str) -> None:
    data = bytes.fromhex(header) + b"\xff\xff\xff\xff" + bytes(20)
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match="not a msgpack document"):
            decode(data)
        peak_nbytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_nbytes < 2**20


def test_a_huge_number_of_experts_allocates_nothing() -> None:
    data = seal(changed(("modules", 0, "n_experts"), 10**9))
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match="n_experts: 1000000000 is not from 1 to 65536"):
            decode(data)
        peak_nbytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_nbytes < 2**20


def test_a_key_twice_in_a_large_map_is_found_in_linear_time() -> None:
    keys = [*map(str, range(20_000)), "19999"]
    entries = b"".join(msgpack.packb(key) + b"\xc0" for key in keys)
    started_s = time.process_time()
    with pytest.raises(FormatError, match="key '19999' occurs twice"):
        decode(b"\xdf" + len(keys).to_bytes(4, "big") + entries)
    assert time.process_time() - started_s < 1  # linear: 0.01 s; quadratic: 6 s


def test_a_message_about_a_hostile_text_is_short_and_printable() -> None:
    hostile = "\x1b" * 5_000
    for path in PATHS:
        for value in (hostile, hostile.encode(), [7] * 5_000, {hostile: 1}, {hostile: {}}):
            if (message := refusal(seal(changed(path, value)))) is not None:
                assert len(message) < 2_000
                assert message.isprintable()
