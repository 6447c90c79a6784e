"""`moepack convert`: a checkpoint to a pack."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from moepack.formats.errors import SourceError
from moepack.formats.sizes import format_size
from moepack.tools.options import FilePath, Name, debug_option, json_option
from moepack.tools.reporting import note, progress
from moepack.tools.startup import interrupts_unwind

__all__ = ["command", "default_pack"]


@click.command("convert")
@click.argument("source", type=Name())
@click.argument("pack", required=False, type=FilePath())
@click.option("-q", "--quantize", is_flag=True, help="Quantize, as mlx_lm.convert does.")
@click.option("--q-bits", type=click.IntRange(2, 8), help="Bits per weight.")
@click.option("--q-group-size", type=click.IntRange(1), help="Weights per scale.")
@click.option(
    "--q-mode",
    type=click.Choice(["affine", "mxfp4", "nvfp4", "mxfp8"]),
    default="affine",
    show_default=True,
    help="Quantization mode.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float16", "bfloat16", "float32"]),
    help="Cast what is not quantized.",
)
@click.option("--revision", help="Branch, tag or commit of a model on the hub.")
@click.option("--overwrite", is_flag=True, help="Replace an existing pack, when done.")
@click.option(
    "--consume",
    is_flag=True,
    help="Delete each shard of SOURCE once all of it is in the pack; unpack gives it back.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be written, and stop.")
@json_option
@debug_option
def command(
    source: str,
    pack: Path | None,
    quantize: bool,
    q_bits: int | None,
    q_group_size: int | None,
    q_mode: str,
    dtype: str | None,
    revision: str | None,
    overwrite: bool,
    consume: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Rewrite a checkpoint as a pack.

    SOURCE is a folder with an MLX or Hugging Face checkpoint, or org/name from the Hugging Face
    cache or hub; from the hub, only one shard at a time is on disk. PACK defaults to the source's
    name with .moepack in this folder.
    """
    if not quantize and (q_bits, q_group_size, q_mode) != (None, None, "affine"):
        raise click.UsageError("--q-bits, --q-group-size and --q-mode need -q")
    from moepack.packer.checkpoint import ConvertOptions
    from moepack.packer.convert import convert, plan_convert, summary
    from moepack.packer.opening import open_for_convert
    from moepack.packer.publishing import check_destination, remove_unstarted

    interrupts_unwind()
    destination = pack if pack is not None else default_pack(source)
    if revision is not None and Path(source).exists():
        raise click.UsageError("--revision is for models on the hub; this source is a path")
    check_destination(destination, overwrite, only_look=dry_run)
    context = click.get_current_context()
    context.call_on_close(lambda: remove_unstarted(destination))  # headers fetched in vain
    started = time.perf_counter()
    options = ConvertOptions(quantize, q_bits, q_group_size, q_mode, dtype)
    opened, store = open_for_convert(source, revision, destination)
    if consume and store is not None:
        raise click.UsageError(
            "--consume is for local folders; from the hub nothing is kept anyway"
        )
    plan = plan_convert(opened, options)
    for warning in (*plan.warnings, *_tokenizer_problems(opened.path, opened.config)):
        note(f"warning: {warning}")
    result = {
        "pack": str(destination),
        "nbytes": plan.nbytes,
        "n_modules": len(plan.layout.modules),
        "n_experts": max(m.n_experts for m in plan.layout.modules),
        "dropped": dict(plan.checkpoint.dropped),
    }
    if not as_json:
        note(summary(plan))
        for name, nbytes in plan.checkpoint.dropped.items():
            note(f"  left out: {name} ({nbytes:,} bytes)")
    if not dry_run:
        with progress("convert", plan.nbytes) as advance:
            manifest = convert(
                plan,
                destination,
                overwrite=overwrite,
                consume=consume,
                store=store,
                advance=advance,
                notify=note,
            )
        result["pack_id"] = manifest.pack_id
    result["elapsed_s"] = time.perf_counter() - started
    if as_json:
        click.echo(json.dumps(result))
    elif dry_run:
        click.echo(f"{destination}: would have {format_size(plan.nbytes)}; nothing was written")
    else:
        click.echo(f"{destination}: {format_size(plan.nbytes)} in {result['elapsed_s']:.1f} s")


def _tokenizer_problems(folder: Path, config: Mapping[str, Any]) -> list[str]:
    """What moepack run would say of the tokenizer of a source that has one."""
    from moepack.formats.pack import has_tokenizer
    from moepack.runtime.tokenizer import load_tokenizer

    if not has_tokenizer(folder):
        return []
    try:
        load_tokenizer(folder, dict(config))
    except SourceError as error:
        return [f"{error}; moepack run needs it"]
    return []


def default_pack(source: str) -> Path:
    """`NAME.moepack` in the current folder, NAME being the source's."""
    path = Path(source)
    name = path.resolve().name if path.exists() else path.name
    return Path(f"{name}.moepack")
