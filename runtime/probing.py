"""What a model needs, asked of the model itself: its graph is built and measured, never evaluated.

MLX infers shapes while a graph is built. So a call on `context` tokens tells the size of every
kind of cache, and each expert module's top-k, for any family, without a table.
"""

import copy
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from moepack.formats.errors import SourceError
from moepack.runtime.standing import StandIn

__all__ = ["ModelShape", "ShapeProbe", "measure_shape"]


class ShapeProbe(StandIn):
    """Stands in for an expert module: notes the shapes of a call and answers with zeros."""

    def __init__(self, stock: nn.Module) -> None:
        super().__init__(stock)
        self.top_k = 0
        self.pairs_nbytes = 0
        self.anchor: mx.array | None = None  # what an answer is made of, instead of nothing
        self._input_dims = [
            int(m.input_dims)
            for m in stock.modules()
            if isinstance(m, SwitchLinear | QuantizedSwitchLinear)
        ]

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        """Zeros `(..., k, dim)`, all experts' outputs having the size of their input."""
        self.top_k = indices.shape[-1]
        dim = x.shape[-1]
        inner = sum(self._input_dims) - (len(self._input_dims) - 1) * dim  # what the last one reads
        width = dim + max(inner, 0)
        self.pairs_nbytes = self.top_k * PAIR_COPIES * width * x.dtype.size
        shape = (*indices.shape, dim)
        if self.anchor is not None:
            return mx.broadcast_to(self.anchor[:1].astype(x.dtype), shape)
        return mx.zeros(shape, dtype=x.dtype)


# mlx-lm's KVCache grows by this many tokens at a time.
GROWTH_STEP = 256
# mlx-lm's default for quantized caches.
KV_GROUP_SIZE = 64
# Arrays of a row an expert and token that a call holds at once: gathered, gate, up, activated,
# down, put back in order; measured with 300 to 2,000 tokens.
PAIR_COPIES = 3
# Attention scores of every head, and what softmax makes of them, not all at once; measured.
SCORE_COPIES = 1.5
# Heads of these widths are attended to without scores in memory on Metal.
FUSED_HEAD_DIMS = (64, 80, 128)
# A single token takes the paths of decoding, unless it is all there is.
MIN_TOKENS = 2
ANCHOR_NBYTES = 2**17  # more than MLX's allocator rounds by


@dataclass(frozen=True, slots=True)
class ModelShape:
    """`top_k` by module; bytes of the caches for `context` tokens; logits a position.

    A chunk of a prompt holds `token_nbytes` a token while its experts run, and `score_nbytes` a
    token and token of the past while it attends. `last_is_remembered`: some cache depends on what
    the last expert module says of a prompt.
    """

    top_k: tuple[int, ...]
    kv_nbytes: int
    vocabulary: int
    token_nbytes: int
    score_nbytes: int
    last_is_remembered: bool


def measure_shape(
    model: nn.Module,
    probes: list[ShapeProbe],
    context: int,
    max_kv_size: int | None = None,
    kv_bits: int | None = None,
) -> ModelShape:
    """Build, and drop, graphs of calls that need no more than `context`; `probes` are in place.

    What caches need for a long context follows from two short calls, a growth step apart: off
    Metal, the graph of linear attention has nodes for every token, and 4,096 tokens of 30 such
    layers take ten seconds and a gigabyte to build. Windows count as full caches, unless
    `max_kv_size` makes them; `kv_bits` quantizes what mlx-lm can quantize. Raises SourceError
    where it cannot.
    """
    if max_kv_size is not None:
        context = min(context, max_kv_size)
    n_steps = max(0, context - MIN_TOKENS) // GROWTH_STEP
    first = context - n_steps * GROWTH_STEP
    with _watching_attention() as scores:
        vocabulary, sizes = _cache_sizes(model, first, max_kv_size, kv_bits)
    if n_steps:
        _, grown = _cache_sizes(model, first + GROWTH_STEP, max_kv_size, kv_bits)
        sizes = [a + (b - a) * n_steps for a, b in zip(sizes, grown, strict=True)]
    unused = [i for i, probe in enumerate(probes) if probe.top_k == 0]
    if unused:
        raise ValueError(f"expert modules {unused} are never called")
    return ModelShape(
        top_k=tuple(probe.top_k for probe in probes),
        kv_nbytes=sum(sizes),
        vocabulary=vocabulary,
        token_nbytes=max(probe.pairs_nbytes for probe in probes),
        score_nbytes=max(scores, default=0),
        last_is_remembered=_is_remembered(model, probes[-1]),
    )


def _is_remembered(model: nn.Module, probe: ShapeProbe) -> bool:
    """Whether caches depend on what a module says: then their graphs keep that in memory."""
    probe.anchor = mx.zeros(ANCHOR_NBYTES, dtype=mx.uint8)
    mx.eval(probe.anchor)
    cache: list[Any] = make_prompt_cache(model)
    model(mx.zeros((1, MIN_TOKENS), dtype=mx.int32), cache=cache)
    gc.collect()
    with_anchor = mx.get_active_memory()
    probe.anchor = None
    return with_anchor - mx.get_active_memory() < ANCHOR_NBYTES


@contextmanager
def _watching_attention() -> Iterator[list[int]]:
    """Collects, for each attention built, what its scores take a token and token of the past."""
    stock = mx.fast.scaled_dot_product_attention
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    found: list[int] = []

    def attention(q: mx.array, k: mx.array, v: mx.array, **options: Any) -> mx.array:
        is_fused = on_gpu and q.shape[-1] == v.shape[-1] and q.shape[-1] in FUSED_HEAD_DIMS
        found.append(0 if is_fused else int(q.shape[1] * q.dtype.size * SCORE_COPIES))
        return stock(q, k, v, **options)

    mx.fast.scaled_dot_product_attention = attention
    try:
        yield found
    finally:
        mx.fast.scaled_dot_product_attention = stock


def _cache_sizes(
    model: nn.Module, n_tokens: int, max_kv_size: int | None, kv_bits: int | None
) -> tuple[int, list[int]]:
    """(logits a position, bytes of each array of the caches) after a call on `n_tokens` tokens.

    0 for an array that is not there.
    """
    cache: list[Any] = make_prompt_cache(model, max_kv_size)
    logits = model(mx.zeros((1, n_tokens), dtype=mx.int32), cache=cache)
    if kv_bits is not None:
        _quantize_caches(model, cache, kv_bits)
    leaves: list[Any] = []
    for entry in cache:
        leaves += dict(tree_flatten(entry.state)).values()
    sizes = [leaf.nbytes if isinstance(leaf, mx.array) else 0 for leaf in leaves]
    return logits.shape[-1], sizes


def _quantize_caches(model: nn.Module, cache: list[Any], bits: int) -> None:
    """Quantize in place, as mlx-lm does before its next call, which is tried too."""
    try:
        maybe_quantize_kv_cache(cache, 0, KV_GROUP_SIZE, bits)
        model(mx.zeros((1, 1), dtype=mx.int32), cache=[copy.copy(entry) for entry in cache])
    except (NotImplementedError, ValueError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise SourceError(
            f"--kv-bits: mlx-lm cannot quantize the KV cache of this model ({reason})"
        ) from error
