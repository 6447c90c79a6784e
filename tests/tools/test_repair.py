"""`moepack repair`: what it prints, and what it answers when it cannot."""

import json
import os
import shutil
from pathlib import Path

import pytest
import tiny_models

from moepack.formats.pack import Pack
from moepack.tools.cli import main


@pytest.fixture
def pack(q4_pack: Path, tmp_path: Path) -> Path:
    """A copy of the 4-bit pack, to damage."""
    return Path(shutil.copytree(q4_pack, tmp_path / "p.moepack"))


def flip(path: Path, offset: int) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def damage(pack: Path) -> None:
    """A record, a shared tensor, a copied file."""
    stride = Pack.open(pack).manifest.modules[1].stride
    flip(pack / "experts/00001.bin", 7 * stride + 100)
    flip(pack / "shared.bin", 0)
    flip(pack / "config.json", 1)


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of an error; there must be nothing on stdout."""
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.strip().splitlines()
    return str(line)


def test_a_damaged_pack_is_found_refused_repaired_and_runs(
    pack: Path, q4_pack: Path, q4_source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = ["-p", tiny_models.text_of(tiny_models.random_tokens(30)), "-m", "4"]
    assert main(["run", str(pack), *prompt]) == 0
    answer = capsys.readouterr().out
    damage(pack)
    flip(pack / "config.json", 1)  # with it mlx-lm could not even build the model
    assert main(["verify", str(pack)]) == 1
    found = [line.split("  ")[1] for line in capsys.readouterr().out.splitlines()[:2]]
    assert main(["run", str(pack), *prompt]) == 1
    assert f"moepack repair {pack} SOURCE" in last_line(capsys)
    assert main(["repair", str(pack), str(q4_source)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines[:2]) == sorted(f"REPAIRED  {text}" for text in found)
    assert lines[2].startswith(f"{pack}: ok now, ")
    assert files_of(pack) == files_of(q4_pack)
    assert main(["verify", str(pack)]) == 0
    capsys.readouterr()
    assert main(["run", str(pack), *prompt]) == 0
    assert capsys.readouterr().out == answer


def test_json_lists_what_was_repaired(
    pack: Path, q4_source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(pack)
    (pack / "experts/00000.bin").unlink()
    assert main(["repair", str(pack), str(q4_source), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["ok"] is True
    assert [(m["layer"], m["expert"], m["part"]) for m in figures["repaired"]] == [
        (None, None, Pack.open(pack).manifest.shared[0].name),
        (None, None, "experts/00000.bin"),
        (1, 7, None),
        (None, None, "config.json"),
    ]
    assert figures["bytes_checked"] == sum(Pack.open(pack).file_nbytes().values())
    assert 0 < figures["bytes_derived"] < figures["bytes_checked"]


def test_a_whole_pack_needs_no_source_and_no_permission(
    pack: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    assert main(["repair", str(pack), "nowhere"]) == 0
    assert capsys.readouterr().out.startswith(f"{pack}: ok, nothing to repair in ")
    assert main(["repair", str(pack), "nowhere", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["repaired"] == []


def test_many_differences_are_cut_off_but_counted(
    pack: Path, q4_source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in Pack.open(pack).manifest.modules:
        (pack / module.file).write_bytes(bytes(module.stride * module.n_experts))
    assert main(["repair", str(pack), str(q4_source)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 22
    assert lines[20] == "... and 12 more (--json lists all)"


def test_the_wrong_source_is_one_line_and_exit_1(
    pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tiny_models.write_checkpoint(tmp_path / "other", bits=4, seed=5)
    capsys.readouterr()
    damage(pack)
    before = files_of(pack)
    assert main(["repair", str(pack), str(other)]) == 1
    line = last_line(capsys)
    assert line.startswith(f"moepack: error: {other}: ")
    assert line.endswith("nothing was written")
    assert files_of(pack) == before


@pytest.mark.parametrize("source", ["none", "config.json", "empty"])
def test_a_source_that_is_none_is_one_line_and_exit_1(
    pack: Path, tmp_path: Path, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    damage(pack)
    assert main(["repair", str(pack), str(tmp_path / source)]) == 1
    assert str(tmp_path / source) in last_line(capsys)


def test_a_pack_for_a_source_is_one_line_and_exit_1(
    pack: Path, q4_pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(pack)
    assert main(["repair", str(pack), str(q4_pack)]) == 1
    assert "is a pack already; moepack unpack makes the checkpoint of it" in last_line(capsys)


def test_what_is_no_pack_is_one_line_and_exit_1(
    q4_source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (tmp_path / "none", q4_source):
        assert main(["repair", str(path), str(q4_source)]) == 1
        assert last_line(capsys).startswith(f"moepack: error: {path}: ")


def test_a_damaged_manifest_is_one_line_that_says_convert_again(
    pack: Path, q4_source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(pack / "manifest.msgpack", 60)
    assert main(["repair", str(pack), str(q4_source)]) == 1
    assert "a damaged manifest cannot be repaired, convert again" in last_line(capsys)


def test_a_read_only_pack_is_one_line(
    pack: Path, q4_source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(pack)
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    assert main(["repair", str(pack), str(q4_source)]) == 1
    assert f"{pack}: no permission to write here; nothing was repaired" in last_line(capsys)


def test_every_command_says_of_a_cut_file_that_it_can_be_repaired(
    pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.truncate(pack / "shared.bin", 100)
    assert main(["verify", str(pack)]) == 1
    assert "convert again, or moepack repair it" in last_line(capsys)


def test_verify_with_the_source_still_lists_what_run_would_refuse(
    pack: Path, q4_source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(pack / "experts/00001.bin", 100)
    assert main(["verify", str(pack), str(q4_source), "--json"]) == 1
    figures = json.loads(capsys.readouterr().out)
    assert {(m["layer"], m["expert"]) for m in figures["mismatches"]} == {(1, 0)}
    assert figures["logits"]["positions"] > 0
