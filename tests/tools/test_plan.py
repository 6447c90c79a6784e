"""`moepack plan`: the plan of a run, from config and headers alone."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from hub_server import MAIN, REPOSITORY, HubServer, serving

import moepack.runtime.disk
import moepack.runtime.loading
import moepack.runtime.machine
from moepack.formats.errors import BudgetError, SourceError
from moepack.formats.manifest import ExpertModule
from moepack.formats.pack import Pack
from moepack.formats.sizes import parse_size
from moepack.packer.source import write_stub
from moepack.runtime.disk import DiskFigures
from moepack.runtime.loading import DEFAULT_CONTEXT, load_engine, measure_needs
from moepack.runtime.memory import START_VARIATION, MemoryPlan, Needs, plan_memory
from moepack.tools.apart import apart
from moepack.tools.cli import main
from moepack.tools.plan import _lines, describe, tokens_per_second

BASE = 300 * 10**6
MEMORY_KEYS = ["shared", "slots", "kv", "prefill", "mlx_cache", "base", "total"]
KEYS = [
    "fits",
    "reason",
    "minimum_memory_bytes",
    "memory",
    "slots_per_layer",
    "n_experts",
    "top_k",
    "record_bytes",
    "bytes_per_token_no_cache",
    "disk",
    "tokens_per_second",
]
DISK = DiskFigures(
    device=1,
    date="2026-11-30",
    version="0.1.0",
    block_bytes=4096,
    method="O_DIRECT",
    cached={1: 1e9, 4: 4e9, 8: 5e9},
    uncached={1: 1e8, 2: 2e8, 4: 4e8, 8: 5e8},
    best_workers=8,
)


@pytest.fixture(autouse=True)
def disk(monkeypatch: pytest.MonkeyPatch) -> DiskFigures:
    """A disk that was measured."""
    monkeypatch.setattr(moepack.runtime.disk, "probe_disk", lambda *_: DISK)
    return DISK


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process, and a machine, that always have the same memory in use."""
    monkeypatch.setattr(moepack.runtime.loading, "resident_memory", lambda: BASE)
    monkeypatch.setattr(moepack.runtime.machine, "available_memory", lambda: 10**10)


def plan(
    model: Path, *options: str, capsys: pytest.CaptureFixture[str], code: int = 0
) -> dict[str, Any]:
    """What `plan --json` prints."""
    capsys.readouterr()
    assert main(["plan", str(model), "--json", *options]) == code
    figures: dict[str, Any] = json.loads(capsys.readouterr().out)
    return figures


