"""Using every core on MLX's CPU backend, where one stream is one thread.

A call's experts are dealt out to several streams, and large quantized matrices are cut by output
rows. Each number is still computed by the same kernel from the same bytes: the bits are the same.
On Metal nothing is spread.
"""

import os
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from moepack.runtime.standing import StandIn

__all__ = ["SpreadExperts", "Spreader", "spread_linears"]

# A quantized matrix of fewer weights takes less time than handing it to another thread.
MIN_WEIGHTS = 2**18
Ids = np.ndarray[Any, np.dtype[np.uint32]]


class Spreader:
    """The streams that share work: the caller's own, and `n_streams - 1` helpers."""

    def __init__(self, n_streams: int) -> None:
        # Thread-local: a model may be built on one thread and run on another, as servers do.
        self.helpers = [mx.new_thread_local_stream(mx.cpu) for _ in range(n_streams - 1)]

    @classmethod
    def for_machine(cls) -> "Spreader":
        """One stream per core this process may use; on Metal only the caller's own."""
        if mx.default_device().type == mx.DeviceType.gpu:
            return cls(1)
        affinity = getattr(os, "sched_getaffinity", None)
        return cls(len(affinity(0)) if affinity is not None else os.cpu_count() or 1)

    @property
    def n_streams(self) -> int:
        """How many streams share work."""
        return len(self.helpers) + 1

    def bounds(self, n: int) -> list[int]:
        """Where to cut `n` things into one run per stream, as equal as they can be."""
        n_parts = min(n, self.n_streams)
        return [n * i // n_parts for i in range(n_parts + 1)]

    def run_experts(self, stock: nn.Module, x: mx.array, ids: mx.array | Ids) -> mx.array:
        """`stock(x, ids)`: the k experts of every token dealt out to the streams.

        Where there are fewer experts a token than streams, the tokens are dealt out instead.
        """
        by_token = ids.shape[-1] < self.n_streams <= ids.shape[-2]
        bounds = self.bounds(ids.shape[-2 if by_token else -1])
        if len(bounds) == 2:
            y: mx.array = stock(x, mx.array(ids))
            return y
        parts = []
        for stream, (start, end) in zip([None, *self.helpers], pairwise(bounds), strict=False):
            cut = slice(start, end)
            piece = ids[..., cut, :] if by_token else ids[..., cut]
            rows = x[..., cut, :] if by_token else x
            with mx.stream(stream) if stream is not None else nullcontext():
                parts.append(stock(rows, mx.array(piece)))
        return mx.concatenate(parts, axis=-3 if by_token else -2)

    def run_token(
        self, stock: nn.Module, x: mx.array, ids: list[int], ndim: int, from_last: bool = False
    ) -> mx.array:
        """`stock(x, ids)` for the experts of one token: ids as an array of `ndim` dimensions.

        `from_last`: the larger shares go to the streams that otherwise get the smaller ones.
        """
        bounds = self.bounds(len(ids))
        streams = [None, *self.helpers][: len(bounds) - 1]
        parts = []
        for stream, (start, end) in zip(
            reversed(streams) if from_last else streams, pairwise(bounds), strict=True
        ):
            piece: list[Any] = ids[start:end]
            for _ in range(ndim - 1):
                piece = [piece]
            with mx.stream(stream) if stream is not None else nullcontext():
                parts.append(stock(x, mx.array(piece, dtype=mx.uint32)))
        return mx.concatenate(parts, axis=-2) if len(parts) > 1 else parts[0]


class SpreadExperts(StandIn):
    """A resident expert module whose experts are dealt out to streams."""

    def __init__(self, stock: nn.Module, spreader: Spreader) -> None:
        super().__init__(stock)
        self._spreader = spreader

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        """As the stock module."""
        return self._spreader.run_experts(self.stock, x, indices)


class SpreadQuantizedLinear(nn.QuantizedLinear):
    """A QuantizedLinear cut by output rows; made by `spread_linears` from a loaded one."""

    def __call__(self, x: mx.array) -> mx.array:
        """As QuantizedLinear: x `(..., in)` -> `(..., out)`."""
        y = _multiply_cuts(self, x)
        return y + self["bias"] if "bias" in self else y


class SpreadQuantizedEmbedding(nn.QuantizedEmbedding):
    """A QuantizedEmbedding whose use as a head is cut by output rows."""

    def as_linear(self, x: mx.array) -> mx.array:
        """As QuantizedEmbedding: x `(..., in)` -> `(..., out)`."""
        return _multiply_cuts(self, x)


SPREAD_CLASSES: dict[type, type] = {
    nn.QuantizedLinear: SpreadQuantizedLinear,
    nn.QuantizedEmbedding: SpreadQuantizedEmbedding,
}


def spread_linears(model: nn.Module, spreader: Spreader) -> None:
    """Cut the large quantized matrices of a loaded model; they stay modules of the same kind."""
    if spreader.n_streams == 1:
        return
    for module in model.modules():
        if type(module) not in SPREAD_CLASSES or _n_weights(module) < MIN_WEIGHTS:
            continue
        matrix = [module["weight"], module["scales"], module.get("biases")]
        cuts = [
            tuple(None if a is None else a[start:end] for a in matrix)
            for start, end in pairwise(spreader.bounds(matrix[0].shape[0]))
        ]
        mx.eval([a for cut in cuts for a in cut if a is not None])  # views, no copies
        module._cuts = list(zip([None, *spreader.helpers], cuts, strict=False))
        module.__class__ = SPREAD_CLASSES[type(module)]


def _multiply_cuts(module: nn.Module, x: mx.array) -> mx.array:
    """x `(..., in)` times the transposed matrix, each cut on its stream."""
    parts = [
        mx.quantized_matmul(
            x,
            weight,
            scales=scales,
            biases=biases,
            transpose=True,
            group_size=module.group_size,
            bits=module.bits,
            mode=module.mode,
            stream=stream,
        )
        for stream, (weight, scales, biases) in module._cuts
    ]
    return mx.concatenate(parts, axis=-1)


def _n_weights(module: nn.Module) -> int:
    rows, packed = module.weight.shape
    return int(rows * packed * 32 // module.bits)
