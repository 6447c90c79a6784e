"""Making a pack appear whole or not at all: a hidden sibling folder, then one rename."""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from moepack.formats.errors import SourceError
from moepack.formats.pack import MANIFEST_NAME, SHARED_NAME, is_pack
from moepack.packer.journal import JOURNAL_NAME
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

    A pack there whose convert was killed right after its rename loses the notes of that convert,
    unless told to `only_look`. `can_overwrite`: whether to speak of --overwrite.
    """
    for above in destination.absolute().parents:
        if is_pack(above):
            raise SourceError(f"{destination}: would be inside the pack {above}")
    parent = destination.parent
    if not parent.is_dir():
        raise SourceError(f"{parent}: no such folder to write {destination.name} in")
    if not os.access(parent, os.W_OK):
        raise SourceError(f"{parent}: no permission to write in this folder")
    if not only_look:
        _recover_old(destination)
    if not (destination.exists() or destination.is_symlink()):
        return
    if is_pack(destination) and not destination.is_symlink() and not only_look:
        clear_notes(destination)
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


def _recover_old(destination: Path) -> None:
    """Undo, or finish, what a convert killed between its two renames left."""
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
    staging = staging_path(destination)
    try:
        staging.mkdir(exist_ok=True)
        lock = os.open(staging, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise SourceError(f"{staging}: {error.strerror}") from error
    if any(staging.iterdir()) and not any((staging / name).exists() for name in contents):
        os.close(lock)
        raise SourceError(f"{staging}: is in the way; move it, or name another destination")
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise SourceError(f"{destination}: another convert is writing it") from error
        try:
            yield staging
            check_destination(destination, overwrite)  # it may have appeared meanwhile
            for folder in (*(p for p in staging.iterdir() if p.is_dir()), staging):
                fsync_folder(folder)
            _rename(staging, destination)
        except BaseException:
            if not keeps():
                shutil.rmtree(staging, ignore_errors=True)
            raise
    finally:
        os.close(lock)


def clear_folder(folder: Path, keep: str | None = None) -> None:
    """Remove everything in a folder but `keep`; links are removed, not followed."""
    for entry in folder.iterdir():
        if entry.name == keep:
            continue
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def clear_notes(folder: Path) -> None:
    """Remove what only an unfinished convert needs from the folder of a complete pack."""
    shutil.rmtree(folder / STUBS_NAME, ignore_errors=True)
    (folder / JOURNAL_NAME).unlink(missing_ok=True)


def remove_unstarted(destination: Path) -> None:
    """Remove the staging folder of a convert that never began: it holds no journal."""
    staging = staging_path(destination)
    if not staging.is_dir() or staging.is_symlink():
        return
    lock = os.open(staging, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if {entry.name for entry in staging.iterdir()} <= {STUBS_NAME}:
            shutil.rmtree(staging, ignore_errors=True)
    except BlockingIOError:
        pass  # another convert is writing it
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
        _remove_pack(old)


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
