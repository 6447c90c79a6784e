"""From a pack to an mlx-lm model: build, share, plan, stream.

mlx-lm's own loader builds the model from the pack's `config.json`, with the manifest's
quantization; nothing of it is evaluated before its expert modules have been replaced.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from moepack.formats.digests import wrong_files
from moepack.formats.errors import BudgetError, FormatError, SourceError
from moepack.formats.manifest import Manifest
from moepack.formats.pack import Pack
from moepack.formats.sizes import parse_size
from moepack.runtime.adapters import apply_adapters
from moepack.runtime.banks import MLX_DTYPES, Banks
from moepack.runtime.building import (
    build_model,
    check_device,
    expert_modules,
    put_shared,
    read_config,
    replace_module,
)
from moepack.runtime.counters import Counters, add
from moepack.runtime.disk import known_disk
from moepack.runtime.half import compute_in_float32, needs_float32, widening_nbytes
from moepack.runtime.machine import (
    available_memory,
    most_wired,
    problem_of_group,
    resident_memory,
    wire_memory,
)
from moepack.runtime.memory import MemoryPlan, Needs, check_pins, plan_memory
from moepack.runtime.probing import ModelShape, ShapeProbe, measure_shape
from moepack.runtime.reading import (
    CHECKS,
    READ_WORKERS,
    RecordReader,
    bypasses_page_cache,
    needs_buffer,
    repair_command,
)
from moepack.runtime.shared import SharedWeights, load_shared
from moepack.runtime.slots import SlotCache
from moepack.runtime.spreading import Spreader, SpreadExperts, spread_linears
from moepack.runtime.streamed import StreamedExperts
from moepack.runtime.tokenizer import load_tokenizer

__all__ = [
    "DEFAULT_CONTEXT",
    "Engine",
    "load",
    "load_engine",
    "load_model",
    "measure_needs",
    "pack_tokenizer",
]

DEFAULT_CONTEXT = 4096  # tokens of prompt and answer that memory is planned for, unless said
MLX_LM_PREFILL_STEP = 2048  # of whoever calls mlx-lm's functions without saying


@dataclass(frozen=True, slots=True)
class Engine:
    """A loaded pack: the model, what it was planned to use, and its streamed layers.

    `layers` is empty when every expert is resident. `is_widened`: half-precision experts are
    computed in float32, since this backend cannot do otherwise. `vocabulary` is how many logits a
    position has, `lossy_top_k` how many experts a router picks if fewer than it was trained with,
    `pins` how many experts of a streamed layer a warm start keeps for good, `read_workers` how many
    threads read experts, `wired` how many bytes Metal was asked to keep in RAM. `forgettable` is
    the last layer, if it is streamed and no cache depends on what it says of a prompt.
    """

    pack: Pack
    model: nn.Module
    config: dict[str, Any]
    plan: MemoryPlan
    layers: tuple[StreamedExperts, ...]
    shared: SharedWeights
    is_widened: bool
    vocabulary: int
    lossy_top_k: int | None
    pins: int
    read_workers: int
    wired: int
    forgettable: StreamedExperts | None

    @property
    def reads_past_page_cache(self) -> bool:
        """How experts are read, where any are."""
        return any(layer.reads_past_page_cache for layer in self.layers)

    def counters(self) -> tuple[Counters, Counters]:
        """(prefill, decode), summed over layers."""
        return (
            add([layer.counters.prefill for layer in self.layers]),
            add([layer.counters.decode for layer in self.layers]),
        )

    @contextmanager
    def caches_only(self) -> Iterator[None]:
        """Inside, calls of several tokens are there to fill caches, and their logits are NaN.

        It is what mlx-lm's generation wants of a prompt but its last token. The last layer's
        experts are not run for these, if no cache depends on them.
        """
        if self.forgettable is None:
            yield
            return
        self.forgettable.skips_prompts = True
        try:
            yield
        finally:
            self.forgettable.skips_prompts = False

    def tokenizer(self) -> TokenizerWrapper:
        """The pack's tokenizer, as mlx_lm.load gives it. Raises SourceError when it has none."""
        return load_tokenizer(self.pack.path, self.config)


def load(
    pack: str | os.PathLike[str],
    *,
    memory: str | int = "auto",
    expert_cache: str | int | None = None,
    adapter_path: str | os.PathLike[str] | None = None,
    check: str = "first",
) -> tuple[nn.Module, TokenizerWrapper]:
    """The pair `(model, tokenizer)` that `mlx_lm.load` gives, for the pack at this path.

    `memory` bounds all that the process uses: bytes as an int, "6GB", or "auto" for what the
    machine has. `expert_cache` bounds the resident experts alone: a size, "all", "floor" (top-k
    experts a layer, the fewest that work), or None for what `memory` leaves. `adapter_path` is the
    folder of a LoRA adapter that mlx-lm made, of shared weights only. `check` says which reads of
    an expert are compared with its digest: the "first", "always" or "never"; unless never, shared
    weights are too. Raises SourceError (no pack, no tokenizer, no usable adapter), FormatError (a
    damaged pack), BudgetError (naming the smallest value that works). A record found damaged later
    raises FormatError from the call of the model that needs it.
    """
    engine = load_engine(
        pack,
        memory=memory,
        expert_cache=expert_cache,
        adapter_path=adapter_path,
        check=check,
        prefill_step=MLX_LM_PREFILL_STEP,
    )
    return engine.model, engine.tokenizer()


