"""Plans of calls that need more experts than there are slots."""

from dataclasses import dataclass
from itertools import pairwise
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from moepack.runtime.waves import Wave, plan_waves

PROPERTY = settings(max_examples=300, deadline=None, derandomize=True)


@dataclass(frozen=True, slots=True)
class Call:
    """What plan_waves is asked."""

    slot_of: dict[int, int]
    n_slots: int
    needed: list[int]
    scores: list[float]

    def plan(self) -> list[Wave]:
        """Its answer."""
        return plan_waves(self.slot_of, self.n_slots, self.needed, self.scores)

    def hits(self) -> set[int]:
        """Needed experts that are resident."""
        return set(self.needed) & set(self.slot_of)

    def final(self) -> dict[int, int]:
        """Expert by slot after the call."""
        held = {slot: expert for expert, slot in self.slot_of.items()}
        for wave in self.plan():
            if wave.is_read:
                held.update(zip(wave.slots, wave.experts, strict=True))
        return held


@st.composite
def calls(draw: st.DrawFn) -> Call:
    """Any state of a layer, and a call that needs more than its slots; often only just more."""
    n_experts = draw(st.integers(2, 40))
    n_slots = draw(st.integers(1, n_experts - 1))
    n_residents = n_slots - draw(st.integers(0, min(n_slots, 3)) | st.integers(0, n_slots))
    most = n_experts - n_slots
    n_needed = n_slots + draw(st.integers(1, min(most, 3)) | st.integers(1, most))
    shuffle = Random(draw(st.integers(0, 2**32)))
    residents = shuffle.sample(range(n_experts), n_residents)
    slots = shuffle.sample(range(n_slots), n_residents)
    if draw(st.booleans()):  # whoever is resident is needed
        others = [e for e in range(n_experts) if e not in residents]
        needed = residents + shuffle.sample(others, n_needed - n_residents)
    else:
        needed = shuffle.sample(range(n_experts), n_needed)
    n_levels = draw(st.sampled_from([1, 3, 10**6]))
    scores = [float(shuffle.randrange(n_levels)) for _ in range(n_experts)]
    return Call(dict(zip(residents, slots, strict=True)), n_slots, sorted(needed), scores)


@PROPERTY
@given(calls())
def test_every_needed_expert_runs_exactly_once(call: Call) -> None:
    """And no other does."""
    assert sorted(e for wave in call.plan() for e in wave.experts) == call.needed


@PROPERTY
@given(calls())
def test_absent_experts_are_read_once_and_residents_never(call: Call) -> None:
    """A wave is all read or all resident."""
    read = [e for wave in call.plan() if wave.is_read for e in wave.experts]
    ready = [e for wave in call.plan() if not wave.is_read for e in wave.experts]
    assert sorted(read) == sorted(set(call.needed) - set(call.slot_of))
    assert set(ready) == call.hits()


@PROPERTY
@given(calls())
def test_residents_run_first_and_in_their_slots(call: Call) -> None:
    """Before anyone may overwrite them."""
    waves = call.plan()
    assert all(wave.is_read for wave in waves[1:])
    if not waves[0].is_read:
        assert [call.slot_of[e] for e in waves[0].experts] == list(waves[0].slots)


@PROPERTY
@given(calls())
def test_waves_fit_the_slots_and_slots_are_distinct(call: Call) -> None:
    """One slot an expert, numbers in range, no empty wave."""
    for wave in call.plan():
        assert 1 <= len(wave.experts) == len(wave.slots) <= call.n_slots
        assert len(set(wave.slots)) == len(wave.slots)
        assert set(wave.slots) <= set(range(call.n_slots))


@PROPERTY
@given(calls())
def test_consecutive_reads_use_disjoint_slots(call: Call) -> None:
    """One is read while the other computes, given two slots."""
    for one, two in pairwise(call.plan()):
        if call.n_slots >= 2 and one.is_read and two.is_read:
            assert set(one.slots).isdisjoint(two.slots)


@PROPERTY
@given(calls())
def test_best_residents_keep_their_slots(call: Call) -> None:
    """Three quarters of the slots at most, among the best of residents and needed."""
    everyone = sorted((call.scores[e] for e in {*call.needed, *call.slot_of}), reverse=True)
    bar = everyone[call.n_slots - 1]  # who scores above it is among the best for certain
    n_passing = max(min(2, call.n_slots), call.n_slots // 4)
    best = sorted((e for e in call.slot_of if call.scores[e] > bar), key=lambda e: -call.scores[e])
    final = call.final()
    for rank, expert in enumerate(best[: call.n_slots - n_passing]):
        ties = sum(call.scores[e] == call.scores[expert] for e in best)
        if rank + ties <= call.n_slots - n_passing:
            assert final[call.slot_of[expert]] == expert


@PROPERTY
@given(calls())
def test_evicted_residents_score_no_higher_than_kept_ones(call: Call) -> None:
    """Reads go through the slots whose experts score lowest; free slots come first."""
    final = call.final()
    kept = [e for e, slot in call.slot_of.items() if final[slot] == e]
    evicted = [e for e, slot in call.slot_of.items() if final[slot] != e]
    if kept and evicted:
        assert max(call.scores[e] for e in evicted) <= min(call.scores[e] for e in kept)
    assert not evicted or len(final) == call.n_slots


@PROPERTY
@given(calls())
def test_what_is_read_last_stays_and_scores_highest(call: Call) -> None:
    """Of the absent ones, those with the highest scores are resident afterwards."""
    final = set(call.final().values())
    misses = [e for e in call.needed if e not in call.slot_of]
    stayed = [call.scores[e] for e in misses if e in final]
    gone = [call.scores[e] for e in misses if e not in final]
    assert stayed
    if gone:
        assert min(stayed) >= max(gone)


@PROPERTY
@given(calls())
def test_slots_hold_the_highest_scores_afterwards(call: Call) -> None:
    """Where residents leave room for a quarter of the slots, as many as pass through."""
    best = sorted((call.scores[e] for e in {*call.needed, *call.slot_of}), reverse=True)
    best = best[: call.n_slots]
    n_passing = max(min(2, call.n_slots), call.n_slots // 4)
    n_good_residents = sum(call.scores[e] >= best[-1] for e in call.slot_of)
    if n_good_residents <= call.n_slots - n_passing:
        final = sorted((call.scores[e] for e in call.final().values()), reverse=True)
        assert final == best


@PROPERTY
@given(calls())
def test_planning_changes_nothing_and_is_deterministic(call: Call) -> None:
    """Pure."""
    before = dict(call.slot_of), list(call.needed), list(call.scores)
    assert call.plan() == call.plan()
    assert (call.slot_of, call.needed, call.scores) == before


def test_one_slot_runs_one_expert_at_a_time() -> None:
    """The smallest bank there is."""
    waves = plan_waves({3: 0}, 1, [1, 2, 3], [0.0, 1.0, 2.0, 0.0])
    assert waves == [
        Wave((3,), (0,), False),
        Wave((1,), (0,), True),
        Wave((2,), (0,), True),
    ]
