"""The source: a checkpoint folder, found, and its weight files, checked before anything is built.

Knows safetensors headers and index files; knows nothing of models. No tensor data is read here.
"""

import json
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

from moepack.formats.errors import SourceError
from moepack.formats.geometry import tensor_nbytes

__all__ = [
    "COPIED_PATTERNS",
    "SourceFolder",
    "TensorRange",
    "find_folder",
    "open_source",
    "read_json",
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
INDEX_NAME = "model.safetensors.index.json"
MAX_JSON_NBYTES = 64 * 2**20  # a config or index; the largest known index has 12 MB


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
    the index does not list.
    """

    path: Path
    name: str | None
    revision: str | None
    config: Mapping[str, Any]
    shards: tuple[Path, ...]
    stray: tuple[Path, ...]
    tensors: Mapping[str, TensorRange]

    @property
    def nbytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.stat().st_size for shard in self.shards)


def find_folder(
    text: str, revision: str | None = None, patterns: Sequence[str] = SOURCE_PATTERNS
) -> tuple[Path, str | None, str | None]:
    """(folder, repository, commit) of a path, or of `org/name` from the Hugging Face cache or hub.

    A path that exists wins; of a repository only files that match `patterns` are fetched. Raises
    SourceError when neither is there.
    """
    path = Path(text).expanduser()
    if path.exists() or text.count("/") != 1 or text.startswith((".", "/", "~")):
        if not path.is_dir():
            what = "not a folder" if path.exists() else "no such folder"
            raise SourceError(f"{text}: {what}")
        return path, None, None
    try:
        folder = _snapshot(text, revision, patterns)
    except (OSError, ValueError, HFValidationError, OfflineModeIsEnabled) as error:
        reason = str(error).strip().splitlines()[0]
        raise SourceError(
            f"{text}: no such folder, nor in the Hugging Face cache, nor on the hub ({reason})"
        ) from error
    return Path(folder), text, Path(folder).name


def _snapshot(repository: str, revision: str | None, patterns: Sequence[str]) -> str:
    """The cached folder of a repository, fetched where the cache has none."""
    options = {"revision": revision, "allow_patterns": list(patterns)}
    try:
        return snapshot_download(repository, local_files_only=True, **options)
    except LocalEntryNotFoundError as incomplete:
        try:
            return snapshot_download(repository, **options)
        except (OSError, OfflineModeIsEnabled):
            # Other tools fetch other files; what is needed is checked file by file later.
            if isinstance(incomplete, IncompleteSnapshotError):
                return incomplete.snapshot_path
            raise


def open_source(text: str, revision: str | None = None) -> SourceFolder:
    """The checked source. Raises SourceError naming the file or tensor missing or damaged."""
    path, name, commit = find_folder(text, revision)
    if not (path / "config.json").is_file():
        raise SourceError(f"{path}: no config.json; not a checkpoint folder")
    config = read_json(path / "config.json")
    if not isinstance(config.get("model_type"), str):
        raise SourceError(f"{path / 'config.json'}: no model_type")
    found = sorted(p for p in path.glob("*.safetensors") if not p.name.startswith("."))
    index_path = path / INDEX_NAME
    listed: dict[str, str] = {}
    if index_path.exists():
        listed = _read_index(index_path)
        shards = [path / file for file in sorted(set(listed.values()))]
    else:
        shards = [p for p in found if p.name.startswith("model")]  # as mlx-lm
    if not shards:
        raise SourceError(f"{path}: no model*.safetensors; not a checkpoint that mlx-lm can load")
    tensors: dict[str, TensorRange] = {}
    for shard in shards:
        for tensor_name, tensor in _read_header(shard, listed=bool(listed)).items():
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
    return SourceFolder(path, name, commit, config, tuple(shards), stray, tensors)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises SourceError naming the file."""
    try:
        if path.stat().st_size > MAX_JSON_NBYTES:
            raise SourceError(f"{path}: {path.stat().st_size:,} bytes is too large")
        value = json.loads(path.read_text(encoding="utf-8"))
    except SourceError:
        raise
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


def _read_header(path: Path, *, listed: bool) -> dict[str, TensorRange]:
    if not path.is_file():
        hint = f"{INDEX_NAME} lists it" if listed else "it is no regular file"
        raise SourceError(f"{path}: no such shard; {hint}")
    try:
        with safe_open(path, framework="numpy"):
            pass  # validates: no overlap, no hole, no trailing byte
        with path.open("rb") as file:
            (nbytes,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(nbytes), object_pairs_hook=_without_duplicates)
    except (OSError, SafetensorError, ValueError) as error:
        raise SourceError(f"{path}: damaged or cut safetensors file ({error})") from error
    start = 8 + nbytes
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        tensor_nbytes(f"{path}: tensor {name!r}", entry["dtype"], shape)
        tensors[name] = TensorRange(path, entry["dtype"], shape, start + begin, end - begin)
    return tensors


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
