"""Experts stored one by one, in layouts that mlx-lm leaves as they are."""

from pathlib import Path

import mlx.core as mx
import pytest
import tiny_models
from conftest import make_pack
from tiny_models import read_weights, resave

from moepack.formats.errors import SourceError
from moepack.formats.pack import Pack
from moepack.packer.checkpoint import ConvertOptions, understand
from moepack.packer.source import open_source

QWEN3_5_MOE = {
    "model_type": "qwen3_5_moe",
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "text_config": {
        **{k: v for k, v in tiny_models.COMMON.items() if k != "rope_theta"},
        "model_type": "qwen3_5_moe_text",
        "num_hidden_layers": 4,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 64,
        "moe_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
        "full_attention_interval": 4,
        "attention_bias": False,
        "rope_parameters": {
            "type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [4, 2, 2],
        },
    },
}


def one_by_one(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """The same tensors with every stacked expert on its own."""
    result = {}
    for name, array in weights.items():
        owner, found, rest = name.partition(".switch_mlp.")
        if not found:
            result[name] = array
            continue
        for expert in range(array.shape[0]):
            result[f"{owner}.experts.{expert}.{rest}"] = array[expert]
    return result


def digests(pack: Path) -> list[bytes]:
    """The digests of all records."""
    return [m.digests for m in Pack.open(pack).manifest.modules]


@pytest.mark.parametrize("bits", [None, 4], ids=["float32", "4-bit"])
@pytest.mark.parametrize("config", [tiny_models.QWEN3_MOE, QWEN3_5_MOE], ids=["qwen3", "qwen3_5"])
def test_experts_one_by_one_give_the_records_of_stacked_ones(
    config: dict[str, object], bits: int | None, tmp_path: Path
) -> None:
    stacked = tiny_models.write_checkpoint(tmp_path / "stacked", config, bits=bits)
    single = resave(stacked, tmp_path / "single", one_by_one(read_weights(stacked)), n_shards=3)
    wanted = digests(make_pack(stacked, tmp_path / "a.moepack"))
    assert digests(make_pack(single, tmp_path / "b.moepack")) == wanted


@pytest.mark.parametrize("leaf", ["weight", "scales", "biases"])
def test_a_missing_tensor_of_one_expert_is_named(
    q4_source: Path, tmp_path: Path, leaf: str
) -> None:
    weights = one_by_one(read_weights(q4_source))
    name = f"model.layers.2.mlp.experts.5.up_proj.{leaf}"
    del weights[name]
    source = resave(q4_source, tmp_path / "s", weights)
    with pytest.raises(SourceError, match=name.replace(".", r"\.")):
        understand(open_source(str(source)), ConvertOptions())


def test_an_expert_too_many_is_named(q4_source: Path, tmp_path: Path) -> None:
    weights = one_by_one(read_weights(q4_source))
    for leaf in ("weight", "scales", "biases"):
        name = f"model.layers.1.mlp.experts.{{}}.up_proj.{leaf}"
        weights[name.format(16)] = weights[name.format(0)]
    source = resave(q4_source, tmp_path / "s", weights)
    with pytest.raises(SourceError, match=r"experts\.16\.up_proj"):
        understand(open_source(str(source)), ConvertOptions())


def test_names_that_the_model_does_not_know_are_refused(q4_source: Path, tmp_path: Path) -> None:
    weights = {
        name.replace(".up_proj.", ".w3."): array
        for name, array in one_by_one(read_weights(q4_source)).items()
    }
    source = resave(q4_source, tmp_path / "s", weights)
    with pytest.raises(SourceError, match=r"up_proj|w3"):
        understand(open_source(str(source)), ConvertOptions())
