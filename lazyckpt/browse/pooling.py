"""A tensor as a small matrix of means or of largest absolute values, from a bounded number of bytes."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt, prod
from typing import Any, Literal

import numpy as np

from ..lazy import LazyArray, shape_of
from ..show.values import as_numbers

How = Literal["mean", "absmax"]
Box = tuple[int, int, int, int]  # first row, row after the last, first column, column after the last

BYTES = 8 << 20  # bytes to read for a picture
_NARROW = 16  # elements: a last dimension that is shorter is joined with those before it, as in kernels


@dataclass(frozen=True, slots=True)
class Pooled:
    """A part of a tensor as a picture.

    Attributes
    ----------
    values
        A float64 matrix: each cell is the mean, or the largest absolute value, of the finite elements that were read of
        its part of the matrix; NaN if there are none.
    odd
        Whether a NaN or an infinity was read in the cell's part.
    box
        The part of the matrix that is shown.
    nbytes
        The bytes that were read.
    every
        1 if all rows were read; n if one of n was.
    """

    values: np.ndarray[Any, Any]
    odd: np.ndarray[Any, Any]
    box: Box
    nbytes: int
    every: int


def matrix_shape(t: LazyArray) -> tuple[int, int]:
    """Return the shape of a tensor as a matrix: leading dimensions are joined, for kernels the trailing ones. A vector
    is wrapped into rows of some length."""
    shape = shape_of(t)
    numel = prod(shape)
    if not numel:
        return 0, 0
    if len(shape) < 2:
        width = min(numel, max(1, -(-isqrt(2 * numel) // _NARROW) * _NARROW))
        return -(-numel // width), width
    first = 1 if shape[-1] < _NARROW and len(shape) > 2 else len(shape) - 1
    return prod(shape[:first]), prod(shape[first:])


def pooled(
    t: LazyArray, rows: int, cols: int, how: How = "mean", box: Box | None = None, budget: int = BYTES
) -> Pooled:
    """Read a part of a tensor as a picture.

    Parameters
    ----------
    t
        The tensor; complex numbers are represented by their absolute values.
    rows, cols
        The largest size of the picture. A smaller part has a cell for each element.
    how
        What a cell shows of its elements.
    box
        The part, in coordinates of `matrix_shape`. By default all.
    budget
        About how many bytes may be read. If the part has more, evenly spaced rows of it are read.

    Raises the errors of reading, such as MissingFileError.
    """
    height, width = matrix_shape(t)
    top, bottom, left, right = box = (0, height, 0, width) if box is None else box
    rows, cols = min(rows, bottom - top), min(cols, right - left)
    affordable = max(1, budget // max(1, (right - left) * t.itemsize))
    edges = np.linspace(top, bottom, rows + 1).astype(np.int64)
    wanted: list[int] = []
    each = max(1, affordable // rows)
    for a, b in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        count = min(b - a, each)
        wanted += [a + (2 * k + 1) * (b - a) // (2 * count) for k in range(count)] if count < b - a else range(a, b)
    if len(wanted) > affordable:  # a row of the picture is more than the share of one: neighbours share a row
        wanted = wanted[:: -(-len(wanted) // affordable)]
    lines, there = _read(t, wanted, left, right, width)
    bins = np.linspace(0, right - left, cols + 1).astype(np.int64)
    at = np.searchsorted(np.asarray(wanted), edges)
    values, odd = np.full((rows, cols), np.nan), np.zeros((rows, cols), bool)
    for n in range(rows):
        low, high = int(at[n]), int(at[n + 1])
        if low == high:  # no row of its own was read: the one before
            low = max(0, low - 1)
            high = low + 1
        last = there if high == len(lines) else right - left
        values[n], odd[n] = _cells(lines[low:high], last, bins, how)
    return Pooled(values, odd, box, len(wanted) * (right - left) * t.itemsize, -(-(bottom - top) // len(wanted)))


def _cells(block: np.ndarray[Any, Any], there: int, bins: np.ndarray[Any, Any], how: How) -> tuple[Any, Any]:
    """Return the cells of a row of the picture, and whether each has an element that is no number. The last row of
    the block has ``there`` elements, the others are full."""
    finite = np.isfinite(block)
    known = np.where(finite, block, 0)
    count = np.add.reduceat(finite.sum(axis=0), bins[:-1])
    if how == "mean":
        with np.errstate(over="ignore", invalid="ignore"):  # sums of the largest floats
            found = np.add.reduceat(known.sum(axis=0), bins[:-1]) / np.maximum(count, 1)
    else:
        found = np.maximum.reduceat(np.abs(known).max(axis=0), bins[:-1])
    finite[-1, there:] = True  # what is past the end is not odd
    odd = np.add.reduceat((~finite).sum(axis=0), bins[:-1]) > 0
    return np.where(count > 0, found, np.nan), odd


def _read(t: LazyArray, wanted: list[int], left: int, right: int, width: int) -> tuple[np.ndarray[Any, Any], int]:
    """Read the columns from ``left`` to ``right`` of some rows of the matrix as float64; and the length of the last row
    that was read, which is shorter than the others if a vector ends in it."""
    shape = shape_of(t)
    run = wanted[-1] - wanted[0] + 1 == len(wanted)
    if len(shape) < 2:
        ends = [(row * width + left, min(row * width + right, prod(shape))) for row in wanted]
        if run and (left, right) == (0, width):
            ends = [(ends[0][0], ends[-1][1])]
        parts = [_numbers(t, slice(a, b) if shape else ...).reshape(-1) for a, b in ends if a < b]
        flat = np.full(len(wanted) * (right - left), np.nan)
        values = np.concatenate(parts) if parts else flat[:0]
        flat[: len(values)] = values
        return flat.reshape(len(wanted), right - left), right - left - (len(flat) - len(values))
    rows: Any = slice(wanted[0], wanted[-1] + 1) if run else wanted
    if len(shape) == 2:
        return _numbers(t, (rows, slice(left, right))), right - left
    if matrix_shape(t)[0] == shape[0]:  # the trailing dimensions are joined
        return _numbers(t, rows).reshape(len(wanted), -1)[:, left:right], right - left
    leads: dict[int, list[int]] = {}
    for row in wanted:
        lead, inner = divmod(row, shape[-2])
        leads.setdefault(lead, []).append(inner)
    blocks = []
    for lead, rows_of in leads.items():
        whole = rows_of[-1] - rows_of[0] + 1 == len(rows_of)
        inside: Any = slice(rows_of[0], rows_of[-1] + 1) if whole else rows_of
        at = tuple(int(n) for n in np.unravel_index(lead, shape[:-2]))
        blocks.append(_numbers(t, (*at, inside, slice(left, right))))
    return np.concatenate(blocks), right - left


def _numbers(t: LazyArray, key: Any) -> np.ndarray[Any, Any]:
    array = as_numbers(t[key])
    return (np.abs(array) if array.dtype.kind == "c" else array).astype(np.float64)
