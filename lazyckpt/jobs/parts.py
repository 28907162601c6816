"""The parts in which a file goes to an object store: cut from its layout, and filled from the tensors.

All parts of a file but the last have the same size, which depends on nothing but the file's (`uploads.part_size`), so a
resumed export finds the parts of the one before it. A part is filled in memory, from texts and pieces of tensors, by
whatever worker sends it.

Some formats keep the CRC-32 of a tensor's bytes in the file. A part with the checksum of a tensor that begins in an
earlier part waits until the CRC-32s of all pieces of the tensor are known.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..core.dtypes import dtype_of
from ..core.merkle import Form, Leaves
from ..errors import DataError
from ..io.storage.access import read_pieces, stored
from ..io.storage.base import Stored
from ..io.storage.uploads import part_size
from ..lazy import LazyArray, shape_of
from .passing import Passing, parts_of
from .pieces import contents, read_piece
from .places import PIECE, combined, crc32
from .plan import Layout, Placed


class Piece(NamedTuple):
    """Bytes of a tensor in a part.

    They begin at byte ``at`` of the part and at byte ``begin`` of tensor ``number`` of the file, and are ``nbytes``
    bytes, all of the tensor if ``whole``. ``tensors`` hold them one after the other; the first ``skip`` of their bytes
    do not belong to the piece. ``passing`` is not None if the bytes are hashed."""

    at: int
    number: int
    begin: int
    nbytes: int
    whole: bool
    tensors: tuple[Any, ...]
    skip: int
    passing: Passing | None = None


@dataclass(frozen=True, slots=True)
class FilePart:
    """A part of a file, without its bytes.

    Attributes
    ----------
    number
        Its number, from 1.
    begin, nbytes
        Where it begins in the file, and its size in bytes.
    texts
        The bytes around the tensors, each with its offset in the part.
    pieces
        The bytes of tensors.
    checksums
        The offset in the part of 4 bytes, and the number of the tensor whose CRC-32 they are. Some of the bytes may be
        in a neighbouring part.
    sums
        Whether the file has checksums.
    """

    number: int
    begin: int
    nbytes: int
    texts: tuple[tuple[int, bytes], ...]
    pieces: tuple[Piece, ...]
    checksums: tuple[tuple[int, int], ...] = ()
    sums: bool = False

    @property
    def waits_for(self) -> set[int]:
        """The numbers of the tensors whose CRC-32 the part contains while it lacks some of their bytes."""
        return {n for _, n in self.checksums} - {piece.number for piece in self.pieces if piece.whole}

    @property
    def tensor(self) -> LazyArray | None:
        """What the part reads first, if it is in a file."""
        return next((t for p in self.pieces for t in p.tensors if isinstance(t, LazyArray)), None)

    @property
    def in_tensors(self) -> int:
        """The number of its bytes that are of tensors."""
        return sum(piece.nbytes for piece in self.pieces)


class Sum(NamedTuple):
    """The CRC-32 of bytes of a tensor: its number in the file, the first byte, their number, and the CRC-32."""

    number: int
    begin: int
    nbytes: int
    crc: int


class Hashed(NamedTuple):
    """The hashes of bytes of a file: their offset, their number, what was hashed, and the hashes."""

    offset: int
    nbytes: int
    passing: Passing
    leaves: Leaves


class Filled(NamedTuple):
    """The bytes of a part, the CRC-32s of its pieces, and their hashes."""

    data: bytearray
    sums: list[Sum]
    hashes: list[Hashed]


class Sums:
    """The CRC-32s of the tensors of a file, from those of pieces in any order."""

    def __init__(self, layout: Layout) -> None:
        self._sizes = {n: placed.tensor.nbytes for n, placed in enumerate(layout.placed)} if layout.checksums else {}
        self._found: dict[int, dict[int, tuple[int, int]]] = {}
        self.known: dict[int, int] = {n: 0 for n, nbytes in self._sizes.items() if not nbytes}

    def add(self, sums: Collection[Sum]) -> None:
        """Take the CRC-32s of pieces."""
        for n, begin, nbytes, crc in sums:
            pieces = self._found.setdefault(n, {})
            pieces[begin] = crc, nbytes
            if n not in self.known and sum(size for _, size in pieces.values()) == self._sizes[n]:
                self.known[n] = combined(pieces[at] for at in sorted(pieces))
                del self._found[n]


def file_parts(layout: Layout, algorithm: str | None = None) -> Iterator[FilePart]:
    """Cut a file into parts, in order. With an ``algorithm``, the bytes of tensors are hashed."""
    size = part_size(layout.size)
    cuts = [
        _Cut(offset, n, layout.placed[n], algorithm)
        for offset, n in sorted((p.offset, n) for n, p in enumerate(layout.placed) if p.tensor.nbytes)
    ]
    sums = sorted(layout.checksums)
    t = c = s = 0
    for number, begin in enumerate(range(0, layout.size, size), 1):
        end = min(begin + size, layout.size)
        texts, pieces, places = [], [], []
        while t < len(layout.texts) and layout.texts[t][0] < end:
            offset, text = layout.texts[t]
            lo, hi = max(offset, begin), min(offset + len(text), end)
            if lo < hi:
                texts.append((lo - begin, text[lo - offset : hi - offset]))
            if offset + len(text) > end:
                break
            t += 1
        while c < len(cuts) and cuts[c].offset < end:
            pieces.append(cuts[c].piece(begin, end))
            if cuts[c].end > end:
                break
            c += 1
        while s < len(sums) and sums[s][0] < end:
            places.append((sums[s][0] - begin, sums[s][1]))
            if sums[s][0] + 4 > end:
                break
            s += 1
        yield FilePart(number, begin, end - begin, tuple(texts), tuple(pieces), tuple(places), bool(sums))


class _Cut:
    """A tensor of a file that is cut into pieces, from its begin to its end."""

    def __init__(self, offset: int, number: int, placed: Placed, algorithm: str | None) -> None:
        self.offset, self.end = offset, offset + placed.tensor.nbytes
        self._number, self._placed, self._algorithm = number, placed, algorithm
        self._rest: list[tuple[int, Any]] = []  # tensors that begin before the end of the last piece, and may go on
        self._ahead = iter(()) if isinstance(placed.tensor, LazyArray) else placed.tensor.pieces(PIECE)

    def piece(self, begin: int, end: int) -> Piece:
        """Return the piece that lies in bytes ``begin`` to ``end`` of the file."""
        tensor, at = self._placed.tensor, self._placed.at
        lo, hi = max(begin, self.offset) - self.offset, min(end, self.end) - self.offset
        tensors, skip = self._tensors(lo, hi)
        passing = None
        if self._algorithm is not None:
            whole = self._placed.whole or Form(dtype_of(tensor.dtype).name, tuple(tensor.shape), tensor.nbytes)
            passing = Passing(whole, at + lo, self._algorithm)
        nbytes = hi - lo
        return Piece(
            self.offset + lo - begin, self._number, lo, nbytes, nbytes == tensor.nbytes, tensors, skip, passing
        )

    def _tensors(self, lo: int, hi: int) -> tuple[tuple[Any, ...], int]:
        tensor, size = self._placed.tensor, self._placed.tensor.itemsize
        if isinstance(tensor, LazyArray):
            first = lo // size * size
            return tuple(parts_of(tensor, shape_of(tensor), first, -(-hi // size) * size)), lo - first
        self._rest = [(at, part) for at, part in self._rest if at + part.nbytes > lo]
        while not self._rest or self._rest[-1][0] + self._rest[-1][1].nbytes < hi:
            ahead, part = next(self._ahead)
            self._rest.append((ahead * size, part))
        return tuple(part for _, part in self._rest), lo - self._rest[0][0]


def filled(part: FilePart, known: Mapping[int, int]) -> Filled:
    """Read the bytes of a part. ``known`` has the CRC-32s of tensors, by number. Raises what reading raises."""
    data = bytearray(part.nbytes)
    found = Filled(data, [], [])
    own: dict[int, int] = {}
    with memoryview(data) as view:
        for at, text in part.texts:
            view[at : at + len(text)] = text
        for piece in part.pieces:
            target = view[piece.at : piece.at + piece.nbytes]
            _read(piece, target)
            if part.sums:
                crc = crc32(target)
                found.sums.append(Sum(piece.number, piece.begin, piece.nbytes, crc))
                if piece.whole:
                    own[piece.number] = crc
            if piece.passing is not None:
                hasher = piece.passing.hasher(piece.nbytes)
                hasher.update(target)
                found.hashes.append(Hashed(part.begin + piece.at, piece.nbytes, piece.passing, hasher.leaves()))
            target.release()
        for at, n in part.checksums:
            crc = own[n] if n in own else known[n]
            for k, byte in enumerate(crc.to_bytes(4, "little")):
                if 0 <= at + k < part.nbytes:
                    view[at + k] = byte
    return found


def sums_of(part: FilePart, numbers: Collection[int] | None) -> list[Sum]:
    """Read pieces of a part for their CRC-32s: those of these tensors, or, if that is None, of tensors that it does not
    have all of."""
    found = []
    for piece in part.pieces:
        if not piece.whole if numbers is None else piece.number in numbers:
            data = bytearray(piece.nbytes)
            _read(piece, memoryview(data))
            found.append(Sum(piece.number, piece.begin, piece.nbytes, crc32(data)))
    return found


def streamed(layout: Layout, hashes: list[Hashed], algorithm: str | None) -> Iterator[bytearray]:
    """Yield the bytes of a file in order, and collect their hashes. In all formats checksums follow their tensors."""
    sums = Sums(layout)
    for part in file_parts(layout, algorithm):
        for n in part.waits_for - set(sums.known):  # it ends in this part
            sums.add(sums_of(part, {n}))
        found = filled(part, sums.known)
        sums.add([one for one in found.sums if one.number not in sums.known])
        hashes += found.hashes
        yield found.data


class Content:
    """The bytes of a file by ranges, from its layout. Threads may share one.

    Raises
    ------
    DataError
        The file has checksums of tensors, whose bytes would all have to be read, gaps, or tensors that are in memory.
    """

    def __init__(self, layout: Layout) -> None:
        covered = sum(len(text) for _, text in layout.texts) + sum(p.tensor.nbytes for p in layout.placed)
        lazy = all(isinstance(p.tensor, LazyArray) for p in layout.placed)
        if layout.checksums or covered != layout.size or not lazy:
            raise DataError("ranges of a file are read only in formats without checksums and gaps, from lazy tensors")
        self.size = layout.size
        self._texts = layout.texts
        self._text_ends = [offset + len(text) for offset, text in layout.texts]
        cuts = sorted((p.offset, n) for n, p in enumerate(layout.placed) if p.tensor.nbytes)
        self._cuts = [_Cut(offset, n, layout.placed[n], None) for offset, n in cuts]
        self._cut_ends = [cut.end for cut in self._cuts]

    def fill(self, begin: int, target: memoryview) -> None:
        """Fill ``target`` with the bytes of the file from ``begin`` on. Raises what reading raises."""
        end = begin + len(target)
        for offset, text in self._texts[bisect_right(self._text_ends, begin) :]:
            if offset >= end:
                break
            lo, hi = max(offset, begin), min(offset + len(text), end)
            target[lo - begin : hi - begin] = text[lo - offset : hi - offset]
        for cut in self._cuts[bisect_right(self._cut_ends, begin) :]:
            if cut.offset >= end:
                break
            piece = cut.piece(begin, end)
            _read(piece, target[piece.at : piece.at + piece.nbytes])

    def stored(self, begin: int, end: int, least: int) -> list[tuple[int, Stored]]:
        """Return which of bytes ``begin`` to ``end`` of the file lie as they are in local files: where the runs of at
        least ``least`` bytes begin, in order, and where they are. Reads no elements, but raises what reading raises."""
        found = []
        for cut in self._cuts[bisect_right(self._cut_ends, begin) :]:
            if cut.offset >= end:
                break
            lo, hi = max(begin, cut.offset), min(end, cut.end)
            if hi - lo < least:
                continue
            piece = cut.piece(lo, hi)
            at = lo - piece.skip
            for tensor in piece.tensors:
                behind = at
                at += tensor.nbytes
                runs = tensor._runs() if min(at, hi) - max(behind, lo) >= least else None
                for path, offset, nbytes in runs or ():
                    first, last = max(behind, lo), min(behind + nbytes, hi)
                    source = None
                    if last - first >= least:
                        source = stored(tensor.store, path, offset + first - behind, last - first)
                    if source is not None:
                        found.append((first, source))
                    behind += nbytes
        return found


def _read(piece: Piece, target: memoryview) -> None:
    skip, at = piece.skip, 0
    for tensor in piece.tensors:
        nbytes = min(tensor.nbytes - skip, len(target) - at)
        _fill(tensor, skip, target[at : at + nbytes])
        at, skip = at + nbytes, 0


def _fill(tensor: Any, skip: int, target: memoryview) -> None:
    """Fill ``target`` with bytes of a tensor from byte ``skip`` on."""
    runs = tensor._runs()
    if runs is not None:
        at, last = -skip, ""
        together: list[tuple[int, memoryview]] = []  # of one file
        for path, offset, nbytes in runs:
            if path != last and together:
                read_pieces(tensor.store, last, together)
                together = []
            last = path
            lo, hi = max(0, at), min(at + nbytes, len(target))
            if lo < hi:
                together.append((offset + lo - at, target[lo:hi]))
            at += nbytes
        if together:
            read_pieces(tensor.store, last, together)
        return
    pieces = contents(tensor) if isinstance(tensor, LazyArray) else [(0, read_piece(tensor))]
    for begin, memory in pieces:
        at = begin - skip
        lo, hi = max(0, at), min(at + len(memory), len(target))
        if lo < hi:
            target[lo:hi] = memory[lo - at : hi - at]
