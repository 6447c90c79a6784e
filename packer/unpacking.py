"""The inverse of convert: a pack back to the MLX checkpoint.

A shard of the source whose every tensor is in the pack unchanged is made again byte for byte. All
else goes to new shards, under the names that mlx-lm's model has for it.
"""

import hashlib
import json
import os
import shutil
import struct
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moepack.formats.digests import check_digests, digest_bytes, read_range
from moepack.formats.errors import FormatError, SourceError
from moepack.formats.manifest import Manifest, Shard, quantization_config
from moepack.formats.pack import Pack
from moepack.formats.progress import Advance, silent
from moepack.packer.publishing import (
    check_destination,
    clear_folder,
    staging_folder,
    write_file,
)
from moepack.packer.source import INDEX_NAME
from moepack.packer.writing import Target, targets_of

__all__ = ["Unpacked", "unpack"]

UNPACKING = "unpacking"  # the name of a file that says whose a staging folder is
MAX_SHARD_NBYTES = 5 * 2**30  # as mlx-lm's


@dataclass(frozen=True, slots=True)
class Unpacked:
    """Names of the shards that equal the source's, by sha256, and of those made anew."""

    restored: tuple[str, ...]
    made: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Tensor:
    dtype: str
    shape: tuple[int, ...]
    target: Target


def unpack(pack: Pack, destination: Path, advance: Advance = silent) -> Unpacked:
    """Write the checkpoint to `destination`, a new folder; it appears whole or not at all.

    `advance` is told of bytes as they are written. Raises SourceError (destination exists, disk
    full) and FormatError (a pack that does not give what its manifest says).
    """
    check_destination(destination, overwrite=False, can_overwrite=False)
    manifest = pack.manifest
    nbytes = manifest.expert_nbytes + sum(t.nbytes for t in manifest.shared)
    free = shutil.disk_usage(destination.parent).free
    if free < nbytes:
        raise SourceError(f"{destination}: needs {nbytes:,} bytes, the disk has {free:,} free")
    try:
        with staging_folder(destination, False, [UNPACKING], lambda: False) as staging:
            clear_folder(staging)
            (staging / UNPACKING).touch()
            result = _write(pack, staging, advance)
            (staging / UNPACKING).unlink()
            return result
    except (SourceError, FormatError):
        raise
    except OSError as error:
        raise SourceError(
            f"{destination}: {error.strerror or error}; nothing was kept ({nbytes:,} bytes needed)"
        ) from error


def _write(pack: Pack, folder: Path, advance: Advance) -> Unpacked:
    manifest = pack.manifest
    tensors = _tensors(manifest)
    restored = _restorable(manifest)
    weight_map: dict[str, str] = {}
    for shard in restored:
        assert shard.header is not None
        names = _names_in_order(shard)
        if unknown := [n for n in names if manifest.source.renamed.get(n, n) not in tensors]:
            raise FormatError(f"manifest source shard {shard.name!r}: no tensor {unknown[0]!r}")
        parameters = [manifest.source.renamed.get(name, name) for name in names]
        digest = _write_shard(
            pack, folder / shard.name, shard.header, [tensors[p] for p in parameters], advance
        )
        if digest != shard.sha256:
            raise FormatError(
                f"{shard.name}: made again, its sha256 is {digest}, the source's was "
                f"{shard.sha256}; run moepack verify on the pack"
            )
        for name, parameter in zip(names, parameters, strict=True):
            weight_map[name] = shard.name
            del tensors[parameter]
    if tensors:  # no sha256 of a source's shard vouches for them
        for mismatch in check_digests(pack):
            raise FormatError(f"{pack.path}: {mismatch}; run moepack verify on it")
    taken = {shard.name for shard in restored}
    made = _write_new_shards(pack, folder, tensors, taken, weight_map, advance)
    _write_files(pack, folder, weight_map, is_identical=not made)
    return Unpacked(tuple(shard.name for shard in restored), made)


def _restorable(manifest: Manifest) -> list[Shard]:
    """All shards if each can be made again; else those whose tensors kept their names."""
    shards = [s for s in manifest.source.shards if s.header is not None]
    if len(shards) == len(manifest.source.shards):
        return shards
    return [s for s in shards if not manifest.source.renamed.keys() & set(_names_in_order(s))]


