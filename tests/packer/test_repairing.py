"""A damaged pack is made whole from its source, byte for byte; from another, nothing is written."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from conftest import make_pack
from hub_server import MAIN, REPOSITORY, HubServer, serving
from tiny_models import per_expert, read_weights, resave

from moepack.formats.digests import check_digests
from moepack.formats.errors import FormatError, SourceError
from moepack.formats.pack import Pack
from moepack.packer import repairing
from moepack.packer.checkpoint import ConvertOptions
from moepack.packer.repairing import find_damage, open_damaged, pieces_of, repair


@dataclass(frozen=True)
class Made:
    """A pack, what it was made from, and every byte of it."""

    pack: Path
    source: Path
    wanted: dict[str, bytes]


def fingerprint(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, hidden ones included."""
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


@pytest.fixture(scope="module")
def originals(
    float_source: Path, q4_source: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Made]:
    """Packs of three kinds. Read only."""
    folder = tmp_path_factory.mktemp("originals")
    # Hugging Face's layout: a stacked tensor is made of tensors of several shards.
    spread = resave(
        float_source, folder / "spread", per_expert(read_weights(float_source)), n_shards=3
    )
    options = ConvertOptions(quantize=True, q_bits=4, q_group_size=32)
    made = {
        "passed through": make_pack(q4_source, folder / "q4.moepack"),
        "-q": make_pack(float_source, folder / "derived.moepack", options),
        "stacked": make_pack(spread, folder / "stacked.moepack"),
    }
    sources = {"passed through": q4_source, "-q": float_source, "stacked": spread}
    return {kind: Made(p, sources[kind], fingerprint(p)) for kind, p in made.items()}


@pytest.fixture(params=["passed through", "-q", "stacked"])
def made(request: pytest.FixtureRequest, originals: dict[str, Made], tmp_path: Path) -> Made:
    """A copy of each, to damage."""
    original = originals[request.param]
    copy = shutil.copytree(original.pack, tmp_path / "copy.moepack")
    return Made(Path(copy), original.source, original.wanted)


@pytest.fixture
def q4(originals: dict[str, Made], tmp_path: Path) -> Made:
    """A copy of the one that passed through, to damage."""
    original = originals["passed through"]
    copy = shutil.copytree(original.pack, tmp_path / "copy.moepack")
    return Made(Path(copy), original.source, original.wanted)


