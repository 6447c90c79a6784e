"""`moepack unpack`: the MLX checkpoint back from a pack."""

import json
from pathlib import Path

import click

from moepack.tools.options import FilePath, Name, debug_option, json_option
from moepack.tools.reporting import progress
from moepack.tools.startup import interrupts_unwind

__all__ = ["command"]


@click.command("unpack")
@click.argument("pack", type=Name())
@click.argument("folder", type=FilePath())
@json_option
@debug_option
def command(pack: str, folder: Path, as_json: bool) -> None:
    """Write the MLX checkpoint back from a pack to FOLDER.

    Shards of the source of which nothing was changed or left out come back byte for byte.
    """
    from moepack.packer.unpacking import unpack
    from moepack.tools.packs import open_pack

    interrupts_unwind()
    opened = open_pack(pack)
    manifest = opened.manifest
    nbytes = manifest.expert_nbytes + sum(t.nbytes for t in manifest.shared)
    with progress("unpack", nbytes) as advance:
        result = unpack(opened, folder, advance)
    if as_json:
        click.echo(json.dumps({"restored": result.restored, "made": result.made}))
        return
    for name in result.restored:
        click.echo(f"{folder / name}: equals the source's shard, sha256 checked")
    for name in result.made:
        click.echo(f"{folder / name}: made anew; the source's shards had other contents")
