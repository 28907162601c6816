"""Muon's momenta under ZeRO-1 and ZeRO-2, where a rank keeps whole matrices.

Muon orthogonalizes whole matrices. A rank therefore keeps the momentum of every matrix of which its partition has an
element, whole and one after the other, without padding (runtime/zero/stage_1_and_2.py `_muon_momentum_buffer`,
`get_partition_info`). It applies the part of the update that belongs to its partition, so that part of its momentum is
the one that is read. (With offloading to the CPU, in BF16_Optimizer and in ZeRO-3, momenta are cut as the weights are.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

from ...core.box import Shape
from ...core.extents import Extent
from ...core.specs import Fragment
from ..shared.flat import Partition

RULE = "Muon: ranks keep whole matrices; of each, the elements that lie in their partition are read"


class Kept(NamedTuple):
    """A matrix on one rank. ``at``: position of the matrix in the rank's momenta; ``lo``, ``hi``: the elements of the
    matrix that lie in the rank's partition, which begin at element ``start`` of it."""

    rank: int
    at: int
    lo: int
    hi: int
    start: int


def matrices(
    shapes: Mapping[str, Shape], places: Mapping[str, tuple[int, int]], width: int, world: int
) -> tuple[list[int], dict[str, list[Kept]]]:
    """Return the number of elements of every rank's momenta, and name -> the matrix on each rank that keeps it.
    ``places``: name -> (position in the flat buffer, 0); ``width``: elements of a partition."""
    lengths = [0] * world
    kept: dict[str, list[Kept]] = {}
    for name, shape in shapes.items():
        begin, total = places[name][0], prod(shape)
        kept[name] = []
        for r in range(begin // width, (begin + total - 1) // width + 1) if total else ():
            lo, hi = max(0, r * width - begin), min(total, (r + 1) * width - begin)
            kept[name].append(Kept(r, lengths[r], lo, hi, begin + lo - r * width))
            lengths[r] += total
    return lengths, kept


def as_partitions(kept: Mapping[str, list[Kept]], ranks: Iterable[int]) -> bool:
    """Return whether the matrices lie on these ranks as in partitions, so that both layouts mean the same."""
    of = set(ranks)
    return all(k.at + k.lo == k.start for pieces in kept.values() for k in pieces if k.rank in of)


def use_muon(base: Any, g: int) -> bool:
    """Return whether an optimizer's state dict says that group g uses Muon."""
    groups = base.get("param_groups") if isinstance(base, dict) else None
    group = groups[g] if isinstance(groups, list) and g < len(groups) else None
    return isinstance(group, dict) and group.get("use_muon") is True


def fragments(shape: Shape, kept: Iterable[Kept], partitions: Sequence[Partition]) -> tuple[Fragment, ...]:
    """Return the fragments of a matrix's momentum. ``partitions``: every rank's momenta."""
    found = []
    for k in kept:
        extent, rank = partitions[k.rank].extent, partitions[k.rank].rank
        if isinstance(extent, Extent):
            at = extent.offset + (k.at + k.lo) * extent.strides[0] * extent.dtype.itemsize
            extent = replace(extent, offset=at, shape=(k.hi - k.lo,))
        found.append(Fragment(extent, shape, None, (k.lo, k.hi), rank))
    return tuple(found)
