"""The table of a tar's members: ustar, GNU (long names, large numbers) and pax.

A tar has no directory: where a header is, only the header before it tells. Small members are read over, with requests
that grow; behind a large one a new request begins. So a tar of a thousand large files takes a thousand requests, one
after the other unless the files have the same size.

The fields of a header are parsed by `tarfile`; its walk is not used, because it takes a damaged header for the end of
the archive.
"""

from __future__ import annotations

import tarfile
from typing import NamedTuple

from ...errors import CorruptError, FormatError
from ..limits import Budget
from ..storage.members import Member, Tree
from ..storage.streams import StoreFile
from .pickle.records import short

_BLOCK = 512
_LOCAL = 4 << 10  # bytes that are read at once of a disk
_FIRST, _LEAST, _MOST = 32 << 10, 2 << 10, 1 << 20  # the same of a server
_GUESSES = 63  # headers that are read where they may be, at the same time
_NEAR = 64 << 10  # bytes; a request takes longer than reading over a member of this size
_RECORDS = 1 << 20  # the largest extended header, in bytes
_CODEC = ("utf-8", "surrogateescape")
_PLAIN = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
_PAX = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
_LONG = {tarfile.GNUTYPE_LONGNAME: "path", tarfile.GNUTYPE_LONGLINK: "linkpath"}
_IGNORED = (tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, b"V")  # devices, pipes and the volume's label
_NEEDED = {"path", "linkpath", "size"}
_KINDS = {tarfile.GNUTYPE_SPARSE: "a sparse file", b"D": "a folder of an incremental backup", b"M": "a part of a file"}


class _Header(NamedTuple):
    name: str
    kind: bytes
    size: int
    link: str


def is_tar(head: bytes) -> bool:
    """Return whether a file begins with the header of a tar."""
    if len(head) < _BLOCK or not any(head[:_BLOCK]):
        return False
    try:
        tarfile.TarInfo.frombuf(head[:_BLOCK], *_CODEC)
    except tarfile.HeaderError:
        return False
    return True


