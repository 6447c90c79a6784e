"""What people get wrong on the command line: one clear line, the right exit code, nothing lost."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
import tiny_models
from conftest import forge_file
from safetensors import safe_open

from moepack.formats.errors import SourceError
from moepack.tools.cli import main
from moepack.tools.options import check_save_path
from moepack.tools.startup import open_files_problem

PROMPT = tiny_models.text_of([5, 9, 40, 77])
Edit = Callable[[Path], object]


def fails(code: int, *arguments: str | Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Run the command, expect this exit code and one clear last line, and return it."""
    capsys.readouterr()
    assert main([str(a) for a in arguments]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert "unexpected" not in captured.err
    return captured.err.strip().splitlines()[-1]


def changed_pack(pack: Path, folder: Path, edit: Edit) -> Path:
    """A copy of a pack with a change made to it."""
    copy = folder / "changed.moepack"
    shutil.copytree(pack, copy)
    edit(copy)
    return copy


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("option", ["--temp", "--top-p", "--min-p", "--repetition-penalty"])
def test_a_number_that_is_none_is_a_usage_error(
    option: str, value: str, q4_pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert option in fails(2, "run", q4_pack, "-p", PROMPT, option, value, capsys=capsys)


def test_a_tolerance_that_is_no_number_is_a_usage_error(
    q4_pack: Path, q4_source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = fails(2, "verify", q4_pack, q4_source, "--tolerance", "nan", capsys=capsys)
    assert "--tolerance" in line


@pytest.mark.parametrize("seed", ["-1", str(2**64)])
def test_a_seed_out_of_range_is_a_usage_error(
    seed: str, q4_pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--seed" in fails(2, "run", q4_pack, "-p", PROMPT, "--seed", seed, capsys=capsys)


@pytest.mark.parametrize("top_k", [tiny_models.VOCAB, 10**6])
def test_top_k_of_all_tokens_is_no_restriction(
    top_k: int, q4_pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["run", str(q4_pack), "-p", PROMPT, "-m", "8", "--temp", "1", "--seed", "3"]
    assert main([*arguments, "--top-k", str(top_k)]) == 0
    restricted = capsys.readouterr().out
    assert main(arguments) == 0
    assert capsys.readouterr().out == restricted


def test_a_group_size_that_fits_no_expert_is_refused(
    float_source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = fails(
        1,
        *("convert", float_source, tmp_path / "p", "-q", "--q-group-size", "7"),
        capsys=capsys,
    )
    assert "group size" in line
    assert list(tmp_path.iterdir()) == []


def test_the_line_end_of_stdin_is_no_part_of_the_prompt(
    q4_pack: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = []
    for text in (PROMPT, f"{PROMPT}\n", f"{PROMPT}\r\n"):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        assert main(["run", str(q4_pack), "-m", "1", "--json"]) == 0
        counts.append(json.loads(capsys.readouterr().out)["prompt_tokens"])
    assert counts == [4, 4, 4]


def test_closed_stdin_is_a_usage_error(
    q4_pack: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert "stdin is closed" in fails(2, "run", q4_pack, capsys=capsys)


def test_stdin_that_is_no_text_is_a_usage_error(
    q4_pack: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(b"ab\xff\xfe"), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", stdin)
    assert "stdin" in fails(2, "run", q4_pack, capsys=capsys)


@pytest.mark.parametrize("option", ["--prompt", "--system-prompt"])
def test_text_that_is_no_utf8_is_a_usage_error(
    option: str, q4_pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = fails(2, "run", q4_pack, "-p", "a", option, "a\udcff", capsys=capsys)
    assert "not valid UTF-8 at character 1" in line


@pytest.mark.parametrize("command", ["run", "verify", "inspect", "unpack", "bench", "convert"])
def test_an_empty_name_is_a_usage_error(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = [tmp_path / "out"] if command in ("unpack", "convert") else []
    assert "empty name" in fails(2, command, "", *more, capsys=capsys)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--prompt", "a"),
        ("--tolerance", "0.1"),
    ],
)
def test_verify_refuses_options_that_need_a_source(
    arguments: tuple[str, str], q4_pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = fails(2, "verify", q4_pack, *arguments, capsys=capsys)
    assert f"{arguments[0]}: of use only with SOURCE" in line


def test_verify_takes_one_text(
    q4_pack: Path, q4_source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.txt").write_text(PROMPT, encoding="utf-8")
    texts = ("--prompt", PROMPT, "--text-file", tmp_path / "t.txt")
    assert "give one of them" in fails(2, "verify", q4_pack, q4_source, *texts, capsys=capsys)


def test_a_text_file_that_is_no_text_is_named(
    q4_pack: Path, q4_source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "t.bin"
    file.write_bytes(b"\xff\xfe\x00")
    line = fails(2, "verify", q4_pack, q4_source, "--text-file", file, capsys=capsys)
    assert f"{file}: not a UTF-8 text" in line


def test_a_revision_of_a_folder_is_a_usage_error(
    q4_source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = fails(2, "convert", q4_source, tmp_path / "p", "--revision", "main", capsys=capsys)
    assert "--revision" in line


def test_verify_names_what_a_source_of_another_shape_has_otherwise(
    q4_pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tiny_models.write_checkpoint(
        tmp_path / "other", {**tiny_models.QWEN3_MOE, "vocab_size": 256}, bits=4
    )
    capsys.readouterr()  # mlx-lm says how it quantized
    assert main(["verify", str(q4_pack), str(other), "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert not result["ok"]
    assert result["logits"] is None
    shapes = {m["part"] for m in result["mismatches"] if "shape" in m["reason"]}
    assert "model.embed_tokens.weight" in shapes


def test_a_broken_config_in_a_pack_is_named(
    q4_pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pack = changed_pack(q4_pack, tmp_path, lambda p: forge_file(p, "config.json", "{"))
    line = fails(1, "run", pack, "-p", PROMPT, capsys=capsys)
    assert f"{pack / 'config.json'}: not a model's config" in line


@pytest.mark.parametrize("number", [17, 10**9])
def test_a_config_that_asks_for_more_experts_than_there_are_is_named(
    number: int, q4_pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def edit(pack: Path) -> None:
        config = json.loads((pack / "config.json").read_text())
        forge_file(pack, "config.json", json.dumps({**config, "num_experts_per_tok": number}))

    pack = changed_pack(q4_pack, tmp_path, edit)
    assert "is its config.json right?" in fails(1, "run", pack, "-p", PROMPT, capsys=capsys)


@pytest.mark.parametrize("place", ["top", "text_config"])
def test_a_config_of_a_billion_layers_is_refused_at_once(
    place: str,
    q4_source: Path,
    q4_pack: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def edit(folder: Path) -> str:
        config = json.loads((folder / "config.json").read_text())
        layers = {"num_hidden_layers": 10**9}
        config |= layers if place == "top" else {"text_config": layers}
        return json.dumps(config)

    source = tmp_path / "source"
    shutil.copytree(q4_source, source)
    (source / "config.json").write_text(edit(source))
    pack = changed_pack(q4_pack, tmp_path, lambda p: forge_file(p, "config.json", edit(p)))
    for arguments in (("convert", source, tmp_path / "p"), ("run", pack, "-p", PROMPT)):
        line = fails(1, *arguments, capsys=capsys)
        assert "num_hidden_layers is 1,000,000,000, more than 1,000" in line


def test_a_pack_without_manifest_is_not_called_a_checkpoint(
    q4_pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pack = changed_pack(q4_pack, tmp_path, lambda p: (p / "manifest.msgpack").unlink())
    assert "the pack is incomplete" in fails(1, "run", pack, "-p", PROMPT, capsys=capsys)


@pytest.mark.parametrize("options", [("--kv-bits", "4"), ("--kv-bits", "8", "--max-kv-size", "64")])
def test_a_cache_that_cannot_be_quantized_is_refused(
    options: tuple[str, ...], q4_pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Heads of 32 numbers are no multiple of mlx-lm's group of 64; sliding caches are not done yet.
    line = fails(1, "run", q4_pack, "-p", PROMPT, *options, capsys=capsys)
    assert "--kv-bits: mlx-lm cannot quantize" in line


@pytest.mark.parametrize("arguments", ['{"tokenize": true}', '{"add_generation_prompt": false}'])
def test_template_arguments_do_not_change_what_a_template_gives(
    arguments: str, q4_pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["run", str(q4_pack), "-p", PROMPT, "-m", "2", "--chat-template-args", arguments]
    assert main(command) == 0


def test_template_arguments_that_fit_no_template_are_refused(
    q4_pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--chat-template-args", '{"conversation": []}')
    assert "template" in fails(1, "run", q4_pack, "-p", PROMPT, *arguments, capsys=capsys)


@pytest.mark.parametrize("command", ["unpack", "demo"])
def test_commands_without_overwrite_do_not_speak_of_it(
    command: str, q4_pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "there"
    shutil.copytree(q4_pack, there)
    arguments = (q4_pack, there) if command == "unpack" else ("--pack", there)
    line = fails(1, command, *arguments, capsys=capsys)
    assert line.endswith("there: exists; name another")


def test_nothing_is_written_inside_a_pack(
    q4_source: Path, q4_pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pack = changed_pack(q4_pack, tmp_path, lambda _: None)
    for arguments in (("convert", q4_source), ("unpack", q4_pack)):
        line = fails(1, *arguments, pack / "experts" / "more", capsys=capsys)
        assert f"would be inside the pack {pack}" in line
    for name in ("config.svg", "experts/bytes.svg"):
        line = fails(1, "inspect", pack, "--plot", pack / name, capsys=capsys)
        assert line.endswith(f"{name}: would be inside the pack {pack}")
    line = fails(1, "run", pack, "-p", PROMPT, "--trace", pack / "t.npz", capsys=capsys)
    assert f"t.npz: would be inside the pack {pack}" in line


def test_a_dry_run_refuses_what_the_run_would_refuse(
    q4_source: Path, q4_pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pack = changed_pack(q4_pack, tmp_path, lambda _: None)
    assert "exists" in fails(1, "convert", q4_source, pack, "--dry-run", capsys=capsys)
    assert main(["convert", str(q4_source), str(pack), "--dry-run", "--overwrite"]) == 0


@pytest.mark.parametrize("name", ["a:b.json", "back\\slash.txt", "new\nline.json", "\udcff.json"])
def test_a_file_with_an_odd_name_is_left_out_with_a_warning(
    name: str, q4_source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    shutil.copytree(q4_source, source)
    try:
        (source / name).write_text("{}")
    except OSError:
        pytest.skip("this file system has no such names")
    assert main(["convert", str(source), str(tmp_path / "p")]) == 0
    assert "has a name that a pack cannot hold" in capsys.readouterr().err
    assert main(["verify", str(tmp_path / "p"), str(source)]) == 0


def test_convert_warns_of_a_tokenizer_that_run_would_refuse(
    q4_source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    shutil.copytree(q4_source, source)
    (source / "tokenizer.json").write_text("{")
    assert main(["convert", str(source), str(tmp_path / "p")]) == 0
    assert "moepack run needs it" in capsys.readouterr().err
    fails(1, "run", tmp_path / "p", "-p", PROMPT, capsys=capsys)


@pytest.mark.parametrize("options", [("--max-kv-size", "150"), ("--adapter-path",)])
def test_a_prompt_cache_of_another_setting_is_refused(
    options: tuple[str, ...],
    q4_source: Path,
    q4_pack: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if options == ("--adapter-path",):
        options = ("--adapter-path", str(tiny_models.write_adapter(q4_source, tmp_path / "a")))
    file = tmp_path / "prompt.safetensors"
    arguments = ["run", str(q4_pack), "-p", PROMPT, "-m", "2", "--prompt-cache-file", str(file)]
    assert main(arguments) == 0
    before = file.read_bytes()
    line = fails(1, *arguments, *options, capsys=capsys)
    assert f"made with another {options[0]}" in line
    assert file.read_bytes() == before


def test_a_prompt_cache_that_cannot_be_saved_costs_the_file_and_not_the_answer(
    q4_pack: Path, tmp_path: Path
) -> None:
    file = tmp_path / "prompt.safetensors"
    command = f"ulimit -f 8; exec {sys.executable} -m moepack.tools run {q4_pack} -p {PROMPT * 40}"
    done = subprocess.run(
        ["bash", "-c", f"{command} -m 2 --prompt-cache-file {file}"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) == 2
    assert f"warning: {file} was not saved" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_prompt_cache_in_a_folder_that_is_not_there_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"none: no such folder to save c\.safetensors in"):
        check_save_path(tmp_path / "none" / "c.safetensors")


def test_a_file_that_is_no_prompt_cache_is_refused_and_kept(
    q4_pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.safetensors"
    file.write_bytes(b"not a cache")
    arguments = ("run", q4_pack, "-p", PROMPT, "--prompt-cache-file", file)
    assert f"{file}: not a prompt cache of moepack" in fails(1, *arguments, capsys=capsys)
    assert file.read_bytes() == b"not a cache"


@pytest.mark.parametrize(("limit", "is_named"), [(1024, True), (4096, False), (-1, False)])
def test_a_limit_of_open_files_below_what_mlx_lm_sets_is_named(
    limit: int, is_named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert ("may open 1024 files" in (open_files_problem(limit) or "")) == is_named


def test_an_interrupt_while_libraries_load_is_never_lost(q4_pack: Path) -> None:
    arguments = ["moepack", "run", str(q4_pack), "-m", "-1", "-p", PROMPT]
    script = (
        f"import sys; sys.argv = {arguments!r}; from moepack.tools.startup import entry_point; "
        "print('started', file=sys.stderr, flush=True); entry_point()"
    )
    for delay_s in (0.05, 0.1, 0.2, 0.4, 0.8):
        process = subprocess.Popen(
            [sys.executable, "-c", script],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        assert process.stderr.readline() == "started\n"
        time.sleep(delay_s)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 130, err
        assert err.strip().splitlines()[-1] == "moepack: interrupted"
        assert "Traceback" not in err


@pytest.mark.parametrize("n_past", ["24", "64"])
def test_saving_a_prompt_cache_does_not_change_the_answer_of_a_sliding_cache(
    n_past: str, q4_pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = tiny_models.text_of(tiny_models.random_tokens(100))
    arguments = ["run", str(q4_pack), "-p", prompt, "-m", "14", "--max-kv-size", n_past]
    assert main(arguments) == 0
    wanted = capsys.readouterr().out
    for _ in range(2):
        assert main([*arguments, "--prompt-cache-file", str(tmp_path / "c.safetensors")]) == 0
        captured = capsys.readouterr()
        assert captured.out == wanted
    assert "reused 99 tokens" in captured.err


def test_a_reused_prompt_counts_for_the_repetition_penalty(
    q4_pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["run", str(q4_pack), "-p", PROMPT * 4, "-m", "14", "--repetition-penalty", "3"]
    assert main(arguments) == 0
    wanted = capsys.readouterr().out
    for _ in range(2):
        assert main([*arguments, "--prompt-cache-file", str(tmp_path / "c.safetensors")]) == 0
        assert capsys.readouterr().out == wanted


@pytest.mark.parametrize("tokens", ["99999999", '"x"', "{}", "[[1]]"])
def test_a_prompt_cache_with_tokens_that_are_none_is_refused(
    tokens: str, q4_pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.safetensors"
    arguments = ("run", q4_pack, "-p", PROMPT, "-m", "2", "--prompt-cache-file", file)
    assert main([str(a) for a in arguments]) == 0
    with safe_open(file, framework="numpy") as cache:
        metadata = cache.metadata()
    key = next(k for k, v in metadata.items() if v.startswith("["))
    arrays = mx.load(str(file))
    assert isinstance(arrays, dict)
    mx.save_safetensors(str(file), arrays, {**metadata, key: tokens})
    assert "its tokens are no numbers" in fails(1, *arguments, capsys=capsys)


def test_a_prompt_without_tokens_is_not_called_empty(
    q4_pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "has no tokens for this prompt" in fails(1, "run", q4_pack, "-p", "abc", capsys=capsys)


def test_an_old_pack_of_a_killed_overwrite_is_spoken_of(
    q4_pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(q4_pack, tmp_path / ".p.moepack.old")
    line = fails(1, "run", tmp_path / "p.moepack", "-p", PROMPT, capsys=capsys)
    assert str(tmp_path / ".p.moepack.old") in line


def test_bench_refuses_another_source(
    q4_pack: Path, float_source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = fails(2, "bench", q4_pack, "--source", float_source, capsys=capsys)
    assert "is not the pack's source" in line


def test_closed_stdout_is_a_failure(q4_pack: Path) -> None:
    command = f"exec {sys.executable} -m moepack.tools run {q4_pack} -p {PROMPT} -m 2 >&-"
    done = subprocess.run(["bash", "-c", command], stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "moepack: error: stdout is closed: no answer could be given\n"
    assert subprocess.run(["bash", "-c", f"{command} 2>&-"], check=False).returncode == 1


@pytest.mark.parametrize(
    ("option", "value", "wanted"),
    [
        ("--temp", "abc", "'abc' is not a valid number."),
        ("--top-k", "1.5", "'1.5' is not a valid whole number."),
    ],
)
def test_what_is_no_number_is_said_in_plain_words(
    option: str, value: str, wanted: str, q4_pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = fails(2, "run", q4_pack, "-p", PROMPT, option, value, capsys=capsys)
    assert line.endswith(f"Invalid value for '{option}': {wanted}")


def test_nested_json_beyond_reason_is_a_usage_error(
    q4_pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--chat-template-args", "[" * 100_000)
    assert "not JSON" in fails(2, "run", q4_pack, "-p", PROMPT, *arguments, capsys=capsys)


def test_an_interrupted_demo_leaves_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    for delay_s in (0.3, 0.9, 1.5):
        process = subprocess.Popen(
            [sys.executable, "-m", "moepack.tools", "demo"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        time.sleep(delay_s)
        process.send_signal(signal.SIGINT)
        process.wait(60)
        assert not list(tmp_path.glob("moepack*"))  # MLX makes a folder of its own there
