"""What is packed: where in an archive of torch.save or a chunk of an array the elements lie, and what they unpack to.

What was found out is kept with the store, so that a second slice costs no look-up: places of the last many,
contents of the last few that had to be unpacked.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

from ..core.index import Archive, Chunk, Extent, FileInfo, Inline, Packed
from ..errors import ChangedFileError, CorruptError, DataError, LazyckptError, MissingFileError
from .batch import checked
from .chunks import Tables, place, unpack_chunk
from .pool import each
from .rebuild import StoredTensor
from .store import Buffer, Entry, Fetched, Store
from .torchfile import Pickles, read_torch_file
from .zstd import unpack_zstd

_PLACES = 1 << 16  # archives whose inside a store remembers
_UNPACKED = 128 << 20  # bytes of unpacked archives that it keeps (the last one whatever its size)
_SMALL = 1 << 20  # bytes; what takes less is always kept, for the next slice
_SLACK = 1 << 20  # bytes that the archive of a tensor may have besides the elements
CODECS = {"stream.zstd/1": unpack_zstd}


class _Known:
    """What one store remembers."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.places: dict[tuple[Any, ...], Extent] = {}
        self.unpacked: dict[tuple[Any, ...], Buffer] = {}
        self.pickles = Pickles()
        self.tables = Tables()


_stores: weakref.WeakKeyDictionary[Any, _Known] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def _forget() -> None:
    """A forked child looks everything up anew: threads of its parent may hold any of the locks."""
    global _stores, _lock
    _stores, _lock = weakref.WeakKeyDictionary(), threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _known(store: Store) -> _Known:
    with _lock:
        known = _stores.get(store)
        if known is None:
            known = _stores[store] = _Known()
        return known


def locate(store: Store, archive: Packed, name: str) -> Extent:
    """Where the elements of an archive or a chunk lie; within what it unpacks to, if it is packed. One or two small
    reads.

    Raises CorruptError (it is no archive of a tensor of this dtype and shape), DataError (a codec that is not known),
    and what reading raises. ``name``: of the tensor, for messages.
    """
    extent = located(store, archive, name)
    if extent is None:
        known = _known(store)
        with checked(apart=True):
            if isinstance(archive, Chunk):
                extent = place(store, archive, known.tables)
            else:
                extent = _look(store, archive, name, known)
        with known.lock:
            known.places[archive.key] = extent
            while len(known.places) > _PLACES:
                del known.places[next(iter(known.places))]
        _compare(store, archive, name, extent)
    return extent


def located(store: Store, archive: Packed, name: str) -> Extent | None:
    """The same, if it was looked up before; reads nothing."""
    extent = _known(store).places.get(archive.key)
    if extent is not None:
        _compare(store, archive, name, extent)
    return extent


def locate_all(store: Store, archives: Iterable[tuple[Packed, str]]) -> None:
    """Look up all (archive, name of its tensor) that are not known yet, several at a time: over a network each takes
    as long as a slice of the tensor does. Packed archives are left out: looking into them is reading them.

    Raises as `locate` does.
    """
    places = _known(store).places
    open_ones = [
        (archive, name)
        for archive, name in archives
        if (isinstance(archive, Chunk) or not archive.codecs) and archive.key not in places
    ]
    each(lambda one: locate(store, *one), open_ones)


def _compare(store: Store, archive: Packed, name: str, extent: Extent) -> None:
    if isinstance(archive, Archive) and (extent.dtype, extent.shape) != (archive.dtype, archive.shape):
        raise CorruptError(
            f"{_where(store, archive)}: the archive of {name!r} holds {extent.dtype} of shape {extent.shape}, not "
            f"{archive.dtype} of shape {archive.shape} as the checkpoint's metadata says: one of the two is damaged"
        )


