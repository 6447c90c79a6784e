"""What a model needs, asked of the model itself: its graph is built and measured, never evaluated.

MLX infers shapes while a graph is built. So a call on `context` tokens tells the size of every
kind of cache, and each expert module's top-k, for any family, without a table.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from moepack.runtime.standing import StandIn

__all__ = ["ModelShape", "ShapeProbe", "measure_shape"]


class ShapeProbe(StandIn):
    """Stands in for an expert module: notes the shapes of a call and answers with zeros."""

    def __init__(self, stock: nn.Module) -> None:
        super().__init__(stock)
        self.top_k = 0
        self.dim = 0

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        """Zeros `(..., k, dim)`, all experts' outputs having the size of their input."""
        self.top_k = indices.shape[-1]
        self.dim = x.shape[-1]
        return mx.zeros((*indices.shape, x.shape[-1]), dtype=x.dtype)


# mlx-lm's KVCache grows by this many tokens at a time.
GROWTH_STEP = 256
# A single token takes the paths of decoding, unless it is all there is.
MIN_TOKENS = 2


@dataclass(frozen=True, slots=True)
class ModelShape:
    """`top_k` by module; bytes of the caches for `context` tokens; width of what experts read."""

    top_k: tuple[int, ...]
    kv_nbytes: int
    dim: int


def measure_shape(model: nn.Module, probes: list[ShapeProbe], context: int) -> ModelShape:
    """Build, and drop, graphs of calls that need no more than `context`; `probes` are in place.

    What caches need for a long context follows from two short calls, a growth step apart: off
    Metal, the graph of linear attention has nodes for every token, and 4,096 tokens of 30 such
    layers take ten seconds and a gigabyte to build. Windows count as full caches.
    """
    n_steps = max(0, context - MIN_TOKENS) // GROWTH_STEP
    first = context - n_steps * GROWTH_STEP
    sizes = _cache_sizes(model, first)
    if n_steps:
        grown = _cache_sizes(model, first + GROWTH_STEP)
        sizes = [a + (b - a) * n_steps for a, b in zip(sizes, grown, strict=True)]
    kv_nbytes = sum(sizes)
    unused = [i for i, probe in enumerate(probes) if probe.top_k == 0]
    if unused:
        raise ValueError(f"expert modules {unused} are never called")
    return ModelShape(
        tuple(probe.top_k for probe in probes), kv_nbytes, max(probe.dim for probe in probes)
    )


def _cache_sizes(model: nn.Module, n_tokens: int) -> list[int]:
    """Bytes of each array of the caches after a call on `n_tokens` tokens; 0 for one not there."""
    cache: list[Any] = make_prompt_cache(model)
    model(mx.zeros((1, n_tokens), dtype=mx.int32), cache=cache)
    leaves: list[Any] = []
    for entry in cache:
        leaves += dict(tree_flatten(entry.state)).values()
    return [leaf.nbytes if isinstance(leaf, mx.array) else 0 for leaf in leaves]