def flip(path: Path, offset: int) -> None:
    """Change one bit of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 16]))


def damage_widely(pack: Path) -> list[str]:
    """A record of each layer, a shared tensor and a copied file; returns their names."""
    manifest = Pack.open(pack).manifest
    tensor = manifest.shared[len(manifest.shared) // 2]
    flip(pack / "shared.bin", tensor.offset + tensor.nbytes // 2)
    names = [tensor.name, "config.json"]
    for layer, module in enumerate(manifest.modules):
        expert = 7 * layer + 2
        flip(pack / module.file, expert * module.stride + module.record_nbytes - 1)
        names.append(f"layer {layer} ({module.path}) expert {expert}")
    flip(pack / "config.json", 1)
    return sorted(names)


def mend(made: Made, source: str | Path | None = None) -> list[str]:
    """Repair, check that every byte is as it was, and return what was wrong."""
    pack = open_damaged(made.pack)
    damage = find_damage(pack)
    repair(pack, damage, str(source or made.source))
    assert fingerprint(made.pack) == made.wanted
    assert names_beside(made) == [made.pack.name]
    assert not find_damage(Pack.open(made.pack))
    return [str(mismatch) for mismatch in damage.mismatches]


def names_beside(made: Made) -> list[str]:
    """What is in the folder of the pack, hidden entries included."""
    return sorted(p.name for p in made.pack.parent.iterdir() if not p.name.startswith("other"))


def test_wrong_bytes_of_every_kind_are_right_again(made: Made) -> None:
    """Exactly those that verify finds are found."""
    names = damage_widely(made.pack)
    by_verify = [str(mismatch) for mismatch in check_digests(Pack.open(made.pack))]
    assert sorted(text.split(": ")[0] for text in by_verify) == names
    assert sorted(mend(made)) == sorted(by_verify)


def test_every_piece_of_a_pack_can_be_repaired(made: Made) -> None:
    """Each record, tensor and file, all wrong at once, first byte and last."""
    pack = Pack.open(made.pack)
    pieces = [piece for piece in pieces_of(pack.manifest) if piece.nbytes]
    for piece in pieces:
        flip(made.pack / piece.file, piece.offset)
        flip(made.pack / piece.file, piece.offset + piece.nbytes - 1)
    assert len(mend(made)) == len(pieces)


def test_whole_pack_has_no_damage(made: Made) -> None:
    """And progress is told of every byte."""
    told: list[int] = []
    pack = Pack.open(made.pack)
    assert not find_damage(pack, told.append)
    assert sum(told) == sum(pack.file_nbytes().values())


@pytest.mark.parametrize("kind", ["records", "shared"])
def test_padding_is_zero_again(q4: Made, kind: str) -> None:
    """Verify finds the same."""
    pieces = [p for p in pieces_of(Pack.open(q4.pack).manifest) if p.end > p.offset + p.nbytes]
    chosen = [p for p in pieces if (p.module is None) == (kind == "shared")]
    for piece in chosen:
        flip(q4.pack / piece.file, piece.offset + piece.nbytes)
        flip(q4.pack / piece.file, piece.end - 1)
    by_verify = [str(mismatch) for mismatch in check_digests(Pack.open(q4.pack))]
    found = mend(q4)
    assert len(found) == len(chosen) > 0
    assert sorted(found) == sorted(by_verify)
    assert all("padding after the" in text for text in found)


WEIGHTS = ["shared.bin", "experts/00000.bin", "experts/00001.bin"]


@pytest.mark.parametrize("name", [*WEIGHTS, "config.json", "tokenizer.json"])
def test_missing_file_is_made_again(made: Made, name: str) -> None:
    """One line says so, not one for each of its records."""
    (made.pack / name).unlink()
    assert mend(made) == [f"{name}: file is missing"]


@pytest.mark.parametrize("name", [*WEIGHTS, "config.json"])
@pytest.mark.parametrize("left", [0, 1, 0.5, -1], ids=["empty", "a byte", "half", "all but one"])
def test_cut_file_gets_its_size_and_bytes(made: Made, name: str, left: float) -> None:
    """What is still there and right stays."""
    size = len(made.wanted[name])
    n_left = int(left * size) if left == 0.5 else int(left) % size
    os.truncate(made.pack / name, n_left)
    (found, *rest) = mend(made)
    assert found == f"{name}: file has {n_left:,} bytes, not {size:,}"
    assert all(text.endswith("differs from its digest") for text in rest)  # of the rest, in a file


@pytest.mark.parametrize("name", [*WEIGHTS, "config.json"])
def test_file_too_long_is_cut(q4: Made, name: str) -> None:
    """It needs nothing of the source."""
    with (q4.pack / name).open("ab") as file:
        file.write(b"more")
    size = len(q4.wanted[name])
    assert mend(q4, "nowhere") == [f"{name}: file has {size + 4:,} bytes, not {size:,}"]


def test_everything_but_the_manifest_can_go(made: Made) -> None:
    """The pack is made again in place."""
    for entry in made.pack.iterdir():
        if entry.name != "manifest.msgpack":
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    assert len(mend(made)) == len(made.wanted) - 1


def refused(made: Made, source: Path, match: str) -> None:
    """The repair is refused, and not one byte of the pack has changed."""
    before = fingerprint(made.pack)
    pack = open_damaged(made.pack)
    with pytest.raises(SourceError, match=match) as raised:
        repair(pack, find_damage(pack), str(source))
    assert "nothing was written" in str(raised.value)
    assert fingerprint(made.pack) == before
    assert names_beside(made) == [made.pack.name]


@pytest.mark.parametrize("kind", ["record", "shared"])
def test_another_checkpoint_is_refused_and_nothing_written(
    q4: Made, tmp_path: Path, kind: str
) -> None:
    """The same shapes, other weights."""
    other = tiny_models.write_checkpoint(tmp_path / "other", bits=4, seed=5)
    name, where = ("experts/00001.bin", "layer 1 ") if kind == "record" else ("shared.bin", "")
    flip(q4.pack / name, 100)
    refused(q4, other, f"other: {where}.*: other bytes than were packed; it is not the checkpoint")


def test_one_wrong_byte_of_the_source_keeps_all_from_being_written(
    q4: Made, tmp_path: Path
) -> None:
    """All that could be repaired included."""
    weights = read_weights(q4.source)
    weights["model.norm.weight"] = weights["model.norm.weight"] * 2
    other = resave(q4.source, tmp_path / "other", weights)
    norm = next(t for t in Pack.open(q4.pack).manifest.shared if t.name == "model.norm.weight")
    flip(q4.pack / "shared.bin", norm.offset)
    (q4.pack / "experts/00000.bin").unlink()
    refused(q4, other, r"model\.norm\.weight: other bytes than were packed")


def test_source_without_the_file_or_with_another_is_refused(q4: Made, tmp_path: Path) -> None:
    """Of another length, or gone."""
    other = Path(shutil.copytree(q4.source, tmp_path / "other"))
    flip(q4.pack / "tokenizer.json", 5)
    data = (other / "tokenizer.json").read_bytes()
    (other / "tokenizer.json").write_bytes(data + b"\n")
    refused(q4, other, r"tokenizer\.json: other bytes")
    (other / "tokenizer.json").unlink()
    refused(q4, other, r"tokenizer\.json: other bytes")


def test_source_of_another_shape_is_refused(q4: Made, float_source: Path, tmp_path: Path) -> None:
    """Before anything is derived."""
    flip(q4.pack / "experts/00001.bin", 100)
    refused(q4, float_source, "layer 1 .*: other bytes than were packed")
    config = {**tiny_models.QWEN3_MOE, "num_hidden_layers": 2}
    refused(q4, tiny_models.write_checkpoint(tmp_path / "other", config, bits=4), "layer 1 ")


@pytest.mark.parametrize("n_written", [0, 1, 2, 5, 9])
def test_interrupted_repair_goes_on(
    made: Made, monkeypatch: pytest.MonkeyPatch, n_written: int
) -> None:
    """After each of several writes to the pack; what is there is never worse than before."""
    damage_widely(made.pack)
    (made.pack / "experts/00001.bin").unlink()
    stock, n_calls = repairing.write_range, 0
    starts = repairing._write

    def write(fd: int, view: memoryview, offset: int) -> None:
        nonlocal n_calls
        n_calls += 1
        if n_calls > n_written:
            stock(fd, view[: len(view) // 2], offset)
            raise KeyboardInterrupt
        stock(fd, view, offset)

    def write_pack(*arguments: Any) -> None:
        monkeypatch.setattr(repairing, "write_range", write)
        starts(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(repairing, "_write", write_pack)
        pack = open_damaged(made.pack)
        with pytest.raises(KeyboardInterrupt):
            repair(pack, find_damage(pack), str(made.source))
    monkeypatch.setattr(repairing, "write_range", stock)
    assert names_beside(made) == [made.pack.name]
    assert mend(made) != []


def test_bytes_that_do_not_stay_written_are_an_error(
    q4: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written is read back."""
    flip(q4.pack / "experts/00000.bin", 0)
    monkeypatch.setattr(repairing, "_write", lambda *_: None)
    pack = open_damaged(q4.pack)
    with pytest.raises(SourceError, match=r"layer 0 .* expert 0: .*written anew; bad disk\?"):
        repair(pack, find_damage(pack), str(q4.source))


