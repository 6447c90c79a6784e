"""`moepack run`: answer a prompt, or chat, from a pack."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moepack.formats.errors import SourceError
from moepack.tools.options import (
    FilePath,
    FiniteRange,
    JsonObject,
    Name,
    Switch,
    Text,
    check_save_path,
    checked_text,
    debug_option,
    expert_cache_option,
    json_option,
    memory_option,
    warm_start_option,
    wire_option,
)
from moepack.tools.reporting import WIDENED, note, waiting
from moepack.tools.startup import interrupts_unwind

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from moepack.runtime.loading import Engine
    from moepack.tools.answering import Answer, Sampling
    from moepack.tools.chat_view import AnswerView

__all__ = ["command"]


# What /set of a chat changes, by the names of the options.
SETTINGS = (
    "temp",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "seed",
    "max_tokens",
    "show_thinking",
)


def _checked_max_tokens(ctx: click.Context, param: click.Parameter, value: int) -> int:
    if value == 0 or value < -1:
        raise click.BadParameter("a positive number, or -1 for no limit")
    return value


@click.command("run")
@click.argument("pack", type=Name())
@click.option(
    "-p", "--prompt", type=Text(), metavar="TEXT|-", help="The message; - reads it from stdin."
)
@click.option("--system-prompt", type=Text(), metavar="TEXT", help="A system message before it.")
@click.option(
    "-m",
    "--max-tokens",
    type=int,
    default=256,
    show_default=True,
    callback=_checked_max_tokens,
    help="-1: without limit.",
)
@click.option("--temp", type=FiniteRange(0), default=0.0, help="0: always the likeliest token.")
@click.option("--top-p", type=FiniteRange(0, 1), default=1.0, help="Of the likeliest, so much.")
@click.option("--top-k", type=click.IntRange(0), default=0, help="Of the k likeliest; 0: off.")
@click.option("--min-p", type=FiniteRange(0, 1), default=0.0, help="Times the likeliest, at least.")
@click.option("--repetition-penalty", type=FiniteRange(0, min_open=True), help="1: none.")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), help="Same seed, same answer.")
@click.option(
    "--prefill-step-size",
    type=click.IntRange(1),
    help="Prompt tokens per call.  [default: what --memory leaves room for]",
)
@click.option("--max-kv-size", type=click.IntRange(5), help="At most so many past tokens.")
@click.option("--kv-bits", type=click.Choice(["2", "3", "4", "5", "6", "8"]), help="Quantize KV.")
@click.option(
    "--prompt-cache-file",
    type=FilePath(dir_okay=False),
    help="Save the prompt's KV cache, or reuse it.",
)
@click.option("--chat-template-args", type=JsonObject(), metavar="JSON", help="For the template.")
@click.option("--ignore-chat-template", is_flag=True, help="Send the raw prompt.")
@click.option(
    "--show-thinking/--hide-thinking",
    type=Switch(),
    default=True,
    help="Thinking is shown, dimmed, unless hidden.",
)
@click.option(
    "--context",
    type=click.IntRange(1),
    help="Plan memory for so many tokens, and end there.  [default: 4096 in a chat, else as "
    "needed]",
)
@click.option(
    "--adapter-path", type=FilePath(), help="A LoRA adapter by mlx-lm, of shared weights."
)
@click.option(
    "--trace",
    type=FilePath(dir_okay=False),
    help="Save which experts each call asked for, for replay: FILE.npz.",
)
@warm_start_option
@click.option(
    "--check",
    type=click.Choice(["first", "always", "never"]),
    default="first",
    show_default=True,
    help="Which reads of an expert are compared with its digest.",
)
@click.option(
    "--lossy-top-k",
    type=click.IntRange(1),
    help="Fewer experts a token than trained.",
)
@click.option(
    "--pin",
    type=click.IntRange(0),
    default=0,
    help="Never evict a layer's best N.",
)
@wire_option
@memory_option
@expert_cache_option
@json_option
@debug_option
def command(
    pack: str,
    prompt: str | None,
    system_prompt: str | None,
    max_tokens: int,
    temp: float,
    top_p: float,
    top_k: int,
    min_p: float,
    repetition_penalty: float | None,
    seed: int | None,
    prefill_step_size: int | None,
    max_kv_size: int | None,
    kv_bits: str | None,
    prompt_cache_file: Path | None,
    chat_template_args: dict[str, Any] | None,
    ignore_chat_template: bool,
    show_thinking: bool,
    context: int | None,
    adapter_path: Path | None,
    trace: Path | None,
    warm_start: bool,
    lossy_top_k: int | None,
    check: str,
    pin: int,
    wire: bool,
    memory: int | str,
    expert_cache: int | str,
    as_json: bool,
) -> None:
    """Answer a prompt from a pack.

    Without --prompt it is a chat on a terminal (/help lists its commands), else stdin is the
    prompt. Statistics go to stderr.
    """
    if prompt_cache_file is not None and prompt_cache_file.suffix != ".safetensors":
        # mlx-lm adds the ending to any other name, and would write over a file nobody looked at.
        raise click.BadParameter("a name ending in .safetensors", param_hint="--prompt-cache-file")
    if trace is not None and trace.suffix != ".npz":
        raise click.BadParameter("a name ending in .npz", param_hint="--trace")
    if pin and (not warm_start or trace is not None):
        raise click.UsageError("--pin needs the warm start, which --trace turns off too")
    is_chat = prompt is None and sys.stdin is not None and sys.stdin.isatty()
    if is_chat and as_json:
        raise click.UsageError("--json needs --prompt")
    if not is_chat and (prompt is None or prompt == "-"):
        prompt = _read_stdin()

    import mlx.core as mx

    from moepack.runtime.loading import DEFAULT_CONTEXT, load_engine, pack_tokenizer
    from moepack.tools.answering import Sampling, prompt_tokens
    from moepack.tools.packs import open_pack

    interrupts_unwind()
    for file in (prompt_cache_file, trace):
        if file is not None:
            check_save_path(file)
    sampling = Sampling(
        max_tokens=max_tokens,
        temp=temp,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        max_kv_size=max_kv_size,
        kv_bits=int(kv_bits) if kv_bits else None,
    )
    started = time.perf_counter()
    opened = open_pack(pack)
    tokenizer = pack_tokenizer(opened)
    use_template = tokenizer.has_chat_template and not ignore_chat_template
    system = [{"role": "system", "content": system_prompt}] if system_prompt is not None else []
    is_edited = sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    # Now, so that memory is planned with what it takes.
    read = _reader(is_edited) if is_chat else None

    def tokens_of(messages: list[dict[str, str]]) -> list[int]:
        return prompt_tokens(
            tokenizer, messages, use_template=use_template, template_args=chat_template_args
        )

    if prompt is not None:
        tokens = tokens_of([*system, {"role": "user", "content": prompt}])
        n_answer = max_tokens if max_tokens > 0 else DEFAULT_CONTEXT
        if context is None:
            context = len(tokens) + min(n_answer, DEFAULT_CONTEXT)
        elif max_kv_size is None or max_kv_size > context:  # memory is for no more
            if context <= len(tokens):
                raise click.UsageError(
                    f"--context {context}: the prompt has {len(tokens):,} tokens, and an answer "
                    "needs room"
                )
            sampling = sampling.within(context - len(tokens))
    context = context or DEFAULT_CONTEXT
    with waiting(f"loading {opened.path.name}"):
        engine = load_engine(
            opened,
            memory=memory,
            expert_cache=expert_cache,
            adapter_path=adapter_path,
            context=context,
            prefill_step=prefill_step_size,
            max_kv_size=max_kv_size,
            kv_bits=sampling.kv_bits,
            keep_streaming=trace is not None,
            lossy_top_k=lossy_top_k,
            check=check,
            pins=pin,
            wire=wire,
        )
    load_s = time.perf_counter() - started
    if seed is not None:  # now, as loading uses random numbers too
        mx.random.seed(seed)
    if lossy_top_k is not None:
        note(f"lossy: {lossy_top_k} experts a token, fewer than the model was trained with")
    if engine.is_widened:
        note(WIDENED)
    if not use_template and not ignore_chat_template:
        note("no chat template in the pack: the raw prompt is sent")

    def open_cache(tokens: list[int]) -> tuple[dict[str, Any], int]:
        from moepack.tools.prompt_cache import open_prompt_cache

        if prompt_cache_file is None:
            return {}, 0
        return open_prompt_cache(prompt_cache_file, engine, tokens, sampling, adapter_path, note)

    def view_of(tokens: list[int], show_thinking: bool) -> "AnswerView":
        return _view(tokenizer, tokens, use_template=use_template, show_thinking=show_thinking)

    # A trace replays from empty slots.
    with _warmed(engine, warm_start and trace is None), _traced(engine, trace):
        if read is None:
            view = None if as_json else view_of(tokens, show_thinking)
            options, n_cached = open_cache(tokens)
            result = _answer_once(engine, tokenizer, tokens, sampling, view, n_cached, options)
            _report(engine, result, load_s, as_json)
            return
        from moepack.tools.chat import Chat

        click_context = click.get_current_context()
        parameters = {p.name: p for p in click_context.command.params if p.name is not None}
        chat = Chat(
            engine,
            tokenizer,
            sampling,
            tokens_of=tokens_of,
            view_of=view_of,
            open_cache=open_cache,
            settings={
                name: partial(parameters[name].process_value, click_context) for name in SETTINGS
            },
            values={name: click_context.params[name] for name in SETTINGS},
            context=context if max_kv_size is None else None,
            system=system_prompt,
        )
        note("Type a message; /help lists the commands, Ctrl-D leaves.")
        chat.run(read, interrupts_end=not is_edited)


def _reader(is_edited: bool) -> Callable[[], str]:
    """What reads a chat's lines."""
    if is_edited:
        from moepack.tools.chat_terminal import terminal_reader

        return terminal_reader(["system", *SETTINGS])
    from moepack.tools.chat_input import plain_reader

    return plain_reader


