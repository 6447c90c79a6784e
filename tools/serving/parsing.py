"""Thinking and tool calls taken out of an answer's text, by mlx-lm's own parsers."""

from typing import Any

from mlx_lm.generate import TextStateMachine, make_text_state_machine
from mlx_lm.server import ToolCallFormatter
from mlx_lm.tokenizer_utils import TokenizerWrapper

__all__ = ["ChatParser", "Delta", "Parser", "merged"]

Delta = dict[str, Any]  # of OpenAI's: content, reasoning_content, tool_calls


class Parser:
    """The text as it comes, for requests that are no chats."""

    def feed(self, text: str) -> list[Delta]:
        """What a piece of text adds."""
        return [{"content": text}]

    def end(self, reason: str) -> tuple[list[Delta], str]:
        """(what was held back, why the answer ended)."""
        return [], reason


class ChatParser(Parser):
    """A chat's: what is thought, and what is called, is told apart from what is said."""

    def __init__(
        self, tokenizer: TokenizerWrapper, prompt: list[int], tools: list[Any], is_stream: bool
    ) -> None:
        self._state = make_text_state_machine(tokenizer).make_state(_first(tokenizer, prompt))
        self._calls_of = ToolCallFormatter(tokenizer.tool_parser, tools or None, is_stream)
        self._call = ""
        self._has_called = False

    def feed(self, text: str) -> list[Delta]:
        """See Parser."""
        self._state, segments = TextStateMachine.split(self._state, text)
        return [delta for segment in segments for delta in self._enter(*segment)]

    def end(self, reason: str) -> tuple[list[Delta], str]:
        """See Parser. An answer that ended by calling a tool says so."""
        self._state, text, name = TextStateMachine.flush(self._state)
        deltas = [*self._enter(name, text), *self._end_call()]
        return deltas, "tool_calls" if self._has_called and reason == "stop" else reason

    def _enter(self, name: str, text: str) -> list[Delta]:
        """What text in a state adds; a call is complete when its state is left."""
        deltas = self._end_call() if name != "tool" else []
        if name == "tool":
            self._call += text
        elif text:
            deltas.append({"reasoning_content" if name == "reasoning" else "content": text})
        return deltas

    def _end_call(self) -> list[Delta]:
        text, self._call = self._call, ""
        if not text.strip():
            return []
        try:
            calls = self._calls_of([text])
        except Exception:  # parsers of many models' formats raise anything
            calls = []
        if not calls:
            return [{"content": text}]  # no call that could be understood: shown, not lost
        self._has_called = True
        return [{"tool_calls": calls}]


def merged(deltas: list[Delta]) -> Delta:
    """All of them as one."""
    whole: Delta = {}
    for delta in deltas:
        for name, value in delta.items():
            whole[name] = whole[name] + value if name in whole else value
    return whole


def _first(tokenizer: TokenizerWrapper, prompt: list[int]) -> str:
    """The state that an answer begins in: thinking, if the prompt opened a thought."""
    state = "normal"
    if tokenizer.has_thinking:
        opened = tokenizer.rfind_think_start(prompt)
        if opened > tokenizer.rfind_think_end(prompt):
            state = "reasoning"
    return tokenizer.response_initial_state or state
