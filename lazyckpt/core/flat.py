"""Flat intervals of tensors: cutting a tensor into 1-d intervals, and joining intervals to the tensor. No I/O.

ZeRO partitions tensors into such intervals: elements lo to hi of the C-order ravel. An interval consists of rows of the
tensor, and every row is a part of the fragment that holds it; if a fragment is contiguous in its file, many rows form
one part. All fragments are created on demand.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod

from .box import Box, Selection, Shape, c_strides, is_run, span_boxes
from .expr import make, operand
from .extents import Extent, Hole
from .fragments import Fragments, fragment_boxes, fragments_of
from .placement import Part, Placement
from .specs import Expr, Fragment, Input, TensorSpec


def interval(source: TensorSpec, lo: int, hi: int) -> TensorSpec:
    """Return elements lo to hi of a tensor's C-order ravel as a tensor of shape (hi - lo,)."""
    if source.expr is not None:
        return replace(source, shape=(hi - lo,), expr=make("flat", source.expr, start=lo, stop=hi))
    extent = plain(source.fragments)
    if extent is not None and lo < hi:
        at = extent.offset + lo * extent.dtype.itemsize
        run = replace(extent, offset=at, shape=(hi - lo,), strides=(1,))
        return replace(source, shape=run.shape, fragments=(Fragment(run, run.shape, rank=source.fragments[0].rank),))
    return replace(source, shape=(hi - lo,), fragments=Interval(source.shape, source.fragments, lo, hi))


def joined(like: TensorSpec, shape: Shape, intervals: Sequence[tuple[int, TensorSpec]]) -> TensorSpec:
    """Return the tensor of this shape whose C-order ravel is made of 1-d tensors.

    ``intervals`` holds pairs of (the first element in the ravel, the 1-d tensor).
    """
    if like.expr is not None or any(spec.expr is not None for _, spec in intervals):
        return replace(
            like, shape=shape, fragments=(), expr=make("reshape", _placed(like, shape, intervals), shape=shape)
        )
    held = tuple((at, min(spec.shape[0], prod(shape) - at), spec.fragments) for at, spec in intervals)
    return replace(like, shape=shape, fragments=Joined(shape, held))


def _placed(like: TensorSpec, shape: Shape, intervals: Sequence[tuple[int, TensorSpec]]) -> Expr | Input:
    """Return a tensor as a flat one, made of 1-d tensors, some of them computed."""
    count = prod(shape)
    if not intervals:  # there is no element
        return operand(like)
    ends = [min(spec.shape[0], count - at) for at, spec in intervals]
    placements = tuple(
        Placement(spec.shape, (Part(Box((0,), (end,)), (at,)),))
        for (at, spec), end in zip(intervals, ends, strict=True)
    )
    return make("place", *(operand(spec) for _, spec in intervals), shape=(count,), placements=placements)


def plain(fragments: Sequence[Fragment]) -> Extent | None:
    """Return the extent of a tensor that lies in one piece, in C order, else None."""
    if type(fragments) is not tuple or len(fragments) != 1:
        return None
    (fragment,) = fragments
    extent = fragment.extent
    whole = fragment.parts is None and fragment.span is None and fragment.axes is None
    return extent if whole and type(extent) is Extent and is_run(extent.shape, extent.strides) else None


class Flat(Fragments):
    """Fragments that are looked up by a flat interval of the tensor."""

    __slots__ = ()

    @property
    @abstractmethod
    def shape(self) -> Shape:
        """The shape of the tensor."""

    @abstractmethod
    def between(self, lo: int, hi: int) -> Iterator[Fragment]:
        """Yield the fragments that hold elements lo to hi of the tensor's C-order ravel."""

    def meeting(self, want: Selection) -> list[Fragment]:
        """Return the fragments that hold elements from the first to the last selected one, in C order."""
        if not all(map(len, want)):
            return []
        strides = c_strides(self.shape)
        lo = sum(int(r[0]) * s for r, s in zip(want, strides, strict=True))
        hi = 1 + sum(int(r[-1]) * s for r, s in zip(want, strides, strict=True))
        return list(self.between(lo, hi))

    def __iter__(self) -> Iterator[Fragment]:
        return self.between(0, prod(self.shape))