def load_model(
    pack: str | os.PathLike[str],
    *,
    memory: str | int = "auto",
    expert_cache: str | int | None = None,
    adapter_path: str | os.PathLike[str] | None = None,
    check: str = "first",
) -> tuple[nn.Module, dict[str, Any]]:
    """As `load`, but `(model, config)` and no tokenizer needed: as `mlx_lm.utils.load_model`."""
    engine = load_engine(
        pack,
        memory=memory,
        expert_cache=expert_cache,
        adapter_path=adapter_path,
        check=check,
        prefill_step=MLX_LM_PREFILL_STEP,
    )
    return engine.model, engine.config


def load_engine(
    pack: str | os.PathLike[str] | Pack,
    *,
    memory: str | int = "auto",
    expert_cache: str | int | None = None,
    adapter_path: str | os.PathLike[str] | None = None,
    context: int = DEFAULT_CONTEXT,
    prefill_step: int | None = None,
    keep_streaming: bool = False,
    spread: bool = True,
    spreader: Spreader | None = None,
    max_kv_size: int | None = None,
    kv_bits: int | None = None,
    check: str = "first",
    lossy_top_k: int | None = None,
    pins: int = 0,
    wire: bool = False,
) -> Engine:
    """Load a pack and keep what the command reports. Options and errors as `load`.

    Memory is planned for `context` tokens of prompt and answer, and for `prefill_step`,
    `max_kv_size` and `kv_bits` as mlx-lm's generation has them. Without
    `prefill_step` the plan chooses one, which generation is to be given. `lossy_top_k` makes the
    routers pick fewer experts and weigh them as they weigh any: other tokens, fewer reads. `pins`
    is how many experts of a layer a warm start is to keep for good, and `wire` has Metal keep the
    weights in RAM between answers too.

    `keep_streaming` leaves layers streamed even when all their experts fit, and `spread=False`
    keeps to one CPU stream: for measuring. `spreader` lends the streams of an earlier load, which
    MLX never ends.
    """
    if check not in CHECKS:
        raise SourceError(f"check: {check!r} is none of {', '.join(CHECKS)}")
    if wire:
        most_wired()
    opened = pack if isinstance(pack, Pack) else Pack.open(pack)
    manifest = opened.manifest
    if check != "never":
        for name in wrong_files(opened):
            remedy = repair_command(opened)
            raise FormatError(f"{opened.path / name}: differs from its digest; {remedy}")
    check_device(opened)
    memory_nbytes = None if memory == "auto" else _size(memory, "memory")
    cache: int | str | None = expert_cache
    if cache == "auto":
        cache = None
    elif cache not in (None, "all", "floor"):
        cache = _size(cache, "expert_cache")

    model, config = build_model(opened, lossy_top_k)
    stock = expert_modules(model, manifest)
    shared = load_shared(opened, check != "never")
    put_shared(model, manifest, shared.arrays)
    if adapter_path is not None:
        for module in manifest.modules:
            replace_module(model, module.path, nn.Module())
        apply_adapters(model, Path(adapter_path), stock)

    shape = _probe(opened, model, stock, context, max_kv_size, kv_bits, adapter_path)
    needs = _needs(manifest, shape, context, shared.adopted_nbytes + shared.copied_nbytes)
    if lossy_top_k is not None and max(shape.top_k) != lossy_top_k:
        raise SourceError(
            f"--lossy-top-k {lossy_top_k}: the routers of this model pick {max(shape.top_k)}"
        )
    plan = plan_memory(
        manifest.modules,
        needs,
        available=available_memory(),
        memory=memory_nbytes,
        expert_cache=cache,
        prefill_step=prefill_step,
    )
    if (problem := problem_of_group(plan.total)) is not None:
        raise BudgetError(f"{problem}; state less, or leave --memory and --expert-cache out")
    check_pins(manifest.modules, plan, needs.top_k, pins)
    wired = wire_memory(plan.shared + plan.slots) if wire else 0
    mx.set_cache_limit(plan.mlx_cache)
    free = available_memory() - (plan.total - resident_memory())
    direct = bypasses_page_cache(manifest.expert_nbytes, free)

    is_widened = needs_float32(model)  # some have switch layers that are no experts
    compute_in_float32(model)
    if spreader is None:
        spreader = Spreader.for_machine() if spread else Spreader(1)
    layers = []
    last: StreamedExperts | None = None
    n_workers = _read_workers(opened, direct)
    pool = ThreadPoolExecutor(max_workers=n_workers, thread_name_prefix="moepack-read")
    for index, module in enumerate(manifest.modules):
        n_slots = plan.slots_per_layer[index]
        reader = RecordReader(opened, index, pool, direct, check)
        banks = Banks(module, n_slots)
        stock[module.path].load_weights(list(banks.arrays.items()), strict=False)
        is_widened = is_widened or needs_float32(stock[module.path])
        compute_in_float32(stock[module.path])
        if n_slots == module.n_experts and not keep_streaming:
            for start in range(0, n_slots, 64):
                experts = range(start, min(start + 64, n_slots))
                reader.read_all(experts, [banks.rows[e] for e in experts])
            reader.close()
            whole = stock[module.path]
            if spreader.n_streams > 1:
                whole = SpreadExperts(whole, spreader)
            replace_module(model, module.path, whole)
            last = None
        else:
            last = StreamedExperts(
                stock[module.path], reader, banks, SlotCache(module.n_experts, n_slots), spreader
            )
            replace_module(model, module.path, last)
            layers.append(last)
    spread_linears(model, spreader)
    model.eval()
    return Engine(
        pack=opened,
        model=model,
        config=config,
        plan=plan,
        layers=tuple(layers),
        shared=shared,
        is_widened=is_widened,
        vocabulary=shape.vocabulary,
        lossy_top_k=lossy_top_k,
        pins=pins,
        read_workers=n_workers,
        wired=wired,
        forgettable=None if shape.last_is_remembered else last,
    )


