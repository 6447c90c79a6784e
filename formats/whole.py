"""A file that appears whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["whole_file"]


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A hidden path beside `path`, with its ending, to write to: it becomes it if all goes well.

    Else nothing stays of it, and `path` is as it was.
    """
    unfinished = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
