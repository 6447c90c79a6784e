"""Packed logits agree with transformers' PyTorch classes on checkpoints that transformers saved.

The references are frozen: `make_references.py` wrote them, and only it needs torch.
"""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import numpy as np
import pytest
from conftest import make_pack
from mlx_lm.models.cache import make_prompt_cache

from moepack.runtime import load_model
from moepack.runtime.loading import load_engine

REFERENCES = Path(__file__).parent / "references"
TOLERANCES = {
    "qwen3_moe": 1e-4,
    "mixtral": 1e-3,
    "olmoe": 1e-3,
    "deepseek_v3": 1e-3,
    "glm4_moe": 1e-3,
    "gpt_oss": 1e-3,
}
N_PROMPT = 24  # of 40 tokens; the rest are given one by one


@pytest.fixture(scope="module", params=TOLERANCES)
def family(request: pytest.FixtureRequest) -> str:
    """A model type that has a reference."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def pack(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pack of the family's reference. Read only."""
    return make_pack(REFERENCES / family, tmp_path_factory.mktemp("oracle") / f"{family}.moepack")


def expected(family: str) -> tuple[mx.array, np.ndarray]:
    """(ids `(1, n_tokens)`, logits `(n_tokens, vocab)`) of the reference."""
    with np.load(REFERENCES / family / "expected.npz") as arrays:
        return mx.array(arrays["ids"])[None], arrays["logits"]


def difference(logits: mx.array, wanted: np.ndarray) -> float:
    """The largest absolute difference of `(1, n_tokens, vocab)` logits from the reference."""
    return float(np.abs(np.array(logits[0]) - wanted).max())


def default_theta(config: dict[str, Any]) -> float:
    """The rope_theta that mlx-lm takes when none is stated; 10,000 where it requires one."""
    _, args_class = mlx_lm.utils._get_classes(config)
    default = {field.name: field.default for field in dataclasses.fields(args_class)}["rope_theta"]
    return 10_000.0 if default is dataclasses.MISSING else float(default)


def test_the_logits_of_a_prompt_are_those_of_transformers(family: str, pack: Path) -> None:
    ids, wanted = expected(family)
    model, _ = load_model(pack, expert_cache="floor")
    assert difference(model(ids), wanted) <= TOLERANCES[family]


def test_the_logits_of_tokens_given_one_by_one_are_those_of_transformers(
    family: str, pack: Path
) -> None:
    ids, wanted = expected(family)
    model, _ = load_model(pack, expert_cache="floor")
    cache = make_prompt_cache(model)
    rows = [model(ids[:, :N_PROMPT], cache=cache)]
    for position in range(N_PROMPT, ids.shape[1]):
        rows.append(model(ids[:, position : position + 1], cache=cache))
        mx.eval(rows)
    assert difference(mx.concatenate(rows, axis=1), wanted) <= TOLERANCES[family]


def test_a_default_rope_theta_in_place_of_the_stated_one_is_seen(
    family: str, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(REFERENCES / family, source)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    assert config["rope_parameters"]["rope_theta"] != default_theta(config)
    config["rope_parameters"]["rope_theta"] = default_theta(config)
    (source / "config.json").write_text(json.dumps(config), encoding="utf-8")
    ids, wanted = expected(family)
    model, _ = load_model(make_pack(source, tmp_path / "changed.moepack"), expert_cache="floor")
    assert difference(model(ids), wanted) > 10 * TOLERANCES[family]


def test_the_prompt_of_a_reference_uses_most_experts_of_every_layer(
    family: str, pack: Path
) -> None:
    ids, _ = expected(family)
    engine = load_engine(pack, expert_cache="floor")
    mx.eval(engine.model(ids))
    assert engine.layers
    for layer in engine.layers:
        counters = layer.counters.prefill
        assert layer.n_experts == 8
        assert counters.hits + counters.misses >= 6
