"""Unpack gives the checkpoint back: the very shards where it can, equal tensors where it cannot."""

import errno
import hashlib
import json
import os
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import families
import mlx.core as mx
import mlx_lm.utils
import numpy as np
import pytest
import tiny_models
from conftest import make_pack
from tiny_models import per_expert, random_tokens, read_weights, resave, run_prompt

from moepack.formats.codec import encode
from moepack.formats.digests import check_digests
from moepack.formats.errors import FormatError, SourceError
from moepack.formats.pack import Pack
from moepack.packer import unpacking
from moepack.packer.checkpoint import ConvertOptions
from moepack.packer.source import INDEX_NAME
from moepack.packer.unpacking import unpack

N_SHARDS = 4


def mixed(path: str, _: Any) -> bool | dict[str, Any]:
    """down_proj in 8 bits, layer 2 in 6, the rest as asked."""
    if path.endswith("down_proj"):
        return {"bits": 8, "group_size": 32}
    return {"bits": 6, "group_size": 32} if ".layers.2." in path else True


def write_tiny(**options: Any) -> Callable[[Path], Path]:
    """Writes a checkpoint of tiny_models."""
    return lambda folder: tiny_models.write_checkpoint(folder, **options)


def write_gemma4(folder: Path) -> Path:
    """4-bit tensors under Hugging Face's names, which are not the model's."""
    mlx = families.write_checkpoint(families.FAMILIES["gemma4"], folder.with_name("mlx"), "affine")
    weights = {
        name.replace("language_model.model.", "model.language_model."): array
        for name, array in read_weights(mlx).items()
    }
    tiny_models.write_tokenizer(mlx)
    return resave(mlx, folder, weights)


COPIED: dict[str, Callable[[Path], Path]] = {
    "float": write_tiny(),
    "mixed bits": write_tiny(bits=4, predicate=mixed),
    "mxfp4": write_tiny(mode="mxfp4"),
    "nvfp4": write_tiny(mode="nvfp4"),
    "gpt_oss": write_tiny(config=tiny_models.GPT_OSS, bits=4),
    "gemma4": write_gemma4,
}


def fingerprint(folder: Path) -> dict[str, str]:
    """The sha256 of every file of a folder."""
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


def names_in(folder: Path) -> list[str]:
    """What is directly in a folder, hidden entries included."""
    return sorted(entry.name for entry in folder.iterdir())


@pytest.mark.parametrize("name", COPIED)
def test_copied_checkpoint_comes_back_byte_for_byte(tmp_path: Path, name: str) -> None:
    """Every shard, the index, the config and the tokenizer, and no other file."""
    whole = COPIED[name](tmp_path / "whole")
    source = resave(whole, tmp_path / "source", read_weights(whole), n_shards=N_SHARDS)
    pack = Pack.open(make_pack(source, tmp_path / "out.moepack"))
    unpacked = unpack(pack, tmp_path / "unpacked")
    assert len(unpacked.restored) == N_SHARDS
    assert unpacked.made == ()
    assert fingerprint(tmp_path / "unpacked") == fingerprint(source)


def test_renamed_tensors_come_back_under_their_old_names(tmp_path: Path) -> None:
    """The case above is one of renamed tensors; and the pack has the new names."""
    source = write_gemma4(tmp_path / "source")
    manifest = Pack.open(make_pack(source, tmp_path / "out.moepack")).manifest
    assert set(manifest.source.renamed) == set(read_weights(source))


def test_single_file_without_index_comes_back(q4_source: Path, tmp_path: Path) -> None:
    """The least that a checkpoint can be."""
    source = Path(shutil.copytree(q4_source, tmp_path / "source"))
    (source / INDEX_NAME).unlink()
    pack = Pack.open(make_pack(source, tmp_path / "out.moepack"))
    assert unpack(pack, tmp_path / "unpacked").restored == ("model.safetensors",)
    assert fingerprint(tmp_path / "unpacked") == fingerprint(source)


