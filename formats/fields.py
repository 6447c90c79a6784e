"""Typed reading of untrusted msgpack maps: every access names the field it failed on."""

from collections.abc import Iterator
from typing import Any, TypeVar

import msgpack

from moepack.formats.errors import FormatError

__all__ = ["Fields", "unpack_map"]

T = TypeVar("T")


def unpack_map(data: bytes) -> dict[str, Any]:
    """The map that `data` is, whole. Duplicate keys, trailing bytes, deep nesting are refused.

    Containers and texts longer than `data` itself are refused by the unpacker before allocation.
    """
    try:
        value = msgpack.unpackb(
            data, raw=False, strict_map_key=True, object_pairs_hook=_map_without_duplicates
        )
    except FormatError:
        raise
    except (msgpack.UnpackException, ValueError, TypeError, RecursionError) as error:
        raise FormatError(
            f"manifest: not a msgpack document ({str(error) or type(error).__name__})"
        ) from error
    if not isinstance(value, dict):
        raise FormatError(f"manifest: a map was expected, found {type(value).__name__}")
    return value


def _map_without_duplicates(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if type(key) is not str:
            raise FormatError(f"manifest: key {key[:100]!r} is not a text")
        if key in result:
            raise FormatError(f"manifest: key {key[:100]!r} occurs twice")
        result[key] = value
    return result


class Fields:
    """A map being taken apart. `finish` refuses what nobody took."""

    def __init__(self, where: str, values: dict[str, Any]) -> None:
        self._where = where
        self._values = dict(values)

    def take(self, key: str, kind: type[T]) -> T:
        """The value of `key`; a bool is not an int. Raises FormatError: absent, or another type."""
        if key not in self._values:
            raise FormatError(f"{self._where}: field {key!r} is missing")
        value = self._values.pop(key)
        if type(value) is not kind:
            raise FormatError(
                f"{self._where} {key}: {kind.__name__} was expected, found {type(value).__name__}"
            )
        return value

    def take_optional(self, key: str, kind: type[T]) -> T | None:
        """As `take`, but the value may be nil."""
        if key in self._values and self._values[key] is None:
            return self._values.pop(key)  # type: ignore[no-any-return]
        return self.take(key, kind)

    def take_digest(self, key: str) -> bytes:
        """A 16-byte digest."""
        value = self.take(key, bytes)
        if len(value) != 16:
            raise FormatError(f"{self._where} {key}: {len(value)} bytes, a digest has 16")
        return value

    def take_list(self, key: str, kind: type[T]) -> list[T]:
        """A list whose items are all of one type."""
        values: list[Any] = self.take(key, list)
        for value in values:
            if type(value) is not kind:
                raise FormatError(
                    f"{self._where} {key}: items of {kind.__name__} were expected, "
                    f"found {type(value).__name__}"
                )
        return values

    def take_ints(self, key: str) -> tuple[int, ...]:
        """A short list of integers that are not negative: a shape or a version."""
        values = self.take_list(key, int)
        if len(values) > 32 or any(v < 0 for v in values):
            raise FormatError(f"{self._where} {key}: {values[:32]} is not a shape")
        return tuple(values)

    def take_map(self, key: str) -> "Fields":
        """A nested map. The caller calls `finish` on it."""
        return Fields(f"{self._where} {key}", self.take(key, dict))

    def take_maps(self, key: str, strict: bool) -> Iterator[tuple[str, "Fields"]]:
        """(name, map) for each entry of a map of maps, each finished after its turn."""
        for name, value in self.take(key, dict).items():
            yield name, (entry := self._entry(f"{key} {name}", value))
            entry.finish(strict)

    def take_map_list(self, key: str, strict: bool) -> Iterator["Fields"]:
        """Each map of a list of maps, finished after its turn."""
        for index, value in enumerate(self.take(key, list)):
            yield (entry := self._entry(f"{key} {index}", value))
            entry.finish(strict)

    def rest(self) -> Iterator[tuple[str, Any]]:
        """Every entry not taken yet."""
        values, self._values = self._values, {}
        yield from values.items()

    def finish(self, strict: bool) -> None:
        """Refuse fields that were not taken, when `strict`."""
        if strict and self._values:
            raise FormatError(f"{self._where}: unknown field {next(iter(self._values))!r}")

    def _entry(self, key: str, value: object) -> "Fields":
        if not isinstance(value, dict):
            raise FormatError(f"{self._where} {key}: map was expected")
        return Fields(f"{self._where} {key}", value)
