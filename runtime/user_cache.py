"""What moepack keeps for a user between runs: small files in the user's cache folder.

Nothing there is needed: a file that is gone or damaged is made again.
"""

from collections.abc import Mapping
from pathlib import Path

from moepack.formats.whole import whole_file

__all__ = ["cache_folder", "write_whole"]


def cache_folder(platform: str, environment: Mapping[str, str]) -> Path | None:
    """The folder on this platform (as sys.platform has it); None when the user has no home."""
    try:
        if platform == "darwin":
            folder = Path.home() / "Library" / "Caches"
        else:
            folder = Path(environment.get("XDG_CACHE_HOME", ""))
            if not folder.is_absolute():  # as the XDG specification wants
                folder = Path.home() / ".cache"
    except RuntimeError:
        return None
    return folder / "moepack"


def write_whole(path: Path, text: str) -> None:
    """Write a file, whole or not at all, and the folders it is in. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
