"""LoRA adapters made by mlx-lm, put on a model's shared weights by mlx-lm's own loader."""

from collections.abc import Iterable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils
from safetensors import SafetensorError, safe_open

from moepack.formats.errors import SourceError

__all__ = ["apply_adapters"]


def apply_adapters(model: nn.Module, folder: Path, expert_paths: Iterable[str]) -> None:
    """Put the adapter in `folder` on a model whose expert modules are out of the way.

    Raises SourceError: no adapter there, one that does not fit, or one that adapts experts, which
    a pack streams unchanged.
    """
    weights = folder / "adapters.safetensors"
    for path in (folder / "adapter_config.json", weights):
        if not path.is_file():
            raise SourceError(f"{path}: no such file; not an adapter that mlx-lm made")
    try:
        with safe_open(weights, framework="numpy") as file:
            names = list(file.keys())
    except (OSError, SafetensorError) as error:
        raise SourceError(f"{weights}: damaged or cut safetensors file ({error})") from error
    prefixes = tuple(f"{path}." for path in expert_paths)
    for name in names:
        if name.startswith(prefixes):
            raise SourceError(
                f"{folder}: adapts experts ({name}), which a pack streams unchanged; fuse it into "
                "the checkpoint with mlx_lm.fuse and convert that"
            )
    try:
        mlx_lm.utils.load_adapters(model, str(folder))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise SourceError(f"{folder}: the adapter does not fit the model ({reason})") from error
    mx.eval(model.parameters())
