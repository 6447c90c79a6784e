"""A damaged pack made whole from its source: what is wrong is derived again and written in place.

Nothing of the pack is written before all that is to be written has the manifest's digests. Until
then it lies in a file without a name on the pack's disk, so that memory is that of one tensor.
"""

import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import xxhash

from moepack.formats.digests import CHUNK_NBYTES, Mismatch, read_range
from moepack.formats.errors import FormatError, SourceError
from moepack.formats.geometry import align_up
from moepack.formats.manifest import ExpertModule, Manifest
from moepack.formats.pack import SHARED_NAME, Pack
from moepack.formats.progress import Advance, silent
from moepack.packer.comparing import recorded_options
from moepack.packer.convert import (
    ConvertPlan,
    copied_file_bytes,
    copied_file_names,
    plan_convert,
)
from moepack.packer.opening import open_for_convert
from moepack.packer.publishing import fsync_folder, remove_unstarted
from moepack.packer.shards import ShardStore
from moepack.packer.steps import plan_steps
from moepack.packer.writing import write_range

__all__ = ["Damage", "Piece", "find_damage", "open_damaged", "pieces_of", "repair"]

UNREADABLE = "cannot be read"


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of a file with a digest of its own: a record, a shared tensor or a copied file.

    `digest` is of `nbytes` at `offset`; zeros follow up to `end`. `module` is of a record, else
    None. `name` is that of a shared tensor or copied file.
    """

    file: str
    offset: int
    nbytes: int
    end: int
    digest: bytes
    name: str = ""
    module: ExpertModule | None = None
    layer: int | None = None
    expert: int | None = None

    @property
    def kind(self) -> str:
        """For messages."""
        if self.module is not None:
            return "record"
        return "shared tensor" if self.file == SHARED_NAME else "file"

    def mismatch(self, reason: str) -> Mismatch:
        """What is wrong with it."""
        path = self.module.path if self.module is not None else None
        return Mismatch(path, self.layer, self.expert, self.name or None, reason)


@dataclass(frozen=True, slots=True)
class Damage:
    """What is wrong with a pack. Empty, hence false, when nothing is.

    `wrong` pieces have other bytes than they should, or none; the padding of `unpadded` ones is
    not zeros; `files`, by name, are missing or not of their size. `mismatches` says it all.
    """

    wrong: tuple[Piece, ...]
    unpadded: tuple[Piece, ...]
    files: frozenset[str]
    mismatches: tuple[Mismatch, ...]

    def __bool__(self) -> bool:
        return bool(self.mismatches)

    @property
    def nbytes(self) -> int:
        """Bytes to derive again, padding left out."""
        return sum(piece.nbytes for piece in self.wrong)

    @property
    def touched(self) -> set[str]:
        """The files that are to be written, by name."""
        return {piece.file for piece in (*self.wrong, *self.unpadded)} | self.files


def open_damaged(path: Path) -> Pack:
    """A pack whose files may be missing, cut or wrong; not its manifest.

    Raises SourceError and FormatError.
    """
    try:
        return Pack.open_unchecked(path)
    except FormatError as error:
        raise FormatError(f"{error}; a damaged manifest cannot be repaired, convert again") from (
            error
        )


def pieces_of(manifest: Manifest) -> list[Piece]:
    """Everything that the manifest has a digest of, file by file, in offset order."""
    shared = [
        Piece(
            SHARED_NAME,
            t.offset,
            t.nbytes,
            align_up(t.offset + t.nbytes, manifest.alignment),
            t.digest,
            t.name,
        )
        for t in manifest.shared
    ]
    records = [
        Piece(
            m.file,
            expert * m.stride,
            m.record_nbytes,
            (expert + 1) * m.stride,
            m.digest(expert),
            module=m,
            layer=layer,
            expert=expert,
        )
        for layer, m in enumerate(manifest.modules)
        for expert in range(m.n_experts)
    ]
    copied = [Piece(f.name, 0, f.nbytes, f.nbytes, f.digest, f.name) for f in manifest.files]
    return [*shared, *records, *copied]


def find_damage(pack: Pack, advance: Advance = silent) -> Damage:
    """Read the whole pack once and say what is wrong, padding of shared tensors included.

    `advance` is told of bytes as they are read. Raises FormatError where a folder, or a link
    out of the pack, is in a file's place, and SourceError where it may not be looked at.
    """
    return _look(pack, pack.file_nbytes(), pieces_of(pack.manifest), advance)


def _look(
    pack: Pack, file_nbytes: Mapping[str, int], pieces: Sequence[Piece], advance: Advance
) -> Damage:
    """The damage in some pieces of some files."""
    by_file: dict[str, list[Piece]] = {name: [] for name in file_nbytes}
    for piece in pieces:
        by_file[piece.file].append(piece)
    wrong: list[Piece] = []
    unpadded: list[Piece] = []
    files: set[str] = set()
    mismatches: list[Mismatch] = []
    buffer = memoryview(bytearray(CHUNK_NBYTES))
    for name, nbytes in file_nbytes.items():
        path = pack.path / name
        size = _size(pack, name)
        if size != nbytes:
            files.add(name)
            state = "is missing" if size is None else f"has {size:,} bytes, not {nbytes:,}"
            mismatches.append(Mismatch(None, None, None, name, f"file {state}"))
        if size is None:
            wrong += by_file[name]
            continue
        with path.open("rb") as file:
            for piece in by_file[name]:
                reason = _what_is_wrong(file.fileno(), path, piece, buffer)
                advance(piece.end - piece.offset)
                if reason is None:
                    continue
                (unpadded if reason.startswith("padding") else wrong).append(piece)
                if not (name in files and reason.endswith(UNREADABLE)):  # it was said of the file
                    mismatches.append(piece.mismatch(reason))
    return Damage(tuple(wrong), tuple(unpadded), frozenset(files), tuple(mismatches))


def _size(pack: Pack, name: str) -> int | None:
    """Bytes of a file, None when it is missing."""
    path = pack.path / name
    pack.check_link(name)
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise FormatError(f"{path}: not a regular file; move it away")
    return status.st_size


def _what_is_wrong(fd: int, path: Path, piece: Piece, buffer: memoryview) -> str | None:
    digest = xxhash.xxh3_128()
    has_padding = False
    middle = piece.offset + piece.nbytes
    try:
        for start in range(piece.offset, piece.end, len(buffer)):
            view = buffer[: min(len(buffer), piece.end - start)]
            read_range(fd, view, start, path)
            inside = max(0, min(len(view), middle - start))
            digest.update(view[:inside])
            has_padding = has_padding or any(view[inside:])
    except SourceError:  # cut, or a bad sector
        return f"{piece.kind} {UNREADABLE}"
    if digest.digest() != piece.digest:
        return f"{piece.kind} differs from its digest"
    return f"padding after the {piece.kind} is not zero" if has_padding else None


def repair(pack: Pack, damage: Damage, source: str, advance: Advance = silent) -> None:
    """Put right what is wrong, from a checkpoint: a folder, or `org/name`, cached or on the hub.

    Of the hub's model that the pack was made from, the same commit is taken, and only the shards
    that are needed, one at a time. `advance` is told of bytes as they are derived. Raises
    SourceError: a source that gives other bytes (then nothing was written), a pack that may not be
    written, no space. Interrupted, it leaves a pack that can be repaired.
    """
    _check_can_write(pack, damage)
    folder = pack.path.resolve()
    beside = folder.with_name(f"{folder.name}.repair")  # headers and shards of the hub go there
    recorded = pack.manifest.source
    try:
        with tempfile.TemporaryFile(dir=pack.path, buffering=0) as spool:
            if damage.wrong:
                revision = recorded.revision if recorded.name == source else None
                opened, store = open_for_convert(source, revision, beside)
                try:
                    plan = plan_convert(opened, recorded_options(pack))
                    _derive(plan, store, damage.wrong, spool.fileno(), advance)
                finally:
                    if store is not None:
                        store.close()
                _check(plan, damage.wrong, spool.fileno())
            _write(pack, damage, spool.fileno())
    except SourceError:
        raise
    except OSError as error:
        raise SourceError(
            f"{error.filename or pack.path}: {error.strerror or error}; run the same command again"
        ) from error
    finally:
        remove_unstarted(beside)
    sizes = {name: pack.file_nbytes()[name] for name in damage.touched}
    for mismatch in _look(pack, sizes, [*damage.wrong, *damage.unpadded], silent).mismatches:
        raise SourceError(f"{pack.path}: {mismatch}, though it was written anew; bad disk?")


def _check_can_write(pack: Pack, damage: Damage) -> None:
    """Raise SourceError where writing would fail: permissions, space."""
    growth = 0
    paths = [pack.path / name for name in sorted(damage.touched)]
    for path in (pack.path, *(path for path in paths if path.exists())):
        if not os.access(path, os.W_OK):
            raise SourceError(f"{path}: no permission to write here; nothing was repaired")
    for name, nbytes in pack.file_nbytes().items():
        if name in damage.files:
            growth += max(0, nbytes - (_size(pack, name) or 0))
    needed = damage.nbytes + growth
    if (free := shutil.disk_usage(pack.path).free) < needed:
        raise SourceError(f"{pack.path}: needs {needed:,} bytes, the disk has {free:,} free")


def _places(pieces: Sequence[Piece]) -> Iterator[tuple[Piece, int]]:
    """Each piece and its offset in the spool: they lie back to back."""
    offset = 0
    for piece in pieces:
        yield piece, offset
        offset += piece.nbytes


@dataclass(frozen=True, slots=True)
class _Rows:
    """Which rows of a tensor are wanted, `row_nbytes` each: number -> offset in the spool."""

    row_nbytes: int
    place_of: dict[int, int]


def _derive(
    plan: ConvertPlan,
    store: ShardStore | None,
    pieces: Sequence[Piece],
    spool: int,
    advance: Advance,
) -> None:
    """Write the bytes that the source gives for the pieces to the spool.

    Raises SourceError where the source has no such tensor or file.
    """
    _check_layout(plan, pieces)
    wanted: dict[str, _Rows] = {}
    for piece, place in _places(pieces):
        if piece.module is not None and piece.expert is not None:
            for part in piece.module.parts:
                rows = wanted.setdefault(f"{piece.module.path}.{part.name}", _Rows(part.nbytes, {}))
                rows.place_of[piece.expert] = place + part.offset
        elif piece.file == SHARED_NAME:
            starts = range(0, piece.nbytes, CHUNK_NBYTES)
            wanted[piece.name] = _Rows(CHUNK_NBYTES, {i: place + s for i, s in enumerate(starts)})
        else:
            data = copied_file_bytes(plan, piece.name)
            if len(data) != piece.nbytes:  # it would reach into the next piece
                raise _another(plan, piece)
            write_range(spool, memoryview(data), place)
            advance(len(data))

    tensors = {name: tensor for name, tensor in plan.tensors().items() if name in wanted}
    needs = {
        name: frozenset(plan.source.tensors[s].path.name for s in tensor.sources)
        for name, tensor in tensors.items()
    }
    used = frozenset(chain.from_iterable(needs.values()))
    shards = [shard.name for shard in plan.source.shards if shard.name in used]
    if needs and not shards:  # tensors that are made of none
        shards = [plan.source.shards[0].name]
    for step in plan_steps(needs, shards):
        if store is not None and step.fetch is not None:
            store.fetch(step.fetch)
        for name in step.tensors:
            rows = wanted[name]
            for row, view in enumerate(tensors[name].rows(rows.row_nbytes)):
                if row in rows.place_of:
                    write_range(spool, view, rows.place_of[row])
                    advance(len(view))
        if store is not None:
            for shard in step.release:
                store.discard(shard)


def _check_layout(plan: ConvertPlan, pieces: Sequence[Piece]) -> None:
    """Raise SourceError unless the source has every piece, of the same types and shapes."""
    modules = {m.path: (m.parts, m.n_experts) for m in plan.layout.modules}
    shared = {t.name: t.nbytes for t in plan.layout.shared}
    files = set(copied_file_names(plan.source.path))
    for piece in pieces:
        if piece.module is not None:
            module = piece.module
            is_there = modules.get(module.path) == (module.parts, module.n_experts)
        elif piece.file == SHARED_NAME:
            is_there = shared.get(piece.name) == piece.nbytes
        else:
            is_there = piece.name in files
        if not is_there:
            raise _another(plan, piece)


def _check(plan: ConvertPlan, pieces: Sequence[Piece], spool: int) -> None:
    """Raise SourceError unless the spool has for each piece the bytes that were packed."""
    for piece, place in _places(pieces):
        digest = xxhash.xxh3_128()
        for view in _chunks(spool, place, piece.nbytes):
            digest.update(view)
        if digest.digest() != piece.digest:
            raise _another(plan, piece)


def _another(plan: ConvertPlan, piece: Piece) -> SourceError:
    mismatch = piece.mismatch("other bytes than were packed")
    return SourceError(
        f"{plan.source.path}: {mismatch}; it is not the checkpoint that the pack was made from, or "
        "other versions of moepack and MLX made the pack; nothing was written"
    )


def _chunks(fd: int, start: int, nbytes: int) -> Iterator[memoryview]:
    """A range of the spool, in views that are valid until the next one."""
    buffer = memoryview(bytearray(min(nbytes, CHUNK_NBYTES)))
    for done in range(0, nbytes, CHUNK_NBYTES):
        view = buffer[: min(CHUNK_NBYTES, nbytes - done)]
        read_range(fd, view, start + done, Path("the copy to write"))
        yield view


def _write(pack: Pack, damage: Damage, spool: int) -> None:
    """Put the checked bytes in their places, zeros after them, and the files on disk."""
    sizes = pack.file_nbytes()
    by_file: dict[str, list[tuple[Piece, int | None]]] = {name: [] for name in damage.touched}
    for piece, place in _places(damage.wrong):
        by_file[piece.file].append((piece, place))
    for piece in damage.unpadded:
        by_file[piece.file].append((piece, None))
    for name in sorted(by_file):
        path = pack.path / name
        path.parent.mkdir(exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            for piece, copy in by_file[name]:
                if copy is not None:
                    at = piece.offset
                    for view in _chunks(spool, copy, piece.nbytes):
                        write_range(fd, view, at)
                        at += len(view)
                end = piece.offset + piece.nbytes
                write_range(fd, memoryview(bytes(piece.end - end)), end)
            os.ftruncate(fd, sizes[name])
            os.fsync(fd)
            if sys.platform != "darwin":  # what is looked at next is what is on disk
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
        if name in damage.files:
            for folder in {path.parent, pack.path}:
                fsync_folder(folder)
