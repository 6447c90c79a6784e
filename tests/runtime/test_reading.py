"""Reading records: exact bytes into a slot's rows, or an error that names the expert."""

import errno
import gc
import os
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import pytest

from moepack.formats.errors import FormatError
from moepack.formats.pack import Pack
from moepack.runtime.banks import Banks
from moepack.runtime.reading import RecordReader, bypasses_page_cache, needs_buffer


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Four workers."""
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture
def pack(q4_pack: Path, tmp_path: Path) -> Pack:
    """A copy of the 4-bit pack, to damage."""
    return Pack.open(shutil.copytree(q4_pack, tmp_path / "copy.moepack"))


@pytest.fixture
def pack_of_pages(float_pack: Path) -> Pack:
    """A pack whose records' parts are whole pages each."""
    pack = Pack.open(float_pack)
    assert not any(map(needs_buffer, pack.manifest.modules))
    return pack


@pytest.fixture(params=[False, True], ids=["cached", "direct"])
def reader(
    request: pytest.FixtureRequest, pack: Pack, pool: ThreadPoolExecutor
) -> Iterator[RecordReader]:
    """Of the second module, through the page cache and past it."""
    reader = RecordReader(pack, 1, pool, direct=request.param)
    if reader.is_direct != request.param:
        pytest.skip("this file system has no direct reads")
    yield reader
    reader.close()


def record(reader: RecordReader, pack: Pack, expert: int) -> bytes:
    """The record as it is on disk."""
    data = pack.expert_file(reader.module).read_bytes()
    start = expert * reader.module.stride
    return data[start : start + reader.module.record_nbytes]


def row_bytes(row: list[memoryview]) -> bytes:
    """A slot's parts back to back."""
    return b"".join(bytes(view) for view in row)


def test_records_arrive_exactly(reader: RecordReader, pack: Pack) -> None:
    """Each in its slot, none elsewhere."""
    banks = Banks(reader.module, 4)
    reader.read_all([9, 0, 15], [banks.rows[slot] for slot in (2, 0, 3)])
    assert row_bytes(banks.rows[2]) == record(reader, pack, 9)
    assert row_bytes(banks.rows[0]) == record(reader, pack, 0)
    assert row_bytes(banks.rows[3]) == record(reader, pack, 15)
    assert not any(row_bytes(banks.rows[1]))


