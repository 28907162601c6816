"""The tree of a view as collapsible nested lists."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from ...core.specs import TensorSpec
from ...core.units import human_bytes, human_count, plural
from ...errors import and_more
from ...lazy import LazyArray, shape_of
from ...namespace import Namespace
from ..layout import Holder, holders
from ..outline import Node, chain
from .parts import Colours, dtype_class, owner, safe, tag, title

# -- The rows of the tree: in a long tree equal layers are folded into one row, and long lists of siblings are cut.

ROWS = 800  # maximum number of rows of a tree


@dataclass(slots=True)
class Row:
    """A line of the tree."""

    label: str
    """The part of the name that this row adds to the rows above it."""
    node: Node
    """The node that is shown; the first one of several equal nodes."""
    leaf: bool = False
    """Whether the row is a tensor."""
    alike: str = ""
    """Numbers of the equal siblings that the row represents: "0-125", or "1-125/2" for every second one."""
    times: int = 1
    """Number of siblings that the row represents."""
    left_out: int = 0
    """Number of siblings that are not listed; such a row has no other content."""
    tensors: int = 0
    numel: int = 0
    nbytes: int = 0
    below: list[Row] = field(default_factory=list)
    """Rows below this one; those of the first of several equal siblings."""


def plan(root: Node, most: int = ROWS) -> list[Row]:
    """Return at most about ``most`` rows of a tree.

    A longer tree is shortened in two ways: equal siblings are folded into one row, then the number of children per node
    is limited."""
    room = _Room(most)
    rows = _rows(root, False, most, room)
    if room.left >= 0:
        return rows
    for each in (most, 256, 64, 16, 4, 1):
        room = _Room(most)
        rows = _rows(root, True, each, room)
        if room.left >= 0:
            break
    return rows


@dataclass(slots=True)
class _Room:
    """The number of rows that still fit; negative once the tree does not fit."""

    left: int


def _rows(node: Node, fold: bool, most: int, room: _Room) -> list[Row]:
    """Return the rows below a node, as long as there is room. ``fold`` makes equal siblings one row; ``most`` limits
    the rows of one node."""
    rows: list[Row] = []
    if not fold and len(node.children) > room.left:
        room.left = -1
        return rows
    found = node.groups if fold else [("", [child]) for child in node.children]
    shown = found if len(found) <= most else found[: max(1, most - 1)]
    for alike, members in shown:
        room.left -= 1
        if room.left < 0:
            return rows
        end = members[0]
        label, end = (end.label, end) if alike else chain(end)  # a chain of single children is one row
        sums = _sums(members)
        if end.spec is not None:
            own = (end.spec.numel, end.spec.nbytes) if end.counted else (0, 0)
            times = len(members)
            rows.append(Row(label, end, True, alike, times, 0, times, own[0] * times, own[1] * times))
        if end.has_children:
            below = _rows(end, fold, most, room)
            rows.append(Row(label, end, False, alike, len(members), 0, *sums, below))
    if len(shown) < len(found):
        rest = [member for _, members in found[len(shown) :] for member in members]
        rows.append(Row("", node, False, "", 1, len(rest), *_sums(rest)))
    return rows


def _sums(nodes: Sequence[Node]) -> tuple[int, int, int]:
    return sum(n.tensors for n in nodes), sum(n.numel for n in nodes), sum(n.nbytes for n in nodes)


# -- The rows as collapsible nested lists.

_OPEN = 40  # maximum number of rows that are visible at first
_BOXES = 12  # maximum number of boxes of a strip
_LOOKED_AT = 40_000  # maximum number of fragments that are examined for the strips of one tree


def tree_html(view: Namespace[Any], rows: Sequence[Row]) -> str:
    """Return the rows of a view as nested lists, with the legend of the colours below."""
    if not rows:
        return tag("p", "(no tensors)", "dim")
    held = _held(view, rows)
    colours = Colours()
    listed = {holder: None for each in held.values() for holder in each}
    if len(set(map(owner, listed))) < 2 and not any(holder.missing for holder in listed):
        held = {}  # strips carry no information if there is one file and it is readable
    body = tag("ul", _items(rows, _levels(rows), held, colours), "tree")
    return body + (_legend(tuple(listed), colours) if held else "")


def _levels(rows: Sequence[Row]) -> int:
    """Return the number of levels that are open at first."""
    levels, seen, level = 0, len(rows), list(rows)
    while level:
        level = [child for row in level for child in row.below]
        seen += len(level)
        if seen > _OPEN or not level:
            break
        levels += 1
    return levels


def _held(view: Namespace[Any], rows: Sequence[Row]) -> dict[int, tuple[Holder, ...]]:
    """Return the holders of each row's tensor by the id of its node, for the first rows only if there are very many
    fragments."""
    found: dict[int, tuple[Holder, ...]] = {}
    left = _LOOKED_AT
    for row in _leaves(rows):
        found[id(row.node)] = held = holders(view[row.node.name])
        left -= len(held)
        if left < 0:
            break
    return found


def _leaves(rows: Sequence[Row]) -> Iterator[Row]:
    for row in rows:
        if row.leaf:
            yield row
        yield from _leaves(row.below)


def _items(rows: Sequence[Row], levels: int, held: dict[int, tuple[Holder, ...]], colours: Colours) -> str:
    return "\n".join(_item(row, levels, held, colours) for row in rows)


def _item(row: Row, levels: int, held: dict[int, tuple[Holder, ...]], colours: Colours) -> str:
    size, count = human_bytes(row.nbytes), human_count(row.numel)
    spacer = tag("span", "", "strip") if held else ""
    if row.left_out:
        text = f"{and_more(row.left_out)} ({plural(row.tensors, 'tensor')})"
        cells = [tag("span", text, "name dim"), tag("span", size, "size"), tag("span", count, "count"), spacer]
        return tag("li", tag("div", " ".join(cells), "row leaf"), data_more=str(row.left_out))
    label = _label(row)
    where = {"data_range": row.alike} if row.alike else {"data_name": row.label}
    if row.leaf:
        assert row.node.spec is not None  # a leaf has one
        cells = [
            label,
            tag("span", kind_html(row.node.spec), "kind"),
            tag("span", size if row.node.counted else "", "size"),
            tag("span", count if row.node.counted else "", "count"),
            _strip(held[id(row.node)], colours) if id(row.node) in held else spacer,
        ]
        return tag("li", tag("div", " ".join(cells), "row leaf"), **where)
    cells = [
        label,
        tag("span", plural(row.tensors, "tensor"), "kind"),
        tag("span", size, "size"),
        tag("span", count, "count"),
        spacer,
    ]
    below = tag("ul", _items(row.below, levels - 1, held, colours))
    start = "<details open>" if levels > 0 else "<details>"
    fold = f"{start}{tag('summary', ' '.join(cells), 'row')}\n{below}</details>"
    return tag("li", fold, **where)


def _label(row: Row) -> str:
    name = tag("code", safe(row.label) or "&#x27;&#x27;")
    if row.alike:
        first, _, rest = row.alike.partition("-")
        last, _, step = rest.partition("/")
        middle = f", {int(first) + int(step)}, … " if step else " … "
        name = tag("code", f"{first}{middle}{last}")
        name += " " + tag("span", f"({row.times:,} alike; {first} is shown)", "dim")
    if row.leaf and row.node.tied:
        name += " " + tag("span", f"= {tag('code', safe(row.node.tied))}", "dim")
    return tag("span", name, "name")


def kind_html(t: LazyArray | TensorSpec) -> str:
    """Return the coloured dtype and the shape of a tensor."""
    dtype, sizes = (t.spec.dtype, shape_of(t)) if isinstance(t, LazyArray) else (t.dtype, t.shape)
    shape = f"[{', '.join(map(str, sizes))}]"
    return f"{tag('b', dtype.short, dtype_class(dtype))} {safe(shape)}"


def _strip(held: Sequence[Holder], colours: Colours) -> str:
    """Return a strip with a box for each holder of a tensor; if there are very many, several share a box."""
    size = ceil(len(held) / _BOXES)
    groups = [held[n : n + size] for n in range(0, len(held), size)] if held else []
    return tag("span", "".join(tag("span", "", colours.of(g), title=_title(g)) for g in groups), "strip")


def _title(held: Sequence[Holder]) -> str:
    """Return a tooltip that is cut to its end, which distinguishes files: a page can have thousands."""
    text = title(held)
    return text if len(text) <= 100 else "…" + text[-99:]


def _legend(listed: Sequence[Holder], colours: Colours, most: int = 24) -> str:
    """Return the legend of the colours, with a line for each rank or, where ranks are unknown, each file."""
    owned: dict[object, list[Holder]] = {}
    for holder in listed:
        owned.setdefault(owner(holder), []).append(holder)
    lines = []
    for held in list(owned.values())[:most]:
        label = max((h.label for h in held), key=lambda label: (label != "rank 0", len(label)))
        paths = {h.path: h.missing for h in held}
        note = plural(len(paths), "file") if len(paths) > 1 else held[0].path if held[0].path != label else ""
        lost = sum(map(bool, paths.values()))
        note += " (missing)" if lost == len(paths) else f" ({lost:,} missing)" if lost else ""
        swatch = tag("span", "", f"swatch {colours.of(held)}")
        lines.append(tag("li", f"{swatch} {safe(label)} {tag('span', safe(note), 'dim')}"))
    if len(owned) > most:
        lines.append(tag("li", and_more(len(owned) - most), "dim"))
    kinds = "ranks" if listed[0].rank else "files"
    which = f"colours of {len(owned):,} {kinds}" if len(owned) > 1 else "location"
    head = tag("summary", which, "dim")
    return tag("details", head + tag("ul", "\n".join(lines)), "legend")
