"""What `moepack bench` measured, as lines for a person."""

from collections.abc import Mapping
from typing import Any

from moepack.formats.sizes import format_size

__all__ = ["lines_of"]


def lines_of(figures: Mapping[str, Any]) -> list[str]:
    """The figures for a person."""
    machine = figures["machine"]
    lines = [
        f"{machine['cores']} cores, {machine['device_name'] or machine['device']}, "
        f"{format_size(machine['free_memory'])} free, MLX {machine['mlx']} on "
        f"{machine['device']}, mlx-lm {machine['mlx-lm']}, moepack {machine['moepack']}",
        *(f"left out: {name}: {reason}" for name, reason in figures["left_out"].items()),
        "",
        f"decoding, medians of {figures['rounds']} rounds of {figures['tokens']} forced tokens",
        f"{'':13} tokens/s  x {figures['base']:9} hits  read/token  own us  experts; files",
    ]
    for name, arm in figures["decode"].items():
        hits, nbytes, own_us = (arm.get(key) for key in ("hit_rate", "bytes_per_token", "own_us"))
        files = arm["files"]
        if files != "not read" and arm["files_cached"] is not None:
            files += f" ({100 * arm['files_cached']:.0f} % in it at the start)"
        lines.append(
            f"{name:13} {arm['tokens_per_second']:8.2f}  {arm['ratio']:11.3f} "
            f"{'' if hits is None else f'{100 * hits:.1f}%':>6}  "
            f"{'' if nbytes is None else format_size(round(nbytes)):>10}  "
            f"{'' if own_us is None else f'{own_us:.1f}':>6}  "
            f"{arm['experts']}; files {files}"
        )
    lines += [
        "own us: moepack's bookkeeping a layer and token, where every call finds its experts",
        "",
        f"prompts of {figures['prompt_tokens']} tokens to the first token, files as for decoding",
        f"{'':13} seconds  x resident  x mlx-lm  chunks of   read  of experts asked for",
    ]
    for name, arm in figures["prefill"].items():
        ratios = ["" if arm[k] is None else f"{arm[k]:.3f}" for k in ("of_resident", "of_mlx_lm")]
        line = (
            f"{name:13} {arm['seconds']:7.2f}  {ratios[0]:>10}  {ratios[1]:>8}  "
            f"{arm['chunks']:6} {arm['step']:>4}"
        )
        if arm["bytes_read"] is not None:
            read, touched = (format_size(round(arm[k])) for k in ("bytes_read", "bytes_touched"))
            line += f"  {read}  {touched}, each once per chunk and layer"
        lines.append(line)
    reads, load = figures["reads"], figures["load"]
    lines.append("")
    if "left_out" in reads:
        lines.append(f"reads: left out: {reads['left_out']}")
    else:
        lines += [
            f"reads, cold, {reads['records_per_token']:.1f} records of "
            f"{format_size(round(reads['record_bytes']))} a token, {reads['workers']} workers, "
            f"{'past' if reads['past_page_cache'] else 'through'} the page cache",
            *(
                f"  {name:10}  {format_size(round(rate['bytes_per_second']))}/s  "
                f"{rate['ratio']:.3f} x raw"
                for name, rate in reads["alone"].items()
            ),
            f"  floor-cold  {format_size(round(reads['waited_bytes_per_second']))}/s  "
            f"{reads['ratio']:.3f} x raw, of the time its calls waited while others computed",
            "  raw: into a buffer; reader: by the runtime, into slots; checked: with their digests",
        ]
    if "left_out" in load:
        lines.append(f"loading: left out: {load['left_out']}")
    else:
        lines.append(
            f"loading, cold: floor engine {load['seconds']:.3f} s; reading shared.bin "
            f"({format_size(load['shared_bytes'])}) {load['read_seconds']:.3f} s; "
            f"{load['ratio']:.2f} x"
        )
    lines.append(f"peak memory of all arms together {format_size(figures['peak_memory'])}")
    return lines
