"""Every model type of the installed mlx-lm that has expert modules, each as a tiny config.

`discover` asks mlx-lm itself which types those are, so that a type that a newer mlx-lm brings is
missed by a test instead of going untested. moepack has no line of code for any of them.
"""

import ast
import contextlib
import functools
import importlib
import io
import json
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
import mlx_lm.utils
from mlx.utils import tree_flatten
from mlx_lm.utils import quantize_model, save_config, save_model

VOCAB = 160
WINDOW = 16  # of every family with sliding windows: shorter than the tests' prompts


@dataclass(frozen=True, slots=True)
class Family:
    """One model type: a tiny config, models that have it, the mode of its quantized test."""

    config: dict[str, Any]
    examples: str
    quantized: str | None = None


# Model types that no test builds, each with the reason.
UNTESTED: dict[str, str] = {}


@functools.cache
def discover() -> dict[str, str]:
    """Model types with expert modules -> their aliases, from the sources of mlx-lm's models.

    A type counts when its module, or a model's module that it imports from, directly or not,
    names SwitchGLU or SwitchMLP.
    """
    imports: dict[str, set[str]] = {}
    has_experts: dict[str, bool] = {}
    for name, tree in _model_sources():
        imports[name] = _imported_modules(tree)
        has_experts[name] = any(
            isinstance(node, ast.Name) and node.id in ("SwitchGLU", "SwitchMLP")
            for node in ast.walk(tree)
        )

    def reaches_experts(name: str, seen: set[str]) -> bool:
        seen.add(name)
        return has_experts[name] or any(
            reaches_experts(other, seen) for other in imports[name] & imports.keys() - seen
        )

    aliases: dict[str, list[str]] = {}
    for alias, name in mlx_lm.utils.MODEL_REMAPPING.items():
        aliases.setdefault(name, []).append(alias)
    return {
        name: ", ".join(sorted(aliases.get(name, [])))
        for name in sorted(imports)
        if reaches_experts(name, set())
    }


def _model_sources() -> Iterator[tuple[str, ast.Module]]:
    """(name, syntax tree) of the modules of mlx_lm.models that define a Model."""
    for path in mlx_lm.models.__path__:
        for module in pkgutil.iter_modules([path]):
            tree = ast.parse((Path(path) / f"{module.name}.py").read_text(encoding="utf-8"))
            bound = {
                *(node.name for node in tree.body if isinstance(node, ast.ClassDef)),
                *(a.asname or a.name for n in tree.body for a in getattr(n, "names", ())
                  if isinstance(a, ast.alias)),
            }  # fmt: skip
            if "Model" in bound:
                yield module.name, tree


def _imported_modules(tree: ast.Module) -> set[str]:
    """Sibling modules that are imported, whole or in part."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            found |= {node.module} if node.module else {alias.name for alias in node.names}
    return found


def is_of_type(family: Family, name: str) -> bool:
    """Whether the config leads to the Model of the mlx-lm module of this name."""
    model_class, _ = mlx_lm.utils._get_classes(family.config)
    return bool(importlib.import_module(f"mlx_lm.models.{name}").Model is model_class)


def build(family: Family, seed: int = 0) -> nn.Module:
    """The family's model in float32, with random weights made so that routing varies."""
    config = json.loads(json.dumps(family.config))
    model_class, args_class = mlx_lm.utils._get_classes(config)
    mx.random.seed(seed)
    model: nn.Module = model_class(args_class.from_dict(config))
    model.eval()
    weights = [(name, _random_like(name, a)) for name, a in tree_flatten(model.parameters())]
    model.load_weights(weights)
    mx.eval(model.parameters())
    return model


def _random_like(name: str, array: mx.array) -> mx.array:
    """Norms near one, router biases near zero, matrices of a size that keeps activations finite."""
    if array.dtype == mx.uint32:  # packed, in a type whose weights are always quantized
        return mx.random.randint(0, 2**31, array.shape).astype(mx.uint32)
    if not mx.issubdtype(array.dtype, mx.floating):
        return array
    noise = mx.random.normal(array.shape)
    if array.ndim == 1:
        start = mx.ones(array.shape) if "norm" in name else array.astype(mx.float32)
        value = start + 0.1 * noise
    else:
        value = 0.12 * noise
    return value.astype(mx.float32)


