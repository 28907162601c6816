"""A strict reader of zips: one directory, one place for each record, nothing that another reader could see otherwise.

Readers of zips differ in what they trust. miniz, which torch reads with, takes the last end record, believes the zip64
locator, looks names up without regard to case and takes the lengths in a record's own header; Python's zipfile shifts
all offsets by the number of bytes in front; Info-ZIP reads on past gaps. A file on which they could disagree is
refused: the directory must end where the end records begin, the records must follow each other from byte 0 to the
directory without gap or overlap, and the header in front of a record's data and the descriptor behind it must repeat
what the directory says.

Readers that this follows: third_party/miniz-3.0.2/miniz.c `mz_zip_reader_read_central_dir`, `mz_zip_reader_locate_file`
and caffe2/serialize/inline_container.cc `getRecordOffset` of torch; Lib/zipfile of Python.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ..errors import CorruptError
from .pool import each
from .records import short
from .store import StoreFile

ZIP_MAGIC = b"PK\x03\x04"
STORED, DEFLATED = 0, 8
ENCRYPTED = 0x2041  # flags of an encrypted record or directory
DESCRIBED = 0x0008  # flag: checksum and sizes stand behind the data
_UTF8 = 0x0800
_REPEATED = ENCRYPTED | DESCRIBED | _UTF8  # flags that a record's header has to repeat
_FOLDER = 0x10  # MS-DOS attribute, by which miniz takes a record for a folder and reads nothing
_MAX16, _MAX32 = 0xFFFF, 0xFFFFFFFF  # the number is in a zip64 field

_END = struct.Struct("<4s4H2IH")  # end of the directory
_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQ2H2I4Q")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_HEADER = struct.Struct("<4s5H3I2H")
_SIGNED = b"PK\x07\x08"
_DESCRIPTORS = {12: "<3I", 16: "<4x3I", 20: "<I2Q", 24: "<4xI2Q"}  # bytes behind the data -> checksum, two sizes
_LONGEST = 24
_EXTRA = 32  # bytes behind a header's name in which its zip64 field ends, if it has one
_NEAR = 32 << 10  # bytes between two headers that are read with them
_WINDOW = 1 << 20  # bytes that one read of headers takes at most
_AT_ONCE = 256  # such reads


class Entry(NamedTuple):
    """A record as the directory describes it. ``header``: where its own header begins; ``nbytes``, ``stored``: its
    size unpacked, and in the file; ``at``: where its entry begins in the directory."""

    name: str
    header: int
    nbytes: int
    stored: int
    crc: int
    method: int
    flags: int
    at: int


class Zip(NamedTuple):
    """``start``: where the directory begins. ``entries``: in its order."""

    start: int
    entries: list[Entry]


def read_zip(file: StoreFile) -> Zip:
    """The directory of a zip.

    Raises CorruptError for damage and for what two readers could see differently. The records' own headers are not
    read: see `data_offsets`.
    """
    count, size, start = _ends(file)
    data = file.at(start, size)
    entries = list(_entries(file, data, count))
    if len({e.name for e in entries}) < len(entries):  # readers differ in which of the two they take
        raise _refused(file, "a record is in it twice")
    ordered = sorted(entries, key=lambda e: e.header)
    if ordered and ordered[0].header != 0:
        raise _refused(file, f"{ordered[0].header:,} bytes come before its first record")
    for entry, after in zip(ordered, [*(e.header for e in ordered[1:]), start], strict=True):
        if entry.header + _HEADER.size + len(entry.name) + entry.stored > after:
            raise _refused(file, f"the record {short(entry.name)} runs into what follows it")
    return Zip(start, entries)


def _ends(file: StoreFile) -> tuple[int, int, int]:
    """How many entries the directory has, its size, and where it begins."""
    at, end = _find_end(file)
    disk, first_disk, here, count, size, start, _ = _END.unpack(end[: _END.size])[1:]
    behind = at  # the directory ends here
    locator = file.at(at - _LOCATOR.size, _LOCATOR.size) if at >= _LOCATOR.size else b""
    if locator.startswith(b"PK\x06\x07"):
        _, its_disk, behind, disks = _LOCATOR.unpack(locator)
        if behind != at - _LOCATOR.size - _END64.size or its_disk != 0 or disks != 1:
            raise _refused(file, "its zip64 locator points elsewhere than to the record in front of it")
        magic, length, _, _, *large = _END64.unpack(file.at(behind, _END64.size))
        if magic != b"PK\x06\x06" or length != _END64.size - 12:
            raise _refused(file, "no zip64 end record is where its locator points")
        small = (disk, first_disk, here, count, size, start)
        limits = (_MAX16,) * 4 + (_MAX32,) * 2
        if any(a not in (b, limit) for a, b, limit in zip(small, large, limits, strict=True)):
            raise _refused(file, "its two end records contradict each other")
        disk, first_disk, here, count, size, start = large
    if disk or first_disk or here != count:
        raise _refused(file, "it is one part of several")
    if start + size != behind:
        raise _refused(
            file,
            f"its directory is said to take {size:,} bytes from {start:,} on, which is not where its end record is "
            f"({behind:,})",
        )
    return count, size, start


def _find_end(file: StoreFile) -> tuple[int, bytes]:
    """Where the end record begins, and the file from there on. It has to be the only one that a reader may choose."""
    tail = file.at(max(0, file.size - _END.size), min(_END.size, file.size))
    if not (tail.startswith(b"PK\x05\x06") and tail.endswith(b"\0\0")):  # perhaps a comment follows
        tail = file.at(max(0, file.size - _END.size - _MAX16), min(_END.size + _MAX16, file.size))
    found = tail.rfind(b"PK\x05\x06", 0, max(0, len(tail) - _END.size + 4))
    if found < 0:
        raise _refused(file, "the end record of its directory is not there: the file is truncated")
    end = tail[found:]
    if len(end) != _END.size + _END.unpack(end[: _END.size])[-1]:
        raise _refused(file, "there are bytes behind its end record")
    return file.size - len(end), end


def _entries(file: StoreFile, data: bytes, count: int) -> Iterator[Entry]:
    at, size = 0, len(data)
    for _ in range(count):
        if at + _ENTRY.size > size:
            raise _refused(file, f"its directory ends before its {count:,} entries do")
        (
            magic, _, _, flags, method, _, _, crc, stored, nbytes,
            n_name, n_extra, n_comment, disk, _, attributes, header,
        ) = _ENTRY.unpack_from(data, at)  # fmt: skip
        name_at = at + _ENTRY.size
        extra_at = name_at + n_name
        end = extra_at + n_extra + n_comment
        if magic != b"PK\x01\x02" or end > size:
            raise _refused(file, "an entry of its directory is damaged")
        name = _name(file, data[name_at:extra_at], flags)
        if n_extra:
            nbytes, stored, header = _large(file, name, data[extra_at : extra_at + n_extra], (nbytes, stored, header))
        if _MAX32 in (nbytes, stored, header) and not n_extra:
            raise _refused(file, f"the sizes of the record {short(name)} are missing")
        if method == STORED and stored != nbytes:
            raise _refused(file, f"the record {short(name)} has two sizes")
        is_folder = name[-1:] == "/"
        if disk or (is_folder and nbytes) or (attributes & _FOLDER and not is_folder):
            raise _refused(file, f"the record {short(name)} is a folder to some readers")
        yield Entry(name, header, nbytes, stored, crc, method, flags, at)
        at = end
    if at != size:
        raise _refused(file, f"its directory has more than its {count:,} entries")


def _name(file: StoreFile, raw: bytes, flags: int) -> str:
    """A record's name, if all readers call it so."""
    try:
        name = raw.decode("utf-8" if flags & _UTF8 else "ascii")
    except UnicodeDecodeError:
        raise _refused(file, f"the name {raw[:60]!r} is in no encoding that it states") from None
    if "\0" in name or "\\" in name or (("//" in name or "." in name or name[:1] == "/") and _is_crooked(name)):
        raise _refused(file, f"the name {short(name)} means another place to some readers")
    return name


