"""Tensors in chunks: boxes at any place of the tensor, in any order, each in its own file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from ...core.box import Box, Shape
from ...core.dtypes import DType
from ...core.index import Archive, Extent, FileInfo, Fragment, Hole, Part, TensorSpec
from ...core.plan import Selection
from ...errors import CorruptError, Problem
from ...io.containers.safetensors import read_safetensors
from ...io.storage.base import Store
from .metadata import Item

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

Piece = Item | Extent | Hole


@dataclass(frozen=True, slots=True, eq=False)
class ChunkFragments(Sequence[Fragment]):
    """One fragment for every chunk, made on demand. ``starts`` and ``sizes``: [chunks, dimensions]."""

    dtype: DType
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    pieces: tuple[Piece, ...]

    def _fragment(self, n: int) -> Fragment:
        start, sizes = tuple(self.starts[n].tolist()), tuple(self.sizes[n].tolist())
        return Fragment(_extent(self.pieces[n], self.dtype, sizes), sizes, (Part(Box.of(sizes), start),))

    def near(self, want: Selection) -> list[Fragment]:
        """The chunks that lie between the first and the last wanted element."""
        if any(not r for r in want):
            return []
        first = np.array([r[0] for r in want], np.int64)
        last = np.array([r[-1] for r in want], np.int64)
        hit = ((self.starts <= last) & (self.starts + self.sizes > first)).all(axis=1)
        return [self._fragment(int(n)) for n in np.flatnonzero(hit)]

    def archives(self) -> list[Archive]:
        """The archives that all of them together are in."""
        found = (f.extent for f, piece in zip(self, self.pieces, strict=True) if isinstance(piece, Item))
        return [extent for extent in found if isinstance(extent, Archive)]

    def __len__(self) -> int:
        return len(self.pieces)

    @overload
    def __getitem__(self, n: int) -> Fragment: ...
    @overload
    def __getitem__(self, n: slice) -> list[Fragment]: ...
    def __getitem__(self, n: Any) -> Any:
        numbers = range(len(self.pieces))[n]
        return [self._fragment(i) for i in numbers] if isinstance(numbers, range) else self._fragment(numbers)

    def __iter__(self) -> Iterator[Fragment]:
        return map(self._fragment, range(len(self.pieces)))


def in_chunks(
    name: str, dtype: DType, shape: Shape, chunks: Sequence[tuple[Shape, Shape, Piece]], rule: str = ""
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
    return TensorSpec(name, shape, dtype, ChunkFragments(dtype, starts, sizes, tuple(p for _, _, p in held)), rule=rule)


def uncovered(shape: Shape, chunks: Sequence[tuple[Shape, Shape]]) -> int:
    """Elements that are certainly in no chunk (more may be, where chunks overlap)."""
    return max(0, prod(shape) - sum(prod(sizes) for _, sizes in chunks))


def _extent(piece: Piece, dtype: DType, shape: Shape) -> Extent | Archive | Hole:
    if isinstance(piece, Item):
        return Archive(piece.path, piece.offset, piece.length, dtype, shape, piece.codecs)
    return piece
