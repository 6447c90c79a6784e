"""Packs and checkpoints made to break their reader: each named, and how it is written to a folder.

An input is a function that writes it; what it says is refused by the command, whatever it is.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
from conftest import forge_file
from formats_strategies import as_map, sample_manifest, seal, write_pack

from moepack.formats.codec import encode
from moepack.packer.source import INDEX_NAME

Steps = tuple[Any, ...]
Write = Callable[[Path], object]

OUTSIDE = (
    *("", ".", "..", "/", "/etc/passwd", "//x", "../x", "experts/..", "experts/../../x", "./x"),
    *("experts//x", "experts/", ".hidden", "experts/.hidden", "a/b/c", "a\\b", "..\\x", "C:\\x"),
    *("x\0", "x\ny", "\x1b[2J", "x" * 256),
)
NUMBERS = (-1, 10**9, 2**31, 2**63 - 1, 2**63, 2**64 - 1)
MODULE: Steps = ("modules", 0)
TENSOR: Steps = ("shared", "tensors", "model.layers.0.mlp.gate.weight")
NUMBER_FIELDS: tuple[Steps, ...] = (
    ("alignment",),
    ("shared", "nbytes"),
    *((*TENSOR, field) for field in ("offset", "nbytes")),
    *((*MODULE, field) for field in ("n_experts", "stride", "record_nbytes")),
    *((*MODULE, "parts", 1, field) for field in ("offset", "nbytes")),
    ("files", "config.json", "nbytes"),
    ("source", "shards", 0, "nbytes"),
)
SHAPES = ([2**62, 2], [2**32, 2**32], [10**9] * 32, [-1], [1] * 33, [2**64 - 1] * 3, [10**9])
PACK_FILES = ("shared.bin", "experts/00000.bin", "experts/00001.bin", "config.json")


class Input(NamedTuple):
    """A hostile pack (`is_pack`) or checkpoint; `write` makes it at a path that does not exist."""

    name: str
    is_pack: bool
    write: Write


def manifests() -> Iterator[tuple[str, bytes]]:
    """(name, bytes) of manifests. Of most the pack_id is right: a stranger can compute it."""
    for name in OUTSIDE:
        yield f"expert file {name[:20]!a}", changed((*MODULE, "file"), name)
        yield f"copied file {name[:20]!a}", renamed(("files",), "config.json", name)
    for field in NUMBER_FIELDS:
        for number in NUMBERS:
            yield f"{'.'.join(map(str, field))} {number}", changed(field, number)
    for offset in (0, 512, 1023, 1025):
        yield f"tensor at {offset}", changed((*TENSOR, "offset"), offset)
    for shape in SHAPES:
        yield f"shape {str(shape)[:30]} of a tensor", changed((*TENSOR, "shape"), shape)
        yield f"shape {str(shape)[:30]} of a part", changed((*MODULE, "parts", 0, "shape"), shape)
    for value in ("", "MOEPACK", None, b"moepack"):
        yield f"magic {value!r}", changed(("magic",), value)
    for value in ([2, 0], [0, 9], [1], [], [2**64 - 1, 0], "1.0"):
        yield f"version {value}", changed(("version",), value)
    yield "required feature", changed(("requires",), ["compressed_records"])
    for place in ((), ("shared",), TENSOR, MODULE, (*MODULE, "parts", 0), ("source",)):
        yield f"unknown field in {place}", changed((*place, "novelty"), 1)
    yield "ten million digests", changed((*MODULE, "digests"), bytes(10**7))
    sample = encode(sample_manifest())
    key = msgpack.packb("magic")
    twice = bytes([sample[0] + 1]) + sample[1:] + key + msgpack.packb("moepack")
    yield "a key twice", twice
    yield "another pack_id", sample.replace(sample[-64:], b"0" * 64)
    for n in (0, 1, 100, len(sample) - 1):
        yield f"cut at {n}", sample[:n]
    yield "more after the end", sample + b"\0"
    for nested in (b"\x91", b"\x81\xa1x", b"\xdc\x00\x01", b"\x81\x91"):
        yield f"16 MB of nesting {nested.hex()}", nested * (16 * 10**6 // len(nested))
    for header in ("dd", "df", "db", "c6", "c9"):
        claimed = bytes.fromhex(header) + b"\xff\xff\xff\xff" + bytes(20)
        yield f"claimed length {header}", claimed


def changed(path: Steps, value: Any) -> bytes:
    """The sample with one value replaced or added, and its pack_id right."""
    whole = as_map(sample_manifest())
    holder: Any = whole
    for step in path[:-1]:
        holder = holder[step]
    holder[path[-1]] = deepcopy(value)
    return seal(whole)


def renamed(path: Steps, old: str, new: str) -> bytes:
    """The sample with a key renamed, and its pack_id right."""
    whole = as_map(sample_manifest())
    holder: Any = whole
    for step in path:
        holder = holder[step]
    holder[new] = holder.pop(old)
    return seal(whole)


def sample_packs() -> Iterator[tuple[str, Write]]:
    """Small packs of no real model, which is found out before that matters."""
    for name, data in manifests():
        yield name, with_manifest(data)
    for n in (16 * 2**20 + 1, 10**8, 2**40):
        yield f"a manifest of {n} bytes", with_sizes({"manifest.msgpack": n})
    for name in PACK_FILES:
        yield f"{name} links out of the pack", with_change(name, link_out)
        yield f"{name} is a folder", with_change(name, lambda p: (p.unlink(), p.mkdir()))
        yield f"{name} is a pipe", with_change(name, lambda p: (p.unlink(), os.mkfifo(p)))
        yield f"{name} is not there", with_change(name, Path.unlink)
        yield f"{name} is a byte short", with_change(name, cut_a_byte)
        yield f"{name} has a terabyte", with_sizes({name: 2**40})


def with_manifest(data: bytes) -> Write:
    """The sample pack with another manifest."""

    def write(pack: Path) -> None:
        write_pack(pack)
        (pack / "manifest.msgpack").write_bytes(data)

    return write


def with_change(name: str, change: Callable[[Path], object]) -> Write:
    """The sample pack with something done to one of its files."""

    def write(pack: Path) -> None:
        write_pack(pack)
        change(pack / name)

    return write


def with_sizes(sizes: dict[str, int]) -> Write:
    """The sample pack with files of other sizes, holes at their ends."""

    def write(pack: Path) -> None:
        write_pack(pack)
        for name, nbytes in sizes.items():
            os.truncate(pack / name, nbytes)

    return write


def link_out(path: Path) -> None:
    """Move a file out of its pack, and link to it."""
    outside = path.parents[1] / f"outside-{path.name}"
    path.rename(outside)
    path.symlink_to(outside)


def cut_a_byte(path: Path) -> None:
    """Leave the last byte out."""
    os.truncate(path, path.stat().st_size - 1)


def real_packs(real: Path) -> Iterator[tuple[str, Write]]:
    """A pack of a real model whose small files are a stranger's, their digests right."""
    config = json.loads((real / "config.json").read_text())

    def with_file(name: str, content: str) -> Write:
        def write(pack: Path) -> None:
            shutil.copytree(real, pack)
            forge_file(pack, name, content)

        return write

    for changes in CONFIGS:
        text = json.dumps({**config, **changes})
        yield f"config with {str(changes)[:40]}", with_file("config.json", text)
    for text in ("", "{", "[1]", "\0", "[" * 10**6, '"text"'):
        yield f"config {text[:10]!a}", with_file("config.json", text)
    for text in ("", "{", "[]", "[" * 10**6, '{"model": 7}', '{"a": ' * 10**5):
        yield f"tokenizer {text[:10]!a}", with_file("tokenizer.json", text)


