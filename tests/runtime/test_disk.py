"""Measuring a disk: what is decided, what is kept, and what a bad disk says. No speeds."""

import errno
import fcntl
import json
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import moepack.runtime.disk as disk
from moepack.formats.errors import SourceError
from moepack.runtime import reading
from moepack.runtime.disk import (
    ALIGNMENT,
    MAX_BLOCK_NBYTES,
    WORKERS,
    DiskFigures,
    best_worker_count,
    block_nbytes,
    figures_of,
    measure_disk,
    memory_file,
    memory_key,
    probe_disk,
    random_offsets,
)
from moepack.runtime.reading import READ_WORKERS

PAGE = ALIGNMENT


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where figures are kept: nowhere of the user's."""
    path = tmp_path / "cache" / "moepack" / "disks.json"
    monkeypatch.setattr(disk, "memory_file", lambda *_: path)
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Thirty pages and a bit."""
    path = tmp_path / "records.bin"
    path.write_bytes(os.urandom(30 * PAGE + 100))
    return path


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A little of everything."""
    monkeypatch.setattr(disk, "MAX_UNCACHED_NBYTES", 32 * PAGE)
    monkeypatch.setattr(disk, "MAX_CACHED_NBYTES", 32 * PAGE)


def some_figures(device: int = 7) -> DiskFigures:
    """As measured."""
    return DiskFigures(
        device=device,
        date="2026-11-30",
        version=disk.version("moepack"),
        block_bytes=8192,
        method="O_DIRECT",
        cached={1: 5e9, 2: 9e9},
        uncached={1: 1e9, 2: 1.5e9, 4: 1.8e9},
        best_workers=4,
    )


@pytest.mark.parametrize(
    ("nbytes", "file_nbytes", "expected"),
    [
        (1, 10**9, PAGE),
        (PAGE, 10**9, PAGE),
        (PAGE + 1, 10**9, 2 * PAGE),
        (2_949_120, 10**9, 2_949_120),
        (10**8, 10**9, MAX_BLOCK_NBYTES),
        (10**6, 5 * PAGE + 7, 5 * PAGE),
        (10**6, 100, 100),  # less than a page: all of it
    ],
)
def test_blocks_are_records_in_whole_pages_within_the_file(
    nbytes: int, file_nbytes: int, expected: int
) -> None:
    """And no more than is of use."""
    assert block_nbytes(nbytes, file_nbytes) == expected


@pytest.mark.parametrize(("n_bytes", "block"), [(10 * PAGE + 5, 3 * PAGE), (PAGE, PAGE), (9, 9)])
def test_offsets_are_aligned_and_every_place_comes(n_bytes: int, block: int) -> None:
    """The last one too; no block leaves the file."""
    found = set(islice(random_offsets(n_bytes, block, random.Random(1)), 500))
    assert found == set(range(0, n_bytes - block + 1, PAGE))


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ({1: 1.0}, 1),
        ({1: 100.0, 2: 200.0, 4: 390.0, 8: 400.0, 16: 395.0}, 4),
        ({1: 100.0, 2: 99.0, 4: 101.0}, 1),
        ({1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0, 16: 16.0}, 16),
    ],
)
def test_best_are_the_fewest_workers_that_are_about_as_fast(
    rates: dict[int, float], expected: int
) -> None:
    """More would only take turns."""
    assert best_worker_count(rates) == expected


def test_rate_of_workers_not_measured_is_that_of_the_next_fewer() -> None:
    """A slow disk leaves no time for many."""
    figures = some_figures()
    rates = {1: 1e9, 2: 1.5e9}
    assert replace(figures, uncached=rates, best_workers=2).uncached_rate == 1.5e9
    assert replace(figures, uncached={1: 1e9}, best_workers=1).uncached_rate == 1e9


def test_a_run_reads_with_as_many_workers_as_were_found_best() -> None:
    """But no fewer than copies from the page cache want."""
    assert replace(some_figures(), best_workers=1).read_workers == READ_WORKERS
    assert replace(some_figures(), best_workers=16).read_workers == 16


def test_figures_are_kept_by_device_and_about_a_size() -> None:
    """To the next power of two."""
    assert memory_key(7, 4096) == "7/4096"
    assert memory_key(7, 4097) == memory_key(7, 8192) == "7/8192"
    assert memory_key(8, 8192) != memory_key(7, 8192)
    assert memory_key(7, 1) == "7/1"


