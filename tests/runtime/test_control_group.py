"""A model three times the memory that a control group allows: it runs, and says the same."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moepack.formats.pack import Pack
from moepack.packer.checkpoint import ConvertOptions
from moepack.packer.convert import convert, plan_convert
from moepack.packer.source import open_source
from moepack.tools.synthetic import write_checkpoint

LIMIT_NBYTES = 300_000_000
V1 = Path("/sys/fs/cgroup/memory")
V2 = Path("/sys/fs/cgroup")
SCRIPT = """
import json, sys
import mlx.core as mx
from mlx_lm.generate import generate_step
from moepack.runtime.loading import load_engine
from moepack.tools.reporting import peak_memory

engine = load_engine(sys.argv[1], context=64)
steps = generate_step(
    mx.array([5, 9, 40, 77]), engine.model, max_tokens=4,
    prefill_step_size=engine.plan.prefill_step,
)
tokens = [int(token) for token, _ in steps]
print(json.dumps([tokens, engine.plan.is_resident, peak_memory(), engine.plan.total]))
"""


@pytest.fixture
def control_group() -> Iterator[Path]:
    """The file to write a process's number to: from then on it has LIMIT_NBYTES."""
    version_1 = (V1 / "memory.limit_in_bytes").is_file()
    group = (V1 if version_1 else V2) / f"moepack-test-{os.getpid()}"
    limit = "memory.limit_in_bytes" if version_1 else "memory.max"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"NOT TESTED: no control group may be set up here ({error})")
    try:
        (group / limit).write_text(str(LIMIT_NBYTES))
        yield group / "cgroup.procs"
    except OSError as error:
        pytest.skip(f"NOT TESTED: no memory limit may be set here ({error})")
    finally:
        group.rmdir()


def test_a_model_three_times_the_memory_allowed_runs(control_group: Path, tmp_path: Path) -> None:
    """Not killed, within its plan, and with the tokens that it has in all the memory it wants."""
    write_checkpoint(tmp_path / "source", "small", n_layers=8)
    pack = tmp_path / "p.moepack"
    plan = plan_convert(open_source(str(tmp_path / "source")), ConvertOptions())
    convert(plan, pack, consume=True)  # a gigabyte is enough on disk
    assert Pack.open(pack).manifest.expert_nbytes >= 3 * LIMIT_NBYTES

    def run(preparation: str) -> tuple[list[int], bool, int, int]:
        command = f"{preparation} exec {sys.executable} -c '{SCRIPT}' {pack}"
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
        assert done.returncode == 0, (done.returncode, done.stderr)
        return tuple(json.loads(done.stdout))

    tokens, is_resident, peak, planned = run(f"echo $$ > {control_group} &&")
    assert not is_resident
    assert peak <= planned + 50_000_000
    assert planned <= LIMIT_NBYTES
    assert run("")[:2] == (tokens, True)
