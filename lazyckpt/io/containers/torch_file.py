"""Index of torch.save files: the places of their tensors and the objects around them. Nothing in a file is executed.

Zip files (torch >= 1.6): writer torch/serialization.py `_save` and caffe2/serialize/inline_container.cc. Legacy files:
torch/serialization.py `_legacy_save`. Tar files of torch 0.1: `torch_tar`. Files of DataStates, which stand in for
those of torch.save: `datastates`. Only pickles and the directories of zips and tars are read, no tensor data.
"""

from __future__ import annotations

import threading
import zlib
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from ...core.box import Shape, c_strides, hull
from ...core.columns import Extents, Kind
from ...core.dtypes import DType
from ...core.extents import Extent, Inline
from ...core.index import FileInfo
from ...errors import CorruptError, FormatError
from ..storage.base import Store
from ..storage.in_memory import Memory
from ..storage.streams import StoreFile
from .datastates import begins, is_datastates, read_datastates
from .pickle.audit import dangerous
from .pickle.machine import Pickle
from .pickle.memo import Items
from .pickle.rebuild import REBUILD, StoredStorage, StoredTensor, persistent_storage, viewed_storage
from .pickle.records import short
from .tar import is_tar
from .torch_tar import read_torch_tar
from .zip import ZIP_MAGIC
from .zip_directory import Directories, Record, same_places

LEGACY_MAGIC = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"  # the pickled number 0x1950a86a20f9469cfc6c
_HEAD = 4 << 20  # bytes before the first storage that are read in one request
_END = 2 << 10  # bytes that hold the pickle of a single tensor, or the directory of its archive
_ZIP_END = 22  # bytes of a zip's last record (torch writes no comment behind it)
_PICKLES = 4  # cached pickles: model states and optimizer states, of rank 0 and of the others
_LEGACY_PICKLES = 256 << 20  # maximum bytes of the pickles of a legacy file


