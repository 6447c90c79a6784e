"""The heart: a streamed pack gives the logits of the model that mlx-lm loads, bit for bit."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils
import pytest
import tiny_models
from conftest import make_pack
from mlx_lm import batch_generate
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
from tiny_models import greedy_text, random_tokens, run_prompt

from moepack.formats.pack import Pack
from moepack.packer.checkpoint import ConvertOptions, load_source_model
from moepack.packer.source import open_source
from moepack.runtime.loading import Engine, load_engine

N_EXPERTS = 16
TOP_K = 4


def open_engine(pack: Path, n_slots: int, **options: Any) -> Engine:
    """An engine with this many slots in every layer, streamed even if all fit."""
    modules = Pack.open(pack).manifest.modules
    nbytes = sum(m.record_nbytes * min(n_slots, m.n_experts) for m in modules)
    options = {"expert_cache": nbytes, "keep_streaming": True, **options}
    engine = load_engine(pack, **options)
    assert engine.plan.slots_per_layer == tuple(min(n_slots, m.n_experts) for m in modules)
    return engine


def check(engine: Engine) -> None:
    """The slots of every layer are in order."""
    for layer in engine.layers:
        layer._slots.check_integrity()


@pytest.fixture(scope="module")
def loaded(q4_source: Path) -> nn.Module:
    """The 4-bit checkpoint as mlx-lm loads it."""
    model: nn.Module = mlx_lm.utils.load_model(q4_source)[0]
    return model


@pytest.fixture(scope="module")
def tokenizer(q4_source: Path) -> Any:
    """The tokenizer as mlx-lm loads it."""
    return mlx_lm.utils.load_tokenizer(q4_source, eos_token_ids=[0])


PROMPTS = [(4, 2048), (200, 7), (200, 64), (200, 2048)]


@pytest.fixture(scope="module")
def truth(loaded: nn.Module) -> dict[tuple[int, int], mx.array]:
    """mlx-lm's logits, by prompt length and prefill step."""
    return {
        (n, step): run_prompt(loaded, random_tokens(n), step, n_decoded=24) for n, step in PROMPTS
    }


@pytest.mark.parametrize(("n_tokens", "step"), PROMPTS)
@pytest.mark.parametrize("n_slots", [4, 5, 6, 8, 11, 15, 16])
def test_streamed_logits_equal_loaded_ones(
    q4_pack: Path,
    truth: dict[tuple[int, int], mx.array],
    n_slots: int,
    n_tokens: int,
    step: int,
) -> None:
    """From top-k slots a layer to all, whatever the chunks of the prompt."""
    engine = open_engine(q4_pack, n_slots)
    assert len(engine.layers) == 2
    logits = run_prompt(engine.model, random_tokens(n_tokens), step, n_decoded=24)
    assert mx.array_equal(logits, truth[n_tokens, step])
    check(engine)


@pytest.mark.parametrize(("n_tokens", "step"), PROMPTS)
def test_resident_logits_equal_loaded_ones(
    q4_pack: Path, truth: dict[tuple[int, int], mx.array], n_tokens: int, step: int
) -> None:
    """All experts fit: mlx-lm's own modules run."""
    engine = open_engine(q4_pack, N_EXPERTS, keep_streaming=False)
    assert engine.layers == ()
    logits = run_prompt(engine.model, random_tokens(n_tokens), step, n_decoded=24)
    assert mx.array_equal(logits, truth[n_tokens, step])


