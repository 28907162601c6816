"""Tensors in chunks: boxes at any place of the tensor, in any order, each in its own file."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from random import getrandbits
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...core.blocks import Blocks, Boxes
from ...core.box import Box, Selection, Shape, c_strides, is_run
from ...core.dtypes import DType
from ...core.extents import Archive, Extent, Hole, Packed
from ...core.fragments import Find
from ...core.index import FileInfo
from ...core.placement import Part
from ...core.specs import Fragment, TensorSpec
from ...core.table import Table
from ...errors import CorruptError, Problem
from ...io.containers.safetensors import read_safetensors
from ...io.storage.base import Store
from .columns import Ints
from .items import Item, Items
from .metadata import FEW, Chunks, Tensor

# -- Safetensors files that hold chunks of tensors, and say which.

INFO = "DCP_SHARDING_INFO"


class ShardFile(NamedTuple):
    """``chunks``: name -> (where the chunk starts in the tensor, its bytes). ``metadata``: the rest of the header's."""

    path: str
    info: FileInfo
    chunks: dict[str, tuple[Shape, Extent]]
    metadata: dict[str, str]
    notes: list[Problem]


def read_shard_file(store: Store, path: str, start: int = 0) -> ShardFile:
    """Index such a file, or what of a file begins at byte ``start``. Raises CorruptError, MissingFileError."""
    file = read_safetensors(store, path, start)
    where = f"{store.root}/{path}"
    table: Any = {}
    if INFO in file.metadata:
        try:
            table = json.loads(file.metadata[INFO])
        except (ValueError, RecursionError) as e:
            raise CorruptError(f"{where}: its {INFO} is not valid JSON ({str(e)[:80]}): damaged") from None
        if not isinstance(table, dict):
            raise CorruptError(f"{where}: its {INFO} is no table: damaged")
    chunks = {}
    for name, extent in file.extents.items():
        entry = table.get(name) if INFO in file.metadata else {"saved_offsets": [0] * len(extent.shape)}
        offsets = entry.get("saved_offsets") if isinstance(entry, dict) else None
        counted = isinstance(offsets, list) and all(type(n) is int and 0 <= n < 1 << 62 for n in offsets)
        if not isinstance(offsets, list) or not counted or len(offsets) != len(extent.shape):
            raise CorruptError(f"{where}: its {INFO} puts {name!r} of shape {extent.shape} at {str(offsets)[:80]}")
        chunks[name] = tuple(offsets), extent
    rest = {key: value for key, value in file.metadata.items() if key != INFO}
    return ShardFile(path, file.info, chunks, rest, [note.prefixed(path) for note in file.notes])


# -- A tensor in chunks: boxes anywhere in it, in any order, each in a file of its own.

ChunkBytes = Item | Extent | Hole  # what holds the elements of a chunk


_FEW = 8  # chunks that are planned one by one


class _Columns(NamedTuple):
    """Of each chunk the number of its file, and the position of its elements in bytes: -1 if it is not known yet."""

    paths: list[str]
    files: NDArray[np.int64]
    offsets: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class ChunkFragments(Blocks):
    """One fragment for every chunk. ``stored``: what holds the chunk of each number."""

    dtype: DType
    blocks: Boxes = field()  # (else its default would be the property of the base class)
    stored: Sequence[ChunkBytes]
    _columns: list[_Columns] = field(default_factory=list, init=False, repr=False)

    def fragment(self, n: int) -> Fragment:
        box = self.blocks.box(n)
        shape = box.shape
        return Fragment(_extent(self.stored[n], self.dtype, shape), shape, (Part(Box.of(shape), box.start),))

    def meeting(self, want: Selection) -> list[Fragment]:
        return [self.fragment(n) for n in self.blocks.meeting(want)]

    def __reduce__(self) -> tuple[Any, ...]:
        return ChunkFragments, (self.dtype, self.blocks, self.stored)  # equal whatever has been read

    def table(self, want: Selection, find: Find | None = None) -> Table | None:
        """Return the table of the chunks. Without ``find``, none of those that are not located yet have a position;
        with it, every chunk has to be located."""
        rows = self.blocks.rows(want)
        if len(rows) < _FEW or not self.blocks.disjoint:
            return None
        if not self._columns:
            self._columns.append(_columns(self.stored))
        paths, files, offsets = self._columns[0]
        unknown = rows[offsets[rows] < 0].tolist()
        located = [self._locate(n, find) for n in unknown] if find is not None or not self._archived else []
        if not all(located):
            return None
        starts, stops = self.blocks.starts[rows], self.blocks.stops[rows]
        strides = np.ones_like(starts)
        strides[:, :-1] = np.cumprod((stops - starts)[:, :0:-1], axis=1)[:, ::-1]
        if not unknown or located:
            return Table(paths, files[rows], offsets[rows], starts, stops, strides, self.dtype)
        return Table(paths, files[rows], np.zeros_like(rows), starts, stops, strides, self.dtype, self._told, rows)

    @property
    def _archived(self) -> bool:
        """Whether all chunks are archives."""
        return isinstance(self.stored, StoredItems) or all(type(one) is Item and not one.codecs for one in self.stored)

    def _told(self, n: int) -> Extent:
        extent = _extent(self.stored[n], self.dtype, self.blocks.box(n).shape)
        assert isinstance(extent, Archive)
        return extent.as_told

    def _locate(self, n: int, find: Find | None) -> bool:
        """Look up where a chunk is; return False if that is not known, or its elements are not raw and in C order."""
        shape = self.blocks.box(n).shape
        extent = _extent(self.stored[n], self.dtype, shape)
        if isinstance(extent, Archive) and find is not None:
            extent = find(extent)
        if not isinstance(extent, Extent) or not extent.raw or extent.dtype is not self.dtype:
            return False
        if not is_run(shape, extent.strides):
            return False
        self._columns[0].offsets[n] = extent.offset
        return True

    def packed(self) -> list[Packed]:
        """The archives that all of them together are in."""
        found = (f.extent for f, stored in zip(self, self.stored, strict=True) if isinstance(stored, Item))
        return [extent for extent in found if isinstance(extent, Archive)]


