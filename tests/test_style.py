"""The repository passes ruff and mypy --strict."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TYPING = ROOT / "build" / "typing"  # ignored by git
PACKAGES = ("formats", "packer", "runtime", "tools")


def run(*arguments: str, folder: Path = ROOT, **environment: str) -> tuple[int, str]:
    """(exit status, output) of a Python module run as a program."""
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("arguments", [("check",), ("format", "--check")], ids=" ".join)
def test_ruff_has_nothing_to_say(arguments: tuple[str, ...]) -> None:
    status, output = run("ruff", *arguments, ".")
    assert status == 0, output


@pytest.fixture(scope="module")
def link_tree() -> Path:
    """A folder where `moepack` is a folder: type checkers do not follow the editable install."""
    (TYPING / "moepack").mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        link = TYPING / "moepack" / package
        if not link.is_symlink():
            link.symlink_to(Path("../../..") / package)
    return TYPING


def mypy(link_tree: Path, *arguments: str) -> tuple[int, str]:
    """(exit status, output) of mypy --strict with `moepack` found in the link tree alone."""
    return run(
        "mypy",
        "--strict",
        f"--config-file={ROOT / 'pyproject.toml'}",
        f"--cache-dir={link_tree / 'cache'}",
        *arguments,
        folder=link_tree,
        MYPYPATH=str(link_tree),
    )


def test_mypy_has_nothing_to_say(link_tree: Path) -> None:
    packages = [argument for package in PACKAGES for argument in ("-p", f"moepack.{package}")]
    status, output = mypy(link_tree, *packages)
    n_files = sum(1 for package in PACKAGES for _ in (ROOT / package).rglob("*.py"))
    assert status == 0, output
    match = re.search(r"no issues found in (\d+) source files", output)
    assert match is not None
    assert int(match[1]) >= n_files


def test_mypy_sees_a_wrong_type_across_packages(link_tree: Path, tmp_path: Path) -> None:
    probe = tmp_path / "probe.py"
    probe.write_text("from moepack.formats.geometry import align_up\n\nx: str = align_up(1)\n")
    status, output = mypy(link_tree, str(probe))
    assert status == 1, output
    assert 'expression has type "int"' in output
