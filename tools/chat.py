"""A chat: what is typed is answered or obeyed, and the conversation and its KV cache are kept."""

import signal
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import click
import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from moepack.formats.errors import BudgetError, MoepackError, SourceError
from moepack.formats.sizes import format_size
from moepack.runtime.counters import Counters
from moepack.runtime.loading import Engine
from moepack.tools import answering
from moepack.tools.answering import Answer, PromptStopped, Sampling
from moepack.tools.chat_input import COMMANDS, EXIT, TAKEN_BACK, help_text, parse
from moepack.tools.chat_saved import Message, load_conversation, save_conversation
from moepack.tools.chat_view import AnswerView
from moepack.tools.options import checked_text
from moepack.tools.prefixes import Prefixes, cut_back
from moepack.tools.reporting import note, peak_memory

__all__ = ["Chat", "ViewMaker"]

# For an answer to a prompt of these tokens, with thinking shown or not.
ViewMaker = Callable[[list[int], bool], AnswerView]
# The prompt cache to begin with, as open_prompt_cache gives it.
CacheOpener = Callable[[list[int]], tuple[dict[str, Any], int]]


class Chat:
    """A conversation with a loaded pack.

    `tokens_of` gives the prompt of a conversation, `view_of` what shows the answer to it,
    `open_cache` the cache where none was kept. `settings` makes a value that an option of the
    command accepts out of a text, by the option's name. Memory is planned for `context` tokens;
    None: past tokens are dropped before there are too many.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: TokenizerWrapper,
        sampling: Sampling,
        *,
        tokens_of: Callable[[list[Message]], list[int]],
        view_of: ViewMaker,
        open_cache: CacheOpener,
        settings: Mapping[str, Callable[[str], Any]],
        values: dict[str, Any],
        context: int | None,
        system: str | None,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._tokens_of = tokens_of
        self._view_of = view_of
        self._open_cache = open_cache
        self._settings = settings
        self._values = values
        self._context = context
        self._prefixes = Prefixes(engine.plan.kv)
        self._n_answers = 0
        self._n_tokens = 0
        self.messages: list[Message] = []
        self._set_system(system)

    def run(self, read: Callable[[], str], *, interrupts_end: bool) -> None:
        """Answer what `read` gives until it raises EOFError, or /exit is typed.

        `interrupts_end`: Ctrl-C while nothing is answered ends the chat, by KeyboardInterrupt.
        """
        while True:
            try:
                command, text = parse(_readable(read()))
                if command == EXIT and not text:
                    return
                if command is not None:
                    self._obey(command, text)
                elif text:
                    self._answer(text)
            except EOFError:
                return
            except KeyboardInterrupt:
                if interrupts_end:
                    raise
                note(TAKEN_BACK)
            except MoepackError as error:
                note(" ".join(f"error: {error}".split()))

    def _obey(self, command: str, text: str) -> None:
        """Do what a command says. Raises SourceError for one that cannot be done."""
        if command not in COMMANDS:
            raise SourceError(
                f'there is no {command}; /help lists what there is, and """ begins any text'
            )
        if text and COMMANDS[command][0] == "":
            raise SourceError(f"nothing follows {command}")
        if command in ("/save", "/load"):
            if not text:
                raise SourceError(f"{command} needs the name of a file")
            self._save_or_load(command, text)
        elif command == "/set":
            self._set(text)
        elif command == "/system":
            self._show_or_set_system(text)
        elif command == "/clear":
            self.messages = self._system()
            note("The conversation is forgotten.")
        elif command == "/stats":
            note(self._statistics())
        else:
            note(help_text(["system", *self._settings]))

    def _save_or_load(self, command: str, name: str) -> None:
        try:
            path = Path(name).expanduser()
        except RuntimeError as error:
            raise SourceError(f"{name}: {error}") from error
        if "\0" in name:
            raise SourceError(f"{command}: a null byte in the file's name")
        if command == "/save":
            save_conversation(path, self.messages)
            note(f"Saved {len(self.messages)} messages to {path}.")
        else:
            self.messages = load_conversation(path)
            note(f"Goes on after {len(self.messages)} messages of {path}.")

    def _set(self, text: str) -> None:
        """Change an option as the command line would, or show them all."""
        if not text:
            note("\n".join(f"  {name:20} {_shown(v)}" for name, v in self._values.items()))
            return
        name, _, given = text.partition(" ")
        name, given = name.replace("-", "_"), given.strip()
        if name == "system":
            self._show_or_set_system(given)
            return
        if name not in self._settings:
            raise SourceError(f"there is no {name}; /set knows system, {', '.join(self._settings)}")
        if not given:
            note(f"{name} is {_shown(self._values[name])}")
            return
        try:
            value = self._settings[name](given)
        except click.BadParameter as error:
            raise SourceError(f"/set {name}: {error.message}") from error
        self._values[name] = value
        if name == "seed":
            mx.random.seed(value)
        elif name in asdict(self._sampling):
            self._sampling = replace(self._sampling, **{name: value})
        note(f"{name} is {value}")

    def _system(self) -> list[Message]:
        return [m for m in self.messages[:1] if m["role"] == "system"]

    def _set_system(self, text: str | None) -> None:
        rest = self.messages[len(self._system()) :]
        first = [] if text is None else [{"role": "system", "content": text}]
        self.messages = [*first, *rest]

    def _show_or_set_system(self, text: str) -> None:
        if text:
            self._set_system(None if text == '""' else text)
        system = self._system()
        note(f"The system message is: {system[0]['content']}" if system else "No system message.")

    def _answer(self, text: str) -> None:
        """Answer a message. One that no answer was begun to is no part of the conversation."""
        messages = [*self.messages, {"role": "user", "content": text}]
        tokens = self._tokens_of(messages)
        sampling = self._within_context(len(tokens))
        cache, n_cached = self._prefixes.take(tokens)
        options: dict[str, Any] = {}
        if cache is None:
            self._prefixes.make_room(self._engine.plan.kv)  # of one conversation, no more
            options, n_cached = self._open_cache(tokens)
            cache = options.pop("prompt_cache", None)
        if cache is None:
            cache = make_prompt_cache(self._engine.model, sampling.max_kv_size)
        view = self._view_of(tokens, self._values["show_thinking"])
        before = self._engine.counters()
        result: Answer | None
        try:
            with Interrupts() as interrupts:
                result = answering.answer(
                    self._engine,
                    self._tokenizer,
                    tokens,
                    sampling,
                    view.feed,
                    n_cached=n_cached,
                    is_stopped=lambda: interrupts.is_asked,
                    prompt_cache=cache,
                    **options,
                )
            # By the time a token is given, mlx-lm has run it already: the cache holds it.
            self._prefixes.put([*tokens, *result.tokens], len(tokens), cache)
        except PromptStopped as stopped:
            result = None
            if cut_back(cache, stopped.n_read):
                self._prefixes.put(tokens[: stopped.n_read], stopped.n_read, cache)
        except KeyboardInterrupt:
            result = None  # in the midst of a token: the cache is not whole, and dropped
        finally:
            view.end()
            click.echo()
        if view.is_empty and (result is None or result.finish_reason == "interrupted"):
            note(TAKEN_BACK)
            return
        self.messages = [*messages, view.message()]
        if result is not None:
            self._report(result, before)

    def _report(self, result: Answer, before: tuple[Counters, Counters]) -> None:
        self._n_answers += 1
        self._n_tokens += result.n_tokens
        figures = answering.statistics(self._engine, result, 0.0, before)
        note(answering.statistics_line(figures))
        if result.finish_reason == "length":
            note(f"The answer was cut at {result.n_tokens} tokens: see /set max_tokens.")

    def _within_context(self, n_tokens: int) -> Sampling:
        """The options of an answer that memory was planned for. Raises BudgetError without any."""
        if self._context is None:
            return self._sampling
        room = self._context - n_tokens
        if room < 1:
            raise BudgetError(
                f"the conversation has {n_tokens} tokens, and memory was planned for --context "
                f"{self._context}; /clear begins another"
            )
        return self._sampling.within(room)

    def _statistics(self) -> str:
        """What the chat has cost so far, for a person."""
        prefill, decode = self._engine.counters()
        n_hits, n_misses = prefill.hits + decode.hits, prefill.misses + decode.misses
        parts = [f"{self._n_answers} answers of {self._n_tokens} tokens"]
        if n_hits + n_misses:
            n_read = format_size(prefill.bytes_read + decode.bytes_read)
            parts.append(f"hit rate {100 * n_hits / (n_hits + n_misses):.1f} %, {n_read} read")
        parts.append(f"{format_size(self._prefixes.nbytes)} of KV cache")
        planned = format_size(self._engine.plan.total)
        parts.append(f"peak memory {format_size(peak_memory())} (planned {planned})")
        return "; ".join(parts)


def _shown(value: object) -> str:
    return "not set" if value is None else str(value)


def _readable(text: str) -> str:
    try:
        return checked_text(text)
    except ValueError as error:
        raise SourceError(f"this line is {error}") from error


class Interrupts:
    """Ctrl-C during an answer: the first asks it to end, the next raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.is_asked = False

    def __enter__(self) -> "Interrupts":
        self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.is_asked:
            raise KeyboardInterrupt
        self.is_asked = True
