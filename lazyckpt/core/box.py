"""Blocks of an N-D index space, and the decomposition of a flat interval of a C-order array into such blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import numpy as np
from numpy.typing import NDArray

Shape = tuple[int, ...]
Axis = range | NDArray[np.int64]  # ascending indices along a dimension
Selection = tuple[Axis, ...]
_FEW = 8  # up to this many boxes are subtracted one by one


@dataclass(frozen=True, slots=True)
class Box:
    """The half-open block ``start[d] <= i[d] < stop[d]`` of an N-D index space.

    >>> Box((0, 2), (4, 6)) & Box((3, 0), (9, 3))
    Box(start=(3, 2), stop=(4, 3))
    """

    start: Shape
    stop: Shape

    @classmethod
    def of(cls, shape: Sequence[int]) -> Box:
        """Return the whole index space of an array.

        Parameters
        ----------
        shape
            The array's shape, in elements.
        """
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> Shape:
        """The lengths of the dimensions, in elements."""
        return tuple([b - a for a, b in zip(self.start, self.stop, strict=True)])  # a generator is twice the calls

    @property
    def numel(self) -> int:
        """The number of indices in the box."""
        return prod(self.shape) if self else 0

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index of an array: one slice for each dimension."""
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    def __bool__(self) -> bool:
        """Return whether the box holds at least one index (a 0-d box holds one)."""
        return all(a < b for a, b in zip(self.start, self.stop, strict=True))

    def __and__(self, other: Box) -> Box:
        return Box(
            tuple(map(max, self.start, other.start)),
            tuple(map(min, self.stop, other.stop)),
        )

    def shift(self, by: Sequence[int]) -> Box:
        """Return the box moved by ``by``, an offset in elements for each dimension.

        >>> Box((1,), (3,)).shift((10,))
        Box(start=(11,), stop=(13,))
        """
        return Box(
            tuple(a + d for a, d in zip(self.start, by, strict=True)),
            tuple(b + d for b, d in zip(self.stop, by, strict=True)),
        )

    def minus(self, other: Box) -> Iterator[Box]:
        """Yield this box without ``other``, as at most 2N disjoint boxes.

        >>> list(Box((0, 0), (3, 3)).minus(Box((1, 1), (3, 2))))
        [Box(start=(0, 0), stop=(1, 3)), Box(start=(1, 0), stop=(3, 1)), Box(start=(1, 2), stop=(3, 3))]
        """
        inner = self & other
        if not inner:
            yield self
            return
        start, stop = list(self.start), list(self.stop)
        for d in range(len(start)):
            if start[d] < inner.start[d]:
                yield Box(tuple(start), (*stop[:d], inner.start[d], *stop[d + 1 :]))
            if inner.stop[d] < stop[d]:
                yield Box((*start[:d], inner.stop[d], *start[d + 1 :]), tuple(stop))
            start[d], stop[d] = inner.start[d], inner.stop[d]


_Half = tuple[Box, list[Box]]


def remainder(box: Box, taken: Sequence[Box]) -> list[Box]:
    """Return a box without the boxes ``taken``, as disjoint boxes.

    The boxes in ``taken`` have to be inside ``box`` and must not overlap each other.

    >>> remainder(Box((0,), (9,)), [Box((0,), (2,)), Box((5,), (9,))])
    [Box(start=(2,), stop=(5,))]
    """
    if not taken:
        return [box]
    if sum(one.numel for one in taken) == box.numel:
        return []
    if len(taken) <= _FEW:
        rest = [box]
        for one in taken:
            rest = [left for part in rest for left in part.minus(one)]
        return rest
    first, second = min((two for d in range(len(box.start)) for two in _halves(box, taken, d)), key=_larger)
    return [*remainder(*first), *remainder(*second)]


