"""Blocks of an N-D index space, and how a flat interval of a C-order array falls apart into them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

Shape = tuple[int, ...]
_FEW = 8  # boxes that are taken away one after the other


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
        """The whole index space of an array of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> Shape:
        return tuple([b - a for a, b in zip(self.start, self.stop, strict=True)])  # a generator is twice the calls

    @property
    def numel(self) -> int:
        return prod(self.shape) if self else 0

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    def __bool__(self) -> bool:
        """True where the box holds at least one index (a 0-d box holds one)."""
        return all(a < b for a, b in zip(self.start, self.stop, strict=True))

    def __and__(self, other: Box) -> Box:
        return Box(
            tuple(map(max, self.start, other.start)),
            tuple(map(min, self.stop, other.stop)),
        )

    def shift(self, by: Sequence[int]) -> Box:
        """The box moved by ``by``.

        >>> Box((1,), (3,)).shift((10,))
        Box(start=(11,), stop=(13,))
        """
        return Box(
            tuple(a + d for a, d in zip(self.start, by, strict=True)),
            tuple(b + d for b, d in zip(self.stop, by, strict=True)),
        )

    def minus(self, other: Box) -> Iterator[Box]:
        """What is left of this box without ``other``: at most 2N disjoint boxes.

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
    """What is left of a box without others, which lie in it and do not overlap each other, as disjoint boxes.

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
    """The box cut in two along a dimension, with what lies in each half: at the middle of the places where others
    begin; nothing if all of these begin where the box does."""
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
    """Strides, in elements, of a C-order array of this shape.

    >>> c_strides((2, 3, 4))
    (12, 4, 1)
    """
    strides = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        strides[d] = strides[d + 1] * max(shape[d + 1], 1)
    return tuple(strides)


def is_run(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """True if the elements of a strided array follow each other without a gap, in C order."""
    return all(n == 1 or s == e for n, s, e in zip(shape, strides, c_strides(shape), strict=True))


def fits(shape: Sequence[int], itemsize: int) -> bool:
    """Whether an array of this shape has a size that can be counted, its empty dimensions not looked at first.

    >>> fits((2**40, 2**40, 0), 1)
    False
    """
    size = itemsize
    for n in shape:
        size *= n
        if size >= 1 << 63:
            return False
    return True


def hull(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last that a strided array touches, both included (0 if it is empty)."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


def tiles(shape: Sequence[int], count: int) -> Iterator[Box]:
    """Cut an array into boxes of at most ``count`` elements that each are one run of its C order, in that order.

    >>> [(b.start, b.stop) for b in tiles((3, 4), 8)]
    [((0, 0), (2, 4)), ((2, 0), (3, 4))]
    """
    if 0 in shape:  # its other dimensions may be of any length, which `product` would list
        return
    sizes, left = [], max(1, count)
    for n in reversed(shape):
        sizes.append(max(1, min(n, left)))
        left //= max(1, n)
    sizes.reverse()
    for corner in _corners([range(0, n, size) for n, size in zip(shape, sizes, strict=True)]):
        yield Box(corner, tuple(min(a + size, n) for a, size, n in zip(corner, sizes, shape, strict=True)))


def _corners(axes: Sequence[range]) -> Iterator[Shape]:
    """As `itertools.product`, which lists each axis first: a tensor of one stored number may have any length."""
    if not axes:
        yield ()
        return
    for outer in _corners(axes[:-1]):
        for last in axes[-1]:
            yield (*outer, last)


def span_boxes(shape: Sequence[int], lo: int, hi: int) -> list[Box]:
    """The flat interval [lo, hi) of a C-order array of ``shape``, as at most 2N-1 boxes in flat order.

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

    # Cut points: lo rounded up to ever larger rows, then hi rounded down to ever smaller ones. Between two
    # neighbours lies a run of whole rows of one stride, inside one row of the next larger stride: a box.
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
    """The box of [lo, hi), which is known to be whole rows of some stride inside one row of the next larger."""
    last = hi - 1
    start, stop = [], []
    for stride in strides:
        start.append(lo // stride)
        stop.append(last // stride + 1)
        lo, last = lo % stride, last % stride
    return Box(tuple(start), tuple(stop))
