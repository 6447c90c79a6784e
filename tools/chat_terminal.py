"""Typing on a terminal: line editing, history and completion, by prompt_toolkit.

Drawn on stderr: stdout has the answers alone.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import Input
from prompt_toolkit.input.typeahead import get_typeahead, store_typeahead
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import Output
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.shortcuts import CompleteStyle

from moepack.runtime.user_cache import cache_folder
from moepack.tools.chat_input import COMMANDS, TAKEN_BACK, is_open
from moepack.tools.reporting import note

__all__ = ["HOW_TO_LEAVE", "open_history", "terminal_reader"]

HOW_TO_LEAVE = "Ctrl-D or /exit leaves."
FILE_COMMANDS = ("/save", "/load")


def terminal_reader(
    settings: Iterable[str],
    *,
    history: History | None = None,
    input: Input | None = None,
    output: Output | None = None,
) -> Callable[[], str]:
    """A function that reads what is typed next, until Enter. `settings`: the names /set knows.

    It raises EOFError for Ctrl-D. Ctrl-C drops what was typed, or says how to leave. `history`,
    `input` and `output` stand for the user's own.
    """
    session: PromptSession[str] = PromptSession(
        "> ",
        multiline=True,  # so that pasted lines stay together; Enter is bound below
        prompt_continuation="... ",
        key_bindings=_bindings(),
        history=open_history() if history is None else history,
        completer=ChatCompleter(settings),
        complete_while_typing=False,
        complete_style=CompleteStyle.READLINE_LIKE,
        enable_suspend=True,
        input=input,
        output=_stderr() if output is None else output,
    )

    def read() -> str:
        while True:
            try:
                text = session.prompt()
            except KeyboardInterrupt:
                if not session.default_buffer.text:
                    note(HOW_TO_LEAVE)
                continue
            if not _is_stopped(session):
                return text
            note(TAKEN_BACK)

    return read


def _is_stopped(session: PromptSession[str]) -> bool:
    """Whether Ctrl-C came right after Enter: a key still, no signal yet. What precedes it is lost.

    Other keys stay for the next prompt.
    """
    keys = get_typeahead(session.input)
    with session.input.raw_mode():
        keys += session.input.read_keys()
    keys += session.app.key_processor.empty_queue()
    stops = [i for i, press in enumerate(keys) if press.key in (Keys.ControlC, Keys.SIGINT)]
    store_typeahead(session.input, keys[stops[-1] + 1 :] if stops else keys)
    return bool(stops)


def open_history() -> History:
    """What was typed in past chats, in a file that only its user can read.

    Where there can be none, that is said, and the history ends with the chat.
    """
    folder = cache_folder(sys.platform, os.environ)
    if folder is None:
        return InMemoryHistory()
    path = folder / "chat_history"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600))
        path.chmod(0o600)
    except OSError as error:
        note(f"warning: what is typed is not remembered ({path}: {error.strerror})")
        return InMemoryHistory()
    return KeptHistory(path)


class KeptHistory(FileHistory):
    """A file; what cannot be written to it is kept in memory, and that is said."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)

    def store_string(self, string: str) -> None:
        """Append to the file."""
        try:
            super().store_string(string)
        except OSError as error:
            note(f"warning: {self.filename!s} was not written ({error.strerror})")


class ChatCompleter(Completer):
    """Names of commands, of what /set knows, and of files."""

    def __init__(self, settings: Iterable[str]) -> None:
        self._settings = sorted(settings)
        self._files = PathCompleter(expanduser=True)

    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterator[Completion]:
        """What the word before the cursor may become; nothing within a message."""
        text = document.text_before_cursor
        command, space, rest = text.partition(" ")
        if not text.startswith("/"):
            return
        if not space:
            yield from _beginning(command, COMMANDS)
        elif command == "/set" and " " not in rest:
            yield from _beginning(rest, self._settings)
        elif command in FILE_COMMANDS:
            yield from self._files.get_completions(Document(rest), complete_event)


def _beginning(word: str, names: Iterable[str]) -> Iterator[Completion]:
    """The names that begin with a word, to take its place."""
    return (Completion(name, -len(word)) for name in names if name.startswith(word))


def _bindings() -> KeyBindings:
    """Enter sends, but not from within triple quotes; Alt-Enter begins a line anywhere."""
    bindings = KeyBindings()
    typing = has_focus(DEFAULT_BUFFER)

    @bindings.add("enter", filter=typing)
    def enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if is_open(buffer.text):
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter", filter=typing)
    def begin_line(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    return bindings


def _stderr() -> Output:
    output = Vt100_Output.from_pty(sys.stderr, term=os.environ.get("TERM"))
    # Asked where the cursor is, a slow terminal would answer into the next line typed.
    output.enable_cpr = False
    return output