CONFIGS: tuple[dict[str, Any], ...] = (
    {"model_file": "evil.py"},
    {"model_type": "../evil"},
    {"model_type": "nosuchmodel"},
    {"model_type": 7},
    {"num_hidden_layers": 10**9},
    {"num_hidden_layers": 9_999},
    {"text_config": {"num_hidden_layers": 10**9}},
    {"num_experts_per_tok": 10**9},
    {"num_experts": 10**9},
    {"hidden_size": -1},
)
CODE = "open({!r}, 'w')"  # what a checkpoint's code would do: leave a mark


def entry(dtype: str, shape: object, offsets: object) -> str:
    """One tensor of a safetensors header."""
    return json.dumps({"dtype": dtype, "shape": shape, "data_offsets": offsets})


def headers() -> Iterator[tuple[str, bytes]]:
    """(name, whole file) of weight files, 8 bytes of data each."""
    lies = {
        "shape": '{"a":' + entry("F32", [3], [0, 8]) + "}",
        "overlap": '{"a":' + entry("F32", [2], [0, 8]) + ',"b":' + entry("F32", [1], [4, 8]) + "}",
        "hole": '{"a":' + entry("U8", [2], [0, 2]) + ',"b":' + entry("U8", [4], [4, 8]) + "}",
        "trailing bytes": '{"a":' + entry("U8", [4], [0, 4]) + "}",
        "a key twice": '{"a":'
        + entry("F32", [2], [0, 8])
        + ',"a":'
        + entry("I32", [2], [0, 8])
        + "}",
        "no dtype": '{"a":{"shape":[2],"data_offsets":[0,8]}}',
        "not an object": "[]",
        "an entry that is none": '{"a":7}',
        "cut": '{"a":',
        "empty": "",
    }
    for dtype in ("F33", "", "f32", "F4"):
        lies[f"dtype {dtype!r}"] = '{"a":' + entry(dtype, [2], [0, 8]) + "}"
    for shape in ([2**62, 2], [2**32, 2**32], [10**9] * 9, [-1], [2.0], ["2"], 2, None, [2**64]):
        lies[f"shape {str(shape)[:20]}"] = '{"a":' + entry("F32", shape, [0, 8]) + "}"
    for offsets in (
        *([-8, 0], [8, 0], [0, 9], [0, 2**63], [0, 2**64], [2**64 - 8, 2**64], [0], [0, 8, 8]),
        *(["0", "8"], [0.0, 8.0], None, [10**9, 10**9 + 8]),
    ):
        lies[f"offsets {offsets}"] = '{"a":' + entry("F32", [2], offsets) + "}"
    nothing = entry("F32", [0], [8, 8])
    empty = "".join(f',"x{i}":{nothing}' for i in range(300_000))
    lies["300,000 empty tensors"] = '{"a":' + entry("F32", [2], [0, 8]) + empty + "}"
    for name, header in lies.items():
        yield f"header with {name}", len(header).to_bytes(8, "little") + header.encode() + bytes(8)
    good = ('{"a":' + entry("F32", [2], [0, 8]) + "}").encode()
    for n in (0, 1, len(good) - 1, len(good) + 9, 10**8 + 1, 2**31, 2**63, 2**64 - 1):
        yield f"header length {n}", n.to_bytes(8, "little") + good + bytes(8)
    for n in (0, 7, 8, 20):
        yield f"cut at {n}", (len(good).to_bytes(8, "little") + good)[:n]
    for nested in (b"[", b'{"a":'):
        header = nested * (99 * 10**6 // len(nested))
        yield f"99 MB of nesting {nested.decode()}", len(header).to_bytes(8, "little") + header
    yield "bytes that are no text", (4).to_bytes(8, "little") + b"\xff\xfe{}" + bytes(8)


def sources(real: Path) -> Iterator[tuple[str, Write]]:
    """Checkpoints, each a real one with something wrong."""
    config = json.loads((real / "config.json").read_text())

    def with_file(name: str, content: bytes) -> Write:
        def write(source: Path) -> None:
            shutil.copytree(real, source)
            (source / "evil.py").write_text(CODE.format(str(source.parent / "ran")))
            if name == "model.safetensors":
                (source / INDEX_NAME).unlink(missing_ok=True)
            (source / name).write_bytes(content)

        return write

    def with_size(name: str, nbytes: int) -> Write:
        def write(source: Path) -> None:
            shutil.copytree(real, source)
            (source / name).touch()
            os.truncate(source / name, nbytes)

        return write

    for name, data in headers():
        yield name, with_file("model.safetensors", data)
    for changes in CONFIGS:
        if "num_experts_per_tok" in changes:  # no concern of weights: running its pack is refused
            continue
        text = json.dumps({**config, **changes}).encode()
        yield f"config with {str(changes)[:40]}", with_file("config.json", text)
    for text in ("", "{", "[1]", "\0", "[" * 10**6, '"text"', '{"model_type": 7}'):
        yield f"config {text[:10]!a}", with_file("config.json", text.encode())
    for file in ("../model.safetensors", "/etc/passwd", "a/b", ".x", "", ".", "..", 7, None, {}):
        index = json.dumps({"weight_map": {"model.norm.weight": file}}).encode()
        yield f"index to {file!r}", with_file(INDEX_NAME, index)
    for text in ("", "{}", "[]", '{"weight_map": {}}', '{"weight_map": 7}', "[" * 10**6):
        yield f"index {text[:20]!a}", with_file(INDEX_NAME, text.encode())
    for name in ("config.json", INDEX_NAME, "tokenizer.json", "tokenizer.model", "LICENSE"):
        yield f"{name} of a gigabyte", with_size(name, 10**9)
    yield "a template of 2 MB", with_size("chat_template.jinja", 2 * 10**6)


def all_inputs(real_pack: Path, real_source: Path) -> Iterator[Input]:
    """Every one, under a name of its own."""
    numbers = count()
    for kind, is_pack, inputs in (
        ("pack", True, sample_packs()),
        ("model", True, real_packs(real_pack)),
        ("source", False, sources(real_source)),
    ):
        for name, write in inputs:
            yield Input(f"{next(numbers)} {kind}: {name}", is_pack, write)
