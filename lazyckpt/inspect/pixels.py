"""Tensors as pictures: the elements of a grid of cells, pooled to their least, greatest and mean value.

Sums are in float64. NaN and infinities are counted, and are left out of the other numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from math import isqrt
from typing import Any

import numpy as np

from ..core.box import Box, tiles
from ..errors import DataError
from ..lazy import LazyArray
from .numbers import Array, number_shape
from .planes import CELL, Plane, Source, Window, checked, even_cells, fold_all, plane_of, source_of

SIDE = 2048
"""Maximum number of rows, and of columns, of a grid."""
_TOGETHER = 1 << 18  # lost elements that are counted at a time
_ROW = 64  # numbers that fit into one row
_PART = 1 << 17  # elements whose groups are reduced at a time


@dataclass(frozen=True, slots=True, eq=False)
class Pixels:
    """The pooled elements of each cell of a grid.

    ``low``, ``high`` and ``mean`` are float64 of shape (rows, columns): those of the finite elements, NaN for a cell
    without any. Of complex numbers they are those of the absolute values.
    """

    plane: Plane
    """How the tensor is drawn."""
    row_edges: Array
    """The rows between which the cells lie: int64, one more than there are rows of cells."""
    col_edges: Array
    """The same for columns."""
    low: Array
    """The least element of each cell."""
    high: Array
    """The greatest element of each cell."""
    mean: Array
    """The mean of the elements of each cell."""
    count: Array
    """The number of elements of each cell that were read, as int64."""
    nan: Array | None
    """The number of NaN in each cell, as int64; None if there are none."""
    inf: Array | None
    """The number of infinities in each cell, as int64; None if there are none."""
    exact: bool
    """Whether every element was read; if not, the numbers are those of a sample."""
    read: int
    """Number of elements that were read."""
    lost: Array | None = None
    """The number of elements of each cell that are in no file that can be read, as int64; None if there are none."""

    @property
    def absmax(self) -> Array:
        """The greatest absolute value in each cell."""
        found: Array = np.maximum(np.abs(self.low), np.abs(self.high))
        return found

    def values(self, how: str) -> Array:
        """Return the values by the name of the pooling: "mean", "min", "max" or "absmax". Raises DataError."""
        found = {"mean": self.mean, "min": self.low, "max": self.high}.get(how)
        if found is not None:
            return found
        if how == "absmax":
            return self.absmax
        raise DataError(f"there is no pooling {how!r}: it is one of mean, min, max, absmax")


def row_length(shape: Sequence[int]) -> int | None:
    """Return in how many columns a tensor of this shape, in numbers, is drawn nearly as a square; None if it has other
    than one dimension, or is short enough for one row.

    >>> row_length((1000,)), row_length((64,)), row_length((1000, 2))
    (32, None, None)
    """
    if len(shape) != 1 or shape[0] <= _ROW:
        return None
    return int(1 << (isqrt(shape[0] - 1)).bit_length())


def pooled(
    t: LazyArray,
    rows: int = 512,
    cols: int = 512,
    *,
    dims: tuple[int, int] | None = None,
    at: Mapping[int, int] | None = None,
    wrap: int | None = None,
    window: Window | None = None,
    exact: bool = True,
    check: Callable[[], None] | None = None,
    executor: Executor | None = None,
    memory: int | str | None = None,
    lost: bool = False,
) -> Pixels:
    """Pool the elements of a tensor, or of a window of it, in a grid of cells.

    Only the elements of the window are read, each once. Memory is that of the grid and of the tasks in flight.

    Parameters
    ----------
    t
        The tensor.
    rows, cols
        The number of rows and columns of the grid, at most 2,048 (`SIDE`). There are no more than the window has.
    dims, at, wrap
        How the tensor is drawn: see `plane_of`.
    window
        The rows and columns to draw, as ``((first, end), (first, end))``. By default all.
    exact
        False reads about 32 MiB of a larger window: some of the rows of each cell, and some of the columns of long
        rows. The result says whether it is exact.
    check
        Called between blocks; what it raises ends the work.
    executor, memory
        See `WriteOptions`.
    lost
        True leaves out the elements that are in no file that can be read, and counts them; by default they raise
        MissingFileError, as always those of computed tensors and of packed floats.

    Raises
    ------
    DataError
        The arguments do not fit the tensor, or the elements are no numbers.
    LazyckptError
        What reading raises.
    """
    plane = plane_of(t, dims, at, wrap)
    if not (1 <= rows <= SIDE and 1 <= cols <= SIDE):
        raise DataError(f"a grid of {rows:,} x {cols:,} cells: it has 1 to {SIDE:,} rows and columns")
    span = checked(plane, window)
    (r0, r1), (c0, c1) = span
    row_edges, col_edges = (even_cells(a, b, n) for (a, b), n in zip(span, (rows, cols), strict=True))
    if 0 in (r1 - r0, c1 - c0) or 0 in number_shape(t):
        empty = np.zeros((len(row_edges) - 1, len(col_edges) - 1))
        nothing = np.full_like(empty, np.nan)
        count = empty.astype(np.int64)
        return Pixels(plane, row_edges, col_edges, nothing, nothing, nothing, count, None, None, True, 0)
    source = source_of(t, plane, span, row_edges, exact, col_edges)
    groups = Groups.of(source, row_edges, col_edges)
    spans = range(len(row_edges) - 1), range(len(col_edges) - 1)
    cells: _Cells | None = None

    def merge(some: _Cells) -> None:
        nonlocal cells
        if cells is None and some.spans == spans:  # it is all: of a large grid, memory for two would be much
            cells = some
        else:
            cells = cells or _Cells(groups, *spans)
            cells.merge(some)

    size = CELL * len(spans[0]) * len(spans[1])
    lose = _Cells.lose if lost else None
    fold_all(t, source, partial(_Cells.of, groups), merge, check, executor, memory, size, lose)
    cells = cells or _Cells(groups, *spans)  # the end of a wrapped tensor may have no elements
    count = source.counts(groups.edges)
    if cells.lost is not None:
        count = count - cells.lost
    finite = count if cells.nan is None or cells.inf is None else count - cells.nan - cells.inf
    some = finite > 0
    low, high, mean = cells.low, cells.high, cells.total
    with np.errstate(invalid="ignore", divide="ignore"):
        mean /= finite
    for one in (low, high, mean):
        np.copyto(one, np.nan, where=~some)
        one += 0.0  # makes 0 of -0
    exact = source.complete
    return Pixels(
        plane, row_edges, col_edges, low, high, mean, count, cells.nan, cells.inf, exact, int(count.sum()), cells.lost
    )


# -- Cells.


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups into which each dimension of a source is divided, one for each row or column of the grid."""

    edges: tuple[Array, ...]
    row: int | None
    col: int | None

    @classmethod
    def of(cls, source: Source, row_edges: Array, col_edges: Array) -> Groups:
        edges = [np.array([0, n]) for n in source.shape]
        for d, one in ((source.row, row_edges), (source.col, col_edges)):
            if d is not None:
                edges[d] = source.positions(d, one)
        return cls(tuple(edges), source.row, source.col)

    def within(self, box: Box, dim: int | None) -> range:
        """Return the groups along a dimension that a box meets."""
        if dim is None:
            return range(1)
        edges = self.edges[dim]
        first = int(np.searchsorted(edges, box.start[dim], "right")) - 1
        return range(first, int(np.searchsorted(edges, box.stop[dim], "left")))

    def span(self, boxes: Sequence[Box]) -> tuple[range, range]:
        """Return the groups of rows and of columns from the first to the last one that some boxes meet."""
        rows, cols = ([self.within(box, d) for box in boxes] for d in (self.row, self.col))
        first, second = (range(min(r.start for r in one), max(r.stop for r in one)) for one in (rows, cols))
        return first, second

    def starts(self, box: Box) -> list[Array]:
        """Return where the groups of each dimension begin in a box."""
        found = []
        for d, edges in enumerate(self.edges):
            groups = self.within(box, d)
            found.append(np.maximum(edges[groups.start : groups.stop] - box.start[d], 0))
        return found

    def matrix(self, reduced: Array) -> Array:
        """Return a reduced block as rows and columns of cells."""
        n_rows = 1 if self.row is None else reduced.shape[self.row]
        n_cols = 1 if self.col is None else reduced.shape[self.col]
        if self.row is not None and self.col is not None and self.row > self.col:
            return reduced.reshape(n_cols, n_rows).T
        return reduced.reshape(n_rows, n_cols)


