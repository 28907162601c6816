"""Indices along an axis, as operations need them: their groups, and whether they are evenly spaced."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .box import Axis, Selection, Shape


def indices(axis: Axis) -> NDArray[np.int64]:
    """Return the indices of an axis as an array.

    >>> indices(range(2, 8, 3))
    array([2, 5])
    """
    return np.arange(axis.start, axis.stop, axis.step) if isinstance(axis, range) else axis


def grouped(axis: Axis, size: int) -> tuple[Axis, NDArray[np.int64]]:
    """Return the groups of ``size`` neighbours that the indices are in, and the position in them of each index's group.

    >>> grouped(range(100, 300), 128)
    (range(0, 3), array([0, 0, ...2]))
    """
    groups = groups_of(axis, size)
    if isinstance(groups, range) and groups.step == 1:  # no group is left out
        return groups, indices(axis) // size - groups.start
    return groups, np.searchsorted(indices(groups), indices(axis) // size)


def groups_of(axis: Axis, size: int) -> Axis:
    """Return the groups of ``size`` neighbours that the indices are in.

    >>> groups_of(range(100, 300), 128)
    range(0, 3)
    """
    if isinstance(axis, range) and len(axis) and axis.step <= size:  # no group is left out
        return range(axis.start // size, axis[-1] // size + 1)
    return as_axis(np.unique(indices(axis) // size))


def as_axis(found: NDArray[np.int64]) -> Axis:
    """Return ascending indices as a range if they are evenly spaced.

    >>> as_axis(np.array([3, 5, 7]))
    range(3, 8, 2)
    """
    if len(found) < 2:
        return range(int(found[0]), int(found[0]) + 1) if len(found) else range(0)
    step = int(found[1]) - int(found[0])
    if (np.diff(found) == step).all():
        return range(int(found[0]), int(found[-1]) + 1, step)
    return found


def everything(shape: Shape) -> Selection:
    """Return the selection of all elements."""
    return tuple(map(range, shape))


def shape_of(want: Selection) -> Shape:
    """Return the shape of a selection."""
    return tuple(map(len, want))
