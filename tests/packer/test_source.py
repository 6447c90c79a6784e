"""Opening a source: what is missing, damaged or foreign is named before anything is built."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import mlx.core as mx
import pytest
import tiny_models
from mlx_lm.utils import save_config

from moepack.formats.errors import SourceError
from moepack.formats.pack import Pack
from moepack.packer.checkpoint import ConvertOptions
from moepack.packer.convert import convert, plan_convert
from moepack.packer.source import INDEX_NAME, open_source

OPTIONS = ConvertOptions()
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def folder(q4_source: Path, tmp_path: Path) -> Path:
    """A copy of the 4-bit checkpoint, to damage."""
    return Path(shutil.copytree(q4_source, tmp_path / "source"))


@pytest.fixture
def sharded(q4_source: Path, tmp_path: Path) -> Path:
    """The 4-bit checkpoint in three shards."""
    weights = tiny_models.read_weights(q4_source)
    return tiny_models.resave(q4_source, tmp_path / "sharded", weights, n_shards=3)


def edit_index(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change the weight map in place."""
    path = folder / INDEX_NAME
    index = json.loads(path.read_text())
    edit(index["weight_map"])
    path.write_text(json.dumps(index))


def edit_config(folder: Path, **changes: Any) -> None:
    """Change entries of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def write_raw_shard(path: Path, header: str, data: bytes) -> None:
    """A safetensors file whose header says what it is told to."""
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + data)


def test_whole_source_is_opened_with_all_its_tensors(sharded: Path) -> None:
    """Three shards, every tensor once, nothing stray."""
    source = open_source(str(sharded))
    assert len(source.shards) == 3
    assert set(source.tensors) == set(tiny_models.read_weights(sharded))
    assert source.stray == ()
    assert source.nbytes == sum(p.stat().st_size for p in sharded.glob("*.safetensors"))


def test_missing_shard_is_named(sharded: Path) -> None:
    """The index lists a file that is gone."""
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(SourceError, match=r"model-00002-of-00003\.safetensors: no such shard"):
        open_source(str(sharded))


@pytest.mark.parametrize("n_left", [0, 4, 8, 100, -1])
def test_cut_shard_is_named(sharded: Path, n_left: int) -> None:
    """A download that stopped early, anywhere."""
    shard = sharded / "model-00003-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:n_left])
    with pytest.raises(SourceError, match=r"model-00003-of-00003\.safetensors: damaged or cut"):
        open_source(str(sharded))


LIES = {
    "shape": '{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}',
    "overlap": (
        '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
        '"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}'
    ),
    "hole": (
        '{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},'
        '"b":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}'
    ),
    "trailing": '{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
    "beyond": '{"a":{"dtype":"U8","shape":[9],"data_offsets":[0,9]}}',
    "duplicate": (
        '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
        '"a":{"dtype":"I32","shape":[2],"data_offsets":[0,8]}}'
    ),
    "dtype": '{"a":{"dtype":"F33","shape":[2],"data_offsets":[0,8]}}',
    "not json": '{"a":',
}


@pytest.mark.parametrize("lie", LIES)
def test_header_that_lies_is_refused(folder: Path, lie: str) -> None:
    """Whatever does not add up in a header is damage, named by file."""
    write_raw_shard(folder / "model.safetensors", LIES[lie], bytes(8))
    (folder / INDEX_NAME).unlink()
    with pytest.raises(SourceError, match=r"model\.safetensors: damaged or cut"):
        open_source(str(folder))


def test_stray_shard_is_reported_and_left_out(sharded: Path, tmp_path: Path) -> None:
    """mlx-lm would load it, since its name begins with `model`; its content is never looked at."""
    stray = sharded / "model-stray.safetensors"
    stray.write_bytes(b"not safetensors")
    plan = plan_convert(open_source(str(sharded)), OPTIONS)
    assert plan.source.stray == (stray,)
    assert any("model-stray.safetensors" in warning for warning in plan.warnings)
    manifest = convert(plan, tmp_path / "out.moepack")
    assert [s.name for s in manifest.source.shards] == [
        f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)
    ]


def test_weight_file_of_another_name_is_stray_without_an_index(folder: Path) -> None:
    """As for mlx-lm, only model*.safetensors counts."""
    (folder / INDEX_NAME).unlink()
    (folder / "consolidated.safetensors").write_bytes(b"")
    source = open_source(str(folder))
    assert [p.name for p in source.stray] == ["consolidated.safetensors"]
    assert [p.name for p in source.shards] == ["model.safetensors"]


def test_apple_double_files_are_ignored(folder: Path, tmp_path: Path) -> None:
    """What macOS leaves on foreign disks is neither a shard nor stray, and is not copied."""
    for name in ("._model.safetensors", "._config.json"):
        (folder / name).write_bytes(b"\x00\x05\x16\x07junk")
    plan = plan_convert(open_source(str(folder)), OPTIONS)
    assert plan.source.stray == ()
    convert(plan, tmp_path / "out.moepack")
    assert not [p for p in (tmp_path / "out.moepack").iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize(
    "entry", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors", ".hidden", 7]
)
def test_index_entry_that_leaves_the_folder_is_refused(sharded: Path, entry: object) -> None:
    """A path in the index is a file name, no more."""
    edit_index(sharded, lambda weight_map: weight_map.update({"model.norm.weight": entry}))
    with pytest.raises(SourceError, match=r"'model\.norm\.weight' points to .* not a file of this"):
        open_source(str(sharded))


@pytest.mark.parametrize("index", ["{}", '{"weight_map": {}}', '{"weight_map": []}', "[]", "nope"])
def test_index_without_weight_map_is_refused(sharded: Path, index: str) -> None:
    """An index that lists nothing is damage."""
    (sharded / INDEX_NAME).write_text(index)
    with pytest.raises(SourceError, match=INDEX_NAME):
        open_source(str(sharded))


@pytest.mark.parametrize("indexed", [True, False])
def test_tensor_in_two_shards_is_refused(sharded: Path, indexed: bool) -> None:
    """Which of the two counts would depend on the order of reading."""
    shutil.copy(
        sharded / "model-00002-of-00003.safetensors", sharded / "model-00004-of-00003.safetensors"
    )
    if indexed:
        edit_index(sharded, lambda m: m.update({"extra": "model-00004-of-00003.safetensors"}))
    else:
        (sharded / INDEX_NAME).unlink()
    with pytest.raises(SourceError, match=r"is also in model-00002-of-00003\.safetensors"):
        open_source(str(sharded))


def test_stale_index_is_refused(sharded: Path) -> None:
    """The index lists a tensor that its shard does not hold."""
    edit_index(sharded, lambda m: m.update(gone="model-00001-of-00003.safetensors"))
    with pytest.raises(SourceError, match=r"00001-of-00003.*'gone' is missing"):
        open_source(str(sharded))


def test_index_that_names_the_wrong_shard_is_refused(sharded: Path) -> None:
    """The tensor is there, in another file."""
    name = list(tiny_models.read_weights(sharded))[-1]
    edit_index(sharded, lambda m: m.update({name: "model-00001-of-00003.safetensors"}))
    with pytest.raises(SourceError, match=f"'{name}' is missing"):
        open_source(str(sharded))


@pytest.mark.parametrize("gone", ["scales", "weight"])
def test_missing_tensor_of_a_quantized_group_is_named(
    q4_source: Path, tmp_path: Path, gone: str
) -> None:
    """mlx-lm would name the ones that are left over."""
    weights = tiny_models.read_weights(q4_source)
    name = f"model.layers.1.mlp.switch_mlp.up_proj.{gone}"
    del weights[name]
    folder = tiny_models.resave(q4_source, tmp_path / "source", weights)
    with pytest.raises(SourceError, match=f"'{name}' is missing"):
        open_source(str(folder))


def test_folder_without_config_is_refused(folder: Path) -> None:
    """A folder of weights is no checkpoint."""
    (folder / "config.json").unlink()
    with pytest.raises(SourceError, match=r"no config\.json"):
        open_source(str(folder))


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x00", "[" * 100_000, '"text"'])
def test_config_that_is_no_json_object_is_refused(folder: Path, text: str) -> None:
    """Named by file."""
    (folder / "config.json").write_text(text)
    with pytest.raises(SourceError, match=r"config\.json: "):
        open_source(str(folder))


def test_config_in_another_encoding_is_refused(folder: Path) -> None:
    """JSON is UTF-8."""
    (folder / "config.json").write_bytes(b'{"model_type": "\xff\xfe"}')
    with pytest.raises(SourceError, match=r"config\.json: not JSON"):
        open_source(str(folder))


@pytest.mark.parametrize("model_type", [None, 3, ["qwen3_moe"]])
def test_config_without_model_type_is_refused(folder: Path, model_type: object) -> None:
    """Absent, or not a text."""
    edit_config(folder, model_type=model_type)
    with pytest.raises(SourceError, match=r"config\.json: no model_type"):
        open_source(str(folder))


@pytest.mark.parametrize("model_type", ["nosuchmodel", "../evil", "switch_layers"])
def test_unknown_model_type_is_refused(folder: Path, model_type: str) -> None:
    """Including one that is no model of mlx-lm but a module beside them."""
    edit_config(folder, model_type=model_type)
    with pytest.raises(SourceError, match="mlx-lm cannot load it"):
        plan_convert(open_source(str(folder)), OPTIONS)


def test_config_that_lacks_an_entry_is_refused_naming_it(folder: Path) -> None:
    """The architecture's arguments come from the config."""
    config = json.loads((folder / "config.json").read_text())
    del config["num_experts"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(SourceError, match=r"config\.json: .*num_experts"):
        plan_convert(open_source(str(folder)), OPTIONS)


def test_dense_model_is_refused(tmp_path: Path) -> None:
    """There is nothing to stream."""
    folder = tiny_models.write_checkpoint(tmp_path / "dense", tiny_models.QWEN3_DENSE)
    with pytest.raises(SourceError, match="'qwen3' has no expert module"):
        plan_convert(open_source(str(folder)), OPTIONS)


def test_code_named_by_model_file_never_runs(folder: Path, tmp_path: Path) -> None:
    """mlx-lm would run it if told to trust it."""
    marker = tmp_path / "ran"
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w')")
    edit_config(folder, model_file="evil.py")
    with pytest.raises(SourceError, match=r"evil\.py"):
        plan_convert(open_source(str(folder)), OPTIONS)
    assert not marker.exists()


def test_code_named_by_auto_map_never_runs_and_is_not_copied(folder: Path, tmp_path: Path) -> None:
    """The architecture is mlx-lm's own."""
    marker = tmp_path / "ran"
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w')")
    edit_config(folder, auto_map={"AutoModel": "evil.Model", "AutoConfig": "evil.Config"})
    convert(plan_convert(open_source(str(folder)), OPTIONS), tmp_path / "out.moepack")
    assert not marker.exists()
    assert not list((tmp_path / "out.moepack").rglob("*.py"))


def test_untied_model_without_lm_head_names_it(float_source: Path, tmp_path: Path) -> None:
    """A tensor of the model that the source lacks."""
    weights = tiny_models.read_weights(float_source)
    del weights["lm_head.weight"]
    folder = tiny_models.resave(float_source, tmp_path / "source", weights)
    with pytest.raises(SourceError, match=r"missing tensors: lm_head\.weight"):
        plan_convert(open_source(str(folder)), OPTIONS)


def test_tensor_that_the_model_does_not_have_is_named(float_source: Path, tmp_path: Path) -> None:
    """Not dropped silently: mlx-lm's sanitize decides what may be dropped."""
    weights = tiny_models.read_weights(float_source)
    weights["model.surprise.weight"] = mx.zeros((2, 2))
    folder = tiny_models.resave(float_source, tmp_path / "source", weights)
    with pytest.raises(SourceError, match=r"does not have: model\.surprise\.weight"):
        plan_convert(open_source(str(folder)), OPTIONS)


def test_missing_expert_is_named(float_source: Path, tmp_path: Path) -> None:
    """One tensor of one expert in the per-expert layout."""
    weights = tiny_models.per_expert(tiny_models.read_weights(float_source))
    name = "model.layers.2.mlp.experts.7.down_proj.weight"
    del weights[name]
    folder = tiny_models.resave(float_source, tmp_path / "source", weights)
    with pytest.raises(SourceError, match=name):
        plan_convert(open_source(str(folder)), OPTIONS)


def test_tensor_of_a_wrong_shape_is_named(float_source: Path, tmp_path: Path) -> None:
    """Found before anything is written."""
    weights = tiny_models.read_weights(float_source)
    weights["model.norm.weight"] = mx.ones((65,))
    folder = tiny_models.resave(float_source, tmp_path / "source", weights)
    with pytest.raises(SourceError, match=r"model\.norm\.weight"):
        plan_convert(open_source(str(folder)), OPTIONS)


@pytest.mark.parametrize("text", ["missing", "./a/b", "/nowhere", "~nobody/x", "a/b/c", ""])
def test_path_that_does_not_exist_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """Texts that are no `org/name`."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError, match=r"no such folder|no config\.json"):
        open_source(text)


def test_file_is_no_source(folder: Path) -> None:
    """A path to the config is not a path to the folder."""
    with pytest.raises(SourceError, match="not a folder"):
        open_source(str(folder / "config.json"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hugging Face cache."""
    path = tmp_path / "hub"
    path.mkdir()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(path))
    monkeypatch.chdir(tmp_path)
    return path


