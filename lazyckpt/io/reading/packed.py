"""Lookup and decompression of array chunks and of `torch.save` archives.

A chunk is a file, an entry of a zip, or a part of a shard whose table records its place. An absent chunk has the fill
value everywhere: one element in memory that all indices refer to (strides of 0).
Sources: zarr-specs v3, codecs/sharding-indexed (index format).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.extents import Archive, Chunk, Codec, Extent, Inline, Packed, Shard
from ...core.requests import Ints
from ...errors import ChangedFileError, CorruptError, DataError, LazyckptError, MissingFileError
from ..checks import checked
from ..codecs import decode, unpack_zstd
from ..containers.pickle.rebuild import StoredTensor
from ..containers.torch_file import Pickles, ends, read_torch_file
from ..containers.zip_offsets import data_offset
from ..pool import each, inline
from ..storage.access import look
from ..storage.base import Buffer, Store
from ..storage.in_memory import Memory
from ..storage.streams import StoreFile
from ..system import after_fork
from .keeping import reads_once

_FILL = "lazyckpt.fill"  # a private codec whose output is the bytes in its configuration
_NOWHERE = (1 << 64) - 1  # offset and length of a chunk that is absent from a shard
_KEPT = 64 << 20  # bytes of cached tables
_LOCKS = 64
_ENTRY = np.dtype([("offset", "<u8"), ("length", "<u8")])

Window = tuple[int, int]
Table = NDArray[Any]


class Tables:
    """A cache of shard tables. If several threads need the same table, one reads it and the others wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tables: dict[tuple[str, Window], Table] = {}
        self._reading = [threading.Lock() for _ in range(_LOCKS)]

    def get(self, store: Store, path: str, window: Window, shard: Shard) -> Table:
        key = (path, window)
        table = self._tables.get(key)
        if table is None:
            with self._reading[hash(key) % _LOCKS], inline():
                table = self._tables.get(key)
                if table is None:
                    with checked(apart=True):
                        table = _table(store, path, window, shard)
                    with self._lock:
                        self._tables[key] = table
                        size = sum(t.nbytes for t in self._tables.values())
                        while size > _KEPT and len(self._tables) > 1:
                            size -= self._tables.pop(next(iter(self._tables))).nbytes
        return table


def place(store: Store, chunk: Chunk, tables: Tables) -> Extent:
    """Locate the elements of a chunk: in the file or, if it is compressed or absent, in its decompressed bytes.

    Raises MissingFileError (the chunk is absent and has no fill value), CorruptError (an impossible size or table).
    """
    window = _window(store, chunk)
    for shard in chunk.shards:
        if window is None:
            break
        window = _inside(store, chunk.path, window, shard, tables)
    if window is None:
        return _filled(store, chunk)
    offset, length = window
    if chunk.codecs:
        found = replace(chunk, window=window, shards=(), zipped=None)
        return Extent(chunk.path, 0, chunk.dtype, chunk.shape, chunk.strides, swapped=chunk.swapped, within=found)
    if length != chunk.nbytes:
        raise CorruptError(
            f"{store.root}/{chunk.path}: {chunk} has {length:,} bytes, expected {chunk.nbytes:,}: truncated, or "
            "not a chunk of this array"
        )
    return Extent(chunk.path, offset, chunk.dtype, chunk.shape, chunk.strides, swapped=chunk.swapped)


def is_filler(extent: Extent) -> bool:
    """Return whether an extent is that of an absent chunk, all of whose elements are the fill value."""
    chunk = extent.within
    return isinstance(chunk, Chunk) and bool(chunk.codecs) and chunk.codecs[0].name == _FILL


def unpack_chunk(store: Store, chunk: Chunk, out: memoryview | None = None, packed: memoryview | None = None) -> Buffer:
    """Decompress a chunk that `place` located; the result may be in ``out``, memory of the chunk's size. ``packed`` are
    its bytes in the file, if they were read already.

    Raises DataError (an unknown codec), CorruptError (damaged data).
    """
    where = f"{store.root}/{chunk.path} ({chunk})"
    if chunk.codecs[0].name == _FILL:
        return bytes.fromhex(chunk.codecs[0].config)
    if packed is None:
        offset, length = chunk.window or (0, store.stat(chunk.path).size)
        packed = np.empty(length, np.uint8).data  # unlike a bytearray, not cleared first
        store.read_into(chunk.path, offset, packed)
    data = decode(chunk.codecs, packed, where, chunk.nbytes, out)
    if len(data) != chunk.nbytes:
        raise CorruptError(f"{where} unpacks to {len(data):,} bytes instead of {chunk.nbytes:,}: damaged")
    return data


def _window(store: Store, chunk: Chunk) -> Window | None:
    """Return the window of the chunk's file that holds the chunk or its shard; None if that is absent."""
    if not chunk.present:
        return None
    if chunk.window is None:
        info = look(store, chunk.path)
        return None if info is None else (0, info.size)
    if chunk.zipped is None:
        return chunk.window
    pin = store.pins.get(chunk.path)
    file = StoreFile(store, chunk.path, tail=0, window=None if pin is None else (0, pin.size))
    return data_offset(file, chunk.zipped), chunk.window[1]