def _is_crooked(name: str) -> bool:
    return not {"", ".", ".."}.isdisjoint(name.removesuffix("/").split("/"))


def _large(file: StoreFile, name: str, extra: bytes, small: tuple[int, int, int]) -> tuple[int, int, int]:
    """The size, the size in the file and the header's place, those that are too large for their fields from the zip64
    field among the extra ones."""
    field = _zip64(file, name, extra)
    wanted = [n for n, value in enumerate(small) if value == _MAX32]
    if not wanted:
        if field is not None and field != struct.pack("<3Q", *small)[: len(field)]:
            raise _refused(file, f"the record {short(name)} has two sizes or places")
        return small
    if field is None or len(field) != 8 * len(wanted):
        raise _refused(file, f"the sizes of the record {short(name)} are missing")
    found = list(small)
    for n, value in zip(wanted, struct.unpack(f"<{len(wanted)}Q", field), strict=True):
        found[n] = value
    return found[0], found[1], found[2]


def _zip64(file: StoreFile, name: str, extra: bytes) -> bytes | None:
    """What the zip64 field holds. There may be one, or none."""
    found, at = None, 0
    while at < len(extra):
        kind, length = struct.unpack_from("<2H", extra, at) if at + 4 <= len(extra) else (0, len(extra))
        if at + 4 + length > len(extra) or (kind == 1 and found is not None):
            raise _refused(file, f"the extra fields of the record {short(name)} are damaged")
        if kind == 1:
            found = extra[at + 4 : at + 4 + length]
        at += 4 + length
    return found


# -- the records' own headers


