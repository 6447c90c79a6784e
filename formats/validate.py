"""The rules of format 1.0, each stated once. Writer and reader both pass through `validate`.

Order matters: a count or size is bounded before anything is computed or allocated from it.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any

from moepack.formats.errors import FormatError
from moepack.formats.geometry import MAX_NBYTES, align_up, tensor_nbytes
from moepack.formats.manifest import DIGEST_NBYTES, ExpertModule, Manifest, Quantization

__all__ = ["is_file_name", "max_copied_nbytes", "validate", "validate_config", "validate_file_name"]

MAX_EXPERTS = 65_536  # two thousand times today's largest top-k; keeps digests below a megabyte
MAX_LAYERS = 1_000  # some eight times today's deepest; models are built layer by layer
# Of tokenizers the largest known has 33 MB, of templates 30 kB; both are read whole to run a model.
MAX_COPIED_NBYTES = 64 * 2**20
MAX_TEMPLATE_NBYTES = 2**20
MODES = ("affine", "mxfp4", "mxfp8", "nvfp4")


def validate(manifest: Manifest) -> None:
    """Check every rule that needs no file. Raises FormatError: `where: what is wrong`."""
    alignment = manifest.alignment
    if not 512 <= alignment <= 2**24 or alignment & (alignment - 1):
        raise FormatError(
            f"manifest alignment: {alignment} is not a power of two from 512 to 16,777,216"
        )
    for key in ("model_type", "created_by"):
        _check_text(f"manifest {key}", getattr(manifest, key))
    _check_shared(manifest)
    _check_unique("manifest modules: path", (m.path for m in manifest.modules))
    _check_unique("manifest modules: file", (m.file for m in manifest.modules))
    if not manifest.modules:
        raise FormatError("manifest modules: none; a pack has at least one expert module")
    total = 0
    for module in manifest.modules:
        _check_module(module, alignment)
        total += module.stride * module.n_experts
    if total > MAX_NBYTES:
        raise FormatError(f"manifest modules: {total} bytes in all do not fit 64 bits")
    _check_quantization("manifest quantization", manifest.quantization)
    _check_source(manifest)
    for file in manifest.files:
        where = f"manifest files {file.name!r}"
        validate_file_name(where, file.name)
        if "/" in file.name or file.name in ("manifest.msgpack", "shared.bin"):
            raise FormatError(f"{where}: not a name for a copied file")
        if not 0 <= file.nbytes <= max_copied_nbytes(file.name):
            raise FormatError(f"{where}: nbytes {file.nbytes} out of range")


def max_copied_nbytes(name: str) -> int:
    """The most bytes that a file copied beside the weights may have."""
    return MAX_TEMPLATE_NBYTES if name.endswith(".jinja") else MAX_COPIED_NBYTES


def validate_file_name(where: str, name: str) -> None:
    """Raises FormatError for a name that a pack cannot hold."""
    if not is_file_name(name):
        raise FormatError(f"{where}: {name!r} is not a relative file name inside the pack")


def is_file_name(name: str) -> bool:
    """A relative path in the pack, `/`-separated, no `..`, no hidden part, nothing to normalize."""
    path = PurePosixPath(name)
    return (
        bool(re.fullmatch(r"[^\x00-\x1f\\:\ud800-\udfff]{1,255}", name))
        and not path.is_absolute()
        and str(path) == name != "."
        and len(path.parts) <= 2
        and not any(part.startswith(".") for part in path.parts)
    )


def _check_shared(manifest: Manifest) -> None:
    end = 0
    _check_unique("manifest shared tensors: name", (t.name for t in manifest.shared))
    if not 0 <= manifest.shared_nbytes <= MAX_NBYTES:
        raise FormatError(f"manifest shared nbytes: {manifest.shared_nbytes} out of range")
    for tensor in manifest.shared:
        where = f"shared tensor {tensor.name!r}"
        _check_text(where, tensor.name)
        wanted = tensor_nbytes(where, tensor.dtype, tensor.shape)
        if tensor.nbytes != wanted:
            raise FormatError(f"{where}: nbytes is {tensor.nbytes}, its shape gives {wanted}")
        if tensor.offset != end:
            raise FormatError(
                f"{where}: offset is {tensor.offset}, wanted {end} (no hole, overlap)"
            )
        end = align_up(end + tensor.nbytes, manifest.alignment)
    if manifest.shared_nbytes != end:
        raise FormatError(
            f"manifest shared nbytes: {manifest.shared_nbytes}, its tensors give {end}"
        )


def _check_module(module: ExpertModule, alignment: int) -> None:
    where = f"module {module.path!r}"
    _check_text(where, module.path)
    _check_text(f"{where} class", module.class_name)
    validate_file_name(f"{where} file", module.file)
    if not module.file.startswith("experts/"):
        raise FormatError(f"{where} file: {module.file!r} is not in the folder experts/")
    if not 1 <= module.n_experts <= MAX_EXPERTS:
        raise FormatError(f"{where} n_experts: {module.n_experts} is not from 1 to {MAX_EXPERTS}")
    if not module.parts:
        raise FormatError(f"{where} parts: none")
    _check_unique(f"{where} part", (p.name for p in module.parts))
    end = 0
    for part in module.parts:
        part_where = f"{where} part {part.name!r}"
        _check_text(part_where, part.name)
        wanted = tensor_nbytes(part_where, part.dtype, part.shape)
        if part.nbytes != wanted or wanted == 0:
            raise FormatError(f"{part_where}: nbytes is {part.nbytes}, its shape gives {wanted}")
        if part.offset != end:
            raise FormatError(f"{part_where}: offset is {part.offset}, wanted {end}")
        end += part.nbytes
    if module.record_nbytes != end:
        raise FormatError(f"{where} record_nbytes: {module.record_nbytes}, its parts give {end}")
    if module.stride != align_up(end, alignment):
        raise FormatError(
            f"{where} stride: {module.stride}, a record of {end} bytes wants "
            f"{align_up(end, alignment)}"
        )
    if len(module.digests) != module.n_experts * DIGEST_NBYTES:
        raise FormatError(
            f"{where} digests: {len(module.digests)} bytes, {module.n_experts} experts want "
            f"{module.n_experts * DIGEST_NBYTES}"
        )
    _check_quantization(where, module.quantization)
    names = {part.name for part in module.parts}
    for projection in module.quantization:
        for tensor in ("weight", "scales"):
            if f"{projection}.{tensor}" not in names:
                raise FormatError(f"{where} quantization: no part {projection}.{tensor}")


def _check_source(manifest: Manifest) -> None:
    source = manifest.source
    if source.name is not None:
        _check_text("manifest source name", source.name)
    _check_unique("manifest source shard", (s.name for s in source.shards))
    for shard in source.shards:
        if not 0 <= shard.nbytes <= MAX_NBYTES or not re.fullmatch(r"[0-9a-f]{64}", shard.sha256):
            raise FormatError(f"manifest source shard {shard.name!r}: bad nbytes or sha256")
        where = f"manifest source shard {shard.name!r}"
        validate_file_name(where, shard.name)
        if not shard.name.endswith(".safetensors"):
            raise FormatError(f"{where}: not the name of a safetensors file")
        if "/" in shard.name or (shard.header is not None and len(shard.header) > shard.nbytes):
            raise FormatError(f"{where}: not a file name, or a header longer than the file")
    for name, nbytes in source.dropped.items():
        if not 0 <= nbytes <= MAX_NBYTES:
            raise FormatError(f"manifest source dropped {name!r}: nbytes {nbytes} out of range")


def _check_quantization(where: str, quantization: Mapping[str, Quantization]) -> None:
    for name, q in quantization.items():
        if not (1 <= q.bits <= 8 and 1 <= q.group_size <= 65_536 and q.mode in MODES):
            raise FormatError(f"{where} quantization of {name!r}: {q} is not one that MLX knows")


def _check_text(where: str, text: str) -> None:
    if not 1 <= len(text) <= 1024 or not text.isprintable():
        raise FormatError(f"{where}: a printable text of 1 to 1,024 characters was expected")


def validate_config(where: str, config: Mapping[str, Any]) -> None:
    """Refuse a model's config that states more layers than any loader should begin to build.

    And one whose `text_config`, where loaders look for them, is none. Raises FormatError.
    """
    if not isinstance(config.get("text_config"), dict | None):
        raise FormatError(f"{where}: text_config is not a JSON object")
    for key, value in config.items():
        if isinstance(value, dict):
            validate_config(f"{where} {key}", value)
        elif "layers" in key and isinstance(value, int) and value > MAX_LAYERS:
            raise FormatError(f"{where}: {key} is {value:,}, more than {MAX_LAYERS:,}")


def _check_unique(where: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise FormatError(f"{where} {name!r} occurs twice")
        seen.add(name)
