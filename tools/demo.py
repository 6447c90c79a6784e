"""`moepack demo`: convert, verify and run the bundled small model, end to end."""

import os
import sys
import tempfile
import time
from pathlib import Path

import click

from moepack.formats.errors import FormatError, SourceError
from moepack.formats.sizes import format_size
from moepack.tools.options import FilePath, Text, debug_option
from moepack.tools.reporting import note, peak_memory
from moepack.tools.startup import interrupts_unwind, terminations_unwind

__all__ = ["DEMO_MODEL", "command"]

DEMO_MODEL = Path(__file__).parent / "demo_model"
# Greedy, so small a model soon repeats itself; with a fixed seed the answer is always the same.
TEMPERATURE = 0.6
SEED = 1
DEFAULT_PROMPT = "In the beginning"
DEFAULT_MAX_TOKENS = 120

CHAT_FOLDER = "demo-chat-1"  # in the user's cache; another number when its recipe changes
CHAT_CACHE = 400_000_000  # bytes, a quarter of its experts
CHAT_SAMPLING = {"temp": 0.2, "top_p": 0.9, "repetition_penalty": 1.1, "seed": SEED}
CHAT_MAX_TOKENS = 200
CHAT_PREFILL_STEP = 256  # tokens a call, so that a long message takes little memory, too


@click.command("demo")
@click.option(
    "-p",
    "--prompt",
    type=Text(),
    metavar="TEXT",
    help=f"What to continue, or with --chat to answer.  [default: {DEFAULT_PROMPT}; asks]",
)
@click.option(
    "-m",
    "--max-tokens",
    type=click.IntRange(1),
    metavar="N",
    help=f"Of an answer.  [default: {DEFAULT_MAX_TOKENS}; with --chat {CHAT_MAX_TOKENS}]",
)
@click.option(
    "--pack",
    type=FilePath(),
    metavar="PACK",
    help="Keep the pack there.  [default: a folder that is removed at the end]",
)
@click.option(
    "--chat",
    is_flag=True,
    help="Chat with a model of 1.6 GB in 400 MB of experts; made once, kept in your cache folder.",
)
@debug_option
@click.pass_context
def command(
    ctx: click.Context, prompt: str | None, max_tokens: int | None, pack: Path | None, chat: bool
) -> int:
    """Convert, verify and run the bundled small model, end to end.

    The model was trained on the King James Bible for this demo; it continues a text. It runs with
    a quarter of its experts in memory.

    With --chat, a model that answers: SmolLM2-135M-Instruct, each layer's feed-forward network
    copied 32 times with a little noise. It knows no more than the small model it is made of, and
    is there to be streamed.
    """
    if chat and pack is not None:
        raise click.UsageError("--pack is without --chat, whose pack is in your cache folder")
    if chat:
        return run_chat(ctx, prompt, max_tokens or CHAT_MAX_TOKENS)

    import moepack.packer.convert
    import moepack.runtime.loading  # noqa: F401

    interrupts_unwind()
    text = DEFAULT_PROMPT if prompt is None else prompt
    n_tokens = max_tokens or DEFAULT_MAX_TOKENS
    if pack is not None:
        return run_demo(pack, text, n_tokens)
    terminations_unwind()
    with tempfile.TemporaryDirectory(prefix="moepack-demo-") as folder:
        return run_demo(Path(folder) / "demo.moepack", text, n_tokens)


