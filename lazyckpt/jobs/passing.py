"""Hashes of what passes through an export, so that its manifest is written without reading anything twice.

A task that writes bytes of a tensor also hashes the whole runs among them (`core.merkle`). When all files are complete,
the export is opened by its reader, which says where each tensor lies in the files; `Passed.known` then finds the hashes
of the bytes there. What no task has hashed (a run that was cut in two, shards of columns, what an earlier call of the
same job wrote) is read from the written files, never from the source.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..core import merkle
from ..core.box import Shape, span_boxes
from ..core.dtypes import dtype_of
from ..core.merkle import Hasher, Leaves, Whole, hash_of
from ..errors import LazyckptError
from ..lazy import LazyArray, shape_of
from .plan import Placed

_SPARSE = 64  # runs of a file for each run of the tree above which a tensor lies in too many places


class Passing(NamedTuple):
    """What a task hashes: bytes of the tensor ``whole`` from ``at`` on, in C order."""

    whole: Whole
    at: int
    algorithm: str

    def hasher(self) -> Hasher:
        """Return what hashes the bytes."""
        return Hasher(self.whole, self.at, hash_of(self.algorithm))


class Cut(NamedTuple):
    """A run of bytes of a file that a task writes: the number of the tensor in the file, the byte offset in the file,
    and the parts of the tensor whose elements follow one another there."""

    number: int
    offset: int
    parts: tuple[Any, ...]
    passing: Passing | None = None

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return sum(part.nbytes for part in self.parts)


def cuts(placed: Sequence[Placed], most: int, algorithm: str | None = None) -> Iterator[Cut]:
    """Cut the tensors of a file into runs of at most ``most`` bytes, without the empty ones. With an ``algorithm``, the
    runs are hashed, so they are cut where the runs of the tree begin."""
    for n, (offset, tensor, whole, begin) in enumerate(placed):
        if not tensor.nbytes:
            continue
        if algorithm is None:
            for ahead, part in tensor.pieces(most):
                yield Cut(n, offset + ahead * tensor.itemsize, (part,))
            continue
        whole = whole or Whole(dtype_of(tensor.dtype).name, tuple(tensor.shape), tensor.nbytes)
        if not isinstance(tensor, LazyArray):
            for ahead, part in tensor.pieces(most):
                at = ahead * tensor.itemsize
                yield Cut(n, offset + at, (part,), Passing(whole, begin + at, algorithm))
            continue
        step = max(1, most // merkle.RUN) * merkle.RUN
        at = 0
        while at < tensor.nbytes:
            end = min(tensor.nbytes, (begin + at) // step * step + step - begin)
            passing = Passing(whole, begin + at, algorithm)
            yield Cut(n, offset + at, tuple(parts_of(tensor, shape_of(tensor), at, end)), passing)
            at = end


def parts_of(tensor: LazyArray, shape: Shape, lo: int, hi: int) -> list[LazyArray]:
    """Return bytes ``lo`` to ``hi`` of a tensor, in C order, as few blocks of it."""
    if hi - lo == tensor.nbytes:
        return [tensor]
    size = tensor.itemsize
    return [tensor.lazy[box.slices] for box in span_boxes(shape, lo // size, hi // size)]


class _Piece(NamedTuple):
    """Bytes of a file: how many, of which tensor, where they begin in it, and the hashes of the runs among them."""

    nbytes: int
    whole: Whole
    at: int
    leaves: Leaves


class Passed:
    """The hashes of what was written, by file and offset."""

    def __init__(self) -> None:
        self._files: dict[str, dict[int, _Piece]] = {}
        self._offsets: dict[str, list[int]] = {}  # sorted, made when first needed

    def add(self, key: str, offset: int, nbytes: int, passing: Passing, leaves: Leaves) -> None:
        """Take the hashes of bytes of a file."""
        if leaves.hashes:
            self._files.setdefault(key, {})[offset] = _Piece(nbytes, passing.whole, passing.at, leaves)

    def known(self, tensor: LazyArray, below: str = "") -> dict[int, bytes]:
        """Return the hashes of runs of a tensor of the written files, by number.

        Parameters
        ----------
        tensor
            A tensor of the export, as its reader describes it.
        below
            The folder of its files among those of the export, "" or with a slash at the end.
        """
        whole = Whole(tensor.spec.dtype.name, shape_of(tensor), tensor.nbytes)
        if not whole.nbytes:
            return {}
        try:
            runs = tensor._runs()
        except (LazyckptError, OSError):  # reading it says what is wrong
            return {}
        found: dict[int, bytes] = {}
        begin = 0
        for path, offset, nbytes in runs if runs is not None and len(runs) <= _SPARSE * whole.runs else ():
            for at, piece in self._within(below + path, offset, nbytes):
                found.update(_placed(piece, whole, begin + at - offset))
            begin += nbytes
        return found

    def _within(self, key: str, offset: int, nbytes: int) -> Iterator[tuple[int, _Piece]]:
        """Yield the pieces that lie within bytes of a file."""
        pieces = self._files.get(key)
        if pieces is None:
            return
        if key not in self._offsets:
            self._offsets[key] = sorted(pieces)
        offsets = self._offsets[key]
        n = bisect_left(offsets, offset)
        while n < len(offsets) and offsets[n] < offset + nbytes:
            piece = pieces[offsets[n]]
            if offsets[n] + piece.nbytes <= offset + nbytes:
                yield offsets[n], piece
            n += 1

    def as_json(self) -> Any:
        """Return the same as plain objects, for a file."""
        return [
            [key, offset, p.nbytes, *p.whole, p.at, p.leaves.first, b"".join(p.leaves.hashes).hex()]
            for key, pieces in self._files.items()
            for offset, p in pieces.items()
        ]

    def take(self, listed: Any) -> None:
        """Add what `as_json` returned."""
        for key, offset, nbytes, dtype, shape, size, at, first, text in listed:
            joined = bytes.fromhex(text)
            hashes = tuple(joined[n : n + merkle.SIZE] for n in range(0, len(joined), merkle.SIZE))
            piece = _Piece(nbytes, Whole(dtype, tuple(shape), size), at, Leaves(first, hashes))
            self._files.setdefault(key, {})[offset] = piece


def _placed(piece: _Piece, whole: Whole, at: int) -> Mapping[int, bytes]:
    """Return the hashes of a piece as those of runs of a tensor in which it begins at byte ``at``."""
    first, hashes = piece.leaves
    if whole.nbytes <= merkle.RUN or piece.whole.nbytes <= merkle.RUN:  # the hash covers dtype and shape
        return {0: hashes[0]} if piece.whole == whole and at == piece.at == 0 else {}
    shift = at - piece.at
    if shift % merkle.RUN:
        return {}
    if first + len(hashes) == piece.whole.runs and piece.whole.nbytes % merkle.RUN:  # the last run is a short one
        if piece.whole.nbytes + shift != whole.nbytes:
            hashes = hashes[:-1]
    return dict(enumerate(hashes, first + shift // merkle.RUN))