def fill_cache(cache: Path, checkpoint: Path) -> Path:
    """Put a checkpoint into a Hugging Face cache as org/name, in links as the hub client does."""
    repository = cache / "models--org--name"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    (repository / "blobs").mkdir()
    for file in checkpoint.iterdir():
        blob = repository / "blobs" / f"blob-of-{file.name}"
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    return snapshot


def test_repository_that_is_not_in_the_cache_is_refused_offline(cache: Path) -> None:
    """One line that names it."""
    with pytest.raises(SourceError, match="org/name: no such folder, nor in the Hugging Face"):
        open_source("org/name")
    assert not list(cache.glob("models--*/snapshots"))


def test_repository_in_the_cache_gives_name_and_commit(
    cache: Path, q4_source: Path, tmp_path: Path
) -> None:
    """The manifest says which revision a pack was made of."""
    fill_cache(cache, q4_source)
    source = open_source("org/name")
    assert (source.name, source.revision) == ("org/name", COMMIT)
    manifest = convert(plan_convert(source, OPTIONS), tmp_path / "out.moepack")
    assert (manifest.source.name, manifest.source.revision) == ("org/name", COMMIT)
    assert [s.name for s in manifest.source.shards] == ["model.safetensors"]
    assert not any(p.is_symlink() for p in (tmp_path / "out.moepack").rglob("*"))


