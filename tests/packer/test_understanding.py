"""Understanding a checkpoint: what is copied, derived or dropped, and what is an expert."""

import json
from pathlib import Path

import mlx.core as mx
import pytest
import tiny_models
from tiny_models import per_expert, read_weights, resave

from moepack.formats.manifest import Quantization
from moepack.packer.checkpoint import Checkpoint, ConvertOptions, natural_key, understand
from moepack.packer.source import open_source
from moepack.packer.tensors import CopiedTensor, DerivedTensor, TensorBytes


def understood(folder: Path, options: ConvertOptions | None = None) -> Checkpoint:
    """The checkpoint in a folder."""
    return understand(open_source(str(folder)), options or ConvertOptions())


def all_tensors(checkpoint: Checkpoint) -> dict[str, TensorBytes]:
    """Every tensor of the model by its path, experts stacked."""
    experts = {
        f"{m.path}.{name}": tensor for m in checkpoint.modules for name, tensor in m.tensors.items()
    }
    return {**checkpoint.shared, **experts}


def test_mlx_checkpoint_passes_through_entirely(q4_source: Path) -> None:
    """Every tensor of the model is a byte range of the source, and none is left over."""
    checkpoint = understood(q4_source)
    tensors = all_tensors(checkpoint)
    assert all(isinstance(t, CopiedTensor) for t in tensors.values())
    assert set(tensors) == set(read_weights(q4_source))
    assert checkpoint.dropped == {}
    assert checkpoint.config is None


def test_thousands_of_tensors_an_expert_each_are_traced_to_their_sources(tmp_path: Path) -> None:
    """As many as real checkpoints have: a derived tensor knows the ones it is made of."""
    config = {**tiny_models.QWEN3_MOE, "num_experts": 700, "moe_intermediate_size": 8}
    config |= {"num_hidden_layers": 2, "hidden_size": 32}
    stacked = tiny_models.write_checkpoint(tmp_path / "stacked", config)
    raw = resave(stacked, tmp_path / "raw", per_expert(read_weights(stacked)))
    (module,) = understood(raw).modules
    for projection in ("gate_proj", "up_proj", "down_proj"):
        assert set(module.tensors[f"{projection}.weight"].sources) == {
            f"model.layers.1.mlp.experts.{expert}.{projection}.weight" for expert in range(700)
        }


def test_stacked_hf_layout_of_gpt_oss_in_mlx_form_passes_through(tmp_path: Path) -> None:
    """Biases of experts are parts too."""
    folder = tiny_models.write_checkpoint(tmp_path / "source", tiny_models.GPT_OSS, bits=4)
    checkpoint = understood(folder)
    assert all(isinstance(t, CopiedTensor) for t in all_tensors(checkpoint).values())
    assert "gate_proj.bias" in checkpoint.modules[0].tensors
    assert {m.class_name for m in checkpoint.modules} == {"SwitchGLU"}


def test_expert_module_of_two_matrices_is_found(tmp_path: Path) -> None:
    """phixtral builds its experts from SwitchMLP."""
    folder = tiny_models.write_checkpoint(tmp_path / "source", tiny_models.PHIXTRAL)
    checkpoint = understood(folder)
    assert [m.class_name for m in checkpoint.modules] == ["SwitchMLP", "SwitchMLP"]
    assert set(checkpoint.modules[0].tensors) == {
        "fc1.weight",
        "fc1.bias",
        "fc2.weight",
        "fc2.bias",
    }


def test_per_expert_layout_gives_derived_experts_and_copied_rest(
    float_source: Path, tmp_path: Path
) -> None:
    """mlx-lm stacks the experts; it passes the rest on."""
    folder = resave(float_source, tmp_path / "raw", per_expert(read_weights(float_source)))
    checkpoint = understood(folder)
    for module in checkpoint.modules:
        assert all(isinstance(t, DerivedTensor) for t in module.tensors.values())
    assert all(isinstance(t, CopiedTensor) for t in checkpoint.shared.values())
    assert checkpoint.dropped == {}


def test_tensor_that_sanitize_drops_is_listed_with_its_bytes(tmp_path: Path) -> None:
    """A tied model with a head of its own: mlx-lm leaves the head out."""
    config = {**tiny_models.QWEN3_MOE, "tie_word_embeddings": True}
    tied = tiny_models.write_checkpoint(tmp_path / "tied", config)
    weights = {**read_weights(tied), "lm_head.weight": mx.ones((tiny_models.VOCAB, 64))}
    checkpoint = understood(resave(tied, tmp_path / "source", weights))
    assert checkpoint.dropped == {"lm_head.weight": tiny_models.VOCAB * 64 * 4}
    assert "lm_head.weight" not in checkpoint.shared


