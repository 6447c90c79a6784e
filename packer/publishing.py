"""Making a pack appear whole or not at all: a hidden sibling folder, then one rename."""

import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from moepack.formats.errors import FormatError, SourceError
from moepack.formats.pack import MANIFEST_NAME, SHARED_NAME, Pack, is_pack
from moepack.packer.journal import JOURNAL_NAME, read_lines
from moepack.packer.source import COPIED_PATTERNS, STUBS_NAME

__all__ = [
    "check_destination",
    "clear_folder",
    "clear_notes",
    "fsync_folder",
    "old_path",
    "remove_unstarted",
    "staging_folder",
    "staging_path",
    "write_file",
]

PACK_PATTERNS = (MANIFEST_NAME, SHARED_NAME, *COPIED_PATTERNS)


def check_destination(
    destination: Path, overwrite: bool, *, can_overwrite: bool = True, only_look: bool = False
) -> None:
    """Refuse a destination that cannot be published to, before any work is done.

    What a convert killed at its renames left is put right first, if no other convert is writing
    there, unless told to `only_look`. `can_overwrite`: whether to speak of --overwrite.
    """
    for above in destination.absolute().parents:
        if is_pack(above):
            raise SourceError(f"{destination}: would be inside the pack {above}")
    parent = destination.parent
    if not parent.is_dir():
        raise SourceError(f"{parent}: no such folder to write {destination.name} in")
    if not os.access(parent, os.W_OK):
        raise SourceError(f"{parent}: no permission to write in this folder")
    if not only_look and _is_unrecovered(destination):
        with _locked_staging(destination):
            _recover(destination)
    _check_replaceable(destination, overwrite, can_overwrite)


def _check_replaceable(destination: Path, overwrite: bool, can_overwrite: bool = True) -> None:
    """Refuse what is in the destination's place, unless it is a pack that may be replaced."""
    if not (destination.exists() or destination.is_symlink()):
        return
    if destination.is_symlink():
        raise SourceError(f"{destination}: exists and is a link; remove it or give another name")
    if not overwrite:
        replace = can_overwrite and is_pack(destination)
        hint = "pass --overwrite to replace it, or name another" if replace else "name another"
        raise SourceError(f"{destination}: exists; {hint}")
    if not is_pack(destination):
        raise SourceError(
            f"{destination}: exists and is not a pack; --overwrite replaces packs only"
        )
    _check_nothing_else(destination)


def _check_nothing_else(destination: Path) -> None:
    """Refuse to replace a pack folder that holds what is not the pack's: it would be deleted."""
    for entry in destination.rglob("*"):
        name = entry.relative_to(destination)
        is_record = name.parts[0] == "experts" and (entry.suffix == ".bin" or len(name.parts) == 1)
        is_copied = len(name.parts) == 1 and any(name.match(p) for p in PACK_PATTERNS)
        if entry.is_symlink() or not (is_record or is_copied) or (is_copied and entry.is_dir()):
            raise SourceError(f"{entry}: not a file of the pack; --overwrite would delete it")


def staging_path(destination: Path) -> Path:
    """The hidden sibling of a destination in which its pack is made."""
    return destination.parent / f".{destination.name}.partial"


def old_path(destination: Path) -> Path:
    """The hidden sibling in which an old pack waits while the new one takes its place."""
    return destination.parent / f".{destination.name}.old"


def _is_unrecovered(destination: Path) -> bool:
    """Whether there is work for `_recover`."""
    old = old_path(destination)
    return (old.is_dir() and not old.is_symlink()) or bool(_finished_notes(destination))


def _recover(destination: Path) -> None:
    """Undo, or finish, what a killed convert left. Only for who holds the destination's lock."""
    _recover_old(destination)
    _clear_finished(destination)


def _recover_old(destination: Path) -> None:
    """What a convert killed between its two renames left, or right after them."""
    old = old_path(destination)
    if old.is_symlink() or not old.is_dir():
        return
    if not any(old.iterdir()):
        old.rmdir()
    elif is_pack(old) and not destination.exists():
        old.rename(destination)
    elif is_pack(old) and is_pack(destination):
        _check_nothing_else(old)
        _remove_pack(old)


def _remove_pack(folder: Path) -> None:
    """The manifest goes last: until then, what a kill leaves can be told to be a pack's."""
    clear_folder(folder, keep=MANIFEST_NAME)
    (folder / MANIFEST_NAME).unlink()
    folder.rmdir()


@contextmanager
def staging_folder(
    destination: Path, overwrite: bool, contents: Sequence[str], keeps: Callable[[], bool]
) -> Iterator[Path]:
    """The hidden folder beside `destination` that becomes it when the block ends well.

    It may hold what a killed run of the same kind left, told by one of the names in `contents`
    being there. On any exception it is removed, unless it `keeps`, and the destination stays as it
    was. A folder of anyone else, or one that a running convert holds, is refused with SourceError.
    """
    with _locked_staging(destination) as staging:
        if any(staging.iterdir()) and not any((staging / name).exists() for name in contents):
            raise SourceError(f"{staging}: is in the way; move it, or name another destination")
        _recover(destination)
        try:
            yield staging
            _check_replaceable(destination, overwrite)  # it may have appeared meanwhile
            for folder in (*(p for p in staging.iterdir() if p.is_dir()), staging):
                fsync_folder(folder)
            _rename(staging, destination)
        except BaseException:
            if not keeps():
                shutil.rmtree(staging, ignore_errors=True)
            raise
        try:
            _recover(destination)  # the old pack goes, and notes of shards that are gone
        except OSError as error:
            raise SourceError(f"{destination}: is complete, but clearing up failed: {error}") from (
                error
            )


