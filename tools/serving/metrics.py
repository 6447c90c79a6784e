"""What /metrics shows, read from the worker when it is asked for."""

from collections.abc import Iterator
from dataclasses import asdict

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moepack.tools.serving.loaded import Counts, Loaded
from moepack.tools.serving.worker import Worker

__all__ = ["Metrics"]

# By field of Counts.
TEXTS = {
    "prompt_tokens": "Tokens of prompts.",
    "cached_prompt_tokens": "Of those, found in a kept KV cache.",
    "generated_tokens": "Tokens of answers.",
    "expert_hits": "Experts found in memory.",
    "expert_misses": "Experts read from disk.",
    "expert_read_bytes": "Bytes of them.",
}


class Metrics:
    """A registry of this server's own."""

    def __init__(self, worker: Worker) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self.requests = Counter(
            "moepack_requests", "HTTP requests.", ("path", "status"), registry=self._registry
        )
        self._registry.register(_WorkerCollector(worker))

    def page(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)


class _WorkerCollector(Collector):
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def collect(self) -> Iterator[Metric]:
        """What `run --json` counts, of all models since the start."""
        worker = self._worker
        gauges, counts = worker.view(_figures)
        gauges += [
            ("requests_running", "Requests being answered.", worker.n_running),
            ("requests_waiting", "Requests in the queue.", worker.n_waiting),
        ]
        for name, text, value in gauges:
            yield GaugeMetricFamily(f"moepack_{name}", text, value=value)
        for name, value in asdict(counts).items():
            yield CounterMetricFamily(f"moepack_{name}", TEXTS[name], value=value)


def _figures(loaded: Loaded | None, counts: Counts) -> tuple[list[tuple[str, str, int]], Counts]:
    gauges = [("ready", "Whether a model is loaded.", int(loaded is not None))]
    if loaded is not None:
        plan = loaded.engine.plan
        slots = sum(plan.slots_per_layer)
        gauges += [
            ("expert_slots", "Experts that fit in memory, of all layers.", slots),
            ("planned_memory_bytes", "Memory planned for all uses.", plan.total),
        ]
    return gauges, counts
