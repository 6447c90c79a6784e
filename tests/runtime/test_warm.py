"""Warm start: another run's favourites are in memory at the start, and the tokens are the same."""

import json
import os
import shutil
from pathlib import Path

import mlx.core as mx
import pytest
from tiny_models import random_tokens, run_prompt, text_of

from moepack.formats.errors import FormatError, SourceError
from moepack.formats.pack import Pack
from moepack.runtime.loading import Engine, load_engine
from moepack.runtime.policy import DecayedFrequency
from moepack.runtime.warm import SHIPPED_NAME, profile_path, save_profile, warm_up
from moepack.tools.cli import main

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
    assert warm_up(warm, tmp_path / "p.json") == []
    assert sum(len(r) for r in residents(warm)) == 10
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


def test_without_a_run_before_the_experts_that_the_pack_ships_are_read(
    q4_pack: Path, tmp_path: Path
) -> None:
    """A profile of the user's own goes before it."""
    shipped = [float(e in (3, 8)) for e in range(16)]
    own = [float(e == 5) for e in range(16)]
    pack = Path(shutil.copytree(q4_pack, tmp_path / "pack"))
    (pack / SHIPPED_NAME).write_text(json.dumps({"scores": {"0": shipped, "1": shipped}}))
    engine = streamed(pack)
    assert warm_up(engine, tmp_path / "p.json") == []
    assert residents(engine) == [{3, 8}, {3, 8}]

    (tmp_path / "p.json").write_text(json.dumps({"scores": {"0": own, "1": own}}))
    engine = streamed(pack)
    assert warm_up(engine, tmp_path / "p.json") == []
    assert residents(engine) == [{5}, {5}]


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
    assert warm_up(engine, tmp_path / "p.json") == []
    assert warm_up(engine, tmp_path / "none.json") == []
    assert residents(engine) == [set(), set()]


@pytest.mark.parametrize("kind", ["a huge integer", "a fifo", "a link to /dev/zero"])
def test_a_profile_that_no_run_wrote_is_no_profile(
    kind: str, q4_pack: Path, tmp_path: Path
) -> None:
    """Whoever made the pack may have put it there; runs go on, and write a good one."""
    pack = Path(shutil.copytree(q4_pack, tmp_path / "pack"))
    shipped = pack / SHIPPED_NAME
    if kind == "a fifo":
        os.mkfifo(shipped)
    elif kind == "a link to /dev/zero":
        shipped.symlink_to("/dev/zero")
    else:
        shipped.write_text(json.dumps({"scores": {"0": [10**400] * 16, "1": [10**400] * 16}}))
    engine = streamed(pack)
    assert warm_up(engine, tmp_path / "p.json") == []
    assert residents(engine) == [set(), set()]
    run_prompt(engine.model, TOKENS)
    save_profile(engine, tmp_path / "p.json")


def test_scores_that_are_no_numbers_are_refused(q4_pack: Path, tmp_path: Path) -> None:
    """JSON as Python writes it knows NaN."""
    scores = ", ".join(["NaN"] * 16)
    (tmp_path / "p.json").write_text(f'{{"scores": {{"0": [{scores}]}}}}')
    engine = streamed(q4_pack)
    assert warm_up(engine, tmp_path / "p.json") == []
    assert residents(engine) == [set(), set()]


def favouring(pack: Path, path: Path, experts: list[int]) -> None:
    """A profile of a run that used these experts of every layer, the last one most."""
    scores = [1.0 + experts.index(e) if e in experts else 0.0 for e in range(16)]
    layers = {str(i): scores for i in range(len(Pack.open(pack).manifest.modules))}
    path.write_text(json.dumps({"scores": layers}))


def damage(pack: Path, layer: int, expert: int) -> None:
    """Flip a bit in a record; again, and it is as it was."""
    module = Pack.open(pack).manifest.modules[layer]
    with (pack / module.file).open("r+b") as file:
        file.seek(expert * module.stride + 7)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def test_a_damaged_favourite_is_told_and_left_on_disk(q4_pack: Path, tmp_path: Path) -> None:
    """The others are read. A router that picks it gets an error; once repaired, the expert."""
    wanted = run_prompt(streamed(q4_pack).model, TOKENS)
    pack = Path(shutil.copytree(q4_pack, tmp_path / "p.moepack"))
    favouring(pack, tmp_path / "p.json", [3, 9, 11, 14, 2])
    damage(pack, 1, 11)
    damage(pack, 1, 3)
    engine = streamed(pack)
    problems = warm_up(engine, tmp_path / "p.json")
    assert [p.partition(": ")[0] for p in problems] == ["layer 1 expert 3", "layer 1 expert 11"]
    assert all(p.endswith(f"; moepack repair {pack} SOURCE") for p in problems)
    assert residents(engine) == [{3, 9, 11, 14, 2}, {9, 14, 2}]
    for layer in engine.layers:
        layer._slots.check_integrity()
    with pytest.raises(FormatError, match=r"layer 1 expert (3|11): .*differs from its digest"):
        run_prompt(engine.model, TOKENS)
    damage(pack, 1, 11)
    damage(pack, 1, 3)
    assert mx.array_equal(run_prompt(engine.model, TOKENS), wanted)


