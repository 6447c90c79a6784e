"""Options that several subcommands share, and the type of a size."""

import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from moepack.formats.errors import SourceError
from moepack.formats.pack import is_pack
from moepack.formats.sizes import parse_size

__all__ = [
    "DEBUG_KEY",
    "FilePath",
    "FiniteRange",
    "JsonObject",
    "Name",
    "Size",
    "Switch",
    "Text",
    "check_save_folder",
    "check_save_path",
    "checked_text",
    "debug_option",
    "expert_cache_option",
    "json_option",
    "memory_option",
    "warm_start_option",
    "wire_option",
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


class FiniteRange(click.FloatRange):
    """A number in a range; `nan` and `inf`, which compare with nothing, are refused."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """See the class. Fails as click wants it."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


class Switch(click.types.BoolParamType):
    """On or off."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> bool:
        """See the class. Fails as click wants it."""
        state = self.str_to_bool(value)
        if state is None:
            self.fail(f"{value!r} is neither on nor off", param, ctx)
        return state


class Text(click.ParamType):  # type: ignore[type-arg]
    """Text for a model. What a shell passes on may hold bytes that are no UTF-8: refused."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """See the class. Fails as click wants it."""
        try:
            return checked_text(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def checked_text(text: str) -> str:
    """The text, if it can be written as UTF-8. Raises ValueError saying where it cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"not valid UTF-8 at character {error.start}") from error
    return text


class Name(click.ParamType):  # type: ignore[type-arg]
    """A path or a repository, as a str; an empty one would mean this folder and is refused."""

    name = "name"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """See the class. Fails as click wants it."""
        if not value:
            self.fail("an empty name", param, ctx)
        return str(value)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Files and folders, as the shell has them."""
        return [CompletionItem(incomplete, type="file")]


class FilePath(click.Path):
    """A path, as a Path; an empty one is refused as by `Name`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(path_type=Path, **options)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See the class. Fails as click wants it."""
        return super().convert(Name().convert(value, param, ctx), param, ctx)


class JsonObject(click.ParamType):  # type: ignore[type-arg]
    """A JSON object given as text."""

    name = "json"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> dict[str, Any]:
        """The object as a dict. Fails as click wants it."""
        try:
            parsed = value if isinstance(value, dict) else json.loads(value)
        except (ValueError, RecursionError) as error:
            self.fail(f"not JSON: {error}", param, ctx)
        if not isinstance(parsed, dict):
            self.fail("a JSON object was expected", param, ctx)
        return parsed


def check_save_path(path: Path) -> None:
    """Refuse, before a model is loaded, a file that could not be written. Raises SourceError.

    One that is there may be read instead.
    """
    try:
        is_there = path.exists()
    except (OSError, ValueError) as error:  # a name that no file can have
        raise SourceError(f"{path}: {_reason(error)}") from error
    if not is_there:
        check_save_folder(path)


def check_save_folder(path: Path) -> None:
    """Refuse a file in whose folder none can be made, or none belongs. Raises SourceError."""
    try:
        folder = path.parent.resolve()
        if not folder.is_dir():
            raise SourceError(f"{path.parent}: no such folder to save {path.name} in")
        for above in (folder, *folder.parents):
            if is_pack(above):
                raise SourceError(f"{path}: would be inside the pack {above}")
        with tempfile.TemporaryFile(dir=folder):
            pass
    except SourceError:
        raise
    except (OSError, ValueError) as error:
        raise SourceError(f"{path}: cannot be saved there ({_reason(error)})") from error


def _reason(error: OSError | ValueError) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


def memory_option(function: F) -> F:
    """`--memory`."""
    return click.option(
        "--memory",
        type=Size("auto"),
        default="auto",
        metavar="SIZE|auto",
        help="All memory it may use.  [default: auto]",
    )(function)


def expert_cache_option(function: F) -> F:
    """`--expert-cache`."""
    return click.option(
        "--expert-cache",
        type=Size("auto", "all", "floor"),
        default="auto",
        metavar="SIZE|auto|all|floor",
        help="For experts alone; floor: top-k a layer.  [default: what --memory leaves]",
    )(function)


def warm_start_option(function: F) -> F:
    """`--warm-start`, `--no-warm-start`."""
    return click.option(
        "--warm-start/--no-warm-start",
        default=True,
        show_default=True,
        help="Begin with the experts that the last run used most.",
    )(function)


def wire_option(function: F) -> F:
    """`--wire`."""
    return click.option("--wire", is_flag=True, help="On a Mac: hold weights in RAM when idle.")(
        function
    )


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