@pytest.mark.skipif(sys.platform == "darwin", reason="reads there need no aligned memory")
def test_parts_of_whole_pages_are_read_past_the_page_cache_in_place(
    pack_of_pages: Pack, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No buffer between; those of other sizes go by one."""
    reader = RecordReader(pack_of_pages, 1, pool, direct=True)
    if not reader.is_direct:
        pytest.skip("this file system has no direct reads")
    monkeypatch.setattr("moepack.runtime.reading._aligned_buffer", None)
    banks = Banks(reader.module, 3)
    reader.read_all([9, 0, 15], banks.rows)
    for row, expert in zip(banks.rows, (9, 0, 15), strict=True):
        assert row_bytes(row) == record(reader, pack_of_pages, expert)
    reader.close()


def test_only_parts_of_whole_pages_need_no_buffer(pack: Pack) -> None:
    """4-bit parts of the tiny model are smaller."""
    assert all(map(needs_buffer, pack.manifest.modules)) is (sys.platform != "darwin")


def test_arrays_see_what_was_read(reader: RecordReader, pack: Pack) -> None:
    """Kernels read the very memory that the views write."""
    banks = Banks(reader.module, 2)
    before = {name: mx.array(array) for name, array in banks.arrays.items()}
    mx.eval(before)
    reader.read(5, banks.rows[1])
    for part in reader.module.parts:
        array = banks.arrays[part.name]
        data = record(reader, pack, 5)[part.offset : part.offset + part.nbytes]
        assert bytes(memoryview(mx.contiguous(array[1]))) == data
        assert mx.array_equal(array[0], before[part.name][0])


@pytest.mark.parametrize("most", [1, 7, 1000, 4096])
def test_short_reads_are_continued(
    reader: RecordReader, pack: Pack, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """A read may give less than asked, in the middle of a part or at its edge."""
    preadv = os.preadv
    most *= 512 if reader.is_direct else 1  # whole sectors

    def short(fd: int, views: Sequence[memoryview], offset: int) -> int:
        left, fewer = most, []
        for view in views:
            fewer.append(view[:left])
            left -= len(fewer[-1])
            if left == 0:
                break
        return preadv(fd, fewer, offset)

    monkeypatch.setattr(os, "preadv", short)
    banks = Banks(reader.module, 1)
    reader.read(3, banks.rows[0])
    assert row_bytes(banks.rows[0]) == record(reader, pack, 3)


@pytest.mark.parametrize("n_left", [0, 1, 5000])
def test_file_cut_while_running_names_layer_expert_and_file(
    reader: RecordReader, pack: Pack, n_left: int
) -> None:
    """At the record's start or in its middle."""
    os.truncate(pack.expert_file(reader.module), 6 * reader.module.stride + n_left)
    banks = Banks(reader.module, 1)
    reader.read(5, banks.rows[0])
    with pytest.raises(FormatError, match=r"layer 1 expert 6: .*00001\.bin ends at byte"):
        reader.read(6, banks.rows[0])


def test_io_error_names_layer_expert_and_file(
    reader: RecordReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the system's reason."""

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    banks = Banks(reader.module, 1)
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(FormatError, match=r"layer 1 expert 2: .*00001\.bin: read failed \(Input"):
        reader.read(2, banks.rows[0])


@pytest.mark.parametrize("failing", [0, 3, 5])
def test_all_workers_finish_before_an_error_is_raised(
    reader: RecordReader, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """No view is written to after the caller has learned of the failure."""
    preadv = os.preadv
    failed = threading.Event()
    lock = threading.Lock()
    n_done = 0

    def read(fd: int, views: Sequence[memoryview], offset: int) -> int:
        nonlocal n_done
        if offset == failing * reader.module.stride:
            failed.set()
            raise OSError(errno.EIO, "gone")
        assert failed.wait(10)  # the others come after the failure
        n = preadv(fd, views, offset)
        with lock:
            n_done += 1
        return n

    monkeypatch.setattr(os, "preadv", read)
    banks = Banks(reader.module, 4)
    experts = [0, 3, 5, 7] if failing != 5 else [5, 0, 3, 7]
    with pytest.raises(FormatError, match=f"expert {failing}:"):
        reader.read_all(experts, banks.rows)
    assert n_done == 3


def test_first_of_several_errors_is_raised(reader: RecordReader, pack: Pack) -> None:
    """One line is enough."""
    os.truncate(pack.expert_file(reader.module), 0)
    banks = Banks(reader.module, 3)
    with pytest.raises(FormatError, match=r"layer 1 expert \d+:"):
        reader.read_all([1, 2, 3], banks.rows)


def test_closed_reader_refuses_to_read(reader: RecordReader) -> None:
    """And may be closed twice."""
    banks = Banks(reader.module, 1)
    reader.close()
    reader.close()
    with pytest.raises(FormatError, match="layer 1 expert 0: "):
        reader.read(0, banks.rows[0])


def test_vanished_file_is_one_error_and_no_noise(pack: Pack, pool: ThreadPoolExecutor) -> None:
    """Named at once; a reader that never opened has nothing to close."""
    pack.expert_file(pack.manifest.modules[0]).unlink()
    with pytest.raises(FormatError, match=r"00000\.bin: No such file"):
        RecordReader(pack, 0, pool)
    gc.collect()


def test_dropped_reader_closes_its_file(pack: Pack, pool: ThreadPoolExecutor) -> None:
    """No file stays open behind a model that is gone."""
    reader = RecordReader(pack, 0, pool)
    fd = reader._fd
    os.fstat(fd)
    del reader
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@pytest.mark.parametrize(("free", "bypasses"), [(-1, True), (0, True), (44, True), (46, False)])
def test_the_page_cache_is_passed_by_where_it_could_not_hold_the_files(
    free: int, bypasses: bool
) -> None:
    """Half of them in it are worth more than none."""
    assert bypasses_page_cache(100, free) == bypasses


def test_a_file_system_without_direct_reads_is_read_as_ever(
    pack: Pack, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the reader says so."""
    stock = os.open

    def without(path: Path, flags: int) -> int:
        if flags & getattr(os, "O_DIRECT", 0):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return stock(path, flags)

    monkeypatch.setattr(os, "open", without)
    reader = RecordReader(pack, 1, pool, direct=True)
    assert not reader.is_direct
    banks = Banks(reader.module, 1)
    reader.read(3, banks.rows[0])
    assert row_bytes(banks.rows[0]) == record(reader, pack, 3)
    reader.close()
