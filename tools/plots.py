"""Pictures of results by matplotlib, which the extra `plot` installs: SVG or PNG, by file name.

Their background is drawn, in one light tone: they read the same in a light and in a dark page.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import click

from moepack.formats.errors import SourceError
from moepack.formats.sizes import format_size
from moepack.formats.whole import whole_file
from moepack.tools.options import FilePath, check_save_folder

__all__ = [
    "PLOT_FORMATS",
    "PlotPath",
    "draw_bytes",
    "draw_hit_rates",
    "draw_speeds",
    "draw_uses",
    "plot_option",
]

F = TypeVar("F", bound=Callable[..., Any])
PLOT_FORMATS = (".svg", ".png")
# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#5f5f5f")
INK, PAPER = "#222222", "#fafaf7"
STYLE = {
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": "medium",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dcdcd6",
    "legend.frameon": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "savefig.dpi": 160,
    "svg.hashsalt": "moepack",  # the same picture, the same bytes
    "text.parse_math": False,
}


class PlotPath(FilePath):
    """A path ending in .svg or .png, in a folder that can be written to; needs matplotlib."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See the class. Fails as click wants it; raises SourceError for what is not there."""
        path = super().convert(value, param, ctx)
        if path.suffix.lower() not in PLOT_FORMATS:
            self.fail("a name ending in .svg or .png is needed", param, ctx)
        check_save_folder(path)
        if find_spec("matplotlib") is None:
            name = param.opts[0] if param is not None else "a picture"
            raise SourceError(f"{name} needs matplotlib: pip install 'moepack[plot]'")
        return path


def plot_option(name: str, help_: str) -> Callable[[F], F]:
    """An option with a picture's file, refused before any work is done where it cannot be."""
    return click.option(
        name, type=PlotPath(dir_okay=False), metavar="FILE", help=f"{help_} FILE.svg or FILE.png."
    )


@contextmanager
def _figure(path: Path, **options: Any) -> Iterator[Any]:
    """A matplotlib figure, saved at the end, whole or not at all. Raises SourceError."""
    with import_module("matplotlib").rc_context(STYLE):
        figure = import_module("matplotlib.figure").Figure(layout="constrained", **options)
        yield figure
        kind = path.suffix.lower().removeprefix(".")
        # Without its date, which is no part of the picture.
        stamp = {"Date": None} if kind == "svg" else None
        try:
            with whole_file(path) as unfinished:
                figure.savefig(unfinished, format=kind, metadata=stamp)
        except OSError as error:
            raise SourceError(f"{path}: not saved ({error.strerror or error})") from error


def draw_hit_rates(path: Path, results: Sequence[Mapping[str, Any]], title: str) -> None:
    """Decode hit rates over slots, a line a policy: the results of `replay --json`."""
    points: dict[str, list[tuple[int, float]]] = {}
    for result in results:
        if (rate := result["decode"]["hit_rate"]) is not None:
            point = (max(result["slots_per_layer"]), 100 * rate)
            points.setdefault(result["policy"], []).append(point)
    with _figure(path, figsize=(7, 4.5)) as figure:
        axes = figure.subplots()
        for (policy, pairs), colour in zip(points.items(), COLOURS, strict=False):
            x, y = zip(*sorted(pairs), strict=True)
            style = "--" if policy == "belady" else "-"
            axes.plot(x, y, style, marker="o", markersize=4, label=policy, color=colour)
        axes.set_xlabel("slots a layer")
        axes.set_ylabel("hit rate of decoding (%)")
        axes.set_title(title)
        if points:
            axes.legend()


def draw_uses(path: Path, uses: Sequence[Sequence[int]], title: str) -> None:
    """A heat map, layers by experts, of how often each expert was asked for.

    `uses` are counts by layer; drawn is a count over its layer's mean, so that 1 is even use. The
    experts of a layer are in order of use: which number has which expert says nothing.
    """
    width = max(map(len, uses))
    rows = []
    for counts in uses:
        mean = sum(counts) / len(counts) or 1
        row = [count / mean for count in sorted(counts, reverse=True)]
        rows.append(row + [float("nan")] * (width - len(row)))
    with _figure(path, figsize=(7, 4.5)) as figure:
        axes = figure.subplots()
        image = axes.imshow(rows, aspect="auto", cmap="viridis", vmin=0, interpolation="nearest")
        axes.grid(False)
        axes.set_xlabel("experts of the layer, the most used first")
        axes.set_ylabel("expert layer")
        axes.set_title(title)
        figure.colorbar(image, label="uses (1: the mean of the layer)")


def draw_bytes(path: Path, nbytes: Mapping[str, Mapping[int | None, int]], title: str) -> None:
    """Stacked bars, a layer each, of bytes by kind; what is of no layer is a bar of its own."""
    layers = sorted({layer for kind in nbytes.values() for layer in kind if layer is not None})
    total = sum(sum(kind.values()) for kind in nbytes.values())
    names: list[int | None] = [None, *layers]
    with _figure(path, figsize=(8, 4.5)) as figure:
        axes = figure.subplots()
        below = [0.0] * len(names)
        for (kind, by_layer), colour in zip(nbytes.items(), COLOURS, strict=False):
            own = sum(by_layer.values())
            if not own:
                continue
            heights = [by_layer.get(name, 0) / 1e6 for name in names]
            label = f"{kind}: {format_size(own)}, {100 * own / total:.1f} %"
            axes.bar(range(len(names)), heights, 0.8, below, label=label, color=colour)
            below = [b + h for b, h in zip(below, heights, strict=True)]
        step = -(-len(layers) // 16)
        ticks = [0, *range(1, len(names), step)]
        axes.set_xticks(ticks, ["ends" if (n := names[t]) is None else str(n) for t in ticks])
        axes.grid(axis="x", visible=False)
        axes.set_xlabel("layer")
        axes.set_ylabel("bytes in the pack (MB)")
        axes.set_title(f"{title}, {format_size(total)}")
        figure.legend(loc="outside lower center", ncols=2)


def draw_speeds(path: Path, arms: Mapping[str, Mapping[str, Any]], base: str, title: str) -> None:
    """Bars of tokens a second and of megabytes read a token: `decode` of `bench --json`."""
    names = list(arms)
    read = [arms[name].get("bytes_per_token") or 0 for name in names]
    with _figure(path, figsize=(8, 0.45 * len(names) + 1.4)) as figure:
        speed, disk = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
        bars = speed.barh(names, [arms[n]["tokens_per_second"] for n in names], color=COLOURS[0])
        labels = [f"{arms[n]['tokens_per_second']:.2f} ({arms[n]['ratio']:.2f}x)" for n in names]
        speed.bar_label(bars, labels, padding=3, fontsize="small")
        speed.set_xlabel(f"decoding (tokens/s; x: of {base})")
        bars = disk.barh(names, [nbytes / 1e6 for nbytes in read], color=COLOURS[1])
        rates = [arms[n].get("hit_rate") for n in names]
        hits = ["" if rate is None else f"{100 * rate:.0f} % hits" for rate in rates]
        disk.bar_label(bars, hits, padding=3, fontsize="small")
        disk.set_xlabel("read (MB a token)")
        for axes in (speed, disk):
            axes.margins(x=0.35)
            axes.grid(axis="y", visible=False)
        speed.invert_yaxis()
        speed.set_title(title)
