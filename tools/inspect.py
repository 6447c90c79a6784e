"""`moepack inspect`: what is inside a pack, from its manifest alone."""

import json
from typing import Any

import click

from moepack.formats.manifest import ExpertModule, Manifest, Quantization
from moepack.formats.sizes import format_size
from moepack.tools.options import Name, debug_option, json_option
from moepack.tools.startup import interrupts_unwind

__all__ = ["command", "describe"]


@click.command("inspect")
@click.argument("pack", type=Name())
@json_option
@debug_option
def command(pack: str, as_json: bool) -> None:
    """Show what is inside a pack: layers, experts, stride, bits, sizes."""
    from moepack.tools.packs import open_pack

    interrupts_unwind()
    manifest = open_pack(pack).manifest
    figures = describe(manifest)
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


def module_bits(module: ExpertModule) -> str:
    """Bits of a module's weights: `4`, `4/8` when mixed, a dtype when not quantized."""
    bits = sorted({q.bits for q in module.quantization.values()})
    if bits:
        return "/".join(map(str, bits))
    return next(p.dtype for p in module.parts if p.name.endswith(".weight"))


def quantization_map(q: Quantization) -> dict[str, int | str]:
    """For JSON."""
    return {"bits": q.bits, "group_size": q.group_size, "mode": q.mode}
