"""From a pack to a model: what is refused, what is planned, what is resident."""

import gc
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import mlx_lm.utils
import pytest
import tiny_models
from conftest import forge_file, make_pack
from tiny_models import greedy_text, random_tokens, run_prompt

import moepack.runtime.loading
from moepack.formats.codec import encode
from moepack.formats.errors import BudgetError, FormatError, SourceError
from moepack.formats.geometry import Part, align_up, lay_out_parts
from moepack.formats.manifest import ExpertModule, Manifest
from moepack.formats.pack import MANIFEST_NAME, Pack
from moepack.formats.sizes import parse_size
from moepack.runtime import load, load_model
from moepack.runtime.loading import load_engine
from moepack.runtime.memory import START_VARIATION
from moepack.runtime.streamed import StreamedExperts

TOP_K = 4
BASE = 300 * 10**6


@pytest.fixture
def pack(q4_pack: Path, tmp_path: Path) -> Path:
    """A copy of the 4-bit pack, to forge."""
    return Path(shutil.copytree(q4_pack, tmp_path / "copy.moepack"))


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that always has the same memory in use."""
    monkeypatch.setattr(moepack.runtime.loading, "resident_memory", lambda: BASE)


def floor_nbytes(pack: Path) -> int:
    """Bytes of top-k slots in every layer."""
    return sum(m.record_nbytes * TOP_K for m in Pack.open(pack).manifest.modules)


def forge(pack: Path, change: Callable[[Manifest], Manifest]) -> None:
    """Rewrite the manifest; files are cut or grown to the sizes it then states."""
    manifest = change(Pack.open(pack).manifest)
    (pack / MANIFEST_NAME).write_bytes(encode(manifest))
    os.truncate(pack / "shared.bin", manifest.shared_nbytes)
    for module in manifest.modules:
        os.truncate(pack / module.file, module.stride * module.n_experts)


def forge_module(pack: Path, change: Callable[[ExpertModule], ExpertModule]) -> None:
    """Rewrite the first module's entry."""

    def change_first(manifest: Manifest) -> Manifest:
        first, *rest = manifest.modules
        return replace(manifest, modules=(change(first), *rest))

    forge(pack, change_first)


def test_missing_shared_tensor_is_named(pack: Path) -> None:
    """Else it would keep the weights that the model was built with."""
    name = Pack.open(pack).manifest.shared[-1].name
    forge(
        pack,
        lambda m: replace(m, shared=m.shared[:-1], shared_nbytes=m.shared[-1].offset),
    )
    with pytest.raises(FormatError, match=f"'{re.escape(name)}' is missing from the pack"):
        load_engine(pack)


def test_shared_tensor_of_a_wrong_shape_is_named(pack: Path) -> None:
    """As many bytes, in other rows."""

    def change(manifest: Manifest) -> Manifest:
        last = manifest.shared[-1]
        return replace(
            manifest, shared=(*manifest.shared[:-1], replace(last, shape=(1, *last.shape)))
        )

    name = Pack.open(pack).manifest.shared[-1].name
    forge(pack, change)
    with pytest.raises(FormatError, match=f"'{re.escape(name)}': shape .* the model wants"):
        load_engine(pack)


def test_shared_tensor_that_the_model_does_not_have_is_named(pack: Path) -> None:
    """Renamed, so that two things are wrong; one is named."""

    def change(manifest: Manifest) -> Manifest:
        first, *rest = manifest.shared
        return replace(manifest, shared=(replace(first, name="model.surprise"), *rest))

    forge(pack, change)
    with pytest.raises(FormatError, match=r"'model\.surprise': the model has no such parameter"):
        load_engine(pack)


def test_module_that_the_model_does_not_have_is_named(pack: Path) -> None:
    """A path of another model."""
    forge_module(pack, lambda m: replace(m, path="model.layers.9.mlp.switch_mlp"))
    with pytest.raises(FormatError, match=r"model\.layers\.9\.mlp\.switch_mlp|layers\.1\.mlp"):
        load_engine(pack)


def test_module_that_is_no_expert_module_is_refused(pack: Path) -> None:
    """The whole sparse block instead of its experts."""
    forge_module(pack, lambda m: replace(m, path="model.layers.1.self_attn", quantization={}))
    with pytest.raises(FormatError):
        load_engine(pack)


def test_missing_part_is_named(pack: Path) -> None:
    """A record without the biases of one projection."""

    def change(module: ExpertModule) -> ExpertModule:
        left = [p for p in module.parts if p.name != "up_proj.biases"]
        parts = lay_out_parts((p.name, p.dtype, p.shape) for p in left)
        nbytes = sum(p.nbytes for p in parts)
        return replace(module, parts=parts, record_nbytes=nbytes, stride=align_up(nbytes))

    forge_module(pack, change)
    with pytest.raises(FormatError, match=r"up_proj\.biases"):
        load_engine(pack)


