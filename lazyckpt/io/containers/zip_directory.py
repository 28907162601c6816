"""The directory of a zip written by torch.save: the offset and size of every record.

Writer: caffe2/serialize/inline_container.cc (miniz). Hundreds of ranks save zips whose directories differ only in
checksums; such a directory is parsed once.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from ...errors import CorruptError, FormatError, some
from ..storage.announced import SMALL
from ..storage.base import Store
from ..storage.streams import StoreFile
from .pickle.records import short
from .zip import DEFLATED, ENCRYPTED, ENTRY_SIZE, STORED, Zip, read_few, read_zip
from .zip_columns import Columns, Records, read_columns
from .zip_headers import ALIGNMENT, HeaderGuard, aligned_offsets, reads_of_headers
from .zip_offsets import data_offset, data_offsets, data_offsets_of_few

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


class Directory(NamedTuple):
    """The records of a zip, by name without the common top-level folder. ``data`` holds the storages, which are the
    records below "data/", by the rest of their names."""

    members: Mapping[str, Record]
    data: Mapping[str, Record]


class _Table(Mapping[str, Record]):
    """Records that are created on access, because a thousand files may share the same places. ``numbers`` maps names to
    the numbers of the directory's entries, the columns hold the values by number; ``start`` is the offset of the zip
    within its file."""

    __slots__ = ("_crcs", "_nbytes", "_numbers", "_offsets", "_start")

    def __init__(
        self, numbers: Mapping[str, int], offsets: Sequence[int], nbytes: Sequence[int], crcs: Sequence[int], start: int
    ) -> None:
        self._numbers, self._offsets, self._nbytes, self._crcs, self._start = numbers, offsets, nbytes, crcs, start

    def __getitem__(self, name: str) -> Record:
        record: Record | None = self.get(name)
        if record is None:
            raise KeyError(name)
        return record

    def get(self, name: str, default: Any = None) -> Any:
        n = self._numbers.get(name)
        if n is None:
            return default
        nbytes = self._nbytes[n]
        return Record(self._start + self._offsets[n], nbytes, self._crcs[n] or (0 if not nbytes else None))

    @property
    def places(self) -> tuple[int, int, int]:
        """A key that is equal for files whose directories have the same layout. (Only the size of data.pkl differs.)"""
        return id(self._numbers), id(self._offsets), self._start

    @property
    def sizes(self) -> list[int]:
        """The sizes of all records in bytes, in the order of the names."""
        return list(map(self._nbytes.__getitem__, self._numbers.values()))

    def checksums(self, names: Iterable[str]) -> list[int | None]:
        """Return the checksums of some records."""
        numbers, crcs, nbytes = self._numbers, self._crcs, self._nbytes
        return [crcs[n] or (0 if not nbytes[n] else None) for n in map(numbers.__getitem__, names)]

    def __contains__(self, name: object) -> bool:
        return name in self._numbers

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)


def checksums(records: Mapping[str, Record], names: Iterable[str]) -> list[int | None]:
    """Return the checksums of some records."""
    return records.checksums(names) if isinstance(records, _Table) else [records[name].crc for name in names]


def same_places(a: Mapping[str, Record], b: Mapping[str, Record]) -> bool:
    """Return whether the storages of two files are known to be at the same places, because the files share a layout."""
    return isinstance(a, _Table) and isinstance(b, _Table) and a.places == b.places


def sizes_of(records: Mapping[str, Record]) -> list[int]:
    """Return the sizes of all records in bytes, in the order of the names."""
    return records.sizes if isinstance(records, _Table) else [record.nbytes for record in records.values()]


@dataclass(frozen=True, slots=True)
class _Layout:
    """A directory without the parts that differ between ranks: the checksums, the name of the top-level folder, the
    length of data.pkl, and the offset of the next record's header, which depends on that length (data is aligned,
    headers are not).

    ``start`` is the offset of the directory. ``rest`` holds the bytes from there to the end of the zip, with zeros for
    the parts that differ: checksums at ``crcs``, the folder at ``folders`` (a row per record), the length twice at
    ``length``, and at ``next`` the header offset of the record number ``behind``. ``records`` are in file order,
    ``order`` are their numbers in the directory, ``offsets`` are the offsets of their data. ``members`` and
    ``storages`` map names to numbers in the directory, by which ``table`` has the places."""

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
    members: Mapping[str, int]
    storages: Mapping[str, int]
    table: _Columns

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
        start = folder.decode()
        names = _Renamed(self.records.names, start)
        records = self.records._replace(
            names=names, raw=raw, header=header, nbytes=nbytes, stored=stored, crc=crcs[self.order]
        )
        if not np.array_equal(_offsets(file, self.start, records), self.offsets):
            return None
        pickle = self.members["data.pkl"]
        sizes = self.table.nbytes[:]
        sizes[pickle] = length
        table = (self.table.offsets, sizes, crcs.tolist(), file.start)
        return Directory(_Table(self.members, *table), _Table(self.storages, *table))


class _Renamed(Sequence[str]):
    """Names whose first characters are replaced by another text of the same length."""

    __slots__ = ("_names", "_start")

    def __init__(self, names: Sequence[str], start: str) -> None:
        self._names, self._start = names, start

    @overload
    def __getitem__(self, n: int) -> str: ...
    @overload
    def __getitem__(self, n: slice) -> Sequence[str]: ...
    def __getitem__(self, n: Any) -> Any:
        if isinstance(n, slice):
            return _Renamed(self._names[n], self._start)
        return self._start + self._names[n][len(self._start) :]

    def __len__(self) -> int:
        return len(self._names)


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


def read_members(file: StoreFile) -> tuple[dict[str, Record], dict[str, tuple[Record, int]]]:
    """Return the records of a zip of TorchScript by name without the common folder; apart from them its compressed
    files of code, with the number of their unpacked bytes.

    Raises CorruptError for damage, and for names that readers could take for one another; FormatError for a compressed
    record."""
    found = read_zip(file)
    entries = sorted(found.entries, key=lambda entry: entry.header)
    if not entries:
        raise CorruptError(f"{file.where}: an empty zip")
    names = [entry.name for entry in entries]
    prefix = names[0].split("/")[0] + "/"
    members = {name[len(prefix) :]: n for n, name in enumerate(names) if name.startswith(prefix)}
    if len({name.lower() for name in names if not name.startswith(f"{prefix}code/")}) < sum(
        not name.startswith(f"{prefix}code/") for name in names
    ):
        raise CorruptError(f"{file.where}: two of its records differ only in the case of letters: made by hand?")
    packed = {n for n, e in enumerate(entries) if e.method == DEFLATED and e.name.startswith(f"{prefix}code/")}
    odd = {n: e.flags for n, e in enumerate(entries) if (e.method != STORED and n not in packed) or e.flags & ENCRYPTED}
    _check(file.where, prefix, names, members, odd)
    offsets = data_offsets_of_few(file, found.start, entries)
    records = {
        name: Record(file.start + offsets[n], entries[n].stored, entries[n].crc or (None if entries[n].nbytes else 0))
        for name, n in members.items()
    }
    code = {name: (records.pop(name), entries[n].nbytes) for name, n in members.items() if n in packed}
    return records, code


def _read(file: StoreFile) -> tuple[Directory, _Layout | None]:
    if not file.store.gap and (few := read_few(file, _FEW)) is not None:
        return _read_few(file, few), None
    columns = read_columns(file)
    records = columns.records
    numbered = np.argsort(columns.order, kind="stable")  # numbers in file order, by the number in the directory
    packed = (records.method != STORED) | (records.flags & ENCRYPTED != 0)
    odd = {int(columns.order[n]): int(records.flags[n]) for n in np.flatnonzero(packed).tolist()}
    prefix, members = _members(file.where, [records.names[n] for n in numbered.tolist()], odd)
    offsets = _offsets(file, columns.start, records)
    table = _Columns(offsets[numbered].tolist(), records.nbytes[numbered].tolist(), records.crc[numbered].tolist())
    storages = _storages(members)
    directory = Directory(_Table(members, *table, file.start), _Table(storages, *table, file.start))
    return directory, _layout(file, columns, prefix, offsets, members, storages, table)


def _read_few(file: StoreFile, found: Zip) -> Directory:
    entries = found.entries
    odd = {n: e.flags for n, e in enumerate(entries) if e.method != STORED or e.flags & ENCRYPTED}
    _, members = _members(file.where, [e.name for e in entries], odd)
    numbers = sorted(range(len(entries)), key=lambda n: entries[n].header)  # in file order
    offsets = dict(zip(numbers, data_offsets_of_few(file, found.start, [entries[n] for n in numbers]), strict=True))
    table = _Columns([offsets[n] for n in range(len(entries))], [e.nbytes for e in entries], [e.crc for e in entries])
    return Directory(_Table(members, *table, file.start), _Table(_storages(members), *table, file.start))


def _members(where: str, names: Sequence[str], odd: Mapping[int, int]) -> tuple[str, dict[str, int]]:
    """Return the common folder of the records, and their numbers by name without it. Raises the errors of a zip that
    torch.save does not write. ``odd``: number of a compressed or encrypted record -> its flags."""
    if not names:
        raise CorruptError(f"{where}: an empty zip")
    prefix = names[0].split("/")[0] + "/"
    members = {name[len(prefix) :]: n for n, name in enumerate(names) if name.startswith(prefix)}
    _refuse_relatives(where, members)
    _check(where, prefix, names, members, odd)
    return prefix, members


def _storages(members: Mapping[str, int]) -> dict[str, int]:
    return {name[5:]: n for name, n in members.items() if name.startswith("data/")}


class _Columns(NamedTuple):
    """The places of a zip's records, by the number of their entries in the directory."""

    offsets: list[int]
    nbytes: list[int]
    crcs: list[int]


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
        if store.is_remote:
            if file.size <= SMALL:  # the whole file is requested at once
                return None
        else:
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
        guard = store.guards[file.path] = HeaderGuard(records, begins, bytes(~certain))
        guard.ask(store, file.path)
    return begins


