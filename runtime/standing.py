"""A module in the place of another: what a model reads of that other by name is still there."""

from typing import Any

import mlx.nn as nn

__all__ = ["StandIn"]


class StandIn(nn.Module):
    """Stands where `stock` stood. Some models keep more below an expert module than its experts."""

    def __init__(self, stock: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self["stock"] = stock

    def __getattr__(self, name: str) -> Any:
        """What this module does not have itself is the stock module's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self["stock"], name)
