"""Configs in the form that mlx-lm's argument classes read.

transformers 5 saves `rope_parameters` where mlx-lm reads `rope_theta`, `rope_scaling` and
`partial_rotary_factor`, and some families save another name for a key, known to transformers as an
alias. mlx-lm then refuses the config, or takes a default although the source states a value. Such
keys are lifted here where their meaning is plain, and refused by name where it is not.
"""

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING
from types import ModuleType
from typing import Any

import mlx_lm.utils
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moepack.formats.errors import SourceError

__all__ = ["lift_config", "unread_rope_keys"]

ROPE_KEYS = ("rope_theta", "partial_rotary_factor")


def lift_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with missing keys lifted, its `text_config` too; equal to it when none is missing.

    Raises SourceError naming a key that is stated but that mlx-lm could not be told of.
    """
    module = _model_module(config)
    if module is None:  # no such model type: the loader says so
        return dict(config)
    text = config.get("text_config")
    if not isinstance(text, dict):
        arguments = [module]
        if "text_config" in _fields(module):  # mlx-lm takes a flat config for these, too
            arguments = list(_modules_below(module))
        return _lift(config, arguments)
    lifted = _lift(config, [module])
    text_module = _model_module(text)
    inner = [text_module] if text_module else list(_modules_below(module))
    lifted["text_config"] = _lift(text, [module, *inner])
    return lifted


def _model_module(config: Mapping[str, Any]) -> ModuleType | None:
    """mlx-lm's module of this model type."""
    if not isinstance(config.get("model_type"), str):
        return None
    try:
        _, args_class = mlx_lm.utils._get_classes(dict(config))
    except (ValueError, AttributeError):  # no such type, or no model class in its module
        return None
    # The arguments' own module: a family may take another's model class.
    return importlib.import_module(args_class.__module__)


def _modules_below(module: ModuleType) -> Iterator[ModuleType]:
    """The module and those of mlx-lm's models that it takes classes from, itself first."""
    pending, seen = [module], set()
    while pending:
        module = pending.pop(0)
        if module.__name__ in seen:
            continue
        seen.add(module.__name__)
        yield module
        for value in vars(module).values():
            name = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None)
            if isinstance(name, str) and name.startswith("mlx_lm.models."):
                pending.append(importlib.import_module(name))


def _fields(module: ModuleType) -> dict[str, bool]:
    """All fields of the module's argument classes, and whether one of these requires it."""
    found: dict[str, bool] = {}
    for value in vars(module).values():
        if isinstance(value, type) and dataclasses.is_dataclass(value):
            for field in dataclasses.fields(value):
                has_default = field.default is not MISSING or field.default_factory is not MISSING
                found[field.name] = found.get(field.name, False) or not has_default
    return found


def _is_read(name: str, modules: list[ModuleType]) -> bool:
    """Whether code of the models uses this argument: some declare a field that nothing reads."""
    sources = {below for module in modules for below in _modules_below(module)}
    return any(re.search(rf"\.{name}\b", inspect.getsource(m)) for m in sources)


def _lift(config: Mapping[str, Any], modules: list[ModuleType]) -> dict[str, Any]:
    """The config as the argument classes of these modules read it."""
    fields = {name for module in modules for name in _fields(module)}
    required = {name for m in modules for name, is_required in _fields(m).items() if is_required}
    lifted = dict(config)
    for alias, stored in _aliases(config).items():
        for wanted, stated in ((alias, stored), (stored, alias)):
            if wanted in fields and wanted not in config and stated in config:
                lifted[wanted] = config[stated]
    rope = config.get("rope_parameters")
    if isinstance(rope, dict) and "rope_parameters" not in fields:
        _lift_rope(lifted, rope, fields, _is_read("rope_scaling", modules))
    if "head_dim" in required and "head_dim" not in lifted and _has_even_heads(lifted):
        lifted["head_dim"] = lifted["hidden_size"] // lifted["num_attention_heads"]
    return lifted


