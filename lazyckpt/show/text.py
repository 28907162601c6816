"""A view as text: a summary line, a tree of names, and the cost of reading it.

Names come from untrusted files: characters that a terminal does not print, above all escape codes, are escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from itertools import islice
from math import prod
from typing import Any, NamedTuple

from ..core.dtypes import DType
from ..core.names import natural, shortened
from ..core.specs import TensorSpec
from ..core.units import columns_of, human_bytes, human_count, padded, plural
from ..errors import DataError, and_more, printable
from ..formats.catalog import recorded_step
from ..lazy import LazyArray, requests_of, shape_of
from ..namespace import Namespace, plain_meta
from .about import loss_of
from .outline import Node, Outline, chain, outline


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
    """A line of the tree."""

    leaf: bool
    cells: tuple[str, str, str, str]  # indented name, dtype and shape, size, parameter count or the name it is tied to


class Rows:
    """The lines of a tree, kept as columns of texts. The rows are made when they are iterated over, and their cells are
    then padded to the widths of the columns."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._leaves = bytearray()
        self._columns: tuple[list[str], list[str], list[str], list[str]] = [], [], [], []
        names, shapes, sizes, notes = self._columns
        for leaf, (name, shape, size, note) in rows:
            self._leaves.append(leaf)
            names.append(name)
            shapes.append(shape)
            sizes.append(size)
            notes.append(note)
        self._widths = (
            max(map(columns_of, names), default=0),
            *(max(map(columns_of, set(column)), default=0) for column in (shapes, sizes)),
        )

    def __len__(self) -> int:
        return len(self._leaves)

    def __iter__(self) -> Iterator[Row]:
        first, second, third = self._widths
        for leaf, a, b, c, d in zip(self._leaves, *self._columns, strict=True):
            yield Row(leaf == 1, (padded(a, first), f"{b:<{second}}", f"{c:>{third}}", d))


LINES = 100  # default length of a tree above which equal layers are folded into one line


def tree(view: Namespace[Any], depth: int | None = None, limit: int | None = None, fold: bool = False) -> str:
    """Return `rows` as lines of text."""
    return "\n".join("  ".join(row.cells).rstrip() for row in rows(view, depth, limit, fold)) or "(no tensors)"


def rows(view: Namespace[Any], depth: int | None = None, limit: int | None = None, fold: bool = False) -> Rows:
    """Return the names of a view as the rows of a tree.

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
        return Rows(_rows(root, depth, folded, kept=False))
    found = list(islice(_rows(root, None, folded), limit + 1))
    if len(found) > limit:
        levels = 1
        while len(fewer := list(islice(_rows(root, levels + 1, folded), limit + 1))) <= limit:
            levels, found = levels + 1, fewer
        found = list(islice(_rows(root, levels, folded), limit))
        hidden = sum(1 for _ in _rows(root, 1, folded)) - limit if levels == 1 else 0
        if hidden > 0:
            found.append(Row(False, (and_more(hidden), "", "", "")))
    return Rows(found)


def _rows(root: Node, depth: int | None, fold: bool, kept: bool = True) -> Iterator[Row]:
    """Yield the rows of everything below a node, unpadded. ``kept``: whether the nodes that are visited are cached."""
    return _below(root, depth, fold, kept, 0, _Texts(root.outline))


def _below(node: Node, depth: int | None, fold: bool, kept: bool, level: int, texts: _Texts) -> Iterator[Row]:
    indent = "  " * level
    for alike, members in node.groups if fold else (("", (child,)) for child in _children(node, kept)):
        first = members[0]
        # a chain of single children is one line, because there is nothing to choose between
        label, end = (alike, first) if alike else chain(first)
        name = printable(shortened(label))
        # outer spaces are no indentation
        name = f"{indent}{name}" if name and name == name.strip() else f"{indent}'{name}'"
        if alike:
            name += f" ({len(members):,} alike, {first.label} is shown)"
        if end.leaf is not None:
            shape, size, note = texts.of(end)
            if alike and size:
                dims, dtype = node.outline.kinds[node.outline.marks[end.leaf]]
                count = len(members) * prod(dims)
                size, note = human_bytes(count * dtype.itemsize), human_count(count)
            yield Row(True, (name, shape, size, note))
        if end.has_children:
            if end.leaf is None:
                tensors, numel, nbytes = (sum(getattr(n, what) for n in members) for what in _SUMS)
                yield Row(False, (name, plural(tensors, "tensor"), human_bytes(nbytes), human_count(numel)))
            if depth is None or level + 1 < depth:
                yield from _below(end, depth, fold, kept, level + 1, texts)


def _children(node: Node, kept: bool) -> list[Node]:
    return node.children if kept else node.listed()


_SUMS = ("tensors", "numel", "nbytes")


class _Texts:
    """Shape, size and note of the tensors of an outline. Those of equal shape and dtype are made once."""

    def __init__(self, of: Outline) -> None:
        self._outline, self._found = of, dict[int, tuple[str, str, str]]()

    def of(self, node: Node) -> tuple[str, str, str]:
        """Return the texts of a node's own tensor."""
        assert node.leaf is not None  # called for leaves only
        mark = int(self._outline.marks[node.leaf])
        found = self._found.get(mark)
        if found is None:
            found = self._made(mark, node.leaf)
        if self._outline.tied and node.tied:
            return found[0], found[1], f"= {printable(shortened(node.tied))}"
        return found

    def _made(self, mark: int, leaf: int) -> tuple[str, str, str]:
        if mark < 0:  # its size is counted under another name
            spec = self._outline.spec(leaf)
            return kind(spec), "", human_count(spec.numel)
        shape, dtype = self._outline.kinds[mark]
        numel = prod(shape)
        found = _kind(dtype, shape), human_bytes(numel * dtype.itemsize), human_count(numel)
        return self._found.setdefault(mark, found)


def kind(t: LazyArray | TensorSpec) -> str:
    """Return dtype and shape as text: ``bf16 [64, 64]``."""
    dtype, shape = (t.spec.dtype, shape_of(t)) if isinstance(t, LazyArray) else (t.dtype, t.shape)
    return _kind(dtype, shape)


def _kind(dtype: DType, shape: Sequence[int]) -> str:
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
