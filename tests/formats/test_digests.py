"""Reading a pack back: every bit of a record, a shared tensor or a copied file counts."""

from pathlib import Path

import pytest
from formats_strategies import write_pack

from moepack.formats.digests import (
    CHUNK_NBYTES,
    Mismatch,
    check_digests,
    digest_bytes,
    digest_file,
    read_range,
)
from moepack.formats.errors import SourceError
from moepack.formats.pack import Pack


@pytest.fixture
def pack(tmp_path: Path) -> Pack:
    """A small whole pack, open."""
    write_pack(tmp_path / "pack")
    return Pack.open(tmp_path / "pack")


def flip(path: Path, offset: int, bit: int = 0) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)


def test_digest_is_xxh3_128() -> None:
    assert digest_bytes(b"").hex() == "99aa06d3014798d86001c324468d497f"


def test_a_file_has_the_digest_of_its_bytes(tmp_path: Path) -> None:
    data = bytes(range(256)) * (CHUNK_NBYTES // 256) + b"more"
    (tmp_path / "file").write_bytes(data)
    assert digest_file(tmp_path / "file") == digest_bytes(data)


def test_a_whole_pack_differs_nowhere(pack: Pack) -> None:
    assert list(check_digests(pack)) == []


def test_progress_counts_every_byte_of_tensors_and_records(pack: Pack) -> None:
    told: list[int] = []
    list(check_digests(pack, told.append))
    assert sum(told) == sum(t.nbytes for t in pack.manifest.shared) + pack.manifest.expert_nbytes


@pytest.mark.parametrize(("layer", "expert"), [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)])
@pytest.mark.parametrize("place", ["first", "last"])
def test_a_flipped_bit_in_a_record_names_layer_and_expert(
    pack: Pack, layer: int, expert: int, place: str
) -> None:
    module = pack.manifest.modules[layer]
    offset = expert * module.stride + (0 if place == "first" else module.record_nbytes - 1)
    flip(pack.expert_file(module), offset, bit=7)
    (found,) = check_digests(pack)
    assert found == Mismatch(module.path, layer, expert, None, "record differs from its digest")
    assert str(found) == f"layer {layer} ({module.path}) expert {expert}: {found.reason}"


@pytest.mark.parametrize("expert", [0, 2])
@pytest.mark.parametrize("place", ["first", "last"])
def test_a_flipped_bit_in_the_padding_of_a_record_is_found(
    pack: Pack, expert: int, place: str
) -> None:
    module = pack.manifest.modules[0]
    assert module.record_nbytes < module.stride
    inside = module.record_nbytes if place == "first" else module.stride - 1
    flip(pack.expert_file(module), expert * module.stride + inside)
    (found,) = check_digests(pack)
    assert found == Mismatch(module.path, 0, expert, None, "padding after the record is not zero")


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("place", ["first", "last"])
def test_a_flipped_bit_in_a_shared_tensor_names_it(pack: Pack, index: int, place: str) -> None:
    tensor = pack.manifest.shared[index]
    flip(pack.shared_file, tensor.offset + (0 if place == "first" else tensor.nbytes - 1), bit=3)
    (found,) = check_digests(pack)
    assert str(found) == f"{tensor.name}: shared tensor differs from its digest"
    assert (found.module, found.layer, found.expert) == (None, None, None)


@pytest.mark.parametrize("place", ["first", "last"])
def test_a_flipped_bit_in_the_padding_of_a_shared_tensor_names_it(pack: Pack, place: str) -> None:
    tensor = pack.manifest.shared[-1]
    end = tensor.offset + tensor.nbytes
    assert end < pack.manifest.shared_nbytes
    flip(pack.shared_file, end if place == "first" else pack.manifest.shared_nbytes - 1)
    (found,) = check_digests(pack)
    assert str(found) == f"{tensor.name}: padding after the shared tensor is not zero"


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_flipped_bit_in_a_copied_file_names_it(pack: Pack, name: str) -> None:
    flip(pack.path / name, 1)
    assert [str(m) for m in check_digests(pack)] == [f"{name}: file differs from its digest"]


def test_a_copied_file_of_another_length_is_found(pack: Pack) -> None:
    with (pack.path / "config.json").open("ab") as file:
        file.write(b"\n")
    (found,) = check_digests(pack)
    assert found.part == "config.json"


def test_two_records_exchanged_are_both_found(pack: Pack) -> None:
    module = pack.manifest.modules[1]
    data = pack.expert_file(module).read_bytes()
    pack.expert_file(module).write_bytes(data[module.stride :] + data[: module.stride])
    assert [(m.layer, m.expert) for m in check_digests(pack)] == [(1, 0), (1, 1)]


def test_every_difference_is_reported(pack: Pack) -> None:
    flip(pack.path / "config.json", 0)
    flip(pack.shared_file, 0)
    for module in pack.manifest.modules:
        flip(pack.expert_file(module), 0)
    assert [m.part or m.layer for m in check_digests(pack)] == [
        "config.json",
        "model.embed_tokens.weight",
        0,
        1,
    ]


def test_a_file_cut_after_opening_is_an_error_that_names_it(pack: Pack) -> None:
    path = pack.expert_file(pack.manifest.modules[0])
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(SourceError, match=r"/experts/00000\.bin: ends at byte 1,535, the file was"):
        list(check_digests(pack))


def test_read_range_fills_the_view_from_its_offset(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(100)))
    buffer = bytearray(10)
    with path.open("rb") as file:
        read_range(file.fileno(), memoryview(buffer), 50, path)
    assert buffer == bytes(range(50, 60))


def test_read_range_on_a_closed_file_is_a_source_error(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x")
    with path.open("rb") as file:
        fd = file.fileno()
    with pytest.raises(SourceError, match="/file: read failed at byte 7"):
        read_range(fd, memoryview(bytearray(1)), 7, path)
