"""The directory of a zip that torch.save wrote: where the bytes of every record begin.

Writer: caffe2/serialize/inline_container.cc (miniz). Hundreds of ranks save zips whose directories are the same but for
the checksums: such a directory is taken apart once.
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

_MOST = 64  # layouts that are kept; ranks' files differ by some bytes in length
_FEW = 64  # records of a local zip that is taken apart anew each time: that is as quick as comparing it
_MANY = 16  # reads of headers; a file that takes fewer is checked when it is opened
_LARGEST = 4 << 20  # bytes of a directory that is kept
_PLAIN = re.compile(
    rb"(?!\.{1,2}/)[\w.+=@ -]{1,255}/", re.ASCII
)  # the name of a folder that no reader takes for another
_CRC, _OFFSET = 16, 42  # where an entry has its checksum (two lengths follow), and where its header is
_DESCRIPTORS = (16, 24)  # bytes behind a record's data
_KNOWN = {"data.pkl", "byteorder", "version", ".format_version", ".storage_alignment", "constants.pkl"}


class Record(NamedTuple):
    """The bytes of one record; ``crc`` is the CRC-32 of all of them, None if the file does not tell."""

    offset: int
    nbytes: int
    crc: int | None


class Place(NamedTuple):
    """A record within its zip, and the number of its entry in the directory."""

    offset: int
    nbytes: int
    entry: int


class Directory(NamedTuple):
    """Names, without the folder that all of a zip's records are in -> records; ``data``: of those below "data/", which
    are the storages, under the rest of their names."""

    members: Mapping[str, Record]
    data: Mapping[str, Record]


class _Shared(Mapping[str, Record]):
    """Records made when asked for: a thousand files have as many tables of the same places. ``start``: where the zip
    begins in its file."""

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
    """A directory but for its checksums, the name of the folder that all records are in, the length of data.pkl, and
    where the next record's header is, which comes from that: data is aligned, headers are not. ``start``: where it
    begins; ``rest``: its bytes to the end of the zip, zeros for all that may differ: checksums, at ``crcs``, the
    folder, at ``folders`` (a row for each record), the length, twice, at ``length``, and the place, at ``next``, of the
    header of the record ``behind``. ``records``: in the order in which they lie in the zip, ``order``: the
    numbers that they have in the directory; ``offsets``: where their data begin."""

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
        """The records of another zip of the same length, if it has this layout. Raises CorruptError if it has, but its
        records contradict it."""
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
    """The layouts of directories that were read before."""

    def __init__(self) -> None:
        self._known: dict[int, _Layout] = {}  # length of the zip -> the last layout

    def read(self, file: StoreFile) -> Directory:
        """The records of a zip. Raises CorruptError, and FormatError if it is none that torch.save writes."""
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
    """Where the data of all records of a zip begin. Headers of large storages are compared with the directory when they
    are read, if the store allows that; all others here."""
    deferred = _deferred(file, start, records)
    return data_offsets(file, start, records) if deferred is None else deferred


def _deferred(file: StoreFile, start: int, records: Records) -> NDArray[np.int64] | None:
    """The same where a guard of the store compares most of the headers; None if that cannot be left to it."""
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
        said = entry.name.endswith("/.storage_alignment")
        if said and file.at(int(begins[n]), min(entry.stored, 20)) != str(ALIGNMENT).encode():
            return None
    if data_offset(file, records.entry(first)) != begins[first]:  # another writer's
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
    """Raise FormatError for a record that is packed, CorruptError for one that torch would find under another name: it
    looks into one folder only, and does not tell capital letters from small ones."""
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
    """The same container is used for other things; each is refused by its name."""
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
