"""Opening a pack: what is there, of the right size, and inside."""

import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from formats_strategies import write_pack

from moepack.formats.digests import check_digests
from moepack.formats.errors import FormatError, SourceError
from moepack.formats.manifest import MAX_MANIFEST_NBYTES
from moepack.formats.pack import Pack, is_pack

PACK_FILES = [
    "shared.bin",
    "experts/00000.bin",
    "experts/00001.bin",
    "config.json",
    "tokenizer.json",
]
WEIGHT_FILES = PACK_FILES[:3]


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    """A small whole pack."""
    write_pack(tmp_path / "pack")
    return tmp_path / "pack"


def test_an_opened_pack_has_its_manifest_and_paths(tmp_path: Path) -> None:
    manifest = write_pack(tmp_path / "pack")
    pack = Pack.open(tmp_path / "pack")
    assert pack.manifest == manifest
    assert pack.shared_file == tmp_path / "pack" / "shared.bin"
    assert pack.expert_file(manifest.modules[1]) == tmp_path / "pack" / "experts" / "00001.bin"


def test_a_pack_opens_by_text_and_through_a_link(pack: Path) -> None:
    link = pack.parent / "link"
    link.symlink_to(pack)
    assert Pack.open(str(link)).manifest == Pack.open(pack).manifest


def test_files_the_manifest_does_not_name_are_ignored(pack: Path) -> None:
    (pack / "README.md").write_text("notes")
    (pack / "experts" / "99999.bin").write_bytes(b"x")
    Pack.open(pack)


def test_is_pack_tells_by_the_manifest(pack: Path) -> None:
    assert is_pack(pack)
    (pack / "manifest.msgpack").unlink()
    assert not is_pack(pack)
    assert not is_pack(pack / "nowhere")


# --- no pack ---


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        SourceError, match="/none: no such folder; a pack is made by moepack convert"
    ):
        Pack.open(tmp_path / "none")


def test_a_file_in_place_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SourceError, match="/file: not a folder; a pack is made by moepack convert"):
        Pack.open(tmp_path / "file")


def test_a_path_too_long_for_the_system_is_a_source_error() -> None:
    with pytest.raises(SourceError):
        Pack.open("x" * 5_000)


def test_a_checkpoint_gets_the_hint_to_convert_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SourceError, match=r"no manifest\.msgpack; it is a checkpoint: run moepack"):
        Pack.open(tmp_path)


def test_an_unfinished_pack_is_no_pack(tmp_path: Path) -> None:
    (tmp_path / "shared.bin").write_bytes(b"")
    with pytest.raises(SourceError, match="the pack is incomplete"):
        Pack.open(tmp_path)


# --- the manifest ---


def test_a_damaged_manifest_is_named(pack: Path) -> None:
    path = pack / "manifest.msgpack"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FormatError, match=r"/manifest\.msgpack: manifest: not a msgpack document"):
        Pack.open(pack)


def test_an_empty_manifest_is_refused(pack: Path) -> None:
    (pack / "manifest.msgpack").write_bytes(b"")
    with pytest.raises(FormatError, match="not a msgpack document"):
        Pack.open(pack)


@pytest.mark.parametrize("nbytes", [MAX_MANIFEST_NBYTES + 1, 100_000_000, 2**40])
def test_an_oversized_manifest_is_refused_unread(pack: Path, nbytes: int) -> None:
    with (pack / "manifest.msgpack").open("wb") as file:
        file.write(b"\x91" * 10_000)
        file.truncate(nbytes)
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match=f"{nbytes:,} bytes, a manifest has at most 16,777"):
            Pack.open(pack)
        peak_nbytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_nbytes < 2**20


def test_a_manifest_that_cannot_be_read_is_a_source_error(
    pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(SourceError, match=r"/manifest\.msgpack: permission denied"):
        Pack.open(pack)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["folder", "fifo"])
def test_a_manifest_that_is_no_file_is_named(pack: Path, make: Callable[[Path], None]) -> None:
    (pack / "manifest.msgpack").unlink()
    make(pack / "manifest.msgpack")
    with pytest.raises(FormatError, match=r"/manifest\.msgpack: not a regular file"):
        Pack.open(pack)


def test_a_manifest_that_is_a_link_to_itself_is_named(pack: Path) -> None:
    (pack / "manifest.msgpack").unlink()
    (pack / "manifest.msgpack").symlink_to("manifest.msgpack")
    with pytest.raises(FormatError, match=r"/manifest\.msgpack: too many levels of symbolic"):
        Pack.open(pack)


# --- the other files ---


