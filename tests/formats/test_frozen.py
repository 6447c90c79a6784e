"""Frozen bytes of format 1.0: today's reader, writer and packer against a pack kept for good.

If one of these fails, packs in the field break: raise the format's version, do not remake `v1`.
"""

import json
from hashlib import sha256
from pathlib import Path

import pytest

from moepack.formats.codec import decode, encode
from moepack.formats.digests import check_digests
from moepack.formats.geometry import Part
from moepack.formats.manifest import Quantization, Shard
from moepack.formats.pack import Pack
from moepack.packer.checkpoint import ConvertOptions
from moepack.packer.convert import convert, plan_convert
from moepack.packer.source import open_source

FIXTURES = Path(__file__).parent / "fixtures"
V1 = FIXTURES / "v1"
PACK_ID = "502f7ab368be6274dd672751321e3ce5f1512da66aa5a01e3154a70ec7d9cf3d"
MANIFEST_SHA256 = "22c8fcc1935940743bf7a89a9474d3be441fbb6c3692acb2fafb288957a2f5af"


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, by relative path."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def source_tensor(name: str) -> bytes:
    """A tensor's bytes in the source, found by the header alone."""
    data = (FIXTURES / "source" / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    begin, end = json.loads(data[8:start])[name]["data_offsets"]
    return data[start + begin : start + end]


def test_the_fixture_is_the_one_that_was_frozen() -> None:
    assert sha256((V1 / "manifest.msgpack").read_bytes()).hexdigest() == MANIFEST_SHA256


def test_the_reader_finds_no_difference_in_the_frozen_pack() -> None:
    assert list(check_digests(Pack.open(V1))) == []


def test_the_reader_reads_the_frozen_manifest_to_what_it_says() -> None:
    manifest = Pack.open(V1).manifest
    assert manifest.version == (1, 0)
    assert manifest.alignment == 16_384
    assert manifest.model_type == "qwen3_moe"
    assert manifest.created_by == "moepack (frozen fixture of format 1.0)"
    assert manifest.pack_id == PACK_ID
    assert manifest.shared_nbytes == 13 * 16_384
    assert manifest.quantization == {"model.layers.0.mlp.gate": Quantization(8, 32, "affine")}
    assert [f.name for f in manifest.files] == ["chat_template.jinja", "config.json"]


def test_the_reader_reads_the_frozen_shared_tensors_to_what_they_are() -> None:
    tensors = {t.name: t for t in Pack.open(V1).manifest.shared}
    assert len(tensors) == 13
    assert [t.offset for t in tensors.values()] == [i * 16_384 for i in range(13)]
    norm = tensors["model.layers.0.post_attention_layernorm.weight"]
    assert (norm.dtype, norm.shape, norm.offset, norm.nbytes) == ("BF16", (32,), 81_920, 64)
    assert norm.digest.hex() == "8ecfee63c77ec5686391a894be9f4c3b"


def test_the_reader_reads_the_frozen_expert_module_to_what_it_is() -> None:
    (module,) = Pack.open(V1).manifest.modules
    assert module.path == "model.layers.0.mlp.switch_mlp"
    assert module.class_name == "SwitchGLU"
    assert module.file == "experts/00000.bin"
    assert (module.n_experts, module.stride, module.record_nbytes) == (2, 16_384, 2_816)
    assert module.parts == (
        Part("down_proj.biases", "F32", (32, 1), 0, 128),
        Part("down_proj.scales", "F32", (32, 1), 128, 128),
        Part("down_proj.weight", "U32", (32, 8), 256, 1024),
        Part("gate_proj.biases", "F32", (32, 1), 1280, 128),
        Part("gate_proj.scales", "F32", (32, 1), 1408, 128),
        Part("gate_proj.weight", "U32", (32, 4), 1536, 512),
        Part("up_proj.biases", "F32", (32, 1), 2048, 128),
        Part("up_proj.scales", "F32", (32, 1), 2176, 128),
        Part("up_proj.weight", "U32", (32, 4), 2304, 512),
    )
    assert module.quantization == {
        "down_proj": Quantization(8, 32, "affine"),
        "gate_proj": Quantization(4, 32, "affine"),
        "up_proj": Quantization(4, 32, "affine"),
    }
    assert module.digest(0).hex() == "4bd6319567945712d79f72a8961dacf0"
    assert module.digest(1).hex() == "c3dcd5a8445a3bdd3d77bdb6e9f4c509"


def test_the_reader_reads_the_frozen_source_to_what_it_was() -> None:
    source = Pack.open(V1).manifest.source
    assert (source.name, source.revision, source.options) == (None, None, {})
    assert source.dropped == {"lm_head.weight": 1024}
    sha = "f458f2037991259add68e04a20f7fd68ab45224507d2cdd952cc99fa136e2f77"
    assert source.shards == (Shard("model.safetensors", 14_464, sha),)


def test_the_frozen_records_hold_the_bytes_of_the_source() -> None:
    (module,) = Pack.open(V1).manifest.modules
    records = (V1 / module.file).read_bytes()
    for part in module.parts:
        stacked = source_tensor(f"{module.path}.{part.name}")
        for expert in range(2):
            begin = expert * module.stride + part.offset
            one = stacked[expert * part.nbytes : (expert + 1) * part.nbytes]
            assert records[begin : begin + part.nbytes] == one


def test_the_frozen_shared_weights_are_the_source_and_zeros() -> None:
    manifest = Pack.open(V1).manifest
    wanted = bytearray(manifest.shared_nbytes)
    for tensor in manifest.shared:
        wanted[tensor.offset : tensor.offset + tensor.nbytes] = source_tensor(tensor.name)
    assert (V1 / "shared.bin").read_bytes() == wanted


def test_the_writer_reproduces_the_frozen_manifest_byte_for_byte() -> None:
    data = (V1 / "manifest.msgpack").read_bytes()
    assert encode(decode(data)) == data


def test_the_packer_reproduces_the_frozen_pack_byte_for_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The one field that changes with a release; it is part of what pack_id covers.
    monkeypatch.setattr(
        "moepack.packer.convert.version", lambda _: "(frozen fixture of format 1.0)"
    )
    plan = plan_convert(open_source(str(FIXTURES / "source")), ConvertOptions())
    convert(plan, tmp_path / "v1")
    assert files_of(tmp_path / "v1") == files_of(V1)
