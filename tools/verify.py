"""`moepack verify`: is a pack whole, and does it say what its source says?"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moepack.formats.digests import Mismatch, check_digests
from moepack.formats.errors import SourceError
from moepack.formats.pack import Pack
from moepack.formats.progress import Advance, silent
from moepack.formats.sizes import format_size
from moepack.tools.options import (
    FilePath,
    FiniteRange,
    Name,
    Text,
    debug_option,
    json_option,
    memory_option,
)
from moepack.tools.reporting import WIDENED, note, progress
from moepack.tools.startup import interrupts_unwind

if TYPE_CHECKING:
    from moepack.tools.logits import LogitsComparison

__all__ = ["command", "compare_bytes", "verify_logits"]

# Long enough to leave every window and fill every expert's row at least once in small models.
DEFAULT_N_TOKENS = 128
DEFAULT_TEXT = (
    "In the beginning God created the heaven and the earth. And the earth was without form, and "
    "void; and darkness was upon the face of the deep. And the Spirit of God moved upon the face "
    "of the waters. And God said, Let there be light: and there was light. def f(x): return x**2 "
    "+ 3*x - 1  # 2, 9, 18\nDer Mond ist aufgegangen, die goldnen Sternlein prangen."
)
MAX_LISTED = 20


@click.command("verify")
@click.argument("pack", type=Name())
@click.argument("source", required=False, type=Name())
@click.option("--prompt", type=Text(), metavar="TEXT", help="Text to compare logits on.")
@click.option(
    "--text-file",
    type=FilePath(exists=True, dir_okay=False),
    help="The same, from a file.",
)
@click.option(
    "--tolerance",
    type=FiniteRange(0),
    default=0.0,
    show_default=True,
    help="Largest difference of a logit that passes.",
)
@memory_option
@json_option
@debug_option
def command(
    pack: str,
    source: str | None,
    prompt: str | None,
    text_file: Path | None,
    tolerance: float,
    memory: int | str,
    as_json: bool,
) -> int:
    """Check a pack.

    Alone: structure, and the digest of every record, shared tensor and file. With SOURCE, the
    checkpoint it was made from: every byte against it, then the logits of the pack, streamed with
    the smallest legal cache, against those of the source loaded by mlx-lm.
    """
    given = {"--prompt": prompt, "--text-file": text_file, "--tolerance": tolerance or None}
    if source is None and any(value is not None for value in given.values()):
        names = " and ".join(name for name, value in given.items() if value is not None)
        raise click.UsageError(f"{names}: of use only with SOURCE")
    if prompt is not None and text_file is not None:
        raise click.UsageError("--prompt and --text-file: give one of them")
    from moepack.tools.packs import open_pack

    text = _read_text(text_file) if text_file is not None else prompt
    opened = open_pack(pack)
    manifest = opened.manifest
    nbytes = manifest.expert_nbytes + sum(t.nbytes for t in manifest.shared)
    with progress("digests", nbytes) as advance:
        mismatches = list(check_digests(opened, advance))
    logits = None
    if source is not None:
        with progress("bytes", nbytes) as advance:
            mismatches += compare_bytes(opened, source, advance)
        # Models of different shapes have no logits to compare, and are told apart by then.
        if not any(m.is_structural for m in mismatches):
            logits = verify_logits(opened, source, text, memory)
    logits_ok = logits is None or (
        logits.max_abs_diff <= tolerance and (tolerance > 0 or logits.identical == logits.positions)
    )
    figures: dict[str, Any] = {
        "ok": not mismatches and logits_ok,
        "records_checked": sum(m.n_experts for m in manifest.modules),
        "bytes_checked": nbytes,
        "mismatches": [m.as_map() for m in mismatches],
        "logits": logits.as_map() if logits is not None else None,
    }
    if as_json:
        click.echo(json.dumps(figures))
    else:
        _print(opened, figures, mismatches)
    return 0 if figures["ok"] else 1


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{path}: not a UTF-8 text ({error.reason})") from error


def compare_bytes(pack: Pack, source: str, advance: Advance = silent) -> Iterator[Mismatch]:
    """Every difference between the pack and what its source gives with the recorded options."""
    from moepack.packer.comparing import compare, recorded_options
    from moepack.packer.convert import plan_convert
    from moepack.packer.source import open_source

    interrupts_unwind()
    plan = plan_convert(open_source(source), recorded_options(pack))
    yield from compare(pack, plan, advance)


def verify_logits(
    pack: Pack, source: str, text: str | None, memory: int | str
) -> "LogitsComparison":
    """Compare the pack, streamed with the smallest legal cache, with the source by mlx-lm."""
    from moepack.packer.checkpoint import load_source_model
    from moepack.packer.comparing import recorded_options
    from moepack.packer.source import open_source
    from moepack.runtime.half import compute_in_float32
    from moepack.runtime.loading import load_engine
    from moepack.tools.logits import compare_logits

    engine = load_engine(pack, memory=memory, expert_cache="floor")
    try:
        tokenizer = engine.tokenizer()
    except SourceError:
        if text is not None:
            raise
        note("the pack has no tokenizer: logits are compared on made-up tokens")
        tokens = [(7919 * i + 13) % engine.vocabulary for i in range(DEFAULT_N_TOKENS)]
    else:
        tokens = tokenizer.encode(DEFAULT_TEXT if text is None else text)
        if text is None:
            tokens = _lengthen(tokens, engine.vocabulary)
    if not tokens:
        raise SourceError("the text to compare on has no tokens")
    original, _ = load_source_model(open_source(source), recorded_options(pack))
    if engine.is_widened:
        note(WIDENED)
        compute_in_float32(original)
    return compare_logits(engine.model, original, tokens)


def _lengthen(tokens: list[int], vocabulary: int) -> list[int]:
    """At least DEFAULT_N_TOKENS tokens: a tokenizer may know little of the default text."""
    made_up = [(7919 * i + 13) % vocabulary for i in range(DEFAULT_N_TOKENS - len(tokens))]
    return [*tokens, *made_up][: max(DEFAULT_N_TOKENS, len(tokens))]


def _print(pack: Pack, figures: dict[str, Any], mismatches: list[Mismatch]) -> None:
    for mismatch in mismatches[:MAX_LISTED]:
        click.echo(f"DIFFERENT  {mismatch}")
    if len(mismatches) > MAX_LISTED:
        click.echo(f"... and {len(mismatches) - MAX_LISTED} more (--json lists all)")
    click.echo(
        f"{figures['records_checked']} records, {format_size(figures['bytes_checked'])} checked, "
        f"{len(mismatches)} differences"
    )
    if (logits := figures["logits"]) is not None:
        click.echo(
            f"logits: {logits['identical']} of {logits['positions']} positions identical, "
            f"largest difference {logits['max_abs_diff']:g}, KL {logits['max_kl']:g}, "
            f"top-1 agreement {100 * logits['top1_agreement']:.2f} %"
            + (
                f", first difference at position {logits['first_difference']}"
                if logits["first_difference"] is not None
                else ""
            )
        )
    click.echo(f"{pack.path}: {'ok' if figures['ok'] else 'NOT OK'}")
