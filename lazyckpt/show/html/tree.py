"""The tree of a view as collapsible nested lists."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...core.fragments import fragments_of
from ...core.specs import TensorSpec
from ...core.units import human_bytes, human_count, plural
from ...errors import and_more
from ...lazy import LazyArray, shape_of
from ...markup import dtype_class, safe, tag
from ...namespace import Namespace
from ..layout import Holder, holders
from ..outline import Node, chain

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
_LOOKED_AT = 40_000  # maximum number of fragments that are examined for the marks of one tree


def tree_html(rows: Sequence[Row], lost: frozenset[int] = frozenset(), css: str = "tree", most: int = _OPEN) -> str:
    """Return the rows of a view as nested lists.

    The bar at the end of a row shows its size beside those of its siblings: the largest of them fills it. ``lost`` are
    the ids of nodes that cannot be read completely. At most ``most`` rows are visible at first.
    """
    if not rows:
        return tag("p", "(no tensors)", "dim")
    return tag("ul", _items(rows, _levels(rows, most), lost), css)


def _levels(rows: Sequence[Row], most: int) -> int:
    """Return the number of levels that are open at first."""
    levels, seen, level = 0, len(rows), list(rows)
    while level:
        level = [child for row in level for child in row.below]
        seen += len(level)
        if seen > most or not level:
            break
        levels += 1
    return levels


def lost_of(view: Namespace[Any], rows: Sequence[Row]) -> dict[int, tuple[Holder, ...]]:
    """Return the holders that cannot be read, by the id of the node, for rows whose tensor has such; for the first rows
    only if there are very many fragments."""
    found: dict[int, tuple[Holder, ...]] = {}
    left = _LOOKED_AT
    for row in _leaves(rows):
        spec = row.node.spec
        if spec is None or (spec.expr is None and fragments_of(spec.fragments).intact):
            continue
        held = holders(view[row.node.name])
        if any(holder.missing for holder in held):
            found[id(row.node)] = tuple(holder for holder in held if holder.missing)
        left -= len(held)
        if left < 0:
            break
    return found


def _leaves(rows: Sequence[Row]) -> Iterator[Row]:
    for row in rows:
        if row.leaf:
            yield row
        yield from _leaves(row.below)


def _items(rows: Sequence[Row], levels: int, lost: frozenset[int]) -> str:
    most = max((row.nbytes for row in rows), default=0)
    return "\n".join(_item(row, levels, lost, most) for row in rows)


def _item(row: Row, levels: int, lost: frozenset[int], most: int) -> str:
    size, count = human_bytes(row.nbytes), human_count(row.numel)
    numbers = f'<span class="size">{size}</span> <span class="count">{count}</span>'
    if row.left_out:
        text = f"{and_more(row.left_out)} ({plural(row.tensors, 'tensor')})"
        cells = f'<span class="name dim">{text}</span> {numbers} {_bar(row, most, "")}'
        return f'<li data-more="{row.left_out}"><div class="row leaf">{cells}</div></li>'
    where = f'data-range="{row.alike}"' if row.alike else f'data-name="{safe(row.label, 400)}"'
    if row.leaf:
        spec = row.node.spec
        assert spec is not None  # a leaf has one
        if not row.node.counted:
            numbers = '<span class="size"></span> <span class="count"></span>'
        css = "lost" if id(row.node) in lost else dtype_class(spec.dtype)
        cells = (
            f'{_label(row, css == "lost")} <span class="kind">{kind_html(spec)}</span> {numbers} {_bar(row, most, css)}'
        )
        return f'<li {where}><div class="row leaf">{cells}</div></li>'
    cells = f'{_label(row)} <span class="kind">{plural(row.tensors, "tensor")}</span> {numbers} {_bar(row, most, "")}'
    start = "<details open>" if levels > 0 else "<details>"
    below = f"<ul>{_items(row.below, levels - 1, lost)}</ul>"
    return f'<li {where}>{start}<summary class="row">{cells}</summary>\n{below}</details></li>'


def _bar(row: Row, most: int, css: str) -> str:
    """Return the bar of a row's size, which is full for the largest one of its siblings."""
    share = 100 * row.nbytes / most if most else 0
    inner = f'<span class="{css}" style="width:{share:.3g}%"></span>' if row.nbytes or css == "lost" else ""
    return f'<span class="strip" aria-hidden="true">{inner}</span>'


def _label(row: Row, lost: bool = False) -> str:
    name = f"<code>{safe(row.label) or '&#x27;&#x27;'}</code>"
    if row.alike:
        first, _, rest = row.alike.partition("-")
        last, _, step = rest.partition("/")
        middle = f", {int(first) + int(step)}, … " if step else " … "
        name = tag("code", f"{first}{middle}{last}")
        name += " " + tag("span", f"({row.times:,} alike; {first} is shown)", "dim")
    if row.leaf and row.node.tied:
        name += " " + tag("span", f"= {tag('code', safe(row.node.tied))}", "dim")
    if lost:
        name += tag("span", "incomplete", "mark")
    return f'<span class="name">{name}</span>'


def kind_html(t: LazyArray | TensorSpec) -> str:
    """Return the coloured dtype and the shape of a tensor."""
    dtype, sizes = (t.spec.dtype, shape_of(t)) if isinstance(t, LazyArray) else (t.dtype, t.shape)
    shape = f"[{', '.join(map(str, sizes))}]"
    return f'<b class="{dtype_class(dtype)}">{dtype.short}</b> {safe(shape)}'
