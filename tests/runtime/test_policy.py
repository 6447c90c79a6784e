"""Scores: frequency of use that halves every twelve tokens."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moepack.runtime.policy import HALF_LIFE_TOKENS, RESCALE_ABOVE, DecayedFrequency

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
