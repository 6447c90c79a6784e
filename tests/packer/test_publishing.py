"""A pack appears whole or not at all, and nothing else is touched."""

import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import make_pack

from moepack.formats.errors import SourceError
from moepack.formats.manifest import Shard
from moepack.formats.pack import Pack
from moepack.packer.checkpoint import ConvertOptions
from moepack.packer.convert import ConvertPlan, _binding, convert, plan_convert
from moepack.packer.journal import Journal
from moepack.packer.publishing import remove_unstarted
from moepack.packer.source import open_source, save_stubs
from moepack.packer.writing import write_range


@pytest.fixture
def plan(q4_source: Path) -> ConvertPlan:
    """A fresh plan of the 4-bit checkpoint."""
    return plan_convert(open_source(str(q4_source)), ConvertOptions())


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """An empty folder to convert into."""
    folder = tmp_path / "place"
    folder.mkdir()
    return folder


def fingerprint(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, hidden ones included."""
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


def names_in(folder: Path) -> list[str]:
    """What is directly in a folder, hidden entries included."""
    return sorted(entry.name for entry in folder.iterdir())


def failing_pwrite(error: BaseException, after: int) -> Callable[..., int]:
    """An os.pwrite that raises from its call number `after` on."""
    n_calls = 0
    pwrite = os.pwrite

    def write(fd: int, data: memoryview, offset: int) -> int:
        nonlocal n_calls
        n_calls += 1
        if n_calls > after:
            raise error
        return pwrite(fd, data, offset)

    return write


DISK_FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_existing_folder_is_refused(plan: ConvertPlan, place: Path) -> None:
    """Whatever is in it."""
    (place / "out.moepack").mkdir()
    with pytest.raises(SourceError, match=r"out\.moepack: exists; name another"):
        convert(plan, place / "out.moepack")
    assert names_in(place) == ["out.moepack"]


def test_existing_pack_is_refused_without_overwrite(plan: ConvertPlan, place: Path) -> None:
    """And stays as it was."""
    (place / "out.moepack").mkdir()
    (place / "out.moepack" / "manifest.msgpack").write_bytes(b"old")
    with pytest.raises(SourceError, match="--overwrite"):
        convert(plan, place / "out.moepack")
    assert fingerprint(place) == {"out.moepack/manifest.msgpack": b"old"}


def test_overwrite_replaces_a_pack_whole(
    plan: ConvertPlan, place: Path, q4_pack: Path, float_pack: Path
) -> None:
    """No file of the old one is left, nor the old one beside it."""
    shutil.copytree(float_pack, place / "out.moepack")
    (place / "out.moepack" / "note.txt").write_text("old")
    convert(plan, place / "out.moepack", overwrite=True)
    assert names_in(place) == ["out.moepack"]
    assert fingerprint(place / "out.moepack") == fingerprint(q4_pack)


@pytest.mark.parametrize("kind", ["folder", "file", "link to a pack", "dangling link"])
def test_overwrite_never_replaces_what_is_no_pack(
    plan: ConvertPlan, place: Path, tmp_path: Path, q4_pack: Path, kind: str
) -> None:
    """Somebody's photographs, or a link whose target is elsewhere."""
    destination = place / "out.moepack"
    if kind == "folder":
        destination.mkdir()
        (destination / "photo.jpg").write_bytes(b"photo")
    elif kind == "file":
        destination.write_bytes(b"text")
    else:
        target = q4_pack if kind == "link to a pack" else tmp_path / "nowhere"
        destination.symlink_to(target)
    before = fingerprint(place)
    with pytest.raises(SourceError, match=r"exists and is (not a pack|a link)"):
        convert(plan, destination, overwrite=True)
    assert fingerprint(place) == before
    assert names_in(place) == ["out.moepack"]


def test_source_is_never_overwritten(q4_source: Path, tmp_path: Path) -> None:
    """Not even a folder that is checkpoint and pack at once."""
    folder = Path(shutil.copytree(q4_source, tmp_path / "both"))
    (folder / "manifest.msgpack").write_bytes(b"")
    before = fingerprint(folder)
    plan = plan_convert(open_source(str(folder)), ConvertOptions())
    with pytest.raises(SourceError, match="is the source itself"):
        convert(plan, folder, overwrite=True)
    assert fingerprint(folder) == before


def test_missing_parent_folder_is_refused(plan: ConvertPlan, place: Path) -> None:
    """Convert makes one folder, not a path."""
    with pytest.raises(SourceError, match=r"missing: no such folder to write out\.moepack in"):
        convert(plan, place / "missing" / "out.moepack")
    assert names_in(place) == []


class Usage(NamedTuple):
    """What shutil.disk_usage gives."""

    total: int
    used: int
    free: int


def test_full_disk_is_refused_before_writing(
    plan: ConvertPlan, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naming both sizes."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 10**9, plan.nbytes - 1))
    written: list[int] = []
    with pytest.raises(SourceError, match=f"needs {plan.nbytes:,} .*{plan.nbytes - 1:,} free"):
        convert(plan, place / "out.moepack", advance=written.append)
    assert names_in(place) == []
    assert written == []


@pytest.mark.parametrize("after", [0, 1, 50, 130])
def test_disk_full_in_the_middle_leaves_nothing(
    plan: ConvertPlan, place: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """In the first write, among experts, among shared weights."""
    monkeypatch.setattr(os, "pwrite", failing_pwrite(DISK_FULL, after))
    with pytest.raises(SourceError, match="No space left on device; nothing was kept"):
        convert(plan, place / "out.moepack")
    assert names_in(place) == []


def test_disk_full_in_the_middle_leaves_the_old_pack(
    plan: ConvertPlan, place: Path, float_pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Overwriting is not deleting first."""
    shutil.copytree(float_pack, place / "out.moepack")
    monkeypatch.setattr(os, "pwrite", failing_pwrite(DISK_FULL, 20))
    with pytest.raises(SourceError, match="nothing was kept"):
        convert(plan, place / "out.moepack", overwrite=True)
    assert names_in(place) == ["out.moepack"]
    assert fingerprint(place / "out.moepack") == fingerprint(float_pack)


def test_disk_full_at_the_manifest_leaves_nothing(
    plan: ConvertPlan, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fsync is where some file systems say so."""
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(DISK_FULL))
    with pytest.raises(SourceError, match="nothing was kept"):
        convert(plan, place / "out.moepack")
    assert names_in(place) == []


def test_interrupt_leaves_nothing(
    plan: ConvertPlan, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C is passed on, and the staging folder is gone."""
    monkeypatch.setattr(os, "pwrite", failing_pwrite(KeyboardInterrupt(), 40))
    with pytest.raises(KeyboardInterrupt):
        convert(plan, place / "out.moepack")
    assert names_in(place) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.EIO, "I/O error")])
def test_failure_between_the_two_renames_leaves_the_old_pack(
    plan: ConvertPlan,
    place: Path,
    float_pack: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
) -> None:
    """Overwriting moves the old pack aside, then the new one in."""
    shutil.copytree(float_pack, place / "out.moepack")
    rename = Path.rename

    def failing_rename(path: Path, target: Path) -> Path:
        if path.name.endswith(".partial"):
            raise error
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", failing_rename)
    with pytest.raises((KeyboardInterrupt, SourceError)):
        convert(plan, place / "out.moepack", overwrite=True)
    assert names_in(place) == ["out.moepack"]
    assert fingerprint(place / "out.moepack") == fingerprint(float_pack)


def test_leftover_of_a_killed_convert_is_cleared(
    plan: ConvertPlan, place: Path, q4_pack: Path
) -> None:
    """Its files do not get into the pack, nor do they stay."""
    leftover = place / ".out.moepack.partial"
    (leftover / "experts").mkdir(parents=True)
    (leftover / "experts" / "00000.bin").write_bytes(b"half")
    (leftover / "shared.bin").write_bytes(b"half")
    (leftover / "link").symlink_to(place)
    (leftover / "journal").touch()
    convert(plan, place / "out.moepack")
    assert names_in(place) == ["out.moepack"]
    assert fingerprint(place / "out.moepack") == fingerprint(q4_pack)


@pytest.mark.parametrize("name", [".out.moepack.partial", ".out.moepack.old"])
def test_hidden_folder_of_someone_else_stays(plan: ConvertPlan, place: Path, name: str) -> None:
    """It is in the way, or of no concern."""
    (place / name).mkdir()
    (place / name / "precious").write_bytes(b"mine")
    if name.endswith(".partial"):
        with pytest.raises(SourceError, match=r"\.out\.moepack\.partial: is in the way"):
            convert(plan, place / "out.moepack")
        remove_unstarted(place / "out.moepack")
    else:
        convert(plan, place / "out.moepack")
    assert fingerprint(place / name) == {"precious": b"mine"}


def test_link_in_place_of_the_staging_folder_is_not_followed(
    plan: ConvertPlan, place: Path, tmp_path: Path
) -> None:
    """Clearing it would delete somebody's files."""
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "photo.jpg").write_bytes(b"photo")
    (place / ".out.moepack.partial").symlink_to(photos)
    with pytest.raises(SourceError, match=r"\.partial"):
        convert(plan, place / "out.moepack")
    assert fingerprint(photos) == {"photo.jpg": b"photo"}


def test_second_convert_to_the_same_place_is_refused(plan: ConvertPlan, place: Path) -> None:
    """The first one goes on undisturbed."""
    staging = place / ".out.moepack.partial"
    staging.mkdir()
    (staging / "shared.bin").write_bytes(b"of the first")
    (staging / "journal").touch()
    held = os.open(staging, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(SourceError, match="another convert is writing it"):
            convert(plan, place / "out.moepack")
        assert fingerprint(staging) == {"shared.bin": b"of the first", "journal": b""}
    finally:
        os.close(held)
    convert(plan, place / "out.moepack")
    assert names_in(place) == ["out.moepack"]


def test_destination_that_appears_meanwhile_is_not_replaced(plan: ConvertPlan, place: Path) -> None:
    """Checked again before the rename."""
    destination = place / "out.moepack"

    def appear(_: int) -> None:
        destination.mkdir(exist_ok=True)

    with pytest.raises(SourceError, match="exists"):
        convert(plan, destination, advance=appear)
    assert names_in(place) == ["out.moepack"]
    assert names_in(destination) == []


def test_short_writes_are_continued(
    q4_pack: Path, plan: ConvertPlan, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk may take less than it was given."""
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, d, at: pwrite(fd, d[: max(1, len(d) // 3)], at))
    convert(plan, place / "out.moepack")
    assert fingerprint(place / "out.moepack") == fingerprint(q4_pack)


def test_write_range_writes_at_its_offset(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte at a time."""
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, d, at: pwrite(fd, d[:1], at))
    with (place / "file").open("w+b") as file:
        write_range(file.fileno(), memoryview(b"hello"), 3)
    assert (place / "file").read_bytes() == b"\0\0\0hello"


def test_source_cut_after_planning_leaves_nothing(
    q4_source: Path, tmp_path: Path, place: Path
) -> None:
    """Named by file, and nothing is published."""
    source = Path(shutil.copytree(q4_source, tmp_path / "source"))
    plan = plan_convert(open_source(str(source)), ConvertOptions())
    shard = source / "model.safetensors"
    os.truncate(shard, shard.stat().st_size // 2)
    with pytest.raises(SourceError, match=r"model\.safetensors: ends at byte .* the file was cut"):
        convert(plan, place / "out.moepack")
    assert names_in(place) == []


def test_manifest_is_written_last(
    plan: ConvertPlan, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever sees a manifest sees a whole pack; and every file was fsynced by then."""
    synced: list[str] = []
    fsync = os.fsync

    def noting_fsync(fd: int) -> None:
        info: Any = os.fstat(fd)
        files = {p.stat().st_ino: p.name for p in place.rglob("*")}
        synced.append(files.get(info.st_ino, place.name))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    convert(plan, place / "out.moepack")
    files = synced[: synced.index("manifest.msgpack") + 1]
    assert set(files) - {"journal"} == {
        p.name for p in (place / "out.moepack").rglob("*") if p.is_file()
    }
    assert {"experts", "place"} <= set(synced[len(files) :])


def test_published_pack_opens(q4_source: Path, place: Path) -> None:
    """What convert returns is what is on disk."""
    manifest = convert(
        plan_convert(open_source(str(q4_source)), ConvertOptions()), place / "out.moepack"
    )
    assert Pack.open(place / "out.moepack").manifest == manifest


def test_destination_inside_the_source_folder_works(q4_source: Path, tmp_path: Path) -> None:
    """The pack is no part of the checkpoint."""
    source = Path(shutil.copytree(q4_source, tmp_path / "source"))
    one = fingerprint(make_pack(source, source / "out.moepack"))
    two = fingerprint(make_pack(source, source / "again.moepack"))
    assert one == two


@pytest.mark.parametrize("name", ["notes.md", "src/model.safetensors", "experts/mine.txt"])
def test_overwrite_spares_what_is_not_the_packs(
    q4_source: Path, q4_pack: Path, tmp_path: Path, name: str
) -> None:
    """A user's own files, or the source itself, inside the folder of a pack."""
    folder = Path(shutil.copytree(q4_pack, tmp_path / "p"))
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"mine")
    before = fingerprint(folder)
    plan = plan_convert(open_source(str(q4_source)), ConvertOptions())
    with pytest.raises(SourceError, match="--overwrite would delete it"):
        convert(plan, folder, overwrite=True)
    assert fingerprint(folder) == before


JOURNALS = {
    "a diary": "diary\n",
    "a line that is not whole": "diary",
    "JSON of someone else": '{"shards": {}}\n',
}


@pytest.mark.parametrize("journal", JOURNALS.values(), ids=JOURNALS)
@pytest.mark.parametrize("overwrite", [False, True])
def test_refused_convert_touches_nothing(
    plan: ConvertPlan, place: Path, q4_pack: Path, journal: str, overwrite: bool
) -> None:
    """A user's files may have the names of a convert's notes."""
    folder = Path(shutil.copytree(q4_pack, place / "out.moepack"))
    (folder / "journal").write_text(journal)
    (folder / "stubs").mkdir()
    (folder / "stubs" / "photo.jpg").write_bytes(b"mine")
    before = fingerprint(place)
    with pytest.raises(SourceError, match=r"out\.moepack"):
        convert(plan, folder, overwrite=overwrite)
    assert fingerprint(place) == before
    assert names_in(place) == ["out.moepack"]


def journal_of(plan: ConvertPlan, folder: Path) -> None:
    """The journal of a convert that consumed every shard, and their stubs."""
    shards = [(Shard(s.name, s.stat().st_size, "0" * 64), False) for s in plan.source.shards]
    Journal.start(folder / "journal", _binding(plan)).add({}, shards)
    save_stubs(plan.source, folder / "stubs")


def test_notes_of_a_finished_convert_are_cleared(
    plan: ConvertPlan, place: Path, q4_pack: Path
) -> None:
    """It was killed right after its rename."""
    folder = Path(shutil.copytree(q4_pack, place / "out.moepack"))
    journal_of(plan, folder)
    with pytest.raises(SourceError, match="exists; pass --overwrite"):
        convert(plan, folder)
    assert fingerprint(folder) == fingerprint(q4_pack)
    assert names_in(place) == ["out.moepack"]


@pytest.mark.parametrize("spoilt", ["pack", "stubs"])
def test_notes_that_may_be_someone_elses_stay(
    plan: ConvertPlan, place: Path, q4_pack: Path, spoilt: str
) -> None:
    """The pack is not complete, or a file among the stubs is none."""
    folder = Path(shutil.copytree(q4_pack, place / "out.moepack"))
    journal_of(plan, folder)
    if spoilt == "pack":
        os.truncate(folder / "shared.bin", 1)
    else:
        (folder / "stubs" / "photo.jpg").write_bytes(b"mine")
    before = fingerprint(place)
    with pytest.raises(SourceError, match="exists; pass --overwrite"):
        convert(plan, folder)
    assert fingerprint(place) == before


@pytest.mark.parametrize("other_overwrites", [False, True])
@pytest.mark.parametrize("moment", ["before", "between", "after"])
def test_second_convert_during_the_renames_of_an_overwrite_is_refused(
    plan: ConvertPlan,
    place: Path,
    q4_pack: Path,
    q4_source: Path,
    float_pack: Path,
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
    other_overwrites: bool,
) -> None:
    """The first one ends as if it had been alone."""
    destination = place / "out.moepack"
    shutil.copytree(float_pack, destination)
    other = plan_convert(open_source(str(q4_source)), ConvertOptions())
    rename = Path.rename
    refusals: list[str] = []

    def second() -> None:
        monkeypatch.setattr(Path, "rename", rename)
        before = fingerprint(place)
        with pytest.raises(SourceError) as refused:
            convert(other, destination, overwrite=other_overwrites)
        refusals.append(str(refused.value))
        assert fingerprint(place) == before

    def noting_rename(path: Path, target: Path) -> Path:
        if moment == "before" and target.name.endswith(".old"):
            second()
        renamed = rename(path, target)
        if (moment == "between" and target.name.endswith(".old")) or (
            moment == "after" and path.name.endswith(".partial")
        ):
            second()
        return renamed

    monkeypatch.setattr(Path, "rename", noting_rename)
    convert(plan, destination, overwrite=True)
    is_seen = moment != "before" or other_overwrites  # else there is just an old pack
    wanted = "another convert is writing it" if is_seen else "exists; pass --overwrite"
    assert len(refusals) == 1
    assert wanted in refusals[0]
    assert names_in(place) == ["out.moepack"]
    assert fingerprint(destination) == fingerprint(q4_pack)


def test_staging_folder_that_became_the_destination_is_not_locked(
    plan: ConvertPlan, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another convert published it between the look-up of its name and the lock."""
    flock = fcntl.flock

    def late_flock(fd: int, operation: int) -> None:
        if (staging := place / ".out.moepack.partial").exists():
            staging.rename(place / "published")
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", late_flock)
    with pytest.raises(SourceError, match="another convert is writing it"):
        convert(plan, place / "out.moepack")
    assert names_in(place) == ["published"]


def test_old_pack_that_cannot_be_removed_does_not_spoil_the_new(
    plan: ConvertPlan,
    place: Path,
    q4_pack: Path,
    float_pack: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The message says that it is there; the next convert removes the old one."""
    destination = place / "out.moepack"
    shutil.copytree(float_pack, destination)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rmdir", lambda _: (_ for _ in ()).throw(OSError(errno.EIO, "I/O")))
        with pytest.raises(SourceError, match=r"out\.moepack: is complete, but clearing up failed"):
            convert(plan, destination, overwrite=True)
    assert fingerprint(destination) == fingerprint(q4_pack)
    with pytest.raises(SourceError, match="exists; pass --overwrite"):
        convert(plan, destination)
    assert names_in(place) == ["out.moepack"]


def test_removing_what_never_began_leaves_a_running_convert_alone(place: Path) -> None:
    """It has fetched headers, and holds the lock."""
    staging = place / ".out.moepack.partial"
    (staging / "stubs").mkdir(parents=True)
    held = os.open(staging, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        remove_unstarted(place / "out.moepack")
        assert names_in(staging) == ["stubs"]
    finally:
        os.close(held)
    remove_unstarted(place / "out.moepack")
    assert names_in(place) == []
