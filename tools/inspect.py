"""`moepack inspect`: what is inside a pack, from its manifest alone."""

import json
import re
from pathlib import Path
from typing import Any

import click

from moepack.formats.manifest import ExpertModule, Manifest, Quantization
from moepack.formats.sizes import format_size
from moepack.tools.options import Name, debug_option, json_option
from moepack.tools.plots import draw_bytes, plot_option
from moepack.tools.startup import interrupts_unwind

__all__ = ["command", "describe", "nbytes_by_layer"]

EXPERTS, PADDING = "routed experts", "padding"
ATTENTION, REST, ENDS = "attention", "routers, norms, dense layers", "embedding and head"


@click.command("inspect")
@click.argument("pack", type=Name())
@plot_option("--plot", "Draw where the bytes are, layer by layer.")
@json_option
@debug_option
def command(pack: str, plot: Path | None, as_json: bool) -> None:
    """Show what is inside a pack: layers, experts, stride, bits, sizes."""
    from moepack.tools.packs import open_pack

    interrupts_unwind()
    manifest = open_pack(pack).manifest
    figures = describe(manifest)
    if plot is not None:
        draw_bytes(plot, nbytes_by_layer(manifest), Path(pack).name)
    if as_json:
        click.echo(json.dumps(figures))
        return
    click.echo(f"{figures['model_type']}, format {figures['version']}, {figures['created_by']}")
    click.echo(f"pack id  {figures['pack_id']}")
    source = manifest.source
    if source.name:
        click.echo(f"source   {source.name} {source.revision or ''}".rstrip())
    for shard in source.shards:
        click.echo(f"source   {shard.name}  {format_size(shard.nbytes)}  sha256 {shard.sha256}")
    if source.options:
        click.echo("options  " + ", ".join(f"{k}={v}" for k, v in source.options.items()))
    for name, nbytes in source.dropped.items():
        click.echo(f"left out {name}  {format_size(nbytes)}")
    click.echo(
        f"shared   {len(manifest.shared)} tensors, "
        f"{format_size(sum(t.nbytes for t in manifest.shared))} "
        f"({format_size(manifest.shared_nbytes)} aligned)"
    )
    click.echo(f"experts  {len(manifest.modules)} modules, {format_size(manifest.expert_nbytes)}")
    click.echo(f"{'file':20} {'experts':>7} {'record':>9} {'stride':>11}  bits  module")
    for module in figures["modules"]:
        click.echo(
            f"{module['file']:20} {module['n_experts']:>7} "
            f"{format_size(module['record_nbytes']):>9} {module['stride']:>11,}  "
            f"{module['bits']:4}  {module['path']}"
        )


def describe(manifest: Manifest) -> dict[str, Any]:
    """The object that `inspect --json` prints."""
    return {
        "model_type": manifest.model_type,
        "version": ".".join(map(str, manifest.version)),
        "created_by": manifest.created_by,
        "pack_id": manifest.pack_id,
        "alignment": manifest.alignment,
        "shared_nbytes": manifest.shared_nbytes,
        "n_shared_tensors": len(manifest.shared),
        "expert_nbytes": manifest.expert_nbytes,
        "options": dict(manifest.source.options),
        "dropped": dict(manifest.source.dropped),
        "modules": [
            {
                "path": m.path,
                "file": m.file,
                "n_experts": m.n_experts,
                "record_nbytes": m.record_nbytes,
                "stride": m.stride,
                "bits": module_bits(m),
                "parts": {p.name: {"dtype": p.dtype, "shape": list(p.shape)} for p in m.parts},
                "quantization": {k: quantization_map(q) for k, q in m.quantization.items()},
            }
            for m in manifest.modules
        ],
    }


def nbytes_by_layer(manifest: Manifest) -> dict[str, dict[int | None, int]]:
    """Bytes of the weight files by kind and layer; None: of no layer."""
    found: dict[str, dict[int | None, int]] = {
        kind: {} for kind in (EXPERTS, ATTENTION, REST, ENDS, PADDING)
    }

    def count(kind: str, layer: int | None, nbytes: int) -> None:
        found[kind][layer] = found[kind].get(layer, 0) + nbytes

    for module in manifest.modules:
        layer = _layer_of(module.path)
        count(EXPERTS, layer, module.n_experts * module.record_nbytes)
        count(PADDING, layer, module.n_experts * (module.stride - module.record_nbytes))
    for tensor in manifest.shared:
        layer = _layer_of(tensor.name)
        kind = REST if layer is not None else ENDS
        count(ATTENTION if re.search("attn|attention", tensor.name) else kind, layer, tensor.nbytes)
    count(PADDING, None, manifest.shared_nbytes - sum(t.nbytes for t in manifest.shared))
    return found


def _layer_of(path: str) -> int | None:
    number = re.search(r"\.(\d+)\.", path)
    return int(number[1]) if number else None


def module_bits(module: ExpertModule) -> str:
    """Bits of a module's weights: `4`, `4/8` when mixed, a dtype when not quantized."""
    bits = sorted({q.bits for q in module.quantization.values()})
    if bits:
        return "/".join(map(str, bits))
    return next(p.dtype for p in module.parts if p.name.endswith(".weight"))


def quantization_map(q: Quantization) -> dict[str, int | str]:
    """For JSON."""
    return {"bits": q.bits, "group_size": q.group_size, "mode": q.mode}
