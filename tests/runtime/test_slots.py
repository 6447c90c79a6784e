"""Slot bookkeeping against a plain model of it, integrity checked after each step."""

import math
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moepack.runtime.slots import SlotCache

N_EXPERTS = 9


class SlotMachine(RuleBasedStateMachine):
    """A SlotCache beside a list of resident experts in order of last use, and a dict of slots."""

    @initialize(n_slots=st.integers(1, N_EXPERTS))
    def start(self, n_slots: int) -> None:
        """An empty cache."""
        self.cache = SlotCache(N_EXPERTS, n_slots)
        self.pinned: set[int] = set()
        self.slots: dict[int, int] = {}
        self.by_recency: list[int] = []
        self.reserved: dict[int, int] = {}
        self.n_evictions = 0

    @rule(experts=st.sets(st.integers(0, N_EXPERTS - 1), max_size=4))
    def use(self, experts: set[int]) -> None:
        """Score and mark experts, resident or not."""
        self.cache.policy.use(experts)
        self.cache.use(sorted(experts))
        for expert in sorted(experts):
            if expert in self.by_recency:
                self.by_recency.remove(expert)
                self.by_recency.append(expert)

    @rule(experts=st.sets(st.integers(0, N_EXPERTS - 1), max_size=3))
    def pin(self, experts: set[int]) -> None:
        """Pin experts instead of those before; to waves they are worth more than any other."""
        self.pinned = experts
        self.cache.pinned = frozenset(experts)
        scores, plain = self.cache.scores, self.cache.policy.scores
        assert [e for e in range(N_EXPERTS) if scores[e] == math.inf] == sorted(experts)
        assert all(scores[e] == plain[e] for e in range(N_EXPERTS) if e not in experts)

    @rule(experts=st.sets(st.integers(0, N_EXPERTS - 1)))
    def can_hold(self, experts: set[int]) -> None:
        """Pinned experts take slots from others."""
        fits = len(experts | self.pinned) <= self.cache.n_slots
        assert self.cache.can_hold(sorted(experts)) == fits

    @precondition(lambda self: not self.reserved)
    @rule(data=st.data())
    def reserve(self, data: st.DataObject) -> None:
        """Take slots for absent experts; victims are the lowest in score, then the oldest."""
        absent = sorted(set(range(N_EXPERTS)) - set(self.slots))
        if not absent:
            return
        wanted = data.draw(st.lists(st.sampled_from(absent), min_size=1, unique=True))
        protected = data.draw(st.sets(st.integers(0, N_EXPERTS - 1)))
        n_free = self.cache.n_slots - len(self.slots)
        scores = self.cache.policy.scores
        candidates = sorted(
            (e for e in self.by_recency if e not in protected | self.pinned),
            key=lambda e: scores[e],
        )
        n_victims = max(0, len(wanted) - n_free)
        if n_victims > len(candidates):
            before = dict(self.cache.slot_of)
            with pytest.raises(ValueError, match="slots wanted"):
                self.cache.reserve(wanted, protected)
            assert self.cache.slot_of == before
            return
        slots = self.cache.reserve(wanted, protected)
        for victim in candidates[:n_victims]:
            del self.slots[victim]
            self.by_recency.remove(victim)
        self.n_evictions += n_victims
        assert len(slots) == len(wanted)
        assert set(slots).isdisjoint(self.slots.values())
        self.reserved = dict(zip(wanted, slots, strict=True))

    @precondition(lambda self: not self.reserved)
    @rule(data=st.data())
    def reserve_slots(self, data: st.DataObject) -> None:
        """Take given slots, whoever is in them."""
        absent = sorted(set(range(N_EXPERTS)) - set(self.slots))
        if not absent:
            return
        every = list(range(self.cache.n_slots))
        slots = data.draw(st.lists(st.sampled_from(every), min_size=1, unique=True))
        experts = data.draw(
            st.permutations(absent).map(lambda order: order[: len(slots)]), label="experts"
        )
        slots = slots[: len(experts)]
        self.cache.reserve_slots(experts, slots)
        for victim in [e for e, slot in self.slots.items() if slot in slots]:
            del self.slots[victim]
            self.by_recency.remove(victim)
            self.n_evictions += 1
        self.reserved = dict(zip(experts, slots, strict=True))

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        """Some reads are done."""
        done = data.draw(st.lists(st.sampled_from(sorted(self.reserved)), unique=True))
        self.cache.fill(done)
        for expert in done:
            self.slots[expert] = self.reserved.pop(expert)
            self.by_recency.append(expert)

    @precondition(lambda self: self.reserved)
    @rule()
    def cancel(self) -> None:
        """The reads failed: their slots are free, nobody else is touched."""
        self.cache.cancel()
        self.reserved = {}

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        """Free one slot."""
        expert = data.draw(st.sampled_from(sorted(self.slots)))
        self.cache.evict(expert)
        del self.slots[expert]
        self.by_recency.remove(expert)
        self.n_evictions += 1

    @invariant()
    def agrees(self) -> None:
        """The same residents in the same slots, in the same order of use."""
        if not hasattr(self, "cache"):
            return
        self.cache.check_integrity()
        assert self.cache.slot_of == self.slots
        assert list(self.cache.slot_of) == self.by_recency
        assert self.cache.n_evictions == self.n_evictions


