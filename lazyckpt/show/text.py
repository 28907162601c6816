"""A view as text: one summary line, a tree, what it would cost to read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..core.dtypes import short_name
from ..core.names import natural
from ..tensor import LazyTensor

if TYPE_CHECKING:
    from ..view import CheckpointView


def human_bytes(n: int) -> str:
    """
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
    """
    >>> human_count(405_000_000_000)
    '405.0B'
    """
    for limit, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**4, "k")):
        if n >= limit:
            return f"{n / (1000 if unit == 'k' else limit):.1f}{unit}"
    return str(n)


@dataclass(slots=True)
class Node:
    """A level of the tree: totals count each tied tensor once."""

    label: str
    tensor: LazyTensor | None = None
    tied: str = ""
    numel: int = 0
    nbytes: int = 0
    tensors: int = 0
    children: dict[str, Node] = field(default_factory=dict)


def build(view: CheckpointView) -> Node:
    """The names of a view as nodes, children in natural order."""
    root = Node("")
    seen: set[str] = set()
    for name in view:
        owner = view.owner(name)
        tensor = view[name]
        first = owner not in seen
        seen.add(owner)
        path = [root]
        for part in name.split("."):
            path.append(path[-1].children.setdefault(part, Node(part)))
        path[-1].tensor = tensor
        path[-1].tied = "" if first else owner
        for node in path:
            node.tensors += 1
            if first:
                node.numel += tensor.spec.numel
                node.nbytes += tensor.spec.nbytes
    _sort(root)
    return root


def _sort(node: Node) -> None:
    node.children = dict(sorted(node.children.items(), key=lambda item: natural(item[0])))
    for child in node.children.values():
        _sort(child)


def summary(view: CheckpointView) -> str:
    """Format, mesh, size and counts on one line."""
    m = view.mesh
    degrees = " ".join(f"{k}={v}" for k, v in (("tp", m.tp), ("pp", m.pp), ("dp", m.dp), ("ep", m.ep)) if v > 1)
    files = len(view.files)
    parts = [
        view.format + (f" ({degrees})" if degrees else ""),
        f"{human_count(view.numel)} elements, {human_bytes(view.nbytes)} in {len(view):,} tensors",
        f"{files:,} file{'s' * (files != 1)}",
    ]
    states = list(view.states)
    if view.state == "stored":
        parts.append("as stored")
    elif len(states) > 1 or states != ["weights"]:
        others = [s for s in states if s != view.state]
        parts.append(f"state {view.state}" + (f" (also {', '.join(others)})" if others else ""))
    if view.problems:
        parts.append(f"{len(view.problems)} problem{'s' * (len(view.problems) != 1)}")
    return " | ".join(parts)


def tree(view: CheckpointView, depth: int | None = None, limit: int | None = None) -> str:
    """The tree, ``depth`` levels deep; where it has more than ``limit`` lines, as many levels as fit (at least one)."""
    root = build(view)
    rows = list(_rows(root, depth))
    if limit is not None and depth is None and len(rows) > limit:
        levels = 1
        while len(fewer := list(_rows(root, levels + 1))) <= limit:
            levels, rows = levels + 1, fewer
        rows = list(_rows(root, levels))
        hidden = max(0, len(rows) - limit)
        if hidden:
            rows = [*rows[:limit], (f"... {hidden:,} more", "", "", "")]
    if not rows:
        return "(no tensors)"
    widths = [max(len(r[c]) for r in rows) for c in range(3)]
    lines = (f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}  {d}".rstrip() for a, b, c, d in rows)
    return "\n".join(lines)


def _rows(node: Node, depth: int | None, level: int = 0) -> Iterator[tuple[str, str, str, str]]:
    """(indented name, shape and dtype, size, note) of everything below a node."""
    for child in node.children.values():
        label, end = child.label or "''", child
        # a chain of single children is one line: it has nothing to choose from
        while end.tensor is None and len(end.children) == 1:
            (end,) = end.children.values()
            label += "." + end.label
        indent = "  " * level
        if end.tensor is not None:
            yield (indent + label, *_leaf(end))
        if end.children:
            if end.tensor is None:
                yield indent + label, f"{end.tensors:,} tensors", human_bytes(end.nbytes), human_count(end.numel)
            if depth is None or level + 1 < depth:
                yield from _rows(end, depth, level + 1)


def _leaf(node: Node) -> tuple[str, str, str]:
    t = node.tensor
    assert t is not None  # asked only of leaves
    shape = f"{short_name(t.dtype)} [{', '.join(map(str, t.shape))}]"
    return shape, "" if node.tied else human_bytes(t.nbytes), f"= {node.tied}" if node.tied else human_count(t.numel())


def explain(view: CheckpointView) -> str:
    """What a view stands on and what reading it all would cost."""
    per_file: dict[str, int] = {}
    for name in {view.owner(n): n for n in view}.values():
        for fragment in view[name].fragments:
            per_file[fragment.extent.path] = per_file.get(fragment.extent.path, 0) + 1
    lines = [summary(view), f"root: {view.root}"]
    lines += [f"state {state}: {len(v):,} tensors, {human_bytes(v.nbytes)}" for state, v in view.states.items()]
    lines += [f"problem: {p}" for p in view.problems]
    lines.append(f"reading this view takes {human_bytes(view.nbytes)} from {len(per_file):,} files:")
    infos = view.files
    for path, count in sorted(per_file.items(), key=lambda item: natural(item[0]))[:50]:
        size = human_bytes(infos[path].size) if path in infos else "missing"
        lines.append(f"  {path}: {count:,} fragments, file of {size}")
    if len(per_file) > 50:
        lines.append(f"  ... and {len(per_file) - 50:,} more files")
    return "\n".join(lines)


def rows_of(view: Mapping[str, LazyTensor]) -> list[dict[str, object]]:
    """A view as a table for machines: name, dtype, shape, numel, nbytes."""
    return [
        {
            "name": name,
            "dtype": str(t.dtype).removeprefix("torch."),
            "shape": list(t.shape),
            "numel": t.numel(),
            "nbytes": t.nbytes,
        }
        for name, t in view.items()
    ]
