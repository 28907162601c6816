"""The fragments of parameters in flat buffers that are partitioned over data-parallel ranks.

A checkpoint of a thousand ranks has a million fragments, but they follow from few numbers: a group's partitions are
stored once (`Partition`), and the fragments of a parameter are created on demand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, overload

import numpy as np

from ...core.box import Selection, Shape, c_strides
from ...core.extents import Extent, Hole
from ...core.flat import Flat
from ...core.fragments import Find
from ...core.placement import Rank
from ...core.specs import Fragment
from ...core.table import Table, spans

_FEW = 8  # ranks that are planned one by one


@dataclass(frozen=True, slots=True)
class Partition:
    """One rank's partition of a group: a flat extent in its file, or a hole with the reason why there is none."""

    extent: Extent | Hole
    rank: Rank


Piece = Extent | Hole | None


class Alike(Sequence[Partition]):
    """Partitions of many ranks, made on demand, because many ranks' files have them at the same place.

    Attributes
    ----------
    ranks
        The path and the rank of each partition, and the number of its piece. All parameters share this list.
    pieces
        The different pieces: an extent, whose path is that of the partition, a hole, or None for a hole whose reason is
        that the file has no fragment.
    """

    __slots__ = ("pieces", "ranks")

    def __init__(self, ranks: Sequence[tuple[str, Rank, int]], pieces: Sequence[Piece]) -> None:
        self.ranks, self.pieces = ranks, pieces

    def __len__(self) -> int:
        return len(self.ranks)

    @overload
    def __getitem__(self, n: int) -> Partition: ...
    @overload
    def __getitem__(self, n: slice) -> Sequence[Partition]: ...
    def __getitem__(self, n: Any) -> Any:
        if isinstance(n, slice):
            return Alike(self.ranks[n], self.pieces)
        path, rank, number = self.ranks[n]
        piece = self.pieces[number]
        if piece is None:
            piece = Hole(path, f"{path} has no fragment of this frozen parameter")
        elif isinstance(piece, Extent) and piece.path != path:
            piece = replace(piece, path=path)
        return Partition(piece, rank)

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, Sequence) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))


@dataclass(frozen=True, slots=True)
class FlatFragments(Flat):
    """The fragments of a parameter, made on demand: one per rank that holds some of it.

    ZeRO-1 and 2: a group's flat buffer is partitioned over all ranks, ``width`` elements each, and the parameter starts
    at element ``within`` of the buffer. ZeRO-3 (``within`` is None): every rank holds ``width`` elements of every
    parameter, those of this one from element ``at`` of its extent on; elements beyond the parameter's end are padding
    with arbitrary values.
    """

    shape: Shape = field()  # (else its default would be the property of the base class)
    width: int
    partitions: Sequence[Partition]
    within: int | None = None
    at: int = 0

    def _ranks(self, lo: int, hi: int) -> range:
        """Return the ranks that hold elements [lo, hi) of the flattened parameter."""
        if lo >= hi or not self.width:
            return range(0)
        base = self.within or 0
        return range((base + lo) // self.width, min((base + hi - 1) // self.width + 1, len(self.partitions)))

    def _bounds(self, r: int) -> tuple[int, int, int]:
        """Return the elements [lo, hi) of the flattened parameter that rank r holds, and their start in its extent."""
        base = self.within or 0
        lo = max(0, r * self.width - base)
        hi = min(prod(self.shape), (r + 1) * self.width - base)
        return lo, hi, base + lo - r * self.width if self.within is not None else self.at

    @property
    def intact(self) -> bool:
        """Whether every element is there: of a thousand ranks that is sooner found out than planned."""
        total = prod(self.shape)
        ranks = self._ranks(0, total)
        if total and ranks.stop * self.width < (self.within or 0) + total:
            return False
        for r in ranks:
            extent = self.partitions[r].extent
            lo, hi, start = self._bounds(r)
            if not isinstance(extent, Extent) or start + hi - lo > extent.shape[0]:
                return False
        return True

    def _of_rank(self, r: int) -> Fragment:
        lo, hi, start = self._bounds(r)
        part = self.partitions[r]
        extent = part.extent
        if isinstance(extent, Extent):
            held = extent.shape[0]
            if start + hi - lo > held:  # the reader has checked sizes, but a group may be inconsistent
                extent = Hole(
                    extent.path, f"{extent.path} holds {held:,} elements of a group, {start + hi - lo:,} are needed"
                )
            else:
                extent = Extent(
                    extent.path,
                    extent.offset + start * extent.strides[0] * extent.dtype.itemsize,
                    extent.dtype,
                    (hi - lo,),
                    extent.strides,
                    swapped=extent.swapped,
                )
        return Fragment(extent, self.shape, None, (lo, hi), part.rank)

    def between(self, lo: int, hi: int) -> Iterator[Fragment]:
        """The fragments of the ranks that hold these elements."""
        return map(self._of_rank, self._ranks(lo, hi))

    def table(self, want: Selection, find: Find | None = None) -> Table | None:
        strides, total = c_strides(self.shape), prod(self.shape)
        ranks = self._ranks(
            *(n + sum(int(r[i]) * s for r, s in zip(want, strides, strict=True)) for i, n in ((0, 0), (-1, 1)))
        )
        extents = [part.extent for part in self.partitions[ranks.start : ranks.stop]]
        if len(ranks) < _FEW or not all(type(extent) is Extent and not extent.swapped for extent in extents):
            return None
        held = [extent for extent in extents if isinstance(extent, Extent)]
        if len({(extent.dtype, extent.strides) for extent in held}) > 1:
            return None
        base, rank = self.within or 0, np.arange(ranks.start, ranks.stop)
        low = np.maximum(rank * self.width - base, 0)
        high = np.minimum((rank + 1) * self.width - base, total)
        start = low + base - rank * self.width if self.within is not None else np.full(len(rank), self.at)
        if (start + high - low > np.array([extent.shape[0] for extent in held])).any():
            return None
        dtype, unit = held[0].dtype, held[0].strides[0]
        begin = np.array([extent.offset for extent in held]) + (start - low) * unit * dtype.itemsize
        numbers, places, starts, stops = spans(self.shape, low, high)
        return Table(
            [extent.path for extent in held],
            numbers,
            begin[numbers] + places * unit * dtype.itemsize,
            starts,
            stops,
            np.broadcast_to(np.array(strides, np.int64) * unit, starts.shape),
            dtype,
        )

    def __len__(self) -> int:
        return len(self._ranks(0, prod(self.shape)))

    def __bool__(self) -> bool:
        return len(self) > 0

    def only(self) -> Fragment | None:
        return self[0] if len(self) == 1 else None

    def __reduce__(self) -> tuple[Any, ...]:
        partitions, within = self.partitions, self.within
        if within is not None:  # pickle only the few of a thousand ranks that hold this parameter
            ranks = self._ranks(0, prod(self.shape))
            held = partitions[ranks.start : ranks.stop]
            if len(held) < len(partitions):
                partitions, within = held, within - ranks.start * self.width
        return FlatFragments, (self.shape, self.width, partitions, within, self.at)

    @overload
    def __getitem__(self, n: int) -> Fragment: ...
    @overload
    def __getitem__(self, n: slice) -> list[Fragment]: ...
    def __getitem__(self, n: Any) -> Any:
        ranks = self._ranks(0, prod(self.shape))[n]
        return [self._of_rank(r) for r in ranks] if isinstance(ranks, range) else self._of_rank(ranks)
