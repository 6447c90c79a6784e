"""Typing in a chat: keys, history and completion, through prompt_toolkit's own pipe."""

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from moepack.tools.chat_input import TAKEN_BACK
from moepack.tools.chat_terminal import (
    HOW_TO_LEAVE,
    ChatCompleter,
    open_history,
    terminal_reader,
)

CTRL_C, CTRL_D, UP, ALT_ENTER = "\x03", "\x04", "\x1b[A", "\x1b\r"


@pytest.fixture
def keyboard() -> Iterator[Any]:
    """`keyboard.type(text)`, and `keyboard.reader()` for a reader of it."""
    with create_pipe_input() as pipe:

        def reader() -> Callable[[], str]:
            return terminal_reader(
                ["temp", "top_p"], history=open_history(), input=pipe, output=DummyOutput()
            )

        yield SimpleNamespace(type=pipe.send_text, reader=reader)


def test_enter_sends_a_line_and_the_cursor_moves_within_it(keyboard: Any) -> None:
    keyboard.type("wrld\x1b[D\x1b[D\x1b[Do\r")
    assert keyboard.reader()() == "world"


def test_enter_within_quotes_begins_a_line(keyboard: Any) -> None:
    keyboard.type('"""one\rtwo\r"""\r')
    assert keyboard.reader()() == '"""one\ntwo\n"""'


def test_lines_pasted_together_are_one_text(keyboard: Any) -> None:
    keyboard.type("\x1b[200~one\ntwo\x1b[201~\r")
    assert keyboard.reader()() == "one\ntwo"


def test_alt_enter_begins_a_line(keyboard: Any) -> None:
    keyboard.type(f"one{ALT_ENTER}two\r")
    assert keyboard.reader()() == "one\ntwo"


def test_ctrl_d_ends(keyboard: Any) -> None:
    keyboard.type(CTRL_D)
    with pytest.raises(EOFError):
        keyboard.reader()()


def test_ctrl_c_drops_the_line_and_a_second_says_how_to_leave(
    keyboard: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    read = keyboard.reader()
    keyboard.type(f"half a li{CTRL_C}whole\r")
    assert read() == "whole"
    assert capsys.readouterr().err == ""
    keyboard.type(f"half a li{CTRL_C}{CTRL_C}whole\r")
    assert read() == "whole"
    assert capsys.readouterr().err == f"{HOW_TO_LEAVE}\n"


def test_ctrl_c_right_after_enter_takes_back_what_was_sent_and_what_follows_stays(
    keyboard: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    keyboard.type(f"sent\rhalf{CTRL_C}next\rmore\r")
    read = keyboard.reader()
    assert [read(), read()] == ["next", "more"]
    assert capsys.readouterr().err == f"{TAKEN_BACK}\n"


def test_the_next_chat_remembers_what_was_typed_for_this_user_alone(keyboard: Any) -> None:
    read = keyboard.reader()
    keyboard.type('first\r"""a\rb"""\r')
    assert [read(), read()] == ["first", '"""a\nb"""']
    again = keyboard.reader()
    keyboard.type(f"{UP}\r")
    assert again() == '"""a\nb"""'
    file = Path(os.environ["XDG_CACHE_HOME"]) / "moepack" / "chat_history"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_history_that_others_could_read_is_closed_to_them() -> None:
    file = Path(os.environ["XDG_CACHE_HOME"]) / "moepack" / "chat_history"
    file.parent.mkdir()
    file.touch(0o666)
    file.chmod(0o666)
    open_history()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_without_a_place_for_it_the_history_lasts_as_long_as_the_chat(
    keyboard: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (Path(os.environ["XDG_CACHE_HOME"]) / "moepack").touch()
    assert isinstance(open_history(), InMemoryHistory)
    assert "what is typed is not remembered" in capsys.readouterr().err


def test_a_history_that_cannot_be_written_any_more_does_not_end_the_chat(
    keyboard: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    read = keyboard.reader()
    file = Path(os.environ["XDG_CACHE_HOME"]) / "moepack" / "chat_history"
    file.unlink()
    file.mkdir()
    keyboard.type("first\r")
    assert read() == "first"
    assert "chat_history was not written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        ("/s", ["/system", "/set", "/stats", "/save"]),
        ("/ex", ["/exit"]),
        ("/set t", ["temp", "top_p"]),
        ("/set temp ", []),
        ("/load f", ["ile.json"]),
        ("hello /s", []),
        ("", []),
    ],
)
def test_tab_completes_commands_settings_and_files(
    typed: str, wanted: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file.json").touch()
    monkeypatch.chdir(tmp_path)
    found = ChatCompleter(["temp", "top_p"]).get_completions(
        Document(typed), CompleteEvent(completion_requested=True)
    )
    assert [completion.text for completion in found] == wanted


def test_tab_completes_what_is_typed(keyboard: Any) -> None:
    keyboard.type("/he\t\r")
    assert keyboard.reader()() == "/help"
