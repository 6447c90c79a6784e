"""Strangers' files: every one is refused in a line, soon, and without much memory."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import tiny_models
from forking import forking
from hostile_inputs import Input, all_inputs

MAX_CPU_S = 2  # time of a processor, not of a clock: other work on the machine does not count
MAX_GROWTH = 300 * 10**6
MIN_INPUTS = 200

# What is measured is the input's.
COMMAND = """
import json, time
import mlx_lm.models.qwen3_moe
import moepack.packer.convert, moepack.packer.opening, moepack.runtime.loading
import moepack.tools.answering, moepack.tools.convert, moepack.tools.run
from moepack.tools.cli import main
from moepack.tools.reporting import peak_memory

def run(arguments):
    before, started = peak_memory(), time.process_time()
    status = main(arguments)
    figures = time.process_time() - started, peak_memory() - before
    print(json.dumps([status, *figures]), flush=True)
    return 0
"""


class Ended(NamedTuple):
    """Of a command: exit status, what it said, seconds of CPU, bytes of memory it took more."""

    status: int
    output: str
    cpu_s: float
    growth: int


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[..., Ended]]:
    """Runs the command with arguments in a process of its own."""
    with forking(COMMAND) as fork:

        def run(*arguments: object) -> Ended:
            died, output = fork([*map(str, arguments)])
            assert died == 0, f"{arguments}: killed by signal {-died}: {output}"
            output, _, figures = output.rstrip("\n").rpartition("\n")
            return Ended(json.loads(figures)[0], output, *json.loads(figures)[1:])

        yield run


def complaint(hostile: Input, folder: Path, run: Callable[..., Ended]) -> tuple[str | None, Ended]:
    """(what is wrong with how an input was met, None if nothing is, and how the command ended)."""
    path, there = folder / "input", folder / "out.moepack"
    hostile.write(path)
    if hostile.is_pack:
        ended = run("run", path, "-p", "x", "-m", "1")
    else:
        ended = run("convert", path, there)
    last = ended.output.splitlines()[-1] if ended.output else ""
    if ended.status != 1:
        return f"ended with {ended.status}: {ended.output[-300:]}", ended
    if "Traceback" in ended.output or "unexpected" in last or not last.startswith("moepack: error"):
        return f"no clear line: {ended.output[-300:]}", ended
    if not last.isprintable() or len(last) > 2000:
        return f"no printable line of a few words: {last[:300]!a}", ended
    if ended.cpu_s > MAX_CPU_S or ended.growth > MAX_GROWTH:
        return f"took {ended.cpu_s:.1f} s, {ended.growth:,} bytes: {last}", ended
    left = sorted(p.name for p in folder.iterdir() if not p.name.startswith("outside-"))
    if left != ["input"]:
        return f"left {left}", ended
    return None, ended


def test_every_hostile_input_is_refused_in_a_line_soon_and_without_much_memory(
    run: Callable[..., Ended],
    count: Callable[[str, int], None],
    q4_pack: Path,
    q4_source: Path,
    tmp_path: Path,
) -> None:
    """None crashes, hangs, allocates wildly, runs code, leaves something behind or passes."""
    complaints, endings = [], []
    for hostile in all_inputs(q4_pack, q4_source):
        folder = tmp_path / "place"
        folder.mkdir()
        wrong, ended = complaint(hostile, folder, run)
        if wrong is not None:
            complaints.append(f"{hostile.name}: {wrong}")
        endings.append(ended)
        shutil.rmtree(folder)
    assert not complaints, "\n".join(complaints)
    assert len(endings) >= MIN_INPUTS
    count("hostile packs and checkpoints, each refused in a line", len(endings))
    count("ms of CPU the slowest took", int(1000 * max(e.cpu_s for e in endings)))
    count("MB of memory the largest took", max(e.growth for e in endings) // 10**6)


def test_what_is_not_hostile_passes(
    run: Callable[..., Ended], q4_pack: Path, q4_source: Path, tmp_path: Path
) -> None:
    """The same commands, on what the hostile ones were made from."""
    prompt = tiny_models.text_of([5, 9])
    assert run("run", q4_pack, "-p", prompt, "-m", "1").status == 0
    assert run("convert", q4_source, tmp_path / "out.moepack").status == 0
