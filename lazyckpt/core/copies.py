"""A step of a plan: the copy of a block of an extent to a block of the output. No I/O."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .box import Shape
from .extents import Extent


class Copy(NamedTuple):
    """A copy of a strided block of an extent to index ``at`` of the output.

    ``shape`` is the block's shape. ``start``, its first element in the extent, and ``strides`` are in elements; the
    position in the file, in bytes, is ``extent.offset + start * itemsize``. In a dimension that a list selects,
    ``lists`` has the ascending positions of its elements, the first 0, in units of the stride; None in others.
    """

    extent: Extent
    start: int
    shape: Shape
    strides: Shape
    at: Shape
    lists: tuple[NDArray[np.int64] | None, ...] = ()

    @property
    def sparse(self) -> bool:
        """Whether a list selects elements of a dimension."""
        return any(positions is not None for positions in self.lists)

    @property
    def lengths(self) -> Shape:
        """The lengths of the dimensions in the file: from the first to the last element of a list."""
        if not self.lists:
            return self.shape
        pairs = zip(self.shape, self.lists, strict=True)
        return tuple(n if positions is None else int(positions[-1]) + 1 for n, positions in pairs)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(a, a + n) for a, n in zip(self.at, self.shape, strict=True))


def even(copy: Copy) -> Copy:
    """Return the copy with strides in place of lists of evenly spaced positions."""
    if not copy.sparse:
        return copy._replace(lists=())
    strides, lists = list(copy.strides), list(copy.lists)
    for d, positions in enumerate(lists):
        if positions is not None:
            step = int(positions[1]) if len(positions) > 1 else 1
            if len(positions) < 3 or (np.diff(positions) == step).all():
                strides[d], lists[d] = strides[d] * step, None
    found = copy._replace(strides=tuple(strides), lists=tuple(lists))
    return found if found.sparse else found._replace(lists=())