def _look(store: Store, archive: Archive, name: str, known: _Known) -> Extent:
    try:
        if archive.codecs:
            file = read_torch_file(unpacked(store, archive), archive.path, known.pickles)
        else:
            file = read_torch_file(store, archive.path, known.pickles, (archive.offset, archive.length))
        tensor = file.root
        if not isinstance(tensor, StoredTensor):
            raise CorruptError(f"{_where(store, archive)}: it holds {type(tensor).__name__}, no tensor")
        extent = file.extent(tensor, name)
    except (ChangedFileError, MissingFileError, DataError):
        raise
    except LazyckptError as e:
        raise CorruptError(f"{name!r}, the archive at byte {archive.offset:,} of {archive.path}: {e}") from None
    if not archive.codecs:
        return extent
    return Extent(
        extent.path, extent.offset, extent.dtype, extent.shape, extent.strides, extent.conj, extent.neg, extent.swapped,
        archive,
    )  # fmt: skip


def unpacked(store: Store, archive: Packed | Inline, limit: int | None = None) -> Memory:
    """What an archive or a chunk (one that `locate` gave) unpacks to, as a store of one file. ``limit``: bytes that it
    may take at most; by default what the tensor needs. Raises DataError for a codec that is not known, CorruptError."""
    if isinstance(archive, Inline):
        return Memory(store, archive.path, archive.data)
    known = _known(store)
    key = archive.key
    data = known.unpacked.get(key)
    if data is None:
        with checked(apart=True):
            data = unpack_chunk(store, archive) if isinstance(archive, Chunk) else unpack(store, archive, limit)
        with known.lock:
            known.unpacked[key] = data
            size = sum(map(len, known.unpacked.values()))
            while size > _UNPACKED and len(known.unpacked) > 1:
                size -= len(known.unpacked.pop(next(iter(known.unpacked))))
    return Memory(store, archive.path, data)


def unpacked_into(store: Store, packed: Packed | Inline, target: memoryview) -> bool:
    """Unpack straight into place what is wanted as a whole, and keep nothing: whether that was done. It is not if it is
    small, unpacks to something else in size, or is kept already. Errors as `unpacked`."""
    if not isinstance(packed, Chunk) or not _SMALL <= len(target) == packed.nbytes:
        return False
    if packed.key in _known(store).unpacked:
        return False
    data = unpack_chunk(store, packed, target)
    if data is not target:
        target[:] = data
    return True


def unpack(store: Store, archive: Archive, limit: int | None = None) -> bytes:
    """The same of an archive as bytes, not kept."""
    where = _where(store, archive)
    unknown = [c for c in archive.codecs if c not in CODECS]
    if unknown:
        raise DataError(
            f"{where}: the elements are packed with {', '.join(map(repr, unknown))}, which lazyckpt cannot unpack (it "
            f"can: {', '.join(CODECS)}). Save the checkpoint again without that extension."
        )
    if limit is None:
        limit = prod(archive.shape) * archive.dtype.itemsize + _SLACK
    data = bytes(store.read(archive.path, archive.offset, archive.length))
    for codec in archive.codecs:
        data = bytes(CODECS[codec](data, where, limit))
    return data


def _where(store: Store, archive: Archive) -> str:
    return f"{store.root}/{archive.path} (at byte {archive.offset:,})"


class Memory(Store):
    """A store of one file that is in memory, for what reads through a store. ``name``: what it is called."""

    gap = 1 << 62  # nothing is saved by reading less

    def __init__(self, origin: Store, name: str, data: Buffer) -> None:
        super().__init__()
        self._root = origin.root
        self._name, self._data = name, data

    @property
    def root(self) -> str:
        return self._root

    def _with(self, pins: Mapping[str, FileInfo]) -> Memory:
        return self

    def below(self, folder: str) -> Memory:
        return self

    def list(self, folder: str = "") -> Mapping[str, Entry]:
        return {self._name: Entry(self.stat(self._name), False)}

    def _stat(self, path: str) -> FileInfo:
        return FileInfo(len(self._data), 0)

    def read(self, path: str, offset: int, length: int) -> memoryview:
        if offset + length > len(self._data):
            raise CorruptError(f"{self.root}/{path}: bytes past the end of what it unpacks to are wanted: damaged")
        return memoryview(self._data)[offset : offset + length]

    def _fetch(self, path: str, offset: int, target: memoryview) -> Fetched:
        target[:] = self.read(path, offset, len(target))
        return len(target), self._stat(path)
