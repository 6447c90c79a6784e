"""What goes to stderr while work goes on: progress on a terminal, notes, and peak memory."""

import re
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NoReturn

import click
from tqdm import tqdm

from moepack.formats.progress import Advance

__all__ = ["WIDENED", "note", "peak_memory", "progress", "prompt_progress", "waiting"]

WIDENED = "half-precision experts are computed in float32: MLX's CPU backend cannot do otherwise"
SHORT_PROMPT = 32  # tokens; of fewer no bar is shown
REDRAW_S = 0.5


def note(text: str) -> None:
    """A line for a person, on stderr."""
    click.echo(text, err=True)


@contextmanager
def progress(what: str, total: int, unit: str = "B") -> Iterator[Advance]:
    """A bar of bytes, or of another unit, on stderr, if that is a terminal."""
    with tqdm(
        total=total,
        desc=what,
        unit=unit,
        unit_scale=unit == "B",
        leave=False,
        disable=not sys.stderr.isatty(),
    ) as bar:
        yield bar.update


@contextmanager
def prompt_progress(n_tokens: int) -> Iterator[Callable[[float], None]]:
    """A bar of a prompt's tokens on stderr, there until all are done; told how many are."""
    with ExitStack() as shown:
        bar = shown.enter_context(
            _ticking(
                n_tokens,
                f"reading {n_tokens:,} tokens",
                "{l_bar}{bar}| {elapsed}<{remaining}",
                is_shown=n_tokens >= SHORT_PROMPT,
            )
        )

        def advance_to(n_done: float) -> None:
            if n_done < n_tokens:
                bar.update(n_done - bar.n)
            else:
                shown.close()  # the answer begins on this line

        yield advance_to


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """The time that something takes which does not say how far it is, on stderr."""
    with _ticking(None, what, "{desc} {elapsed}"):
        yield


@contextmanager
def _ticking(
    total: int | None, what: str, bar_format: str, *, is_shown: bool = True
) -> Iterator["tqdm[NoReturn]"]:
    """A bar whose clock runs while nothing else moves it, if stderr is a terminal."""
    is_over = threading.Event()
    is_shown = is_shown and sys.stderr.isatty()
    with tqdm(
        total=total, desc=what, bar_format=bar_format, leave=False, disable=not is_shown
    ) as bar:

        def redraw() -> None:
            while not is_over.wait(REDRAW_S):
                bar.refresh()

        thread = threading.Thread(target=redraw, name="moepack-clock", daemon=True)
        if is_shown:
            thread.start()
        try:
            yield bar
        finally:
            is_over.set()
            if is_shown:
                thread.join()


def peak_memory() -> int:
    """The most RAM this process has had so far, in bytes."""
    status = Path("/proc/self/status")
    if status.is_file():  # Linux: ru_maxrss would count the process that started this one, too
        found = re.search(r"^VmHWM:\s+(\d+) kB$", status.read_text(), re.MULTILINE)
        if found:
            return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
