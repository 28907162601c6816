"""Map the ranks of other degrees to the stored ranks that make them up, as deepspeed/checkpoint/reshape_meg_2d.py does.

Model-parallel (mp) ranks number tensor-parallel ranks within pipeline stages: mp = pp * tp_degree + tp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from ..errors import FormatError, SelectionError
from ..layouts.cut import stored_ranks

T = TypeVar("T")


class Degrees(NamedTuple):
    """The number of ranks along each axis."""

    pp: int
    tp: int
    dp: int

    @property
    def world_size(self) -> int:
        return self.pp * self.tp * self.dp

    def check(self, **indices: int) -> None:
        """Raise SelectionError if an index (``pp=``, ``tp=``, ``dp=``) is not that of a rank."""
        for axis, index in indices.items():
            degree = getattr(self, axis)
            if not 0 <= index < degree:
                raise SelectionError(f"{axis} index {index}: there are {degree} {axis} ranks, 0 to {degree - 1}")


def check_reshape(stored: Degrees, wanted: Degrees) -> None:
    """Raise FormatError if the stored ranks cannot be regrouped to the wanted degrees.

    Pipeline stages and data-parallel partitions can only be joined; tensor-parallel shards can also be divided.
    """
    for axis, have, want in zip(("pipeline", "tensor", "data"), stored, wanted, strict=True):
        if want < 1:
            raise FormatError(f"a {axis}-parallel degree of {want}: it has to be at least 1")
        if have % want and not (axis == "tensor" and want % have == 0):
            more = " (more ranks than are stored)" if want > have else ""
            raise FormatError(
                f"{have} {axis}-parallel ranks cannot be regrouped to {want}{more}; lazyckpt.open(dir) reads whole "
                "tensors, whatever the degrees"
            )


def partition(items: Sequence[T], count: int) -> list[list[T]]:
    """Cut a sequence into ``count`` runs of equal length; ``count`` has to divide its length."""
    each = len(items) // count
    return [list(items[i * each : (i + 1) * each]) for i in range(count)]


def balanced(items: Sequence[T], count: int) -> list[list[T]]:
    """Cut a sequence into runs whose lengths differ by at most one, longer ones first, as deepspeed's
    `partition_uniform` does.

    >>> balanced("abcde", 3)
    [['a', 'b'], ['c', 'd'], ['e']]
    """
    each, rest = divmod(len(items), count)
    ends = [(i + 1) * each + min(i + 1, rest) for i in range(count)]
    return [list(items[a:b]) for a, b in zip([0, *ends], ends, strict=False)]


class Map2D:
    """(pp, tp) of the wanted degrees -> the stored mp ranks, stage by stage."""

    def __init__(self, stored: Degrees, wanted: Degrees) -> None:
        self.pp_degree, self.tp_degree = wanted.pp, wanted.tp
        self.map: dict[tuple[int, int], list[int]] = {
            (pp, tp): [
                old_pp * stored.tp + old_tp
                for old_pp in stored_ranks(stored.pp, wanted.pp, pp)
                for old_tp in stored_ranks(stored.tp, wanted.tp, tp)
            ]
            for pp in range(wanted.pp)
            for tp in range(wanted.tp)
        }

    def get_data(self, pp_index: int | None = None, tp_index: int | None = None) -> list[int]:
        """Return the stored mp ranks of one rank, or of all ranks along an axis whose index is None."""
        return [
            mp
            for (pp, tp), ranks in self.map.items()
            if pp_index in (None, pp) and tp_index in (None, tp)
            for mp in ranks
        ]


def zero_ranks(stored: Degrees, wanted: Degrees, pp: int, tp: int, dp: int) -> list[tuple[int, int]]:
    """Return the stored (dp rank, mp rank) pairs whose partitions, in this order, make up those of one rank."""
    mps = Map2D(stored, wanted).get_data(pp, tp)
    return partition([(old_dp, mp) for mp in mps for old_dp in range(stored.dp)], wanted.dp)[dp]
