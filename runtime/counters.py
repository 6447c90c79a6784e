"""What the engine counts: one set of counters per layer, prefill and decode apart."""

from dataclasses import asdict, dataclass, fields

__all__ = ["Counters", "LayerCounters", "add", "since"]


@dataclass(slots=True)
class Counters:
    """Hits and misses are distinct experts per call. `wait_s`: time spent waiting for the router.

    `read_s` is wall time in which the call waited for reads; `bytes_read` leaves padding out.
    `own_s` is the time of bookkeeping in calls of one token that hit every expert.
    """

    calls: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    bytes_read: int = 0
    read_s: float = 0.0
    wait_s: float = 0.0
    own_s: float = 0.0

    @property
    def hit_rate(self) -> float | None:
        """Share of hits; None before the first call."""
        total = self.hits + self.misses
        return self.hits / total if total else None

    def as_map(self) -> dict[str, float | int | None]:
        """For JSON."""
        return {**asdict(self), "hit_rate": self.hit_rate}


@dataclass(slots=True)
class LayerCounters:
    """The counters of one layer."""

    prefill: Counters
    decode: Counters


def add(counters: list[Counters]) -> Counters:
    """The sum."""
    return Counters(*(sum(getattr(c, f.name) for c in counters) for f in fields(Counters)))


def since(now: Counters, before: Counters) -> Counters:
    """What was counted between two moments."""
    return Counters(*(getattr(now, f.name) - getattr(before, f.name) for f in fields(Counters)))
