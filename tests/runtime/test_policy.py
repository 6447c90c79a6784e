"""Scores and victims: the engine's decayed frequency, and the policies it is compared with."""

from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moepack.runtime.policy import (
    HALF_LIFE_TOKENS,
    POLICIES,
    RESCALE_ABOVE,
    DecayedFrequency,
    Frequency,
    S3Fifo,
    WTinyLfu,
)
from moepack.runtime.simulate import simulate_layer
from moepack.runtime.slots import SlotCache
from moepack.runtime.trace import Call

N = 6
CALLS = st.lists(
    st.lists(st.integers(0, N - 1), min_size=1, max_size=4, unique=True), min_size=1, max_size=60
)


def ranking(scores: list[float]) -> list[int]:
    """Experts by falling score."""
    return sorted(range(len(scores)), key=scores.__getitem__, reverse=True)


def test_score_halves_after_twelve_tokens() -> None:
    """One use then counts half of a use now."""
    policy = DecayedFrequency(3)
    policy.use([0])
    for _ in range(HALF_LIFE_TOKENS - 1):
        policy.use([2])
    policy.use([1])
    assert policy.scores[0] == pytest.approx(policy.scores[1] / 2)


@pytest.mark.parametrize("half_life", [1, 5, 100])
def test_half_life_is_an_option(half_life: int) -> None:
    """Experiments replay traces with others."""
    policy = DecayedFrequency(2, half_life)
    policy.use([0])
    for _ in range(half_life - 1):
        policy.use([])
    policy.use([1])
    assert policy.scores[0] == pytest.approx(policy.scores[1] / 2)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(CALLS)
def test_scores_are_sums_of_faded_uses(calls: list[list[int]]) -> None:
    """The growing weight is the fading sum, up to one factor for all."""
    policy = DecayedFrequency(N)
    for experts in calls:
        policy.use(experts)
    faded = [
        sum(
            2.0 ** (-(len(calls) - 1 - t) / HALF_LIFE_TOKENS)
            for t, experts in enumerate(calls)
            if expert in experts
        )
        for expert in range(N)
    ]
    newest = 2.0 ** (len(calls) / HALF_LIFE_TOKENS)
    assert policy.scores == pytest.approx([newest * score for score in faded])


@settings(max_examples=100, deadline=None, derandomize=True)
@given(CALLS)
def test_use_many_of_one_token_is_use(calls: list[list[int]]) -> None:
    """Decoding and a prompt of one token are the same thing."""
    one, many = DecayedFrequency(N), DecayedFrequency(N)
    for experts in calls:
        one.use(experts)
        many.use_many(dict.fromkeys(experts, 1), 1)
    assert many.scores == pytest.approx(one.scores)


def test_use_many_of_an_expert_that_every_token_picked_is_that_many_uses() -> None:
    """Up to a half-life."""
    one, many = DecayedFrequency(2), DecayedFrequency(2)
    for _ in range(7):
        one.use([0])
    many.use_many({0: 7}, 7)
    one.use([1])
    many.use([1])
    assert many.scores == pytest.approx(one.scores)


@pytest.mark.parametrize("n_tokens", [12, 13, 200, 100_000])
def test_long_call_fades_older_scores_by_one_half_life(n_tokens: int) -> None:
    """A prompt does not wipe out what decoding had learned."""
    policy = DecayedFrequency(3)
    policy.use([0])
    policy.use_many({1: 1}, n_tokens)
    policy.use([2])
    faded = 2.0 ** (-(HALF_LIFE_TOKENS + 1) / HALF_LIFE_TOKENS)
    assert policy.scores[0] / policy.scores[2] == pytest.approx(faded)


def test_calls_score_shares_not_counts() -> None:
    """Ten of a hundred tokens weigh like one of ten."""
    short, long = DecayedFrequency(2), DecayedFrequency(2)
    short.use_many({0: 2, 1: 4}, 20)
    long.use_many({0: 20, 1: 40}, 200)
    assert long.scores == pytest.approx(short.scores)