def _inside(store: Store, path: str, window: Window, shard: Shard, tables: Tables) -> Window | None:
    """Return the bytes of a chunk within the shard at ``window``; None if the chunk is absent from the shard."""
    table = tables.get(store, path, window, shard)
    offset, length = int(table["offset"][shard.number]), int(table["length"][shard.number])
    if offset == length == _NOWHERE:
        return None
    if offset + length > window[1]:
        raise CorruptError(
            f"{store.root}/{path}: the shard of {window[1]:,} bytes at {window[0]:,} has chunk {shard.number:,} at "
            f"bytes {offset:,} to {offset + length:,}: truncated, or its table is damaged"
        )
    return window[0] + offset, length


def _table(store: Store, path: str, window: Window, shard: Shard) -> Table:
    size = shard.chunks * _ENTRY.itemsize + 4 * shard.checked
    where = f"{store.root}/{path}: the table of the shard at byte {window[0]:,}"
    if size > window[1]:
        raise CorruptError(f"{where} takes {size:,} bytes, the shard has {window[1]:,}: truncated")
    data = store.read(path, window[0] + (window[1] - size if shard.at_end else 0), size)
    if shard.checked:
        data = decode([Codec("crc32c")], data, where, size)
    entry = _ENTRY.newbyteorder() if shard.swapped else _ENTRY
    return np.frombuffer(data, entry, shard.chunks)


def _filled(store: Store, chunk: Chunk) -> Extent:
    if chunk.fill is None:
        raise MissingFileError(f"{store.root}/{chunk.path}: {chunk} is not there. Is the whole checkpoint here?")
    one = replace(
        chunk, shape=(), strides=(), nbytes=len(chunk.fill), codecs=(Codec(_FILL, chunk.fill.hex()),), swapped=False,
        shards=(), window=(0, 0), zipped=None, present=True,
    )  # fmt: skip
    return Extent(chunk.path, 0, chunk.dtype, chunk.shape, (0,) * len(chunk.shape), within=one)


# -- Archives of torch.save and chunks of arrays: locating the elements and decompressing them.

_PLACES = 1 << 16  # located archives that are cached per store
_UNPACKED = 128 << 20  # bytes of decompressed archives that are cached per store (at least the last one)
_UNPACKED_ONCE = 64 << 20  # the same for threads that read once
_HUGE = 8 << 20  # bytes; threads that read once decompress larger ones one at a time
_SMALL = 1 << 20  # bytes; smaller chunks are always cached, for the next slice
_SLACK = 1 << 20  # bytes that the archive of a tensor may have besides the elements
CODECS = {"stream.zstd/1": unpack_zstd}


class _Known:
    """The caches of one store."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.turn = threading.Lock()  # held while a huge one is decompressed
        self.places: dict[tuple[Any, ...], Extent] = {}
        self.unpacked: dict[tuple[Any, ...], Buffer] = {}
        self.pickles = Pickles()
        self.tables = Tables()

    def keep(self, key: tuple[Any, ...], data: Buffer, limit: int) -> None:
        """Keep a decompressed archive; of the others the last ones, so that all have at most ``limit`` bytes."""
        with self.lock:
            self.unpacked.pop(key, None)
            self._forget(limit - len(data))
            self.unpacked[key] = data

    def forget(self, limit: int) -> None:
        """Forget the first of the decompressed archives, so that the others have at most ``limit`` bytes."""
        with self.lock:
            self._forget(limit)

    def _forget(self, limit: int) -> None:
        size = sum(map(len, self.unpacked.values()))
        while self.unpacked and size > limit:
            size -= len(self.unpacked.pop(next(iter(self.unpacked))))


_stores: weakref.WeakKeyDictionary[Any, _Known] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def _forget() -> None:
    """Drop all caches in a forked child: threads of its parent may hold any of the locks."""
    global _stores, _lock
    _stores, _lock = weakref.WeakKeyDictionary(), threading.Lock()


after_fork(_forget)


def _known(store: Store) -> _Known:
    with _lock:
        known = _stores.get(store)
        if known is None:
            known = _stores[store] = _Known()
        return known


def locate(store: Store, archive: Packed, name: str) -> Extent:
    """Locate the elements of an archive or a chunk: in the file or, if compressed, in the decompressed bytes. Takes one
    or two small reads.

    ``name`` is the tensor's name, for messages. Raises CorruptError (not an archive of a tensor of this dtype and
    shape), DataError (an unknown codec), and what reading raises.
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
    """Return the result of an earlier `locate` from the cache, without reading; None if there is none."""
    extent = _known(store).places.get(archive.key)
    if extent is not None:
        _compare(store, archive, name, extent)
    return extent


