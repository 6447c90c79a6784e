"""`moepack bench`: how fast a pack decodes, reads prompts, reads its disk and loads.

Arms take turns in one process, since other work on the machine comes and goes: only their ratios
mean much. Tokens are forced, drawn at random: greedy decoding of random weights falls into loops
that flatter every cache.
"""

import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moepack.tools.bench_table import lines_of
from moepack.tools.options import Name, debug_option, json_option, memory_option
from moepack.tools.plots import draw_speeds, plot_option
from moepack.tools.reporting import note, peak_memory, progress
from moepack.tools.startup import interrupts_unwind

if TYPE_CHECKING:
    import numpy as np

    from moepack.formats.pack import Pack
    from moepack.runtime.counters import Counters
    from moepack.tools.bench_arms import Arm

__all__ = ["command"]

Done = Callable[[str], None]
PROMPT_ARMS = ("mlx-lm", "resident", "quarter")
MOST_KEPT = 0.02  # of files that were dropped from the page cache: above this they were not


@click.command("bench")
@click.argument("pack", type=Name())
@click.option(
    "--source", type=Name(), help="Its checkpoint: adds arms loaded by mlx-lm from there."
)
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    help="After one to warm up; figures are medians.",
)
@click.option(
    "--tokens",
    type=click.IntRange(2),
    default=16,
    show_default=True,
    help="To decode, an arm and round.",
)
@click.option(
    "--prompt-tokens",
    type=click.IntRange(8),
    default=256,
    show_default=True,
    help="Of the prompts that are read.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**32 - 1),
    default=0,
    show_default=True,
    help="Same seed, same tokens.",
)
@memory_option
@plot_option("--plot", "Draw the speed of decoding, and the bytes read for it, of each arm.")
@json_option
@debug_option
def command(
    pack: str,
    source: str | None,
    rounds: int,
    tokens: int,
    prompt_tokens: int,
    seed: int,
    memory: int | str,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Measure decoding, prompts, reads and loading, arms interleaved.

    Decoding: resident (every expert in memory, mlx-lm's own path), all-hits (every expert cached,
    but streamed), quarter and floor (a quarter of the experts cached, or top-k a layer; files in
    the page cache), these two cold (files dropped from it before each token; Linux alone), and
    with --source mlx-lm. Prompts: resident, quarter and mlx-lm. Reads: what floor-cold got from
    the disk against as many reads of records alone. Loading: the floor engine against reading
    shared.bin once. Arms that do not fit into --memory together are left out, and named.
    """
    import numpy as np

    from moepack.runtime.loading import DEFAULT_CONTEXT, measure_needs
    from moepack.runtime.machine import available_memory, resident_memory
    from moepack.runtime.memory import plan_memory
    from moepack.tools import bench_arms
    from moepack.tools.packs import open_pack

    interrupts_unwind()
    opened = open_pack(pack)
    manifest = opened.manifest
    folder = _source_folder(source, opened) if source is not None else None
    source_nbytes = sum(s.nbytes for s in manifest.source.shards) if folder is not None else None
    context = max(DEFAULT_CONTEXT, prompt_tokens + tokens)
    needs = measure_needs(opened, context)
    free = available_memory()
    stated = memory if isinstance(memory, int) else None
    # Refuses what not even the smallest engine fits into, naming what works.
    plan_memory(manifest.modules, needs, available=free, memory=stated, expert_cache=None)
    problem = cold_problem([opened.expert_file(module) for module in manifest.modules])
    bound = free if stated is None else stated
    fit = bench_arms.fit_arms(manifest, needs, bound, source_nbytes, problem)
    for name, reason in fit.left_out.items():
        note(f"{name} is left out: {reason}")
    arms = []
    for name, plan in fit.plans.items():
        note(f"loading {name}")
        arms.append(bench_arms.load_arm(name, opened, plan, context, folder))

    can_warm = manifest.expert_nbytes < available_memory() - resident_memory()
    rng = np.random.default_rng(seed)
    decoding = Decoding(opened, arms, can_warm)
    load_problem = problem or fit.problem_of_another
    n_rounds = 1 + rounds * (2 if load_problem is not None else 3)
    with _rounds_shown(n_rounds) as done:
        decoding.run(rounds, tokens, rng, done)
        prefill = prefill_figures(opened, arms, rounds, prompt_tokens, rng, can_warm, done)
        load = load_figures(opened, rounds, load_problem, done)
    figures: dict[str, Any] = {
        "pack": str(opened.path),
        "machine": machine_facts(free),
        "rounds": rounds,
        "tokens": tokens,
        "prompt_tokens": prompt_tokens,
        "seed": seed,
        "expert_bytes": manifest.expert_nbytes,
        "left_out": fit.left_out,
        "base": arms[0].name,
        "decode": {arm.name: decoding.figures(arm, arms[0].name) for arm in arms},
        "prefill": prefill,
        "reads": decoding.reads(fit.left_out.get("floor-cold")),
        "load": load,
        "peak_memory": peak_memory(),
    }
    click.echo(json.dumps(figures) if as_json else "\n".join(lines_of(figures)))
    if plot is not None:
        draw_speeds(plot, figures["decode"], figures["base"], opened.path.name)


@contextmanager
def _rounds_shown(n_rounds: int) -> Iterator[Done]:
    """To be told of each round: a bar where stderr is a terminal, else a line a round."""
    with progress("measuring", n_rounds, unit="round") as advance:

        def done(what: str) -> None:
            advance(1)
            if not sys.stderr.isatty():
                note(what)

        yield done


def _source_folder(source: str, opened: "Pack") -> Path:
    """The checkpoint that the pack was made of, by its shards' sizes. Raises UsageError."""
    from moepack.packer.source import find_folder

    folder = find_folder(source)[0]
    for shard in opened.manifest.source.shards:
        path = folder / shard.name
        if not path.is_file() or path.stat().st_size != shard.nbytes:
            raise click.UsageError(f"--source: {path} is not the pack's source")
    return folder


def cold_problem(files: Sequence[Path]) -> str | None:
    """Why these files cannot be dropped from the page cache; None when they can, and were."""
    from moepack.tools.bench_arms import cached_share, drop_pages

    if cached_share(files) is None:
        return "this system does not let files be dropped from the page cache and say so"
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())  # what is not on disk yet is not dropped
    drop_pages(files)
    kept = cached_share(files)
    return None if kept is not None and kept <= MOST_KEPT else "the file system keeps files cached"


