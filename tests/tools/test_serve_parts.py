"""The parts of the server that need no server: stops, parsing, queue, waiting."""

import asyncio
import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moepack.tools.answering import Sampling
from moepack.tools.prefixes import Prefixes
from moepack.tools.serving.answers import events
from moepack.tools.serving.bodies import ChatBody, parse_body
from moepack.tools.serving.errors import ApiError
from moepack.tools.serving.generation import Finished, Job
from moepack.tools.serving.parsing import ChatParser, merged
from moepack.tools.serving.prompts import chat_tokens
from moepack.tools.serving.stops import StopFinder
from moepack.tools.serving.worker import Worker

END = Finished("stop", 1, 0)


@given(
    st.lists(st.text("ab", max_size=4), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_text_ends_before_the_first_stop_however_it_is_cut(
    pieces: list[str], stops: list[str]
) -> None:
    finder, passed, is_stopped = StopFinder(stops), "", False
    for piece in pieces:
        text, is_stopped = finder.feed(piece)
        passed += text
        if is_stopped:
            break
    whole = "".join(pieces)
    assert is_stopped == any(stop in whole for stop in stops)
    if not is_stopped:
        assert passed + finder.flush() == whole
    else:  # a stop that is complete first wins over one that begins first
        assert whole.startswith(passed)
        assert not any(stop in passed for stop in stops)


def parse_call(text: str, tools: Any) -> dict[str, Any]:
    """A tool call as JSON."""
    parsed: dict[str, Any] = json.loads(text)
    return parsed


def parser(opens_thought: bool = False) -> ChatParser:
    """Of a model that thinks and calls tools."""
    tokenizer: Any = SimpleNamespace(
        has_thinking=True,
        think_start="<think>",
        think_end="</think>",
        has_tool_calling=True,
        tool_call_start="<call>",
        tool_call_end="</call>",
        tool_parser=parse_call,
        structural_markers=[],
        response_transitions={},
        response_initial_state=None,
        rfind_think_start=lambda tokens: 3 if opens_thought else -1,
        rfind_think_end=lambda tokens: -1,
    )
    return ChatParser(tokenizer, [1], [], False)


@pytest.mark.parametrize("n", [1, 3, 100])
def test_thoughts_and_calls_are_told_apart_from_text(n: int) -> None:
    call = '{"name": "add", "arguments": {"a": 1}}'
    text = f"<think>hm</think>Let me see.<call>{call}</call>"
    chat = parser()
    deltas = [d for i in range(0, len(text), n) for d in chat.feed(text[i : i + n])]
    held, reason = chat.end("stop")
    said = merged([*deltas, *held])
    assert said["reasoning_content"] == "hm"
    assert said["content"] == "Let me see."
    (made,) = said["tool_calls"]
    assert made["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert reason == "tool_calls"


def test_a_thought_that_the_prompt_opened_is_one_and_a_cut_call_is_shown() -> None:
    chat = parser(opens_thought=True)
    deltas = chat.feed('hm</think>so<call>{"name": ')
    held, reason = chat.end("length")
    said = merged([*deltas, *held])
    assert said == {"reasoning_content": "hm", "content": 'so{"name": '}
    assert reason == "length"


def test_a_template_is_given_the_tools_and_arguments_of_the_request() -> None:
    given: dict[str, Any] = {}

    def apply_chat_template(messages: Any, **options: Any) -> str:
        given.update(options, messages=messages)
        return f"text {options.get('tools')}"

    tokenizer: Any = SimpleNamespace(
        has_chat_template=True,
        apply_chat_template=apply_chat_template,
        encode=lambda text, **_: [1, 2],
    )
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    body = {
        "messages": [{"role": "developer", "content": "hi"}],
        "tools": [tool],
        "reasoning_effort": "low",
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert chat_tokens(tokenizer, parse_body(json.dumps(body).encode(), ChatBody), None) == [1, 2]
    assert given["tools"] == [tool]
    assert given["enable_thinking"] is False
    assert given["reasoning_effort"] == "low"
    assert given["messages"] == [{"role": "system", "content": "hi"}]
    given.clear()
    without = json.dumps({**body, "tool_choice": "none"}).encode()
    chat_tokens(tokenizer, parse_body(without, ChatBody), None)
    assert "tools" not in given


class FakeGeneration:
    """Runs a job by waiting until it is let go; a seed of 13 fails."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.ran: list[int | None] = []

    def run(self, job: Job) -> Finished | None:
        """See Generation."""
        self.go.wait(5)
        self.ran.append(job.seed)
        if job.seed == 13:
            raise ValueError("unlucky")
        return None if job.is_cancelled.is_set() else END


def test_a_queue_serves_in_order_refuses_forgets_and_survives_a_failure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    told: list[tuple[int | None, Any]] = []
    done = threading.Event()

    def job(seed: int) -> Job:
        def emit(event: Any) -> None:
            told.append((seed, event))
            if seed == 4:
                done.set()

        return Job("m", [1], Sampling(), seed, (), emit)

    generation: Any = FakeGeneration()
    loaded: Any = SimpleNamespace(
        name="m", generation=generation, save_if_due=lambda: None, close=lambda: None
    )
    worker = Worker(lambda name: loaded, "m", 3, lambda: None)
    with pytest.raises(ApiError, match="loaded"):
        worker.submit(job(0))
    worker.start()
    while worker.loading:
        pass
    jobs = [job(13), job(2), job(3), job(4)]
    for one in jobs:
        worker.submit(one)
    with pytest.raises(ApiError) as refused:
        worker.submit(job(5))
    assert refused.value.status == 429
    worker.cancel(jobs[1])
    generation.go.set()
    assert done.wait(5)
    worker.close()
    assert worker.join(5)
    assert generation.ran == [13, 3, 4]
    assert [(seed, type(event)) for seed, event in told] == [
        (13, ApiError),
        (3, Finished),
        (4, Finished),
    ]
    assert "unlucky" in capsys.readouterr().err
    assert "unlucky" not in told[0][1].message


def test_comments_come_on_a_timer_until_there_is_text() -> None:
    async def listen() -> list[Any]:
        queue: asyncio.Queue[Any] = asyncio.Queue()

        async def stays() -> bool:
            return False

        async def speak() -> None:
            await asyncio.sleep(0.2)
            queue.put_nowait("text")
            queue.put_nowait(END)

        speaking = asyncio.create_task(speak())
        heard = [event async for event in events(queue, stays, keep_alive_s=0.05)]
        await speaking
        return heard

    heard = asyncio.run(listen())
    assert heard[0] is None
    assert heard[-2:] == ["text", END]


class FakeCache:
    """A layer's cache of 10 bytes, which can be trimmed or not."""

    nbytes = 10

    def __init__(self, is_trimmable: bool) -> None:
        self._is_trimmable = is_trimmable
        self.n_trimmed = 0

    def is_trimmable(self) -> bool:
        """As mlx-lm's."""
        return self._is_trimmable

    def trim(self, n: int) -> int:
        """As mlx-lm's."""
        self.n_trimmed += n
        return n


def test_the_longest_kept_beginning_is_taken_and_the_oldest_dropped() -> None:
    kept = Prefixes(20)
    cache = FakeCache(is_trimmable=True)
    kept.put([1, 2, 3, 4, 5], 3, [cache])
    kept.put([9, 9, 9, 9], 4, [FakeCache(is_trimmable=True)])
    assert kept.take([9, 1, 1]) == (None, 0)  # another conversation's stays
    assert kept.take([1, 2, 3, 4]) == ([cache], 3)  # one token is left to run
    assert cache.n_trimmed == 2
    assert kept.take([1, 2, 3, 4]) == (None, 0)  # moved, not copied
    kept.put([1, 2, 3], 3, [FakeCache(is_trimmable=False)])
    kept.put([7, 8], 2, [cache])  # the third of two: the nines go
    assert kept.take([9, 9, 9, 9, 9]) == (None, 0)
    assert kept.take([1, 2, 4]) == (None, 0)  # would have to be cut
    assert kept.take([1, 2, 3, 4])[1] == 3
    kept.make_room(15)
    assert kept.take([7, 8, 9]) == (None, 0)
