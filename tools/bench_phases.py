"""The phases of `moepack bench`: decoding, prompts, reads and loading, and their figures."""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from moepack.formats.pack import Pack
from moepack.runtime.counters import Counters, add, since
from moepack.tools import bench_arms, bench_reads
from moepack.tools.bench_arms import Arm

__all__ = ["Decoding", "Done", "load_figures", "prefill_figures"]

Done = Callable[[str], None]  # told what was measured
PROMPT_ARMS = ("mlx-lm", "resident", "quarter")


def median_ratio(base: Sequence[float], own: Sequence[float]) -> float:
    """How many times `base` is what `own` is, round by round."""
    return statistics.median(b / o for b, o in zip(base, own, strict=True))


class Decoding:
    """Rounds of decoding: all arms in turn, cold ones last, for they empty the page cache."""

    def __init__(self, opened: Pack, arms: Sequence[Arm], can_warm: bool) -> None:
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

    def run(self, rounds: int, tokens: int, rng: np.random.Generator, done: Done) -> None:
        """Decode `tokens` forced tokens by every arm, `rounds` times after one to warm up."""
        self._tokens = tokens
        warm = [arm for arm in self._arms if not arm.is_cold]
        cold = [arm for arm in self._arms if arm.is_cold]
        for round_ in range(rounds + 1):
            forced = rng.integers(0, bench_arms.vocabulary(self._arms), tokens).tolist()
            if self._can_warm:
                bench_arms.warm_pages(self._files)
            first = round_ % len(warm)
            for arm in [*warm[first:], *warm[:first], *cold]:
                self._take_turn(arm, forced, is_counted=round_ > 0)
            done(f"decoding: round {round_} of {rounds}")

    def _take_turn(self, arm: Arm, forced: list[int], *, is_counted: bool) -> None:
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
            rates = bench_reads.read_rates(
                self._opened,
                counted.misses,
                len(forced),
                len(self._reads),
                arm.engine.read_workers,
                past_page_cache=arm.reads_past_page_cache,
            )
            self._reads.append(rates)

    def figures(self, arm: Arm, base: str) -> dict[str, Any]:
        """Of one arm. `own_us` is known only where every call found all its experts."""
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

    def _state_of_files(self, arm: Arm) -> str:
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
                for name in bench_reads.ARMS
            },
        }


def prefill_figures(
    opened: Pack,
    arms: Sequence[Arm],
    rounds: int,
    n_tokens: int,
    rng: np.random.Generator,
    can_warm: bool,
    done: Done,
) -> dict[str, Any]:
    """Seconds from a prompt to its first token, and bytes read for it; files warm if they can be.

    `bytes_touched`: of the experts asked for, each once per chunk and layer.
    """
    chosen = [arm for arm in arms if arm.name in PROMPT_ARMS]
    seconds: dict[str, list[float]] = {arm.name: [] for arm in chosen}
    nbytes = {arm.name: [0, 0] for arm in chosen}
    if can_warm:
        bench_arms.warm_pages([opened.expert_file(module) for module in opened.manifest.modules])
    for round_ in range(rounds):
        prompt = rng.integers(0, bench_arms.vocabulary(arms), n_tokens).tolist()
        first = round_ % max(len(chosen), 1)
        for arm in [*chosen[first:], *chosen[:first]]:
            before = bench_arms.prompt_nbytes(arm)
            with arm.caches_only():
                elapsed = bench_arms.prefill_seconds(arm.model, prompt, arm.prefill_step)
            seconds[arm.name].append(elapsed)
            after = bench_arms.prompt_nbytes(arm)
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


def load_figures(opened: Pack, rounds: int, problem: str | None, done: Done) -> dict[str, Any]:
    """Seconds to load the floor engine, and to read shared.bin once, the pack's files cold."""
    if problem is not None:
        return {"left_out": problem}
    files = [path for path in opened.path.rglob("*") if path.is_file()]
    loads, reads = [], []
    for round_ in range(rounds):
        bench_arms.drop_pages(files)
        loads.append(bench_arms.load_seconds(opened))
        bench_arms.drop_pages(files)
        reads.append(bench_arms.read_seconds([opened.shared_file]))
        done(f"loading: round {round_ + 1} of {rounds}")
    return {
        "seconds": statistics.median(loads),
        "shared_bytes": opened.manifest.shared_nbytes,
        "read_seconds": statistics.median(reads),
        "ratio": median_ratio(loads, reads),
    }