def write_checkpoint(family: Family, folder: Path, mode: str | None = None) -> Path:
    """An MLX checkpoint as mlx-lm saves it; in 4 bits, groups of 32, when `mode` is given.

    What the type wants in more bits, or not quantized at all, is so here too: often its router.
    """
    model = build(family)
    config = json.loads(json.dumps(family.config))
    if mode is not None:
        with contextlib.redirect_stdout(io.StringIO()):  # mlx-lm prints a line
            model, config = quantize_model(model, config, 32, 4, mode=mode)
    folder.mkdir(parents=True)
    save_model(folder, model)
    save_config(config, folder / "config.json")
    return folder


def family_table() -> str:
    """The Markdown table of the README: one row a model type, from the list below."""
    aliases = discover()
    rows = ["| model type | example models | tested |", "|---|---|---|"]
    for name in sorted({*FAMILIES, *UNTESTED}, key=str.lower):
        also = f" ({', '.join(f'`{a}`' for a in aliases[name].split(', '))})"
        title = f"`{name}`{also if aliases[name] else ''}"
        if name in FAMILIES:
            family = FAMILIES[name]
            modes = ["float32", *_mode_names(family.quantized)]
            rows.append(f"| {title} | {family.examples} | {', '.join(modes)} |")
        else:
            rows.append(f"| {title} | | no: {UNTESTED[name]} |")
    return "\n".join(rows) + "\n"


def _mode_names(mode: str | None) -> list[str]:
    if mode is None:
        return []
    return ["4-bit"] if mode == "affine" else [f"4-bit ({mode})"]


SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}

YARN: dict[str, Any] = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

# Latent attention (MLA), and its experts with a dense first layer.
DEEPSEEK: dict[str, Any] = {
    **SIZES,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "n_group": 2,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "attention_bias": False,
}

# Lightning attention's configs: one layer in two attends in full.
BAILING: dict[str, Any] = {
    **SIZES,
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_shared_experts": 1,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "routed_scaling_factor": 1.5,
    "use_qk_norm": True,
}

QWEN: dict[str, Any] = {
    **SIZES,
    "head_dim": 32,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
}

LINEAR_ATTENTION: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}

QWEN3_5: dict[str, Any] = {
    **QWEN,
    **LINEAR_ATTENTION,
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "shared_expert_intermediate_size": 32,
    "rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}

GEMMA4: dict[str, Any] = {
    **SIZES,
    "model_type": "gemma4_text",
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_kv_shared_layers": 1,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 32,
    "sliding_window": WINDOW,
    "sliding_window_pattern": 2,
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
    "tie_word_embeddings": True,
}

GLM4_MOE: dict[str, Any] = {
    **SIZES,
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "rope_scaling": None,
    "use_qk_norm": True,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}

# 6 real experts and 2 that give their input back.
LONGCAT: dict[str, Any] = {
    **SIZES,
    "attention_method": "MLA",
    "attention_bias": False,
    "zero_expert_type": "identity",
    "zero_expert_num": 2,
    "n_routed_experts": 6,
    "ffn_hidden_size": 96,
    "expert_ffn_hidden_size": 32,
    "moe_topk": 3,
    "num_layers": 2,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "routed_scaling_factor": 1.5,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}

MISTRAL4: dict[str, Any] = {
    **DEEPSEEK,
    "model_type": "mistral4",
    "n_group": 1,
    "first_k_dense_replace": 0,
    "rope_parameters": {**YARN, "rope_theta": 10000.0, "llama_4_scaling_beta": 0.1},
}

SPARSE_INDEX: dict[str, Any] = {"index_head_dim": 32, "index_n_heads": 2, "index_topk": 12}

# Delta attention in three layers of four, counted from one.
KIMI_LINEAR: dict[str, Any] = {
    **SIZES,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "model_max_length": 4096,
    "linear_attn_config": {
        "kda_layers": [1, 2, 4],
        "full_attn_layers": [3],
        "num_heads": 2,
        "head_dim": 32,
        "short_conv_kernel_size": 4,
    },
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "num_expert_group": 2,
    "topk_group": 1,
}

GRANITE: dict[str, Any] = {
    **SIZES,
    "logits_scaling": 2.0,
    "attention_multiplier": 0.25,
    "embedding_multiplier": 4.0,
    "residual_multiplier": 0.5,
    "attention_bias": False,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}

SLIDING_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]

