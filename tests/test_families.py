"""Every model type with expert modules packs, and runs from its pack with mlx-lm's own bits."""

import importlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils
import numpy as np
import pytest
from conftest import make_pack
from families import (
    FAMILIES,
    UNTESTED,
    WINDOW,
    discover,
    family_table,
    is_of_type,
    write_checkpoint,
)
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP
from tiny_models import random_tokens

from moepack.formats.pack import Pack
from moepack.packer.checkpoint import ConvertOptions
from moepack.runtime.loading import Engine, load_engine
from moepack.tools.verify import verify_logits

N_PREFILLED = 40
N_DECODED = 6

QUANTIZED = [(name, family.quantized) for name, family in FAMILIES.items() if family.quantized]
# A cache above the floor: experts stay from call to call, in layers of unlike top-k or size too.
ABOVE_FLOOR = ["deepseek_v3", "gpt_oss", "hunyuan", "nemotron_h", "qwen3_5_moe"]

README = Path(__file__).parents[1] / "README.md"
MARKERS = ("<!-- families -->", "<!-- /families -->")


def test_every_family_of_mlx_lm_has_a_tiny_config_or_a_stated_reason() -> None:
    assert {*FAMILIES, *UNTESTED} == set(discover())
    assert not FAMILIES.keys() & UNTESTED.keys()


@pytest.mark.parametrize("name", FAMILIES)
def test_config_leads_to_the_model_type_it_stands_for(name: str) -> None:
    assert is_of_type(FAMILIES[name], name)


@pytest.mark.parametrize("name", FAMILIES)
def test_family_runs_from_its_pack_bit_for_bit(
    name: str, tmp_path: Path, kernels_anywhere: None
) -> None:
    check_family(name, tmp_path, mode=None)


@pytest.mark.parametrize(("name", "mode"), QUANTIZED)
def test_quantized_family_runs_from_its_pack_bit_for_bit(
    name: str, mode: str, tmp_path: Path
) -> None:
    check_family(name, tmp_path, mode)


@pytest.mark.parametrize("name", ABOVE_FLOOR)
def test_family_runs_with_one_expert_more_than_the_floor(name: str, tmp_path: Path) -> None:
    check_family(name, tmp_path, mode=None, n_above_floor=1)


# One with switch layers that are no experts, one with another name for the size of a vocabulary.
@pytest.mark.parametrize("name", ["deepseek_v41", "phixtral", "gpt_oss"])
def test_family_in_half_precision_equals_mlx_lm_widened_alike(name: str, tmp_path: Path) -> None:
    source = write_checkpoint(FAMILIES[name], tmp_path / "source", None)
    pack = Pack.open(make_pack(source, tmp_path / "pack", ConvertOptions(dtype="bfloat16")))
    logits = verify_logits(pack, str(source), None, "auto")
    assert logits.identical == logits.positions == 128


def test_at_least_a_third_of_the_families_are_tested_in_4_bits() -> None:
    assert 3 * len(QUANTIZED) >= len(FAMILIES)


def test_readme_has_the_table_of_families() -> None:
    text = README.read_text(encoding="utf-8") if README.is_file() else ""
    assert all(marker in text for marker in MARKERS), f"README.md has no {' ... '.join(MARKERS)}"
    table = text.partition(MARKERS[0])[2].partition(MARKERS[1])[0]
    assert table.strip() == family_table().strip(), "paste what `python tests/families.py` prints"


def check_family(name: str, folder: Path, mode: str | None, n_above_floor: int = 0) -> None:
    """Pack, count, run both models over a prompt and an answer, compare every bit."""
    source = write_checkpoint(FAMILIES[name], folder / "source", mode)
    loaded: nn.Module = mlx_lm.utils.load_model(source)[0]
    pack = Pack.open(make_pack(source, folder / "pack"))
    assert {m.path: m.n_experts for m in pack.manifest.modules} == count_experts(loaded)
    if mode is not None:
        modes = {q.mode for m in pack.manifest.modules for q in m.quantization.values()}
        assert modes == {mode}

    engine = load_engine(pack, expert_cache="floor", context=N_PREFILLED)
    assert engine.plan.kv == cache_nbytes(loaded, N_PREFILLED)
    if n_above_floor:
        floor = engine.plan.slots_per_layer
        nbytes = sum(
            (n + n_above_floor) * module.record_nbytes
            for n, module in zip(floor, pack.manifest.modules, strict=True)
        )
        engine = load_engine(pack, expert_cache=nbytes)
        assert engine.plan.slots_per_layer != floor
    assert len(engine.layers) == len(pack.manifest.modules), "not every layer streams"

    tokens = [t % 150 for t in random_tokens(N_PREFILLED + N_DECODED)]
    wanted = logits_of(loaded, tokens)
    assert np.isfinite(wanted).all()
    assert logits_of(engine.model, tokens).tobytes() == wanted.tobytes()
    check_streaming(engine)
    check_caches_only(engine, tokens, wanted)


def count_experts(model: nn.Module) -> dict[str, int]:
    """Path -> number of experts of every expert module, from the weights of its first matrix."""
    return {
        path: (m.gate_proj if isinstance(m, SwitchGLU) else m.fc1).weight.shape[0]
        for path, m in model.named_modules()
        if isinstance(m, SwitchGLU | SwitchMLP)
    }


