"""The source: a checkpoint folder, found, and its weight files, checked before anything is built.

Knows safetensors headers and index files; knows nothing of models. No tensor data is read here.
"""

import json
import os
import stat
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HFValidationError,
    IncompleteSnapshotError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
)
from safetensors import SafetensorError, safe_open

from moepack.formats.errors import FormatError, SourceError
from moepack.formats.geometry import tensor_nbytes
from moepack.formats.pack import is_pack, link_leaves
from moepack.formats.validate import max_copied_nbytes, validate_config

__all__ = [
    "COPIED_PATTERNS",
    "INDEX_NAME",
    "MAX_HEADER_NBYTES",
    "STUBS_NAME",
    "SourceFolder",
    "TensorRange",
    "cached_folder",
    "find_folder",
    "is_repository",
    "most_header_nbytes",
    "open_folder",
    "open_source",
    "read_json",
    "same_file",
    "save_stubs",
    "snapshot",
    "write_stub",
]

# What a tokenizer or generation needs, as mlx-lm fetches it, and licences. No code, no weights.
COPIED_PATTERNS = (
    "*.json",
    "*.jsonl",
    "*.jinja",
    "*.txt",
    "*.tiktoken",
    "tokenizer.model",
    "LICENSE*",
    "NOTICE*",
)
SOURCE_PATTERNS = (*COPIED_PATTERNS, "*.safetensors")
STUBS_NAME = "stubs"  # in the staging folder of a convert that consumes or fetches its source
INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_NBYTES = 100 * 10**6  # the safetensors library's own limit
# A header costs its reader ten times its size. Those of real shards are a thousandth of the data.
FREE_HEADER_NBYTES = 2**20
LEAST_DATA_SHARE = 16  # bytes of data for a byte of a header beyond that


