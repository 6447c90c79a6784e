"""A failed read is one error; the engine goes on as if the call had not been."""

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils
import pytest
from tiny_models import greedy_text, random_tokens, run_prompt

from moepack.formats.errors import FormatError
from moepack.formats.pack import Pack
from moepack.runtime.loading import Engine, load_engine

N_SLOTS = 6


@pytest.fixture
def engine(q4_pack: Path, tmp_path: Path) -> Engine:
    """Six slots a layer, on a pack of its own."""
    pack = Pack.open(shutil.copytree(q4_pack, tmp_path / "copy.moepack"))
    nbytes = sum(m.record_nbytes * N_SLOTS for m in pack.manifest.modules)
    return load_engine(pack, expert_cache=nbytes)


@pytest.fixture
def loaded(q4_source: Path) -> nn.Module:
    """The same model by mlx-lm."""
    model: nn.Module = mlx_lm.utils.load_model(q4_source)[0]
    return model


def check(engine: Engine) -> None:
    """Every slot free or full."""
    for layer in engine.layers:
        layer._slots.check_integrity()
        assert not layer._slots._reserved


def failing_preadv(after: int, n_failures: int = 10**9) -> Callable[..., int]:
    """An os.preadv that fails from its call number `after` on, that often."""
    preadv = os.preadv
    n_calls = 0

    def read(fd: int, views: Sequence[memoryview], offset: int) -> int:
        nonlocal n_calls
        n_calls += 1
        if after < n_calls <= after + n_failures:
            for view in views:
                view[:] = b"\xff" * len(view)  # what a failed read leaves is nobody's
            raise OSError(errno.EIO, "I/O error")
        return preadv(fd, views, offset)

    return read


@pytest.mark.parametrize("after", [0, 5, 20, 33])
@pytest.mark.parametrize("n_failures", [1, 10**9])
def test_engine_works_again_after_a_failed_generation(
    engine: Engine,
    loaded: nn.Module,
    monkeypatch: pytest.MonkeyPatch,
    after: int,
    n_failures: int,
) -> None:
    """In the prompt or while decoding; half-read slots are never used."""
    prompt = random_tokens(9)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing_preadv(after, n_failures))
        with pytest.raises(FormatError, match=r"layer \d expert \d+: .*read failed"):
            run_prompt(engine.model, prompt, step=1, n_decoded=60)
    check(engine)
    assert mx.array_equal(run_prompt(engine.model, prompt), run_prompt(loaded, prompt))
    check(engine)


@pytest.mark.parametrize("after", [0, 3, 6, 9])
@pytest.mark.parametrize("n_failures", [1, 10**9])
def test_engine_works_again_after_a_failed_wave(
    engine: Engine,
    loaded: nn.Module,
    monkeypatch: pytest.MonkeyPatch,
    after: int,
    n_failures: int,
) -> None:
    """A long prompt reads one wave while another computes."""
    prompt = random_tokens(120)
    run_prompt(engine.model, random_tokens(5))  # so that some residents are there
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing_preadv(after, n_failures))
        with pytest.raises(FormatError, match=r"layer \d expert \d+: .*read failed"):
            run_prompt(engine.model, prompt)
    check(engine)
    assert mx.array_equal(run_prompt(engine.model, prompt), run_prompt(loaded, prompt))
    check(engine)


def test_cut_file_stops_mlx_lms_generation_and_the_whole_file_revives_it(
    engine: Engine, loaded: nn.Module
) -> None:
    """Through stream_generate, as a user meets it."""
    tokenizer: Any = engine.tokenizer()
    prompt = random_tokens(8)
    expected = greedy_text(loaded, tokenizer, prompt, 20)
    file = engine.pack.expert_file(engine.pack.manifest.modules[1])
    data = file.read_bytes()
    os.truncate(file, 0)
    with pytest.raises(FormatError, match=r"layer 1 expert \d+: .*00001\.bin ends at byte"):
        greedy_text(engine.model, tokenizer, prompt, 20)
    check(engine)
    with file.open("r+b") as same:
        same.write(data)
    assert greedy_text(engine.model, tokenizer, prompt, 20) == expected


def test_interrupt_while_reading_leaves_the_slots_in_order(
    engine: Engine, loaded: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in a chat ends the answer, not the session."""
    preadv = os.preadv
    n_calls = 0

    def read(fd: int, views: Sequence[memoryview], offset: int) -> int:
        nonlocal n_calls
        n_calls += 1
        if n_calls == 10:
            raise KeyboardInterrupt
        return preadv(fd, views, offset)

    prompt = random_tokens(20)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", read)
        with pytest.raises(KeyboardInterrupt):
            run_prompt(engine.model, prompt, step=1)
    check(engine)
    assert mx.array_equal(run_prompt(engine.model, prompt), run_prompt(loaded, prompt))
