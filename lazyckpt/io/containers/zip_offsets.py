"""The offsets of the data of a zip's records, from the records' own headers, which must repeat the directory."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from ...core.extents import ZipEntry
from ..storage.streams import StoreFile
from .pickle.records import short
from .zip import DESCRIBED, ENCRYPTED, HEADER, MAX32, UTF8, ZIP_MAGIC, Where, refused, zip64_field
from .zip_columns import Records

_REPEATED = ENCRYPTED | DESCRIBED | UTF8  # flags that a record's header must repeat
_SIGNED = b"PK\x07\x08"
_DESCRIPTORS = {12: "<3I", 16: "<4x3I", 20: "<I2Q", 24: "<4xI2Q"}  # length of a descriptor -> checksum, two sizes
_LONGEST = 24
_FIELDS = np.dtype(
    [
        ("magic", "<u4"), ("version", "<u2"), ("flags", "<u2"), ("method", "<u2"), ("time", "<u2"), ("date", "<u2"),
        ("crc", "<u4"), ("stored", "<u4"), ("nbytes", "<u4"), ("n_name", "<u2"), ("n_extra", "<u2"),
    ]
)  # fmt: skip
_DESCRIPTOR = np.dtype([("magic", "<u4"), ("crc", "<u4"), ("stored", "<u4"), ("nbytes", "<u4")])
_DESCRIPTOR64 = np.dtype([("magic", "<u4"), ("crc", "<u4"), ("stored", "<u8"), ("nbytes", "<u8")])
_EXTRA = 32  # bytes after a header's name that contain its zip64 field, if it has one
NEAR = 32 << 10  # bytes; headers with a smaller gap are read together
_WINDOW = 1 << 20  # maximum bytes of one read of headers
_SMALL_WINDOW = 128 << 10  # the same for zips with few records
_AT_ONCE = 16 << 20  # maximum bytes of such reads in memory at a time


def data_offsets(file: StoreFile, start: int, records: Records) -> NDArray[np.int64]:
    """Return the offsets of the data of all records of a zip, in file order.

    Reads the bytes between the records' data, several headers in one read if they are close. Raises CorruptError unless
    these bytes repeat the values of the directory, which begins at ``start``.
    """
    if not len(records.header):
        return records.header
    nexts = np.append(records.header[1:], start)
    # one row per header, with the bytes before it, and a last row for the bytes before the directory
    width = _LONGEST + HEADER.size + records.raw.shape[1] + _EXTRA
    rows = _rows(file, np.append(records.header, start) - _LONGEST, width)
    headers, behind = rows[:-1, _LONGEST:], rows[1:, :_LONGEST]
    fields = np.ascontiguousarray(headers[:, : HEADER.size]).view(_FIELDS)[:, 0]
    begins: NDArray[np.int64] = records.header + HEADER.size + fields["n_name"] + fields["n_extra"]
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
    lengths = [*(HEADER.size + len(e.name.encode()) + _EXTRA for e in entries), 0]
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
    room = HEADER.size + len(entry.name.encode()) + _EXTRA
    found = check_header(file, entry, file.at(entry.header, max(HEADER.size, min(room, file.size - entry.header))))
    if entry.after >= 0:
        length = entry.after - found - entry.stored
        behind = file.at(found + entry.stored, length) if length in _DESCRIPTORS else b""
        _check_behind(file, entry, behind, length)
    return found


def _repeats(records: Records, headers: NDArray[np.uint8], fields: NDArray[np.void]) -> NDArray[np.bool_]:
    """Return a mask of the headers that repeat the directory in the usual way. `check_header` accepts all of these,
    and possibly others."""
    name = headers[:, HEADER.size : HEADER.size + records.raw.shape[1]]
    inside = np.arange(records.raw.shape[1]) < records.lengths[:, None]
    sizes = (fields["crc"], fields["stored"], fields["nbytes"])
    empty = (sizes[0] == 0) & (sizes[1] == 0) & (sizes[2] == 0) & (fields["flags"] & DESCRIBED != 0)
    same = (sizes[0] == records.crc) & (sizes[1] == records.stored) & (sizes[2] == records.nbytes)
    same &= (sizes[1] != MAX32) & (sizes[2] != MAX32)
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
    magic, _, flags, method, _, _, crc, stored, nbytes, n_name, n_extra = HEADER.unpack_from(data)
    if magic != ZIP_MAGIC:
        raise refused(file, f"the header of the record {short(entry.name)} is not where the directory says")
    begins = HEADER.size + n_name
    same = method == entry.method and data[HEADER.size : begins] == entry.name.encode()
    if not same or (flags ^ entry.flags) & _REPEATED:
        raise refused(file, f"the header of the record {short(entry.name)} contradicts the directory")
    found: int = entry.header + HEADER.size + n_name + n_extra
    stated = (crc, nbytes, stored)
    if stated == (0, 0, 0) and flags & DESCRIBED:
        return found
    if MAX32 in (nbytes, stored):
        extra = data[begins : begins + n_extra]
        field = zip64_field(file, entry.name, extra) if len(extra) == n_extra else _first64(extra)
        sizes = struct.unpack("<2Q", field[:16]) if field is not None and len(field) >= 16 else (-1, -1)
        stated = (crc, *(b if a == MAX32 else a for a, b in zip((nbytes, stored), sizes, strict=True)))
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
