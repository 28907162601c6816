"""Slices of a tensor in several blocks, such as the partitions of ranks, through mappings of their files.

A plan of the whole tensor is kept as columns: which block is at which place of which file. Keys whose rows are in
blocks of whole rows are read by them (rows.py). Any other selection of up to `_MOST` blocks is copied block by block.
Blocks of rows that follow each other in one file are copied together: a gather, given the position of each row.
`Mosaic.read` returns None where a planned read (gather.py) is better or has to raise an error.

Torch's kernels may rely on aligned elements, and writers such as torch.distributed.checkpoint align nothing. Blocks of
a tensor that may not be aligned are read as bytes, as an array with one more dimension.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from math import prod
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.box import Axis, Selection, Shape, c_strides
from ...core.copies import Copy
from ...core.dtypes import bits_of
from ...core.extents import Archive
from ...core.select import Reads
from ...core.specs import TensorSpec
from ...core.table import Copies
from ..storage.base import Store
from ..storage.mapping import Mapped
from ..tensors import empty
from .gather import finish
from .rows import Rows
from .strips import UNKNOWN, Place
from .window import CLONABLE, LARGE, NEAR, span_of

if TYPE_CHECKING:
    import torch
else:
    from ...deferred import torch

_MOST = 4096  # blocks that a slice is copied from one by one
_FILES = 96  # most files that a slice is copied from: a store keeps the mappings of some more
_BLOCKS = 1 << 16  # most blocks of a tensor
_CACHED = 1 << 14  # blocks whose tensors a mapping caches
_FEW = 4  # blocks that are copied one by one


class Mosaic(Rows):
    """A tensor of raw elements in blocks of local files."""

    __slots__ = ("_aligned", "_key", "_starts", "_stops")

    def __init__(self, store: Store, spec: TensorSpec, places: Sequence[Place]) -> None:
        super().__init__(store, spec, places)
        self._key = object()  # of the cached blocks (not this object: it refers to the store, which has the mappings)
        known = [offset for _, _, offset, _, _ in places if isinstance(offset, int)]
        self._aligned = len(known) == len(places) and not any(offset % spec.dtype.itemsize for offset in known)
        self._starts = [start for start, *_ in places]
        self._stops = [tuple(a + n for a, n in zip(start, shape, strict=True)) for start, _, _, shape, _ in places]

    @staticmethod
    def of(store: Store, spec: TensorSpec, copies: Sequence[Copy]) -> Mosaic | None:
        """Return the mosaic of a tensor, given the plan that reads all of it; None if it has to be planned."""
        if not 1 <= len(copies) <= _BLOCKS or not spec.shape or spec.dtype not in CLONABLE:
            return None
        size = spec.dtype.itemsize
        places: list[Place]
        if isinstance(copies, Copies) and copies.table.packed is None:
            if copies.table.dtype is not spec.dtype:
                return None
            columns = (copies.at, copies.shapes, copies.strides)
            paths = [copies.table.paths[n] for n in copies.table.files.tolist()]
            ats, shapes, strides = (list(map(tuple, column.tolist())) for column in columns)
            places = list(zip(ats, paths, copies.offsets.tolist(), shapes, strides, strict=True))
        else:
            found = [_place(copy, size) for copy in copies if copy.extent.dtype is spec.dtype]
            places = [place for place in found if place is not None]
            if len(places) < len(copies):
                return None
        places.sort(key=itemgetter(0))
        ends = [start[0] + shape[0] for start, _, _, shape, _ in places]
        if any(a > b for a, b in pairwise(ends)):  # `read` looks for the first and the last block by their rows
            return None
        return Mosaic(store, spec, places)

    def read(self, reads: Reads) -> torch.Tensor | None:
        """Read a selection, copying from each block that holds a part of it."""
        want = reads.want
        if not all(map(len, want)) or prod(reads.shape) * self._dtype.itemsize > LARGE:
            return None
        first = bisect_right(self._highs, int(want[0][0]))
        last = bisect_left(self._lows, int(want[0][-1]) + 1)
        if last - first > _MOST:
            return None
        out = empty(reads.shape, self._dtype)
        memory = out if self._aligned else out.view(-1, 1).view(torch.uint8).view(*reads.shape, out.itemsize)
        used: dict[str, Mapped] = {}
        left = memory.numel()
        n = first
        while n < last:
            end = self._end(n, last)
            copied = self._copy_run(want, n, end, memory, used) if end else self._copy_block(want, n, memory, used)
            if copied is None or len(used) > _FILES:
                return None
            left -= copied
            n = end or n + 1
        if left:
            return None
        for path, mapped in used.items():
            self._store.confirm(path, mapped)
        return finish(reads, out)

    def _copy_block(self, want: Selection, n: int, memory: torch.Tensor, used: dict[str, Mapped]) -> int | None:
        """Copy what a block holds; return the number of elements, or None if a planned read is better."""
        inside = _inside(want, self._starts[n], self._stops[n])
        if inside is None:
            return 0
        target, source, lists = inside
        found = self._block(n)
        if found is None:
            return None
        mapped, block, offset = found
        view = block[source]
        if not _resident(mapped, block, offset, view):
            return None
        place = memory[target]
        _pick(view, [(d, torch.from_numpy(positions)) for d, positions in lists], place)
        used[self._places[n][0]] = mapped
        return place.numel()

    def _copy_run(
        self, want: Selection, first: int, end: int, memory: torch.Tensor, used: dict[str, Mapped]
    ) -> int | None:
        """Copy what blocks of rows in one file hold; return the number of elements, or None if a planned read is
        better."""
        path, rows, low = self._places[first][0], self._places[first][2][0], self._lows[first]
        start, after = _before(want[0], low), _before(want[0], self._highs[end - 1])
        if start == after:
            return 0
        axis, others, target = want[0][start:after], want[1:], memory[start:after]
        at = np.asarray(axis) - low
        blocks = at // rows + first
        if (self._offsets[blocks] == UNKNOWN).any() and not all(map(self._located, np.unique(blocks).tolist())):
            return None
        mapped = self._store.maps.get(path) or self._store.map(path)
        if mapped is None:
            return None
        addresses = self._offsets[blocks] + at % rows * self._row
        offset, stop = int(addresses.min()), int(addresses.max()) + self._row
        if stop > len(mapped.buffer) or stop - offset > NEAR or not mapped.resident(offset, stop):
            return None
        self._store.check(path, offset, stop - offset)
        size = self._dtype.itemsize
        shape, dtype, unit = self._shape[1:], self._dtype, size
        if not self._aligned:
            shape, dtype, unit = (*shape, size), torch.uint8, 1
        flat = torch.frombuffer(mapped.buffer, dtype=dtype, count=(stop - offset) // unit, offset=offset)
        addresses -= offset
        step = int(np.gcd.reduce(addresses)) or self._row
        lines = flat.as_strided(((stop - offset - self._row) // step + 1, *shape), (step // unit, *c_strides(shape)))
        keys = tuple(slice(a.start, a.stop, a.step) if isinstance(a, range) else slice(None) for a in others)
        view, index = lines[(slice(None), *keys)], addresses // step
        lists = [(d, torch.from_numpy(a)) for d, a in enumerate(others, 1) if not isinstance(a, range)]
        if len(index) < _FEW or view[0].is_contiguous():
            lists.insert(0, (0, torch.from_numpy(index)))  # before the others: the lines overlap
        else:  # torch would copy row by row, numpy gathers
            array = view.view(bits_of(size)).numpy() if self._aligned else view.numpy().view(f"u{size}")
            view = torch.from_numpy(array[index].view(array.dtype if self._aligned else np.uint8)).view(dtype)
        _pick(view, lists, target)
        used[path] = mapped
        return target.numel()

    def _end(self, first: int, last: int) -> int:
        """Return the end of the blocks of rows from ``first`` on that follow each other in one file; 0 if they are
        few."""
        if last - first < _FEW or not self._follows[first : first + _FEW - 1].all():
            return 0
        apart = np.flatnonzero(~self._follows[first : last - 1])
        return first + 1 + int(apart[0]) if len(apart) else last

    def _block(self, n: int) -> tuple[Mapped, torch.Tensor, int] | None:
        """Return the mapping of a block's file, the block as a tensor, and its position in the file."""
        if not self._located(n):
            return None
        path, offset, shape, strides = self._places[n]
        assert isinstance(offset, int)
        mapped = self._store.maps.get(path) or self._store.map(path)
        if mapped is None:
            return None
        known: torch.Tensor | None = mapped.arrays.get((self._key, n))
        if known is None:
            count = 1 + sum((m - 1) * s for m, s in zip(shape, strides, strict=True))
            nbytes = count * self._dtype.itemsize
            if offset + nbytes > len(mapped.buffer):
                return None
            self._store.check(path, offset, nbytes)
            if self._aligned:
                flat = torch.frombuffer(mapped.buffer, dtype=self._dtype, count=count, offset=offset)
            else:
                size = self._dtype.itemsize
                flat = torch.frombuffer(mapped.buffer, dtype=torch.uint8, count=nbytes, offset=offset)
                shape, strides = (*shape, size), (*(s * size for s in strides), 1)
            if len(mapped.arrays) >= _CACHED:
                mapped.arrays.clear()
            known = mapped.arrays[self._key, n] = flat.as_strided(shape, strides)
        return mapped, known, offset


