"""The documents say what the code does."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from moepack.tools.cli import COMMANDS, cli, main
from moepack.tools.demo import DEMO_MODEL
from moepack.tools.reference import reference_page

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


PAGES = ("README.md", "runtime/API.md", "tools/MEASURING.md", "tools/MEMORY.md")
NAMED = "Qwen3-30B-A3B-4bit"  # the model of the documents, in whose place the demo's stands
QUICK_BENCH = "--rounds 1 --tokens 2 --prompt-tokens 8"
# Lines that need what a test has not, and why.
NOT_RUN = {
    "pip install": "the network; CI runs the first of them",
    "source .venv/bin/activate": "the folder that the line above made",
    "small12": "1.6 GB, to measure with; test_control_group.py makes a smaller one",
    "demo --chat": "weights from the network; test_demo_chat.py",
}


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a page that are in this language."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def shell_lines(page: str = "README.md") -> list[str]:
    """The lines of every shell block of a page."""
    return [line for b in blocks(page, "sh") for line in b.splitlines() if line.strip()]


@pytest.fixture
def home(tmp_path: Path, demo_pack: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's home where the demo's model and its pack have the name that documents use."""
    shutil.copytree(DEMO_MODEL, tmp_path / "models" / NAMED)
    shutil.copytree(demo_pack, tmp_path / f"{NAMED}.moepack")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def demo_pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model as a pack."""
    pack = tmp_path_factory.mktemp("demo") / "demo.moepack"
    assert main(["convert", str(DEMO_MODEL), str(pack)]) == 0
    return pack


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "sh")])
def test_the_shell_lines_of_a_page_run_in_order(page: str, home: Path) -> None:
    """As printed, from an empty folder where the page makes its pack; a server until it listens."""
    lines = [line for line in shell_lines(page) if not any(part in line for part in NOT_RUN)]
    assert lines
    if any("moepack convert" in line for line in lines):
        shutil.rmtree(home / f"{NAMED}.moepack")
    environment = {**os.environ, "HOME": str(home)}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    for line in lines:
        if "moepack serve" in line:
            serve_until_it_listens(line, environment)
            continue
        # The last of an option counts: bench is to run, not to measure.
        is_bench = "moepack bench" in line
        done = subprocess.run(
            ["bash", "-c", f"{line} {QUICK_BENCH}" if is_bench else line],
            cwd=home,
            env=environment,
            input="In the beginning",
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        for picture in re.findall(r"\S+\.(?:svg|png)", line):
            assert (home / picture).stat().st_size > 1000


def serve_until_it_listens(line: str, environment: dict[str, str]) -> None:
    """Run a server as printed, on any free port, and end it as a user would."""
    pytest.importorskip("uvicorn")
    with subprocess.Popen(
        ["bash", "-c", f"exec {line} --port 0"], env=environment, stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stderr is not None
        said = ""
        for said in server.stderr:
            if "http://" in said:
                break
        server.terminate()
        rest = server.stderr.read()
    assert "http://127.0.0.1" in said, said + rest
    assert server.returncode == 0, rest


def test_the_shell_lines_that_do_not_run_are_few() -> None:
    """And each entry of NOT_RUN is about one at least."""
    left_out = [s for p in PAGES for s in shell_lines(p) if any(part in s for part in NOT_RUN)]
    assert all(any(part in line for line in left_out) for part in NOT_RUN)
    assert len(left_out) <= 8


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")])
def test_the_python_blocks_of_a_page_are_a_program_that_runs(
    page: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, object] = {}
    for block in blocks(page, "python"):
        exec(compile(block, page, "exec"), names)
        assert capsys.readouterr().out.strip(), block


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_in_the_documents(command: str) -> None:
    """In the page of all help texts at least; short forms too."""
    page = reference_page().split(f"\n## {command}\n")[1].split("\n## ")[0]
    context = click.Context(cli)
    found = cli.get_command(context, command)
    assert found is not None
    for parameter in found.get_params(click.Context(found, parent=context)):
        if isinstance(parameter, click.Option) and not parameter.hidden:
            assert all(opt in page for opt in (*parameter.opts, *parameter.secondary_opts))


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
