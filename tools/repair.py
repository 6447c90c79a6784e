"""`moepack repair`: the bytes that a pack has lost, back from its source."""

import json
from pathlib import Path

import click

from moepack.formats.sizes import format_size
from moepack.tools.options import FilePath, Name, debug_option, json_option
from moepack.tools.reporting import progress
from moepack.tools.startup import interrupts_unwind
from moepack.tools.verify import MAX_LISTED

__all__ = ["command"]


@click.command("repair")
@click.argument("pack", type=FilePath())
@click.argument("source", type=Name())
@json_option
@debug_option
def command(pack: Path, source: str, as_json: bool) -> None:
    """Put right what is damaged in a pack.

    What verify finds, and files that are missing or cut, is derived again from SOURCE, the
    checkpoint that the pack was made from: a folder, or org/name from the Hugging Face cache or
    hub. It is written in place once all of it has the digests of the manifest; if any has not,
    nothing is written. A pack whose manifest is damaged has to be converted again.
    """
    from moepack.packer.repairing import find_damage, open_damaged, repair

    interrupts_unwind()
    opened = open_damaged(pack)
    nbytes = sum(opened.file_nbytes().values())
    with progress("digests", nbytes) as advance:
        damage = find_damage(opened, advance)
    if damage:
        with progress("repair", damage.nbytes) as advance:
            repair(opened, damage, source, advance)
    if as_json:
        repaired = [mismatch.as_map() for mismatch in damage.mismatches]
        figures = {"ok": True, "repaired": repaired, "bytes_checked": nbytes}
        click.echo(json.dumps({**figures, "bytes_derived": damage.nbytes}))
        return
    for mismatch in damage.mismatches[:MAX_LISTED]:
        click.echo(f"REPAIRED  {mismatch}")
    if len(damage.mismatches) > MAX_LISTED:
        click.echo(f"... and {len(damage.mismatches) - MAX_LISTED} more (--json lists all)")
    if damage:
        click.echo(f"{pack}: ok now, {format_size(damage.nbytes)} derived again")
    else:
        click.echo(f"{pack}: ok, nothing to repair in {format_size(nbytes)}")
