"""Make the frozen references: tiny checkpoints that transformers saved, and its own logits of them.

Each folder of `references/` holds `config.json` and `model.safetensors` as `save_pretrained`
writes them (float32), and `expected.npz`: a prompt (`ids`, int32) and the logits that the PyTorch
class gives for it (`logits`, float32). gpt-oss has its experts in MXFP4, as it is published:
mlx-lm does not read the float form; transformers reads the blocks back and widens them.

The tests read these files and need no torch; this script does, in an environment of its own:

    python -m venv /tmp/oracle
    /tmp/oracle/bin/pip install torch==2.13.0 transformers==5.24.0 numpy==2.4.6
    /tmp/oracle/bin/python tests/oracle/make_references.py
"""

import json
import os
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # everything is made here

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

REFERENCES = Path(__file__).parent / "references"
VOCAB = 128
N_TOKENS = 40  # more than twice the sliding window below

# No theta is a default of any library: one taken in silence would change the logits.
THETA = 50_000.0
PLAIN_ROPE = {"rope_type": "default", "rope_theta": THETA}

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 4096,
    "rope_parameters": PLAIN_ROPE,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

# The head dimension differs from hidden size / heads where the family lets it.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 8,
        "moe_intermediate_size": 16,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    },
    "mixtral": {"num_local_experts": 8, "intermediate_size": 16},
    "olmoe": {"num_experts": 8, "intermediate_size": 16, "norm_topk_prob": False},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "max_position_embeddings": 40 * 64,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": THETA,
            "factor": 40.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "glm4_moe": {
        "head_dim": 16,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "use_qk_norm": True,
        "attention_bias": True,
        "rope_parameters": {**PLAIN_ROPE, "partial_rotary_factor": 0.5},
    },
    "gpt_oss": {
        "head_dim": 16,
        "num_local_experts": 8,
        "intermediate_size": 32,  # one block
        "sliding_window": 16,
        "max_position_embeddings": 32 * 64,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": THETA,
            "factor": 32.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": True,  # the published models say False, which mlx-lm does not read
        },
    },
}


def build(family: str, seed: int) -> torch.nn.Module:
    """The family's PyTorch model in float32, weights large enough that routing varies."""
    config = CONFIG_MAPPING[family](**{**COMMON, **FAMILIES[family]})
    model: torch.nn.Module = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    generator = torch.Generator().manual_seed(seed)
    state = {
        name: draw(name, tensor, generator) for name, tensor in sorted(model.state_dict().items())
    }
    model.load_state_dict(state, strict=True)
    return model.eval()


def draw(name: str, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random values of this tensor's shape: norms near one, biases small, matrices of unit gain."""
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
    if "norm" in name:
        return 1 + 0.1 * noise
    if "embed_tokens" in name:
        return noise
    if "bias" in name or "sinks" in name:
        return 0.1 * noise
    return noise * tensor.shape[-1] ** -0.5


def pack_experts(folder: Path, seed: int) -> torch.nn.Module:
    """The model with random MXFP4 experts in place of its own, written over the saved one.

    A block is 32 inputs of one output: 16 bytes of two 4-bit floats, and a power of two.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(folder / "model.safetensors")
    for name in sorted(name for name in weights if name.endswith(("_up_proj", "down_proj"))):
        n_experts, n_inputs, n_outputs = weights.pop(name).shape
        shape = (n_experts, n_outputs, n_inputs // 32)
        weights[f"{name}_blocks"] = torch.randint(
            0, 256, (*shape, 16), generator=generator, dtype=torch.uint8
        )
        weights[f"{name}_scales"] = torch.randint(
            127 - 5, 127 - 2, shape, generator=generator, dtype=torch.uint8
        )
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        quantization_config=Mxfp4Config(dequantize=True),
    )
    return model.eval()


def make(family: str, seed: int) -> None:
    """Write one family's folder."""
    model = build(family, seed)
    folder = REFERENCES / family
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if family == "gpt_oss":
        model = pack_experts(folder, seed)
    ids = torch.randint(0, VOCAB, (1, N_TOKENS), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits
    np.savez(
        folder / "expected.npz",
        ids=ids[0].numpy().astype(np.int32),
        logits=logits[0].numpy().astype(np.float32),
    )
    nbytes = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{family}: {nbytes:,} bytes, logits up to {logits.abs().max():.2f}")


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    for number, name in enumerate(FAMILIES):
        make(name, seed=number)
