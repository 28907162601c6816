"""A tensor in chunks: boxes anywhere in it, in any order, each in a file of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray

from ...core.box import Box, Shape
from ...core.index import Archive, Extent, Fragment, Hole, Part, TensorSpec
from ...core.plan import Selection
from .metadata import Item

Piece = Item | Extent | Hole


@dataclass(frozen=True, slots=True, eq=False)
class ChunkFragments(Sequence[Fragment]):
    """One fragment for every chunk, made on demand. ``starts`` and ``sizes``: [chunks, dimensions]."""

    dtype: torch.dtype
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
    name: str, dtype: torch.dtype, shape: Shape, chunks: Sequence[tuple[Shape, Shape, Piece]], rule: str = ""
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


def _extent(piece: Piece, dtype: torch.dtype, shape: Shape) -> Extent | Archive | Hole:
    if isinstance(piece, Item):
        return Archive(piece.path, piece.offset, piece.length, dtype, shape, piece.codecs)
    return piece
