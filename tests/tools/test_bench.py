"""`moepack bench` on a tiny pack: what it counts, and what it leaves out. No time is compared."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tiny_models

from moepack.formats.pack import Pack
from moepack.runtime.loading import Engine, load_engine, measure_needs
from moepack.runtime.memory import SLACK, Needs
from moepack.tools import bench, bench_arms
from moepack.tools.bench_arms import ARMS, ORDER_OF_NEED, Arm, fit_arms
from moepack.tools.bench_reads import read_rates
from moepack.tools.cli import main

COLD = ("quarter-cold", "floor-cold")
N_LAYERS, N_EXPERTS, TOP_K = 2, 16, 4
QUICK = ("--rounds", "2", "--tokens", "5", "--prompt-tokens", "40")


def benched(*arguments: str | Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What `bench --json` says."""
    capsys.readouterr()
    assert main(["bench", *map(str, arguments), *QUICK, "--json"]) == 0
    figures: dict[str, Any] = json.loads(capsys.readouterr().out)
    return figures


def record_nbytes(pack: Path) -> int:
    """The size of a record; all layers of the tiny packs have the same."""
    (nbytes,) = {module.record_nbytes for module in Pack.open(pack).manifest.modules}
    return nbytes


@pytest.fixture
def uncold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system where nothing tells what the page cache has."""
    monkeypatch.setattr("moepack.tools.bench_arms.cached_share", lambda _: None)


def test_every_arm_is_measured(
    q4_pack: Path, q4_source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And every figure that is a time or a speed is above zero."""
    figures = benched(q4_pack, "--source", q4_source, capsys=capsys)
    assert {*figures["decode"], *figures["left_out"]} == set(ARMS)
    assert set(figures["left_out"]) <= set(COLD)  # where files cannot be made cold
    assert figures["base"] == "mlx-lm"
    assert figures["decode"]["mlx-lm"]["ratio"] == 1
    for arm in figures["decode"].values():
        assert arm["tokens_per_second"] > 0
        assert arm["ratio"] > 0
        assert arm["experts"]
        assert arm["files"]
    assert list(figures["prefill"]) == ["mlx-lm", "resident", "quarter"]
    for arm in figures["prefill"].values():
        assert arm["seconds"] > 0
        assert arm["of_resident"] > 0
        assert arm["of_mlx_lm"] > 0
        assert arm["chunks"] == 1
    assert figures["peak_memory"] > 0
    assert figures["machine"]["cores"] > 0
    assert figures["machine"]["free_memory"] > 0