def reduced(operation: Any, block: Array, starts: Sequence[Array], dtype: Any = None) -> Array:
    """Apply an operation of numpy to the elements of each group."""
    axis = next((d for d, n in enumerate(block.shape) if n > 1), block.ndim)
    if axis + 1 >= block.ndim or block.size <= _PART or len(starts[axis]) in (1, block.shape[axis]):
        return _reduced(operation, block, starts, dtype)
    first, ahead, parts = starts[axis], (slice(None),) * axis, []  # some groups at a time: results take memory
    ends = np.append(first[1:], block.shape[axis])
    step = max(1, _PART * block.shape[axis] // block.size)
    n = 0
    while n < len(first):
        begin = first[n]
        stop = max(n + 1, int(np.searchsorted(ends, begin + step, "right")))
        some = [*starts[:axis], first[n:stop] - begin, *starts[axis + 1 :]]
        parts.append(_reduced(operation, block[(*ahead, slice(begin, ends[stop - 1]))], some, dtype))
        n = stop
    return np.concatenate(parts, axis=axis)


def _reduced(operation: Any, block: Array, starts: Sequence[Array], dtype: Any) -> Array:
    for d, first in enumerate(starts):
        if len(first) == block.shape[d]:
            continue
        if len(first) == 1:
            block = operation.reduce(block, axis=d, keepdims=True, dtype=dtype)
        elif d == len(starts) - 1:
            block = operation.reduceat(block, first, axis=d, dtype=dtype)
        else:
            ends = [*first[1:], block.shape[d]]
            ahead = (slice(None),) * d
            parts = [
                operation.reduce(block[(*ahead, slice(a, b))], axis=d, keepdims=True, dtype=dtype)
                for a, b in zip(first, ends, strict=True)
            ]
            block = np.concatenate(parts, axis=d)
    return block


class _Cells:
    """Least and greatest finite element, and sum, of cells. ``top`` and ``left`` are the numbers of the first ones."""

    def __init__(self, groups: Groups, rows: range, cols: range) -> None:
        self._groups, self.spans = groups, (rows, cols)
        self.top, self.left = rows.start, cols.start
        shape = len(rows), len(cols)
        self.low, self.high = np.full(shape, np.inf), np.full(shape, -np.inf)
        self.total = np.zeros(shape)
        self.nan: Array | None = None
        self.inf: Array | None = None
        self.lost: Array | None = None

    @classmethod
    def of(cls, groups: Groups, boxes: Sequence[Box]) -> _Cells:
        """Return the empty cells that some boxes meet."""
        return cls(groups, *groups.span(boxes))

    def add(self, box: Box, block: Array) -> None:
        groups = self._groups
        starts = groups.starts(box)
        low, high = reduced(np.minimum, block, starts), reduced(np.maximum, block, starts)
        nan = inf = None
        with np.errstate(over="ignore", invalid="ignore"):
            if not (np.isfinite(low).all() and np.isfinite(high).all()):
                good = np.isfinite(block)
                low = reduced(np.minimum, np.where(good, block, np.inf), starts)
                high = reduced(np.maximum, np.where(good, block, -np.inf), starts)
                odd = np.isnan(block)
                nan = reduced(np.add, odd, starts, np.int64)
                inf = reduced(np.add, ~good & ~odd, starts, np.int64)
                block = np.where(good, block, 0)
            total = reduced(np.add, block, starts, np.float64)
            found = (None if one is None else groups.matrix(one) for one in (low, high, total, nan, inf))
            self._merge(groups.within(box, groups.row).start, groups.within(box, groups.col).start, *found)

    def lose(self, box: Box) -> None:
        """Count the elements of a box as lost."""
        groups = self._groups
        for one in tiles(box.shape, _TOGETHER):
            some = one.shift(box.start)
            lost = groups.matrix(reduced(np.add, np.ones(some.shape, np.uint8), groups.starts(some), np.int64))
            self._lose(groups.within(some, groups.row).start, groups.within(some, groups.col).start, lost)

    def _lose(self, top: int, left: int, lost: Array) -> None:
        top, left = top - self.top, left - self.left
        if self.lost is None:
            self.lost = np.zeros(self.low.shape, np.int64)
        self.lost[top : top + lost.shape[0], left : left + lost.shape[1]] += lost

    def merge(self, other: _Cells) -> None:
        """Add the elements of other cells."""
        if other.lost is not None:
            self._lose(other.top, other.left, other.lost)
        with np.errstate(over="ignore", invalid="ignore"):
            self._merge(other.top, other.left, other.low, other.high, other.total, other.nan, other.inf)

    def _merge(
        self, top: int, left: int, low: Any, high: Any, total: Any, nan: Array | None, inf: Array | None
    ) -> None:
        top, left = top - self.top, left - self.left
        at = slice(top, top + low.shape[0]), slice(left, left + low.shape[1])
        np.minimum(self.low[at], low, out=self.low[at])
        np.maximum(self.high[at], high, out=self.high[at])
        self.total[at] += total
        if nan is not None and inf is not None:
            if self.nan is None or self.inf is None:
                self.nan, self.inf = np.zeros(self.low.shape, np.int64), np.zeros(self.low.shape, np.int64)
            self.nan[at] += nan
            self.inf[at] += inf
