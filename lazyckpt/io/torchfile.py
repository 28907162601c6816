"""Files of torch.save: where their tensors lie, and the objects around them. Nothing of a file is executed.

Zip files (torch >= 1.6): writer torch/serialization.py `_save` and caffe2/serialize/inline_container.cc. Legacy files:
torch/serialization.py `_legacy_save`. Only the pickle and the zip's directory are read, no tensor data.
"""

from __future__ import annotations

import struct
import threading
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..core.box import hull
from ..core.index import Extent, FileInfo
from ..errors import CorruptError, FormatError
from .pickles import Pickle
from .rebuild import REBUILD, StoredStorage, StoredTensor, persistent_storage
from .store import Store, StoreFile

ZIP_MAGIC = b"PK\x03\x04"
LEGACY_MAGIC = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"  # the number 0x1950a86a20f9469cfc6c as a pickle spells it
_HEAD = 4 << 20  # what stands before the first storage is read at once if it is at most this long
_END = 2 << 10  # bytes in which the pickle of a single tensor, or the directory of its archive, ends
_ZIP_END = 22  # bytes of a zip's last record (torch writes no comment behind it)
_TORCH_FLAGS = 0x0808  # sizes behind the data, names in UTF-8: miniz, as torch uses it
_PICKLES = 4  # kept at a time: model states and optimizer states, of rank 0 and of the others
_LEGACY_PICKLES = 256 << 20  # bytes of a legacy file that its pickles may take


class Record(NamedTuple):
    """The bytes of one storage; ``crc`` is the CRC-32 of all of them, None if the file does not tell."""

    offset: int
    nbytes: int
    crc: int | None


@dataclass(frozen=True, slots=True)
class TorchFile:
    """One file of torch.save, indexed. ``root``: what was saved, with `StoredTensor` records for tensors."""

    path: str
    info: FileInfo
    root: Any
    records: Mapping[str, Record]
    globals: dict[tuple[str, str], bool]
    swapped: bool
    pickle_size: int

    def extent(self, tensor: StoredTensor, name: str) -> Extent:
        """Where a tensor of this file lies. Raises CorruptError if the file cannot hold it."""
        storage = tensor.storage
        if storage is None:
            raise CorruptError(f"{self.path}: {name!r} has no storage")
        record = self.records.get(storage.key)
        if record is None:
            raise CorruptError(f"{self.path}: the storage {storage.key!r} of {name!r} is not in the file: truncated?")
        size = tensor.dtype.itemsize
        reach = (tensor.offset + hull(tensor.shape, tensor.strides)) * size if 0 not in tensor.shape else 0
        if reach > record.nbytes or storage.nbytes > record.nbytes:
            raise CorruptError(
                f"{self.path}: {name!r} needs {max(reach, storage.nbytes):,} bytes of the storage {storage.key!r}, "
                f"which has {record.nbytes:,}: the file is damaged"
            )
        return Extent(
            self.path,
            record.offset + tensor.offset * size,
            tensor.dtype,
            tensor.shape,
            tensor.strides,
            tensor.conj,
            tensor.neg,
            self.swapped and size > 1,
        )


def is_torch_file(head: bytes) -> bool:
    """Whether a file that begins so is (or claims to be) one of torch.save, or one of its relatives."""
    return head.startswith(ZIP_MAGIC) or LEGACY_MAGIC in head[:32]


def is_whole(store: Store, path: str) -> bool:
    """Whether the file ends as the zips of torch.save do: a truncated one does not. It takes one small read."""
    size = store.stat(path).size
    return size >= _ZIP_END and bytes(store.read(path, size - _ZIP_END, 4)) == b"PK\x05\x06"


class Pickles:
    """Pickles that were read before. Hundreds of ranks save files whose pickles are the same, byte for byte: then what
    is in them is the same too, only their storages lie elsewhere. (What was read of one is never changed.)"""

    def __init__(self) -> None:
        self._known: dict[bytes, Pickle] = {}
        self._lock = threading.Lock()

    def read(self, data: bytes, where: str) -> Pickle:
        pickle = self._known.get(data)
        if pickle is None:
            pickle = Pickle(data, where, REBUILD, persistent_storage)
            with self._lock:
                self._known[data] = pickle
                if len(self._known) > _PICKLES:  # ranks whose pickles all differ gain nothing from it
                    del self._known[next(iter(self._known))]
        return pickle


def read_torch_file(
    store: Store, path: str, pickles: Pickles | None = None, window: tuple[int, int] | None = None
) -> TorchFile:
    """Index a file of torch.save, zip or legacy. ``pickles``: those of files that are alike. ``window`` (start,
    length): it is that part of the file only; the offsets of its records are those in the file all the same.

    Raises FormatError for what is something else (TorchScript, .pt2, torch.package, other zips, plain pickles),
    CorruptError for damage, MissingFileError.
    """
    file = StoreFile(store, path) if window is None else StoreFile(store, path, *_ends(window[1]), window)
    head = file.at(0, min(file.size, 512))
    if head.startswith(ZIP_MAGIC):
        return _read_zip(file, pickles or Pickles())
    if LEGACY_MAGIC in head[:32]:
        return _read_legacy(file)
    if not head:
        raise CorruptError(f"{file.where} is empty (0 bytes): copy it again from its source")
    if head[257:262] == b"ustar":
        raise FormatError(
            f"{file.where} is a tar archive, as torch 0.1 saved: load it with an old torch and save it again"
        )
    if head[:1] == b"\x80":
        raise FormatError(
            f"{file.where} is a plain pickle, not a file of torch.save: load it where you trust it and save it again"
        )
    raise FormatError(f"{file.where} is not a file of torch.save (it begins with {head[:8]!r})")


