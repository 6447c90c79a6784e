"""`moepack serve` with several packs: one in memory at a time, chosen by the request."""

import json
import shutil
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny_models
from conftest import forge_file
from mlx_lm import load as mlx_load
from served import served

from moepack.tools.answering import Sampling
from moepack.tools.cli import main
from moepack.tools.serving.catalog import Catalog, open_packs
from moepack.tools.serving.generation import Event, Finished, Job
from moepack.tools.serving.loaded import Loaded, loader
from moepack.tools.serving.usage import Watch
from moepack.tools.serving.worker import Worker

SHORT = tiny_models.text_of([5, 9, 40, 77])
WAIT_S = 60


@pytest.fixture
def folder(tmp_path: Path, q4_pack: Path, float_pack: Path) -> Path:
    """A folder of two packs, one that does not load, and things that are no packs."""
    inside = tmp_path / "packs"
    shutil.copytree(q4_pack, inside / "four.moepack")
    shutil.copytree(float_pack, inside / "float.moepack")
    shutil.copytree(q4_pack, inside / "bad.moepack")
    forge_file(inside / "bad.moepack", "config.json", '{"model_type": "qwen3_moe"}')
    shutil.copytree(q4_pack, inside / ".hidden.moepack")
    (inside / "notes").mkdir()
    return inside


def complete(url: str, model: str | None) -> httpx.Response:
    """A completion of 12 tokens."""
    body = {"model": model, "prompt": SHORT, "max_tokens": 12}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT_S)


def test_the_request_chooses_and_every_model_answers_as_it_does_alone(
    folder: Path, q4_source: Path, float_source: Path
) -> None:
    wanted = {}
    for name, source in (("four", q4_source), ("float", float_source)):
        model, tokenizer, *_ = mlx_load(str(source))
        tokens = tokenizer.encode(SHORT)
        wanted[name] = tiny_models.greedy_text(model, tokenizer, tokens, max_tokens=12)
    with served(folder, "--expert-cache", "floor") as (url, _):
        listed = httpx.get(f"{url}/v1/models").json()["data"]
        assert [model["id"] for model in listed] == ["bad", "float", "four"]
        assert httpx.get(f"{url}/v1/models/four").json() == listed[2]
        totals = []
        for name in ("four", "float", "four"):
            assert complete(url, name).json()["choices"][0]["text"] == wanted[name]
            page = httpx.get(f"{url}/metrics").text
            (line,) = [x for x in page.splitlines() if x.startswith("moepack_generated_tokens_t")]
            totals.append(float(line.split()[1]))
        assert totals == [12, 24, 36]  # of all models
        failed = complete(url, "bad")
        assert failed.status_code == 503
        assert failed.json()["error"]["code"] == "model_not_loaded"
        assert str(folder) not in failed.text
        for name, status in (("other", 404), ("../four", 404), (None, 400)):
            refused = complete(url, name)
            assert refused.status_code == status
            assert refused.json()["error"]["param"] == "model"
        assert complete(url, "float").json()["choices"][0]["text"] == wanted["float"]


def test_a_model_that_makes_room_is_gone_from_memory(folder: Path) -> None:
    models: list[weakref.ref[Any]] = []
    catalog = Catalog(open_packs([str(folder)]), 64)
    load = loader(
        catalog, Watch(), memory="auto", expert_cache="floor", warm_start=False, wire=False
    )

    def load_noted(name: str) -> Loaded:
        assert [model() for model in models] == [None] * len(models)  # before the next is there
        loaded = load(name)
        models.append(weakref.ref(loaded.engine.model))
        return loaded

    worker = Worker(load_noted, None, 4, lambda: None)
    worker.start()
    for name in ("four", "float", "four"):
        assert isinstance(ask(worker, name)[-1], Finished)
    worker.close()
    assert worker.join(WAIT_S)
    assert len(models) == 3


def ask(worker: Worker, model: str) -> list[Event]:
    """All events of a short job."""
    heard: list[Event] = []
    done = threading.Event()

    def emit(event: Event) -> None:
        heard.append(event)
        if not isinstance(event, str):
            done.set()

    worker.submit(Job(model, [5, 9, 40], Sampling(max_tokens=3), None, (), emit))
    assert done.wait(WAIT_S)
    return heard


def test_two_packs_of_one_name_are_refused_in_one_line(
    folder: Path, q4_pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "four"
    shutil.copytree(q4_pack, other)
    assert main(["serve", str(folder), str(other), "--port", "0"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "two packs are named 'four'" in line
    assert list(open_packs([str(q4_pack), str(q4_pack)])) == ["q4"]  # one pack, named twice


def test_a_folder_without_a_pack_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(tmp_path), "--port", "0"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "no packs are in this folder" in line


def residents(url: str) -> str:
    """What the first event of the live page says is in memory, in base64."""
    with httpx.stream("GET", f"{url}/events", timeout=WAIT_S) as response:
        for line in response.iter_lines():
            if '"residents"' in line:
                return str(json.loads(line.removeprefix("data: "))["residents"])
    raise AssertionError("no tick")


def test_a_server_begins_with_the_experts_that_the_last_one_used_most(q4_pack: Path) -> None:
    nothing = "AAAAAA=="  # 32 experts on disk
    with served(q4_pack, "--expert-cache", "floor") as (url, process):
        assert residents(url) == nothing
        complete(url, None)
        used = residents(url)
        process.terminate()
        assert process.wait(WAIT_S) == 0
    assert used != nothing
    with served(q4_pack, "--expert-cache", "floor") as (url, _):
        assert residents(url) != nothing
    with served(q4_pack, "--expert-cache", "floor", "--no-warm-start") as (url, _):
        assert residents(url) == nothing


class CancelledAtCall(threading.Event):
    """Set from its n-th question on. `n_asked` counts them."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self._n = n
        self.n_asked = 0

    def is_set(self) -> bool:
        """See threading.Event."""
        self.n_asked += 1
        return self.n_asked > self._n


@pytest.mark.parametrize("cache", ["floor", "all"])
def test_a_prompt_is_left_midway_and_gone_on_with_when_asked_again(
    q4_pack: Path, cache: str
) -> None:
    catalog = Catalog(open_packs([str(q4_pack)]), 1024)
    load = loader(catalog, Watch(), memory="auto", expert_cache=cache, warm_start=False, wire=False)
    tokens = tiny_models.random_tokens(600)

    def answer(loaded: Loaded, cancelled: CancelledAtCall) -> tuple[Finished | None, str]:
        said: list[str] = []
        emit: Callable[[Any], None] = said.append
        job = Job("q4", tokens, Sampling(max_tokens=8), None, (), emit, cancelled)
        return loaded.generation.run(job), "".join(said)

    never = CancelledAtCall(10**9)
    fresh, wanted = answer(load("q4"), never)
    assert fresh is not None
    loaded = load("q4")
    n_before = loaded.generation.prefill_step
    assert n_before < 100  # on the CPU backend: a chunk is over soon
    assert answer(loaded, CancelledAtCall(never.n_asked // 2)) == (None, "")
    again, text = answer(loaded, never)
    assert again is not None
    assert 0 < again.n_cached < len(tokens) - n_before
    assert text == wanted
