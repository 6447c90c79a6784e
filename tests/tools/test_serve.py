"""`moepack serve`: a real server, asked by OpenAI's own client."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import openai
import pytest
import tiny_models
from mlx_lm import load as mlx_load
from served import PROGRAM, served

from moepack.tools import serve
from moepack.tools.cli import main

KEY = "a key"
SHORT = tiny_models.text_of([5, 9, 40, 77])
LIMIT_S = 3.0  # in which a server notices that a client is gone
STOP_S = 5.0  # in which it ends
COUNTED = ("prompt_tokens", "generated_tokens", "expert_hits", "expert_misses", "expert_read_bytes")


@pytest.fixture(scope="module")
def url(q4_pack: Path) -> Iterator[str]:
    """A server with a key and small bounds."""
    options = ["--api-key", KEY, "--expert-cache", "floor", "--max-body", "100kB"]
    with served(q4_pack, *options, "--no-warm-start") as (url, _):
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    """OpenAI's client of that server."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def wanted(q4_source: Path) -> str:
    """mlx-lm's greedy answer of 12 tokens to SHORT."""
    model, tokenizer, *_ = mlx_load(str(q4_source))
    return tiny_models.greedy_text(model, tokenizer, tokenizer.encode(SHORT), max_tokens=12)


def user(content: Any) -> list[Any]:
    """A conversation of one message."""
    return [{"role": "user", "content": content}]


def ask(client: openai.OpenAI, content: Any = SHORT, **options: Any) -> Any:
    """A chat completion of 12 tokens."""
    options = {"max_tokens": 12, **options}
    return client.chat.completions.create(model="q4", messages=user(content), **options)


