"""A view as text: one summary line, a tree, what it would cost to read.

Names come from files: what a terminal would not print as a character (escape codes above all) is shown escaped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple

from ..core.dtypes import short_name
from ..core.index import TensorSpec
from ..core.names import natural, shortened
from ..core.units import human_bytes, human_count, plural
from ..errors import DataError, printable
from ..lazy import LazyArray
from ..namespace import Namespace

_LEVELS = 100  # of the tree, which is walked by recursion; what lies deeper is one label


@dataclass(slots=True)
class Node:
    """A level of the tree: totals count each tied tensor once. A leaf has the ``spec`` of its tensor, and the ``name``
    that this has in the view. ``tied``: the name that owns the tensor, if it is not this one; ``counted``: whether the
    tensor is in the totals under this name."""

    label: str
    name: str = ""
    spec: TensorSpec | None = None
    tied: str = ""
    counted: bool = True
    numel: int = 0
    nbytes: int = 0
    tensors: int = 0
    children: dict[str, Node] = field(default_factory=dict)


def build(view: Namespace[Any]) -> Node:
    """The names of a view as nodes, children in natural order."""
    root = Node("")

    def child(parent: Node, label: str) -> Node:
        found = parent.children.get(label)
        if found is None:
            found = parent.children[label] = Node(label)
        return found

    above, parent = "", root  # of the name before: neighbours mostly have the same
    specs, seen = view.specs, set[str]()
    for name in view:
        front, dot, label = name.rpartition(".")
        if not dot:
            above, parent = "", root
        elif front != above or parent is root:
            *parts, label = name.split(".", _LEVELS)
            parent = root
            for part in parts:
                parent = child(parent, part)
            above = front if "." not in label else ""
        leaf = child(parent, label)
        full = view.full_name(name)
        owner = full if full in specs else view.owner(name)
        leaf.name, leaf.spec = name, specs[owner]
        leaf.tied = owner if owner != full else ""
        leaf.counted = owner not in seen
        seen.add(owner)
    _finish(root, {})
    return root


def _finish(node: Node, keys: dict[str, list[tuple[int, int, str]]]) -> None:
    """Sort the children and add them up. ``keys``: what labels, which recur in all layers, are sorted by."""
    if node.spec is not None:
        node.tensors = 1
        if node.counted:
            node.numel, node.nbytes = node.spec.numel, node.spec.nbytes
    if len(node.children) > 1:
        for label in node.children:
            if label not in keys:
                keys[label] = natural(label)
        node.children = {label: node.children[label] for label in sorted(node.children, key=keys.__getitem__)}
    for child in node.children.values():
        _finish(child, keys)
        node.tensors += child.tensors
        node.numel += child.numel
        node.nbytes += child.nbytes


def summary(view: Namespace[Any]) -> str:
    """Format, mesh, size and counts on one line."""
    return " | ".join(facts(view, view.numel, view.nbytes))


def facts(view: Namespace[Any], numel: int, nbytes: int) -> list[str]:
    """What `summary` says, one thing after the other; ``numel``, ``nbytes``: the view's."""
    m = view.mesh
    degrees = " ".join(f"{k}={v}" for k, v in (("tp", m.tp), ("pp", m.pp), ("dp", m.dp), ("ep", m.ep)) if v > 1)
    files = len(view.files)
    parts = [
        view.format + (f" ({degrees})" if degrees else ""),
        f"{human_count(numel)} elements, {human_bytes(nbytes)} in {plural(len(view), 'tensor')}",
        plural(files, "file"),
    ]
    states = [printable(s) for s in view.states]
    if view.state == "stored":
        parts.append("as stored")
    elif len(states) > 1 or states != ["weights"]:
        others = [s for s in states if s != printable(view.state)]
        parts.append(f"state {printable(view.state)}" + (f" (also {', '.join(others)})" if others else ""))
    if view.problems:
        parts.append(plural(len(view.problems), "problem"))
    return parts


class Row(NamedTuple):
    """A line of the tree; ``cells`` are padded to columns by `rows`."""

    leaf: bool
    cells: tuple[str, str, str, str]  # indented name, dtype and shape, size, parameter count or the name it is tied to


def tree(view: Namespace[Any], depth: int | None = None, limit: int | None = None) -> str:
    """The tree, ``depth`` levels deep; where it has more than ``limit`` lines, as many levels as fit (at least one)."""
    return "\n".join("  ".join(row.cells).rstrip() for row in rows(view, depth, limit)) or "(no tensors)"


