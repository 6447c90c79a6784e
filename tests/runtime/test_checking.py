"""Digests at run time: a wrong byte is read again, then refused; never computed with."""

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import pytest
import tiny_models
from tiny_models import random_tokens, run_prompt

from moepack.formats.errors import FormatError, SourceError
from moepack.formats.pack import Pack
from moepack.runtime import load, load_model
from moepack.runtime.banks import Banks
from moepack.runtime.loading import Engine, load_engine
from moepack.runtime.reading import CHECKS, RecordReader
from moepack.tools.cli import main

N_SLOTS = 6
PROMPT = tiny_models.text_of(random_tokens(60))


@pytest.fixture
def pack(q4_pack: Path, tmp_path: Path) -> Pack:
    """A copy of the 4-bit pack, to damage."""
    return Pack.open(shutil.copytree(q4_pack, tmp_path / "copy.moepack"))


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Four workers."""
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture(params=[False, True], ids=["cached", "direct"])
def reader(
    request: pytest.FixtureRequest, pack: Pack, pool: ThreadPoolExecutor
) -> Iterator[Callable[[str], RecordReader]]:
    """Opens the second module with a check, through the page cache and past it."""
    readers = []

    def opened(check: str) -> RecordReader:
        reader = RecordReader(pack, 1, pool, request.param, check)
        if reader.is_direct != request.param:
            pytest.skip("this file system has no direct reads")
        readers.append(reader)
        return reader

    yield opened
    for one in readers:
        one.close()


def flip(path: Path, offset: int) -> None:
    """Change one bit of a file; again, and it is as it was."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))
        file.flush()
        os.fsync(file.fileno())


