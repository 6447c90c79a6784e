"""`moepack verify`: passes what is equal, and names what is not."""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import tiny_models
from conftest import make_pack

from moepack.packer.checkpoint import ConvertOptions
from moepack.tools.cli import main


def verify_json(
    *arguments: object, code: int, capsys: pytest.CaptureFixture[str]
) -> dict[str, Any]:
    """The object that `verify --json` prints."""
    assert main(["verify", *map(str, arguments), "--json"]) == code
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


@pytest.mark.parametrize("quantize", [False, True], ids=["as it is", "-q"])
@pytest.mark.parametrize("source", ["float_source", "q4_source"])
def test_a_pack_equals_its_source_in_every_byte_and_logit(
    source: str,
    quantize: bool,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = request.getfixturevalue(source)
    if quantize and source == "q4_source":
        pytest.skip("quantized already")
    options = ConvertOptions(quantize=True, q_group_size=32) if quantize else ConvertOptions()
    pack = make_pack(folder, tmp_path / "p", options)
    figures = verify_json(pack, folder, code=0, capsys=capsys)
    assert figures["ok"] is True
    assert figures["records_checked"] == 32
    assert figures["mismatches"] == []
    logits = figures["logits"]
    assert logits["positions"] == logits["identical"] == 128
    assert logits["max_abs_diff"] == 0.0
    assert logits["top1_agreement"] == 1.0
    assert logits["first_difference"] is None


def test_without_a_source_logits_are_null(
    q4_pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify_json(q4_pack, code=0, capsys=capsys)["logits"] is None


def flip_bit(path: Path, offset: int) -> None:
    """Flip the lowest bit of one byte."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_one_flipped_bit_is_found_and_its_layer_and_expert_named(
    q4_pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pack = tmp_path / "p"
    shutil.copytree(q4_pack, pack)
    flip_bit(pack / "experts/00001.bin", 7 * 16384 + 100)
    figures = verify_json(pack, code=1, capsys=capsys)
    (mismatch,) = figures["mismatches"]
    assert (mismatch["layer"], mismatch["expert"]) == (1, 7)
    assert main(["verify", str(pack)]) == 1
    assert "layer 1 (model.layers.2.mlp.switch_mlp) expert 7" in capsys.readouterr().out


def test_a_pack_of_another_checkpoint_differs_in_bytes_and_logits(
    q4_pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tiny_models.write_checkpoint(tmp_path / "other", bits=4, seed=5)
    capsys.readouterr()
    figures = verify_json(q4_pack, other, code=1, capsys=capsys)
    assert figures["logits"]["max_abs_diff"] > 0
    assert figures["logits"]["first_difference"] == 0
    assert figures["logits"]["max_kl"] > 0
    assert {m["part"] for m in figures["mismatches"]} >= {"gate_proj.weight", "lm_head.weight"}


def test_one_expert_of_another_checkpoint_is_the_one_named(
    float_source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = tiny_models.read_weights(float_source)
    name = "model.layers.1.mlp.switch_mlp.up_proj.weight"
    stacked = weights[name]
    weights[name] = mx.concatenate([stacked[:5], stacked[6:7], stacked[6:]])
    pack = make_pack(tiny_models.resave(float_source, tmp_path / "s", weights), tmp_path / "p")
    figures = verify_json(pack, float_source, code=1, capsys=capsys)
    assert [(m["layer"], m["expert"], m["part"]) for m in figures["mismatches"]] == [
        (0, 5, "up_proj.weight")
    ]
    assert figures["logits"]["identical"] < figures["logits"]["positions"]


def test_a_tolerance_lets_a_small_difference_pass_but_not_a_wrong_byte(
    float_source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = tiny_models.read_weights(float_source)
    weights["lm_head.weight"] = weights["lm_head.weight"] * 1.000001
    other = tiny_models.resave(float_source, tmp_path / "s", weights)
    pack = make_pack(other, tmp_path / "p")
    figures = verify_json(pack, float_source, "--tolerance", "0.1", code=1, capsys=capsys)
    assert 0 < figures["logits"]["max_abs_diff"] < 0.1
    assert [m["part"] for m in figures["mismatches"]] == ["lm_head.weight"]


def test_logits_are_compared_on_the_text_given(
    q4_pack: Path, q4_source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tiny_models.text_of(tiny_models.random_tokens(37))
    (tmp_path / "text").write_text(text, encoding="utf-8")
    for option, value in (("--prompt", text), ("--text-file", str(tmp_path / "text"))):
        figures = verify_json(q4_pack, q4_source, option, value, code=0, capsys=capsys)
        assert figures["logits"]["positions"] == 37


def test_a_pack_without_a_tokenizer_is_compared_on_made_up_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tiny_models.write_checkpoint(tmp_path / "s", bits=4, with_tokenizer=False)
    capsys.readouterr()
    pack = make_pack(source, tmp_path / "p")
    assert verify_json(pack, source, code=0, capsys=capsys)["logits"]["identical"] == 128
