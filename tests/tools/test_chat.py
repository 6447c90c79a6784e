"""A chat with a pack: on a real pseudo-terminal, and turn by turn in this process."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import pytest
import tiny_models
from mlx_lm import load as mlx_load
from mlx_lm.models.cache import KVCache, RotatingKVCache

import moepack.runtime.loading
from moepack.runtime.loading import Engine
from moepack.tools.cli import main
from moepack.tools.prefixes import cut_back

CTRL_C, CTRL_D = "\x03", "\x04"
HELLO = tiny_models.text_of([5, 9, 40, 77])
MORE = tiny_models.text_of([7, 8])
LONG = tiny_models.text_of(tiny_models.random_tokens(60))
WAIT_S = 60
PROMPT = r">[^\n]*\x1b\[\?25h"  # drawn, and the cursor shown again
ANSWER_BEGUN = r"\x1b\[\?2004l[^\u4e00-\u9fff]*[\u4e00-\u9fff]"  # the keyboard is given back
# The terminal becomes the controlling one, so that Ctrl-C is a signal.
START = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execv(sys.executable, [sys.executable, '-m', 'moepack.tools', *sys.argv[1:]])"
)


@pytest.fixture(scope="module")
def greedy(q4_source: Path) -> Callable[..., str]:
    """What mlx-lm answers to a text, greedily."""
    model, tokenizer, *_ = mlx_load(str(q4_source))

    def answer(text: str, max_tokens: int = 16) -> str:
        return tiny_models.greedy_text(model, tokenizer, tokenizer.encode(text), max_tokens)

    return answer


class Terminal:
    """A pseudo-terminal with the command running in it."""

    def __init__(self, *arguments: object) -> None:
        self.fd, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-c", START, *map(str, arguments)],
            stdin=child,
            stdout=child,
            stderr=child,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm"},
        )
        os.close(child)
        self.seen = ""

    def type(self, text: str) -> None:
        """Press keys; Enter is \\r."""
        os.write(self.fd, text.encode())

    def wait_for(self, pattern: str) -> str:
        """What was shown up to the end of what matches, since the last such wait."""
        ends = time.monotonic() + WAIT_S
        while (found := re.search(pattern, self.seen)) is None:
            ready, _, _ = select.select([self.fd], [], [], max(0, ends - time.monotonic()))
            assert ready, f"no {pattern!r} in {self.seen!r}"
            try:
                data = os.read(self.fd, 65536)
            except OSError:  # Linux's way to say that the other side is closed
                data = b""
            assert data, f"ended without {pattern!r}: {self.seen!r}"
            self.seen += data.decode(errors="ignore")
        shown, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return shown

    def close(self) -> None:
        """Nothing of it stays."""
        self.process.kill()
        self.process.wait()
        os.close(self.fd)


@pytest.fixture
def terminal(q4_pack: Path) -> Iterator[Callable[..., Terminal]]:
    """Makes a terminal with a chat in it."""
    opened: list[Terminal] = []

    def start(*options: object) -> Terminal:
        opened.append(Terminal("run", q4_pack, *options))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


def test_a_conversation_on_a_terminal(
    terminal: Callable[..., Terminal], greedy: Callable[..., str], tmp_path: Path
) -> None:
    """Several lines, commands good and bad, an answer that is stopped, and the way out."""
    file = tmp_path / "c.json"
    chat = terminal("-m", "16")
    chat.wait_for(PROMPT)
    chat.type(f'"""{HELLO[:2]}\r{HELLO[2:]}\r"""\r')
    assert greedy(HELLO) in chat.wait_for("tokens/s; .*peak memory")
    chat.type("/nothing\r")
    chat.wait_for("there is no /nothing")
    chat.type("/set temp hot\r")
    chat.wait_for("/set temp: 'hot' is not a valid number")
    chat.type("/set max_tokens -1\r")
    chat.wait_for("max_tokens is -1")
    chat.type(f"{LONG}\r")
    chat.wait_for(ANSWER_BEGUN)
    chat.type(CTRL_C)
    chat.wait_for("tokens/s; .*peak memory")
    chat.type(f"/set max_tokens 16\r{MORE}\r")
    report = chat.wait_for("prompt \\d+ tokens.*peak memory")
    chat.type(f"/save {file}\r")
    chat.wait_for("Saved 6 messages")
    chat.wait_for(PROMPT)
    chat.type(CTRL_D)
    assert chat.process.wait(WAIT_S) == 0

    said = [message["content"] for message in json.loads(file.read_text(encoding="utf-8"))]
    assert said[0] == f"{HELLO[:2]}\n{HELLO[2:]}"
    partial = said[3]
    assert 0 < len(partial) < 4000
    assert greedy("".join(said[:3]), len(partial)) == partial
    # The cache holds what was said before Ctrl-C and no more: two tokens are new.
    assert "prompt 2 tokens" in report
    assert said[5] == greedy("".join(said[:5]))


def test_ctrl_c_in_the_instant_of_the_first_prompt_is_not_lost(
    terminal: Callable[..., Terminal],
) -> None:
    chat = terminal()
    chat.wait_for(PROMPT)
    os.kill(chat.process.pid, signal.SIGINT)
    chat.wait_for("Ctrl-D or /exit leaves")
    chat.type("half" + CTRL_C)
    chat.wait_for(PROMPT)
    chat.type("/exit\r")
    assert chat.process.wait(WAIT_S) == 0


def test_ctrl_c_in_the_instant_after_enter_takes_the_message_back(
    terminal: Callable[..., Terminal],
) -> None:
    chat = terminal("-m", "-1")
    chat.wait_for(PROMPT)
    for _ in range(3):
        chat.type(f"{HELLO}\r{CTRL_C}")
        assert "tokens/s" not in chat.wait_for("Stopped before an answer began")
        chat.wait_for(PROMPT)
    chat.type("/exit\r")
    assert chat.process.wait(WAIT_S) == 0


def test_a_pipe_is_one_prompt_and_no_chat(q4_pack: Path, greedy: Callable[..., str]) -> None:
    """And a prompt loads nothing that only a chat needs."""
    script = (
        f"import sys; from moepack.tools.cli import main; code = main(['run', {str(q4_pack)!r}, "
        "'-m', '16']); assert 'prompt_toolkit' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=f"{HELLO}\n{MORE}\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == greedy(HELLO + MORE) + "\n"


def test_progress_is_shown_on_a_terminal_alone(
    terminal: Callable[..., Terminal],
    q4_pack: Path,
    greedy: Callable[..., str],
    capfd: pytest.CaptureFixture[str],
) -> None:
    arguments = ("-p", LONG, "-m", "16", "--expert-cache", "floor", "--prefill-step-size", "16")
    shown = terminal(*arguments).wait_for("peak memory")
    assert "loading q4.moepack" in shown
    # By layer: chunk of 16 of 60 tokens, two streamed layers.
    assert re.findall(r"reading 60 tokens: +(\d+)%", shown)[0] == "0"
    assert f"\r{greedy(LONG)}\r\n" in shown  # the bar is wiped away before the answer
    assert main(["run", str(q4_pack), *arguments]) == 0
    assert not re.search("loading|reading", capfd.readouterr().err)


def test_a_cache_that_cannot_be_cut_is_not() -> None:
    cache = [KVCache(), RotatingKVCache(8)]
    assert not cut_back(cache, 0)
    assert cut_back(cache[:1], 0)


class Typed:
    """A chat in this process, as with stdin on a terminal and stderr in a file."""

    def __init__(self, pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._pack = pack
        self._monkeypatch = monkeypatch
        monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)

    def __call__(
        self, lines: Sequence[str], *options: object, watch: Callable[[Engine], None] | None = None
    ) -> int:
        """Run with these lines typed; `watch` is given the engine first. Returns the exit code."""
        waiting = iter(lines)
        load_engine = moepack.runtime.loading.load_engine

        def load(*arguments: Any, **keywords: Any) -> Engine:
            engine = load_engine(*arguments, **keywords)
            if watch is not None:
                watch(engine)
            return engine

        def read(_: str) -> str:
            line = next(waiting, None)
            if line is None:
                raise EOFError
            return line

        with self._monkeypatch.context() as patch:
            patch.setattr("builtins.input", read)
            patch.setattr("moepack.runtime.loading.load_engine", load)
            return main(["run", str(self._pack), "-m", "16", *map(str, options)])


@pytest.fixture
def typed(q4_pack: Path, monkeypatch: pytest.MonkeyPatch) -> Typed:
    """A chat with the tiny pack."""
    return Typed(q4_pack, monkeypatch)


def interrupt_at(n_calls: int, *, is_decode: bool, n_times: int = 1) -> Callable[[Engine], None]:
    """Ctrl-C, so often, in the call of this number of the first streamed layer."""

    def watch(engine: Engine) -> None:
        left = n_calls

        def record(
            experts: Sequence[int], uses: Sequence[int], n_tokens: int, is_decoding: bool
        ) -> None:
            nonlocal left
            if is_decoding == is_decode:
                left -= 1
                for _ in range(n_times if left == 0 else 0):
                    os.kill(os.getpid(), signal.SIGINT)

        engine.layers[0].record = record

    return watch


def read_tokens(err: str) -> list[int]:
    """How many tokens of each prompt were read, by the statistics."""
    return [int(n) for n in re.findall(r"^prompt (\d+) tokens", err, flags=re.MULTILINE)]


def test_a_stop_while_a_prompt_is_read_takes_the_message_back_and_keeps_what_was_read(
    typed: Typed, greedy: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    stop = interrupt_at(4, is_decode=False)  # of chunks of 16 tokens: the first prompt has one
    options = ("--expert-cache", "floor", "--prefill-step-size", "16")
    assert typed([HELLO, LONG, LONG], *options, watch=stop) == 0
    captured = capsys.readouterr()
    first = greedy(HELLO)
    assert captured.out.split() == [first, greedy(HELLO + first + LONG)]
    assert "the message is taken back" in captured.err
    # Of the 60 tokens three chunks were read: stopped in the third, whose last layer has no call.
    assert read_tokens(captured.err) == [4, 60 - 48]


def test_a_second_ctrl_c_stops_within_a_token_and_the_next_answer_is_right(
    typed: Typed,
    greedy: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    stop = interrupt_at(8, is_decode=True, n_times=2)
    lines = [HELLO, MORE, f"/save {tmp_path / 'c.json'}"]
    assert typed(lines, "--expert-cache", "floor", watch=stop) == 0
    captured = capsys.readouterr()
    partial, following = captured.out.split()
    assert 0 < len(partial) < 16
    assert greedy(HELLO).startswith(partial)
    assert following == greedy(HELLO + partial + MORE)
    # Nothing was kept of the cache that was left midway.
    assert read_tokens(captured.err) == [len(HELLO + partial + MORE)]


def test_ctrl_c_stops_an_answer_after_the_token_in_hand(
    typed: Typed, greedy: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    stop = interrupt_at(8, is_decode=True)
    assert typed([HELLO, MORE], "--expert-cache", "floor", watch=stop) == 0
    captured = capsys.readouterr()
    partial, following = captured.out.split()
    assert 0 < len(partial) < 16
    assert following == greedy(HELLO + partial + MORE)
    assert read_tokens(captured.err) == [4, 2]


def test_a_conversation_is_saved_cleared_and_gone_on_with(
    typed: Typed,
    greedy: Callable[..., str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file, system = tmp_path / "c.json", tiny_models.text_of([33, 34, 35])
    lines = [f"/system {system}", HELLO, f"/save {file}", "/clear", MORE, f"/load {file}", MORE]
    assert typed(lines) == 0
    answers = capsys.readouterr().out.split()
    first = greedy(system + HELLO)
    assert answers == [first, greedy(system + MORE), greedy(system + HELLO + first + MORE)]
    assert [m["role"] for m in json.loads(file.read_text())] == ["system", "user", "assistant"]


def test_bad_lines_are_one_line_each_and_the_chat_goes_on(
    typed: Typed, greedy: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes").write_text("mine")
    bad = {
        "/foo bar": "there is no /foo",
        "/clear all": "nothing follows /clear",
        "/exit now": "nothing follows /exit",
        "/save": "/save needs the name of a file",
        f"/save {tmp_path / 'notes'}": "not replaced",
        f"/save {'x' * 300}": "File name too long",
        f"/save {tmp_path / ('x' * 250)}": "not saved (File name too long)",
        f"/save {'x/' * 3000}x": "File name too long",
        "/save /proc/c.json": "/proc/c.json: cannot be saved there",
        "/save a\0b": "null byte",
        f"/load {'x' * 300}": "File name too long",
        "/load a\0b": "null byte",
        f"/load {tmp_path / 'none'}": "No such file",
        "/load ~nobody-of-that-name/x": "nobody-of-that-name",
        "/set top_p 3": "/set top_p: 3.0 is not in the range",
        "/set top_p hot": "/set top_p: 'hot' is not a valid number.",
        "/set seed 1.5": "/set seed: '1.5' is not a valid whole number.",
        "/set show_thinking perhaps": "/set show_thinking: 'perhaps' is neither on nor off",
        "/set seed -1": "/set seed: -1 is not in the range",
        "/set max_tokens 0": "/set max_tokens: a positive number, or -1",
        "/set colour red": "there is no colour",
        "a\udcff": "this line is not valid UTF-8",
        "abc": "the model's tokenizer has no tokens for this prompt",
    }
    assert typed([*bad, HELLO]) == 0
    captured = capsys.readouterr()
    errors = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    for line, wanted in zip(errors, bad.values(), strict=True):
        assert wanted in line
    assert captured.out.split() == [greedy(HELLO)]
    assert (tmp_path / "notes").read_text() == "mine"


def test_set_changes_how_answers_are_made(
    typed: Typed, greedy: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    sampled = ["/set temp 1", "/set seed 7", HELLO, "/clear"]
    assert typed([*sampled, *sampled, "/set temp 0", "/set max-tokens 3", HELLO, "/set"]) == 0
    captured = capsys.readouterr()
    first, second, third = captured.out.split()
    assert first == second != greedy(HELLO)
    assert third == greedy(HELLO, 3)
    assert "  max_tokens           3\n" in captured.err
    assert "cut at 3 tokens" in captured.err


def test_statistics_are_of_an_answer_and_of_the_chat(
    typed: Typed, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed([HELLO, MORE, "/stats"], "--expert-cache", "floor") == 0
    *answers, chat = re.findall(r"([\d.]+) ([kM]?B) read", capsys.readouterr().err)
    factor = {"B": 1, "kB": 1e3, "MB": 1e6}
    first, second, whole = (float(n) * factor[unit] for n, unit in [*answers, chat])
    assert whole == pytest.approx(first + second, rel=0.02)


def test_a_conversation_ends_where_memory_was_planned_for(
    typed: Typed, greedy: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed([HELLO, MORE, MORE, "/clear", HELLO], "--context", "24") == 0
    captured = capsys.readouterr()
    first = greedy(HELLO)
    second = greedy(HELLO + first + MORE, 24 - 22)
    assert captured.out.split() == [first, second, first]
    assert "memory was planned for --context 24; /clear begins another" in captured.err


def test_a_prompt_cache_file_begins_a_chat(
    typed: Typed, greedy: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--system-prompt", LONG, "--prompt-cache-file", tmp_path / "c.safetensors")
    for n_read in (64, 1):
        assert typed([HELLO, MORE], *options) == 0
        captured = capsys.readouterr()
        first = greedy(LONG + HELLO)
        assert captured.out.split() == [first, greedy(LONG + HELLO + first + MORE)]
        assert read_tokens(captured.err) == [n_read, 2]


@pytest.fixture
def thinking_pack(
    q4_source: Path, greedy: Callable[..., str], tmp_path: Path
) -> tuple[Path, list[str]]:
    """A pack whose answer to HELLO thinks; and what it says before, thinks, and says after."""
    answer = greedy(HELLO)
    once = [i for i in range(1, 16) if answer.count(answer[i]) == 1]
    start, end = once[0], once[-2]
    source = tmp_path / "source"
    source.mkdir()
    for file in q4_source.iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    file = source / "tokenizer.json"
    described = json.loads(file.read_text(encoding="utf-8"))
    vocab = described["model"]["vocab"]
    for place, mark in ((start, "<think>"), (end, "</think>")):
        vocab[mark] = vocab.pop(answer[place])
    file.write_text(json.dumps(described), encoding="utf-8")
    assert main(["convert", str(source), str(tmp_path / "p")]) == 0
    return tmp_path / "p", [answer[:start], answer[start + 1 : end], answer[end + 1 :]]


def test_what_is_thought_is_dimmed_on_a_terminal_and_apart_in_the_conversation(
    thinking_pack: tuple[Path, list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pack, (before, thought, after) = thinking_pack
    shown: list[str] = []
    echo = click.echo
    monkeypatch.setattr(click, "echo", lambda *a, **k: (shown.append(str(*a)), echo(*a, **k)))
    lines = [HELLO, f"/save {tmp_path / 'c.json'}"]
    typed = Typed(pack, monkeypatch)
    assert typed(lines) == 0
    pieces = "".join(shown)
    assert before + "".join(click.style(c, dim=True) for c in thought) in pieces
    assert "think>" not in pieces
    message = json.loads((tmp_path / "c.json").read_text(encoding="utf-8"))[1]
    assert message["reasoning_content"] == thought
    assert message["content"] == before + after

    capsys.readouterr()
    for hide in ([*lines[:1]], ["/set show_thinking off", *lines[:1]]):
        assert typed(hide, *(["--hide-thinking"] if len(hide) == 1 else [])) == 0
        assert capsys.readouterr().out == before + after + "\n"


def test_a_prompt_whose_answer_goes_to_a_file_is_not_changed_unless_asked(
    thinking_pack: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    pack, (before, thought, after) = thinking_pack
    capsys.readouterr()
    arguments = ["run", str(pack), "-p", HELLO, "-m", "16"]
    assert main(arguments) == 0
    assert capsys.readouterr().out == f"{before}<think>{thought}</think>{after}\n"
    assert main([*arguments, "--hide-thinking"]) == 0
    assert capsys.readouterr().out == before + after + "\n"
    assert main([*arguments, "--json", "--hide-thinking"]) == 0
    assert f"<think>{thought}</think>" in json.loads(capsys.readouterr().out)["text"]
