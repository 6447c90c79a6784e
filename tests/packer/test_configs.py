"""Configs of transformers 5 in the form that mlx-lm reads."""

from typing import Any

import pytest
import tiny_models
from families import FAMILIES

from moepack.formats.errors import SourceError
from moepack.packer.configs import lift_config, unread_rope_keys

PLAIN = tiny_models.QWEN3_MOE


def saved_by_transformers(**rope: Any) -> dict[str, Any]:
    """PLAIN with `rope_parameters` for `rope_theta`, and the saved name of `num_experts`."""
    config = {k: v for k, v in PLAIN.items() if k not in ("rope_theta", "num_experts")}
    parameters = {"rope_theta": 50000.0, "rope_type": "default", **rope}
    return {**config, "num_local_experts": 16, "rope_parameters": parameters}


def test_a_config_that_lacks_nothing_is_unchanged() -> None:
    assert lift_config(PLAIN) == PLAIN


def test_rope_theta_and_aliases_are_lifted() -> None:
    lifted = lift_config(saved_by_transformers())
    assert lifted["rope_theta"] == 50000.0
    assert lifted["num_experts"] == 16


@pytest.mark.parametrize("stated", [50000.0, None])
def test_a_key_stated_twice_alike_or_as_null_is_lifted(stated: float | None) -> None:
    lifted = lift_config({**saved_by_transformers(), "rope_theta": stated})
    assert lifted["rope_theta"] == 50000.0


def test_a_key_stated_twice_with_other_values_is_refused() -> None:
    with pytest.raises(SourceError, match=r"rope_theta is 123\.0, but 50000\.0 by rope_parameters"):
        lift_config({**saved_by_transformers(), "rope_theta": 123.0})


@pytest.mark.parametrize("model_type", ["gpt_oss", "deepseek_v3"])
def test_a_null_rope_scaling_does_not_hide_the_one_in_rope_parameters(model_type: str) -> None:
    yarn = {"rope_type": "yarn", "factor": 8.0}
    config = {
        **FAMILIES[model_type].config,
        "rope_scaling": None,
        "rope_parameters": {"rope_theta": 50000.0, **yarn},
    }
    config.pop("rope_theta", None)
    assert lift_config(config)["rope_scaling"] == yarn


def test_rope_scaling_stated_twice_alike_is_kept_and_otherwise_refused() -> None:
    old = {"type": "yarn", "factor": 8.0}
    config = {
        **tiny_models.GPT_OSS,
        "rope_scaling": old,
        "rope_parameters": {"rope_type": "yarn", "factor": 8.0},
    }
    assert lift_config(config)["rope_scaling"] == old
    with pytest.raises(SourceError, match=r"rope_scaling is .* by rope_parameters"):
        lift_config({**config, "rope_scaling": {**old, "factor": 4.0}})


def test_a_scaled_rope_that_the_model_ignores_is_refused_by_name() -> None:
    config = saved_by_transformers(rope_type="yarn", factor=4.0)
    with pytest.raises(SourceError, match=r"rope_parameters\.rope_type.*'qwen3_moe' ignores it"):
        lift_config(config)


def test_a_partial_rotary_factor_that_the_model_ignores_is_refused_by_name() -> None:
    config = saved_by_transformers(partial_rotary_factor=0.5)
    with pytest.raises(SourceError, match=r"rope_parameters\.partial_rotary_factor"):
        lift_config(config)


def test_rope_by_layer_type_is_refused_by_name() -> None:
    config = saved_by_transformers()
    config["rope_parameters"] = {"full_attention": config["rope_parameters"]}
    with pytest.raises(SourceError, match="rope_parameters is given by layer type"):
        lift_config(config)


def test_an_unknown_model_type_is_left_to_the_loader() -> None:
    assert lift_config({"model_type": "nosuch", "rope_parameters": {}}) == {
        "model_type": "nosuch",
        "rope_parameters": {},
    }


def test_a_rope_key_that_no_code_reads_is_told() -> None:
    """gpt-oss states `truncate`, which mlx-lm's rope does not know."""
    scaling = {"rope_type": "yarn", "factor": 8.0, "truncate": False}
    assert unread_rope_keys({**tiny_models.GPT_OSS, "rope_scaling": scaling}) == [
        "rope_scaling.truncate"
    ]
    assert unread_rope_keys(PLAIN) == []


def test_a_rope_that_is_not_scaled_has_no_unread_key() -> None:
    assert unread_rope_keys(saved_by_transformers()) == []
