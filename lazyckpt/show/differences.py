"""A comparison of two checkpoints as a table: the tensors that differ, those of repeated layers in one line.

The lines are plain data. Names come from untrusted files: characters that a terminal does not print are escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..core.names import natural, shortened
from ..errors import printable
from .repeated import ALIKE, joined, place_of, template

if TYPE_CHECKING:
    from ..inspect.diff import Difference

_PREFIXES = 8  # prefixes that are tried for names that only one checkpoint has

Kind = Literal["values", "shape", "unreadable", "only in a", "only in b", "equal"]
_ORDER: tuple[Kind, ...] = ("values", "shape", "unreadable", "only in a", "only in b", "equal")


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the table: a tensor, or the tensors of repeated layers that have the same dtypes and shapes.

    ``rows`` are the tensors, in natural order. ``of`` is the number of all tensors of the line's name, also of those
    that other lines have."""

    name: str
    kind: Kind
    rows: tuple[Difference, ...]
    of: int

    @property
    def worst(self) -> Difference:
        """The tensor that differs most: by its relative norm or, where there is none, by its largest difference."""
        return max(self.rows, key=farness)

    @property
    def cosine(self) -> float | None:
        """The smallest cosine."""
        return min((row.cosine for row in self.rows if row.cosine is not None), default=None)

    @property
    def max_abs(self) -> float | None:
        """The largest absolute difference."""
        return max((row.max_abs for row in self.rows if row.max_abs is not None), default=None)


def farness(row: Difference) -> tuple[float, float]:
    """Return a key by which tensors that differ more come last."""
    if row.relative is None and row.norm_a == 0 and row.norm_b:  # the first tensor is 0
        return float("inf"), row.max_abs or 0.0
    return -1.0 if row.relative is None else row.relative, row.max_abs or 0.0


def kind_of(row: Difference) -> Kind:
    """Return the part of the table to which a row belongs."""
    return "values" if row.status == "dtype" else row.status


def lines_of(found: Iterable[Difference], every: bool = False) -> list[Line]:
    """Return the lines of the table.

    Tensors that differ come first, those that differ most on top; then those whose shapes differ or that cannot be
    read, then names that only one checkpoint has, in natural order.

    Parameters
    ----------
    found
        The comparison.
    every
        Whether each tensor has a line of its own, also the equal ones.
    """
    groups: dict[tuple[object, ...], list[Difference]] = {}
    totals: dict[tuple[object, ...], int] = {}
    for row in found:
        parts, numbers = template(row.name)
        name = (row.state, parts, len(numbers))
        totals[name] = totals.get(name, 0) + 1
        kind = kind_of(row)
        if kind == "equal" and not every:
            continue
        why = row.error.replace(repr(row.name), "") if row.error is not None and kind == "unreadable" else None
        own = row.name if every or not numbers else None
        groups.setdefault((kind, row.a, row.b, why, own, *name), []).append(row)
    lines: list[Line] = []
    for key, rows in groups.items():
        of = 1 if every else totals[key[5:]]
        rows = sorted(rows, key=lambda row: natural(row.name))
        packs = [rows] if len(rows) >= ALIKE else [[row] for row in rows]
        lines += [Line(_label(pack), kind_of(pack[0]), tuple(pack), of) for pack in packs]

    def order(line: Line) -> tuple[object, ...]:
        far, most = farness(line.worst) if line.kind == "values" else (0.0, 0.0)
        return _ORDER.index(line.kind), -far, -most, natural(line.name)

    return sorted(lines, key=order)


def _label(rows: Sequence[Difference]) -> str:
    """Return the name of a line, ``layers.{0-31}.up`` for those of repeated layers."""
    state = "" if rows[0].state is None else f"{rows[0].state}: "
    return state + joined([row.name for row in rows])


HEAD = ("relative", "cosine", "maximum", "tensor", "dtype and shape", "tensors", "most at")