def locate_all(store: Store, archives: Iterable[tuple[Packed, str]]) -> None:
    """Locate all archives that are not in the cache, several at a time: over a network, one lookup takes as long as
    reading a slice, and the ends of archives that follow each other are read together. ``archives`` yields pairs
    (archive, name of its tensor).

    Compressed archives are skipped, because locating their elements means reading all of them. Raises what `locate`
    raises.
    """
    places = _known(store).places
    open_ones = [
        (archive, name)
        for archive, name in archives
        if (isinstance(archive, Chunk) or not archive.codecs) and archive.key not in places
    ]
    torch_ones = [one for one in open_ones if isinstance(one[0], Archive)] if store.joins else []
    if torch_ones:
        with store.holding(ends_of([archive for archive, _ in torch_ones])):
            for archive, name in torch_ones:
                locate(store, archive, name)
        open_ones = [one for one in open_ones if not isinstance(one[0], Archive)]
    each(lambda one: locate(store, *one), open_ones, store.width)


def ends_of(archives: Sequence[Packed]) -> dict[str, tuple[Ints, Ints]]:
    """Return the runs (offsets, lengths) of files that `read_torch_file` reads to find what is in archives."""
    runs: dict[str, set[tuple[int, int]]] = {}
    for archive in archives:
        if isinstance(archive, Archive):
            tail, head = ends(archive.length)
            both = (archive.offset + archive.length - tail, tail), (archive.offset, head)
            runs.setdefault(archive.path, set()).update(one for one in both if one[1])
    columns = {path: np.array(sorted(found), np.int64).T for path, found in runs.items() if found}
    return {path: (column[0], column[1]) for path, column in columns.items()}


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
            raise CorruptError(f"{_where(store, archive)}: it holds {type(tensor).__name__}, not a tensor")
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


def unread(store: Store, archive: Packed | Inline) -> tuple[int, int] | None:
    """Return where the bytes of a chunk that `locate` returned are in its file (offset, length); None if they are not
    needed, or known only after looking."""
    if not isinstance(archive, Chunk) or not archive.codecs or archive.codecs[0].name == _FILL:
        return None
    return None if archive.key in _known(store).unpacked else archive.window


def unpacked(
    store: Store, archive: Packed | Inline, limit: int | None = None, packed: memoryview | None = None
) -> Memory:
    """Decompress an archive, or a chunk that `locate` returned, to a store of one file. ``limit`` is the maximum size
    in bytes, by default what the tensor needs. ``packed`` are the bytes of a chunk, if they were read already. Raises
    DataError for an unknown codec, CorruptError for damaged data."""
    if isinstance(archive, Inline):
        return Memory(store, archive.path, archive.data)
    known = _known(store)
    data = known.unpacked.get(archive.key)
    if data is None:
        if reads_once() and _size(archive) > _HUGE:
            with known.turn, inline():
                data = known.unpacked.get(archive.key)  # another thread may have needed the same
                if data is None:
                    known.forget(_UNPACKED_ONCE - _size(archive))
                    data = _unpacked(store, archive, limit, packed, known)
        else:
            data = _unpacked(store, archive, limit, packed, known)
    return Memory(store, archive.path, data)


def _unpacked(store: Store, archive: Packed, limit: int | None, packed: memoryview | None, known: _Known) -> Buffer:
    with checked(apart=True):
        if isinstance(archive, Chunk):
            if packed is not None:  # read before, by a job that verifies it at its end only
                store.settle(archive.path)
            data = unpack_chunk(store, archive, packed=packed)
        else:
            data = unpack(store, archive, limit)
    known.keep(archive.key, data, _UNPACKED_ONCE if reads_once() else _UNPACKED)
    return data


def _size(archive: Packed) -> int:
    """Return the bytes of the decompressed elements."""
    return archive.nbytes if isinstance(archive, Chunk) else prod(archive.shape) * archive.dtype.itemsize


def unpacked_into(store: Store, archive: Packed | Inline, target: memoryview, packed: memoryview | None = None) -> bool:
    """Decompress a whole chunk directly into ``target``, without caching it, and return True. Return False for a chunk
    that is small, has another size, or is cached already. Raises what `unpacked` raises."""
    if not isinstance(archive, Chunk) or not _SMALL <= len(target) == archive.nbytes:
        return False
    if archive.key in _known(store).unpacked:
        return False
    data = unpack_chunk(store, archive, target, packed)
    if data is not target:
        target[:] = data
    return True


def unpack(store: Store, archive: Archive, limit: int | None = None) -> bytes:
    """Decompress an archive to bytes, without caching them."""
    where = _where(store, archive)
    unknown = [c for c in archive.codecs if c not in CODECS]
    if unknown:
        raise DataError(
            f"{where}: the elements are packed with {', '.join(map(repr, unknown))}, which lazyckpt cannot unpack (it "
            f"supports: {', '.join(CODECS)}). Save the checkpoint again without that extension."
        )
    if limit is None:
        limit = prod(archive.shape) * archive.dtype.itemsize + _SLACK
    data = bytes(store.read(archive.path, archive.offset, archive.length))
    for codec in archive.codecs:
        data = bytes(CODECS[codec](data, where, limit))
    return data


def _where(store: Store, archive: Archive) -> str:
    return f"{store.root}/{archive.path} (at byte {archive.offset:,})"