def test_place_of_the_figures_is_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the system has it; a relative one counts as none."""
    monkeypatch.setenv("HOME", "/home/someone")
    home = Path("/home/someone")
    assert memory_file("linux", {"XDG_CACHE_HOME": "/c"}) == Path("/c/moepack/disks.json")
    for environment in ({}, {"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "here"}):
        assert memory_file("linux", environment) == home / ".cache/moepack/disks.json"
    expected = home / "Library/Caches/moepack/disks.json"
    assert memory_file("darwin", {"XDG_CACHE_HOME": "/c"}) == expected


def test_user_without_a_home_has_no_such_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is no error."""

    def fail() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", fail)
    assert memory_file("linux", {}) is None


def test_figures_survive_json() -> None:
    """Which makes text of the numbers of workers."""
    figures = some_figures()
    assert figures_of(json.loads(json.dumps(figures.as_map())), 7) == figures


@pytest.mark.parametrize(
    "change",
    [
        {"device": 8},
        {"version": "0.0.1"},
        {"date": 3},
        {"block_bytes": "many"},
        {"cached": {}},
        {"cached": [1]},
        {"cached": {"1": -5}},
        {"uncached": {"1": "fast"}},
        {"uncached": {"x": 1.0}},
        {"uncached": {"2": 1.0}},
        {"uncached": {"1": float("nan")}},
        {"best_workers": 3},
        {"surprise": 1},
    ],
    ids=str,
)
def test_damaged_entry_is_none(change: dict[str, Any]) -> None:
    """Nor is one of another device or version."""
    assert figures_of(some_figures().as_map() | change, 7) is None


@pytest.mark.parametrize("entry", [None, 3, "text", [], {}])
def test_what_is_no_entry_is_none(entry: object) -> None:
    """Whatever a file says."""
    assert figures_of(entry, 7) is None


def test_file_is_measured_with_all_numbers_of_workers(file: Path, quick: None) -> None:
    """And says when and by what."""
    figures = measure_disk(file, 2 * PAGE)
    assert tuple(figures.uncached) == WORKERS
    assert tuple(figures.cached) == WORKERS
    assert all(rate > 0 for rate in (*figures.cached.values(), *figures.uncached.values()))
    assert figures.device == file.stat().st_dev
    assert figures.block_bytes == 2 * PAGE
    assert figures_of(figures.as_map(), figures.device) == figures


def test_only_so_many_bytes_are_read(
    file: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each figure, and to warm up."""
    monkeypatch.setattr(disk, "MAX_WARM_NBYTES", 8 * PAGE)
    read: list[int] = []
    preadv = os.preadv

    def counting(fd: int, views: Sequence[memoryview], offset: int) -> int:
        n = preadv(fd, views, offset)
        read.append(n)
        return n

    monkeypatch.setattr(os, "preadv", counting)
    measure_disk(file, 2 * PAGE)
    assert sum(read) <= 2 * len(WORKERS) * 32 * PAGE + 8 * PAGE + PAGE


@pytest.mark.parametrize("nbytes", [1, 100, PAGE - 1, PAGE, PAGE + 1])
def test_smallest_files_are_measured(nbytes: int, tmp_path: Path, quick: None) -> None:
    """Less than a page cannot be read by O_DIRECT."""
    path = tmp_path / "small"
    path.write_bytes(b"x" * nbytes)
    figures = probe_disk(path, 10**6)
    assert figures.block_bytes == min(nbytes, PAGE)
    assert (figures.method == "O_DIRECT") <= (nbytes >= PAGE)


def refuse(at: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `open` with O_DIRECT, or reads of what it opened, fail."""
    opened, real_open, real_preadv = set(), os.open, os.preadv

    def open_(path: Any, flags: int, *more: Any) -> int:
        if flags & reading.O_DIRECT and at == "open":
            raise OSError(number, os.strerror(number))
        fd = real_open(path, flags, *more)
        opened.discard(fd)
        if flags & reading.O_DIRECT:
            opened.add(fd)
        return fd

    def preadv(fd: int, views: Sequence[memoryview], offset: int) -> int:
        if fd in opened and at == "read":
            raise OSError(number, os.strerror(number))
        return real_preadv(fd, views, offset)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "preadv", preadv)


needs_direct = pytest.mark.skipif(not reading.O_DIRECT, reason="no O_DIRECT here")


