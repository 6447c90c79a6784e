"""`moepack verify`: passes what is equal, and names what is not."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import tiny_models
from conftest import make_pack

import moepack.packer.comparing
import moepack.tools.logits
import moepack.tools.reference_model
import moepack.tools.verify
from moepack.formats.codec import encode
from moepack.formats.digests import digest_bytes
from moepack.formats.manifest import ExpertModule
from moepack.formats.pack import MANIFEST_NAME, Pack
from moepack.packer.checkpoint import ConvertOptions
from moepack.tools.cli import main

WAYS = {"fits": "the source is loaded fully", "bounded": "at most 5 at a time"}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the source is loaded: made to look too large for any memory, or not."""
    if request.param == "bounded":
        module = moepack.tools.reference_model
        monkeypatch.setattr(module, "whole_nbytes", lambda model: 2**60)
        monkeypatch.setattr(module, "n_banked", lambda *sizes: 5)
    return str(request.param)


def verify_json(
    *arguments: object, code: int, capsys: pytest.CaptureFixture[str]
) -> dict[str, Any]:
    """The object that `verify --json` prints."""
    assert main(["verify", *map(str, arguments), "--json"]) == code
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
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


def test_with_a_record_of_every_layer_damaged_verify_lists_those_and_repair_ends_it(
    q4_pack: Path, q4_source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pack = Path(shutil.copytree(q4_pack, tmp_path / "p"))
    wrong = []
    for layer, module in enumerate(Pack.open(pack).manifest.modules):
        expert = 3 * layer + 1
        wrong.append((layer, expert))
        flip_bit(pack / module.file, expert * module.stride + module.record_nbytes // 3)
    listed = verify_json(pack, code=1, capsys=capsys)["mismatches"]
    assert [(m["layer"], m["expert"]) for m in listed] == wrong
    for prompt in (tiny_models.random_tokens(1), tiny_models.random_tokens(60)):
        arguments = ["-p", tiny_models.text_of(prompt), "-m", "4", "--expert-cache", "floor"]
        assert main(["run", str(q4_pack), *arguments]) == 0
        answer = capsys.readouterr().out
        status = main(["run", str(pack), *arguments])
        assert (status, capsys.readouterr().out) in ((0, answer), (1, ""))
    assert status == 1  # the long prompt touches them
    assert main(["repair", str(pack), str(q4_source)]) == 0
    for file in q4_pack.rglob("*"):
        if file.is_file():
            assert (pack / file.relative_to(q4_pack)).read_bytes() == file.read_bytes()


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


def rewrite_record(
    pack: Path, layer: int, expert: int, change: Callable[[bytearray, ExpertModule], None]
) -> None:
    """Change one record of a pack, and its digest in the manifest, as a stranger could."""
    manifest = Pack.open(pack).manifest
    module = manifest.modules[layer]
    with (pack / module.file).open("r+b") as file:
        file.seek(expert * module.stride)
        record = bytearray(file.read(module.record_nbytes))
        change(record, module)
        file.seek(expert * module.stride)
        file.write(record)
    digests = bytearray(module.digests)
    digests[expert * 16 : expert * 16 + 16] = digest_bytes(record)
    modules = list(manifest.modules)
    modules[layer] = replace(module, digests=bytes(digests))
    (pack / MANIFEST_NAME).write_bytes(encode(replace(manifest, modules=tuple(modules))))


def test_one_low_bit_of_one_scale_is_found_though_its_digest_is_right(
    way: str,
    q4_pack: Path,
    q4_source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pack = Path(shutil.copytree(q4_pack, tmp_path / "p"))
    # An expert that some of the tokens pick, not all.
    expert = 11

    def flip(record: bytearray, module: ExpertModule) -> None:
        (part,) = (p for p in module.parts if p.name == "down_proj.scales")
        record[part.offset + 4 * 17] ^= 1

    rewrite_record(pack, 1, expert, flip)
    capsys.readouterr()
    assert main(["verify", str(pack)]) == 0
    assert main(["verify", str(pack), str(q4_source)]) == 1
    printed = capsys.readouterr()
    named = f"layer 1 (model.layers.2.mlp.switch_mlp) expert {expert} down_proj.scales"
    assert f"DIFFERENT  {named}: bytes differ from the source's" in printed.out
    assert "first difference at position " in printed.out
    assert f"first different bytes in {named}" in printed.out
    assert WAYS[way] in printed.err
    figures = verify_json(pack, q4_source, code=1, capsys=capsys)
    assert [(m["layer"], m["expert"], m["part"]) for m in figures["mismatches"]] == [
        (1, expert, "down_proj.scales")
    ]
    assert 0 < figures["logits"]["identical"] < figures["logits"]["positions"]
    assert 0 < figures["logits"]["max_abs_diff"] < 0.1


def test_an_expert_packed_from_another_checkpoint_is_named_though_its_digest_is_right(
    way: str,
    q4_pack: Path,
    q4_source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = make_pack(tiny_models.write_checkpoint(tmp_path / "s", bits=4, seed=5), tmp_path / "o")
    pack = Path(shutil.copytree(q4_pack, tmp_path / "p"))

    def take_other(record: bytearray, module: ExpertModule) -> None:
        with (other / module.file).open("rb") as file:
            file.seek(3 * module.stride)
            record[:] = file.read(module.record_nbytes)

    rewrite_record(pack, 0, 3, take_other)
    capsys.readouterr()
    figures = verify_json(pack, q4_source, code=1, capsys=capsys)
    assert {(m["layer"], m["expert"]) for m in figures["mismatches"]} == {(0, 3)}
    parts = {p.name for p in Pack.open(pack).manifest.modules[0].parts}
    assert {m["part"] for m in figures["mismatches"]} == parts
    assert figures["logits"]["first_difference"] is not None
    assert main(["verify", str(pack), str(q4_source)]) == 1
    assert WAYS[way] in capsys.readouterr().err


def test_a_whole_pack_passes_either_way(
    way: str, q4_pack: Path, q4_source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(q4_pack), str(q4_source)]) == 0
    assert WAYS[way] in capsys.readouterr().err


def test_two_cache_sizes_give_the_same_bits(
    q4_pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = Pack.open(q4_pack).manifest.modules[0].record_nbytes
    figures = verify_json(q4_pack, "--budgets", code=0, capsys=capsys)
    assert figures["budgets"] == {"sizes": [2 * 4 * record, 2 * 8 * record], "identical": True}
    assert figures["logits"] is None
    assert verify_json(q4_pack, code=0, capsys=capsys)["budgets"] is None


def test_other_bits_with_another_cache_size_fail_and_their_position_is_named(
    q4_pack: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stock = moepack.tools.logits.position_digests
    n_runs = 0

    def wrong_in_the_second(*arguments: Any) -> list[bytes]:
        nonlocal n_runs
        n_runs += 1
        digests = stock(*arguments)
        return digests if n_runs % 2 else [*digests[:31], b"", *digests[32:]]

    monkeypatch.setattr(moepack.tools.logits, "position_digests", wrong_in_the_second)
    figures = verify_json(q4_pack, "--budgets", code=1, capsys=capsys)
    assert figures["budgets"]["identical"] is False
    text = tiny_models.text_of(tiny_models.random_tokens(40))
    assert main(["verify", str(q4_pack), "--budgets", "--prompt", text]) == 1
    assert "DIFFERENT, first at position 31" in capsys.readouterr().out


def test_memory_for_one_cache_size_alone_is_refused_with_what_works(
    q4_pack: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(moepack.tools.verify, "_bound", lambda memory: 10**6)
    assert main(["verify", str(q4_pack), "--budgets"]) == 1
    line = capsys.readouterr().err
    assert "one cache size alone" in line
    assert "the smallest that works is --memory " in line


def test_memory_for_no_tensor_computed_as_convert_did_is_refused_before_it_is_taken(
    float_source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pack = make_pack(float_source, tmp_path / "p", ConvertOptions(quantize=True, q_group_size=32))
    monkeypatch.setattr(moepack.tools.verify, "_bound", lambda memory: 10**6)
    monkeypatch.setattr(moepack.packer.comparing, "compare", None)
    assert main(["verify", str(pack), str(float_source)]) == 1
    assert "1 MB of memory are too little to compute" in capsys.readouterr().err


def test_memory_for_no_reference_at_all_is_refused_with_what_works(
    q4_pack: Path,
    q4_source: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(moepack.tools.verify, "_bound", lambda memory: 10**6)
    assert main(["verify", str(q4_pack), str(q4_source)]) == 1
    line = capsys.readouterr().err
    assert "too little to compare with the source" in line
    assert "the smallest that works is --memory " in line
