"""A checkpoint with the layer shapes of a real model and random weights, to measure with.

Weights are made in their quantized form, one tensor at a time: 4-bit affine, float32 scales (MLX's
CPU kernels for bfloat16 are 5 to 25 times slower). Its answers mean nothing.

    python -m moepack.tools.synthetic DIR --preset qwen3-30b-a3b --layers 4
"""

import json
from pathlib import Path
from typing import Any

import click
import mlx.core as mx
import numpy as np

__all__ = ["PRESETS", "write_checkpoint"]

BITS = 4
GROUP_SIZE = 64
# Public config.json of each model; only the number of layers is chosen here.
QWEN3_30B_A3B: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "vocab_size": 151936,
}
PRESETS = {
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    # Small enough to stream from a 450 MB control group: 1.5 GB at 12 layers.
    "small": QWEN3_30B_A3B
    | {
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "head_dim": 64,
        "moe_intermediate_size": 512,
        "vocab_size": 32000,
    },
}


def write_checkpoint(folder: Path, preset: str, n_layers: int, seed: int = 0) -> None:
    """Write an MLX checkpoint of `n_layers` layers without a tokenizer, one shard a layer."""
    config = {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_hidden_layers": n_layers,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
        "quantization": {"group_size": GROUP_SIZE, "bits": BITS, "mode": "affine"},
        **PRESETS[preset],
    }
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    weight_map: dict[str, str] = {}
    shards = [_layer(config, i) for i in range(n_layers)] + [_ends(config)]
    for number, shapes in enumerate(shards):
        name = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        tensors: dict[str, mx.array] = {}
        for path, shape in shapes.items():
            tensors |= _norm(path, shape) if len(shape) == 1 else _quantized(path, shape, rng)
        mx.eval(tensors)
        mx.save_safetensors(str(folder / name), tensors, metadata={"format": "mlx"})
        weight_map |= dict.fromkeys(tensors, name)
        mx.clear_cache()
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    index = {"metadata": {}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _layer(config: dict[str, Any], index: int) -> dict[str, tuple[int, ...]]:
    dim, head = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    experts, inner = config["num_experts"], config["moe_intermediate_size"]
    p = f"model.layers.{index}"
    return {
        f"{p}.self_attn.q_proj": (heads * head, dim),
        f"{p}.self_attn.k_proj": (kv_heads * head, dim),
        f"{p}.self_attn.v_proj": (kv_heads * head, dim),
        f"{p}.self_attn.o_proj": (dim, heads * head),
        f"{p}.self_attn.q_norm": (head,),
        f"{p}.self_attn.k_norm": (head,),
        f"{p}.input_layernorm": (dim,),
        f"{p}.post_attention_layernorm": (dim,),
        f"{p}.mlp.gate": (experts, dim),
        f"{p}.mlp.switch_mlp.gate_proj": (experts, inner, dim),
        f"{p}.mlp.switch_mlp.up_proj": (experts, inner, dim),
        f"{p}.mlp.switch_mlp.down_proj": (experts, dim, inner),
    }


def _ends(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    dim, vocab = config["hidden_size"], config["vocab_size"]
    return {
        "model.embed_tokens": (vocab, dim),
        "model.norm": (dim,),
        "lm_head": (vocab, dim),
    }


def _norm(path: str, shape: tuple[int, ...]) -> dict[str, mx.array]:
    return {f"{path}.weight": mx.ones(shape)}


def _quantized(path: str, shape: tuple[int, ...], rng: np.random.Generator) -> dict[str, mx.array]:
    """Random codes; scales that give weights about the variance of a trained matrix."""
    *rows, columns = shape
    spread = rng.uniform(0.5, 1.5, (*rows, columns // GROUP_SIZE)).astype(np.float32)
    scales = mx.array(spread * np.float32(0.25 / columns**0.5))
    codes = rng.integers(0, 2**32, (*rows, columns * BITS // 32), dtype=np.uint32)
    middle = (2**BITS - 1) / 2
    return {
        f"{path}.weight": mx.array(codes),
        f"{path}.scales": scales,
        f"{path}.biases": -middle * scales,
    }


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--preset", type=click.Choice(sorted(PRESETS)), default="qwen3-30b-a3b")
@click.option("--layers", type=click.IntRange(1), default=4, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
def main(folder: Path, preset: str, layers: int, seed: int) -> None:
    """Write a checkpoint with random weights to FOLDER."""
    if folder.exists():
        raise click.UsageError(f"{folder}: exists")
    write_checkpoint(folder, preset, layers, seed)


if __name__ == "__main__":
    main()
