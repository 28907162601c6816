"""The C-order ravel of a tensor: the numbers of selected elements in it, and the blocks of neighbours that they are in.

Whole rows, which most reads select, are intervals of the ravel. They are ranges here, not arrays of numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ..axes import as_axis, indices
from ..box import Axis, Selection, Shape, c_strides

Numbers = NDArray[np.int64]


def numbers_of(shape: Shape, want: Selection) -> Axis:
    """Return the C-order numbers of selected elements; as a range if they are an interval."""
    d = next((d for d, axis in enumerate(want) if len(axis) > 1), len(shape) - 1)
    axis = want[d]
    whole = all(len(inner) == n for inner, n in zip(want[d + 1 :], shape[d + 1 :], strict=True))
    if whole and isinstance(axis, range) and (axis.step == 1 or len(axis) == 1):
        strides = c_strides(shape)
        first = sum(one[0] * stride for one, stride in zip(want, strides, strict=True))
        return range(int(first), int(first) + len(axis) * strides[d])
    return raveled(shape, want)


def raveled(shape: Shape, want: Selection) -> Numbers:
    """Return the C-order numbers of selected elements, in order."""
    total = np.zeros(1, np.int64)
    for axis, stride in zip(want, c_strides(shape), strict=True):
        total = (total[:, None] + indices(axis) * stride).ravel()
    return total


def blocks_of(numbers: Axis, size: int) -> Axis:
    """Return the blocks of ``size`` neighbours that ascending numbers are in.

    >>> blocks_of(range(6, 13), 4)
    range(1, 4)
    """
    if isinstance(numbers, range) and numbers.step == 1:
        return range(numbers.start // size, (numbers.stop - 1) // size + 1)
    return distinct(indices(numbers) // size)


def positions(numbers: Axis, have: Axis, size: int) -> Numbers:
    """Return the position in ``have`` of each number's block of ``size``."""
    found = indices(numbers) // size
    if isinstance(have, range):
        return (found - have.start) // have.step
    return np.searchsorted(have, found)


def distinct(numbers: Numbers) -> Axis:
    """Return the distinct of some numbers, ascending."""
    ascending = numbers if (numbers[1:] >= numbers[:-1]).all() else np.sort(numbers)
    return as_axis(ascending[np.concatenate(([True], ascending[1:] != ascending[:-1]))])


def union(ranges: Sequence[range]) -> Axis:
    """Return the distinct indices of ranges, ascending."""
    if len(ranges) == 1:
        return ranges[0]
    return as_axis(np.unique(np.concatenate([indices(one) for one in ranges])))


def slice_of(part: range, have: Axis) -> slice:
    """Return where an interval of indices is in ``have``, which has it all."""
    first = int(positions(range(part.start, part.start + 1), have, 1)[0])
    return slice(first, first + len(part))


def rows_of(numbers: range, columns: int) -> Iterator[tuple[range, range]]:
    """Yield the blocks of a matrix that an interval of its ravel consists of, in order: rows and columns.

    >>> list(rows_of(range(3, 14), 5))
    [(range(0, 1), range(3, 5)), (range(1, 2), range(0, 5)), (range(2, 3), range(0, 4))]
    """
    at = numbers.start
    while at < numbers.stop:
        row, column = divmod(at, columns)
        if column or numbers.stop - at < columns:
            last = min(columns, column + numbers.stop - at)
            yield range(row, row + 1), range(column, last)
            at += last - column
        else:
            count = (numbers.stop - at) // columns
            yield range(row, row + count), range(columns)
            at += count * columns
