"""Which of many boxes overlap, in about as much time as there are boxes and overlaps, whatever their order. Pure.

A sweep along one dimension finds candidates, within strips of a second dimension where that leaves fewer of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from operator import lt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .box import Box

_FEW = 24  # boxes that are compared one by one: arrays are not worth it
_PAIRS = 1 << 20  # candidates that are looked at together

Ints = NDArray[np.int64]


def earlier_overlaps(boxes: Sequence[Box]) -> list[list[int]]:
    """For each box (no box may be empty), the numbers of those before it that share an index with it, ascending.

    >>> earlier_overlaps([Box((0,), (4,)), Box((6,), (9,)), Box((3,), (7,))])
    [[], [], [0, 1]]
    """
    if any(
        all(a.stop[d] <= b.start[d] for a, b in pairwise(boxes)) for d in range(len(boxes[0].start) if boxes else 0)
    ):
        return [[] for _ in boxes]  # in order, as ranks mostly are
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
    """Boxes in the order of a sweep, those that lie in several strips once for each. ``behind``: how many of those that
    follow each begin before it ends, in its strip."""

    boxes: Ints
    strips: Ints
    behind: Ints

    @property
    def cost(self) -> int:
        return len(self.boxes) + int(self.behind.sum())


def _pairs(starts: Ints, stops: Ints) -> Iterator[tuple[Ints, Ints]]:
    """Pairs of boxes that overlap, each once."""
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
        # of the strips that two boxes share, the first one counts
        same: NDArray[Any] = np.maximum(first[a], first[b]) == best.strips[left]
        for d in range(dims):
            same &= (starts[a, d] < stops[b, d]) & (starts[b, d] < stops[a, d])
        yield a[same], b[same]
        at = stop


def _sweep(starts: Ints, stops: Ints, first: Ints, last: Ints) -> _Sweep:
    """Boxes that lie in strips ``first`` to ``last``, by strip and then by where they start."""
    times = last - first + 1
    boxes = np.repeat(np.arange(len(starts)), times)
    strips = np.arange(len(boxes)) - np.repeat(np.cumsum(times) - times, times) + first[boxes]
    places = np.unique(starts)
    key = strips * (len(places) + 1) + np.searchsorted(places, starts)[boxes]
    end = strips * (len(places) + 1) + np.searchsorted(places, stops)[boxes]
    order = np.argsort(key, kind="stable")
    behind = np.searchsorted(key[order], end[order]) - np.arange(len(order)) - 1
    return _Sweep(boxes[order], strips[order], behind)
