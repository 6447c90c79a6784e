"""What an unfinished convert has written for good: a line a tensor or shard, in its own folder.

A line is appended only after the bytes it speaks of are on disk, so after a crash every whole line
is true. The first line binds the journal to a source and options.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from moepack.formats.errors import SourceError
from moepack.formats.manifest import Shard

__all__ = ["JOURNAL_NAME", "Journal", "journal_consumed", "read_lines"]

JOURNAL_NAME = "journal"


class Journal:
    """`tensors`: digest of each tensor written; `shards`: those that were released."""

    def __init__(self, path: Path, binding: Mapping[str, Any]) -> None:
        """Read the journal at `path` if it has this binding, else leave it for `start`."""
        self.tensors: dict[str, bytes] = {}
        self.shards: dict[str, Shard] = {}
        self._path = path
        self.is_resumed = self._read(binding)

    @classmethod
    def start(cls, path: Path, binding: Mapping[str, Any]) -> "Journal":
        """A new journal; there is none at `path`."""
        journal = cls(path, binding)
        journal._append([dict(binding)])
        return journal

    def add(self, tensors: Mapping[str, bytes], shards: Iterable[tuple[Shard, bool]]) -> None:
        """Note tensors, and released shards with whether they will still be there.

        Durable when this returns.
        """
        shards = list(shards)
        self.tensors.update(tensors)
        self.shards.update((shard.name, shard) for shard, _ in shards)
        self._append(
            [{"tensor": name, "digest": digest.hex()} for name, digest in tensors.items()]
            + [
                {"shard": s.name, "nbytes": s.nbytes, "sha256": s.sha256, "is_kept": is_kept}
                for s, is_kept in shards
            ]
        )

    def forget(self, tensor: str) -> None:
        """The bytes of a noted tensor are not there after all."""
        del self.tensors[tensor]

    def _append(self, lines: list[dict[str, Any]]) -> None:
        if not lines:
            return
        with self._path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(line, sort_keys=True) + "\n" for line in lines))
            file.flush()
            os.fsync(file.fileno())

    def _read(self, binding: Mapping[str, Any]) -> bool:
        """Whether there is a journal of the same source and options; reads it if so."""
        if not self._path.is_file():
            return False
        lines, nbytes = read_lines(self._path)
        if not lines or not _is_same(lines, json.loads(json.dumps(binding))):
            return False
        for line in lines[1:]:
            if "tensor" in line:
                self.tensors[line["tensor"]] = bytes.fromhex(line["digest"])
            else:
                self.shards[line["shard"]] = Shard(line["shard"], line["nbytes"], line["sha256"])
        os.truncate(self._path, nbytes)  # the next line must not run into a cut one
        return True


def _is_same(lines: list[dict[str, Any]], now: dict[str, Any]) -> bool:
    """Equal bindings; the time of change of a shard that is a stub, or was given up, is nothing."""
    noted, given_up = lines[0], _given_up(lines)
    times = {
        name: noted.get("mtimes_ns", {}).get(name) if time is None or name in given_up else time
        for name, time in now["mtimes_ns"].items()
    }
    return noted == now | {"mtimes_ns": times}


def journal_consumed(path: Path) -> bool:
    """Whether a journal at `path` says that shards were given up for what is in its folder."""
    return bool(_given_up(read_lines(path)[0] if path.is_file() else []))


def _given_up(lines: list[dict[str, Any]]) -> set[str]:
    return {line["shard"] for line in lines if "shard" in line and not line["is_kept"]}


def read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The whole lines of a journal and their bytes; a last line cut by a crash is left out.

    Raises SourceError when a whole line is damaged.
    """
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    try:
        lines = [json.loads(line) for line in whole.splitlines()]
    except ValueError as error:
        raise SourceError(f"{path}: damaged ({error}); move its folder away") from error
    return lines, len(whole)
