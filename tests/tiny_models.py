"""Tiny checkpoints with random weights, made on the spot: what every test packs and runs.

The tokenizer is injective: token i is the one character chr(0x4E00 + i), so equal text means equal
tokens. Token 0 ends a text.
"""

import importlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm import stream_generate
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model, quantize_model, save_config, save_model
from tokenizers import Tokenizer, decoders, models

VOCAB = 320
CHARACTERS = [chr(0x4E00 + i) for i in range(VOCAB)]

COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
}

# Layer 0 is dense: the place of an expert module is not the number of its layer.
QWEN3_MOE: dict[str, Any] = {
    **COMMON,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
    "moe_intermediate_size": 64,
    "tie_word_embeddings": False,
    "norm_topk_prob": True,
}

QWEN3_DENSE: dict[str, Any] = {
    **COMMON,
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "tie_word_embeddings": False,
}


def build(config: dict[str, Any], seed: int = 0, dtype: mx.Dtype = mx.float32) -> nn.Module:
    """A model of this config with random weights; norms near one, so that routing varies."""
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(seed)
    model: nn.Module = module.Model(module.ModelArgs.from_dict(json.loads(json.dumps(config))))
    weights = []
    for name, array in tree_flatten(model.parameters()):
        noise = mx.random.normal(array.shape)
        if array.ndim == 1:
            start = mx.ones(array.shape) if "norm" in name else array.astype(mx.float32)
            value = start + 0.1 * noise
        else:
            value = 0.08 * noise
        weights.append((name, value if name.endswith("A_log") else value.astype(dtype)))
    model.load_weights(weights)
    mx.eval(model.parameters())
    return model


def write_checkpoint(
    folder: Path,
    config: dict[str, Any] = QWEN3_MOE,
    *,
    bits: int | None = None,
    group_size: int = 32,
    mode: str = "affine",
    predicate: Callable[[str, nn.Module], bool | dict[str, Any]] | None = None,
    seed: int = 0,
    with_tokenizer: bool = True,
) -> Path:
    """An MLX checkpoint folder, quantized when `bits` is given or `mode` is not affine."""
    model = build(config, seed)
    config = json.loads(json.dumps(config))
    if bits is not None or mode != "affine":
        size = group_size if mode == "affine" else None
        model, config = quantize_model(
            model, config, size, bits, mode=mode, quant_predicate=predicate or (lambda *_: True)
        )
    folder.mkdir(parents=True)
    save_model(folder, model)
    config["eos_token_id"] = 0
    save_config(config, folder / "config.json")
    if with_tokenizer:
        write_tokenizer(folder)
    return folder


def write_adapter(
    source: Path, folder: Path, keys: Sequence[str] | None = ("self_attn.q_proj",)
) -> Path:
    """An adapter with random weights on the modules that end in `keys`, as mlx-lm saves it."""
    model, _ = load_model(source)
    parameters = {"rank": 4, "scale": 8.0, "dropout": 0.0, "keys": keys}
    model.freeze()
    linear_to_lora_layers(model, 3, parameters)
    mx.random.seed(3)
    weights = {
        name: 0.05 * mx.random.normal(array.shape)
        for name, array in tree_flatten(model.trainable_parameters())
        if "lora" in name
    }
    folder.mkdir()
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    config = {"fine_tune_type": "lora", "num_layers": 3, "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def write_tokenizer(folder: Path) -> None:
    """The injective tokenizer and a chat template that sends the content alone."""
    vocab = {character: i for i, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": CHARACTERS[0],
                "model_max_length": 4096,
            }
        )
    )
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    )


def text_of(tokens: list[int]) -> str:
    """The text that encodes to these tokens."""
    return "".join(CHARACTERS[t] for t in tokens)


def random_tokens(n: int, seed: int = 1) -> list[int]:
    """`n` tokens, none of them the end of text."""
    mx.random.seed(seed)
    values: list[int] = mx.random.randint(1, 300, (n,)).tolist()
    return values


def greedy_text(
    model: nn.Module, tokenizer: Any, prompt: list[int], max_tokens: int = 16, **options: Any
) -> str:
    """mlx-lm's greedy answer to a prompt of tokens."""
    return "".join(
        r.text
        for r in stream_generate(model, tokenizer, list(prompt), max_tokens=max_tokens, **options)
    )


def resave(
    source: Path,
    folder: Path,
    weights: dict[str, mx.array],
    *,
    n_shards: int = 1,
    config: dict[str, Any] | None = None,
) -> Path:
    """A copy of a checkpoint folder with other weights, in `n_shards` indexed files."""
    folder.mkdir(parents=True)
    for file in source.iterdir():
        if file.suffix != ".safetensors" and "index" not in file.name:
            (folder / file.name).write_bytes(file.read_bytes())
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    names = list(weights)
    per_shard = -(-len(names) // n_shards)
    weight_map = {}
    for shard in range(n_shards):
        part = names[shard * per_shard : (shard + 1) * per_shard]
        file_name = f"model-{shard + 1:05d}-of-{n_shards:05d}.safetensors"
        mx.save_safetensors(
            str(folder / file_name),
            {name: mx.contiguous(weights[name]) for name in part},
            metadata={"format": "mlx"},
        )
        weight_map.update(dict.fromkeys(part, file_name))
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return folder


def read_weights(folder: Path) -> dict[str, mx.array]:
    """All tensors of a checkpoint folder."""
    weights: dict[str, mx.array] = {}
    for shard in sorted(folder.glob("model*.safetensors")):
        loaded = mx.load(str(shard))
        assert isinstance(loaded, dict)
        weights.update(loaded)
    return weights


# Sliding windows in every second layer; experts with biases.
GPT_OSS: dict[str, Any] = {
    **COMMON,
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "intermediate_size": 64,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}

# Experts of two matrices with biases: SwitchMLP.
PHIXTRAL: dict[str, Any] = {
    "model_type": "phixtral",
    "num_vocab": VOCAB,
    "model_dim": 64,
    "num_heads": 4,
    "num_layers": 2,
    "rotary_dim": 8,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
}


def per_expert(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """The Hugging Face layout of qwen3_moe: one tensor an expert and projection."""
    unstacked: dict[str, mx.array] = {}
    for name, array in weights.items():
        if ".switch_mlp." in name:
            for expert in range(array.shape[0]):
                unstacked[name.replace(".switch_mlp.", f".experts.{expert}.")] = array[expert]
        else:
            unstacked[name] = array
    return unstacked


def run_prompt(
    model: nn.Module, prompt: list[int], step: int = 2048, n_decoded: int = 6, cache: Any = None
) -> mx.array:
    """Logits `(len(prompt) + n_decoded, vocab)` of a prompt in chunks, then of a greedy answer."""
    cache = make_prompt_cache(model) if cache is None else cache
    rows = []
    for start in range(0, len(prompt), step):
        rows.append(model(mx.array([prompt[start : start + step]]), cache=cache)[0])
        mx.eval(rows[-1])
    for _ in range(n_decoded):
        token = mx.argmax(rows[-1][-1])
        rows.append(model(token.reshape(1, 1), cache=cache)[0])
        mx.eval(rows[-1])
    return mx.concatenate(rows)
