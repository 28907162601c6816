"""The names of a view as a lazily built tree, and the detection of equal layers.

Building an outline visits every name once. After that, the cost of drawing the first levels depends on the number of
nodes drawn, not on the number of names below them. A view caches its outline.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.box import Shape
from ..core.dtypes import DType
from ..core.names import Same, natural
from ..core.specs import TensorSpec, kind_of, marks_of
from ..namespace import Namespace

LEVELS = 100  # maximum depth, because the tree is walked by recursion; deeper levels share one label
_SHORT, _ORDERS = 64, 10_000  # characters of a label whose sort key is cached, and number of these
_ALIKE = 4  # minimum number of equal siblings that are folded into one row


class Outline:
    """The names of a view in plain sorted order, with prefix sums of their sizes.

    Attributes
    ----------
    names
        The sorted names.
    tied
        For each name that does not own its tensor, the full name of the owner.
    twice
        Names whose tensor is counted in the totals under another name.
    marks
        A number for the shape and dtype of each tensor; -1 for tensors that are not counted in the totals.
    kinds
        The shape and dtype that each number of ``marks`` stands for.
    whole, places
        For the outline of some names, the whole one and their indices in it; else None.
    numels, nbytes
        Prefix sums of elements and of bytes; the last one is the total.
    """

    def __init__(self, view: Namespace[Any]) -> None:
        self.names: Sequence[str] = view.names.sorted
        self.tied: dict[str, str] = {}
        self._drawn: dict[int, TensorSpec] = {}
        self._orders: dict[str, list[tuple[int, int, str]]] = {}
        self._specs, self._full_names = specs, full_names = view.specs, view.full_names
        twice: set[str] = set()  # a tied tensor is counted under the name that comes first in the view's order
        kinds: dict[tuple[Shape, DType], int] = {}
        if isinstance(full_names, Same):
            self.marks = marks_of(specs, kinds)[view.names.ranking]
        else:
            seen: set[str] = set()
            for name, full in full_names.items():
                owner = full if full in specs else view.owner(name)
                if owner != full:
                    self.tied[name] = owner
                if owner in seen:
                    twice.add(name)
                seen.add(owner)
            owners = [self._owner(name) for name in self.names]
            if len(owners) > len(specs) // 4:
                of = dict(zip(specs, marks_of(specs, kinds).tolist(), strict=True))
                marks = [of[owner] for owner in owners]
            else:
                marks = [kinds.setdefault(kind_of(specs, owner), len(kinds)) for owner in owners]
            self.marks = np.array(marks, np.int64)
        if twice:
            self.marks[[name in twice for name in self.names]] = -1
        numels = [prod(shape) for shape, _ in kinds]
        sizes = [numel * dtype.itemsize for numel, (_, dtype) in zip(numels, kinds, strict=True)]
        self.twice = twice
        self.kinds = list(kinds)
        self.whole: Outline | None = None
        self.places: NDArray[np.int64] | None = None
        self._of_kinds = numels, sizes
        self.numels, self.nbytes = (_sums(of, self.marks) for of in self._of_kinds)

    def part(self, indices: NDArray[np.int64]) -> Outline:
        """Return the outline of some of the names. ``indices`` increase. A tied tensor is counted under the first of
        them."""
        if len(indices) == len(self.names):
            return self
        found = copy(self)
        found.__dict__.pop("root", None)
        names = self.names
        found.whole = self.whole or self
        found.places = indices if self.places is None else self.places[indices]
        found.names, found._drawn, found.marks = [names[n] for n in indices.tolist()], {}, self.marks[indices]
        if self.twice:
            shared, seen = {self._owner(name) for name in self.twice}, set()
            numbers = {kind: n for n, kind in enumerate(self.kinds)}
            found.twice = set()
            for n, name in enumerate(found.names):
                owner = self._owner(name)
                if owner in seen:
                    found.twice.add(name)
                    found.marks[n] = -1
                elif owner in shared:
                    seen.add(owner)
                    found.marks[n] = numbers[kind_of(self._specs, owner)]
        found.numels, found.nbytes = (_sums(of, found.marks) for of in self._of_kinds)
        return found

    def _owner(self, name: str) -> str:
        return self.tied.get(name) or self._full_names[name]

    def spec(self, n: int) -> TensorSpec:
        """Return the spec of a name by its index."""
        found = self._drawn.get(n)
        if found is None:
            name = self.names[n]
            found = self._drawn[n] = self._specs[self._owner(name)]
        return found

    def kind(self, mark: int) -> tuple[str, int]:
        """Return the dtype, by its short name, and the bytes of the tensors of a mark."""
        shape, dtype = self.kinds[mark]
        return dtype.short, prod(shape) * dtype.itemsize

    def order_of(self, label: str) -> list[tuple[int, int, str]]:
        """Return the sort key `natural` of a label. Most labels occur many times: short ones are cached."""
        found = self._orders.get(label)
        if found is None:
            found = natural(label)
            if len(label) <= _SHORT and len(self._orders) < _ORDERS:
                self._orders[label] = found
        return found

    def dtypes(self) -> list[tuple[Any, int]]:
        """Return (dtype, bytes) pairs, the largest first; tied tensors are counted once."""
        found: dict[Any, int] = {}
        counts = np.bincount(self.marks[self.marks >= 0], minlength=len(self.kinds)).tolist()
        for (shape, dtype), count in zip(self.kinds, counts, strict=True):
            if count:
                found[dtype] = found.get(dtype, 0) + count * prod(shape) * dtype.itemsize
        return sorted(found.items(), key=lambda item: -item[1])

    @cached_property
    def root(self) -> Node:
        """The root of the tree."""
        return Node(self, "", "", None, 0, len(self.names))


def _sums(values: Sequence[int], marks: NDArray[np.int64]) -> Sequence[int]:
    """Return the prefix sums of the values of some marks; -1 has the value 0."""
    if max(values, default=0) * len(marks) >= 1 << 63:
        return list(accumulate((values[n] if n >= 0 else 0 for n in marks.tolist()), initial=0))
    sums: Sequence[int] = np.append(0, np.array([*values, 0], np.int64)[marks].cumsum())  # type: ignore[assignment]
    return sums


@dataclass(slots=True)
class Node:
    """A node of the tree; it can have children and a tensor of its own at the same time."""

    outline: Outline
    label: str
    """The part of the name that this node adds to its parent's."""
    start: str
    """Common prefix of the names below the node, with the final dot; "" for the root."""
    leaf: int | None
    """Index of the node's own tensor in the sorted names; None if it has none."""
    low: int
    """Index of the first name below the node."""
    high: int
    """Index after the last name below the node."""
    level: int = 0
    _children: list[Node] | None = None
    _groups: list[tuple[str, Sequence[Node]]] | None = None

    @property
    def name(self) -> str:
        """Name of the node's own tensor in the view; "" if it has none."""
        return "" if self.leaf is None else self.outline.names[self.leaf]

    @property
    def spec(self) -> TensorSpec | None:
        """Spec of the node's own tensor; None if it has none."""
        return None if self.leaf is None else self.outline.spec(self.leaf)

    @property
    def tied(self) -> str:
        """Full name of the owner of the node's tensor; "" if this name owns it."""
        return self.outline.tied.get(self.name, "")

    @property
    def counted(self) -> bool:
        """Whether the node's own tensor is counted in the totals under this name."""
        return self.name not in self.outline.twice

    @property
    def tensors(self) -> int:
        """Number of names at and below the node."""
        return self.high - self.low + (self.leaf is not None)

    @property
    def numel(self) -> int:
        """Number of elements at and below the node; tied tensors are counted once."""
        return self._sum(self.outline.numels)

    @property
    def nbytes(self) -> int:
        """Number of bytes at and below the node; tied tensors are counted once."""
        return self._sum(self.outline.nbytes)

    def _sum(self, sums: Sequence[int]) -> int:
        own = 0 if self.leaf is None else sums[self.leaf + 1] - sums[self.leaf]
        return int(own + sums[self.high] - sums[self.low])

    @property
    def children(self) -> list[Node]:
        """The child nodes in natural order."""
        if self._children is None:
            self._children = self.listed()
        return self._children

    def listed(self) -> list[Node]:
        """Return the child nodes in natural order. They are not cached: a walk over a whole tree keeps no nodes."""
        if self._children is not None:
            return self._children
        found = {node.label: node for node in self._found()}
        order = self.outline.order_of
        return sorted(found.values(), key=lambda node: order(node.label))

    @property
    def has_children(self) -> bool:
        """Whether there are names below the node."""
        return self.low < self.high

    @property
    def groups(self) -> list[tuple[str, Sequence[Node]]]:
        """The child nodes, with equal siblings in groups: see `groups`."""
        if self._groups is None:
            self._groups = groups(self.children)
        return self._groups

    @property
    def single(self) -> Node | None:
        """The child node if there is exactly one. The other names below the node are not visited."""
        if self._children is not None or self.level >= LEVELS or self.low == self.high:
            return self.children[0] if len(self.children) == 1 else None
        names, length, low = self.outline.names, len(self.start), self.low
        first, last = names[low], names[self.high - 1]
        dot = first.find(".", length)
        if dot >= 0 and last.startswith(first[: dot + 1]):
            self._children = [
                Node(self.outline, first[length:dot], first[: dot + 1], None, low, self.high, self.level + 1)
            ]
        elif dot < 0 and (
            self.high - low == 1 or (names[low + 1].startswith(first + ".") and last.startswith(first + "."))
        ):
            below = low + 1 if self.high - low > 1 else low
            high = self.high if self.high - low > 1 else low
            self._children = [Node(self.outline, first[length:], first + ".", low, below, high, self.level + 1)]
        return self._children[0] if self._children else None

    def _found(self) -> Iterator[Node]:
        """Yield the children in the order of the sorted names. A child that has both a tensor and children comes twice:
        first with its tensor only, then complete."""
        outline, names, length, high, level = self.outline, self.outline.names, len(self.start), self.high, self.level
        leaves: dict[str, int] = {}
        at = self.low
        while at < high:
            name = names[at]
            dot = name.find(".", length) if level < LEVELS else -1
            if dot < 0:
                label = name[length:]
                leaves[label] = at
                yield Node(outline, label, name + ".", at, at, at, level + 1)
                at += 1
            else:
                start, stop = name[: dot + 1], at + 1
                if stop < high and names[stop].startswith(start):
                    stop = bisect_left(names, start[:-1] + "/", stop, high)  # "/" follows "." in ASCII
                label = start[length:-1]
                yield Node(outline, label, start, leaves.get(label), at, stop, level + 1)
                at = stop

    def looks(self) -> object:
        """Return a key of the subtree below the label, equal for siblings with the same names, shapes and dtypes."""
        outline = self.outline
        own = None if self.leaf is None else int(outline.marks[self.leaf])
        names = outline.names[self.low : self.high]
        below: Any = "\n" + "\n".join(names) if names else ""
        if below.count("\n") == len(names):
            below = below.replace("\n" + self.start, "\n")
        else:
            below = tuple([name[len(self.start) :] for name in names])
        return own, below, outline.marks[self.low : self.high].tobytes()


