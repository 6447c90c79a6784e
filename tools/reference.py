"""The page of all help texts, `tools/COMMANDS.md`, made from the commands themselves.

python -m moepack.tools.reference > tools/COMMANDS.md
"""

from typing import Any

import click

from moepack.tools.cli import COMMANDS, cli

__all__ = ["reference_page"]


def reference_page() -> str:
    """Markdown: the list of subcommands, then a section with the help of each."""
    width: dict[str, Any] = {"terminal_width": 90}
    context = click.Context(cli, info_name="moepack", **width, **cli.context_settings)
    parts = [
        "# Commands\n\nMade by `python -m moepack.tools.reference`. Exit codes: 0 done, 1 failed "
        "or different,\n2 usage, 130 interrupted. Answers and results go to stdout, everything "
        "else to stderr.\n"
    ]
    parts.append(f"\n```text\n{cli.get_help(context)}\n```\n")
    for name in COMMANDS:
        command = cli.get_command(context, name)
        assert command is not None
        child = click.Context(command, info_name=name, parent=context, **width)
        parts.append(f"\n## {name}\n\n```text\n{command.get_help(child)}\n```\n")
    return "".join(parts)


if __name__ == "__main__":
    click.echo(reference_page(), nl=False)
