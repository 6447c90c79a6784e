"""How help looks: commands and options in groups, examples, metavars. What it says is elsewhere."""

from collections.abc import Iterable

import click

__all__ = ["COMMAND_GROUPS", "EXAMPLES", "MAX_WIDTH", "HelpfulCommand", "write_commands"]

MAX_WIDTH = 100  # columns of a help page
MAX_OPTION = 36  # columns of an option and its values, beside which its text begins

COMMAND_GROUPS = {
    "Packing": ("plan", "convert", "inspect", "unpack"),
    "Running": ("run", "serve", "demo"),
    "Checking": ("verify", "repair"),
    "Measuring": ("bench", "replay"),
    "Setting up": ("completion",),
}

PACK = "Qwen3-30B-A3B-4bit.moepack"
EXAMPLES = {
    "plan": (f"moepack plan {PACK} --memory 6GB", "moepack plan mlx-community/Qwen3-30B-A3B-4bit"),
    "convert": (
        "moepack convert ~/models/Qwen3-30B-A3B-4bit",
        "moepack convert Qwen/Qwen3-30B-A3B qwen3.moepack -q --q-bits 4",
    ),
    "inspect": (f"moepack inspect {PACK}", f"moepack inspect {PACK} --plot bytes.svg"),
    "unpack": (f"moepack unpack {PACK} Qwen3-30B-A3B-4bit",),
    "run": (
        f'moepack run {PACK} --memory 6GB -p "Why is the sky blue?"',
        f"moepack run {PACK} < question.txt",
    ),
    "serve": (f"moepack serve {PACK} --memory 6GB --context 8192",),
    "demo": ('moepack demo -p "And the king"', "moepack demo --chat"),
    "verify": (f"moepack verify {PACK}", f"moepack verify {PACK} ~/models/Qwen3-30B-A3B-4bit"),
    "repair": (f"moepack repair {PACK} ~/models/Qwen3-30B-A3B-4bit",),
    "bench": (f"moepack bench {PACK}", f"moepack bench {PACK} --rounds 3 --plot speed.svg"),
    "replay": (
        "moepack replay run.npz --plot hit-rates.svg",
        "moepack replay run.npz --heatmap experts.png",
    ),
    "completion": (
        "moepack completion bash >> ~/.bashrc",
        "moepack completion zsh >> ~/.zshrc",
        "moepack completion fish > ~/.config/fish/completions/moepack.fish",
    ),
}

# What is in none of these comes first, under Options.
OPTION_GROUPS = {
    "Sampling": (
        "--temp",
        "--top-p",
        "--top-k",
        "--min-p",
        "--repetition-penalty",
        "--seed",
    ),
    "Prompt": (
        "--system-prompt",
        "--chat-template-args",
        "--ignore-chat-template",
        "--show-thinking",
        "--prompt-cache-file",
    ),
    "Memory and reads": (
        "--memory",
        "--expert-cache",
        "--context",
        "--max-kv-size",
        "--kv-bits",
        "--prefill-step-size",
        "--warm-start",
        "--check",
        "--lossy-top-k",
        "--pin",
        "--wire",
    ),
    "Access": ("--host", "--port", "--api-key", "--insecure", "--max-queue", "--max-body"),
    "Output": ("--json", "--plot", "--heatmap", "--trace", "--debug", "--help"),
}


class HelpfulCommand(click.Command):
    """A command with its options in groups, shorter metavars, and examples at the end."""

    def __init__(self, command: click.Command) -> None:
        name = command.name or ""
        super().__init__(
            name,
            callback=command.callback,
            params=command.params,
            help=command.help,
            epilog="\b\n" + "\n".join(["Examples:", *(f"  {e}" for e in EXAMPLES[name])]),
        )
        for parameter in self.params:
            if parameter.metavar is None and isinstance(parameter.type, click.ParamType):
                parameter.metavar = _metavar(parameter.type)
            if isinstance(parameter.type, click.FloatRange | click.IntRange):
                # Errors say "is not a valid" before it, where click has "float range".
                is_whole = isinstance(parameter.type, click.IntRange)
                parameter.type.name = "whole number" if is_whole else "number"

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The groups, in the order of OPTION_GROUPS."""
        rows: dict[str, list[tuple[str, str]]] = {"Options": [], **{g: [] for g in OPTION_GROUPS}}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                rows[_group_of(parameter)].append(record)
        for heading, records in rows.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records, col_max=MAX_OPTION)


def write_commands(
    formatter: click.HelpFormatter, commands: Iterable[tuple[str, click.Command]]
) -> None:
    """The subcommands, in groups, each with one line."""
    found = dict(commands)
    width = max(map(len, found))
    for heading, names in COMMAND_GROUPS.items():
        with formatter.section(heading):
            formatter.write_dl([(f"{name:{width}}", _short(found[name])) for name in names])


def _short(command: click.Command) -> str:
    """The first sentence of a command's help, up to its colon."""
    return command.get_short_help_str(MAX_WIDTH).split(":")[0].rstrip(".")


def _group_of(option: click.Option) -> str:
    groups = (group for group, names in OPTION_GROUPS.items() if {*names} & {*option.opts})
    return next(groups, "Options")


def _metavar(kind: click.ParamType) -> str | None:  # type: ignore[type-arg]
    """`N` and `X` for whole and other numbers; None leaves it to click."""
    if isinstance(kind, type(click.INT)):
        return "N"
    if isinstance(kind, type(click.FLOAT)):
        return "X"
    return None
