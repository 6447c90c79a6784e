"""A real `moepack serve` in a process of its own, for tests that ask it."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

PROGRAM = (sys.executable, "-m", "moepack.tools")


@contextmanager
def served(*arguments: str | Path) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """(URL, process) of a server that is ready; killed at the end if it still runs."""
    process = subprocess.Popen(
        [*PROGRAM, "serve", *map(str, arguments), "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        match = re.search(r"http://\S+(?=/v1)", line)
        assert match is not None, line + process.stderr.read()
        while httpx.get(f"{match[0]}/health").status_code == 503:
            time.sleep(0.05)
        yield match[0], process
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
