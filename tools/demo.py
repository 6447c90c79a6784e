"""`moepack demo`: convert, verify and run the bundled small model, end to end."""

import tempfile
import time
from pathlib import Path

import click

from moepack.formats.sizes import format_size
from moepack.tools.options import FilePath, Text, debug_option
from moepack.tools.reporting import note
from moepack.tools.startup import interrupts_unwind

__all__ = ["DEMO_MODEL", "command"]

DEMO_MODEL = Path(__file__).parent / "demo_model"
# Greedy, so small a model soon repeats itself; with a fixed seed the answer is always the same.
TEMPERATURE = 0.6
SEED = 1
DEFAULT_PROMPT = "In the beginning"


@click.command("demo")
@click.option(
    "-p", "--prompt", type=Text(), default=DEFAULT_PROMPT, show_default=True, metavar="TEXT"
)
@click.option("-m", "--max-tokens", type=click.IntRange(1), default=120, show_default=True)
@click.option(
    "--pack",
    type=FilePath(),
    help="Keep the pack there.  [default: a folder that is removed at the end]",
)
@debug_option
def command(prompt: str, max_tokens: int, pack: Path | None) -> int:
    """Convert, verify and run the bundled small model, end to end.

    The model was trained on the King James Bible for this demo; it continues a text. It runs with
    a quarter of its experts in memory.
    """
    import moepack.packer.convert
    import moepack.runtime.loading  # noqa: F401

    interrupts_unwind()
    if pack is not None:
        return run_demo(pack, prompt, max_tokens)
    with tempfile.TemporaryDirectory(prefix="moepack-demo-") as folder:
        return run_demo(Path(folder) / "demo.moepack", prompt, max_tokens)


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
