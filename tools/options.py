"""Options that several subcommands share, and the type of a size."""

import json
from collections.abc import Callable
from typing import Any, TypeVar

import click

from moepack.formats.sizes import parse_size

__all__ = [
    "DEBUG_KEY",
    "JsonObject",
    "Size",
    "debug_option",
    "expert_cache_option",
    "json_option",
    "memory_option",
]

F = TypeVar("F", bound=Callable[..., Any])
DEBUG_KEY = "moepack.debug"  # in click's context, for whoever prints errors


class Size(click.ParamType):  # type: ignore[type-arg]
    """Bytes as an int, from `8GB`, `8GiB`, `512MB` or `8` (GB); or one of some words, unchanged."""

    name = "size"

    def __init__(self, *words: str) -> None:
        self._words = words

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | str:
        """See the class. Fails as click wants it."""
        if isinstance(value, int) or value in self._words:
            return value  # type: ignore[no-any-return]
        try:
            return parse_size(value)
        except ValueError as error:
            words = f", or {' or '.join(self._words)}" if self._words else ""
            self.fail(f"{error}{words}", param, ctx)


class JsonObject(click.ParamType):  # type: ignore[type-arg]
    """A JSON object given as text."""

    name = "json"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> dict[str, Any]:
        """The object as a dict. Fails as click wants it."""
        try:
            parsed = value if isinstance(value, dict) else json.loads(value)
        except ValueError as error:
            self.fail(f"not JSON: {error}", param, ctx)
        if not isinstance(parsed, dict):
            self.fail("a JSON object was expected", param, ctx)
        return parsed


def memory_option(function: F) -> F:
    """`--memory`."""
    return click.option(
        "--memory",
        type=Size("auto"),
        default="auto",
        metavar="SIZE|auto",
        help="All the memory the process may use.  [default: auto]",
    )(function)


def expert_cache_option(function: F) -> F:
    """`--expert-cache`."""
    return click.option(
        "--expert-cache",
        type=Size("auto", "all", "floor"),
        default="auto",
        metavar="SIZE|auto|all|floor",
        help="Memory for resident experts alone; floor: top-k a layer.  [default: what --memory "
        "leaves]",
    )(function)


def json_option(function: F) -> F:
    """`--json`, as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")(
        function
    )


def debug_option(function: F) -> F:
    """`--debug`: a traceback with errors."""

    def note(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        ctx.meta[DEBUG_KEY] = value

    return click.option(
        "--debug",
        is_flag=True,
        expose_value=False,
        callback=note,
        is_eager=True,
        help="Show a traceback with an error.",
    )(function)
