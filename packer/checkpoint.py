"""Understanding a checkpoint: which tensor of the model is which bytes of the source.

mlx-lm's loader builds the model with lazy weights; a parameter that is the very array the loader
read is copied as bytes, any other is derived. Expert modules are found by class, never by name.
"""

import contextlib
import io
import json
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models.switch_layers import (
    QuantizedSwitchLinear,
    SwitchGLU,
    SwitchLinear,
    SwitchMLP,
)

from moepack.formats.errors import SourceError
from moepack.formats.manifest import Quantization
from moepack.packer.configs import lift_config
from moepack.packer.source import SourceFolder
from moepack.packer.stacking import stack_experts
from moepack.packer.tensors import MLX_DTYPE_NAMES, CopiedTensor, DerivedTensor, TensorBytes

__all__ = [
    "Checkpoint",
    "ConvertOptions",
    "ExpertTensors",
    "find_expert_modules",
    "load_source_lazily",
    "load_source_model",
    "understand",
    "understand_model",
]

TOWER_CONFIGS = ("vision_config", "audio_config")
DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """The options of convert that change a pack's bytes; defaults change nothing."""

    quantize: bool = False
    q_bits: int | None = None
    q_group_size: int | None = None
    q_mode: str = "affine"
    dtype: str | None = None

    def as_map(self) -> dict[str, str | int | bool]:
        """What differs from the default, by name: what the manifest keeps."""
        default = ConvertOptions()
        return {
            key: value
            for key in self.__dataclass_fields__
            if (value := getattr(self, key)) != getattr(default, key)
        }


@dataclass(frozen=True, slots=True)
class ExpertTensors:
    """One expert module: its stacked tensors by part name, first dimension the expert."""

    path: str
    class_name: str
    n_experts: int
    tensors: Mapping[str, TensorBytes]
    quantization: Mapping[str, Quantization]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A source as the pack will hold it. `config` is None when the source's own still describes it.

    `dropped` maps tensors of the source that the model does not use to their bytes, `renamed` those
    copied under another name to that. `restorable` are shards of which every tensor is copied.
    """

    modules: tuple[ExpertTensors, ...]
    shared: Mapping[str, TensorBytes]
    quantization: Mapping[str, Quantization]
    config: Mapping[str, Any] | None
    dropped: Mapping[str, int]
    renamed: Mapping[str, str]
    restorable: frozenset[str]


def understand(source: SourceFolder, options: ConvertOptions) -> Checkpoint:
    """The checkpoint's tensors, sorted into experts and shared. Nothing is evaluated.

    Raises SourceError: not loadable by mlx-lm, a tensor missing or left over, no expert module.
    """
    return understand_model(source, options)[1]


def understand_model(source: SourceFolder, options: ConvertOptions) -> tuple[nn.Module, Checkpoint]:
    """As `understand`, with the model whose lazy parameters the checkpoint's tensors are."""
    model, config, loaded = _load_lazily(source, options)
    modules = find_expert_modules(model)
    if not modules:
        raise SourceError(
            f"{source.path}: model type {source.config['model_type']!r} has no expert module "
            "(a dense model, or experts that mlx-lm does not build from SwitchGLU or SwitchMLP); "
            "there is nothing to stream"
        )
    parameters: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    names = {id(array): name for name, array in loaded.items()}

    derived = {path: a for path, a in parameters.items() if id(a) not in names}
    inputs = _inputs_of(derived, loaded)

    def locate(path: str) -> TensorBytes:
        array = parameters.pop(path)
        if (name := names.get(id(array))) is not None:
            return CopiedTensor(MLX_DTYPE_NAMES[array.dtype], name, source.tensors[name])
        return DerivedTensor(array, inputs[path])

    copied = {names[id(a)]: path for path, a in parameters.items() if id(a) in names}
    used = copied.keys() | frozenset().union(*inputs.values())
    dropped = {n: t.nbytes for n, t in source.tensors.items() if n not in used}

    experts = []
    for path, module in modules:
        n_experts, tensors = _expert_tensors(path, module)
        experts.append(
            ExpertTensors(
                path,
                "SwitchGLU" if isinstance(module, SwitchGLU) else "SwitchMLP",
                n_experts,
                {name: locate(f"{path}.{name}") for name in tensors},
                _quantization_below(module),
            )
        )
    expert_paths = tuple(f"{path}." for path, _ in modules)
    quantization = {
        path: q
        for path, q in _quantization_below(model).items()
        if not path.startswith(expert_paths)
    }
    checkpoint = Checkpoint(
        modules=tuple(experts),
        shared={n: locate(n) for n in sorted(parameters, key=natural_key)},
        quantization=quantization,
        config=_changed_config(source, config, options, bool(dropped)),
        dropped=dropped,
        renamed={name: path for name, path in copied.items() if name != path},
        restorable=frozenset(shard.name for shard in source.shards)
        - {t.path.name for name, t in source.tensors.items() if name not in copied},
    )
    return model, checkpoint


