"""Warm start: another run's favourites are in memory at the start, and the tokens are the same."""

from pathlib import Path

import mlx.core as mx
import pytest
from tiny_models import random_tokens, run_prompt

from moepack.formats.pack import Pack
from moepack.runtime.loading import Engine, load_engine
from moepack.runtime.policy import DecayedFrequency
from moepack.runtime.warm import profile_path, save_profile, warm_up

TOKENS = random_tokens(30)


def streamed(pack: Path) -> Engine:
    """A quarter of the experts a layer and one more."""
    nbytes = sum(5 * m.record_nbytes for m in Pack.open(pack).manifest.modules)
    return load_engine(pack, expert_cache=nbytes)


def residents(engine: Engine) -> list[set[int]]:
    """The experts in memory, by layer."""
    return [set(layer._slots.slot_of) for layer in engine.layers]


def test_a_warm_engine_begins_where_the_last_ended_and_says_the_same(
    q4_pack: Path, tmp_path: Path
) -> None:
    """Its best experts are resident before the first token."""
    cold = streamed(q4_pack)
    wanted = run_prompt(cold.model, TOKENS, n_decoded=12)
    save_profile(cold, tmp_path / "p.json")

    warm = streamed(q4_pack)
    assert warm_up(warm, tmp_path / "p.json") == sum(len(r) for r in residents(warm)) == 10
    for layer, old in zip(warm.layers, cold.layers, strict=True):
        assert isinstance(old.policy, DecayedFrequency)
        scores = old.policy.relative_scores()
        assert set(layer._slots.slot_of) == set(
            sorted(range(16), key=scores.__getitem__, reverse=True)[:5]
        )
        layer._slots.check_integrity()
    prefill, decode = warm.counters()
    assert prefill.misses == decode.misses == 0  # reading ahead is nobody's miss
    assert mx.array_equal(run_prompt(warm.model, TOKENS, n_decoded=12), wanted)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"scores": []}', '{"scores": {"0": [1, 2]}}', '{"scores": {"0": ["x"]}}'],
)
def test_a_profile_that_does_not_fit_is_no_profile(
    text: str, q4_pack: Path, tmp_path: Path
) -> None:
    """Damaged, or of a layer with other experts: the start is a cold one."""
    (tmp_path / "p.json").write_text(text)
    engine = streamed(q4_pack)
    assert warm_up(engine, tmp_path / "p.json") == 0
    assert warm_up(engine, tmp_path / "none.json") == 0
    assert residents(engine) == [set(), set()]


def test_scores_that_are_no_numbers_are_refused(q4_pack: Path, tmp_path: Path) -> None:
    """JSON as Python writes it knows NaN."""
    scores = ", ".join(["NaN"] * 16)
    (tmp_path / "p.json").write_text(f'{{"scores": {{"0": [{scores}]}}}}')
    assert warm_up(streamed(q4_pack), tmp_path / "p.json") == 0


def test_the_profile_lies_in_the_users_cache_by_pack_id(q4_pack: Path) -> None:
    """Never in the pack."""
    path = profile_path(streamed(q4_pack))
    assert path is not None
    assert path.name == f"{Pack.open(q4_pack).manifest.pack_id}.json"
    assert not path.is_relative_to(q4_pack)