def _place(copy: Copy, size: int) -> Place | None:
    """Return the place of a copy; None if its elements are not in the file as they are."""
    extent = copy.extent
    if extent.raw:
        return copy.at, extent.path, extent.offset + copy.start * size, copy.shape, copy.strides
    if isinstance(extent.within, Archive) and extent == extent.within.as_told and not extent.within.codecs:
        return copy.at, extent.path, (extent.within, copy.start * size), copy.shape, copy.strides
    return None


def _pick(view: torch.Tensor, lists: list[tuple[int, torch.Tensor]], place: torch.Tensor) -> None:
    """Copy a view to its place, in some dimensions only the elements at positions."""
    if not lists:
        _copy(view, place)
        return
    for d, positions in lists[:-1]:
        view = view.index_select(d, positions)
    if place.is_contiguous():
        torch.index_select(view, *lists[-1], out=place)
    else:
        place.copy_(view.index_select(*lists[-1]))


def _copy(view: torch.Tensor, place: torch.Tensor) -> None:
    """Copy a view to a place of the same shape and dtype."""
    if _has_gaps(view) and place.stride(-1) == 1:
        size = view.shape[-1]
        source, target = (array.numpy().view(f"u{size}") for array in (view, place))
        np.copyto(target, source)
    else:
        place.copy_(view)


