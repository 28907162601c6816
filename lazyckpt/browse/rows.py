"""The rows of the tree of names: which are visible, in which order, and what each stands for. No widgets, no I/O.

Repeated layers that are equal in names, shapes and dtypes are one row. The rows of a level are computed when it is
opened, whatever the number of names below it; a flat list of all tensors computes a row when it is looked at.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, overload

import numpy as np
from numpy.typing import NDArray

from ..core.names import natural
from ..show.outline import Node, Outline, chain

Order = Literal["name", "size", "dtype", "value"]
ORDERS: tuple[Order, ...] = ("name", "size", "dtype", "value")
OPENED = 40  # levels are opened at first as long as the tree has at most this many rows


@dataclass(slots=True, eq=False)
class Row:
    """A row. Counts and sizes include everything below it, each tied tensor once."""

    label: str
    """The part of the name that this row adds to the rows above it; ``0-31`` for equal layers."""
    nodes: Sequence[Node]
    """The node of the names; several for equal layers."""
    leaf: bool
    """Whether the row is a tensor."""
    depth: int
    parent: Row | None = None
    opened: bool = False
    below: list[Row] | None = None

    @property
    def node(self) -> Node:
        return self.nodes[0]

    @property
    def folded(self) -> bool:
        """Whether the row stands for several equal layers."""
        return len(self.nodes) > 1

    @property
    def start(self) -> str:
        """The name of the tensor, or the common prefix of the names below, with the final dot. For equal layers it is
        that of the first, with the numbers of all."""
        if not self.folded:
            return self.node.name if self.leaf else self.node.start
        above = self.node.start[: len(self.node.start) - len(self.node.label) - 1]
        return f"{above}{self.label}."

    @property
    def key(self) -> tuple[str, bool]:
        return self.start, self.leaf

    @property
    def tensors(self) -> int:
        return 1 if self.leaf else sum(self._of(node)[0] for node in self.nodes)

    @property
    def numel(self) -> int:
        return sum(self._of(node)[1] for node in self.nodes)

    @property
    def nbytes(self) -> int:
        return sum(self._of(node)[2] for node in self.nodes)

    def _of(self, node: Node) -> tuple[int, int, int]:
        """Return tensors, elements and bytes of a node: of its own tensor, or of what is below it."""
        spec = node.spec
        if self.leaf:
            assert spec is not None  # leaves have one
            return 1, *((spec.numel, spec.nbytes) if node.counted else (0, 0))
        if self.folded or spec is None:
            return node.tensors, node.numel, node.nbytes
        own = (spec.numel, spec.nbytes) if node.counted else (0, 0)
        return node.tensors - 1, node.numel - own[0], node.nbytes - own[1]

    @property
    def dtype(self) -> str:
        """The dtype of a tensor; "" for several tensors of several dtypes."""
        if self.leaf:
            spec = self.node.spec
            assert spec is not None  # leaves have one
            return spec.dtype.short
        found = dtypes(self.node)
        return found[0][0] if len(found) == 1 else ""

    def names(self) -> Iterator[str]:
        """Yield the names of the tensors."""
        for node in self.nodes:
            for low, high in self.ranges(node):
                yield from node.outline.names[low:high]

    def ranges(self, node: Node) -> Iterator[tuple[int, int]]:
        """Yield the ranges of the outline's names that are those of the tensors of a node of the row."""
        if node.leaf is not None and (self.leaf or self.folded):
            yield node.leaf, node.leaf + 1
        if not self.leaf:
            yield node.low, node.high


def dtypes(node: Node) -> list[tuple[str, int, int]]:
    """Return (dtype, tensors, bytes) of what is below a node, the most bytes first; tied tensors are counted once."""
    of = node.outline
    low = node.low if node.leaf is None or not node.has_children else min(node.leaf, node.low)
    marks = of.marks[low : max(node.high, low + (node.leaf is not None))]
    found: dict[str, tuple[int, int]] = {}
    for mark, count in zip(*(x.tolist() for x in np.unique(marks[marks >= 0], return_counts=True)), strict=True):
        dtype, nbytes = of.kind(mark)
        tensors, size = found.get(dtype, (0, 0))
        found[dtype] = tensors + count, size + count * nbytes
    return sorted(((dtype, *rest) for dtype, rest in found.items()), key=lambda row: -row[2])


