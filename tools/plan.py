"""`moepack plan`: whether a model fits this machine, from its config and headers alone.

The needs and the plan are those of `moepack run`: runtime/loading.py measures the needs of a pack,
with its weights or without. A checkpoint is laid out as `convert` would, as a pack without weights,
by a process of its own, so that what that takes is not counted as what a run starts with.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from moepack.formats.errors import BudgetError, FormatError, SourceError
from moepack.formats.manifest import ExpertModule, Manifest
from moepack.formats.pack import SHARED_NAME, Pack, is_pack
from moepack.formats.sizes import format_size
from moepack.tools.apart import apart
from moepack.tools.options import Name, debug_option, json_option, memory_option
from moepack.tools.reporting import note
from moepack.tools.startup import interrupts_unwind, terminations_unwind

if TYPE_CHECKING:
    from moepack.runtime.disk import DiskFigures
    from moepack.runtime.memory import MemoryPlan, Needs

__all__ = ["command", "describe", "lay_out_unread", "tokens_per_second"]

# Reading memory takes half the traffic of copying it out of the page cache, which was measured.
READS_PER_COPY = 2
# No memory is larger: where the search for the smallest that works begins.
MOST_NBYTES = 2**62


@click.command("plan")
@click.argument("model", type=Name())
@memory_option
@click.option(
    "--context",
    type=click.IntRange(1),
    help="Tokens of prompt and answer to plan for.  [default: 4096]",
)
@json_option
@debug_option
def command(model: str, memory: int | str, context: int | None, as_json: bool) -> int:
    """Say whether a model fits, before it is converted or downloaded.

    MODEL is a pack, a folder with a checkpoint, or org/name from the Hugging Face cache or hub. No
    weights are read, and of the hub's only headers fetched. The disk is measured once, with random
    reads for two seconds. Exits 1 when the model does not fit.
    """
    from moepack.runtime.disk import probe_disk
    from moepack.runtime.loading import DEFAULT_CONTEXT, measure_needs
    from moepack.runtime.machine import available_memory, problem_of_group

    interrupts_unwind()
    terminations_unwind()
    with TemporaryDirectory(prefix="moepack-plan-") as folder:
        subject = _find(model, Path(folder))
        try:
            tokenizer = _tokenizer(subject.pack)
            needs = measure_needs(subject.pack, context or DEFAULT_CONTEXT)
            del tokenizer
        except FormatError as error:
            raise FormatError(str(error).replace(str(subject.pack.path), model)) from error
    available = available_memory()
    modules = subject.pack.manifest.modules
    disk = None
    if subject.file is not None:
        disk = probe_disk(subject.file, max(m.record_nbytes for m in modules))
    figures = describe(
        modules,
        needs,
        disk,
        available=available,
        memory=memory if isinstance(memory, int) else None,
    )
    if (problem := problem_of_group(figures["memory"]["total"])) is not None:
        note(f"warning: {problem}")
    click.echo(json.dumps(figures) if as_json else "\n".join(_lines(figures, disk)))
    return 1 if figures["fits"] == "no" else 0


@dataclass(frozen=True, slots=True)
class Subject:
    """A pack, which may lack weight files, and a file to measure its disk with, if it is here."""

    pack: Pack
    file: Path | None


def _find(model: str, folder: Path) -> Subject:
    """The pack, or the checkpoint laid out as one in `folder`. Raises SourceError, FormatError."""
    from moepack.packer.source import cached_folder, is_repository
    from moepack.tools import answering, packs  # what a run has in memory, it has here

    assert answering is not None
    path = cached_folder(model, None) if is_repository(model) else Path(model)
    if path is not None and (not path.is_dir() or is_pack(path) or (path / SHARED_NAME).is_file()):
        pack = packs.open_pack(str(path))
        largest = max(pack.manifest.modules, key=lambda m: m.stride * m.n_experts)
        return Subject(pack, pack.expert_file(largest))
    manifest, file = apart(lay_out_unread, model, folder)
    return Subject(Pack(folder, manifest), file)


def lay_out_unread(model: str, folder: Path) -> tuple[Manifest, Path | None]:
    """(manifest without digests, largest shard) of the pack that convert would make of a model.

    `folder` gets the files that a pack has beside its weights. No shard: it is on the hub. Raises
    SourceError.
    """
    from moepack.formats.geometry import ALIGNMENT
    from moepack.formats.manifest import VERSION, Source
    from moepack.packer.checkpoint import ConvertOptions
    from moepack.packer.convert import copied_file_bytes, copied_file_names, plan_convert
    from moepack.packer.opening import open_for_convert

    with TemporaryDirectory(dir=folder) as headers:
        source, store = open_for_convert(model, None, Path(headers) / "plan.moepack")
        plan = plan_convert(source, ConvertOptions())
    for name in copied_file_names(source.path):
        (folder / name).write_bytes(copied_file_bytes(plan, name))
    manifest = Manifest(
        version=VERSION,
        alignment=ALIGNMENT,
        model_type=source.config["model_type"],
        created_by="moepack plan",
        shared_nbytes=plan.layout.file_nbytes[SHARED_NAME],
        shared=plan.layout.shared,
        modules=plan.layout.modules,
        quantization=plan.checkpoint.quantization,
        source=Source(source.name, source.revision, (), {}, {}, {}),
        files=(),
    )
    is_here = store is None
    return manifest, max(source.shards, key=lambda s: s.stat().st_size) if is_here else None


def _tokenizer(pack: Pack) -> object:
    """The tokenizer, which a run has in memory too; None, and a warning, when there is none."""
    from moepack.runtime.building import read_config
    from moepack.runtime.tokenizer import load_tokenizer

    config = read_config(pack)
    try:
        return load_tokenizer(pack.path, config)
    except SourceError:
        note("warning: no usable tokenizer; moepack run needs one")
        return None


def describe(
    modules: Sequence[ExpertModule],
    needs: "Needs",
    disk: "DiskFigures | None",
    *,
    available: int,
    memory: int | None,
) -> dict[str, Any]:
    """The object that `plan --json` prints.

    Sizes are in bytes. Of layers that differ, the most slots, experts, picks and the largest record
    are stated. Where the model does not fit, everything else is of `minimum_memory_bytes`.
    """

    from moepack.runtime.memory import START_VARIATION, ceil_size, plan_memory

    def plan_of(nbytes: int | None) -> "MemoryPlan":
        return plan_memory(modules, needs, available=available, memory=nbytes, expert_cache=None)

    def holds_all(nbytes: int) -> bool:
        return all(plan_of(nbytes + more).is_resident for more in (0, START_VARIATION))

    minimum = _smallest(lambda nbytes: plan_of(nbytes).total <= nbytes) + START_VARIATION
    n_experts = max(m.n_experts for m in modules)
    try:
        plan = plan_of(memory)
    except BudgetError as error:
        plan = plan_of(minimum)
        fits, reason = "no", str(error)
    else:
        fits = "resident" if plan.is_resident else "streamed"
        bound = format_size(available if memory is None else memory)
        reason = f"all experts stay in memory, within {bound}"
        if not plan.is_resident:
            whole = ceil_size(_smallest(holds_all) + START_VARIATION)
            reason = (
                f"{max(plan.slots_per_layer)} of {n_experts} experts a layer stay in memory, "
                f"within {bound}; --memory {whole} would hold all"
            )
    if disk is None:
        reason += "; the weights are on the hub, so there is no disk to measure"
    return {
        "fits": fits,
        "reason": reason,
        "minimum_memory_bytes": minimum,
        "memory": plan.as_map(),
        "slots_per_layer": max(plan.slots_per_layer),
        "n_experts": n_experts,
        "top_k": max(_picks(modules, needs)),
        "record_bytes": max(m.record_nbytes for m in modules),
        "bytes_per_token_no_cache": _bytes_per_token(modules, needs),
        "disk": disk.as_map() if disk is not None else None,
        "tokens_per_second": tokens_per_second(modules, needs, plan, disk) if disk else None,
    }


def tokens_per_second(
    modules: Sequence[ExpertModule], needs: "Needs", plan: "MemoryPlan", disk: "DiskFigures"
) -> dict[str, float]:
    """Between which speeds reading lets a plan decode. Computing is not counted.

    low: every expert picked is read from the disk, past the page cache, with as many workers as a
    run has. high: a pick is in memory as often as an even choice would have it, slots in n_experts;
    real routers pick some experts more than others, and the page cache may hold the rest. Neither
    is more than memory allows, if each token reads all shared weights and its experts once, at
    twice the fastest rate of copies from the page cache. A resident plan reads no disk.
    """
    rate = disk.uncached_rate
    picked = _bytes_per_token(modules, needs)
    missed = sum(
        k * m.record_nbytes * (1 - n / m.n_experts)
        for k, m, n in zip(_picks(modules, needs), modules, plan.slots_per_layer, strict=True)
    )
    most = READS_PER_COPY * max(disk.cached.values()) / (needs.shared + picked)
    low = most if plan.is_resident else min(most, rate / picked)
    return {"low": low, "high": min(most, rate / missed) if missed > 0 else most}


def _picks(modules: Sequence[ExpertModule], needs: "Needs") -> list[int]:
    """Experts a token, by module."""
    return [min(k, m.n_experts) for k, m in zip(needs.top_k, modules, strict=True)]


def _bytes_per_token(modules: Sequence[ExpertModule], needs: "Needs") -> int:
    """Bytes of the experts that a token picks."""
    picks = _picks(modules, needs)
    return sum(k * m.record_nbytes for k, m in zip(picks, modules, strict=True))


def _smallest(works: Callable[[int], bool]) -> int:
    """The smallest number of bytes that works; from there on all do."""
    low, high = 0, MOST_NBYTES
    while low < high:
        middle = (low + high) // 2
        try:
            is_enough = works(middle)
        except BudgetError:
            is_enough = False
        low, high = (low, middle) if is_enough else (middle + 1, high)
    return low


def _lines(figures: Mapping[str, Any], disk: "DiskFigures | None") -> list[str]:
    """The same for a person."""
    from moepack.runtime.memory import ceil_size

    memory, speed = figures["memory"], figures["tokens_per_second"]
    uses = {
        "shared weights": memory["shared"],
        "experts": memory["slots"],
        "KV cache": memory["kv"],
        "prompt": memory["prefill"],
        "MLX's buffers": memory["mlx_cache"],
        "process": memory["base"],
    }
    parts = ", ".join(f"{what} {format_size(n)}" for what, n in uses.items() if n)
    lines = [
        f"fits      {figures['fits']}: {figures['reason']}",
        f"memory    {format_size(memory['total'])}: {parts}"
        + (" (with the smallest)" if figures["fits"] == "no" else ""),
        f"smallest  --memory {ceil_size(figures['minimum_memory_bytes'])}",
        f"experts   {figures['n_experts']} a layer, {figures['top_k']} a token, "
        f"{format_size(figures['record_bytes'])} each; "
        f"{format_size(figures['bytes_per_token_no_cache'])} a token without a cache",
    ]
    if disk is None:
        return lines
    uncached, cached = disk.uncached_rate, max(disk.cached.values())
    lines.append(
        f"disk      {format_size(round(uncached))}/s at random, {format_size(round(cached))}/s "
        f"from the page cache, in blocks of {format_size(disk.block_bytes)}; measured {disk.date}"
    )
    low, high = (f"{speed[key]:.3g}" for key in ("low", "high"))
    if low == high:
        lines.append(f"tokens/s  at most {high}, by memory's speed; computing is not counted")
        return lines
    lines += [
        f"tokens/s  between {low} (every expert read from disk) and {high} (picks spread evenly, "
        f"{figures['slots_per_layer']} of {figures['n_experts']} in",
        "          memory); computing is not counted",
    ]
    return lines