def test_run_warns_of_a_damaged_favourite_and_answers_without_it(
    q4_pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless the answer needs it."""
    pack = Path(shutil.copytree(q4_pack, tmp_path / "p.moepack"))
    arguments = ["run", str(pack), "-p", text_of(TOKENS[:1]), "-m", "1", "--expert-cache", "floor"]
    assert main(arguments) == 0
    answer = capsys.readouterr().out
    path = profile_path(streamed(pack))
    assert path is not None
    scores = json.loads(path.read_text())["scores"]["1"]
    unused = scores.index(0)
    favouring(pack, path, [unused])
    damage(pack, 1, unused)
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert captured.out == answer
    assert f"warning: layer 1 expert {unused}: " in captured.err
    assert f"moepack repair {pack} SOURCE" in captured.err
    damage(pack, 1, used := max(range(16), key=scores.__getitem__))
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"moepack: error: layer 1 expert {used}: " in captured.err


def test_pinned_experts_stay_whatever_is_asked_for(q4_pack: Path, tmp_path: Path) -> None:
    """Decoding, a prompt in waves and a batch evict others; the tokens are the same."""
    wanted = run_prompt(streamed(q4_pack).model, TOKENS, n_decoded=12)
    favouring(q4_pack, tmp_path / "p.json", [7, 2])
    nbytes = sum(6 * m.record_nbytes for m in Pack.open(q4_pack).manifest.modules)
    engine = load_engine(q4_pack, expert_cache=nbytes, pins=2)
    assert warm_up(engine, tmp_path / "p.json") == []
    assert [layer.pinned for layer in engine.layers] == [{2, 7}, {2, 7}]
    assert mx.array_equal(run_prompt(engine.model, TOKENS, n_decoded=12), wanted)
    batch = mx.array([TOKENS[:3], TOKENS[3:6]])
    assert mx.array_equal(engine.model(batch), streamed(q4_pack).model(batch))
    steps = mx.array([[t] for t in TOKENS[:8]])
    assert mx.array_equal(engine.model(steps), streamed(q4_pack).model(steps))
    for layer in engine.layers:
        assert layer.pinned <= set(layer.residents)
        layer._slots.check_integrity()


def test_no_more_are_pinned_than_lets_a_token_pass(q4_pack: Path) -> None:
    """The model picks 4; of experts that are all in memory any number is pinned."""
    nbytes = sum(6 * m.record_nbytes for m in Pack.open(q4_pack).manifest.modules)
    expected = r"--pin 3: with 6 experts of a layer in memory, at most 2 can be pinned"
    with pytest.raises(SourceError, match=expected):
        load_engine(q4_pack, expert_cache=nbytes, pins=3)
    assert load_engine(q4_pack, expert_cache="all", pins=99).layers == ()


def test_run_pins_what_the_last_run_used_most(
    q4_pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first run has nothing to pin, and says so; statistics have the number."""
    nbytes = sum(6 * m.record_nbytes for m in Pack.open(q4_pack).manifest.modules)
    arguments = ["run", str(q4_pack), "-p", text_of(TOKENS), "-m", "4", "--pin", "2"]
    arguments += ["--expert-cache", f"{nbytes}B"]
    path = profile_path(streamed(q4_pack))
    assert path is not None
    path.unlink(missing_ok=True)
    assert main(arguments) == 0
    first = capsys.readouterr()
    assert "nothing is pinned: no run of this pack was noted yet" in first.err
    assert main(arguments) == 0
    second = capsys.readouterr()
    assert "; 4 experts pinned; " in second.err
    assert second.out == first.out
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["experts"]["pinned"] == 4
    assert main([*arguments, "--no-warm-start"]) == 2
    assert "--pin needs the warm start" in capsys.readouterr().err


def test_the_profile_lies_in_the_users_cache_by_pack_id(q4_pack: Path) -> None:
    """Never in the pack."""
    path = profile_path(streamed(q4_pack))
    assert path is not None
    assert path.name == f"{Pack.open(q4_pack).manifest.pack_id}.json"
    assert not path.is_relative_to(q4_pack)
