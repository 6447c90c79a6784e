"""The manifest: what a pack says about itself, as data, and its msgpack form.

`encode` and `decode` are inverse; both end in the same `validate`, so a writer cannot publish what
a reader would refuse. Nothing here opens a file.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any

import msgpack

from moepack.formats.errors import FormatError
from moepack.formats.fields import Fields, unpack_map
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
    "SharedTensor",
    "Shard",
    "Source",
    "decode",
    "encode",
]

MAGIC = "moepack"
VERSION = (1, 0)
DIGEST_NBYTES = 16  # xxh3-128
# The largest known model (92 layers x 896 experts) needs 1.5 MB; a stranger's file gets no more.
MAX_MANIFEST_NBYTES = 16 * 2**20
# Features a reader must know to read the pack at all. None exists in 1.0.
KNOWN_FEATURES: frozenset[str] = frozenset()


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
    """One weight file of the source; `sha256` in hexadecimal, as the hub states it."""

    name: str
    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Source:
    """Where a pack came from. `options` are the convert options that change bytes, by flag name."""

    name: str
    revision: str | None
    shards: tuple[Shard, ...]
    options: Mapping[str, str | int | bool]
    dropped: Mapping[str, int]  # source tensor -> bytes left out (vision towers, MTP heads)


@dataclass(frozen=True, slots=True)
class CopiedFile:
    """A file kept beside the weights: config, tokenizer, chat template."""

    name: str
    nbytes: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything `manifest.msgpack` holds. Build it with `encode` in mind: `validate` is strict."""

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
        return sha256(msgpack.packb(_to_map(self))).hexdigest()

    @property
    def expert_nbytes(self) -> int:
        """Bytes of all records, padding left out."""
        return sum(m.record_nbytes * m.n_experts for m in self.modules)


def encode(manifest: Manifest) -> bytes:
    """The canonical msgpack bytes. Raises FormatError where `validate` does."""
    from moepack.formats.validate import validate

    validate(manifest)
    return bytes(msgpack.packb({**_to_map(manifest), "pack_id": manifest.pack_id}))


def decode(data: bytes) -> Manifest:
    """The manifest in `data`, checked. Raises FormatError naming the field that is wrong."""
    from moepack.formats.validate import validate

    fields = Fields("manifest", unpack_map(data))
    magic = fields.take("magic", str)
    if magic != MAGIC:
        raise FormatError(f"manifest: magic is {magic!r}, not {MAGIC!r}; this is not a pack")
    version = fields.take_ints("version")
    if len(version) != 2 or version[0] != VERSION[0]:
        raise FormatError(
            f"manifest: version is {'.'.join(map(str, version))}, this moepack reads "
            f"{VERSION[0]}.x; update moepack or convert again"
        )
    for feature in fields.take_list("requires", str):
        if feature not in KNOWN_FEATURES:
            raise FormatError(f"manifest: requires {feature!r}, unknown here; update moepack")
    # A later minor version may add fields that old readers can do without.
    strict = version[1] <= VERSION[1]
    shared = fields.take_map("shared")
    manifest = Manifest(
        version=(version[0], version[1]),
        alignment=fields.take("alignment", int),
        model_type=fields.take("model_type", str),
        created_by=fields.take("created_by", str),
        shared_nbytes=shared.take("nbytes", int),
        shared=tuple(
            SharedTensor(
                name,
                t.take("dtype", str),
                t.take_ints("shape"),
                t.take("offset", int),
                t.take("nbytes", int),
                t.take_digest("digest"),
            )
            for name, t in shared.take_maps("tensors", strict)
        ),
        modules=tuple(_module(m, strict) for m in fields.take_map_list("modules", strict)),
        quantization=_quantization(fields, "quantization", strict),
        source=_source(fields.take_map("source"), strict),
        files=tuple(
            CopiedFile(name, f.take("nbytes", int), f.take_digest("digest"))
            for name, f in fields.take_maps("files", strict)
        ),
    )
    pack_id = fields.take("pack_id", str)
    shared.finish(strict)
    fields.finish(strict)
    validate(manifest)
    if strict and pack_id != manifest.pack_id:
        raise FormatError(
            f"manifest: pack_id is {pack_id!r} but its content gives {manifest.pack_id!r}; "
            "the file is damaged: convert again"
        )
    return manifest


def _module(fields: Fields, strict: bool) -> ExpertModule:
    return ExpertModule(
        path=fields.take("path", str),
        class_name=fields.take("class", str),
        file=fields.take("file", str),
        n_experts=fields.take("n_experts", int),
        stride=fields.take("stride", int),
        record_nbytes=fields.take("record_nbytes", int),
        parts=tuple(
            Part(
                p.take("name", str),
                p.take("dtype", str),
                p.take_ints("shape"),
                p.take("offset", int),
                p.take("nbytes", int),
            )
            for p in fields.take_map_list("parts", strict)
        ),
        quantization=_quantization(fields, "quantization", strict),
        digests=fields.take("digests", bytes),
    )


def _quantization(fields: Fields, key: str, strict: bool) -> dict[str, Quantization]:
    return {
        name: Quantization(q.take("bits", int), q.take("group_size", int), q.take("mode", str))
        for name, q in fields.take_maps(key, strict)
    }


def _source(fields: Fields, strict: bool) -> Source:
    revision = fields.take_optional("revision", str)
    options: dict[str, str | int | bool] = {}
    for key, value in fields.take_map("options").rest():
        if not isinstance(value, str | int | bool):
            raise FormatError(f"manifest source options {key}: not a text, integer or boolean")
        options[key] = value
    dropped: dict[str, int] = {}
    for key, value in fields.take_map("dropped").rest():
        if type(value) is not int:
            raise FormatError(f"manifest source dropped {key}: not an integer")
        dropped[key] = value
    source = Source(
        name=fields.take("name", str),
        revision=revision,
        shards=tuple(
            Shard(s.take("name", str), s.take("nbytes", int), s.take("sha256", str))
            for s in fields.take_map_list("shards", strict)
        ),
        options=options,
        dropped=dropped,
    )
    fields.finish(strict)
    return source


def _to_map(manifest: Manifest) -> dict[str, Any]:
    """Plain maps in a fixed order: the same manifest gives the same bytes everywhere."""
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
        },
        "files": {f.name: _without_name(f) for f in manifest.files},
    }


def _without_name(entry: SharedTensor | CopiedFile) -> dict[str, Any]:
    return {key: value for key, value in asdict(entry).items() if key != "name"}
