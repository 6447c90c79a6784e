"""A replay with a run's policy and slots counts exactly what the run counted."""

from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from tiny_models import random_tokens

from moepack.formats.pack import Pack
from moepack.runtime.counters import Counters
from moepack.runtime.loading import Engine, load_engine
from moepack.runtime.policy import POLICIES
from moepack.runtime.simulate import simulate, simulate_layer
from moepack.runtime.slots import SlotCache
from moepack.runtime.trace import Call, Trace, TraceRecorder, load_trace

# Two conversations: chunks that need every expert, short ones, and tokens one by one.
CONVERSATIONS = [[64, 50, 2, *[1] * 12], [40, 3, *[1] * 10]]


def run(pack: Path, n_slots: int, file: Path) -> Engine:
    """An engine that has run the conversations and then batches, and their trace in `file`."""
    modules = Pack.open(pack).manifest.modules
    nbytes = sum(m.record_nbytes * n_slots for m in modules)
    engine = load_engine(pack, expert_cache=nbytes, keep_streaming=True)
    recorder = TraceRecorder()
    for index, layer in enumerate(engine.layers):
        layer.record = recorder.layer(index)
    for chunks in CONVERSATIONS:
        cache = make_prompt_cache(engine.model)
        tokens = random_tokens(sum(chunks))
        for size in chunks:
            mx.eval(engine.model(mx.array([tokens[:size]]), cache=cache))
            tokens = tokens[size:]
    for token in range(3):
        mx.eval(engine.model(mx.array([[token], [70], [9 * token], [5]])))
    n_experts = [layer.n_experts for layer in engine.layers]
    recorder.save(file, n_experts, engine.plan.slots_per_layer, "a test")
    return engine


def counted(counters: Counters) -> tuple[int, int, int, int]:
    """What a replay counts."""
    return counters.calls, counters.hits, counters.misses, counters.evictions


@pytest.mark.parametrize("n_slots", [4, 5, 7, 12, 16])
def test_a_replay_counts_what_the_run_counted(q4_pack: Path, n_slots: int, tmp_path: Path) -> None:
    """Layer by layer, prefill and decode apart, in waves or not; and ends with the same slots."""
    engine = run(q4_pack, n_slots, tmp_path / "t.npz")
    trace = load_trace(tmp_path / "t.npz")
    assert trace.slots == (n_slots, n_slots)
    n_in_waves = 0
    for layer, calls, n_experts in zip(engine.layers, trace.layers, trace.n_experts, strict=True):
        cache = SlotCache(n_experts, n_slots)
        replayed = simulate_layer(calls, cache)
        assert list(cache.slot_of.items()) == list(layer._slots.slot_of.items())
        assert counted(replayed.prefill) == counted(layer.counters.prefill)
        assert counted(replayed.decode) == counted(layer.counters.decode)
        n_in_waves += sum(len(call.experts) > n_slots for call in calls)
    assert (n_in_waves > 0) == (n_slots < 16)
    prefill, decode = engine.counters()
    total = simulate(trace, "decayed", trace.slots)
    assert (counted(total.prefill), counted(total.decode)) == (counted(prefill), counted(decode))


def trace_of(*layers: list[list[int]]) -> Trace:
    """Layers of four experts, each call one token of decoding."""
    calls = tuple(tuple(Call(tuple(e), (1,) * len(e), 1, True) for e in layer) for layer in layers)
    return Trace("a test", 2, (4,) * len(layers), None, calls)


@pytest.mark.parametrize("policy", POLICIES)
def test_with_slots_for_all_the_first_uses_are_the_misses(policy: str) -> None:
    trace = trace_of([[0, 1], [1, 2], [0, 2]], [[3], [3], [3]])
    assert counted(simulate(trace, policy, [4, 4]).decode) == (6, 5, 4, 0)


def test_layers_have_slots_of_their_own() -> None:
    trace = trace_of([[0], [1], [0]], [[0], [1], [0]])
    assert counted(simulate(trace, "lru", [1, 2]).decode) == (6, 1, 5, 2)


def test_the_warm_up_is_run_and_not_counted() -> None:
    """In each layer."""
    trace = trace_of([[0, 1], [1, 2], [0, 2]], [[3], [3], [3]])
    assert counted(simulate(trace, "lru", [4, 4], warm_up=1).decode) == (4, 5, 1, 0)
    assert counted(simulate(trace, "lru", [4, 4], warm_up=9).decode) == (0, 0, 0, 0)
