"""The command as a whole: help, exit codes, one-line errors."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
import tiny_models

from moepack.tools.cli import COMMANDS, cli, main
from moepack.tools.completion import COMPLETE_VARIABLE, SHELLS
from moepack.tools.help import EXAMPLES, OPTION_GROUPS


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The last line on stderr; there must be no traceback."""
    err = capsys.readouterr().err
    assert "Traceback" not in err
    return err.strip().splitlines()[-1]


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)])
def test_help_is_printed_without_importing_mlx(command: tuple[str, ...]) -> None:
    script = (
        "import sys; from moepack.tools.cli import main; "
        f"code = main({[*command, '--help']!r}); "
        "assert not {'mlx', 'mlx.core', 'mlx_lm', 'transformers'} & set(sys.modules); "
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Usage: moepack" in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_of_its_own(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines[2].strip()) > 10  # the first line of its docstring


def help_page(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """A command's help on a terminal of 100 columns."""
    assert main([command, "--help"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_a_screen(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`run` has most options of all."""
    for columns, most, most_of_run in ((100, 45, 54), (80, 50, 56)):
        monkeypatch.setenv("COLUMNS", str(columns))
        n_lines = len(help_page(command, capsys).splitlines())
        assert n_lines <= (most_of_run if command == "run" else most)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_ends_with_examples_whose_options_it_has(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    page, examples = help_page(command, capsys).split("\n  Examples:\n")
    lines = [line.strip() for line in examples.strip().splitlines()]
    assert lines == list(EXAMPLES[command])
    for line in lines:
        assert line.startswith(f"moepack {command}")
        assert all(re.search(rf"{o}\b", page) for o in re.findall(r" (--?[a-z-]+)", line))


def test_every_option_group_has_options() -> None:
    """No option of a group is one that no command has any more."""
    context = click.Context(cli)
    commands = [cli.get_command(context, name) for name in COMMANDS]
    opts = {opt for c in commands if c for p in c.get_params(click.Context(c)) for opt in p.opts}
    assert {name for names in OPTION_GROUPS.values() for name in names} <= opts


def test_commands_are_listed_in_groups_of_one_line_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["--help"]) == 0
    page = capsys.readouterr().out
    assert "Packing:\n  plan  " in page
    lines = page.split("Packing:")[1].splitlines()
    listed = [line.split()[0] for line in lines if re.match(r"  \w+  ", line)]
    assert listed == list(COMMANDS)
    assert len([line for line in lines if line.startswith("  ")]) == len(COMMANDS) + 1  # epilog


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_prints_clicks_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "moepack" in script
    assert f"{COMPLETE_VARIABLE}={shell}_complete" in script


@pytest.mark.parametrize(
    ("words", "completed"), [("insp", "inspect"), ("run --te", "--temp"), ("serve --ho", "--host")]
)
def test_the_command_answers_the_script(words: str, completed: str) -> None:
    asked = f"moepack {words}"
    done = subprocess.run(
        [sys.executable, "-m", "moepack.tools"],
        env={
            **os.environ,
            COMPLETE_VARIABLE: "bash_complete",
            "COMP_WORDS": asked,
            "COMP_CWORD": str(len(asked.split()) - 1),
        },
        capture_output=True,
        text=True,
    )
    assert done.stdout == f"plain,{completed}\n"


def test_an_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pack"]) == 2
    assert "No such command 'pack'" in last_line(capsys)


@pytest.mark.parametrize("command", ["run", "verify", "inspect"])
def test_a_pack_that_does_not_exist_is_one_line_and_exit_1(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [command, str(tmp_path / "none")] + (["-p", "x"] if command == "run" else [])
    assert main(arguments) == 1
    assert f"{tmp_path / 'none'}: no such folder" in last_line(capsys)


@pytest.mark.parametrize("command", ["run", "verify", "inspect"])
def test_a_checkpoint_in_place_of_a_pack_is_told_to_be_converted(
    command: str, q4_source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [command, str(q4_source)] + (["-p", "x"] if command == "run" else [])
    assert main(arguments) == 1
    assert "run moepack convert on it first" in last_line(capsys)


@pytest.mark.parametrize("command", ["run", "verify", "inspect"])
@pytest.mark.parametrize("file", ["experts/00001.bin", "shared.bin", "config.json"])
def test_a_missing_file_is_named_by_every_command(
    command: str, file: str, q4_pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pack = tmp_path / "p.moepack"
    shutil.copytree(q4_pack, pack)
    (pack / file).unlink()
    assert main([command, str(pack)] + (["-p", "x"] if command == "run" else [])) == 1
    assert f"{pack / file}: no such file" in last_line(capsys)


@pytest.mark.parametrize("command", ["run", "verify", "inspect"])
@pytest.mark.parametrize("file", ["experts/00001.bin", "shared.bin", "manifest.msgpack"])
def test_a_cut_file_is_named_by_every_command(
    command: str, file: str, q4_pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pack = tmp_path / "p.moepack"
    shutil.copytree(q4_pack, pack)
    (pack / file).write_bytes((pack / file).read_bytes()[:-100])
    assert main([command, str(pack)] + (["-p", "x"] if command == "run" else [])) == 1
    assert str(pack / file) in last_line(capsys)


def test_debug_adds_a_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path / "none"), "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupt_exits_130_without_a_traceback(
    q4_pack: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("moepack.tools.inspect.describe", interrupt)
    assert main(["inspect", str(q4_pack)]) == 130
    assert last_line(capsys) == "moepack: interrupted"


def test_a_closed_pipe_ends_quietly(q4_pack: Path) -> None:
    done = subprocess.run(
        f"{sys.executable} -m moepack.tools inspect {q4_pack} | true",
        shell=True,
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""


def test_inspect_states_layers_experts_and_bits(
    q4_pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(q4_pack)]) == 0
    out = capsys.readouterr().out
    assert "experts  2 modules" in out
    row = next(line for line in out.splitlines() if line.startswith("experts/00000.bin"))
    assert row.split()[1] == "16"
    assert row.split()[-2:] == ["4", "model.layers.1.mlp.switch_mlp"]


def test_convert_names_the_pack_after_the_source(
    q4_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["convert", str(q4_source)]) == 0
    assert (tmp_path / "q4.moepack" / "manifest.msgpack").is_file()
    assert [p.name for p in tmp_path.iterdir()] == ["q4.moepack"]


def test_convert_dry_run_writes_nothing(
    q4_source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(q4_source), str(tmp_path / "p"), "--dry-run"]) == 0
    assert "nothing was written" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_convert_of_a_dense_model_is_refused_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tiny_models.write_checkpoint(tmp_path / "dense", tiny_models.QWEN3_DENSE)
    assert main(["convert", str(source), str(tmp_path / "p")]) == 1
    assert "no expert module" in last_line(capsys)
    assert [p.name for p in tmp_path.iterdir()] == ["dense"]


def test_convert_to_an_existing_destination_is_refused(
    q4_source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p").mkdir()
    assert main(["convert", str(q4_source), str(tmp_path / "p")]) == 1
    assert "exists" in last_line(capsys)


def test_quantization_options_without_q_are_a_usage_error(
    q4_source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(q4_source), str(tmp_path / "p"), "--q-bits", "4"]) == 2
    assert "need -q" in last_line(capsys)
