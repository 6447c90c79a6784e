"""Which expert is in which slot of one layer. Pure bookkeeping: no bytes, no MLX, one thread."""

import math
from collections.abc import Collection, Iterable, Sequence

from moepack.runtime.policy import DecayedFrequency, Policy

__all__ = ["SlotCache"]


class SlotCache:
    """`n_slots` places for `n_experts` experts.

    A slot is free, reserved (its bytes are being read) or holds an expert. `reserve` evicts,
    `fill` makes the expert findable once its bytes are there: a failed read leaves a free slot.
    `policy` chooses victims and scores experts, by decayed frequency unless another is given;
    what is `pinned` is no victim.
    """

    def __init__(self, n_experts: int, n_slots: int, policy: Policy | None = None) -> None:
        self.n_experts = n_experts
        self.n_slots = n_slots
        self.policy = DecayedFrequency(n_experts) if policy is None else policy
        self.slot_of: dict[int, int] = {}  # in order of last use, oldest first
        self.n_evictions = 0
        self.pinned: frozenset[int] = frozenset()
        self._free = list(range(n_slots - 1, -1, -1))
        self._reserved: dict[int, int] = {}

    @property
    def scores(self) -> Sequence[float]:
        """The policy's, pinned experts above all."""
        pinned = self.pinned
        return [math.inf if e in pinned else s for e, s in enumerate(self.policy.scores)]

    def can_hold(self, experts: Iterable[int]) -> bool:
        """Whether `experts` and what is pinned can be resident together."""
        return len(self.pinned.union(experts)) <= self.n_slots

    def use(self, experts: Iterable[int]) -> list[int]:
        """Mark residents among `experts` as the most recently used; returns their slots."""
        slot_of = self.slot_of
        slots = []
        for expert in experts:
            if (slot := slot_of.pop(expert, None)) is not None:
                slot_of[expert] = slot
                slots.append(slot)
        return slots

    def reserve(self, experts: Sequence[int], protected: Collection[int]) -> list[int]:
        """A slot for each of `experts`, none of them resident; evicts, never from `protected`.

        Raises ValueError when there are not enough slots that may be taken.
        """
        short = len(experts) - len(self._free)
        if short > 0:
            candidates = [e for e in self.slot_of if e not in protected and e not in self.pinned]
            if short > len(candidates):
                raise ValueError(f"{len(experts)} slots wanted, {len(self._free)} can be had")
            for victim in self.policy.victims(candidates, short):
                self.evict(victim)
        slots = [self._free.pop() for _ in experts]
        self._reserved.update(zip(experts, slots, strict=True))
        return slots

    def reserve_slots(self, experts: Sequence[int], slots: Sequence[int]) -> None:
        """Reserve given slots for given absent experts, evicting whoever is in them."""
        taken = set(slots)
        for victim in [e for e, slot in self.slot_of.items() if slot in taken]:
            self.evict(victim)
        for expert, slot in zip(experts, slots, strict=True):
            self._free.remove(slot)
            self._reserved[expert] = slot

    def evict(self, expert: int) -> None:
        """Free the slot of a resident expert."""
        self._free.append(self.slot_of.pop(expert))
        self.n_evictions += 1
        self.policy.evicted(expert)

    def fill(self, experts: Iterable[int]) -> None:
        """The bytes of reserved experts are there: they are resident now."""
        for expert in experts:
            self.slot_of[expert] = self._reserved.pop(expert)
            self.policy.filled(expert)

    def cancel(self) -> None:
        """Reads failed: free every reserved slot."""
        self._free.extend(self._reserved.values())
        self._reserved.clear()

    def check_integrity(self) -> None:
        """Raise AssertionError unless every slot is in exactly one state."""
        slots = [*self.slot_of.values(), *self._reserved.values(), *self._free]
        if sorted(slots) != list(range(self.n_slots)):
            raise AssertionError(f"slots {sorted(slots)} are not 0..{self.n_slots - 1}, once each")
        experts = [*self.slot_of, *self._reserved]
        if len(set(experts)) != len(experts) or not all(0 <= e < self.n_experts for e in experts):
            raise AssertionError(f"experts {experts} are not distinct numbers of this layer")