FAMILIES: dict[str, Family] = {
    "Klear": Family(
        {**QWEN, "model_type": "Klear", "attention_bias": False, "n_shared_experts": 1},
        "Klear-46B-A2.5B",
    ),
    "afmoe": Family(
        {
            **SIZES,
            "model_type": "afmoe",
            "layer_types": SLIDING_LAYERS,
            "sliding_window": WINDOW,
            "head_dim": 16,
            "moe_intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "num_dense_layers": 1,
            "n_group": 2,
            "topk_group": 1,
        },
        "Trinity Mini, Nano and Large",
        "affine",
    ),
    "bailing_hybrid": Family(
        {
            **BAILING,
            "model_type": "bailing_hybrid",
            "num_hidden_layers": 4,
            "layer_group_size": 2,
            "group_norm_size": 2,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
        },
        "Ring 2.5, Ling 2.5 and 2.6",
    ),
    "bailing_moe": Family(
        {**BAILING, "model_type": "bailing_moe"}, "Ling and Ring, Ling 2.0 and Ring 2.0", "affine"
    ),
    "bailing_moe_linear": Family(
        {
            **BAILING,
            "model_type": "bailing_moe_linear",
            "num_hidden_layers": 4,
            "layer_group_size": 2,
            "group_norm_size": 2,
        },
        "Ring Linear 2.0 and Ling Linear 2.0",
        "affine",
    ),
    "bailing_moe_v3": Family(
        {
            **BAILING,
            "model_type": "bailing_hybrid",
            "architectures": ["BailingMoeV3ForCausalLM"],
            "num_hidden_layers": 4,
            "layer_group_size": 2,
            "moe_shared_expert_intermediate_size": 32,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            "head_dim": 32,
        },
        "Ling 3.0 Tiny and Flash",
    ),
    "deepseek": Family(
        {**DEEPSEEK, "model_type": "deepseek", "n_shared_experts": 2}, "DeepSeek MoE 16B"
    ),
    "deepseek_v2": Family(
        {
            **DEEPSEEK,
            "model_type": "deepseek_v2",
            "topk_method": "group_limited_greedy",
            "rope_scaling": YARN,
        },
        "DeepSeek V2, V2.5 and Coder V2",
        "affine",
    ),
    "deepseek_v3": Family(
        {**DEEPSEEK, "model_type": "deepseek_v3"},
        "DeepSeek V3 and R1, Kimi K2, Moonlight",
        "affine",
    ),
    "deepseek_v32": Family(
        {**DEEPSEEK, **SPARSE_INDEX, "model_type": "deepseek_v32"}, "DeepSeek V3.2", "affine"
    ),
    "deepseek_v41": Family(
        {
            **SIZES,
            "model_type": "deepseek_v41",
            "num_hidden_layers": 4,
            "head_dim": 32,
            "q_lora_rank": 32,
            "qk_rope_head_dim": 16,
            "o_groups": 2,
            "o_lora_rank": 32,
            "moe_intermediate_size": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "compress_ratios": [0, 4, 4, 4],
            "kv_source_layer_ids": [1],
            "index_source_layer_ids": [1, 2],
            "candidate_source_layer_id": 1,
            "candidate_topk_blocks": 2,
            "candidate_block_size": 4,
            "index_n_heads": 2,
            "index_head_dim": 32,
            "index_topk": 6,
            "hc_mult": 2,
            "hc_sinkhorn_iters": 3,
        },
        "DeepSeek V4.1",
        "affine",
    ),
    "dots1": Family(
        {**GLM4_MOE, "model_type": "dots1", "scoring_func": "noaux_tc"}, "dots.llm1", "affine"
    ),
    "ernie4_5_moe": Family(
        {
            **SIZES,
            "model_type": "ernie4_5_moe",
            "use_bias": False,
            "moe_num_experts": 8,
            "moe_k": 2,
            "moe_intermediate_size": 32,
            "moe_layer_start_index": 1,
            "moe_layer_interval": 1,
            "moe_num_shared_experts": 1,
            "moe_use_aux_free": True,
        },
        "ERNIE 4.5 A3B and A47B",
        "affine",
    ),
    "exaone_moe": Family(
        {
            **SIZES,
            "model_type": "exaone_moe",
            "head_dim": 16,
            "moe_intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "num_shared_experts": 1,
            "sliding_window": WINDOW,
            "layer_types": SLIDING_LAYERS,
            "is_moe_layer": [False, True, True],
            "n_group": 2,
        },
        "K-EXAONE",
        "affine",
    ),
    "gemma4": Family(
        {"model_type": "gemma4", "vocab_size": VOCAB, "text_config": GEMMA4},
        "Gemma 4 26B-A4B",
        "affine",
    ),
    "gemma4_text": Family(GEMMA4, "Gemma 4 26B-A4B, text alone"),
    "glm4_moe": Family(
        {**GLM4_MOE, "model_type": "glm4_moe"}, "GLM 4.5, 4.5 Air, 4.6 and 4.7", "affine"
    ),
    "glm4_moe_lite": Family(
        {**DEEPSEEK, "model_type": "glm4_moe_lite", "num_nextn_predict_layers": 0},
        "GLM 4.7 Flash",
        "affine",
    ),
    "glm_moe_dsa": Family(
        {
            **DEEPSEEK,
            **SPARSE_INDEX,
            "model_type": "glm_moe_dsa",
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "GLM 5",
    ),
    "gpt_oss": Family(
        {
            **SIZES,
            "model_type": "gpt_oss",
            "head_dim": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "layer_types": SLIDING_LAYERS,
        },
        "gpt-oss 20B and 120B",
        "mxfp4",
    ),
    "granitemoe": Family({**GRANITE, "model_type": "granitemoe"}, "Granite 3.x A400M and A800M"),
    "granitemoehybrid": Family(
        {
            **GRANITE,
            "model_type": "granitemoehybrid",
            "layer_types": ["mamba", "attention", "mamba"],
            "shared_intermediate_size": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 32,
            "mamba_proj_bias": False,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_n_groups": 1,
            "mamba_conv_bias": True,
            "position_embedding_type": "nope",
        },
        "Granite 4.0 H Tiny and Small",
        "affine",
    ),
    "hunyuan": Family(
        {
            **SIZES,
            "model_type": "hunyuan",
            "num_hidden_layers": 4,
            "attention_bias": False,
            "num_experts": 8,
            "moe_topk": [1, 2, 3, 2],
            "moe_intermediate_size": [32, 64, 32, 64],
            "num_shared_expert": [1, 1, 1, 1],
            "use_mixed_mlp_moe": True,
            "use_qk_norm": True,
            "use_cla": True,
            "cla_share_factor": 2,
            "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
        },
        "Hunyuan A13B and Large",
        "affine",
    ),
    "jamba": Family(
        {
            **SIZES,
            "model_type": "jamba",
            "num_hidden_layers": 4,
            "attn_layer_offset": 2,
            "attn_layer_period": 4,
            "expert_layer_offset": 1,
            "expert_layer_period": 2,
            "mamba_d_conv": 4,
            "mamba_d_state": 16,
            "mamba_expand": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
        "Jamba 1.5 and 1.7",
    ),
    "kimi_k25": Family(
        {"model_type": "kimi_k25", "text_config": {**DEEPSEEK, "model_type": "kimi_k2"}},
        "Kimi K2.5",
    ),
    "kimi_k3": Family(
        {
            "model_type": "kimi_k3",
            "text_config": {
                **KIMI_LINEAR,
                "model_type": "kimi_linear",
                "q_lora_rank": 32,
                "activation_situ_beta": 1.5,
                "activation_situ_linear_beta": 2.0,
                "attn_res_block_size": 2,
                "mla_use_output_gate": True,
                "routed_expert_hidden_size": 32,
                "latent_moe_use_norm": True,
            },
        },
        "Kimi K3",
        "affine",
    ),
    "kimi_linear": Family({**KIMI_LINEAR, "model_type": "kimi_linear"}, "Kimi Linear 48B-A3B"),
    "kimi_vl": Family(
        {"model_type": "kimi_vl", "text_config": {**DEEPSEEK, "model_type": "deepseek_v3"}},
        "Kimi-VL A3B",
    ),
    "laguna": Family(
        {
            **SIZES,
            "model_type": "laguna",
            "head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": SLIDING_LAYERS,
            "num_attention_heads_per_layer": [4, 2, 4],
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "moe_routed_scaling_factor": 1.5,
            "rope_parameters": {
                "full_attention": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_theta": 10000.0, "partial_rotary_factor": 1.0},
            },
        },
        "Laguna XS",
        "affine",
    ),
    "lfm2_moe": Family(
        {
            **SIZES,
            "model_type": "lfm2_moe",
            "num_hidden_layers": 4,
            "norm_eps": 1e-6,
            "moe_intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "use_expert_bias": True,
            "num_dense_layers": 1,
            "conv_bias": False,
            "conv_L_cache": 3,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
        },
        "LFM2 8B-A1B and 24B-A2B",
        "affine",
    ),
    "llama4": Family(
        {
            "model_type": "llama4",
            "text_config": {
                **SIZES,
                "model_type": "llama4_text",
                "num_hidden_layers": 4,
                "attention_bias": False,
                "attention_chunk_size": WINDOW,
                "head_dim": 16,
                "interleave_moe_layer_step": 2,
                "intermediate_size": 32,
                "intermediate_size_mlp": 96,
                "num_experts_per_tok": 1,
                "num_local_experts": 4,
                "rope_scaling": None,
                "use_qk_norm": True,
            },
        },
        "Llama 4 Scout and Maverick",
        "affine",
    ),
    "longcat_flash": Family({**LONGCAT, "model_type": "longcat_flash"}, "LongCat Flash", "affine"),
    "longcat_flash_ngram": Family(
        {
            **LONGCAT,
            "model_type": "longcat_flash_ngram",
            "hidden_size": 72,
            "ngram_vocab_size_ratio": 2,
            "emb_neighbor_num": 3,
            "emb_split_num": 2,
        },
        "LongCat Flash Lite",
    ),
    "mellum": Family(
        {
            **QWEN,
            "model_type": "mellum",
            "sliding_window": WINDOW,
            "layer_types": SLIDING_LAYERS,
            "rope_parameters": {
                "full_attention": {"rope_theta": 100000.0, "rope_type": "default"},
                "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
            },
        },
        "Mellum 2",
    ),
    "mimo_v2_flash": Family(
        {
            **SIZES,
            "model_type": "mimo_v2_flash",
            "hybrid_layer_pattern": [0, 1, 1],
            "moe_layer_freq": [0, 1, 1],
            "add_swa_attention_sink_bias": True,
            "add_full_attention_sink_bias": False,
            "sliding_window_size": WINDOW,
            "moe_intermediate_size": 32,
            "n_shared_experts": None,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "routed_scaling_factor": None,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "norm_topk_prob": True,
            "n_group": 1,
            "topk_group": 1,
            "layernorm_epsilon": 1e-6,
            "swa_rope_theta": 10000.0,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 1,
            "head_dim": 32,
            "v_head_dim": 16,
            "swa_head_dim": 32,
            "swa_v_head_dim": 16,
            "partial_rotary_factor": 0.5,
        },
        "MiMo V2 Flash",
        "affine",
    ),
    "minimax": Family(
        {
            **SIZES,
            "model_type": "minimax_m2",
            "intermediate_size": 32,
            "shared_intermediate_size": 0,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "head_dim": 32,
            "rotary_dim": 16,
        },
        "MiniMax M2, M2.1 and M2.5",
        "affine",
    ),
    "minimax_m3_vl": Family(
        {
            "model_type": "minimax_m3_vl",
            "text_config": {
                **SIZES,
                "model_type": "minimax_m3",
                "num_hidden_layers": 4,
                "intermediate_size": 32,
                "dense_intermediate_size": 96,
                "shared_intermediate_size": 32,
                "num_local_experts": 8,
                "num_experts_per_tok": 2,
                "head_dim": 32,
                "moe_layer_freq": [0, 1, 1, 1],
                "sparse_attention_config": {
                    "sparse_num_index_heads": 2,
                    "sparse_index_dim": 32,
                    "sparse_block_size": 8,
                    "sparse_topk_blocks": 2,
                    "sparse_local_block": 1,
                    "sparse_attention_freq": [0, 0, 1, 1],
                },
            },
        },
        "MiniMax M3",
        "affine",
    ),
    "mistral3": Family(
        {"model_type": "mistral3", "text_config": MISTRAL4}, "Mistral Small 4", "affine"
    ),
    "mistral4": Family(MISTRAL4, "Mistral Small 4, text alone"),
    "mixtral": Family(
        {**SIZES, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
        "Mixtral 8x7B and 8x22B",
    ),
    "muse_spark": Family(
        {
            "model_type": "muse_spark",
            "text_config": {
                **SIZES,
                "head_dim": 16,
                "post_norm_eps": 1e-6,
                "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
                "layer_rope_theta": [10000.0, 0.0, 10000.0],
                "layer_types": SLIDING_LAYERS,
                "sliding_window": WINDOW,
                "final_logit_softcapping": 30.0,
                "output_multiplier": 1.0,
                "num_local_experts": 8,
                "num_experts_per_tok": 2,
                "moe_hidden_size": 32,
                "moe_intermediate_size": 32,
            },
        },
        "Muse Spark",
    ),
    "nemotron_h": Family(
        {
            **SIZES,
            "model_type": "nemotron_h",
            "hybrid_override_pattern": ["M", "E", "*", "E", "-"],
            "attention_bias": False,
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "mamba_proj_bias": False,
            "ssm_state_size": 16,
            "conv_kernel": 4,
            "n_groups": 2,
            "mlp_bias": False,
            "layer_norm_epsilon": 1e-6,
            "use_bias": False,
            "use_conv_bias": True,
            "head_dim": 16,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 32,
            "moe_latent_size": 32,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
        },
        "Nemotron 3 Nano and Super",
        "affine",
    ),
    "olmoe": Family(
        {**SIZES, "model_type": "olmoe", "num_experts": 16, "num_experts_per_tok": 4},
        "OLMoE 1B-7B",
        "affine",
    ),
    "phimoe": Family(
        {
            **SIZES,
            "model_type": "phimoe",
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "original_max_position_embeddings": 32,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
                "short_mscale": 1.2,
                "long_mscale": 1.2,
            },
        },
        "Phi-3.5 MoE, Phi mini MoE",
    ),
    "phixtral": Family(
        {
            "model_type": "phixtral",
            "num_vocab": VOCAB,
            "model_dim": 64,
            "num_heads": 4,
            "num_layers": 2,
            "rotary_dim": 8,
            "num_experts_per_tok": 2,
            "num_local_experts": 4,
        },
        "Phixtral 2x2.8 and 4x2.8",
    ),
    "prism_hadamard_qwen35": Family(
        {
            "model_type": "prism_hadamard_qwen35",
            "schema_version": 1,
            "tensor_namespace": "mlx-lm-text",
            "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
            "modules": [{"path": "lm_head", "embedding": False, "dtype": "float16", "block": 0}],
            "text_config": {**QWEN3_5, "model_type": "qwen3_5_text", "hidden_size": 128},
        },
        "(no model with experts known)",
    ),
    "qwen2_moe": Family(
        {**QWEN, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 96},
        "Qwen1.5 MoE A2.7B, Qwen2 57B-A14B",
    ),
    "qwen3_5": Family(
        {"model_type": "qwen3_5", "text_config": {**QWEN3_5, "model_type": "qwen3_5_text"}},
        "Qwen 3.5 (its dense models have this type)",
    ),
    "qwen3_5_moe": Family(
        {"model_type": "qwen3_5_moe", "text_config": {**QWEN3_5, "model_type": "qwen3_5_moe_text"}},
        "Qwen 3.5 and 3.6 35B-A3B, 122B-A10B, 397B-A17B",
        "affine",
    ),
    "qwen3_moe": Family(
        {**QWEN, "model_type": "qwen3_moe"}, "Qwen 3 30B-A3B and 235B-A22B, Qwen3 Coder", "affine"
    ),
    "qwen3_next": Family(
        {
            **QWEN,
            **LINEAR_ATTENTION,
            "model_type": "qwen3_next",
            "num_hidden_layers": 4,
            "full_attention_interval": 2,
            "shared_expert_intermediate_size": 32,
            "partial_rotary_factor": 0.25,
        },
        "Qwen3 Next 80B-A3B, Qwen3 Coder Next",
    ),
    "qwen3_vl_moe": Family(
        {"model_type": "qwen3_vl_moe", "text_config": {**QWEN, "model_type": "qwen3_vl_moe_text"}},
        "Qwen3-VL 30B-A3B and 235B-A22B",
    ),
    "solar_open": Family({**GLM4_MOE, "model_type": "solar_open"}, "Solar Open 100B"),
    "step3p5": Family(
        {
            **SIZES,
            "model_type": "step3p5",
            "num_attention_groups": 2,
            "head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": SLIDING_LAYERS,
            "attention_other_setting": {
                "num_attention_heads": 2,
                "num_attention_groups": 1,
                "head_dim": 16,
            },
            "partial_rotary_factors": [1.0, 0.5, 1.0],
            "moe_num_experts": 8,
            "moe_top_k": 2,
            "moe_intermediate_size": 32,
            "share_expert_dim": 32,
            "moe_layers_enum": "1,2",
            "swiglu_limits": [0.0, 0.0, 7.0],
            "swiglu_limits_shared": [0.0, 0.0, 7.0],
        },
        "Step 3.5 Flash",
        "affine",
    ),
}

if __name__ == "__main__":
    print(family_table(), end="")
