"""The documents say what the code does."""

import re
import subprocess
from pathlib import Path

import pytest

from moepack.tools.cli import COMMANDS, main
from moepack.tools.reference import reference_page

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def shell_lines() -> list[str]:
    """The lines of every shell block of the README."""
    blocks = re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def test_the_command_page_is_what_the_commands_say() -> None:
    page = (ROOT / "tools" / "COMMANDS.md").read_text(encoding="utf-8")
    assert page == reference_page(), "run: python -m moepack.tools.reference > tools/COMMANDS.md"


def test_every_command_is_in_the_readme() -> None:
    for name in COMMANDS:
        assert f"moepack {name}" in README, name


def test_ci_runs_the_readmes_own_test_command() -> None:
    (command,) = [line for line in shell_lines() if "pytest" in line]
    assert command in (ROOT / ".ci" / "run").read_text().splitlines()


def test_the_readmes_first_screen_has_both_commands() -> None:
    first_screen = "\n".join(README.splitlines()[:40])
    assert "moepack demo" in first_screen
    assert "-m pytest" in first_screen


@pytest.mark.parametrize("line", [s for s in shell_lines() if re.search(r"\bmoepack \w", s)])
def test_every_moepack_line_of_the_readme_parses(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = line.split("moepack ", 1)[1].split("#")[0].split()
    assert main([words[0], "--help"]) == 0
    page = capsys.readouterr().out
    for word in words[1:]:
        if word.startswith("-"):
            assert word.split("=")[0] in page, word


@pytest.mark.parametrize("document", sorted(ROOT.rglob("*.md")), ids=lambda p: p.name)
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    if any(part.startswith(".") or part == "build" for part in document.relative_to(ROOT).parts):
        return
    for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", document.read_text(encoding="utf-8")):
        assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_no_file_of_the_project_is_executable_by_accident() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-s"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    executable = {line.split("\t")[1] for line in listed.splitlines() if line.startswith("100755")}
    assert executable <= {".ci/run"}
