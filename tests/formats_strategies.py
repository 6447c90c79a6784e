"""Manifests and packs for tests of the format: one fixed sample, and any valid one by hypothesis.

Nothing here needs MLX: bytes of tensors are arbitrary.
"""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgpack
from hypothesis import strategies as st

from moepack.formats.codec import encode
from moepack.formats.digests import digest_bytes
from moepack.formats.geometry import (
    DTYPE_NBYTES,
    MAX_NBYTES,
    Part,
    align_up,
    lay_out_parts,
    tensor_nbytes,
)
from moepack.formats.manifest import (
    CopiedFile,
    ExpertModule,
    Manifest,
    Quantization,
    Shard,
    SharedTensor,
    Source,
)
from moepack.formats.validate import MAX_TEMPLATE_NBYTES, MODES

Layout = tuple[str, str, tuple[int, ...]]  # name, dtype, shape


def pattern(nbytes: int, seed: int) -> bytes:
    """`nbytes` bytes, none of them zero, different for each seed."""
    start = seed * 37 % 255
    return (bytes(range(1, 256)) * (nbytes // 255 + 2))[start : start + nbytes]


def record_bytes(module: ExpertModule, expert: int) -> bytes:
    """What `write_pack` puts in one record."""
    return pattern(module.record_nbytes, expert + 100 * len(module.parts))


def tensor_bytes(tensor: SharedTensor) -> bytes:
    """What `write_pack` puts in one shared tensor."""
    return pattern(tensor.nbytes, tensor.offset + 1)


def shared_tensors(
    layouts: Sequence[Layout], alignment: int
) -> tuple[tuple[SharedTensor, ...], int]:
    """(tensors one after the other with the digests of `tensor_bytes`, bytes in all)."""
    tensors, offset = [], 0
    for name, dtype, shape in layouts:
        nbytes = tensor_nbytes(name, dtype, shape)
        tensor = SharedTensor(name, dtype, shape, offset, nbytes, b"")
        tensors.append(replace(tensor, digest=digest_bytes(tensor_bytes(tensor))))
        offset = align_up(offset + nbytes, alignment)
    return tuple(tensors), offset


def expert_module(
    path: str,
    file: str,
    layouts: Sequence[Layout],
    n_experts: int,
    alignment: int,
    quantization: dict[str, Quantization],
) -> ExpertModule:
    """A module of these parts, with the digests of `record_bytes`."""
    parts = lay_out_parts(layouts)
    record_nbytes = sum(part.nbytes for part in parts)
    stride = align_up(record_nbytes, alignment)
    module = ExpertModule(
        path, "SwitchGLU", file, n_experts, stride, record_nbytes, parts, quantization, b""
    )
    digests = b"".join(digest_bytes(record_bytes(module, e)) for e in range(n_experts))
    return replace(module, digests=digests)


def sample_manifest() -> Manifest:
    """Two modules that differ in experts, parts and bits; every optional field filled."""
    alignment = 512
    shared, shared_nbytes = shared_tensors(
        [
            ("model.embed_tokens.weight", "BF16", (20, 16)),
            ("model.layers.0.mlp.gate.weight", "U32", (3, 4)),
            ("model.layers.0.mlp.gate.scales", "F32", (3, 1)),
            ("model.layers.0.post_attention_layernorm.weight", "F16", (16,)),
        ],
        alignment,
    )
    modules = (
        expert_module(
            "model.layers.0.mlp.switch_mlp",
            "experts/00000.bin",
            [
                ("down_proj.weight", "U32", (16, 2)),
                ("down_proj.scales", "F16", (16, 1)),
                ("down_proj.biases", "F16", (16, 1)),
                ("up_proj.weight", "U32", (8, 4)),
                ("up_proj.scales", "F16", (8, 1)),
            ],
            3,
            alignment,
            {"down_proj": Quantization(4, 32, "affine"), "up_proj": Quantization(8, 32, "mxfp8")},
        ),
        expert_module(
            "model.layers.1.mlp.switch_mlp",
            "experts/00001.bin",
            [("fc1.weight", "BF16", (8, 16)), ("fc2.weight", "BF16", (16, 8))],
            2,
            alignment,
            {},
        ),
    )
    config = b'{"model_type": "sample"}'
    return Manifest(
        version=(1, 0),
        alignment=alignment,
        model_type="sample",
        created_by="moepack test",
        shared_nbytes=shared_nbytes,
        shared=shared,
        modules=modules,
        quantization={"model.layers.0.mlp.gate": Quantization(8, 64, "affine")},
        source=Source(
            name="org/name",
            revision="0123abcd",
            shards=(Shard("model.safetensors", 1234, sha256(b"shard").hexdigest(), b"head"),),
            options={"quantize": True, "q_bits": 4, "dtype": "float16"},
            dropped={"vision.weight": 512},
            renamed={"lm.norm": "model.norm"},
        ),
        files=(
            CopiedFile("config.json", len(config), digest_bytes(config)),
            CopiedFile("tokenizer.json", 2, digest_bytes(b"{}")),
        ),
    )


def write_pack(folder: Path) -> Manifest:
    """Write the pack of `sample_manifest` to a new folder; returns its manifest."""
    manifest = sample_manifest()
    (folder / "experts").mkdir(parents=True)
    shared = bytearray(manifest.shared_nbytes)
    for tensor in manifest.shared:
        shared[tensor.offset : tensor.offset + tensor.nbytes] = tensor_bytes(tensor)
    (folder / "shared.bin").write_bytes(shared)
    for module in manifest.modules:
        records = (
            record_bytes(module, e).ljust(module.stride, b"\0") for e in range(module.n_experts)
        )
        (folder / module.file).write_bytes(b"".join(records))
    (folder / "config.json").write_bytes(b'{"model_type": "sample"}')
    (folder / "tokenizer.json").write_bytes(b"{}")
    (folder / "manifest.msgpack").write_bytes(encode(manifest))
    return manifest


def as_map(manifest: Manifest) -> dict[str, Any]:
    """The manifest's map as a reader of msgpack sees it, `pack_id` included."""
    value: dict[str, Any] = msgpack.unpackb(encode(manifest))
    return value


def seal(value: dict[str, Any]) -> bytes:
    """msgpack bytes of a map, with the `pack_id` that its own content gives."""
    content = {key: v for key, v in value.items() if key != "pack_id"}
    pack_id = sha256(msgpack.packb(content)).hexdigest()
    return bytes(msgpack.packb({**content, "pack_id": pack_id}))


# --- any valid manifest ---

_dtypes = st.sampled_from(sorted(DTYPE_NBYTES))
# What str.isprintable means, so that nothing drawn is thrown away.
_characters = st.characters(exclude_categories=["C", "Z"]) | st.just(" ")
_texts = st.text(_characters, min_size=1, max_size=40)
_sizes = st.integers(0, MAX_NBYTES)
_digests = st.binary(min_size=16, max_size=16)
_quantizations = st.builds(
    Quantization, st.integers(1, 8), st.integers(1, 65_536), st.sampled_from(MODES)
)
_file_names = st.from_regex(r"\w[\w \-]{0,20}(\.[a-z]{1,6})?", fullmatch=True)


def _layouts(min_size: int, smallest: int, most: int) -> st.SearchStrategy[list[Layout]]:
    shapes = st.lists(st.integers(smallest, 9), max_size=4).map(tuple)
    return st.lists(
        st.tuples(_texts, _dtypes, shapes),
        min_size=min_size,
        max_size=most,
        unique_by=lambda layout: layout[0],
    )


@st.composite
def _modules(draw: st.DrawFn, path: str, file: str, alignment: int) -> ExpertModule:
    layouts = draw(_layouts(1, 1, 3))
    projections = draw(st.lists(st.sampled_from(["gate_proj", "up_proj", "fc1"]), unique=True))
    names = {name for name, _, _ in layouts}
    for name in (f"{p}.{last}" for p in projections for last in ("weight", "scales")):
        if name not in names:
            layouts.append((name, draw(_dtypes), (draw(st.integers(1, 9)),)))
    return expert_module(
        path,
        file,
        layouts,
        draw(st.integers(1, 4)),
        alignment,
        {projection: draw(_quantizations) for projection in projections},
    )


@st.composite
def _sources(draw: st.DrawFn) -> Source:
    shards = st.builds(
        Shard,
        _file_names.map(lambda name: f"{name}.safetensors"),
        st.integers(4, 2**63 - 1),
        st.binary(max_size=4).map(lambda b: sha256(b).hexdigest()),
        st.none() | st.binary(max_size=4),
    )
    values = st.one_of(_texts, st.integers(-(2**63), 2**64 - 1), st.booleans())
    return Source(
        name=draw(st.none() | _texts),
        revision=draw(st.none() | st.text(max_size=40)),
        shards=tuple(draw(st.lists(shards, max_size=3, unique_by=lambda s: s.name))),
        options=draw(st.dictionaries(_texts, values, max_size=3)),
        dropped=draw(st.dictionaries(_texts, _sizes, max_size=3)),
        renamed=draw(st.dictionaries(_texts, _texts, max_size=3)),
    )


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Any manifest that is valid in format 1.0."""
    alignment = 2 ** draw(st.integers(9, 24))
    shared, shared_nbytes = shared_tensors(draw(_layouts(0, 0, 4)), alignment)
    paths = draw(st.lists(_texts, min_size=1, max_size=3, unique=True))
    files = draw(st.lists(_file_names, min_size=len(paths), max_size=len(paths), unique=True))
    # The least that any name may have at most.
    copied = st.builds(CopiedFile, _file_names, st.integers(0, MAX_TEMPLATE_NBYTES), _digests)
    return Manifest(
        version=(1, 0),
        alignment=alignment,
        model_type=draw(_texts),
        created_by=draw(_texts),
        shared_nbytes=shared_nbytes,
        shared=shared,
        modules=tuple(
            draw(_modules(path, f"experts/{file}", alignment))
            for path, file in zip(paths, files, strict=True)
        ),
        quantization=draw(st.dictionaries(_texts, _quantizations, max_size=3)),
        source=draw(_sources()),
        files=tuple(draw(st.lists(copied, max_size=3, unique_by=lambda f: f.name))),
    )


def replace_part(module: ExpertModule, index: int, **changes: Any) -> ExpertModule:
    """The module with one part changed and nothing else."""
    parts: list[Part] = list(module.parts)
    parts[index] = replace(parts[index], **changes)
    return replace(module, parts=tuple(parts))
