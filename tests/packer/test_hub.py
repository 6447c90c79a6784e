"""A source on the hub: shard by shard, resumed, checked; from a server on this machine."""

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from conftest import make_pack
from hub_server import MAIN, REPOSITORY, HubServer, serving
from tiny_models import read_weights, resave

from moepack.formats.codec import encode
from moepack.formats.pack import MANIFEST_NAME, Pack
from moepack.packer.source import write_stub

# Shards of more than half a megabyte: a header is a small part, and blocks of disk are counted.
CONFIG: dict[str, Any] = {
    **tiny_models.QWEN3_MOE,
    "num_hidden_layers": 1,
    "mlp_only_layers": [],
    "num_experts": 8,
    "hidden_size": 256,
    "moe_intermediate_size": 256,
}
EXPERTS = "model.layers.0.mlp.switch_mlp."
OTHER, SWAPPED, DENSE = "2" * 40, "3" * 40, "4" * 40
SHARDS = [f"model-{i}-of-00003.safetensors" for i in ("00001", "00002", "00003")]


def write_source(folder: Path, seed: int) -> Path:
    """A 4-bit checkpoint in three shards of about one size."""
    whole = tiny_models.write_checkpoint(folder / "whole", CONFIG, bits=4, seed=seed)
    weights = read_weights(whole)
    names = sorted(weights, key=lambda name: (-weights[name].nbytes, name))
    dealt = {name: weights[name] for i in range(3) for name in names[i::3]}
    return resave(whole, folder / "source", dealt, n_shards=3)


def write_swapped(source: Path, folder: Path) -> Path:
    """The same tensors, of the same sizes, two of the last shard in the other's place."""
    shutil.copytree(source, folder)
    data = (folder / SHARDS[2]).read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:start])
    one, two = (n for n in header if n.startswith(EXPERTS) and not n.endswith(".weight"))
    assert header[one]["shape"] == header[two]["shape"]
    (a, b), (c, d) = (header[name]["data_offsets"] for name in (one, two))
    header[one]["data_offsets"], header[two]["data_offsets"] = [c, d], [a, b]
    body = bytearray(data[start:])
    body[a:b], body[c:d] = body[c:d], body[a:b]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (start - 8 - len(text))
    (folder / SHARDS[2]).write_bytes(struct.pack("<Q", len(text)) + text + body)
    assert len(text) == start - 8
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of each commit. Read only."""
    folder = tmp_path_factory.mktemp("hub")
    main = write_source(folder / "main", 0)
    dense = tiny_models.write_checkpoint(folder / "dense", tiny_models.QWEN3_DENSE)
    return {
        MAIN: main,
        OTHER: write_source(folder / "other", 1),
        SWAPPED: write_swapped(main, folder / "swapped"),
        DENSE: dense,
    }


@dataclass(frozen=True)
class Home:
    """A place to convert into, and a cache of the hub."""

    hub: HubServer
    place: Path
    cache: Path

    def convert(
        self, *options: str, repository: str = REPOSITORY, offline: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """Run `moepack convert` to `place/out.moepack`, in a process of its own."""
        destination = str(self.place / "out.moepack")
        return self.python(
            "-m", "moepack.tools", "convert", repository, destination, *options, offline=offline
        )

    def python(self, *arguments: str, offline: bool = False) -> subprocess.CompletedProcess[str]:
        """Run Python for which the server is the hub."""
        environment = {
            **os.environ,
            "HF_ENDPOINT": self.hub.endpoint,
            "HF_HOME": str(self.cache),
            "HF_HUB_OFFLINE": "1" if offline else "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1",
        }
        for name in ("HF_HUB_CACHE", "HF_TOKEN"):
            environment.pop(name, None)
        return subprocess.run(
            [sys.executable, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    def copy(self, folder: Path) -> "Home":
        """The same state elsewhere."""
        shutil.copytree(self.place, folder / "place")
        shutil.copytree(self.cache, folder / "cache", symlinks=True)
        return Home(self.hub, folder / "place", folder / "cache")

    @property
    def pack(self) -> Path:
        """What is made."""
        return self.place / "out.moepack"

    @property
    def staging(self) -> Path:
        """Where it is made."""
        return self.place / ".out.moepack.partial"

    def allocated_nbytes(self) -> int:
        """Disk space in use, holes left out."""
        files = [p for root in (self.place, self.cache) for p in root.rglob("*")]
        return sum(p.lstat().st_blocks * 512 for p in files)


@pytest.fixture(scope="module")
def start(folders: dict[str, Path]) -> Iterator[Any]:
    """Makes an empty home in a folder, with a server of its own."""
    with ExitStack() as stack:

        def start(folder: Path) -> Home:
            branches = {"main": MAIN, "other": OTHER}
            hub = stack.enter_context(serving(HubServer(folders, branches)))
            home = Home(hub, folder / "place", folder / "cache")
            home.place.mkdir()
            home.cache.mkdir()
            return home

        yield start


@pytest.fixture
def home(start: Any, tmp_path: Path) -> Home:
    """An empty one."""
    made: Home = start(tmp_path)
    return made


def failed_line(done: subprocess.CompletedProcess[str]) -> str:
    """The one line in which a command said why it failed."""
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    (line,) = (t for t in done.stderr.splitlines() if t.startswith("moepack: error: "))
    assert done.stderr.endswith(f"{line}\n")
    return line


def fingerprint(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, hidden ones included."""
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