def _halves(box: Box, taken: Sequence[Box], d: int) -> Iterator[tuple[_Half, _Half]]:
    """Yield the two halves of a box cut along dimension ``d``, each with the taken boxes in it.

    The cut is at the median start of the taken boxes. Yield nothing if they all start where the box starts.
    """
    edges = sorted(one.start[d] for one in taken if one.start[d] > box.start[d])
    if not edges:
        return
    cut = edges[max(0, len(edges) - len(taken) // 2 - 1)]
    low = Box(box.start, (*box.stop[:d], cut, *box.stop[d + 1 :]))
    high = Box((*box.start[:d], cut, *box.start[d + 1 :]), box.stop)
    below = [one & low for one in taken if one.start[d] < cut]
    yield (low, below), (high, [one & high for one in taken if one.stop[d] > cut])


def _larger(two: tuple[_Half, _Half]) -> int:
    return max(len(two[0][1]), len(two[1][1]))


def c_strides(shape: Sequence[int]) -> Shape:
    """Return the strides, in elements, of a C-order array of this shape.

    >>> c_strides((2, 3, 4))
    (12, 4, 1)
    """
    strides = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        strides[d] = strides[d + 1] * max(shape[d + 1], 1)
    return tuple(strides)


def is_run(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether a strided array is contiguous in C order."""
    expected = c_strides(shape)
    return strides == expected or all(n == 1 or s == e for n, s, e in zip(shape, strides, expected, strict=True))


def fits(shape: Sequence[int], itemsize: int) -> bool:
    """Return whether the size in bytes, as a product of the dimensions from left to right, and the dimensions always
    fit into 63 bits.

    >>> fits((2**40, 2**40, 0), 1), fits((0, 2**63), 1)
    (False, False)
    """
    size = itemsize
    for n in shape:
        size *= n
        if size >= 1 << 63 or n >= 1 << 63:
            return False
    return True


def hull(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements from the first to the last one of a strided array, inclusive (0 if it is empty)."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


def hull_of(want: Selection) -> tuple[range, ...]:
    """Return the selection with the range from the first to the last index in place of each list of indices."""
    return tuple(r if isinstance(r, range) else range(int(r[0]), int(r[-1]) + 1) if len(r) else range(0) for r in want)


def tiles(shape: Sequence[int], count: int) -> Iterator[Box]:
    """Yield boxes of at most ``count`` elements that cover an array, each contiguous in C order, in that order.

    >>> [(b.start, b.stop) for b in tiles((3, 4), 8)]
    [((0, 0), (2, 4)), ((2, 0), (3, 4))]
    """
    if 0 in shape:  # the other dimensions may have any length: do not iterate over them
        return
    sizes, left = [], max(1, count)
    for n in reversed(shape):
        sizes.append(max(1, min(n, left)))
        left //= max(1, n)
    sizes.reverse()
    for corner in _corners([range(0, n, size) for n, size in zip(shape, sizes, strict=True)]):
        yield Box(corner, tuple(min(a + size, n) for a, size, n in zip(corner, sizes, shape, strict=True)))


def _corners(axes: Sequence[range]) -> Iterator[Shape]:
    """Yield what `itertools.product` does, without listing each axis first: an expanded tensor may have any length."""
    if not axes:
        yield ()
        return
    for outer in _corners(axes[:-1]):
        for last in axes[-1]:
            yield (*outer, last)


def span_boxes(shape: Sequence[int], lo: int, hi: int) -> list[Box]:
    """Return the flat interval [lo, hi) of a C-order array of ``shape`` as at most 2N-1 boxes, in flat order.

    >>> [(b.start, b.stop) for b in span_boxes((3, 4), 2, 9)]
    [((0, 2), (1, 4)), ((1, 0), (2, 4)), ((2, 0), (3, 1))]
    """
    shape = tuple(shape)
    total = prod(shape)
    lo, hi = max(lo, 0), min(hi, total)
    if lo >= hi:
        return []
    if lo == 0 and hi == total:
        return [Box.of(shape)]
    strides = c_strides(shape)

    # Cut points: lo rounded up to ever larger rows, then hi rounded down to ever smaller ones. The elements between
    # two neighbouring cut points are whole rows of one stride, inside one row of the next larger stride: a box.
    cuts, at = [lo], lo
    for stride in reversed(strides):
        at = -(-at // stride) * stride
        if at > hi:
            break
        cuts.append(at)
    for stride in strides:
        down = hi // stride * stride
        if down > cuts[-1]:
            cuts.append(down)
    return [_row_box(shape, strides, a, b) for a, b in pairwise(cuts) if a < b]


def _row_box(shape: Shape, strides: Shape, lo: int, hi: int) -> Box:
    """Return the box of [lo, hi), which has to be whole rows of some stride inside one row of the next larger one."""
    last = hi - 1
    start, stop = [], []
    for stride in strides:
        start.append(lo // stride)
        stop.append(last // stride + 1)
        lo, last = lo % stride, last % stride
    return Box(tuple(start), tuple(stop))
