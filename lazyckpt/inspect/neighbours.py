"""The rows of a matrix that are most alike to one of them: of an embedding, the nearest tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import NamedTuple

import numpy as np

from ..core.box import Box
from ..errors import DataError
from ..lazy import LazyArray
from .numbers import Array, number_shape, numbers, packing
from .planes import checked, even_cells, fold_all, plane_of, source_of

_MOST = 1000  # rows that are listed at most


class Neighbour(NamedTuple):
    """A row, and how alike it is."""

    row: int
    """The number of the row."""
    cosine: float
    """The cosine of the angle between the two rows."""


def neighbours(
    t: LazyArray,
    row: int,
    count: int = 20,
    *,
    check: Callable[[], None] | None = None,
    executor: Executor | None = None,
    memory: int | str | None = None,
) -> list[Neighbour]:
    """Return the rows with the largest cosine to a row of a matrix, the most alike first, without the row itself.

    The matrix is read once. Memory is 16 bytes for each row, and that of the tasks in flight. Rows of zeros, rows
    with NaN or infinities, and rows whose squares float64 cannot hold are left out.

    Parameters
    ----------
    t
        The matrix.
    row
        The number of the row.
    count
        How many rows to return: at most 1,000.
    check, executor, memory
        See `pixels.pooled`.

    Raises
    ------
    DataError
        The tensor is not a matrix of numbers, has no such row, or the row has no direction.
    LazyckptError
        What reading raises.
    """
    shape = number_shape(t)
    if len(shape) != 2 or packing(t.spec.dtype) > 1 or t.spec.dtype.is_complex:
        raise DataError(f"{t.name!r} is no matrix of real numbers: it has no rows to compare")
    if not 0 <= row < shape[0]:
        raise DataError(f"{t.name!r} has the rows 0 to {shape[0] - 1:,}, and none of number {row:,}")
    if not 0 <= count <= _MOST:
        raise DataError(f"count={count:,}: from 0 to {_MOST:,} rows are listed")
    with np.errstate(over="ignore", invalid="ignore"):
        own = numbers(t[row]).astype(np.float64)
        length = float(np.linalg.norm(own))
    if not 0 < length < np.inf:
        raise DataError(f"row {row:,} of {t.name!r} is zero or not finite: it has no direction to compare")
    own /= length
    plane = plane_of(t)
    span = checked(plane, None)
    whole = _Products(own, range(shape[0]))
    source = source_of(t, plane, span, even_cells(*span[0], 1))
    fold_all(t, source, partial(_started, own), whole.merge, check, executor, memory)
    with np.errstate(invalid="ignore", divide="ignore"):
        cosines = whole.dots / np.sqrt(whole.squares)
    cosines[~np.isfinite(cosines) | ~np.isfinite(whole.squares)] = -np.inf
    cosines[row] = -np.inf
    order = np.lexsort((np.arange(len(cosines)), -cosines))[:count]
    return [Neighbour(int(n), max(-1.0, min(1.0, float(cosines[n])))) for n in order if np.isfinite(cosines[n])]


class _Products:
    """The product of each row with a direction, and its sum of squares."""

    def __init__(self, own: Array, rows: range) -> None:
        self._own, self._first = own, rows.start
        self.dots, self.squares = np.zeros(len(rows)), np.zeros(len(rows))

    def add(self, box: Box, block: Array) -> None:
        at = slice(box.start[0] - self._first, box.stop[0] - self._first)
        with np.errstate(over="ignore", invalid="ignore"):
            wide = block.astype(np.float64)
            self.dots[at] += wide @ self._own[box.start[1] : box.stop[1]]
            self.squares[at] += np.square(wide, out=wide).sum(1)

    def merge(self, other: _Products) -> None:
        at = slice(other._first - self._first, other._first - self._first + len(other.dots))
        self.dots[at] += other.dots
        self.squares[at] += other.squares


def _started(own: Array, boxes: Sequence[Box]) -> _Products:
    return _Products(own, range(min(b.start[0] for b in boxes), max(b.stop[0] for b in boxes)))
