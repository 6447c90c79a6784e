"""Fixtures shared by all tests: tiny checkpoints, and packs made of them, once a session."""

import os
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # no test may reach a network

import tiny_models

from moepack.packer.checkpoint import ConvertOptions
from moepack.packer.convert import convert, plan_convert
from moepack.packer.source import open_source


def make_pack(source: Path, destination: Path, options: ConvertOptions | None = None) -> Path:
    """Convert and return the destination."""
    convert(plan_convert(open_source(str(source)), options or ConvertOptions()), destination)
    return destination


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
