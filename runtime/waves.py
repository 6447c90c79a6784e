"""A call whose experts cannot be in slots together: in which waves to run it. Pure planning."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Wave", "n_passing", "plan_waves"]


@dataclass(frozen=True, slots=True)
class Wave:
    """Experts that run together: `slots[i]` holds `experts[i]`, read for this wave if `is_read`."""

    experts: tuple[int, ...]
    slots: tuple[int, ...]
    is_read: bool


def n_passing(n_slots: int) -> int:
    """How many of a layer's slots waves read through: what is in the others survives a call."""
    return max(min(2, n_slots), n_slots // 4)


def plan_waves(
    slot_of: Mapping[int, int], n_slots: int, needed: Sequence[int], scores: Sequence[float]
) -> list[Wave]:
    """Waves that run every expert of `needed` once and read each absent one once.

    First what is resident, without a read. Then the absent ones, lowest score first, through the
    slots whose experts score lowest (at least a quarter of all, so that the best of decoding
    survive), in two halves taken in turn: one is read while the other computes. What is read last
    stays: after the call the slots hold the highest scores among residents and needed.
    """
    wanted = set(needed)
    hits = [e for e in slot_of if e in wanted]
    misses = sorted((e for e in needed if e not in slot_of), key=scores.__getitem__)
    waves = []
    if hits:
        waves.append(Wave(tuple(hits), tuple(slot_of[e] for e in hits), False))

    best = sorted({*needed, *slot_of}, key=scores.__getitem__, reverse=True)[:n_slots]
    staying = [e for e in best if e in slot_of][: n_slots - n_passing(n_slots)]
    held = {slot_of[e] for e in staying}
    worth = {slot: scores[expert] for expert, slot in slot_of.items()}
    passing = sorted(
        (slot for slot in range(n_slots) if slot not in held), key=lambda s: worth.get(s, -1.0)
    )  # the free ones first, then those whose experts are missed least
    middle = (len(passing) + 1) // 2
    halves = [passing[:middle], passing[middle:] or passing]

    # From the end backwards, so that the waves whose experts stay are full.
    reading: list[Wave] = []
    while misses:
        slots = halves[len(reading) % 2]
        taken = misses[-len(slots) :]
        del misses[-len(slots) :]
        reading.append(Wave(tuple(taken), tuple(slots[: len(taken)]), True))
    return waves + reading[::-1]
