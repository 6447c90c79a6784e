"""`moepack verify`: is a pack whole, and does it say what its source says?"""

import gc
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moepack.formats.digests import Mismatch, check_digests
from moepack.formats.errors import BudgetError, SourceError
from moepack.formats.pack import Pack
from moepack.formats.progress import Advance, silent
from moepack.formats.sizes import format_size, parse_size
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
    from moepack.runtime.loading import Engine
    from moepack.tools.logits import LogitsComparison

__all__ = ["BudgetsComparison", "command", "compare_bytes", "verify_budgets", "verify_logits"]

# Long enough to leave every window and fill every expert's row at least once in small models.
DEFAULT_N_TOKENS = 128
DEFAULT_TEXT = (
    "In the beginning God created the heaven and the earth. And the earth was without form, and "
    "void; and darkness was upon the face of the deep. And the Spirit of God moved upon the face "
    "of the waters. And God said, Let there be light: and there was light. def f(x): return x**2 "
    "+ 3*x - 1  # 2, 9, 18\nDer Mond ist aufgegangen, die goldnen Sternlein prangen."
)
MAX_LISTED = 20


@dataclass(frozen=True, slots=True)
class BudgetsComparison:
    """Runs with expert caches of `sizes` bytes; the first position where their bits differ."""

    sizes: tuple[int, int]
    first_difference: int | None

    def as_map(self) -> dict[str, Any]:
        """The `budgets` object of `verify --json`."""
        return {"sizes": list(self.sizes), "identical": self.first_difference is None}


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
@click.option(
    "--budgets",
    is_flag=True,
    help="Run the pack with two cache sizes too: the same bits, or it fails. Needs no SOURCE.",
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
    budgets: bool,
    memory: int | str,
    as_json: bool,
) -> int:
    """Check a pack.

    Alone: structure, and the digest of every record, shared tensor and file. With SOURCE, the
    checkpoint it was made from: every byte against it, then the logits of the pack, streamed with
    the smallest legal cache, against those of the source loaded by mlx-lm. A source that does not
    fit in the memory is loaded without its experts, which are read from its shards as needed;
    those that convert computed are computed once more, into a scratch file beside the pack.
    """
    given = {"--prompt": prompt, "--text-file": text_file, "--tolerance": tolerance or None}
    if budgets:
        given = {"--tolerance": given["--tolerance"]}
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
            mismatches += compare_bytes(opened, source, advance, memory)
        # Models of different shapes have no logits to compare, and are told apart by then.
        if not any(m.is_structural for m in mismatches):
            logits = verify_logits(opened, source, text, memory)
    compared = verify_budgets(opened, text, memory) if budgets else None
    logits_ok = logits is None or (
        logits.max_abs_diff <= tolerance and (tolerance > 0 or logits.identical == logits.positions)
    )
    figures: dict[str, Any] = {
        "ok": not mismatches
        and logits_ok
        and (compared is None or compared.first_difference is None),
        "records_checked": sum(m.n_experts for m in manifest.modules),
        "bytes_checked": nbytes,
        "mismatches": [m.as_map() for m in mismatches],
        "logits": logits.as_map() if logits is not None else None,
        "budgets": compared.as_map() if compared is not None else None,
    }
    if as_json:
        click.echo(json.dumps(figures))
    else:
        _print(opened, figures, mismatches, compared)
    return 0 if figures["ok"] else 1


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{path}: not a UTF-8 text ({error.reason})") from error


def compare_bytes(
    pack: Pack, source: str, advance: Advance = silent, memory: int | str = "auto"
) -> Iterator[Mismatch]:
    """Every difference between the pack and what its source gives with the recorded options.

    Raises BudgetError where computing one tensor as convert did takes more than `memory`.
    """
    from moepack.packer.comparing import compare, recorded_options
    from moepack.packer.convert import plan_convert
    from moepack.packer.source import open_source
    from moepack.runtime.machine import resident_memory
    from moepack.tools.reference_model import deriving_nbytes

    interrupts_unwind()
    plan = plan_convert(open_source(source), recorded_options(pack))
    deriving = deriving_nbytes(plan.source, plan.options, plan.checkpoint)
    if deriving and (needed := resident_memory() + deriving) > (bound := _bound(memory)):
        raise BudgetError(
            f"{format_size(bound)} of memory are too little to compute the pack's tensors from the "
            f"source: that alone takes {format_size(needed)}"
        )
    yield from compare(pack, plan, advance)


def verify_logits(
    pack: Pack, source: str, text: str | None, memory: int | str
) -> "LogitsComparison":
    """Compare the pack, streamed with the smallest legal cache, with the source by mlx-lm.

    Both share `memory`; a note says how the source was loaded. Raises BudgetError.
    """
    from moepack.packer.comparing import recorded_options
    from moepack.packer.source import open_source
    from moepack.tools.logits import compare_logits
    from moepack.tools.reference_model import load_reference

    engine, tokens = _load_smallest(pack, text, memory)
    plan, bound = engine.plan, _bound(memory)
    chunks = _chunks(engine, bound)
    original, place, how = load_reference(
        open_source(source),
        recorded_options(pack),
        plan.slots_per_layer,
        bound=bound,
        # The two models take turns: of the workspace of a call there is one, of caches are two.
        taken=[nbytes + plan.kv for nbytes in chunks.values()],
        name="the memory free here" if memory == "auto" else "--memory",
        scratch=_scratch_folder(pack),
    )
    note(how)
    if engine.is_widened:
        note(WIDENED)
    return compare_logits(engine.model, original, tokens, list(chunks)[place])


