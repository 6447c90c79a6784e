"""The fuzz targets, a bounded number of runs from a fixed seed: nothing crashes."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from formats_strategies import sample_manifest

from moepack.formats.codec import encode

TARGET = Path(__file__).parent / "fuzz_headers.py"
# A run reads its input as it is, and with its sum or length put right. A shard lies in a folder.
N_RUNS = {"manifest": 15_000, "shard": 5_000}
HEADER = (
    b'{"__metadata__":{"format":"mlx"},"a.weight":{"dtype":"U32","shape":[2,3],'
    b'"data_offsets":[0,24]},"a.scales":{"dtype":"BF16","shape":[4],"data_offsets":[24,32]}}'
)
TWICE = (
    b'{"a":{"dtype":"U8","shape":[32],"data_offsets":[0,32]},'
    b'"a":{"dtype":"F32","shape":[8],"data_offsets":[0,32]}}'
)
FIELDS = (
    *("magic", "version", "requires", "alignment", "model_type", "created_by", "shared", "nbytes"),
    *("tensors", "dtype", "shape", "offset", "digest", "modules", "path", "class", "file", "parts"),
    *("n_experts", "stride", "record_nbytes", "name", "quantization", "bits", "group_size", "mode"),
    *("digests", "source", "revision", "shards", "sha256", "header", "options", "dropped"),
    *("renamed", "files", "pack_id", "data_offsets", "__metadata__", "F8_E8M0", "F4", "../x"),
)

needs_atheris = pytest.mark.skipif(
    find_spec("atheris") is None, reason="NOT FUZZED: atheris is for Linux and Python below 3.14"
)


def write_corpus(kind: str, folder: Path) -> Path:
    """One valid input, and one with two keys alike, which mutations rarely come by."""
    folder.mkdir()
    if kind == "manifest":
        (folder / "valid").write_bytes(encode(sample_manifest()))
    else:
        for name, header in (("valid", HEADER), ("twice", TWICE)):
            data = len(header).to_bytes(8, "little") + header + bytes(32)
            (folder / name).write_bytes(data)
    return folder


@needs_atheris
@pytest.mark.parametrize("kind", ["manifest", "shard"])
def test_no_input_ends_in_anything_but_a_refusal(
    kind: str, tmp_path: Path, count: Callable[[str, int], None]
) -> None:
    """Mutated by what they reach of our own code; one that crashes is left in `tmp_path`."""
    (tmp_path / "files").mkdir()
    (tmp_path / "words").write_text("".join(f'"{word}"\n' for word in FIELDS))
    ended = subprocess.run(
        [
            *(sys.executable, TARGET, kind, tmp_path / "files"),
            *(f"-runs={N_RUNS[kind]}", "-seed=7", "-max_len=4096", f"-dict={tmp_path / 'words'}"),
            *("-timeout=20", "-rss_limit_mb=700", "-malloc_limit_mb=300"),
            *(f"-artifact_prefix={tmp_path}/", write_corpus(kind, tmp_path / "corpus")),
        ],
        capture_output=True,
        text=True,
        errors="replace",
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    done = re.search(r"Done (\d+) runs", ended.stderr)
    assert done is not None
    assert int(done[1]) >= N_RUNS[kind]
    covered = re.findall(r"cov: (\d+)", ended.stderr)
    assert int(covered[-1]) > int(covered[0]) > 30  # our code is seen, and more and more of it
    count("fuzzed manifests and weight files, none of which crashed", int(done[1]))
