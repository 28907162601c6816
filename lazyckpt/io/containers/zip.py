"""A strict zip reader that rejects every file that two zip readers could interpret differently.

Zip readers trust different fields. miniz, which torch uses, takes the last end record, trusts the zip64 locator,
ignores case in names and uses the lengths in a record's own header; Python's zipfile shifts all offsets by the number
of bytes before the first record; Info-ZIP skips gaps. To rule out disagreement, this reader requires that the directory
ends where the end records begin, that the records follow each other from byte 0 to the directory without gap or
overlap, and that the header before a record's data and the descriptor after it repeat the directory's values.

Reference readers: third_party/miniz-3.0.2/miniz.c `mz_zip_reader_read_central_dir`, `mz_zip_reader_locate_file` and
caffe2/serialize/inline_container.cc `getRecordOffset` of torch; Lib/zipfile of Python.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from ...core.extents import ZipEntry
from ...errors import CorruptError
from ..storage.streams import StoreFile
from .pickle.records import short

ZIP_MAGIC = b"PK\x03\x04"
STORED, DEFLATED = 0, 8
ENCRYPTED = 0x2041  # flags of an encrypted record or directory
DESCRIBED = 0x0008  # flag: a descriptor with checksum and sizes follows the data
_UTF8 = 0x0800
_REPEATED = ENCRYPTED | DESCRIBED | _UTF8  # flags that a record's header must repeat
_FOLDER = 0x10  # MS-DOS attribute; miniz treats a record that has it as a folder and reads nothing
_MAX16, _MAX32 = 0xFFFF, 0xFFFFFFFF  # placeholders: the actual number is in a zip64 field

_END = struct.Struct("<4s4H2IH")  # end of the directory
_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQ2H2I4Q")
_ENTRY = struct.Struct("<4s6H3I5H2I")
ENTRY_SIZE = _ENTRY.size  # bytes of an entry before its name
_HEADER = struct.Struct("<4s5H3I2H")
HEADER_SIZE = _HEADER.size  # bytes of a record's header before its name
_SIGNED = b"PK\x07\x08"
_DESCRIPTORS = {12: "<3I", 16: "<4x3I", 20: "<I2Q", 24: "<4xI2Q"}  # length of a descriptor -> checksum, two sizes
_LONGEST = 24
_USUAL_NAME = 512  # bytes; headers of records with longer names are compared one by one
_FIELDS = np.dtype(
    [
        ("magic", "<u4"), ("version", "<u2"), ("flags", "<u2"), ("method", "<u2"), ("time", "<u2"), ("date", "<u2"),
        ("crc", "<u4"), ("stored", "<u4"), ("nbytes", "<u4"), ("n_name", "<u2"), ("n_extra", "<u2"),
    ]
)  # fmt: skip
_ENTRY_FIELDS = np.dtype(
    [
        ("magic", "<u4"), ("made", "<u2"), ("version", "<u2"), ("flags", "<u2"), ("method", "<u2"), ("time", "<u2"),
        ("date", "<u2"), ("crc", "<u4"), ("stored", "<u4"), ("nbytes", "<u4"), ("n_name", "<u2"), ("n_extra", "<u2"),
        ("n_comment", "<u2"), ("disk", "<u2"), ("internal", "<u2"), ("attributes", "<u4"), ("header", "<u4"),
    ]
)  # fmt: skip
_CROOKED = re.compile(rb"[\0\\]|[\n/]\.{0,2}[\n/]")
_DESCRIPTOR = np.dtype([("magic", "<u4"), ("crc", "<u4"), ("stored", "<u4"), ("nbytes", "<u4")])
_DESCRIPTOR64 = np.dtype([("magic", "<u4"), ("crc", "<u4"), ("stored", "<u8"), ("nbytes", "<u8")])
_EXTRA = 32  # bytes after a header's name that contain its zip64 field, if it has one
NEAR = 32 << 10  # bytes; headers with a smaller gap are read together
_WINDOW = 1 << 20  # maximum bytes of one read of headers
_SMALL_WINDOW = 128 << 10  # the same for zips with few records
_AT_ONCE = 16 << 20  # maximum bytes of such reads in memory at a time


class Where(Protocol):
    """What errors name: a file."""

    @property
    def where(self) -> str: ...


class Named(NamedTuple):
    """A file that is only named."""

    where: str


class Zip(NamedTuple):
    """A parsed zip: the offset of its directory (``start``) and its ``entries`` in directory order."""

    start: int
    entries: list[ZipEntry]


def read_zip(file: StoreFile) -> Zip:
    """Read the directory of a zip, without the records' own headers (see `data_offsets` for those).

    Raises CorruptError for damage and for ambiguities between zip readers.
    """
    return _zip(file, *_ends(file))


def read_few(file: StoreFile, most: int) -> Zip | None:
    """Return the same as `read_zip`; None if the directory has more than ``most`` entries."""
    count, size, start = _ends(file)
    return _zip(file, count, size, start) if count <= most else None


def _zip(file: StoreFile, count: int, size: int, start: int) -> Zip:
    data = file.at(start, size)
    entries = list(_entries(file, data, count))
    if len({e.name for e in entries}) < len(entries):  # readers differ in which one they return
        raise refused(file, "a record is in it twice")
    ordered = sorted(entries, key=lambda e: e.header)
    if ordered and ordered[0].header != 0:
        raise refused(file, f"{ordered[0].header:,} bytes come before its first record")
    for entry, after in zip(ordered, [*(e.header for e in ordered[1:]), start], strict=True):
        if entry.header + _HEADER.size + len(entry.name) + entry.stored > after:
            raise refused(file, f"the record {short(entry.name)} runs into what follows it")
    return Zip(start, entries)


def _ends(file: StoreFile) -> tuple[int, int, int]:
    """Return the directory's number of entries, its size and its offset."""
    at, end = _find_end(file)
    disk, first_disk, here, count, size, start, _ = _END.unpack(end[: _END.size])[1:]
    behind = at  # the directory ends here
    locator = file.at(at - _LOCATOR.size, _LOCATOR.size) if at >= _LOCATOR.size else b""
    if locator.startswith(b"PK\x06\x07"):
        _, its_disk, behind, disks = _LOCATOR.unpack(locator)
        if behind != at - _LOCATOR.size - _END64.size or its_disk != 0 or disks != 1:
            raise refused(file, "its zip64 locator points elsewhere than to the record in front of it")
        magic, length, _, _, *large = _END64.unpack(file.at(behind, _END64.size))
        if magic != b"PK\x06\x06" or length != _END64.size - 12:
            raise refused(file, "no zip64 end record is where its locator points")
        small = (disk, first_disk, here, count, size, start)
        limits = (_MAX16,) * 4 + (_MAX32,) * 2
        if any(a not in (b, limit) for a, b, limit in zip(small, large, limits, strict=True)):
            raise refused(file, "its two end records contradict each other")
        disk, first_disk, here, count, size, start = large
    if disk or first_disk or here != count:
        raise refused(file, "it is one part of several")
    if start + size != behind:
        raise refused(
            file,
            f"its end record at {behind:,} claims a directory of {size:,} bytes from {start:,} on, which does not end "
            "there",
        )
    return count, size, start