def _has_even_heads(config: Mapping[str, Any]) -> bool:
    """Whether an unstated head dimension is the hidden size over the heads: transformers' rule."""
    sizes = config.get("hidden_size"), config.get("num_attention_heads")
    is_latent = "kv_lora_rank" in config  # heads of several dimensions, each stated
    return all(isinstance(n, int) and n > 0 for n in sizes) and not is_latent


def _aliases(config: Mapping[str, Any]) -> dict[str, str]:
    """transformers' own table for this model type: another name -> the name saved."""
    model_type = config.get("model_type")
    if model_type not in CONFIG_MAPPING:
        return {}
    return dict(CONFIG_MAPPING[model_type].attribute_map)


def _lift_rope(
    lifted: dict[str, Any], rope: Mapping[str, Any], fields: set[str], is_scaling_read: bool
) -> None:
    """Lift `rope_parameters` of the plain form; those by layer type have no one meaning here."""
    by_layer_type = any(isinstance(value, dict) for value in rope.values())
    scaling = {key: value for key, value in rope.items() if key not in ROPE_KEYS}
    is_scaled = scaling.get("rope_type", scaling.get("type", "default")) != "default"
    if by_layer_type:
        if "rope_theta" in fields and "rope_theta" not in lifted:
            raise SourceError(
                "config.json: rope_parameters is given by layer type, which mlx-lm does not read "
                f"for model type {lifted.get('model_type')!r}; state rope_theta in its place"
            )
        return
    for key in ROPE_KEYS:
        if rope.get(key) is None:
            continue
        if lifted.get(key) is not None:
            _refuse_another(key, lifted[key], rope[key])
        elif key in fields:
            lifted[key] = rope[key]
        elif key == "partial_rotary_factor" and rope[key] != 1.0:
            raise SourceError(_unreadable(lifted, f"rope_parameters.{key}"))
    if lifted.get("rope_scaling") is not None:
        _refuse_another("rope_scaling", _by_rope_type(lifted["rope_scaling"]), _by_rope_type(rope))
    elif is_scaled and not ("rope_scaling" in fields and is_scaling_read):
        raise SourceError(_unreadable(lifted, "rope_parameters.rope_type"))
    elif "rope_scaling" in fields:
        lifted["rope_scaling"] = scaling if is_scaled else None


def _by_rope_type(scaling: Any) -> Any:
    """A rope scaling without what is stated elsewhere too, its type under the newer name."""
    if not isinstance(scaling, dict):
        return scaling
    kept = {k: v for k, v in scaling.items() if k not in ROPE_KEYS and v is not None}
    if "type" in kept:
        kept.setdefault("rope_type", kept.pop("type"))
    return kept


def _refuse_another(key: str, stated: object, in_parameters: object) -> None:
    if stated != in_parameters:
        raise SourceError(
            f"config.json: {key} is {stated}, but {in_parameters} by rope_parameters; "
            "remove the wrong one"
        )


def unread_rope_keys(config: Mapping[str, Any]) -> list[str]:
    """Stated keys of a scaled rope that no code of mlx-lm's model names, such as `truncate`.

    mlx-lm ignores them, so a pack does: its tokens are mlx-lm's. A user should know.
    """
    module = _model_module(config)
    if module is None:
        return []
    code = "".join(inspect.getsource(m) for m in _modules_below(module))
    return [
        f"{owner}.{key}"
        for part in (config, config.get("text_config") or {})
        for owner in ("rope_scaling", "rope_parameters")
        if isinstance(rope := part.get(owner), dict)
        if rope.get("rope_type", rope.get("type")) != "default"  # there is nothing to read, then
        for key, value in rope.items()
        if value is not None and not isinstance(value, dict)
        if not re.search(rf"\b{re.escape(key)}\b", code)
    ]


def _unreadable(config: Mapping[str, Any], key: str) -> str:
    return f"config.json: {key} is stated, but mlx-lm's {config.get('model_type')!r} ignores it"