def test_repository_cached_by_mlx_lm_is_found_offline(cache: Path, q4_source: Path) -> None:
    """mlx-lm fetches neither README.md nor .gitattributes, and the cache knows of them."""
    fill_cache(cache, q4_source)
    names = [*(p.name for p in q4_source.iterdir()), "README.md", ".gitattributes"]
    trees = cache / "models--org--name" / "trees"
    trees.mkdir()
    listing = {name: {"size": 1, "blob_id": "0" * 40} for name in names}
    text = json.dumps({"format_version": 1, "files": listing})
    (trees / f"{COMMIT}.json").write_text(text)
    assert open_source("org/name").revision == COMMIT


def test_folder_wins_over_a_repository_of_the_same_name(
    cache: Path, q4_source: Path, tmp_path: Path
) -> None:
    """`org/name` that exists here is a folder."""
    fill_cache(cache, q4_source)
    shutil.copytree(q4_source, tmp_path / "org" / "name")
    source = open_source("org/name")
    assert (source.name, source.revision) == (None, None)


def test_pack_is_no_source(q4_pack: Path) -> None:
    """Converting twice by mistake is refused."""
    with pytest.raises(SourceError, match="is a pack already"):
        open_source(str(q4_pack))
    assert Pack.open(q4_pack).manifest.modules