@needs_direct
@pytest.mark.parametrize("at", ["open", "read"])
def test_file_system_without_direct_reads_is_told_to_forget(
    at: str, file: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every block, before it is read."""
    refuse(at, errno.EINVAL, monkeypatch)
    forgotten = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *arguments: forgotten.append(arguments[1:]))
    figures = measure_disk(file, 2 * PAGE)
    assert figures.method == "POSIX_FADV_DONTNEED"
    assert len(forgotten) == len(WORKERS) * 16
    assert all(length == 2 * PAGE for _, length, _ in forgotten)


def test_on_macos_the_file_is_opened_without_its_cache(
    file: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By F_NOCACHE, on the descriptor of the uncached reads alone."""
    calls = []
    monkeypatch.setattr(disk.sys, "platform", "darwin")
    monkeypatch.setattr(fcntl, "fcntl", lambda *arguments: calls.append(arguments[1:]))
    assert measure_disk(file, PAGE).method == "F_NOCACHE"
    assert calls == [(disk.F_NOCACHE, 1)]


def failing(*_: object) -> int:
    """A read of a bad disk."""
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_read_error_names_the_file(
    file: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line; nothing is kept of it, and no file stays open."""
    before = len(list(Path("/dev/fd").iterdir()))
    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(SourceError, match=r"records\.bin: read failed \(Input/output error\)"):
        probe_disk(file, PAGE)
    assert not memory.exists()
    assert len(list(Path("/dev/fd").iterdir())) == before


def test_file_that_becomes_shorter_is_named(
    file: Path, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    """While it is measured."""
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(SourceError, match=r"records\.bin: ends at byte "):
        measure_disk(file, PAGE)


def test_short_reads_are_continued(
    file: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read may give less than asked."""
    preadv = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda fd, views, offset: preadv(fd, [views[0][:PAGE]], offset)
    )
    assert measure_disk(file, 3 * PAGE).block_bytes == 3 * PAGE


def test_missing_file_is_named(tmp_path: Path) -> None:
    """As the system says it."""
    with pytest.raises(SourceError, match=r"none: read failed \(No such file"):
        probe_disk(tmp_path / "none", PAGE)


def test_slow_disk_is_not_asked_by_more_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a figure takes more than twice its time."""
    seconds = iter([0.1, 0.2, 0.31, 0.1])
    monkeypatch.setattr(disk, "_timed", lambda *_: (1000, next(seconds)))
    found = disk._rates(lambda *_: None, iter([]), 1, 1)
    assert list(found) == [1, 2, 4]


def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The block of each measurement made from here on."""
    blocks = []

    def measure(path: Path, block: int) -> DiskFigures:
        blocks.append(block)
        return replace(some_figures(path.stat().st_dev), block_bytes=block)

    monkeypatch.setattr(disk, "measure_disk", measure)
    return blocks


def test_disk_is_measured_once_a_size(
    file: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And told from memory after that."""
    blocks = measured(monkeypatch)
    first = probe_disk(file, 4 * PAGE)
    assert probe_disk(file, 3 * PAGE) == first
    assert blocks == [4 * PAGE]
    probe_disk(file, 5 * PAGE)
    assert blocks == [4 * PAGE, 5 * PAGE]
    assert len(json.loads(memory.read_text())) == 2
    assert [p.name for p in memory.parent.iterdir()] == [memory.name]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff\xfe", b"[" * 100_000])
def test_damaged_memory_is_written_anew(
    content: bytes, file: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the disk was measured again."""
    blocks = measured(monkeypatch)
    memory.parent.mkdir(parents=True)
    memory.write_bytes(content)
    figures = probe_disk(file, PAGE)
    assert probe_disk(file, PAGE) == figures
    assert blocks == [PAGE]


def test_damaged_entry_leaves_others(
    file: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of other disks."""
    blocks = measured(monkeypatch)
    memory.parent.mkdir(parents=True)
    key, other = memory_key(file.stat().st_dev, PAGE), some_figures().as_map()
    memory.write_text(json.dumps({key: {"cached": 3}, "7/8192": other}))
    probe_disk(file, PAGE)
    assert blocks == [PAGE]
    known = json.loads(memory.read_text())
    assert figures_of(known["7/8192"], 7) == some_figures()
    assert figures_of(known[key], file.stat().st_dev) is not None


def read_only(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file can be made there."""

    def fail(*_: object, **__: object) -> None:
        raise PermissionError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "write_text", fail)


def no_folder(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is where the folder would be."""
    memory.parent.parent.write_text("")


def no_home(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no such place."""
    monkeypatch.setattr(disk, "memory_file", lambda *_: None)


@pytest.mark.parametrize("spoil", [read_only, no_folder, no_home])
def test_memory_that_cannot_be_written_is_no_error(
    spoil: Callable[[Path, pytest.MonkeyPatch], None],
    file: Path,
    memory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The disk is measured each time."""
    blocks = measured(monkeypatch)
    spoil(memory, monkeypatch)
    assert probe_disk(file, PAGE) == probe_disk(file, PAGE)
    assert blocks == [PAGE, PAGE]
