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

__all__ = ["ModelShape", "ShapeProbe", "measure_shape"]


class ShapeProbe(nn.Module):
    """Stands in for an expert module: notes the shapes of a call and answers with zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.top_k = 0
        self.dim = 0

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        """Zeros `(..., k, dim)`, all experts' outputs having the size of their input."""
        self.top_k = indices.shape[-1]
        self.dim = x.shape[-1]
        return mx.zeros((*indices.shape, x.shape[-1]), dtype=x.dtype)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """`top_k` by module; bytes of the caches for `context` tokens; width of what experts read."""

    top_k: tuple[int, ...]
    kv_nbytes: int
    dim: int


def measure_shape(model: nn.Module, probes: list[ShapeProbe], context: int) -> ModelShape:
    """Build, and drop, the graph of one call on `context` tokens; `probes` are in place."""
    cache: list[Any] = make_prompt_cache(model)
    model(mx.zeros((1, context), dtype=mx.int32), cache=cache)
    kv_nbytes = sum(
        array.nbytes
        for entry in cache
        for _, array in tree_flatten(entry.state)
        if isinstance(array, mx.array)
    )
    unused = [i for i, probe in enumerate(probes) if probe.top_k == 0]
    if unused:
        raise ValueError(f"expert modules {unused} are never called")
    return ModelShape(
        tuple(probe.top_k for probe in probes), kv_nbytes, max(probe.dim for probe in probes)
    )
