"""The ranks of a mesh: their order, and the composition of two meshes. No I/O.

Global ranks are in Megatron's order: tp, cp, ep, dp, pp, the first varying fastest (megatron/training/arguments.py:
``order="tp-cp-ep-dp-pp"``), so that the ranks that communicate most are neighbours. ``ep`` is a separate axis: all ep
ranks have the parameters outside experts, and ``dp`` counts the ranks with the same experts (Megatron's
expert-data-parallel degree; its data-parallel degree for all other parameters is ep * dp).
"""

from __future__ import annotations

from collections.abc import Mapping

from ..core.placement import Mesh, Rank
from ..errors import MeshError, SelectionError

_AXES = ("tp", "pp", "dp", "ep")

RankLike = int | tuple[int, ...] | Mapping[str, int]


def mesh_of(tp: int, pp: int, dp: int, ep: int) -> Mesh:
    """Return the mesh of these degrees. Raises MeshError unless they are positive integers."""
    for axis, degree in zip(_AXES, (tp, pp, dp, ep), strict=True):
        if type(degree) is not int or degree < 1:
            raise MeshError(f"{axis}={degree!r}: a parallel degree is a number from 1 on")
    return Mesh(tp, pp, dp, ep)


def world_size(mesh: Mesh) -> int:
    """Return the number of ranks."""
    return mesh.tp * mesh.pp * mesh.dp * mesh.ep


def rank_of(mesh: Mesh, rank: RankLike) -> Rank:
    """Return a rank from its global number, from (tp, pp, dp, ep), or from a mapping by the names of the axes.

    The last numbers of the tuple may be left out.

    >>> rank_of(Mesh(tp=2, pp=2, ep=3), 8), rank_of(Mesh(tp=2, pp=2), (1, 1)), rank_of(Mesh(tp=2), {"tp": 1})
    (Rank(tp=0, pp=1, dp=0, ep=1), Rank(tp=1, pp=1, dp=0, ep=0), Rank(tp=1, pp=0, dp=0, ep=0))

    Raises SelectionError for a rank that is not in the mesh.
    """
    if isinstance(rank, Mapping):
        unknown = [key for key in rank if key not in _AXES]
        if unknown:
            raise SelectionError(f"rank={dict(rank)!r}: {unknown[0]!r} is none of the axes {', '.join(_AXES)}")
        found = Rank(**rank)
    elif isinstance(rank, tuple):
        if len(rank) > len(_AXES):
            raise SelectionError(f"rank={rank!r}: a rank has at most {len(_AXES)} numbers, {', '.join(_AXES)}")
        found = Rank(*rank)
    elif type(rank) is int:
        if not 0 <= rank < world_size(mesh):
            raise SelectionError(f"rank={rank}: there are {world_size(mesh)} ranks, from 0 on ({_degrees(mesh)})")
        rest, tp = divmod(rank, mesh.tp)
        rest, ep = divmod(rest, mesh.ep)
        pp, dp = divmod(rest, mesh.dp)
        found = Rank(tp, pp, dp, ep)
    else:
        raise SelectionError(f"rank={rank!r}: a rank is a number, a tuple ({', '.join(_AXES)}) or a mapping of these")
    for axis, index in zip(_AXES, found, strict=True):
        if type(index) is not int or not 0 <= index < getattr(mesh, axis):
            raise SelectionError(f"rank={rank!r}: there are {getattr(mesh, axis)} {axis} ranks, none is {index!r}")
    return found


def within(outer: Mesh, outer_rank: Rank, inner: Mesh, inner_rank: Rank) -> tuple[Mesh, Rank]:
    """Return the single mesh, and the rank in it, whose part equals a rank's part of another rank's part.

    >>> within(Mesh(tp=2), Rank(tp=1), Mesh(tp=4, pp=2), Rank(tp=3, pp=1))
    (Mesh(tp=8, pp=2, dp=1, ep=1), Rank(tp=7, pp=1, dp=0, ep=0))
    """
    degrees = {axis: getattr(outer, axis) * getattr(inner, axis) for axis in _AXES}
    ranks = {axis: getattr(outer_rank, axis) * getattr(inner, axis) + getattr(inner_rank, axis) for axis in _AXES}
    return Mesh(**degrees), Rank(**ranks)


def _degrees(mesh: Mesh) -> str:
    return ", ".join(f"{axis}={getattr(mesh, axis)}" for axis in _AXES)
