"""Routing traces: which experts every call asked for, as an npz file.

In the form of public traces: `step_layer_expert` int32 (n, 3) in order of calls, where a step is
the number of the layer's call, and the scalars `n_layers`, `n_experts`, `top_k`,
`first_decode_step`, `source`. A run adds, by row, `uses` (pairs of a token and this expert),
`tokens` and `is_decode` of the call; by layer, `experts_per_layer` and `slots_per_layer`.
"""

import io
import zipfile
import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np

from moepack.formats.errors import SourceError
from moepack.formats.whole import whole_file
from moepack.runtime.streamed import Record

__all__ = ["Call", "Trace", "TraceRecorder", "load_trace"]

Array = np.ndarray[Any, np.dtype[Any]]

# Bounds for files of strangers.
MAX_NBYTES = 2**29
MAX_LAYERS = 10_000
MAX_EXPERTS = 65_536
MAX_NUMBER = 2**31 - 1
NAMES = (
    "step_layer_expert",
    "n_layers",
    "n_experts",
    "top_k",
    "first_decode_step",
    "source",
    "uses",
    "tokens",
    "is_decode",
    "experts_per_layer",
    "slots_per_layer",
)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a layer: distinct experts in order of look-up, and the pairs of each."""

    experts: tuple[int, ...]
    uses: tuple[int, ...]
    n_tokens: int
    is_decode: bool


@dataclass(frozen=True, slots=True)
class Trace:
    """The calls of every layer. `slots`: of the run that was traced, by layer, where known."""

    source: str
    top_k: int
    n_experts: tuple[int, ...]
    slots: tuple[int, ...] | None
    layers: tuple[tuple[Call, ...], ...]


class TraceRecorder:
    """Takes down calls: `layer(i)` is the `record` of streamed layer i."""

    def __init__(self) -> None:
        # layer, experts, tokens, is_decode, then the experts and their uses; call after call.
        self._words = array("i")

    def layer(self, index: int) -> Record:
        """What to tell the calls of this layer."""

        def record(
            experts: Sequence[int], uses: Sequence[int], n_tokens: int, is_decode: bool
        ) -> None:
            head = [index, len(experts), n_tokens, is_decode]
            self._words.extend(array("i", [*head, *experts, *uses]))

        return record

    def save(self, path: Path, n_experts: Sequence[int], slots: Sequence[int], source: str) -> int:
        """Write the file, whole or not at all; `n_experts` and `slots` by layer.

        Returns how many calls it has; without any there is no file. Raises OSError.
        """
        if not self._words:
            return 0
        columns, n_calls = self._columns(len(n_experts))
        decode_steps = columns["step_layer_expert"][columns["is_decode"], 0]
        n_steps = int(columns["step_layer_expert"][:, 0].max()) + 1
        arrays = {
            **columns,
            "n_layers": np.int64(len(n_experts)),
            "n_experts": np.int64(max(n_experts)),
            "first_decode_step": np.int64(decode_steps.min(initial=n_steps)),
            "source": np.str_(source),
            "experts_per_layer": np.array(n_experts, np.int32),
            "slots_per_layer": np.array(slots, np.int32),
        }
        with whole_file(path) as unfinished:
            np.savez_compressed(unfinished, **arrays)
        return n_calls

    def _columns(self, n_layers: int) -> tuple[dict[str, Any], int]:
        """The arrays by row, with `top_k`; and the number of calls."""
        words = np.array(self._words, np.int32)
        calls = []
        start = 0
        while start < len(words):
            calls.append(start)
            start += 4 + 2 * int(words[start + 1])
        n_rows = (len(words) - 4 * len(calls)) // 2
        rows = np.empty((n_rows, 3), np.int32)
        uses, tokens = np.empty(n_rows, np.int32), np.empty(n_rows, np.int32)
        is_decode = np.empty(n_rows, np.bool_)
        n_calls = [0] * n_layers
        top_k = 1
        at = 0
        for start in calls:
            layer, n, n_tokens, decode = words[start : start + 4].tolist()
            call = slice(at, at + n)
            first = start + 4
            rows[call, 0] = n_calls[layer]
            rows[call, 1] = layer
            rows[call, 2] = words[first : first + n]
            uses[call] = words[first + n : first + 2 * n]
            tokens[call] = n_tokens
            is_decode[call] = decode
            n_calls[layer] += 1
            top_k = max(top_k, int(uses[call].sum()) // n_tokens)
            at += n
        columns = {"step_layer_expert": rows, "uses": uses, "tokens": tokens}
        return {**columns, "is_decode": is_decode, "top_k": np.int64(top_k)}, len(calls)


def load_trace(path: Path) -> Trace:
    """Read a trace, a run's or a public one. Raises SourceError.

    Without the arrays that a run adds, each row is one use, a step before `first_decode_step` has
    the tokens that its rows and `top_k` allow at least, and any other has one.
    """
    if not path.is_file():
        raise SourceError(f"{path}: no such file")
    with path.open("rb") as file:
        try:
            return _trace(_arrays(file))
        except (
            ValueError,
            EOFError,
            OSError,
            RuntimeError,
            zipfile.BadZipFile,
            zlib.error,
        ) as error:
            reason = " ".join(str(error).split())[:200]
            raise SourceError(f"{path}: not a routing trace ({reason})") from error


def _arrays(file: IO[bytes]) -> dict[str, Array]:
    """The arrays of a trace that are in the file, none larger than its bytes."""
    with zipfile.ZipFile(file) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        wanted = {name: members[name] for name in NAMES if name in members}
        nbytes = sum(info.file_size for info in wanted.values())
        if nbytes > MAX_NBYTES:
            raise ValueError(f"{nbytes:,} bytes of arrays, at most {MAX_NBYTES:,} are read")
        return {name: _array(name, archive.read(info)) for name, info in wanted.items()}


def _array(name: str, data: bytes) -> Array:
    """An npy file's array; what its header says is compared with its bytes first."""
    file = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(file)
        if version == (1, 0):
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        else:
            shape, _, dtype = np.lib.format.read_array_header_2_0(file)
    except Exception as error:  # headers are parsed as Python: anything is raised
        raise ValueError(f"{name} is no array of npy format 1 or 2") from error
    if dtype.kind not in "biuU":
        raise ValueError(f"{name} has type {dtype}")
    n_values = 1
    for n in shape:
        n_values *= n
    if n_values * dtype.itemsize != len(data) - file.tell():
        raise ValueError(f"{name} is not as long as its shape {shape} says")
    array: Array = np.load(io.BytesIO(data), allow_pickle=False)
    return array


