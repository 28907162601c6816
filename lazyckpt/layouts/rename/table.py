"""Tables of names: a pattern for each side, and how a tensor of the left side is split into those of the right."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ...core.names import Names
from ...errors import FormatError, MissingFileError
from ..tables import read_toml

Cut = Literal["", "qkv", "qgkv", "kv", "delta", "halves", "alternating", "swapped"]
Part = Literal["", "vision"]
_NUMBER = r"\d+"
_FIELD = re.compile(r"\{([a-z]+)\}")
_KEYS = {"into", "cut", "transpose", "stack", "beside", "heads", "less_one", "outer", "given"}
# cut -> possible numbers of names
_CUTS: dict[str, tuple[int, ...]] = {
    "": (1,),
    "qkv": (1, 3),
    "qgkv": (3,),
    "kv": (2,),
    "delta": (2, 4),
    "halves": (1, 2),
    "alternating": (1,),
    "swapped": (1,),
}
_PARTS = ("", "vision")
_MOST = 1 << 16  # lines of a table


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of a table: ``left`` is split into the tensors of ``right``, or these are joined in that order.

    Attributes
    ----------
    left, right
        Names with fields in braces. No name on the right: there is nothing like it, and it keeps its name.
    cut
        How the rows of the left tensor are those of the right ones.
    transpose
        Whether the right side's matrices are [in, out].
    stack
        The field, of the left name only, whose numbers the right tensor has along its first dimension; "" for none.
    beside
        The name of a tensor that has to be there on the right side for the way back; "" for none.
    heads
        Whose heads a cut of q, k and v counts: "" for those of the language model, or "vision".
    less_one
        Whether the left tensor is the right one less 1. This holds for parameters, not for moments of an optimizer.
    outer
        How many dimensions of length 1 the left tensor has before those of the right one; less than 0: the right one.
    given
        The name of a tensor that has to be there on the left side for the way there; "" for none.
    """

    left: str
    right: tuple[str, ...]
    cut: Cut = ""
    transpose: bool = False
    stack: str = ""
    beside: str = ""
    heads: Part = ""
    less_one: bool = False
    outer: int = 0
    given: str = ""


class Builtin(NamedTuple):
    """A table of this package, chosen for a model. ``model``: its `model_type`, or the table's own name."""

    name: str
    model: str

    @property
    def less_one(self) -> bool:
        """Whether models of the right side store the weights of norms less 1."""
        return self.model in less_one_models()

    @property
    def interleaved(self) -> bool:
        """Whether rotary embeddings turn neighbouring rows in models of the right side."""
        return self.model in _document()["values"]["interleaved"]

    @property
    def needs(self) -> tuple[str, ...]:
        """Right names that every model of the table has."""
        return tuple(_document()["needs"].get(self.name, ()))


def builtin(which: str) -> Builtin | None:
    """Return the table with a name, or the one for a `model_type` of config.json; None if there is none.

    >>> builtin("qwen3_moe"), builtin("resnet")
    (Builtin(name='qwen_moe', model='qwen3_moe'), None)
    """
    name = _document()["models"].get(which, which)
    return Builtin(name, which) if name in known() else None


def table(which: str | Mapping[str, Any]) -> list[Entry]:
    """Return the entries of a table, given by name, by `model_type` or by the user.

    Raises FormatError if it is invalid, or if there is none.
    """
    return [entry for left, value in _lines(which).items() for entry in _entries(left, value)]


