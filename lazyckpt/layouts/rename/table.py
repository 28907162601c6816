"""Tables of names: a pattern for each side, and how a tensor of the left side is split into those of the right."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...core.names import Names
from ...errors import FormatError, MissingFileError
from ..tables import read_toml

Cut = Literal["", "qkv", "halves"]
_FIELD = re.compile(r"\{([a-z]+)\}")
_KEYS = {"into", "cut", "transpose"}
_CUTS: dict[str, tuple[int, ...]] = {"": (1,), "qkv": (1, 3), "halves": (1, 2)}  # cut -> possible numbers of names


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of a table: ``left`` is split into the tensors of ``right``, or these are joined in that order."""

    left: str
    right: tuple[str, ...]
    cut: Cut = ""
    transpose: bool = False


def table(which: str | Mapping[str, Any]) -> list[Entry]:
    """Return the entries of a table, given by name or by the user. Raises FormatError if it is invalid."""
    if isinstance(which, str):
        tables = _tables()
        if which not in tables:
            near = Names(tables).near(which)
            raise FormatError(
                f"there is no table of names {which!r}; there are {', '.join(('hf', 'megatron', *tables))}"
                + (f": did you mean {near[0]!r}?" if near else "")
            )
        return table(dict(tables[which]))
    lines = dict(which)
    base = lines.pop("extends", None)
    entries = [_entry(left, value) for left, value in lines.items()]
    return entries + ([] if base is None else table(base))


def known() -> tuple[str, ...]:
    """Return the names of the built-in tables."""
    return tuple(_tables())


def _tables() -> dict[str, Any]:
    return read_toml(__package__, "tables.toml")


def _entry(left: str, value: Any) -> Entry:
    about = {"into": [value]} if isinstance(value, str) else value
    if not isinstance(about, Mapping) or "into" not in about or not set(about) <= _KEYS:
        raise FormatError(f"{left!r}: {value!r} is neither a name nor a table with `into` (and `cut`, `transpose`)")
    into, cut, transpose = about["into"], about.get("cut", ""), about.get("transpose", False)
    names = [into] if isinstance(into, str) else into
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise FormatError(f"{left!r}: `into` is {into!r}, names are wanted")
    if cut not in _CUTS or len(names) not in _CUTS[cut]:
        raise FormatError(f"{left!r}: cut = {cut!r} into {len(names)} names: it is one of {', '.join(list(_CUTS)[1:])}")
    for name in (left, *names):
        if set(_FIELD.sub("", name)) & set("{}"):
            raise FormatError(f"{name!r} has a brace outside of a field such as {{l}}")
    fields = set(_FIELD.findall(left))
    for name in names:
        if set(_FIELD.findall(name)) != fields:
            raise FormatError(f"{left!r} and {name!r} have different fields: each has to stand on both sides")
    return Entry(left, tuple(names), cut, bool(transpose))


@functools.lru_cache(maxsize=4096)
def pattern(name: str) -> re.Pattern[str]:
    """Return the regular expression of a name with fields: {p} matches one word, other fields match a number.

    >>> pattern("layers.{l}.norm.{p}").fullmatch("layers.12.norm.weight").groupdict()
    {'l': '12', 'p': 'weight'}
    """
    parts = _FIELD.split(name)
    seen: set[str] = set()
    text = ""
    for n, part in enumerate(parts):
        if n % 2 == 0:
            text += re.escape(part)
        elif part in seen:
            text += f"(?P={part})"
        else:
            seen.add(part)
            text += rf"(?P<{part}>[^.]+)" if part.startswith("p") else rf"(?P<{part}>\d+)"
    return re.compile(text)


# -- A table of names in a TOML or JSON file, for the command line: what `CheckpointView.rename` takes.

ENDINGS = (".toml", ".json")


def read_table(path: str) -> dict[str, Any]:
    """Read a table from a file. Raises MissingFileError, and FormatError if the file has no table of names."""
    import tomllib

    kind = "JSON" if path.endswith(".json") else "TOML"
    try:
        text = Path(path).read_text(encoding="utf-8")
        found = json.loads(text) if kind == "JSON" else tomllib.loads(text)
    except FileNotFoundError:
        raise MissingFileError(f"{path}: no such file (it should hold a table of names)") from None
    except (ValueError, RecursionError) as e:  # invalid syntax, or not UTF-8
        raise FormatError(f"{path} is no {kind}: {e}") from None
    if not isinstance(found, dict) or not found:
        raise FormatError(f'{path} holds no table of names: NAME = "OTHER NAME"')
    try:
        table(found)
    except FormatError as e:
        raise FormatError(f"{path}: {e}") from None
    return found