@pytest.mark.parametrize("name", PACK_FILES)
def test_a_missing_file_is_named(pack: Path, name: str) -> None:
    (pack / name).unlink()
    with pytest.raises(FormatError, match=f"/{name}: no such file .* incomplete, convert again"):
        Pack.open(pack)


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize("name", WEIGHT_FILES)
def test_a_weight_file_of_another_size_is_named(pack: Path, name: str, change: int) -> None:
    nbytes = (pack / name).stat().st_size
    os.truncate(pack / name, nbytes + change)
    wanted = f"/{name}: {nbytes + change:,} bytes, the manifest says {nbytes:,}; .* convert again"
    with pytest.raises(FormatError, match=wanted):
        Pack.open(pack)


@pytest.mark.parametrize("name", PACK_FILES)
def test_a_folder_in_place_of_a_file_is_refused(pack: Path, name: str) -> None:
    (pack / name).unlink()
    (pack / name).mkdir()
    with pytest.raises(FormatError, match=f"/{name}: not a regular file"):
        Pack.open(pack)


@pytest.mark.parametrize("name", PACK_FILES)
def test_a_fifo_in_place_of_a_file_is_refused(pack: Path, name: str) -> None:
    (pack / name).unlink()
    os.mkfifo(pack / name)
    with pytest.raises(FormatError, match=f"/{name}: not a regular file"):
        Pack.open(pack)


# --- links ---


@pytest.mark.parametrize("name", PACK_FILES)
def test_a_link_out_of_the_pack_is_refused(pack: Path, name: str) -> None:
    outside = pack.parent / "outside"
    (pack / name).rename(outside)
    (pack / name).symlink_to(outside)
    with pytest.raises(FormatError, match=f"/{name}: a link that leaves the pack"):
        Pack.open(pack)


def test_a_folder_linked_out_of_the_pack_is_refused(pack: Path) -> None:
    (pack / "experts").rename(pack.parent / "elsewhere")
    (pack / "experts").symlink_to(pack.parent / "elsewhere")
    with pytest.raises(FormatError, match=r"/experts/00000\.bin: a link that leaves the pack"):
        Pack.open(pack)


def test_a_sibling_whose_name_begins_like_the_pack_is_outside(pack: Path) -> None:
    outside = pack.parent / "pack-other"
    outside.mkdir()
    (pack / "shared.bin").rename(outside / "shared.bin")
    (pack / "shared.bin").symlink_to(outside / "shared.bin")
    with pytest.raises(FormatError, match=r"/shared\.bin: a link that leaves the pack"):
        Pack.open(pack)


def test_a_link_inside_the_pack_is_accepted(pack: Path) -> None:
    (pack / "shared.bin").rename(pack / "weights")
    (pack / "shared.bin").symlink_to("weights")
    Pack.open(pack)


def test_a_link_to_itself_is_refused(pack: Path) -> None:
    (pack / "shared.bin").unlink()
    (pack / "shared.bin").symlink_to("shared.bin")
    with pytest.raises(FormatError, match=r"/shared\.bin: .*; the pack is incomplete"):
        Pack.open(pack)


def hub_cache(pack: Path, repository: str) -> Path:
    """The pack as the Hugging Face cache keeps it: a snapshot of links to blobs."""
    root = pack.parent / repository
    snapshot = root / "snapshots" / "0123abcd"
    (root / "blobs").mkdir(parents=True)
    for index, name in enumerate([*PACK_FILES, "manifest.msgpack"]):
        blob = root / "blobs" / f"{index:064x}"
        (pack / name).rename(blob)
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        up = "../" * (2 + name.count("/"))
        (snapshot / name).symlink_to(f"{up}blobs/{blob.name}")
    return snapshot


def test_a_snapshot_in_the_hugging_face_cache_opens(pack: Path) -> None:
    snapshot = hub_cache(pack, "models--org--name")
    assert (snapshot / "shared.bin").is_symlink()
    assert list(check_digests(Pack.open(snapshot))) == []


def test_a_folder_that_only_resembles_the_cache_is_refused(pack: Path) -> None:
    snapshot = hub_cache(pack, "datasets--org--name")
    with pytest.raises(FormatError, match=r"/shared\.bin: a link that leaves the pack"):
        Pack.open(snapshot)


def test_a_link_from_one_cached_model_to_another_is_refused(pack: Path) -> None:
    snapshot = hub_cache(pack, "models--org--name")
    other = pack.parent / "models--org--other"
    other.mkdir()
    (snapshot / "shared.bin").resolve().rename(other / "blob")
    (snapshot / "shared.bin").unlink()
    (snapshot / "shared.bin").symlink_to(other / "blob")
    with pytest.raises(FormatError, match=r"/shared\.bin: a link that leaves the pack"):
        Pack.open(snapshot)
