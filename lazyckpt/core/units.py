"""Sizes and counts in human-readable form."""

from __future__ import annotations

import re
from fractions import Fraction
from unicodedata import combining, east_asian_width

from ..errors import DataError

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("KMGT", 1)
    for unit, base in (("B", 1000), ("iB", 1024))
}


def size_in_bytes(size: int | str) -> int:
    """Return a size in bytes, from a number or a text with a unit. Raises DataError for anything else.

    >>> size_in_bytes("5GB"), size_in_bytes("1.5 MiB")
    (5000000000, 1572864)
    """
    if isinstance(size, int):
        count = size
    else:
        match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([KMGT]?i?B?)\s*", str(size), re.IGNORECASE)
        unit = match[2].upper().replace("I", "i") if match else ""
        if match is None or unit not in _UNITS:
            raise DataError(
                f"the size {size!r} is not understood: pass a number of bytes, or one with a unit ('5GB', '512MiB')"
            )
        count = int(Fraction(match[1]) * _UNITS[unit])
    if count <= 0:
        raise DataError(f"a size of {size!r} holds nothing: pass a size above 0, or None for no limit")
    return count


def human_bytes(n: int) -> str:
    """Return a number of bytes with a binary unit.

    >>> human_bytes(1536)
    '1.5 KiB'
    """
    size = float(n)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return f"{int(size)} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError  # the loop returns


def human_count(n: int) -> str:
    """Return a count with a decimal unit, from 10,000 on.

    >>> human_count(405_000_000_000)
    '405.0B'
    """
    for limit, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**4, "k")):
        if n >= limit:
            return f"{n / (1000 if unit == 'k' else limit):.1f}{unit}"
    return str(n)


def plural(n: int, what: str, several: str = "") -> str:
    """Return a count with its noun, in the plural unless the count is 1. ``several`` is an irregular plural.

    >>> plural(1000, "tensor"), plural(0, "entry", "entries")
    ('1,000 tensors', '0 entries')
    """
    return f"{n:,} {what if n == 1 else several or what + 's'}"


def columns_of(text: str) -> int:
    """Return how many columns of a terminal a text takes: two for a Chinese character, none for a combining one.

    >>> columns_of("norm"), columns_of("\u65e5\u672c"), columns_of("e\u0301")
    (4, 4, 1)
    """
    if text.isascii():
        return len(text)
    return sum(2 if east_asian_width(c) in "WF" else 0 if combining(c) else 1 for c in text)


def padded(text: str, width: int, right: bool = False) -> str:
    """Return a text with spaces after it, or before it, so that it takes so many columns of a terminal.

    >>> padded("\u65e5\u672c", 6), padded("12", 4, right=True)
    ('\u65e5\u672c  ', '  12')
    """
    space = " " * (width - columns_of(text))
    return space + text if right else text + space