def _lines(which: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return the lines of a table, those of its own before those of the table that it extends."""
    if isinstance(which, str):
        found = builtin(which)
        if found is None:
            near = Names(names()).near(which)
            hint = f"did you mean {' or '.join(map(repr, near[:3]))}?" if near else "hf and megatron are usual."
            raise FormatError(
                f"there is no table of names {which!r:.60}: {hint} "
                f"`lazyckpt formats --tables` lists all {len(names()):,}; a file of your own ends in "
                f"{' or '.join(ENDINGS)}"
            )
        return _lines(_document()[found.name])
    lines = dict(which)
    base = lines.pop("extends", [])
    for one in base if isinstance(base, list) else [base]:
        inner = _extended(one)
        lines |= {name: value for name, value in inner.items() if name not in lines}
    return lines


def _extended(base: Any) -> dict[str, Any]:
    """Return the lines that ``extends`` takes from another table, under other names."""
    about = {"table": base} if isinstance(base, str) else base
    if not isinstance(about, Mapping) or "table" not in about or not set(about) <= {"table", "left", "right"}:
        raise FormatError(
            f"extends = {base!r:.80}: the name of a table is wanted, or a table with `table`, `left`, `right`"
        )
    if not isinstance(about["table"], str):
        raise FormatError(f"extends = {base!r:.80}: names are wanted")
    left, right = (_beginnings(about.get(side, ""), base) for side in ("left", "right"))
    found: dict[str, Any] = {}
    for name, value in _lines(about["table"]).items():
        values = [one for with_it in _under(value, right) for one in with_it]
        for n, other in enumerate(_names_under(name, left) if values or not value else []):
            found.setdefault(other, _lefts(values, left, n))
    if len(found) > _MOST:
        raise FormatError(f"extends = {base!r:.80}: there are more than {_MOST:,} lines")
    return found


def _lefts(values: list[Any], beginnings: Mapping[str, list[str]], n: int) -> list[Any]:
    """Return values with the n-th other beginning for the left names in them."""
    found = []
    for one in values:
        moved = _names_under(one["given"], beginnings) if isinstance(one, Mapping) and "given" in one else []
        found.append({**one, "given": moved[n]} if moved else one)
    return found


def _beginnings(given: Any, base: Any) -> dict[str, list[str]]:
    """Return the beginnings of names, each with those that take its place; a prefix takes the place of nothing."""
    about = {"": given} if isinstance(given, str | list) else given
    if isinstance(about, Mapping):
        found = {key: [one] if isinstance(one, str) else one for key, one in about.items()}
        if all(isinstance(one, list) and all(isinstance(name, str) for name in one) for one in found.values()):
            return found
    raise FormatError(f"extends = {base!r:.80}: names are wanted")


def _names_under(name: str, beginnings: Mapping[str, list[str]]) -> list[str]:
    """Return the names that a name has with other beginnings, by the longest that it has; none if it has none."""
    known = [key for key in beginnings if name.startswith(key)]
    key = max(known, key=len, default=None)
    return [] if key is None else [one + name[len(key) :] for one in beginnings[key]]


def _under(value: Any, beginnings: Mapping[str, list[str]]) -> Iterator[list[Any]]:
    """Yield what a line of a table of this package gives, under each of the other beginnings of its names."""
    if isinstance(value, list):
        naming = [list(_under(one, beginnings)) for one in value]
        for n in range(max(map(len, naming), default=0)):
            yield [one for found in naming if n < len(found) for one in found[n]]
    elif isinstance(value, str):
        yield from ([name] for name in _names_under(value, beginnings))
    else:
        into = [value["into"]] if isinstance(value["into"], str) else value["into"]
        others = [_names_under(name, beginnings) for name in into]
        beside = _names_under(value["beside"], beginnings) if "beside" in value else None
        for n in range(min(map(len, others))):
            one = {**value, "into": [names[n] for names in others]}
            yield [one if beside is None else {**one, "beside": beside[n]}]


def known() -> tuple[str, ...]:
    """Return the names of the built-in tables."""
    return tuple(name for name in _document() if name not in ("models", "without", "values", "needs"))


def names() -> tuple[str, ...]:
    """Return the names that stand for a table: "hf", "megatron", those of the tables, and each `model_type`."""
    return tuple(dict.fromkeys(("hf", "megatron", *known(), *models())))


def chosen() -> tuple[str, ...]:
    """Return the names of the built-in tables that belong to a `model_type`."""
    return tuple(dict.fromkeys(_document()["models"].values()))


def models() -> tuple[str, ...]:
    """Return each `model_type` that has a table."""
    return tuple(_document()["models"])


def why_not(model: str) -> str:
    """Return why a `model_type` has no table, if that is known."""
    return str(_document()["without"].get(model, ""))


def less_one_models() -> tuple[str, ...]:
    """Return each `model_type` whose models store the weights of norms less 1."""
    return tuple(_document()["values"]["less_one"])


def _document() -> dict[str, Any]:
    return read_toml(__package__, "tables.toml")


def _entries(left: str, value: Any) -> list[Entry]:
    if value == []:
        return [Entry(left, ())]
    return [_entry(left, one) for one in (value if isinstance(value, list) else [value])]


def _entry(left: str, value: Any) -> Entry:
    about = {"into": [value]} if isinstance(value, str) else value
    if not isinstance(about, Mapping) or "into" not in about or not set(about) <= _KEYS:
        raise FormatError(
            f"{left!r}: {value!r} is neither a name nor a table with `into` (and {', '.join(sorted(_KEYS - {'into'}))})"
        )
    into, cut, transpose = about["into"], about.get("cut", ""), about.get("transpose", False)
    stack: Any = about.get("stack", "")
    beside: Any = about.get("beside", "")
    heads, outer = about.get("heads", ""), about.get("outer", 0)
    given: Any = about.get("given", "")
    names = [into] if isinstance(into, str) else into
    if not isinstance(names, Sequence) or not all(
        isinstance(name, str) for name in (*names, cut, stack, beside, given)
    ):
        raise FormatError(f"{left!r}: `into` is {into!r}, names are wanted")
    if cut not in _CUTS or len(names) not in _CUTS[cut]:
        raise FormatError(f"{left!r}: cut = {cut!r} into {len(names)} names: it is one of {', '.join(list(_CUTS)[1:])}")
    for name in (left, *names, beside, given):
        if set(_FIELD.sub("", name)) & set("{}"):
            raise FormatError(f"{name!r} has a brace outside of a field such as {{l}}")
    fields = set(_FIELD.findall(left))
    if stack and (
        stack not in fields
        or stack == "any"
        or stack.startswith("p")
        or len(names) != 1
        or cut not in ("", "halves", "alternating")
    ):
        raise FormatError(
            f"{left!r}: stack = {stack!r} takes a number of the left name, and one name into which it goes"
        )
    for name in names:
        if set(_FIELD.findall(name)) != fields - {stack}:
            raise FormatError(f"{left!r} and {name!r} have different fields: each has to stand on both sides")
    if not set(_FIELD.findall(beside)) <= fields - {stack}:
        raise FormatError(f"{left!r}: beside = {beside!r} has a field that the names have not")
    if not set(_FIELD.findall(given)) <= fields:
        raise FormatError(f"{left!r}: given = {given!r} has a field that the name has not")
    if heads not in _PARTS:
        raise FormatError(f"{left!r}: heads = {heads!r:.80}: it is one of {', '.join(_PARTS[1:])}")
    if type(outer) is not int or abs(outer) > 8 or (outer and (cut or stack or transpose)):
        raise FormatError(f"{left!r}: outer = {outer!r:.80}: a small number is wanted, and no cut, stack or transpose")
    return Entry(
        left, tuple(names), cut, bool(transpose), stack, beside, heads, bool(about.get("less_one")), outer, given
    )


@functools.lru_cache(maxsize=4096)
def pattern(name: str) -> re.Pattern[str]:
    """Return the regular expression of a name with fields: {p} is one word, {any} all of the rest, others are numbers.

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
            text += f"(?P<{part}>{'.+' if part == 'any' else '[^.]+' if part.startswith('p') else _NUMBER})"
    return re.compile(text)


def matched(name: str, fields: str) -> re.Match[str] | None:
    """Return the match of a name with a name with fields; None if they do not match.

    >>> matched("layers.12.norm.weight", "layers.{l}.norm.{p}").groupdict()
    {'l': '12', 'p': 'weight'}
    """
    start, longest = _texts(fields)
    return pattern(fields).fullmatch(name) if name.startswith(start) and longest in name else None


@functools.lru_cache(maxsize=4096)
def _texts(fields: str) -> tuple[str, str]:
    """Return what stands before the first field, and the longest text behind it: most other names have not both."""
    start, *others = _FIELD.split(fields)[::2]
    return start, max(others, key=len, default="")


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
