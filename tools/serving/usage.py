"""How often each expert of a model is picked, counted while a page shows it.

The counting is the generation thread's; other threads copy the counts, and none waits for another.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten

from moepack.runtime.loading import Engine
from moepack.runtime.standing import StandIn
from moepack.runtime.streamed import Record

__all__ = ["Usage", "Watch", "watch_experts"]


@dataclass(slots=True)
class Watch:
    """How many pages look on; without one nothing is counted."""

    n_pages: int = 0


class Usage:
    """Uses of every expert since somebody looked, the modules' one after the other in `counts`."""

    def __init__(self, n_experts: Sequence[int], watch: Watch) -> None:
        self.starts = [0, *accumulate(n_experts)]
        self.counts = array("Q", bytes(8 * self.starts[-1]))
        self._watch = watch
        # Picks of resident layers, which mlx-lm computes a step ahead: of the step before, and now.
        self._settled: list[tuple[int, mx.array]] = []
        self._pending: list[tuple[int, mx.array]] = []

    def record(self, module: int, check: Callable[[], object]) -> Record:
        """What to tell the calls of a streamed layer; `check` runs first, and may raise."""
        start, counts, watch = self.starts[module], self.counts, self._watch

        def record(
            experts: Sequence[int], uses: Sequence[int], n_tokens: int, is_decode: bool
        ) -> None:
            check()
            if watch.n_pages:
                for expert, n in zip(experts, uses, strict=True):
                    counts[start + expert] += n

        return record

    def pick(self, module: int, indices: mx.array, is_computed: bool) -> None:
        """A resident layer's router picked these; `settle` counts what is not computed yet."""
        if not self._watch.n_pages:
            return
        if is_computed:
            self._count(module, indices)
        else:
            self._pending.append((module, indices))

    def settle(self) -> None:
        """A token was given: what was picked for it is computed, and can be read without a wait."""
        for module, indices in self._settled:
            self._count(module, indices)
        self._settled, self._pending = self._pending, []

    def forget(self) -> None:
        """The answer is over or was left: what was picked for it may never be computed."""
        self._settled, self._pending = [], []

    def _count(self, module: int, indices: mx.array) -> None:
        experts, uses = np.unique(np.array(indices), return_counts=True)
        counts = np.frombuffer(self.counts, np.uint64)
        counts[experts.astype(np.int64) + self.starts[module]] += uses.astype(np.uint64)


class WatchedExperts(StandIn):
    """Stands where a resident expert module stood: a long prompt can be left at each layer."""

    def __init__(
        self, stock: nn.Module, module: int, usage: Usage, check: Callable[[], object]
    ) -> None:
        super().__init__(stock)
        self._module = module
        self._usage = usage
        self._check = check

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        """As the stock module."""
        is_prompt = indices.size > indices.shape[-1]
        if is_prompt:  # a token alone takes no time worth a wait
            mx.eval(indices)
            self._check()
        self._usage.pick(self._module, indices, is_prompt)
        y: mx.array = self.stock(x, indices)
        return y


def watch_experts(engine: Engine, usage: Usage, check: Callable[[], object]) -> None:
    """Have every expert module count its uses, and call `check`, which may raise, now and then."""
    streamed = {layer.number: layer for layer in engine.layers}
    modules: dict[str, nn.Module] = dict(engine.model.named_modules())
    resident = []
    for number, module in enumerate(engine.pack.manifest.modules):
        if number in streamed:
            streamed[number].record = usage.record(number, check)
            streamed[number].checkpoint = check
        else:
            watched = WatchedExperts(modules[module.path], number, usage, check)
            resident.append((module.path, watched))
    engine.model.update_modules(tree_unflatten(resident))
