"""Conversations as files: a JSON list of messages, as OpenAI's API and chat templates have them."""

import json
import stat
from pathlib import Path

from moepack.formats.errors import SourceError
from moepack.formats.whole import whole_file
from moepack.tools.options import check_save_path, checked_text

__all__ = ["Message", "load_conversation", "save_conversation"]

Message = dict[str, str]  # role, content, and of an answer perhaps reasoning_content

ROLES = ("system", "user", "assistant")
FIELDS = {"role", "content", "reasoning_content"}
MAX_NBYTES = 2**26  # no context is so long


def save_conversation(path: Path, messages: list[Message]) -> None:
    """Write the file, whole or not at all. Raises SourceError.

    A file that is there is replaced only if it is a saved conversation too.
    """
    check_save_path(path)
    if path.exists():
        try:
            load_conversation(path)
        except SourceError as error:
            raise SourceError(f"{error}; not replaced") from error
    text = json.dumps(messages, ensure_ascii=False, indent=2)
    try:
        with whole_file(path) as unfinished:
            unfinished.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise SourceError(f"{path}: not saved ({error.strerror or error})") from error


def load_conversation(path: Path) -> list[Message]:
    """The messages of a file. Raises SourceError for one that is no saved conversation."""
    try:
        if not stat.S_ISREG((status := path.stat()).st_mode):
            raise SourceError(f"{path}: not a file")
        if status.st_size > MAX_NBYTES:
            raise SourceError(f"{path}: too big for a saved conversation")
        messages = json.loads(path.read_text(encoding="utf-8"))
    except SourceError:
        raise
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path}: not a saved conversation (no JSON: {error})") from error
    if not isinstance(messages, list):
        raise SourceError(f"{path}: not a saved conversation (no list of messages)")
    for number, message in enumerate(messages):
        problem = _problem(message, number)
        if problem is not None:
            raise SourceError(f"{path}: not a saved conversation (message {number}: {problem})")
    return messages


def _problem(message: object, number: int) -> str | None:
    """What is wrong with a message, if anything is."""
    if not isinstance(message, dict) or not {"role", "content"} <= message.keys() <= FIELDS:
        return "wanted are role, content and perhaps reasoning_content"
    for value in message.values():
        if not isinstance(value, str):
            return "its values are no text"
        try:
            checked_text(value)
        except ValueError as error:
            return str(error)
    if message["role"] not in ROLES:
        return f"a role is {', '.join(ROLES)}"
    if message["role"] == "system" and number > 0:
        return "a system message comes first"
    return None
