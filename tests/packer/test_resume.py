"""A convert that dies at any moment loses nothing and, run again, ends in the same bytes."""

import errno
import hashlib
import itertools
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import pytest
import tiny_models
from conftest import make_pack
from forking import forking
from tiny_models import per_expert, read_weights, resave

from moepack.formats.errors import SourceError
from moepack.formats.pack import Pack
from moepack.packer.checkpoint import ConvertOptions
from moepack.packer.convert import ConvertPlan, convert, plan_convert
from moepack.packer.journal import Journal
from moepack.packer.shards import ConsumedShards
from moepack.packer.source import open_source
from moepack.packer.unpacking import unpack
from moepack.packer.writing import targets_of

# One layer of three experts: a few dozen writes, so that a kill at each takes seconds.
SMALL: dict[str, Any] = {
    **tiny_models.QWEN3_MOE,
    "num_hidden_layers": 1,
    "mlp_only_layers": [],
    "num_experts": 3,
    "num_experts_per_tok": 2,
}
N_SHARDS = 3
QUANTIZE = ("-q", "--q-bits", "4", "--q-group-size", "32")
QUANTIZE_OPTIONS = ConvertOptions(quantize=True, q_bits=4, q_group_size=32)

# Every call by which convert changes what is on disk; a write is seen when it is flushed.
CALLS = ("pwrite", "fsync", "truncate", "rename", "replace", "unlink", "rmdir", "mkdir")

# For forks of one process that has imported all and computed nothing: a fork takes
# a tenth of a second. The profiler sees every call into C, the methods of files too.
CONVERTING = """
import os, signal, sys, threading
import mlx_lm.models.qwen3_moe
import moepack.packer.opening
import moepack.packer.convert as converting
import moepack.tools.convert
from moepack.tools.cli import main

def run(job):
    n_calls = 0
    lock = threading.Lock()
    def count(frame, event, argument):
        nonlocal n_calls
        if event == "c_call" and argument.__name__ in job["calls"]:
            with lock:
                n_calls += 1
                if n_calls == job["kill_at"]:
                    os.kill(os.getpid(), signal.SIGKILL)
    convert = converting.convert
    def counted(*arguments, **options):
        sys.setprofile(count if job["calls"] else None)
        threading.setprofile(count if job["calls"] else None)  # those that convert starts
        try:
            return convert(*arguments, **options)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    converting.convert = counted
    status = main(job["arguments"])
    print(n_calls, flush=True)
    return status
"""


class Ended(NamedTuple):
    """How a command ended: exit status (negative: the signal), what it said, calls counted."""

    status: int
    output: str
    n_calls: int


class Run(Protocol):
    """Runs `moepack convert` in a process of its own that is killed just before a call."""

    def __call__(
        self, *arguments: object, kill_at: int = 0, calls: tuple[str, ...] = CALLS
    ) -> Ended: ...


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """See Run."""
    with forking(CONVERTING) as fork:

        def run(*arguments: object, kill_at: int = 0, calls: tuple[str, ...] = CALLS) -> Ended:
            texts = ["convert", *map(str, arguments)]
            status, output = fork({"arguments": texts, "kill_at": kill_at, "calls": calls})
            if status < 0:
                return Ended(status, output, kill_at)
            output, n_calls = output.rstrip("\n").rsplit("\n", 1)
            return Ended(status, output, int(n_calls))

        yield run