FAMILIES: dict[str, dict[str, Any]] = {
    "float": {},
    "affine 3": {"bits": 3},
    "mxfp4": {"mode": "mxfp4"},
    "nvfp4": {"mode": "nvfp4"},
    "mxfp8": {"mode": "mxfp8"},
    "gpt_oss": {"config": tiny_models.GPT_OSS, "bits": 4},
    "gpt_oss mxfp4": {"config": tiny_models.GPT_OSS, "mode": "mxfp4"},
    "phixtral": {"config": tiny_models.PHIXTRAL, "bits": 4},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_expert_equals_its_loaded_self(tmp_path: Path, family: str) -> None:
    """Formats of weights, experts with biases, experts of two matrices; at top-k slots."""
    source = tiny_models.write_checkpoint(tmp_path / "source", **FAMILIES[family])
    pack = make_pack(source, tmp_path / "out.moepack")
    model, _ = mlx_lm.utils.load_model(source)
    n_slots = 2 if "config" in FAMILIES[family] else TOP_K
    engine = open_engine(pack, n_slots)
    for n_tokens in (3, 60):
        prompt = random_tokens(n_tokens)
        assert mx.array_equal(run_prompt(engine.model, prompt), run_prompt(model, prompt))
    check(engine)


def test_mixed_precision_equals_its_loaded_self(tmp_path: Path) -> None:
    """Records of other sizes in every layer."""

    def predicate(path: str, _: object) -> bool | dict[str, int]:
        if path.endswith(("down_proj", "mlp.gate")):
            return {"bits": 8, "group_size": 32}
        return {"bits": 6, "group_size": 32} if ".layers.2." in path else True

    source = tiny_models.write_checkpoint(tmp_path / "source", bits=4, predicate=predicate)
    engine = open_engine(make_pack(source, tmp_path / "out.moepack"), 5)
    model, _ = mlx_lm.utils.load_model(source)
    prompt = random_tokens(40)
    assert mx.array_equal(run_prompt(engine.model, prompt), run_prompt(model, prompt))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_scales_equal_their_loaded_self(
    float_source: Path, tmp_path: Path, dtype: str
) -> None:
    """Parts of 16-bit floats, of which NumPy knows one."""
    options = ConvertOptions(quantize=True, q_bits=4, q_group_size=32, dtype=dtype)
    pack = make_pack(float_source, tmp_path / "out.moepack", options)
    model, _ = load_source_model(open_source(str(float_source)), options)
    engine = open_engine(pack, TOP_K)
    prompt = random_tokens(20)
    assert mx.array_equal(run_prompt(engine.model, prompt), run_prompt(model, prompt))


@pytest.mark.skipif(mx.default_device().type == mx.DeviceType.gpu, reason="of the CPU backend")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("n_slots", [TOP_K, N_EXPERTS])
def test_unquantized_half_precision_runs_on_the_cpu(
    float_source: Path, float_pack: Path, tmp_path: Path, dtype: str, n_slots: int
) -> None:
    """Where mlx-lm cannot run it: the experts are computed in float32, near the float32 model."""
    pack = make_pack(float_source, tmp_path / "out.moepack", ConvertOptions(dtype=dtype))
    engine = open_engine(pack, n_slots)
    prompt = random_tokens(3)
    logits = run_prompt(engine.model, prompt, n_decoded=0)
    near = run_prompt(open_engine(float_pack, n_slots).model, prompt, n_decoded=0)
    assert mx.abs(logits.astype(mx.float32) - near).max().item() < 0.5


@pytest.mark.parametrize("n_slots", [4, 7, 16])
def test_batch_equals_loaded_batch_and_prompts_alone(
    q4_pack: Path, loaded: nn.Module, tokenizer: Any, n_slots: int
) -> None:
    """Three prompts of different lengths at once."""
    prompts = [random_tokens(n, seed=n) for n in (5, 40, 17)]
    engine = open_engine(q4_pack, n_slots)
    options = {"max_tokens": 12, "return_token_ids": True, "return_logprobs": True}
    streamed = batch_generate(engine.model, tokenizer, prompts, **options)
    resident = batch_generate(loaded, tokenizer, prompts, **options)
    assert streamed.token_ids == resident.token_ids
    assert streamed.logprobs == resident.logprobs
    check(engine)
    alone = [greedy_text(engine.model, tokenizer, prompt, 12) for prompt in prompts]
    assert streamed.texts == alone


def test_batch_of_rows_in_one_call_equals_loaded(q4_pack: Path, loaded: nn.Module) -> None:
    """Decoding many rows may need more experts than there are slots."""
    engine = open_engine(q4_pack, TOP_K)
    tokens = mx.array([random_tokens(9, seed=i) for i in range(6)])
    caches = make_prompt_cache(engine.model), make_prompt_cache(loaded)
    for part in (tokens, tokens[:, :1], tokens[:, 1:2]):
        one, two = engine.model(part, cache=caches[0]), loaded(part, cache=caches[1])
        assert mx.array_equal(one, two)
    check(engine)


def test_waves_equal_the_whole(q4_pack: Path) -> None:
    """A call cut in waves equals the same call on slots for all."""
    prompt = random_tokens(150)
    whole, cut = open_engine(q4_pack, N_EXPERTS), open_engine(q4_pack, 5)
    assert mx.array_equal(
        run_prompt(cut.model, prompt, n_decoded=0), run_prompt(whole.model, prompt, n_decoded=0)
    )
    assert cut.layers[0].counters.prefill.misses > 5


def test_resumed_prompt_cache_equals_fresh(
    q4_pack: Path, loaded: nn.Module, tmp_path: Path
) -> None:
    """A conversation saved by one process goes on in another."""
    prompt = random_tokens(120)
    file = str(tmp_path / "cache.safetensors")
    first = open_engine(q4_pack, 6)
    cache = make_prompt_cache(first.model)
    head = run_prompt(first.model, prompt[:90], n_decoded=0, cache=cache)
    save_prompt_cache(file, cache)
    second = open_engine(q4_pack, 5)
    tail = run_prompt(second.model, prompt[90:], cache=load_prompt_cache(file))
    cache = make_prompt_cache(loaded)
    assert mx.array_equal(head, run_prompt(loaded, prompt[:90], n_decoded=0, cache=cache))
    assert mx.array_equal(tail, run_prompt(loaded, prompt[90:], cache=cache))


def test_generated_text_equals_loaded(q4_pack: Path, loaded: nn.Module, tokenizer: Any) -> None:
    """mlx-lm's stream_generate, which builds one step ahead of what it evaluates."""
    prompt = random_tokens(30)
    engine = open_engine(q4_pack, TOP_K)
    expected = greedy_text(loaded, tokenizer, prompt, 60)
    assert greedy_text(engine.model, engine.tokenizer(), prompt, 60) == expected
    assert len(set(expected)) > 5
    check(engine)


def test_serial_reads_equal_parallel_ones(q4_pack: Path, loaded: nn.Module) -> None:
    """The number of workers changes neither bits nor counts."""
    prompt = random_tokens(80)
    parallel, serial = open_engine(q4_pack, 5), open_engine(q4_pack, 5)
    with ThreadPoolExecutor(1) as pool:
        for layer in serial.layers:
            layer._reader._pool = pool
        one = run_prompt(serial.model, prompt, step=32)
    two = run_prompt(parallel.model, prompt, step=32)
    assert mx.array_equal(one, two)
    assert mx.array_equal(two, run_prompt(loaded, prompt, step=32))
    for a, b in zip(serial.layers, parallel.layers, strict=True):
        assert a._slots.slot_of == b._slots.slot_of
        assert a.counters.decode.misses == b.counters.decode.misses


def test_two_models_on_one_pack_do_not_disturb_each_other(q4_pack: Path, loaded: nn.Module) -> None:
    """Two engines, step by step in turn."""
    engines = [open_engine(q4_pack, n_slots) for n_slots in (4, 9)]
    prompts = [random_tokens(30, seed=seed) for seed in (5, 6)]
    caches = [make_prompt_cache(e.model) for e in engines]
    rows: list[list[mx.array]] = [[], []]
    for start in range(0, 30, 3):
        for i, engine in enumerate(engines):
            chunk = mx.array([prompts[i][start : start + 3]])
            rows[i].append(engine.model(chunk, cache=caches[i])[0])
            mx.eval(rows[i][-1])
    for i, prompt in enumerate(prompts):
        expected = run_prompt(loaded, prompt, step=3, n_decoded=0)
        assert mx.array_equal(mx.concatenate(rows[i]), expected)


def tokens_of_distinct_experts(engine: Engine) -> tuple[int, int]:
    """Two tokens whose last layer picks no expert in common."""
    picked: dict[int, frozenset[int]] = {}
    slots = engine.layers[-1]._slots
    for token in range(1, 200):
        mx.eval(engine.model(mx.array([[token]])))
        newest = list(slots.slot_of)[-TOP_K:]
        for other, experts in picked.items():
            if experts.isdisjoint(newest):
                return other, token
        picked[token] = frozenset(newest)
    raise AssertionError("every two tokens share an expert")


def test_graph_not_yet_evaluated_survives_a_call_that_evicts_its_experts(
    q4_pack: Path, loaded: nn.Module
) -> None:
    """Logits of A are built, B takes A's slots, then A is evaluated."""
    engine = open_engine(q4_pack, TOP_K)
    a, b = tokens_of_distinct_experts(engine)
    lazy_a = engine.model(mx.array([[a]]))
    lazy_b = engine.model(mx.array([[b]]))
    assert mx.array_equal(lazy_a, loaded(mx.array([[a]])))
    assert mx.array_equal(lazy_b, loaded(mx.array([[b]])))


def test_graph_survives_a_call_without_misses_and_then_one_that_evicts(
    q4_pack: Path, loaded: nn.Module
) -> None:
    """Logits of A are built, again of A on the same experts, then B takes their slots."""
    engine = open_engine(q4_pack, TOP_K)
    a, b = tokens_of_distinct_experts(engine)
    first = engine.model(mx.array([[a]]))
    second = engine.model(mx.array([[a]]))
    third = engine.model(mx.array([[b]]))
    expected = loaded(mx.array([[a]]))
    assert mx.array_equal(third, loaded(mx.array([[b]])))
    assert mx.array_equal(second, expected)
    assert mx.array_equal(first, expected)


def test_graph_survives_a_prompt_that_runs_in_waves(q4_pack: Path, loaded: nn.Module) -> None:
    """Logits of A are built, a long prompt goes through every slot, then A is evaluated."""
    engine = open_engine(q4_pack, TOP_K)
    first = engine.model(mx.array([[7]]))
    second = engine.model(mx.array([[7]]))
    prompt = mx.array([random_tokens(100)])
    mx.eval(engine.model(prompt))
    expected = loaded(mx.array([[7]]))
    assert mx.array_equal(second, expected)
    assert mx.array_equal(first, expected)


@pytest.mark.parametrize("n_slots", [4, 7, 12])
def test_generations_interleaved_on_one_model_equal_loaded_ones(
    q4_pack: Path, loaded: nn.Module, n_slots: int
) -> None:
    """Separate caches, one model; every step of all is built before any is evaluated."""
    engine = open_engine(q4_pack, n_slots)
    prompts = [random_tokens(12, seed=seed) for seed in (8, 9, 10)]
    rows: dict[int, list[mx.array]] = {i: [] for i in range(3)}
    caches = [make_prompt_cache(engine.model) for _ in prompts]
    for position in range(12):
        for i, prompt in enumerate(prompts):
            token = mx.array([[prompt[position]]])
            rows[i].append(engine.model(token, cache=caches[i])[0])
    for i, prompt in enumerate(prompts):
        expected = run_prompt(loaded, prompt, step=1, n_decoded=0)
        assert mx.array_equal(mx.concatenate(rows[i]), expected)
    check(engine)


def test_same_prompt_twice_gives_the_same_logits(q4_pack: Path) -> None:
    """Whatever is in the slots by then."""
    engine = open_engine(q4_pack, 6)
    first = run_prompt(engine.model, random_tokens(50))
    run_prompt(engine.model, random_tokens(70, seed=3))
    assert mx.array_equal(run_prompt(engine.model, random_tokens(50)), first)
