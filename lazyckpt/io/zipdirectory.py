"""The directory of a zip that torch.save wrote: where the bytes of every record begin.

Writer: caffe2/serialize/inline_container.cc (miniz). Hundreds of ranks save zips whose directories are the same but for
the checksums: such a directory is taken apart once.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import CorruptError, FormatError
from .store import StoreFile

ZIP_MAGIC = b"PK\x03\x04"
_TORCH_FLAGS = 0x0808  # sizes behind the data, names in UTF-8: miniz, as torch uses it
_MOST = 64  # layouts that are kept; ranks' files differ by some bytes in length
_LARGEST = 4 << 20  # bytes of a directory that is kept
_ENTRY = 46  # bytes of an entry before its name
_CRC, _OFFSET = 16, 42  # where its checksum stands (two lengths follow), and where its header is
_DESCRIPTORS = (16, 24)  # bytes behind a record's data
_HEADER = 30  # bytes before the name in front of a record


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
    """A directory but for its checksums, the length of data.pkl, and where the next record's header is, which comes
    from that: data is aligned, headers are not. ``start``: where it begins; ``rest``: its bytes to the end of the zip,
    zeros for all that may differ: checksums, at ``crcs``, the length, twice, at ``length``, and the place, at ``next``,
    of the header whose data begin at ``follows``; ``header``, ``data``: where one more header and its data begin."""

    start: int
    rest: NDArray[np.uint8]
    crcs: NDArray[np.int64]
    length: int
    next: int
    follows: int
    members: Mapping[str, Place]
    storages: Mapping[str, Place]
    header: int
    data: int

    def of(self, file: StoreFile) -> Directory | None:
        """The records of another zip of the same length, if it has this layout."""
        found = np.frombuffer(file.at(self.start, file.size - self.start), np.uint8).copy()
        crcs = np.ascontiguousarray(found[self.crcs]).view("<u4").reshape(-1)
        found[self.crcs] = 0
        length, again = found[self.length : self.length + 8].view("<u4").tolist()
        (behind,) = found[self.next : self.next + 4].view("<u4").tolist()
        found[self.length : self.length + 8] = 0
        found[self.next : self.next + 4] = 0
        if length != again or not np.array_equal(found, self.rest):
            return None
        if behind - length - self.members["data.pkl"].offset not in _DESCRIPTORS:
            return None
        if _header(file, behind) != self.follows or _header(file, self.header) != self.data:
            return None
        pickle = self.members["data.pkl"]._replace(nbytes=length)
        members = {**self.members, "data.pkl": pickle}
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
    try:  # zipfile has no error of its own for all damage; NotImplementedError is its word for a zip of a later version
        archive = zipfile.ZipFile(file)
    except (zipfile.BadZipFile, ValueError, struct.error, NotImplementedError, EOFError, OverflowError) as e:
        raise CorruptError(
            f"{where}: the zip's directory, at the end of the file, cannot be read ({e}): the file is truncated or "
            "damaged, copy it again from its source"
        ) from None
    infos = archive.infolist()
    if not infos:
        raise CorruptError(f"{where}: an empty zip")
    prefix = infos[0].filename.split("/")[0] + "/"
    if len({i.filename for i in infos}) < len(infos):  # readers differ in which of the two they take
        raise CorruptError(
            f"{where}: a record is in the zip twice: no writer does that, the file is damaged or hostile"
        )
    members = {i.filename.removeprefix(prefix): i for i in infos if i.filename.startswith(prefix)}
    _refuse_relatives(where, members)
    offsets, sample = _data_offsets(file, where, infos, archive.start_dir, members, prefix)
    numbers = {info.filename: n for n, info in enumerate(infos)}
    places = {
        name: Place(offsets[info.filename], info.file_size, numbers[info.filename]) for name, info in members.items()
    }
    found = {name: _record(place, members[name].CRC, file.start) for name, place in places.items()}
    storages = {name[5:]: record for name, record in found.items() if name.startswith("data/")}
    layout = None if sample is None else _layout(file, archive.start_dir, places, sample, len(infos))
    return Directory(found, storages), layout


def _layout(
    file: StoreFile, start: int, places: Mapping[str, Place], sample: tuple[int, int], count: int
) -> _Layout | None:
    if not 0 <= start < file.size <= start + _LARGEST:
        return None
    rest = np.frombuffer(file.at(start, file.size - start), np.uint8).copy()
    entries, at = [], 0
    for _ in range(count):
        if bytes(rest[at : at + 4]) != b"PK\x01\x02" or at + _ENTRY > len(rest):
            return None
        entries.append(at)
        at += _ENTRY + sum(struct.unpack("<HHH", bytes(rest[at + 28 : at + 34])))
    pickle = places["data.pkl"]
    behind = min((p for p in places.values() if p.offset > pickle.offset), default=None)
    if behind is None:
        return None
    crcs = (np.array(entries, np.int64)[:, None] + np.arange(_CRC, _CRC + 4)).reshape(-1)
    length, after = entries[pickle.entry] + _CRC + 4, entries[behind.entry] + _OFFSET
    for a, b in ((length, length + 8), (after, after + 4)):
        rest[a:b] = 0
    rest[crcs] = 0
    storages = {name[5:]: place for name, place in places.items() if name.startswith("data/")}
    return _Layout(start, rest, crcs, length, after, behind.offset, places, storages, *sample)


def _refuse_relatives(where: str, members: Mapping[str, zipfile.ZipInfo]) -> None:
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
        names = ", ".join(name[:40] for name in list(members)[:3] if name)
        found = f" (it has {names}, ...)" if names else ""
        raise FormatError(f"{where} is a zip, but not one of torch.save: it has no data.pkl{found}")


def _data_offsets(
    file: StoreFile,
    where: str,
    infos: list[zipfile.ZipInfo],
    directory: int,
    members: Mapping[str, zipfile.ZipInfo],
    prefix: str,
) -> tuple[dict[str, int], tuple[int, int] | None]:
    """Where the bytes of every record begin, and, if this is torch's writer, where one header and its data do.

    A record's header has a length that only the header tells, and one read per tensor is too much. But torch's writer
    leaves no gap: a record ends where the next header (or the directory) begins, less a descriptor of 16 or 24 bytes,
    and begins at a multiple of the alignment. Where that does not give exactly one answer, the header is read; the
    first one always is, to see that this is torch's writer (which pads with the extra field "FB").
    """
    alignment = 64
    ordered = sorted(infos, key=lambda i: i.header_offset)
    if ".storage_alignment" in members:
        text = file.at(
            _read_header(file, where, members[".storage_alignment"]), members[".storage_alignment"].file_size
        )
        alignment = int(text) if text.isdigit() and len(text) < 10 and int(text) else 1
    found: dict[str, int] = {}
    trusted: bool | None = None
    sample = None
    for info, after in zip(ordered, [*(i.header_offset for i in ordered[1:]), directory], strict=True):
        name, size = info.filename, info.file_size
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise FormatError(
                f"{where}: the record {name!r} is {'encrypted' if info.flag_bits & 1 else 'compressed'}, "
                "which torch.save never does: another tool wrote it. Try torch.save(torch.load(path, mmap=False), path)"
            )
        at = -1
        least = info.header_offset + _HEADER + len(name)
        if not size and name.startswith(prefix + "data/"):
            at = least  # nothing is read there: ZeRO-3 saves a thousand empty parameters, not worth a read each
        elif (
            info.flag_bits == _TORCH_FLAGS
            and alignment >= 32
            and name.startswith(prefix + "data/")
            and trusted is not False
        ):
            fits = [
                a
                for a in (after - size - 16, after - size - 24)
                if a % alignment == 0 and least <= a <= least + alignment + 64
            ]
            if len(fits) == 1 and trusted is None:
                at = _read_header(file, where, info)
                trusted = at == fits[0] and file.at(least, 2) == b"FB"
                sample = (info.header_offset, at) if trusted else None
            elif len(fits) == 1:
                at = fits[0]
        if at < 0:
            at = _read_header(file, where, info)
        if at < 0 or at + size > file.size:
            raise CorruptError(
                f"{where}: the record {name!r} claims {size:,} bytes at {at:,}, the file has {file.size:,}"
            )
        found[name] = at
    return found, sample


def _read_header(file: StoreFile, where: str, info: zipfile.ZipInfo) -> int:
    found = _header(file, info.header_offset)
    if found is None:
        raise CorruptError(
            f"{where}: the header of the record {info.filename!r} is not where the directory says: damaged"
        )
    return found


def _header(file: StoreFile, at: int) -> int | None:
    """Where the data behind a record's header begins; None if there is no header."""
    header = file.at(at, _HEADER) if at >= 0 else b""
    if header[:4] != ZIP_MAGIC:
        return None
    name, extra = struct.unpack("<HH", header[26:30])
    return at + _HEADER + int(name) + int(extra)