def _read_workers(pack: Pack, direct: bool) -> int:
    """How many threads read experts: what a probe of the disk found best, if there was one.

    No more than READ_WORKERS where each has a buffer, which `_needs` counts.
    """
    largest = max(pack.manifest.modules, key=lambda module: module.stride)
    if direct and any(needs_buffer(module) for module in pack.manifest.modules):
        return READ_WORKERS
    disk = known_disk(pack.expert_file(largest), largest.record_nbytes)
    return READ_WORKERS if disk is None else disk.read_workers


def measure_needs(pack: Pack, context: int = DEFAULT_CONTEXT) -> Needs:
    """What `load_engine` plans with, of a pack's config and manifest alone: no weight is read.

    `pack` need not have weight files. Raises FormatError.
    """
    manifest = pack.manifest
    model, _ = build_model(pack)
    stock = expert_modules(model, manifest)
    unread = {t.name: mx.zeros(t.shape, dtype=MLX_DTYPES[t.dtype]) for t in manifest.shared}
    put_shared(model, manifest, unread)
    shape = _probe(pack, model, stock, context)
    return _needs(manifest, shape, context, 0)


def _probe(
    pack: Pack,
    model: nn.Module,
    stock: dict[str, nn.Module],
    context: int,
    max_kv_size: int | None = None,
    kv_bits: int | None = None,
    adapter_path: str | os.PathLike[str] | None = None,
) -> ModelShape:
    """The shape of a model whose shared weights are in place; probes are left in its experts'."""
    probes = [ShapeProbe(stock[module.path]) for module in pack.manifest.modules]
    for module, probe in zip(pack.manifest.modules, probes, strict=True):
        replace_module(model, module.path, probe)
    try:
        return measure_shape(model, probes, context, max_kv_size, kv_bits)
    except (ValueError, TypeError, IndexError, AttributeError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        cause = "is its config.json right"
        if adapter_path is not None:
            cause += f", and the adapter {adapter_path}"
        raise FormatError(
            f"{pack.path}: the model cannot be called; {cause}? ({reason})"
        ) from error


def _needs(
    manifest: Manifest,
    shape: ModelShape,
    context: int,
    n_loaded: int,
) -> Needs:
    """The needs of a model of this shape; `n_loaded` bytes of shared weights are in memory now."""
    return Needs(
        shared=sum(tensor.nbytes for tensor in manifest.shared),
        kv=shape.kv_nbytes,
        base=max(0, resident_memory() - n_loaded)
        + max(widening_nbytes(module) for module in manifest.modules)
        + READ_WORKERS * max(module.stride for module in manifest.modules),
        top_k=shape.top_k,
        context=context,
        token=shape.token_nbytes,
        score=shape.score_nbytes,
        keeps_buffers=mx.default_device().type == mx.DeviceType.gpu,
    )


def pack_tokenizer(pack: Pack) -> TokenizerWrapper:
    """A pack's tokenizer, before the model is loaded. Raises SourceError, FormatError."""
    return load_tokenizer(pack.path, read_config(pack))


def _size(value: str | int, name: str) -> int:
    try:
        return parse_size(value)
    except ValueError as error:
        raise SourceError(f"{name}: {error}") from error
