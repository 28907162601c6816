"""What each rank of a checkpoint holds: bytes, tensors and files, and what is lost with files that cannot be read.

The numbers come from the index. No file is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from ..core.compose import lost_boxes
from ..core.expr import leaves
from ..core.extents import Extent, Hole
from ..core.fragments import fragment_boxes, fragments_of
from ..core.placement import Mesh, Rank
from ..core.specs import Fragment, place_of
from ..errors import Problem
from ..namespace import Namespace

_EVERY = 64  # tensors between two checks


@dataclass(slots=True)
class FileHeld:
    """What a file holds of the tensors.

    Attributes
    ----------
    path
        The file's path.
    size
        The file's size in bytes; None if there is no such file.
    rank
        The rank that wrote it; None if the checkpoint does not say.
    tensors
        The number of tensors that it holds elements of.
    nbytes
        The size of these elements in bytes, as read; replicas are counted in every file that has them.
    missing
        Why the file cannot be read; "" if it can.
    problems
        What is wrong with the file.
    """

    path: str
    size: int | None = None
    rank: Rank | None = None
    tensors: int = 0
    nbytes: int = 0
    missing: str = ""
    problems: list[Problem] = field(default_factory=list)


class RankHeld(NamedTuple):
    """What a rank holds: the sums over its files.

    Attributes
    ----------
    rank
        The rank; None for files of no known rank.
    tensors
        The number of tensors that the rank holds elements of.
    nbytes
        The size of these elements in bytes, as read.
    missing
        The size in bytes of those that are in files that cannot be read.
    files
        The rank's files.
    """

    rank: Rank | None
    tensors: int
    nbytes: int
    missing: int
    files: tuple[FileHeld, ...]


@dataclass(frozen=True, slots=True)
class Ranks:
    """What the ranks and files of a checkpoint hold. See `ranks_of`.

    Attributes
    ----------
    mesh
        The parallel degrees that the checkpoint was written with.
    ranks
        What each rank holds, in the order pp, dp, ep, tp; files of no known rank last.
    files
        Path -> what the file holds.
    lost
        State and full name of each tensor that has lost elements -> their number: those that only files hold that
        cannot be read.
    """

    mesh: Mesh
    ranks: tuple[RankHeld, ...]
    files: Mapping[str, FileHeld]
    lost: Mapping[tuple[str, str], int]


class Piece(NamedTuple):
    """What one file holds of a tensor: ``numel`` elements, at byte ``offset`` of the file if that is known."""

    name: str
    path: str
    rank: Rank | None
    numel: int
    nbytes: int
    offset: int | None
    missing: str


def ranks_of(
    views: Iterable[Namespace[Any]],
    check: Callable[[], None] = lambda: None,
    names: Iterable[str] | None = None,
) -> Ranks:
    """Count what each rank and each file holds of some states of a checkpoint. Nothing is read.

    Parameters
    ----------
    views
        The states, or other parts, of one checkpoint.
    check
        Called now and then; what it raises ends the work.
    names
        The full names of the tensors to count; None: all.
    """
    views = tuple(views)
    files: dict[str, FileHeld] = {}
    tensors: dict[Rank | None, int] = {}
    lost: dict[tuple[str, str], int] = {}
    for view in views:
        specs = view.specs
        for n, name in enumerate(view._owners() if names is None else names):
            if n % _EVERY == 0:
                check()
            holders: set[Rank | None] = set()
            paths: set[str] = set()
            holes = False
            for piece in pieces_of(view, name):
                found = files.get(piece.path)
                if found is None:
                    found = files[piece.path] = FileHeld(piece.path, rank=piece.rank)
                found.nbytes += piece.nbytes
                if piece.path not in paths:
                    paths.add(piece.path)
                    found.tensors += 1
                if piece.missing:
                    found.missing, holes = piece.missing, True
                holders.add(found.rank)
            for rank in holders:
                tensors[rank] = tensors.get(rank, 0) + 1
            if holes and specs[name].expr is None:
                gone = sum(box.numel for box in lost_boxes(specs[name]))
                if gone:
                    lost[view.state, name] = gone
    for view in views[:1]:
        _describe(view, files)
    return Ranks(views[0].mesh if views else Mesh(), tuple(_by_rank(files, tensors)), files, lost)


def pieces_of(view: Namespace[Any], name: str) -> Iterator[Piece]:
    """Yield what each file holds of a tensor, in the order of its fragments, replicas included.

    Parameters
    ----------
    view
        The view that has the tensor.
    name
        The full name that owns the tensor.
    """
    specs = view.specs
    place = place_of(specs, name)
    if place is not None:  # one run of plain values, which takes no description
        numel = prod(place.shape)
        if numel:
            yield Piece(name, place.path, None, numel, numel * place.dtype.itemsize, place.offset, "")
        return
    for one in leaves(specs[name]):
        size = one.spec.dtype.itemsize
        for fragment in one.spec.fragments:
            extent = fragment.extent
            missing = extent.reason if isinstance(extent, Hole) else ""
            offset = extent.offset if isinstance(extent, Extent) and extent.within is None else None
            numel = _numel(fragment)
            if numel:
                yield Piece(name, extent.path, fragment.rank, numel, numel * size, offset, missing)


def held_by(
    views: Iterable[Namespace[Any]],
    path: str,
    check: Callable[[], None] = lambda: None,
) -> Iterator[tuple[str, Piece]]:
    """Yield what a file holds, as pairs of a state and a piece of one of its tensors.

    Parameters
    ----------
    views
        The states of a checkpoint.
    path
        The file's path.
    check
        Called now and then; what it raises ends the work.
    """
    for view in views:
        specs = view.specs
        for n, name in enumerate(view._owners()):
            if n % _EVERY == 0:
                check()
            if any(path in fragments_of(one.spec.fragments).file_paths() for one in leaves(specs[name])):
                for piece in pieces_of(view, name):
                    if piece.path == path:
                        yield view.state, piece


def _numel(fragment: Fragment) -> int:
    """Return the number of elements of the tensor that a fragment holds; padding is left out."""
    if fragment.parts is None:
        return prod(fragment.local_shape) if fragment.span is None else fragment.span[1] - fragment.span[0]
    if fragment.span is None:
        return sum(part.local.numel for part in fragment.parts)
    return sum(box.numel for box, _ in fragment_boxes(fragment))


def _describe(view: Namespace[Any], files: dict[str, FileHeld]) -> None:
    """Add the sizes of the files, files that hold nothing, and the problems of files."""
    for path, info in view.files.items():
        files.setdefault(path, FileHeld(path)).size = info.size
    for problem in view.problems:
        if problem.path is not None and problem.path in files:
            files[problem.path].problems.append(problem)


def _by_rank(files: Mapping[str, FileHeld], tensors: Mapping[Rank | None, int]) -> Iterator[RankHeld]:
    of: dict[Rank | None, list[FileHeld]] = {}
    for held in files.values():
        of.setdefault(held.rank, []).append(held)
    for rank in sorted(of, key=_order):
        found = of[rank]
        missing = sum(held.nbytes for held in found if held.missing)
        yield RankHeld(rank, tensors.get(rank, 0), sum(held.nbytes for held in found), missing, tuple(found))


def _order(rank: Rank | None) -> tuple[bool, int, int, int, int]:
    return (True, 0, 0, 0, 0) if rank is None else (False, rank.pp, rank.dp, rank.ep, rank.tp)