def machine_facts(free: int) -> dict[str, Any]:
    """What figures depend on; this process may take `free` bytes."""
    import mlx.core as mx

    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "cores": len(affinity(0)) if affinity is not None else os.cpu_count(),
        "device": str(mx.default_device()),
        "device_name": mx.device_info().get("device_name"),
        "free_memory": free,
        **{name: version(name) for name in ("moepack", "mlx", "mlx-lm")},
    }


def median_ratio(base: Sequence[float], own: Sequence[float]) -> float:
    """How many times `base` is what `own` is, round by round."""
    return statistics.median(b / o for b, o in zip(base, own, strict=True))


class Decoding:
    """Rounds of decoding: all arms in turn, cold ones last, for they empty the page cache."""

    def __init__(self, opened: "Pack", arms: "Sequence[Arm]", can_warm: bool) -> None:
        self._opened = opened
        self._files = [opened.expert_file(module) for module in opened.manifest.modules]
        self._arms = arms
        self._can_warm = can_warm
        self._tokens = 0
        # By arm, of each round that counts; `_cached` is the share of the files in the page cache.
        self._seconds: dict[str, list[float]] = {arm.name: [] for arm in arms}
        self._counted: dict[str, list[Counters]] = {arm.name: [] for arm in arms}
        self._cached: dict[str, list[float]] = {arm.name: [] for arm in arms}
        self._reads: list[dict[str, float]] = []

    def run(self, rounds: int, tokens: int, rng: "np.random.Generator", done: Done) -> None:
        """Decode `tokens` forced tokens by every arm, `rounds` times after one to warm up."""
        from moepack.tools.bench_arms import vocabulary, warm_pages

        self._tokens = tokens
        warm = [arm for arm in self._arms if not arm.is_cold]
        cold = [arm for arm in self._arms if arm.is_cold]
        for round_ in range(rounds + 1):
            forced = rng.integers(0, vocabulary(self._arms), tokens).tolist()
            if self._can_warm:
                warm_pages(self._files)
            first = round_ % len(warm)
            for arm in [*warm[first:], *warm[:first], *cold]:
                self._take_turn(arm, forced, is_counted=round_ > 0)
            done(f"decoding: round {round_} of {rounds}")

    def _take_turn(self, arm: "Arm", forced: list[int], *, is_counted: bool) -> None:
        from moepack.runtime.counters import since
        from moepack.tools import bench_arms
        from moepack.tools.bench_reads import read_rates

        drop = partial(bench_arms.drop_pages, self._files) if arm.is_cold else None
        if drop is not None:
            drop()
        share = bench_arms.cached_share(self._files)
        before = arm.decode_counters()
        elapsed = bench_arms.decode_seconds(arm.model, forced, drop)
        if not is_counted:
            return
        counted = since(arm.decode_counters(), before)
        self._seconds[arm.name].append(elapsed)
        self._counted[arm.name].append(counted)
        if share is not None:
            self._cached[arm.name].append(share)
        if arm.name == "floor-cold" and counted.misses:
            assert arm.engine is not None
            rates = read_rates(
                self._opened,
                counted.misses,
                len(forced),
                len(self._reads),
                arm.engine.read_workers,
                past_page_cache=arm.reads_past_page_cache,
            )
            self._reads.append(rates)

    def figures(self, arm: "Arm", base: str) -> dict[str, Any]:
        """Of one arm. `own_us` is known only where every call found all its experts."""
        from moepack.runtime.counters import add

        times = self._seconds[arm.name]
        cached = self._cached[arm.name]
        figures = {
            "tokens_per_second": self._tokens / statistics.median(times),
            "ratio": median_ratio(self._seconds[base], times),
            "experts": "all in memory",
            "files": "not read",
            "files_cached": statistics.median(cached) if cached else None,
        }
        if arm.engine is None or not arm.is_streamed:
            return figures
        counted = add(self._counted[arm.name])
        slots = arm.engine.plan.slots_per_layer
        most = max(module.n_experts for module in self._opened.manifest.modules)
        return figures | {
            "experts": f"{max(slots)} of {most} a layer in slots",
            "files": self._state_of_files(arm) if counted.misses else "not read",
            "slots_per_layer": list(slots),
            "hit_rate": counted.hit_rate,
            "bytes_per_token": counted.bytes_read / (self._tokens * len(times)),
            "own_us": None if counted.misses else 1e6 * counted.own_s / counted.calls,
        }

    def _state_of_files(self, arm: "Arm") -> str:
        if arm.is_cold:
            return "dropped from the page cache before each token"
        if arm.reads_past_page_cache:
            return "read past the page cache"
        if self._can_warm:
            return "read into the page cache before each round"
        return "larger than the page cache, in it as far as they were"

    def reads(self, problem: str | None) -> dict[str, Any]:
        """What floor-cold got from the disk, against reading alone. Rates in bytes a second.

        `waited_bytes_per_second` is by the time that calls waited for reads: less than reads took
        where something was computed meanwhile. The other rates are those of `bench_reads`.
        """
        from moepack.runtime.counters import add
        from moepack.tools.bench_reads import ARMS

        rounds = self._counted.get("floor-cold", [])
        if problem is None and len(self._reads) < len(rounds):
            problem = "floor-cold had nothing to read"
        if problem is not None:
            return {"left_out": problem}
        waited = [counted.bytes_read / max(counted.read_s, 1e-9) for counted in rounds]
        total = add(rounds)
        (arm,) = (arm for arm in self._arms if arm.name == "floor-cold")
        assert arm.engine is not None
        raw = [rates["raw"] for rates in self._reads]
        return {
            "records_per_token": total.misses / (self._tokens * len(rounds)),
            "record_bytes": total.bytes_read / total.misses,
            "workers": arm.engine.read_workers,
            "past_page_cache": arm.reads_past_page_cache,
            "waited_bytes_per_second": statistics.median(waited),
            "ratio": median_ratio(waited, raw),
            "alone": {
                name: {
                    "bytes_per_second": statistics.median(r[name] for r in self._reads),
                    "ratio": median_ratio([r[name] for r in self._reads], raw),
                }
                for name in ARMS
            },
        }