@dataclass(frozen=True, slots=True, eq=False)
class Interval(Flat):
    """The fragments of elements lo to hi of a tensor's ravel. ``source`` is the tensor's shape."""

    source: Shape
    fragments: Sequence[Fragment]
    lo: int
    hi: int

    @property
    def shape(self) -> Shape:
        return (self.hi - self.lo,)

    def between(self, lo: int, hi: int) -> Iterator[Fragment]:
        """Yield the fragments of an interval of this interval, with the parts that hold its elements."""
        boxes = span_boxes(self.source, self.lo + lo, self.lo + hi)
        if not boxes:
            return
        hull = tuple(
            range(min(b.start[d] for b in boxes), max(b.stop[d] for b in boxes)) for d in range(len(self.source))
        )
        for fragment in fragments_of(self.fragments).meeting(hull):
            found = self._flat(fragment, boxes)
            if found.parts:
                yield found

    def _flat(self, fragment: Fragment, boxes: Sequence[Box]) -> Fragment:
        shape, local_shape = self.source, fragment.local_shape
        dense = _is_dense(fragment)
        if not shape and not dense:
            parts_of = tuple(Part(local, (-self.lo,)) for local, _ in fragment_boxes(fragment))
            return replace(fragment, parts=parts_of, axes=(None,))
        last = max((d for d, n in enumerate(shape) if n > 1), default=len(shape) - 1)
        axes = tuple(range(len(shape))) if fragment.axes is None else fragment.axes
        parts: list[Part] = []
        for local, globe in fragment_boxes(fragment):
            for inner in filter(None, (globe & box for box in boxes)):
                for row in _rows(inner, shape, last, local_shape if dense else None):
                    start = list(local.start)
                    for d, axis in enumerate(axes):
                        if axis is not None:
                            start[axis] += row.start[d] - globe.start[d]
                    if dense:
                        at = _ravel(start, local_shape)
                        block = Box((at,), (at + row.numel,))
                    else:
                        stop = [n + 1 for n in start]
                        along = axes[last]
                        if along is not None:
                            stop[along] = start[along] + row.numel
                        block = Box(tuple(start), tuple(stop))
                    parts.append(Part(block, (_ravel(row.start, shape) - self.lo,)))
        if not dense:
            return replace(fragment, parts=tuple(parts), axes=(axes[last],))
        extent, count = fragment.extent, prod(local_shape)
        if isinstance(extent, Extent) and fragment.span is None:
            extent = replace(extent, shape=(count,), strides=(1,))
        return replace(fragment, extent=extent, local_shape=(count,), parts=tuple(parts))


@dataclass(frozen=True, slots=True, eq=False)
class Joined(Flat):
    """The fragments of a tensor whose ravel is stored in intervals.

    ``held`` holds, for each interval, (first element, number of elements, fragments).
    """

    shape: Shape = field()  # (else its default would be the property of the base class)
    held: tuple[tuple[int, int, Sequence[Fragment]], ...]

    def between(self, lo: int, hi: int) -> Iterator[Fragment]:
        for at, count, fragments in self.held:
            a, b = max(lo - at, 0), min(hi - at, count)
            if a < b:
                for fragment in fragments_of(fragments).meeting((range(a, b),)):
                    yield from self._placed(fragment, at, a, b)

    def _placed(self, fragment: Fragment, at: int, lo: int, hi: int) -> Iterator[Fragment]:
        runs: list[tuple[int, Extent]] = []
        for local, globe in fragment_boxes(fragment):
            a, b = max(globe.start[0], lo), min(globe.stop[0], hi)
            if a >= b:
                continue
            axis = 0 if fragment.axes is None else fragment.axes[0]
            start = list(local.start)
            if axis is not None:
                start[axis] += a - globe.start[0]
            extent = fragment.extent
            if isinstance(extent, Hole):
                yield Fragment(extent, self.shape, span=(at + a, at + b), rank=fragment.rank)
            elif isinstance(extent, Extent):
                runs.append((at + a, _run(extent, fragment, start, axis, b - a, len(self.shape))))
            elif len(fragment.local_shape) == 1 and b - a == fragment.local_shape[0] and fragment.span is None:
                span = (at + a, at + b)  # the whole of a packed 1-d array
                yield replace(fragment, local_shape=self.shape, parts=None, span=span, axes=None)
            else:
                yield self._rows(fragment, start, axis, (at + a, at + b))
        for group in _alike(runs, self.shape[-1] if self.shape else 1):
            if len(group) > 1:
                yield from self._blocks(group, fragment)
            else:
                at_, extent = group[0]
                yield Fragment(extent, self.shape, span=(at_, at_ + extent.shape[-1]), rank=fragment.rank)

    def _blocks(self, group: Sequence[tuple[int, Extent]], fragment: Fragment) -> Iterator[Fragment]:
        """Yield whole rows that are equally spaced in the file, as blocks."""
        (first, extent), (_, second) = group[:2]
        width, lead = self.shape[-1], self.shape[:-1]
        pitch = (second.offset - extent.offset) // extent.dtype.itemsize
        row = first // width
        for box in span_boxes(lead, row, row + len(group)):
            ahead = (_ravel(box.start, lead) - row) * pitch
            strides = (*(n * pitch for n in c_strides(lead)), extent.strides[-1])
            shape = (*box.shape, width)
            offset = extent.offset + ahead * extent.dtype.itemsize
            block = replace(extent, offset=offset, shape=shape, strides=strides)
            yield Fragment(block, shape, (Part(Box.of(shape), (*box.start, 0)),), rank=fragment.rank)

    def _rows(self, fragment: Fragment, start: Sequence[int], axis: int | None, span: tuple[int, int]) -> Fragment:
        """Return a packed fragment in its own shape, with one part for each row."""
        last = max((d for d, n in enumerate(self.shape) if n > 1), default=len(self.shape) - 1)
        parts = []
        for box in span_boxes(self.shape, *span):
            for row in _rows(box, self.shape, last, None):
                lo = list(start)
                if axis is not None:
                    lo[axis] += _ravel(row.start, self.shape) - span[0]
                hi = [n + 1 for n in lo]
                if axis is not None:
                    hi[axis] = lo[axis] + row.numel
                parts.append(Part(Box(tuple(lo), tuple(hi)), row.start))
        axes = tuple(axis if d == last else None for d in range(len(self.shape)))
        return replace(fragment, parts=tuple(parts), axes=axes)


