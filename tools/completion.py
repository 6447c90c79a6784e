"""`moepack completion`: click's own script that completes commands and options in a shell."""

import click

from moepack.tools.options import debug_option

__all__ = ["COMPLETE_VARIABLE", "SHELLS", "command"]

SHELLS = ("bash", "zsh", "fish")
COMPLETE_VARIABLE = "_MOEPACK_COMPLETE"  # by which the script asks the command


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
@debug_option
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print the script that completes commands and options in a shell."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None  # click has one for each of SHELLS
    click.echo(kind(ctx.find_root().command, {}, "moepack", COMPLETE_VARIABLE).source())
