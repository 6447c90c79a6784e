"""What is typed in a chat, and conversations as files."""

import json
import os
from pathlib import Path

import pytest

from moepack.formats.errors import SourceError
from moepack.tools.chat_input import COMMANDS, help_text, is_open, parse
from moepack.tools.chat_saved import load_conversation, save_conversation

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Zwölf\nBoxkämpfer?"},
    {"role": "assistant", "content": "Ja.", "reasoning_content": "Hm."},
]


@pytest.mark.parametrize(
    ("typed", "command", "text"),
    [
        ("  hello there ", None, "hello there"),
        ("", None, ""),
        ("/clear", "/clear", ""),
        ("/set temp  0.7", "/set", "temp  0.7"),
        ("/nothing at all", "/nothing", "at all"),
        ("/bye", "/exit", ""),
        ("/?", "/help", ""),
        ('"""one line"""', None, "one line"),
        ('"""\nfirst\n  second\n"""', None, "first\n  second"),
        ('"""first\nsecond"""  ', None, "first\nsecond"),
        ('"""/clear is text here"""', None, "/clear is text here"),
        ('/system """two\nlines"""', "/system", "two\nlines"),
        ('/set system """two\nlines"""', "/set", "system two\nlines"),
        ('what is """ in Python?', None, 'what is """ in Python?'),
        ('"""never closed', None, "never closed"),
    ],
)
def test_a_typed_text_is_a_message_or_a_command(typed: str, command: str | None, text: str) -> None:
    assert parse(typed) == (command, text)


@pytest.mark.parametrize(
    ("typed", "is_it"),
    [
        ("hello", False),
        ('"""', True),
        ('"""a\nb', True),
        ('"""a\nb"""', False),
        ('""""""', False),
        ('/system """a', True),
        ('what is """ in Python?', False),
        ('"""a""" and more', True),
    ],
)
def test_quotes_keep_a_text_open_until_a_line_ends_with_quotes(typed: str, is_it: bool) -> None:
    assert is_open(typed) == is_it


def test_help_names_every_command_and_setting() -> None:
    text = help_text(["temp", "seed"])
    assert all(command in text for command in COMMANDS)
    assert "temp, seed" in text


def test_a_saved_conversation_comes_back(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    save_conversation(file, CONVERSATION)
    assert load_conversation(file) == CONVERSATION
    assert json.loads(file.read_text(encoding="utf-8")) == CONVERSATION


def test_a_saved_conversation_is_replaced_and_nothing_else_left(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    save_conversation(file, CONVERSATION)
    save_conversation(file, CONVERSATION[:1])
    assert load_conversation(file) == CONVERSATION[:1]
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("content", ["", "text", "{}", '[{"role": "user"}]', '["a"]'])
def test_a_file_that_is_no_conversation_is_not_replaced(content: str, tmp_path: Path) -> None:
    file = tmp_path / "notes.json"
    file.write_text(content)
    with pytest.raises(SourceError, match=r"notes\.json: not a saved conversation.*not replaced"):
        save_conversation(file, CONVERSATION)
    assert file.read_text() == content


def test_a_conversation_that_cannot_be_written_is_an_error_naming_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(SourceError, match="no such folder"):
        save_conversation(tmp_path / "none" / "c.json", CONVERSATION)
    monkeypatch.setattr(Path, "write_text", no_room)
    with pytest.raises(SourceError, match=r"c\.json: not saved \(No space left on device\)"):
        save_conversation(tmp_path / "c.json", CONVERSATION)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\xff\xfe", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b'{"role": "user"}', "no list of messages"),
        (b"[7]", "message 0: wanted are role, content"),
        (b'[{"role": "user", "content": "a", "name": "b"}]', "wanted are role, content"),
        (b'[{"role": "user", "content": 7}]', "its values are no text"),
        (b'[{"role": "user", "content": null}]', "its values are no text"),
        (b'[{"role": "user", "content": "\\ud800"}]', "not valid UTF-8"),
        (b'[{"role": "tool", "content": "a"}]', "a role is system, user, assistant"),
        (
            b'[{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]',
            "message 1: a system message comes first",
        ),
    ],
)
def test_a_file_that_is_no_conversation_is_refused_with_the_reason(
    content: bytes, reason: str, tmp_path: Path
) -> None:
    file = tmp_path / "c.json"
    file.write_bytes(content)
    with pytest.raises(SourceError, match="not a saved conversation") as raised:
        load_conversation(file)
    assert reason in str(raised.value)


def test_what_is_no_regular_file_is_refused_without_being_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "fifo"):
        with pytest.raises(SourceError, match="not a file"):
            load_conversation(path)
        with pytest.raises(SourceError, match="not a file"):
            save_conversation(path, CONVERSATION)
    with pytest.raises(SourceError, match="No such file"):
        load_conversation(tmp_path / "none")