def test_progress_adds_up_to_the_bytes_of_all_tensors(q4_pack: Path, tmp_path: Path) -> None:
    """A bar that reaches its end."""
    done: list[int] = []
    pack = Pack.open(q4_pack)
    unpack(pack, tmp_path / "unpacked", done.append)
    total = pack.manifest.expert_nbytes + sum(t.nbytes for t in pack.manifest.shared)
    assert sum(done) == total


class Made(NamedTuple):
    """A pack of computed tensors and what it was unpacked to."""

    pack: Path
    folder: Path
    made: tuple[str, ...]


QUANTIZE = ConvertOptions(quantize=True, q_bits=4, q_group_size=32)


@pytest.fixture(scope="module")
def quantized(float_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Stacked and quantized by convert, in a config with neither."""
    folder = tmp_path_factory.mktemp("quantized")
    source = resave(float_source, folder / "raw", per_expert(read_weights(float_source)))
    pack = make_pack(source, folder / "out.moepack", QUANTIZE)
    unpacked = unpack(Pack.open(pack), folder / "unpacked")
    assert unpacked.restored == ()
    return Made(pack, folder / "unpacked", unpacked.made)


def test_computed_tensors_go_to_a_new_shard(quantized: Made) -> None:
    """Named as mlx-lm names one, with an index."""
    assert quantized.made == ("model.safetensors",)
    index = json.loads((quantized.folder / INDEX_NAME).read_text())
    assert set(index["weight_map"]) == set(read_weights(quantized.folder))
    assert set(index["weight_map"].values()) == {"model.safetensors"}


def test_unpacked_model_gives_the_logits_of_mlx_lms_own_quantization(
    quantized: Made, float_source: Path
) -> None:
    """Bit for bit, loaded by mlx-lm from the config that unpack wrote."""
    model, config = mlx_lm.utils.load_model(float_source)
    model, _ = mlx_lm.utils.quantize_model(model, config, 32, 4)
    unpacked, _ = mlx_lm.utils.load(str(quantized.folder))
    prompt = random_tokens(20)
    wanted, found = run_prompt(model, prompt), run_prompt(unpacked, prompt)
    assert np.array_equal(np.array(found), np.array(wanted))


def test_pack_of_an_unpacked_pack_has_the_same_records(quantized: Made, tmp_path: Path) -> None:
    """And the same shared weights: it goes round."""
    one = Pack.open(quantized.pack).manifest
    two = Pack.open(make_pack(quantized.folder, tmp_path / "again.moepack")).manifest
    assert two.modules == one.modules
    assert two.shared == one.shared
    assert two.quantization == one.quantization


def test_new_shards_are_cut_at_the_size_of_mlx_lms(
    quantized: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbered, listed in the index, none larger, and all tensors there."""
    monkeypatch.setattr(unpacking, "MAX_SHARD_NBYTES", 200_000)
    unpacked = unpack(Pack.open(quantized.pack), tmp_path / "unpacked")
    n = len(unpacked.made)
    assert n > 2
    assert unpacked.made == tuple(f"model-{i:05d}-of-{n:05d}.safetensors" for i in range(1, n + 1))
    for name in unpacked.made:
        weights = mx.load(str(tmp_path / "unpacked" / name))
        assert isinstance(weights, dict)
        assert sum(a.nbytes for a in weights.values()) <= 200_000
    whole, cut = read_weights(quantized.folder), read_weights(tmp_path / "unpacked")
    assert whole.keys() == cut.keys()
    assert all(mx.array_equal(whole[name], cut[name]) for name in whole)


def test_shards_without_the_dropped_tensor_come_back_byte_for_byte(
    float_source: Path, tmp_path: Path
) -> None:
    """The one with it is made anew, under a name that is none of theirs, and mlx-lm loads all."""
    config = json.loads((float_source / "config.json").read_text())
    weights = read_weights(float_source)  # with a head that a tied model does not use
    source = resave(
        float_source,
        tmp_path / "source",
        weights,
        n_shards=N_SHARDS,
        config={**config, "tie_word_embeddings": True},
    )
    unpacked = unpack(Pack.open(make_pack(source, tmp_path / "out.moepack")), tmp_path / "unpacked")
    before, after = fingerprint(source), fingerprint(tmp_path / "unpacked")
    assert len(unpacked.restored) == N_SHARDS - 1
    assert [after[name] for name in unpacked.restored] == [
        before[name] for name in unpacked.restored
    ]
    assert unpacked.made == ("model-unpacked-00001-of-00001.safetensors",)
    prompt = random_tokens(10)
    (one, _), (two, _) = (mlx_lm.utils.load(str(p)) for p in (source, tmp_path / "unpacked"))
    assert np.array_equal(np.array(run_prompt(one, prompt)), np.array(run_prompt(two, prompt)))


def test_cast_checkpoint_comes_back_as_it_is_in_the_pack(
    float_source: Path, tmp_path: Path
) -> None:
    """Its sizes are the pack's, not the source's."""
    options = ConvertOptions(dtype="bfloat16")
    pack = Pack.open(make_pack(float_source, tmp_path / "out.moepack", options))
    assert unpack(pack, tmp_path / "unpacked").restored == ()
    weights = read_weights(tmp_path / "unpacked")
    source = read_weights(float_source)
    assert weights.keys() == source.keys()
    assert all(mx.array_equal(weights[n], source[n].astype(mx.bfloat16)) for n in source)


@pytest.mark.parametrize("kind", ["folder", "file", "pack", "dangling link"])
def test_existing_destination_is_refused(q4_pack: Path, tmp_path: Path, kind: str) -> None:
    """And stays as it was."""
    destination = tmp_path / "place" / "there"
    destination.parent.mkdir()
    if kind == "folder":
        destination.mkdir()
    elif kind == "file":
        destination.write_text("text")
    elif kind == "pack":
        shutil.copytree(q4_pack, destination)
    else:
        destination.symlink_to(tmp_path / "nowhere")
    before = fingerprint(destination.parent)
    with pytest.raises(SourceError, match="there: exists"):
        unpack(Pack.open(q4_pack), destination)
    assert fingerprint(destination.parent) == before
    assert names_in(destination.parent) == ["there"]


@pytest.fixture
def damaged(q4_pack: Path, tmp_path: Path) -> tuple[Pack, Path]:
    """A pack with one bit of one record flipped, and a place to unpack it to."""
    folder = Path(shutil.copytree(q4_pack, tmp_path / "damaged.moepack"))
    pack = Pack.open(folder)
    module = pack.manifest.modules[1]
    file = pack.expert_file(module)
    data = bytearray(file.read_bytes())
    data[5 * module.stride + 100] ^= 4
    file.write_bytes(data)
    assert list(check_digests(pack)) != []
    (tmp_path / "place").mkdir()
    return pack, tmp_path / "place"


def test_flipped_bit_in_a_record_is_refused_and_leaves_nothing(damaged: tuple[Pack, Path]) -> None:
    """Named by the shard that it would be in."""
    pack, place = damaged
    with pytest.raises(
        FormatError, match=r"model\.safetensors: made again, its sha256 is .*verify"
    ):
        unpack(pack, place / "unpacked")
    assert names_in(place) == []


def test_flipped_bit_in_a_computed_record_is_refused_and_leaves_nothing(
    quantized: Made, tmp_path: Path
) -> None:
    """There is no sha256 of a new shard to hold it against, but a digest of each record."""
    folder = Path(shutil.copytree(quantized.pack, tmp_path / "damaged.moepack"))
    pack = Pack.open(folder)
    module = pack.manifest.modules[0]
    file = pack.expert_file(module)
    data = bytearray(file.read_bytes())
    data[3 * module.stride + 100] ^= 4
    file.write_bytes(data)
    place = tmp_path / "place"
    place.mkdir()
    with pytest.raises(FormatError, match="expert 3"):
        unpack(pack, place / "unpacked")
    assert names_in(place) == []


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
def test_damaged_small_file_is_refused_and_leaves_nothing(
    q4_pack: Path, tmp_path: Path, name: str
) -> None:
    """It is no part of any shard."""
    folder = Path(shutil.copytree(q4_pack, tmp_path / "damaged.moepack"))
    (folder / name).write_bytes((folder / name).read_bytes().replace(b" ", b"\t", 1))
    with pytest.raises(FormatError, match=f"{name}: differs from its digest"):
        unpack(Pack.open(folder), tmp_path / "unpacked")
    assert names_in(tmp_path) == ["damaged.moepack"]


class Usage(NamedTuple):
    """What shutil.disk_usage gives."""

    total: int
    used: int
    free: int


def test_full_disk_is_refused_before_writing(
    q4_pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naming both sizes."""
    pack = Pack.open(q4_pack)
    nbytes = pack.manifest.expert_nbytes + sum(t.nbytes for t in pack.manifest.shared)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 10**9, nbytes - 1))
    with pytest.raises(SourceError, match=f"needs {nbytes:,} .*{nbytes - 1:,} free"):
        unpack(pack, tmp_path / "unpacked")
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("fail_at", range(1, 8))
def test_disk_full_in_the_middle_leaves_nothing(
    q4_pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fail_at: int
) -> None:
    """fsync, of the shard, of each small file, of the folder, is where file systems say so."""
    n_calls = 0
    fsync = os.fsync

    def failing(fd: int) -> None:
        nonlocal n_calls
        n_calls += 1
        if n_calls == fail_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(SourceError, match="No space left on device; nothing was kept"):
        unpack(Pack.open(q4_pack), tmp_path / "unpacked")
    assert n_calls == fail_at
    assert names_in(tmp_path) == []


def test_interrupt_leaves_nothing(q4_pack: Path, tmp_path: Path) -> None:
    """Ctrl-C is passed on."""

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        unpack(Pack.open(q4_pack), tmp_path / "unpacked", interrupt)
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("header", [{"nosuch": {"data_offsets": [0, 4]}}, "["])
def test_forged_header_of_a_shard_is_refused(q4_pack: Path, tmp_path: Path, header: object) -> None:
    """It names a tensor that the pack does not have, or is no header at all."""
    folder = Path(shutil.copytree(q4_pack, tmp_path / "forged.moepack"))
    text = json.dumps(header).encode() if isinstance(header, dict) else b"[" * 100_000
    manifest = Pack.open(folder).manifest
    shard, *rest = manifest.source.shards
    forged = replace(shard, header=struct.pack("<Q", len(text)) + text, nbytes=10**6)
    source = replace(manifest.source, shards=(forged, *rest))
    (folder / "manifest.msgpack").write_bytes(encode(replace(manifest, source=source)))
    with pytest.raises(FormatError, match=r"no tensor 'nosuch'|is damaged"):
        unpack(Pack.open(folder), tmp_path / "unpacked")
    assert names_in(tmp_path) == ["forged.moepack"]


def test_unfinished_convert_in_the_way_is_not_touched(q4_pack: Path, tmp_path: Path) -> None:
    """It may hold the only copy of shards that it consumed."""
    staging = tmp_path / ".unpacked.partial"
    staging.mkdir()
    (staging / "journal").write_text("{}\n")
    (staging / "shared.bin").write_bytes(b"consumed")
    before = fingerprint(staging)
    with pytest.raises(SourceError, match=r"\.unpacked\.partial: is in the way"):
        unpack(Pack.open(q4_pack), tmp_path / "unpacked")
    assert fingerprint(staging) == before


def test_leftover_of_a_killed_unpack_is_cleared(
    q4_pack: Path, q4_source: Path, tmp_path: Path
) -> None:
    """Its files do not get into the checkpoint."""
    leftover = tmp_path / ".unpacked.partial"
    leftover.mkdir()
    (leftover / "model-extra.safetensors").write_bytes(b"half")
    (leftover / "unpacking").touch()
    unpack(Pack.open(q4_pack), tmp_path / "unpacked")
    assert fingerprint(tmp_path / "unpacked") == fingerprint(q4_source)
    assert names_in(tmp_path) == ["unpacked"]