def cells(line: Line) -> tuple[str, ...]:
    """Return the cells of a line, in the columns of `HEAD`, as printable text."""
    row = line.worst
    name = printable(shortened(line.name))
    name = name if name and name == name.strip() else f"'{name}'"
    kind = row.a if row.a == row.b or row.b is None else row.b if row.a is None else f"{row.a} and {row.b}"
    count = f"{len(line.rows):,}" if len(line.rows) == line.of else f"{len(line.rows):,} of {line.of:,}"
    most = printable(place_of(row.name)) if line.kind == "values" and len(line.rows) > 1 else ""
    if line.kind == "unreadable":
        most = printable(f"cannot be read: {row.error}")
    elif row.by_digest and line.kind == "values":
        most = "the digests differ"
    relative, cosine, maximum = numbers_of(line)
    return relative, cosine, maximum, name, shortened(kind or ""), count, most


def numbers_of(line: Line) -> tuple[str, str, str]:
    """Return relative norm, cosine and largest difference of a line as text; "" for those that it does not have."""
    row = line.worst
    return relative_text(row), cosine_text(line.cosine), "" if line.max_abs is None else f"{line.max_abs:.3g}"


def relative_text(row: Difference) -> str:
    """Return the relative norm of a difference as text: "from 0" if the first tensor is 0."""
    if row.relative is None:
        return "from 0" if row.norm_a == 0 and row.norm_b else ""
    return "0" if row.relative == 0 else f"{row.relative:.2e}" if row.relative < 1e-3 else f"{row.relative:.4f}"


def cosine_text(cosine: float | None) -> str:
    """Return a cosine as text; close to 1 as what it lacks.

    >>> cosine_text(0.25), cosine_text(1.0), cosine_text(1 - 2.5e-9)
    ('0.250000', '1', '1-2.5e-09')
    """
    if cosine is None:
        return ""
    if cosine == 1:
        return "1"
    return f"1-{1 - cosine:.1e}" if cosine > 1 - 1e-5 else f"{cosine:.6f}"


def degree(row: Difference) -> Literal["none", "small", "medium", "large"]:
    """Return how much a tensor differs, in steps for colours: by less than 0.1 %, 10 %, or more of its norm."""
    far, most = farness(row)
    if row.status == "equal" or (far <= 0 and not most and row.count in (0, None)):
        return "none"
    return "small" if 0 <= far < 1e-3 else "medium" if 0 <= far < 0.1 else "large"


def changed_prefix(found: Sequence[Difference]) -> tuple[str, int] | None:
    """Return the prefix that all names of one checkpoint have more than those of the other, and the number of names,
    if this explains every name that the checkpoint with fewer such names has alone."""
    sides = [{row.name: row.a or row.b for row in found if row.status == f"only in {side}"} for side in "ab"]
    for one, other in (sides, sides[::-1]):
        if not one or not other:
            continue
        first = max(one, key=len)
        longer = [name for name in other if name.endswith(f".{first}")]
        for name in longer[:_PREFIXES]:
            prefix = name[: -len(first)]
            moved = {prefix + name: kind for name, kind in one.items()}
            if all(other.get(name) == kind for name, kind in moved.items()):
                return prefix[:-1], len(one)
    return None


def counts(found: Sequence[Difference]) -> str:
    """Return how many tensors are equal, differ, and are missing on one side, as text."""
    of: dict[Kind, int] = dict.fromkeys(_ORDER, 0)
    for row in found:
        of[kind_of(row)] += 1
    rest = {
        "values": "differ", "shape": "of other shape", "unreadable": "unreadable", "only in a": "only in A",
        "only in b": "only in B",
    }  # fmt: skip
    parts = [f"{of['equal']:,} of {len(found):,} tensors are equal"]
    return ", ".join([*parts, *(f"{of[kind]:,} {text}" for kind, text in rest.items() if of[kind])])  # type: ignore[index]
