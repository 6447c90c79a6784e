"""A pack named on the command line: a path, or `org/name` from the Hugging Face cache or hub."""

from pathlib import Path

from moepack.formats.errors import SourceError
from moepack.formats.pack import Pack, is_pack

__all__ = ["open_pack"]


def open_pack(text: str) -> Pack:
    """The opened pack; a path that exists wins. Raises SourceError, FormatError."""
    if Path(text).exists():
        return Pack.open(text)
    # Not before: importing the hub's client takes longer than opening a pack.
    from moepack.packer.publishing import old_path
    from moepack.packer.source import COPIED_PATTERNS, find_folder

    if is_pack(old := old_path(Path(text))):
        raise SourceError(
            f"{text}: not there; a convert --overwrite that was killed left the old pack as {old}"
        )
    folder, _, _ = find_folder(text, patterns=(*COPIED_PATTERNS, "*.msgpack", "*.bin"))
    return Pack.open(folder)
