"""Chunks of arrays: whether one is there and where, and what it unpacks to.

A chunk is a file, an entry of a zip, or a part of a shard, whose table says where it is. One that is absent stands for
the fill value: one element in memory, which all indices show.
Sources: zarr-specs v3, codecs/sharding-indexed (index format).
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.index import Chunk, Codec, Extent, Shard
from ..errors import CorruptError, MissingFileError
from .batch import checked
from .codecs import decode
from .store import Buffer, Store, StoreFile, look
from .zips import data_offset

_FILL = "lazyckpt.fill"  # a codec of our own: the bytes in its configuration, whatever it is given
_NOWHERE = (1 << 64) - 1  # offset and length of a chunk that a shard has not
_KEPT = 64 << 20  # bytes of tables
_LOCKS = 64
_ENTRY = np.dtype([("offset", "<u8"), ("length", "<u8")])

Window = tuple[int, int]
Table = NDArray[Any]


class Tables:
    """The tables of the last shards that were looked into. Several threads that want the same wait for one of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tables: dict[tuple[str, Window], Table] = {}
        self._reading = [threading.Lock() for _ in range(_LOCKS)]

    def get(self, store: Store, path: str, window: Window, shard: Shard) -> Table:
        key = (path, window)
        table = self._tables.get(key)
        if table is None:
            with self._reading[hash(key) % _LOCKS]:
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
    """Where the elements of a chunk lie: in the file or, if it is packed or absent, within what it unpacks to.

    Raises MissingFileError (absent, and there is no fill value), CorruptError (a size or a table that cannot be).
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
            f"{store.root}/{chunk.path}: {chunk} has {length:,} bytes where it takes {chunk.nbytes:,}: truncated, or "
            "not of this array"
        )
    return Extent(chunk.path, offset, chunk.dtype, chunk.shape, chunk.strides, swapped=chunk.swapped)


def unpack_chunk(store: Store, chunk: Chunk, out: memoryview | None = None) -> Buffer:
    """The bytes of a chunk that `place` has found; perhaps in ``out``, memory for so many bytes.

    Raises DataError (an unknown codec), CorruptError (damaged).
    """
    where = f"{store.root}/{chunk.path} ({chunk})"
    if chunk.codecs[0].name == _FILL:
        return bytes.fromhex(chunk.codecs[0].config)
    offset, length = chunk.window or (0, store.stat(chunk.path).size)
    packed = np.empty(length, np.uint8).data  # memory that nobody has to clear first
    store.read_into(chunk.path, offset, packed)
    data = decode(chunk.codecs, packed, where, chunk.nbytes, out)
    if len(data) != chunk.nbytes:
        raise CorruptError(f"{where} unpacks to {len(data):,} bytes in place of {chunk.nbytes:,}: damaged")
    return data


def _window(store: Store, chunk: Chunk) -> Window | None:
    """The bytes of the chunk, or of the shard it is in."""
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
    """The bytes of a chunk of a shard that takes these bytes of the file; None if the shard has it not."""
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
