"""What a server stands: bodies too long, packs that break, signals at bad moments."""

import asyncio
import json
import shutil
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import tiny_models
from hypothesis import example, given
from hypothesis import strategies as st
from served import served
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from moepack.tools.serving.bodies import ChatBody, CompletionBody, parse_body
from moepack.tools.serving.bounds import bytes_per_token
from moepack.tools.serving.errors import ApiError
from moepack.tools.serving.guards import cut_off, guarded, hosted
from moepack.tools.serving.prompts import chat_tokens, completion_tokens
from moepack.tools.serving.reading import BODIES, BodyReader, unless_closed
from moepack.tools.serving.worker import Worker

DEMO = Path(__file__).parents[2] / "tools" / "demo_model" / "tokenizer.json"
STOP_S = 6


def byte_level() -> Tokenizer:
    """The demo model's, as it is in most models."""
    return Tokenizer.from_file(str(DEMO))


def composing() -> Tokenizer:
    """One that makes text shorter before it is split, as Qwen's."""
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def byte_fallback() -> Tokenizer:
    """One that writes spaces as three bytes, as Mixtral's."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁ab"]
    vocab = {name: number for number, name in enumerate(names)}
    merges = [("▁", "a"), ("▁a", "b")]
    model = models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.add_special_tokens([AddedToken("<a long special token>", special=True)])
    return tokenizer


TEXTS = st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("ab \u0301")))


@pytest.mark.parametrize("make", [byte_level, composing, byte_fallback])
def test_no_token_stands_for_more_bytes_than_said(make: Any) -> None:
    tokenizer = make()
    most = bytes_per_token(tokenizer)
    assert most is not None
    longest = max(tokenizer.get_vocab(), key=len)

    @given(TEXTS)
    @example("\u1fbe\u0308\u0301" * 9)
    @example(longest * 9)
    @example(" " * 99)
    def check(text: str) -> None:
        assert len(text.encode()) <= most * len(tokenizer.encode(text, add_special_tokens=False))

    check()


def test_where_text_may_be_dropped_nothing_is_certain() -> None:
    unknown = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    stripped, split, eating, short = (byte_level() for _ in range(4))
    stripped.normalizer = normalizers.Strip()
    short.normalizer = normalizers.Replace("aaaa", "a")
    split.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()]
    )
    eating.add_special_tokens([AddedToken("<end>", rstrip=True)])
    for tokenizer in (None, unknown, words, stripped, split, eating, short):
        assert bytes_per_token(tokenizer) is None


def test_a_text_that_cannot_fit_is_refused_before_it_is_split() -> None:
    split: list[str] = []

    def encode(text: str, **_: Any) -> list[int]:
        split.append(text)
        return [1]

    tokenizer: Any = SimpleNamespace(
        has_chat_template=True,
        bos_token_id=None,
        apply_chat_template=lambda messages, **_: messages[-1]["content"],
        encode=encode,
    )
    for n, is_too_long in ((5, False), (6, True)):
        text = "é" * n
        chat = {
            "messages": [{"role": "user", "content": "x" * 99}, {"role": "user", "content": text}]
        }
        made = (
            partial(completion_tokens, tokenizer, body({"prompt": text}, CompletionBody), 10),
            partial(chat_tokens, tokenizer, body(chat, ChatBody), 10),
        )
        for make in made:
            if is_too_long:
                with pytest.raises(ApiError) as error:
                    make()
                assert (error.value.status, error.value.code) == (400, "context_length_exceeded")
            else:
                assert make() == [1]
    assert split == ["é" * 5] * 2


def body(fields: dict[str, Any], kind: Any) -> Any:
    """A body as the routes read it."""
    return parse_body(json.dumps(fields).encode(), kind)


def test_requests_that_are_being_prepared_count_in_the_queue() -> None:
    worker = Worker(lambda name: pytest.fail(name), None, 1, lambda: None)
    with worker.place(), worker.place():
        assert worker.n_waiting == 2
        with pytest.raises(ApiError) as error, worker.place():
            pass
        assert error.value.status == 429
    assert worker.n_waiting == 0
    with worker.place():
        pass


class FakeRequest:
    """A request whose body comes in two pieces."""

    headers: dict[str, str] = {}  # noqa: RUF012

    async def stream(self) -> Any:
        """See starlette's."""
        yield b"12345"
        yield b"67890"


def test_bodies_have_a_bound_together() -> None:
    reader, request = BodyReader(10), FakeRequest()

    async def hold(n: int) -> None:
        async with reader.read(request) as data:  # type: ignore[arg-type]
            assert data == b"1234567890"
            if n > 1:
                await hold(n - 1)

    asyncio.run(hold(BODIES))
    with pytest.raises(ApiError) as error:
        asyncio.run(hold(BODIES + 1))
    assert error.value.status == 429
    asyncio.run(hold(BODIES))  # those before were given back


def test_what_takes_long_is_left_when_the_server_ends() -> None:
    worker = Worker(lambda name: pytest.fail(name), None, 1, lambda: None)

    async def give() -> int:
        return 5

    async def wait() -> None:
        waiting = asyncio.ensure_future(unless_closed(worker, asyncio.sleep(60)))
        assert await unless_closed(worker, give()) == 5
        worker.close()
        with pytest.raises(ApiError) as error:
            await waiting
        assert (error.value.status, error.value.code) == (503, "shutting_down")

    asyncio.run(wait())


