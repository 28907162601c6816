"""Norms of the rows and columns of a tensor, its largest elements, and its elements that are not finite."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ..core.box import Box, Shape, c_strides
from ..errors import DataError
from ..lazy import LazyArray
from .moments import WIDE
from .numbers import Array, number_shape
from .pixels import Groups, reduced
from .planes import Plane, Window, checked, even_cells, fold_all, plane_of, source_of

GROUPS = 8192
"""Maximum number of rows, and of columns, whose norms are computed apart; of more, those of groups are."""
_LISTED = 10_000  # maximum number of elements that are listed
_PART = (
    1 << 17
)  # elements that are squared, or among which the largest are sought, at a time: what they become takes memory


# -- Rows and columns.


@dataclass(frozen=True, slots=True, eq=False)
class Norms:
    """The L2 norms of the rows and of the columns of a tensor, of their finite elements.

    If there are more than were asked for, those of groups of consecutive ones: the root mean square of their norms.
    """

    plane: Plane
    """Which dimensions are the rows and the columns."""
    row_edges: Array
    """The rows between which the groups lie: int64, one more than there are groups."""
    col_edges: Array
    """The same for columns."""
    rows: Array
    """The norm of each row, or of the rows of each group, as float64; infinite only if float64 cannot hold it."""
    cols: Array
    """The same for columns."""


def norms(
    t: LazyArray,
    rows: int = GROUPS,
    cols: int = GROUPS,
    *,
    dims: tuple[int, int] | None = None,
    at: Mapping[int, int] | None = None,
    wrap: int | None = None,
    window: Window | None = None,
    check: Callable[[], None] | None = None,
    executor: Executor | None = None,
    memory: int | str | None = None,
) -> Norms:
    """Compute the norms of the rows and columns of a tensor, or of a window of it, in one pass.

    Parameters
    ----------
    t
        The tensor.
    rows, cols
        The number of groups of rows and of columns, at most 8,192 (`GROUPS`).
    dims, at, wrap, window, check, executor, memory
        See `pixels.pooled`. Elements along pooled dimensions belong to the same row and column.

    Raises
    ------
    DataError
        The arguments do not fit the tensor, or the elements are no numbers.
    LazyckptError
        What reading raises.
    """
    plane = plane_of(t, dims, at, wrap)
    if not (1 <= rows <= GROUPS and 1 <= cols <= GROUPS):
        raise DataError(f"rows={rows:,}, cols={cols:,}: norms are computed of 1 to {GROUPS:,} groups")
    span = checked(plane, window)
    row_edges, col_edges = (even_cells(a, b, n) for (a, b), n in zip(span, (rows, cols), strict=True))
    edges = row_edges, col_edges
    sides = [_Sums.of(len(one) - 1) for one in edges]
    if 0 not in (len(row_edges) - 1, len(col_edges) - 1, *number_shape(t)):
        source = source_of(t, plane, span, row_edges)
        groups = Groups.of(source, row_edges, col_edges)
        whole = _Squares(groups, *(range(len(one) - 1) for one in edges))
        fold_all(t, source, partial(_Squares.of, groups), whole.merge, check, executor, memory)
        sides = [whole.rows, whole.cols]
    return Norms(plane, *edges, *(side.root(np.diff(one)) for side, one in zip(sides, edges, strict=True)))


class _Sums(NamedTuple):
    """Sums of squares, each in units of 4 to the power of its exponent: see `moments.Moments`."""

    sums: Array
    exponents: Array

    @classmethod
    def of(cls, size: int) -> _Sums:
        return cls(np.zeros(size), np.zeros(size, np.int32))

    def add(self, first: int, sums: Array, exponents: Array | None) -> None:
        """Add some sums from number ``first`` on, whose exponents are 0 if None is given."""
        at = slice(first, first + len(sums))
        mine, own = self.sums[at], self.exponents[at]
        if exponents is None and not own.any():
            mine += sums
            return
        theirs = np.zeros_like(own) if exponents is None else exponents
        common = np.where(mine == 0, theirs, np.where(sums == 0, own, np.maximum(own, theirs)))
        mine[:] = np.ldexp(mine, 2 * (own - common)) + np.ldexp(sums, 2 * (theirs - common))
        own[:] = common

    def root(self, counts: Array) -> Array:
        """Return the roots of the sums, each divided by a count."""
        with np.errstate(over="ignore"):
            found: Array = np.ldexp(np.sqrt(self.sums / counts), self.exponents)
        return found


class _Squares:
    """Sums of squares of the finite elements of groups of rows and of columns."""

    def __init__(self, groups: Groups, rows: range, cols: range) -> None:
        self._groups, self._top, self._left = groups, rows.start, cols.start
        self.rows, self.cols = _Sums.of(len(rows)), _Sums.of(len(cols))

    @classmethod
    def of(cls, groups: Groups, boxes: Sequence[Box]) -> _Squares:
        return cls(groups, *groups.span(boxes))

    def add(self, box: Box, block: Array) -> None:
        groups = self._groups
        starts = groups.starts(box)
        sides = (
            (self.rows, groups.row, groups.col, self._top),
            (self.cols, groups.col, groups.row, self._left),
        )
        ones = [[np.zeros(1, np.int64) if d == side[2] else one for d, one in enumerate(starts)] for side in sides]
        with np.errstate(over="ignore", invalid="ignore"):  # numpy warns of signaling NaN, too
            sums = _sums_of_squares(block, ones)
            for (side, dim, _, first), groups_of, found in zip(sides, ones, sums, strict=True):
                at = groups.within(box, dim).start - first
                scaled = _scaled(block, groups_of) if block.dtype == np.float64 else None
                if scaled is None:
                    side.add(at, found.reshape(-1), None)
                else:
                    side.add(at, scaled[0].reshape(-1), scaled[1].reshape(-1))

    def merge(self, other: _Squares) -> None:
        with np.errstate(over="ignore"):
            self.rows.add(other._top - self._top, *other.rows)
            self.cols.add(other._left - self._left, *other.cols)


def _scaled(block: Array, starts: Sequence[Array]) -> tuple[Array, Array] | None:
    """Return the sums of squares of the finite elements of groups, in units of 4 to the power of exponents, and these
    exponents (see `moments.exponent_of`); None if all are 0."""
    finite = np.isfinite(block)
    numbers = block if finite.all() else np.where(finite, block, 0)
    largest = np.maximum(reduced(np.maximum, numbers, starts), -reduced(np.minimum, numbers, starts))
    exponents = np.frexp(largest)[1]
    found: Array = np.where(np.abs(exponents) > WIDE, exponents, 0)
    if not found.any():
        return None
    wide = found
    for d, (one, n) in enumerate(zip(starts, block.shape, strict=True)):
        wide = np.repeat(wide, np.diff([*one, n]), d)
    return reduced(np.add, np.square(np.ldexp(numbers, -wide)), starts), found


def _sums_of_squares(block: Array, sides: Sequence[Sequence[Array]]) -> list[Array]:
    """Return the sums of the squares of the finite elements of groups, for each way to divide the block into groups:
    those of `reduced`, bit for bit. Squares of the whole block would take memory."""
    axis = next((d for d, n in enumerate(block.shape) if n > 1), 0)
    rows = block.reshape(block.shape[axis:])
    elements = prod(rows.shape[1:])
    if block.size <= _PART or elements == 1:  # numpy adds the elements of a line in an order of its own
        squares = _squares(block, np.empty(block.shape))
        return [reduced(np.add, squares, starts) for starts in sides]
    step = max(1, _PART // elements)
    room = np.empty((step + 1, *rows.shape[1:]))
    running = [_Running(starts[axis:], len(rows)) for starts in sides]
    for begin in range(0, len(rows), step):
        some = rows[begin : begin + step]
        _squares(some, room[1 : len(some) + 1])
        for one in running:
            one.add(room[: len(some) + 1])
    return [np.concatenate(one.parts) for one in running]


def _squares(block: Array, out: Array) -> Array:
    """Compute the squares of the finite elements, and 0 of the others, as float64."""
    out[...] = block
    np.square(out, out=out)
    if not np.isfinite(out.sum()):
        out[~np.isfinite(block)] = 0
    return out


class _Running:
    """Sums of groups of a block whose rows come in parts. Rows of a group are added one after the other, as numpy adds
    those of a whole block.

    Parameters
    ----------
    starts
        Where the groups of each dimension begin.
    count
        The number of rows.
    """

    def __init__(self, starts: Sequence[Array], count: int) -> None:
        self._ends = [*starts[0][1:].tolist(), count]
        self._later = starts[1:]
        self._row = self._group = 0
        self._open: Array | None = None  # the sum of the rows of a group that has more
        self.parts: list[Array] = []

    def add(self, room: Array) -> None:
        """Add rows, which follow a first one in ``room`` that is free."""
        begin, end, sums = self._row, self._row + len(room) - 1, []
        if len(self._ends) == self._ends[-1]:  # each row is a group
            self.parts.append(reduced(np.add, room[1:], [np.arange(end - begin), *self._later]))
            self._row = end
            return
        while self._row < end:
            stop = min(end, self._ends[self._group])
            low = self._row - begin + 1
            if self._open is not None:
                room[0], low = self._open, 0
            total = np.add.reduce(room[low : stop - begin + 1], axis=0, keepdims=True)
            self._open = total if stop < self._ends[self._group] else None
            if self._open is None:
                sums.append(total)
                self._group += 1
            self._row = stop
        if sums:
            self.parts.append(reduced(np.add, np.concatenate(sums), [np.arange(len(sums)), *self._later]))


# -- Outliers.


@dataclass(frozen=True, slots=True)
class Outliers:
    """The elements of a tensor with the largest absolute values, and those that are not finite."""

    indices: tuple[tuple[int, ...], ...]
    """The index of each of the largest finite elements: largest first, of equal ones the first in C order."""
    values: tuple[float, ...]
    """Their values; of complex numbers the absolute values."""
    odd_indices: tuple[tuple[int, ...], ...]
    """The indices of the first elements that are NaN or infinite."""
    odd_values: tuple[float, ...]
    """Their values."""
    nan: int
    """The number of NaN."""
    posinf: int
    """The number of positive infinities."""
    neginf: int
    """The number of negative infinities."""


def outliers(
    t: LazyArray,
    count: int = 20,
    odd: int = 20,
    *,
    check: Callable[[], None] | None = None,
    executor: Executor | None = None,
    memory: int | str | None = None,
) -> Outliers:
    """Find the largest elements of a tensor by absolute value, and the first ones that are NaN or infinite.

    Every element is read once. An index of packed 4-bit floats counts numbers, not bytes, along the last dimension.

    Parameters
    ----------
    t
        The tensor.
    count, odd
        How many of the largest elements, and of those that are not finite, to list: at most 10,000.
    check, executor, memory
        See `pixels.pooled`.

    Raises
    ------
    DataError
        The arguments are out of range, or the elements are no numbers.
    LazyckptError
        What reading raises.
    """
    if not (0 <= count <= _LISTED and 0 <= odd <= _LISTED):
        raise DataError(f"count={count:,}, odd={odd:,}: from 0 to {_LISTED:,} elements are listed")
    shape = number_shape(t)
    whole = _Largest(shape, count, odd)
    if 0 not in shape:
        plane = plane_of(t)
        span = checked(plane, None)
        source = source_of(t, plane, span, even_cells(*span[0], 1))
        fold_all(t, source, partial(_started, shape, count, odd), whole.merge, check, executor, memory)
    return whole.result()


def _started(shape: Shape, count: int, odd: int, boxes: Sequence[Box]) -> _Largest:
    return _Largest(shape, count, odd)


class _Largest:
    """The largest elements of some blocks by their index in C order."""

    def __init__(self, shape: Shape, count: int, odd: int) -> None:
        self._shape, self._strides, self._count, self._odd = shape, c_strides(shape), count, odd
        self._at, self._values = np.empty(0, np.int64), np.empty(0)
        self._odd_at, self._odd_values = np.empty(0, np.int64), np.empty(0)
        self._nan = self._posinf = self._neginf = 0

    def add(self, box: Box, block: Array) -> None:
        flat = block.reshape(-1)
        for at in range(0, len(flat), _PART):
            self._add(box, at, flat[at : at + _PART])

    def _add(self, box: Box, ahead: int, flat: Array) -> None:
        """Add elements of a box; ``ahead`` others lie before them in C order."""
        top = max(float(flat.max()), -float(flat.min()))  # NaN only if both are
        good = None
        if not np.isfinite(top) or np.isnan(flat.max()):
            good = np.isfinite(flat)
            where = np.flatnonzero(~good)
            values = flat[where]
            self._nan += int(np.isnan(values).sum())
            self._posinf += int((values == np.inf).sum())
            self._neginf += int((values == -np.inf).sum())
            rest = self._odd - len(self._odd_at)
            self._odd_at = np.concatenate([self._odd_at, self._flat(box, where[:rest] + ahead)])
            with np.errstate(invalid="ignore"):  # of signaling NaN
                self._odd_values = np.concatenate([self._odd_values, values[:rest].astype(np.float64)])
        least = abs(self._values[-1]) if len(self._values) == self._count and self._count else -1.0
        if not self._count or (good is None and top <= least):
            return
        sizes = np.abs(flat)
        if good is not None:
            sizes = np.where(good, sizes, -1.0)
        where = np.flatnonzero(sizes > least)
        if len(where) > self._count:
            some = sizes[where]
            bound = np.partition(some, len(some) - self._count)[len(some) - self._count]
            above, equal = where[some > bound], where[some == bound]
            where = np.sort(np.concatenate([above, equal[: self._count - len(above)]]))
        self._take(self._flat(box, where + ahead), flat[where].astype(np.float64))

    def _flat(self, box: Box, where: Array) -> Array:
        """Return the indices in C order of elements of a box."""
        found = np.zeros(len(where), np.int64)
        if not box.shape:
            return found
        for n, start, stride in zip(np.unravel_index(where, box.shape), box.start, self._strides, strict=True):
            found += (n + start) * stride
        return found

    def _take(self, at: Array, values: Array) -> None:
        at, values = np.concatenate([self._at, at]), np.concatenate([self._values, values])
        order = np.lexsort((at, -np.abs(values)))[: self._count]
        self._at, self._values = at[order], values[order]

    def merge(self, other: _Largest) -> None:
        self._take(other._at, other._values)
        rest = self._odd - len(self._odd_at)
        self._odd_at = np.concatenate([self._odd_at, other._odd_at[:rest]])
        self._odd_values = np.concatenate([self._odd_values, other._odd_values[:rest]])
        self._nan += other._nan
        self._posinf += other._posinf
        self._neginf += other._neginf

    def result(self) -> Outliers:
        return Outliers(
            self._indices(self._at),
            tuple(self._values.tolist()),
            self._indices(self._odd_at),
            tuple(self._odd_values.tolist()),
            self._nan,
            self._posinf,
            self._neginf,
        )

    def _indices(self, at: Array) -> tuple[tuple[int, ...], ...]:
        columns: list[Any] = []
        for n, stride in zip(self._shape, self._strides, strict=True):
            columns.append((at // stride % max(1, n)).tolist())
        return tuple(zip(*columns, strict=True)) if columns else ((),) * len(at)
