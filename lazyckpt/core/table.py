"""Plans of tensors with many fragments, as columns of numbers: no object is made for a fragment before it is read.

A `Table` has a row for every block of a tensor that lies in a file as raw elements. `choose` intersects the rows with a
selection and returns the copies that fill it, in tens of nanoseconds a row. It covers the usual case only: blocks that
do not overlap and together hold every selected element. The general plan (plan.py) does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from .box import Box, Selection, Shape, c_strides
from .copies import Copy, even
from .dtypes import DType
from .extents import Extent

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Blocks of a tensor that do not overlap.

    Attributes
    ----------
    paths
        The files.
    files
        The number of the file of each block; shape [blocks].
    offsets
        The position of each block's first element in its file, in bytes; shape [blocks].
    starts, stops
        The blocks, in indices of the tensor; shape [blocks, dimensions].
    strides
        The distances of the elements in the file, in elements; shape [blocks, dimensions].
    dtype
        The dtype in the files.
    packed
        Of a table of archives that are not located yet: a function that returns the extent of a block of this table,
        given its number, and ``numbers`` of the blocks. ``offsets`` then count from the start of that extent.
    """

    paths: Sequence[str]
    files: Ints
    offsets: Ints
    starts: Ints
    stops: Ints
    strides: Ints
    dtype: DType
    packed: Callable[[int], Extent] | None = None
    numbers: Ints | None = None

    def __len__(self) -> int:
        return len(self.files)

    def rows(self, chosen: Any) -> Table:
        """Return the table of some rows, in any form that numpy takes as an index."""
        return replace(
            self,
            files=self.files[chosen], offsets=self.offsets[chosen], starts=self.starts[chosen],
            stops=self.stops[chosen], strides=self.strides[chosen],
            numbers=None if self.numbers is None else self.numbers[chosen],
        )  # fmt: skip

    def moved(self, block: Box, start: Shape) -> Table:
        """Return the parts of the blocks inside a block, which begins at index ``start`` of another tensor."""
        low, high = np.array(block.start, np.int64), np.array(block.stop, np.int64)
        starts, stops = np.maximum(self.starts, low), np.minimum(self.stops, high)
        ahead = ((starts - self.starts) * self.strides).sum(1) * self.dtype.itemsize
        by = np.array(start, np.int64) - low
        found = replace(self, offsets=self.offsets + ahead, starts=starts + by, stops=stops + by)
        return found.rows((starts < stops).all(1))


def joined(tables: Sequence[Table]) -> Table | None:
    """Return tables whose blocks do not overlap as one; None if they differ in dtype, or have archives."""
    first = tables[0]
    if any(table.dtype is not first.dtype or table.packed is not None for table in tables):
        return None
    counts = np.cumsum([0, *(len(table.paths) for table in tables)])
    return Table(
        [path for table in tables for path in table.paths],
        np.concatenate([table.files + n for table, n in zip(tables, counts[:-1], strict=True)]),
        np.concatenate([table.offsets for table in tables]),
        np.concatenate([table.starts for table in tables]),
        np.concatenate([table.stops for table in tables]),
        np.concatenate([table.strides for table in tables]),
        first.dtype,
    )


