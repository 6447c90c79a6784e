"""`moepack run`: the answer on stdout is mlx-lm's, and nothing else is."""

import io
import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from mlx_lm import load as mlx_load

from moepack.tools.cli import main

SHORT = [5, 9, 40, 77]
LONG = tiny_models.random_tokens(200)


@pytest.fixture(scope="module")
def wanted(q4_source: Path) -> dict[int, str]:
    """mlx-lm's greedy answers on the source, by the prompt's length."""
    model, tokenizer, *_ = mlx_load(str(q4_source))
    return {len(p): tiny_models.greedy_text(model, tokenizer, p) for p in (SHORT, LONG)}


def run_json(pack: Path, *options: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The object that `run --json` prints for a short prompt."""
    prompt = tiny_models.text_of(SHORT)
    assert main(["run", str(pack), "-p", prompt, "-m", "8", "--json", *options]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


@pytest.mark.parametrize("cache", ["floor", "100kB", "all", "auto"])
@pytest.mark.parametrize("prompt", [SHORT, LONG], ids=["short", "long"])
@pytest.mark.parametrize("step", ["2048", "33"])
def test_stdout_is_the_greedy_text_of_mlx_lm(
    cache: str,
    prompt: list[int],
    step: str,
    q4_pack: Path,
    wanted: dict[int, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["run", str(q4_pack), "--prompt", tiny_models.text_of(prompt), "-m", "16"]
    assert main([*arguments, "--expert-cache", cache, "--prefill-step-size", step]) == 0
    assert capsys.readouterr().out == wanted[len(prompt)] + "\n"


def test_a_cache_too_small_is_refused_with_a_size_that_works(
    q4_pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["run", str(q4_pack), "-p", tiny_models.text_of(SHORT), "-m", "2"]
    assert main([*arguments, "--expert-cache", "10kB"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    smallest = captured.err.split("smallest that works is ")[1].split()[0]
    assert main([*arguments, "--expert-cache", smallest]) == 0


def test_a_memory_too_small_is_refused_with_a_size_that_works(
    q4_pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["run", str(q4_pack), "-p", tiny_models.text_of(SHORT), "-m", "2"]
    assert main([*arguments, "--memory", "1MB"]) == 1
    smallest = capsys.readouterr().err.split("--memory ")[-1].strip()
    # This process grows while tests run in it; the figure is for the next start.
    assert (
        main([*arguments, "--memory", f"{1.2 * float(smallest.rstrip('GMB')):.1f}{smallest[-2:]}"])
        == 0
    )


@pytest.mark.parametrize(
    ("option", "value"),
    [("--memory", "lots"), ("--expert-cache", "-1"), ("--max-tokens", "0"), ("--temp", "-1")],
)
def test_a_bad_value_is_a_usage_error_naming_the_option(
    option: str, value: str, q4_pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(q4_pack), "-p", "x", option, value]) == 2
    assert option in capsys.readouterr().err


def test_statistics_go_to_stderr(q4_pack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["run", str(q4_pack), "-p", tiny_models.text_of(SHORT), "-m", "4"])
    assert "tokens/s" in capsys.readouterr().err


def test_json_counts_hits_and_misses_of_a_small_cache(
    q4_pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = run_json(q4_pack, "--expert-cache", "floor", capsys=capsys)
    experts = figures["experts"]
    assert figures["mode"] == "streamed"
    assert experts["slots_per_layer"] == 4
    assert experts["misses"] > 0
    assert experts["misses"] == experts["prefill"]["misses"] + experts["decode"]["misses"]
    assert experts["bytes_read"] == experts["misses"] * experts["cache_bytes"] // 8
    assert figures["generation_tokens"] == 8
    assert figures["finish_reason"] == "length"


def test_json_says_resident_when_everything_fits(
    q4_pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = run_json(q4_pack, "--expert-cache", "all", capsys=capsys)
    assert figures["mode"] == "resident"
    assert figures["experts"]["hit_rate"] is None


def test_the_prompt_is_read_from_stdin(
    q4_pack: Path,
    wanted: dict[int, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(tiny_models.text_of(SHORT)))
    assert main(["run", str(q4_pack), "--prompt", "-", "-m", "16"]) == 0
    assert capsys.readouterr().out == wanted[4] + "\n"


def test_the_same_seed_gives_the_same_answer_and_another_another(
    q4_pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, other = (
        run_json(q4_pack, "--temp", "1", "--seed", seed, capsys=capsys)["text"]
        for seed in ("1", "1", "2")
    )
    assert first == second
    assert first != other


def test_a_list_of_end_tokens_in_generation_config_ends_the_answer(
    q4_source: Path,
    q4_pack: Path,
    wanted: dict[int, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    third = tiny_models.CHARACTERS.index(wanted[4][2])
    for name, content in (
        ("generation_config.json", {"eos_token_id": [0, third]}),
        (
            "config.json",
            {**json.loads((q4_source / "config.json").read_text()), "eos_token_id": [0, third]},
        ),
    ):
        source = tmp_path / name / "source"
        shutil.copytree(q4_source, source)
        (source / name).write_text(json.dumps(content))
        pack = tmp_path / name / "p"
        assert main(["convert", str(source), str(pack)]) == 0
        capsys.readouterr()
        assert main(["run", str(pack), "-p", tiny_models.text_of(SHORT), "-m", "16"]) == 0
        assert capsys.readouterr().out == wanted[4][:2] + "\n"


def test_an_empty_prompt_is_refused_in_one_line(
    q4_pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(q4_pack), "-p", ""]) == 1
    assert "the prompt is empty" in capsys.readouterr().err


def test_one_token_can_be_asked_for(q4_pack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(q4_pack), "-p", tiny_models.text_of(SHORT), "-m", "1"]) == 0
    assert len(capsys.readouterr().out.strip()) == 1


def test_without_a_template_the_raw_prompt_is_sent_and_that_is_said(
    q4_source: Path, wanted: dict[int, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    shutil.copytree(q4_source, source)
    (source / "chat_template.jinja").unlink()
    assert main(["convert", str(source), str(tmp_path / "p")]) == 0
    capsys.readouterr()
    assert main(["run", str(tmp_path / "p"), "-p", tiny_models.text_of(SHORT), "-m", "16"]) == 0
    captured = capsys.readouterr()
    assert captured.out == wanted[4] + "\n"
    assert "the raw prompt is sent" in captured.err


def test_the_template_file_is_used(
    q4_source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    shutil.copytree(q4_source, source)
    head = tiny_models.text_of([11, 12])
    (source / "chat_template.jinja").write_text(head + "{{ messages[0]['content'] }}")
    assert main(["convert", str(source), str(tmp_path / "p")]) == 0
    capsys.readouterr()
    figures = run_json(tmp_path / "p", capsys=capsys)
    assert figures["prompt_tokens"] == 2 + len(SHORT)


def test_a_prompt_cache_file_gives_the_same_answer_and_runs_less(
    q4_pack: Path, wanted: dict[int, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompt.safetensors"
    arguments = ["run", str(q4_pack), "-p", tiny_models.text_of(LONG), "-m", "16", "--json"]
    arguments += ["--prompt-cache-file", str(file)]
    for _ in range(2):
        assert main(arguments) == 0
        figures = json.loads(capsys.readouterr().out)
        assert figures["text"] == wanted[200]
    assert figures["prompt_tokens"] == 1


def test_a_prompt_cache_is_cut_back_to_what_two_prompts_share(
    q4_pack: Path, q4_source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompt.safetensors"
    other = [*LONG[:150], 7, 8, 9]
    model, tokenizer, *_ = mlx_load(str(q4_source))
    expected = tiny_models.greedy_text(model, tokenizer, other)
    for prompt in (LONG, other):
        capsys.readouterr()
        arguments = ["run", str(q4_pack), "-p", tiny_models.text_of(prompt), "-m", "16"]
        assert main([*arguments, "--prompt-cache-file", str(file)]) == 0
    captured = capsys.readouterr()
    assert captured.out == expected + "\n"
    assert "reused 150 of 199 tokens" in captured.err


def test_a_prompt_cache_of_another_pack_is_refused(
    q4_pack: Path, float_pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompt.safetensors"
    arguments = ["-p", tiny_models.text_of(SHORT), "-m", "2", "--prompt-cache-file", str(file)]
    assert main(["run", str(q4_pack), *arguments]) == 0
    assert main(["run", str(float_pack), *arguments]) == 1
    assert "made with another pack" in capsys.readouterr().err


def test_a_prompt_cache_file_of_another_ending_is_refused_and_nothing_written(
    q4_pack: Path, tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    arguments = ["run", str(q4_pack), "-p", tiny_models.text_of(SHORT), "-m", "2"]
    assert main([*arguments, "--prompt-cache-file", str(tmp_path / "model")]) == 2
    assert (tmp_path / "model.safetensors").read_bytes() == b"weights"


def test_a_conversation_reads_only_what_is_new_and_says_what_it_would_say_alone(
    q4_pack: Path, q4_source: Path, tmp_path: Path
) -> None:
    """Two lines typed on a terminal; the second prompt holds the first answer."""
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    source = tmp_path / "source"
    shutil.copytree(q4_source, source)
    (source / "chat_template.jinja").write_text(template)
    assert main(["convert", str(source), str(tmp_path / "p")]) == 0
    model, tokenizer, *_ = mlx_load(str(source))
    first = tiny_models.greedy_text(model, tokenizer, SHORT)
    said = [tiny_models.CHARACTERS.index(character) for character in first]
    second = tiny_models.greedy_text(model, tokenizer, [*SHORT, *said, 7, 8])

    parent, child = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "moepack.tools", "run", str(tmp_path / "p"), "-m", "16"],
        stdin=child,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    lines = f"{tiny_models.text_of(SHORT)}\n{tiny_models.text_of([7, 8])}\n\x04"
    os.write(parent, lines.encode())
    out, err = process.communicate(timeout=120)
    os.close(parent)
    os.close(child)
    assert process.returncode == 0, err
    assert first in out
    assert second in out
    # The prompt of the second turn is the first one's, its answer, and two tokens: those two run.
    assert [line.split()[1] for line in err.splitlines() if line.startswith("prompt ")] == [
        "4",
        "2",
    ]


def test_an_answer_ends_where_a_stated_context_does(
    q4_pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Memory is planned for no more tokens; a prompt that leaves no room is refused."""
    arguments = ["run", str(q4_pack), "-p", tiny_models.text_of(SHORT), "--json", "--context"]
    for n_tokens in ("8", "-1"):
        assert main([*arguments, "10", "-m", n_tokens]) == 0
        figures = json.loads(capsys.readouterr().out)
        assert (figures["prompt_tokens"], figures["generation_tokens"]) == (4, 6)
        assert figures["finish_reason"] == "length"
    assert main([*arguments, "4"]) == 2
    assert "--context 4: the prompt has 4 tokens" in capsys.readouterr().err
    assert main([*arguments, "8", "-m", "8", "--max-kv-size", "8"]) == 0  # keeps no more than 8
    assert json.loads(capsys.readouterr().out)["generation_tokens"] == 8


def test_more_memory_than_the_control_group_allows_is_refused(
    q4_pack: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The kernel would end the process without a word; `plan`, which is for any machine, warns."""
    monkeypatch.setattr("moepack.runtime.machine.cgroup_limit", lambda: 10**6)
    prompt = tiny_models.text_of(SHORT)
    assert main(["run", str(q4_pack), "-p", prompt, "--memory", "8GB"]) == 1
    problem = r"MB are planned, but the control group of this process allows 1 MB"
    assert problem in capsys.readouterr().err.splitlines()[-1]
    assert main(["plan", str(q4_pack), "--memory", "8GB"]) == 0
    assert problem in capsys.readouterr().err


def test_a_prompt_of_one_token_has_nothing_to_save(
    q4_pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.safetensors"
    prompt = tiny_models.text_of(SHORT[:1])
    assert main(["run", str(q4_pack), "-p", prompt, "--prompt-cache-file", str(path)]) == 0
    assert f"nothing to save to {path}" in capsys.readouterr().err
    assert not path.exists()