def last_length(file: StoreFile) -> int:
    """Return the number of bytes of the last of several zips that follow each other in a file, by its end records.
    Raises CorruptError if there is none."""
    at, end = _find_end(file)
    size, start = _END.unpack(end[: _END.size])[5:7]
    length = len(end)
    if at >= _LOCATOR.size + _END64.size and file.at(at - _LOCATOR.size, 4) == b"PK\x06\x07":
        size, start = _END64.unpack(file.at(at - _LOCATOR.size - _END64.size, _END64.size))[-2:]
        length += _LOCATOR.size + _END64.size
    return int(start + size + length)


def _find_end(file: StoreFile) -> tuple[int, bytes]:
    """Return the offset of the end record, and the bytes from there on. Raises CorruptError unless the end record is
    the only one that a reader may choose."""
    tail = file.at(max(0, file.size - _END.size), min(_END.size, file.size))
    if not (tail.startswith(b"PK\x05\x06") and tail.endswith(b"\0\0")):  # perhaps a comment follows
        tail = file.at(max(0, file.size - _END.size - _MAX16), min(_END.size + _MAX16, file.size))
    found = tail.rfind(b"PK\x05\x06", 0, max(0, len(tail) - _END.size + 4))
    if found < 0:
        raise refused(file, "the end record of its directory is not there: the file is truncated")
    end = tail[found:]
    if len(end) != _END.size + _END.unpack(end[: _END.size])[-1]:
        raise refused(file, "there are bytes behind its end record")
    return file.size - len(end), end


