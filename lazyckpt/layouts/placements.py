"""The blocks of a tensor that each rank of a device mesh holds, from the placements of a DTensor. No I/O.

Writer: torch/distributed/tensor/placement_types.py (`Shard` cuts like `torch.chunk`; `_StridedShard` cuts what another
mesh dimension will cut afterwards, so that a rank may hold several runs of the dimension), _utils.py
`compute_local_shape_and_global_offset` (placements apply from left to right) and _dtensor_spec.py (`shard_order`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

from ..core.box import Box, Shape
from ..core.placement import Part

_MAX_PARTS = 1 << 14  # parts of one rank's array; valid files have a few

Run = tuple[int, int]  # start in the whole dimension, and length


class Cut(NamedTuple):
    """``Shard(dim)``, or ``_StridedShard(dim, split_factor=split)`` if ``split`` > 1. ``dim`` is not negative."""

    dim: int
    split: int = 1


class Same(NamedTuple):
    """``Replicate()``: all ranks along the mesh dimension hold the same."""


class Summand(NamedTuple):
    """``Partial(reduce)``: the ranks hold summands that have yet to be reduced; none holds the values."""

    reduce: str


MeshPlacement = Cut | Same | Summand


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a tensor on a device mesh.

    ``mesh`` is the shape of the mesh, ``placements`` has one entry for each of its dimensions. ``order`` holds the mesh
    dimensions in the order in which they cut (None: from left to right).
    """

    mesh: Shape
    placements: tuple[MeshPlacement, ...]
    order: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if len(self.mesh) != len(self.placements):
            raise ValueError(f"{len(self.placements)} placements on a mesh of {len(self.mesh)} dimensions")
        if self.order is not None and sorted(self.order) != list(range(len(self.mesh))):
            raise ValueError(f"an order {self.order} of the {len(self.mesh)} dimensions of a mesh")
        if any(n < 1 for n in self.mesh):
            raise ValueError(f"a mesh of shape {self.mesh}")
        for p in self.placements:
            if isinstance(p, Cut) and (p.dim < 0 or p.split < 1):
                raise ValueError(f"a shard along dimension {p.dim}, split by {p.split}")

    @property
    def partial(self) -> str:
        """The reduction that the ranks' arrays still need ("sum", "avg", ...); empty if they need none."""
        return next((p.reduce for p in self.placements if isinstance(p, Summand)), "")

    def key(self, coordinate: Sequence[int]) -> Shape:
        """Return the part of a coordinate that decides what a rank holds; it is equal for replicas."""
        return tuple(c for c, p in zip(coordinate, self.placements, strict=True) if isinstance(p, Cut))

    def coordinates(self) -> Iterator[Shape]:
        """Yield the coordinates of all ranks of the mesh, in C order."""
        return product(*map(range, self.mesh))

    def cuts(self, ndim: int) -> list[list[tuple[int, int]]]:
        """Return, for every dimension of the tensor, its cuts in order: (mesh dimension, split factor)."""
        found: list[list[tuple[int, int]]] = [[] for _ in range(ndim)]
        for m in self.order if self.order is not None else range(len(self.mesh)):
            p = self.placements[m]
            if isinstance(p, Cut):
                if p.dim >= ndim:
                    raise ValueError(f"a shard along dimension {p.dim} of a tensor with {ndim}")
                found[p.dim].append((m, p.split))
        return found

    def runs(self, shape: Shape, coordinate: Sequence[int]) -> list[list[Run]]:
        """Return what the rank at a coordinate holds: for every dimension of the tensor its runs.

        The runs are in the order of the rank's array. Raises ValueError for placements that do not fit the shape.

        >>> Layout((2, 2), (Cut(0, 2), Cut(0))).runs((8, 3), (0, 1))
        [[(4, 2)], [(0, 3)]]
        >>> Layout((2,), (Cut(0, 2),)).runs((8, 3), (1,))
        [[(2, 2), (6, 2)], [(0, 3)]]
        """
        cuts = self.cuts(len(shape))
        if prod(min(split, n) for n, cs in zip(shape, cuts, strict=True) for _, split in cs if n) > _MAX_PARTS:
            raise ValueError(f"dimensions cut into more than {_MAX_PARTS:,} pieces on one rank")
        return [
            _runs(n, tuple((self.mesh[m], coordinate[m], split) for m, split in cs))
            for n, cs in zip(shape, cuts, strict=True)
        ]

    def local_shape(self, shape: Shape, coordinate: Sequence[int]) -> Shape:
        """Return the shape of the array that the rank at a coordinate holds. Raises ValueError as `runs` does.

        >>> [Layout((3,), (Cut(0),)).local_shape((4, 5), (r,)) for r in range(3)]
        [(2, 5), (2, 5), (0, 5)]
        """
        return tuple(sum(n for _, n in runs) for runs in self.runs(shape, coordinate))

    def parts(self, shape: Shape, coordinate: Sequence[int]) -> tuple[Part, ...]:
        """Return the blocks of a rank's array and their positions in the tensor. Raises ValueError as `runs` does.

        >>> Layout((2,), (Cut(0),)).parts((5,), (1,))
        (Part(local=Box(start=(0,), stop=(2,)), start=(3,)),)
        """
        placed = []
        for runs in self.runs(shape, coordinate):
            at = 0
            spans = []
            for start, length in runs:
                spans.append((at, at + length, start))
                at += length
            placed.append(spans)
        return tuple(
            Part(Box(tuple(a for a, _, _ in block), tuple(b for _, b, _ in block)), tuple(g for _, _, g in block))
            for block in product(*placed)
        )

    def hull(self, shape: Shape, coordinate: Sequence[int]) -> Box:
        """Return the bounding box of a rank's blocks (an empty box if it holds none)."""
        runs = self.runs(shape, coordinate)
        if not all(runs):
            return Box((0,) * len(shape), (0,) * len(shape))
        return Box(tuple(r[0][0] for r in runs), tuple(max(a + n for a, n in r) for r in runs))


@lru_cache(maxsize=1 << 14)
def _runs(size: int, cuts: tuple[tuple[int, int, int], ...]) -> list[Run]:
    """Return the runs that remain of a dimension after its cuts.

    A cut is (number of chunks, index of the rank's chunk, split factor), and applies to what the previous one left.
    """
    held: list[Run] = [(0, size)] if size else []
    length = size
    for count, index, split in cuts:
        wanted = _chunks(length, count, index, split)
        held = _within(held, wanted)
        length = sum(n for _, n in held)
    return held


def _chunks(length: int, count: int, index: int, split: int) -> list[Run]:
    """Return the ``index``-th of ``count`` chunks of each of ``split`` chunks of [0, length), cut as by torch.chunk."""
    outer = -(-length // split)
    found = []
    for start in range(0, length, outer) if outer else ():
        width = min(outer, length - start)
        inner = -(-width // count)
        a, b = min(index * inner, width), min((index + 1) * inner, width)
        if a < b:
            found.append((start + a, b - a))
    return found


def _within(held: list[Run], wanted: list[Run]) -> list[Run]:
    """Return the wanted runs of an array that is itself made of runs. Adjacent runs are joined."""
    found: list[Run] = []
    n = passed = 0  # the runs of ``held`` that end before the wanted run, and their total length
    for start, length in wanted:
        while length:
            while passed + held[n][1] <= start:
                passed += held[n][1]
                n += 1
            at = held[n][0] + start - passed
            take = min(length, held[n][1] - (start - passed))
            if found and sum(found[-1]) == at:
                found[-1] = (found[-1][0], found[-1][1] + take)
            else:
                found.append((at, take))
            start, length = start + take, length - take
    return found