def damage(pack: Pack, layer: int, expert: int) -> None:
    """Flip a bit in the middle of a record."""
    module = pack.manifest.modules[layer]
    flip(pack.expert_file(module), expert * module.stride + module.record_nbytes // 2)


def flipping_preadv(
    monkeypatch: pytest.MonkeyPatch, wrong: Callable[[int], bool]
) -> dict[str, list[Any]]:
    """Have os.preadv flip a bit in those calls, by number from 0; returns the offsets read."""
    preadv = os.preadv
    told: dict[str, list[Any]] = {"offsets": [], "forgotten": []}

    def read(fd: int, views: Sequence[memoryview], offset: int) -> int:
        n = preadv(fd, views, offset)
        if wrong(len(told["offsets"])):
            views[0][5] ^= 1
        told["offsets"].append(offset)
        return n

    monkeypatch.setattr(os, "preadv", read)
    if sys.platform != "darwin":
        monkeypatch.setattr(os, "posix_fadvise", lambda *a: told["forgotten"].append(a[1:3]))
    return told


@pytest.mark.parametrize("check", ["first", "always"])
@pytest.mark.parametrize("place", ["first", "last"])
def test_wrong_record_is_one_error_that_says_what_to_do(
    reader: Callable[[str], RecordReader], pack: Pack, check: str, place: str
) -> None:
    """Its neighbours are read as ever."""
    opened = reader(check)
    inside = 0 if place == "first" else opened.module.record_nbytes - 1
    flip(pack.expert_file(opened.module), 6 * opened.module.stride + inside)
    banks = Banks(opened.module, 1)
    for _ in range(2):
        with pytest.raises(FormatError) as raised:
            opened.read(6, banks.rows[0])
        text = str(raised.value)
        assert text.startswith(f"layer 1 expert 6: {pack.expert_file(opened.module)}: the record")
        assert text.endswith(f"differs from its digest; moepack repair {pack.path} SOURCE")
    for expert in (5, 7):
        opened.read(expert, banks.rows[0])


def test_never_reads_whatever_is_there(reader: Callable[[str], RecordReader], pack: Pack) -> None:
    """As it was asked to."""
    opened = reader("never")
    damage(pack, 1, 6)
    opened.read(6, Banks(opened.module, 1).rows[0])


@pytest.mark.parametrize("check", ["first", "always"])
def test_bit_flipped_in_one_read_is_healed_by_another(
    reader: Callable[[str], RecordReader], pack: Pack, monkeypatch: pytest.MonkeyPatch, check: str
) -> None:
    """What the page cache holds of the record is dropped in between."""
    opened = reader(check)
    banks = Banks(opened.module, 1)
    start, stride = 6 * opened.module.stride, opened.module.stride
    told = flipping_preadv(monkeypatch, lambda call: call == 0)
    opened.read(6, banks.rows[0])
    assert told["offsets"] == [start, start]
    assert told["forgotten"] == ([] if opened.is_direct else [(start, stride)])
    data = pack.expert_file(opened.module).read_bytes()[start:]
    assert b"".join(map(bytes, banks.rows[0])) == data[: opened.module.record_nbytes]


@pytest.mark.parametrize(("check", "n_found"), [("first", 0), ("always", 1), ("never", 0)])
def test_which_reads_are_checked(
    reader: Callable[[str], RecordReader],
    monkeypatch: pytest.MonkeyPatch,
    check: str,
    n_found: int,
) -> None:
    """A record that was right once is looked at again if always."""
    opened = reader(check)
    banks = Banks(opened.module, 1)
    opened.read(6, banks.rows[0])
    told = flipping_preadv(monkeypatch, lambda call: call == 0)
    opened.read(6, banks.rows[0])
    assert len(told["offsets"]) == 1 + n_found


def test_first_means_the_first_that_was_right(
    reader: Callable[[str], RecordReader], pack: Pack
) -> None:
    """A record repaired meanwhile is read, and only then is it known."""
    opened = reader("first")
    banks = Banks(opened.module, 1)
    damage(pack, 1, 6)
    with pytest.raises(FormatError, match="expert 6"):
        opened.read(6, banks.rows[0])
    damage(pack, 1, 6)
    opened.read(6, banks.rows[0])
    damage(pack, 1, 6)
    opened.read(6, banks.rows[0])  # not looked at any more


def open_engine(pack: Pack, **options: Any) -> Engine:
    """Six slots a layer."""
    nbytes = sum(m.record_nbytes * N_SLOTS for m in pack.manifest.modules)
    return load_engine(pack, expert_cache=nbytes, **options)


@pytest.mark.parametrize("step", [1, 2048], ids=["tokens", "waves"])
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("check", ["first", "always"])
def test_no_token_is_computed_with_a_wrong_record(
    pack: Pack, q4_source: Path, check: str, layer: int, step: int
) -> None:
    """The call fails; its slots stay free, and the engine works once the record is right."""
    loaded, _ = mlx_lm.utils.load_model(q4_source)
    engine = open_engine(pack, check=check)
    prompt = random_tokens(120)
    damage(pack, layer, 9)
    for _ in range(2):
        with pytest.raises(FormatError, match=f"layer {layer} expert 9: .*differs from its digest"):
            run_prompt(engine.model, prompt, step=step)
        for streamed in engine.layers:
            streamed._slots.check_integrity()
            assert not streamed._slots._reserved
        assert 9 not in engine.layers[layer]._slots.slot_of
    damage(pack, layer, 9)
    assert mx.array_equal(run_prompt(engine.model, prompt), run_prompt(loaded, prompt))


def test_no_token_is_computed_with_records_that_one_read_had_wrong(
    pack: Pack, q4_source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every first read of each is; the logits are those of the source."""
    loaded, _ = mlx_lm.utils.load_model(q4_source)
    wanted = run_prompt(loaded, random_tokens(40))
    seen: set[tuple[int, int]] = set()
    preadv = os.preadv

    def read(fd: int, views: Sequence[memoryview], offset: int) -> int:
        n = preadv(fd, views, offset)
        if (key := (fd, offset)) not in seen:
            seen.add(key)
            views[-1][0] ^= 1
        return n

    engine = open_engine(pack)
    monkeypatch.setattr(os, "preadv", read)
    assert mx.array_equal(run_prompt(engine.model, random_tokens(40)), wanted)
    assert len(seen) > N_SLOTS


def test_resident_experts_are_checked_as_they_are_loaded(pack: Pack) -> None:
    """They are read once, so always is as first."""
    damage(pack, 1, 15)
    for check in ("first", "always"):
        with pytest.raises(FormatError, match=r"layer 1 expert 15: .*; moepack repair"):
            load_engine(pack, expert_cache="all", check=check)
    load_engine(pack, expert_cache="all", check="never")


@pytest.mark.parametrize("expert_cache", ["all", "floor"])
def test_shared_tensors_are_checked_as_they_are_loaded(pack: Pack, expert_cache: str) -> None:
    """The wrong one is named."""
    tensor = pack.manifest.shared[3]
    flip(pack.shared_file, tensor.offset + tensor.nbytes - 1)
    for check in ("first", "always"):
        with pytest.raises(FormatError) as raised:
            load_engine(pack, expert_cache=expert_cache, check=check)
        assert f"shared tensor {tensor.name} differs from its digest; " in str(raised.value)
        assert str(raised.value).endswith(f"moepack repair {pack.path} SOURCE")
    load_engine(pack, expert_cache=expert_cache, check="never")


def test_a_name_with_a_space_can_be_pasted_from_the_message(pack: Pack) -> None:
    """Quoted for a shell."""
    path = pack.path.rename(pack.path.parent / "a pack")
    flip(path / "shared.bin", 0)
    with pytest.raises(FormatError, match=f"moepack repair '{path}' SOURCE"):
        load_engine(path)


def test_mlx_lms_twins_take_the_option(pack: Pack) -> None:
    """And refuse what is none of its values."""
    damage(pack, 0, 0)
    for function in (load, load_model):
        function(pack.path, check="never")
        with pytest.raises(FormatError, match="layer 0 expert 0"):
            function(pack.path)
        with pytest.raises(SourceError, match="check: 'often' is none of first, always, never"):
            function(pack.path, check="often")
    assert CHECKS == ("first", "always", "never")


@pytest.mark.parametrize("cache", ["floor", "all"])
@pytest.mark.parametrize("options", [(), ("--check", "always")], ids=["default", "always"])
def test_run_prints_no_answer_from_a_damaged_pack(
    pack: Pack, options: tuple[str, ...], cache: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, exit 1; with --check never it is the user's own affair."""
    damage(pack, 0, 3)
    arguments = ["run", str(pack.path), "-p", PROMPT, "-m", "8", "--expert-cache", cache]
    assert main([*arguments, *options]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    last = captured.err.strip().splitlines()[-1]
    assert last.startswith("moepack: error: layer 0 expert 3: ")
    assert last.endswith(f"moepack repair {pack.path} SOURCE")
    assert main([*arguments, "--check", "never"]) == 0


def test_run_stops_an_answer_at_the_last_right_token(
    pack: Pack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk that fails while the answer is being written ends it."""
    arguments = ["run", str(pack.path), "-p", PROMPT[:3], "-m", "40", "--expert-cache", "floor"]
    arguments += ["--no-warm-start", "--check", "always"]
    with monkeypatch.context() as patch:
        told = flipping_preadv(patch, lambda _: False)
        assert main(arguments) == 0
        n_reads = len(told["offsets"])
    whole = capsys.readouterr().out.removesuffix("\n")
    assert n_reads > 40
    with monkeypatch.context() as patch:
        flipping_preadv(patch, lambda call: call >= n_reads // 2)
        assert main(arguments) == 1
    captured = capsys.readouterr()
    assert 0 < len(captured.out) < len(whole)
    assert whole.startswith(captured.out)
    assert "differs from its digest" in captured.err