class Flat(Sequence[Row]):
    """All tensors as rows of one level, which are made when they are looked at."""

    def __init__(self, of: Outline, indices: NDArray[np.int64]) -> None:
        self._of, self._indices = of, indices

    def __len__(self) -> int:
        return len(self._indices)

    def find(self, name: str) -> int:
        """Return the row of a name, or of the first one below a level; 0 if there is none."""
        names = self._of.names
        at = bisect_left(names, name)
        if at == len(names) or not names[at].startswith(name):
            return 0
        return int(np.flatnonzero(self._indices == at)[0])

    @overload
    def __getitem__(self, n: int) -> Row: ...
    @overload
    def __getitem__(self, n: slice) -> list[Row]: ...
    def __getitem__(self, n: int | slice) -> Row | list[Row]:
        if isinstance(n, slice):
            return [self[k] for k in range(*n.indices(len(self)))]
        at = int(self._indices[n])
        name = self._of.names[at]
        return Row(name, (Node(self._of, name, name + ".", at, at, at),), True, 0)


@dataclass(frozen=True, slots=True)
class Look:
    """How the names are arranged."""

    fold: bool = True
    """Whether equal layers are one row."""
    flat: bool = False
    """Whether all tensors are listed, without levels."""
    order: Order = ORDERS[0]
    reverse: bool = False