def test_a_reader_that_is_cut_off_is_no_failure() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(60)

    async def end() -> None:
        nothing: Any = None
        sending = asyncio.ensure_future(cut_off(app)(nothing, nothing, nothing))
        await asyncio.sleep(0)
        sending.cancel()
        await sending

    asyncio.run(end())


def test_a_signal_while_bodies_come_and_a_prompt_is_read_ends_the_server_well(
    q4_pack: Path,
) -> None:
    options = ("--expert-cache", "floor", "--no-warm-start", "--context", "4096")
    with served(q4_pack, *options) as (url, process):
        host, port = url.removeprefix("http://").split(":")
        half = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{"
        prompt = json.dumps({"prompt": tiny_models.text_of([5, 9, 40] * 1300)}).encode()
        whole = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
        clients = [socket.create_connection((host, int(port)), timeout=STOP_S) for _ in range(9)]
        for client in clients[1:]:
            client.sendall(half)
        clients[0].sendall(whole % len(prompt) + prompt)
        while not httpx.get(f"{url}/metrics").text.count("moepack_requests_running 1"):
            pass
        process.send_signal(signal.SIGTERM)
        for client in clients:
            with client, client.makefile("rb") as reply:
                text = reply.read()
            assert text.startswith(b"HTTP/1.1 503 "), text
            assert b'"code":"shutting_down"' in text
        assert process.wait(STOP_S) == 0
        assert process.stderr is not None
        loaded, stopped = process.stderr.read().splitlines()
        assert loaded.startswith("loaded")
        assert stopped == "stopped"


def test_a_signal_while_libraries_load_ends_the_server_well(q4_pack: Path) -> None:
    program = f"""
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "mlx_lm":
            os.kill(os.getpid(), signal.SIGTERM)
sys.meta_path.insert(0, Finder())
from moepack.tools.startup import entry_point
sys.argv = ["moepack", "serve", {str(q4_pack)!r}, "--port", "0"]
entry_point()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "stopped\n")


def test_a_pack_that_breaks_later_is_said_in_one_line(tmp_path: Path, q4_pack: Path) -> None:
    folder = tmp_path / "packs"
    for name in ("good", "gone", "damaged"):
        shutil.copytree(q4_pack, folder / f"{name}.moepack")
    with served(folder, "--expert-cache", "floor", "--no-warm-start") as (url, process):
        shutil.rmtree(folder / "gone.moepack")
        (folder / "damaged.moepack" / "tokenizer.json").write_text("{}")
        prompt = tiny_models.text_of([5, 9])
        for name, status in (("gone", 503), ("damaged", 503), ("good", 200)):
            asked = {"model": name, "prompt": prompt, "max_tokens": 2}
            reply = httpx.post(f"{url}/v1/completions", json=asked, timeout=60)
            assert reply.status_code == status, reply.text
            if status == 503:
                assert reply.json()["error"]["code"] == "model_not_loaded"
                assert str(folder) not in reply.text
        process.terminate()
        assert process.wait(STOP_S) == 0
        assert process.stderr is not None
        lines = process.stderr.read().splitlines()
        assert [line.split()[0] for line in lines] == ["gone:", "damaged:", "loaded", "stopped"]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"stop": [""]}, "stop: a text or at most 16, each of 1 to 1,000 characters"),
        ({"stop": 5}, "stop: a text or at most 16, each of 1 to 1,000 characters"),
        ({"prompt": {}}, "prompt: a text, or a list of one text or of tokens"),
        ({"prompt": [1, "a"]}, "prompt: a text, or a list of one text or of tokens"),
    ],
    ids=str,
)
def test_a_field_of_several_kinds_is_explained_in_words(fields: Any, text: str) -> None:
    with pytest.raises(ApiError) as error:
        body({"prompt": "a", **fields}, CompletionBody)
    assert error.value.message == text
    assert error.value.param == next(iter(fields))


def test_a_part_of_a_message_is_explained_in_words() -> None:
    with pytest.raises(ApiError) as error:
        body({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, ChatBody)
    wanted = "messages.0.content: a text, or a list of parts, each with a type and a text"
    assert error.value.message == wanted
    with pytest.raises(ApiError, match=r"^messages\.0: an object is wanted$"):
        body({"messages": [5]}, ChatBody)


@pytest.mark.parametrize(
    ("host", "key", "status"),
    [
        ("LOCALHOST.:80", "bearer secret", 200),
        ("localhost", "BEARER  secret", 200),
        ("localhost", "Bearer secret", 200),
        ("localhost", "Basic secret", 401),
        ("localhost", "secret", 401),
        ("localhost", "Bearer other", 401),
        ("localhost..", "Bearer secret", 403),
        ("localhost.evil.example", "Bearer secret", 403),
    ],
)
def test_hosts_and_schemes_are_of_any_case(host: str, key: str, status: int) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def ask() -> int:
        guard = hosted(guarded(app, "secret", ()), {"localhost"})
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=guard)) as client:
            headers = {"host": host, "authorization": key}
            return (await client.get("http://any/", headers=headers)).status_code

    assert asyncio.run(ask()) == status