def test_rescale_keeps_order_and_goes_on() -> None:
    """Weights grow beyond what a float holds; scores are brought down together."""
    policy = DecayedFrequency(N)
    n_tokens = 0
    largest = 0.0
    while n_tokens < 20_000:
        policy.use([n_tokens % N, (n_tokens // 7) % N])
        n_tokens += 1
        before, largest = largest, max(policy.scores)
        if largest < before:
            break
    else:
        pytest.fail("never rescaled")
    order = ranking(policy.scores)

    plain = DecayedFrequency(N)  # the last tokens alone, far enough back for equal order
    for t in range(n_tokens - 1_000, n_tokens):
        plain.use([t % N, (t // 7) % N])
    assert ranking(plain.scores) == order
    assert max(policy.scores) < RESCALE_ABOVE


def test_rescale_keeps_the_ratios() -> None:
    """An expert not used around the rescale keeps its place."""
    policy = DecayedFrequency(3)
    while max(policy.scores) < RESCALE_ABOVE:
        policy.use([0])
    policy.use([1])
    first, second = policy.scores[:2]
    policy.use([])
    policy.use([])
    assert policy.scores[0] / policy.scores[1] == pytest.approx(first / second)


def run(policy: str, calls: Sequence[Sequence[int]], n_slots: int) -> tuple[int, SlotCache]:
    """(misses, the cache afterwards) of calls of one token each."""
    cache = SlotCache(N, n_slots, POLICIES[policy](N, n_slots, calls))
    made = [Call(tuple(experts), (1,) * len(experts), 1, True) for experts in calls]
    return simulate_layer(made, cache).decode.misses, cache


def fewest_misses(calls: Sequence[Sequence[int]], n_slots: int) -> int:
    """By trying every eviction at every call."""

    @cache
    def at(number: int, residents: frozenset[int]) -> int:
        if number == len(calls):
            return 0
        needed = frozenset(calls[number])
        after = {residents | needed}
        while any(len(kept) > n_slots for kept in after):
            after = {kept - {e} for kept in after for e in kept - needed}
        return len(needed - residents) + min(at(number + 1, kept) for kept in after)

    return at(0, frozenset())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(CALLS, st.integers(4, N))
def test_belady_misses_the_fewest_that_can_be(calls: list[list[int]], n_slots: int) -> None:
    """And so no policy fewer."""
    belady, _ = run("belady", calls, n_slots)
    assert belady == fewest_misses(calls, n_slots)
    assert belady <= min(run(policy, calls, n_slots)[0] for policy in POLICIES)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(CALLS, st.integers(4, N))
def test_lru_is_a_list_in_order_of_use(calls: list[list[int]], n_slots: int) -> None:
    """Residents are the experts used last; in one call, those that came by it are the later."""
    misses = 0
    order: list[int] = []
    for experts in calls:
        new = [e for e in experts if e not in order]
        misses += len(new)
        others = [e for e in order if e not in experts]
        others = others[max(0, len(others) + len(experts) - n_slots) :]
        order = [*others, *(e for e in experts if e in order), *new]
    found, cache = run("lru", calls, n_slots)
    assert found == misses
    assert set(cache.slot_of) == set(order)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(CALLS, st.integers(4, N))
def test_lfu_keeps_what_was_used_most(calls: list[list[int]], n_slots: int) -> None:
    """Over the whole past; ties go to the one used last, as of LRU."""
    misses = 0
    kept: list[int] = []
    counts = [0] * N
    for experts in calls:
        for expert in experts:
            counts[expert] += 1
        new = [e for e in experts if e not in kept]
        misses += len(new)
        others = [e for e in kept if e not in experts]
        n_kept = min(len(others), n_slots - len(experts))
        best = sorted(others, key=lambda e: (counts[e], others.index(e)))[len(others) - n_kept :]
        kept = [e for e in others if e in best] + [e for e in experts if e in kept] + new
    assert run("lfu", calls, n_slots)[0] == misses


def s3_fifo_misses(requests: Sequence[int], n_slots: int) -> int:
    """As the paper writes it, one request at a time."""
    small: list[int] = []
    main: list[int] = []
    ghosts: list[int] = []
    uses: dict[int, int] = {}
    n_small = max(1, n_slots // 10)
    misses = 0

    def evict() -> None:
        while len(small) >= n_small or not main:
            oldest = small.pop(0)
            if uses[oldest] <= 1:
                ghosts.append(oldest)
                del ghosts[: -max(1, n_slots - n_small)]
                return
            main.append(oldest)
            uses[oldest] = 0
        while uses[main[0]] > 0:
            uses[main[0]] -= 1
            main.append(main.pop(0))
        main.pop(0)

    for expert in requests:
        if expert in small or expert in main:
            uses[expert] = min(uses[expert] + 1, 3)
            continue
        misses += 1
        if len(small) + len(main) == n_slots:
            evict()
        if expert in ghosts:
            ghosts.remove(expert)
            main.append(expert)
        else:
            small.append(expert)
        uses[expert] = 0
    return misses


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, N - 1), min_size=1, max_size=80), st.integers(1, N))
def test_s3_fifo_is_the_papers(requests: list[int], n_slots: int) -> None:
    """One expert a call, so that nothing is protected."""
    found, _ = run("s3-fifo", [[e] for e in requests], n_slots)
    assert found == s3_fifo_misses(requests, n_slots)


@pytest.mark.parametrize("policy", ["s3-fifo", "w-tinylfu", "lfu", "decayed"])
def test_a_scan_does_not_evict_what_is_used_often(policy: str) -> None:
    """LRU loses both."""
    often = [[0], [1]] * 4
    _, cache = run(policy, [*often, [2], [3], [4], [5]], 3)
    assert {0, 1} < set(cache.slot_of)
    _, cache = run("lru", [*often, [2], [3], [4], [5]], 3)
    assert set(cache.slot_of) == {3, 4, 5}


def test_w_tinylfu_lets_a_newcomer_stay_that_was_used_more_often() -> None:
    """Than the one it replaces."""
    _, cache = run("w-tinylfu", [[0], [1], [2], [3], [3], [3], [4]], 3)
    assert 3 in cache.slot_of
    _, cache = run("w-tinylfu", [[0], [1], [2], [3], [4]], 3)
    assert 3 not in cache.slot_of


def test_w_tinylfu_forgets() -> None:
    """Uses are halved, so that an expert of long ago can be replaced."""
    policy = WTinyLfu(N, 2)
    policy.use([0] * 19)
    assert policy.scores[0] == 15
    policy.use([1])
    assert list(policy.scores[:2]) == [7, 0]
    policy.use([0] * 9)
    assert policy.scores[0] == 15
    policy.use([0])
    assert policy.scores[0] == 7


def test_lfu_counts_every_pair_of_a_call() -> None:
    policy = Frequency(3)
    policy.use_many({0: 3, 2: 1}, 3)
    policy.use([2])
    assert policy.scores == [3, 0, 2]


WAVE_CALLS = st.lists(
    st.tuples(
        st.lists(st.integers(0, N - 1), min_size=1, max_size=N, unique=True),
        st.integers(1, 3),
        st.booleans(),
    ),
    min_size=1,
    max_size=40,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(WAVE_CALLS, st.integers(1, N), st.sampled_from(sorted(POLICIES)))
def test_every_policy_knows_who_is_resident(
    made: list[tuple[list[int], int, bool]], n_slots: int, policy: str
) -> None:
    """In calls of many tokens and in waves as well; scores are never negative."""
    calls = [Call(tuple(e), (1,) * len(e), n, is_decode) for e, n, is_decode in made]
    cache = SlotCache(N, n_slots, POLICIES[policy](N, n_slots, [c.experts for c in calls]))
    for call in calls:
        before = set(cache.slot_of)
        counters = simulate_layer([call], cache)
        both = (counters.prefill, counters.decode)
        assert sum(c.hits for c in both) == len(before & set(call.experts))
        assert sum(c.misses for c in both) == len(set(call.experts) - before)
        if len(call.experts) <= n_slots:
            assert set(call.experts) <= set(cache.slot_of)
        cache.check_integrity()
        assert min(cache.policy.scores) >= 0
        if isinstance(cache.policy, S3Fifo):
            queued = [*cache.policy._new, *cache.policy._main]
        elif isinstance(cache.policy, WTinyLfu):
            queued = [*cache.policy._window, *cache.policy._trial, *cache.policy._safe]
        else:
            continue
        assert sorted(queued) == sorted(cache.slot_of)