@dataclass(frozen=True, slots=True)
class TensorRange:
    """Where one tensor of the source lies: byte range of a shard."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SourceFolder:
    """A checkpoint folder whose weight files are all there and whole.

    `shards` are the files that count, in name order; `stray` are weight files beside them that
    the index does not list. `headers` are the first bytes of each shard, up to its data. A shard
    whose data is not there, or not yet, is a stub: a file of its header and size.
    """

    path: Path
    name: str | None
    revision: str | None
    config: Mapping[str, Any]
    shards: tuple[Path, ...]
    stray: tuple[Path, ...]
    tensors: Mapping[str, TensorRange]
    headers: Mapping[str, bytes]

    @property
    def nbytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.stat().st_size for shard in self.shards)

    def mtimes_ns(self) -> dict[str, int | None]:
        """When each shard was last changed; None for a stub."""
        return {
            shard.name: shard.stat().st_mtime_ns if shard.parent == self.path else None
            for shard in self.shards
        }


def is_repository(text: str) -> bool:
    """Whether `text` names a repository on the hub: `org/name`, and no path that exists."""
    return (
        text.count("/") == 1
        and not text.startswith((".", "/", "~"))
        and not text.endswith("/")
        and not Path(text).exists()
    )


def find_folder(
    text: str, revision: str | None = None, patterns: Sequence[str] = SOURCE_PATTERNS
) -> tuple[Path, str | None, str | None]:
    """(folder, repository, commit) of a path, or of `org/name` from the Hugging Face cache or hub.

    A path that exists wins; of a repository only files that match `patterns` are fetched. Raises
    SourceError when neither is there.
    """
    path = Path(text).expanduser()
    if not is_repository(text):
        if not path.is_dir():
            what = "not a folder" if path.exists() else "no such folder"
            raise SourceError(f"{text}: {what}")
        return path, None, None
    try:
        folder = snapshot(text, revision, patterns)
    except (OSError, ValueError, HFValidationError, OfflineModeIsEnabled) as error:
        reason = str(error).strip().splitlines()[0]
        raise SourceError(
            f"{text}: no such folder, nor in the Hugging Face cache, nor on the hub ({reason})"
        ) from error
    return Path(folder), text, Path(folder).name


def snapshot(repository: str, revision: str | None, patterns: Sequence[str]) -> str:
    """The cached folder of a repository, fetched where the cache has none."""
    wanted = list(patterns)
    try:
        return snapshot_download(
            repository, revision=revision, allow_patterns=wanted, local_files_only=True
        )
    except LocalEntryNotFoundError as incomplete:
        try:
            return snapshot_download(repository, revision=revision, allow_patterns=wanted)
        except (OSError, OfflineModeIsEnabled):
            # Other tools fetch other files; what is needed is checked file by file later.
            if isinstance(incomplete, IncompleteSnapshotError):
                return incomplete.snapshot_path
            raise


def open_source(text: str, revision: str | None = None, stubs: Path | None = None) -> SourceFolder:
    """The checked source. Raises SourceError naming the file or tensor missing or damaged.

    A shard that is not in the folder may have a stub in `stubs`.
    """
    return open_folder(*find_folder(text, revision), stubs=stubs)


def open_folder(
    path: Path, name: str | None, commit: str | None, *, stubs: Path | None
) -> SourceFolder:
    """As `open_source`, for a folder found already."""
    if is_pack(path) and not any(path.glob("model*.safetensors")):
        raise SourceError(f"{path}: is a pack already; moepack unpack makes the checkpoint of it")
    if not os.path.lexists(path / "config.json"):
        raise SourceError(f"{path}: no config.json; not a checkpoint folder")
    _check_copied(path)
    config = read_json(path / "config.json")
    try:
        validate_config(str(path / "config.json"), config)
    except FormatError as error:
        raise SourceError(str(error)) from error
    if not isinstance(config.get("model_type"), str):
        raise SourceError(f"{path / 'config.json'}: no model_type")
    found = sorted(p for p in path.glob("*.safetensors") if not p.name.startswith("."))
    index_path = path / INDEX_NAME
    listed: dict[str, str] = {}
    if index_path.exists():
        listed = _read_index(index_path)
        names = sorted(set(listed.values()))
    else:
        stubbed = stubs.glob("*.safetensors") if stubs is not None else ()
        names = sorted({p.name for p in (*found, *stubbed) if p.name.startswith("model")})
    shards = [_shard_path(path, file, stubs) for file in names]
    if not shards:
        raise SourceError(f"{path}: no model*.safetensors; not a checkpoint that mlx-lm can load")
    tensors: dict[str, TensorRange] = {}
    headers = {}
    for shard in shards:
        headers[shard.name], found_tensors = _read_header(shard, listed=bool(listed))
        for tensor_name, tensor in found_tensors.items():
            if tensor_name in tensors:
                other = tensors[tensor_name].path.name
                raise SourceError(f"{shard}: tensor {tensor_name!r} is also in {other}")
            tensors[tensor_name] = tensor
    for tensor_name, file in listed.items():
        if tensor_name not in tensors or tensors[tensor_name].path.name != file:
            raise SourceError(
                f"{path / file}: tensor {tensor_name!r} is missing, though {INDEX_NAME} lists it"
            )
    _check_quantized_groups(tensors)
    stray = tuple(p for p in found if p not in shards)
    return SourceFolder(path, name, commit, config, tuple(shards), stray, tensors, headers)


def cached_folder(repository: str, revision: str | None) -> Path | None:
    """The cached snapshot of a repository, whole or not; None when there is none."""
    try:
        folder = snapshot_download(
            repository,
            revision=revision,
            allow_patterns=list(SOURCE_PATTERNS),
            local_files_only=True,
        )
    except IncompleteSnapshotError as error:
        return Path(error.snapshot_path)
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return Path(folder)


def _check_copied(folder: Path) -> None:
    """Raises SourceError for a file that would be copied, were it not one of the folder's own.

    That is, a regular file that no link out of the checkpoint leads to, and not absurdly large.
    """
    for path in sorted({p for pattern in COPIED_PATTERNS for p in folder.glob(pattern)}):
        if link_leaves(folder, path.name):
            raise SourceError(
                f"{path}: a link that leaves the checkpoint; what it leads to would be copied into "
                "the pack; copy the file in its place"
            )
        try:
            status = path.stat()
        except FileNotFoundError:  # a link to nowhere: named by whoever needs the file
            continue
        except OSError as error:
            raise SourceError(f"{path}: {error.strerror}") from error
        if stat.S_ISDIR(status.st_mode) and path.suffix != ".json":
            continue  # such as LICENSES: never read
        if not stat.S_ISREG(status.st_mode):
            raise SourceError(f"{path}: not a regular file")
        nbytes = status.st_size
        if nbytes > (most := max_copied_nbytes(path.name)):
            raise SourceError(
                f"{path}: {nbytes:,} bytes, a file beside the weights has at most {most:,}; if the "
                "model does not need it, move it away"
            )


def _shard_path(folder: Path, name: str, stubs: Path | None) -> Path:
    path = folder / name
    if stubs is not None and not path.exists() and (stubs / name).is_file():
        return stubs / name
    return path


def save_stubs(source: SourceFolder, stubs: Path) -> None:
    """Write a stub of each shard that is in the source's folder, for when it no longer is."""
    stubs.mkdir(exist_ok=True)
    for shard in source.shards:
        if shard.parent == source.path and not (stubs / shard.name).exists():
            write_stub(stubs / shard.name, source.headers[shard.name], shard.stat().st_size)