def run_chat(ctx: click.Context, prompt: str | None, max_tokens: int) -> int:
    """Make the model that talks, unless it is there, and `run` it; returns the exit code."""
    from moepack.formats.pack import Pack
    from moepack.runtime.user_cache import cache_folder
    from moepack.tools import demo_chat, run

    interrupts_unwind()
    cache = cache_folder(sys.platform, os.environ)
    if cache is None:
        raise SourceError("demo --chat keeps its model in your cache folder, and you have no home")
    folder = cache / CHAT_FOLDER
    if not folder.exists():
        demo_chat.gguf_path()  # or say what is missing
        note(f"making {folder}, once: a minute or so, and for that time 3.2 GB of disk")
        demo_chat.build(folder)
    try:
        opened = Pack.open(folder / demo_chat.PACK_NAME)
    except (FormatError, SourceError) as error:
        raise SourceError(f"{error}; or remove {folder}, to have it made again") from error
    module = opened.manifest.modules[0]
    note(
        f"SmolLM2-135M-Instruct (HuggingFaceTB, Apache-2.0), its feed-forward networks copied\n"
        f"{module.n_experts} times with a little noise, for show: "
        f"{len(opened.manifest.modules)} layers x {module.n_experts} experts, "
        f"{format_size(opened.manifest.expert_nbytes)}, of which {format_size(CHAT_CACHE)} at most "
        "are in memory.\n"
    )
    status = ctx.invoke(
        run.command,
        pack=str(opened.path),
        prompt=prompt,
        max_tokens=max_tokens,
        expert_cache=CHAT_CACHE,
        prefill_step_size=CHAT_PREFILL_STEP,
        **CHAT_SAMPLING,
    )
    note(
        f"all in all: a model of {format_size(opened.manifest.expert_nbytes)} of experts and "
        f"{format_size(opened.manifest.shared_nbytes)} of shared weights, in a process that never "
        f"took more than {format_size(peak_memory())}"
    )
    return int(status or 0)


def run_demo(destination: Path, prompt: str, max_tokens: int) -> int:
    """The three steps, each said and timed; returns the exit code."""
    import mlx.core as mx

    from moepack.formats.digests import check_digests
    from moepack.formats.pack import Pack
    from moepack.packer.checkpoint import ConvertOptions
    from moepack.packer.convert import convert, plan_convert, summary
    from moepack.packer.publishing import check_destination
    from moepack.packer.source import open_source
    from moepack.runtime.loading import load_engine, pack_tokenizer
    from moepack.tools import answering
    from moepack.tools.verify import compare_bytes, verify_logits

    check_destination(destination, overwrite=False, can_overwrite=False)
    started = time.perf_counter()
    plan = plan_convert(open_source(str(DEMO_MODEL)), ConvertOptions())
    convert(plan, destination)
    note(f"convert  {summary(plan)}  [{time.perf_counter() - started:.1f} s]")

    started = time.perf_counter()
    pack = Pack.open(destination)
    mismatches = [*check_digests(pack), *compare_bytes(pack, str(DEMO_MODEL))]
    logits = verify_logits(pack, str(DEMO_MODEL), None, "auto")
    ok = not mismatches and logits.identical == logits.positions
    note(
        f"verify   {sum(m.n_experts for m in pack.manifest.modules)} records, "
        f"{len(mismatches)} differences; logits of {logits.identical} of {logits.positions} "
        f"positions identical to mlx-lm's  [{time.perf_counter() - started:.1f} s]"
    )

    started = time.perf_counter()
    quarter = -(-pack.manifest.expert_nbytes // 4)
    tokenizer = pack_tokenizer(pack)
    tokens = answering.prompt_tokens(
        tokenizer, [{"role": "user", "content": prompt}], use_template=tokenizer.has_chat_template
    )
    engine = load_engine(pack, expert_cache=quarter, context=len(tokens) + max_tokens)
    load_s = time.perf_counter() - started
    slots, n_experts = max(engine.plan.slots_per_layer), pack.manifest.modules[0].n_experts
    note(f"run      {slots} of {n_experts} experts a layer, {format_size(engine.plan.slots)}\n")
    mx.random.seed(SEED)
    click.echo(f"> {prompt}")
    result = answering.answer(
        engine,
        tokenizer,
        tokens,
        answering.Sampling(max_tokens=max_tokens, temp=TEMPERATURE),
        lambda text: click.echo(text, nl=False),
    )
    click.echo()
    note("\n" + answering.statistics_line(answering.statistics(engine, result, load_s)))
    return 0 if ok else 1