def _scratch_folder(pack: Pack) -> Path | None:
    """The folder that the pack is in, whose disk is large enough for packs, if it may be written.

    The system's own for such files may be in memory.
    """
    folder = pack.path.resolve().parent
    return folder if os.access(folder, os.W_OK) else None


def verify_budgets(pack: Pack, text: str | None, memory: int | str) -> BudgetsComparison:
    """Run the pack with the smallest legal expert cache, then with one of half of the experts.

    The second is smaller where `memory` leaves no more. Raises BudgetError where it leaves room for
    the first alone.
    """
    from moepack.runtime.loading import load_engine
    from moepack.tools.logits import first_difference, position_digests

    engine, tokens = _load_smallest(pack, text, memory)
    floor = engine.plan.slots
    chunk, cache = _second_cache(engine, _bound(memory))
    few = position_digests(engine.model, tokens, chunk)
    for layer in engine.layers:
        layer.close()
    del engine
    gc.collect()
    engine = load_engine(
        pack,
        memory=memory,
        expert_cache=cache,
        context=len(tokens),
        prefill_step=chunk,
        check="never",
    )
    more = position_digests(engine.model, tokens, chunk)
    return BudgetsComparison((floor, engine.plan.slots), first_difference(few, more))


def _second_cache(engine: "Engine", bound: int) -> tuple[int, int]:
    """(positions a call, bytes of an expert cache above that of `engine`, the smallest).

    Half of the experts, or as many as `bound` leaves room for. Raises BudgetError where that is not
    one more a layer.
    """
    from moepack.runtime.memory import SLACK, START_VARIATION, ceil_size

    modules, floor = engine.pack.manifest.modules, engine.plan.slots
    least = most = smallest = 0
    for n_slots, module in zip(engine.plan.slots_per_layer, modules, strict=True):
        one_more = min(n_slots + 1, module.n_experts)
        least += one_more * module.record_nbytes
        most += max(one_more, module.n_experts // 2) * module.record_nbytes
    for chunk, taken in _chunks(engine, bound).items():
        if (cache := min(most, int(bound / SLACK) - taken + floor)) >= least:
            return chunk, cache
        smallest = int((taken - floor + least) * SLACK) + START_VARIATION
    raise BudgetError(
        f"--budgets: {format_size(bound)} of memory leave room for one cache size alone, "
        f"{format_size(floor)}; the smallest that works is --memory {ceil_size(smallest)}"
    )


def _load_smallest(pack: Pack, text: str | None, memory: int | str) -> tuple["Engine", list[int]]:
    """(the pack with the smallest legal expert cache, the tokens to run it on)."""
    from moepack.runtime.loading import load_engine, pack_tokenizer

    try:
        tokenizer = pack_tokenizer(pack)
    except SourceError:
        if text is not None:
            raise
        note("the pack has no tokenizer: logits are compared on made-up tokens")
        tokens = []
    else:
        tokens = tokenizer.encode(DEFAULT_TEXT if text is None else text)
        del tokenizer
    if text is not None and not tokens:
        raise SourceError("the text to compare on has no tokens")
    engine = load_engine(
        pack,
        memory=memory,
        expert_cache="floor",
        context=len(tokens) if text is not None else max(DEFAULT_N_TOKENS, len(tokens)),
        check="never",
    )
    return engine, tokens if text is not None else _lengthen(tokens, engine.vocabulary)


def _chunks(engine: "Engine", bound: int) -> dict[int, int]:
    """Positions a call that `bound` allows, most first: bytes that the engine then takes in all."""
    from moepack.tools.logits import chunk_choices, logits_nbytes

    plan = engine.plan
    choices = chunk_choices(bound - plan.total, engine.vocabulary, plan.prefill_step)
    return {
        chunk: plan.total
        - plan.prefill
        + plan.prefill * chunk // plan.prefill_step
        + logits_nbytes(chunk, engine.vocabulary)
        for chunk in choices
    }


def _bound(memory: int | str) -> int:
    """Bytes that the process may use."""
    from moepack.runtime.machine import available_memory

    return available_memory() if memory == "auto" else parse_size(memory)


def _lengthen(tokens: list[int], vocabulary: int) -> list[int]:
    """At least DEFAULT_N_TOKENS tokens: a tokenizer may know little of the default text."""
    made_up = [(7919 * i + 13) % vocabulary for i in range(DEFAULT_N_TOKENS - len(tokens))]
    return [*tokens, *made_up][: max(DEFAULT_N_TOKENS, len(tokens))]


def _print(
    pack: Pack,
    figures: dict[str, Any],
    mismatches: list[Mismatch],
    budgets: BudgetsComparison | None,
) -> None:
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
            + _expert_named(mismatches)
        )
    if budgets is not None:
        at = budgets.first_difference
        click.echo(
            f"budgets: {' and '.join(format_size(n) for n in budgets.sizes)} of experts cached, "
            + ("identical" if at is None else f"DIFFERENT, first at position {at}")
        )
    click.echo(f"{pack.path}: {'ok' if figures['ok'] else 'NOT OK'}")


def _expert_named(mismatches: list[Mismatch]) -> str:
    """What to add to a difference of logits: the first expert whose bytes differ, if one does."""
    for mismatch in mismatches:
        if mismatch.expert is not None:
            return f", first different bytes in {str(mismatch).partition(':')[0]}"
    return ""
