"""Which source and which store of shards a convert works with: a folder, the cache, or the hub."""

from pathlib import Path

from huggingface_hub.constants import is_offline_mode

from moepack.formats.errors import SourceError
from moepack.packer.hub import open_hub_source
from moepack.packer.journal import JOURNAL_NAME, journal_consumed, read_lines
from moepack.packer.publishing import staging_path
from moepack.packer.shards import ShardStore
from moepack.packer.source import (
    STUBS_NAME,
    SourceFolder,
    cached_folder,
    is_repository,
    open_folder,
    open_source,
)

__all__ = ["open_for_convert"]


def open_for_convert(
    text: str, revision: str | None, destination: Path
) -> tuple[SourceFolder, ShardStore | None]:
    """The source for a pack at `destination`, and where its shards come from when not its folder.

    Shards that an unfinished convert consumed are stubs in its staging folder. A repository that
    the cache holds whole is read from there; any other is fetched shard by shard. Raises
    SourceError.
    """
    stubs = staging_path(destination) / STUBS_NAME
    journal = staging_path(destination) / JOURNAL_NAME
    is_consumed = journal_consumed(journal)
    if not is_repository(text):
        return open_source(text, revision, stubs if is_consumed else None), None
    if (folder := cached_folder(text, revision)) is not None:
        try:
            return open_folder(folder, text, folder.name, stubs=None), None
        except SourceError:
            if is_offline_mode():
                raise
    if is_consumed and read_lines(journal)[0][0]["repository"] != text:
        raise SourceError(
            f"{journal.parent}: holds shards of another source, consumed into it; finish that "
            "convert, or move the folder away"
        )
    return open_hub_source(text, revision, stubs)
