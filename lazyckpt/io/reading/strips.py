"""The strips of a tensor in blocks of local files, as arrays over the mappings of the files.

A *strip* is a run of blocks of whole rows that follow each other in one file: one block, or the chunks that a process
has saved. If its blocks lie at equal distances, as chunks of equal size do, the strip is one array of the dimensions
(block, row, ...) over the mapping of the file, and a key takes one to three slices of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...core.box import Shape, c_strides
from ...core.dtypes import BF16
from ...core.extents import Archive
from ...core.specs import TensorSpec
from ...errors import LazyckptError, decoding
from ..storage.base import Store
from ..storage.mapping import Mapped
from .packed import locate_all, located
from .window import NEAR, SMALL

if TYPE_CHECKING:
    import torch
else:
    from ...deferred import torch

# Where a block begins in the tensor, its file, its position there, its shape and strides. The position may be one in an
# archive that is not located yet.
Place = tuple[Shape, str, "int | tuple[Archive, int]", Shape, Shape]

UNKNOWN = -1  # the position of a block that is not located yet
_NEVER = -1  # instead of a number of blocks: they are no strip
_CACHED = 1 << 14  # arrays that a mapping caches
_FEW = 4  # blocks that are located together, whichever are wanted

Array = NDArray[Any]


class Strip(NamedTuple):
    """A strip through the mapping of its file.

    Attributes
    ----------
    offset
        The position of the first block in the file, in bytes.
    distance
        Bytes from one block to the next.
    height
        Rows of a block.
    array
        The elements, in the dimensions (block, row, ...).
    torch
        The same for torch: the elements if they are aligned, else bytes, with the last dimension that much longer;
        None for elements of one dimension that are not aligned.
    wide
        How much longer the last dimension of ``torch`` is.
    lines
        Rows of bytes that begin at each multiple of ``unit`` bytes.
    unit
        The greatest distance of which ``distance`` and the distance of rows are multiples.
    """

    offset: int
    distance: int
    height: int
    array: Array
    torch: torch.Tensor | None
    wide: int
    lines: torch.Tensor
    unit: int


class Strips:
    """The strips of a tensor in blocks."""

    __slots__ = (
        "_bits", "_dtype", "_firsts", "_follows", "_highs", "_keys", "_length", "_lows", "_offsets", "_places",
        "_planned", "_rank", "_rest", "_row", "_shape", "_spec", "_store", "_strip_highs", "_strip_lows", "_whole_rows",
    )  # fmt: skip

    def __init__(self, store: Store, spec: TensorSpec, places: Sequence[Place]) -> None:
        self._store, self._spec, self._dtype, self._shape = store, spec, spec.dtype.torch, spec.shape
        self._bits = np.dtype(np.uint16) if spec.dtype is BF16 else np.dtype(spec.dtype.numpy)
        self._length, self._rest, self._rank = spec.shape[0], spec.shape[1:], len(spec.shape)
        self._row = prod(spec.shape[1:]) * spec.dtype.itemsize  # bytes of a row
        self._places = [(path, offset, shape, strides) for _, path, offset, shape, strides in places]
        self._lows = [start[0] for start, *_ in places]
        self._highs = [start[0] + shape[0] for start, _, _, shape, _ in places]
        self._whole_rows = [shape[1:] == spec.shape[1:] for _, _, _, shape, _ in places]
        self._offsets = np.array([at if isinstance(at, int) else UNKNOWN for _, _, at, _, _ in places], np.int64)
        # whether each block is followed by the next rows, in a block of the same shape in the same file
        self._follows = np.array(
            [
                whole and a[1] == b[1] and a[3] == b[3] and a[4] == b[4] == c_strides(a[3]) and high == b[0][0]
                for whole, high, (a, b) in zip(self._whole_rows, self._highs, pairwise(places), strict=False)
            ],
            np.bool_,
        )
        self._firsts = [0, *(np.flatnonzero(~self._follows) + 1).tolist(), len(places)]  # the first block of each strip
        self._strip_lows = [self._lows[n] for n in self._firsts[:-1]]
        self._strip_highs = [self._highs[n - 1] for n in self._firsts[1:]]
        # of the cached strips (not this object: it refers to the store, which has the mappings)
        self._keys = [object() for _ in self._strip_lows]
        self._planned = [0] * len(self._strip_lows)  # blocks of each strip that were located one by one; see `_strip`

    def _resident(self, mapped: Mapped, strip: Strip, start: int, stop: int) -> bool:
        """Return whether the rows of a strip are probably in memory."""
        first, last = divmod(start, strip.height), divmod(stop - 1, strip.height)
        low = strip.offset + first[0] * strip.distance + first[1] * self._row
        high = strip.offset + last[0] * strip.distance + (last[1] + 1) * self._row
        return high - low <= NEAR and (high - low <= SMALL or mapped.resident(low, high))

    def _strip(self, n: int, start: int, stop: int, most: int = 1 << 62) -> tuple[str, Mapped, Strip] | None:
        """Return the file, the mapping and the strip of number ``n``, to read rows in at most so many blocks; None if
        it is none.

        A block in an archive has to be located first, which takes a read. All blocks of a strip are located once a
        selection, or those before it together, wanted half as many; until then, planned reads locate what they want.
        """
        first, end = self._firsts[n], self._firsts[n + 1]
        path, _, shape, strides = self._places[first]
        mapped = self._store.maps.get(path) or self._store.map(path)
        if mapped is None:
            return None
        strip: Strip | None = mapped.arrays.get(self._keys[n])
        if strip is not None:
            return path, mapped, strip
        if not self._whole_rows[first] or strides != c_strides(shape) or self._planned[n] == _NEVER:
            return None
        height, row, size = shape[0], self._row, self._bits.itemsize
        if (self._offsets[first:end] == UNKNOWN).any():
            self._planned[n] += min(most, (stop - 1) // height - start // height + 1)
            if end - first > _FEW and 2 * self._planned[n] < end - first:
                return None
            if not self._locate(first, end):
                self._planned[n] = _NEVER
                return None
        offsets = self._offsets[first:end]
        distances = np.diff(offsets)
        distance = int(distances[0]) if len(distances) else height * row
        if distance < height * row or (distances != distance).any():
            self._planned[n] = _NEVER
            return None
        offset, span = int(offsets[0]), (end - first - 1) * distance + height * row
        if offset + span > len(mapped.buffer):  # a planned read raises an error
            return None
        for at in offsets.tolist() if self._store.guards else ():
            self._store.check(path, at, height * row)
        whole, steps = (end - first, *shape), (distance, *(s * size for s in strides))
        array: Array = np.ndarray(whole, self._bits, mapped.buffer, offset, steps)
        flat = torch.frombuffer(mapped.buffer, dtype=torch.uint8, count=span, offset=offset)
        unit = int(np.gcd(distance, row)) if end - first > 1 else row
        lines = flat.as_strided(((span - row) // unit + 1, row), (unit, 1))
        block, wide = None, 1
        if not (offset % size or distance % size):
            flat = torch.frombuffer(mapped.buffer, dtype=self._dtype, count=span // size, offset=offset)
            block = flat.as_strided(whole, tuple(s // size for s in steps))
        elif len(shape) > 1:
            block, wide = flat.as_strided((*whole[:-1], whole[-1] * size), (*steps[:-1], 1)), size
        if len(mapped.arrays) >= _CACHED:
            mapped.arrays.clear()
        strip = mapped.arrays[self._keys[n]] = Strip(offset, distance, height, array, block, wide, lines, unit)
        return path, mapped, strip

    def _locate(self, first: int, end: int) -> bool:
        """Find out where blocks are; return False if one is not in its file as it is, or is damaged."""
        archives = [place[1][0] for place in self._places[first:end] if not isinstance(place[1], int)]
        try:
            with decoding(self._store.root, f"looking for {self._spec.name!r:.80}"):
                locate_all(self._store, [(archive, self._spec.name) for archive in archives])
        except LazyckptError:  # a planned read raises it, if it wants the block
            return False
        return all(map(self._located, range(first, end)))

    def _located(self, n: int) -> bool:
        """Look up where a block is; return False if its elements are not in the file as they are."""
        path, offset, shape, strides = self._places[n]
        if not isinstance(offset, int):
            archive, ahead = offset
            extent = located(self._store, archive, self._spec.name)
            if extent is None or not extent.raw or extent.strides != c_strides(extent.shape):
                return False
            offset = extent.offset + ahead
            self._places[n] = path, offset, shape, strides
            self._offsets[n] = offset
        return True