def _view(
    tokenizer: "TokenizerWrapper", tokens: list[int], *, use_template: bool, show_thinking: bool
) -> "AnswerView":
    """What shows an answer: with its thinking told apart, unless all of it goes to a file."""
    from moepack.tools.chat_view import AnswerView
    from moepack.tools.serving.parsing import ChatParser, Parser

    def write(text: str) -> None:
        click.echo(text, nl=False)  # and flushes

    is_parsed = use_template and (sys.stdin.isatty() or sys.stdout.isatty() or not show_thinking)
    parser = ChatParser(tokenizer, tokens, [], is_stream=False) if is_parsed else Parser()
    return AnswerView(parser, write, show_thinking=show_thinking)


@contextmanager
def _warmed(engine: "Engine", is_on: bool) -> Iterator[None]:
    """Begin with the experts that the last run of this pack used most, and note this run's."""
    from moepack.runtime.warm import warm_up
    from moepack.tools.warming import keep, profile_of

    profile = profile_of(engine, is_on)
    if profile is None:
        yield
        return
    with waiting("reading the experts used most"):
        problems = warm_up(engine, profile)
    for problem in problems:
        note(f"warning: {problem}")
    if engine.pins and not any(layer.pinned for layer in engine.layers):
        note("nothing is pinned: no run of this pack was noted yet")
    try:
        yield
    finally:
        keep(engine, profile)


