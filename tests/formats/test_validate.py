"""The rules that need no file, one test a rule. Each names the field or tensor it found."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from formats_strategies import replace_part, sample_manifest

from moepack.formats.codec import encode
from moepack.formats.errors import FormatError
from moepack.formats.manifest import CopiedFile, ExpertModule, Manifest, Quantization, Shard
from moepack.formats.validate import MAX_EXPERTS, MODES, validate, validate_file_name

MODULE = "module 'model.layers.0.mlp.switch_mlp'"
EMBEDDING = "shared tensor 'model.embed_tokens.weight'"
GATE = "shared tensor 'model.layers.0.mlp.gate.weight'"

OUTSIDE_NAMES = [
    "",
    ".",
    "..",
    "/",
    "/etc/passwd",
    "//x",
    "../x",
    "experts/..",
    "experts/../x",
    "experts/../../x",
    "./x",
    "experts/./x",
    "experts//x",
    "experts/",
    ".hidden",
    "experts/.hidden",
    ".experts/x",
    "a/b/c",
    "a\\b",
    "..\\x",
    "C:x",
    "C:\\x",
    "x\x00",
    "x\ny",
    "\x1b[2J",
    "x" * 256,
]


def refuse(manifest: Manifest, message: str) -> None:
    """Both the rules and the writer refuse it with a message that has `message` in it."""
    with pytest.raises(FormatError, match=re.escape(message)):
        validate(manifest)
    with pytest.raises(FormatError, match=re.escape(message)):
        encode(manifest)


def with_module(**changes: Any) -> Manifest:
    """The sample with its first module changed."""
    sample = sample_manifest()
    return replace(sample, modules=(replace(sample.modules[0], **changes), *sample.modules[1:]))


def with_part(index: int, **changes: Any) -> Manifest:
    """The sample with one part of its first module changed."""
    sample = sample_manifest()
    module = replace_part(sample.modules[0], index, **changes)
    return replace(sample, modules=(module, *sample.modules[1:]))


def with_tensor(index: int, **changes: Any) -> Manifest:
    """The sample with one shared tensor changed."""
    sample = sample_manifest()
    shared = list(sample.shared)
    shared[index] = replace(shared[index], **changes)
    return replace(sample, shared=tuple(shared))


def with_source(**changes: Any) -> Manifest:
    """The sample with its source changed."""
    sample = sample_manifest()
    return replace(sample, source=replace(sample.source, **changes))


def with_copied(name: str, nbytes: int = 1) -> Manifest:
    """The sample with one copied file."""
    return replace(sample_manifest(), files=(CopiedFile(name, nbytes, bytes(16)),))


def test_the_sample_is_valid() -> None:
    validate(sample_manifest())


# --- the manifest itself ---


@pytest.mark.parametrize("alignment", [-512, 0, 1, 256, 511, 513, 16_385, 2**25, 2**64])
def test_alignment_must_be_a_power_of_two_in_range(alignment: int) -> None:
    refuse(
        replace(sample_manifest(), alignment=alignment),
        f"manifest alignment: {alignment} is not a power of two from 512 to 16,777,216",
    )


@pytest.mark.parametrize("text", ["", "x" * 1025, "a\nb", "\x1b[31m", "\u202e", "\x00"], ids=ascii)
@pytest.mark.parametrize("field", ["model_type", "created_by"])
def test_text_must_be_short_and_printable(field: str, text: str) -> None:
    changes: dict[str, Any] = {field: text}
    refuse(replace(sample_manifest(), **changes), f"manifest {field}: a printable text")


def test_zero_modules_are_refused() -> None:
    refuse(replace(sample_manifest(), modules=()), "manifest modules: none")


def test_two_modules_with_one_path_are_refused() -> None:
    first, second = sample_manifest().modules
    refuse(
        replace(sample_manifest(), modules=(first, replace(second, path=first.path))),
        f"manifest modules: path {first.path!r} occurs twice",
    )


def test_two_modules_with_one_file_are_refused() -> None:
    first, second = sample_manifest().modules
    refuse(
        replace(sample_manifest(), modules=(first, replace(second, file=first.file))),
        "manifest modules: file 'experts/00000.bin' occurs twice",
    )


# --- file names ---


@pytest.mark.parametrize("name", OUTSIDE_NAMES, ids=ascii)
def test_a_file_name_that_could_leave_the_pack_is_refused(name: str) -> None:
    with pytest.raises(FormatError, match=r"^x: .* is not a relative file name inside the pack"):
        validate_file_name("x", name)


@pytest.mark.parametrize(
    "name", ["x", "experts/00000.bin", "a b", "LICENSE", "é.json", "x" * 255, "~", "a..b"]
)
def test_a_plain_file_name_is_accepted(name: str) -> None:
    validate_file_name("x", name)


@pytest.mark.parametrize("name", OUTSIDE_NAMES, ids=ascii)
def test_an_expert_file_must_be_in_the_pack(name: str) -> None:
    refuse(with_module(file=name), f"{MODULE} file: {name!r} is not a relative file name")


@pytest.mark.parametrize("name", ["00000.bin", "config.json", "shared.bin", "other/00000.bin"])
def test_an_expert_file_must_be_in_its_folder(name: str) -> None:
    refuse(with_module(file=name), f"{MODULE} file: {name!r} is not in the folder experts/")


@pytest.mark.parametrize("name", OUTSIDE_NAMES, ids=ascii)
def test_a_copied_file_must_be_in_the_pack(name: str) -> None:
    refuse(with_copied(name), f"manifest files {name!r}: {name!r} is not a relative file name")


@pytest.mark.parametrize("name", ["manifest.msgpack", "shared.bin", "experts/00000.bin", "a/b"])
def test_a_copied_file_must_not_take_the_place_of_another(name: str) -> None:
    refuse(with_copied(name), f"manifest files {name!r}: not a name for a copied file")


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [("x", -1), ("x", 2**63), ("tokenizer.json", 2**26 + 1), ("chat_template.jinja", 2**20 + 1)],
)
def test_the_size_of_a_copied_file_must_fit(name: str, nbytes: int) -> None:
    validate(with_copied(name, min(max(0, nbytes - 1), 2**20)))
    refuse(with_copied(name, nbytes), f"manifest files {name!r}: nbytes {nbytes} out of range")


# --- shared weights ---


@pytest.mark.parametrize("nbytes", [-512, 2**63])
def test_the_size_of_shared_weights_must_fit(nbytes: int) -> None:
    refuse(
        replace(sample_manifest(), shared_nbytes=nbytes),
        f"manifest shared nbytes: {nbytes} out of range",
    )


@pytest.mark.parametrize("change", [-512, -1, 1, 512, 10**12])
def test_the_size_of_shared_weights_must_be_what_the_tensors_give(change: int) -> None:
    nbytes = sample_manifest().shared_nbytes
    refuse(
        replace(sample_manifest(), shared_nbytes=nbytes + change),
        f"manifest shared nbytes: {nbytes + change}, its tensors give {nbytes}",
    )


def test_two_shared_tensors_with_one_name_are_refused() -> None:
    refuse(
        with_tensor(1, name="model.embed_tokens.weight"),
        "manifest shared tensors: name 'model.embed_tokens.weight' occurs twice",
    )


@pytest.mark.parametrize("name", ["", "x" * 1025, "a\x00b"], ids=["empty", "long", "NUL"])
def test_the_name_of_a_shared_tensor_must_be_short_and_printable(name: str) -> None:
    refuse(with_tensor(0, name=name), f"shared tensor {name!r}: a printable text")


@pytest.mark.parametrize("dtype", ["", "bfloat16", "F4", "f32"])
def test_an_unknown_dtype_of_a_shared_tensor_is_refused(dtype: str) -> None:
    refuse(with_tensor(0, dtype=dtype), f"{EMBEDDING}: dtype {dtype!r} is not one of BOOL, U8")


@pytest.mark.parametrize("nbytes", [-1, 0, 639, 641, 2**63])
def test_nbytes_of_a_shared_tensor_must_be_what_its_shape_gives(nbytes: int) -> None:
    refuse(with_tensor(0, nbytes=nbytes), f"{EMBEDDING}: nbytes is {nbytes}, its shape gives 640")


@pytest.mark.parametrize("shape", [(2**62, 2), (2**32, 2**32), (2**64 - 1,) * 3])
def test_a_shape_of_a_shared_tensor_beyond_63_bits_is_refused(shape: tuple[int, ...]) -> None:
    refuse(with_tensor(0, shape=shape), f"{EMBEDDING}:")


@pytest.mark.parametrize(
    "offset",
    [
        pytest.param(0, id="all of it overlaps"),
        pytest.param(512, id="overlap, aligned"),
        pytest.param(1023, id="one byte overlaps"),
        pytest.param(1025, id="one byte of hole"),
        pytest.param(1536, id="hole, aligned"),
        pytest.param(-1, id="negative"),
        pytest.param(2**63, id="beyond 63 bits"),
    ],
)
def test_a_shared_tensor_must_begin_where_the_one_before_ends(offset: int) -> None:
    refuse(with_tensor(1, offset=offset), f"{GATE}: offset is {offset}, wanted 1024")


def test_shared_tensors_out_of_order_are_refused() -> None:
    sample = sample_manifest()
    refuse(
        replace(sample, shared=sample.shared[::-1]),
        "shared tensor 'model.layers.0.post_attention_layernorm.weight': offset is",
    )


def test_the_first_shared_tensor_must_begin_at_zero() -> None:
    refuse(with_tensor(0, offset=512), f"{EMBEDDING}: offset is 512, wanted 0")


def test_a_pack_may_have_no_shared_tensor() -> None:
    validate(replace(sample_manifest(), shared=(), shared_nbytes=0))


def test_a_shared_tensor_may_be_empty() -> None:
    sample = sample_manifest()
    last = replace(sample.shared[-1], name="z", shape=(0, 4), nbytes=0, offset=sample.shared_nbytes)
    validate(replace(sample, shared=(*sample.shared, last)))


# --- expert modules ---


@pytest.mark.parametrize("n_experts", [-1, 0, 65_537, 10**9, 2**63])
def test_the_number_of_experts_must_be_in_range(n_experts: int) -> None:
    assert MAX_EXPERTS == 65_536
    refuse(
        with_module(n_experts=n_experts), f"{MODULE} n_experts: {n_experts} is not from 1 to 65536"
    )


@pytest.mark.parametrize("text", ["", "x" * 1025, "a\nb"], ids=["empty", "long", "two lines"])
def test_path_and_class_of_a_module_must_be_short_and_printable(text: str) -> None:
    refuse(with_module(path=text), f"module {text!r}: a printable text")
    refuse(with_module(class_name=text), f"{MODULE} class: a printable text")


def test_a_module_without_parts_is_refused() -> None:
    refuse(with_module(parts=()), f"{MODULE} parts: none")


def test_two_parts_with_one_name_are_refused() -> None:
    refuse(with_part(1, name="down_proj.biases"), f"{MODULE} part 'down_proj.biases' occurs twice")


def test_the_name_of_a_part_must_be_short_and_printable() -> None:
    refuse(with_part(0, name=""), f"{MODULE} part '': a printable text")


def test_an_unknown_dtype_of_a_part_is_refused() -> None:
    refuse(with_part(0, dtype="F4"), f"{MODULE} part 'down_proj.biases': dtype 'F4' is not one of")


@pytest.mark.parametrize("nbytes", [-1, 0, 31, 33, 2**63])
def test_nbytes_of_a_part_must_be_what_its_shape_gives(nbytes: int) -> None:
    refuse(
        with_part(0, nbytes=nbytes),
        f"{MODULE} part 'down_proj.biases': nbytes is {nbytes}, its shape gives 32",
    )


def test_an_empty_part_is_refused() -> None:
    refuse(
        with_part(0, shape=(0, 1), nbytes=0),
        f"{MODULE} part 'down_proj.biases': nbytes is 0, its shape gives 0",
    )


def test_a_shape_of_a_part_beyond_63_bits_is_refused() -> None:
    refuse(with_part(0, shape=(2**62,)), f"{MODULE} part 'down_proj.biases':")


@pytest.mark.parametrize("offset", [-1, 0, 31, 33, 64, 2**63])
def test_a_part_must_begin_where_the_one_before_ends(offset: int) -> None:
    refuse(
        with_part(1, offset=offset),
        f"{MODULE} part 'down_proj.scales': offset is {offset}, wanted 32",
    )


@pytest.mark.parametrize("change", [-1, 1, 512])
def test_record_nbytes_must_be_what_the_parts_give(change: int) -> None:
    nbytes = sample_manifest().modules[0].record_nbytes
    refuse(
        with_module(record_nbytes=nbytes + change),
        f"{MODULE} record_nbytes: {nbytes + change}, its parts give {nbytes}",
    )


@pytest.mark.parametrize("stride", [-512, 0, 336, 511, 513, 1024, 2**63])
def test_stride_must_be_the_record_aligned(stride: int) -> None:
    refuse(
        with_module(stride=stride), f"{MODULE} stride: {stride}, a record of 336 bytes wants 512"
    )


@pytest.mark.parametrize("nbytes", [0, 32, 47, 49, 64])
def test_digests_must_be_sixteen_bytes_an_expert(nbytes: int) -> None:
    refuse(
        with_module(digests=bytes(nbytes)), f"{MODULE} digests: {nbytes} bytes, 3 experts want 48"
    )


def test_records_beyond_63_bits_in_all_are_refused() -> None:
    sample = sample_manifest()
    nbytes = 2**62
    module = replace(
        replace_part(sample.modules[0], 0, dtype="U8", shape=(nbytes,), nbytes=nbytes),
        quantization={},
        record_nbytes=nbytes,
        stride=nbytes,
    )
    module = replace(module, parts=module.parts[:1])
    refuse(
        replace(sample, modules=(module,)),
        f"manifest modules: {3 * nbytes} bytes in all do not fit 64 bits",
    )


# --- quantization ---

BAD_QUANTIZATIONS = [
    Quantization(-1, 32, "affine"),
    Quantization(0, 32, "affine"),
    Quantization(9, 32, "affine"),
    Quantization(2**63, 32, "affine"),
    Quantization(4, 0, "affine"),
    Quantization(4, -32, "affine"),
    Quantization(4, 65_537, "affine"),
    Quantization(4, 32, ""),
    Quantization(4, 32, "AFFINE"),
    Quantization(4, 32, "int4"),
]


@pytest.mark.parametrize("quantization", BAD_QUANTIZATIONS, ids=str)
def test_a_quantization_of_shared_weights_that_mlx_lacks_is_refused(
    quantization: Quantization,
) -> None:
    refuse(
        replace(sample_manifest(), quantization={"lm_head": quantization}),
        "manifest quantization quantization of 'lm_head'",
    )


@pytest.mark.parametrize("quantization", BAD_QUANTIZATIONS, ids=str)
def test_a_quantization_of_experts_that_mlx_lacks_is_refused(quantization: Quantization) -> None:
    refuse(
        with_module(quantization={"down_proj": quantization}),
        f"{MODULE} quantization of 'down_proj'",
    )


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_of_mlx_is_accepted(mode: str) -> None:
    validate(with_module(quantization={"down_proj": Quantization(4, 32, mode)}))


@pytest.mark.parametrize("projection", ["gate_proj", "", "down_proj.weight"])
def test_a_quantization_must_name_a_part(projection: str) -> None:
    refuse(
        with_module(quantization={projection: Quantization(4, 32, "affine")}),
        f"{MODULE} quantization: no part {projection}.weight",
    )


def test_a_quantization_must_have_scales() -> None:
    sample = sample_manifest()
    second = replace(sample.modules[1], quantization={"fc1": Quantization(4, 32, "affine")})
    refuse(
        replace(sample, modules=(sample.modules[0], second)),
        "module 'model.layers.1.mlp.switch_mlp' quantization: no part fc1.scales",
    )


# --- source ---


def test_the_name_of_a_source_must_be_short_and_printable() -> None:
    refuse(with_source(name=""), "manifest source name: a printable text")
    validate(with_source(name=None))


GOOD_SHA256 = "0" * 64


@pytest.mark.parametrize(
    "shard",
    [
        Shard("a", -1, GOOD_SHA256),
        Shard("a", 2**63, GOOD_SHA256),
        Shard("a", 1, ""),
        Shard("a", 1, GOOD_SHA256[1:]),
        Shard("a", 1, GOOD_SHA256 + "\n"),
        Shard("a", 1, "A" * 64),
        Shard("a", 1, "g" * 64),
    ],
    ids=str,
)
def test_a_shard_must_have_a_size_and_a_sha256(shard: Shard) -> None:
    refuse(with_source(shards=(shard,)), "manifest source shard 'a': bad nbytes or sha256")


def test_two_shards_with_one_name_are_refused() -> None:
    refuse(
        with_source(shards=(Shard("a", 1, GOOD_SHA256),) * 2),
        "manifest source shard 'a' occurs twice",
    )


@pytest.mark.parametrize("nbytes", [-1, 2**63])
def test_the_size_of_a_dropped_tensor_must_fit(nbytes: int) -> None:
    refuse(
        with_source(dropped={"vision": nbytes}),
        f"manifest source dropped 'vision': nbytes {nbytes} out of range",
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda m: replace(m, n_experts=MAX_EXPERTS, digests=bytes(16 * MAX_EXPERTS)),
        lambda m: replace(m, quantization={}),
        lambda m: replace(m, class_name="x" * 1024),
    ],
    ids=["most experts", "not quantized", "longest text"],
)
def test_the_edge_of_a_rule_is_accepted(change: Callable[[ExpertModule], ExpertModule]) -> None:
    sample = sample_manifest()
    validate(replace(sample, modules=(change(sample.modules[0]), sample.modules[1])))
