"""`moepack demo`, and the model that it ships."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from served import PROGRAM

from moepack.formats.pack import Pack
from moepack.tools.cli import main
from moepack.tools.demo import DEMO_MODEL


def test_the_demo_converts_verifies_and_runs_with_a_quarter_of_the_experts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "-m", "40", "--pack", str(tmp_path / "demo.moepack")]) == 0
    captured = capsys.readouterr()
    assert "192 records, 0 differences; logits of 128 of 128 positions identical" in captured.err
    assert "8 of 32 experts a layer" in captured.err
    words = captured.out.lower().split()
    assert sum(words.count(word) for word in ("and", "the", "lord", "unto", "of", "he")) >= 5


def test_the_demo_model_is_small_and_has_32_experts_in_6_layers(tmp_path: Path) -> None:
    assert sum(f.stat().st_size for f in DEMO_MODEL.iterdir()) <= 8_000_000
    assert main(["convert", str(DEMO_MODEL), str(tmp_path / "p")]) == 0
    modules = Pack.open(tmp_path / "p").manifest.modules
    assert [m.n_experts for m in modules] == [32] * 6


def test_the_demos_routing_is_skewed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A quarter of the experts serves about half of the choices; chance would be a quarter."""
    main(["demo", "-m", "60", "--pack", str(tmp_path / "p")])
    rate = capsys.readouterr().err.split("hit rate ")[1].split(" %")[0]
    assert float(rate) > 40


def test_sigterm_leaves_no_folder(tmp_path: Path) -> None:
    """The pack that it makes is as temporary then."""
    with subprocess.Popen(
        [*PROGRAM, "demo", "-m", "100000"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as demo:
        assert demo.stdout is not None
        assert demo.stdout.read(1)  # it answers
        assert list(tmp_path.glob("moepack-demo-*"))
        demo.terminate()
        assert demo.wait(60) == 128 + signal.SIGTERM
    assert not list(tmp_path.glob("moepack-demo-*"))