def _entries(file: StoreFile, data: bytes, count: int) -> Iterator[ZipEntry]:
    at, size = 0, len(data)
    for _ in range(count):
        if at + _ENTRY.size > size:
            raise refused(file, f"its directory ends before its {count:,} entries do")
        (
            magic, _, _, flags, method, _, _, crc, stored, nbytes,
            n_name, n_extra, n_comment, disk, _, attributes, header,
        ) = _ENTRY.unpack_from(data, at)  # fmt: skip
        name_at = at + _ENTRY.size
        extra_at = name_at + n_name
        end = extra_at + n_extra + n_comment
        if magic != b"PK\x01\x02" or end > size:
            raise refused(file, "an entry of its directory is damaged")
        name = _name(file, data[name_at:extra_at], flags)
        if n_extra:
            nbytes, stored, header = _large(file, name, data[extra_at : extra_at + n_extra], (nbytes, stored, header))
        if _MAX32 in (nbytes, stored, header) and not n_extra:
            raise refused(file, f"the sizes of the record {short(name)} are missing")
        if method == STORED and stored != nbytes:
            raise refused(file, f"the record {short(name)} has two sizes")
        is_folder = name[-1:] == "/"
        if disk or (is_folder and nbytes) or (attributes & _FOLDER and not is_folder):
            raise refused(file, f"the record {short(name)} is a folder to some readers")
        yield ZipEntry(name, header, nbytes, stored, crc, method, flags, at)
        at = end
    if at != size:
        raise refused(file, f"its directory has more than its {count:,} entries")


def _name(file: StoreFile, raw: bytes, flags: int) -> str:
    """Decode a record's name. Raises CorruptError if readers could interpret the name differently."""
    try:
        name = raw.decode("utf-8" if flags & _UTF8 else "ascii")
    except UnicodeDecodeError:
        raise refused(file, f"the name {raw[:60]!r} is in no encoding that it states") from None
    if "\0" in name or "\\" in name or (("//" in name or "." in name or name[:1] == "/") and _is_crooked(name)):
        raise refused(file, f"the name {short(name)} means another place to some readers")
    return name


def _is_crooked(name: str) -> bool:
    return not {"", ".", ".."}.isdisjoint(name.removesuffix("/").split("/"))