def test_config_of_mlx_lm_is_read_as_saved(tmp_path: Path) -> None:
    """mlx-lm's save_config sorts keys; nothing depends on their order."""
    folder = tiny_models.write_checkpoint(tmp_path / "source", bits=4)
    config = json.loads((folder / "config.json").read_text())
    save_config(dict(reversed(config.items())), folder / "config.json")
    assert open_source(str(folder)).config["model_type"] == "qwen3_moe"


@pytest.mark.parametrize("name", [INDEX_NAME, "tokenizer.json", "config.json", "notes.txt"])
def test_fifo_in_place_of_a_file_is_refused(folder: Path, name: str) -> None:
    """Reading it would wait for ever."""
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(SourceError, match=f"/{name}: not a regular file"):
        open_source(str(folder))


def test_folder_in_place_of_the_index_is_named(folder: Path) -> None:
    """It is not taken for none."""
    (folder / INDEX_NAME).unlink(missing_ok=True)
    (folder / INDEX_NAME).mkdir()
    with pytest.raises(SourceError, match=f"/{INDEX_NAME}: not a regular file"):
        open_source(str(folder))


def test_link_to_itself_in_place_of_the_index_is_named(folder: Path) -> None:
    """Nor is this."""
    (folder / INDEX_NAME).unlink(missing_ok=True)
    (folder / INDEX_NAME).symlink_to(INDEX_NAME)
    with pytest.raises(SourceError, match=f"/{INDEX_NAME}: Too many levels of symbolic links"):
        open_source(str(folder))


