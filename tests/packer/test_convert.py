"""Convert: the bytes of a pack are the source's, and depend on nothing else."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils
import numpy as np
import pytest
import tiny_models
from conftest import make_pack
from mlx.utils import tree_flatten, tree_map
from safetensors.numpy import load_file
from tiny_models import per_expert, read_weights, resave

from moepack.formats.digests import check_digests
from moepack.formats.errors import SourceError
from moepack.formats.pack import Pack
from moepack.packer.checkpoint import ConvertOptions, load_source_model
from moepack.packer.convert import convert, plan_convert
from moepack.packer.source import INDEX_NAME, open_source

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]
DTYPES = {"float32": "F32", "uint32": "U32", "uint8": "U8", "float16": "F16"}


def pack_tensors(path: Path) -> Tensors:
    """(dtype, shape, bytes) of every tensor of a pack, experts stacked, by its model path."""
    pack = Pack.open(path)
    data = pack.shared_file.read_bytes()
    tensors = {
        t.name: (t.dtype, t.shape, data[t.offset : t.offset + t.nbytes])
        for t in pack.manifest.shared
    }
    for module in pack.manifest.modules:
        data = pack.expert_file(module).read_bytes()
        for part in module.parts:
            starts = [e * module.stride + part.offset for e in range(module.n_experts)]
            stacked = b"".join(data[start : start + part.nbytes] for start in starts)
            shape = (module.n_experts, *part.shape)
            tensors[f"{module.path}.{part.name}"] = (part.dtype, shape, stacked)
    return tensors


def source_tensors(folder: Path) -> Tensors:
    """The same of a checkpoint folder, by the safetensors library."""
    return {
        name: (DTYPES[str(array.dtype)], array.shape, array.tobytes())
        for shard in sorted(folder.glob("model*.safetensors"))
        for name, array in load_file(shard).items()
    }


def model_tensors(model: nn.Module) -> Tensors:
    """The same of a model in memory."""
    tensors = {}
    for name, array in tree_flatten(model.parameters()):
        if array.dtype == mx.bfloat16:
            dtype, values = "BF16", np.array(mx.contiguous(array).view(mx.uint16))
        else:
            values = np.array(array)
            dtype = DTYPES[str(values.dtype)]
        tensors[name] = (dtype, array.shape, values.tobytes())
    return tensors


def folder_bytes(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


def mixed(path: str, _: nn.Module) -> bool | dict[str, Any]:
    """down_proj in 8 bits, layer 2 in 6, the routers in 8, the rest as asked."""
    if path.endswith("down_proj") or path.endswith("mlp.gate"):
        return {"bits": 8, "group_size": 32}
    return {"bits": 6, "group_size": 32} if ".layers.2." in path else True


SOURCES: dict[str, dict[str, Any]] = {
    "float": {},
    "affine 4": {"bits": 4},
    "affine 3": {"bits": 3},
    "affine 2 group 64": {"bits": 2, "group_size": 64},
    "mixed": {"bits": 4, "predicate": mixed},
    "mxfp4": {"mode": "mxfp4"},
    "nvfp4": {"mode": "nvfp4"},
    "mxfp8": {"mode": "mxfp8"},
    "gpt_oss": {"config": tiny_models.GPT_OSS, "bits": 4},
    "gpt_oss mxfp4": {"config": tiny_models.GPT_OSS, "mode": "mxfp4"},
    "phixtral": {"config": tiny_models.PHIXTRAL, "bits": 4},
}


@pytest.mark.parametrize("name", SOURCES)
def test_every_byte_of_the_pack_is_the_sources(tmp_path: Path, name: str) -> None:
    """Names, dtypes, shapes and bytes; and the digests agree with what is on disk."""
    source = tiny_models.write_checkpoint(tmp_path / "source", **SOURCES[name])
    pack = make_pack(source, tmp_path / "out.moepack")
    assert pack_tensors(pack) == source_tensors(source)
    assert list(check_digests(Pack.open(pack))) == []


def test_padding_between_records_is_zero(q4_pack: Path) -> None:
    """Equal sources give equal bytes, padding included."""
    pack = Pack.open(q4_pack)
    for module in pack.manifest.modules:
        records = np.fromfile(pack.expert_file(module), np.uint8).reshape(-1, module.stride)
        assert not records[:, module.record_nbytes :].any()
        assert records[:, : module.record_nbytes].any(axis=1).all()


def test_manifest_states_the_mixed_quantization(tmp_path: Path) -> None:
    """By module and projection, never from one layer for all."""
    source = tiny_models.write_checkpoint(tmp_path / "source", bits=4, predicate=mixed)
    manifest = Pack.open(make_pack(source, tmp_path / "out.moepack")).manifest
    first, second = manifest.modules
    assert {p: q.bits for p, q in first.quantization.items()} == {
        "gate_proj": 4,
        "up_proj": 4,
        "down_proj": 8,
    }
    assert {p: q.bits for p, q in second.quantization.items()} == {
        "gate_proj": 6,
        "up_proj": 6,
        "down_proj": 8,
    }
    assert manifest.quantization["model.layers.1.mlp.gate"].bits == 8
    assert first.stride != 0
    assert first.record_nbytes < second.record_nbytes


def test_two_converts_give_identical_bytes(q4_source: Path, q4_pack: Path, tmp_path: Path) -> None:
    """From two folders, into two places."""
    copy = shutil.copytree(q4_source, tmp_path / "elsewhere" / "q4")
    again = make_pack(Path(copy), tmp_path / "again.moepack")
    assert folder_bytes(again) == folder_bytes(q4_pack)
    assert Pack.open(again).manifest.pack_id == Pack.open(q4_pack).manifest.pack_id


def test_order_of_the_index_does_not_matter(q4_source: Path, tmp_path: Path) -> None:
    """The same shards listed in another order, and made in another order: the same weights."""
    weights = read_weights(q4_source)
    source = resave(q4_source, tmp_path / "source", weights, n_shards=3)
    other = tmp_path / "other"
    other.mkdir()
    for file in sorted(source.iterdir(), reverse=True):
        shutil.copy(file, other)
    index = json.loads((source / INDEX_NAME).read_text())
    index["weight_map"] = dict(sorted(index["weight_map"].items(), reverse=True))
    (other / INDEX_NAME).write_text(json.dumps(index))
    one = make_pack(source, tmp_path / "one.moepack")
    two = make_pack(other, tmp_path / "two.moepack")
    same = {name: data for name, data in folder_bytes(one).items() if name.endswith(".bin")}
    assert same == {n: data for n, data in folder_bytes(two).items() if n.endswith(".bin")}
    assert len(same) == 3


def test_derived_converts_give_identical_bytes(float_source: Path, tmp_path: Path) -> None:
    """Stacking and quantizing are deterministic, and so is the written config."""
    source = resave(float_source, tmp_path / "raw", per_expert(read_weights(float_source)))
    options = ConvertOptions(quantize=True, q_bits=4, q_group_size=32)
    one = make_pack(source, tmp_path / "one.moepack", options)
    two = make_pack(source, tmp_path / "two.moepack", options)
    assert folder_bytes(one) == folder_bytes(two)


def test_raw_and_mlx_layout_of_the_same_weights_give_equal_records(
    float_source: Path, float_pack: Path, tmp_path: Path
) -> None:
    """A record does not tell which way it came."""
    weights = per_expert(read_weights(float_source))
    source = resave(float_source, tmp_path / "raw", weights, n_shards=4)
    raw = Pack.open(make_pack(source, tmp_path / "raw.moepack")).manifest
    mlx = Pack.open(float_pack).manifest
    assert raw.modules == mlx.modules
    assert raw.shared == mlx.shared
    assert raw.pack_id != mlx.pack_id  # the sources differ


QUANTIZATIONS = {
    "default": ConvertOptions(quantize=True),
    "affine 4": ConvertOptions(quantize=True, q_bits=4, q_group_size=32),
    "affine 8": ConvertOptions(quantize=True, q_bits=8, q_group_size=64),
    "mxfp4": ConvertOptions(quantize=True, q_mode="mxfp4"),
    "nvfp4": ConvertOptions(quantize=True, q_mode="nvfp4"),
}


@pytest.mark.parametrize("layout", ["mlx", "per expert"])
@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_quantizing_equals_mlx_lms_own_bit_for_bit(
    float_source: Path, tmp_path: Path, name: str, layout: str
) -> None:
    """Its quantize_model on the loaded model gives the same tensors and settings."""
    options = QUANTIZATIONS[name]
    source = float_source
    if layout == "per expert":
        source = resave(float_source, tmp_path / "raw", per_expert(read_weights(float_source)))
    pack = make_pack(source, tmp_path / "out.moepack", options)

    model, config = mlx_lm.utils.load_model(float_source)
    model, config = mlx_lm.utils.quantize_model(
        model, config, options.q_group_size, options.q_bits, mode=options.q_mode
    )
    assert pack_tensors(pack) == model_tensors(model)
    written = json.loads((pack / "config.json").read_text())
    assert written["quantization"] == config["quantization"]
    assert Pack.open(pack).manifest.source.options["quantize"] is True


def test_model_predicate_chooses_the_routers_bits(tmp_path: Path) -> None:
    """gpt_oss tells mlx-lm to keep its routers in 8 bits; so does the pack."""
    source = tiny_models.write_checkpoint(tmp_path / "source", tiny_models.GPT_OSS)
    pack = make_pack(source, tmp_path / "out.moepack", ConvertOptions(quantize=True, q_bits=4))
    model, config = mlx_lm.utils.load_model(source)
    model, _ = mlx_lm.utils.quantize_model(model, config, None, 4)
    assert pack_tensors(pack) == model_tensors(model)


def test_quantizing_a_quantized_source_is_refused(q4_source: Path) -> None:
    """It would quantize what is no longer the model."""
    with pytest.raises(SourceError, match="already quantized"):
        plan_convert(open_source(str(q4_source)), ConvertOptions(quantize=True))


def test_impossible_quantization_is_refused(float_source: Path) -> None:
    """MLX knows no such mode and size."""
    options = ConvertOptions(quantize=True, q_mode="mxfp4", q_bits=7)
    with pytest.raises(SourceError, match="quantize"):
        plan_convert(open_source(str(float_source)), options)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtype_casts_as_mlx_does(float_source: Path, tmp_path: Path, dtype: str) -> None:
    """Every floating parameter, rounded once."""
    pack = make_pack(float_source, tmp_path / "out.moepack", ConvertOptions(dtype=dtype))
    model, _ = mlx_lm.utils.load_model(float_source)
    kind: mx.Dtype = getattr(mx, dtype)
    model.update(tree_map(lambda array: array.astype(kind), model.parameters()))
    assert pack_tensors(pack) == model_tensors(model)
    assert Pack.open(pack).manifest.source.options == {"dtype": dtype}


def test_dtype_keeps_integers_of_a_quantized_source(q4_source: Path, tmp_path: Path) -> None:
    """Scales and biases are cast, packed weights are copied."""
    pack = make_pack(q4_source, tmp_path / "out.moepack", ConvertOptions(dtype="bfloat16"))
    tensors, source = pack_tensors(pack), source_tensors(q4_source)
    for name, (dtype, shape, data) in source.items():
        if dtype == "U32":
            assert tensors[name] == (dtype, shape, data)
        else:
            assert tensors[name][:2] == ("BF16", shape)


def test_load_source_model_is_the_model_of_the_pack(float_source: Path, tmp_path: Path) -> None:
    """The model that a comparison takes as the truth has the pack's tensors."""
    options = ConvertOptions(quantize=True, q_bits=4, dtype="float16")
    pack = make_pack(float_source, tmp_path / "out.moepack", options)
    model, _ = load_source_model(open_source(str(float_source)), options)
    assert pack_tensors(pack) == model_tensors(model)


