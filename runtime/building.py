"""The mlx-lm model of a pack, built from its config and checked against its manifest.

Nothing of it is evaluated here: weights are what a caller puts in.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils
from mlx.utils import tree_flatten

from moepack.formats.errors import FormatError, SourceError
from moepack.formats.manifest import ExpertModule, Manifest, quantization_config
from moepack.formats.pack import Pack
from moepack.formats.validate import validate_config
from moepack.runtime.banks import MLX_DTYPES

__all__ = [
    "build_model",
    "check_device",
    "expert_modules",
    "put_shared",
    "read_config",
    "replace_module",
]

# How configs call the number of experts that a router picks for a token.
TOP_K_KEYS = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "top_k_experts",
    "moe_top_k",
    "moe_topk",
    "moe_k",
)


def read_config(pack: Pack) -> dict[str, Any]:
    """The pack's config as mlx-lm reads it. Raises FormatError."""
    path = pack.path / "config.json"
    try:
        config: dict[str, Any] = mlx_lm.utils.load_config(pack.path)
        validate_config(str(path), config)
    except FormatError:
        raise
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise FormatError(f"{path}: not a model's config ({error})") from error
    return config


def _with_top_k(config: dict[str, Any], top_k: int) -> dict[str, Any]:
    """The config with routers that pick `top_k` experts, where it says how many they pick."""
    changed = {
        key: _with_top_k(value, top_k) if isinstance(value, dict) else value
        for key, value in config.items()
    }
    for key in TOP_K_KEYS:
        if isinstance(stated := config.get(key), int):
            changed[key] = min(stated, top_k)
        elif isinstance(stated, list):  # by layer
            changed[key] = [min(k, top_k) for k in stated]
    return changed


def build_model(pack: Pack, lossy_top_k: int | None = None) -> tuple[nn.Module, dict[str, Any]]:
    """(model with lazy, meaningless weights and the manifest's quantization, config)."""

    def classes(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
        model_class, args_class = mlx_lm.utils._get_classes(config)

        class EmptyModel(model_class):  # type: ignore[misc, valid-type]
            def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
                return weights

        class StatedArguments(args_class):  # type: ignore[misc, valid-type]
            @classmethod
            def from_dict(cls, config: dict[str, Any]) -> Any:
                return args_class.from_dict(stated)

        return EmptyModel, StatedArguments

    stated = read_config(pack)
    if lossy_top_k is not None:
        stated = _with_top_k(stated, lossy_top_k)
    try:
        model, config = mlx_lm.utils.load_model(
            pack.path,
            lazy=True,
            strict=False,
            model_config=quantization_config(pack.manifest),
            get_model_classes=classes,
        )
    except Exception as error:  # a loader for 100 families raises anything
        reason = " ".join(str(error).split())[:300]
        raise FormatError(f"{pack.path}: mlx-lm cannot build the model: {reason}") from error
    model.__class__ = type(model).__mro__[1]
    return model, config


def expert_modules(model: nn.Module, manifest: Manifest) -> dict[str, nn.Module]:
    """The model's expert modules by path, checked against the manifest. Raises FormatError."""
    stock = {module.path: _module_at(model, module.path) for module in manifest.modules}
    for module in manifest.modules:
        _check_parts(module, stock[module.path])
    return stock


def put_shared(model: nn.Module, manifest: Manifest, shared: dict[str, mx.array]) -> None:
    """Load the shared weights strictly: the same names and shapes as the model's, no more."""
    experts = {f"{m.path}.{part.name}" for m in manifest.modules for part in m.parts}
    parameters: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    wanted = {name: array.shape for name, array in parameters.items() if name not in experts}
    for name, array in shared.items():
        if name not in wanted:
            raise FormatError(f"shared tensor {name!r}: the model has no such parameter")
        if wanted[name] != array.shape:
            raise FormatError(
                f"shared tensor {name!r}: shape {array.shape}, the model wants {wanted[name]}"
            )
    for name in wanted:
        if name not in shared:
            raise FormatError(f"shared tensor {name!r} is missing from the pack")
    model.load_weights(list(shared.items()), strict=False)


def _check_parts(module: ExpertModule, stock: nn.Module) -> None:
    """The pack's parts are the model's parameters, of the same shapes. Raises FormatError."""
    packed = {part.name: (module.n_experts, *part.shape) for part in module.parts}
    parameters: dict[str, mx.array] = dict(tree_flatten(stock.parameters()))
    wanted = {name: tuple(array.shape) for name, array in parameters.items()}
    dtypes = {part.name: MLX_DTYPES[part.dtype] for part in module.parts}
    for name in packed:
        if name not in wanted:
            raise FormatError(f"module {module.path!r} part {name!r}: the model has no such part")
        if packed[name][0] != wanted[name][0]:
            raise FormatError(
                f"module {module.path!r}: {module.n_experts} experts, the model wants "
                f"{wanted[name][0]}"
            )
        if packed[name] != wanted[name]:
            raise FormatError(
                f"module {module.path!r} part {name!r}: shape {packed[name]}, the model wants "
                f"{wanted[name]}"
            )
        if dtypes[name] != parameters[name].dtype and not (
            mx.issubdtype(dtypes[name], mx.floating)
            and mx.issubdtype(parameters[name].dtype, mx.floating)
        ):
            raise FormatError(
                f"module {module.path!r} part {name!r}: {dtypes[name]}, the model wants "
                f"{parameters[name].dtype}"
            )


def _module_at(model: nn.Module, path: str) -> nn.Module:
    modules: dict[str, nn.Module] = dict(model.named_modules())
    if path not in modules:
        raise FormatError(f"module {path!r}: the model has no such module")
    return modules[path]


def replace_module(model: nn.Module, path: str, module: nn.Module) -> None:
    """Put `module` at a dotted path."""
    parent: Any = model
    *steps, last = path.split(".")
    for step in steps:
        parent = parent[int(step)] if isinstance(parent, list) else parent[step]
    if isinstance(parent, list):
        parent[int(last)] = module
    else:
        parent[last] = module


def check_device(pack: Pack) -> None:
    """Raises SourceError for tensors that MLX's CPU backend has no kernel for."""
    names = [t.name for t in pack.manifest.shared]
    names += [part.name for m in pack.manifest.modules for part in m.parts]
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    if on_cpu and any(name.endswith(".global_scale") for name in names):
        raise SourceError(f"{pack.path}: nvfp4 with global scales: MLX computes it on a GPU only")
