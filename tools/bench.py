"""`moepack bench`: how fast a pack decodes, against the same model fully loaded.

Arms take turns in one process, since other work on the machine comes and goes: only their ratios
mean much. Tokens are forced, drawn at random: greedy decoding of random weights falls into loops
that flatter every cache.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from moepack.tools.options import Name, debug_option, json_option, memory_option
from moepack.tools.reporting import note
from moepack.tools.startup import interrupts_unwind

if TYPE_CHECKING:
    import mlx.core as mx
    import mlx.nn as nn

__all__ = ["command", "decode_seconds"]


@click.command("bench")
@click.argument("pack", type=Name())
@click.option(
    "--source", type=Name(), help="Its checkpoint: adds an arm loaded by mlx-lm from there."
)
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--tokens", type=click.IntRange(2), default=16, show_default=True)
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True)
@memory_option
@json_option
@debug_option
def command(
    pack: str,
    source: str | None,
    rounds: int,
    tokens: int,
    seed: int,
    memory: int | str,
    as_json: bool,
) -> None:
    """Measure decoding, arms interleaved.

    Arms: resident (every expert in memory, mlx-lm's own path), all-hits (every expert cached, but
    streamed), quarter (a quarter of the experts cached, files warm); with --source also mlx-lm.
    """
    import numpy as np

    from moepack.runtime.loading import load_engine
    from moepack.tools.packs import open_pack

    interrupts_unwind()
    opened = open_pack(pack)
    whole = opened.manifest.expert_nbytes
    engines = {
        "resident": load_engine(opened, memory=memory, expert_cache="all"),
        "all-hits": load_engine(opened, memory=memory, expert_cache="all", keep_streaming=True),
        "quarter": load_engine(opened, memory=memory, expert_cache=-(-whole // 4)),
    }
    models = {name: engine.model for name, engine in engines.items()}
    if source is not None:
        import mlx_lm.utils

        from moepack.packer.source import find_folder

        folder = find_folder(source)[0]
        for shard in opened.manifest.source.shards:
            path = folder / shard.name
            if not path.is_file() or path.stat().st_size != shard.nbytes:
                raise click.UsageError(f"--source: {path} is not the pack's source")
        models["mlx-lm"], _ = mlx_lm.utils.load_model(folder)
    for layer in engines["all-hits"].layers:
        layer.preload(range(layer.n_experts))
    rng = np.random.default_rng(seed)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for round_ in range(rounds + 1):  # the first warms up
        forced = rng.integers(0, engines["resident"].vocabulary, tokens).tolist()
        for name, model in models.items():
            elapsed = decode_seconds(model, forced)
            if round_ > 0:
                seconds[name].append(elapsed)
        note(f"round {round_} of {rounds}")
    base = "mlx-lm" if source is not None else "resident"
    figures: dict[str, Any] = {
        "tokens": tokens,
        "rounds": rounds,
        "base": base,
        "arms": {
            name: {
                "tokens_per_second": tokens / statistics.median(times),
                "ratio": statistics.median(
                    b / t for b, t in zip(seconds[base], times, strict=True)
                ),
            }
            for name, times in seconds.items()
        },
    }
    for name in ("all-hits", "quarter"):
        decode = engines[name].counters()[1]
        figures["arms"][name] |= {
            "hit_rate": decode.hit_rate,
            "bytes_per_token": decode.bytes_read / ((rounds + 1) * tokens),
        }
    if as_json:
        click.echo(json.dumps(figures))
        return
    click.echo(f"decode, medians of {rounds} rounds of {tokens} forced tokens, files warm")
    for name, arm in figures["arms"].items():
        hits = (
            f"  hit rate {100 * arm['hit_rate']:.1f} %" if arm.get("hit_rate") is not None else ""
        )
        click.echo(
            f"{name:10} {arm['tokens_per_second']:8.2f} tokens/s  {arm['ratio']:.3f} x {base}{hits}"
        )


def decode_seconds(model: "nn.Module", forced: list[int]) -> float:
    """Seconds to decode one token after another, each forced, by mlx-lm's own generate_step."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    steps: Iterator[Any] = generate_step(
        mx.array(forced[:1]), model, max_tokens=len(forced), sampler=_forcing(forced)
    )
    started = time.perf_counter()
    for _ in steps:
        pass
    return time.perf_counter() - started


def _forcing(tokens: list[int]) -> "Callable[[mx.array], mx.array]":
    """A sampler that says the given tokens, still depending on what the model computed."""
    import mlx.core as mx

    remaining = iter([*tokens[1:], *tokens])

    def sampler(logprobs: mx.array) -> mx.array:
        token: mx.array = mx.depends(mx.array([next(remaining)]), logprobs)
        return token

    return sampler
