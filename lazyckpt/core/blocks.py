"""Sequences of fragments that each hold one block of a tensor. No I/O.

A `Grid` (regular) or a table of `Boxes` (irregular) describes the positions of the blocks. A format adds which bytes
hold each block.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from .box import Axis, Box, Selection, Shape, c_strides
from .chunking import chunk_box, grid_of
from .fragments import Fragments
from .specs import Fragment


@dataclass(frozen=True, slots=True, eq=False)
class Boxes:
    """Blocks at any positions in a tensor, in any order.

    ``starts`` and ``stops`` have shape [blocks, dimensions]. ``numbers`` holds the number of each block, by row.
    """

    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    numbers: Sequence[int]
    _apart: list[bool] = field(default_factory=list, init=False, repr=False)  # the result of `disjoint`

    def __reduce__(self) -> tuple[Any, ...]:
        return Boxes, (self.starts, self.stops, self.numbers)

    @property
    def cell(self) -> None:
        """None: the blocks form no grid."""
        return None

    def __len__(self) -> int:
        return len(self.starts)

    def box(self, at: int) -> Box:
        """Return the block in a row of the table."""
        return Box(tuple(self.starts[at].tolist()), tuple(self.stops[at].tolist()))

    def meeting(self, want: Selection) -> list[int]:
        """Return the numbers of the blocks that overlap the bounding box of the selection, and in each dimension that
        is selected by a list an index of the list."""
        return [self.numbers[at] for at in self.rows(want).tolist()]

    def rows(self, want: Selection) -> NDArray[np.int64]:
        """Return the rows of these blocks in the table."""
        if not all(map(len, want)):
            return np.zeros(0, np.int64)
        first = np.array([r[0] for r in want], np.int64)
        last = np.array([r[-1] for r in want], np.int64)
        hit = ((self.starts <= last) & (self.stops > first)).all(axis=1)
        for d, axis in enumerate(want):
            if not isinstance(axis, range):
                low, high = (np.searchsorted(axis, ends[:, d]) for ends in (self.starts, self.stops))
                hit &= low < high
        return np.flatnonzero(hit)

    @property
    def disjoint(self) -> bool:
        """Whether it is certain that no two blocks overlap: they are the cells of a grid with lines anywhere."""
        if not self._apart:
            cell = np.zeros(len(self), np.int64)
            alike = True
            for d in range(self.starts.shape[1]):
                lines = np.unique(np.concatenate((self.starts[:, d], self.stops[:, d])))
                low, high = (np.searchsorted(lines, ends[:, d]) for ends in (self.starts, self.stops))
                alike = alike and bool((high == low + 1).all())
                cell = cell * len(lines) + low
            self._apart.append(alike and len(np.unique(cell)) == len(self))
        return self._apart[0]


@dataclass(frozen=True, slots=True)
class Grid:
    """The cells of a regular grid, in C order. The end of the tensor cuts off the last cells of each dimension.

    >>> grid = Grid((5, 4), (2, 4))
    >>> grid.box(2), list(grid.meeting((range(4, 5), range(4))))
    (Box(start=(4, 0), stop=(5, 4)), [Box(start=(4, 0), stop=(5, 4))])
    """

    shape: Shape
    cell: Shape

    @property
    def counts(self) -> Shape:
        """The number of cells in each dimension."""
        return grid_of(self.shape, self.cell)

    @property
    def numbers(self) -> range:
        """The numbers of all cells."""
        return range(len(self))

    def __len__(self) -> int:
        return prod(self.counts)

    def box(self, n: int) -> Box:
        """Return the block of cell ``n``."""
        counts = self.counts
        place = [n // stride % count for stride, count in zip(c_strides(counts), counts, strict=True)]
        return chunk_box(place, self.shape, self.cell)

    def meeting(self, want: Selection) -> Iterator[Box]:
        """Yield the cells that hold wanted elements, in C order."""
        if all(map(len, want)):
            for place in product(*map(cells, want, self.cell)):
                yield chunk_box(place, self.shape, self.cell)


def cells(wanted: Axis, size: int) -> Iterator[int]:
    """Return the cells of one dimension, ``size`` elements each, that hold an index of ``wanted`` (not empty)."""
    if not isinstance(wanted, range):
        return iter(np.unique(wanted // size).tolist())
    if wanted.step <= size:
        return iter(range(wanted[0] // size, wanted[-1] // size + 1))
    return (i // size for i in wanted)


class Blocks(Fragments):
    """One fragment for each block of the tensor."""

    __slots__ = ()

    @property
    @abstractmethod
    def blocks(self) -> Boxes | Grid:
        """The positions of the blocks in the tensor."""

    @abstractmethod
    def fragment(self, n: int) -> Fragment:
        """Return the fragment that holds block ``n``."""

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