def in_process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "moepack.tools", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_json_has_exactly_these_fields(q4_pack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In this order."""
    figures = plan(q4_pack, capsys=capsys)
    assert list(figures) == KEYS
    assert list(figures["memory"]) == MEMORY_KEYS
    assert sum(list(figures["memory"].values())[:-1]) == figures["memory"]["total"]
    assert figures["fits"] == "resident"
    module = Pack.open(q4_pack).manifest.modules[0]
    assert figures["slots_per_layer"] == figures["n_experts"] == 16
    assert figures["top_k"] == 4
    assert figures["record_bytes"] == module.record_nbytes
    assert figures["bytes_per_token_no_cache"] == 2 * 4 * module.record_nbytes
    assert list(figures["tokens_per_second"]) == ["low", "high"]
    assert figures["disk"]["best_workers"] == 8


@pytest.mark.parametrize("kind", ["q4", "float"])
@pytest.mark.parametrize("options", [(), ("--memory", "345MB"), ("--context", "100")], ids=str)
def test_pack_and_its_source_have_the_same_plan(
    kind: str,
    options: tuple[str, ...],
    steady: None,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """To the byte, in equal processes."""
    source, pack = (request.getfixturevalue(f"{kind}_{what}") for what in ("source", "pack"))
    code = main(["plan", str(pack), *options])
    of_pack = plan(pack, *options, capsys=capsys, code=code)
    assert plan(source, *options, capsys=capsys, code=code) == of_pack


def has_loaded(pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run has the shared weights in memory by the time it looks."""
    nbytes = sum(t.nbytes for t in pack.manifest.shared)
    monkeypatch.setattr(moepack.runtime.loading, "resident_memory", lambda: BASE + nbytes)


def test_plan_is_that_of_a_run(
    float_pack: Path,
    steady: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The same needs, whatever the memory."""
    pack = Pack.open(float_pack)
    options = [("--memory", f"{n}MB") for n in (345, 400, 1000)]
    planned = [plan(float_pack, *o, capsys=capsys)["memory"] for o in options]
    has_loaded(pack, monkeypatch)
    engines = [load_engine(pack, memory=memory) for _, memory in options]
    assert [engine.plan.as_map() for engine in engines] == planned
    assert not engines[0].plan.is_resident
    assert engines[-1].plan.is_resident


def test_smallest_memory_is_enough_for_a_run_and_less_is_not(
    float_pack: Path,
    float_source: Path,
    steady: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """For the pack that a checkpoint will be, too."""
    least = plan(float_source, capsys=capsys)["minimum_memory_bytes"]
    less = least - START_VARIATION - 1
    figures = plan(float_source, "--memory", f"{least}B", capsys=capsys)
    assert figures["fits"] != "no"
    assert figures["minimum_memory_bytes"] == least
    figures = plan(float_source, "--memory", f"{less}B", capsys=capsys, code=1)
    assert figures["fits"] == "no"
    assert figures["minimum_memory_bytes"] == least
    assert figures["memory"]["total"] <= least
    stated = figures["reason"].split("--memory ")[-1]
    assert least <= parse_size(stated) <= least * 1.001 + 10**5
    has_loaded(Pack.open(float_pack), monkeypatch)
    assert load_engine(float_pack, memory=least).plan.total <= least
    assert not load_engine(float_pack, memory=less + 1).plan.is_resident
    with pytest.raises(BudgetError):
        load_engine(float_pack, memory=less)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Folders of their own for figures of the disk and for what is temporary."""
    (tmp_path / "tmp").mkdir()
    return {"XDG_CACHE_HOME": str(tmp_path / "cache"), "TMPDIR": str(tmp_path / "tmp")}


@pytest.mark.parametrize("kind", ["pack", "source"])
def test_smallest_memory_of_one_process_is_enough_for_another(
    kind: str, request: pytest.FixtureRequest, q4_pack: Path, environment: dict[str, str]
) -> None:
    """As processes come: a real disk, real sizes of what is in memory already."""
    model = request.getfixturevalue(f"q4_{kind}")
    planned = in_process("plan", str(model), "--json", **environment)
    assert planned.returncode == 0, planned.stderr
    assert not list(Path(environment["TMPDIR"]).iterdir())
    least = json.loads(planned.stdout)["minimum_memory_bytes"]
    options = ["-p", tiny_models.text_of([5, 9]), "-m", "2", "--json"]
    done = in_process("run", str(q4_pack), "--memory", f"{least}B", *options, **environment)
    assert done.returncode == 0, done.stderr
    assert (Path(environment["XDG_CACHE_HOME"]) / "moepack" / "disks.json").is_file()


def hollow(file: Path) -> None:
    """Zeros in the place of a file's bytes."""
    nbytes = file.stat().st_size
    file.unlink()
    with file.open("xb") as made:
        made.truncate(nbytes)


def test_no_weight_is_read(
    q4_pack: Path,
    q4_source: Path,
    steady: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Models of zeros have the same plan."""
    wanted = plan(q4_pack, capsys=capsys)
    pack = Path(shutil.copytree(q4_pack, tmp_path / "p.moepack"))
    for file in (pack / "shared.bin", *(pack / "experts").iterdir()):
        hollow(file)
    assert plan(pack, capsys=capsys) == wanted
    source = Path(shutil.copytree(q4_source, tmp_path / "source"))
    for shard in source.glob("*.safetensors"):
        data = shard.read_bytes()
        shard.unlink()
        write_stub(shard, data[: 8 + int.from_bytes(data[:8], "little")], len(data))
    assert plan(source, capsys=capsys) == wanted


def test_text_is_a_few_aligned_lines(
    float_pack: Path, steady: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """For people."""
    assert main(["plan", str(float_pack), "--memory", "345MB"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = captured.out.splitlines()
    heads = ["fits", "memory", "smallest", "experts", "disk", "tokens/s", ""]
    assert [line[:10].strip() for line in lines] == heads
    assert "streamed: " in lines[0]
    assert "would hold all" in lines[0]
    assert "between " in lines[5]
    assert "computing is not counted" in lines[6]


def test_what_would_hold_all_does(
    float_pack: Path, steady: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """And not much less."""
    reason = plan(float_pack, "--memory", "345MB", capsys=capsys)["reason"]
    whole = parse_size(reason.split("--memory ")[1].split()[0])
    assert plan(float_pack, "--memory", f"{whole}B", capsys=capsys)["fits"] == "resident"
    less = whole - START_VARIATION - 10**5
    assert plan(float_pack, "--memory", f"{less}B", capsys=capsys)["fits"] == "streamed"


def test_model_that_does_not_fit_exits_1_and_names_what_would(
    q4_pack: Path, steady: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the same lines."""
    assert main(["plan", str(q4_pack), "--memory", "300MB"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("fits      no: --memory is 300 MB, too little")
    least = lines[2].split("--memory ")[1]
    assert lines[0].endswith(f"the smallest that works is --memory {least}")
    assert main(["plan", str(q4_pack), "--memory", least]) == 0


def test_more_context_needs_more(
    q4_pack: Path, steady: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run's default without the option."""
    kv = [plan(q4_pack, *o, capsys=capsys)["memory"]["kv"] for o in ((), ("--context", "8192"))]
    assert kv[1] == 2 * kv[0] > 0
    same = plan(q4_pack, "--context", str(DEFAULT_CONTEXT), capsys=capsys)
    assert same["memory"]["kv"] == kv[0]


@pytest.mark.parametrize(
    ("options", "hint"),
    [(("--context", "0"), "--context"), (("--memory", "much"), "--memory")],
)
def test_bad_options_are_usage_errors(
    options: tuple[str, ...], hint: str, q4_pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is read."""
    assert main(["plan", str(q4_pack), *options]) == 2
    assert hint in capsys.readouterr().err.splitlines()[-1]


def failed_line(model: Path | str, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of an error."""
    capsys.readouterr()
    assert main(["plan", str(model)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("moepack: error: ")
    return line


def test_missing_folder_dense_model_and_damaged_pack_are_told_in_one_line(
    q4_pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Naming what was given."""
    assert f"{tmp_path / 'none'}: no such folder" in failed_line(tmp_path / "none", capsys)
    dense = tiny_models.write_checkpoint(tmp_path / "dense", tiny_models.QWEN3_DENSE)
    assert "no expert module" in failed_line(dense, capsys)
    pack = Path(shutil.copytree(q4_pack, tmp_path / "p.moepack"))
    (pack / "manifest.msgpack").unlink()
    assert "the pack is incomplete" in failed_line(pack, capsys)


def test_disk_that_cannot_be_read_is_told_in_one_line(
    q4_pack: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the probe says it."""

    def fail(path: Path, nbytes: int) -> DiskFigures:
        raise SourceError(f"{path}: read failed (Input/output error)")

    monkeypatch.setattr(moepack.runtime.disk, "probe_disk", fail)
    assert "00000.bin: read failed (Input/output error)" in failed_line(q4_pack, capsys)


def test_process_that_dies_is_an_error() -> None:
    """Out of memory, say."""
    with pytest.raises(SourceError, match=r"ended early \(status 3\)"):
        apart(os._exit, 3)


def test_error_of_that_process_is_raised_here() -> None:
    """As it was there."""
    with pytest.raises(ValueError, match="invalid literal"):
        apart(int, "x")


@pytest.fixture
def hub(q4_source: Path) -> Iterator[HubServer]:
    """A hub that has the checkpoint."""
    with serving(HubServer({MAIN: q4_source})) as server:
        yield server


def test_model_on_the_hub_is_planned_from_its_headers(
    hub: HubServer,
    q4_source: Path,
    tmp_path: Path,
    environment: dict[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No shard is fetched, nothing is left but the small files in the hub's own cache."""
    settings = {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(tmp_path / "hub"),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "127.0.0.1",
    }
    done = in_process("plan", REPOSITORY, "--json", **environment, **settings)
    assert done.returncode == 0, done.stderr
    found, wanted = json.loads(done.stdout), plan(q4_source, capsys=capsys)
    assert list(found) == KEYS
    assert found["disk"] is None
    assert found["tokens_per_second"] is None
    assert "the weights are on the hub" in found["reason"]
    same = ("fits", "n_experts", "top_k", "record_bytes", "bytes_per_token_no_cache")
    assert [found[key] for key in same] == [wanted[key] for key in same]
    for use in ("shared", "slots", "kv", "prefill"):
        assert found["memory"][use] == wanted["memory"][use]
    assert not [name for name in hub.whole if name.endswith(".safetensors")]
    assert not list((tmp_path / "tmp").iterdir())
    assert not list((tmp_path / "hub").rglob("*.safetensors"))
    assert not (tmp_path / "cache").exists()


def module(n_experts: int, record_nbytes: int) -> ExpertModule:
    """Only these two count."""
    return ExpertModule("m", "SwitchGLU", "f", n_experts, 0, record_nbytes, (), {}, b"")


NEEDS = Needs(
    shared=10**9,
    kv=0,
    base=10**8,
    top_k=(8, 2),
    context=100,
    token=1,
    score=1,
    keeps_buffers=False,
)
MODULES = [module(16, 10**7), module(1, 10**6)]  # the second: fewer experts than picks


def plan_of(memory: int) -> MemoryPlan:
    """Of those."""
    return plan_memory(MODULES, NEEDS, available=0, memory=memory, expert_cache=None)


def test_speed_is_between_all_missed_and_as_many_hits_as_slots() -> None:
    """By the disk's speed for as many workers as a run has."""
    half = plan_memory(MODULES, NEEDS, available=0, memory=None, expert_cache=121 * 10**6)
    assert half.slots_per_layer == (12, 1)
    speed = tokens_per_second(MODULES, NEEDS, half, DISK)
    assert speed["low"] == pytest.approx(5e8 / 81e6)
    # Three of four picks of the first layer hit, and all of the second: but memory is the bound.
    assert speed["high"] == pytest.approx(10e9 / 1081e6)
    few = replace(half, slots_per_layer=(8, 1))
    fast = replace(DISK, cached={1: 1e12})
    assert tokens_per_second(MODULES, NEEDS, few, fast)["high"] == pytest.approx(5e8 / 40e6)


def test_speed_of_a_resident_plan_is_memorys() -> None:
    """Nothing is read from disk."""
    speed = tokens_per_second(MODULES, NEEDS, plan_of(10**10), DISK)
    assert speed["low"] == speed["high"] == pytest.approx(10e9 / 1081e6)


def test_disk_faster_than_memory_promises_no_more_than_memory() -> None:
    """One in memory, say."""
    fast = replace(DISK, uncached={1: 1e15})
    speed = tokens_per_second(MODULES, NEEDS, plan_of(1_400_000_000), fast)
    assert speed["low"] == speed["high"] == pytest.approx(10e9 / 1081e6)


def test_layers_that_differ_are_told_by_the_largest() -> None:
    """Bytes a token are exact."""
    figures = describe(MODULES, NEEDS, DISK, available=10**10, memory=None)
    assert figures["n_experts"] == 16
    assert figures["top_k"] == 8
    assert figures["record_bytes"] == 10**7
    assert figures["bytes_per_token_no_cache"] == 8 * 10**7 + 10**6
    assert any("at most 9.25" in line for line in _lines(figures, DISK))


def test_auto_is_what_is_free_here() -> None:
    """And does not fit when that is too little."""
    figures = describe(MODULES, NEEDS, None, available=10**9, memory=None)
    assert figures["fits"] == "no"
    assert "the memory free here is 1 GB" in figures["reason"]
    assert "on the hub" in figures["reason"]
    assert len(_lines(figures, None)) == 4
    least = figures["minimum_memory_bytes"]
    assert describe(MODULES, NEEDS, None, available=least, memory=None)["fits"] == "streamed"


def test_needs_without_weights_are_those_with(q4_pack: Path, steady: None) -> None:
    """Shapes and types alone tell."""
    pack = Pack.open(q4_pack)
    assert measure_needs(pack).shared == sum(t.nbytes for t in pack.manifest.shared)
    assert measure_needs(pack) == measure_needs(pack)
