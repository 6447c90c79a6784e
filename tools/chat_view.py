"""An answer on the screen, and as the turn of a conversation: what is thought apart from what is
said, by mlx-lm's own parser of it."""

import json
from collections.abc import Callable

import click

from moepack.tools.chat_saved import Message
from moepack.tools.serving.parsing import Delta, Parser

__all__ = ["AnswerView"]


class AnswerView:
    """Takes an answer's text as it comes, and hands on to `write` what is to be seen of it.

    Thinking is dimmed, or with `show_thinking=False` left out.
    """

    def __init__(
        self, parser: Parser, write: Callable[[str], object], *, show_thinking: bool
    ) -> None:
        self._parser = parser
        self._write = write
        self._shows_thinking = show_thinking
        self._thought = ""
        self._said = ""

    def feed(self, text: str) -> None:
        """More of the answer."""
        self._enter(self._parser.feed(text))

    def end(self) -> None:
        """There is no more: what was held back, in case it was a mark, is text."""
        self._enter(self._parser.end("stop")[0])

    @property
    def is_empty(self) -> bool:
        """Whether nothing was thought or said."""
        return not (self._thought or self._said)

    def message(self) -> Message:
        """The turn. The templates of models that think leave out what was thought in past turns."""
        message = {"role": "assistant", "content": self._said}
        if self._thought:
            message["reasoning_content"] = self._thought
        return message

    def _enter(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            if "reasoning_content" in delta:
                self._think(delta["reasoning_content"])
            elif "tool_calls" in delta:  # nobody gave the model tools: shown, not called
                self._say(json.dumps(delta["tool_calls"], ensure_ascii=False))
            else:
                self._say(delta["content"])

    def _think(self, text: str) -> None:
        if not self._thought:
            text = text.lstrip("\n")
        self._thought += text
        if self._shows_thinking and text:
            self._write(click.style(text, dim=True))

    def _say(self, text: str) -> None:
        if self._thought and not self._said:
            text = text.lstrip("\n")
            if text and self._shows_thinking:
                self._write("\n" if self._thought.endswith("\n") else "\n\n")
        self._said += text
        if text:
            self._write(text)
