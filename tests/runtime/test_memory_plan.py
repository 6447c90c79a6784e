"""The memory plan as arithmetic, and the limits of the machine."""

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moepack.runtime.machine
from moepack.formats.errors import BudgetError, SourceError
from moepack.formats.geometry import Part, align_up
from moepack.formats.manifest import ExpertModule
from moepack.formats.sizes import parse_size
from moepack.runtime.machine import (
    available_memory,
    cgroup_limit,
    resident_memory,
    wire_memory,
)
from moepack.runtime.memory import (
    MLX_CACHE_NBYTES,
    RUN_NBYTES,
    START_VARIATION,
    Needs,
    ceil_size,
    plan_memory,
)

GB = 10**9
PROPERTY = settings(max_examples=200, deadline=None, derandomize=True)


def module(n_experts: int, record_nbytes: int) -> ExpertModule:
    """A module of these sizes."""
    part = Part("w", "U8", (record_nbytes,), 0, record_nbytes)
    stride = align_up(record_nbytes)
    return ExpertModule("m", "SwitchGLU", "f", n_experts, stride, record_nbytes, (part,), {}, b"")


def needs_of(
    top_k: tuple[int, ...], *sizes: int, context: int = 4096, token: int = 0, score: int = 0
) -> Needs:
    """Needs of which most are nothing; `sizes` are shared, kv and base."""
    shared, kv, base = sizes or (0, 0, 0)
    return Needs(shared, kv, base, top_k, context, token, score, keeps_buffers=False)


