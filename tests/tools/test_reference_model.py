"""The source with its experts left in its shards gives the bits of the fully loaded one."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import tiny_models
from families import FAMILIES, write_checkpoint
from mlx.utils import tree_flatten
from tiny_models import random_tokens

import moepack.tools.reference_model
from moepack.formats.errors import BudgetError, SourceError
from moepack.formats.sizes import parse_size
from moepack.packer.checkpoint import ConvertOptions, load_source_model, understand
from moepack.packer.source import SourceFolder, open_source
from moepack.runtime.half import compute_in_float32
from moepack.runtime.memory import SLACK
from moepack.tools.logits import logits_by_position
from moepack.tools.reference_model import (
    DerivedArrays,
    ScratchFile,
    ShardExperts,
    deriving_nbytes,
    load_bounded,
    load_reference,
)

TOP_K = 4
QUANTIZE = ConvertOptions(quantize=True, q_group_size=32)
HALF = ConvertOptions(dtype="bfloat16")


def logits_bits(model: nn.Module, tokens: list[int]) -> bytes:
    """The bits of all logits, of a prompt in chunks and an answer token by token."""
    return b"".join(
        np.array(logits.astype(mx.float32)).tobytes()
        for logits in logits_by_position(model, tokens, 16)
    )


def check_equal(source: SourceFolder, options: ConvertOptions, tokens: list[int], n: int) -> None:
    """Both models give the same bits; of the bounded one every expert module was replaced."""
    whole, _ = load_source_model(source, options)
    compute_in_float32(whole)
    bounded = load_bounded(source, options, n)
    assert logits_bits(bounded, tokens) == logits_bits(whole, tokens)
    replaced = [m for _, m in bounded.named_modules() if isinstance(m, ShardExperts)]
    assert replaced
    assert all(a.shape[0] == 1 for m in replaced for _, a in tree_flatten(m.parameters()))


def per_expert_source(float_source: Path, folder: Path) -> Path:
    """The Hugging Face layout in two shards: every expert tensor is derived."""
    weights = tiny_models.per_expert(tiny_models.read_weights(float_source))
    return tiny_models.resave(float_source, folder, weights, n_shards=2)


def half_source(float_source: Path, folder: Path) -> Path:
    """Stored in bfloat16: passed through, and computed in float32."""
    weights = tiny_models.read_weights(float_source)
    return tiny_models.resave(
        float_source, folder, {n: a.astype(mx.bfloat16) for n, a in weights.items()}
    )


def as_it_is(float_source: Path, folder: Path) -> Path:
    """The float32 checkpoint itself."""
    return float_source


SOURCES = [
    pytest.param(as_it_is, ConvertOptions(), id="float32"),
    pytest.param(as_it_is, QUANTIZE, id="float32, -q"),
    pytest.param(as_it_is, HALF, id="float32, --dtype bfloat16"),
    pytest.param(half_source, ConvertOptions(), id="bfloat16"),
    pytest.param(per_expert_source, ConvertOptions(), id="per expert"),
    pytest.param(per_expert_source, QUANTIZE, id="per expert, -q"),
]


@pytest.mark.parametrize("n_at_once", [TOP_K, 7, 16])
@pytest.mark.parametrize(("make", "options"), SOURCES)
def test_experts_in_their_shards_give_the_bits_of_the_loaded_model(
    make: Callable[[Path, Path], Path],
    options: ConvertOptions,
    n_at_once: int,
    float_source: Path,
    tmp_path: Path,
) -> None:
    source = open_source(str(make(float_source, tmp_path / "s")))
    check_equal(source, options, random_tokens(40), n_at_once)


def test_so_do_experts_in_4_bits(q4_source: Path) -> None:
    check_equal(open_source(str(q4_source)), ConvertOptions(), random_tokens(40), TOP_K)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("gpt_oss", None),  # biases
        ("gpt_oss", "mxfp4"),
        ("deepseek_v3", None),
        ("deepseek_v3", "affine"),
        ("gemma4", None),
        ("nemotron_h", None),  # SwitchMLP
        ("phixtral", None),
        ("deepseek_v41", None),  # switch layers that are no experts
    ],
)
def test_so_do_families(name: str, mode: str | None, tmp_path: Path) -> None:
    source = open_source(str(write_checkpoint(FAMILIES[name], tmp_path / "s", mode)))
    check_equal(source, ConvertOptions(), [t % 150 for t in random_tokens(40)], TOP_K)


def test_so_does_a_family_with_biases_in_half_precision(tmp_path: Path) -> None:
    source = open_source(str(write_checkpoint(FAMILIES["gpt_oss"], tmp_path / "s", None)))
    check_equal(source, HALF, [t % 150 for t in random_tokens(40)], TOP_K)


@pytest.mark.parametrize(("make", "options"), SOURCES)
def test_nothing_of_an_expert_stays_after_a_call(
    make: Callable[[Path, Path], Path], options: ConvertOptions, float_source: Path, tmp_path: Path
) -> None:
    source = open_source(str(make(float_source, tmp_path / "s")))
    mx.clear_cache()
    before = mx.get_active_memory()
    model = load_bounded(source, options, TOP_K)
    loaded = mx.get_active_memory() - before
    logits_bits(model, random_tokens(20))
    mx.clear_cache()
    stayed = mx.get_active_memory() - before - loaded
    assert stayed < expert_nbytes(source, options) // 16


def expert_nbytes(source: SourceFolder, options: ConvertOptions) -> int:
    """Bytes of all experts."""
    model, _ = load_source_model(source, options)
    names = dict(tree_flatten(model.parameters()))
    return sum(array.nbytes for name, array in names.items() if ".switch_mlp." in name)


DERIVED = [p for p in SOURCES if p.id not in ("float32", "bfloat16")]


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry for each time that mlx-lm's loader is asked to compute experts' tensors."""
    found: list[None] = []
    loader = moepack.tools.reference_model.load_source_lazily

    def noting(*arguments: Any) -> nn.Module:
        found.append(None)
        return loader(*arguments)

    monkeypatch.setattr(moepack.tools.reference_model, "load_source_lazily", noting)
    return found


