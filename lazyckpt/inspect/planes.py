"""Tensors as planes: two dimensions become rows and columns, and a window of them is read in pieces of a few MiB.

What looks at the numbers of a window (pictures, norms, outliers) is a `Fold` over its blocks. `fold_all` runs it: the
blocks are read once, in the order of the file, only those of the window, and the folds of tasks are merged in the order
of the elements. So the same tensor has the same digits on any number of threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from math import ceil, prod
from typing import Any, Protocol, TypeVar

import numpy as np

from ..core.box import Box, Shape, tiles
from ..core.dtypes import F32, F64, DType
from ..core.extents import Hole
from ..core.fragments import fragment_boxes
from ..errors import DataError, MissingFileError
from ..io.cancelling import go_on
from ..io.reading.keeping import once
from ..jobs.batching import Task
from ..jobs.executor import OVERHEAD, runner
from ..jobs.pieces import scratch
from ..jobs.places import PIECE
from ..jobs.write import RUN
from ..lazy import LazyArray
from .numbers import Array, is_narrow, number_shape, numbers, packing

Window = tuple[tuple[int, int], tuple[int, int]]
"""The rows and the columns of a part of a plane, as half-open intervals."""

CELL = 24  # bytes of a result for an element
SAMPLE = 32 << 20
"""Bytes to read of a tensor if a sample is enough."""
_BLOCK = 1 << 20  # elements that are folded at a time: of fewer rows, reducing the columns would take longer
_MOST = 1 << 44  # bytes that are read at most
_TOO_LONG = 2.0  # times the sample: if more would be read of some rows, only some of their columns are
_TOGETHER = 1024  # elements beside each other that a sample of columns has


# -- How a tensor is drawn.


@dataclass(frozen=True, slots=True)
class Plane:
    """Two dimensions of a tensor as the rows and columns of a picture."""

    height: int
    """Number of rows."""
    width: int
    """Number of columns."""
    row_dim: int | None
    """The dimension that is drawn from top to bottom; None if there is one row, or if a dimension is wrapped."""
    col_dim: int | None
    """The dimension that is drawn from left to right; None for a tensor without dimensions."""
    at: Mapping[int, int] = field(default_factory=dict)
    """Dimension -> index, for other dimensions of which one index is drawn. All elements along the rest are pooled."""
    wrap: bool = False
    """Whether one dimension is drawn in rows of ``width`` elements, as text."""


def plane_of(
    t: LazyArray,
    dims: tuple[int, int] | None = None,
    at: Mapping[int, int] | None = None,
    wrap: int | None = None,
) -> Plane:
    """Return how a tensor is drawn.

    Parameters
    ----------
    t
        The tensor.
    dims
        The dimensions of the rows and the columns. By default the last two; of a tensor with one dimension this is the
        dimension of the columns.
    at
        Dimension -> index, for other dimensions. Elements along dimensions without an index are pooled.
    wrap
        Of a tensor with one dimension: the number of columns, in which it is drawn in several rows.

    Raises
    ------
    DataError
        There are no such dimensions or indices, or the elements are no numbers.
    """
    shape = number_shape(t)
    ndim, at = len(shape), dict(at or {})
    if wrap is not None:
        if ndim != 1 or dims is not None or at:
            raise DataError(f"{t.name!r} has {ndim} dimensions: wrap= is for tensors of one, without dims= and at=")
        if not 1 <= wrap <= max(1, shape[0]) or wrap % packing(t.spec.dtype):
            raise DataError(f"wrap={wrap}: {t.name!r} of {shape[0]:,} numbers cannot be drawn in rows of that length")
        return Plane(ceil(shape[0] / wrap), wrap, None, 0, {}, True)
    if ndim < 2:
        if dims is not None or at:
            raise DataError(f"{t.name!r} has {ndim} dimensions: dims= and at= are for tensors of two and more")
        return Plane(1, shape[0] if ndim else 1, None, 0 if ndim else None)
    row, col = dims if dims is not None else (ndim - 2, ndim - 1)
    if not (0 <= row < ndim and 0 <= col < ndim and row != col):
        raise DataError(f"dims=({row}, {col}): {t.name!r} has the dimensions 0 to {ndim - 1}; name two of them")
    for d, n in at.items():
        if not 0 <= d < ndim or d in (row, col):
            raise DataError(f"at={{{d}: {n}}}: dimension {d} of {t.name!r} is drawn, or there is none")
        if not 0 <= n < shape[d]:
            raise DataError(f"at={{{d}: {n}}}: dimension {d} of {t.name!r} has the indices 0 to {shape[d] - 1}")
    return Plane(shape[row], shape[col], row, col, at)


def checked(plane: Plane, window: Window | None) -> Window:
    if window is None:
        return (0, plane.height), (0, plane.width)
    for (a, b), n, what in zip(window, (plane.height, plane.width), ("rows", "columns"), strict=True):
        if not 0 <= a <= b <= n:
            raise DataError(f"the {what} {a:,} to {b:,} of the window are not within 0 to {n:,}")
    return window


def even_cells(start: int, stop: int, most: int) -> Array:
    """Return the edges of at most ``most`` cells of nearly equal size, of whole elements."""
    count = min(most, stop - start)
    return np.array([start + (stop - start) * n // max(1, count) for n in range(count + 1)], np.int64)


# -- What is read: boxes of elements, in the order of the file.

Block = tuple[Box, LazyArray, int]
"""A box of numbers; the elements to read; and how many numbers are before the box in each row of what is read (a byte
has two 4-bit floats)."""


class Source(Protocol):
    """The elements of a window, as blocks in the order of the file."""

    shape: Shape
    """The lengths of the dimensions, in numbers."""

    @property
    def row(self) -> int | None:
        """The dimension of the rows."""

    @property
    def col(self) -> int | None:
        """The dimension of the columns."""

    nbytes: int
    """The bytes that are read."""
    complete: bool
    """Whether all elements of the window are read."""

    def positions(self, dim: int, indices: Array) -> Array:
        """Return how many of the numbers that are read along a dimension lie before each index of the tensor."""

    def blocks(self, nbytes: int) -> Iterator[Block]:
        """Yield blocks of at most ``nbytes`` bytes."""

    def counts(self, edges: Sequence[Array]) -> Array:
        """Return the number of elements in each cell that are read."""


class Boxes:
    """A window of a tensor.

    Parameters
    ----------
    t, plane, span
        The tensor, how it is drawn, and the window.
    picked
        Dimension -> the indices to read, of those of which not all are read.
    """

    def __init__(self, t: LazyArray, plane: Plane, span: Window, picked: Mapping[int, Array]) -> None:
        whole = number_shape(t)
        ends = [(0, n) for n in whole]
        for d, one in ((plane.row_dim, span[0]), (plane.col_dim, span[1])):
            if d is not None:
                ends[d] = one
        for d, n in plane.at.items():
            ends[d] = (n, n + 1)
        self.row, self.col = plane.row_dim, plane.col_dim
        self._pack, self._ends, self._picked = packing(t.spec.dtype), ends, picked
        self.shape: Shape = tuple(len(picked[d]) if d in picked else b - a for d, (a, b) in enumerate(ends))
        self.complete = not picked
        if whole == self.shape:
            self._part = t
        else:
            key = [slice(None) if d in picked else slice(a, b) for d, (a, b) in enumerate(ends)]
            if self._pack > 1:
                key[-1] = slice(ends[-1][0] // self._pack, -(-ends[-1][1] // self._pack))
            self._part = t.lazy[tuple(key)]
            for d, indices in picked.items():
                self._part = self._part.lazy[(slice(None),) * d + (indices,)]
        self.nbytes = self._part.nbytes

    def positions(self, dim: int, indices: Array) -> Array:
        if dim in self._picked:
            return np.searchsorted(self._picked[dim], indices)
        found: Array = indices - self._ends[dim][0]
        return found

    def blocks(self, nbytes: int) -> Iterator[Block]:
        part, pack = self._part, self._pack
        for box in tiles(part.shape, nbytes // part.itemsize):
            one = part if box.shape == tuple(part.shape) else part.lazy[box.slices]
            if pack == 1:
                yield box, one, 0
                continue
            low, high = self._ends[-1]
            first = (low // pack + box.start[-1]) * pack
            start, stop = max(first, low), min(first + box.shape[-1] * pack, high)
            inside = Box((*box.start[:-1], start - low), (*box.stop[:-1], stop - low))
            yield inside, one, start - first

    def counts(self, edges: Sequence[Array]) -> Array:
        others = prod(n for d, n in enumerate(self.shape) if d not in (self.row, self.col))
        sizes = [np.array([1]) if d is None else np.diff(edges[d]) for d in (self.row, self.col)]
        return np.outer(*sizes) * others


class Wrapped:
    """A window of a tensor of one dimension that is drawn in rows. Parameters: those of `Boxes`."""

    row, col = 0, 1

    def __init__(self, t: LazyArray, plane: Plane, span: Window, picked: Mapping[int, Array]) -> None:
        (r0, r1), (self._left, right) = span
        self._t, self._width, self._pack = t, plane.width, packing(t.spec.dtype)
        self._rows = picked.get(0, np.arange(r0, r1))
        self.shape: Shape = (len(self._rows), right - self._left)
        self.complete = not picked
        full, rest = divmod(number_shape(t)[0], plane.width)
        self._full = int(np.searchsorted(self._rows, full))  # rows that are not cut off
        self._rest = max(0, min(right, rest) - self._left)  # numbers of the last row, if it is
        self.nbytes = prod(self.shape) * t.itemsize // self._pack

    def positions(self, dim: int, indices: Array) -> Array:
        if dim == 0:
            return np.searchsorted(self._rows, indices)
        found: Array = indices - self._left
        return found

    def blocks(self, nbytes: int) -> Iterator[Block]:
        count = nbytes // self._t.itemsize * self._pack
        for box in tiles((self._full, self.shape[1]), count):
            yield self._block(box)
        if self._full < self.shape[0]:
            for box in tiles((1, self._rest), count):
                yield self._block(box.shift((self._full, 0)))

    def _block(self, box: Box) -> Block:
        pack, width = self._pack, self._width // self._pack
        rows = self._rows[box.start[0] : box.stop[0]]
        start = self._left + box.start[1]
        first, end = start // pack, -(-(self._left + box.stop[1]) // pack)
        run = len(rows) == 1 or (end - first == width and rows[-1] - rows[0] == len(rows) - 1)
        if run:
            key: Any = slice(int(rows[0]) * width + first, int(rows[-1]) * width + end)
        else:
            key = (rows[:, None] * width + np.arange(first, end)).reshape(-1)
        return box, self._t.lazy[key], start - first * pack

    def counts(self, edges: Sequence[Array]) -> Array:
        found = np.outer(np.diff(edges[0]), np.diff(edges[1]))
        if self._full < self.shape[0] and len(found):
            found[-1] -= np.diff(edges[1] - np.minimum(edges[1], self._rest))
        return found


def _picked(
    t: LazyArray, plane: Plane, span: Window, row_edges: Array, col_edges: Array | None, exact: bool
) -> dict[int, Array]:
    """Return the indices to read of each dimension that is sampled.

    Columns are sampled last, and only if the rows that are left are still too long. The elements of the last dimension
    lie beside each other: runs of them are read.
    """
    shape = [plane.height, plane.width] if plane.wrap else list(number_shape(t))
    row, col = (0, 1) if plane.wrap else (plane.row_dim, plane.col_dim)
    cells: dict[int | None, Array] = {row: row_edges}
    for d, (a, b) in ((row, span[0]), (col, span[1])):
        if d is not None:
            shape[d] = b - a
            if d == col:
                cells[d] = np.array([a, b]) if col_edges is None else col_edges
    for d in plane.at:
        shape[d] = 1
    pack = packing(t.spec.dtype)
    excess = 0.0 if exact else prod(shape) * t.itemsize / pack / SAMPLE
    found: dict[int, Array] = {}
    last = len(shape) - 1
    for d in sorted(range(len(shape)), key=lambda d: (d == last, d == col)):
        late = d in (col, last)
        if excess <= (_TOO_LONG if late else 1) or shape[d] == 1 or (d == last and (pack > 1 or plane.wrap)):
            continue
        indices = _spread(cells.get(d, np.array([0, shape[d]])), excess, _TOGETHER if d == last else 1)
        if len(indices) < shape[d]:
            found[d] = indices
            excess *= len(indices) / shape[d]
    return found


def _spread(ends: Array, excess: float, run: int) -> Array:
    """Return evenly spaced indices of each cell, as many as a sample has, in runs of up to ``run`` of them."""
    keep = ceil(int(np.diff(ends).max()) / excess)
    found = []
    for a, n in zip(ends, np.diff(ends), strict=False):
        k = min(keep, n)
        together = min(k, run)
        runs = k // together
        starts = a + np.arange(runs) * n // runs + (n // runs - together) // 2
        found.append((starts[:, None] + np.arange(together)).reshape(-1))
    return np.concatenate(found)


def source_of(
    t: LazyArray,
    plane: Plane,
    span: Window,
    row_edges: Array,
    exact: bool = True,
    col_edges: Array | None = None,
) -> Source:
    """Return the blocks of a window.

    Parameters
    ----------
    t, plane, span
        The tensor, how it is drawn, and the window.
    row_edges, col_edges
        The rows and columns between which cells lie, if a sample is read: some rows of each cell, and some columns if
        the rows are long. By default all columns are one cell.
    exact
        Whether to read everything.

    Raises
    ------
    DataError
        More than 16 TiB would be read.
    """
    picked = _picked(t, plane, span, row_edges, col_edges, exact)
    kind: type[Wrapped] | type[Boxes] = Wrapped if plane.wrap else Boxes
    source = kind(t, plane, span, picked)
    if source.nbytes > _MOST:
        raise DataError(f"{t.name!r}: {source.nbytes:,} bytes are too many to look at: choose a smaller window")
    return source


# -- Work on all blocks.


class Fold(Protocol):
    """What is known of some blocks."""

    def add(self, box: Box, block: Array) -> None:
        """Add the numbers of a box, as float32 or float64."""


F = TypeVar("F", bound=Fold)


def fold_all(
    t: LazyArray,
    source: Source,
    start: Callable[[Sequence[Box]], F],
    merge: Callable[[F], None],
    check: Callable[[], None] | None = None,
    executor: Executor | None = None,
    memory: int | str | None = None,
    held: int = 0,
    lose: Callable[[F, Box], None] | None = None,
) -> None:
    """Read all blocks of a source, each once, by tasks.

    Parameters
    ----------
    t, source
        The tensor, and its blocks.
    start
        Returns an empty `Fold` for a task that will read some boxes.
    merge
        Takes the fold of each task, in the order of the elements.
    check, executor, memory
        See `pooled`.
    held
        Bytes that a fold holds at most.
    lose
        Called with a fold and a box none of whose elements can be read, because a file is lost. By default such
        elements raise MissingFileError; those of computed tensors and of packed floats always do.
    """
    if lose is None:
        t._check()
    expected = 0
    waiting: dict[int, F] = {}

    def tasks() -> Iterator[Task]:
        for number, group in enumerate(_grouped(source.blocks(PIECE // packing(t.spec.dtype) ** 2))):
            if check is not None:
                check()
            nbytes = sum(part.nbytes for _, part, _ in group)
            work = min(held, CELL * nbytes) + 8 * PIECE + OVERHEAD
            yield Task(nbytes, work, partial(_folded, number, group, start, lose), group[0][1])

    def done(task: Task, result: tuple[int, F]) -> None:
        nonlocal expected
        if check is not None:
            check()
        waiting[result[0]] = result[1]
        while expected in waiting:
            merge(waiting.pop(expected))
            expected += 1

    runner(executor, memory)(tasks(), done, tensors=[t])


def _grouped(blocks: Iterable[Block]) -> Iterator[list[Block]]:
    group: list[Block] = []
    size = 0
    for block in blocks:
        group.append(block)
        size += block[1].nbytes
        if size >= RUN:
            yield group
            group, size = [], 0
    if group:
        yield group


_own = threading.local()


def _room(count: int, dtype: DType) -> Array | None:
    """Return memory of this thread for the numbers of a block: to allocate it anew for each block takes longer than to
    fold the block. None if the elements are their numbers."""
    if dtype in (F32, F64):
        return None
    size = 4 if is_narrow(dtype) else 8
    room: Array | None = getattr(_own, "room", None)
    if room is None or room.size < size * count:
        room = _own.room = np.empty(size * max(count, _BLOCK), np.uint8)
    return room


def _folded(
    number: int, group: Sequence[Block], start: Callable[[Sequence[Box]], F], lose: Callable[[F, Box], None] | None
) -> tuple[int, F]:
    fold = start([box for box, _, _ in group])
    for box, part, ahead in group:
        _fold_block(fold, box, part, ahead, lose)
    return number, fold


def _fold_block(fold: F, box: Box, part: LazyArray, ahead: int, lose: Callable[[F, Box], None] | None) -> None:
    go_on()
    pack = packing(part.spec.dtype)
    try:
        with once():
            block = part.read_into(scratch(part.nbytes).view(part.dtype).view(part.shape))
    except MissingFileError:
        if lose is None or pack > 1 or part.spec.expr is not None:
            raise
        if part.numel() == 1 or not _has_files(part):
            lose(fold, box)
            return
        for half, some in _halves(box, part):
            _fold_block(fold, half, some, 0, lose)
        return
    if pack > 1:
        found = numbers(block).reshape(*box.shape[:-1], -1)[..., ahead : ahead + box.shape[-1]]
        for one in tiles(box.shape, _BLOCK):
            fold.add(one.shift(box.start), found[one.slices])
    else:
        block = block.view(box.shape)
        for one in tiles(box.shape, _BLOCK):
            fold.add(one.shift(box.start), numbers(block[one.slices], _room(one.numel, part.spec.dtype)))


def _has_files(part: LazyArray) -> bool:
    """Return whether a file that can be read may hold elements of a part of a tensor."""
    hull = part._sel.hull
    readable = (one for one in part.fragments if not isinstance(one.extent, Hole))
    return any(globe & hull for one in readable for _, globe in fragment_boxes(one))


def _halves(box: Box, part: LazyArray) -> Iterator[tuple[Box, LazyArray]]:
    """Divide a block of more than one element in two, in the order of the elements."""
    dim = next(d for d, n in enumerate(box.shape) if n > 1)
    middle = box.shape[dim] // 2
    wrapped = len(part.shape) < len(box.shape)  # then the part has the elements in one dimension
    width = prod(box.shape[dim + 1 :]) if wrapped else 1
    ahead = () if wrapped else (slice(None),) * dim
    for first, end in ((0, middle), (middle, box.shape[dim])):
        start, stop = list(box.start), list(box.stop)
        start[dim], stop[dim] = box.start[dim] + first, box.start[dim] + end
        yield Box(tuple(start), tuple(stop)), part.lazy[(*ahead, slice(first * width, end * width))]