def _ends(size: int) -> tuple[int, int]:
    """How many bytes at the end and at the start of a small archive are worth a read each."""
    return (size, 0) if size <= 4 * _END else (_END, _END)


# -- zip


def _read_zip(file: StoreFile, pickles: Pickles) -> TorchFile:
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
    members = {i.filename.removeprefix(prefix): i for i in infos if i.filename.startswith(prefix)}
    if len({i.filename for i in infos}) < len(infos):  # readers differ in which of the two they take
        raise CorruptError(
            f"{where}: a record is in the zip twice: no writer does that, the file is damaged or hostile"
        )
    _refuse_relatives(where, members)
    offsets = _data_offsets(file, where, infos, archive.start_dir, members, prefix)

    def small(name: str) -> bytes:
        info = members[name]
        return file.at(offsets[info.filename], info.file_size)

    data = small("data.pkl")
    crc = members["data.pkl"].CRC
    if crc and zlib.crc32(data) != crc:  # 0: written with set_crc32_options(False)
        raise CorruptError(
            f"{where}: data.pkl, the list of what is in the file, fails its checksum: the file is damaged, copy it "
            "again from its source"
        )
    order = small("byteorder") if "byteorder" in members else b"little"
    if order not in (b"little", b"big"):
        raise CorruptError(f"{where}: its byteorder record says {order[:20]!r}")
    pickle = pickles.read(data, f"{where} (data.pkl)")
    records = {
        name[5:]: Record(file.start + offsets[i.filename], i.file_size, i.CRC or (0 if not i.file_size else None))
        for name, i in members.items()
        if name.startswith("data/")
    }
    return TorchFile(file.path, file.info, pickle.value, records, pickle.globals, order == b"big", len(data))


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
        names = ", ".join(list(members)[:3])
        raise FormatError(f"{where} is a zip, but not one of torch.save: it has no data.pkl (it has {names}, ...)")


def _data_offsets(
    file: StoreFile,
    where: str,
    infos: list[zipfile.ZipInfo],
    directory: int,
    members: Mapping[str, zipfile.ZipInfo],
    prefix: str,
) -> dict[str, int]:
    """Where the bytes of every record begin.

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
    for info, after in zip(ordered, [*(i.header_offset for i in ordered[1:]), directory], strict=True):
        name, size = info.filename, info.file_size
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise FormatError(
                f"{where}: the record {name!r} is {'encrypted' if info.flag_bits & 1 else 'compressed'}, "
                "which torch.save never does: another tool wrote it. Try torch.save(torch.load(path, mmap=False), path)"
            )
        at = -1
        least = info.header_offset + 30 + len(name)
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
            elif len(fits) == 1:
                at = fits[0]
        if at < 0:
            at = _read_header(file, where, info)
        if at < 0 or at + size > file.size:
            raise CorruptError(
                f"{where}: the record {name!r} claims {size:,} bytes at {at:,}, the file has {file.size:,}"
            )
        found[name] = at
    return found


def _read_header(file: StoreFile, where: str, info: zipfile.ZipInfo) -> int:
    header = file.at(info.header_offset, 30) if info.header_offset >= 0 else b""
    if header[:4] != ZIP_MAGIC:
        raise CorruptError(
            f"{where}: the header of the record {info.filename!r} is not where the directory says: damaged"
        )
    name, extra = struct.unpack("<HH", header[26:30])
    return info.header_offset + 30 + int(name) + int(extra)


# -- legacy


def _read_legacy(file: StoreFile) -> TorchFile:
    where = f"{file.where} (legacy torch file)"
    window = min(file.size, 1 << 20)
    while True:
        data = file.at(0, window)
        try:
            pickles, storages = _legacy_pickles(data, where)
            break
        except CorruptError:
            if window >= min(file.size, _LEGACY_PICKLES):
                raise
            window = min(file.size, window * 4, _LEGACY_PICKLES)
    _, _, _, root, keys = (p.value for p in pickles)
    if not isinstance(keys, list) or not all(type(k) is str for k in keys) or set(keys) != set(storages):
        raise CorruptError(f"{where}: the list of storages does not match the tensors: damaged")
    records, at = {}, pickles[-1].end
    for key in keys:
        storage = storages[key]
        # little-endian on any machine (torch/csrc/serialization.cpp THPStorage_writeFileRaw), whatever the header says
        count = int.from_bytes(file.at(at, 8), "little", signed=True)
        nbytes = count * (storage.dtype.itemsize if storage.dtype else 1)
        at += 8
        if count < 0 or at + nbytes > file.size:
            raise CorruptError(
                f"{where}: the storage {key!r} claims {nbytes:,} bytes at {at:,}, of {file.size:,}: truncated?"
            )
        records[key] = Record(file.start + at, nbytes, None)
        at += nbytes
    return TorchFile(file.path, file.info, root, records, pickles[3].globals, False, pickles[-1].end)


def _legacy_pickles(data: bytes, where: str) -> tuple[list[Pickle], dict[str, StoredStorage]]:
    """The five pickles at the start: magic number, protocol, system, the object, the order of the storages."""
    storages: dict[str, StoredStorage] = {}

    def persistent(pid: Any) -> Any:
        storage = persistent_storage(pid)
        if isinstance(storage, StoredStorage):
            storages[storage.key] = storage
        return storage

    pickles: list[Pickle] = []
    for _ in range(5):
        pickles.append(Pickle(data, where, REBUILD, persistent, pickles[-1].end if pickles else 0))
    return pickles, storages
