"""Finding a stop text in an answer that comes in pieces."""

from collections.abc import Sequence

__all__ = ["StopFinder"]


class StopFinder:
    """Passes text on, but for what may be the beginning of a stop text."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """(text to pass on, whether a stop text was met); nothing from the stop on is passed."""
        text = self._held + text
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        n_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held], False

    def flush(self) -> str:
        """What was held back: no stop text came of it."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` begin `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
