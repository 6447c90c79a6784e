"""Memory of convert: one record for what is copied, one tensor for what is derived."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from tiny_models import per_expert, read_weights, resave

# Layers of 16 experts x 3 x 256 x 340 x 4 bytes: 16.7 MB each.
BIG_LAYERS: dict[str, Any] = {
    **tiny_models.QWEN3_MOE,
    "mlp_only_layers": [],
    "hidden_size": 256,
    "moe_intermediate_size": 340,
}
LAYER_NBYTES = 16 * 3 * 256 * 340 * 4
SLACK_NBYTES = 12 * 10**6  # allocators, the interpreter; the six layers more are 100 MB

# The peak of this process alone: ru_maxrss would count the parent's before exec.
CONVERT = """
import sys
from pathlib import Path
from moepack.packer.checkpoint import ConvertOptions
from moepack.packer.convert import convert, plan_convert
from moepack.packer.source import open_source

def peak():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024

convert(plan_convert(open_source(sys.argv[1]), ConvertOptions()), Path(sys.argv[2]))
print(peak())
"""


def peak_of_convert(source: Path, destination: Path) -> int:
    """Bytes at most in RAM while another process converts."""
    done = subprocess.run(
        [sys.executable, "-c", CONVERT, str(source), str(destination)],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
@pytest.mark.parametrize("layout", ["mlx", "per expert"])
def test_peak_memory_does_not_grow_with_the_number_of_layers(tmp_path: Path, layout: str) -> None:
    """Two layers and eight layers of 17 MB, copied or stacked, take the same memory."""
    peaks = []
    for n_layers in (2, 8):
        folder = tmp_path / f"{n_layers} layers"
        source = tiny_models.write_checkpoint(
            folder, {**BIG_LAYERS, "num_hidden_layers": n_layers}, with_tokenizer=False
        )
        if layout == "per expert":
            raw = tmp_path / f"{n_layers} raw"
            source = resave(folder, raw, per_expert(read_weights(folder)), n_shards=2)
        peaks.append(peak_of_convert(source, tmp_path / f"{n_layers}.moepack"))
    assert peaks[1] - peaks[0] < SLACK_NBYTES, peaks
    assert 6 * LAYER_NBYTES > 5 * SLACK_NBYTES
