"""The model that a pack is compared with: its source by mlx-lm, fully loaded where that fits.

Where it does not, its experts stay in the source's shards, and never come from the pack: each call
fetches those it needs, some at a time, and runs mlx-lm's own module on a small bank of them. The
same kernels on the same bytes give the same bits. What mlx-lm computes from the shards it computes
once, a tensor at a time, into a scratch file.
"""

import gc
import shutil
import tempfile
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from moepack.formats.errors import BudgetError, SourceError
from moepack.formats.geometry import DTYPE_NBYTES, tensor_nbytes
from moepack.formats.sizes import format_size
from moepack.packer.checkpoint import (
    DTYPES,
    Checkpoint,
    ConvertOptions,
    ExpertTensors,
    find_expert_modules,
    load_source_lazily,
    load_source_model,
    understand_model,
)
from moepack.packer.source import SourceFolder, TensorRange
from moepack.packer.tensors import (
    MLX_DTYPE_NAMES,
    CopiedTensor,
    DerivedTensor,
    TensorBytes,
    array_bytes,
)
from moepack.packer.writing import write_range
from moepack.runtime.banks import MLX_DTYPES, byte_rows
from moepack.runtime.half import compute_in_float32
from moepack.runtime.memory import SLACK, START_VARIATION, ceil_size
from moepack.runtime.standing import StandIn

__all__ = ["ScratchFile", "load_bounded", "load_reference"]

# Of what is left for experts: the rest is for what allocators take while tensors come and go.
BANK_SHARE = 0.5
# An fp8 weight on its way, a number: times its scales in float32, before and after in bfloat16.
DEQUANTIZED_NBYTES = 8
# Of the disk's free bytes, what a scratch file may take: the disk is others' too.
SCRATCH_SHARE = 0.9
Numbers = np.ndarray[Any, np.dtype[Any]]


def load_reference(
    source: SourceFolder,
    options: ConvertOptions,
    top_k: Sequence[int],
    *,
    bound: int,
    taken: Sequence[int],
    name: str,
    scratch: Path | None = None,
) -> tuple[nn.Module, int, str]:
    """(the model, a place in `taken`, a line that says how it was loaded and why).

    `top_k` is by module. The process may use `bound` bytes, which `name` stated; what others take
    of them, and the model's caches and workspace, is one of `taken`, most first: the first that
    leaves enough. A scratch file, if one is needed, is made in the folder `scratch`. Raises
    BudgetError, naming the smallest value that works, when `top_k` experts of a layer do not fit
    beside the last.
    """
    model, checkpoint = understand_model(source, options)
    whole = whole_nbytes(model)
    deriving = deriving_nbytes(source, options, checkpoint)
    rooms = [int(bound / SLACK) - nbytes for nbytes in taken]
    what = f"the source's tensors take {format_size(whole)}"
    for place, room in enumerate(rooms):
        if whole + deriving <= room:
            del model, checkpoint
            model, _ = load_source_model(source, options)
            compute_in_float32(model)
            why = f"{what}, {name} leaves {format_size(room)} beside the pack's"
            return model, place, f"the source is loaded fully: {why}"
    expert = max(
        sum(nbytes_of(t) for t in module.tensors.values()) // module.n_experts
        for module in checkpoint.modules
    )
    fixed = sum(nbytes_of(t) for t in checkpoint.shared.values()) + deriving
    most, n_experts = max(top_k), max(module.n_experts for module in checkpoint.modules)
    least = fixed + most * expert
    for place, room in enumerate(rooms):
        if least <= room:
            n_at_once = min(n_banked(room - fixed, expert, most), n_experts)
            file = ScratchFile(scratch)
            replace_experts(model, checkpoint, source, options, n_at_once, file)
            why = f"{what}, {name} leaves {format_size(room)} beside the pack's"
            how = f"the source's experts are read from its shards, at most {n_at_once} at a time"
            if computed := derived_nbytes(checkpoint):
                how += f", computed once into a file in {file.folder} ({format_size(computed)})"
                if computed > file.room:
                    how += f", as far as its disk has room for them ({format_size(file.room)})"
            return model, place, f"{how}: {why}"
    smallest = int((taken[-1] + least) * SLACK) + START_VARIATION
    raise BudgetError(
        f"{name} is {format_size(bound)}, too little to compare with the source, even by "
        f"{most} experts at a time; the smallest that works is --memory {ceil_size(smallest)}"
    )