def post(url: str, body: Any, path: str = "chat/completions", key: str = KEY) -> httpx.Response:
    """A request as bytes, or as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{url}/v1/{path}", content=content, headers=headers, timeout=60)


def metrics(url: str) -> dict[str, float]:
    """The samples without labels."""
    page = httpx.get(f"{url}/metrics", headers={"authorization": f"Bearer {KEY}"}).text
    return {n: float(v) for n, v in re.findall(r"^moepack_(\w+) (\S+)$", page, re.MULTILINE)}


def wait_until_idle(url: str) -> None:
    """Fails when a request still runs after LIMIT_S."""
    ends = time.monotonic() + LIMIT_S
    while metrics(url)["requests_running"]:
        assert time.monotonic() < ends
        time.sleep(0.1)


def test_a_chat_is_answered_as_mlx_lm_answers(client: openai.OpenAI, wanted: str) -> None:
    reply = ask(client)
    assert reply.object == "chat.completion"
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].message.content == wanted
    assert reply.choices[0].finish_reason == "length"
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (4, 12)
    assert reply.usage.total_tokens == 16
    assert reply.usage.prompt_tokens_details.cached_tokens in range(4)


def test_a_stream_has_the_same_text_in_pieces(client: openai.OpenAI, wanted: str) -> None:
    first, *chunks, last, usage = ask(client, stream=True, stream_options={"include_usage": True})
    assert first.choices[0].delta.role == "assistant"
    assert len(chunks) == 12
    assert "".join(c.choices[0].delta.content for c in chunks) == wanted
    assert {c.choices[0].finish_reason for c in chunks} == {None}
    assert last.choices[0].finish_reason == "length"
    assert usage.choices == []
    assert usage.usage.completion_tokens == 12
    assert {c.id for c in (*chunks, last, usage)} == {first.id}
    without = list(ask(client, stream=True))
    assert without[-1].choices[0].finish_reason == "length"
    assert all(c.usage is None for c in without)


def test_a_text_is_completed_streamed_and_not(client: openai.OpenAI, wanted: str) -> None:
    tokens = [tiny_models.CHARACTERS.index(c) for c in SHORT]
    for prompt in (SHORT, [SHORT], tokens):
        reply = client.completions.create(model="q4", prompt=prompt, max_tokens=12)  # type: ignore[arg-type]
        assert reply.choices[0].text == wanted
    stream = client.completions.create(model="q4", prompt=SHORT, max_tokens=12, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == wanted
    assert client.completions.create(model="q4", prompt=SHORT).usage.completion_tokens == 16  # type: ignore[union-attr]


def test_the_model_is_listed_by_its_packs_name(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["q4"]
    assert client.models.retrieve("q4").object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


@pytest.mark.parametrize("as_list", [False, True])
def test_a_stop_across_tokens_ends_the_answer(
    client: openai.OpenAI, wanted: str, as_list: bool
) -> None:
    stop = wanted[3:6]
    text = wanted[: wanted.index(stop)]
    stops = ["never", stop] if as_list else stop
    reply = ask(client, stop=stops)
    assert reply.choices[0].message.content == text
    assert reply.choices[0].finish_reason == "stop"
    chunks = list(ask(client, stop=stops, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == text
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_the_beginning_of_a_stop_that_does_not_come_is_not_lost(
    client: openai.OpenAI, wanted: str
) -> None:
    assert ask(client, stop=wanted[-1] + "never").choices[0].message.content == wanted


def test_a_seed_decides_the_answer(client: openai.OpenAI) -> None:
    first, second, other = (
        ask(client, temperature=1, seed=seed).choices[0].message.content for seed in (1, 1, -2)
    )
    assert first == second != other


def test_sampling_fields_of_mlx_lm_are_obeyed(client: openai.OpenAI, wanted: str) -> None:
    for fields in ({"top_k": 1}, {"min_p": 1}, {"top_k": -1, "min_p": 1}):
        reply = ask(client, temperature=1, seed=5, extra_body=fields)
        assert reply.choices[0].message.content == wanted, fields
    reply = ask(client, extra_body={"repetition_penalty": 1e6})
    said = SHORT + reply.choices[0].message.content
    assert len(set(said)) == len(said)


def test_parts_and_the_developer_role_are_text(client: openai.OpenAI, wanted: str) -> None:
    parts = [{"type": "text", "text": SHORT[:1]}, {"type": "text", "text": SHORT[1:]}]
    assert ask(client, parts).choices[0].message.content == wanted
    messages: Any = [{"role": "developer", "content": SHORT[:3]}, *user(SHORT[3:])]
    reply = client.chat.completions.create(model="q4", messages=messages, max_tokens=12)
    assert reply.choices[0].message.content == wanted


def test_null_means_absent_and_unknown_fields_are_ignored(url: str, wanted: str) -> None:
    fields = ("stop", "seed", "n", "temperature", "top_p", "tools", "stream", "max_tokens", "model")
    body = {**dict.fromkeys(fields), "messages": user(SHORT), "max_completion_tokens": 12}
    reply = post(url, {**body, "unheard_of": [1]})
    assert reply.json()["choices"][0]["message"]["content"] == wanted


def test_a_conversation_goes_on_from_its_kept_cache(client: openai.OpenAI, wanted: str) -> None:
    follow_up = [*user(SHORT), {"role": "assistant", "content": wanted}, *user(SHORT)]
    ask(client)
    replies = [
        client.chat.completions.create(model="q4", messages=messages, max_tokens=12)
        for messages in (follow_up, user(SHORT + wanted + SHORT))
    ]
    assert replies[0].usage.prompt_tokens_details.cached_tokens == 16  # type: ignore[union-attr]
    assert replies[0].choices[0].message.content == replies[1].choices[0].message.content


def test_requests_at_once_get_the_answers_they_get_alone(client: openai.OpenAI) -> None:
    texts = [tiny_models.text_of(tiny_models.random_tokens(n, seed=n)) for n in range(3, 27)]

    def answer(text: str) -> str:
        return str(ask(client, text).choices[0].message.content)

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(answer, texts))
    assert together == [answer(text) for text in texts]


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_hangs_up_frees_the_server(url: str, is_stream: bool) -> None:
    body = {"messages": user(SHORT), "stream": is_stream}
    headers = {"authorization": f"Bearer {KEY}"}
    before = metrics(url)["generated_tokens_total"]
    with httpx.Client(base_url=url, headers=headers, timeout=1) as client:
        if is_stream:
            with client.stream("POST", "/v1/chat/completions", json=body) as response:
                next(response.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/chat/completions", json=body)
    wait_until_idle(url)
    assert metrics(url)["generated_tokens_total"] - before < 4000


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logprobs": True}, "logprobs"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": user([{"type": "image_url", "image_url": {"url": "x"}}])}, "messages"),
        ({"messages": user("\ud800")}, None),
        ({"messages": user("")}, "messages"),
        ({"messages": user(SHORT * 1024)}, "messages"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ],
    ids=str,
)
def test_a_wrong_request_is_told_what_is_wrong(
    url: str, fields: dict[str, Any], param: str | None
) -> None:
    reply = post(url, {"messages": user(SHORT), "max_tokens": 2, **fields})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b"[" * 50_000], ids=repr)
def test_a_body_that_is_no_object_is_refused(url: str, data: bytes) -> None:
    assert post(url, data).json()["error"]["type"] == "invalid_request_error"
    assert post(url, data).status_code == 400


def test_errors_have_openais_status_and_shape(url: str, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as error:
        client.chat.completions.create(model="other", messages=user(SHORT))
    assert error.value.code == "model_not_found"
    replies = {
        401: post(url, {"messages": user(SHORT)}, key="another"),
        404: post(url, {}, "nothing"),
        413: post(url, {"messages": user(SHORT), "more": "x" * 200_000}),
    }
    for status, reply in replies.items():
        assert reply.status_code == status
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    assert httpx.get(f"{url}/v1/models").status_code == 401
    assert httpx.get(f"{url}/metrics").status_code == 401
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}


def test_a_body_of_unstated_length_is_bounded_too(url: str) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    pieces = (b" " * 10_000 for _ in range(30))
    reply = httpx.post(f"{url}/v1/completions", content=pieces, headers=headers)
    assert reply.status_code == 413


def test_metrics_grow_by_what_run_counts_the_queue_is_bounded_and_a_signal_ends_it(
    q4_pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(q4_pack), "--expert-cache", "floor"]
    assert main(["run", *arguments, "-p", SHORT, "-m", "12", "--json", "--no-warm-start"]) == 0
    figures = json.loads(capsys.readouterr().out)
    with served(*arguments, "--max-queue", "1", "--no-warm-start") as (url, process):
        before = metrics(url)
        assert before["expert_slots"] == 8
        assert before["planned_memory_bytes"] > 0
        post(url, {"messages": user(SHORT), "max_tokens": 12})
        after = metrics(url)
        grown = {n: after[f"{n}_total"] - before[f"{n}_total"] for n in COUNTED}
        experts = figures["experts"]
        assert grown == {
            "prompt_tokens": figures["prompt_tokens"],
            "generated_tokens": figures["generation_tokens"],
            "expert_hits": experts["hits"],
            "expert_misses": experts["misses"],
            "expert_read_bytes": experts["bytes_read"],
        }

        long = {"messages": user(SHORT), "stream": True}
        with ThreadPoolExecutor(2) as pool:
            running = [pool.submit(post, url, long) for _ in range(2)]
            ends = time.monotonic() + LIMIT_S
            while metrics(url)["requests_waiting"] < 1:
                assert time.monotonic() < ends
                time.sleep(0.05)
            refused = post(url, long)
            assert refused.status_code == 429
            assert refused.json()["error"]["type"] == "rate_limit_error"
            started = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert process.wait(STOP_S) == 0
            assert time.monotonic() - started < STOP_S
            for future in running:
                assert '"code": "shutting_down"' in future.result().text


def test_a_pack_that_does_not_load_ends_the_server_in_one_line(q4_pack: Path) -> None:
    done = subprocess.run(
        [*PROGRAM, "serve", str(q4_pack), "--port", "0", "--memory", "1MB"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "the smallest that works is" in done.stderr.splitlines()[-1]


def test_other_machines_need_a_key_or_a_word(
    q4_pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for host in ("0.0.0.0", "", "::"):
        assert main(["serve", str(q4_pack), "--host", host, "--port", "0"]) == 2
        assert "--api-key, or --insecure" in capsys.readouterr().err


def test_a_name_that_was_made_to_lead_here_gets_nothing(q4_pack: Path, url: str) -> None:
    with served(q4_pack) as (keyless, _):
        port = keyless.rsplit(":", 1)[1]
        for host in ("localhost", f"LOCALHOST:{port}", f"127.0.0.1:{port}", f"[::1]:{port}"):
            assert httpx.get(f"{keyless}/v1/models", headers={"host": host}).status_code == 200
        for host in ("evil.example", f"evil.example:{port}", "localhost.evil.example", "[::2]", ""):
            for path in ("", "v1/models", "health", "events"):
                reply = httpx.get(f"{keyless}/{path}", headers={"host": host})
                assert reply.status_code == 403, (host, path)
                assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    headers = {"host": "any.example", "authorization": f"Bearer {KEY}"}
    assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 200


def test_without_the_extra_the_command_names_it(
    q4_pack: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    assert main(["serve", str(q4_pack)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install 'moepack[serve]'" in line


def test_help_imports_no_server() -> None:
    program = (
        "import sys; from moepack.tools.cli import main; main(['--help']); main(['serve', '-h']);"
        "sys.exit(any(m in sys.modules for m in ('starlette', 'uvicorn', 'pydantic', 'mlx')))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True).returncode == 0


def test_a_port_in_use_is_said_in_one_line(
    url: str, q4_pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(q4_pack), "--port", url.rsplit(":", 1)[1]]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "in use" in line


def test_without_metal_nothing_is_served_that_was_to_be_wired(
    q4_pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of several packs none would be loaded at the start."""
    if mx.metal.is_available():
        pytest.skip("NOT TESTED: this machine has Metal")
    other = shutil.copytree(q4_pack, tmp_path / "other.moepack")
    assert main(["serve", str(q4_pack), str(other), "--port", "0", "--wire"]) == 1
    error = "moepack: error: --wire: only Metal wires memory, and this machine has none\n"
    assert capsys.readouterr().err == error