@pytest.mark.parametrize("expert_cache", ["all", "floor"])
def test_part_of_a_wrong_shape_is_named(pack: Path, expert_cache: str) -> None:
    """As many bytes, in other rows: refused when loading, not when running."""

    def change(module: ExpertModule) -> ExpertModule:
        parts = list(module.parts)
        rows, columns = parts[-1].shape
        parts[-1] = replace(parts[-1], shape=(rows * 2, columns // 2))
        return replace(module, parts=tuple(parts))

    name = Pack.open(pack).manifest.modules[0].parts[-1].name
    forge_module(pack, change)
    with pytest.raises(FormatError, match=re.escape(name)):
        load_engine(pack, expert_cache=expert_cache)


@pytest.mark.parametrize(("of", "dtype"), [("weight", "F32"), ("scales", "U32")])
def test_part_of_a_wrong_type_is_named(pack: Path, of: str, dtype: str) -> None:
    """As many bytes: integers in place of floats, or the other way around."""

    def change(module: ExpertModule) -> ExpertModule:
        parts = [replace(p, dtype=dtype) if p.name == f"up_proj.{of}" else p for p in module.parts]
        return replace(module, parts=tuple(parts))

    forge_module(pack, change)
    with pytest.raises(FormatError, match=rf"up_proj\.{of}.*the model wants"):
        load_engine(pack)


def test_part_that_the_model_does_not_have_is_named(pack: Path) -> None:
    """One more than the projection has."""

    def change(module: ExpertModule) -> ExpertModule:
        nbytes = module.record_nbytes + 64
        extra = Part("up_proj.surprise", "U8", (64,), module.record_nbytes, 64)
        stride = align_up(nbytes)
        parts = (*module.parts, extra)
        return replace(module, parts=parts, record_nbytes=nbytes, stride=stride)

    forge_module(pack, change)
    with pytest.raises(FormatError, match=r"up_proj\.surprise"):
        load_engine(pack)


@pytest.mark.parametrize("n_experts", [8, 17])
def test_another_number_of_experts_than_the_model_has_is_refused(
    pack: Path, n_experts: int
) -> None:
    """The router would pick experts that are not there, or never the last one."""

    def change(module: ExpertModule) -> ExpertModule:
        digests = (module.digests * 2)[: n_experts * 16]
        return replace(module, n_experts=n_experts, digests=digests)

    forge_module(pack, change)
    with pytest.raises(FormatError, match="expert"):
        load_engine(pack, expert_cache="floor")


def test_config_that_mlx_lm_cannot_build_is_refused(pack: Path) -> None:
    """Edited by hand."""
    text = (pack / "config.json").read_text()
    forge_file(pack, "config.json", text.replace('"qwen3_moe"', '"nosuchmodel"'))
    with pytest.raises(FormatError, match="mlx-lm cannot build the model"):
        load_engine(pack)


def test_code_that_a_pack_names_never_runs(pack: Path, tmp_path: Path) -> None:
    """A pack comes from a stranger."""
    marker = tmp_path / "ran"
    (pack / "evil.py").write_text(f"open({str(marker)!r}, 'w')")
    text = (pack / "config.json").read_text()
    forge_file(pack, "config.json", text.replace("{", '{"model_file": "evil.py",', 1))
    with pytest.raises(FormatError, match=r"evil\.py"):
        load_engine(pack)
    assert not marker.exists()


def test_expert_file_that_vanishes_is_one_error(
    pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between opening the pack and opening the file."""
    opened = Pack.open(pack)
    (pack / opened.manifest.modules[1].file).unlink()
    with pytest.raises(FormatError, match=r"00001\.bin: No such file"):
        load_engine(opened, expert_cache="floor")
    gc.collect()


def test_smallest_expert_cache_works(q4_pack: Path) -> None:
    """top-k slots a layer."""
    engine = load_engine(q4_pack, expert_cache=floor_nbytes(q4_pack))
    assert engine.plan.slots_per_layer == (TOP_K, TOP_K)
    assert engine.plan.slots == floor_nbytes(q4_pack)


def test_floor_is_the_smallest_expert_cache(q4_pack: Path) -> None:
    """By name."""
    engine = load_engine(q4_pack, expert_cache="floor")
    assert engine.plan.slots_per_layer == (TOP_K, TOP_K)


def test_one_byte_less_than_the_smallest_cache_is_refused_naming_it(q4_pack: Path) -> None:
    """And the size that the message names works when typed."""
    least = floor_nbytes(q4_pack)
    with pytest.raises(BudgetError, match=r"the smallest that works is \d") as raised:
        load_engine(q4_pack, expert_cache=least - 1)
    named = str(raised.value).split("works is ")[1].split()[0]
    assert named == "73.73kB"  # 73,728 bytes
    assert least <= parse_size(named) < least * 1.01
    assert load_engine(q4_pack, expert_cache=named).plan.slots_per_layer == (TOP_K, TOP_K)


@pytest.mark.parametrize(
    ("n_slots", "extra", "expected"), [(5, 0, 5), (5, 1, 5), (6, -1, 5), (15, 0, 15)]
)
def test_expert_cache_gives_as_many_slots_as_fit(
    q4_pack: Path, n_slots: int, extra: int, expected: int
) -> None:
    """Whole slots, in every layer the same."""
    nbytes = floor_nbytes(q4_pack) // TOP_K * n_slots + extra
    engine = load_engine(q4_pack, expert_cache=nbytes)
    assert engine.plan.slots_per_layer == (expected, expected)
    assert engine.plan.slots <= nbytes
    assert not engine.plan.is_resident


@pytest.mark.parametrize("expert_cache", ["all", "1GB", None, "auto"])
def test_resident_engine_is_mlx_lms_model(
    q4_pack: Path, q4_source: Path, expert_cache: str | None
) -> None:
    """No module of ours is left in it."""
    engine = load_engine(q4_pack, expert_cache=expert_cache)
    assert engine.plan.is_resident
    assert engine.layers == ()
    assert not any(isinstance(m, StreamedExperts) for _, m in engine.model.named_modules())
    loaded, _ = mlx_lm.utils.load_model(q4_source)
    assert type(engine.model) is type(loaded)
    prompt = random_tokens(30)
    assert mx.array_equal(run_prompt(engine.model, prompt), run_prompt(loaded, prompt))


@pytest.mark.usefixtures("steady")
def test_memory_that_is_too_small_names_the_smallest_that_works(q4_pack: Path) -> None:
    """Typed in, it works and gives top-k slots or few more."""
    with pytest.raises(BudgetError, match="--memory is 1 MB, too little") as raised:
        load_engine(q4_pack, memory="1MB")
    least = str(raised.value).split("--memory ")[-1].split()[0]
    engine = load_engine(q4_pack, memory=least)
    assert engine.plan.slots_per_layer[0] >= TOP_K
    assert engine.plan.total <= parse_size(least)
    with pytest.raises(BudgetError, match=f"--memory {least}"):
        load_engine(q4_pack, memory=int(parse_size(least) * 0.99) - START_VARIATION)


def test_smallest_memory_named_works_in_a_process_that_is_a_little_larger(
    q4_pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No two processes start with the same memory in use."""
    monkeypatch.setattr(moepack.runtime.loading, "resident_memory", lambda: BASE)
    with pytest.raises(BudgetError) as raised:
        load_engine(q4_pack, memory="1MB")
    least = str(raised.value).split("--memory ")[-1].split()[0]
    monkeypatch.setattr(moepack.runtime.loading, "resident_memory", lambda: BASE + 500_000)
    assert load_engine(q4_pack, memory=least).plan.slots_per_layer[0] >= TOP_K


@pytest.mark.usefixtures("steady")
def test_memory_and_expert_cache_both_bound_the_slots(q4_pack: Path) -> None:
    """The smaller one counts, whichever it is."""
    per_slot = floor_nbytes(q4_pack) // TOP_K
    fixed = load_engine(q4_pack, expert_cache="floor", prefill_step=64).plan
    enough = int((fixed.total + 6 * per_slot) * 1.03)
    one = load_engine(q4_pack, memory=enough, expert_cache=5 * per_slot, prefill_step=64)
    assert one.plan.slots_per_layer == (5, 5)
    room_for_7 = int((fixed.total + 3 * per_slot) * 1.02) + 1
    two = load_engine(q4_pack, memory=room_for_7, expert_cache=12 * per_slot, prefill_step=64)
    assert two.plan.slots_per_layer == (7, 7)


@pytest.mark.usefixtures("steady")
def test_all_experts_within_too_small_a_memory_are_refused(q4_pack: Path) -> None:
    """Not silently fewer."""
    fixed = load_engine(q4_pack, expert_cache="floor", prefill_step=64).plan
    with pytest.raises(BudgetError, match="--expert-cache all needs 295 kB"):
        load_engine(
            q4_pack, memory=int(fixed.total * 1.02) + 1, expert_cache="all", prefill_step=64
        )


@pytest.mark.parametrize("option", ["memory", "expert_cache"])
@pytest.mark.parametrize("value", ["", "lots", "-1GB", "8 GBit", "nan"])
def test_size_that_is_none_is_refused_naming_the_option(
    q4_pack: Path, option: str, value: str
) -> None:
    """With the way to write it."""
    sizes: dict[str, Any] = {option: value}
    with pytest.raises(SourceError, match=f"{option}: .* is not a size; write it as 8GB"):
        load_engine(q4_pack, **sizes)


@pytest.mark.parametrize("expert_cache", ["floor", "all"])
def test_fewer_experts_a_token_are_what_mlx_lm_gives_with_such_a_config(
    q4_pack: Path, q4_source: Path, tmp_path: Path, expert_cache: str
) -> None:
    """Chosen and weighed by the model's own router."""
    source = Path(shutil.copytree(q4_source, tmp_path / "source"))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "num_experts_per_tok": 2}))
    theirs, _ = mlx_lm.utils.load_model(source)
    engine = load_engine(q4_pack, expert_cache=expert_cache, lossy_top_k=2)
    if expert_cache == "floor":
        assert engine.plan.slots_per_layer == (2, 2)
    tokens = random_tokens(40)
    wanted = run_prompt(theirs, tokens, n_decoded=8)
    assert mx.array_equal(run_prompt(engine.model, tokens, n_decoded=8), wanted)


