"""Counters against the router's own picks, noted by a wrapper around the stock experts."""

from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from tiny_models import random_tokens

from moepack.formats.pack import Pack
from moepack.runtime.counters import Counters, add
from moepack.runtime.loading import Engine, load_engine


class NotingExperts(nn.Module):
    """The stock experts, with a list of what each call picked."""

    def __init__(self, stock: nn.Module) -> None:
        super().__init__()
        self.stock = stock
        self._picks: list[set[int]] = []

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        """As the stock module."""
        self._picks.append(set(np.array(indices).reshape(-1).tolist()))
        y: mx.array = self.stock(x, indices)
        return y


@dataclass(frozen=True, slots=True)
class Picks:
    """Distinct experts by call, of one layer."""

    prefill: list[set[int]] = field(default_factory=list)
    decode: list[set[int]] = field(default_factory=list)


CHUNKS = [64, 50, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]


def run(model: nn.Module) -> None:
    """Three chunks of a prompt, then twelve single tokens."""
    cache = make_prompt_cache(model)
    tokens = random_tokens(sum(CHUNKS))
    for size in CHUNKS:
        mx.eval(model(mx.array([tokens[:size]]), cache=cache))
        tokens = tokens[size:]


@pytest.fixture(scope="module")
def picks(q4_source: Path) -> list[Picks]:
    """What the router of each expert layer picks."""
    model, _ = mlx_lm.utils.load_model(q4_source)
    noting = []
    for layer in model.model.layers[1:]:
        layer.mlp.switch_mlp = NotingExperts(layer.mlp.switch_mlp)
        noting.append(layer.mlp.switch_mlp)
    run(model)
    return [Picks(n._picks[:3], n._picks[3:]) for n in noting]


def run_engine(pack: Path, n_slots: int) -> Engine:
    """An engine that has seen the same tokens."""
    modules = Pack.open(pack).manifest.modules
    nbytes = sum(m.record_nbytes * n_slots for m in modules)
    engine = load_engine(pack, expert_cache=nbytes, keep_streaming=True)
    run(engine.model)
    return engine


@pytest.mark.parametrize("n_slots", [4, 7, 12, 16])
def test_hits_and_misses_are_the_distinct_experts_of_each_call(
    q4_pack: Path, picks: list[Picks], n_slots: int
) -> None:
    """Prefill and decode apart, in waves or not."""
    engine = run_engine(q4_pack, n_slots)
    for layer, pick in zip(engine.layers, picks, strict=True):
        prefill, decode = layer.counters.prefill, layer.counters.decode
        assert (prefill.calls, decode.calls) == (3, 12)
        assert prefill.hits + prefill.misses == sum(map(len, pick.prefill))
        assert decode.hits + decode.misses == sum(map(len, pick.decode)) == 12 * 4


def test_with_slots_for_all_every_expert_is_read_once(q4_pack: Path, picks: list[Picks]) -> None:
    """Misses are the experts ever seen; nothing is evicted."""
    engine = run_engine(q4_pack, 16)
    for layer, pick in zip(engine.layers, picks, strict=True):
        prefill, decode = layer.counters.prefill, layer.counters.decode
        assert prefill.misses + decode.misses == len(set().union(*pick.prefill, *pick.decode))
        assert prefill.evictions + decode.evictions == 0


@pytest.mark.parametrize("n_slots", [4, 7, 12])
def test_evictions_and_bytes_follow_from_misses(q4_pack: Path, n_slots: int) -> None:
    """Who came and is not there was evicted; a miss is one record, padding left out."""
    engine = run_engine(q4_pack, n_slots)
    for layer, module in zip(engine.layers, engine.pack.manifest.modules, strict=True):
        total = add([layer.counters.prefill, layer.counters.decode])
        assert total.misses - total.evictions == len(layer._slots.slot_of) == n_slots
        assert total.bytes_read == total.misses * module.record_nbytes
        assert total.read_s > 0


def test_engine_counters_are_the_sum_over_layers(q4_pack: Path) -> None:
    """Of every field."""
    engine = run_engine(q4_pack, 5)
    prefill, decode = engine.counters()
    assert prefill.misses == sum(layer.counters.prefill.misses for layer in engine.layers)
    assert decode.hits == sum(layer.counters.decode.hits for layer in engine.layers)
    assert decode.calls == 24


def test_a_batch_of_single_tokens_counts_as_decode(q4_pack: Path) -> None:
    """Rows of one token each, as batch generation decodes."""
    engine = load_engine(q4_pack, expert_cache="200kB")
    mx.eval(engine.model(mx.array([[3], [4], [5]])))
    prefill, decode = engine.counters()
    assert (prefill.calls, decode.calls) == (0, 2)


def test_hit_rate_before_the_first_call_is_unknown() -> None:
    """Not zero, and no division by it."""
    assert Counters().hit_rate is None
    assert Counters(hits=3, misses=1).hit_rate == 0.75
    assert Counters(hits=1).as_map()["hit_rate"] == 1.0
    assert add([]) == Counters()
