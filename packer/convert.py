"""Checkpoint to pack, end to end: check, understand, write, count, publish; or resume that."""

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from moepack.formats.codec import encode
from moepack.formats.digests import digest_bytes
from moepack.formats.errors import SourceError
from moepack.formats.geometry import ALIGNMENT
from moepack.formats.manifest import VERSION, CopiedFile, Manifest, Shard, Source
from moepack.formats.pack import MANIFEST_NAME, SHARED_NAME, has_tokenizer, is_pack
from moepack.formats.progress import Advance, silent
from moepack.formats.sizes import format_size
from moepack.formats.validate import is_file_name
from moepack.packer.checkpoint import Checkpoint, ConvertOptions, config_text, understand
from moepack.packer.configs import unread_rope_keys
from moepack.packer.filling import fill
from moepack.packer.journal import JOURNAL_NAME, Journal, journal_consumed
from moepack.packer.publishing import (
    check_destination,
    clear_folder,
    clear_notes,
    staging_folder,
    staging_path,
    write_file,
)
from moepack.packer.shards import ConsumedShards, LocalShards, ShardStore
from moepack.packer.source import (
    COPIED_PATTERNS,
    STUBS_NAME,
    SourceFolder,
    same_file,
    save_stubs,
)
from moepack.packer.steps import Step, peak_nbytes, plan_steps
from moepack.packer.tensors import TensorBytes
from moepack.packer.writing import Layout, digest_target, lay_out

__all__ = [
    "ConvertPlan",
    "convert",
    "copied_file_bytes",
    "copied_file_names",
    "plan_convert",
    "summary",
]

# A staging folder with one of these is a convert's: made before the journal, with it, or after.
CONVERT_CONTENTS = (STUBS_NAME, JOURNAL_NAME, MANIFEST_NAME)


@dataclass(frozen=True, slots=True)
class ConvertPlan:
    """What convert will do: the checkpoint as understood, its layout, the order of its shards."""

    source: SourceFolder
    options: ConvertOptions
    checkpoint: Checkpoint
    layout: Layout
    steps: tuple[Step, ...]
    warnings: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that the pack's weight files will have."""
        return self.layout.nbytes

    def tensors(self) -> dict[str, TensorBytes]:
        """All tensors of the pack by parameter path, experts first, in model order."""
        experts = {
            f"{m.path}.{part.name}": e.tensors[part.name]
            for m, e in zip(self.layout.modules, self.checkpoint.modules, strict=True)
            for part in m.parts
        }
        return experts | dict(self.checkpoint.shared)


def plan_convert(source: SourceFolder, options: ConvertOptions) -> ConvertPlan:
    """Understand the source and lay the pack out. Writes nothing. Raises SourceError."""
    checkpoint = understand(source, options)
    warnings = [
        f"{stray.name} is not listed in the index and is left out" for stray in source.stray
    ]
    warnings += [
        f"{name!r} has a name that a pack cannot hold and is left out"
        for name in sorted(_small_file_names(source.path))
        if not is_file_name(name)
    ]
    if not has_tokenizer(source.path):
        warnings.append("the source has no tokenizer; moepack run needs one")
    warnings += [
        f"config.json states {key}, which mlx-lm ignores; so does the pack"
        for key in unread_rope_keys(source.config)
    ]
    plan = ConvertPlan(source, options, checkpoint, lay_out(checkpoint), (), tuple(warnings))
    needs = {
        path: frozenset(source.tensors[name].path.name for name in tensor.sources)
        for path, tensor in plan.tensors().items()
    }
    return replace(plan, steps=tuple(plan_steps(needs, [s.name for s in source.shards])))