@dataclass(frozen=True, slots=True)
class TorchFile:
    """The index of one torch.save file. ``root`` is the saved object, with `StoredTensor` records for tensors."""

    path: str
    info: FileInfo
    root: Any
    records: Mapping[str, Record]
    globals: dict[tuple[str, str], bool]
    swapped: bool
    pickle_size: int
    _dtypes: dict[str, DType | None] = field(default_factory=dict)

    def like(self, other: TorchFile) -> bool:
        """Return whether the tensors of both files are the same and at the same places."""
        return self.root is other.root and self.swapped == other.swapped and same_places(self.records, other.records)

    def extents(self, tensors: Mapping[str, StoredTensor]) -> Extents | None:
        """Return the places of these tensors as columns; None if they are not all C-order arrays of plain values.

        Raises CorruptError if the file cannot hold the elements of one of them."""
        kinds: dict[Kind, int] = {}
        offsets, numbers = array("q"), array("I")
        plain = not self.swapped
        dtypes, records = self._dtypes, self.records
        for name, t in tensors.items():
            storage = t.storage
            if storage is None or storage.data is not None:
                plain = False
                continue
            reach = _reach(t.offset, t.shape, t.strides, t.dtype)
            record = records.get(storage.key)
            same = not storage.numel or dtypes.setdefault(storage.key, storage.dtype) is storage.dtype
            if record is None or not same or reach > record.nbytes or storage.reach > record.nbytes:
                self.extent(t, name)  # raises the error
            elif plain:
                plain = not (t.conj or t.neg) and _plain(t.shape, t.strides)
                numbers.append(kinds.setdefault((t.shape, t.dtype), len(kinds)))
                offsets.append(record.offset + t.offset * t.dtype.itemsize)
        if not plain:
            return None
        return Extents(self.path, dict(zip(tensors, range(len(tensors)), strict=True)), offsets, numbers, list(kinds))

    def extent(self, tensor: StoredTensor, name: str) -> Extent:
        """Return the place of a tensor's elements. Raises CorruptError if the file cannot hold them."""
        storage = tensor.storage
        if storage is None:
            raise CorruptError(f"{self.path}: {name!r} has no storage")
        if storage.data is not None:
            held = Inline(self.path, storage.data)
            reach = _reach(tensor.offset, tensor.shape, tensor.strides, tensor.dtype)
            if reach > len(storage.data):
                raise CorruptError(
                    f"{self.path}: {name!r} needs {reach:,} bytes of a storage in the pickle, which has "
                    f"{len(storage.data):,}: the file is damaged"
                )
            start = tensor.offset * tensor.dtype.itemsize
            return Extent(
                self.path, start, tensor.dtype, tensor.shape, tensor.strides, tensor.conj, tensor.neg, within=held
            )
        if storage.numel and self._dtypes.setdefault(storage.key, storage.dtype) != storage.dtype:
            raise CorruptError(
                f"{self.path}: the storage {storage.key!r} of {name!r} is described as {self._dtypes[storage.key]} and "
                f"as {storage.dtype}, and torch would take the first for both: the file is damaged"
            )
        record = self.records.get(storage.key)
        if record is None:
            raise CorruptError(f"{self.path}: the storage {storage.key!r} of {name!r} is not in the file: truncated?")
        size = tensor.dtype.itemsize
        reach = _reach(tensor.offset, tensor.shape, tensor.strides, tensor.dtype)
        if reach > record.nbytes or storage.reach > record.nbytes:
            raise CorruptError(
                f"{self.path}: {name!r} needs {max(reach, storage.reach):,} bytes of the storage {storage.key!r}, "
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


@lru_cache(4096)
def _plain(shape: Shape, strides: Shape) -> bool:
    return strides == c_strides(shape)


@lru_cache(4096)
def _reach(offset: int, shape: Shape, strides: Shape, dtype: DType) -> int:
    """Return the number of bytes from the start of a storage to the end of a tensor. Most tensors are like others."""
    return (offset + hull(shape, strides)) * dtype.itemsize if 0 not in shape else 0


def is_torch_file(head: bytes) -> bool:
    """Return whether the first bytes of a file are those of a torch.save file or of a related format."""
    return head.startswith(ZIP_MAGIC) or LEGACY_MAGIC in head[:32] or is_tar(head) or begins(head)


def is_whole(store: Store, path: str, size: int) -> bool:
    """Return whether a file of that size ends like a torch.save zip, that is, is complete. Takes one small read."""
    return size >= _ZIP_END and bytes(store.read(path, size - _ZIP_END, 4)) == b"PK\x05\x06"


class Pickles:
    """A cache of parsed pickles and zip directories.

    Hundreds of ranks save files whose pickles are identical, byte for byte, in whole or in large part. Their objects
    are then identical, too; only the places of the storages differ. Cached objects are never modified."""

    def __init__(self) -> None:
        self.directories = Directories()
        self._known: dict[bytes, Pickle] = {}
        self._items = Items()
        self._lock = threading.Lock()

    def read(self, data: bytes, where: str) -> Pickle:
        with self._lock:  # unpickling holds the GIL, so several threads would not be faster
            pickle = self._known.get(data)
            if pickle is None:
                pickle = self._known[data] = Pickle(data, where, REBUILD, persistent_storage, known=self._items)
                if len(self._known) > _PICKLES:  # if all ranks' pickles differ, the cache is of no use
                    del self._known[next(iter(self._known))]
        return pickle


def read_torch_file(
    store: Store, path: str, pickles: Pickles | None = None, window: tuple[int, int] | None = None
) -> TorchFile:
    """Index a torch.save file: zip, legacy, or tar.

    ``pickles`` is a cache for similar files. With ``window`` (start, length), the torch.save file is this part of the
    file; the offsets of its records are still relative to the whole file. Raises FormatError for other formats
    (TorchScript, .pt2, torch.package, other zips, plain pickles), CorruptError for damage, MissingFileError.
    """
    file = StoreFile(store, path) if window is None else StoreFile(store, path, *ends(window[1]), window)
    head = file.at(0, min(file.size, 512))
    if head.startswith(ZIP_MAGIC):
        return _read_zip(file, pickles or Pickles())
    if LEGACY_MAGIC in head[:32]:
        return _read_legacy(file)
    if not head:
        raise CorruptError(f"{file.where} is empty (0 bytes): copy it again from its source")
    file.refuse_pointer(head)
    if is_tar(head):
        found = read_torch_tar(file)
        return TorchFile(
            file.path, file.info, found.root, found.records, found.globals, swapped=False, pickle_size=found.pickle_size
        )
    if is_datastates(file, head):
        return _read_datastates(file, head)
    if head[:1] == b"\x80":
        raise FormatError(
            f"{file.where} is a plain pickle, not a file of torch.save: load it where you trust it and save it again"
        )
    raise FormatError(f"{file.where} is not a file of torch.save (it begins with {head[:8]!r})")


def ends(size: int) -> tuple[int, int]:
    """Return the number of bytes to read in one request at the end and at the start of a small archive."""
    return (size, 0) if size <= 4 * _END else (_END, _END)


# -- storages in plain pickles


class _Nowhere:
    root = "a checkpoint"


_NOWHERE: Any = _Nowhere()
_NAME = "inner pickle"


def storage_in(data: Any) -> StoredStorage:
    """Return the storage that `pickle.dumps` of a tensor has inside, as bytes of `torch.save` in its legacy form
    (torch/storage.py `_StorageBase.__reduce__`)."""
    if not isinstance(data, bytes) or LEGACY_MAGIC not in data[:32]:
        raise TypeError("no bytes of a storage")
    file = read_torch_file(Memory(_NOWHERE, _NAME, data), _NAME)
    root = file.root
    if not isinstance(root, StoredStorage) or any(dangerous(*name) for name in file.globals):
        raise TypeError("no storage")
    record = file.records[root.key]
    dtype: DType | None = root.dtype
    return StoredStorage(root.key, dtype, root.numel, root.location, None, data[record.offset :][: record.nbytes])


LOADED = ("torch.storage", "_load_from_bytes")
INNER = {LOADED: storage_in}


def _read_datastates(file: StoreFile, head: bytes) -> TorchFile:
    """Read a file of DataStates, whose writer pickles tensors in tuples as they are."""
    known: dict[bytes, StoredStorage] = {}
    refused: list[TypeError] = []

    def load(data: Any) -> StoredStorage:  # (a pickle may name the same bytes many times)
        if type(data) is bytes and data in known:
            return known[data]
        try:
            found = storage_in(data)
        except TypeError as e:
            refused.append(e)
            raise
        known[data] = found._replace(key=f"pickled {len(known)}")  # (the files' own keys could be equal)
        return known[data]

    states = read_datastates(file, head, {**REBUILD, LOADED: load})
    named = {name: called for name, called in states.globals.items() if name != LOADED or refused or not known}
    return TorchFile(file.path, file.info, states.root, states.records, named, False, pickle_size=states.pickle_size)


# -- zip


def _read_zip(file: StoreFile, pickles: Pickles) -> TorchFile:
    where = file.where
    records, storages = pickles.directories.read(file)

    def small(name: str) -> bytes:
        record = records[name]
        return file.at(record.offset - file.start, record.nbytes)

    data = small("data.pkl")
    crc = records["data.pkl"].crc
    if crc and zlib.crc32(data) != crc:  # None: written with set_crc32_options(False)
        raise CorruptError(
            f"{where}: data.pkl, the list of what is in the file, fails its checksum: the file is damaged, copy it "
            "again from its source"
        )
    order = small("byteorder") if "byteorder" in records else b"little"
    if order not in (b"little", b"big"):
        raise CorruptError(f"{where}: its byteorder record says {order[:20]!r}")
    pickle = pickles.read(data, f"{where} (data.pkl)")
    if pickle.end != len(data):
        raise CorruptError(
            f"{where}: data.pkl has {len(data) - pickle.end:,} bytes behind the end of its pickle, which torch does "
            "not read: the file is damaged, or hides something. Save it again from where you trust it."
        )
    return TorchFile(file.path, file.info, pickle.value, storages, pickle.globals, order == b"big", len(data))


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
        # always little-endian (torch/csrc/serialization.cpp THPStorage_writeFileRaw), regardless of the header
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
    """Parse the five pickles at the start: magic number, protocol, system, the object, the order of the storages."""
    storages: dict[str, StoredStorage] = {}
    views: dict[Any, StoredStorage] = {}

    def persistent(pid: Any) -> Any:
        storage = viewed_storage(pid)
        if isinstance(storage, StoredStorage):
            first = storages.setdefault(storage.key, storage)
            if first.dtype != storage.dtype:  # torch uses the first dtype
                raise CorruptError(f"the storage {storage.key!r} is described as {first.dtype} and as {storage.dtype}")
            if storage.start is not None and views.setdefault(pid[5][0], storage) != storage:
                raise CorruptError(f"the view {short(pid[5][0])} of a storage is described in two ways")
        return storage

    pickles: list[Pickle] = []
    for _ in range(5):
        pickles.append(Pickle(data, where, REBUILD, persistent, pickles[-1].end if pickles else 0))
    return pickles, storages
