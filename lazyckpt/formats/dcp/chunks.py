"""Tensors in chunks: boxes at any place of the tensor, in any order, each in its own file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ...core.blocks import Blocks, Boxes
from ...core.box import Box, Selection, Shape
from ...core.dtypes import DType
from ...core.index import Archive, Extent, FileInfo, Fragment, Hole, Packed, Part, TensorSpec
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

ChunkBytes = Item | Extent | Hole  # what holds the elements of a chunk


@dataclass(frozen=True, slots=True, eq=False)
class ChunkFragments(Blocks):
    """One fragment for every chunk. ``stored``: what holds the chunk of each number."""

    dtype: DType
    blocks: Boxes = field()  # (else its default would be the property of the base class)
    stored: tuple[ChunkBytes, ...]

    def fragment(self, n: int) -> Fragment:
        box = self.blocks.box(n)
        shape = box.shape
        return Fragment(_extent(self.stored[n], self.dtype, shape), shape, (Part(Box.of(shape), box.start),))

    def meeting(self, want: Selection) -> list[Fragment]:
        return [self.fragment(n) for n in self.blocks.meeting(want)]

    def packed(self) -> list[Packed]:
        """The archives that all of them together are in."""
        found = (f.extent for f, stored in zip(self, self.stored, strict=True) if isinstance(stored, Item))
        return [extent for extent in found if isinstance(extent, Archive)]


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
    """Elements that are certainly in no chunk (more may be, where chunks overlap)."""
    return max(0, prod(shape) - sum(prod(sizes) for _, sizes in chunks))


def _extent(stored: ChunkBytes, dtype: DType, shape: Shape) -> Extent | Archive | Hole:
    if isinstance(stored, Item):
        return Archive(stored.path, stored.offset, stored.length, dtype, shape, stored.codecs)
    return stored