def _changed_config(
    source: SourceFolder, loaded: dict[str, Any], options: ConvertOptions, is_text_of_more: bool
) -> dict[str, Any] | None:
    """The config that the pack must have in place of the source's own; None to keep that.

    Where tensors were left out, it says no more that there is a vision or audio tower.
    """
    config = dict(loaded) if options.as_map() else lift_config(source.config)
    if is_text_of_more:
        for key in TOWER_CONFIGS:
            config.pop(key, None)
    return config if config != source.config else None


def load_source_model(
    source: SourceFolder, options: ConvertOptions
) -> tuple[nn.Module, dict[str, Any]]:
    """The model that a pack made with these options must equal, by mlx-lm, fully loaded."""
    # Without the arrays as read, which would hold all that derived parameters are made of.
    model, config = _load_lazily(source, options)[:2]
    parameters: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    for array in parameters.values():
        mx.eval(array)
    return model, config


def load_source_lazily(source: SourceFolder, options: ConvertOptions) -> nn.Module:
    """The same model, nothing of it evaluated."""
    return _load_lazily(source, options)[0]


def find_expert_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(path, module) of every SwitchGLU and SwitchMLP, in model order."""
    found = [(p, m) for p, m in model.named_modules() if isinstance(m, SwitchGLU | SwitchMLP)]
    return sorted(found, key=lambda entry: natural_key(entry[0]))


def natural_key(path: str) -> list[tuple[int, str]]:
    """Sorts `layers.2` before `layers.10`."""
    return [(int(p), "") if p.isdigit() else (-1, p) for p in re.split(r"(\d+)", path)]


def _expert_tensors(path: str, module: nn.Module) -> tuple[int, list[str]]:
    """(n_experts, part names): the switch layers' parameters with one row an expert."""
    linears = {
        name: m
        for name, m in module.named_modules()
        if isinstance(m, SwitchLinear | QuantizedSwitchLinear)
    }
    counts = {m.num_experts for m in linears.values()}
    if len(counts) != 1:
        raise SourceError(f"{path}: projections with different numbers of experts {sorted(counts)}")
    (n_experts,) = counts
    names = []
    for name, m in linears.items():
        parameters: dict[str, mx.array] = dict(tree_flatten(m.parameters()))
        names += [
            f"{name}.{parameter}"
            for parameter, array in parameters.items()
            if array.ndim >= 1 and array.shape[0] == n_experts
        ]
    return n_experts, names


def _quantization_below(module: nn.Module) -> dict[str, Quantization]:
    return {
        path: Quantization(m.bits, m.group_size, m.mode)
        for path, m in module.named_modules()
        if "scales" in m and hasattr(m, "bits") and hasattr(m, "mode")
    }


