"""`run --trace` and `moepack replay`: from an answer to a table of policies."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models

from moepack.runtime.policy import POLICIES
from moepack.runtime.trace import TraceRecorder, load_trace
from moepack.tools import plots
from moepack.tools.cli import main
from moepack.tools.replay import POLICY_NAMES

PROMPT = tiny_models.text_of(tiny_models.random_tokens(60))


def traced_run(
    pack: Path, file: Path, *options: str, capsys: pytest.CaptureFixture[str]
) -> dict[str, Any]:
    """What `run --json` says of a run with a trace."""
    arguments = ["run", str(pack), "-p", PROMPT, "-m", "8", "--json", "--trace", str(file)]
    assert main([*arguments, *options]) == 0
    figures: dict[str, Any] = json.loads(capsys.readouterr().out)
    return figures


def replayed(*arguments: str | Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What `replay --json` says."""
    assert main(["replay", *map(str, arguments), "--json"]) == 0
    figures: dict[str, Any] = json.loads(capsys.readouterr().out)
    return figures


@pytest.fixture
def public_trace(tmp_path: Path) -> Path:
    """Two layers of 16 experts, decoding alone, without what a run adds."""
    rng = np.random.default_rng(0)
    rows = [
        [step, layer, expert]
        for step in range(30)
        for layer in range(2)
        for expert in rng.choice(16, 2, replace=False)
    ]
    file = tmp_path / "public.npz"
    np.savez(
        file,
        step_layer_expert=np.array(rows, np.int32),
        n_layers=2,
        n_experts=16,
        top_k=2,
        first_decode_step=0,
        source="someone\x1b[31m/$x$",
    )
    return file


@pytest.mark.parametrize("cache", ["floor", "100kB", "all"])
@pytest.mark.parametrize("step", ["2048", "33"])
def test_the_own_column_is_what_the_run_counted(
    cache: str, step: str, q4_pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also when every expert fits, for then the layers stay streamed."""
    file = tmp_path / "t.npz"
    options = ("--expert-cache", cache, "--prefill-step-size", step)
    experts = traced_run(q4_pack, file, *options, capsys=capsys)["experts"]
    figures = replayed(file, "--policy", "decayed", capsys=capsys)
    (own,) = [r for r in figures["results"] if r["slots"].startswith("own")]
    for part in ("prefill", "decode"):
        assert own[part] == {name: experts[part][name] for name in own[part]}
    assert own["decode"]["hits"] > 0
    assert figures["source"] == f"moepack run of {q4_pack.name}"
    assert figures["top_k"] == 4


def test_a_trace_changes_no_answer(
    q4_pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for options in (["--trace", str(tmp_path / "t.npz")], []):
        assert main(["run", str(q4_pack), "-p", PROMPT, "-m", "8", *options]) == 0
        captured = capsys.readouterr()
        texts.append(captured.out)
        assert ("saved " in captured.err) == bool(options)
    assert texts[0] == texts[1]


def test_a_failed_write_is_an_error_after_the_answer(
    q4_pack: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full_disk(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TraceRecorder, "save", full_disk)
    file = tmp_path / "t.npz"
    assert main(["run", str(q4_pack), "-p", PROMPT, "-m", "4", "--trace", str(file)]) == 1
    captured = capsys.readouterr()
    assert len(captured.out.strip()) == 4
    error = captured.err.strip().splitlines()[-1]
    assert error == f"moepack: error: {file}: not saved (No space left on device)"


def test_the_lines_of_a_chat_are_one_trace(
    q4_pack: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And what was said before an interrupt is kept."""
    lines = iter([PROMPT, PROMPT])

    def typed(_: str) -> str:
        line = next(lines, None)
        if line is None:
            raise KeyboardInterrupt
        return line

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", typed)
    file = tmp_path / "t.npz"
    assert main(["run", str(q4_pack), "-m", "4", "--trace", str(file)]) == 130
    kinds = [call.is_decode for call in load_trace(file).layers[0]]
    assert kinds.count(False) == 2
    assert kinds == sorted(kinds[: len(kinds) // 2]) * 2


@pytest.mark.parametrize(
    ("name", "code"), [("t.npy", 2), ("t", 2), ("none/t.npz", 1)], ids=["ending", "bare", "folder"]
)
def test_a_trace_file_that_cannot_be_is_refused_before_the_answer(
    name: str, code: int, q4_pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["run", str(q4_pack), "-p", PROMPT, "--trace", str(tmp_path / name)]
    assert main(arguments) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert ("--trace" if code == 2 else "no such folder") in captured.err
    assert list(tmp_path.iterdir()) == []


def test_the_table_has_a_line_a_policy_and_a_column_a_size(
    public_trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without what is not in the trace, and without a terminal's control characters."""
    assert main(["replay", str(public_trace)]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0] == "someone?[31m/$x$: 2 layers, 16 experts, top-2"
    assert lines[2] == "hit rate in %, decode (60 calls), by slots a layer"
    assert lines[3].split() == ["2", "4", "8"]
    assert [line.split()[0] for line in lines[4:]] == list(POLICY_NAMES)
    assert all(len(line.split()) == 4 for line in lines[4:])
    assert "prefill" not in out


def test_policies_slots_and_warm_up_are_chosen(
    public_trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--policy", "lru", "--policy", "belady", "--slots", "3,99", "--warm-up", "10")
    figures = replayed(public_trace, *arguments, capsys=capsys)
    found = [(r["policy"], r["slots"], r["slots_per_layer"]) for r in figures["results"]]
    assert found == [
        ("lru", "3", [3, 3]),
        ("lru", "99", [16, 16]),
        ("belady", "3", [3, 3]),
        ("belady", "99", [16, 16]),
    ]
    assert all(r["decode"]["calls"] == 40 for r in figures["results"])
    assert all(r["prefill"]["hit_rate"] is None for r in figures["results"])


def test_a_warm_up_of_everything_leaves_no_table(
    public_trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(public_trace), "--warm-up", "1000"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


@pytest.mark.parametrize("slots", ["0", "", "4,", "4;5", "-1", "1e3", "٣", "9999999999"])
def test_slots_that_are_none_are_a_usage_error(
    slots: str, public_trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(public_trace), "--slots", slots]) == 2
    assert "--slots" in capsys.readouterr().err


def test_a_file_of_another_kind_is_refused_in_one_line(
    q4_pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(q4_pack / "shared.bin")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("moepack: error:")
    assert "not a routing trace" in line


def test_what_is_no_regular_file_is_called_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "/dev/null"]) == 1
    assert capsys.readouterr().err == "moepack: error: /dev/null: not a regular file\n"


def test_the_names_of_policies_are_those_of_the_runtime() -> None:
    assert list(POLICIES) == list(POLICY_NAMES)


def test_without_matplotlib_one_line_says_how_to_install_it(
    public_trace: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda _: None)
    assert main(["replay", str(public_trace), "--plot", str(tmp_path / "p.svg")]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert "pip install 'moepack[plot]'" in line
    assert not (tmp_path / "p.svg").exists()


@pytest.mark.parametrize(("name", "code"), [("p.pdf", 2), ("none/p.svg", 1)])
def test_a_plot_that_cannot_be_saved_is_refused_first(
    name: str,
    code: int,
    public_trace: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["replay", str(public_trace), "--plot", str(tmp_path / name)]) == code
    assert capsys.readouterr().out == ""
