"""Configs in the form that mlx-lm's argument classes read.

transformers 5 saves `rope_parameters` where mlx-lm reads `rope_theta`, `rope_scaling` and
`partial_rotary_factor`, and some families save another name for a key, known to transformers as an
alias. mlx-lm then refuses the config, or takes a default although the source states a value. Such
keys are lifted here where their meaning is plain, and refused by name where it is not.
"""

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

import mlx_lm.utils
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moepack.formats.errors import SourceError

__all__ = ["lift_config"]

ROPE_KEYS = ("rope_theta", "partial_rotary_factor")


def lift_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with missing keys lifted, its `text_config` too; equal to it when none is missing.

    Raises SourceError naming a key that is stated but that mlx-lm could not be told of.
    """
    fields = _argument_fields(config)
    lifted = _lift(config, fields)
    if isinstance(text := config.get("text_config"), dict):
        lifted["text_config"] = _lift(text, fields | _argument_fields(text))
    return lifted


def _argument_fields(config: Mapping[str, Any]) -> set[str]:
    """Names of all fields of the argument classes beside the model class of this config."""
    if not isinstance(config.get("model_type"), str):
        return set()
    try:
        model_class, _ = mlx_lm.utils._get_classes(dict(config))
    except (ValueError, AttributeError):  # no such type: the loader says so, or the outer builds it
        return set()
    module = importlib.import_module(model_class.__module__)
    return {
        field.name
        for value in vars(module).values()
        if isinstance(value, type) and dataclasses.is_dataclass(value)
        for field in dataclasses.fields(value)
    }


def _lift(config: Mapping[str, Any], fields: set[str]) -> dict[str, Any]:
    lifted = dict(config)
    for alias, stored in _aliases(config).items():
        for wanted, stated in ((alias, stored), (stored, alias)):
            if wanted in fields and wanted not in config and stated in config:
                lifted[wanted] = config[stated]
    rope = config.get("rope_parameters")
    if isinstance(rope, dict) and "rope_parameters" not in fields:
        _lift_rope(lifted, rope, fields)
    return lifted


def _aliases(config: Mapping[str, Any]) -> dict[str, str]:
    """transformers' own table for this model type: another name -> the name saved."""
    model_type = config.get("model_type")
    if model_type not in CONFIG_MAPPING:
        return {}
    return dict(CONFIG_MAPPING[model_type].attribute_map)


def _lift_rope(lifted: dict[str, Any], rope: Mapping[str, Any], fields: set[str]) -> None:
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
        if key in rope and key not in lifted:
            if key in fields:
                lifted[key] = rope[key]
            elif key == "partial_rotary_factor" and rope[key] != 1.0:
                raise SourceError(_unreadable(lifted, f"rope_parameters.{key}"))
    if "rope_scaling" not in lifted:
        if "rope_scaling" in fields:
            lifted["rope_scaling"] = scaling if is_scaled else None
        elif is_scaled:
            raise SourceError(_unreadable(lifted, "rope_parameters.rope_type"))


def _unreadable(config: Mapping[str, Any], key: str) -> str:
    return f"config.json: {key} is stated, but mlx-lm's {config.get('model_type')!r} ignores it"