def test_default_options_are_not_in_the_manifest(q4_pack: Path) -> None:
    """Only what changes bytes is."""
    assert Pack.open(q4_pack).manifest.source.options == {}


def test_copied_files_are_the_sources(q4_source: Path, q4_pack: Path) -> None:
    """Config, index, tokenizer, chat template."""
    names = [f.name for f in Pack.open(q4_pack).manifest.files]
    assert names == [
        "chat_template.jinja",
        "config.json",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    for name in names:
        assert (q4_pack / name).read_bytes() == (q4_source / name).read_bytes()


def test_pack_folder_holds_what_the_manifest_lists_and_nothing_else(q4_pack: Path) -> None:
    """No stray file travels."""
    manifest = Pack.open(q4_pack).manifest
    listed = {f.name for f in manifest.files} | {m.file for m in manifest.modules}
    assert set(folder_bytes(q4_pack)) == listed | {"manifest.msgpack", "shared.bin"}


def test_dropped_tensors_are_in_the_manifest(tmp_path: Path) -> None:
    """Whoever reads the pack can tell what it lacks."""
    config = {**tiny_models.QWEN3_MOE, "tie_word_embeddings": True}
    tied = tiny_models.write_checkpoint(tmp_path / "tied", config)
    weights = {**read_weights(tied), "lm_head.weight": mx.ones((8, 4))}
    source = resave(tied, tmp_path / "source", weights)
    manifest = Pack.open(make_pack(source, tmp_path / "out.moepack")).manifest
    assert manifest.source.dropped == {"lm_head.weight": 8 * 4 * 4}


def test_progress_adds_up_to_the_bytes_of_all_tensors(q4_source: Path, tmp_path: Path) -> None:
    """A bar that reaches its end."""
    done: list[int] = []
    plan = plan_convert(open_source(str(q4_source)), ConvertOptions())
    convert(plan, tmp_path / "out.moepack", advance=done.append)
    assert sum(done) == sum(len(data) for _, _, data in source_tensors(q4_source).values())


def test_planned_bytes_are_the_weight_files_bytes(q4_source: Path, q4_pack: Path) -> None:
    """The check for free disk counts what is written."""
    plan = plan_convert(open_source(str(q4_source)), ConvertOptions())
    files = [q4_pack / "shared.bin", *(q4_pack / "experts").iterdir()]
    assert plan.nbytes == sum(f.stat().st_size for f in files)


def test_source_without_tokenizer_converts_with_a_warning(tmp_path: Path) -> None:
    """It can be measured, though not talked to."""
    source = tiny_models.write_checkpoint(tmp_path / "source", bits=4, with_tokenizer=False)
    plan = plan_convert(open_source(str(source)), ConvertOptions())
    assert any("no tokenizer" in warning for warning in plan.warnings)
    convert(plan, tmp_path / "out.moepack")
    assert Pack.open(tmp_path / "out.moepack").manifest.modules


def test_source_with_tokenizer_converts_without_warning(q4_source: Path) -> None:
    """Silence means all is well."""
    assert plan_convert(open_source(str(q4_source)), ConvertOptions()).warnings == ()


def test_source_is_only_read(
    q4_source: Path, tmp_path: Path, change_mode: Callable[[Path, int], None]
) -> None:
    """A folder without write permission, as a mounted snapshot is."""
    source = Path(shutil.copytree(q4_source, tmp_path / "source"))
    before = {p.name: p.stat().st_mtime_ns for p in source.iterdir()}
    for file in source.iterdir():
        file.chmod(0o444)
    change_mode(source, 0o555)
    pack = make_pack(source, tmp_path / "out.moepack")
    assert pack_tensors(pack) == source_tensors(source)
    assert {p.name: p.stat().st_mtime_ns for p in source.iterdir()} == before


@pytest.fixture
def change_mode() -> Any:
    """Change a folder's permissions for the test."""
    changed: list[Path] = []

    def change(path: Path, mode: int) -> None:
        changed.append(path)
        path.chmod(mode)

    yield change
    for path in changed:
        path.chmod(0o755)


@pytest.mark.parametrize("name", ["with space", "größe-模型", "a'b\"c", "percent%20"])
def test_paths_with_unusual_characters_work(q4_source: Path, tmp_path: Path, name: str) -> None:
    """Of the source and of the destination."""
    source = shutil.copytree(q4_source, tmp_path / f"{name} source")
    pack = make_pack(Path(source), tmp_path / f"{name}.moepack")
    assert pack_tensors(pack) == source_tensors(q4_source)


def test_relative_paths_work(
    q4_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the source and of the destination."""
    shutil.copytree(q4_source, tmp_path / "source")
    monkeypatch.chdir(tmp_path)
    make_pack(Path("source"), Path("out.moepack"))
    assert pack_tensors(tmp_path / "out.moepack") == source_tensors(q4_source)


def test_source_of_links_gives_a_pack_of_files(q4_source: Path, tmp_path: Path) -> None:
    """A snapshot in the Hugging Face cache is links."""
    model = tmp_path / "models--org--name"
    source = model / "snapshots" / "0123abcd"
    source.mkdir(parents=True)
    shutil.copytree(q4_source, model / "blobs")
    for file in q4_source.iterdir():
        (source / file.name).symlink_to(f"../../blobs/{file.name}")
    pack = make_pack(source, tmp_path / "out.moepack")
    assert not any(p.is_symlink() for p in pack.rglob("*"))
    assert pack_tensors(pack) == source_tensors(q4_source)