def write_stub(path: Path, header: bytes, nbytes: int) -> None:
    """A file of `nbytes` that begins with a safetensors header and is a hole after it.

    It can be loaded lazily in place of a shard whose data is not there, or not there yet.
    """
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        file.write(header)
        file.truncate(nbytes)
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, of a file whose size was checked. Raises SourceError naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise SourceError(f"{path}: a JSON object was expected")
    return value


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceError(f"{path}: no weight_map")
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or file.startswith("."):
            raise SourceError(f"{path}: {tensor!r} points to {file!r}, not a file of this folder")
    return weight_map


def _read_header(path: Path, *, listed: bool) -> tuple[bytes, dict[str, TensorRange]]:
    """(the file's bytes before its data, where its tensors lie)."""
    if not path.is_file():
        hint = "it is no regular file"
        if listed:
            hint = f"{INDEX_NAME} lists it (convert --consume moves shards into the pack)"
        raise SourceError(f"{path}: no such shard; {hint}")
    _check_header_size(path)
    try:
        with safe_open(path, framework="numpy"):
            pass  # validates: no overlap, no hole, no trailing byte
        with path.open("rb") as file:
            prefix = file.read(8)
            (nbytes,) = struct.unpack("<Q", prefix)
            text = file.read(nbytes)
            header = json.loads(text, object_pairs_hook=_without_duplicates)
    except (OSError, SafetensorError, ValueError) as error:
        raise SourceError(f"{path}: damaged or cut safetensors file ({error})") from error
    start = 8 + nbytes
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        # MLX reads exponents as plain bytes; no tensor of a pack has their type.
        dtype = "U8" if entry["dtype"] == "F8_E8M0" else entry["dtype"]
        tensor_nbytes(f"{path}: tensor {name!r}", dtype, shape)
        tensors[name] = TensorRange(path, dtype, shape, start + begin, end - begin)
    return prefix + text, tensors


def most_header_nbytes(n_data: int) -> int:
    """The most bytes that the header of a shard with `n_data` bytes of data may have."""
    return FREE_HEADER_NBYTES + max(0, n_data) // LEAST_DATA_SHARE


def _check_header_size(path: Path) -> None:
    """Raises SourceError for a header out of all proportion, before it is read."""
    try:
        with path.open("rb") as file:
            prefix = file.read(8)
            n_data = os.fstat(file.fileno()).st_size - 8
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from error
    if len(prefix) < 8:
        return  # what that is, the library says
    (nbytes,) = struct.unpack("<Q", prefix)
    n_data -= nbytes
    if nbytes > most_header_nbytes(n_data):
        raise SourceError(
            f"{path}: damaged or hostile safetensors file (a header of {nbytes:,} bytes before "
            f"{max(0, n_data):,} bytes of data)"
        )


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; safetensors 0.8 takes one with a key twice."""
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("a key occurs twice in the header")
    return entries


def _check_quantized_groups(tensors: Mapping[str, TensorRange]) -> None:
    """MLX's quantized matrices come in twos or threes; name the one that is gone.

    mlx-lm would report the ones that are left over instead.
    """
    for name in tensors:
        stem, _, last = name.rpartition(".")
        if last == "biases" and f"{stem}.scales" not in tensors:
            raise SourceError(f"tensor '{stem}.scales' is missing, though {name!r} is there")
        if last in ("biases", "scales") and not any(
            f"{stem}.{weight}" in tensors for weight in ("weight", "qweight", "weight_packed")
        ):
            raise SourceError(f"tensor '{stem}.weight' is missing, though {name!r} is there")


def same_file(a: Path, b: Path) -> bool:
    """Whether both paths exist and are the same file or folder."""
    return a.exists() and b.exists() and a.samefile(b)