def _columns(stored: Sequence[ChunkBytes]) -> _Columns:
    if isinstance(stored, StoredItems):
        return _Columns(*stored.files, np.full(len(stored), -1, np.int64))
    numbers: dict[str, int] = {}
    files = [numbers.setdefault(chunk.path, len(numbers)) for chunk in stored]
    return _Columns(list(numbers), np.array(files, np.int64), np.full(len(files), -1, np.int64))


class StoredItems(Sequence[Item]):
    """Items of chunks as columns: numbers of ``names``, offsets, lengths."""

    __slots__ = ("_lengths", "_names", "_offsets", "_paths")

    def __init__(self, names: Sequence[str], paths: Any, offsets: Any, lengths: Any) -> None:
        self._names, self._paths, self._offsets, self._lengths = names, paths, offsets, lengths

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, n: Any) -> Any:
        if isinstance(n, slice):
            return StoredItems(self._names, self._paths[n], self._offsets[n], self._lengths[n])
        return Item(self._names[int(self._paths[n])], int(self._offsets[n]), int(self._lengths[n]))

    @property
    def files(self) -> tuple[list[str], NDArray[np.int64]]:
        """The paths of these items only, and the number of each item's path among them."""
        used, numbers = np.unique(self._paths, return_inverse=True)
        return [self._names[n] for n in used.tolist()], numbers.astype(np.int64)

    def __reduce__(self) -> tuple[Any, ...]:
        names, numbers = self.files
        return StoredItems, (names, numbers.astype(np.int32), self._offsets.copy(), self._lengths.copy())


def in_rows(key: str, tensor: Tensor, items: Items, sizes: Callable[[Ints], Ints]) -> TensorSpec | None:
    """Return a tensor whose chunks and items are columns and match, without an object for each; else None.

    ``sizes`` returns the sizes of files by the numbers of their paths, -1 for a missing file."""
    chunks, bounds = tensor.chunks, items.bounds.get(key)
    if not isinstance(chunks, Chunks) or bounds is None or len(chunks) != bounds[1] - bounds[0] or len(chunks) < 2:
        return None
    rows = slice(*bounds)
    if len(chunks) <= FEW:
        return _in_few_rows(key, tensor, chunks, items, rows, sizes)
    shape = np.array(tensor.shape, np.int64)
    starts = items.starts[rows, : len(shape)]
    if (items.dims[rows] != len(shape)).any():
        return None
    where: Any = rows
    if not np.array_equal(starts, chunks.starts):
        if (starts >= shape).any():
            return None
        strides = np.array(c_strides(tensor.shape), np.int64)
        wanted, there = chunks.starts @ strides, starts @ strides
        order, found = np.argsort(wanted), np.argsort(there)
        if not np.array_equal(wanted[order], there[found]):
            return None
        where = np.empty(len(order), np.int64)
        where[order] = bounds[0] + found
    paths, offsets, lengths = items.paths[where], items.offsets[where], items.lengths[where]
    ends = sizes(paths)
    # an archive is longer than its tensor; a tensor in a safetensors file is listed with its exact length
    if (offsets > ends - lengths).any() or (lengths == chunks.sizes.prod(1) * tensor.dtype.itemsize).any():
        return None
    return _in_columns(key, tensor, chunks, StoredItems(items.names, paths, offsets, lengths))


def _in_few_rows(
    key: str, tensor: Tensor, chunks: Chunks, items: Items, rows: slice, sizes: Callable[[Ints], Ints]
) -> TensorSpec | None:
    """Return what `in_rows` does, for a few chunks, with lists in the place of numpy."""
    dims = len(tensor.shape)
    starts = [tuple(start[:dims]) for start in items.starts[rows].tolist()]
    if items.dims[rows].tolist() != [dims] * len(starts):
        return None
    wanted = [tuple(start) for start in chunks.starts.tolist()]
    where: Any = rows
    if starts != wanted:
        at = {start: rows.start + n for n, start in enumerate(starts)}
        if len(at) < len(starts) or any(start not in at for start in wanted):
            return None
        where = np.array([at[start] for start in wanted], np.int64)
    paths, offsets, lengths = items.paths[where], items.offsets[where], items.lengths[where]
    about = zip(offsets.tolist(), lengths.tolist(), sizes(paths).tolist(), chunks.sizes.tolist(), strict=True)
    for offset, length, end, shape in about:
        if offset + length > end or length == prod(shape) * tensor.dtype.itemsize:
            return None
    return _in_columns(key, tensor, chunks, StoredItems(items.names, paths, offsets, lengths))