def _tensors(manifest: Manifest) -> dict[str, _Tensor]:
    """Every parameter of the pack, by path, in pack order."""
    targets = targets_of(manifest)
    experts = {
        f"{m.path}.{part.name}": (part.dtype, (m.n_experts, *part.shape))
        for m in manifest.modules
        for part in m.parts
    }
    shared = {t.name: (t.dtype, t.shape) for t in manifest.shared}
    return {
        n: _Tensor(dtype, shape, targets[n]) for n, (dtype, shape) in (shared | experts).items()
    }


def _names_in_order(shard: Shard) -> list[str]:
    """The tensors of a restorable shard in the order of their data."""
    assert shard.header is not None
    try:
        header = json.loads(shard.header[8:])
        entries = [(e["data_offsets"][0], n) for n, e in header.items() if n != "__metadata__"]
    except (
        ValueError,
        KeyError,
        TypeError,
        IndexError,
        AttributeError,
        RecursionError,
    ) as error:
        raise FormatError(f"{shard.name}: its header in the manifest is damaged") from error
    return [name for _, name in sorted(entries)]


def _write_shard(
    pack: Pack, path: Path, header: bytes, tensors: list[_Tensor], advance: Advance
) -> str:
    """Write a safetensors file and fsync it; returns its sha256."""
    digest = hashlib.sha256(header)
    with path.open("xb") as file:
        file.write(header)
        for tensor in tensors:
            for row in _rows(pack, tensor.target):
                file.write(row)
                digest.update(row)
                advance(len(row))
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _rows(pack: Pack, target: Target) -> Iterator[memoryview]:
    path = pack.path / target.file
    buffer = memoryview(bytearray(target.chunk_nbytes))
    with path.open("rb") as file:
        for offset, nbytes in target.ranges():
            read_range(file.fileno(), buffer[:nbytes], offset, path)
            yield buffer[:nbytes]


def _write_new_shards(
    pack: Pack,
    folder: Path,
    tensors: Mapping[str, _Tensor],
    taken: Set[str],
    weight_map: dict[str, str],
    advance: Advance,
) -> tuple[str, ...]:
    groups: list[dict[str, _Tensor]] = []
    size = 0
    for name, tensor in tensors.items():
        if not groups or size + tensor.target.nbytes > MAX_SHARD_NBYTES:
            groups.append({})
            size = 0
        groups[-1][name] = tensor
        size += tensor.target.nbytes
    made = []
    for number, group in enumerate(groups, start=1):
        kind = "-unpacked" if taken else ""
        name = f"model{kind}-{number:05d}-of-{len(groups):05d}.safetensors"
        if len(groups) == 1 and not taken:
            name = "model.safetensors"
        while name in taken:
            name = name.replace("model-unpacked", "model-unpacked-again", 1)
        _write_shard(pack, folder / name, _header(group), list(group.values()), advance)
        weight_map |= dict.fromkeys(group, name)
        made.append(name)
    return tuple(made)


def _header(tensors: Mapping[str, _Tensor]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.target.nbytes
        entries[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
    return struct.pack("<Q", len(text)) + text


def _write_files(pack: Pack, folder: Path, weight_map: dict[str, str], is_identical: bool) -> None:
    for file in pack.manifest.files:
        data = (pack.path / file.name).read_bytes()
        if digest_bytes(data) != file.digest:
            raise FormatError(f"{pack.path / file.name}: differs from its digest")
        if not is_identical and file.name == INDEX_NAME:
            continue
        if not is_identical and file.name == "config.json":
            config = json.loads(data)
            for key, value in quantization_config(pack.manifest).items():
                config.pop(key, None)
                if value is not None:
                    config[key] = value
            data = (json.dumps(config, indent=4) + "\n").encode()
        write_file(folder / file.name, data)
    if not is_identical:
        total = sum((folder / name).stat().st_size for name in set(weight_map.values()))
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_file(folder / INDEX_NAME, (json.dumps(index, indent=4) + "\n").encode())
