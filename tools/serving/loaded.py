"""The model in memory: loading one of a catalog's packs, and giving it back."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from moepack.formats.sizes import format_size
from moepack.runtime.loading import Engine, load_engine
from moepack.runtime.spreading import Spreader
from moepack.runtime.warm import warm_up
from moepack.tools.reporting import WIDENED, note
from moepack.tools.serving.catalog import Catalog
from moepack.tools.serving.generation import Generation
from moepack.tools.serving.usage import Usage, Watch
from moepack.tools.warming import keep, profile_of

__all__ = ["Counts", "Loaded", "loader"]

SAVE_S = 300.0  # between two saves of which experts are used most
# MLX's CPU backend cannot be interrupted inside a layer, or a wave of one, and computes some 1e9
# operations a second and core: 16 tokens of a layer of Qwen3 30B took 2 s on two cores.
CPU_TOKENS_PER_CORE = 8


@dataclass(frozen=True, slots=True)
class Counts:
    """What `run --json` counts, since the start."""

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0
    expert_hits: int = 0
    expert_misses: int = 0
    expert_read_bytes: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        mine, others = asdict(self), asdict(other)
        return Counts(**{name: mine[name] + others[name] for name in mine})


class Loaded:
    """A loaded pack, the `number`-th. `generation` is for the thread that loaded it alone.

    `profile` is where to keep which experts are used most, if anywhere.
    """

    def __init__(
        self,
        name: str,
        number: int,
        engine: Engine,
        catalog: Catalog,
        watch: Watch,
        n_cores: int,
        profile: Path | None,
    ) -> None:
        self.name = name
        self.number = number
        self.engine = engine
        modules = engine.pack.manifest.modules
        self.usage = Usage([module.n_experts for module in modules], watch)
        tokenizer = catalog.tokenizer(name)
        self.has_chat_template = bool(tokenizer.has_chat_template)
        step = prefill_step(engine, n_cores)
        self.generation = Generation(engine, tokenizer, catalog.context, step, self.usage)
        self._profile = profile
        self._saved = time.monotonic()

    def counts(self) -> Counts:
        """Of this model, since it was loaded."""
        totals, counters = self.generation.totals, self.engine.counters()
        return Counts(
            totals.prompt,
            totals.cached,
            totals.generated,
            sum(c.hits for c in counters),
            sum(c.misses for c in counters),
            sum(c.bytes_read for c in counters),
        )

    def residents(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Whether each expert is in memory, in the order of `usage.counts`."""
        starts = self.usage.starts
        is_resident = np.ones(starts[-1], np.bool_)
        for layer in self.engine.layers:
            start = starts[layer.number]
            is_resident[start : starts[layer.number + 1]] = False
            is_resident[[start + expert for expert in layer.residents]] = True
        return is_resident

    def save_if_due(self) -> None:
        """Keep which experts are used most, for the next start, from time to time."""
        if time.monotonic() - self._saved >= SAVE_S:
            self._save()

    def close(self) -> None:
        """The model is no longer used: keep its profile, close its files."""
        self._save()
        for layer in self.engine.layers:
            layer.close()

    def _save(self) -> None:
        self._saved = time.monotonic()
        if self._profile is not None:
            keep(self.engine, self._profile)


def prefill_step(engine: Engine, n_cores: int) -> int:
    """Tokens of a prompt to run at once: as planned, or fewer, to be interrupted soon enough.

    A wave has the share of a layer's work that the slots have of its experts, so the fewer slots,
    the more tokens: each chunk reads the experts it picks again.
    """
    planned = engine.plan.prefill_step
    if mx.default_device().type == mx.DeviceType.gpu:
        return planned
    modules, slots = engine.pack.manifest.modules, engine.plan.slots_per_layer
    n_waves = min(m.n_experts // n for m, n in zip(modules, slots, strict=True))
    return min(planned, CPU_TOKENS_PER_CORE * n_cores * n_waves)


def loader(
    catalog: Catalog,
    watch: Watch,
    *,
    memory: int | str,
    expert_cache: int | str,
    warm_start: bool,
    wire: bool,
) -> Callable[[str], Loaded]:
    """A function that loads the model of a name. It raises what loading a pack raises."""
    spreader = Spreader.for_machine()
    numbers = count(1)

    def load(name: str) -> Loaded:
        started = time.perf_counter()
        catalog.keep_tokenizer(name)
        catalog.tokenizer(name)  # its memory counts in the plan
        engine = load_engine(
            catalog.pack(name),
            memory=memory,
            expert_cache=expert_cache,
            context=catalog.context,
            spreader=spreader,
            wire=wire,
        )
        profile = profile_of(engine, warm_start)
        if profile is not None:
            for problem in warm_up(engine, profile):
                note(f"warning: {problem}")
        if engine.is_widened:
            note(WIDENED)
        wired = f", {format_size(engine.wired)} wired" if engine.wired else ""
        note(f"loaded {name} in {time.perf_counter() - started:.1f} s{wired}")
        return Loaded(name, next(numbers), engine, catalog, watch, spreader.n_streams, profile)

    return load
