"""The files of a zarr array: their keys and content, and their comparison with the source.

A file holds one chunk or, as a shard, many chunks and an index. All chunks have the same shape; elements beyond the
tensor's end are zero. Source: the zarr v3 core specification (regular chunk grid, default chunk key encoding) and its
codec "sharding_indexed": the index has the offset and size of each inner chunk as uint64, and their CRC-32C.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np
import torch

from ..core.box import Box, Shape, c_strides, is_run, tiles
from ..core.chunking import chunk_box, grid_of
from ..core.dtypes import bits_of
from ..core.merkle import Leaves
from ..formats.zarr.documents import RAW, Json
from ..io.tensors import as_bytes, empty
from ..jobs.executor import OVERHEAD
from ..jobs.passing import Passing
from ..jobs.pieces import contents, differs, scratch
from ..jobs.places import PIECE, Place, Sized
from ..lazy import LazyArray
from .codecs import Encoding

_ABSENT = (1 << 64) - 1  # offset and size of an absent inner chunk
Seen = Callable[[memoryview], None]
INDEX_CODECS = (*RAW, {"name": "crc32c"})


@dataclass(frozen=True, slots=True)
class Cut:
    """The chunking and encoding of an array. ``shard`` is the shape of a file, a multiple of the chunk shape; None if
    each file has one chunk."""

    chunk: Shape
    shard: Shape | None
    encoding: Encoding

    @property
    def file(self) -> Shape:
        """The shape of the block of elements in a file."""
        return self.shard or self.chunk

    @property
    def codecs(self) -> tuple[Json, ...]:
        if self.shard is None:
            return self.encoding.json
        sharding = {
            "chunk_shape": list(self.chunk),
            "codecs": list(self.encoding.json),
            "index_codecs": list(INDEX_CODECS),
            "index_location": "end",
        }
        return ({"name": "sharding_indexed", "configuration": sharding},)

    def files(self, shape: Shape) -> Iterator[tuple[str, Box]]:
        """Yield all files: (key relative to the array, block of the tensor)."""
        for at in product(*map(range, grid_of(shape, self.file))):
            yield "/".join(["c", *map(str, at)]), chunk_box(at, shape, self.file)

    def most(self, itemsize: int) -> int:
        """Return the size of a file in bytes, before compression."""
        index = 16 * prod(grid_of(self.shard, self.chunk)) + 4 if self.shard else 0
        return prod(self.file) * itemsize + index

    def memory(self, itemsize: int) -> int:
        """Return the memory in bytes needed to write or check a file in pieces."""
        held = 2 * PIECE if self.encoding.raw else 3 * prod(self.chunk) * itemsize
        index = 32 * prod(grid_of(self.shard, self.chunk)) if self.shard else 0
        return held + index + OVERHEAD


def write(place: Place, key: str, tensor: LazyArray, cut: Cut) -> int:
    """Write the file with this block of a tensor; return its size in bytes."""
    return _put(place, key, tensor, cut)


def write_hashed(place: Place, key: str, tensor: LazyArray, cut: Cut, passing: Passing) -> tuple[int, Leaves]:
    """Write the file with this block of a tensor; return its size in bytes, and hashes of the elements."""
    hasher = passing.hasher(tensor.nbytes)
    return _put(place, key, tensor, cut, hasher.update), hasher.leaves()


def _put(place: Place, key: str, tensor: LazyArray, cut: Cut, seen: Seen | None = None) -> int:
    pieces = content(tensor, cut, seen)
    return place.put(key, Sized(pieces, cut.most(tensor.itemsize)) if cut.encoding.raw else pieces)


def is_in_order(block: Shape, cut: Cut) -> bool:
    """Return whether the elements of a block, in C order, are the first ones of the file or, of a shard, of its chunks
    one after the other."""
    if cut.shard is None:
        return is_run(block, c_strides(cut.chunk))
    at, strides = 0, c_strides(block)
    for box in _boxes(block, cut):
        if box:
            begin = sum(a * s for a, s in zip(box.start, strides, strict=True))
            if begin != at or not is_run(box.shape, strides) or not is_run(box.shape, c_strides(cut.chunk)):
                return False
            at += box.numel
    return True


def content(tensor: LazyArray, cut: Cut, seen: Seen | None = None) -> Iterator[memoryview]:
    """Yield the bytes of a file in pieces. A piece is valid until the next one. ``seen`` is called with the bytes of
    the elements, which must be in order (`is_in_order`)."""
    if cut.shard is None:
        yield from _chunk(tensor, cut.chunk, cut.encoding, seen)
        return
    index, at = [], 0
    for inner in _inner(tensor, cut):
        begin = at
        if inner is not None:
            for piece in _chunk(inner, cut.chunk, cut.encoding, seen):
                at += len(piece)
                yield piece
        index += [_ABSENT, _ABSENT] if inner is None else [begin, at - begin]
    yield _index(index)


def check(place: Place, key: str, tensor: LazyArray, cut: Cut) -> None:
    """Read a file again and compare it with the source. Raises CorruptError if they differ."""
    where = f"{place}/{key}"
    size = place.forget(key)
    if cut.shard is None:
        if not _same(place, key, 0, size, tensor, cut):
            raise differs(where, "all bytes")
        return
    inners = list(_inner(tensor, cut))
    length = 16 * len(inners) + 4
    stored = place.get(key, size - length, length) if size >= length else b""
    index = np.frombuffer(stored[:-4], "<u8").tolist() if stored else []
    if not stored or bytes(stored) != bytes(_index(index)):
        raise differs(where, f"the last {length:,} bytes")
    for n, inner in enumerate(inners):
        offset, nbytes = index[2 * n : 2 * n + 2]
        if (inner is None) != (offset == _ABSENT):
            raise differs(where, f"inner chunk {n}")
        if inner is not None and not _same(place, key, offset, nbytes, inner, cut):
            raise differs(where, f"bytes {offset:,} to {offset + nbytes:,}")


def _same(place: Place, key: str, offset: int, nbytes: int, tensor: LazyArray, cut: Cut) -> bool:
    if not cut.encoding.raw:
        whole = _whole(tensor, cut.chunk)
        found = cut.encoding.decode(memoryview(place.get(key, offset, nbytes)), cut.chunk, tensor.dtype)
        return len(found) == whole.nbytes and np.array_equal(np.frombuffer(found, np.uint8), as_bytes(whole))
    end = offset + nbytes
    for piece in _chunk(tensor, cut.chunk, cut.encoding):
        if offset + len(piece) > end or place.get(key, offset, len(piece)) != bytes(piece):
            return False
        offset += len(piece)
    return offset == end


def _inner(tensor: LazyArray, cut: Cut) -> Iterator[LazyArray | None]:
    """Yield the parts of the tensor in the chunks of a shard, in index order; None for a chunk beyond the tensor's
    end."""
    for box in _boxes(tuple(tensor.shape), cut):
        yield tensor.lazy[box.slices] if box else None


def _boxes(shape: Shape, cut: Cut) -> Iterator[Box]:
    """Yield the blocks of a shard's chunks, in index order, cut off by the tensor's end."""
    inside = Box.of(shape)
    for at in product(*map(range, grid_of(cut.file, cut.chunk))):
        yield chunk_box(at, cut.file, cut.chunk) & inside


def _chunk(tensor: LazyArray, chunk: Shape, encoding: Encoding, seen: Seen | None = None) -> Iterator[memoryview]:
    left = tensor.nbytes  # elements beyond the tensor's end follow
    if encoding.raw and tuple(tensor.shape) == chunk:
        pieces = (piece for _, piece in contents(tensor))
    elif encoding.raw:
        pieces = (
            as_bytes(_fill(tensor, tile, _as(scratch(tile.numel * tensor.itemsize), tensor.dtype, tile.shape)))
            for tile in tiles(chunk, PIECE // tensor.itemsize)
        )
    else:
        whole = _whole(tensor, chunk)
        if seen is not None:
            seen(as_bytes(whole)[:left])
        yield encoding.encode(whole)
        return
    for piece in pieces:
        if seen is not None and left:
            seen(piece[:left])
            left -= min(left, len(piece))
        yield piece


def _whole(tensor: LazyArray, chunk: Shape) -> torch.Tensor:
    out = empty(chunk, tensor.dtype)
    if tuple(tensor.shape) == chunk:
        return tensor.read_into(out)
    flat, at = out.view(-1), 0
    for tile in tiles(chunk, PIECE // tensor.itemsize):
        _fill(tensor, tile, flat[at : at + tile.numel].view(tile.shape))
        at += tile.numel
    return out


def _fill(tensor: LazyArray, tile: Box, out: torch.Tensor) -> torch.Tensor:
    """Fill ``out`` with a tile of a chunk; elements beyond the tensor's end are zero."""
    inner = tile & Box.of(tensor.shape)
    if inner == tile:
        return tensor.lazy[tile.slices].read_into(out)
    bits = out.view(bits_of(out.itemsize))
    bits.zero_()
    if inner:
        part = tensor.lazy[inner.slices].read_into(torch.empty(inner.shape, dtype=tensor.dtype, device="cpu"))
        bits[tuple(slice(a - t, b - t) for a, b, t in zip(inner.start, inner.stop, tile.start, strict=True))] = (
            part.view(bits.dtype)
        )
    return out


def _as(memory: torch.Tensor, dtype: torch.dtype, shape: Shape) -> torch.Tensor:
    return memory.view(dtype).view(shape)


def _index(numbers: list[int]) -> memoryview:
    import google_crc32c  # zarr depends on it

    data = np.array(numbers, "<u8").tobytes()
    return memoryview(data + google_crc32c.value(data).to_bytes(4, "little"))
