"""Hashes of what passes through an export, so that its manifest is written without reading anything twice.

A task that writes bytes of a tensor also hashes the whole runs among them (`core.merkle`). When all files are complete,
the export is opened by its reader, which says where each tensor lies in the files; `Passed.known` then finds the hashes
of the bytes there. What no task has hashed (a run that was cut in two, shards of columns, what an earlier call of the
same job wrote) is read from the written files, never from the source.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..core import merkle
from ..core.box import Shape, span_boxes
from ..core.dtypes import dtype_of
from ..core.fragments import fragments_of
from ..core.merkle import Form, Hasher, Leaves, hash_of, run_of
from ..errors import LazyckptError
from ..lazy import LazyArray, shape_of
from .plan import Placed

_SPARSE = 64  # runs of a file for each run of the tree above which a tensor lies in too many places


class Passing(NamedTuple):
    """What a task hashes: bytes of the tensor ``whole`` from ``at`` on, in C order."""

    whole: Form
    at: int
    algorithm: str

    def hasher(self, kept: int | None = None) -> Hasher:
        """Return what hashes the bytes. ``kept``: their number, if those of incomplete runs are kept."""
        return Hasher(self.whole, self.at, hash_of(self.algorithm), kept)


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
        whole = whole or Form(dtype_of(tensor.dtype).name, tuple(tensor.shape), tensor.nbytes)
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
    whole: Form
    at: int
    leaves: Leaves


class Passed:
    """The hashes of what was written, by file and offset."""

    def __init__(self) -> None:
        self._files: dict[str, dict[int, _Piece]] = {}
        self._cut: dict[tuple[str, int, int], dict[int, bytes]] = {}  # file, begin of the tensor, number of the run
        self._offsets: dict[str, list[int]] = {}  # sorted, made when first needed
        self._arrays: dict[str, tuple[Form, dict[int, bytes]]] = {}
        self._edges: dict[str, dict[int, dict[int, bytes]]] = {}  # array -> number of a run -> pieces of it

    def add_chunk(self, array: str, passing: Passing, leaves: Leaves) -> None:
        """Take the hashes of a chunk of an array, and join the pieces of runs that chunks cut."""
        whole = passing.whole
        found = self._arrays.setdefault(array, (whole, {}))[1]
        found.update(enumerate(leaves.hashes, leaves.first))
        edges = self._edges.setdefault(array, {})
        for at, data in leaves.edges:
            n = at // merkle.RUN
            pieces = edges.setdefault(n, {})
            pieces[at] = data
            hashed = run_of(whole, n, pieces, hash_of(passing.algorithm))
            if hashed is not None:
                found[n] = hashed
                del edges[n]

    def add(self, key: str, offset: int, nbytes: int, passing: Passing, leaves: Leaves) -> None:
        """Take the hashes of bytes of a file, and join the pieces of runs that were cut, if their bytes were kept."""
        whole = passing.whole
        if leaves.hashes:
            self._files.setdefault(key, {})[offset] = _Piece(nbytes, whole, passing.at, leaves)
        begin = offset - passing.at  # of the tensor in the file
        for at, data in leaves.edges:
            n = at // merkle.RUN
            pieces = self._cut.setdefault((key, begin, n), {})
            pieces[at] = data
            hashed = run_of(whole, n, pieces, hash_of(passing.algorithm))
            if hashed is not None:
                at = n * merkle.RUN
                piece = _Piece(min(merkle.RUN, whole.nbytes - at), whole, at, Leaves(n, (hashed,)))
                self._files.setdefault(key, {})[begin + at] = piece
                del self._cut[key, begin, n]

    def known(self, tensor: LazyArray, below: str = "") -> dict[int, bytes]:
        """Return the hashes of runs of a tensor of the written files, by number.

        Parameters
        ----------
        tensor
            A tensor of the export, as its reader describes it.
        below
            The folder of its files among those of the export, "" or with a slash at the end.
        """
        whole = Form(tensor.spec.dtype.name, shape_of(tensor), tensor.nbytes)
        if not whole.nbytes:
            return {}
        if self._arrays and (array := array_of(tensor)) is not None:
            of, hashes = self._arrays.get(below + array, (None, {}))
            return hashes if of == whole else {}
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

    def as_json(self) -> bytes:
        """Return the hashes as text, for the process that finishes an export of several shares."""
        files = [
            [key, offset, piece.nbytes, *piece.whole, piece.at, piece.leaves.first, b"".join(piece.leaves.hashes).hex()]
            for key, pieces in self._files.items()
            for offset, piece in pieces.items()
        ]
        arrays = [
            [array, *whole, list(hashes), b"".join(hashes.values()).hex()]
            for array, (whole, hashes) in self._arrays.items()
        ]
        return json.dumps({"files": files, "arrays": arrays}).encode("utf-8", "surrogatepass")

    def take(self, text: bytes) -> None:
        """Add what `as_json` returned."""
        about = json.loads(text)
        for key, offset, nbytes, dtype, shape, size, at, first, joined in about["files"]:
            piece = _Piece(nbytes, Form(dtype, tuple(shape), size), at, Leaves(first, tuple(_hashes(joined))))
            self._files.setdefault(key, {})[offset] = piece
        for array, dtype, shape, size, numbers, joined in about["arrays"]:
            found = self._arrays.setdefault(array, (Form(dtype, tuple(shape), size), {}))[1]
            found.update(zip(numbers, _hashes(joined), strict=True))


def _hashes(text: str) -> list[bytes]:
    joined = bytes.fromhex(text)
    return [joined[n : n + merkle.SIZE] for n in range(0, len(joined), merkle.SIZE)]


def array_of(tensor: LazyArray) -> str | None:
    """Return the path of the Zarr array whose chunks a tensor consists of; None if its files are no chunks."""
    path = next(iter(fragments_of(tensor.spec.fragments).file_paths()), None)
    if path is None:
        return None
    parts = path.split("/")
    cut = len(parts) - 1 - len(tensor.spec.shape)
    return "/".join(parts[:cut]) if cut > 0 and parts[cut] == "c" else None


def _placed(piece: _Piece, whole: Form, at: int) -> Mapping[int, bytes]:
    """Return the hashes of a piece as those of runs of a tensor in which it begins at byte ``at``."""
    first, hashes, _ = piece.leaves
    if whole.nbytes <= merkle.RUN or piece.whole.nbytes <= merkle.RUN:  # the hash covers dtype and shape
        return {0: hashes[0]} if piece.whole == whole and at == piece.at == 0 else {}
    shift = at - piece.at
    if shift % merkle.RUN:
        return {}
    has_short = first + len(hashes) == piece.whole.runs and piece.whole.nbytes % merkle.RUN
    if has_short and piece.whole.nbytes + shift != whole.nbytes:
        hashes = hashes[:-1]
    return dict(enumerate(hashes, first + shift // merkle.RUN))
