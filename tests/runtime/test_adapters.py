"""LoRA adapters on a pack: of shared weights as with mlx-lm, of experts refused."""

from pathlib import Path

import mlx.core as mx
import mlx_lm.utils
import pytest
from tiny_models import run_prompt, write_adapter

from moepack.formats.errors import SourceError
from moepack.runtime import load_model

TOKENS = [5, 9, 40, 77, 3, 200]


@pytest.mark.parametrize("cache", ["floor", "all"])
def test_an_adapter_of_attention_gives_the_logits_of_mlx_lm(
    cache: str, q4_source: Path, q4_pack: Path, tmp_path: Path
) -> None:
    adapter = write_adapter(q4_source, tmp_path / "a", ["self_attn.q_proj", "self_attn.v_proj"])
    original, _ = mlx_lm.utils.load_model(q4_source)
    plain = run_prompt(original, TOKENS, n_decoded=2)
    mlx_lm.utils.load_adapters(original, str(adapter))
    original.eval()
    wanted = run_prompt(original, TOKENS, n_decoded=2)
    model, _ = load_model(q4_pack, expert_cache=cache, adapter_path=adapter)
    got = run_prompt(model, TOKENS, n_decoded=2)
    assert mx.array_equal(got, wanted)
    assert not mx.array_equal(got, plain)


@pytest.mark.parametrize("keys", [["mlp.switch_mlp.up_proj"], None], ids=["named", "all"])
def test_an_adapter_of_experts_is_refused_with_the_reason(
    keys: list[str] | None, q4_source: Path, q4_pack: Path, tmp_path: Path
) -> None:
    adapter = write_adapter(q4_source, tmp_path / "a", keys)
    with pytest.raises(SourceError, match=r"adapts experts \(model\.layers\..*mlx_lm\.fuse"):
        load_model(q4_pack, adapter_path=adapter)


def test_an_adapter_of_another_model_is_refused(
    q4_source: Path, q4_pack: Path, tmp_path: Path
) -> None:
    adapter = write_adapter(q4_source, tmp_path / "a")
    weights = mx.load(str(adapter / "adapters.safetensors"))
    assert isinstance(weights, dict)
    wrong = {name: mx.concatenate([w, w]) for name, w in weights.items()}
    mx.save_safetensors(str(adapter / "adapters.safetensors"), wrong)
    with pytest.raises(SourceError, match="does not fit the model"):
        load_model(q4_pack, adapter_path=adapter)


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapters.safetensors"])
def test_a_folder_without_an_adapter_is_refused(
    missing: str, q4_source: Path, q4_pack: Path, tmp_path: Path
) -> None:
    adapter = write_adapter(q4_source, tmp_path / "a")
    (adapter / missing).unlink()
    with pytest.raises(SourceError, match=missing):
        load_model(q4_pack, adapter_path=adapter)
