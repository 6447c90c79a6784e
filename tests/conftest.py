"""Fixtures shared by all tests: tiny checkpoints, and packs made of them, once a session."""

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # no test may reach a network

import tiny_models

from moepack.formats.codec import encode
from moepack.formats.digests import digest_bytes
from moepack.formats.manifest import CopiedFile
from moepack.formats.pack import MANIFEST_NAME, Pack
from moepack.packer.checkpoint import ConvertOptions
from moepack.packer.convert import convert, plan_convert
from moepack.packer.source import open_source

# No test is timed: the machine may have other work.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")
COUNTS = pytest.StashKey[Counter[str]]()


@pytest.fixture(scope="session")
def count(request: pytest.FixtureRequest) -> Callable[[str, int], None]:
    """Adds to a number that is printed at the end, for what tests must show in numbers."""
    counts = request.config.stash.setdefault(COUNTS, Counter())
    return lambda what, n: counts.update({what: n})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what was counted."""
    for what, n in terminalreporter.config.stash.get(COUNTS, Counter()).items():
        terminalreporter.write_line(f"{n:,} {what}")


def make_pack(source: Path, destination: Path, options: ConvertOptions | None = None) -> Path:
    """Convert and return the destination."""
    convert(plan_convert(open_source(str(source)), options or ConvertOptions()), destination)
    return destination


def forge_file(pack: Path, name: str, content: str) -> None:
    """Replace a copied file of a pack and what its manifest says of it, as a stranger could."""
    data = content.encode()
    manifest = Pack.open(pack).manifest
    forged = CopiedFile(name, len(data), digest_bytes(data))
    files = tuple(forged if file.name == name else file for file in manifest.files)
    (pack / name).write_bytes(data)
    (pack / MANIFEST_NAME).write_bytes(encode(replace(manifest, files=files)))


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path_factory: pytest.TempPathFactory, monkeypatch: Any) -> None:
    """No test finds what another, or a user's own run, left in the user's cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session")
def session_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that lives as long as the session. Read only: tests copy what they change."""
    return tmp_path_factory.mktemp("session")


@pytest.fixture(scope="session")
def float_source(session_folder: Path) -> Path:
    """A float32 qwen3_moe: a dense layer, then two of 16 experts, top-4."""
    return tiny_models.write_checkpoint(session_folder / "float")


@pytest.fixture(scope="session")
def q4_source(session_folder: Path) -> Path:
    """The same in 4 bits, as mlx-lm saves it: everything passes through."""
    return tiny_models.write_checkpoint(session_folder / "q4", bits=4)


@pytest.fixture(scope="session")
def q4_pack(session_folder: Path, q4_source: Path) -> Path:
    """The pack of `q4_source`."""
    return make_pack(q4_source, session_folder / "q4.moepack")


@pytest.fixture(scope="session")
def float_pack(session_folder: Path, float_source: Path) -> Path:
    """The pack of `float_source`."""
    return make_pack(float_source, session_folder / "float.moepack")
