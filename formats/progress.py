"""Progress of long work, as a callback: told how many bytes were done since its last call."""

from collections.abc import Callable

__all__ = ["Advance", "silent"]

Advance = Callable[[int], object]


def silent(nbytes: int) -> None:
    """An Advance that reports to nobody."""