def n_banked(room: int, expert: int, top_k: int) -> int:
    """How many experts of `expert` bytes to have at a time with `room` bytes, `top_k` or more."""
    return max(top_k, int(room * BANK_SHARE) // expert)


def load_bounded(
    source: SourceFolder,
    options: ConvertOptions,
    n_at_once: int,
    scratch: "ScratchFile | None" = None,
) -> nn.Module:
    """The model with no more than `n_at_once` experts of one layer in memory, top-k or more."""
    model, checkpoint = understand_model(source, options)
    replace_experts(model, checkpoint, source, options, n_at_once, scratch or ScratchFile())
    return model


def replace_experts(
    model: nn.Module,
    checkpoint: Checkpoint,
    source: SourceFolder,
    options: ConvertOptions,
    n_at_once: int,
    scratch: "ScratchFile",
) -> None:
    """Of a lazy model, put what is shared into memory, and `ShardExperts` for its experts."""
    compute_in_float32(model)
    derived = DerivedArrays(source, options, checkpoint)
    stock = dict(find_expert_modules(model))
    in_their_place = [
        (e.path, ShardExperts(stock[e.path], e, derived, n_at_once, scratch))
        for e in checkpoint.modules
    ]
    model.update_modules(tree_unflatten(in_their_place))
    empty = [f"{e.path}.stock.{name}" for e in checkpoint.modules for name in e.tensors]
    for name, array in parameters_of(model).items():
        if name not in empty:
            mx.eval(array)  # one at a time: what a derived one is made of is then dropped


def whole_nbytes(model: nn.Module) -> int:
    """Bytes of all parameters of a model, evaluated or not."""
    return sum(array.nbytes for array in parameters_of(model).values())


def parameters_of(model: nn.Module) -> dict[str, mx.array]:
    """All parameters of a model by path."""
    parameters: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    return parameters


def nbytes_of(tensor: TensorBytes) -> int:
    """Bytes of a tensor."""
    return tensor_nbytes("a tensor", tensor.dtype, tensor.shape)


def derived_nbytes(checkpoint: Checkpoint) -> int:
    """Bytes of the experts' tensors that mlx-lm computes."""
    tensors = (t for module in checkpoint.modules for t in module.tensors.values())
    return sum(nbytes_of(t) for t in tensors if isinstance(t, DerivedTensor))


def deriving_nbytes(source: SourceFolder, options: ConvertOptions, checkpoint: Checkpoint) -> int:
    """The most that evaluating one derived tensor takes: what it is made of, that stacked, and it.

    What is stacked may have been cast or dequantized first. A quantized weight comes with its
    scales and biases: what is made of the same is counted as one.
    """
    cast = DTYPES[options.dtype].size if options.dtype is not None else 0
    tensors = [*checkpoint.shared.values()]
    for module in checkpoint.modules:
        tensors += module.tensors.values()
    made: dict[frozenset[str], int] = {}
    for tensor in tensors:
        if isinstance(tensor, DerivedTensor):
            made[tensor.sources] = made.get(tensor.sources, 0) + nbytes_of(tensor)
    most = 0
    for names, nbytes in made.items():
        for given in (source.tensors[name] for name in names):
            width = DTYPE_NBYTES[given.dtype]
            passed = DEQUANTIZED_NBYTES if given.dtype.startswith("F8") else max(width, cast)
            nbytes += given.nbytes + given.nbytes // width * passed
        most = max(most, nbytes)
    return most


class ScratchFile:
    """Tensors computed once, on disk: in a file without a name, which ends with the process.

    It has at most `room` bytes, a share of what is free on the disk of `folder`.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or Path(tempfile.gettempdir())
        self.room = int(shutil.disk_usage(self.folder).free * SCRATCH_SHARE)
        self._file: FileIO | None = None
        self._nbytes = 0

    def __del__(self) -> None:
        if self._file is not None:
            self._file.close()

    def keep(self, array: mx.array) -> CopiedTensor | None:
        """The array, evaluated and written, to be read from the file; None where there is no room.

        Raises SourceError when writing fails.
        """
        if self._nbytes + array.nbytes > self.room:
            return None
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self.folder, buffering=0)  # noqa: SIM115
            write_range(self._file.fileno(), array_bytes(array), self._nbytes)
        except OSError as error:
            raise SourceError(f"{self.folder}: a scratch file: {error.strerror}") from error
        path, dtype = Path(f"/dev/fd/{self._file.fileno()}"), MLX_DTYPE_NAMES[array.dtype]
        place = TensorRange(path, dtype, tuple(array.shape), self._nbytes, array.nbytes)
        self._nbytes += array.nbytes
        return CopiedTensor(dtype, "", place)


class DerivedArrays:
    """The experts' tensors that mlx-lm computes, unevaluated: each can be had again.

    An array that was evaluated keeps its bytes as long as anything refers to it. So each is given
    away once, and when one is wanted again, mlx-lm's loader builds all of them anew, lazily.
    """

    def __init__(
        self, source: SourceFolder, options: ConvertOptions, checkpoint: Checkpoint
    ) -> None:
        self._source = source
        self._options = options
        self._names = {
            f"{module.path}.{name}"
            for module in checkpoint.modules
            for name, tensor in module.tensors.items()
            if isinstance(tensor, DerivedTensor)
        }
        self._arrays: dict[str, mx.array] = {}

    def take(self, name: str) -> mx.array:
        """The unevaluated tensor of that path `(n_experts, ...)`; the caller drops it soon."""
        if name not in self._arrays:
            self._arrays.clear()
            model = load_source_lazily(self._source, self._options)
            self._arrays = {n: a for n, a in parameters_of(model).items() if n in self._names}
            del model
            gc.collect()  # some models refer to themselves
        return self._arrays.pop(name)


class ShardExperts(StandIn):
    """Stands where `stock`, an expert module, stood; its experts are in the source's shards."""

    def __init__(
        self,
        stock: nn.Module,
        experts: ExpertTensors,
        derived: DerivedArrays,
        n_at_once: int,
        scratch: ScratchFile,
    ) -> None:
        super().__init__(stock)
        # Underscored, so that nn.Module does not take them for parameters.
        self._path = experts.path
        self._n_at_once = n_at_once
        self._derived = derived
        self._scratch = scratch
        # Derived ones, whose arrays would keep what they are made of, follow when they are on disk.
        self._copied = {n: t for n, t in experts.tensors.items() if isinstance(t, CopiedTensor)}
        self._rows = {n: (t.dtype, t.shape[1:]) for n, t in experts.tensors.items()}
        self._let_go()

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        """As the stock module: x `(..., dim)`, indices `(..., k)` -> `(..., k, out)`, evaluated.

        Raises SourceError when a shard cannot be read.
        """
        picked = np.array(indices)
        needed = np.unique(picked)
        if len(needed) <= self._n_at_once:
            return self._run(x, needed, picked)
        tokens, flat = x.reshape(-1, x.shape[-1]), picked.reshape(-1)
        outputs, places = [], []
        for start in range(0, len(needed), self._n_at_once):
            some = needed[start : start + self._n_at_once]
            pairs = np.flatnonzero(np.isin(flat, some))
            rows = tokens[mx.array(pairs // picked.shape[-1])]
            y = self._run(rows, some, flat[pairs][:, None])
            outputs.append(y.reshape(len(pairs), -1))
            places.append(pairs)
        order = np.argsort(np.concatenate(places))
        y = mx.concatenate(outputs)[mx.array(order)].reshape(*picked.shape, -1)
        mx.eval(y)
        return y

    def _run(self, x: mx.array, experts: Numbers, picked: Numbers) -> mx.array:
        """The stock module on a bank of `experts`, in ascending order, which has all `picked`."""
        bank = [(name, self._fetch(name, experts)) for name in self._rows]
        self.stock.load_weights(bank, strict=False)
        del bank
        y: mx.array = self.stock(x, mx.array(np.searchsorted(experts, picked).astype(np.uint32)))
        mx.eval(y)
        self._let_go()
        return y

    def _fetch(self, name: str, experts: Numbers) -> mx.array:
        """The rows of one tensor that belong to `experts`, evaluated."""
        if (copied := self._copied.get(name)) is None:
            array = self._derived.take(f"{self._path}.{name}")
            if (copied := self._scratch.keep(array)) is None:
                rows = array[mx.array(experts)]
                mx.eval(rows)
                del array
                mx.clear_cache()
                return rows
            del array
            mx.clear_cache()
            self._copied[name] = copied
        dtype, shape = self._rows[name]
        rows = mx.zeros((len(experts), *shape), dtype=MLX_DTYPES[dtype])
        mx.eval(rows)
        copied.read_rows(experts.tolist(), (row.data for row in byte_rows(rows)))
        return rows

    def _let_go(self) -> None:
        """Nothing in the bank's place, of the same types, never evaluated."""
        nothing = [
            (name, mx.zeros((1, *shape), dtype=MLX_DTYPES[dtype]))
            for name, (dtype, shape) in self._rows.items()
        ]
        self.stock.load_weights(nothing, strict=False)
        mx.clear_cache()
