"""The chunks of an array in an OCDBT database: parts of its data files, or bytes in the nodes of its B+tree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ...core.box import Shape
from ...core.dtypes import DType
from ...core.extents import Chunk, Codec, Extent, Hole, Inline
from ...core.index import FileInfo
from ...core.specs import Fragment
from ...errors import CorruptError, LazyckptError
from ...io.codecs import decode
from ..zarr.grid import Array, GridFragments
from .ocdbt import Values

HERE = "is the whole checkpoint here?"  # what a message about a lost file ends with
_ABSENT = (1 << 64) - 1  # offset and length of a chunk that a shard does not have


@dataclass(frozen=True, slots=True, eq=False)
class ValueFragments(GridFragments):
    """One fragment for each cell of an array whose chunks are values of a database.

    ``files`` has the states of the database's files, None for those that are not there. ``root`` is the store's root,
    for messages.
    """

    values: Values | None = None
    files: Mapping[str, FileInfo | None] | None = None
    root: str = ""

    @property
    def intact(self) -> bool:
        """Whether all chunks have a value, or may be absent, and the files of the values are there."""
        return not self.lacking()

    def lacking(self) -> str:
        """Return why some elements cannot be read; "" if all can, as far as names and sizes tell."""
        values, files = self._held_by
        lost = sorted(path for path in values.paths() if files.get(path) is None)
        if lost:
            return f"{self.root}/{lost[0]} is not there: {HERE}"
        if self.complete:
            count = 1
            for n, c in zip(self.array.shape, self.array.chunk, strict=True):
                count *= -(-n // c)
            have = values.last - values.first - 1  # without the document
            if have < count:
                have = sum(1 for _ in self._there())
                return (
                    f"{count - have:,} of its {count:,} chunks have no value: the save was not finished, or is damaged"
                )
        return ""

    @property
    def _held_by(self) -> tuple[Values, Mapping[str, FileInfo | None]]:
        assert self.values is not None and self.files is not None
        return self.values, self.files

    def _there(self) -> Iterator[Shape]:
        array = self.array
        grid = tuple(-(-n // c) for n, c in zip(array.shape, array.chunk, strict=True))
        for key in self._held_by[0]:
            place = array.place(key, grid)
            if place is not None:
                yield place

    def paths(self) -> Iterator[str]:
        """The files that the chunks are in."""
        values, files = self._held_by
        yield from sorted(path for path in values.paths() if files.get(path) is not None)

    def holds(self, path: str) -> bool:
        """Whether a file is one that a chunk is in."""
        return path in self._held_by[0].paths()

    def _held(self, cell: Any) -> Fragment:
        sizes = cell.shape
        found = GridFragments._held(self, cell)
        return replace(found, extent=self._found(found.extent, cell.start, sizes))

    def _found(self, extent: Any, start: Shape, sizes: Shape) -> Extent | Chunk | Hole:
        """Return where a chunk is that `GridFragments` takes for a file with the chunk's key as its name."""
        values, files = self._held_by
        key = self.array.key([a // c for a, c in zip(start, self.array.chunk, strict=True)])
        value = values.get(key)
        chunk = extent if isinstance(extent, Chunk) else self._as_chunk(extent)
        if value is None:
            path = values.database.folder
            reason = f"{self.root}/{self.folder}/{key} has no value: the save was not finished, or is damaged"
            return (
                Hole(f"{path}/manifest.ocdbt" if path else "manifest.ocdbt", reason)
                if self.complete
                else replace(chunk, path=next(iter(values.database.paths)), present=False)
            )
        if isinstance(value, bytes):
            path = values.node(key)
            try:
                data = unpacked(chunk, value, f"{self.root}/{path} ({self.folder}/{key})")
            except LazyckptError as e:
                return Hole(path, str(e))
            if data is None:
                return (
                    Hole(path, f"{self.root}/{path}: {self.folder}/{key} lacks a chunk of its shard")
                    if (chunk.fill is None)
                    else replace(chunk, path=path, present=False)
                )
            held = Inline(path, data)
            return Extent(path, 0, chunk.dtype, sizes, chunk.strides, swapped=chunk.swapped, within=held)
        info = files.get(value.path)
        if info is None:
            return Hole(value.path, f"{self.root}/{value.path} is not there: {HERE}")
        if value.offset + value.length > info.size:
            return Hole(
                value.path,
                f"{self.root}/{value.path} has {info.size:,} bytes, and {self.folder}/{key} ends at "
                f"{value.offset + value.length:,}: truncated",
            )
        return replace(chunk, path=value.path, window=(value.offset, value.length))

    def _as_chunk(self, extent: Extent) -> Chunk:
        cell = self.blocks.cell
        nbytes = extent.dtype.itemsize
        for n in cell:
            nbytes *= n
        return Chunk(extent.path, extent.dtype, extent.shape, extent.strides, nbytes, swapped=extent.swapped)


def unpacked(chunk: Chunk, data: bytes, where: str) -> bytes | None:
    """Unpack the value of a chunk that is in memory; None if its shard does not have it. Raises CorruptError."""
    for shard in chunk.shards:
        size = 16 * shard.chunks + 4 * shard.checked
        if size > len(data):
            raise CorruptError(f"{where}: the table of the shard takes {size:,} bytes, the shard has {len(data):,}")
        table: Any = data[-size:] if shard.at_end else data[:size]
        if shard.checked:
            table = bytes(decode([Codec("crc32c")], table, where, size))
        order: Literal["big", "little"] = "big" if shard.swapped else "little"
        at = 16 * shard.number
        offset, length = int.from_bytes(table[at : at + 8], order), int.from_bytes(table[at + 8 : at + 16], order)
        if offset == length == _ABSENT:
            return None
        if offset + length > len(data):
            raise CorruptError(
                f"{where}: a chunk of its shard ends at byte {offset + length:,} of {len(data):,}: damaged"
            )
        data = data[offset : offset + length]
    if chunk.codecs:
        data = bytes(decode(chunk.codecs, data, where, chunk.nbytes))
    if len(data) != chunk.nbytes:
        raise CorruptError(f"{where} has {len(data):,} bytes instead of {chunk.nbytes:,}: damaged")
    return data


def scalar(array: Array, fragments: ValueFragments) -> Any:
    """Return the value of an array of one element that is in a node of the database, as a Python number; else None."""
    if len(fragments) != 1 or any(n != 1 for n in array.shape) or not _is_number(array.dtype):
        return None
    extent = fragments.fragment(0).extent
    if not isinstance(extent, Extent) or not isinstance(extent.within, Inline):
        return None
    import numpy as np

    dtype = array.dtype.numpy.newbyteorder(">" if extent.swapped else "<")
    return np.frombuffer(extent.within.data, dtype, 1)[0].item()


def _is_number(dtype: DType) -> bool:
    return dtype.name in ("bool", "float64", "float32") or dtype.name.lstrip("u").startswith("int")