def _layout(
    file: StoreFile,
    columns: Columns,
    prefix: str,
    offsets: NDArray[np.int64],
    members: Mapping[str, int],
    storages: Mapping[str, int],
    table: _Columns,
) -> _Layout | None:
    start, records, order, at = columns
    pickle = int(np.flatnonzero(order == members["data.pkl"])[0])
    behind = pickle + 1
    folder = prefix.encode()
    if file.size - start > _LARGEST or behind == len(order) or not _PLAIN.fullmatch(folder):
        return None
    rest = np.frombuffer(file.at(start, file.size - start), np.uint8).copy()
    entries = at[np.argsort(order, kind="stable")]
    crcs = (entries[:, None] + np.arange(_CRC, _CRC + 4)).reshape(-1)
    length, after = int(at[pickle]) + _CRC + 4, int(at[behind]) + _OFFSET
    for a, b in ((length, length + 8), (after, after + 4)):
        rest[a:b] = 0
    rest[crcs] = 0
    folders = (entries + ENTRY_SIZE)[:, None] + np.arange(len(folder))
    rest[folders] = 0
    return _Layout(
        start, rest, crcs, folders, length, after, pickle, behind, records, order, offsets, members, storages, table
    )


def _check(where: str, prefix: str, names: Sequence[str], members: Mapping[str, int], odd: Mapping[int, int]) -> None:
    """Raise FormatError for a compressed or encrypted record, CorruptError for a record that torch would find under
    another name: torch looks into one folder only and ignores case."""
    for n in sorted(odd.keys() | _disguised(prefix, names, members)):
        if n in odd:
            kind = "encrypted" if odd[n] & ENCRYPTED else "compressed"
            raise FormatError(
                f"{where}: the record {short(names[n])} is {kind}, "
                "which torch.save never does: another tool wrote it. Try torch.save(torch.load(path, mmap=False), path)"
            )
        raise CorruptError(
            f"{where}: the record {short(names[n])} is one that torch does not write: the file is damaged or hostile"
        )


def _disguised(prefix: str, names: Sequence[str], members: Mapping[str, int]) -> set[int]:
    """Return the numbers of the records outside the folder, and of those whose name torch would take for another."""
    found = {n for n, name in enumerate(names) if not name.startswith(prefix)} if len(members) < len(names) else set()
    joined = "\n".join(members)
    if joined.lower() != joined:
        for name, n in members.items():
            small = name.lower()
            if small != name and (small in _KNOWN or small.startswith((".data/", "data/"))):
                found.add(n)
    return found


def _refuse_relatives(where: str, members: Collection[str]) -> None:
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
