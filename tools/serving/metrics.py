"""What /metrics shows, read from the engine when it is asked for."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moepack.tools.serving.generation import Totals
from moepack.tools.serving.worker import Worker

__all__ = ["Metrics"]


class Metrics:
    """A registry of this server's own."""

    def __init__(self, worker: Worker) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self.requests = Counter(
            "moepack_requests", "HTTP requests.", ("path", "status"), registry=self._registry
        )
        self._registry.register(_EngineCollector(worker))

    def page(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def collect(self) -> Iterator[Metric]:
        """What `run --json` counts, since the start."""
        worker = self._worker
        totals = worker.generation.totals if worker.generation else Totals()
        engine = worker.engine
        counters = engine.counters() if engine else ()
        gauges = [
            ("ready", "Whether the model is loaded.", int(engine is not None)),
            ("requests_running", "Requests being answered.", worker.n_running),
            ("requests_waiting", "Requests in the queue.", worker.n_waiting),
        ]
        if engine is not None:
            slots = sum(engine.plan.slots_per_layer)
            gauges += [
                ("expert_slots", "Experts that fit in memory, of all layers.", slots),
                ("planned_memory_bytes", "Memory planned for all uses.", engine.plan.total),
            ]
        counts = [
            ("prompt_tokens", "Tokens of prompts.", totals.prompt),
            ("cached_prompt_tokens", "Of those, found in a kept KV cache.", totals.cached),
            ("generated_tokens", "Tokens of answers.", totals.generated),
            ("expert_hits", "Experts found in memory.", sum(c.hits for c in counters)),
            ("expert_misses", "Experts read from disk.", sum(c.misses for c in counters)),
            ("expert_read_bytes", "Bytes of them.", sum(c.bytes_read for c in counters)),
        ]
        for name, text, value in gauges:
            yield GaugeMetricFamily(f"moepack_{name}", text, value=value)
        for name, text, value in counts:
            yield CounterMetricFamily(f"moepack_{name}", text, value=value)