def test_dropped_is_told_apart_from_derived(float_source: Path, tmp_path: Path) -> None:
    """Stacked experts are used though none of their arrays is a parameter; a dropped one is not."""
    config = {**tiny_models.QWEN3_MOE, "tie_word_embeddings": True}
    weights = per_expert(read_weights(float_source))
    checkpoint = understood(resave(float_source, tmp_path / "source", weights, config=config))
    assert list(checkpoint.dropped) == ["lm_head.weight"]


def test_expert_modules_come_in_model_order(tmp_path: Path) -> None:
    """Layer 10 comes after layer 9, not after layer 1."""
    config = {**tiny_models.QWEN3_MOE, "num_hidden_layers": 12, "num_experts": 4}
    folder = tiny_models.write_checkpoint(tmp_path / "deep", config)
    checkpoint = understood(folder)
    assert [m.path for m in checkpoint.modules] == [
        f"model.layers.{i}.mlp.switch_mlp" for i in range(1, 12)
    ]
    layers = [n.split(".")[2] for n in checkpoint.shared if n.endswith("q_proj.weight")]
    assert layers == [str(i) for i in range(12)]


def test_natural_key_orders_numbers_by_value_and_mixed_paths() -> None:
    """Numbers and words at the same place compare."""
    paths = ["a.10.b", "a.9.b", "a.b.1", "a2", "a10", "a"]
    assert sorted(paths, key=natural_key) == ["a", "a2", "a10", "a.9.b", "a.10.b", "a.b.1"]


def test_every_module_has_its_own_quantization(tmp_path: Path) -> None:
    """Mixed precision: by projection, by layer, and of the router."""

    def predicate(path: str, _: object) -> bool | dict[str, int]:
        if path.endswith("down_proj"):
            return {"bits": 8, "group_size": 32}
        if path.endswith("mlp.gate"):
            return {"bits": 8, "group_size": 64}
        return {"bits": 6, "group_size": 32} if ".layers.2." in path else True

    folder = tiny_models.write_checkpoint(tmp_path / "mixed", bits=4, predicate=predicate)
    checkpoint = understood(folder)
    first, second = (m.quantization for m in checkpoint.modules)
    assert first["gate_proj"] == Quantization(4, 32, "affine")
    assert first["down_proj"] == Quantization(8, 32, "affine")
    assert second["up_proj"] == Quantization(6, 32, "affine")
    assert checkpoint.quantization["model.layers.1.mlp.gate"] == Quantization(8, 64, "affine")
    assert not any("switch_mlp" in path for path in checkpoint.quantization)


def test_understanding_evaluates_no_derived_tensor(float_source: Path, tmp_path: Path) -> None:
    """Memory of a plan is names and shapes."""
    folder = resave(float_source, tmp_path / "raw", per_expert(read_weights(float_source)))
    mx.clear_cache()
    before = mx.get_active_memory()
    checkpoint = understood(folder, ConvertOptions(quantize=True, q_bits=4))
    assert mx.get_active_memory() - before < 100_000  # the weights are 2.5 MB
    assert checkpoint.modules


def test_derived_bytes_can_be_had_once() -> None:
    """The array is dropped with its last row."""
    tensor = DerivedTensor(mx.arange(6, dtype=mx.uint8), frozenset())
    assert [bytes(row) for row in tensor.rows(4)] == [bytes([0, 1, 2, 3]), bytes([4, 5])]
    with pytest.raises(RuntimeError, match="once"):
        next(tensor.rows(4))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16, mx.uint32, mx.bool_])
def test_derived_rows_are_row_major_bytes(dtype: mx.Dtype) -> None:
    """A transposed array is written as its shape says, not as it lies in memory."""
    array = mx.arange(12).reshape(3, 4).astype(dtype).T
    expected = b"".join(bytes(memoryview(mx.contiguous(array[i]))) for i in range(4))
    assert b"".join(bytes(row) for row in DerivedTensor(array, frozenset()).rows(5)) == expected


def test_the_config_of_a_text_only_pack_names_no_vision_tower(
    float_source: Path, tmp_path: Path
) -> None:
    """What was left out is not described; what passed through whole is copied as it is."""
    weights = read_weights(float_source)
    config = json.loads((float_source / "config.json").read_text())
    config |= {"tie_word_embeddings": True, "vision_config": {"depth": 3}}
    source = resave(float_source, tmp_path / "s", weights, config=config)
    checkpoint = understand(open_source(str(source)), ConvertOptions())
    assert checkpoint.dropped
    assert checkpoint.config is not None
    assert "vision_config" not in checkpoint.config
