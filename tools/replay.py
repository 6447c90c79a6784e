"""`moepack replay`: the hit rates that a trace would have had with other policies and slots."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moepack.formats.errors import SourceError
from moepack.tools.options import FilePath, debug_option, json_option
from moepack.tools.plots import draw_hit_rates, draw_uses, plot_option
from moepack.tools.startup import interrupts_unwind

if TYPE_CHECKING:
    from moepack.runtime.trace import Trace

__all__ = ["POLICY_NAMES", "SlotCounts", "command", "uses_of"]

# The keys of moepack.runtime.policy.POLICIES, the engine's own first.
POLICY_NAMES = ("decayed", "lru", "lfu", "s3-fifo", "w-tinylfu", "belady")
OWN = "own"


class SlotCounts(click.ParamType):  # type: ignore[type-arg]
    """Slots a layer, `16,32,64`, as a list without repeats."""

    name = "slots"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[int]:
        """See the class. Fails as click wants it."""
        if isinstance(value, list):
            return value
        if not re.fullmatch(r"0*[1-9][0-9]{0,8}(,0*[1-9][0-9]{0,8})*", value):
            self.fail(f"{value!r} is not numbers from 1 with commas between", param, ctx)
        return list(dict.fromkeys(map(int, value.split(","))))


@click.command("replay")
@click.argument("trace", type=FilePath(dir_okay=False))
@click.option(
    "--policy",
    "policies",
    type=click.Choice(POLICY_NAMES),
    multiple=True,
    help="Which experts stay; may be repeated.  [default: all]",
)
@click.option(
    "--slots",
    type=SlotCounts(),
    metavar="N,N,...",
    help="Slots a layer.  [default: 1/8, 1/4, 1/2 of the experts, and the run's own]",
)
@click.option(
    "--warm-up",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Calls of decoding, a layer, that are run first and not counted.",
)
@plot_option("--plot", "Draw hit rates of decoding against cache size.")
@plot_option("--heatmap", "Draw how often each expert of each layer was asked for.")
@json_option
@debug_option
def command(
    trace: Path,
    policies: tuple[str, ...],
    slots: list[int] | None,
    warm_up: int,
    plot: Path | None,
    heatmap: Path | None,
    as_json: bool,
) -> None:
    """Replay a routing trace, of `run --trace` or a public one.

    Prints the share of a call's distinct experts that were in memory already. `decayed` is the
    engine's policy: with the run's own slots, its figures are the run's. `belady` knows the
    future: over all calls no policy hits more, unless some need more experts than the slots.
    """
    if plot is not None and heatmap is not None and plot.resolve() == heatmap.resolve():
        raise click.UsageError("--plot and --heatmap name the same file")
    if trace.exists() and not trace.is_file():
        raise SourceError(f"{trace}: not a regular file")

    from moepack.runtime.simulate import simulate
    from moepack.runtime.trace import load_trace

    interrupts_unwind()
    loaded = load_trace(trace)
    columns = _columns(loaded, slots)
    results = []
    for policy in dict.fromkeys(policies or POLICY_NAMES):
        for label, counts in columns.items():
            figures = simulate(loaded, policy, counts, warm_up)
            results.append(
                {
                    "policy": policy,
                    "slots": label,
                    "slots_per_layer": counts,
                    "prefill": _counted(figures.prefill.as_map()),
                    "decode": _counted(figures.decode.as_map()),
                }
            )
    source = "".join(c if c.isprintable() else "?" for c in loaded.source)[:200]
    description = {
        "source": source,
        "n_layers": len(loaded.layers),
        "n_experts": max(loaded.n_experts),
        "top_k": loaded.top_k,
        "warm_up": warm_up,
    }
    if as_json:
        click.echo(json.dumps({**description, "results": results}))
    else:
        click.echo(
            f"{source or trace.name}: {len(loaded.layers)} layers, {max(loaded.n_experts)} "
            f"experts, top-{loaded.top_k}"
        )
        _print_table("decode", results, list(columns))
        _print_table("prefill", results, list(columns))
    title = source or trace.name
    if plot is not None:
        draw_hit_rates(plot, results, title)
    if heatmap is not None:
        draw_uses(heatmap, uses_of(loaded), title)


def _columns(trace: "Trace", slots: Sequence[int] | None) -> dict[str, list[int]]:
    """Slots by layer, by the label of their column."""
    if slots is not None:
        return {str(n): [min(n, of) for of in trace.n_experts] for n in slots}
    most = max(trace.n_experts)
    columns = {
        str(max(1, most // part)): [max(1, of // part) for of in trace.n_experts]
        for part in (8, 4, 2)
    }
    if trace.slots is not None:
        columns[f"{OWN} {max(trace.slots)}"] = list(trace.slots)
    return columns


def uses_of(trace: "Trace") -> list[list[int]]:
    """How many tokens asked for each expert, by layer."""
    uses = [[0] * n for n in trace.n_experts]
    for row, calls in zip(uses, trace.layers, strict=True):
        for call in calls:
            for expert, n in zip(call.experts, call.uses, strict=True):
                row[expert] += n
    return uses


def _counted(figures: dict[str, Any]) -> dict[str, Any]:
    """What a replay knows of a layer's counters."""
    return {name: figures[name] for name in ("calls", "hits", "misses", "evictions", "hit_rate")}


def _print_table(part: str, results: Sequence[dict[str, Any]], labels: Sequence[str]) -> None:
    """Hit rates by policy and slots; nothing when the trace has no such calls."""
    calls = results[0][part]["calls"]
    if calls == 0:
        return
    width = max(7, *(len(label) for label in labels)) + 2
    click.echo(f"\nhit rate in %, {part} ({calls:,} calls), by slots a layer")
    click.echo(f"{'':10}" + "".join(f"{label:>{width}}" for label in labels))
    rates: dict[str, str] = {}
    for result in results:
        rate = 100 * result[part]["hit_rate"]
        rates[result["policy"]] = rates.get(result["policy"], "") + f"{rate:>{width}.1f}"
    for policy, line in rates.items():
        click.echo(f"{policy:10}{line}")