def test_more_experts_a_token_than_the_model_picks_are_refused(q4_pack: Path) -> None:
    """It would be no less, and not what was asked."""
    with pytest.raises(SourceError, match=r"--lossy-top-k 5: the routers of this model pick 4"):
        load_engine(q4_pack, lossy_top_k=5)


def test_load_gives_the_pair_that_mlx_lm_gives(q4_pack: Path, q4_source: Path) -> None:
    """Model and tokenizer, text for text."""
    model, tokenizer = load(q4_pack, expert_cache="100kB")
    theirs, their_tokenizer = mlx_lm.load(str(q4_source))
    assert type(tokenizer) is type(their_tokenizer)
    assert tokenizer.eos_token_ids == their_tokenizer.eos_token_ids
    prompt = random_tokens(12)
    text = greedy_text(model, tokenizer, prompt)
    assert text == greedy_text(theirs, their_tokenizer, prompt)
    chat = [{"role": "user", "content": tiny_models.text_of(prompt)}]
    assert tokenizer.apply_chat_template(chat) == their_tokenizer.apply_chat_template(chat)


def test_pack_without_tokenizer_loads_as_a_model_only(tmp_path: Path) -> None:
    """`load` says what is missing."""
    source = tiny_models.write_checkpoint(tmp_path / "source", bits=4, with_tokenizer=False)
    pack = make_pack(source, tmp_path / "out.moepack")
    model, config = load_model(pack, expert_cache="floor")
    assert config["model_type"] == "qwen3_moe"
    assert run_prompt(model, [1, 2, 3], n_decoded=0).shape == (3, tiny_models.VOCAB)
    with pytest.raises(SourceError, match="no usable tokenizer"):
        load(pack)


