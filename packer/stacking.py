"""Experts that a checkpoint holds one by one and mlx-lm's own loader leaves so.

mlx-lm stacks the layouts it knows. What is left over as `P.experts.E.up_proj.scales` is stacked
here, when the model has exactly one expert module below `P` and that has an `up_proj`: then the
model's own names say where it belongs. Nothing is evaluated.
"""

import re
from collections.abc import Mapping

import mlx.core as mx
import mlx.nn as nn

from moepack.formats.errors import SourceError

__all__ = ["stack_experts"]

ONE_EXPERT = re.compile(
    r"(?P<owner>.+)\.experts\.(?P<expert>\d+)\.(?P<projection>\w+)\.(?P<leaf>\w+)"
)


def stack_experts(
    weights: Mapping[str, mx.array], modules: Mapping[str, nn.Module]
) -> dict[str, mx.array]:
    """The weights with left-over experts stacked; others, and names of no one meaning, unchanged.

    `modules` are the model's expert modules by path. Raises SourceError naming an expert's tensor
    that is missing from a stack, or packed as mlx-lm reads dense layers only.
    """
    rest: dict[str, mx.array] = {}
    stacks: dict[str, dict[int, mx.array]] = {}
    names: dict[str, str] = {}
    for name, array in weights.items():
        match = ONE_EXPERT.fullmatch(name)
        target = _target(match, modules) if match else None
        if match is None or target is None or target in weights:
            rest[name] = array
            continue
        if match["leaf"] == "qweight":
            raise SourceError(f"tensor {name!r}: mlx-lm reads no experts packed by AWQ or GPTQ")
        stacks.setdefault(target, {})[int(match["expert"])] = array
        names[target] = f"{match['owner']}.experts.{{}}.{match['projection']}.{match['leaf']}"
    for target, arrays in stacks.items():
        path, projection, _ = target.rsplit(".", 2)
        n_experts = modules[path][projection].num_experts
        for expert in range(n_experts):
            if expert not in arrays:
                raise SourceError(f"tensor {names[target].format(expert)!r} is missing")
        if len(arrays) > n_experts:
            extra = names[target].format(max(arrays))
            raise SourceError(f"tensor {extra!r}: the model has {n_experts} experts a layer")
        rest[target] = mx.stack([arrays[expert] for expert in range(n_experts)])
    return rest


def _target(match: re.Match[str], modules: Mapping[str, nn.Module]) -> str | None:
    """The stacked parameter that one expert's tensor belongs to; None when that is not plain."""
    below = [path for path in modules if path.startswith(f"{match['owner']}.")]
    if len(below) != 1 or match["projection"] not in modules[below[0]]:
        return None
    return f"{below[0]}.{match['projection']}.{match['leaf']}"