def test_folder_of_licences_is_left_out(folder: Path, tmp_path: Path) -> None:
    """Its name is like that of a licence, which a pack keeps."""
    (folder / "LICENSES").mkdir()
    convert(plan_convert(open_source(str(folder)), OPTIONS), tmp_path / "out.moepack")
    assert not (tmp_path / "out.moepack" / "LICENSES").exists()


@pytest.mark.parametrize("name", ["x.txt", "tokenizer.json", "config.json", INDEX_NAME])
def test_link_to_a_file_elsewhere_is_refused(folder: Path, tmp_path: Path, name: str) -> None:
    """A stranger's checkpoint would put a private file into a pack that is passed on."""
    private = tmp_path / "private"
    private.write_bytes((folder / name).read_bytes() if (folder / name).exists() else b"secret")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(private)
    with pytest.raises(SourceError, match=f"/{name}: a link that leaves the checkpoint"):
        open_source(str(folder))


def test_links_inside_the_checkpoint_and_of_weights_are_followed(
    folder: Path, tmp_path: Path
) -> None:
    """People keep shards on another disk."""
    (folder / "config.json").rename(folder / "other")
    (folder / "config.json").symlink_to("other")
    for shard in folder.glob("*.safetensors"):
        shard.rename(tmp_path / shard.name)
        shard.symlink_to(tmp_path / shard.name)
    assert open_source(str(folder)).tensors


@pytest.mark.parametrize("target", ["own", "another's"])
def test_link_in_a_cached_snapshot_stays_in_its_model(
    folder: Path, tmp_path: Path, target: str
) -> None:
    """All files of the Hugging Face cache are links to its blobs."""
    snapshot = tmp_path / "models--org--name" / "snapshots" / COMMIT
    shutil.move(folder, snapshot)
    owner = "models--org--name" if target == "own" else "models--org--other"
    blob = tmp_path / owner / "blobs" / "0123"
    blob.parent.mkdir(parents=True)
    (snapshot / "config.json").rename(blob)
    (snapshot / "config.json").symlink_to(f"../../../{owner}/blobs/0123")
    if target == "own":
        assert open_source(str(snapshot)).config
    else:
        with pytest.raises(SourceError, match="a link that leaves the checkpoint"):
            open_source(str(snapshot))


def test_text_config_that_is_no_object_is_refused(folder: Path) -> None:
    """Before any code looks into it."""
    edit_config(folder, text_config=5)
    with pytest.raises(SourceError, match=r"config\.json: text_config is not a JSON object"):
        plan_convert(open_source(str(folder)), OPTIONS)