def fingerprint(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, hidden ones included."""
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


def names_in(folder: Path) -> list[str]:
    """What is directly in a folder, hidden entries included."""
    return sorted(entry.name for entry in folder.iterdir())


def shards_of(folder: Path) -> dict[str, str]:
    """The sha256 of each weight file."""
    return {
        p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.glob("*.safetensors")
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for this module's sources and packs. Read only."""
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def copied(folder: Path) -> Path:
    """A 4-bit checkpoint of MLX in three shards: every byte is copied."""
    whole = tiny_models.write_checkpoint(folder / "whole", SMALL, bits=4)
    return resave(whole, folder / "copied", read_weights(whole), n_shards=N_SHARDS)


@pytest.fixture(scope="module")
def derived(folder: Path) -> Path:
    """A float checkpoint in the Hugging Face layout in three shards: stacked and quantized."""
    whole = tiny_models.write_checkpoint(folder / "float", SMALL)
    return resave(whole, folder / "derived", per_expert(read_weights(whole)), n_shards=N_SHARDS)


@pytest.fixture(scope="module")
def copied_pack(folder: Path, copied: Path) -> Path:
    """The pack of `copied`, made without interruption."""
    return make_pack(copied, folder / "copied.moepack")


@pytest.fixture(scope="module")
def derived_pack(folder: Path, derived: Path) -> Path:
    """The pack of `derived` in 4 bits, made without interruption."""
    return make_pack(derived, folder / "derived.moepack", QUANTIZE_OPTIONS)


class Case(NamedTuple):
    """A source, the options it is packed with, and its pack."""

    source: Path
    options: tuple[str, ...]
    convert_options: ConvertOptions
    pack: Path


@pytest.fixture(params=["copied", "derived"])
def case(request: pytest.FixtureRequest) -> Case:
    """A checkpoint that is copied, and one that is computed."""
    source, pack = (request.getfixturevalue(f"{request.param}{end}") for end in ("", "_pack"))
    is_derived = request.param == "derived"
    options = QUANTIZE_OPTIONS if is_derived else ConvertOptions()
    return Case(source, QUANTIZE if is_derived else (), options, pack)


def killed(
    run: Run,
    count: Callable[[str, int], None],
    tmp_path: Path,
    source: Path,
    *options: str,
    old: Path | None = None,
    calls: tuple[str, ...] = CALLS,
) -> Iterator[tuple[Path, Path]]:
    """(place, source) after a kill at each call of a convert to `place/out.moepack`, in turn.

    Each begins with a copy of the source, and of the pack `old` if given.
    """
    for n in itertools.count(1):
        home = tmp_path / str(n)
        place = home / "place"
        place.mkdir(parents=True)
        copy = Path(shutil.copytree(source, home / "source"))
        if old is not None:
            shutil.copytree(old, place / "out.moepack")
        ended = run(copy, place / "out.moepack", *options, kill_at=n, calls=calls)
        if ended.status == 0:
            assert ended.n_calls == n - 1
            assert n > 30
            count("kill points of a convert, none of which lost anything", n - 1)
            return
        assert ended.status == -signal.SIGKILL, ended.output
        yield place, copy
        shutil.rmtree(home)


def finish(run: Run, place: Path, source: Path, *options: str) -> None:
    """Run the convert again, unkilled: it completes, or finds the pack complete already."""
    was_complete = (place / "out.moepack").exists() and "--overwrite" not in options
    ended = run(source, place / "out.moepack", *options, calls=())
    assert ended.status == int(was_complete), ended.output
    if was_complete:
        assert "out.moepack: exists; pass --overwrite" in ended.output


def test_convert_killed_at_any_call_ends_in_the_same_pack(
    run: Run, count: Callable[[str, int], None], tmp_path: Path, case: Case
) -> None:
    """The destination is absent or whole, the source untouched, the rest of no importance."""
    wanted = fingerprint(case.pack)
    source_bytes = fingerprint(case.source)
    for place, source in killed(run, count, tmp_path, case.source, *case.options):
        assert fingerprint(source) == source_bytes
        assert set(names_in(place)) <= {"out.moepack", ".out.moepack.partial"}
        if (place / "out.moepack").exists():
            Pack.open(place / "out.moepack")
            assert fingerprint(place / "out.moepack") == wanted
        finish(run, place, source, *case.options)
        assert fingerprint(place / "out.moepack") == wanted
        assert names_in(place) == ["out.moepack"]
        assert fingerprint(source) == source_bytes


def tensors_in(folder: Path, pack: Pack, names: set[str]) -> bool:
    """Whether these tensors are in a folder as they are in a pack."""
    targets = targets_of(pack.manifest)
    for name in names:
        file = targets[name].file
        if not (folder / file).exists():
            return False
        data, wanted = (folder / file).read_bytes(), (pack.path / file).read_bytes()
        if any(data[i : i + n] != wanted[i : i + n] for i, n in targets[name].ranges()):
            return False
    return True


def test_consuming_convert_killed_at_any_call_has_every_tensor(
    run: Run, count: Callable[[str, int], None], tmp_path: Path, copied: Path, copied_pack: Path
) -> None:
    """Each shard is intact, or all of it is in the staging folder or the pack; then it is gone."""
    wanted = fingerprint(copied_pack)
    shards = shards_of(copied)
    pack = Pack.open(copied_pack)
    tensors = {name: set(mx.load(str(copied / name))) for name in shards}
    n_gone = []
    for place, source in killed(run, count, tmp_path, copied, "--consume"):
        left = shards_of(source)
        n_gone.append(len(shards.keys() - left.keys()))
        is_published = (place / "out.moepack").exists()
        where = "out.moepack" if is_published else ".out.moepack.partial"
        for name in shards:
            assert left.get(name) == shards[name] or tensors_in(place / where, pack, tensors[name])
        if is_published:
            Pack.open(place / where)
        assert set(names_in(place)) <= {"out.moepack", ".out.moepack.partial"}
        finish(run, place, source, "--consume")
        assert shards_of(source) == {}
        assert fingerprint(place / "out.moepack") == wanted
        assert names_in(place) == ["out.moepack"]
    assert set(n_gone) == {0, 1, 2, 3}


def test_unpack_gives_consumed_shards_back(
    run: Run, tmp_path: Path, copied: Path, copied_pack: Path
) -> None:
    """After a kill with two of them gone."""
    source = Path(shutil.copytree(copied, tmp_path / "source"))
    pack = tmp_path / "out.moepack"
    assert run(source, pack, "--consume", kill_at=3, calls=("unlink",)).status < 0
    assert len(shards_of(source)) == 1
    ended = run(source, pack, "--consume")
    assert ended.status == 0, ended.output
    assert shards_of(source) == {}
    unpacked = unpack(Pack.open(pack), tmp_path / "unpacked")
    assert unpacked.made == ()
    assert shards_of(tmp_path / "unpacked") == shards_of(copied)


def test_overwriting_convert_killed_at_any_call_has_the_old_pack_or_the_new(
    run: Run,
    count: Callable[[str, int], None],
    tmp_path: Path,
    copied: Path,
    copied_pack: Path,
    derived_pack: Path,
) -> None:
    """Between the two renames both lie whole beside the destination, hidden.

    The writes go as without an old pack.
    """
    old, new = fingerprint(derived_pack), fingerprint(copied_pack)
    seen = set()
    calls = tuple(call for call in CALLS if call != "pwrite")
    points = killed(run, count, tmp_path, copied, "--overwrite", old=derived_pack, calls=calls)
    for place, source in points:
        if (place / "out.moepack").exists():
            found = fingerprint(place / "out.moepack")
            assert found in (old, new)
            seen.add("old" if found == old else "new")
        else:
            seen.add("between")
            assert fingerprint(place / ".out.moepack.old") == old
            assert fingerprint(place / ".out.moepack.partial") == new
        finish(run, place, source, "--overwrite")
        assert fingerprint(place / "out.moepack") == new
        assert names_in(place) == ["out.moepack"]
    assert seen == {"old", "between", "new"}


def test_convert_after_a_kill_between_the_two_renames_finds_the_old_pack(
    run: Run, tmp_path: Path, copied: Path, copied_pack: Path, derived_pack: Path
) -> None:
    """It is put back first."""
    destination = tmp_path / "place" / "out.moepack"
    shutil.copytree(derived_pack, destination)
    ended = run(copied, destination, "--overwrite", kill_at=2, calls=("rename",))
    assert ended.status < 0
    assert not destination.exists()
    ended = run(copied, destination)
    assert ended.status == 1
    assert "exists; pass --overwrite" in ended.output
    assert fingerprint(destination) == fingerprint(derived_pack)
    assert run(copied, destination, "--overwrite").status == 0
    assert fingerprint(destination) == fingerprint(copied_pack)
    assert names_in(tmp_path / "place") == ["out.moepack"]


class Writes:
    """An os.pwrite that counts its calls and fails at one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n_calls = 0
        self.fail_at = 0
        self.error = OSError()
        self._pwrite = os.pwrite
        monkeypatch.setattr(os, "pwrite", self)

    def __call__(self, fd: int, data: memoryview, offset: int) -> int:
        self.n_calls += 1
        if self.n_calls == self.fail_at:
            raise self.error
        return self._pwrite(fd, data, offset)


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Writes:
    """See Writes."""
    return Writes(monkeypatch)


def plan_of(source: Path, options: ConvertOptions | None = None) -> ConvertPlan:
    """The plan of a folder."""
    return plan_convert(open_source(str(source)), options or ConvertOptions())


@pytest.mark.parametrize(
    ("case", "code"),
    [("copied", errno.ENOSPC), ("derived", errno.EIO)],
    indirect=["case"],
    ids=["copied ENOSPC", "derived EIO"],
)
def test_failing_write_leaves_nothing_whichever_it_is(
    count: Callable[[str, int], None], tmp_path: Path, case: Case, writes: Writes, code: int
) -> None:
    """Neither a pack nor a staging folder, and the source as it was."""
    source_bytes = fingerprint(case.source)
    place = tmp_path / "place"
    place.mkdir()
    make_pack(case.source, tmp_path / "counted.moepack", case.convert_options)
    n_writes = writes.n_calls
    assert n_writes > 30
    writes.error = OSError(code, os.strerror(code))
    for n in range(1, n_writes + 1):
        writes.n_calls, writes.fail_at = 0, n
        plan = plan_of(case.source, case.convert_options)
        with pytest.raises(SourceError, match=f"{os.strerror(code)}; nothing was kept"):
            convert(plan, place / "out.moepack")
        assert writes.n_calls == n
        assert names_in(place) == []
    assert fingerprint(case.source) == source_bytes
    count("failing writes of a convert, none of which left anything", n_writes)


def test_consuming_convert_with_a_failing_write_goes_on_whichever_it_was(
    run: Run, tmp_path: Path, copied: Path, copied_pack: Path, writes: Writes
) -> None:
    """The second half of the writes, when shards are gone; the command finishes it."""
    wanted = fingerprint(copied_pack)
    make_pack(copied, tmp_path / "counted.moepack")
    n_writes = writes.n_calls
    writes.error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for n in range(n_writes, n_writes // 2, -4):
        writes.n_calls, writes.fail_at = 0, n
        place = tmp_path / str(n)
        place.mkdir()
        source = Path(shutil.copytree(copied, place / "source"))
        with pytest.raises(SourceError, match=r"No space left .*run it again to go on from here"):
            convert(plan_of(source), place / "out.moepack", consume=True)
        assert len(shards_of(source)) < N_SHARDS
        ended = run(source, place / "out.moepack", "--consume")
        assert ended.status == 0, ended.output
        assert fingerprint(place / "out.moepack") == wanted
        assert names_in(place) == ["out.moepack", "source"]


def test_short_writes_of_computed_tensors_are_continued(
    tmp_path: Path, derived: Path, derived_pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk may take less than it was given."""
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, d, at: pwrite(fd, d[: max(1, len(d) // 3)], at))
    pack = make_pack(derived, tmp_path / "out.moepack", QUANTIZE_OPTIONS)
    assert fingerprint(pack) == fingerprint(derived_pack)


class Unfinished(NamedTuple):
    """What a killed convert left: its source, a copy, its destination and staging folder."""

    source: Path
    destination: Path
    staging: Path

    def journal(self) -> list[dict[str, Any]]:
        """The lines of the journal."""
        text = (self.staging / "journal").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def finished(self, run: Run, *options: str) -> str:
        """What the convert said when it was run again and completed, leaving nothing hidden."""
        ended = run(self.source, self.destination, *options)
        assert ended.status == 0, ended.output
        assert names_in(self.destination.parent) == ["out.moepack"]
        return ended.output


def unfinished(run: Run, home: Path, source: Path, *options: str) -> Unfinished:
    """Killed at its last write, in the third shard: what the first two gave is in the journal."""
    home.mkdir()
    copy = Path(shutil.copytree(source, home / "source"))
    destination = home / "place" / "out.moepack"
    destination.parent.mkdir()
    keeping = [option for option in options if option != "--consume"]
    n_writes = run(copy, home / "counted.moepack", *keeping, calls=("pwrite",)).n_calls
    ended = run(copy, destination, *options, kill_at=n_writes, calls=("pwrite",))
    assert ended.status < 0, ended.output
    left = Unfinished(copy, destination, destination.parent / ".out.moepack.partial")
    assert any("shard" in line for line in left.journal())
    return left


def test_resumed_convert_writes_only_what_is_missing(run: Run, tmp_path: Path, case: Case) -> None:
    """And says how much was there."""
    left = unfinished(run, tmp_path / "home", case.source, *case.options)
    n_noted = sum("tensor" in line for line in left.journal())
    written = case.pack / "shared.bin"
    before = (left.staging / "shared.bin").stat()
    ended = run(left.source, left.destination, *case.options, calls=("pwrite",))
    assert n_noted > 0
    assert f"resuming: {n_noted} of " in ended.output
    whole = run(left.source, tmp_path / "whole.moepack", *case.options, calls=("pwrite",))
    assert 0 < ended.n_calls < whole.n_calls / 2
    assert (left.destination / "shared.bin").stat().st_ino == before.st_ino
    assert (left.destination / "shared.bin").read_bytes() == written.read_bytes()


REPLACED = "an unfinished convert of another source or options is replaced"


def test_touched_source_starts_over(run: Run, tmp_path: Path, copied: Path) -> None:
    """The time of change is all that tells, without reading everything."""
    left = unfinished(run, tmp_path / "home", copied)
    shard = min(left.source.glob("*.safetensors"))
    os.utime(shard, ns=(0, shard.stat().st_mtime_ns + 1))
    output = left.finished(run)
    assert REPLACED in output
    assert "resuming" not in output


def test_source_with_other_bytes_starts_over(run: Run, tmp_path: Path, copied: Path) -> None:
    """The pack has the new ones."""
    left = unfinished(run, tmp_path / "home", copied)
    shard = min(left.source.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert REPLACED in left.finished(run)
    wanted = make_pack(left.source, tmp_path / "wanted.moepack")
    assert fingerprint(left.destination) == fingerprint(wanted)


def test_changed_tokenizer_starts_over(run: Run, tmp_path: Path, copied: Path) -> None:
    """The small files are part of the source."""
    left = unfinished(run, tmp_path / "home", copied)
    (left.source / "chat_template.jinja").write_text("other")
    assert REPLACED in left.finished(run)
    assert (left.destination / "chat_template.jinja").read_text() == "other"


def test_other_options_start_over(run: Run, tmp_path: Path, copied: Path) -> None:
    """Half a pack in float32 scales is no use for one in bfloat16."""
    left = unfinished(run, tmp_path / "home", copied)
    assert REPLACED in left.finished(run, "--dtype", "bfloat16")
    wanted = make_pack(copied, tmp_path / "wanted.moepack", ConvertOptions(dtype="bfloat16"))
    assert fingerprint(left.destination) == fingerprint(wanted)


@pytest.mark.parametrize("kind", ["shared", "expert"])
def test_damaged_tensor_in_the_staging_folder_is_written_again(
    run: Run, tmp_path: Path, case: Case, kind: str
) -> None:
    """Every noted tensor is read and compared before it counts."""
    left = unfinished(run, tmp_path / "home", case.source, *case.options)
    noted = [line["tensor"] for line in left.journal() if "tensor" in line]
    targets = targets_of(Pack.open(case.pack).manifest)
    name = next(n for n in noted if ("switch_mlp" in n) == (kind == "expert"))
    file = left.staging / targets[name].file
    data = bytearray(file.read_bytes())
    data[list(targets[name].ranges())[-1][0]] ^= 1
    file.write_bytes(data)
    assert f"resuming: {len(noted) - 1} of " in left.finished(run, *case.options)
    assert fingerprint(left.destination) == fingerprint(case.pack)


def test_missing_file_in_the_staging_folder_is_written_again(
    run: Run, tmp_path: Path, copied: Path, copied_pack: Path
) -> None:
    """Someone tidied up."""
    left = unfinished(run, tmp_path / "home", copied)
    (left.staging / "shared.bin").unlink()
    assert "resuming" in left.finished(run)
    assert fingerprint(left.destination) == fingerprint(copied_pack)


@pytest.mark.parametrize("options", [(), ("--consume",)], ids=["kept", "consumed"])
def test_journal_with_a_cut_last_line_is_gone_on_with(
    run: Run, tmp_path: Path, copied: Path, copied_pack: Path, options: tuple[str, ...]
) -> None:
    """By a convert that is killed in turn: what it notes does not run into the cut line."""
    left = unfinished(run, tmp_path / "home", copied, *options)
    with (left.staging / "journal").open("a") as journal:
        journal.write('{"tensor": "model.emb')
    n_lines = (left.staging / "journal").read_bytes().count(b"\n")
    for kill_at in itertools.count(1):
        ended = run(left.source, left.destination, *options, kill_at=kill_at, calls=("fsync",))
        assert ended.status < 0, ended.output
        if (left.staging / "journal").read_bytes().count(b"\n") > n_lines:
            break
    assert "resuming" in left.finished(run, *options)
    assert fingerprint(left.destination) == fingerprint(copied_pack)


def test_journal_without_a_whole_line_starts_over(
    run: Run, tmp_path: Path, copied: Path, copied_pack: Path
) -> None:
    """Cut while it was begun."""
    left = unfinished(run, tmp_path / "home", copied)
    os.truncate(left.staging / "journal", 20)
    assert "resuming" not in left.finished(run)
    assert fingerprint(left.destination) == fingerprint(copied_pack)


def test_unreadable_journal_of_a_consumed_source_is_refused_in_a_line(
    run: Run, tmp_path: Path, copied: Path
) -> None:
    """Starting over would delete what is nowhere else."""
    left = unfinished(run, tmp_path / "home", copied, "--consume")
    journal = left.staging / "journal"
    journal.write_bytes(b"\xff" + journal.read_bytes()[1:])
    before = fingerprint(left.staging)
    ended = run(left.source, left.destination, "--consume")
    assert ended.status == 1
    assert "journal: damaged" in ended.output
    assert fingerprint(left.staging) == before


@pytest.mark.parametrize("options", [(), ("--consume",), ("--dtype", "bfloat16")], ids=str)
def test_consumed_shards_are_not_deleted_for_another_source(
    run: Run, tmp_path: Path, copied: Path, derived: Path, copied_pack: Path, options: Any
) -> None:
    """Refused whether or not the other convert consumes; the first one can still be finished."""
    left = unfinished(run, tmp_path / "home", copied, "--consume")
    assert len(shards_of(left.source)) == 1
    before = fingerprint(left.staging)
    other = Path(shutil.copytree(derived, tmp_path / "other"))
    ended = run(other, left.destination, *options)
    assert ended.status == 1
    assert "holds shards of another source or options, consumed into it" in ended.output
    assert fingerprint(left.staging) == before
    assert fingerprint(other) == fingerprint(derived)
    assert "resuming" in left.finished(run, "--consume")
    assert fingerprint(left.destination) == fingerprint(copied_pack)


def test_consumed_shards_outlive_a_failing_convert_without_consume(
    run: Run, tmp_path: Path, copied: Path, copied_pack: Path, writes: Writes
) -> None:
    """Without --consume a failure clears up; not what is nowhere else."""
    left = unfinished(run, tmp_path / "home", copied, "--consume")
    writes.fail_at, writes.error = 1, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    plan = plan_convert(
        open_source(str(left.source), stubs=left.staging / "stubs"), ConvertOptions()
    )
    with pytest.raises(SourceError, match="run it again to go on from here"):
        convert(plan, left.destination)
    assert "resuming" in left.finished(run)
    assert fingerprint(left.destination) == fingerprint(copied_pack)
    assert len(shards_of(left.source)) == 1  # what was not consumed by then


def test_damaged_tensor_of_a_consumed_shard_is_refused(
    run: Run, tmp_path: Path, copied: Path, copied_pack: Path
) -> None:
    """Naming it; nothing is deleted."""
    left = unfinished(run, tmp_path / "home", copied, "--consume")
    name = next(line["tensor"] for line in left.journal() if "tensor" in line)
    target = targets_of(Pack.open(copied_pack).manifest)[name]
    data = bytearray((left.staging / target.file).read_bytes())
    data[target.offset] ^= 1
    (left.staging / target.file).write_bytes(data)
    before = fingerprint(left.staging)
    ended = run(left.source, left.destination, "--consume")
    assert ended.status == 1
    assert f"{name} is damaged and its source is gone" in ended.output
    assert fingerprint(left.staging) == before


def test_damaged_tensor_of_a_shard_still_there_is_written_again(
    run: Run, tmp_path: Path, copied: Path, copied_pack: Path
) -> None:
    """Killed after the shard was noted as released, before it was deleted."""
    left = unfinished(run, tmp_path / "home", copied, "--consume")
    for shard in copied.glob("*.safetensors"):
        if not (left.source / shard.name).exists():
            shutil.copy2(shard, left.source)
    name = next(line["tensor"] for line in left.journal() if "tensor" in line)
    target = targets_of(Pack.open(copied_pack).manifest)[name]
    data = bytearray((left.staging / target.file).read_bytes())
    data[target.offset] ^= 1
    (left.staging / target.file).write_bytes(data)
    left.finished(run, "--consume")
    assert shards_of(left.source) == {}
    assert fingerprint(left.destination) == fingerprint(copied_pack)


def test_stubs_of_another_source_are_not_taken_for_this_ones(
    run: Run, tmp_path: Path, copied: Path, derived: Path
) -> None:
    """A convert killed before it consumed anything is replaced; the next is killed and resumed."""
    destination = tmp_path / "place" / "out.moepack"
    destination.parent.mkdir()
    one = Path(shutil.copytree(derived, tmp_path / "one"))
    assert run(one, destination, "--consume", kill_at=1, calls=("pwrite",)).status < 0
    two = Path(shutil.copytree(copied, tmp_path / "two"))
    n_writes = run(two, tmp_path / "counted.moepack", calls=("pwrite",)).n_calls
    assert run(two, destination, "--consume", kill_at=n_writes, calls=("pwrite",)).status < 0
    assert len(shards_of(two)) == 1
    ended = run(two, destination, "--consume")
    assert ended.status == 0, ended.output
    assert shards_of(two) == {}
    assert shards_of(one) == shards_of(derived)


@pytest.mark.parametrize("kind", ["symlink", "hard link"])
def test_consume_refuses_linked_shards_before_anything_is_deleted(
    run: Run, tmp_path: Path, copied: Path, kind: str
) -> None:
    """Their bytes belong to somebody else too."""
    source = Path(shutil.copytree(copied, tmp_path / "source"))
    shard = max(source.glob("*.safetensors"))
    if kind == "symlink":
        shard.rename(tmp_path / "elsewhere")
        shard.symlink_to(tmp_path / "elsewhere")
    else:
        os.link(shard, tmp_path / "elsewhere")
    before = fingerprint(tmp_path)
    ended = run(source, tmp_path / "out.moepack", "--consume")
    assert ended.status == 1
    assert f"{shard}: is a link; --consume takes plain files only" in ended.output
    assert fingerprint(tmp_path) == before
    assert names_in(tmp_path) == ["elsewhere", "source"]


def test_consume_keeps_shards_with_computed_tensors(
    run: Run, tmp_path: Path, derived: Path, derived_pack: Path
) -> None:
    """And says which: those bytes are not in the pack."""
    source = Path(shutil.copytree(derived, tmp_path / "source"))
    ended = run(source, tmp_path / "out.moepack", "--consume", *QUANTIZE)
    assert ended.status == 0, ended.output
    assert shards_of(source) == shards_of(derived)
    names = ", ".join(sorted(shards_of(derived)))
    assert f"kept, as not all their bytes are in the pack: {names}" in ended.output
    assert fingerprint(tmp_path / "out.moepack") == fingerprint(derived_pack)


def test_consume_keeps_shards_with_dropped_tensors(run: Run, tmp_path: Path, copied: Path) -> None:
    """The others go."""
    config = {**json.loads((copied / "config.json").read_text()), "tie_word_embeddings": True}
    weights = read_weights(copied)  # a tied model does not use the head
    del weights["lm_head.scales"], weights["lm_head.biases"]
    source = resave(copied, tmp_path / "source", weights, n_shards=N_SHARDS, config=config)
    dropped = next(n for n in shards_of(source) if "lm_head.weight" in mx.load(str(source / n)))
    before = shards_of(source)
    ended = run(source, tmp_path / "out.moepack", "--consume")
    assert ended.status == 0, ended.output
    assert f"kept, as not all their bytes are in the pack: {dropped}\n" in ended.output
    assert shards_of(source) == {dropped: before[dropped]}


def test_names_are_durable_before_a_shard_is_deleted(
    tmp_path: Path, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file whose folder was not fsynced can be gone after a power cut."""
    source = Path(shutil.copytree(copied, tmp_path / "source"))
    place = tmp_path / "place"
    place.mkdir()
    synced: set[int] = set()
    at_first: list[set[int]] = []
    needed: list[dict[int, str]] = []
    fsync, discard = os.fsync, ConsumedShards.discard

    def noting_fsync(fd: int) -> None:
        synced.add(os.fstat(fd).st_ino)
        fsync(fd)

    def noting_discard(store: ConsumedShards, name: str) -> None:
        if not at_first:
            at_first.append(set(synced))
            needed.append({p.stat().st_ino: p.name for p in (place, *place.rglob("*"))})
        discard(store, name)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(ConsumedShards, "discard", noting_discard)
    convert(plan_of(source), place / "out.moepack", consume=True)
    missing = {name for inode, name in needed[0].items() if inode not in at_first[0]}
    assert missing <= {"00000.bin", "shared.bin"}  # what no tensor of the shard is in


def test_journal_reads_back_what_it_noted(tmp_path: Path) -> None:
    """And nothing under another binding."""
    path = tmp_path / "journal"
    binding: dict[str, Any] = {"options": {}, "mtimes_ns": {}}
    Journal.start(path, binding).add({"a": b"\x01", "b": b"\x02"}, [])
    assert Journal(path, binding).tensors == {"a": b"\x01", "b": b"\x02"}
    other = Journal(path, {**binding, "options": {"dtype": "float16"}})
    assert not other.is_resumed
    assert other.tensors == {}