def names_in(folder: Path) -> list[str]:
    """What is directly in a folder, hidden entries included."""
    return sorted(entry.name for entry in folder.iterdir())


def check_equal(pack: Path, local: Path, commit: str) -> None:
    """Bytes equal to a pack of the local folder, but for the name of the source."""
    found, wanted = fingerprint(pack), fingerprint(local)
    manifest = Pack.open(local).manifest
    named = replace(manifest.source, name=REPOSITORY, revision=commit)
    wanted[MANIFEST_NAME] = encode(replace(manifest, source=named))
    assert found == wanted


@dataclass(frozen=True)
class Fetched:
    """A home where a pack was made, and the disk space in use whenever a shard was asked for."""

    home: Home
    allocated_at: dict[str, int]


@pytest.fixture(scope="module")
def fetched(start: Any, tmp_path_factory: pytest.TempPathFactory) -> Fetched:
    """See Fetched."""
    home: Home = start(tmp_path_factory.mktemp("fetched"))
    allocated = {}

    def note(name: str) -> None:
        allocated[name] = home.allocated_nbytes()

    home.hub.before_file = note
    done = home.convert()
    assert done.returncode == 0, done.stderr
    return Fetched(home, allocated)


@pytest.fixture(scope="module")
def local_pack(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pack of the folder of `MAIN`."""
    return make_pack(folders[MAIN], tmp_path_factory.mktemp("local") / "out.moepack")


def test_pack_from_the_hub_equals_one_from_a_folder(fetched: Fetched, local_pack: Path) -> None:
    """But for the name of the source and its commit."""
    check_equal(fetched.home.pack, local_pack, MAIN)
    assert names_in(fetched.home.place) == ["out.moepack"]


def test_every_shard_is_fetched_once(fetched: Fetched) -> None:
    """In order."""
    assert [n for n in fetched.home.hub.whole if n in SHARDS] == SHARDS


def test_disk_never_holds_two_shards(fetched: Fetched, folders: dict[str, Path]) -> None:
    """When a shard is asked for, there is the pack of those before it, and none of them."""
    sizes = [(folders[MAIN] / name).stat().st_size for name in SHARDS]
    n_tensors = len(read_weights(folders[MAIN]))
    slack = n_tensors * 2 * 4096 + 2**16  # blocks cut at both ends; journal, folders
    at = [fetched.allocated_at[name] for name in SHARDS]
    assert min(sizes) > slack
    for i in (1, 2):
        assert sum(sizes[:i]) - slack < at[i] - at[0] < sum(sizes[:i]) + slack


def test_cache_holds_no_shard_afterwards(fetched: Fetched, folders: dict[str, Path]) -> None:
    """Only the small files."""
    names = {p.name for p in fetched.home.cache.rglob("*")}
    assert "config.json" in names
    assert not names & set(SHARDS)
    small = [p.stat().st_size for p in folders[MAIN].iterdir() if p.suffix != ".safetensors"]
    files = [p for p in fetched.home.cache.rglob("*") if p.is_file() and not p.is_symlink()]
    assert sum(p.stat().st_size for p in files) < sum(small) + 2**16


@pytest.fixture(scope="module")
def cut(start: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Home, str]:
    """A home where the connection was reset in the second shard, and what was said."""
    home: Home = start(tmp_path_factory.mktemp("cut"))
    home.hub.broken = {SHARDS[1]}
    line = failed_line(home.convert())
    home.hub.broken = set()
    home.hub.whole.clear()
    return home, line


def test_reset_connection_is_an_error_of_one_line(cut: tuple[Home, str]) -> None:
    """It names the shard and says what to do; what was fetched is kept, hidden."""
    home, line = cut
    assert SHARDS[1] in line
    assert "run the same command again to go on from here" in line
    assert names_in(home.place) == [".out.moepack.partial"]


def test_second_run_fetches_only_the_remaining_shards(
    cut: tuple[Home, str], tmp_path: Path, local_pack: Path
) -> None:
    """And ends in the same pack."""
    home = cut[0].copy(tmp_path)
    home.hub.whole.clear()
    done = home.convert()
    assert done.returncode == 0, done.stderr
    assert "resuming" in done.stderr
    assert [n for n in home.hub.whole if n in SHARDS] == SHARDS[1:]
    check_equal(home.pack, local_pack, MAIN)
    assert names_in(home.place) == ["out.moepack"]


def test_dry_run_keeps_what_an_unfinished_convert_has(
    cut: tuple[Home, str], tmp_path: Path
) -> None:
    """It says what would be done and touches nothing."""
    home = cut[0].copy(tmp_path)
    before = fingerprint(home.place)
    done = home.convert("--dry-run")
    assert done.returncode == 0, done.stderr
    assert fingerprint(home.place) == before


def test_dry_run_leaves_nothing(home: Home) -> None:
    """Nor does it fetch a shard."""
    done = home.convert("--dry-run")
    assert done.returncode == 0, done.stderr
    assert "nothing was written" in done.stdout
    assert names_in(home.place) == []
    assert not set(home.hub.whole) & set(SHARDS)


def test_shard_that_is_not_what_the_hub_states_is_refused(home: Home) -> None:
    """By its sha256; nothing is published."""
    home.hub.sha256[SHARDS[1]] = "ab" * 32
    line = failed_line(home.convert())
    assert f"{SHARDS[1]}: sha256 is " in line
    assert f"the hub states {'ab' * 32}" in line
    assert not home.pack.exists()


def test_whole_cache_works_offline(home: Home, local_pack: Path) -> None:
    """Without a single request."""
    fetch = f"import huggingface_hub as hub; hub.snapshot_download({REPOSITORY!r})"
    filled = home.python("-c", fetch)
    assert filled.returncode == 0, filled.stderr
    n_requests = home.hub.n_requests
    done = home.convert(offline=True)
    assert done.returncode == 0, done.stderr
    assert home.hub.n_requests == n_requests
    check_equal(home.pack, local_pack, MAIN)


def test_empty_cache_offline_is_an_error_of_one_line(home: Home) -> None:
    """And leaves nothing."""
    assert REPOSITORY in failed_line(home.convert(offline=True))
    assert home.hub.n_requests == 0
    assert names_in(home.place) == []


def test_revision_chooses_the_commit(home: Home, folders: dict[str, Path], tmp_path: Path) -> None:
    """By the name of a branch."""
    done = home.convert("--revision", "other")
    assert done.returncode == 0, done.stderr
    check_equal(home.pack, make_pack(folders[OTHER], tmp_path / "local.moepack"), OTHER)


def test_headers_of_another_commit_are_not_used(
    home: Home, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Left by a convert that was killed in its first shard; the shards are of equal size."""
    (home.staging / "stubs").mkdir(parents=True)
    for name in SHARDS:
        shard = (folders[MAIN] / name).read_bytes()
        header = shard[: 8 + int.from_bytes(shard[:8], "little")]
        write_stub(home.staging / "stubs" / name, header, len(shard))
    (home.staging / "journal").write_text(json.dumps({"repository": REPOSITORY, "mtimes_ns": {}}))
    with (home.staging / "journal").open("a") as file:
        file.write("\n")
    done = home.convert("--revision", SWAPPED)
    assert done.returncode == 0, done.stderr
    assert "another source or options is replaced" in done.stderr
    check_equal(home.pack, make_pack(folders[SWAPPED], tmp_path / "local.moepack"), SWAPPED)


@pytest.mark.parametrize(
    ("repository", "options"),
    [("org/none", ()), (REPOSITORY, ("--revision", "none"))],
    ids=["repository", "revision"],
)
def test_unknown_name_is_an_error_of_one_line(
    home: Home, repository: str, options: tuple[str, ...]
) -> None:
    """Which names the repository; nothing is left."""
    assert repository in failed_line(home.convert(*options, repository=repository))
    assert names_in(home.place) == []


def test_model_that_cannot_be_packed_leaves_nothing(home: Home) -> None:
    """Its headers were fetched to find out."""
    assert "no expert module" in failed_line(home.convert("--revision", DENSE))
    assert names_in(home.place) == []


def test_consume_of_a_repository_is_a_usage_error_and_leaves_nothing(home: Home) -> None:
    """There is nothing to consume."""
    done = home.convert("--consume")
    assert done.returncode == 2
    assert "--consume is for local folders" in done.stderr
    assert names_in(home.place) == []


def test_folder_consumed_to_the_same_place_is_not_touched(home: Home) -> None:
    """Its bytes and headers are nowhere else."""
    (home.staging / "stubs").mkdir(parents=True)
    (home.staging / "stubs" / SHARDS[0]).write_bytes(b"header of the consumed shard")
    lines = [
        {"repository": None, "mtimes_ns": {}},
        {"shard": SHARDS[0], "nbytes": 28, "sha256": "00" * 32, "is_kept": False},
    ]
    (home.staging / "journal").write_text("".join(json.dumps(line) + "\n" for line in lines))
    before = fingerprint(home.place)
    assert "holds shards of another source" in failed_line(home.convert())
    assert fingerprint(home.place) == before
