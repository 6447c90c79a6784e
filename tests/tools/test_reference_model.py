"""The source with its experts left in its shards gives the bits of the fully loaded one."""

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import tiny_models
from families import FAMILIES, write_checkpoint
from mlx.utils import tree_flatten
from tiny_models import random_tokens

from moepack.formats.errors import BudgetError, SourceError
from moepack.formats.sizes import parse_size
from moepack.packer.checkpoint import ConvertOptions, load_source_model
from moepack.packer.source import SourceFolder, open_source
from moepack.runtime.half import compute_in_float32
from moepack.runtime.memory import SLACK
from moepack.tools.logits import logits_by_position
from moepack.tools.reference_model import ShardExperts, load_bounded, load_reference

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