def _large(file: StoreFile, name: str, extra: bytes, small: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return size, stored size and header offset; take those that are too large for 32 bits from the zip64 extra
    field."""
    field = _zip64(file, name, extra)
    wanted = [n for n, value in enumerate(small) if value == _MAX32]
    if not wanted:
        if field is not None and field != struct.pack("<3Q", *small)[: len(field)]:
            raise refused(file, f"the record {short(name)} has two sizes or places")
        return small
    if field is None or len(field) != 8 * len(wanted):
        raise refused(file, f"the sizes of the record {short(name)} are missing")
    found = list(small)
    for n, value in zip(wanted, struct.unpack(f"<{len(wanted)}Q", field), strict=True):
        found[n] = value
    return found[0], found[1], found[2]


def _zip64(file: Where, name: str, extra: bytes) -> bytes | None:
    """Return the content of the zip64 extra field; None if there is none."""
    found, at = None, 0
    while at < len(extra):
        kind, length = struct.unpack_from("<2H", extra, at) if at + 4 <= len(extra) else (0, len(extra))
        if at + 4 + length > len(extra) or (kind == 1 and found is not None):
            raise refused(file, f"the extra fields of the record {short(name)} are damaged")
        if kind == 1:
            found = extra[at + 4 : at + 4 + length]
        at += 4 + length
    return found


# -- the directory as columns, and the records' own headers


class Records(NamedTuple):
    """Entries of a zip in file order, as columns. ``raw`` holds the encoded names, cut to a fixed width and padded with
    zeros; ``lengths`` holds the full lengths of the names in bytes."""

    names: Sequence[str]
    raw: NDArray[np.uint8]
    lengths: NDArray[np.int64]
    header: NDArray[np.int64]
    nbytes: NDArray[np.uint64]
    stored: NDArray[np.int64]
    crc: NDArray[np.uint32]
    method: NDArray[np.uint16]
    flags: NDArray[np.uint16]

    @classmethod
    def of(cls, entries: Sequence[ZipEntry]) -> Records:
        names = [e.name.encode() for e in entries]
        lengths = np.fromiter(map(len, names), np.int64, len(names))
        width = min(int(lengths.max(initial=1)), _USUAL_NAME)
        # numpy cuts and pads strings of a fixed width
        raw = np.array(names, f"S{width}").view(np.uint8).reshape(len(names), width)
        _, header, nbytes, stored, crc, method, flags, *_ = zip(*entries, strict=True) if entries else [()] * 9
        return cls(
            [e.name for e in entries],
            raw,
            lengths,
            np.array(header, np.int64),
            np.array(nbytes, np.uint64),
            np.array(stored, np.int64),
            np.array(crc, np.uint32),
            np.array(method, np.uint16),
            np.array(flags, np.uint16),
        )

    def part(self, n: int, stop: int) -> Records:
        """Return the records from ``n`` up to ``stop``."""
        return Records(
            self.names[n:stop],
            self.raw[n:stop],
            self.lengths[n:stop],
            self.header[n:stop],
            self.nbytes[n:stop],
            self.stored[n:stop],
            self.crc[n:stop],
            self.method[n:stop],
            self.flags[n:stop],
        )

    def entry(self, n: int) -> ZipEntry:
        columns = (self.header, self.nbytes, self.stored, self.crc, self.method, self.flags)
        header, nbytes, stored, crc, method, flags = (int(column[n]) for column in columns)
        return ZipEntry(self.names[n], header, nbytes, stored, crc, method, flags)


class Columns(NamedTuple):
    """A parsed zip as columns: the offset of its directory, its ``records`` in file order, and for each of them the
    number (``order``) and the position (``at``) of its entry in the directory."""

    start: int
    records: Records
    order: NDArray[np.int64]
    at: NDArray[np.int64]


def read_columns(file: StoreFile) -> Columns:
    """Return the same as `read_zip` as columns. Raises the same errors."""
    count, size, start = _ends(file)
    found = _columns(file, file.at(start, size), count, start)
    if found is None:  # unusual or damaged: look at the entries one by one
        entries = read_zip(file).entries
        order = np.argsort(np.array([e.header for e in entries], np.int64), kind="stable")
        ordered = [entries[n] for n in order.tolist()]
        return Columns(start, Records.of(ordered), order, np.array([e.at for e in ordered], np.int64))
    return found


def _columns(file: StoreFile, data: bytes, count: int, start: int) -> Columns | None:
    """Return the entries of a directory as columns if all of them are of the usual kind, which `read_zip` accepts."""
    raw = np.frombuffer(data, np.uint8)
    magic = (raw[:-3] == 0x50) & (raw[1:-2] == 0x4B) & (raw[2:-1] == 1) & (raw[3:] == 2)
    at = np.flatnonzero(magic).astype(np.int64)
    if not count or len(at) != count or at[0] or at[-1] + ENTRY_SIZE > len(data):
        return None
    fields = np.ascontiguousarray(sliding_window_view(raw, ENTRY_SIZE)[at]).view(_ENTRY_FIELDS)[:, 0]
    lengths = fields["n_name"].astype(np.int64)
    behind = at + ENTRY_SIZE + lengths
    if not np.array_equal(behind + fields["n_extra"] + fields["n_comment"], np.append(at[1:], len(data))):
        return None
    names = [data[a:b] for a, b in zip((at + ENTRY_SIZE).tolist(), behind.tolist(), strict=True)]
    text = _plain_names(names)
    large = [fields[name].astype(np.int64) for name in ("nbytes", "stored", "header")]
    header, stored, nbytes = large[2], large[1], large[0]
    missing = (header == _MAX32) | (stored == _MAX32) | (nbytes == _MAX32)
    if text is None or len(set(text)) < count or (missing & (fields["n_extra"] == 0)).any():
        return None
    try:
        for n in np.flatnonzero(fields["n_extra"]).tolist():
            extra = data[behind[n] : behind[n] + int(fields["n_extra"][n])]
            small = (int(nbytes[n]), int(stored[n]), int(header[n]))
            nbytes[n], stored[n], header[n] = _large(file, text[n], extra, small)
    except OverflowError:
        return None
    order = np.argsort(header, kind="stable")
    ends = (header + HEADER_SIZE + lengths + stored)[order]
    if (
        (nbytes < 0).any()
        or (stored < 0).any()
        or ((fields["method"] == STORED) & (stored != nbytes)).any()
        or fields["disk"].any()
        or (fields["attributes"] & _FOLDER).any()
        or header[order[0]]
        or (ends < 0).any()
        or (ends > np.append(header[order][1:], start)).any()
    ):
        return None
    ordered = order.tolist()
    width = min(int(lengths.max()), _USUAL_NAME)
    matrix = np.array([names[n] for n in ordered], f"S{width}").view(np.uint8).reshape(count, width)
    records = Records(
        [text[n] for n in ordered],
        matrix,
        lengths[order],
        header[order],
        nbytes[order].astype(np.uint64),
        stored[order],
        fields["crc"][order],
        fields["method"][order],
        fields["flags"][order],
    )
    return Columns(start, records, order, at[order])


def _plain_names(raw: Sequence[bytes]) -> list[str] | None:
    """Return names of ASCII characters whose parts are neither empty nor "." nor "..", and None if there are others."""
    joined = b"\n".join(raw)
    if not joined.isascii() or _CROOKED.search(b"\n" + joined + b"\n"):
        return None
    names = joined.decode("ascii").split("\n")
    return names if len(names) == len(raw) else None


def data_offsets(file: StoreFile, start: int, records: Records) -> NDArray[np.int64]:
    """Return the offsets of the data of all records of a zip, in file order.

    Reads the bytes between the records' data, several headers in one read if they are close. Raises CorruptError unless
    these bytes repeat the values of the directory, which begins at ``start``.
    """
    if not len(records.header):
        return records.header
    nexts = np.append(records.header[1:], start)
    # one row per header, with the bytes before it, and a last row for the bytes before the directory
    width = _LONGEST + _HEADER.size + records.raw.shape[1] + _EXTRA
    rows = _rows(file, np.append(records.header, start) - _LONGEST, width)
    headers, behind = rows[:-1, _LONGEST:], rows[1:, :_LONGEST]
    fields = np.ascontiguousarray(headers[:, : _HEADER.size]).view(_FIELDS)[:, 0]
    begins: NDArray[np.int64] = records.header + _HEADER.size + fields["n_name"] + fields["n_extra"]
    for n in np.flatnonzero(~_repeats(records, headers, fields)).tolist():  # zip64 fields, long names, contradictions
        entry = records.entry(n)
        if records.lengths[n] > records.raw.shape[1]:
            begins[n] = data_offset(file, entry)
        else:
            begins[n] = check_header(file, entry, headers[n].tobytes())
    ends = begins + records.stored
    for n in np.flatnonzero(~_described(records, behind, nexts - ends)).tolist():
        length = int(nexts[n] - ends[n])
        _check_behind(file, records.entry(n), behind[n, max(0, _LONGEST - length) :].tobytes(), length)
    return begins


def data_offsets_of_few(file: StoreFile, start: int, entries: Sequence[ZipEntry]) -> list[int]:
    """Return the same as `data_offsets` for the entries of a local file. Faster than arrays for a few dozen entries."""
    places = [*(e.header for e in entries), start]
    lengths = [*(_HEADER.size + len(e.name.encode()) + _EXTRA for e in entries), 0]
    windows: list[tuple[int, int, int, bytearray]] = []  # first record, the one behind, offset
    first = 0
    while first < len(places):
        last = first
        while (
            last + 1 < len(places)
            and places[last + 1] - places[last] <= NEAR
            and places[last + 1] - places[first] <= _SMALL_WINDOW
        ):
            last += 1
        low = max(0, places[first] - _LONGEST)
        windows.append((first, last + 1, low, bytearray(min(file.size, places[last] + lengths[last]) - low)))
        first = last + 1
    file.read_pieces([(low, memoryview(window)) for _, _, low, window in windows])
    found: list[int] = []
    for first, stop, low, read in windows:
        window = bytes(read)
        if low == 0:
            file.keep(window)  # it usually contains the pickle
        for n in range(first, stop):
            at = places[n] - low
            if n:
                length = places[n] - found[-1] - entries[n - 1].stored
                _check_behind(file, entries[n - 1], window[at - length : at] if 0 < length <= at else b"", length)
            if n < len(entries):
                found.append(check_header(file, entries[n], window[at : at + lengths[n]]))
    return found


def data_offset(file: StoreFile, entry: ZipEntry) -> int:
    """Return the offset of the data of one record.

    Reads its header and, if ``after`` is known, the descriptor behind its data, if it has one. Raises CorruptError
    unless both repeat the directory's values and the data ends where the next record begins.
    """
    room = _HEADER.size + len(entry.name.encode()) + _EXTRA
    found = check_header(file, entry, file.at(entry.header, max(_HEADER.size, min(room, file.size - entry.header))))
    if entry.after >= 0:
        length = entry.after - found - entry.stored
        behind = file.at(found + entry.stored, length) if length in _DESCRIPTORS else b""
        _check_behind(file, entry, behind, length)
    return found


def _repeats(records: Records, headers: NDArray[np.uint8], fields: NDArray[np.void]) -> NDArray[np.bool_]:
    """Return a mask of the headers that repeat the directory in the usual way. `check_header` accepts all of these,
    and possibly others."""
    name = headers[:, _HEADER.size : _HEADER.size + records.raw.shape[1]]
    inside = np.arange(records.raw.shape[1]) < records.lengths[:, None]
    sizes = (fields["crc"], fields["stored"], fields["nbytes"])
    empty = (sizes[0] == 0) & (sizes[1] == 0) & (sizes[2] == 0) & (fields["flags"] & DESCRIBED != 0)
    same = (sizes[0] == records.crc) & (sizes[1] == records.stored) & (sizes[2] == records.nbytes)
    same &= (sizes[1] != _MAX32) & (sizes[2] != _MAX32)
    found: NDArray[np.bool_] = (
        (fields["magic"] == int.from_bytes(ZIP_MAGIC, "little"))
        & (fields["method"] == records.method)
        & ((fields["flags"] ^ records.flags) & _REPEATED == 0)
        & (fields["n_name"] == records.lengths)
        & (records.lengths <= records.raw.shape[1])
        & ((name == records.raw) | ~inside).all(1)
        & (empty | same)
    )
    return found


def _described(records: Records, behind: NDArray[np.uint8], lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return a mask of the records that are followed by the usual descriptor of this length, or by zero bytes if they
    have no descriptor. `_check_behind` accepts all of these, and possibly others."""
    described = records.flags & DESCRIBED != 0
    found: NDArray[np.bool_] = ~described & (lengths == 0)
    for kind in (_DESCRIPTOR, _DESCRIPTOR64):
        data = np.ascontiguousarray(behind[:, _LONGEST - kind.itemsize :]).view(kind)[:, 0]
        found |= (
            described
            & (lengths == kind.itemsize)
            & (data["magic"] == int.from_bytes(_SIGNED, "little"))
            & (data["crc"] == records.crc)
            & (data["stored"] == records.stored)
            & (data["nbytes"] == records.nbytes)
        )
    return found


def check_header(file: Where, entry: ZipEntry, data: bytes) -> int:
    """Return the offset of a record's data, after checking the record's header at the start of ``data``."""
    magic, _, flags, method, _, _, crc, stored, nbytes, n_name, n_extra = _HEADER.unpack_from(data)
    if magic != ZIP_MAGIC:
        raise refused(file, f"the header of the record {short(entry.name)} is not where the directory says")
    begins = _HEADER.size + n_name
    same = method == entry.method and data[_HEADER.size : begins] == entry.name.encode()
    if not same or (flags ^ entry.flags) & _REPEATED:
        raise refused(file, f"the header of the record {short(entry.name)} contradicts the directory")
    found: int = entry.header + _HEADER.size + n_name + n_extra
    stated = (crc, nbytes, stored)
    if stated == (0, 0, 0) and flags & DESCRIBED:
        return found
    if _MAX32 in (nbytes, stored):
        extra = data[begins : begins + n_extra]
        field = _zip64(file, entry.name, extra) if len(extra) == n_extra else _first64(extra)
        sizes = struct.unpack("<2Q", field[:16]) if field is not None and len(field) >= 16 else (-1, -1)
        stated = (crc, *(b if a == _MAX32 else a for a, b in zip((nbytes, stored), sizes, strict=True)))
    unknown = flags & DESCRIBED
    real = (entry.crc, entry.nbytes, entry.stored)
    if any(a != b and not (unknown and a == 0) for a, b in zip(stated, real, strict=True)):
        raise refused(file, f"the header of the record {short(entry.name)} states other sizes than the directory")
    return found


def _first64(extra: bytes) -> bytes | None:
    """Return the zip64 field from truncated extra fields if it is the first one, else None."""
    return extra[4:20] if extra[:2] == b"\1\0" and len(extra) >= 20 else None


def _check_behind(file: StoreFile, entry: ZipEntry, data: bytes, length: int) -> None:
    """Raise CorruptError unless a record's data is followed by its descriptor, or by nothing if it has none."""
    if not entry.flags & DESCRIBED:
        if length == 0:
            return
    elif length in _DESCRIPTORS and len(data) == length and (length in (12, 20) or data.startswith(_SIGNED)):
        if struct.unpack(_DESCRIPTORS[length], data) == (entry.crc, entry.stored, entry.nbytes):
            return
        raise refused(file, f"what follows the record {short(entry.name)} contradicts the directory")
    if length < 0:
        raise refused(file, f"another record begins before the end of the record {short(entry.name)}")
    raise refused(file, f"{length:,} bytes that belong to no record follow the record {short(entry.name)}")


def _rows(file: StoreFile, starts: NDArray[np.int64], width: int) -> NDArray[np.uint8]:
    """Return a row of ``width`` bytes from each of the ascending offsets on, with zeros outside the file. Close rows
    are read together or taken from a mapping of the file."""
    rows = np.zeros((len(starts), width), np.uint8)
    near = max(NEAR, file.store.gap)
    outside = (starts < 0) | (starts + width > file.size)
    ends = file.ends_of(starts, width)
    cuts = (np.diff(starts) - width > near) | outside[1:] | outside[:-1] | (ends[1:] != ends[:-1])
    mapped = None if file.store.gap or cuts.all() else file.store.map(file.path)
    if mapped is None:
        cuts |= np.diff(starts // _WINDOW) > 0
    bounds = [0, *(np.flatnonzero(cuts) + 1).tolist(), len(starts)]
    places = starts.tolist()
    flat = rows.reshape(-1).data
    windows: list[tuple[int, int, NDArray[np.uint8]]] = []
    pieces: list[tuple[int, memoryview]] = []
    waiting = 0

    def read() -> None:
        file.read_pieces(pieces)
        for first, last, window in windows:
            rows[first:last] = sliding_window_view(window, width)[starts[first:last] - starts[first]]
        pieces.clear()
        windows.clear()

    for first, last in pairwise(bounds):
        start, stop = places[first], places[last - 1] + width
        if mapped is not None and last - first > 1:
            window = np.frombuffer(mapped.buffer, np.uint8, stop - start, file.start + start)
            rows[first:last] = sliding_window_view(window, width)[starts[first:last] - start]
            continue
        if last - first == 1:
            target = flat[first * width : last * width]
        else:
            window = np.zeros(stop - start, np.uint8)
            windows.append((first, last, window))
            target = window.data
            waiting += stop - start
        if start < 0 or stop > file.size:
            target = target[max(0, -start) : min(stop, file.size) - start]
            start = max(0, start)
        pieces.append((start, target))
        if waiting > _AT_ONCE:
            read()
            waiting = 0
    read()
    if mapped is not None:
        file.store.confirm(file.path, mapped)
    return rows


def refused(file: Where, what: str) -> CorruptError:
    """Return the error for a zip that readers could interpret differently."""
    return CorruptError(
        f"{file.where}: {what}. The zip is damaged, or made so that other readers see something else in it: copy it "
        "again from its source"
    )