NEEDS = needs_of((8, 8), 2 * GB, GB, GB // 4)
MODULES = [module(128, 1_000_000), module(128, 1_000_000)]
FIXED = NEEDS.shared + NEEDS.kv + NEEDS.base + RUN_NBYTES


def test_total_is_the_sum_of_all_uses() -> None:
    """And the map states the same numbers."""
    plan = plan_memory(MODULES, NEEDS, available=64 * GB, memory=None, expert_cache=20_000_000)
    assert plan.slots == 20_000_000
    assert plan.total == FIXED + 20_000_000
    numbers = plan.as_map()
    assert sum(v for k, v in numbers.items() if k != "total") == numbers["total"] == plan.total


@pytest.mark.parametrize("extra", [0, 999_999, 2_000_000, 100_000_000])
def test_plan_stays_below_the_memory_given(extra: int) -> None:
    """With room for the allocators' slack, and no slot left unused."""
    memory = int((FIXED + 16_000_000 + extra) * 1.02) + 1
    plan = plan_memory(MODULES, NEEDS, available=0, memory=memory, expert_cache=None)
    assert plan.total * 1.02 <= memory
    assert plan.slots_per_layer == ((16_000_000 + extra) // 2_000_000,) * 2


def test_metal_has_a_cache_of_buffers_and_the_cpu_none() -> None:
    """There an allocation is slow."""
    for keeps, nbytes in ((True, MLX_CACHE_NBYTES), (False, 0)):
        needs = replace(NEEDS, keeps_buffers=keeps)
        plan = plan_memory(MODULES, needs, available=64 * GB, memory=None, expert_cache=None)
        assert plan.mlx_cache == nbytes
        assert plan.total == FIXED + nbytes + 256_000_000 + plan.prefill


@pytest.mark.parametrize(
    ("left", "step"),
    [
        (0, 64),  # the least that works
        (4 * 256 * 1000, 256),
        (4 * 256 * 1000 - 4, 128),
        (4 * 4096 * 1000, 4096),
        (100 * GB, 8192),
    ],
)
def test_a_chunk_takes_a_quarter_of_what_is_left(left: int, step: int) -> None:
    """Above the fewest slots; never more tokens than there are."""
    needs = replace(NEEDS, token=1000, context=20_000)
    modules = [module(100_000, 1_000_000)] * 2
    room = FIXED + 16_000_000 + (left or 64 * 1000)
    memory = int(room * 1.02) + 2
    plan = plan_memory(modules, needs, available=0, memory=memory, expert_cache=None)
    assert plan.prefill_step == step
    assert plan.prefill == plan.prefill_step * 1000
    assert plan.total * 1.02 <= memory
    short = replace(needs, context=50)
    plan = plan_memory(modules, short, available=0, memory=memory, expert_cache=None)
    assert plan.prefill_step == 50


def test_resident_packs_take_mlx_lms_chunk() -> None:
    """More is no faster where nothing is read."""
    needs = replace(NEEDS, token=1000, context=20_000)
    plan = plan_memory(MODULES, needs, available=64 * GB, memory=None, expert_cache=None)
    assert plan.is_resident
    assert plan.prefill_step == 2048


def test_a_stated_chunk_is_kept_and_counted() -> None:
    """But for tokens that are not there."""
    needs = replace(NEEDS, token=1000, score=1, context=5000)
    for stated, step in ((33, 33), (10**12, 5000)):
        plan = plan_memory(
            MODULES, needs, available=64 * GB, memory=None, expert_cache=None, prefill_step=stated
        )
        assert plan.prefill_step == step
        assert plan.prefill == step * (1000 + 5000)


def test_auto_takes_what_is_available() -> None:
    """None means the machine's own limit."""
    plan = plan_memory(MODULES, NEEDS, available=64 * GB, memory=None, expert_cache=None)
    assert plan.is_resident
    assert plan.slots_per_layer == (128, 128)


def test_auto_that_does_not_fit_names_the_smallest_memory() -> None:
    """The machine is too small, whatever is asked."""
    with pytest.raises(BudgetError, match=r"the memory free here is 1 GB, .* --memory \d"):
        plan_memory(MODULES, NEEDS, available=GB, memory=None, expert_cache=None)


def test_stated_expert_cache_is_not_bounded_by_what_is_free() -> None:
    """Whoever states it knows."""
    plan = plan_memory(MODULES, NEEDS, available=0, memory=None, expert_cache=30_000_000)
    assert plan.slots_per_layer == (15, 15)


def test_all_needs_no_memory_given() -> None:
    """It is the whole model."""
    plan = plan_memory(MODULES, NEEDS, available=0, memory=None, expert_cache="all")
    assert plan.is_resident


def test_all_in_exactly_enough_memory_is_resident() -> None:
    """One byte less than the slack allows is refused."""
    enough = int((FIXED + 256_000_000) * 1.02) + 1
    plan = plan_memory(MODULES, NEEDS, available=0, memory=enough, expert_cache="all")
    assert plan.is_resident
    with pytest.raises(BudgetError, match="all needs 256 MB"):
        plan_memory(MODULES, NEEDS, available=0, memory=enough - 3, expert_cache="all")


def test_small_layers_are_full_while_large_ones_grow() -> None:
    """Equal numbers where a layer has as many experts."""
    modules = [module(4, 1000), module(64, 1000), module(64, 3000)]
    needs = needs_of((2, 8, 8))
    plan = plan_memory(modules, needs, available=0, memory=None, expert_cache=4000 + 10 * 4000)
    assert plan.slots_per_layer == (4, 10, 10)


def test_floor_is_each_layers_own_top_k() -> None:
    """Never more than it has experts."""
    modules = [module(4, 1000), module(64, 1000)]
    needs = needs_of((8, 6))
    plan = plan_memory(modules, needs, available=0, memory=None, expert_cache="floor")
    assert plan.slots_per_layer == (4, 6)
    assert plan.slots == 10_000
    with pytest.raises(BudgetError, match=r"smallest that works is 10\.00kB \(4/6 experts"):
        plan_memory(modules, needs, available=0, memory=None, expert_cache=9_999)


@st.composite
def models(draw: st.DrawFn) -> tuple[list[ExpertModule], Needs]:
    """Layers of any sizes, and other needs."""
    n_layers = draw(st.integers(1, 6))
    modules = [
        module(draw(st.integers(1, 300)), draw(st.integers(1, 10**7))) for _ in range(n_layers)
    ]
    top_k = tuple(draw(st.integers(1, 20)) for _ in modules)
    sizes = [draw(st.integers(0, 10**11)) for _ in range(3)]
    context, token, score = (draw(st.integers(1, n)) for n in (20_000, 10**6, 10**4))
    return modules, needs_of(top_k, *sizes, context=context, token=token, score=score)


@PROPERTY
@given(models())
def test_smallest_memory_named_works_and_is_near_the_truth(
    model: tuple[list[ExpertModule], Needs],
) -> None:
    """For any model; a fiftieth less, and less what starts vary by, does not."""
    modules, needs = model
    with pytest.raises(BudgetError) as raised:
        plan_memory(modules, needs, available=0, memory=0, expert_cache=None)
    least = parse_size(str(raised.value).split("--memory ")[-1])
    plan = plan_memory(modules, needs, available=0, memory=least, expert_cache=None)
    assert plan.total <= least
    less = int(least * 0.98) - START_VARIATION
    with pytest.raises(BudgetError):
        plan_memory(modules, needs, available=0, memory=less, expert_cache=None)


@PROPERTY
@given(models(), st.integers(0, 10**10))
def test_slots_fit_and_no_layer_could_have_one_more(
    model: tuple[list[ExpertModule], Needs], extra: int
) -> None:
    """The most slots a layer, all equal where they can be."""
    modules, needs = model
    floor = [min(k, m.n_experts) for k, m in zip(needs.top_k, modules, strict=True)]
    bound = sum(n * m.record_nbytes for n, m in zip(floor, modules, strict=True)) + extra
    plan = plan_memory(modules, needs, available=0, memory=None, expert_cache=bound)
    assert plan.slots <= bound
    slots = plan.slots_per_layer
    assert all(f <= n <= m.n_experts for f, n, m in zip(floor, slots, modules, strict=True))
    grown = [n for f, n, m in zip(floor, slots, modules, strict=True) if f < n < m.n_experts]
    assert len(set(grown)) <= 1
    assert plan.is_resident == (slots == tuple(m.n_experts for m in modules))


@PROPERTY
@given(st.integers(0, 2**50))
def test_ceil_size_parses_back_to_at_least_as_much(nbytes: int) -> None:
    """And to at most a hundredth of the unit more."""
    size = parse_size(ceil_size(nbytes))
    assert nbytes <= size <= nbytes + max(nbytes // 100, 10) + 1


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0B"),
        (999, "999B"),
        (1000, "1.00kB"),
        (73_728, "73.73kB"),
        (999_999, "1000.00kB"),
        (5_000_001, "5.01MB"),
        (2_010_000_000, "2.01GB"),
    ],
)
def test_ceil_size_is_text_to_type(nbytes: int, text: str) -> None:
    """In the units of --memory."""
    assert ceil_size(nbytes) == text


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/", {"memory.max": "2147483648"}, 2_147_483_648),
        ("0::/a/b", {"a/b/memory.max": "max", "a/memory.max": "5000", "memory.max": "9000"}, 5000),
        ("0::/not/visible", {"memory.max": "7000"}, 7000),
        ("0::/", {"memory.max": "max"}, None),
        ("0::/", {"memory.max": ""}, None),
        ("0::/", {}, None),
        ("9:cpu:/\n5:memory:/a", {"memory/a/memory.limit_in_bytes": "1073741824"}, 1_073_741_824),
        ("5:memory:/a", {"memory/memory.limit_in_bytes": "8000"}, 8000),
        ("5:memory:/", {"memory/memory.limit_in_bytes": "9223372036854771712"}, None),  # no limit
        (
            "5:memory:/a\n0::/",
            {"memory/a/memory.limit_in_bytes": "9000", "memory.max": "4000"},
            4000,
        ),
    ],
)
def test_cgroup_limit_is_the_least_of_those_above(
    tmp_path: Path, own: str, files: dict[str, str], expected: int | None
) -> None:
    """In either version, and where both are mounted."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    (tmp_path / "own").write_text(own + "\n")
    assert cgroup_limit(tmp_path, tmp_path / "own") == expected
    assert cgroup_limit(tmp_path, tmp_path / "none") is None


def test_available_memory_keeps_the_control_groups_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container sees its own limit, less the headroom."""
    monkeypatch.setattr(moepack.runtime.machine, "cgroup_limit", lambda: 10**8)
    assert available_memory() == 90_000_000


def test_available_memory_counts_what_this_process_has() -> None:
    """Less than the machine has in all."""
    assert 0 < available_memory() < psutil.virtual_memory().total
    assert 10**6 < resident_memory() < psutil.virtual_memory().total


@pytest.mark.parametrize(("wanted", "wired"), [(500, 500), (5000, 900)])
def test_wiring_leaves_a_tenth_of_metals_working_set(
    wanted: int, wired: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX is told what is reported."""
    told: list[int] = []
    info = {"max_recommended_working_set_size": 1000}
    monkeypatch.setattr(mx, "device_info", lambda: info)
    monkeypatch.setattr(mx, "set_wired_limit", told.append)
    assert wire_memory(wanted) == wired
    assert told == [wired]


def test_nothing_is_wired_without_metal(monkeypatch: pytest.MonkeyPatch) -> None:
    """One clear line."""
    monkeypatch.setattr(mx, "device_info", dict)
    with pytest.raises(SourceError, match="--wire: only Metal wires memory"):
        wire_memory(500)
