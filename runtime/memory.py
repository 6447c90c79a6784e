"""How many expert slots fit: pure arithmetic on sizes that others measured."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from moepack.formats.errors import BudgetError, SourceError
from moepack.formats.manifest import ExpertModule
from moepack.formats.sizes import format_size
from moepack.runtime.waves import n_passing

__all__ = ["MemoryPlan", "Needs", "check_pins", "plan_memory"]

# Buffers that MLX keeps for reuse on Metal, where an allocation is slow. On the CPU backend keeping
# none costs nothing (tools/EXPERIMENTS.md).
MLX_CACHE_NBYTES = 64 * 10**6
# Code of libraries that is first read when a model runs, and what allocators hold back.
RUN_NBYTES = 24 * 10**6
# What allocators and the interpreter take above what is counted.
SLACK = 1.02
# A process starts with more or less resident memory than the one that named a smallest value.
START_VARIATION = 4 * 10**6
# Tokens of a prompt a call: the more, the fewer times experts are read, and the more memory.
PREFILL_STEPS = (8192, 4096, 2048, 1024, 512, 256, 128, 64)
RESIDENT_PREFILL_STEP = 2048  # mlx-lm's default; more is no faster where nothing is read


@dataclass(frozen=True, slots=True)
class Needs:
    """Sizes in bytes that do not depend on the slots. `top_k` is by module, in model order.

    `context` tokens of prompt and answer need `kv`. A prompt's chunk takes `token` bytes a token,
    and `score` a token and token of the context. `keeps_buffers`: MLX's buffer cache is of use.
    """

    shared: int
    kv: int
    base: int
    top_k: tuple[int, ...]
    context: int
    token: int
    score: int
    keeps_buffers: bool

    def prefill(self, step: int) -> int:
        """Workspace of a prompt's chunk of `step` tokens."""
        return step * (self.token + self.score * self.context)

    @property
    def fixed(self) -> int:
        """What is needed whatever the slots and the chunk."""
        kept = MLX_CACHE_NBYTES if self.keeps_buffers else 0
        return self.shared + self.kv + self.base + RUN_NBYTES + kept


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The bytes of each use, their total, and the slots of each module, in model order.

    `prefill_step`: the tokens of a prompt to give the model in a call.
    """

    shared: int
    slots: int
    kv: int
    prefill: int
    mlx_cache: int
    base: int
    slots_per_layer: tuple[int, ...]
    is_resident: bool
    prefill_step: int

    @property
    def total(self) -> int:
        """Bytes that the process is expected to use at most."""
        return self.shared + self.slots + self.kv + self.prefill + self.mlx_cache + self.base

    def as_map(self) -> dict[str, int]:
        """The `memory` object of `plan --json`."""
        fields = asdict(self)
        names = ("shared", "slots", "kv", "prefill", "mlx_cache", "base")
        return {**{name: fields[name] for name in names}, "total": self.total}


def plan_memory(
    modules: Sequence[ExpertModule],
    needs: Needs,
    *,
    available: int,
    memory: int | None,
    expert_cache: int | str | None,
    prefill_step: int | None = None,
) -> MemoryPlan:
    """Slots for each module within the bounds given, all of equal number where they fit.

    `memory` bounds everything (None: `available`); `expert_cache` bounds the slots: bytes, "all",
    "floor" (top-k slots a layer), or None for what `memory` leaves. A stated expert cache is not
    bounded by `available`. Without a stated `prefill_step`, a prompt's chunk takes up to a quarter
    of what is left above the fewest slots.
    Raises BudgetError, naming the smallest value that works, when top-k slots a layer do not fit.
    """
    floor = [min(k, m.n_experts) for k, m in zip(needs.top_k, modules, strict=True)]
    floor_nbytes = sum(n * m.record_nbytes for n, m in zip(floor, modules, strict=True))
    whole = sum(m.n_experts * m.record_nbytes for m in modules)

    bound = available if memory is None else memory
    room = int(bound / SLACK) - needs.fixed
    step = prefill_step
    if step is None:
        stated = {"all": whole, "floor": floor_nbytes}.get(str(expert_cache), expert_cache)
        least, most = (floor_nbytes, whole) if stated is None else (int(stated), int(stated))
        step = _choose_step(needs, room, min(least, whole), min(most, whole))
    step = min(step, needs.context)
    bounds = []
    if memory is not None or expert_cache is None:
        left = room - needs.prefill(step)
        if left < floor_nbytes:
            smallest = min(step, PREFILL_STEPS[-1]) if prefill_step is None else step
            total = needs.fixed + needs.prefill(smallest) + floor_nbytes
            what = "the memory free here" if memory is None else "--memory"
            raise BudgetError(
                f"{what} is {format_size(bound)}, too little for this model and "
                f"{needs.context:,} tokens; the smallest that works is "
                f"--memory {ceil_size(int(total * SLACK) + START_VARIATION)}"
            )
        bounds.append(left)
    if expert_cache == "all":
        if bounds and bounds[0] < whole:
            raise BudgetError(
                f"--expert-cache all needs {format_size(whole)}, --memory leaves "
                f"{format_size(bounds[0])} for it; raise --memory or give a smaller cache"
            )
        bounds.append(whole)
    elif expert_cache == "floor":
        bounds.append(floor_nbytes)
    elif isinstance(expert_cache, int):
        if expert_cache < floor_nbytes:
            raise BudgetError(
                f"--expert-cache is {format_size(expert_cache)}, too little for this model; "
                f"the smallest that works is {ceil_size(floor_nbytes)} "
                f"({'/'.join(str(n) for n in sorted(set(floor)))} experts a layer)"
            )
        bounds.append(expert_cache)
    slots = _spread(modules, floor, min(bounds))
    return MemoryPlan(
        shared=needs.shared,
        slots=sum(n * m.record_nbytes for n, m in zip(slots, modules, strict=True)),
        kv=needs.kv,
        prefill=needs.prefill(step),
        mlx_cache=MLX_CACHE_NBYTES if needs.keeps_buffers else 0,
        base=needs.base + RUN_NBYTES,
        slots_per_layer=tuple(slots),
        is_resident=all(n == m.n_experts for n, m in zip(slots, modules, strict=True)),
        prefill_step=step,
    )


def check_pins(
    modules: Sequence[ExpertModule], plan: MemoryPlan, top_k: Sequence[int], pins: int
) -> None:
    """Raises SourceError where a token, or a wave, could not pass beside so many pinned experts."""
    layers = zip(modules, plan.slots_per_layer, top_k, strict=True)
    most, n_slots = min(
        ((n - max(k, n_passing(n)), n) for module, n, k in layers if n < module.n_experts),
        default=(pins, 0),
    )
    if pins > most:
        raise SourceError(
            f"--pin {pins}: with {n_slots} experts of a layer in memory, at most {most} can be "
            "pinned"
        )


def _choose_step(needs: Needs, room: int, least: int, most: int) -> int:
    """Tokens of a prompt a call, for `room` above what is fixed and slots of `least` to `most`."""
    if room - most >= needs.prefill(min(RESIDENT_PREFILL_STEP, needs.context)):
        return RESIDENT_PREFILL_STEP
    for step in PREFILL_STEPS:
        if needs.prefill(min(step, needs.context)) <= (room - least) // 4:
            return step
    return PREFILL_STEPS[-1]


def _spread(modules: Sequence[ExpertModule], floor: Sequence[int], nbytes: int) -> list[int]:
    """The most slots a layer, equal for all where a layer has that many experts."""

    def slots_at(n: int) -> list[int]:
        return [min(max(n, f), m.n_experts) for f, m in zip(floor, modules, strict=True)]

    def nbytes_at(n: int) -> int:
        return sum(s * m.record_nbytes for s, m in zip(slots_at(n), modules, strict=True))

    low, high = 0, max(m.n_experts for m in modules)
    while low < high:
        middle = (low + high + 1) // 2
        if nbytes_at(middle) <= nbytes:
            low = middle
        else:
            high = middle - 1
    return slots_at(low)


def ceil_size(nbytes: int) -> str:
    """A size to type, in the units of `--memory`, at least `nbytes`."""
    for unit, digits in (("GB", 9), ("MB", 6), ("kB", 3)):
        if nbytes >= 10**digits:
            hundredths = -(-nbytes * 100 // 10**digits)
            return f"{hundredths / 100:.2f}{unit}"
    return f"{nbytes}B"
