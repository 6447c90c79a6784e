"""The manifest's msgpack form. `encode` and `decode` are inverse.

Both end in the same `validate`, so a writer cannot publish what a reader would refuse. Nothing
here opens a file.
"""

import msgpack

from moepack.formats.errors import FormatError
from moepack.formats.fields import Fields, unpack_map
from moepack.formats.geometry import Part
from moepack.formats.manifest import (
    MAGIC,
    VERSION,
    CopiedFile,
    ExpertModule,
    Manifest,
    Quantization,
    Shard,
    SharedTensor,
    Source,
    to_map,
)
from moepack.formats.validate import validate

__all__ = ["decode", "encode"]

# Features a reader must know to read the pack at all. None exists in 1.0.
KNOWN_FEATURES: frozenset[str] = frozenset()
MAX_MESSAGE = 1000  # a hostile name must not flood or steer a terminal


def encode(manifest: Manifest) -> bytes:
    """The canonical msgpack bytes. Raises FormatError where `validate` does."""
    validate(manifest)
    try:
        data = bytes(msgpack.packb({**to_map(manifest), "pack_id": manifest.pack_id}))
    except (ValueError, OverflowError) as error:  # not UTF-8; an integer of 65 bits
        raise FormatError(f"manifest: cannot be written ({error})") from error
    if decode(data) != manifest:
        raise FormatError("manifest: does not read back as it was written")
    return data


def decode(data: bytes) -> Manifest:
    """The manifest in `data`, checked. Raises FormatError naming the field that is wrong."""
    try:
        return _decode(data)
    except FormatError as error:
        text = str(error)
        if len(text) <= MAX_MESSAGE and text.isprintable():
            raise
        text = "".join(c if c.isprintable() else "?" for c in text[:MAX_MESSAGE])
        raise FormatError(f"{text} ...") from error


def _decode(data: bytes) -> Manifest:
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
    renamed: dict[str, str] = {}
    for key, value in fields.take_map("renamed").rest():
        if type(value) is not str:
            raise FormatError(f"manifest source renamed {key}: not a text")
        renamed[key] = value
    source = Source(
        name=fields.take_optional("name", str),
        revision=revision,
        shards=tuple(
            Shard(
                s.take("name", str),
                s.take("nbytes", int),
                s.take("sha256", str),
                s.take_optional("header", bytes),
            )
            for s in fields.take_map_list("shards", strict)
        ),
        options=options,
        dropped=dropped,
        renamed=renamed,
    )
    fields.finish(strict)
    return source
