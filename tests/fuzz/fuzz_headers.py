"""Fuzz targets: what strangers write, read by us. A manifest, and a safetensors file.

    python tests/fuzz/fuzz_headers.py manifest|shard FOLDER [libFuzzer's options] [CORPUS]

Runs until it finds a crash, for developers; test_fuzz.py runs it a bounded number of times. FOLDER
is for files that inputs are written to.
"""

import random
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import atheris
import msgpack

with atheris.instrument_imports(include=["moepack"]):
    from moepack.formats.codec import decode, encode
    from moepack.formats.errors import FormatError, SourceError
    from moepack.formats.geometry import DTYPE_NBYTES
    from moepack.packer.source import open_folder


def read_manifest(data: bytes) -> None:
    """A manifest is refused; or nothing in it overlaps or leaves its file, and it is writable."""
    try:
        manifest = decode(data)
    except FormatError:
        return
    check_ranges([(t.offset, t.nbytes) for t in manifest.shared], manifest.shared_nbytes)
    for module in manifest.modules:
        check_ranges([(p.offset, p.nbytes) for p in module.parts], module.record_nbytes)
        assert module.record_nbytes <= module.stride
        assert module.stride * module.n_experts < 2**63
    for name in [*(m.file for m in manifest.modules), *(f.name for f in manifest.files)]:
        assert not Path(name).is_absolute()
        assert ".." not in Path(name).parts
    assert decode(encode(manifest)) == manifest


def check_ranges(ranges: list[tuple[int, int]], end: int) -> None:
    """Ranges `(offset, nbytes)` are in order, apart, and inside the first `end` bytes."""
    done = 0
    for offset, nbytes in ranges:
        assert done <= offset
        assert nbytes >= 0
        done = offset + nbytes
    assert done <= end


def read_sealed(data: bytes) -> None:
    """As `read_manifest`, by a forger who knows how to make a pack_id."""
    try:
        content = msgpack.unpackb(data)
        content.pop("pack_id", None)
        pack_id = sha256(msgpack.packb(content)).hexdigest()
        sealed = msgpack.packb({**content, "pack_id": pack_id})
    except Exception:  # what msgpack cannot hold is no manifest
        return
    read_manifest(sealed)


def mutate_manifest(data: bytes, max_size: int, seed: int) -> bytes:
    """Change one value of a manifest, which changed bytes rarely leave one; or else some bytes."""
    source = random.Random(seed)
    try:
        whole = msgpack.unpackb(data)
    except Exception:
        whole = None
    if not isinstance(whole, dict) or source.random() < 0.3:
        return bytes(atheris.Mutate(data, max_size))
    places = [*places_in(whole)]
    if not places:
        return bytes(atheris.Mutate(data, max_size))
    holder, key = source.choice(places)
    value = holder[key]
    if isinstance(value, int) and source.random() < 0.7:
        steps = (-1, 1, -512, 512, -value, 10**9, 2**62 - value, -2 * value)
        holder[key] = min(2**64 - 1, max(-(2**63), value + source.choice(steps)))
    elif source.random() < 0.7:
        other, its = source.choice(places)
        holder[key] = other[its]
    else:
        del holder[key]
    try:
        changed: bytes = msgpack.packb(whole)
    except ValueError:  # a value was put inside itself
        return data
    return changed if len(changed) <= max_size else data


def places_in(value: Any) -> list[tuple[Any, Any]]:
    """(map or list, key) of every value inside nested maps and lists."""
    keys = list(value) if isinstance(value, dict) else range(len(value))
    found = [(value, key) for key in keys]
    for key in keys:
        if isinstance(value[key], dict | list):
            found += places_in(value[key])
    return found


def read_shard(folder: Path, data: bytes) -> None:
    """A weight file is refused, or its tensors lie in it one beside the other, to its end."""
    path = folder / "model.safetensors"
    path.write_bytes(data)
    try:
        source = open_folder(folder, None, None, stubs=None)
    except (FormatError, SourceError):
        return
    end = len(source.headers[path.name])
    for tensor in sorted(source.tensors.values(), key=lambda t: (t.offset, t.nbytes)):
        assert tensor.offset == end
        n_numbers = 1
        for n in tensor.shape:
            n_numbers *= n
        assert tensor.nbytes == n_numbers * DTYPE_NBYTES[tensor.dtype]
        end += tensor.nbytes
    assert end == len(data)


def read_header(folder: Path, data: bytes) -> None:
    """As `read_shard`, with a right length before a header that ends with the last brace."""
    header, brace, rest = data[8:].rpartition(b"}")
    header += brace
    read_shard(folder, len(header).to_bytes(8, "little") + header + rest)


def main() -> None:
    """See the module."""
    kind, folder = sys.argv.pop(1), Path(sys.argv.pop(1))
    (folder / "config.json").write_text('{"model_type": "qwen3_moe"}')

    def one_input(data: bytes) -> None:
        if kind == "manifest":
            read_manifest(data)
            read_sealed(data)
        else:
            read_shard(folder, data)
            read_header(folder, data)

    if kind == "manifest":
        atheris.Setup(sys.argv, one_input, custom_mutator=mutate_manifest)
    else:
        atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()


main()