@pytest.mark.parametrize(("make", "options"), DERIVED)
def test_computed_experts_are_computed_once_however_many_calls(
    make: Callable[[Path, Path], Path],
    options: ConvertOptions,
    float_source: Path,
    tmp_path: Path,
    loads: list[None],
) -> None:
    source = open_source(str(make(float_source, tmp_path / "s")))
    model = load_bounded(source, options, TOP_K)
    first = logits_bits(model, random_tokens(20))
    assert logits_bits(model, random_tokens(20)) == first
    assert len(loads) == 1


@pytest.mark.parametrize("share", [0, 0.5])
def test_where_the_disk_is_full_they_are_computed_again_to_the_same_bits(
    share: float, float_source: Path, tmp_path: Path, loads: list[None]
) -> None:
    source = open_source(str(float_source))
    wanted = logits_bits(load_bounded(source, QUANTIZE, TOP_K), random_tokens(20))
    scratch = ScratchFile(tmp_path)
    scratch.room = int(expert_nbytes(source, QUANTIZE) * share)
    loads.clear()
    model = load_bounded(source, QUANTIZE, TOP_K, scratch)
    assert logits_bits(model, random_tokens(20)) == wanted
    assert len(loads) > 10  # once a call and more


def test_a_scratch_file_has_no_name_and_no_more_than_its_share(tmp_path: Path) -> None:
    scratch = ScratchFile(tmp_path)
    scratch.room = 1000
    kept = scratch.keep(mx.arange(200, dtype=mx.float32).reshape(50, 4))
    assert kept is not None
    assert scratch.keep(mx.zeros((51,), dtype=mx.float32)) is None
    rows = [memoryview(bytearray(16)), memoryview(bytearray(16))]
    kept.read_rows([49, 3], rows)
    assert [row.cast("f").tolist() for row in rows] == [[196, 197, 198, 199], [12, 13, 14, 15]]
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_while_writing_is_an_error_that_names_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(moepack.tools.reference_model, "write_range", full)
    with pytest.raises(SourceError, match=f"{tmp_path}: a scratch file: No space left"):
        ScratchFile(tmp_path).keep(mx.zeros((1,)))


@pytest.mark.parametrize(("make", "options"), DERIVED)
def test_computing_a_tensor_takes_no_more_memory_than_was_planned(
    make: Callable[[Path, Path], Path], options: ConvertOptions, float_source: Path, tmp_path: Path
) -> None:
    source = open_source(str(make(float_source, tmp_path / "s")))
    checkpoint = understand(source, options)
    planned = deriving_nbytes(source, options, checkpoint)
    derived = DerivedArrays(source, options, checkpoint)
    for name in sorted(derived._names):
        array = derived.take(name)
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(array)
        assert mx.get_peak_memory() - before <= planned
        del array


def test_the_model_is_loaded_whole_where_it_fits_and_else_by_experts(q4_source: Path) -> None:
    source = open_source(str(q4_source))
    whole, _, how = load_reference(
        source, ConvertOptions(), [TOP_K], bound=10**9, taken=[10**6], name="--memory"
    )
    assert "loaded fully" in how
    assert not any(isinstance(m, ShardExperts) for m in whole.modules())
    bound = int(1e6 * SLACK) + source.nbytes // 2
    bounded, _, how = load_reference(
        source, ConvertOptions(), [TOP_K], bound=bound, taken=[10**6], name="--memory"
    )
    assert "read from its shards" in how
    assert any(isinstance(m, ShardExperts) for m in bounded.modules())


def test_less_is_taken_by_others_where_the_most_leaves_too_little(q4_source: Path) -> None:
    source, taken = open_source(str(q4_source)), [10**9, 10**7, 10**6]
    bound = int(1e7 * SLACK) + source.nbytes // 2  # by experts with the second, whole with the last
    *_, place, how = load_reference(
        source, ConvertOptions(), [TOP_K], bound=bound, taken=taken, name="--memory"
    )
    assert (place, "loaded fully" in how) == (2, True)
    *_, place, how = load_reference(
        source, ConvertOptions(), [TOP_K], bound=bound, taken=taken[:2], name="--memory"
    )
    assert (place, "read from its shards" in how) == (1, True)


@pytest.mark.parametrize("make", [as_it_is, per_expert_source])
def test_the_smallest_memory_named_works(
    make: Callable[[Path, Path], Path], float_source: Path, tmp_path: Path
) -> None:
    source = open_source(str(make(float_source, tmp_path / "s")))
    with pytest.raises(BudgetError, match=r"--memory is 1 MB, too little") as caught:
        load_reference(source, QUANTIZE, [TOP_K], bound=10**6, taken=[10**9], name="--memory")
    smallest = parse_size(str(caught.value).split()[-1])
    load_reference(source, QUANTIZE, [TOP_K], bound=smallest, taken=[10**9], name="--memory")


def test_a_shard_that_was_cut_since_is_an_error_that_names_it(
    float_source: Path, tmp_path: Path
) -> None:
    weights = tiny_models.read_weights(float_source)
    folder = tiny_models.resave(float_source, tmp_path / "s", weights)
    model = load_bounded(open_source(str(folder)), ConvertOptions(), TOP_K)
    (shard,) = folder.glob("*.safetensors")
    with shard.open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(SourceError, match=shard.name):
        logits_bits(model, random_tokens(4))
