"""The `moepack` command: its group, its exit codes, its one-line errors.

Command modules import MLX and the models inside their functions, so that help needs neither.
"""

import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

import click
from click.shell_completion import shell_complete

from moepack.formats.errors import MoepackError
from moepack.tools.completion import COMPLETE_VARIABLE
from moepack.tools.help import COMMAND_GROUPS, MAX_WIDTH, HelpfulCommand, write_commands
from moepack.tools.options import DEBUG_KEY
from moepack.tools.startup import open_files_problem

__all__ = ["COMMANDS", "cli", "main"]

COMMANDS = tuple(name for names in COMMAND_GROUPS.values() for name in names)


class CommandGroup(click.Group):
    """Finds a subcommand as `command` in the module of its name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The subcommands, group by group."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The subcommand of this name, or None."""
        if cmd_name not in COMMANDS:
            return None
        command = import_module(f"moepack.tools.{cmd_name}").command
        assert isinstance(command, click.Command)
        return HelpfulCommand(command)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The subcommands in groups."""
        commands = ((name, self.get_command(ctx, name)) for name in COMMANDS)
        write_commands(formatter, [(name, found) for name, found in commands if found is not None])


@click.group(
    cls=CommandGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": MAX_WIDTH},
    epilog="moepack COMMAND --help has each command's options and examples.",
)
@click.version_option(package_name="moepack")
def cli() -> None:
    """Run Mixture-of-Experts language models bigger than memory, bit for bit."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0 done, 1 failed, 2 usage, 130 interrupted."""
    context = None
    if sys.stdout is None:  # by whoever started us
        return _fail("stdout is closed: no answer could be given", context)
    try:
        if arguments is None and (instruction := os.environ.get(COMPLETE_VARIABLE)):
            return shell_complete(cli, {}, "moepack", COMPLETE_VARIABLE, instruction)
        args = list(sys.argv[1:] if arguments is None else arguments)
        context = cli.make_context("moepack", args)
        with context:
            result = cli.invoke(context)
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        click.echo("moepack: interrupted", err=True)
        return 130
    except BrokenPipeError:
        # The reader of our output has left; keep the interpreter from failing again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except MoepackError as error:
        return _fail(str(error), context)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"{where}{error.strerror or error}", context)
    except MemoryError:
        return _fail("out of memory; give a smaller --memory", context)
    except Exception as error:
        from_setrlimit = isinstance(error, ValueError) and "maximum limit" in str(error)
        if from_setrlimit and (problem := open_files_problem()) is not None:
            return _fail(problem, context)
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return _fail(f"unexpected {text} (--debug shows where)", context)


def _fail(text: str, context: click.Context | None) -> int:
    if context is not None and context.meta.get(DEBUG_KEY):
        traceback.print_exc()
    click.echo(f"moepack: error: {' '.join(text.split())}", err=True)
    return 1