def data_offsets(file: StoreFile, start: int, entries: Sequence[Entry]) -> list[int]:
    """Where the data of these records begin, which are all of a zip, in the order in which they lie in it.

    Reads what lies between the records' data: neighbouring headers at once, others each by itself. Raises
    CorruptError unless it repeats what the directory, which begins at ``start``, says.
    """
    found: list[int] = []
    room = _HEADER.size + _EXTRA
    spans = [(max(0, e.header - _LONGEST), min(start, e.header + room + len(e.name.encode()))) for e in entries]
    last: Entry | None = None
    end = 0  # of the record before
    for entry, (base, data) in zip(entries, _windows(file, spans), strict=True):
        at = entry.header - base
        if last is not None:
            _check_behind(file, last, data[max(0, end - base) : at], entry.header - end)
        end = _check_header(file, entry, data, at)
        found.append(end)
        end += entry.stored
        last = entry
    if last is not None:
        _check_behind(file, last, file.at(max(end, start - _LONGEST), max(0, min(start - end, _LONGEST))), start - end)
    return found


def _check_header(file: StoreFile, entry: Entry, data: bytes, at: int) -> int:
    """Where the data begin behind the header that is at ``at`` in ``data``."""
    if at + _HEADER.size > len(data):
        raise _refused(file, f"the header of the record {short(entry.name)} is not where the directory says")
    magic, _, flags, method, _, _, crc, stored, nbytes, n_name, n_extra = _HEADER.unpack_from(data, at)
    if magic != ZIP_MAGIC:
        raise _refused(file, f"the header of the record {short(entry.name)} is not where the directory says")
    begins = at + _HEADER.size + n_name
    same = method == entry.method and data[at + _HEADER.size : begins] == entry.name.encode()
    if not same or (flags ^ entry.flags) & _REPEATED:
        raise _refused(file, f"the header of the record {short(entry.name)} contradicts the directory")
    found: int = entry.header + _HEADER.size + n_name + n_extra
    told = (crc, nbytes, stored)
    if told == (0, 0, 0) and flags & DESCRIBED:
        return found
    if _MAX32 in (nbytes, stored):
        extra = data[begins : begins + n_extra]
        field = _zip64(file, entry.name, extra) if len(extra) == n_extra else _first64(extra)
        sizes = struct.unpack("<2Q", field[:16]) if field is not None and len(field) >= 16 else (-1, -1)
        told = (crc, *(b if a == _MAX32 else a for a, b in zip((nbytes, stored), sizes, strict=True)))
    unknown = flags & DESCRIBED
    real = (entry.crc, entry.nbytes, entry.stored)
    if any(a != b and not (unknown and a == 0) for a, b in zip(told, real, strict=True)):
        raise _refused(file, f"the header of the record {short(entry.name)} states other sizes than the directory")
    return found


def _first64(extra: bytes) -> bytes | None:
    """The zip64 field if it is the first one, of extra fields whose end is not known."""
    return extra[4:20] if extra[:2] == b"\1\0" and len(extra) >= 20 else None


def _check_behind(file: StoreFile, entry: Entry, data: bytes, length: int) -> None:
    """Raise CorruptError unless what follows a record's data is its descriptor, or nothing where it has none."""
    if not entry.flags & DESCRIBED:
        if length == 0:
            return
    elif length in _DESCRIPTORS and len(data) == length and (length in (12, 20) or data.startswith(_SIGNED)):
        if struct.unpack(_DESCRIPTORS[length], data) == (entry.crc, entry.stored, entry.nbytes):
            return
        raise _refused(file, f"what follows the record {short(entry.name)} contradicts the directory")
    if length < 0:
        raise _refused(file, f"another record begins before the end of the record {short(entry.name)}")
    raise _refused(file, f"{length:,} bytes that belong to no record follow the record {short(entry.name)}")


def _windows(file: StoreFile, spans: Sequence[tuple[int, int]]) -> Iterator[tuple[int, bytes]]:
    """For each span, in ascending order: (where the bytes begin, bytes that hold it). Neighbours are read together."""
    near = max(_NEAR, file.store.gap) if len(spans) > 1 else 0
    groups: list[tuple[int, int, int]] = []  # start, stop, how many spans
    start = stop = count = 0
    for a, b in spans:
        if count and a - stop <= near and b - start <= _WINDOW:
            stop, count = max(stop, b), count + 1
            continue
        if count:
            groups.append((start, stop, count))
        start, stop, count = a, b, 1
    if count:
        groups.append((start, stop, count))
    for n in range(0, len(groups), _AT_ONCE):
        some = groups[n : n + _AT_ONCE]
        read = _at_once(file, some) if file.store.gap else lambda group: file.at(group[0], group[1] - group[0])
        for group in some:
            data = read(group)
            for _ in range(group[2]):
                yield group[0], data


Group = tuple[int, int, int]


def _at_once(file: StoreFile, groups: Sequence[Group]) -> Callable[[Group], bytes]:
    """Over a network, several requests at a time."""
    found: dict[Group, bytes] = {}

    def read(group: Group) -> None:
        found[group] = file.at(group[0], group[1] - group[0])

    each(read, groups)
    return found.__getitem__


def _refused(file: StoreFile, what: str) -> CorruptError:
    return CorruptError(
        f"{file.where}: {what}. The zip is damaged, or made so that other readers see something else in it: copy it "
        "again from its source"
    )
