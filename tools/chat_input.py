"""What is typed in a chat: a message, perhaps of several lines between triple quotes, or a command.

Knows no terminal and no model.
"""

import sys
from collections.abc import Iterable
from typing import NamedTuple

import click

__all__ = [
    "COMMANDS",
    "EXIT",
    "TAKEN_BACK",
    "Typed",
    "help_text",
    "is_open",
    "parse",
    "plain_reader",
]

QUOTES = '"""'
EXIT = "/exit"
TAKEN_BACK = "Stopped before an answer began: the message is taken back."
COMMANDS = {  # what follows the command, and what it does
    "/help": ("", "shows this"),
    "/clear": ("", "forgets the conversation, but for the system message"),
    "/system": ("[TEXT]", 'sets the system message, or shows it; "" removes it'),
    "/set": ("[NAME VALUE]", "changes an option of this chat, or shows them all"),
    "/stats": ("", "what this chat has cost so far"),
    "/save": ("FILE", "writes the conversation, as a JSON list of messages"),
    "/load": ("FILE", "goes on with a conversation that was saved"),
    EXIT: ("", "leaves"),
}
ALIASES = {"/?": "/help", "/bye": EXIT, "/quit": EXIT}  # ollama's
KEYS = (
    ('"""', "begins a text of several lines, and ends it"),
    ("Ctrl-C", "stops an answer, or drops the line typed"),
    ("Ctrl-D", "leaves"),
)


class Typed(NamedTuple):
    """A command and what follows it; or no command and a message. `text` may be empty."""

    command: str | None
    text: str


def parse(typed: str) -> Typed:
    """What was meant. A word after `/` counts as a command, known or not; quoted text never."""
    before, quoted = _split(typed)
    before = before.strip()
    if not before.startswith("/"):
        return Typed(None, before if quoted is None else quoted)
    command, *rest = before.split(maxsplit=1)
    if quoted is not None:
        rest.append(quoted)
    return Typed(ALIASES.get(command, command), " ".join(rest))


def is_open(typed: str) -> bool:
    """Whether triple quotes were opened and have not been closed."""
    before, mark, after = typed.partition(QUOTES)
    return bool(mark) and _may_quote(before) and not after.rstrip().endswith(QUOTES)


def plain_reader() -> str:
    """Read from a terminal without editing. Raises EOFError at the end, KeyboardInterrupt."""
    typed = _line("> ")
    while is_open(typed):
        try:
            typed += "\n" + _line("... ")
        except EOFError:
            break
    return typed


def _line(mark: str) -> str:
    if sys.stderr.isatty():  # input() would put it on stdout, among the answers
        click.echo(mark, nl=False, err=True)
    return input("")


def help_text(settings: Iterable[str]) -> str:
    """All commands and keys, and the names that /set knows."""
    rows = [(f"{name} {what}".strip(), does) for name, (what, does) in COMMANDS.items()]
    lines = [f"  {left:20} {does}" for left, does in (*rows, *KEYS)]
    return "\n".join([*lines, f"/set knows {', '.join(settings)}."])


def _may_quote(before: str) -> bool:
    """Quotes open a text at the beginning or after a command; within a message they are text."""
    return before.strip() == "" or before.lstrip().startswith("/")


def _split(typed: str) -> tuple[str, str | None]:
    """(what precedes the quotes, what is in them); None without quotes."""
    before, mark, after = typed.partition(QUOTES)
    if not mark or not _may_quote(before):
        return typed, None
    if after.rstrip().endswith(QUOTES):
        after = after.rstrip().removesuffix(QUOTES)
    return before, after.removeprefix("\n").removesuffix("\n")