def test_what_is_counted_adds_up(q4_pack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bytes are those of the experts that were missed; nothing is missed when all are there."""
    figures = benched(q4_pack, capsys=capsys)
    nbytes = record_nbytes(q4_pack)
    picks = N_LAYERS * TOP_K
    for name, arm in figures["decode"].items():
        if name == "resident":
            assert "hit_rate" not in arm
            continue
        missed = (1 - arm["hit_rate"]) * picks
        assert arm["bytes_per_token"] == pytest.approx(missed * nbytes)
        assert (arm["own_us"] is not None) == (name == "all-hits")
    assert figures["decode"]["all-hits"]["hit_rate"] == 1
    assert figures["decode"]["all-hits"]["own_us"] > 0
    assert figures["decode"]["floor"]["slots_per_layer"] == [TOP_K] * N_LAYERS
    quarter = figures["prefill"]["quarter"]
    assert 0 < quarter["bytes_read"] < quarter["bytes_touched"]
    assert quarter["bytes_touched"] <= N_LAYERS * N_EXPERTS * nbytes
    assert quarter["bytes_read"] * 2 % nbytes == 0  # the mean of two rounds


def test_cold_arms_are_cold_and_reads_are_compared_with_theirs(
    q4_pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the file system of the tests can be made to forget."""
    figures = benched(q4_pack, capsys=capsys)
    if set(COLD) <= set(figures["left_out"]):
        assert "left_out" in figures["reads"]
        assert "left_out" in figures["load"]
        pytest.skip(figures["left_out"]["floor-cold"])
    cold, reads, load = figures["decode"]["floor-cold"], figures["reads"], figures["load"]
    assert cold["files_cached"] <= bench.MOST_KEPT
    assert cold["files"] == "dropped from the page cache before each token"
    assert reads["record_bytes"] == record_nbytes(q4_pack)
    assert reads["records_per_token"] * reads["record_bytes"] == pytest.approx(
        cold["bytes_per_token"]
    )
    assert list(reads["alone"]) == ["raw", "reader", "checked"]
    assert all(figures["bytes_per_second"] > 0 for figures in reads["alone"].values())
    assert reads["alone"]["raw"]["ratio"] == 1
    assert reads["waited_bytes_per_second"] > 0
    assert reads["ratio"] > 0
    assert load["shared_bytes"] == Pack.open(q4_pack).manifest.shared_nbytes
    assert load["seconds"] > 0
    assert load["read_seconds"] > 0


def test_a_system_that_cannot_drop_pages_says_so(
    q4_pack: Path, uncold: None, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = benched(q4_pack, capsys=capsys)
    assert set(figures["left_out"]) == {"mlx-lm", *COLD}
    for place in (figures["reads"], figures["load"]):
        assert "does not let files be dropped" in place["left_out"]
    assert all(arm["files_cached"] is None for arm in figures["decode"].values())
    assert main(["bench", str(q4_pack), *QUICK]) == 0
    out = capsys.readouterr().out
    assert "left out: floor-cold: this system does not" in out
    assert "reads: left out: this system does not" in out
    assert "loading: left out: this system does not" in out


def test_the_table_has_a_line_an_arm(
    q4_pack: Path, q4_source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", str(q4_pack), "--source", str(q4_source), *QUICK]) == 0
    captured = capsys.readouterr()
    firsts = [line.split()[0] for line in captured.out.splitlines() if line.strip()]
    for name in ("mlx-lm", "resident", "quarter"):
        assert firsts.count(name) == 2  # decoding and prompts
    assert firsts.count("all-hits") == firsts.count("floor") == 1
    assert "decoding: round 2 of 2" in captured.err


def needs_of(pack: Path) -> Needs:
    """What an engine of it needs."""
    return measure_needs(Pack.open(pack))


def test_arms_without_room_are_left_out_in_the_order_of_need(q4_pack: Path) -> None:
    """And those that are there have room together."""
    manifest, needs = Pack.open(q4_pack).manifest, needs_of(q4_pack)
    source = sum(shard.nbytes for shard in manifest.source.shards)
    seen = set()
    floor = fit_arms(manifest, needs, 10**12, source, None).plans["floor"]
    for bound in range(int(floor.total * SLACK) + 2, 2 * floor.total, 10**5):
        fit = fit_arms(manifest, needs, bound, source, None)
        names = [name for name in ORDER_OF_NEED if name in fit.plans]
        assert names[0] == "floor"
        assert {*fit.plans, *fit.left_out} == set(ARMS)
        total = needs.fixed - needs.shared + max(p.prefill for p in fit.plans.values())
        for name, plan in fit.plans.items():
            total += source if name == "mlx-lm" else plan.shared + plan.slots
        assert total <= bound / SLACK
        assert all("other arms leave" in reason for reason in fit.left_out.values())
        seen.add(len(names))
        if not fit.left_out:
            break
    assert min(seen) == 1
    assert max(seen) == len(ARMS)


def test_little_memory_leaves_arms_out_and_names_them(
    q4_pack: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = Pack.open(q4_pack).manifest
    needs = needs_of(q4_pack)
    floor = fit_arms(manifest, needs, 10**12, None, None).plans["floor"]
    monkeypatch.setattr("moepack.runtime.loading.measure_needs", lambda *_: needs)
    nbytes = int(floor.total * SLACK) + 2
    figures = benched(q4_pack, "--memory", f"{nbytes}B", capsys=capsys)
    assert list(figures["decode"]) == ["floor"]
    assert figures["base"] == "floor"
    assert figures["prefill"] == {}
    assert "it needs" in figures["left_out"]["resident"]
    assert figures["left_out"]["mlx-lm"] == "no --source was given"
    assert "left_out" in figures["reads"]
    assert "left_out" in figures["load"]


def test_too_little_memory_for_any_arm_names_what_works(
    q4_pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", str(q4_pack), *QUICK, "--memory", "20MB"]) == 1
    assert "the smallest that works is --memory" in capsys.readouterr().err


def calls(engine: Engine) -> list[int]:
    """Of decoding, by layer."""
    return [layer.counters.decode.calls for layer in engine.layers]


def test_as_many_calls_are_timed_as_tokens_are_counted(q4_pack: Path) -> None:
    engine = load_engine(q4_pack, expert_cache="floor")
    dropped = []
    for before_token in (None, lambda: dropped.append(calls(engine))):
        before = calls(engine)
        assert bench_arms.decode_seconds(engine.model, [3, 5, 7, 9, 11], before_token) > 0
        assert [n - b for n, b in zip(calls(engine), before, strict=True)] == [5] * N_LAYERS
    assert [n[0] - 5 for n in dropped] == [0, 2, 3, 4, 5]


def test_forced_tokens_are_what_the_model_is_given(q4_pack: Path) -> None:
    engine = load_engine(q4_pack, expert_cache="all")
    given: list[int] = []

    class Listening:
        layers = engine.model.layers

        def __call__(self, tokens: mx.array, **options: Any) -> mx.array:
            given.extend(tokens.reshape(-1).tolist())
            logits: mx.array = engine.model(tokens, **options)
            return logits

    model: Any = Listening()
    bench_arms.decode_seconds(model, [3, 5, 7, 9])
    assert given == [3, 5, 7, 9]


@pytest.mark.parametrize("step", [64, 16])
def test_a_prompt_touches_each_expert_once_per_chunk_and_layer(q4_pack: Path, step: int) -> None:
    """By what the layers were asked, and what was read is no more."""
    engine = load_engine(q4_pack, expert_cache="floor", prefill_step=step)
    asked = []
    for layer in engine.layers:
        layer.record = lambda needed, _, __, is_decode: asked.append((len(needed), is_decode))
    arm = Arm("quarter", engine.model, engine, step)
    prompt = np.random.default_rng(0).integers(0, tiny_models.VOCAB, 52).tolist()
    assert bench_arms.prefill_seconds(engine.model, prompt, step) > 0
    in_chunks = [n for n, is_decode in asked if not is_decode]
    assert len(in_chunks) == N_LAYERS * -(-51 // step)
    assert len(asked) - len(in_chunks) == N_LAYERS  # the last token
    read, touched = bench_arms.prompt_nbytes(arm)
    assert touched == sum(in_chunks) * record_nbytes(q4_pack)
    assert read <= touched
    assert read == engine.counters()[0].bytes_read


def test_pages_come_and_go(q4_pack: Path) -> None:
    """Where they can be seen."""
    files = sorted((q4_pack / "experts").iterdir())
    problem = bench.cold_problem(files)
    if problem is not None:
        pytest.skip(problem)
    bench_arms.drop_pages(files)
    gone = bench_arms.cached_share(files)
    bench_arms.warm_pages(files)
    assert gone == 0
    assert bench_arms.cached_share(files) == 1


def test_raw_reads_are_of_records_that_are_there(q4_pack: Path) -> None:
    """Also when more are asked for in a batch than there are."""
    pack = Pack.open(q4_pack)
    problem = bench.cold_problem([pack.expert_file(m) for m in pack.manifest.modules])
    if problem is not None:
        pytest.skip(problem)
    for n_records in (7, 1000):
        for direct in (False, True):
            rates = read_rates(pack, n_records, 3, 0, 2, past_page_cache=direct)
            assert rates.keys() == {"raw", "reader", "checked"}
            assert all(rate > 0 for rate in rates.values())