class Rows:
    """The visible rows of an outline of names.

    ``value`` gives the number by which the order "value" sorts, None for a row without one; ``each`` those of all names
    of an outline, NaN for none, by which a list without levels is sorted. ``opened`` has the keys of
    the rows that are open; without any, the first levels are, as long as the tree has at most ``most`` rows. No tensor
    data is read."""

    def __init__(
        self,
        of: Outline,
        value: Callable[[Row], float | None] | None = None,
        most: int = OPENED,
        look: Look | None = None,
        opened: Collection[tuple[str, bool]] = (),
        each: Callable[[Outline], NDArray[np.float64]] | None = None,
    ) -> None:
        self.outline, self.look, self._each = of, look or Look(), each
        self._value, self._most, self._opened = value, most, opened
        self.whole = Row("", (of.root,), False, -1, opened=True)
        self.visible: Sequence[Row] = []
        if self.look.flat:
            self.visible = Flat(of, self._indices())
            return
        self.visible = rows = list(self.below(self.whole))
        if opened:
            self._reopen(opened)
        else:
            self._open_first(rows)

    @property
    def opened(self) -> Collection[tuple[str, bool]]:
        """The keys of the rows that are open; in a list without levels, of those that were open before."""
        return {row.key for row in self.visible if row.opened} if isinstance(self.visible, list) else self._opened

    def _reopen(self, kept: Collection[tuple[str, bool]]) -> None:
        n = 0
        while n < len(self.visible):
            if self.visible[n].key in kept and not self.visible[n].opened:
                self.open(n)
            n += 1

    def _open_first(self, level: list[Row]) -> None:
        """Open the first levels, as long as the tree stays short."""
        count = len(level)
        while True:
            level = [row for row in level if not row.leaf and not row.folded]
            if not level or len(level) > self._most:
                return
            more = [child for row in level for child in self.below(row)]
            count += len(more)
            if len(level) > 1 and count > self._most:  # a single row is always opened
                return
            for row in level:
                self.open(self._at(row))
            level = more

    def _at(self, row: Row) -> int:
        return next(n for n, other in enumerate(self.visible) if other is row)

    # -- levels

    def below(self, row: Row) -> list[Row]:
        """Return the rows one level below a row, in the order that is set.

        A chain of single children is one row. A tensor whose name is also a prefix is two rows: the tensor, and the
        level below it. The members of equal layers are the level below their row."""
        if row.below is None:
            made = self._members(row) if row.folded else self._children(row)
            row.below = self._sorted(made)
        return row.below

    def _members(self, row: Row) -> list[Row]:
        return [found for node in row.nodes for found in self._rows_of(node, row)]

    def _children(self, row: Row) -> list[Row]:
        found: list[Row] = []
        for alike, nodes in row.node.groups if self.look.fold else (("", [child]) for child in row.node.children):
            if alike:
                found.append(Row(alike, nodes, False, row.depth + 1, row))
            else:
                found += self._rows_of(nodes[0], row)
        return found

    def _rows_of(self, node: Node, parent: Row, above: str = "") -> Iterator[Row]:
        label, node = chain(node)
        label = f"{above}.{label}" if above else label
        if node.spec is not None:
            yield Row(label, (node,), True, parent.depth + 1, parent)
        single = node.single if node.spec is not None else None
        if single is not None:
            yield from self._rows_of(single, parent, label)
        elif node.has_children:
            yield Row(label, (node,), False, parent.depth + 1, parent)

    def _sorted(self, rows: list[Row]) -> list[Row]:
        order = self.look.order
        if order == "size":
            rows.sort(key=lambda row: -row.nbytes)
        elif order == "dtype":
            rows.sort(key=lambda row: (row.dtype == "", row.dtype))
        elif order == "value":
            rows.sort(key=lambda row: _last(self._value(row) if self._value is not None else None))
        return rows[::-1] if self.look.reverse else rows

    def _indices(self) -> NDArray[np.int64]:
        """Return the indices of all names in the order that is set."""
        of = self.outline
        count, order = len(of.names), self.look.order
        if order == "size":
            found = np.argsort(-np.diff(np.asarray(of.nbytes, np.float64)), kind="stable")
        elif order == "dtype":
            texts = [of.kind(mark)[0] if mark >= 0 else "" for mark in range(int(of.marks.max(initial=-1)) + 1)]
            ranks = {text: n for n, text in enumerate(sorted(set(texts)))}
            table = np.array([*(ranks[text] for text in texts), len(ranks)])
            found = np.argsort(table[of.marks], kind="stable")
        elif order == "value" and self._each is not None:
            numbers = self._each(of)
            found = np.argsort(np.where(np.isnan(numbers), np.inf, -numbers), kind="stable")
        else:
            found = np.arange(count)
            if count < 20_000:
                found = np.array(sorted(range(count), key=lambda n: natural(of.names[n])), np.int64)
        return found[::-1] if self.look.reverse else found

    # -- opening and closing

    def open(self, n: int) -> None:
        """Open a row: show the level below it."""
        row = self.visible[n]
        if row.leaf or row.opened or not isinstance(self.visible, list):
            return
        row.opened = True
        self.visible[n + 1 : n + 1] = self._shown(row)

    def close(self, n: int) -> None:
        row = self.visible[n]
        if not row.opened or not isinstance(self.visible, list):
            return
        row.opened = False
        end = n + 1
        while end < len(self.visible) and self.visible[end].depth > row.depth:
            end += 1
        del self.visible[n + 1 : end]

    def _shown(self, row: Row) -> list[Row]:
        found: list[Row] = []
        for child in self.below(row):
            found.append(child)
            if child.opened:
                found += self._shown(child)
        return found

    def beside(self, row: Row, by: int) -> str | None:
        """Return the name of the tensor after a row, or before it; None at the end."""
        names, node = self.outline.names, row.node
        if isinstance(self.visible, Flat):
            at = self.visible.find(row.start) + by
            return self.visible[at].start if 0 <= at < len(self.visible) else None
        at = node.leaf if row.leaf and node.leaf is not None else node.low - (by > 0)
        return names[at + by] if 0 <= at + by < len(names) else None

    def reveal(self, name: str) -> int:
        """Open the levels down to a name, and return its row, or that of the nearest level above it, or the first."""
        if not name:
            return 0
        if isinstance(self.visible, Flat):
            return self.visible.find(name)
        found, n = 0, 0
        while n < len(self.visible):
            row = self.visible[n]
            if row.start == name:
                return n
            if not row.leaf and any(name.startswith(node.start) for node in row.nodes):
                found = n
                if not row.opened:
                    self.open(n)
            n += 1
        return found


def _last(value: float | None) -> float:
    """Return a key that sorts large values first, and no value last."""
    return float("inf") if value is None or value != value else -value