def read_tar(file: StoreFile) -> Tree:
    """Return the members of a tar.

    Raises CorruptError for a damaged or truncated tar, FormatError for members that cannot be read by ranges, such as
    sparse files.
    """
    budget = Budget(file.where, file.size)
    tree = Tree(file.where, budget)
    window = _Window(file)
    records: dict[str, str] = {}  # of extended headers, for the next member
    at = 0
    while True:
        if at + _BLOCK > file.size:
            raise CorruptError(
                f"{file.where} has no end of archive behind its last member, it stops at byte {file.size:,}: it is "
                "truncated. Copy it again from its source, or pack the folder again."
            )
        block = window.read(at, _BLOCK)
        if not any(block):
            return tree.finish()
        header = _header(file, at, block, records)
        at += _BLOCK
        budget.objects()
        budget.time()
        if header.kind in _KINDS or "GNU.sparse.major" in records or "GNU.sparse.size" in records:
            kind = _KINDS.get(header.kind, "a sparse file")
            raise FormatError(
                f"{file.where}: the member {short(header.name)} is {kind}, which cannot be read by ranges. Pack the "
                "folder again without such options (tar -cf, without --sparse)"
            )
        extended = header.kind in _PAX or header.kind in _LONG or header.kind == tarfile.XGLTYPE
        size = header.size if extended or header.kind in _PLAIN else 0
        if at + size > file.size:
            raise CorruptError(
                f"{file.where}: the member {short(header.name)} has {size:,} bytes from byte {at:,} on, the archive "
                f"ends at byte {file.size:,}: it is truncated. Copy it again from its source."
            )
        if extended:
            if size > _RECORDS:
                raise _damaged(file, at, f"an extended header of {size:,} bytes")
            budget.characters(size)
            _extend(file, at, header, window.read(at, size), records)
        else:
            _add(file, tree, header, at)
            records = {}
        at += -(-size // _BLOCK) * _BLOCK


class _Window:
    """Reads of headers from the start of a file to its end. What follows a header is read with it, the more the smaller
    the members are.

    The files of ranks are often of one size. Behind two members of the same size, the headers of the next ones are read
    where they are if their members have that size, too, many at a time. A wrong guess costs a small request.
    """

    def __init__(self, file: StoreFile) -> None:
        self._file = file
        self._start, self._data, self._last = 0, b"", 0
        self._remote = file.store.gap > 0
        self._ahead = _FIRST if self._remote else _LOCAL
        self._stride, self._guesses = 0, 0
        self._guessed: dict[int, bytearray] = {}

    def read(self, offset: int, size: int) -> bytes:
        at = offset - self._start
        if size and at + size > len(self._data):
            if self._remote and self._data:
                near = offset - self._last <= _NEAR
                self._ahead = min(_MOST, max(_FIRST, 2 * self._ahead)) if near else _LEAST
            self._data = bytes(self._guessed.pop(offset, b""))
            if len(self._data) < size:
                self._data = self._read(offset, max(size, self._ahead))
            self._start, at = offset, 0
        self._last = offset
        return self._data[at : at + size] if size else b""

    def _read(self, offset: int, length: int) -> bytes:
        stride = offset - self._start
        same = self._remote and stride == self._stride and stride > _NEAR
        self._guesses = min(_GUESSES, 2 * self._guesses + 1) if same else 0
        self._stride = stride
        starts = [at for n in range(self._guesses + 1) if (at := offset + n * stride) < self._file.size]
        found = {at: bytearray(min(length, self._file.size - at)) for at in starts}
        self._file.read_pieces([(at, memoryview(data)) for at, data in found.items()])
        self._guessed = found
        return bytes(found.pop(offset))


def _header(file: StoreFile, at: int, block: bytes, records: dict[str, str]) -> _Header:
    try:
        info = tarfile.TarInfo.frombuf(block, *_CODEC)
    except tarfile.HeaderError as e:
        raise _damaged(file, at, f"no header of a tar ({e})") from None
    kind = info.type
    if kind not in (*_PLAIN, *_PAX, *_LONG, *_IGNORED, *_KINDS, tarfile.XGLTYPE, b"1", b"2", b"5"):
        raise _damaged(file, at, f"a member of an unknown kind ({kind!r})")
    if kind in _PAX or kind in _LONG or kind == tarfile.XGLTYPE:
        if info.size < 0:
            raise _damaged(file, at, "a header with a negative size")
        return _Header(info.name, kind, info.size, "")
    digits = records.get("size", "0")
    if not (digits.isascii() and digits.isdigit() and len(digits) < 20):
        raise _damaged(file, at, f"a size that is no number: {digits[:40]!r}")
    size = int(digits) if "size" in records else info.size
    if size < 0:
        raise _damaged(file, at, "a header with a negative size")
    return _Header(records.get("path", info.name), kind, size, records.get("linkpath", info.linkname))


def _extend(file: StoreFile, at: int, header: _Header, data: bytes, records: dict[str, str]) -> None:
    """Add the records of an extended header to those of the next member."""
    found: dict[str, str] = {}
    begin = 0
    if header.kind in _LONG:
        found[_LONG[header.kind]] = data.split(b"\0", 1)[0].decode(*_CODEC)
        begin = len(data)
    while begin < len(data) and data[begin]:  # zeros may follow the records
        space = data.find(b" ", begin, begin + 20)
        digits = data[begin:space] if space > 0 else b""
        length = int(digits) if digits.isdigit() else 0
        record = data[begin : begin + length]
        key, equals, value = record[space + 1 - begin : -1].partition(b"=")
        if not equals or not record.endswith(b"\n") or len(record) != length:
            raise _damaged(file, at, "a damaged extended header")
        found[key.decode(*_CODEC)] = value.decode(*_CODEC)
        begin += length
    if header.kind == tarfile.XGLTYPE:
        if _NEEDED & found.keys():
            raise _damaged(file, at, "an extended header that gives all members one name or size")
        return
    if any(key in records and records[key] != found[key] for key in _NEEDED & found.keys()):
        raise _damaged(file, at, "a member with two names or sizes")
    records.update(found)


def _add(file: StoreFile, tree: Tree, header: _Header, at: int) -> None:
    if header.kind in _PLAIN:
        tree.add(header.name, Member(at, header.size))
    elif header.kind == tarfile.DIRTYPE:
        tree.add(header.name, None)
    elif header.kind == tarfile.LNKTYPE:
        tree.add_hard_link(header.name, header.link)
    elif header.kind == tarfile.SYMTYPE:
        tree.add_link(header.name, header.link)


def _damaged(file: StoreFile, at: int, what: str) -> CorruptError:
    return CorruptError(
        f"{file.where}: at byte {at:,} is {what}: the archive is damaged or hostile. Copy it again from its source."
    )
