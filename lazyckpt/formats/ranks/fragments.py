"""The fragments of a tensor on a device mesh, created on demand from the offsets in the ranks' files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod

import numpy as np
from numpy.typing import NDArray

from ...core.blocks import Blocks, Boxes
from ...core.box import Box, Selection, Shape, c_strides
from ...core.dtypes import DType
from ...core.extents import Extent, Hole
from ...core.specs import Fragment
from ...layouts.placements import Cut, Layout


@dataclass(frozen=True, slots=True)
class Team:
    """The ranks that hold tensors of one layout, with their coordinates in the mesh and their files.

    ``lost`` holds the reason why each file cannot be read, empty if it can.
    """

    coordinates: tuple[Shape, ...]
    paths: tuple[str, ...]
    lost: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class MeshFragments(Blocks):
    """One fragment for every rank that holds a part of the tensor.

    A rank's array is in C order and begins at byte ``offsets[rank]`` of its file; ``odd`` holds the extents of all
    other arrays.
    """

    shape: Shape
    dtype: DType
    layout: Layout
    team: Team
    offsets: NDArray[np.int64]
    odd: Mapping[int, Extent] = field(default_factory=dict)

    @property
    def blocks(self) -> Boxes:
        """The bounding boxes of the ranks' blocks, by rank, for the ranks that hold any."""
        return _hulls(self.layout, self.shape, self.team.coordinates)

    def fragment(self, n: int) -> Fragment:
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
    def intact(self) -> bool:
        """Whether at least one rank's readable file holds each shard."""
        return _intact(self.layout, self.team)

    def meeting(self, want: Selection) -> list[Fragment]:
        """Return the fragments that may hold selected elements, with the first readable one of each set of replicas."""
        chosen: dict[Shape, int] = {}
        for n in self.blocks.meeting(want):
            key = self.layout.key(self.team.coordinates[n])
            if key not in chosen or (self.team.lost[chosen[key]] and not self.team.lost[n]):
                chosen[key] = n
        return list(map(self.fragment, chosen.values()))

    def replicas(self, want: Selection) -> list[Fragment]:
        return list(map(self.fragment, self.blocks.meeting(want)))


@lru_cache(maxsize=256)
def _intact(layout: Layout, team: Team) -> bool:
    there = {layout.key(c) for c, lost in zip(team.coordinates, team.lost, strict=True) if not lost}
    return len(there) == prod(n for n, p in zip(layout.mesh, layout.placements, strict=True) if isinstance(p, Cut))


@lru_cache(maxsize=256)
def _hulls(layout: Layout, shape: Shape, coordinates: tuple[Shape, ...]) -> Boxes:
    known: dict[Shape, Box] = {}
    starts, stops, holders = [], [], []
    for n, coordinate in enumerate(coordinates):
        key = layout.key(coordinate)
        hull = known.get(key)
        if hull is None:
            hull = known[key] = layout.hull(shape, coordinate)
        if hull:
            starts.append(hull.start)
            stops.append(hull.stop)
            holders.append(n)
    size = len(holders), len(shape)
    return Boxes(np.array(starts, np.int64).reshape(size), np.array(stops, np.int64).reshape(size), tuple(holders))
