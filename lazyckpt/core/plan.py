"""The plan of a read: the copies from files that fill a selection of a tensor, by box intersection. No I/O.

Coordinates: a *selection* has ascending indices for each dimension of the tensor: a `range`, or a list of them. Its
elements, numbered from 0 in each dimension, are the coordinates of the output array. A `Copy` moves a block of an
extent to a block of the output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod
from operator import lt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, MissingFileError, sentences
from .box import Box, Selection, c_strides, remainder
from .copies import Copy, even
from .extents import Hole, Packed
from .fragments import Find, fragment_boxes, fragments_of
from .specs import Fragment, TensorSpec
from .table import choose

# -- Which of many boxes overlap, in time about proportional to the boxes and overlaps, in any order of the boxes.

_FEW = 24  # up to this many boxes are compared one by one: numpy is slower
_PAIRS = 1 << 20  # candidate pairs that are compared at a time

Ints = NDArray[np.int64]


def earlier_overlaps(boxes: Sequence[Box]) -> list[list[int]]:
    """Return, for each box, the ascending numbers of the earlier boxes that overlap it. No box may be empty.

    >>> earlier_overlaps([Box((0,), (4,)), Box((6,), (9,)), Box((3,), (7,))])
    [[], [], [0, 1]]
    """
    if any(
        all(a.stop[d] <= b.start[d] for a, b in pairwise(boxes)) for d in range(len(boxes[0].start) if boxes else 0)
    ):
        return [[] for _ in boxes]  # sorted and disjoint along a dimension, as the ranks' boxes mostly are
    if len(boxes) <= _FEW or not boxes[0].start:
        return [[m for m in range(n) if _overlap(boxes[m], box)] for n, box in enumerate(boxes)]
    starts = np.array([box.start for box in boxes], np.int64)
    stops = np.array([box.stop for box in boxes], np.int64)
    found = list(_pairs(starts, stops))
    low = np.concatenate([np.minimum(a, b) for a, b in found])
    high = np.concatenate([np.maximum(a, b) for a, b in found])
    order = np.lexsort((low, high))
    ends = np.searchsorted(high[order], np.arange(len(boxes)), "right").tolist()
    ordered = low[order].tolist()
    return [ordered[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]


def _overlap(a: Box, b: Box) -> bool:
    return all(map(lt, a.start, b.stop)) and all(map(lt, b.start, a.stop))


class _Sweep(NamedTuple):
    """Boxes in the order of a sweep; a box occurs once for each strip that it meets.

    ``behind`` holds, for each box, how many of the following boxes of its strip begin before it ends.
    """

    boxes: Ints
    strips: Ints
    behind: Ints

    @property
    def cost(self) -> int:
        return len(self.boxes) + int(self.behind.sum())


def _pairs(starts: Ints, stops: Ints) -> Iterator[tuple[Ints, Ints]]:
    """Yield the pairs of overlapping boxes, each pair once, as two arrays of numbers."""
    count, dims = starts.shape
    nothing = np.zeros(count, np.int64)
    along = min(range(dims), key=lambda d: _sweep(starts[:, d], stops[:, d], nothing, nothing).cost)
    first, best = nothing, _sweep(starts[:, along], stops[:, along], nothing, nothing)
    for across in range(dims):
        ordered = np.sort(starts[:, across])
        strips = 4
        while across != along and strips <= count:
            edges = np.unique(ordered[:: count // strips])
            low = np.searchsorted(edges, starts[:, across], "right")
            high = np.searchsorted(edges, stops[:, across] - 1, "right")
            strips *= 4
            if int((high - low + 1).sum()) > best.cost:
                break
            made = _sweep(starts[:, along], stops[:, along], low, high)
            if made.cost < best.cost:
                first, best = low, made
    ends = np.cumsum(best.behind)
    at = 0
    while at < len(best.boxes):
        done = int(ends[at - 1]) if at else 0
        stop = max(at + 1, int(np.searchsorted(ends, done + _PAIRS)))
        behind = best.behind[at:stop]
        left = np.repeat(np.arange(at, at + len(behind)), behind)
        right = left + 1 + np.arange(len(left)) - np.repeat(np.cumsum(behind) - behind, behind)
        a, b = best.boxes[left], best.boxes[right]
        # two boxes may share several strips: keep the pair of the first one
        same: NDArray[Any] = np.maximum(first[a], first[b]) == best.strips[left]
        for d in range(dims):
            same &= (starts[a, d] < stops[b, d]) & (starts[b, d] < stops[a, d])
        yield a[same], b[same]
        at = stop


def _sweep(starts: Ints, stops: Ints, first: Ints, last: Ints) -> _Sweep:
    """Return the boxes, which meet strips ``first`` to ``last``, sorted by strip and then by start."""
    times = last - first + 1
    boxes = np.repeat(np.arange(len(starts)), times)
    strips = np.arange(len(boxes)) - np.repeat(np.cumsum(times) - times, times) + first[boxes]
    places = np.unique(starts)
    key = strips * (len(places) + 1) + np.searchsorted(places, starts)[boxes]
    end = strips * (len(places) + 1) + np.searchsorted(places, stops)[boxes]
    order = np.argsort(key, kind="stable")
    behind = np.searchsorted(key[order], end[order]) - np.arange(len(order)) - 1
    return _Sweep(boxes[order], strips[order], behind)


# -- From a selection of a tensor to the copies that fill it.


def plan(spec: TensorSpec, want: Selection, find: Find | None = None) -> Sequence[Copy]:
    """Return the copies that fill the selection.

    They cover every selected element exactly once. ``find`` looks up where a packed extent holds its elements; without
    it their position is left open.

    Raises MissingFileError if the file of a selected element is missing, DataError if no file holds the element.
    """
    whole = Box.of([len(r) for r in want])
    if not whole:
        return []
    fragments = fragments_of(spec.fragments)
    table = fragments.table(want, find)
    found = None if table is None else choose(table, want)
    if found is not None:
        return found
    pieces = [p for f in fragments.meeting(want) for p in pieces_of(f, want, find)]
    copies = _cover(whole, [(target, piece) for target, piece in pieces if isinstance(piece, Copy)])
    left = whole.numel - sum(prod(copy.shape) for copy in copies)
    if left:
        raise _uncovered(spec, left, pieces)
    return copies


def overlaps(spec: TensorSpec, want: Selection, find: Find | None = None) -> Iterator[tuple[Copy, Copy]]:
    """Yield the copies of the selected elements that several fragments hold.

    Each pair of copies fills the same block of the output: from the first fragment that holds it, and from another one.
    Missing fragments are skipped.
    """
    pieces = [
        (number, target, piece)
        for number, fragment in enumerate(fragments_of(spec.fragments).replicas(want))
        for target, piece in pieces_of(fragment, want, find)
        if isinstance(piece, Copy)
    ]
    held = _held_first([target for _, target, _ in pieces])
    for (number, target, piece), (_, shared) in zip(pieces, held, strict=True):
        for m, inner in shared:
            owner, whole, copy = pieces[m]
            if owner != number:
                yield _crop(copy, whole, inner), _crop(piece, target, inner)


def pieces_of(fragment: Fragment, want: Selection, find: Find | None) -> Iterator[tuple[Box, Copy | Hole]]:
    """Yield the selected blocks that a fragment holds, as (block of the output, the copy that fills it)."""
    extent, span, axes = fragment.extent, fragment.span, fragment.axes
    for local, globe in fragment_boxes(fragment):
        lo: list[int] = []
        hi: list[int] = []
        lists: list[NDArray[np.int64] | None] = []
        first = list(local.start)  # the rank-local index of the first selected element
        for r, a, b, axis in zip(want, globe.start, globe.stop, axes or range(len(want)), strict=True):
            if isinstance(r, range):
                i = max(0, -(-(a - r.start) // r.step))
                j = min(len(r), -(-(b - r.start) // r.step))
                lists.append(None)
            else:
                i, j = np.searchsorted(r, (a, b)).tolist()
                lists.append(r[i:j] - r[i] if i < j else r)
            if i >= j:
                break
            lo.append(i)
            hi.append(j)
            if axis is not None:
                first[axis] += int(r[i]) - a
        else:
            target = Box(tuple(lo), tuple(hi))
            if isinstance(extent, Hole):
                yield target, extent
                continue
            if isinstance(extent, Packed):
                extent = extent.as_told if find is None else find(extent)
            if span is None:
                base, strides = 0, extent.strides
            else:  # the extent is the ravel from span[0] on
                unit = extent.strides[-1] if extent.strides else 1
                base = -span[0] * unit
                strides = tuple(s * unit for s in c_strides(fragment.local_shape))
            start = base + sum(i * s for i, s in zip(first, strides, strict=True))
            if axes is not None:
                strides = tuple(0 if a is None else strides[a] for a in axes)
            steps = tuple(s * r.step if isinstance(r, range) else s for s, r in zip(strides, want, strict=True))
            yield target, even(Copy(extent, start, target.shape, steps, target.start, tuple(lists)))


def _cover(whole: Box, pieces: list[tuple[Box, Copy]]) -> list[Copy]:
    """Return copies that cover all that the pieces cover, each element from the first piece that has it."""
    if pieces and pieces[0][0] == whole:
        return [pieces[0][1]]
    known: dict[Box, Copy] = {}
    for target, piece in pieces:
        known.setdefault(target, piece)
    first = list(known.items())
    total, enough = 0, 0
    while enough < len(first) and total < whole.numel:
        total += first[enough][0].numel
        enough += 1
    copies = _of_first_holders(first[:enough])
    if enough == len(first) or sum(prod(copy.shape) for copy in copies) == whole.numel:
        return copies
    return _of_first_holders(first)


def _of_first_holders(pieces: list[tuple[Box, Copy]]) -> list[Copy]:
    held = _held_first([target for target, _ in pieces])
    return [_crop(piece, target, box) for (target, piece), (own, _) in zip(pieces, held, strict=True) for box in own]


def _held_first(targets: Sequence[Box]) -> Iterator[tuple[list[Box], list[tuple[int, Box]]]]:
    """Yield, for each block, the boxes that no earlier block has, and (number of the first owner, box) of the rest."""
    first: dict[Box, int] = {}
    for n, target in enumerate(targets):
        first.setdefault(target, n)
    numbers = list(first.values())
    before = dict(zip(first, earlier_overlaps(list(first)), strict=True))
    held: dict[Box, list[Box]] = {}
    shares: dict[Box, list[tuple[int, Box]]] = {}
    for target in targets:
        if target in held:  # a repeated block: the first one holds all of it
            yield [], [*((first[target], box) for box in held[target]), *shares[target]]
            continue
        owners = [(numbers[m], held[targets[numbers[m]]]) for m in before[target]]
        shared = shares[target] = [(n, inner) for n, boxes in owners for box in boxes if (inner := box & target)]
        held[target] = remainder(target, [inner for _, inner in shared])
        yield held[target], shared


def _crop(copy: Copy, target: Box, inner: Box) -> Copy:
    if inner == target:
        return copy
    ahead = [i - t for i, t in zip(inner.start, target.start, strict=True)]
    if not copy.lists:
        start = copy.start + sum(n * s for n, s in zip(ahead, copy.strides, strict=True))
        return copy._replace(start=start, shape=inner.shape, at=inner.start)
    start = copy.start
    lists: list[NDArray[np.int64] | None] = []
    for n, length, stride, positions in zip(ahead, inner.shape, copy.strides, copy.lists, strict=True):
        if positions is None:
            start += n * stride
            lists.append(None)
        else:
            start += int(positions[n]) * stride
            lists.append(positions[n : n + length] - positions[n])
    return even(copy._replace(start=start, shape=inner.shape, at=inner.start, lists=tuple(lists)))


class UncoveredError(DataError):
    """No file of the checkpoint holds some elements of a tensor."""


def _uncovered(spec: TensorSpec, left: int, pieces: list[tuple[Box, Copy | Hole]]) -> MissingFileError | DataError:
    what = f"{spec.name!r}: {left:,} of the wanted elements cannot be read"
    reasons = dict.fromkeys(_reasons(pieces))
    if reasons:
        why = sentences(reasons, 8)
        end = "" if why.endswith((".", "?")) else "."
        return MissingFileError(f"{what}: {why}{end} Slices that do not touch them still read.")
    if not spec.fragments:
        return DataError(f"{spec.name!r}: {spec.rule or 'it has no data in the checkpoint'}")
    return UncoveredError(f"{what}: no file of the checkpoint holds them.")


def _reasons(pieces: list[tuple[Box, Copy | Hole]]) -> Iterator[str]:
    """Yield the reasons of the holes that have elements which no copy holds."""
    copies = [target for target, piece in pieces if isinstance(piece, Copy)]
    holes = [(target, piece) for target, piece in pieces if isinstance(piece, Hole)]
    own = [boxes for boxes, _ in _held_first(copies)]
    before = earlier_overlaps([*copies, *(target for target, _ in holes)])[len(copies) :]
    for (target, hole), near in zip(holes, before, strict=True):
        if remainder(target, [inner for m in near if m < len(own) for box in own[m] if (inner := box & target)]):
            yield hole.reason
