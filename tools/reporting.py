"""What goes to stderr while work goes on: progress on a terminal, notes, and peak memory."""

import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from tqdm import tqdm

from moepack.formats.progress import Advance

__all__ = ["WIDENED", "note", "peak_memory", "progress"]

WIDENED = "half-precision experts are computed in float32: MLX's CPU backend cannot do otherwise"


def note(text: str) -> None:
    """A line for a person, on stderr."""
    click.echo(text, err=True)


@contextmanager
def progress(what: str, nbytes: int) -> Iterator[Advance]:
    """A bar of bytes on stderr, if that is a terminal."""
    with tqdm(
        total=nbytes,
        desc=what,
        unit="B",
        unit_scale=True,
        leave=False,
        disable=not sys.stderr.isatty(),
    ) as bar:
        yield bar.update


def peak_memory() -> int:
    """The most RAM this process has had so far, in bytes."""
    status = Path("/proc/self/status")
    if status.is_file():  # Linux: ru_maxrss would count the process that started this one, too
        found = re.search(r"^VmHWM:\s+(\d+) kB$", status.read_text(), re.MULTILINE)
        if found:
            return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