def prefill_figures(
    opened: "Pack",
    arms: "Sequence[Arm]",
    rounds: int,
    n_tokens: int,
    rng: "np.random.Generator",
    can_warm: bool,
    done: Done,
) -> dict[str, Any]:
    """Seconds from a prompt to its first token, and bytes read for it; files warm if they can be.

    `bytes_touched`: of the experts asked for, each once per chunk and layer.
    """
    from moepack.tools.bench_arms import prefill_seconds, prompt_nbytes, vocabulary, warm_pages

    chosen = [arm for arm in arms if arm.name in PROMPT_ARMS]
    seconds: dict[str, list[float]] = {arm.name: [] for arm in chosen}
    nbytes = {arm.name: [0, 0] for arm in chosen}
    if can_warm:
        warm_pages([opened.expert_file(module) for module in opened.manifest.modules])
    for round_ in range(rounds):
        prompt = rng.integers(0, vocabulary(arms), n_tokens).tolist()
        first = round_ % max(len(chosen), 1)
        for arm in [*chosen[first:], *chosen[:first]]:
            before = prompt_nbytes(arm)
            with arm.caches_only():
                elapsed = prefill_seconds(arm.model, prompt, arm.prefill_step)
            seconds[arm.name].append(elapsed)
            after = prompt_nbytes(arm)
            nbytes[arm.name] = [
                n + b - a for n, a, b in zip(nbytes[arm.name], before, after, strict=True)
            ]
        done(f"prompts: round {round_ + 1} of {rounds}")
    figures = {}
    for name, times in seconds.items():
        (arm,) = (arm for arm in chosen if arm.name == name)
        figures[name] = {
            "seconds": statistics.median(times),
            **{
                f"of_{other.replace('-', '_')}": median_ratio(seconds[other], times)
                if other in seconds
                else None
                for other in ("resident", "mlx-lm")
            },
            "step": arm.prefill_step,
            "chunks": -(-(n_tokens - 1) // arm.prefill_step),  # mlx-lm gives the last token alone
            "bytes_read": nbytes[name][0] / rounds if arm.is_streamed else None,
            "bytes_touched": nbytes[name][1] / rounds if arm.is_streamed else None,
        }
    return figures


def load_figures(opened: "Pack", rounds: int, problem: str | None, done: Done) -> dict[str, Any]:
    """Seconds to load the floor engine, and to read shared.bin once, the pack's files cold."""
    from moepack.tools.bench_arms import drop_pages, load_seconds, read_seconds

    if problem is not None:
        return {"left_out": problem}
    files = [path for path in opened.path.rglob("*") if path.is_file()]
    loads, reads = [], []
    for round_ in range(rounds):
        drop_pages(files)
        loads.append(load_seconds(opened))
        drop_pages(files)
        reads.append(read_seconds([opened.shared_file]))
        done(f"loading: round {round_ + 1} of {rounds}")
    return {
        "seconds": statistics.median(loads),
        "shared_bytes": opened.manifest.shared_nbytes,
        "read_seconds": statistics.median(reads),
        "ratio": median_ratio(loads, reads),
    }