TestSlotMachine: Any = SlotMachine.TestCase
TestSlotMachine.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True
)


def filled(n_slots: int, experts: list[int]) -> SlotCache:
    """A cache with these residents."""
    cache = SlotCache(N_EXPERTS, n_slots)
    cache.reserve(experts, ())
    cache.fill(experts)
    return cache


def test_victim_is_the_lowest_score() -> None:
    """Not the oldest."""
    cache = filled(3, [0, 1, 2])
    cache.policy.use([0])
    cache.policy.use([2])
    cache.reserve([5], ())
    assert set(cache.slot_of) == {0, 2}


def test_tie_goes_to_the_least_recently_used() -> None:
    """Equal scores: the one longest out of use."""
    cache = filled(3, [0, 1, 2])
    cache.use([0])
    cache.reserve([5], ())
    assert set(cache.slot_of) == {0, 2}


def test_several_victims_are_the_lowest_ones() -> None:
    """In one call as in many."""
    cache = filled(4, [0, 1, 2, 3])
    for expert in (3, 1, 0, 2):
        cache.policy.use([expert])
    cache.reserve([5, 6], ())
    assert set(cache.slot_of) == {0, 2}


def test_protected_experts_are_never_evicted() -> None:
    """Though they score lowest."""
    cache = filled(2, [0, 1])
    cache.policy.use([1])
    cache.reserve([5], {0})
    assert set(cache.slot_of) == {0}


def test_reserved_expert_is_not_findable_until_filled() -> None:
    """Its bytes are still on their way."""
    cache = SlotCache(N_EXPERTS, 2)
    (slot,) = cache.reserve([4], ())
    assert 4 not in cache.slot_of
    cache.fill([4])
    assert cache.slot_of == {4: slot}


def test_score_outlives_eviction() -> None:
    """An expert that comes back has its past."""
    cache = filled(1, [0])
    for _ in range(5):
        cache.policy.use([0])
    score = cache.policy.scores[0]
    cache.reserve([1], ())
    assert cache.policy.scores[0] == score


@pytest.mark.parametrize(
    "damage",
    [
        lambda cache: cache.slot_of.update({7: 0}),
        lambda cache: cache.slot_of.pop(0),
        lambda cache: cache.slot_of.update({99: cache.slot_of.pop(0)}),
        lambda cache: cache._free.append(0),
    ],
)
def test_check_integrity_finds_damage(damage: Any) -> None:
    """The check can fail."""
    cache = filled(3, [0, 1])
    cache.check_integrity()
    damage(cache)
    with pytest.raises(AssertionError):
        cache.check_integrity()