def _trace(arrays: Mapping[str, Array]) -> Trace:
    n_layers = _number(arrays, "n_layers", 1, MAX_LAYERS)
    most_experts = _number(arrays, "n_experts", 1, MAX_EXPERTS)
    top_k = _number(arrays, "top_k", 1, most_experts)
    source = arrays.get("source", np.str_(""))
    if source.shape != () or source.dtype.kind != "U":
        raise ValueError("source is no text")

    rows = arrays.get("step_layer_expert")
    if rows is None or rows.ndim != 2 or rows.shape[1] != 3 or not len(rows):
        raise ValueError("no step_layer_expert of n rows and 3 columns")
    n_rows = len(rows)
    experts_per_layer = np.full(n_layers, most_experts)
    if "experts_per_layer" in arrays:
        experts_per_layer = _numbers(arrays, "experts_per_layer", n_layers, 1, most_experts)
    n_experts = tuple(experts_per_layer.tolist())
    slots = None
    if "slots_per_layer" in arrays:
        slots = tuple(_numbers(arrays, "slots_per_layer", n_layers, 1, most_experts).tolist())
    columns = {
        name: rows[:, column] for column, name in enumerate(("its steps", "its layers", "experts"))
    }
    steps = _numbers(columns, "its steps", n_rows, 0, MAX_NUMBER)
    layers = _numbers(columns, "its layers", n_rows, 0, n_layers - 1)
    experts = _numbers(columns, "experts", n_rows, 0, most_experts - 1)
    if (experts >= experts_per_layer[layers]).any():
        raise ValueError("an expert that its layer does not have")
    uses = np.ones(n_rows, np.int64)
    if "uses" in arrays:
        uses = _numbers(arrays, "uses", n_rows, 1, MAX_NUMBER)
    tokens = np.zeros(n_rows, np.int64)
    if "tokens" in arrays:
        tokens = _numbers(arrays, "tokens", n_rows, 1, MAX_NUMBER)
    if "is_decode" in arrays:
        is_decode = arrays["is_decode"]
        if is_decode.shape != (n_rows,) or is_decode.dtype.kind != "b":
            raise ValueError(f"is_decode is not {n_rows} truth values")
    else:
        is_decode = steps >= _number(arrays, "first_decode_step", 0, MAX_NUMBER)

    order = np.lexsort((steps, layers))
    steps, layers, experts = steps[order], layers[order], experts[order]
    uses, tokens, is_decode = uses[order], tokens[order], is_decode[order]
    is_next = (np.diff(steps) != 0) | (np.diff(layers) != 0)
    if (((np.diff(tokens) != 0) | (is_decode[1:] != is_decode[:-1])) & ~is_next).any():
        raise ValueError("tokens or is_decode differ within a call")
    bounds = [0, *(np.flatnonzero(is_next) + 1).tolist(), n_rows]
    calls: list[list[Call]] = [[] for _ in range(n_layers)]
    for start, end in pairwise(bounds):
        counts: dict[int, int] = {}
        pairs = zip(experts[start:end].tolist(), uses[start:end].tolist(), strict=True)
        for expert, n_uses in pairs:
            counts[expert] = counts.get(expert, 0) + n_uses
        decode = bool(is_decode[start])
        n_tokens = int(tokens[start])
        if n_tokens == 0:
            n_tokens = 1 if decode else -(-sum(counts.values()) // top_k)
        call = Call(tuple(counts), tuple(counts.values()), n_tokens, decode)
        calls[int(layers[start])].append(call)
    return Trace(str(source), top_k, n_experts, slots, tuple(map(tuple, calls)))


def _number(arrays: Mapping[str, Array], name: str, least: int, most: int) -> int:
    if name not in arrays:
        raise ValueError(f"no {name}")
    return int(_numbers({name: arrays[name].reshape(-1)}, name, 1, least, most)[0])


def _numbers(arrays: Mapping[str, Array], name: str, n: int, least: int, most: int) -> Array:
    """An array of `n` whole numbers within bounds. Raises ValueError."""
    values = arrays[name]
    if values.shape != (n,) or values.dtype.kind not in "iu":
        raise ValueError(f"{name} is not {n} whole numbers")
    if values.min() < least or values.max() > most:
        raise ValueError(f"{name} is not within {least} and {most}")
    return values.astype(np.int64)
