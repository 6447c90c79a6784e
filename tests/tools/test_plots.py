"""Pictures: `replay --plot` and `--heatmap`, `inspect --plot`, `bench --plot`."""

import json
import re
from pathlib import Path

import pytest
import tiny_models

from moepack.formats.errors import SourceError
from moepack.formats.geometry import ALIGNMENT
from moepack.formats.pack import Pack
from moepack.runtime.trace import load_trace
from moepack.tools import plots
from moepack.tools.cli import main
from moepack.tools.inspect import ATTENTION, ENDS, EXPERTS, PADDING, nbytes_by_layer
from moepack.tools.plots import draw_speeds, draw_uses
from moepack.tools.replay import uses_of

imread = pytest.importorskip("matplotlib.image").imread


@pytest.fixture(scope="module")
def trace(q4_pack: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a short run."""
    file = tmp_path_factory.mktemp("trace") / "run.npz"
    prompt = tiny_models.text_of(tiny_models.random_tokens(20))
    assert main(["run", str(q4_pack), "-p", prompt, "-m", "6", "--trace", str(file)]) == 0
    return file


def texts(svg: Path) -> str:
    """The text of a picture, which matplotlib keeps as comments beside its outlines."""
    return "\n".join(re.findall(r"<!-- (.*?) -->", svg.read_text(encoding="utf-8")))


@pytest.mark.parametrize("option", ["--plot", "--heatmap"])
@pytest.mark.parametrize("name", ["p.svg", "p.png", "P.SVG", "P.Png"])
def test_replay_draws_in_the_format_of_the_name(
    option: str, name: str, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(trace), option, str(tmp_path / name)]) == 0
    data = (tmp_path / name).read_bytes()
    assert (b"<svg" in data) if name.lower() == "p.svg" else data.startswith(b"\x89PNG")
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_axes_have_names_and_units(
    trace: Path, q4_pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hits, heat, sizes, speed = (tmp_path / f"{n}.svg" for n in ("hits", "heat", "sizes", "speed"))
    assert main(["replay", str(trace), "--plot", str(hits), "--heatmap", str(heat)]) == 0
    assert main(["inspect", str(q4_pack), "--plot", str(sizes)]) == 0
    arms = {
        "resident": {"tokens_per_second": 8.0, "ratio": 1.0},
        "floor": {"tokens_per_second": 4.0, "ratio": 0.5, "hit_rate": 0.25, "bytes_per_token": 3e6},
    }
    draw_speeds(speed, arms, "resident", "some.moepack")
    assert {"slots a layer", "hit rate of decoding (%)", "belady"} <= {*texts(hits).split("\n")}
    assert {"expert layer", "uses (1: the mean of the layer)"} <= {*texts(heat).split("\n")}
    assert {"layer", "bytes in the pack (MB)"} <= {*texts(sizes).split("\n")}
    drawn = {*texts(speed).split("\n")}
    assert {"decoding (tokens/s; x: of resident)", "read (MB a token)"} <= drawn
    assert {"4.00 (0.50x)", "25 % hits"} <= drawn


def test_the_bytes_drawn_are_those_of_the_weight_files(q4_pack: Path) -> None:
    pack = Pack.open(q4_pack)
    found = nbytes_by_layer(pack.manifest)
    total = sum(sum(kind.values()) for kind in found.values())
    files = [pack.shared_file, *(pack.expert_file(m) for m in pack.manifest.modules)]
    assert total == sum(file.stat().st_size for file in files)
    assert sum(found[EXPERTS].values()) == pack.manifest.expert_nbytes
    assert set(found[EXPERTS]) == {1, 2}  # layer 0 is dense
    assert set(found[ATTENTION]) == {0, 1, 2}
    assert set(found[ENDS]) == {None}
    assert found[PADDING][1] < 16 * ALIGNMENT


def test_the_heat_map_counts_every_choice_of_a_token(trace: Path) -> None:
    loaded = load_trace(trace)
    uses = uses_of(loaded)
    for row, calls in zip(uses, loaded.layers, strict=True):
        assert len(row) == 16
        assert sum(row) == 4 * sum(call.n_tokens for call in calls)


def test_a_heat_map_tells_an_even_layer_from_an_uneven_one(tmp_path: Path) -> None:
    draw_uses(tmp_path / "h.png", [[3, 3, 3, 3], [9, 0, 0]], "")
    pixels = (imread(tmp_path / "h.png")[:, :, :3] * 255).astype(int)
    height, width = pixels.shape[:2]
    columns = slice(width // 8, width * 3 // 4, 20)
    even, uneven = (
        {tuple(p) for p in pixels[y, columns].tolist()} for y in (height // 4, height * 5 // 8)
    )
    assert len(even) == 1
    assert len(uneven) == 3  # used alone, never used, and the paper where no expert is


def test_bench_draws_what_it_prints(
    q4_pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "b.svg"
    arguments = ["--rounds", "1", "--tokens", "3", "--prompt-tokens", "8", "--plot", str(picture)]
    assert main(["bench", str(q4_pack), *arguments, "--json"]) == 0
    arms = json.loads(capsys.readouterr().out)["decode"]
    drawn = {*texts(picture).split("\n")}
    assert set(arms) <= drawn
    assert f"{arms['floor']['tokens_per_second']:.2f} ({arms['floor']['ratio']:.2f}x)" in drawn


def test_without_matplotlib_a_picture_is_refused_first(
    q4_pack: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda _: None)
    for command in ("inspect", "bench"):
        assert main([command, str(q4_pack), "--plot", str(tmp_path / "p.svg")]) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        (line,) = captured.err.splitlines()
        assert "--plot needs matplotlib: pip install 'moepack[plot]'" in line


@pytest.mark.parametrize("command", ["bench --plot", "inspect --plot", "replay --heatmap"])
def test_a_picture_that_could_not_be_saved_is_refused_before_any_work(
    command: str,
    q4_pack: Path,
    trace: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def work(*_: object, **__: object) -> None:
        raise AssertionError("work was begun")

    monkeypatch.setattr("moepack.runtime.trace.load_trace", work)
    monkeypatch.setattr("moepack.tools.packs.open_pack", work)
    name, option = command.split()
    of = trace if name == "replay" else q4_pack
    assert main([name, str(of), option, "/proc/b.svg"]) == 1  # even root makes no file there
    (line,) = capsys.readouterr().err.splitlines()
    assert "/proc/b.svg: cannot be saved there" in line


def test_a_picture_that_fails_at_the_end_is_named_as_the_user_named_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "a hidden name")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    with pytest.raises(SourceError) as raised:
        draw_uses(tmp_path / "h.svg", [[1, 2]], "")
    assert str(raised.value) == f"{tmp_path / 'h.svg'}: not saved (No space left on device)"
    assert list(tmp_path.iterdir()) == []


def test_two_pictures_in_one_file_are_refused(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder").mkdir()
    names = [str(tmp_path / "p.svg"), str(tmp_path / "folder" / ".." / "p.svg")]
    assert main(["replay", str(trace), "--plot", names[0], "--heatmap", names[1]]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "--plot and --heatmap name the same file" in captured.err


def test_the_same_numbers_are_the_same_bytes(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pictures = []
    for name in ("a.svg", "b.svg"):
        assert main(["replay", str(trace), "--plot", str(tmp_path / name)]) == 0
        pictures.append((tmp_path / name).read_bytes())
    assert pictures[0] == pictures[1]