def _run(extent: Extent, fragment: Fragment, start: Sequence[int], axis: int | None, count: int, ndim: int) -> Extent:
    """Return the extent of ``count`` elements along an axis of the rank-local array, beginning at index ``start``."""
    if fragment.span is None:
        first, strides = sum(i * s for i, s in zip(start, extent.strides, strict=True)), extent.strides
    else:
        unit = extent.strides[-1] if extent.strides else 1
        first = (_ravel(start, fragment.local_shape) - fragment.span[0]) * unit
        strides = tuple(s * unit for s in c_strides(fragment.local_shape))
    step = 1 if axis is None else strides[axis]
    rest = (1,) * (ndim - 1)
    offset = extent.offset + first * extent.dtype.itemsize
    return replace(extent, offset=offset, shape=(*rest, count), strides=(*rest, step))


def _alike(runs: Sequence[tuple[int, Extent]], width: int) -> Iterator[Sequence[tuple[int, Extent]]]:
    """Group the runs that are whole rows, consecutive in the tensor and equally spaced in the file."""
    n = 0
    while n < len(runs):
        end = n + 1
        if _is_row(runs[n], width):
            pitch = runs[end][1].offset - runs[n][1].offset if end < len(runs) else 0
            while (
                end < len(runs)
                and pitch > 0
                and _is_row(runs[end], width)
                and runs[end][0] == runs[end - 1][0] + width
                and runs[end][1].offset - runs[end - 1][1].offset == pitch
                and runs[end][1].strides == runs[n][1].strides
            ):
                end += 1
        yield runs[n:end]
        n = end


def _is_row(run: tuple[int, Extent], width: int) -> bool:
    return run[1].shape[-1] == width and run[0] % width == 0


def _is_dense(fragment: Fragment) -> bool:
    """Return whether the stored elements are contiguous and in the order of the rank-local array's ravel."""
    if fragment.axes is not None:
        return False
    if fragment.span is not None or isinstance(fragment.extent, Hole):
        return True
    extent = fragment.extent
    return isinstance(extent, Extent) and is_run(extent.shape, extent.strides)


def _rows(box: Box, shape: Shape, last: int, local: Shape | None) -> Iterator[Box]:
    """Yield a box as runs that are contiguous in an array of ``shape``, and in one of shape ``local`` if given.

    Without ``local`` every run is along dimension ``last``.
    """
    d = last
    if local is not None:
        d = len(shape) - 1
        while d > 0 and box.start[d] == 0 and box.stop[d] == shape[d] == local[d]:
            d -= 1
    for corner in product(*(range(a, b) for a, b in zip(box.start[:d], box.stop[:d], strict=True))):
        yield Box((*corner, *box.start[d:]), (*(n + 1 for n in corner), *box.stop[d:]))


def _ravel(index: Sequence[int], shape: Shape) -> int:
    return sum(i * s for i, s in zip(index, c_strides(shape), strict=True))