@pytest.mark.parametrize("change", [lambda data: data[:-3], lambda data: b"\x00" + data])
def test_damaged_manifest_cannot_be_repaired(q4: Made, change: Callable[[bytes], bytes]) -> None:
    """It is what everything else is measured by."""
    path = q4.pack / "manifest.msgpack"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(FormatError, match="a damaged manifest cannot be repaired, convert again"):
        open_damaged(q4.pack)


def test_manifest_with_a_flipped_bit_cannot_be_repaired(q4: Made) -> None:
    """Nor can one that is gone."""
    data = (q4.pack / "manifest.msgpack").read_bytes()
    flip(q4.pack / "manifest.msgpack", data.index(b"digests") + 40)
    with pytest.raises(FormatError, match="cannot be repaired, convert again"):
        open_damaged(q4.pack)
    (q4.pack / "manifest.msgpack").unlink()
    with pytest.raises(SourceError, match="the pack is incomplete, convert again"):
        open_damaged(q4.pack)


@pytest.mark.parametrize("name", ["shared.bin", "experts/00000.bin", "config.json"])
@pytest.mark.parametrize("is_there", [False, True])
def test_nothing_outside_the_pack_is_written(
    q4: Made, tmp_path: Path, name: str, is_there: bool
) -> None:
    """Through a link that leads out of it, dangling or not."""
    outside = tmp_path / "other"
    if is_there:
        outside.write_bytes(b"precious")
    (q4.pack / name).unlink()
    (q4.pack / name).symlink_to(outside)
    with pytest.raises(FormatError, match="a link that leaves the pack"):
        find_damage(open_damaged(q4.pack))
    assert (outside.read_bytes() == b"precious") if is_there else not outside.exists()