@contextmanager
def _locked_staging(destination: Path) -> Iterator[Path]:
    """The staging folder, made if need be, with the lock that converts of a destination share.

    The lock is of the folder itself and goes with it when it becomes the destination. So who locks
    a new staging folder looks whether the destination is locked too: by a convert that published
    it and has not cleared up yet. Raises SourceError when another convert has it.
    """
    staging = staging_path(destination)
    try:
        staging.mkdir(exist_ok=True)
        lock = _lock(staging, destination)
    except SourceError:
        raise
    except OSError as error:
        raise SourceError(f"{staging}: {error.strerror}") from error
    try:
        if destination.is_dir() and not destination.is_symlink():
            os.close(_lock(destination, destination))
        yield staging
    finally:
        with suppress(OSError):  # it is the destination by now, or not empty
            staging.rmdir()
        os.close(lock)


def _lock(folder: Path, destination: Path) -> int:
    """An open file that holds the lock of a folder. Raises OSError, or SourceError when taken."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError as error:  # it became the destination, or was empty and removed
        raise SourceError(f"{destination}: another convert is writing it") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(lock), folder.lstat()):
            raise BlockingIOError  # it became the destination between the open and the lock
    except (BlockingIOError, FileNotFoundError) as error:
        os.close(lock)
        raise SourceError(f"{destination}: another convert is writing it") from error
    except BaseException:
        os.close(lock)
        raise
    return lock


def clear_folder(folder: Path, keep: str | None = None) -> None:
    """Remove everything in a folder but `keep`; links are removed, not followed."""
    for entry in folder.iterdir():
        if entry.name == keep:
            continue
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def clear_notes(staging: Path) -> None:
    """Remove what only an unfinished convert needs from a staging folder that is to be a pack."""
    shutil.rmtree(staging / STUBS_NAME, ignore_errors=True)
    (staging / JOURNAL_NAME).unlink(missing_ok=True)


def _clear_finished(destination: Path) -> None:
    """Remove the notes of a finished convert from its pack; the journal, which proves it, last."""
    for note in _finished_notes(destination):
        note.rmdir() if note.is_dir() else note.unlink()


def _finished_notes(folder: Path) -> list[Path]:
    """What a convert that consumed shards left in its complete pack, in an order to remove it in.

    Empty where any of it may be someone else's: no pack, no journal that names its shards, or a
    file among the stubs that is none.
    """
    journal, stubs = folder / JOURNAL_NAME, folder / STUBS_NAME
    if folder.is_symlink() or not is_pack(folder) or not _is_regular(journal):
        return []
    try:
        lines, _ = read_lines(journal)
        Pack.open(folder)
    except (SourceError, FormatError):  # not a journal, or not a complete pack: nobody's to clear
        return []
    if not lines or not all(isinstance(line, dict) for line in lines):
        return []
    binding, shards = lines[0], lines[0].get("shards")
    if not (isinstance(shards, dict) and {"created_by", "options", "files"} <= binding.keys()):
        return []
    if stubs.is_symlink() or not stubs.is_dir():
        return [] if os.path.lexists(stubs) else [journal]
    entries = sorted(stubs.iterdir())
    names = {*shards, *(Path(name).with_suffix(".unfinished").name for name in shards)}
    if not all(entry.name in names and _is_regular(entry) for entry in entries):
        return []
    return [*entries, stubs, journal]


def _is_regular(path: Path) -> bool:
    """Whether there is a regular file, and no link to one."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def remove_unstarted(destination: Path) -> None:
    """Remove the staging folder of a convert that never began: it holds no journal."""
    staging = staging_path(destination)
    if not staging.is_dir() or staging.is_symlink():
        return
    try:
        lock = _lock(staging, destination)
    except SourceError:
        return  # another convert is writing it
    try:
        if {entry.name for entry in staging.iterdir()} <= {STUBS_NAME}:
            shutil.rmtree(staging, ignore_errors=True)
    finally:
        os.close(lock)


def _rename(staging: Path, destination: Path) -> None:
    parent = destination.parent
    old = old_path(destination)
    if not destination.exists():
        staging.rename(destination)
        fsync_folder(parent)
    else:
        if old.exists():
            raise SourceError(f"{old}: is in the way; move it")
        destination.rename(old)
        try:
            staging.rename(destination)
        except BaseException:
            old.rename(destination)
            raise
        fsync_folder(parent)


def write_file(path: Path, data: bytes) -> None:
    """Write a file and fsync it."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def fsync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