def outline(view: Namespace[Any]) -> Outline:
    """Return the outline of a view, which is built on first use and cached. No tensor data is read."""
    kept = view.kept.get("outline")
    if kept is None:
        kept = view.kept["outline"] = Outline(view)
    assert isinstance(kept, Outline)
    return kept


def chain(node: Node) -> tuple[str, Node]:
    """Follow single children down from a node; return their joined label and the last node.

    A chain of single children is drawn as one row."""
    if node.leaf is None and node.high - node.low == 1:  # a single name: its node is the last one
        name, outline = node.outline.names[node.low], node.outline
        rest = name[len(node.start) :]
        level = node.level + rest.count(".")
        if level <= LEVELS:
            end = Node(outline, rest.rpartition(".")[2], name + ".", node.low, node.low, node.low, level + 1)
            return f"{node.label}.{rest}", end
    labels = [node.label]
    while node.leaf is None and (single := node.single) is not None:
        node = single
        labels.append(node.label)
    return ".".join(labels), node


def groups(nodes: Sequence[Node]) -> list[tuple[str, Sequence[Node]]]:
    """Group numbered siblings that are equal.

    Returns
    -------
    list
        (numbers, nodes) pairs in the order of the nodes. The numbers are "0-125", or "1-125/2" for every second one,
        and "" for a node alone.
    """
    numbered = [n for n in nodes if n.label.isascii() and n.label.isdigit() and str(int(n.label[:18])) == n.label]
    if len(numbered) < _ALIKE:
        return [("", [node]) for node in nodes]
    runs = {id(run[0]): run for same in _classes(numbered) for run in _runs(same) if len(run) >= _ALIKE}
    found: list[tuple[str, Sequence[Node]]] = []
    done: set[int] = set()
    for node in nodes:
        run = runs.get(id(node))
        if run is not None:
            done.update(map(id, run))
            found.append((_numbers(run), run))
        elif id(node) not in done:
            found.append(("", [node]))
    return found


def _classes(nodes: Iterable[Node]) -> Iterable[list[Node]]:
    """Group the nodes that look alike; both groups and nodes keep their order."""
    found: dict[object, list[Node]] = {}
    for node in nodes:
        found.setdefault(node.looks(), []).append(node)
    return found.values()


def _runs(nodes: list[Node]) -> Iterator[list[Node]]:
    """Split the nodes into runs of evenly spaced numbers. After a run that is too short to fold, the next run starts at
    its second node."""
    at = 0
    while at < len(nodes):
        run = _run(nodes, at)
        yield run
        at += len(run) if len(run) >= _ALIKE else 1


def _run(nodes: list[Node], start: int) -> list[Node]:
    """Return the longest run from ``start`` whose numbers are evenly spaced."""
    numbers = [int(n.label) for n in nodes[start : start + 2]]
    end = start + 1
    while end < len(nodes) and int(nodes[end].label) - int(nodes[end - 1].label) == numbers[1] - numbers[0]:
        end += 1
    return nodes[start:end]


def _numbers(nodes: Sequence[Node]) -> str:
    first, second, last = nodes[0].label, nodes[1].label, nodes[-1].label
    step = int(second) - int(first)
    return f"{first}-{last}" + (f"/{step}" if step > 1 else "")