def _has_gaps(view: torch.Tensor) -> bool:
    """Return whether a view consists of elements of several bytes with gaps between them: torch copies it byte by byte,
    numpy element by element."""
    if view.dtype is not torch.uint8 or view.ndim < 2 or view.shape[-1] not in (2, 4, 8):
        return False
    return view.stride(-1) == 1 and view.stride(-2) != view.shape[-1]


def _before(axis: Axis, high: int) -> int:
    """Return how many indices of an axis are below ``high``."""
    if isinstance(axis, range):
        return max(0, min(len(axis), -((axis.start - high) // axis.step)))
    return int(np.searchsorted(axis, high))


def _resident(mapped: Mapped, block: torch.Tensor, offset: int, view: torch.Tensor) -> bool:
    span = span_of(view)
    if span > NEAR:
        return False
    start = offset + view.data_ptr() - block.data_ptr()
    return not span or mapped.resident(start, start + span)


def _inside(
    want: Selection, start: Shape, stop: Shape
) -> tuple[tuple[slice, ...], tuple[slice, ...], list[tuple[int, np.ndarray[Any, Any]]]] | None:
    """Return what a block holds of a selection: where it goes in the output, the slices of the block, and in dimensions
    that a list selects the positions along them. None if it holds nothing."""
    target: list[slice] = []
    source: list[slice] = []
    lists: list[tuple[int, np.ndarray[Any, Any]]] = []
    for d, (axis, a, b) in enumerate(zip(want, start, stop, strict=True)):
        if isinstance(axis, range):
            i = max(0, -((axis.start - a) // axis.step))
            j = min(len(axis), -((axis.start - b) // axis.step))
            if i >= j:
                return None
            at = axis.start + i * axis.step - a
            source.append(slice(at, at + (j - i - 1) * axis.step + 1, axis.step))
        else:
            i, j = np.searchsorted(axis, (a, b)).tolist()
            if i >= j:
                return None
            source.append(slice(None))
            lists.append((d, axis[i:j] - a))
        target.append(slice(i, j))
    return tuple(target), tuple(source), lists