def _in_columns(key: str, tensor: Tensor, chunks: Chunks, stored: StoredItems) -> TensorSpec:
    blocks = Boxes(chunks.starts, chunks.starts + chunks.sizes, range(len(chunks)))
    return TensorSpec(key, tensor.shape, tensor.dtype, ChunkFragments(tensor.dtype, blocks, stored))


def in_chunks(
    name: str, dtype: DType, shape: Shape, chunks: Sequence[tuple[Shape, Shape, ChunkBytes]], rule: str = ""
) -> TensorSpec:
    """A tensor from its chunks: (where it starts, its shape, its bytes). Empty ones are left out."""
    held = [chunk for chunk in chunks if 0 not in chunk[1]]
    if len(held) == 1 and held[0][1] == shape:
        return TensorSpec(name, shape, dtype, (Fragment(_extent(held[0][2], dtype, shape), shape),), rule=rule)
    if not held:
        return TensorSpec(name, shape, dtype, (), rule=rule)
    count = len(held), len(shape)
    starts = np.array([start for start, _, _ in held], np.int64).reshape(count)
    sizes = np.array([sizes for _, sizes, _ in held], np.int64).reshape(count)
    boxes = Boxes(starts, starts + sizes, range(len(held)))
    fragments = ChunkFragments(dtype, boxes, tuple(stored for _, _, stored in held))
    return TensorSpec(name, shape, dtype, fragments, rule=rule)


def uncovered(shape: Shape, chunks: Sequence[tuple[Shape, Shape]]) -> int:
    """Return the number of elements that are certainly in no chunk (more may be, where chunks overlap); less than zero
    if chunks have more elements than the tensor, which means that they overlap."""
    if isinstance(chunks, Chunks):
        counts = chunks.sizes.prod(1)
        if int(counts.max(initial=0)) * len(counts) < 1 << 63:
            return prod(shape) - int(counts.sum())
    return prod(shape) - sum(prod(sizes) for _, sizes in chunks)


def overlapping(shape: Shape, chunks: Sequence[tuple[Shape, Shape]]) -> bool:
    """Return whether chunks that have as many elements as the tensor overlap, and so leave others out.

    Chunks cover each element once exactly if the sum of the products of f(stop) - f(start) over the dimensions is that
    of the whole tensor, for every function f of the places on each dimension. Random functions, which no file knows,
    decide that in one pass: they say "overlapping" only if it is true, and miss it once in 2**50 or so.

    >>> overlapping((4,), [((0,), (2,)), ((2,), (2,))]), overlapping((4,), [((0,), (2,)), ((1,), (2,))])
    (False, True)
    """
    if len(chunks) < 2 or not shape:
        return False
    if isinstance(chunks, Chunks):
        return _overlapping_columns(shape, chunks)
    at = 0
    for start, sizes in chunks:  # most tensors are cut along the first dimension, in order
        if start[0] != at or sizes[1:] != shape[1:]:
            break
        at += sizes[0]
    else:
        return False
    functions = [defaultdict[int, int](lambda: getrandbits(64)) for _ in shape]

    def measure(start: Sequence[int], sizes: Sequence[int]) -> int:
        return prod(f[a + n] - f[a] for f, a, n in zip(functions, start, sizes, strict=True))

    return sum(measure(*chunk) for chunk in chunks) != measure((0,) * len(shape), shape)


def _overlapping_columns(shape: Shape, chunks: Chunks) -> bool:
    starts, stops = chunks.starts, chunks.starts + chunks.sizes
    if (starts[1:, 0] == stops[:-1, 0]).all() and (chunks.sizes[:, 1:] == shape[1:]).all():
        return False
    bounds = np.array([shape], np.int64)
    return _measure(starts, stops) != _measure(np.zeros_like(bounds), bounds)


def _measure(starts: Ints, stops: Ints) -> int:
    """Return the sum over boxes of the product of f(stop) - f(start), modulo 2**64."""
    total = np.ones(len(starts), np.uint64)
    for dim in range(starts.shape[1]):
        total *= _random(stops[:, dim], dim) - _random(starts[:, dim], dim)
    return int(total.sum())


def _random(places: Ints, dim: int) -> NDArray[np.uint64]:
    """Return a random number for each place: the function of splitmix64, with a secret of this process."""
    x = places.astype(np.uint64) + np.uint64((_SECRET + dim * 0x9E3779B97F4A7C15) & (1 << 64) - 1)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


_SECRET = getrandbits(64)


def _extent(stored: ChunkBytes, dtype: DType, shape: Shape) -> Extent | Archive | Hole:
    if isinstance(stored, Item):
        return Archive(stored.path, stored.offset, stored.length, dtype, shape, stored.codecs)
    return stored
