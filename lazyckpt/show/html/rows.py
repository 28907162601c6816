"""The tree of a view as few enough rows: of layers that are alike one is shown, and what is left is cut.

A view of a hundred thousand tensors is some hundred rows that way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ..text import Node

ROWS = 800  # of a tree, at most
_ALIKE = 4  # so many siblings that are alike are one row


@dataclass(slots=True)
class Row:
    """A line of the tree. ``label``: what it adds to the names above it. ``alike``: the numbers it stands for, as
    "0-125" or "1-125/2" (every second), of ``times`` siblings; the rows below are then those of the first.
    ``left_out``: siblings that this row says are not listed."""

    label: str
    node: Node
    leaf: bool = False
    alike: str = ""
    times: int = 1
    left_out: int = 0
    tensors: int = 0
    numel: int = 0
    nbytes: int = 0
    below: list[Row] = field(default_factory=list)


def plan(root: Node, most: int = ROWS) -> list[Row]:
    """The rows of a tree: all of them if they are few; else siblings that are alike as one, and then no more of one
    node's than fit."""
    room = _Room(most)
    rows = _rows(root, None, most, room)
    if room.left >= 0:
        return rows
    kinds: dict[int, int] = {}
    _kind(root, {}, kinds)
    for each in (most, 256, 64, 16, 4, 1):
        room = _Room(most)
        rows = _rows(root, kinds, each, room)
        if room.left >= 0:
            break
    return rows


@dataclass(slots=True)
class _Room:
    """For how many more rows there is room; below 0 none is needed any more."""

    left: int


def _kind(node: Node, known: dict[object, int], kinds: dict[int, int]) -> int:
    """A number for what a node looks like from its label on: its tensor's shape and dtype, and what is below."""
    own: tuple[tuple[int, ...], torch.dtype, bool] | None = None
    if node.spec is not None:
        own = (node.spec.shape, node.spec.dtype, node.counted)
    below = tuple((label, _kind(child, known, kinds)) for label, child in node.children.items())
    kinds[id(node)] = number = known.setdefault((own, below), len(known))
    return number


def _rows(node: Node, kinds: dict[int, int] | None, most: int, room: _Room) -> list[Row]:
    """What is below a node, as far as there is room. ``kinds``: of every node, by its id, where what is alike is to be
    one row."""
    rows: list[Row] = []
    if kinds is None and len(node.children) > room.left:
        room.left = -1
        return rows
    groups = _groups(list(node.children.values()), kinds)
    shown = groups if len(groups) <= most else groups[: max(1, most - 1)]
    for alike, members in shown:
        room.left -= 1
        if room.left < 0:
            return rows
        end = members[0]
        labels = [end.label]
        while not alike and end.spec is None and len(end.children) == 1:  # nothing to choose from: one row
            ((_, child),) = end.children.items()
            end = child
            labels.append(end.label)
        label = ".".join(labels)
        sums = _sums(members)
        if end.spec is not None:
            own = (end.spec.numel, end.spec.nbytes) if end.counted else (0, 0)
            times = len(members)
            rows.append(Row(label, end, True, alike, times, 0, times, own[0] * times, own[1] * times))
        if end.children:
            below = _rows(end, kinds, most, room)
            rows.append(Row(label, end, False, alike, len(members), 0, *sums, below))
    if len(shown) < len(groups):
        rest = [member for _, members in groups[len(shown) :] for member in members]
        rows.append(Row("", node, False, "", 1, len(rest), *_sums(rest)))
    return rows


def _sums(nodes: Sequence[Node]) -> tuple[int, int, int]:
    return sum(n.tensors for n in nodes), sum(n.numel for n in nodes), sum(n.nbytes for n in nodes)


def _groups(nodes: list[Node], kinds: dict[int, int] | None) -> list[tuple[str, list[Node]]]:
    """(the numbers that they have, or "" for one alone; the nodes)."""
    if kinds is None:
        return [("", [node]) for node in nodes]
    same: dict[int, list[Node]] = {}
    for node in nodes:
        if node.label.isascii() and node.label.isdigit() and str(int(node.label[:18])) == node.label:
            same.setdefault(kinds[id(node)], []).append(node)
    runs = {id(run[0]): run for members in same.values() for run in _runs(members) if len(run) >= _ALIKE}
    found: list[tuple[str, list[Node]]] = []
    done: set[int] = set()
    for node in nodes:
        run = runs.get(id(node))
        if run is not None:
            done.update(map(id, run))
            found.append((_numbers(run), run))
        elif id(node) not in done:
            found.append(("", [node]))
    return found


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