def convert(
    plan: ConvertPlan,
    destination: Path,
    *,
    overwrite: bool = False,
    consume: bool = False,
    store: ShardStore | None = None,
    advance: Advance = silent,
    notify: Callable[[str], object] = str,
) -> Manifest:
    """Write the planned pack to `destination` and return its manifest. A plan is good for one run.

    The destination appears whole or not at all. What a killed convert of the same source and
    options left is verified and kept. `consume` deletes each shard of the source once all its
    bytes are in the pack, on disk; a shard with derived or left-out tensors stays. `store` says
    where shards come from when it is not the source's folder. `advance` is told of bytes as they
    are written, `notify` gets notes for a person. Raises SourceError.
    """
    source = plan.source
    if same_file(source.path, destination):
        raise SourceError(f"{destination}: is the source itself")
    check_destination(destination, overwrite)
    if store is None:
        there = tuple(shard for shard in source.shards if shard.parent == source.path)
        restorable = plan.checkpoint.restorable
        store = ConsumedShards(there, restorable) if consume else LocalShards(there)
        if consume and (kept := sorted(s.name for s in there if store.keeps(s.name))):
            notify(f"kept, as not all their bytes are in the pack: {', '.join(kept)}")
    staging = staging_path(destination)

    def holds_shards() -> bool:
        """Whether shards that are nowhere else are in the staging folder, of now or before."""
        return journal_consumed(staging / JOURNAL_NAME)

    try:
        with staging_folder(destination, overwrite, CONVERT_CONTENTS, holds_shards):
            journal = _open_journal(plan, staging, notify)
            _check_space(plan, staging, destination, store)
            if not store.keeps_source:
                save_stubs(source, staging / STUBS_NAME)
            digests = fill(
                plan.layout, plan.steps, plan.tensors(), staging, store, journal, advance
            )
            manifest = _finish(plan, staging, journal, digests)
            if not holds_shards():
                clear_notes(staging)
    except KeyboardInterrupt:
        if holds_shards():
            notify(
                f"what is done is kept in {staging}, and shards consumed are nowhere else; run the "
                "same command again to go on from here"
            )
        elif not staging.exists() and is_pack(destination):
            notify(f"{destination} is complete")
        raise
    except SourceError:
        raise
    except OSError as error:
        after = "run it again to go on from here" if holds_shards() else "nothing was kept"
        at = Path(os.fsdecode(error.filename)) if error.filename else destination
        where = at if at.is_relative_to(source.path) else destination
        raise SourceError(
            f"{where}: {error.strerror or error}; {after} ({plan.nbytes:,} bytes needed, "
            f"{shutil.disk_usage(destination.parent).free:,} free)"
        ) from error
    finally:
        store.close()
    return manifest


def _open_journal(plan: ConvertPlan, staging: Path, notify: Callable[[str], object]) -> Journal:
    """The journal of this very convert, its tensors verified; or a new one in a cleared folder."""
    binding = _binding(plan)
    path = staging / JOURNAL_NAME
    had_journal = path.is_file()
    journal = Journal(path, binding) if had_journal else None
    if journal is None or not journal.is_resumed:
        if journal_consumed(path):
            raise SourceError(
                f"{staging}: holds shards of another source or options, consumed into it; finish "
                "that convert, or move the folder away"
            )
        if had_journal:
            notify("an unfinished convert of another source or options is replaced")
        clear_folder(staging, keep=STUBS_NAME if _stubs_of(plan) else None)
        (staging / "experts").mkdir()
        return Journal.start(path, binding)
    gone = journal.shards.keys() & _stubs_of(plan)
    for name, digest in list(journal.tensors.items()):
        target = plan.layout.targets[name]
        file = staging / target.file
        if not file.is_file() or digest_target(file, target) != digest:
            if gone & _shards_of(plan, name):
                raise SourceError(f"{staging}: {name} is damaged and its source is gone")
            journal.forget(name)
    notify(f"resuming: {len(journal.tensors)} of {len(plan.layout.targets)} tensors are there")
    return journal


def _binding(plan: ConvertPlan) -> dict[str, Any]:
    """What a journal is good for: this source, by names, sizes and headers, and these options."""
    return {
        "created_by": _created_by(),
        "options": plan.options.as_map(),
        "repository": plan.source.name,
        "revision": plan.source.revision,
        "shards": {
            shard.name: [shard.stat().st_size, digest_bytes(plan.source.headers[shard.name]).hex()]
            for shard in plan.source.shards
        },
        "mtimes_ns": plan.source.mtimes_ns(),
        "files": {
            name: digest_bytes(copied_file_bytes(plan, name)).hex()
            for name in copied_file_names(plan.source.path)
        },
    }


def _stubs_of(plan: ConvertPlan) -> set[str]:
    """The shards that are not in the source's folder: consumed, or on the hub."""
    return {shard.name for shard in plan.source.shards if shard.parent != plan.source.path}


def _shards_of(plan: ConvertPlan, tensor: str) -> set[str]:
    sources = plan.tensors()[tensor].sources
    return {plan.source.tensors[name].path.name for name in sources}


