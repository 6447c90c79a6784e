"""Every quantized form of a checkpoint that mlx-lm reads: packed, and run with the same bits.

The oracle is mlx-lm's own loader on the source. Forms other than MLX's are written by hand, in the
layout in which they are published.
"""

import json
import re
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import families
import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils
import numpy as np
import pytest
import tiny_models
from conftest import make_pack
from families import FAMILIES, Family
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from moepack.formats.errors import SourceError
from moepack.formats.manifest import Quantization
from moepack.formats.pack import Pack
from moepack.packer.checkpoint import ConvertOptions
from moepack.packer.convert import plan_convert
from moepack.packer.source import open_source
from moepack.runtime.half import compute_in_float32
from moepack.runtime.loading import load_model
from moepack.tools.cli import main

Weights = dict[str, mx.array]
# Matrices of whole groups of 128; a dense layer, then an expert layer.
WIDE: dict[str, Any] = {
    **tiny_models.QWEN3_MOE,
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
N_CHUNK, N_SINGLE = 20, 4
TOKENS = [(7 * i * i + 13) % families.VOCAB for i in range(N_CHUNK + N_SINGLE)]


class Packed(NamedTuple):
    """A source, the pack of it, and the parameters and logits of mlx-lm's model of the source."""

    source: Path
    pack: Path
    parameters: Mapping[str, tuple[tuple[int, ...], bytes]]
    logits: bytes


def tensor_bytes(array: mx.array) -> bytes:
    """The bytes of an array in row-major order."""
    return np.array(mx.contiguous(array).reshape(-1).view(mx.uint8)).tobytes()


def logits_of(model: nn.Module) -> bytes:
    """All bits of the logits of a chunk of tokens, then of single ones."""
    cache = make_prompt_cache(model)
    rows = []
    for start, end in [(0, N_CHUNK), *((i, i + 1) for i in range(N_CHUNK, len(TOKENS)))]:
        rows.append(model(mx.array([TOKENS[start:end]]), cache=cache)[0])
        mx.eval(rows[-1])
    logits = mx.concatenate(rows)
    assert mx.isfinite(logits).all()
    assert logits.shape[0] == N_CHUNK + N_SINGLE
    return tensor_bytes(logits)


def parameters_of(model: nn.Module) -> dict[str, tuple[tuple[int, ...], bytes]]:
    """(shape, bytes) of every parameter."""
    return {n: (tuple(a.shape), tensor_bytes(a)) for n, a in tree_flatten(model.parameters())}


def pack_parameters(path: Path) -> dict[str, tuple[tuple[int, ...], bytes]]:
    """The same of a pack, experts stacked."""
    pack = Pack.open(path)
    data = pack.shared_file.read_bytes()
    found = {t.name: (t.shape, data[t.offset : t.offset + t.nbytes]) for t in pack.manifest.shared}
    for module in pack.manifest.modules:
        data = pack.expert_file(module).read_bytes()
        for part in module.parts:
            starts = [e * module.stride + part.offset for e in range(module.n_experts)]
            stacked = b"".join(data[start : start + part.nbytes] for start in starts)
            found[f"{module.path}.{part.name}"] = ((module.n_experts, *part.shape), stacked)
    return found


def pack_quantization(path: Path) -> dict[str, Quantization]:
    """By module path, what the manifest says of every quantized matrix."""
    manifest = Pack.open(path).manifest
    experts = {f"{m.path}.{p}": q for m in manifest.modules for p, q in m.quantization.items()}
    return {**manifest.quantization, **experts}


def model_quantization(model: nn.Module) -> dict[str, Quantization]:
    """The same, of a model in memory."""
    return {
        path: Quantization(m.bits, m.group_size, m.mode)
        for path, m in model.named_modules()
        if "scales" in m
    }


def verify(pack: Path, source: Path) -> int:
    """The exit status of `moepack verify` on a short text."""
    text = tiny_models.text_of(TOKENS)
    return main(["verify", str(pack), str(source), "--prompt", text])


def packed(write: Callable[[Path], Path], folder: Path) -> Packed:
    """Write a source, pack it, and run mlx-lm's model of it."""
    source = write(folder / "source")
    pack = make_pack(source, folder / "pack")
    model, _ = mlx_lm.utils.load_model(source)
    assert pack_quantization(pack) == model_quantization(model)
    parameters = parameters_of(model)
    compute_in_float32(model)  # half-precision experts, where stock mlx-lm cannot run
    return Packed(source, pack, parameters, logits_of(model))


# MLX's own forms.


def by_layer_and_projection(path: str, _: nn.Module) -> bool | dict[str, Any]:
    """down_proj of experts in mxfp8, their up_proj in 6 bits, attention in groups of 128."""
    if path.endswith("switch_mlp.down_proj"):
        return {"bits": 8, "group_size": 32, "mode": "mxfp8"}
    if path.endswith("switch_mlp.up_proj"):
        return {"bits": 6, "group_size": 64, "mode": "affine"}
    return {"bits": 3, "group_size": 128, "mode": "affine"} if "self_attn" in path else True


def other_router_bits(path: str, _: nn.Module) -> bool | dict[str, Any]:
    """The routers in 8 bits."""
    return {"bits": 8, "group_size": 64} if path.endswith("mlp.gate") else True


def without_head(path: str, _: nn.Module) -> bool:
    """All but lm_head."""
    return path != "lm_head"


MLX_FORMS: dict[str, dict[str, Any]] = {
    **{
        f"affine {bits} group {size}": {"bits": bits, "group_size": size}
        for bits in (2, 3, 4, 5, 6, 8)
        for size in (32, 64, 128)
    },
    **{mode: {"mode": mode} for mode in ("mxfp4", "mxfp8", "nvfp4")},
    "mixed": {"bits": 4, "predicate": by_layer_and_projection},
    "other router bits": {"bits": 4, "predicate": other_router_bits},
    "lm_head in float": {"bits": 4, "predicate": without_head},
}


def write_mlx(form: str) -> Callable[[Path], Path]:
    """A writer of an MLX checkpoint in this form."""
    return lambda folder: tiny_models.write_checkpoint(folder, WIDE, **MLX_FORMS[form])


@pytest.fixture(scope="module", params=MLX_FORMS)
def mlx_form(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Packed:
    """A source in each of MLX's own forms."""
    return packed(write_mlx(request.param), tmp_path_factory.mktemp("mlx"))


def test_tensors_of_mlx_forms_are_the_files_bytes(mlx_form: Packed) -> None:
    """Copied, whatever the bits: experts and the rest."""
    files = tiny_models.read_weights(mlx_form.source)
    assert pack_parameters(mlx_form.pack) == {
        name: (tuple(array.shape), tensor_bytes(array)) for name, array in files.items()
    }


def test_logits_of_mlx_forms_are_mlx_lms(mlx_form: Packed) -> None:
    """Every bit, streamed with the smallest cache."""
    model, _ = load_model(mlx_form.pack, expert_cache="floor")
    assert logits_of(model) == mlx_form.logits


@pytest.mark.parametrize(
    ("form", "path", "wanted"),
    [
        ("affine 5 group 128", "switch_mlp.up_proj", Quantization(5, 128, "affine")),
        ("mxfp4", "switch_mlp.down_proj", Quantization(4, 32, "mxfp4")),
        ("mxfp8", "switch_mlp.down_proj", Quantization(8, 32, "mxfp8")),
        ("nvfp4", "switch_mlp.gate_proj", Quantization(4, 16, "nvfp4")),
        ("mixed", "switch_mlp.down_proj", Quantization(8, 32, "mxfp8")),
        ("mixed", "switch_mlp.up_proj", Quantization(6, 64, "affine")),
        ("mixed", "switch_mlp.gate_proj", Quantization(4, 32, "affine")),
        ("other router bits", "gate", Quantization(8, 64, "affine")),
    ],
)
def test_manifest_states_the_quantization_of_a_matrix(
    tmp_path: Path, form: str, path: str, wanted: Quantization
) -> None:
    pack = make_pack(write_mlx(form)(tmp_path / "source"), tmp_path / "pack")
    assert pack_quantization(pack)[f"model.layers.1.mlp.{path}"] == wanted


def test_manifest_does_not_name_a_head_in_float(tmp_path: Path) -> None:
    pack = make_pack(write_mlx("lm_head in float")(tmp_path / "source"), tmp_path / "pack")
    assert "lm_head" not in pack_quantization(pack)
    assert "model.embed_tokens" in pack_quantization(pack)


# One nvfp4 scale an expert, which MLX computes on a GPU alone.


def write_global_scale(folder: Path) -> Path:
    """An MLX checkpoint with a tensor scale for each expert."""
    model, config = mlx_lm.utils.quantize_model(
        tiny_models.build(WIDE), dict(WIDE), None, None, mode="nvfp4", global_scale=True
    )
    folder.mkdir()
    mlx_lm.utils.save_model(folder, model)
    mlx_lm.utils.save_config(config, folder / "config.json")
    return folder


@pytest.fixture(scope="module")
def global_scale(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(source, pack) of nvfp4 with a scale an expert."""
    folder = tmp_path_factory.mktemp("global")
    source = write_global_scale(folder / "source")
    return source, make_pack(source, folder / "pack")


def has_gpu_kernel() -> bool:
    """Whether this backend multiplies by nvfp4 matrices with a tensor scale."""
    quantized, scales = mx.quantize(mx.ones((1, 16, 16)), 16, 4, mode="nvfp4")
    try:
        mx.eval(
            mx.gather_qmm(
                mx.ones((1, 16)),
                quantized,
                scales,
                rhs_indices=mx.array([0]),
                group_size=16,
                bits=4,
                mode="nvfp4",
                global_scale=mx.ones((1,)),
            )
        )
    except ValueError:
        return False
    return True


def test_a_scale_an_expert_is_a_part_without_dimensions(global_scale: tuple[Path, Path]) -> None:
    (module,) = Pack.open(global_scale[1]).manifest.modules
    scales = {p.name: (p.dtype, p.shape) for p in module.parts if p.name.endswith("global_scale")}
    assert scales == {
        f"{projection}.global_scale": ("F32", ())
        for projection in ("down_proj", "gate_proj", "up_proj")
    }


def test_tensors_with_a_scale_an_expert_are_the_files_bytes(
    global_scale: tuple[Path, Path],
) -> None:
    source, pack = global_scale
    files = tiny_models.read_weights(source)
    assert pack_parameters(pack) == {
        name: (tuple(array.shape), tensor_bytes(array)) for name, array in files.items()
    }


def test_logits_with_a_scale_an_expert_are_mlx_lms(global_scale: tuple[Path, Path]) -> None:
    if not has_gpu_kernel():
        pytest.skip("MLX computes nvfp4 with a scale an expert on a GPU alone")
    source, pack = global_scale
    original, _ = mlx_lm.utils.load_model(source)
    model, _ = load_model(pack, expert_cache="floor")
    assert logits_of(model) == logits_of(original)


def test_a_scale_an_expert_without_a_gpu_is_an_error_of_one_line(
    global_scale: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    if has_gpu_kernel():
        pytest.skip("this backend can compute it")
    source, pack = global_scale
    assert main(["verify", str(pack), str(source)]) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if "made-up" not in line]
    assert len(lines) == 1, lines
    assert "GPU" in lines[0]


# Published forms, written by hand.


class Stored(NamedTuple):
    """A tensor under a safetensors type that MLX does not write."""

    dtype: str
    array: mx.array


PLAIN_TYPES = {
    mx.float32: "F32",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint8: "U8",
    mx.int32: "I32",
    mx.uint32: "U32",
}


def write_published(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, mx.array | Stored],
    **files: Mapping[str, Any],
) -> Path:
    """A checkpoint folder of one safetensors file and JSON files."""
    header: dict[str, Any] = {}
    data = bytearray()
    for name, tensor in tensors.items():
        stored = tensor if isinstance(tensor, Stored) else Stored(PLAIN_TYPES[tensor.dtype], tensor)
        begin = len(data)
        data += tensor_bytes(stored.array)
        header[name] = {
            "dtype": stored.dtype,
            "shape": list(stored.array.shape),
            "data_offsets": [begin, len(data)],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(data))
    for name, content in {"config": config, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    tiny_models.write_tokenizer(folder)
    return folder


def family_weights(config: Mapping[str, Any], dtype: mx.Dtype) -> Weights:
    """Random weights of a model of this config, in MLX's names."""
    model = families.build(Family(dict(config), ""))
    return {n: a.astype(dtype) for n, a in tree_flatten(model.parameters())}


def unstack(weights: Weights, names: Mapping[str, str], owner: str = "switch_mlp") -> Weights:
    """Experts one by one, as most are published; `names` by projection."""
    result = {}
    for name, array in weights.items():
        match = re.fullmatch(rf"(.+)\.{owner}\.(\w+)\.(\w+)", name)
        if match is None:
            result[name] = array
            continue
        prefix, projection, leaf = match.groups()
        for expert in range(array.shape[0]):
            result[f"{prefix}.experts.{expert}.{names[projection]}.{leaf}"] = array[expert]
    return result


SAME_NAMES = {name: name for name in ("gate_proj", "up_proj", "down_proj")}
NUMBERED_NAMES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
# Not whole blocks of 128 in either direction.
RAGGED = {"hidden_size": 192, "moe_intermediate_size": 160, "vocab_size": families.VOCAB}


def with_latent_projection(weights: Weights) -> Weights:
    """`kv_b_proj`, as published, in place of the two matrices that mlx-lm makes of it."""
    result = {}
    for name, array in weights.items():
        if name.endswith("embed_q.weight"):
            value = weights[name.replace("embed_q", "unembed_out")]
            both = mx.concatenate([array.swapaxes(-1, -2), value], axis=1)
            result[name.replace("embed_q", "kv_b_proj")] = both.reshape(-1, both.shape[-1])
        elif not name.endswith("unembed_out.weight"):
            result[name] = array
    return result


# AutoAWQ and GPTQ, of all but the experts.

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that each half-byte of a word holds


def pack_awq(values: mx.array) -> mx.array:
    """4-bit values `(rows, columns)` -> int32 words `(rows, columns / 8)` in AutoAWQ's order."""
    words = values.astype(mx.uint32).reshape(values.shape[0], -1, 8)[..., mx.array(AWQ_ORDER)]
    return (words << (4 * mx.arange(8, dtype=mx.uint32))).sum(axis=-1).view(mx.int32)


def awq_tensors(name: str, weight: mx.array, *, with_zeros: bool) -> Weights:
    """`qweight`, `scales` and maybe `qzeros` of a matrix `(out, in)`, in groups of 32."""
    groups = weight.T.astype(mx.float32).reshape(-1, 32, weight.shape[0])
    scales = mx.abs(groups).max(axis=1) / 7
    zeros = mx.random.randint(7, 10, scales.shape) if with_zeros else mx.full(scales.shape, 8)
    values = mx.clip(mx.round(groups / scales[:, None]) + zeros[:, None], 0, 15)
    stem = name.removesuffix("weight")
    tensors = {
        f"{stem}qweight": pack_awq(values.reshape(-1, weight.shape[0])),
        f"{stem}scales": scales.astype(mx.float16),
    }
    return {**tensors, f"{stem}qzeros": pack_awq(zeros)} if with_zeros else tensors


def write_awq(folder: Path, *, method: str = "awq", with_experts: bool = False) -> Path:
    """qwen3_moe in 4 bits, experts left in float16 unless asked."""
    tensors: Weights = {}
    for name, array in unstack(family_weights(WIDE, mx.float16), SAME_NAMES).items():
        is_expert = ".experts." in name
        if "_proj." in name and (with_experts or not is_expert):
            tensors |= awq_tensors(name, array, with_zeros=method == "awq")
        else:
            tensors[name] = array
    stated = {"quant_method": method, "bits": 4, "group_size": 32}
    if method == "awq":
        stated |= {"version": "gemm", "zero_point": True, "modules_to_not_convert": ["experts"]}
    return write_published(folder, {**WIDE, "quantization_config": stated}, tensors)


def write_gptq(folder: Path) -> Path:
    """The same said to be GPTQ's: symmetric, words in the order in which mlx-lm reads both."""
    return write_awq(folder, method="gptq")


# FP8 in blocks.


def fp8_blocks(weight: mx.array, block: int) -> tuple[mx.array, mx.array]:
    """(float8 bytes, float32 factor of each block) of a matrix `(out, in)`."""
    rows, columns = (-(-n // block) for n in weight.shape)
    padding = [(0, n * block - m) for n, m in zip((rows, columns), weight.shape, strict=True)]
    blocks = mx.pad(weight.astype(mx.float32), padding).reshape(rows, block, columns, block)
    factors = mx.maximum(mx.abs(blocks).max(axis=(1, 3)) / 448, 1e-12)
    scaled = (blocks / factors[:, None, :, None]).reshape(rows * block, columns * block)
    return mx.to_fp8(scaled[: weight.shape[0], : weight.shape[1]]), factors


def write_fp8(family: str, names: Mapping[str, str]) -> Callable[[Path], Path]:
    """A writer of a family's projections as float8 in blocks of 128."""

    def write(folder: Path) -> Path:
        config = {**FAMILIES[family].config, **RAGGED}
        if family == "minimax":
            config["intermediate_size"] = RAGGED["moe_intermediate_size"]
        weights = with_latent_projection(unstack(family_weights(config, mx.bfloat16), names))
        tensors: dict[str, mx.array | Stored] = {}
        for name, array in weights.items():
            if array.ndim == 2 and re.search(r"(_proj|_mqa|\.w[123])\.weight$", name):
                values, factors = fp8_blocks(array, 128)
                tensors[name] = Stored("F8_E4M3", values)
                tensors[f"{name}_scale_inv"] = factors
            else:
                tensors[name] = array
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        }
        return write_published(folder, config, tensors)

    return write


# Powers of two as scales: mxfp8, and mxfp4 experts.


def to_published_v41(name: str) -> str:
    """deepseek_v41's name of a tensor, of mlx-lm's."""
    if name in ("lm_head.weight", "model.embed_tokens.weight"):
        return {"lm_head": "head", "model": "embed"}[name.split(".")[0]] + ".weight"
    pairs = [
        (".shared_experts.gate_proj.", ".shared_experts.w1."),
        (".shared_experts.down_proj.", ".shared_experts.w2."),
        (".shared_experts.up_proj.", ".shared_experts.w3."),
        (".gate.e_score_correction_bias", ".gate.bias"),
        (".indexer.k_proj.", ".indexer.wk."),
        (".compressor.kv_norm.", ".compressor.norm."),
        (".q_a_norm.", ".q_norm."),
        (".o_a_proj.", ".wo_a."),
        (".o_b_proj.", ".wo_b."),
        (".q_a_proj.", ".wq_a."),
        (".q_b_proj.", ".wq_b."),
        (".gate_proj.", ".wgate."),
        (".kv_proj.", ".wkv."),
        (".sinks", ".attn_sink"),
        (".ffn_hc.", ".hc_ffn_"),
        (".attn_hc.", ".hc_attn_"),
        (".post_attention_layernorm.", ".ffn_norm."),
        (".input_layernorm.", ".attn_norm."),
        (".mlp.", ".ffn."),
        (".self_attn.", ".attn."),
    ]
    for own, published in pairs:
        name = name.replace(own, published)
    return name.removeprefix("model.")


def power_of_two_blocks(weight: mx.array) -> tuple[mx.array, mx.array]:
    """(float8 bytes, exponents biased by 127) of blocks of 32 x 32."""
    _, factors = fp8_blocks(weight, 32)
    exponents = mx.ceil(mx.log2(factors))
    spread = mx.repeat(mx.repeat(2**exponents, 32, axis=0), 32, axis=1)
    scaled = weight.astype(mx.float32) / spread[: weight.shape[0], : weight.shape[1]]
    return mx.to_fp8(scaled), (exponents + 127).astype(mx.uint8)


def write_ue8m0(folder: Path) -> Path:
    """deepseek_v41: projections in float8, experts in 4 bits, one exponent a block."""
    config = dict(FAMILIES["deepseek_v41"].config)
    weights = unstack(family_weights(config, mx.bfloat16), NUMBERED_NAMES, "experts.switch_mlp")
    tensors: dict[str, mx.array | Stored] = {}
    for own, array in weights.items():
        name = to_published_v41(own)
        stem = name.removesuffix("weight")
        if ".experts." in name:
            values, scales = mx.quantize(array, mode="mxfp4")
            tensors[name] = Stored("I8", values.view(mx.uint8))
            tensors[f"{stem}scale"] = Stored("F8_E8M0", scales)
        elif re.search(r"\.(wq_a|wq_b|wkv|wo_[ab]|shared_experts\.w[123])\.weight$", name):
            values, scales = power_of_two_blocks(array.reshape(-1, array.shape[-1]))
            tensors[name] = Stored("F8_E4M3", values)
            tensors[f"{stem}scale"] = Stored("F8_E8M0", scales)
        else:
            tensors[name] = array
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "weight_block_size": [32, 32],
    }
    return write_published(folder, config, tensors)


def write_mxfp8(folder: Path) -> Path:
    """minimax_m3_vl: float8 with an exponent for 32 values of a row."""
    config = dict(FAMILIES["minimax_m3_vl"].config)
    tensors: dict[str, mx.array | Stored] = {}
    for name, array in unstack(family_weights(config, mx.bfloat16), NUMBERED_NAMES).items():
        if array.ndim == 2 and re.search(r"([qkvo]_proj|\.w[123])\.weight$", name):
            values, scales = mx.quantize(array, mode="mxfp8")
            tensors[name] = Stored("F8_E4M3", values.view(mx.uint8))
            tensors[f"{name}_scale_inv"] = scales
        else:
            tensors[name] = array
    config["quantization_config"] = {"quant_method": "mxfp8", "weight_block_size": [1, 32]}
    return write_published(folder, config, tensors)


# compressed-tensors.


def int4_tensors(name: str, weight: mx.array) -> Weights:
    """`weight_packed`, `weight_scale` and `weight_shape` of a matrix, in groups of 32."""
    groups = weight.astype(mx.float32).reshape(weight.shape[0], -1, 32)
    scales = mx.abs(groups).max(axis=-1) / 7
    values = mx.round(groups / scales[..., None]) + 8
    words = values.astype(mx.uint32).reshape(weight.shape[0], -1, 8)
    return {
        f"{name}_packed": (words << (4 * mx.arange(8, dtype=mx.uint32))).sum(-1).view(mx.int32),
        f"{name}_scale": scales.astype(mx.bfloat16),
        f"{name}_shape": mx.array(weight.shape, dtype=mx.int32),
    }


def write_int4(family: str, *, is_nested: bool = False) -> Callable[[Path], Path]:
    """A writer of a family with experts in compressed-tensors' 4 bits."""

    def write(folder: Path) -> Path:
        config = json.loads(json.dumps(FAMILIES[family].config))
        weights = unstack(family_weights(config, mx.bfloat16), SAME_NAMES)
        tensors: Weights = {}
        for name, array in with_latent_projection(weights).items():
            tensors |= int4_tensors(name, array) if ".experts." in name else {name: array}
        owner = config["text_config"] if is_nested else config
        owner["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32}}},
        }
        return write_published(folder, config, tensors)

    return write


def write_packed_mxfp4(folder: Path) -> Path:
    """kimi_k3: experts in compressed-tensors' mxfp4."""
    config = dict(FAMILIES["kimi_k3"].config)
    tensors: Weights = {}
    for name, array in unstack(family_weights(config, mx.bfloat16), NUMBERED_NAMES).items():
        if ".experts." in name:
            values, scales = mx.quantize(array, mode="mxfp4")
            name = name.replace(".mlp.", ".block_sparse_moe.")
            tensors[f"{name}_packed"] = values.view(mx.uint8)
            tensors[f"{name}_scale"] = scales
        else:
            tensors[name] = array
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
    }
    return write_published(folder, config, tensors)


# ModelOpt and gpt-oss.


HF_QUANT_CONFIG = {
    "quant_method": "modelopt",
    "quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]},
}


def write_modelopt(folder: Path) -> Path:
    """qwen3_moe in nvfp4 without tensor scales, said in a file of its own."""
    tensors: dict[str, mx.array | Stored] = {}
    for name, array in family_weights(WIDE, mx.bfloat16).items():
        if name.endswith("_proj.weight"):
            tensors[name], scales = mx.quantize(array, mode="nvfp4")
            tensors[name.replace("weight", "scales")] = Stored("F8_E4M3", scales)
        else:
            tensors[name] = array
    return write_published(folder, WIDE, tensors, hf_quant_config=HF_QUANT_CONFIG)


def write_modelopt_muse(folder: Path) -> Path:
    """muse_spark as published: experts in nvfp4 with a scale an expert and projection."""
    config = dict(FAMILIES["muse_spark"].config)
    weights = family_weights(config, mx.bfloat16)
    tensors: dict[str, mx.array | Stored] = {}

    def store(name: str, array: mx.array) -> None:
        values, scales = mx.quantize(array, mode="nvfp4")
        tensors[name] = values.view(mx.uint8)
        tensors[f"{name}_weight_scale"] = Stored("F8_E4M3", scales)
        tensors[f"{name}_input_scale"] = mx.ones((), dtype=mx.float32)

    for name, array in weights.items():
        experts = name.rsplit(".", 2)[0]
        if name.endswith(("_beta", "up_proj.weight")) and ".shared_" not in name:
            continue  # of a gate, or of a fused pair
        if name.endswith("_alpha"):
            branch = {"add_attn": "attention", "add_ffn": "feedforward"}[
                name.split(".")[-1].removesuffix("_alpha")
            ]
            gate = f"{name.rsplit('.', 1)[0]}.post_{branch}_residual_gate.gate"
            tensors[gate] = array - 1
        elif ".self_attn.qkvg_proj." in name:
            sizes = [64, 32, 32]  # 4 heads of 16, then 2, 2 and the gate
            parts = mx.split(array, [sum(sizes[: i + 1]) for i in range(3)])
            for letter, part in zip(("q", "k", "v", "gate"), parts, strict=True):
                tensors[name.replace("qkvg", letter)] = part
        elif name.endswith("experts.gate_proj.weight"):
            both = mx.concatenate([array, weights[f"{experts}.up_proj.weight"]], axis=1)
            store(f"{experts}.gate_up_proj", both)
            scale = mx.random.uniform(0.5, 2, (both.shape[0], 2)) / 2688
            tensors[f"{experts}.gate_up_proj_weight_scale_2"] = scale
        elif name.endswith("experts.down_proj.weight"):
            store(f"{experts}.down_proj", array)
            scale = mx.random.uniform(0.5, 2, (array.shape[0],)) / 2688
            tensors[f"{experts}.down_proj_weight_scale_2"] = scale
        else:
            tensors[name] = array
    return write_published(folder, config, tensors, hf_quant_config=HF_QUANT_CONFIG)


def write_gpt_oss(folder: Path) -> Path:
    """gpt_oss as published: blocks of 32 half-bytes, gate and up rows in turn."""
    config = dict(FAMILIES["gpt_oss"].config)
    tensors: Weights = {}
    weights = family_weights(config, mx.bfloat16)

    def in_turn(name: str) -> mx.array:
        pair = [weights[name.replace("gate_proj", p)] for p in ("gate_proj", "up_proj")]
        return mx.stack(pair, axis=2).reshape(pair[0].shape[0], -1, *pair[0].shape[2:])

    for name, array in weights.items():
        if ".experts.up_proj." in name:
            continue
        if ".experts." not in name:
            tensors[name] = array
            continue
        value = in_turn(name) if ".gate_proj." in name else array
        stem, leaf = name.replace("gate_proj", "gate_up_proj").rsplit(".", 1)
        if leaf == "bias":
            tensors[f"{stem}_bias"] = value
        else:
            values, scales = mx.quantize(value, mode="mxfp4")
            tensors[f"{stem}_blocks"] = values.view(mx.uint8).reshape(*scales.shape, 16)
            tensors[f"{stem}_scales"] = scales
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
    }
    return write_published(folder, config, tensors)


PUBLISHED: dict[str, Callable[[Path], Path]] = {
    "awq": write_awq,
    "gptq": write_gptq,
    "fp8 deepseek_v3": write_fp8("deepseek_v3", SAME_NAMES),
    "fp8 deepseek_v32": write_fp8("deepseek_v32", SAME_NAMES),
    "fp8 mimo_v2_flash": write_fp8("mimo_v2_flash", SAME_NAMES),
    "fp8 minimax": write_fp8("minimax", NUMBERED_NAMES),
    "fp8 mistral4": write_fp8("mistral4", SAME_NAMES),
    "fp8 ue8m0": write_ue8m0,
    "mxfp8": write_mxfp8,
    "int4 deepseek_v3": write_int4("deepseek_v3"),
    "int4 kimi_k25": write_int4("kimi_k25", is_nested=True),
    "int4 mistral4": write_int4("mistral4"),
    "packed mxfp4": write_packed_mxfp4,
    "modelopt": write_modelopt,
    "gpt_oss": write_gpt_oss,
}
DEQUANTIZED = [name for name in PUBLISHED if re.match(r"fp8 (?!ue8m0)", name)]


@pytest.fixture(scope="module", params=PUBLISHED)
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Packed:
    """A source in each published form."""
    mx.random.seed(5)
    return packed(PUBLISHED[request.param], tmp_path_factory.mktemp("published"))


def test_tensors_of_published_forms_are_mlx_lms(published: Packed) -> None:
    """All bytes that mlx-lm's loader makes of the source: experts and the rest."""
    assert pack_parameters(published.pack) == published.parameters


def test_logits_of_published_forms_are_mlx_lms(published: Packed) -> None:
    """Every bit, streamed with the smallest cache."""
    model, _ = load_model(published.pack, expert_cache="floor")
    assert logits_of(model) == published.logits


def test_verify_passes_published_forms(published: Packed) -> None:
    assert verify(published.pack, published.source) == 0


def test_every_tensor_of_published_forms_is_used(published: Packed) -> None:
    """None is said to be left out, but scales of activations, which mlx-lm has no use for."""
    dropped = Pack.open(published.pack).manifest.source.dropped
    assert [n for n in dropped if not n.endswith(("input_scale", "weight_shape"))] == []


@pytest.mark.parametrize("form", ["affine 4 group 64", "mixed", "nvfp4"])
def test_verify_passes_mlx_forms(form: str, tmp_path: Path) -> None:
    source = write_mlx(form)(tmp_path / "source")
    pack = make_pack(source, tmp_path / "pack")
    assert verify(pack, source) == 0


def test_a_pack_needs_no_source(published: Packed, tmp_path: Path) -> None:
    """What the source says of its quantization does not matter to the pack."""
    pack = shutil.copytree(published.pack, tmp_path / "elsewhere")
    published.source.rename(tmp_path / "source")
    try:
        model, _ = load_model(pack)
        assert logits_of(model) == published.logits
    finally:
        (tmp_path / "source").rename(published.source)


def test_tensor_scales_of_modelopt_are_parts_of_the_records(tmp_path: Path) -> None:
    """With the factor by which mlx-lm's are larger."""
    source = write_modelopt_muse(tmp_path / "source")
    pack = make_pack(source, tmp_path / "pack")
    model, _ = mlx_lm.utils.load_model(source)
    assert pack_parameters(pack) == parameters_of(model)
    for module in Pack.open(pack).manifest.modules:
        shapes = {p.name: p.shape for p in module.parts}
        assert shapes["down_proj.global_scale"] == shapes["gate_proj.global_scale"] == ()


# -q.

MODES: dict[str, ConvertOptions] = {
    "affine 4": ConvertOptions(quantize=True, q_bits=4),
    "affine 8": ConvertOptions(quantize=True, q_bits=8, q_group_size=32),
    "mxfp4": ConvertOptions(quantize=True, q_mode="mxfp4"),
    "nvfp4": ConvertOptions(quantize=True, q_mode="nvfp4"),
    "mxfp8": ConvertOptions(quantize=True, q_mode="mxfp8"),
}


def quantized_logits(source: Path, options: ConvertOptions) -> bytes:
    """The logits of mlx-lm's model of the source, quantized by mlx-lm."""
    model, config = mlx_lm.utils.load_model(source)
    model, _ = mlx_lm.utils.quantize_model(
        model, config, options.q_group_size, options.q_bits, mode=options.q_mode
    )
    return logits_of(model)


@pytest.mark.parametrize("mode", MODES)
def test_logits_after_q_are_those_of_mlx_lms_quantized_model(
    mode: str, float_source: Path, tmp_path: Path
) -> None:
    pack = make_pack(float_source, tmp_path / "pack", MODES[mode])
    model, _ = load_model(pack, expert_cache="floor")
    assert logits_of(model) == quantized_logits(float_source, MODES[mode])


@pytest.mark.parametrize("form", ["fp8 deepseek_v3", "fp8 minimax"])
def test_q_of_fp8_blocks_quantizes_what_mlx_lm_makes_of_them(form: str, tmp_path: Path) -> None:
    """mlx-lm dequantizes them, so there is no other quantization yet."""
    options = ConvertOptions(quantize=True, q_bits=4, q_group_size=32)
    source = PUBLISHED[form](tmp_path / "source")
    pack = make_pack(source, tmp_path / "pack", options)
    model, _ = load_model(pack, expert_cache="floor")
    assert logits_of(model) == quantized_logits(source, options)


@pytest.mark.parametrize("form", [name for name in PUBLISHED if name not in DEQUANTIZED])
def test_q_of_a_quantized_published_form_is_refused_in_one_line(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = PUBLISHED[form](tmp_path / "source")
    assert main(["convert", str(source), str(tmp_path / "pack"), "-q"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "already quantized" in line
    assert not (tmp_path / "pack").exists()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_tensor_is_left_out_by_a_cast(dtype: str, float_source: Path, tmp_path: Path) -> None:
    """Not even by one to the type that the source has."""
    pack = make_pack(float_source, tmp_path / "pack", ConvertOptions(dtype=dtype))
    assert Pack.open(pack).manifest.source.dropped == {}


# What mlx-lm cannot load is refused.


def with_group_index(folder: Path) -> Path:
    """GPTQ as published, with the group of every row."""
    write_gptq(folder)
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    name = "model.layers.0.self_attn.q_proj.g_idx"
    mx.save_safetensors(
        str(folder / "model.safetensors"), {**weights, name: mx.arange(128, dtype=mx.int32) // 32}
    )
    return folder


def write_awq_experts(folder: Path) -> Path:
    """AWQ of the experts, too."""
    return write_awq(folder, with_experts=True)


@pytest.mark.parametrize(
    ("write", "reason"),
    [(with_group_index, "g_idx"), (write_awq_experts, "qweight")],
    ids=["gptq with g_idx", "awq experts"],
)
def test_what_mlx_lm_cannot_load_is_refused_in_one_line(
    write: Callable[[Path], Path], reason: str, tmp_path: Path
) -> None:
    source = write(tmp_path / "source")
    with pytest.raises(ValueError):  # noqa: PT011 - only that it fails
        mlx_lm.utils.load_model(source)
    with pytest.raises(SourceError, match=reason) as refused:
        plan_convert(open_source(str(source)), ConvertOptions())
    assert "\n" not in str(refused.value)
