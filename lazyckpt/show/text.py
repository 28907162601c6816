"""A view as text: a summary line, a tree of names, and the cost of reading it.

Names come from untrusted files: characters that a terminal does not print, above all escape codes, are escaped.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from itertools import islice
from typing import Any, NamedTuple

from ..core.names import natural, shortened
from ..core.specs import TensorSpec
from ..core.units import columns_of, human_bytes, human_count, padded, plural
from ..errors import DataError, and_more, printable
from ..formats.catalog import recorded_step
from ..lazy import LazyArray, requests_of, shape_of
from ..namespace import Namespace, plain_meta
from .about import loss_of
from .outline import Node, chain, outline


def summary(view: Namespace[Any]) -> str:
    """Return format, mesh, size and counts on one line."""
    return " | ".join(facts(view))


def facts(view: Namespace[Any]) -> list[str]:
    """Return the items of `summary`."""
    root = outline(view).root
    m = view.mesh
    degrees = " ".join(f"{k}={v}" for k, v in (("tp", m.tp), ("pp", m.pp), ("dp", m.dp), ("ep", m.ep)) if v > 1)
    files = len(view.files)
    parts = [
        view.format + (f" ({degrees})" if degrees else ""),
        f"{human_count(root.numel)} elements, {human_bytes(root.nbytes)} in {plural(len(view), 'tensor')}",
        plural(files, "file"),
    ]
    parts += _training(view)
    states = [printable(s) for s in view.states]
    if view.state == "stored":
        parts.append("as stored")
    elif len(states) > 1 or states != ["weights"]:
        others = [s for s in states if s != printable(view.state)]
        parts.append(f"state {printable(view.state)}" + (f" (also {', '.join(others)})" if others else ""))
    if view.problems:
        parts.append(plural(len(view.problems), "problem"))
    return parts


def _training(view: Namespace[Any]) -> list[str]:
    """Return the dtypes, if there are several, and the step and the loss of the metadata."""
    dtypes = [dtype.short for dtype, _ in outline(view).dtypes()]
    meta = plain_meta(view)
    step, loss = recorded_step(meta), loss_of(meta)
    parts = [", ".join(dtypes)] if len(dtypes) > 1 else []
    parts += [f"step {step:,}"] if step is not None else []
    parts += [f"loss {loss[1]:.4g}"] if loss is not None else []
    return parts


class Row(NamedTuple):
    """A line of the tree; ``cells`` are padded to columns by `rows`."""

    leaf: bool
    cells: tuple[str, str, str, str]  # indented name, dtype and shape, size, parameter count or the name it is tied to


LINES = 100  # default length of a tree above which equal layers are folded into one line


def tree(view: Namespace[Any], depth: int | None = None, limit: int | None = None, fold: bool = False) -> str:
    """Return `rows` as lines of text."""
    return "\n".join("  ".join(row.cells).rstrip() for row in rows(view, depth, limit, fold)) or "(no tensors)"


def rows(view: Namespace[Any], depth: int | None = None, limit: int | None = None, fold: bool = False) -> list[Row]:
    """Return the names of a view as the rows of a tree, padded to columns.

    Parameters
    ----------
    view
        The view.
    depth
        Number of levels to show; None shows all.
    limit
        Maximum number of lines: a longer tree is cut to the levels that fit, at least one. None sets no limit.
    fold
        Whether equal layers are folded into one line if the tree has more than ``limit`` (or `LINES`) lines.
    """
    root, most = outline(view).root, LINES if limit is None else limit
    folded = fold and sum(1 for _ in islice(_rows(root, depth, False), most + 1)) > most
    if limit is None or depth is not None:
        found = list(_rows(root, depth, folded))
    else:
        found = list(islice(_rows(root, None, folded), limit + 1))
        if len(found) > limit:
            levels = 1
            while len(fewer := list(islice(_rows(root, levels + 1, folded), limit + 1))) <= limit:
                levels, found = levels + 1, fewer
            found = list(islice(_rows(root, levels, folded), limit))
            hidden = sum(1 for _ in _rows(root, 1, folded)) - limit if levels == 1 else 0
            if hidden > 0:
                found.append(Row(False, (and_more(hidden), "", "", "")))
    widths = [max((columns_of(r.cells[c]) for r in found), default=0) for c in range(3)]
    return [
        Row(leaf, (padded(a, widths[0]), f"{b:<{widths[1]}}", f"{c:>{widths[2]}}", d)) for leaf, (a, b, c, d) in found
    ]


def _rows(node: Node, depth: int | None, fold: bool, level: int = 0) -> Iterator[Row]:
    """Yield the rows of everything below a node, unpadded."""
    for alike, members in node.groups if fold else (("", [child]) for child in node.children):
        first = members[0]
        # a chain of single children is one line, because there is nothing to choose between
        label, end = (alike, first) if alike else chain(first)
        name = printable(shortened(label))
        name = "  " * level + (
            name if name and name == name.strip() else f"'{name}'"
        )  # outer spaces are no indentation
        if alike:
            name += f" ({len(members):,} alike, {first.label} is shown)"
        if end.spec is not None:
            shape, size, note = _leaf(end)
            if alike and end.counted:
                size, note = human_bytes(end.spec.nbytes * len(members)), human_count(end.spec.numel * len(members))
            yield Row(True, (name, shape, size, note))
        if end.has_children:
            if end.spec is None:
                tensors, numel, nbytes = (sum(getattr(n, what) for n in members) for what in _SUMS)
                yield Row(False, (name, plural(tensors, "tensor"), human_bytes(nbytes), human_count(numel)))
            if depth is None or level + 1 < depth:
                yield from _rows(end, depth, fold, level + 1)


_SUMS = ("tensors", "numel", "nbytes")


def _leaf(node: Node) -> tuple[str, str, str]:
    spec = node.spec
    assert spec is not None  # called for leaves only
    size = human_bytes(spec.nbytes) if node.counted else ""
    return kind(spec), size, f"= {printable(shortened(node.tied))}" if node.tied else human_count(spec.numel)


def kind(t: LazyArray | TensorSpec) -> str:
    """Return dtype and shape as text: ``bf16 [64, 64]``."""
    dtype, shape = (t.spec.dtype, shape_of(t)) if isinstance(t, LazyArray) else (t.dtype, t.shape)
    return f"{dtype.short} [{shortened(', '.join(map(str, shape)))}]"


def oddities(view: Namespace[Any]) -> list[str]:
    """Return the problems of a view and its unreadable names, as lines; names with the same reason have one line."""
    groups: dict[str, list[str]] = {}
    for name, why in view.unreadable.items():
        groups.setdefault(why.replace(repr(name), "each"), []).append(name)
    lines = [str(problem) for problem in view.problems]
    for why, names in groups.items():
        if len(names) == 1:
            lines.append(f"cannot be read: {names[0]}: {view.unreadable[names[0]]}")
        else:
            more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
            lines.append(f"cannot be read: {', '.join(names[:_NAMED])}{more}: {why}")
    return lines


_NAMED = 3  # unreadable names that are written out
_COUNTED = 100_000  # fragments that `explain` looks at: a small document can describe millions of chunks


def explain(view: Namespace[Any]) -> str:
    """Describe the states, problems and files of a view, and the number of bytes that reading all of it takes."""
    per_file: dict[str, int] = {}
    left, uncounted = _COUNTED, 0
    counted: list[LazyArray] = []
    for name in {view.owner(n): n for n in view}.values():
        fragments = view[name].fragments
        if len(fragments) > left:
            uncounted += len(fragments)
            continue
        left -= len(fragments)
        counted.append(view[name])
        for fragment in fragments:
            per_file[fragment.extent.path] = per_file.get(fragment.extent.path, 0) + 1
    lines = [summary(view), f"root: {printable(view.root)}"]
    sizes = {printable(state): (plural(len(v), "tensor"), human_bytes(v.nbytes)) for state, v in view.states.items()}
    lines += [f"state {state}: {count}, {size}" for state, (count, size) in sizes.items()]
    lines += [f"problem: {printable(p)}" for p in oddities(view)]
    cost = requests_of(counted)
    asked = "" if cost is None else f" ({cost.nbytes:,} bytes read in {plural(cost.requests, 'request')})"
    lines.append(f"reading this view takes {human_bytes(view.nbytes)} from {plural(len(per_file), 'file')}{asked}:")
    infos = view.files
    for path, count in sorted(per_file.items(), key=lambda item: natural(item[0]))[:50]:
        size = human_bytes(infos[path].size) if path in infos else "missing"
        lines.append(f"  {printable(path)}: {plural(count, 'fragment')}, file of {size}")
    if len(per_file) > 50:
        lines.append(f"  {and_more(len(per_file) - 50, 'files')}")
    if uncounted:
        requests = "" if cost is None else ", nor are the requests for them"
        lines.append(f"  {uncounted:,} fragments of arrays with many chunks are not counted{requests}")
    return "\n".join(lines)


COLUMNS = ("name", "dtype", "shape", "numel", "nbytes", "tied")


def each_row(view: Namespace[Any]) -> Iterator[dict[str, object]]:
    """Yield a row for every name of a view.

    ``name`` is the full name; ``tied`` is the full name of the tensor's owner, or None if this name owns it."""
    for name, t in view.items():
        owner = view.owner(name)
        yield {
            "name": t.name,
            "dtype": t.spec.dtype.name,
            "shape": list(t.spec.shape),
            "numel": t.spec.numel,
            "nbytes": t.spec.nbytes,
            "tied": owner if owner != t.name else None,
        }


def rows_of(view: Namespace[Any]) -> list[dict[str, object]]:
    """Return a view as a table: the rows of `each_row`."""
    return list(each_row(view))


def frame_of(view: Any) -> Any:
    """Return `rows_of` as a data frame of pandas or polars, or raise DataError if neither is installed."""
    table = rows_of(view)
    columns = {key: [row[key] for row in table] for key in COLUMNS}
    for package in ("pandas", "polars"):
        try:
            return import_module(package).DataFrame(columns)
        except ModuleNotFoundError as e:
            if e.name != package:
                raise
    raise DataError("to_frame needs pandas or polars: pip install pandas")