def rows(view: Namespace[Any], depth: int | None = None, limit: int | None = None) -> list[Row]:
    """The lines of `tree`, as columns."""
    root = build(view)
    found = list(_rows(root, depth))
    if limit is not None and depth is None and len(found) > limit:
        levels = 1
        while len(fewer := list(_rows(root, levels + 1))) <= limit:
            levels, found = levels + 1, fewer
        found = list(_rows(root, levels))
        hidden = max(0, len(found) - limit)
        if hidden:
            found = [*found[:limit], Row(False, (f"... {hidden:,} more", "", "", ""))]
    widths = [max((len(r.cells[c]) for r in found), default=0) for c in range(3)]
    return [
        Row(leaf, (f"{a:<{widths[0]}}", f"{b:<{widths[1]}}", f"{c:>{widths[2]}}", d)) for leaf, (a, b, c, d) in found
    ]


def _rows(node: Node, depth: int | None, level: int = 0) -> Iterator[Row]:
    """Everything below a node."""
    for child in node.children.values():
        labels, end = [child.label or "''"], child
        # a chain of single children is one line: it has nothing to choose from
        while end.spec is None and len(end.children) == 1:
            (end,) = end.children.values()
            labels.append(end.label)
        label = ".".join(labels)
        name = "  " * level + printable(shortened(label))
        if end.spec is not None:
            yield Row(True, (name, *_leaf(end)))
        if end.children:
            if end.spec is None:
                counts = plural(end.tensors, "tensor"), human_bytes(end.nbytes), human_count(end.numel)
                yield Row(False, (name, *counts))
            if depth is None or level + 1 < depth:
                yield from _rows(end, depth, level + 1)


def _leaf(node: Node) -> tuple[str, str, str]:
    spec = node.spec
    assert spec is not None  # asked only of leaves
    size = human_bytes(spec.nbytes) if node.counted else ""
    return kind(spec), size, f"= {printable(shortened(node.tied))}" if node.tied else human_count(spec.numel)


def kind(t: LazyArray | TensorSpec) -> str:
    """``bf16 [64, 64]``"""
    return f"{short_name(t.dtype)} [{shortened(', '.join(map(str, t.shape)))}]"


def oddities(view: Namespace[Any]) -> list[str]:
    """Its problems, and the names that cannot even be described, as lines."""
    return [*view.problems, *(f"cannot be read: {name}: {why}" for name, why in view.unreadable.items())]


def explain(view: Namespace[Any]) -> str:
    """What a view stands on and what reading it all would cost."""
    per_file: dict[str, int] = {}
    for name in {view.owner(n): n for n in view}.values():
        for fragment in view[name].fragments:
            per_file[fragment.extent.path] = per_file.get(fragment.extent.path, 0) + 1
    lines = [summary(view), f"root: {printable(view.root)}"]
    sizes = {printable(state): (plural(len(v), "tensor"), human_bytes(v.nbytes)) for state, v in view.states.items()}
    lines += [f"state {state}: {count}, {size}" for state, (count, size) in sizes.items()]
    lines += [f"problem: {printable(p)}" for p in oddities(view)]
    lines.append(f"reading this view takes {human_bytes(view.nbytes)} from {plural(len(per_file), 'file')}:")
    infos = view.files
    for path, count in sorted(per_file.items(), key=lambda item: natural(item[0]))[:50]:
        size = human_bytes(infos[path].size) if path in infos else "missing"
        lines.append(f"  {printable(path)}: {plural(count, 'fragment')}, file of {size}")
    if len(per_file) > 50:
        lines.append(f"  ... and {len(per_file) - 50:,} more files")
    return "\n".join(lines)


COLUMNS = ("name", "dtype", "shape", "numel", "nbytes", "tied")


def rows_of(view: Namespace[Any]) -> list[dict[str, object]]:
    """A view as a table for machines, a row for every name; ``name`` is the full one, ``tied``: the name that owns the
    tensor, None where that is this one."""
    table: list[dict[str, object]] = []
    for name, t in view.items():
        owner = view.owner(name)
        table.append(
            {
                "name": t.name,
                "dtype": str(t.dtype).removeprefix("torch."),
                "shape": list(t.shape),
                "numel": t.numel(),
                "nbytes": t.nbytes,
                "tied": owner if owner != t.name else None,
            }
        )
    return table


def frame_of(view: Any) -> Any:
    """`rows_of` as a data frame of pandas or polars. Raises DataError if neither is installed."""
    table = rows_of(view)
    columns = {key: [row[key] for row in table] for key in COLUMNS}
    for package in ("pandas", "polars"):
        try:
            return import_module(package).DataFrame(columns)
        except ModuleNotFoundError as e:
            if e.name != package:
                raise
    raise DataError("to_frame needs pandas or polars: pip install pandas")
