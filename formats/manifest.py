"""The manifest: what a pack says about itself, as plain data. `codec.py` reads and writes it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any

import msgpack

from moepack.formats.geometry import Part

__all__ = [
    "DIGEST_NBYTES",
    "MAGIC",
    "MAX_MANIFEST_NBYTES",
    "VERSION",
    "CopiedFile",
    "ExpertModule",
    "Manifest",
    "Quantization",
    "Shard",
    "SharedTensor",
    "Source",
    "quantization_config",
    "to_map",
]

MAGIC = "moepack"
VERSION = (1, 0)
DIGEST_NBYTES = 16  # xxh3-128
# The largest known model (92 layers x 896 experts) needs 1.5 MB; a stranger's file gets no more.
MAX_MANIFEST_NBYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Quantization:
    """How MLX reads a quantized matrix: `mode` is one of affine, mxfp4, mxfp8, nvfp4."""

    bits: int
    group_size: int
    mode: str


@dataclass(frozen=True, slots=True)
class SharedTensor:
    """One tensor of `shared.bin`, by its parameter path in the mlx-lm model."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class ExpertModule:
    """One file of records. `quantization` is by projection (`gate_proj`); absent: not quantized.

    `digests` holds the xxh3-128 of each record, `n_experts * 16` bytes in expert order.
    """

    path: str
    class_name: str
    file: str
    n_experts: int
    stride: int
    record_nbytes: int
    parts: tuple[Part, ...]
    quantization: Mapping[str, Quantization]
    digests: bytes

    def digest(self, expert: int) -> bytes:
        """The 16-byte digest of one record."""
        return self.digests[expert * DIGEST_NBYTES : (expert + 1) * DIGEST_NBYTES]


@dataclass(frozen=True, slots=True)
class Shard:
    """One weight file of the source; `sha256` in hexadecimal, as the hub states it.

    `header` holds its first bytes, up to the tensor data, when every tensor of the file is in the
    pack unchanged, so that the file can be made again; else None.
    """

    name: str
    nbytes: int
    sha256: str
    header: bytes | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """Where a pack came from: `name` is `org/name` on the hub, None for a folder.

    `options` are the convert options that change bytes, by flag name.
    """

    name: str | None
    revision: str | None
    shards: tuple[Shard, ...]
    options: Mapping[str, str | int | bool]
    dropped: Mapping[str, int]  # source tensor -> bytes left out (vision towers, MTP heads)
    renamed: Mapping[str, str]  # source tensor -> parameter path, where unchanged but renamed


@dataclass(frozen=True, slots=True)
class CopiedFile:
    """A file kept beside the weights: config, tokenizer, chat template."""

    name: str
    nbytes: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything `manifest.msgpack` holds."""

    version: tuple[int, int]
    alignment: int
    model_type: str
    created_by: str
    shared_nbytes: int
    shared: tuple[SharedTensor, ...]
    modules: tuple[ExpertModule, ...]
    quantization: Mapping[str, Quantization]
    source: Source
    files: tuple[CopiedFile, ...]

    @property
    def pack_id(self) -> str:
        """sha256, in hexadecimal, of the manifest's canonical bytes without `pack_id`.

        Digests of every record, shared tensor and copied file are among those bytes.
        """
        return sha256(msgpack.packb(to_map(self))).hexdigest()

    @property
    def expert_nbytes(self) -> int:
        """Bytes of all records, padding left out."""
        return sum(m.record_nbytes * m.n_experts for m in self.modules)


def to_map(manifest: Manifest) -> dict[str, Any]:
    """Plain maps in a fixed order, `pack_id` left out: equal manifests give equal bytes."""
    return {
        "magic": MAGIC,
        "version": list(manifest.version),
        "requires": [],
        "alignment": manifest.alignment,
        "model_type": manifest.model_type,
        "created_by": manifest.created_by,
        "shared": {
            "nbytes": manifest.shared_nbytes,
            "tensors": {t.name: _without_name(t) for t in manifest.shared},
        },
        "modules": [
            {
                "path": m.path,
                "class": m.class_name,
                "file": m.file,
                "n_experts": m.n_experts,
                "stride": m.stride,
                "record_nbytes": m.record_nbytes,
                "parts": [asdict(p) for p in m.parts],
                "quantization": {k: asdict(q) for k, q in sorted(m.quantization.items())},
                "digests": m.digests,
            }
            for m in manifest.modules
        ],
        "quantization": {k: asdict(q) for k, q in sorted(manifest.quantization.items())},
        "source": {
            "name": manifest.source.name,
            "revision": manifest.source.revision,
            "shards": [asdict(s) for s in manifest.source.shards],
            "options": dict(sorted(manifest.source.options.items())),
            "dropped": dict(sorted(manifest.source.dropped.items())),
            "renamed": dict(sorted(manifest.source.renamed.items())),
        },
        "files": {f.name: _without_name(f) for f in manifest.files},
    }


def _without_name(entry: SharedTensor | CopiedFile) -> dict[str, Any]:
    return {key: value for key, value in asdict(entry).items() if key != "name"}


def quantization_config(manifest: Manifest) -> dict[str, Any]:
    """mlx-lm's entries of a config: every quantized module by path, so that none is inferred.

    A value of None: the config must not have that entry.
    """
    by_path: dict[str, Any] = {
        path: {"bits": q.bits, "group_size": q.group_size, "mode": q.mode}
        for path, q in manifest.quantization.items()
    }
    for module in manifest.modules:
        names = {part.name for part in module.parts}
        for projection, q in module.quantization.items():
            entry: dict[str, Any] = {"bits": q.bits, "group_size": q.group_size, "mode": q.mode}
            if f"{projection}.global_scale" in names:
                entry["global_scale"] = True
            by_path[f"{module.path}.{projection}"] = entry
    if not by_path:
        return {"quantization": None, "quantization_config": None}
    return {"quantization": {"group_size": 64, "bits": 4, **by_path}, "quantization_config": None}
