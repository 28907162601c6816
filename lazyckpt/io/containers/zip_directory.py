"""The directory of a zip written by torch.save: the offset and size of every record.

Writer: caffe2/serialize/inline_container.cc (miniz). Hundreds of ranks save zips whose directories differ only in
checksums; such a directory is parsed once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...core.index import ZipEntry
from ...errors import CorruptError, FormatError, some
from ..storage.base import Store, StoreFile
from .pickle.records import short
from .zip import (
    ENCRYPTED,
    ENTRY_SIZE,
    STORED,
    ZIP_MAGIC,
    Records,
    data_offset,
    data_offsets,
    data_offsets_of_few,
    read_zip,
)
from .zip_headers import ALIGNMENT, HeaderGuard, aligned_offsets, reads_of_headers

__all__ = ["ZIP_MAGIC", "Directories", "Record"]

_MOST = 64  # cached layouts; the lengths of ranks' files differ by some bytes
_FEW = 64  # records; a local zip with fewer is parsed each time, which is as fast as comparing layouts
_MANY = 16  # reads of headers; a file that needs fewer is checked when it is opened
_LARGEST = 4 << 20  # maximum bytes of a cached directory
_PLAIN = re.compile(rb"(?!\.{1,2}/)[\w.+=@ -]{1,255}/", re.ASCII)  # a folder name that all readers interpret alike
_CRC, _OFFSET = 16, 42  # positions within an entry of the checksum (two lengths follow) and of the header's offset
_DESCRIPTORS = (16, 24)  # bytes of the descriptor behind a record's data
_KNOWN = {"data.pkl", "byteorder", "version", ".format_version", ".storage_alignment", "constants.pkl"}


class Record(NamedTuple):
    """The bytes of one record; ``crc`` is their CRC-32, None if the file does not store it."""

    offset: int
    nbytes: int
    crc: int | None


class Place(NamedTuple):
    """A record within its zip, and the number of its entry in the directory."""

    offset: int
    nbytes: int
    entry: int


class Directory(NamedTuple):
    """The records of a zip, by name without the common top-level folder. ``data`` holds the storages, which are the
    records below "data/", by the rest of their names."""

    members: Mapping[str, Record]
    data: Mapping[str, Record]


class _Shared(Mapping[str, Record]):
    """A table that creates its records on access, because a thousand files may share the same places. ``start`` is the
    offset of the zip within its file."""

    __slots__ = ("_crcs", "_places", "_start")

    def __init__(self, places: Mapping[str, Place], crcs: NDArray[np.uint32], start: int) -> None:
        self._places, self._crcs, self._start = places, crcs, start

    def __getitem__(self, name: str) -> Record:
        return _record(self._places[name], int(self._crcs[self._places[name].entry]), self._start)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self._places else default

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


@dataclass(frozen=True, slots=True)
class _Layout:
    """A directory without the parts that differ between ranks: the checksums, the name of the top-level folder, the
    length of data.pkl, and the offset of the next record's header, which depends on that length (data is aligned,
    headers are not).

    ``start`` is the offset of the directory. ``rest`` holds the bytes from there to the end of the zip, with zeros for
    the parts that differ: checksums at ``crcs``, the folder at ``folders`` (a row per record), the length twice at
    ``length``, and at ``next`` the header offset of the record number ``behind``. ``records`` are in file order,
    ``order`` are their numbers in the directory, ``offsets`` are the offsets of their data."""

    start: int
    rest: NDArray[np.uint8]
    crcs: NDArray[np.int64]
    folders: NDArray[np.int64]
    length: int
    next: int
    pickle: int
    behind: int
    records: Records
    order: NDArray[np.int64]
    offsets: NDArray[np.int64]
    members: Mapping[str, Place]
    storages: Mapping[str, Place]

    def of(self, file: StoreFile) -> Directory | None:
        """Return the records of another zip of the same length; None if it has another layout. Raises CorruptError if
        its records contradict its directory."""
        found = np.frombuffer(file.at(self.start, file.size - self.start), np.uint8).copy()
        crcs = np.ascontiguousarray(found[self.crcs]).view("<u4").reshape(-1)
        found[self.crcs] = 0
        folders = found[self.folders]
        found[self.folders] = 0
        length, again = found[self.length : self.length + 8].view("<u4").tolist()
        (behind,) = found[self.next : self.next + 4].view("<u4").tolist()
        found[self.length : self.length + 8] = 0
        found[self.next : self.next + 4] = 0
        if length != again or not np.array_equal(found, self.rest):
            return None
        if behind - length - self.offsets[self.pickle] not in _DESCRIPTORS:
            return None
        folder = folders[0].tobytes()
        if not (folders == folders[0]).all() or not _PLAIN.fullmatch(folder):
            return None
        header, nbytes, stored = self.records.header.copy(), self.records.nbytes.copy(), self.records.stored.copy()
        header[self.behind], nbytes[self.pickle], stored[self.pickle] = behind, length, length
        raw = self.records.raw.copy()
        raw[:, : len(folder)] = folders[0]
        names = [folder.decode() + name[len(folder) :] for name in self.records.names]
        records = self.records._replace(
            names=names, raw=raw, header=header, nbytes=nbytes, stored=stored, crc=crcs[self.order]
        )
        if not np.array_equal(_offsets(file, self.start, records), self.offsets):
            return None
        members = {**self.members, "data.pkl": self.members["data.pkl"]._replace(nbytes=length)}
        return Directory(_Shared(members, crcs, file.start), _Shared(self.storages, crcs, file.start))


class Directories:
    """A cache of directory layouts."""

    def __init__(self) -> None:
        self._known: dict[int, _Layout] = {}  # length of the zip -> the last layout

    def read(self, file: StoreFile) -> Directory:
        """Read the records of a zip. Raises CorruptError, and FormatError if torch.save does not write such a zip."""
        known = self._known.get(file.size)
        found = None if known is None else known.of(file)
        if found is not None:
            return found
        found, layout = _read(file)
        if layout is not None:
            self._known[file.size] = layout
            if len(self._known) > _MOST:
                self._known.pop(next(iter(self._known)), None)
        return found


def _record(place: Place, crc: int, start: int) -> Record:
    return Record(start + place.offset, place.nbytes, crc or (0 if not place.nbytes else None))


def _read(file: StoreFile) -> tuple[Directory, _Layout | None]:
    where = file.where
    start, entries = read_zip(file)
    if not entries:
        raise CorruptError(f"{where}: an empty zip")
    prefix = entries[0].name.split("/")[0] + "/"
    _refuse_relatives(where, {e.name.removeprefix(prefix) for e in entries if e.name.startswith(prefix)})
    for entry in entries:
        _check(where, prefix, entry)
    order = sorted(range(len(entries)), key=lambda n: entries[n].header)
    ordered = [entries[n] for n in order]
    few = len(entries) <= _FEW and not file.store.gap
    records = None if few else Records.of(ordered)
    offsets = data_offsets_of_few(file, start, ordered) if records is None else _offsets(file, start, records)
    begins = dict(zip(order, map(int, offsets), strict=True))
    places = {e.name[len(prefix) :]: Place(begins[n], e.nbytes, n) for n, e in enumerate(entries)}
    found = {name: _record(place, entries[place.entry].crc, file.start) for name, place in places.items()}
    storages = {name[5:]: record for name, record in found.items() if name.startswith("data/")}
    layout = None if records is None else _layout(file, start, entries, order, records, np.asarray(offsets), places)
    return Directory(found, storages), layout


def _offsets(file: StoreFile, start: int, records: Records) -> NDArray[np.int64]:
    """Return the offsets of the data of all records. Check all headers against the directory now, except those of large
    storages if a guard of the store can check them when the storages are read."""
    deferred = _deferred(file, start, records)
    return data_offsets(file, start, records) if deferred is None else deferred


def _deferred(file: StoreFile, start: int, records: Records) -> NDArray[np.int64] | None:
    """Return the offsets of the data and leave the check of most headers to a guard; None if a guard cannot do it."""
    store = file.store
    if not isinstance(store, Store) or file.start:
        return None
    guarded = file.path in store.guards
    if not guarded:
        if store.reads_of_headers is None:
            return None
        reads = reads_of_headers(file, records)
        if reads <= max(_MANY, store.reads_of_headers):
            store.reads_of_headers -= reads
            return None
    begins, certain = aligned_offsets(start, records)
    others = np.flatnonzero(~certain).tolist()
    first = next(iter(np.flatnonzero(certain & (records.stored > 0)).tolist()), None)
    if first is None or len(others) > _FEW:
        return None
    nexts = np.append(records.header[1:], start).tolist()
    for n in others:
        entry = records.entry(n)._replace(after=nexts[n])
        begins[n] = data_offset(file, entry)
        alignment = entry.name.endswith("/.storage_alignment")
        if alignment and file.at(int(begins[n]), min(entry.stored, 20)) != str(ALIGNMENT).encode():
            return None
    if data_offset(file, records.entry(first)) != begins[first]:  # not written by torch
        return None
    if not guarded:
        store.guards[file.path] = HeaderGuard(records, begins, bytes(~certain))
    return begins


def _layout(
    file: StoreFile,
    start: int,
    entries: Sequence[ZipEntry],
    order: Sequence[int],
    records: Records,
    offsets: NDArray[np.int64],
    places: Mapping[str, Place],
) -> _Layout | None:
    pickle = order.index(places["data.pkl"].entry)
    behind = pickle + 1
    folder = entries[0].name[: entries[0].name.index("/") + 1].encode()
    if file.size - start > _LARGEST or behind == len(order) or not _PLAIN.fullmatch(folder):
        return None
    rest = np.frombuffer(file.at(start, file.size - start), np.uint8).copy()
    crcs = (np.array([e.at for e in entries], np.int64)[:, None] + np.arange(_CRC, _CRC + 4)).reshape(-1)
    length, after = entries[order[pickle]].at + _CRC + 4, entries[order[behind]].at + _OFFSET
    for a, b in ((length, length + 8), (after, after + 4)):
        rest[a:b] = 0
    rest[crcs] = 0
    names = np.array([e.at for e in entries], np.int64) + ENTRY_SIZE
    folders = names[:, None] + np.arange(len(folder))
    rest[folders] = 0
    storages = {name[5:]: place for name, place in places.items() if name.startswith("data/")}
    numbers = np.array(order)
    return _Layout(
        start, rest, crcs, folders, length, after, pickle, behind, records, numbers, offsets, places, storages
    )


def _check(where: str, prefix: str, entry: ZipEntry) -> None:
    """Raise FormatError for a compressed or encrypted record, CorruptError for a record that torch would find under
    another name: torch looks into one folder only and ignores case."""
    if entry.method != STORED or entry.flags & ENCRYPTED:
        raise FormatError(
            f"{where}: the record {short(entry.name)} is {'encrypted' if entry.flags & ENCRYPTED else 'compressed'}, "
            "which torch.save never does: another tool wrote it. Try torch.save(torch.load(path, mmap=False), path)"
        )
    name = entry.name.removeprefix(prefix)
    small = name.lower()
    if len(name) == len(entry.name) or (small != name and (small in _KNOWN or small.startswith((".data/", "data/")))):
        raise CorruptError(
            f"{where}: the record {short(entry.name)} is one that torch does not write: the file is damaged or hostile"
        )


def _refuse_relatives(where: str, members: set[str]) -> None:
    """Raise FormatError for other formats that use the same container, naming the format."""
    if "constants.pkl" in members:
        raise FormatError(
            f"{where} is a TorchScript archive: it holds code. Save its weights where you trust it: "
            "torch.save(torch.jit.load(path).state_dict(), 'weights.pt')"
        )
    if "archive_format" in members or any(name.startswith("models/") for name in members):
        raise FormatError(
            f"{where} is a torch.export archive (.pt2): it holds a program. Save its weights where you trust it: "
            "torch.save(torch.export.load(path).state_dict, 'weights.pt')"
        )
    if ".data/extern_modules" in members:
        raise FormatError(
            f"{where} is a torch.package archive: it holds code. Load it where you trust it, save the state dict"
        )
    if "data.pkl" not in members:
        names = some(filter(None, members))
        found = f" (it has {names})" if names else ""
        raise FormatError(f"{where} is a zip, but not one of torch.save: it has no data.pkl{found}")