def _load_lazily(
    source: SourceFolder, options: ConvertOptions
) -> tuple[nn.Module, dict[str, Any], dict[str, mx.array]]:
    """(model, config, arrays as read), on CPU streams: derived bytes are the same anywhere."""
    loaded: dict[str, mx.array] = {}

    def noting_classes(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
        model_class, args_class = mlx_lm.utils._get_classes(config)

        class NotingModel(model_class):  # type: ignore[misc, valid-type]
            def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
                loaded.update(weights)
                if hasattr(model_class, "sanitize"):
                    weights = super().sanitize(weights)
                return stack_experts(weights, dict(find_expert_modules(self)))

        return NotingModel, args_class

    with tempfile.TemporaryDirectory() as folder, mx.stream(mx.cpu):
        _link_source(source, lift_config(source.config), Path(folder))
        try:
            model, config = mlx_lm.utils.load_model(
                Path(folder), lazy=True, strict=True, get_model_classes=noting_classes
            )
        except SourceError as error:
            raise SourceError(f"{source.path}: {error}") from error
        except Exception as error:  # a loader for 100 families raises anything
            raise SourceError(f"{source.path}: {_load_failure(error)}") from error
        model.__class__ = type(model).__mro__[1]
        if options.dtype is not None:
            _cast(model, DTYPES[options.dtype])
        if options.quantize:
            config = _quantize(source, model, config, options)
        arrays = dict(loaded)
        loaded.clear()  # the class above lives until the garbage collector finds its cycles
    return model, config, arrays


def _link_source(source: SourceFolder, config: Mapping[str, Any], folder: Path) -> None:
    """A view of the source with the listed shards alone: mlx-lm takes every model*.safetensors."""
    (folder / "config.json").write_text(config_text(config))
    for index, shard in enumerate(source.shards):
        (folder / f"model-{index:05d}.safetensors").symlink_to(shard.resolve())
    for name in ("generation_config.json", "hf_quant_config.json"):
        if (source.path / name).is_file():
            (folder / name).symlink_to((source.path / name).resolve())


def _load_failure(error: Exception) -> str:
    """One line for what mlx-lm's loader raised."""
    text = " ".join(str(error).split())
    if isinstance(error, KeyError):
        return f"tensor or config entry {text} is missing"
    if match := re.match(r"Missing \d+ parameters: ?(.*)", text):
        return f"missing tensors: {_shorten(match[1])}"
    if match := re.match(r"Received \d+ parameters not in model: ?(.*)", text):
        return f"tensors that the model does not have: {_shorten(match[1])}"
    if isinstance(error, TypeError) and (match := re.search(r"missing .* argument.*", text)):
        return f"config.json: {match[0]}"
    return f"mlx-lm cannot load it: {_shorten(text)}"


def _shorten(text: str) -> str:
    return text.rstrip(". ") if len(text) <= 300 else f"{text[:300]} ..."


def _cast(model: nn.Module, dtype: mx.Dtype) -> None:
    """As mlx_lm.convert does with its --dtype."""
    cast_predicate = getattr(model, "cast_predicate", lambda _: True)
    model.update(
        tree_map_with_path(
            lambda path, array: (
                array.astype(dtype)
                if cast_predicate(path) and mx.issubdtype(array.dtype, mx.floating)
                else array
            ),
            model.parameters(),
        )
    )


def _quantize(
    source: SourceFolder, model: nn.Module, config: dict[str, Any], options: ConvertOptions
) -> dict[str, Any]:
    if "quantization" in config:
        raise SourceError(f"{source.path}: already quantized; convert it without -q")
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # mlx-lm prints a line
            _, config = mlx_lm.utils.quantize_model(
                model, config, options.q_group_size, options.q_bits, mode=options.q_mode
            )
    except ValueError as error:
        raise SourceError(f"cannot quantize: {' '.join(str(error).split())}") from error
    for path, module in find_expert_modules(model):
        if not _quantization_below(module):
            stated = config["quantization"]
            raise SourceError(
                f"cannot quantize {path}: mlx-lm leaves out a matrix whose width is no multiple of "
                f"the group size ({stated['group_size']}); give another --q-group-size"
            )
    return config


def _inputs_of(
    derived: Mapping[str, mx.array], loaded: Mapping[str, mx.array]
) -> dict[str, frozenset[str]]:
    """For each derived array, the names of the loaded ones it is computed from.

    Read off MLX's own export of the graph; nothing is evaluated.
    """
    if not derived:
        return {}
    # A node of its own each: a cast to the type that a tensor has is the loaded array again.
    nodes = [mx.stop_gradient(array) for array in derived.values()]
    text = io.StringIO()
    mx.export_to_dot(text, list(loaded.values()), nodes)
    graph = text.getvalue()
    # Arrays appear in the order given, each after all that it is computed from: first the loaded,
    # which are computed from nothing, and what no other is computed from as a sink.
    arrays = re.findall(r'^\{ (rank=\w+; )?"(\w+)"; \}$', graph, re.MULTILINE)
    starts = {label: name for (_, label), name in zip(arrays, loaded, strict=False)}
    sinks = [label for rank, label in arrays[len(loaded) :] if rank == "rank=sink; "]
    ends = dict(zip(sinks, derived, strict=True))
    parents: dict[str, list[str]] = {}
    for parent, child in re.findall(r'^"?(\w+)"? -> "?(\w+)"?$', graph, re.MULTILINE):
        parents.setdefault(child, []).append(parent)
    result = {}
    for label, path in ends.items():
        found, todo, seen = set(), [label], {label}
        while todo:
            node = todo.pop()
            if node in starts:
                found.add(starts[node])
                continue
            new = [p for p in parents.get(node, ()) if p not in seen]
            seen.update(new)
            todo.extend(new)
        result[path] = frozenset(found)
    return result


def config_text(config: Mapping[str, Any]) -> str:
    """The JSON text of a config that differs from the source's, keys sorted."""
    return json.dumps(dict(sorted(config.items())), indent=4) + "\n"