def _check_space(plan: ConvertPlan, staging: Path, destination: Path, store: ShardStore) -> None:
    sizes = {name: target.nbytes for name, target in plan.layout.targets.items()}
    padding = plan.nbytes - sum(sizes.values())
    there = sum(f.stat().st_blocks * 512 for f in staging.rglob("*.bin"))
    freed = store.freed_nbytes()
    if plan.source.path.stat().st_dev != staging.stat().st_dev and not _stubs_of(plan):
        freed = {}  # it is given back elsewhere
    peak = peak_nbytes(plan.steps, sizes, store.fetched_nbytes(), freed)
    needed = peak + padding - there
    free = shutil.disk_usage(destination.parent).free
    if free < needed:
        raise SourceError(f"{destination}: needs {needed:,} bytes, the disk has {free:,} free")


def _finish(
    plan: ConvertPlan, staging: Path, journal: Journal, digests: Mapping[str, bytes]
) -> Manifest:
    """Copy the small files, write the manifest. `digests`: of the records, by module path."""
    source, layout = plan.source, plan.layout
    modules = tuple(replace(m, digests=digests[m.path]) for m in layout.modules)
    manifest = Manifest(
        version=VERSION,
        alignment=ALIGNMENT,
        model_type=source.config["model_type"],
        created_by=_created_by(),
        shared_nbytes=layout.file_nbytes[SHARED_NAME],
        shared=tuple(replace(t, digest=journal.tensors[t.name]) for t in layout.shared),
        modules=modules,
        quantization=plan.checkpoint.quantization,
        source=Source(
            name=source.name,
            revision=source.revision,
            shards=tuple(_described(plan, journal.shards[s.name]) for s in source.shards),
            options=plan.options.as_map(),
            dropped=plan.checkpoint.dropped,
            renamed=plan.checkpoint.renamed,
        ),
        files=_copy_files(plan, staging),
    )
    _count(plan, manifest)
    write_file(staging / MANIFEST_NAME, encode(manifest))
    return manifest


def _described(plan: ConvertPlan, shard: Shard) -> Shard:
    """The shard with its header, where `unpack` can restore the file from the pack alone."""
    if shard.name in plan.checkpoint.restorable:
        return replace(shard, header=plan.source.headers[shard.name])
    return shard


def _copy_files(plan: ConvertPlan, staging: Path) -> tuple[CopiedFile, ...]:
    files = []
    for name in copied_file_names(plan.source.path):
        data = copied_file_bytes(plan, name)
        write_file(staging / name, data)
        files.append(CopiedFile(name, len(data), digest_bytes(data)))
    return tuple(files)


def copied_file_bytes(plan: ConvertPlan, name: str) -> bytes:
    """A copied file as the pack has it: the source's bytes, or the config that convert changed."""
    if name == "config.json" and plan.checkpoint.config is not None:
        return config_text(plan.checkpoint.config).encode()
    return (plan.source.path / name).read_bytes()


def copied_file_names(folder: Path) -> list[str]:
    """The files of a checkpoint that a pack keeps beside the weights, in name order."""
    return sorted(name for name in _small_file_names(folder) if is_file_name(name))


def _small_file_names(folder: Path) -> set[str]:
    names = {p.name for pattern in COPIED_PATTERNS for p in folder.glob(pattern) if p.is_file()}
    return {name for name in names if not name.startswith(".")}


def _count(plan: ConvertPlan, manifest: Manifest) -> None:
    """Nothing left over, nothing twice: every parameter of the model is in the pack once."""
    wanted = {path: tensor.shape for path, tensor in plan.tensors().items()}
    packed = {
        f"{m.path}.{part.name}": (m.n_experts, *part.shape)
        for m in manifest.modules
        for part in m.parts
    } | {t.name: t.shape for t in manifest.shared}
    if wanted != packed:
        raise SourceError(f"{plan.source.path}: internal count of tensors does not close")


def _created_by() -> str:
    return f"moepack {version('moepack')}"


def summary(plan: ConvertPlan) -> str:
    """A few lines for a person: layers, experts, bytes, what is left out."""
    modules = plan.layout.modules
    counts = sorted({m.n_experts for m in modules})
    lines = [
        f"{len(modules)} expert layers x {'/'.join(map(str, counts))} experts, "
        f"{format_size(sum(m.record_nbytes * m.n_experts for m in modules))}; "
        f"shared weights {format_size(plan.layout.file_nbytes[SHARED_NAME])}",
    ]
    if plan.checkpoint.dropped:
        total = sum(plan.checkpoint.dropped.values())
        lines.append(
            f"left out, not part of the text model: {len(plan.checkpoint.dropped)} tensors, "
            f"{format_size(total)}"
        )
    return "\n".join(lines)
