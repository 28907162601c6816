"""Fragments that each hold one block of the tensor. Pure.

Where the blocks lie is data of its own, a regular `Grid` or a table of `Boxes`; what a format adds is which bytes hold
the block of a number.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from .box import Box, Shape, c_strides
from .chunking import chunk_box, grid_of
from .fragments import Fragments, Selection
from .index import Fragment


@dataclass(frozen=True, slots=True, eq=False)
class Boxes:
    """Blocks anywhere in a tensor, in any order. ``starts`` and ``stops``: [blocks, dimensions]. ``numbers``: by which
    number each block goes."""

    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    numbers: Sequence[int]

    @property
    def cell(self) -> None:
        """They form no grid."""
        return None

    def __len__(self) -> int:
        return len(self.starts)

    def box(self, at: int) -> Box:
        """The block at a place of the table."""
        return Box(tuple(self.starts[at].tolist()), tuple(self.stops[at].tolist()))

    def meeting(self, want: Selection) -> list[int]:
        """The numbers of the blocks between the first and the last wanted element."""
        if not all(map(len, want)):
            return []
        first = np.array([r[0] for r in want], np.int64)
        last = np.array([r[-1] for r in want], np.int64)
        hit = ((self.starts <= last) & (self.stops > first)).all(axis=1)
        return [self.numbers[at] for at in np.flatnonzero(hit).tolist()]


@dataclass(frozen=True, slots=True)
class Grid:
    """The cells of a regular grid, in C order; the last ones of a dimension are cut off by the end of the tensor.

    >>> grid = Grid((5, 4), (2, 4))
    >>> grid.box(2), list(grid.meeting((range(4, 5), range(4))))
    (Box(start=(4, 0), stop=(5, 4)), [Box(start=(4, 0), stop=(5, 4))])
    """

    shape: Shape
    cell: Shape

    @property
    def counts(self) -> Shape:
        """How many cells there are in each dimension."""
        return grid_of(self.shape, self.cell)

    @property
    def numbers(self) -> range:
        """The numbers of all cells."""
        return range(len(self))

    def __len__(self) -> int:
        return prod(self.counts)

    def box(self, n: int) -> Box:
        """The block of a number."""
        counts = self.counts
        place = [n // stride % count for stride, count in zip(c_strides(counts), counts, strict=True)]
        return chunk_box(place, self.shape, self.cell)

    def meeting(self, want: Selection) -> Iterator[Box]:
        """Yield the cells that hold wanted elements, in C order."""
        if all(map(len, want)):
            for place in product(*map(cells, want, self.cell)):
                yield chunk_box(place, self.shape, self.cell)


def cells(wanted: range, size: int) -> Iterator[int]:
    """The cells of this size, of one dimension, that hold wanted elements (one at least)."""
    if wanted.step <= size:
        return iter(range(wanted[0] // size, wanted[-1] // size + 1))
    return (i // size for i in wanted)


class Blocks(Fragments):
    """One fragment for each of the blocks that lie at ``blocks``."""

    __slots__ = ()

    @property
    @abstractmethod
    def blocks(self) -> Boxes | Grid:
        """Where the blocks lie in the tensor."""

    @abstractmethod
    def fragment(self, n: int) -> Fragment:
        """The fragment that holds the block of a number."""

    def only(self) -> Fragment | None:
        numbers = self.blocks.numbers
        return self.fragment(numbers[0]) if len(numbers) == 1 else None

    @property
    def cell(self) -> Shape | None:
        return self.blocks.cell

    def __len__(self) -> int:
        return len(self.blocks)

    def __bool__(self) -> bool:
        return len(self) > 0

    def __iter__(self) -> Iterator[Fragment]:
        return map(self.fragment, self.blocks.numbers)

    @overload
    def __getitem__(self, n: int) -> Fragment: ...
    @overload
    def __getitem__(self, n: slice) -> list[Fragment]: ...
    def __getitem__(self, n: Any) -> Any:
        numbers = self.blocks.numbers[n]
        return self.fragment(numbers) if isinstance(numbers, int) else list(map(self.fragment, numbers))
