"""The names of a view as a tree whose levels are made when they are asked for, and layers that are alike.

Making an outline looks at every name once; drawing its first levels then costs what is drawn, however many names there
are below. A view keeps its outline.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Any

from ..core.index import TensorSpec
from ..core.names import natural
from ..namespace import Namespace

LEVELS = 100  # of a tree; it is walked by recursion, and what lies deeper is one label
_ALIKE = 4  # siblings that are alike, from which on they are one row


class Outline:
    """The names of a view in plain sorted order, with the sums of their sizes.

    ``names``: the names. ``specs``: their tensors. ``tied``: name -> the full name that owns its tensor, of those that
    do not own theirs. ``twice``: names whose tensor is in the totals under another name. ``marks``: a number for the
    shape and dtype of each; -1 for those that are not in the totals. ``numels``, ``nbytes``: the sums of elements and
    bytes before each, and of all.
    """

    def __init__(self, view: Namespace[Any]) -> None:
        self.names: Sequence[str] = view.names.sorted
        self.specs: list[TensorSpec] = []
        self.tied: dict[str, str] = {}
        specs, full_names = view.specs, view.full_names
        twice: set[str] = set()  # names whose tensor has been counted under another name, first in the view's order
        if len(full_names) == len(specs) and full_names.keys() == specs.keys():
            self.specs = [specs[name] for name in self.names]
        else:
            seen: set[str] = set()
            for name, full in full_names.items():
                owner = full if full in specs else view.owner(name)
                if owner != full:
                    self.tied[name] = owner
                if owner in seen:
                    twice.add(name)
                seen.add(owner)
            self.specs = [specs[self.tied.get(name) or full_names[name]] for name in self.names]
        kinds: dict[tuple[tuple[int, ...], Any], int] = {}
        self.marks = [kinds.setdefault((spec.shape, spec.dtype), len(kinds)) for spec in self.specs]
        numels = [prod(shape) for shape, _ in kinds]
        sizes = [numel * dtype.itemsize for numel, (_, dtype) in zip(numels, kinds, strict=True)]
        if twice:
            numels, sizes = [*numels, 0], [*sizes, 0]
            self.marks = [-1 if name in twice else n for name, n in zip(self.names, self.marks, strict=True)]
        self.twice = twice
        self._kinds = list(kinds)
        self.numels = list(accumulate((numels[n] for n in self.marks), initial=0))
        self.nbytes = list(accumulate((sizes[n] for n in self.marks), initial=0))

    def dtypes(self) -> list[tuple[Any, int]]:
        """(dtype, bytes of the tensors that have it, each tied one once), the most bytes first."""
        found: dict[Any, int] = {}
        for mark, count in Counter(self.marks).items():
            if mark >= 0:
                shape, dtype = self._kinds[mark]
                found[dtype] = found.get(dtype, 0) + count * prod(shape) * dtype.itemsize
        return sorted(found.items(), key=lambda item: -item[1])

    @cached_property
    def root(self) -> Node:
        """The node of all names."""
        return Node(self, "", "", None, 0, len(self.names))


@dataclass(slots=True)
class Node:
    """A level of the tree.

    ``label``: what it adds to the names above. ``start``: what the names below it begin with, which ends with a dot, or
    "" at the root. ``leaf``: the place of its own tensor among the sorted names; None if it has none. ``low``,
    ``high``: the places of the names below it.
    """

    outline: Outline
    label: str
    start: str
    leaf: int | None
    low: int
    high: int
    level: int = 0
    _children: list[Node] | None = None

    @property
    def name(self) -> str:
        """The name of its own tensor in the view; "" if it has none."""
        return "" if self.leaf is None else self.outline.names[self.leaf]

    @property
    def spec(self) -> TensorSpec | None:
        """Its own tensor."""
        return None if self.leaf is None else self.outline.specs[self.leaf]

    @property
    def tied(self) -> str:
        """The full name that owns its own tensor; "" if it is this one."""
        return self.outline.tied.get(self.name, "")

    @property
    def counted(self) -> bool:
        """Whether its own tensor is in the totals under this name."""
        return self.name not in self.outline.twice

    @property
    def tensors(self) -> int:
        """Names at and below it."""
        return self.high - self.low + (self.leaf is not None)

    @property
    def numel(self) -> int:
        """Elements at and below it, each tied tensor once."""
        return self._sum(self.outline.numels)

    @property
    def nbytes(self) -> int:
        """Bytes at and below it, each tied tensor once."""
        return self._sum(self.outline.nbytes)

    def _sum(self, sums: Sequence[int]) -> int:
        own = 0 if self.leaf is None else sums[self.leaf + 1] - sums[self.leaf]
        return own + sums[self.high] - sums[self.low]

    @property
    def children(self) -> list[Node]:
        """What is one level below, in natural order."""
        if self._children is None:
            found = {node.label: node for node in self._found()}
            self._children = sorted(found.values(), key=lambda node: natural(node.label))
        return self._children

    def _found(self) -> Iterator[Node]:
        """The children, in the order of the sorted names; one that is a name and begins others comes twice, the second
        time whole."""
        names, length = self.outline.names, len(self.start)
        leaves: dict[str, int] = {}
        at = self.low
        while at < self.high:
            name = names[at]
            dot = name.find(".", length) if self.level < LEVELS else -1
            if dot < 0:
                label = name[length:]
                leaves[label] = at
                yield Node(self.outline, label, name + ".", at, at, at, self.level + 1)
                at += 1
            else:
                start = name[: dot + 1]
                stop = bisect_left(names, start[:-1] + "/", at, self.high)  # "/" is the character behind "."
                label = start[length:-1]
                yield Node(self.outline, label, start, leaves.get(label), at, stop, self.level + 1)
                at = stop

    def looks(self) -> object:
        """What it looks like from its label on: equal for siblings that are alike."""
        length, outline = len(self.start), self.outline
        own = None if self.leaf is None else outline.marks[self.leaf]
        names = outline.names[self.low : self.high]
        return own, tuple([name[length:] for name in names]), tuple(outline.marks[self.low : self.high])


def outline(view: Namespace[Any]) -> Outline:
    """The outline of a view, made the first time that it is asked for. Reads no tensor data."""
    kept = view.kept.get("outline")
    if kept is None:
        kept = view.kept["outline"] = Outline(view)
    assert isinstance(kept, Outline)
    return kept


def chain(node: Node) -> tuple[str, Node]:
    """The label and the last of the nodes below which there is only one other: they are drawn as one."""
    labels = [node.label]
    while node.leaf is None and len(node.children) == 1:
        (node,) = node.children
        labels.append(node.label)
    return ".".join(labels), node


def groups(nodes: Sequence[Node]) -> list[tuple[str, Sequence[Node]]]:
    """Siblings, with those that have numbers and are alike together.

    Returns
    -------
    list
        (the numbers, as "0-125" or "1-125/2" for every second, or "" for a node alone; the nodes), in their order.
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
    """The nodes that look alike, in their order."""
    found: dict[object, list[Node]] = {}
    for node in nodes:
        found.setdefault(node.looks(), []).append(node)
    return found.values()


def _runs(nodes: list[Node]) -> Iterator[list[Node]]:
    """Cut where the numbers are no longer evenly spaced. Of a run that is too short for a row, the next begins with its
    second node."""
    at = 0
    while at < len(nodes):
        run = _run(nodes, at)
        yield run
        at += len(run) if len(run) >= _ALIKE else 1


def _run(nodes: list[Node], start: int) -> list[Node]:
    """Those from ``start`` on, as far as their numbers are evenly spaced."""
    numbers = [int(n.label) for n in nodes[start : start + 2]]
    end = start + 1
    while end < len(nodes) and int(nodes[end].label) - int(nodes[end - 1].label) == numbers[1] - numbers[0]:
        end += 1
    return nodes[start:end]


def _numbers(nodes: Sequence[Node]) -> str:
    first, second, last = nodes[0].label, nodes[1].label, nodes[-1].label
    step = int(second) - int(first)
    return f"{first}-{last}" + (f"/{step}" if step > 1 else "")
