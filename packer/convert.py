"""Checkpoint to pack, end to end: check, understand, write, count, publish."""

import hashlib
import shutil
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from moepack.formats.codec import encode
from moepack.formats.digests import digest_bytes
from moepack.formats.errors import SourceError
from moepack.formats.geometry import ALIGNMENT
from moepack.formats.manifest import (
    VERSION,
    CopiedFile,
    ExpertModule,
    Manifest,
    Shard,
    Source,
)
from moepack.formats.pack import MANIFEST_NAME, SHARED_NAME, has_tokenizer
from moepack.formats.progress import Advance, silent
from moepack.formats.sizes import format_size
from moepack.packer.checkpoint import Checkpoint, ConvertOptions, config_text, understand
from moepack.packer.publishing import check_destination, staging_folder, write_file
from moepack.packer.source import COPIED_PATTERNS, SourceFolder, same_file
from moepack.packer.writing import (
    lay_out_module,
    planned_nbytes,
    write_experts,
    write_shared,
)

__all__ = [
    "ConvertPlan",
    "convert",
    "copied_file_bytes",
    "copied_file_names",
    "plan_convert",
    "summary",
]


@dataclass(frozen=True, slots=True)
class ConvertPlan:
    """What convert will do: the checkpoint as understood, its layout, the bytes it needs."""

    source: SourceFolder
    options: ConvertOptions
    checkpoint: Checkpoint
    modules: tuple[ExpertModule, ...]
    nbytes: int
    warnings: tuple[str, ...]


def plan_convert(source: SourceFolder, options: ConvertOptions) -> ConvertPlan:
    """Understand the source and lay the pack out. Writes nothing. Raises SourceError."""
    checkpoint = understand(source, options)
    modules = tuple(lay_out_module(i, m) for i, m in enumerate(checkpoint.modules))
    warnings = [
        f"{stray.name} is not listed in the index and is left out" for stray in source.stray
    ]
    if not has_tokenizer(source.path):
        warnings.append("the source has no tokenizer; moepack run needs one")
    nbytes = planned_nbytes(list(modules), dict(checkpoint.shared))
    return ConvertPlan(source, options, checkpoint, modules, nbytes, tuple(warnings))


def convert(
    plan: ConvertPlan, destination: Path, *, overwrite: bool = False, advance: Advance = silent
) -> Manifest:
    """Write the planned pack to `destination` and return its manifest. A plan is good for one run.

    The destination appears whole or not at all. `advance` is told of bytes as they are written,
    `plan.nbytes` less padding in all. Raises SourceError.
    """
    source = plan.source
    check_destination(destination, overwrite)
    if same_file(source.path, destination):
        raise SourceError(f"{destination}: is the source itself")
    free = shutil.disk_usage(destination.parent).free
    if free < plan.nbytes:
        raise SourceError(f"{destination}: needs {plan.nbytes:,} bytes, the disk has {free:,} free")
    try:
        with (
            ThreadPoolExecutor(1, thread_name_prefix="sha256") as pool,
            staging_folder(destination, overwrite) as staging,
        ):
            shards = [pool.submit(_digest_shard, path) for path in source.shards]
            try:
                manifest = _write(plan, staging, shards, advance)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
    except SourceError:
        raise
    except OSError as error:
        free = shutil.disk_usage(destination.parent).free
        raise SourceError(
            f"{destination}: {error.strerror or error}; nothing was kept "
            f"({plan.nbytes:,} bytes needed, {free:,} free)"
        ) from error
    return manifest


def _write(
    plan: ConvertPlan, staging: Path, shards: Sequence["Future[Shard]"], advance: Advance
) -> Manifest:
    checkpoint, source = plan.checkpoint, plan.source
    modules = []
    for layout, experts in zip(plan.modules, checkpoint.modules, strict=True):
        digests = write_experts(staging / layout.file, layout, experts, advance)
        modules.append(replace(layout, digests=digests))
    shared = write_shared(staging / SHARED_NAME, dict(checkpoint.shared), advance)
    files = _copy_files(plan, staging)
    manifest = Manifest(
        version=VERSION,
        alignment=ALIGNMENT,
        model_type=source.config["model_type"],
        created_by=f"moepack {version('moepack')}",
        shared_nbytes=(staging / SHARED_NAME).stat().st_size,
        shared=shared,
        modules=tuple(modules),
        quantization=checkpoint.quantization,
        source=Source(
            name=source.name,
            revision=source.revision,
            shards=tuple(shard.result() for shard in shards),
            options=plan.options.as_map(),
            dropped=checkpoint.dropped,
        ),
        files=files,
    )
    _count(plan, manifest)
    write_file(staging / MANIFEST_NAME, encode(manifest))
    return manifest


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
    names = {p.name for pattern in COPIED_PATTERNS for p in folder.glob(pattern) if p.is_file()}
    return sorted(n for n in names if not n.startswith(".") and not n.endswith(".index.json"))


def _count(plan: ConvertPlan, manifest: Manifest) -> None:
    """Nothing left over, nothing twice: every parameter of the model is in the pack once."""
    wanted = {
        (m.path, name, tensor.shape)
        for m in plan.checkpoint.modules
        for name, tensor in m.tensors.items()
    }
    packed = {
        (m.path, part.name, (m.n_experts, *part.shape))
        for m in manifest.modules
        for part in m.parts
    }
    if wanted != packed or {t.name for t in manifest.shared} != set(plan.checkpoint.shared):
        raise SourceError(f"{plan.source.path}: internal count of tensors does not close")


def _digest_shard(path: Path) -> Shard:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Shard(path.name, path.stat().st_size, digest)


def summary(plan: ConvertPlan) -> str:
    """A few lines for a person: layers, experts, bytes, what is left out."""
    modules = plan.modules
    counts = sorted({m.n_experts for m in modules})
    shared = plan.nbytes - sum(m.stride * m.n_experts for m in modules)
    lines = [
        f"{len(modules)} expert layers x {'/'.join(map(str, counts))} experts, "
        f"{format_size(sum(m.record_nbytes * m.n_experts for m in modules))}; "
        f"shared weights {format_size(shared)}",
    ]
    if plan.checkpoint.dropped:
        total = sum(plan.checkpoint.dropped.values())
        lines.append(
            f"left out, not part of the text model: {len(plan.checkpoint.dropped)} tensors, "
            f"{format_size(total)}"
        )
    return "\n".join(lines)
