"""What the live page is told, and what its files may do."""

import asyncio
import json
import re
from base64 import b64decode
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tiny_models
from served import served

from moepack.tools.answering import Sampling
from moepack.tools.serving.catalog import Catalog, open_packs
from moepack.tools.serving.errors import ApiError
from moepack.tools.serving.generation import Job
from moepack.tools.serving.live import MAX_PAGES, LiveResponse, live_events
from moepack.tools.serving.loaded import Counts, Loaded, loader
from moepack.tools.serving.pages import page_files
from moepack.tools.serving.usage import Watch

K = 4  # experts a token and layer; of two layers


def load(pack: Path, watch: Watch, cache: str) -> Loaded:
    """The pack's model."""
    catalog = Catalog(open_packs([str(pack)]), 256)
    return loader(catalog, watch, memory="auto", expert_cache=cache, warm_start=False, wire=False)(
        "q4"
    )


def run(loaded: Loaded, n_prompt: int = 40, n_tokens: int = 10) -> None:
    """An answer."""
    tokens = tiny_models.random_tokens(n_prompt)
    job = Job("q4", tokens, Sampling(max_tokens=n_tokens), None, (), lambda _: None)
    assert loaded.generation.run(job) is not None


def test_uses_are_counted_while_somebody_looks_streamed_or_resident(q4_pack: Path) -> None:
    watch = Watch()
    streamed, resident = load(q4_pack, watch, "floor"), load(q4_pack, watch, "all")
    for loaded in (streamed, resident):
        run(loaded)
        assert sum(loaded.usage.counts) == 0
    watch.n_pages = 1
    # Prompts that share no beginning with the first, so that all of it is run.
    tokens = tiny_models.random_tokens(40, seed=7)
    for loaded in (streamed, resident):
        job = Job("q4", tokens, Sampling(max_tokens=10), None, (), lambda _: None)
        assert loaded.generation.run(job) is not None
    exact, last = np.split(np.array(streamed.usage.counts), 2)
    counted, _ = np.split(np.array(resident.usage.counts), 2)
    assert exact.sum() in ((40 + 9) * K, (40 + 10) * K)  # mlx-lm runs one ahead
    assert last.sum() in ((1 + 9) * K, (1 + 10) * K)  # a prompt's last token alone
    assert (counted <= exact).all()
    assert exact.sum() - counted.sum() <= 3 * K  # the last tokens' are not waited for


def test_residents_are_what_the_slots_hold(q4_pack: Path) -> None:
    loaded = load(q4_pack, Watch(), "floor")
    assert not loaded.residents().any()
    run(loaded)
    held = [layer.number * 16 + e for layer in loaded.engine.layers for e in layer.residents]
    assert np.flatnonzero(loaded.residents()).tolist() == sorted(held)
    assert load(q4_pack, Watch(), "all").residents().all()


class FakeWorker:
    """A worker with a model in memory, or none."""

    def __init__(self, loaded: Loaded | None) -> None:
        self.loaded = loaded
        self.is_closed = False
        self.n_running = self.n_waiting = 0
        self.loading: str | None = None

    def view(self, look: Any) -> Any:
        """See Worker."""
        return look(self.loaded, self.loaded.counts() if self.loaded else Counts())


async def heard(events: AsyncGenerator[str]) -> dict[str, Any]:
    """The next events, by name."""
    text = await anext(events)
    found = re.findall(r"event: (\w+)\ndata: (.*)\n\n", text)
    return {name: json.loads(data) for name, data in found}


def test_a_page_is_told_the_model_then_what_changed(q4_pack: Path) -> None:
    watch = Watch()
    loaded = load(q4_pack, watch, "floor")
    worker: Any = FakeWorker(None)

    async def look() -> None:
        events = live_events(worker)
        first = await heard(events)
        assert first["model"] == {"model": None}
        worker.loaded = loaded
        second = await heard(events)
        assert second["model"]["model"] == "q4"
        assert [m["experts"] for m in second["model"]["modules"]] == [16, 16]
        assert second["model"]["plan"]["total"] == loaded.engine.plan.total
        assert second["tick"]["uses"] is None
        run(loaded)
        third = await heard(events)
        assert set(third) == {"tick"}
        uses = np.frombuffer(b64decode(third["tick"]["uses"]), np.uint8)
        assert uses.tolist() == [min(n, 255) for n in loaded.usage.counts]
        bits = np.unpackbits(np.frombuffer(b64decode(third["tick"]["residents"]), np.uint8))
        assert bits.tolist() == loaded.residents().tolist()
        assert third["tick"]["generated_tokens"] == 10
        quiet = await heard(events)  # only that it is still there
        assert quiet["tick"]["uses"] is quiet["tick"]["residents"] is None
        worker.is_closed = True
        with pytest.raises(StopAsyncIteration):
            await anext(events)

    watch.n_pages = 1
    asyncio.run(look())


def test_a_page_too_many_is_refused() -> None:
    worker: Any = FakeWorker(None)
    watch = Watch()
    opened = [LiveResponse(worker, watch) for _ in range(MAX_PAGES)]  # all before any began
    with pytest.raises(ApiError) as error:
        LiveResponse(worker, watch)
    assert error.value.status == 429
    worker.is_closed = True

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
    for response in opened:
        asyncio.run(response(scope, receive, send))
    assert watch.n_pages == 0
    LiveResponse(worker, watch)


def test_the_page_is_open_strict_and_its_data_wants_the_key(q4_pack: Path) -> None:
    with served(q4_pack, "--api-key", "k") as (url, _):
        for path, (content, kind) in page_files().items():
            reply = httpx.get(url + path)
            assert reply.content == content
            assert reply.headers["content-type"].startswith(kind)
            policy = reply.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
        assert httpx.get(f"{url}/settings").json() == {"needs_key": True}
        assert httpx.get(f"{url}/events").status_code == 401


def test_every_file_of_the_page_is_served_and_none_reaches_out() -> None:
    folder = Path(__file__).parents[2] / "tools" / "serving" / "page"
    names = {"index.html" if path == "/" else path[1:] for path in page_files()}
    assert names == {path.name for path in folder.iterdir()}
    for path in folder.iterdir():
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "://" not in text, path.name
        assert "innerHTML" not in text, path.name
        assert "insertAdjacentHTML" not in text, path.name
    page = (folder / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", page)
