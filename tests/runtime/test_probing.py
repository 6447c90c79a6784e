"""What a model needs, measured on its graph, against a real call."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils
import pytest
import tiny_models
from conftest import make_pack
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from tiny_models import random_tokens

from moepack.packer.checkpoint import find_expert_modules
from moepack.runtime.building import replace_module
from moepack.runtime.loading import load_engine
from moepack.runtime.probing import ShapeProbe, _is_remembered, measure_shape

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"bits": 4},
    "gpt_oss": {"config": tiny_models.GPT_OSS, "bits": 4},  # sliding windows of 16 tokens
    "phixtral": {"config": tiny_models.PHIXTRAL},
}
INNER = {"qwen3_moe": 64, "gpt_oss": 64, "phixtral": 256}
N_HEADS = {"qwen3_moe": 4, "gpt_oss": 4, "phixtral": 4}
TOP_K = {"qwen3_moe": (4, 4), "gpt_oss": (2, 2, 2), "phixtral": (2, 2)}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, session_folder: Path) -> tuple[str, Path]:
    """Name and checkpoint folder."""
    name: str = request.param
    folder = session_folder / f"probed {name}"
    return name, tiny_models.write_checkpoint(folder, **FAMILIES[name])


def real_cache_nbytes(model: nn.Module, n_tokens: int) -> int:
    """Bytes of the caches after a call that is evaluated."""
    cache: list[Any] = make_prompt_cache(model)
    mx.eval(model(mx.array([random_tokens(n_tokens)]), cache=cache))
    leaves = [leaf for entry in cache for _, leaf in tree_flatten(entry.state)]
    arrays = [leaf for leaf in leaves if isinstance(leaf, mx.array)]  # others are offsets
    mx.eval(arrays)
    return sum(array.nbytes for array in arrays)


@pytest.mark.parametrize("context", [1, 16, 17, 300])
def test_measured_shape_is_a_real_calls(family: tuple[str, Path], context: int) -> None:
    """top-k of every module, bytes of every kind of cache, width of the experts' input."""
    name, source = family
    model, _ = mlx_lm.utils.load_model(source)
    expected = real_cache_nbytes(model, context)
    modules = find_expert_modules(model)
    probes = [ShapeProbe(m) for _, m in modules]
    for (path, _), probe in zip(modules, probes, strict=True):
        replace_module(model, path, probe)
    shape = measure_shape(model, probes, context)
    assert shape.top_k == TOP_K[name]
    assert shape.kv_nbytes == expected > 0
    assert shape.token_nbytes == TOP_K[name][0] * 3 * (64 + INNER[name]) * 4
    assert shape.score_nbytes == N_HEADS[name] * 4 * 1.5


@pytest.mark.parametrize("context", [8, 300])
def test_plan_counts_the_caches_of_the_context(
    family: tuple[str, Path], tmp_path: Path, context: int
) -> None:
    """From the pack alone."""
    _, source = family
    pack = make_pack(source, tmp_path / "out.moepack")
    model, _ = mlx_lm.utils.load_model(source)
    engine = load_engine(pack, context=context)
    assert engine.plan.kv == real_cache_nbytes(model, context)


def test_only_what_the_last_module_says_is_in_no_cache(family: tuple[str, Path]) -> None:
    """Of the modules before it, a later layer's cache keeps what they said."""
    model, _ = mlx_lm.utils.load_model(family[1])
    modules = find_expert_modules(model)
    probes = [ShapeProbe(m) for _, m in modules]
    for (path, _), probe in zip(modules, probes, strict=True):
        replace_module(model, path, probe)
    remembered = [_is_remembered(model, probe) for probe in probes]
    assert remembered == [True] * (len(probes) - 1) + [False]


def test_measuring_evaluates_nothing(float_source: Path) -> None:
    """A context of a hundred thousand tokens costs no memory."""
    model, _ = mlx_lm.utils.load_model(float_source)
    modules = find_expert_modules(model)
    probes = [ShapeProbe(m) for _, m in modules]
    for (path, _), probe in zip(modules, probes, strict=True):
        replace_module(model, path, probe)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    shape = measure_shape(model, probes, 100_000)
    assert shape.kv_nbytes >= 3 * 2 * 100_000 * 2 * 32 * 4
    assert mx.get_peak_memory() - before < 1_000_000


def test_module_that_is_never_called_is_an_error(float_source: Path) -> None:
    """Its top-k could not be known."""
    model, _ = mlx_lm.utils.load_model(float_source)
    with pytest.raises(ValueError, match=r"\[0\] are never called"):
        measure_shape(model, [ShapeProbe(nn.Module())], 4)