def cache_nbytes(model: nn.Module, n_tokens: int) -> int:
    """Bytes of the caches after a call on a prompt of this length."""
    cache: list[Any] = make_prompt_cache(model)
    mx.eval(model(mx.zeros((1, n_tokens), dtype=mx.int32), cache=cache))
    leaves = [leaf for entry in cache for _, leaf in tree_flatten(entry.state)]
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, mx.array))


def logits_of(model: nn.Module, tokens: list[int]) -> "np.ndarray[Any, Any]":
    """Logits `(len(tokens), vocab)`: a prompt in one chunk, then an answer token by token."""
    assert N_PREFILLED > 2 * WINDOW
    cache = make_prompt_cache(model)
    rows = [model(mx.array([tokens[:N_PREFILLED]]), cache=cache)[0]]
    for token in tokens[N_PREFILLED:]:
        mx.eval(rows[-1])
        rows.append(model(mx.array([[token]]), cache=cache)[0])
    return np.array(mx.concatenate(rows).astype(mx.float32))


def check_streaming(engine: Engine) -> None:
    """Slots are in order, and the prompt needed more experts than they hold."""
    for layer in engine.layers:
        layer._slots.check_integrity()
    prefill, decode = engine.counters()
    assert prefill.misses > sum(engine.plan.slots_per_layer)
    assert decode.hits + decode.misses > 0


def check_caches_only(engine: Engine, tokens: list[int], wanted: "np.ndarray[Any, Any]") -> None:
    """After a prompt that the last layer's experts did not see, decoding is the same."""
    last = engine.forgettable
    assert last is engine.layers[-1]
    before = last.counters.prefill.calls
    cache = make_prompt_cache(engine.model)
    rows = []
    with engine.caches_only():
        engine.model(mx.array([tokens[:N_PREFILLED]]), cache=cache)
        mx.eval([entry.state for entry in cache])
        for token in tokens[N_PREFILLED:]:
            rows.append(engine.model(mx.array([[token]]), cache=cache)[0])
            mx.eval(rows[-1])
    assert last.counters.prefill.calls == before
    decoded = np.array(mx.concatenate(rows).astype(mx.float32))
    assert decoded.tobytes() == wanted[N_PREFILLED:].tobytes()


@pytest.fixture
def kernels_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Metal, plain MLX in place of the kernels that muse_spark has for Metal alone."""
    if mx.metal.is_available():
        return
    module = importlib.import_module("mlx_lm.models.muse_spark")
    for kernel in (
        expert_routing,
        norm_add_norm,
        post_expert_norm_combine,
        pre_norm,
        qk_norm,
        qk_norm_rope,
        rms_norm_sigmoid_gate,
    ):
        monkeypatch.setattr(module, kernel.__name__, kernel)


def expert_routing(
    logits: mx.array,
    expert_bias: mx.array,
    *,
    top_k: int,
    multiplier: float,
    score_eps: float,
    route_scale: float,
) -> tuple[mx.array, mx.array]:
    scores = mx.sigmoid(logits * multiplier)
    picked = mx.argsort(-(scores + expert_bias), axis=-1)[..., :top_k]
    weights = mx.take_along_axis(scores, picked, axis=-1)
    total = weights.sum(axis=-1, keepdims=True) + score_eps
    return picked, weights / total * route_scale


def norm_add_norm(
    branch: mx.array,
    stream: mx.array,
    *,
    alpha: mx.array,
    beta: mx.array,
    post_weight: mx.array | None,
    post_eps: float,
    next_norm: nn.RMSNorm | None,
) -> tuple[mx.array, mx.array | None]:
    scaled = branch if post_weight is None else post_weight * branch
    summed = alpha * stream + beta * mx.fast.rms_norm(scaled, None, post_eps)
    return summed, None if next_norm is None else next_norm(summed)


def post_expert_norm_combine(
    experts: mx.array, weights: mx.array, *, norm_weight: mx.array, eps: float
) -> mx.array:
    normed = mx.fast.rms_norm(norm_weight * experts, None, eps)
    return (normed * weights[..., None]).sum(axis=-2)


def pre_norm(stream: mx.array, norm: nn.RMSNorm, *, dtype: mx.Dtype) -> mx.array:
    normed: mx.array = norm(stream)
    return normed.astype(dtype)


def qk_norm(
    qkvg: mx.array,
    *,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    eps: float,
    query_scale: float,
) -> tuple[mx.array, mx.array]:
    heads = qkvg.reshape(*qkvg.shape[:-1], -1, head_dim)
    normed = mx.fast.rms_norm(heads[..., : n_heads + n_kv_heads, :], None, eps)
    return normed[..., :n_heads, :] * query_scale, normed[..., n_heads:, :]


def qk_norm_rope(
    qkvg: mx.array, *, rope_base: float, offset: int | mx.array, **norm_args: Any
) -> list[mx.array]:
    return [
        mx.fast.rope(
            x.swapaxes(-2, -3),
            norm_args["head_dim"],
            traditional=True,
            base=rope_base,
            scale=1.0,
            offset=offset,
        ).swapaxes(-2, -3)
        for x in qk_norm(qkvg, **norm_args)
    ]


def rms_norm_sigmoid_gate(x: mx.array, gate: mx.array, *, eps: float) -> mx.array:
    normed = mx.fast.rms_norm(x, None, eps).swapaxes(1, 2)
    return normed.reshape(gate.shape) * mx.sigmoid(gate)
