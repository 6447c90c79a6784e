"""`moepack bench`: how fast a pack decodes, reads prompts, reads its disk and loads.

Arms take turns in one process, since other work on the machine comes and goes: only their ratios
mean much. Tokens are forced, drawn at random: greedy decoding of random weights falls into loops
that flatter every cache.
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
    from moepack.formats.pack import Pack
    from moepack.tools.bench_phases import Done

__all__ = ["command"]

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
    from moepack.tools.bench_phases import Decoding, load_figures, prefill_figures
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
def _rounds_shown(n_rounds: int) -> Iterator["Done"]:
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