@pytest.mark.parametrize("path", ["missing", "checkpoint", "empty"])
def test_what_is_no_pack_is_refused(tmp_path: Path, q4_source: Path, path: str) -> None:
    """With what to do."""
    (tmp_path / "empty").mkdir()
    folder = q4_source if path == "checkpoint" else tmp_path / path
    with pytest.raises(SourceError, match=r"moepack convert|not a pack"):
        load(folder)


def test_packs_slots_are_part_of_the_models_memory(q4_pack: Path) -> None:
    """Banks are the stock modules' parameters, of the planned size and no larger."""
    engine = load_engine(q4_pack, expert_cache="100kB")
    n_slots = engine.plan.slots_per_layer[0]
    banks = engine.layers[0].stock.parameters()
    assert {array.shape[0] for p in banks.values() for array in p.values()} == {n_slots}
    nbytes = sum(array.nbytes for p in banks.values() for array in p.values())
    assert nbytes == n_slots * engine.pack.manifest.modules[0].record_nbytes


def test_preload_makes_experts_resident(q4_pack: Path) -> None:
    """Before the first call, and uncounted."""
    engine = load_engine(q4_pack, expert_cache="100kB")
    engine.layers[0].preload([3, 9])
    assert set(engine.layers[0]._slots.slot_of) == {3, 9}
    engine.layers[0]._slots.check_integrity()
    assert engine.counters()[0].misses == 0


def test_model_can_be_loaded_many_times_without_leaking_files(q4_pack: Path) -> None:
    """A dropped engine closes its files and ends its threads."""

    def n_open() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc")
    load_engine(q4_pack, expert_cache="floor")
    gc.collect()
    before = n_open()
    for _ in range(5):
        engine = load_engine(q4_pack, expert_cache="floor")
        mx.eval(engine.model(mx.array([[1, 2]])))
    del engine
    gc.collect()
    assert n_open() <= before
