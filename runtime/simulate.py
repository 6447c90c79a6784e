"""What a run would have hit and missed with another policy or other slots: a trace, replayed.

The policies, slots and waves are the engine's own, called in the order of `StreamedExperts`: with
its policy and its slots, the figures are the run's.
"""

from collections.abc import Sequence

from moepack.runtime.counters import Counters, LayerCounters, add
from moepack.runtime.policy import POLICIES
from moepack.runtime.slots import SlotCache
from moepack.runtime.trace import Call, Trace
from moepack.runtime.waves import plan_waves

__all__ = ["simulate", "simulate_layer"]


def simulate(trace: Trace, policy: str, slots: Sequence[int], warm_up: int = 0) -> LayerCounters:
    """The sum over layers, with `slots[i]` slots in layer i.

    `policy` is a key of POLICIES; `warm_up` as of `simulate_layer`.
    """
    layers = []
    for calls, n_experts, n_slots in zip(trace.layers, trace.n_experts, slots, strict=True):
        future = [call.experts for call in calls]
        cache = SlotCache(n_experts, n_slots, POLICIES[policy](n_experts, n_slots, future))
        layers.append(simulate_layer(calls, cache, warm_up))
    return LayerCounters(
        add([layer.prefill for layer in layers]), add([layer.decode for layer in layers])
    )


def simulate_layer(calls: Sequence[Call], cache: SlotCache, warm_up: int = 0) -> LayerCounters:
    """Calls, hits, misses and evictions; the first `warm_up` calls of decoding are not counted."""
    counters = LayerCounters(Counters(), Counters())
    uncounted = Counters()
    n_decoded = 0
    for call in calls:
        counted = counters.decode if call.is_decode else counters.prefill
        if call.is_decode:
            n_decoded += 1
            if n_decoded <= warm_up:
                counted = uncounted
        evictions = cache.n_evictions
        hits = _run(call, cache)
        counted.calls += 1
        counted.hits += hits
        counted.misses += len(call.experts) - hits
        counted.evictions += cache.n_evictions - evictions
    return counters


def _run(call: Call, cache: SlotCache) -> int:
    """Experts that were there already."""
    needed = call.experts
    if call.n_tokens == 1:
        cache.policy.use(needed)
    else:
        cache.policy.use_many(dict(zip(needed, call.uses, strict=True)), call.n_tokens)
    misses = [e for e in needed if e not in cache.slot_of]
    if len(needed) > cache.n_slots:
        waves = plan_waves(cache.slot_of, cache.n_slots, needed, cache.policy.scores)
        for wave in waves:
            if wave.is_read:
                cache.reserve_slots(wave.experts, wave.slots)
                cache.fill(wave.experts)
        cache.use(e for wave in waves for e in wave.experts)
    else:
        cache.use(needed)
        if misses:
            cache.reserve(misses, set(needed))
            cache.fill(misses)
    return len(needed) - len(misses)
