"""Byte sizes as people write and read them: `8GB`, `8GiB`, `512MB`; a plain number is GB."""

import re

__all__ = ["format_size", "parse_size"]

_UNITS: dict[str, int] = {
    "": 10**9,
    "b": 1,
    **{f"{p}b": 10 ** (3 * i) for i, p in enumerate("kmgt", start=1)},
    **{p: 10 ** (3 * i) for i, p in enumerate("kmgt", start=1)},
    **{f"{p}ib": 2 ** (10 * i) for i, p in enumerate("kmgt", start=1)},
}


def parse_size(text: str | int) -> int:
    """Bytes. An int is taken as bytes, text as `8GB` (10^9), `8GiB` (2^30), `8` (GB).

    Raises ValueError, with a sentence for the user, for anything else.
    """
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,30})?)\s*([a-zA-Z]*)\s*", text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{text!r} is not a size; write it as 8GB, 8GiB, 512MB or 8 (GB)")
    return round(float(match[1]) * unit)


def format_size(nbytes: int) -> str:
    """The size in decimal units, at most three digits before the point: `1.77 MB`."""
    if nbytes < 1000:
        return f"{nbytes} B"
    value = float(nbytes)
    for unit in ("kB", "MB", "GB"):
        value /= 1000
        if value < 999.5:
            return f"{value:.3g} {unit}" if value < 100 else f"{value:.0f} {unit}"
    return f"{value / 1000:.3g} TB"
