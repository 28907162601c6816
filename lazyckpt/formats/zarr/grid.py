"""The chunks of an array as fragments that are created on demand, because a hierarchy can have millions of chunks.

The cells of the grid are the innermost chunks, which are read individually: the chunks inside the shards of a sharded
array, and the chunks of any other array.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from ...core.blocks import Blocks, Grid, cells
from ...core.box import Box, Selection, Shape, c_strides, hull_of
from ...core.chunking import chunk_box, grid_of
from ...core.dtypes import DType
from ...core.extents import Chunk, Codec, Extent, Packed, Shard, ZipEntry
from ...core.index import FileInfo
from ...core.placement import Part
from ...core.specs import Fragment, TensorSpec
from ...errors import CorruptError
from ...io.storage.access import present
from ...io.storage.base import Store
from ...io.storage.listed import ABSENT, Listed
from .keys import Keys

_FEW = 1024  # chunks that are looked up one by one; where there are more, the folder is listed
_DIGITS = 20  # of a number in the key of a chunk, more than there can be


class Level(NamedTuple):
    """Shards of one level: ``cell``, the shape of the chunks in them; ``order``: the dimensions as they are stored."""

    cell: Shape
    order: Shape
    at_end: bool = True
    checked: bool = True
    swapped: bool = False


@dataclass(frozen=True, slots=True)
class Packing:
    """What is in a chunk: ``levels`` of shards, the outermost first; the innermost chunk, whose dimensions are stored
    in ``order``, is unpacked with ``codecs``."""

    order: Shape
    levels: tuple[Level, ...] = ()
    codecs: tuple[Codec, ...] = ()
    swapped: bool = False


@dataclass(frozen=True, slots=True)
class Array:
    """An array as its document describes it. ``chunk``: the shape of what has a key of its own: ``key(place)`` is its
    prefix and its numbers joined by ``separator``. ``fill``: the bytes of the fill value."""

    shape: Shape
    dtype: DType
    chunk: Shape
    packing: Packing
    fill: bytes
    prefix: str = ""
    separator: str = "."
    attributes: Mapping[str, Any] | None = None

    def key(self, place: Sequence[int]) -> str:
        """Of a chunk, below the array's folder.

        >>> import torch
        >>> from lazyckpt.core.dtypes import I8
        >>> array = Array((9, 9), I8, (4, 4), Packing((0, 1)), b"0", "c", "/")
        >>> array.key((0, 2))
        'c/0/2'
        """
        return self.separator.join([*([self.prefix] if self.prefix else []), *map(str, place)]) or "0"

    def place(self, key: str, grid: Shape) -> Shape | None:
        """The place in the grid of the chunk with a key; None if it is no chunk's.

        >>> import torch
        >>> from lazyckpt.core.dtypes import I8
        >>> array = Array((9, 9), I8, (4, 4), Packing((0, 1)), b"0", "c", "/")
        >>> array.place("c/0/2", (3, 3)), array.place("c/0/3", (3, 3)), array.place("zarr.json", (3, 3))
        ((0, 2), None, None)
        """
        parts = key.split(self.separator)
        if self.prefix:
            parts = parts[1:]
        elif not grid:
            parts = []
        if not all(part.isdecimal() and len(part) < _DIGITS for part in parts):
            return None
        place = tuple(map(int, parts))
        inside = len(place) == len(grid) and all(n < count for n, count in zip(place, grid, strict=True))
        return place if inside and self.key(place) == key else None


class Place(NamedTuple):
    """The zip entry of a chunk; ``packed`` says whether it is compressed."""

    entry: ZipEntry
    packed: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class GridFragments(Blocks):
    """One fragment for each cell.

    ``folder`` is the path of the array in the store. ``complete`` says that every chunk must exist, as in hierarchies
    that lazyckpt writes. ``zip`` is the zip that contains the array, ``places`` has the positions of the keys in it,
    and ``keys`` the existing keys of a folder.
    """

    array: Array
    folder: str
    complete: bool = False
    zip: str | None = None
    places: Mapping[str, Place] | None = None
    keys: Keys | None = None
    blocks: Grid = field(init=False)

    def __post_init__(self) -> None:
        levels = self.array.packing.levels
        grid = Grid(self.array.shape, levels[-1].cell if levels else self.array.chunk)
        object.__setattr__(self, "blocks", grid)  # kept: planning needs it for every cell

    @property
    def intact(self) -> bool:
        """True: which chunks are missing is not known before they are looked up."""
        return True

    @property
    def _plain(self) -> bool:
        """Whether every chunk is a file that exists and contains nothing but its elements."""
        packing = self.array.packing
        return self.complete and self.zip is None and not packing.codecs and not packing.levels

    def meeting(self, want: Selection) -> list[Fragment]:
        """Return the fragments of the cells that hold wanted elements. Many absent cells become a few large blocks."""
        if self._is_sparse and prod(map(_count, hull_of(want), self.blocks.cell)) > _FEW:
            return self._sparse(hull_of(want))
        return list(map(self._held, self.blocks.meeting(want)))

    @property
    def _is_sparse(self) -> bool:
        """Whether chunks may be absent, and the existing ones are known."""
        return not self.complete and (self.keys is not None or self.places is not None)

    def _there(self) -> Iterable[Shape]:
        """Return the grid positions of the existing keys."""
        array = self.array
        keys = self.places if self.places is not None else self.keys
        grid = grid_of(array.shape, array.chunk)
        return filter(None.__ne__, (array.place(key, grid) for key in keys or ()))  # type: ignore[arg-type]

    def _sparse(self, want: tuple[range, ...]) -> list[Fragment]:
        """Do the work of `meeting` in time and memory proportional to the number of existing chunks."""
        if not all(map(len, want)):
            return []
        array, cell = self.array, self.blocks.cell
        start = tuple(r[0] // c for r, c in zip(want, array.chunk, strict=True))
        stop = tuple(r[-1] // c + 1 for r, c in zip(want, array.chunk, strict=True))
        there = sorted(p for p in self._there() if all(a <= n < b for a, n, b in zip(start, p, stop, strict=True)))
        found = [self._fill(box) for box in _gaps(there, start, stop)]
        for place in there:
            numbers = []
            for r, n, whole, size in zip(want, place, array.chunk, cell, strict=True):
                inner = r[
                    max(0, -(-(n * whole - r.start) // r.step)) : max(0, -(-((n + 1) * whole - r.start) // r.step))
                ]
                numbers.append(cells(inner, size) if inner else ())
            found += (self._held(chunk_box(at, array.shape, cell)) for at in itertools.product(*numbers))
        return found

    def _fill(self, box: Box) -> Fragment:
        """A block of chunks that are absent: all its elements are the fill value."""
        array = self.array
        start = tuple(a * c for a, c in zip(box.start, array.chunk, strict=True))
        sizes = tuple(min(b * c, n) - a for a, b, c, n in zip(start, box.stop, array.chunk, array.shape, strict=True))
        path = self._path(array.key(box.start))
        absent = Chunk(path, array.dtype, sizes, (0,) * len(sizes), 0, fill=array.fill, present=False)
        return Fragment(absent, sizes, (Part(Box.of(sizes), start),))

    def packed(self) -> list[Packed]:
        """The chunks that are looked up before they are read."""
        if self._plain:
            return []
        return [f.extent for f in self.meeting(tuple(map(range, self.array.shape))) if isinstance(f.extent, Chunk)]

    def paths(self) -> Iterator[str]:
        """The files that the chunks are in."""
        if self.zip is not None:
            yield self.zip
            return
        grid = grid_of(self.array.shape, self.array.chunk)
        places = self._there() if self._is_sparse and prod(grid) > _FEW else itertools.product(*map(range, grid))
        for place in places:
            yield self._path(self.array.key(place))

    def holds(self, path: str) -> bool:
        """Whether a file is one that a chunk is in, or would be in."""
        if self.zip is not None:
            return path == self.zip
        if self.folder and not path.startswith(f"{self.folder}/"):
            return False
        key = path[len(self.folder) + 1 :] if self.folder else path
        return self.array.place(key, grid_of(self.array.shape, self.array.chunk)) is not None

    def fragment(self, n: int) -> Fragment:
        return self._held(self.blocks.box(n))

    def _held(self, cell: Box) -> Fragment:
        """The fragment of a cell."""
        sizes = cell.shape
        return Fragment(self._extent(cell.start, sizes), sizes, (Part(Box.of(sizes), cell.start),))

    def _extent(self, start: Shape, sizes: Shape) -> Extent | Chunk:
        array, packing, cell = self.array, self.array.packing, self.blocks.cell
        key = array.key([a // c for a, c in zip(start, array.chunk, strict=True)])
        strides = _strides(cell, packing.order)
        path = self._path(key)
        if self._plain:
            return Extent(path, 0, array.dtype, sizes, strides, swapped=packing.swapped)
        codecs, entry, window, there = packing.codecs, None, None, True
        if self.places is not None:
            place = self.places.get(key)
            there = place is not None
            if place is not None:
                entry, window = place.entry, (place.entry.header, place.entry.stored)
                if place.packed:
                    if packing.levels:
                        raise CorruptError(
                            f"{path}: the entry of {self.folder}/{key}, a shard, is compressed: lazyckpt reads the "
                            "chunks of a shard where they lie. Write the zip without compression (ZIP_STORED)"
                        )
                    codecs = (Codec("zip-deflate"), *codecs)
        return Chunk(
            path,
            array.dtype,
            sizes,
            strides,
            prod(cell) * array.dtype.itemsize,
            codecs,
            None if self.complete else array.fill,
            packing.swapped,
            _shards(start, array.chunk, packing.levels),
            window,
            entry,
            there,
        )

    def _path(self, key: str) -> str:
        return self.zip if self.zip is not None else f"{self.folder}/{key}" if self.folder else key


class ChunkFiles(Mapping[str, FileInfo]):
    """The files of a hierarchy: its documents, and the chunks. Chunks that ``states`` lacks are looked at when one asks
    for them. A chunk that is not there has size and time 0."""

    def __init__(
        self,
        store: Store,
        documents: Mapping[str, FileInfo],
        states: Mapping[str, FileInfo],
        chunks: Sequence[GridFragments | str],
    ) -> None:
        self._store = store
        self._documents = dict(documents)
        self._states = states
        self._chunks = tuple(chunks)
        self._single = {chunk for chunk in chunks if isinstance(chunk, str)}
        self._grids = {chunk.folder: chunk for chunk in chunks if isinstance(chunk, GridFragments)}

    def only(self, paths: Iterable[str]) -> ChunkFiles:
        """Those of them."""
        wanted = dict.fromkeys(paths)
        documents = {path: info for path, info in self._documents.items() if path in wanted}
        chunks = [path for path in wanted if path not in documents and path in self]
        states = self._states.only(chunks, {}) if isinstance(self._states, Listed) else self._states
        return ChunkFiles(self._store, documents, states, chunks)

    def __getitem__(self, path: str) -> FileInfo:
        if path in self._documents:
            return self._documents[path]
        if path not in self:
            raise KeyError(path)
        return self._states.get(path) or present(self._store, path) or ABSENT

    def __contains__(self, path: object) -> bool:
        if not isinstance(path, str):
            return False
        if path in self._documents or path in self._single:
            return True
        folder = path
        while folder:
            folder = folder.rpartition("/")[0]
            if folder in self._grids:
                return self._grids[folder].holds(path)
        return False

    def __iter__(self) -> Iterator[str]:
        yield from self._documents
        yield from self.paths()

    def paths(self) -> Iterator[str]:
        """The files that chunks are in, or would be in."""
        for chunk in self._chunks:
            if isinstance(chunk, str):
                yield chunk
            else:
                yield from chunk.paths()

    def __len__(self) -> int:
        return sum(1 for _ in self)


def spec_of(name: str, fragments: GridFragments, rule: str = "") -> TensorSpec:
    """The tensor of an array. One that is a single chunk lies there as it is."""
    array = fragments.array
    if 0 in array.shape:
        return TensorSpec(name, array.shape, array.dtype, (), rule=rule)
    if len(fragments) == 1:
        only = Fragment(fragments.fragment(0).extent, array.shape)
        return TensorSpec(name, array.shape, array.dtype, (only,), rule=rule)
    return TensorSpec(name, array.shape, array.dtype, fragments, rule=rule)


def _gaps(there: Sequence[Shape], start: Shape, stop: Shape, axis: int = 0) -> Iterator[Box]:
    """The blocks of a grid between ``start`` and ``stop`` that none of these places is in, which are sorted.

    >>> [(box.start, box.stop) for box in _gaps([(1, 2)], (0, 0), (3, 4))]
    [((0, 0), (1, 4)), ((1, 0), (2, 2)), ((1, 3), (2, 4)), ((2, 0), (3, 4))]
    """
    if axis == len(start):
        return
    at = start[axis]
    for n, group in itertools.groupby(there, lambda place: place[axis]):
        inner_start, inner_stop = list(start), list(stop)
        if at < n:
            inner_start[axis], inner_stop[axis] = at, n
            yield Box(tuple(inner_start), tuple(inner_stop))
        inner_start[axis], inner_stop[axis] = n, n + 1
        yield from _gaps(list(group), tuple(inner_start), tuple(inner_stop), axis + 1)
        at = n + 1
    if at < stop[axis]:
        yield Box((*start[:axis], at, *start[axis + 1 :]), stop)


def _count(wanted: range, size: int) -> int:
    return len(wanted) if not wanted or wanted.step > size else wanted[-1] // size - wanted[0] // size + 1


def _strides(cell: Shape, order: Shape) -> Shape:
    """Strides of a chunk whose dimensions are stored in another order.

    >>> _strides((2, 3, 4), (2, 0, 1))
    (3, 1, 6)
    """
    strides = [0] * len(cell)
    for axis, stride in zip(order, c_strides([cell[axis] for axis in order]), strict=True):
        strides[axis] = stride
    return tuple(strides)


def _shards(start: Shape, chunk: Shape, levels: Sequence[Level]) -> tuple[Shard, ...]:
    """Return the position of the cell that begins at ``start`` within the shards of each level."""
    found = []
    outer = chunk
    for level in levels:
        inner = [(a % o) // c for a, o, c in zip(start, outer, level.cell, strict=True)]
        counts = grid_of(outer, level.cell)
        number = 0
        for axis in level.order:
            number = number * counts[axis] + inner[axis]
        found.append(Shard(number, prod(counts), level.at_end, level.checked, level.swapped))
        outer = level.cell
    return tuple(found)
