"""Unquantized half-precision switch layers on the CPU: its `gather_mm` takes float32 only.

Stock mlx-lm fails there. The experts that a call picks are computed in float32 and the result is
rounded to the type that went in. On Metal the stock path stays.
"""

import os
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import SwitchLinear

from moepack.formats.manifest import ExpertModule

__all__ = ["compute_in_float32", "needs_float32", "widening_nbytes"]

HALF_TYPES = (mx.bfloat16, mx.float16)
HALF_NAMES = ("BF16", "F16")
# Experts widened at a time: bounds the float32 copies of a long prompt's experts.
EXPERTS_AT_ONCE = 8


def needs_float32(module: nn.Module) -> bool:
    """Whether the module has switch layers that this backend's `gather_mm` cannot take."""
    return mx.default_device().type == mx.DeviceType.cpu and any(
        _is_half(m) for m in module.modules()
    )


def compute_in_float32(module: nn.Module) -> None:
    """Where `needs_float32`, replace the switch layers below `module` by ones that widen."""
    if not needs_float32(module):
        return
    for parent in module.modules():
        for name, child in parent.items():
            if isinstance(child, nn.Module) and _is_half(child):
                parent[name] = WideningSwitchLinear(child)


def widening_nbytes(module: ExpertModule) -> int:
    """The most that float32 copies of a packed module's experts take in a call."""
    if mx.default_device().type != mx.DeviceType.cpu:
        return 0
    weights = [p for p in module.parts if p.dtype in HALF_NAMES and p.name.endswith(".weight")]
    largest = max((part.nbytes // 2 for part in weights), default=0)
    return 4 * EXPERTS_AT_ONCE * largest * (os.cpu_count() or 1)


def _is_half(module: nn.Module) -> bool:
    return isinstance(module, SwitchLinear) and module.weight.dtype in HALF_TYPES


class WideningSwitchLinear(nn.Module):
    """A SwitchLinear that multiplies in float32, a few experts at a time; it waits for its input.

    Each pair of a row and an expert is a product of its own, so the bits do not depend on which
    other pairs are in the call.
    """

    def __init__(self, stock: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.weight = stock.weight
        if "bias" in stock:
            self.bias = stock.bias

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """As SwitchLinear: x `(..., m, in)` broadcast with indices `(...)` -> `(..., m, out)`."""
        pairs_shape = np.broadcast_shapes(x.shape[:-2], indices.shape)
        rows = mx.broadcast_to(x, (*pairs_shape, *x.shape[-2:])).reshape(-1, *x.shape[-2:])
        mx.eval(rows, indices)
        picked: Any = np.broadcast_to(np.array(indices), pairs_shape).reshape(-1)
        experts = np.unique(picked)
        outputs, places = [], []
        for start in range(0, len(experts), EXPERTS_AT_ONCE):
            some = experts[start : start + EXPERTS_AT_ONCE]
            pairs = np.flatnonzero(np.isin(picked, some))
            weight = self.weight[mx.array(some)].astype(mx.float32)
            y = mx.gather_mm(
                rows[mx.array(pairs)].astype(mx.float32),
                weight.swapaxes(-1, -2),
                rhs_indices=mx.array(np.searchsorted(some, picked[pairs]).astype(np.uint32)),
            )
            mx.eval(y)
            outputs.append(y)
            places.append(pairs)
        order = np.argsort(np.concatenate(places))
        y = mx.concatenate(outputs)[mx.array(order)].reshape(*pairs_shape, x.shape[-2], -1)
        if "bias" in self:
            y = y + mx.expand_dims(self["bias"][indices].astype(mx.float32), -2)
        return y.astype(x.dtype)
