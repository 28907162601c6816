"""A strict zip reader that rejects every file that two zip readers could interpret differently.

Zip readers trust different fields. miniz, which torch uses, takes the last end record, trusts the zip64 locator,
ignores case in names and uses the lengths in a record's own header; Python's zipfile shifts all offsets by the number
of bytes before the first record; Info-ZIP skips gaps. To rule out disagreement, this reader requires that the directory
ends where the end records begin, that the records follow each other from byte 0 to the directory without gap or
overlap, and that the header before a record's data and the descriptor after it repeat the directory's values.
This module reads the directory, one entry at a time; `zip_columns` reads that of a large zip as columns, and
`zip_offsets` the headers of the records.

Reference readers: third_party/miniz-3.0.2/miniz.c `mz_zip_reader_read_central_dir`, `mz_zip_reader_locate_file` and
caffe2/serialize/inline_container.cc `getRecordOffset` of torch; Lib/zipfile of Python.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from ...core.extents import ZipEntry
from ...errors import CorruptError
from ..storage.streams import StoreFile
from .pickle.records import short

ZIP_MAGIC = b"PK\x03\x04"
STORED, DEFLATED = 0, 8
ENCRYPTED = 0x2041  # flags of an encrypted record or directory
DESCRIBED = 0x0008  # flag: a descriptor with checksum and sizes follows the data
UTF8 = 0x0800
FOLDER = 0x10  # MS-DOS attribute; miniz treats a record that has it as a folder and reads nothing
_MAX16, MAX32 = 0xFFFF, 0xFFFFFFFF  # placeholders: the actual number is in a zip64 field

_END = struct.Struct("<4s4H2IH")  # end of the directory
_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQ2H2I4Q")
_ENTRY = struct.Struct("<4s6H3I5H2I")
ENTRY_SIZE = _ENTRY.size  # bytes of an entry before its name
HEADER = struct.Struct("<4s5H3I2H")
HEADER_SIZE = HEADER.size  # bytes of a record's header before its name


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
    """Read the directory of a zip, without the records' own headers (see `zip_offsets` for those).

    Raises CorruptError for damage and for ambiguities between zip readers.
    """
    return _zip(file, *directory_place(file))


def read_few(file: StoreFile, most: int) -> Zip | None:
    """Return the same as `read_zip`; None if the directory has more than ``most`` entries."""
    count, size, start = directory_place(file)
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
        if entry.header + HEADER.size + len(entry.name) + entry.stored > after:
            raise refused(file, f"the record {short(entry.name)} runs into what follows it")
    return Zip(start, entries)


def directory_place(file: StoreFile) -> tuple[int, int, int]:
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
        limits = (_MAX16,) * 4 + (MAX32,) * 2
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
            nbytes, stored, header = large_sizes(
                file, name, data[extra_at : extra_at + n_extra], (nbytes, stored, header)
            )
        if MAX32 in (nbytes, stored, header) and not n_extra:
            raise refused(file, f"the sizes of the record {short(name)} are missing")
        if method == STORED and stored != nbytes:
            raise refused(file, f"the record {short(name)} has two sizes")
        is_folder = name[-1:] == "/"
        if disk or (is_folder and nbytes) or (attributes & FOLDER and not is_folder):
            raise refused(file, f"the record {short(name)} is a folder to some readers")
        yield ZipEntry(name, header, nbytes, stored, crc, method, flags, at)
        at = end
    if at != size:
        raise refused(file, f"its directory has more than its {count:,} entries")


def _name(file: StoreFile, raw: bytes, flags: int) -> str:
    """Decode a record's name. Raises CorruptError if readers could interpret the name differently."""
    try:
        name = raw.decode("utf-8" if flags & UTF8 else "ascii")
    except UnicodeDecodeError:
        raise refused(file, f"the name {raw[:60]!r} is in no encoding that it states") from None
    if "\0" in name or "\\" in name or (("//" in name or "." in name or name[:1] == "/") and _is_crooked(name)):
        raise refused(file, f"the name {short(name)} means another place to some readers")
    return name


def _is_crooked(name: str) -> bool:
    return not {"", ".", ".."}.isdisjoint(name.removesuffix("/").split("/"))


def large_sizes(file: StoreFile, name: str, extra: bytes, small: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return size, stored size and header offset; take those that are too large for 32 bits from the zip64 extra
    field."""
    field = zip64_field(file, name, extra)
    wanted = [n for n, value in enumerate(small) if value == MAX32]
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


def zip64_field(file: Where, name: str, extra: bytes) -> bytes | None:
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


def refused(file: Where, what: str) -> CorruptError:
    """Return the error for a zip that readers could interpret differently."""
    return CorruptError(
        f"{file.where}: {what}. The zip is damaged, or made so that other readers see something else in it: copy it "
        "again from its source"
    )