def test_folder_in_place_of_a_file_is_refused(q4: Made) -> None:
    """It may hold something."""
    (q4.pack / "shared.bin").unlink()
    (q4.pack / "shared.bin").mkdir()
    with pytest.raises(FormatError, match=r"shared\.bin: not a regular file; move it away"):
        find_damage(open_damaged(q4.pack))


def test_link_within_the_pack_is_written_through(q4: Made) -> None:
    """As in the Hugging Face cache."""
    (q4.pack / "shared.bin").rename(q4.pack / "weights")
    (q4.pack / "shared.bin").symlink_to("weights")
    flip(q4.pack / "weights", 0)
    pack = open_damaged(q4.pack)
    repair(pack, find_damage(pack), str(q4.source))
    assert (q4.pack / "shared.bin").is_symlink()
    assert (q4.pack / "weights").read_bytes() == q4.wanted["shared.bin"]


@pytest.mark.parametrize("closed", ["copy.moepack", "00000.bin"])
def test_read_only_pack_is_one_line(q4: Made, monkeypatch: pytest.MonkeyPatch, closed: str) -> None:
    """Said before anything is derived."""
    flip(q4.pack / "experts/00000.bin", 0)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != closed)
    pack = open_damaged(q4.pack)
    with pytest.raises(SourceError, match=f"{closed}: no permission to write here; nothing was"):
        repair(pack, find_damage(pack), "nowhere")


def test_disk_without_room_is_told_before_anything_is_derived(
    q4: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy, and the file that is to grow."""
    (q4.pack / "experts/00000.bin").unlink()
    usage = shutil.disk_usage(q4.pack)._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    pack = open_damaged(q4.pack)
    damage = find_damage(pack)
    needed = damage.nbytes + len(q4.wanted["experts/00000.bin"])
    with pytest.raises(SourceError, match=f"needs {needed:,} bytes, the disk has 10 free"):
        repair(pack, damage, "nowhere")


def test_source_on_the_hub_is_fetched_by_the_shards_that_are_needed(
    q4: Made, tmp_path: Path
) -> None:
    """Which are gone afterwards."""
    weights = read_weights(q4.source)
    folder = resave(q4.source, tmp_path / "other source", weights, n_shards=4)
    wanted = fingerprint(make_pack(folder, tmp_path / "other.moepack"))
    damaged = Made(tmp_path / "other.moepack", folder, wanted)
    flip(damaged.pack / "experts/00001.bin", 0)
    (damaged.pack / "tokenizer.json").unlink()
    with serving(HubServer({MAIN: folder})) as hub:
        environment = {
            **{k: v for k, v in os.environ.items() if k not in ("HF_HUB_CACHE", "HF_TOKEN")},
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(tmp_path / "other home"),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1",
        }
        command = [sys.executable, "-m", "moepack.tools", "repair", damaged.pack, REPOSITORY]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        fetched = [name for name in hub.whole if name.endswith(".safetensors")]
    assert fingerprint(damaged.pack) == wanted
    assert 0 < len(fetched) == len(set(fetched)) < 4
    assert names_beside(q4) == ["copy.moepack"]
    assert not list(tmp_path.glob(".other*"))
    assert not list((tmp_path / "other home").rglob("*.safetensors"))


def test_link_to_itself_is_named(q4: Made) -> None:
    """It is not followed for ever."""
    (q4.pack / "shared.bin").unlink()
    (q4.pack / "shared.bin").symlink_to("shared.bin")
    with pytest.raises(SourceError, match=r"shared\.bin: Too many levels of symbolic links"):
        find_damage(open_damaged(q4.pack))