def _answer_once(
    engine: "Engine",
    tokenizer: "TokenizerWrapper",
    tokens: list[int],
    sampling: "Sampling",
    view: "AnswerView | None",
    n_cached: int,
    options: dict[str, Any],
) -> "Answer":
    """The answer to a prompt; `view`, if any, shows it."""
    from moepack.tools import answering

    show: Callable[[str], object] = (lambda text: None) if view is None else view.feed
    result = answering.answer(
        engine, tokenizer, tokens, sampling, show, n_cached=n_cached, **options
    )
    if view is not None:
        view.end()
    return result


def _report(engine: "Engine", result: "Answer", load_s: float, as_json: bool) -> None:
    """Print what an answer cost."""
    from moepack.tools import answering

    figures = answering.statistics(engine, result, load_s)
    if as_json:
        click.echo(answering.as_json(figures))
    else:
        click.echo()
        note(answering.statistics_line(figures))


@contextmanager
def _traced(engine: "Engine", path: Path | None) -> Iterator[None]:
    """Save the trace of what runs inside, interrupted or not; without a path do nothing."""
    from moepack.runtime.trace import TraceRecorder

    if path is None:
        yield
        return
    recorder = TraceRecorder()
    for index, layer in enumerate(engine.layers):
        layer.record = recorder.layer(index)

    def save() -> None:
        try:
            n_calls = recorder.save(
                path,
                [layer.n_experts for layer in engine.layers],
                engine.plan.slots_per_layer,
                f"moepack run of {engine.pack.path.name}",
            )
        except OSError as error:
            raise SourceError(f"{path}: not saved ({error.strerror or error})") from error
        note(f"saved {n_calls} calls of expert layers to {path}")

    try:
        yield
    except BaseException:
        try:
            save()
        except SourceError as error:
            note(f"warning: {error}")  # something worse is under way
        raise
    save()


def _read_stdin() -> str:
    """All of stdin, without the line end that `echo` and editors put after a text."""
    if sys.stdin is None:
        raise click.UsageError("no --prompt, and stdin is closed")
    try:
        text = checked_text(sys.stdin.read())
    except ValueError as error:  # UnicodeDecodeError is one
        raise click.UsageError(f"stdin: {error}") from error
    return text.removesuffix("\n").removesuffix("\r")
