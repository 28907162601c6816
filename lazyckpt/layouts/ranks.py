"""The ranks of a mesh: their order, and the composition of two divisions of a model. No I/O.

Global ranks are in Megatron's order: tp, cp, ep, dp, pp, the first varying fastest (megatron/training/arguments.py:
``order="tp-cp-ep-dp-pp"``), so that the ranks that communicate most are neighbours. ``ep`` is a separate axis: all ep
ranks have the parameters outside experts, and ``dp`` counts the ranks with the same experts (Megatron's
expert-data-parallel degree; its data-parallel degree for all other parameters is ep * dp).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm

from ..core.placement import Division, Mesh, Pipeline, Place, Rank
from ..errors import MeshError, SelectionError

_AXES = ("tp", "pp", "dp", "ep")

RankLike = int | tuple[int, ...] | Mapping[str, int]


def mesh_of(tp: int, pp: int, dp: int, ep: int) -> Mesh:
    """Return the mesh of these degrees. Raises MeshError unless they are positive integers."""
    for axis, degree in zip(_AXES, (tp, pp, dp, ep), strict=True):
        if type(degree) is not int or degree < 1:
            raise MeshError(f"{axis}={degree!r}: a parallel degree is a number from 1 on")
    return Mesh(tp, pp, dp, ep)


def division_of(
    mesh: Mesh, etp: int | None = None, pipeline: Pipeline | None = None, vocab_multiple: int | None = None
) -> Division:
    """Return the division of a model on a mesh. ``etp`` is the expert-tensor-parallel degree, by default ``mesh.tp``;
    without a ``pipeline``, all stages have the same number of layers. Raises MeshError for a number below 1."""
    if etp is not None and (type(etp) is not int or etp < 1):
        raise MeshError(f"etp={etp!r}: a parallel degree is a number from 1 on")
    if vocab_multiple is not None and (type(vocab_multiple) is not int or vocab_multiple < 1):
        raise MeshError(
            f"vocab_multiple={vocab_multiple!r}: rows of a vocabulary are padded to a multiple of a number from 1 on"
        )
    return Division(mesh, etp or mesh.tp, pipeline or Pipeline(mesh.pp), vocab_multiple)


def world_size(mesh: Mesh, etp: int | None = None) -> int:
    """Return the number of ranks."""
    return _of_stage(mesh, etp or mesh.tp) * mesh.pp * mesh.dp


def _of_stage(mesh: Mesh, etp: int) -> int:
    """Return the number of ranks of a pipeline stage before a tensor-parallel, expert-tensor-parallel and
    expert-parallel rank meet again."""
    return lcm(mesh.tp, etp * mesh.ep)


def rank_of(mesh: Mesh, rank: RankLike) -> Rank:
    """Return a rank from its global number, from (tp, pp, dp, ep), or from a mapping by the names of the axes.

    The last numbers of the tuple may be left out.

    >>> rank_of(Mesh(tp=2, pp=2, ep=3), 8), rank_of(Mesh(tp=2, pp=2), (1, 1)), rank_of(Mesh(tp=2), {"tp": 1})
    (Rank(tp=0, pp=1, dp=0, ep=1), Rank(tp=1, pp=1, dp=0, ep=0), Rank(tp=1, pp=0, dp=0, ep=0))

    Raises SelectionError for a rank that is not in the mesh.
    """
    return place_of(division_of(mesh), rank).rank


def place_of(division: Division, rank: RankLike) -> Place:
    """Return the place of a rank, given as in `rank_of`.

    The ranks of a stage are counted as Megatron does (parallel_state.py `RankGenerator`): ``etp`` and then ``ep`` vary
    fastest for experts, ``tp`` for all other tensors. So not every ``tp`` meets every ``ep`` unless ``etp`` is ``tp``.

    >>> division = division_of(Mesh(tp=2, ep=2), etp=1)
    >>> [(place.rank.tp, place.rank.ep) for place in (place_of(division, n) for n in range(2))]
    [(0, 0), (1, 1)]

    Raises SelectionError for a rank that is not in the division.
    """
    mesh, etp = division.mesh, division.etp
    count = _of_stage(mesh, etp)
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
        world = world_size(mesh, etp)
        if not 0 <= rank < world:
            raise SelectionError(f"rank={rank}: there are {world} ranks, from 0 on ({_degrees(division)})")
        rest, number = divmod(rank, count)
        pp, dp = divmod(rest, mesh.dp)
        return Place(Rank(number % mesh.tp, pp, dp, number // etp % mesh.ep), number % etp)
    else:
        raise SelectionError(f"rank={rank!r}: a rank is a number, a tuple ({', '.join(_AXES)}) or a mapping of these")
    for axis, index in zip(_AXES, found, strict=True):
        if type(index) is not int or not 0 <= index < getattr(mesh, axis):
            raise SelectionError(f"rank={rank!r}: there are {getattr(mesh, axis)} {axis} ranks, none is {index!r}")
    if etp == mesh.tp:
        return Place(found, found.tp)
    places = {n % etp for n in range(found.tp, count, mesh.tp) if n // etp % mesh.ep == found.ep}
    if len(places) != 1:
        several = f"several ranks have tp={found.tp} and ep={found.ep}" if places else "no rank has both"
        raise SelectionError(f"rank={rank!r}: {several} ({_degrees(division)}); give its number in the stage, rank=N")
    return Place(found, places.pop())


def within(outer: Division, outer_place: Place, inner: Division, inner_place: Place) -> tuple[Division, Place]:
    """Return the single division, and the place in it, whose part equals a rank's part of another rank's part.

    >>> division, place = within(
    ...     division_of(Mesh(tp=2)), Place(Rank(tp=1), 1), division_of(Mesh(tp=4, pp=2)), Place(Rank(tp=3, pp=1), 3)
    ... )
    >>> division.mesh, place
    (Mesh(tp=8, pp=2, dp=1, ep=1), Place(rank=Rank(tp=7, pp=1, dp=0, ep=0), etp=7))

    Raises MeshError if both divide a pipeline, and one of them unevenly.
    """
    a, b = outer_place.rank, inner_place.rank
    degrees = {axis: getattr(outer.mesh, axis) * getattr(inner.mesh, axis) for axis in _AXES}
    ranks = {axis: getattr(a, axis) * getattr(inner.mesh, axis) + getattr(b, axis) for axis in _AXES}
    place = Place(Rank(**ranks), outer_place.etp * inner.etp + inner_place.etp)
    multiple = outer.vocab_multiple if inner.vocab_multiple is None else inner.vocab_multiple
    return Division(Mesh(**degrees), outer.etp * inner.etp, _both(outer.pipeline, inner.pipeline), multiple), place


def _both(outer: Pipeline, inner: Pipeline) -> Pipeline:
    if inner.stages == 1:
        return outer
    if outer.stages == 1:
        return inner
    if Pipeline(outer.stages) == outer and Pipeline(inner.stages) == inner:
        return Pipeline(outer.stages * inner.stages)
    raise MeshError(
        f"pp={inner.stages}: the shard is a stage of {outer.stages}, and the layers of one of the two pipelines have a "
        "layout of their own (layout=, vpp=). Shard the whole view instead"
    )


def _degrees(division: Division) -> str:
    etp = f", etp={division.etp}" if division.etp != division.mesh.tp else ""
    return ", ".join(f"{axis}={getattr(division.mesh, axis)}" for axis in _AXES) + etp
