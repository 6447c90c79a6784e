"""A pack against its source, byte for byte: what convert should have written, derived again."""

from collections.abc import Iterator
from pathlib import Path

from moepack.formats.digests import CHUNK_NBYTES, Mismatch, digest_bytes, read_range
from moepack.formats.manifest import ExpertModule
from moepack.formats.pack import Pack
from moepack.formats.progress import Advance, silent
from moepack.packer.checkpoint import ConvertOptions, ExpertTensors
from moepack.packer.convert import ConvertPlan, copied_file_bytes, copied_file_names
from moepack.packer.source import INDEX_NAME
from moepack.packer.tensors import TensorBytes

__all__ = ["compare", "recorded_options"]


def recorded_options(pack: Pack) -> ConvertOptions:
    """The options that the pack was made with."""
    return ConvertOptions(**pack.manifest.source.options)  # type: ignore[arg-type]


def compare(pack: Pack, plan: ConvertPlan, advance: Advance = silent) -> Iterator[Mismatch]:
    """Yield every difference between the pack and what `plan` would write. Uses the plan up.

    `advance` is told of bytes as they are compared.
    """
    manifest = pack.manifest
    # The index says in which shard a tensor is, which is not what a model is.
    names = [n for n in copied_file_names(plan.source.path) if n != INDEX_NAME]
    wanted_files = {name: copied_file_bytes(plan, name) for name in names}
    packed_files = {file.name: file.digest for file in manifest.files if file.name != INDEX_NAME}
    for name in sorted({*wanted_files, *packed_files}):
        if name not in packed_files:
            yield _whole(name, "is in the source, not in the pack")
        elif name not in wanted_files:
            yield _whole(name, "is in the pack, not in the source")
        elif digest_bytes(wanted_files[name]) != packed_files[name]:
            yield _whole(name, "differs from the source's")

    yield from _compare_shared(pack, plan, advance)

    layouts = {m.path: (layer, m) for layer, m in enumerate(manifest.modules)}
    for layout, experts in zip(plan.layout.modules, plan.checkpoint.modules, strict=True):
        if layout.path not in layouts:
            yield _other(layout.path, "expert module is in the source, not in the pack")
            continue
        layer, module = layouts.pop(layout.path)
        if (module.parts, module.n_experts) != (layout.parts, layout.n_experts):
            yield Mismatch(
                module.path, layer, None, None, "parts or experts differ from the source", True
            )
        elif module.quantization != experts.quantization:
            yield Mismatch(
                module.path, layer, None, None, "quantization differs from the source", True
            )
        else:
            yield from _compare_module(pack.expert_file(module), layer, module, experts, advance)
    for path in layouts:
        yield _other(path, "expert module is in the pack, not in the source")


def _compare_module(
    path: Path, layer: int, module: ExpertModule, experts: ExpertTensors, advance: Advance
) -> Iterator[Mismatch]:
    with path.open("rb") as file:
        for part in module.parts:
            packed = memoryview(bytearray(part.nbytes))
            for expert, row in enumerate(experts.tensors[part.name].rows(part.nbytes)):
                read_range(file.fileno(), packed, expert * module.stride + part.offset, path)
                if packed != row:
                    yield Mismatch(
                        module.path, layer, expert, part.name, "bytes differ from the source's"
                    )
                advance(part.nbytes)


def _compare_shared(pack: Pack, plan: ConvertPlan, advance: Advance) -> Iterator[Mismatch]:
    packed = {t.name: t for t in pack.manifest.shared}
    for name in sorted(packed.keys() - plan.checkpoint.shared.keys()):
        yield _other(name, "shared tensor is in the pack, not in the source")
    if pack.manifest.quantization != plan.checkpoint.quantization:
        yield _other("quantization", "of shared weights differs from the source's")
    with pack.shared_file.open("rb") as file:
        for name, tensor in plan.checkpoint.shared.items():
            if name not in packed:
                yield _other(name, "shared tensor is in the source, not in the pack")
                continue
            entry = packed[name]
            if (entry.dtype, entry.shape) != (tensor.dtype, tensor.shape):
                yield _other(name, "shared tensor has another dtype or shape than the source's")
            elif not _equal(file.fileno(), pack.shared_file, entry.offset, tensor, advance):
                yield _whole(name, "shared tensor's bytes differ from the source's")


def _equal(fd: int, path: Path, offset: int, tensor: TensorBytes, advance: Advance) -> bool:
    buffer = memoryview(bytearray(CHUNK_NBYTES))
    same = True
    for row in tensor.rows(CHUNK_NBYTES):
        view = buffer[: len(row)]
        read_range(fd, view, offset, path)
        same = same and view == row
        offset += len(row)
        advance(len(row))
    return same


def _whole(name: str, reason: str) -> Mismatch:
    return Mismatch(None, None, None, name, reason)


def _other(name: str, reason: str) -> Mismatch:
    return Mismatch(None, None, None, name, reason, is_structural=True)
