"""The fragments of a tensor that lies on a device mesh: made on demand from what each rank's file holds of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from ...core.box import Shape, c_strides
from ...core.dtypes import DType
from ...core.index import Extent, Fragment, Hole
from ...core.plan import Selection
from ...layouts.placements import Cut, Layout


@dataclass(frozen=True, slots=True)
class Team:
    """The ranks that hold tensors of one layout: where each stands in its mesh, and its file. ``lost``: why a file
    cannot be read; empty for one that can."""

    coordinates: tuple[Shape, ...]
    paths: tuple[str, ...]
    lost: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class MeshFragments(Sequence[Fragment]):
    """One fragment for every rank that holds some of the tensor. A rank's array is taken to be in C order from byte
    ``offsets[rank]`` of its file on; where it is not, ``odd`` has its extent."""

    shape: Shape
    dtype: DType
    layout: Layout
    team: Team
    offsets: NDArray[np.int64]
    odd: Mapping[int, Extent] = field(default_factory=dict)

    def _fragment(self, n: int) -> Fragment:
        coordinate = self.team.coordinates[n]
        local = self.layout.local_shape(self.shape, coordinate)
        extent: Extent | Hole
        if self.team.lost[n]:
            extent = Hole(self.team.paths[n], self.team.lost[n])
        elif n in self.odd:
            extent = self.odd[n]
        else:
            extent = Extent(self.team.paths[n], int(self.offsets[n]), self.dtype, local, c_strides(local))
        return Fragment(extent, local, None if local == self.shape else self.layout.parts(self.shape, coordinate))

    @property
    def _held(self) -> Sequence[int]:
        return _hulls(self.layout, self.shape, self.team.coordinates)[2]

    @property
    def intact(self) -> bool:
        """Whether every shard is there, on one rank at least."""
        return _intact(self.layout, self.team)

    def near(self, want: Selection) -> list[Fragment]:
        """The fragments that may hold wanted elements; of replicas the first that is there."""
        if any(not r for r in want):
            return []
        starts, stops, held = _hulls(self.layout, self.shape, self.team.coordinates)
        first = np.array([r[0] for r in want], np.int64)
        last = np.array([r[-1] for r in want], np.int64)
        hit = ((starts <= last) & (stops > first)).all(axis=1)
        chosen: dict[Shape, int] = {}
        for at in np.flatnonzero(hit).tolist():
            n = held[at]
            key = self.layout.key(self.team.coordinates[n])
            if key not in chosen or (self.team.lost[chosen[key]] and not self.team.lost[n]):
                chosen[key] = n
        return [self._fragment(n) for n in chosen.values()]

    def __len__(self) -> int:
        return len(self._held)

    @overload
    def __getitem__(self, n: int) -> Fragment: ...
    @overload
    def __getitem__(self, n: slice) -> list[Fragment]: ...
    def __getitem__(self, n: Any) -> Any:
        found = self._held[n]
        return [self._fragment(i) for i in found] if isinstance(n, slice) else self._fragment(found)

    def __iter__(self) -> Iterator[Fragment]:
        return map(self._fragment, self._held)


@lru_cache(maxsize=256)
def _intact(layout: Layout, team: Team) -> bool:
    there = {layout.key(c) for c, lost in zip(team.coordinates, team.lost, strict=True) if not lost}
    return len(there) == prod(n for n, p in zip(layout.mesh, layout.placements, strict=True) if isinstance(p, Cut))


@lru_cache(maxsize=256)
def _hulls(
    layout: Layout, shape: Shape, coordinates: tuple[Shape, ...]
) -> tuple[NDArray[np.int64], NDArray[np.int64], tuple[int, ...]]:
    """Between which elements each rank's blocks lie, for the ranks that hold any: (starts, stops, which ranks)."""
    known: dict[Shape, Any] = {}
    starts, stops, held = [], [], []
    for n, coordinate in enumerate(coordinates):
        key = layout.key(coordinate)
        hull = known.get(key)
        if hull is None:
            hull = known[key] = layout.hull(shape, coordinate)
        if hull:
            starts.append(hull.start)
            stops.append(hull.stop)
            held.append(n)
    size = len(held), len(shape)
    return np.array(starts, np.int64).reshape(size), np.array(stops, np.int64).reshape(size), tuple(held)