class Runs(NamedTuple):
    """Contiguous runs that a plan copies, in the order of files and offsets; adjacent ones are joined.

    ``files``, ``offsets`` in the file, ``at`` in the output and ``nbytes`` have one number for each run, in bytes.
    ``rest`` has the numbers of the copies that are no runs.
    """

    files: Ints
    offsets: Ints
    at: Ints
    nbytes: Ints
    rest: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Copies(Sequence[Copy]):
    """The copies of a plan as columns; a `Copy` is made when it is asked for.

    ``offsets`` are in bytes, ``shapes``, ``strides`` and ``at`` as in `Copy`, with one row for each copy. ``lists`` has
    the selected indices of each dimension that a list selects, else None.
    """

    table: Table
    offsets: Ints
    shapes: Ints
    strides: Ints
    at: Ints
    lists: tuple[Ints | None, ...]

    def runs(self, shape: Shape) -> Runs:
        """Return the copies that are one contiguous run both in the file and in an output of this shape, in C order."""
        inner = np.ones_like(self.shapes)
        if self.shapes.shape[1]:
            inner[:, :-1] = np.cumprod(self.shapes[:, :0:-1], axis=1)[:, ::-1]
        single, size = self.shapes == 1, self.table.dtype.itemsize
        strides = np.array(c_strides(shape), np.int64)
        whole = (single | ((self.strides == inner) & (strides == inner))).all(1)
        for d, axis in enumerate(self.lists):
            if axis is not None:
                whole &= single[:, d]
        chosen = np.flatnonzero(whole)
        at = (self.at[chosen] * strides).sum(1) * size
        files, offsets, nbytes = self.table.files[chosen], self.offsets[chosen], self.shapes[chosen].prod(1) * size
        order = np.lexsort((offsets, files))
        files, offsets, nbytes, at = files[order], offsets[order], nbytes[order], at[order]
        begins = np.ones(len(files), bool)  # a run that does not continue the one before
        begins[1:] = (files[1:] != files[:-1]) | (offsets[1:] != offsets[:-1] + nbytes[:-1])
        begins[1:] |= at[1:] != at[:-1] + nbytes[:-1]
        first = np.flatnonzero(begins)
        total = np.add.reduceat(nbytes, first) if len(first) else nbytes
        return Runs(files[first], offsets[first], at[first], total, np.flatnonzero(~whole))

    def __len__(self) -> int:
        return len(self.offsets)

    @overload
    def __getitem__(self, n: int) -> Copy: ...
    @overload
    def __getitem__(self, n: slice) -> list[Copy]: ...
    def __getitem__(self, n: Any) -> Any:
        if isinstance(n, slice):
            return [self[m] for m in range(*n.indices(len(self)))]
        table = self.table
        shape, strides, at = (tuple(column[n].tolist()) for column in (self.shapes, self.strides, self.at))
        lists: tuple[Ints | None, ...] = ()
        lengths = shape
        if any(axis is not None for axis in self.lists):
            lists = tuple(
                None if axis is None else axis[a : a + m] - axis[a]
                for axis, a, m in zip(self.lists, at, shape, strict=True)
            )
            lengths = tuple(m if one is None else int(one[-1]) + 1 for m, one in zip(shape, lists, strict=True))
        if table.packed is not None and table.numbers is not None:
            whole = table.packed(int(table.numbers[n]))
            return even(Copy(whole, int(self.offsets[n]) // table.dtype.itemsize, shape, strides, at, lists))
        extent = Extent(table.paths[int(table.files[n])], int(self.offsets[n]), table.dtype, lengths, strides)
        return even(Copy(extent, 0, shape, strides, at, lists))

    def __iter__(self) -> Iterator[Copy]:
        return map(self.__getitem__, range(len(self)))


def choose(table: Table, want: Selection) -> Copies | None:
    """Return the copies that fill a selection; None if the table does not hold all selected elements."""
    low, high, first, steps = [], [], [], []
    for d, axis in enumerate(want):
        a, b = table.starts[:, d], table.stops[:, d]
        if isinstance(axis, range):
            low.append(np.maximum(-((axis.start - a) // axis.step), 0))
            high.append(np.minimum(-((axis.start - b) // axis.step), len(axis)))
            first.append(axis.start + low[-1] * axis.step)
            steps.append(axis.step)
        else:
            low.append(np.searchsorted(axis, a))
            high.append(np.searchsorted(axis, b))
            first.append(axis[np.minimum(low[-1], len(axis) - 1)])
            steps.append(1)
    shape = np.shape(table.starts)
    at = np.stack(low, 1) if low else np.zeros(shape, np.int64)
    shapes = np.stack(high, 1) - at if high else np.zeros(shape, np.int64)
    held = (shapes > 0).all(1)
    if not held.all():
        table, at, shapes = table.rows(held), at[held], shapes[held]
        first = [one[held] for one in first]
    if int(shapes.prod(1).sum()) != int(np.prod([len(axis) for axis in want], dtype=np.int64)):
        return None
    ahead = (np.stack(first, 1) - table.starts) * table.strides if first else np.zeros((len(table), 0), np.int64)
    offsets = table.offsets + ahead.sum(1) * table.dtype.itemsize
    lists = tuple(None if isinstance(axis, range) else axis for axis in want)
    return Copies(table, offsets, shapes, table.strides * np.array(steps, np.int64), at, lists)


def spans(shape: Shape, low: Ints, high: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Return flat intervals of a C-order array of ``shape`` as boxes, in flat order.

    ``low`` and ``high`` are the ends of the intervals. Returns, for each box, the number of its interval, the place of
    its first element in the ravel, its start and its stop. `box.span_boxes` does the same for one interval.
    """
    strides = c_strides(shape)
    at, alive = low, np.ones(len(low), bool)
    cuts = [low]
    for stride in reversed(strides):
        up = -(-at // stride) * stride
        alive = alive & (up <= high)
        at = np.where(alive, up, at)
        cuts.append(at)
    for stride in strides:
        at = np.maximum(at, high // stride * stride)
        cuts.append(at)
    ends = np.stack(cuts)
    a, b = ends[:-1].T.ravel(), ends[1:].T.ravel()
    numbers = np.repeat(np.arange(len(low)), len(cuts) - 1)
    real = a < b
    a, b, numbers = a[real], b[real], numbers[real]
    rest, last = a, b - 1
    starts, stops = [], []
    for stride in strides:
        starts.append(rest // stride)
        stops.append(last // stride + 1)
        rest, last = rest % stride, last % stride
    size = len(a), len(shape)
    return (
        numbers, a,
        np.stack(starts, 1) if starts else np.zeros(size, np.int64),
        np.stack(stops, 1) if stops else np.zeros(size, np.int64),
    )  # fmt: skip
