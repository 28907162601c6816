"""The datasets of an HDF5 file: names, dtypes, and where their elements lie. Needs h5py.

h5py parses the file's structure in a process of its own with limits (`hdf5_child`), which asks for bytes of the store;
the elements are then read by lazyckpt, from the offsets and the chunk tables that HDF5 tells. Nothing outside the file
is followed: external links, external storage and virtual datasets are refused. Source: HDF5 File Format Specification
3.0 (H5Z filters, chunk indexes); h5py's h5d.

What the process says, each in a frame of JSON (``says``), and bytes: ``read`` (a range of the file, which is its
answer), ``refused``, ``alias``, ``attribute``, ``dataset``, ``chunks`` behind a chunked one (rows of 64-bit numbers:
the first element in each dimension, offset, size, mask of filters left out; none: no more), and in the end ``done``,
``failed``, ``behind`` (a user block), or ``missing`` (h5py).
"""

from __future__ import annotations

import math
import posixpath
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...core.blocks import Blocks, Grid
from ...core.box import Box, Selection, Shape, c_strides, fits
from ...core.dtypes import BF16, BOOL, C64, C128, DTYPES, DType
from ...core.extents import Chunk, Codec, Extent, Inline
from ...core.placement import Part
from ...core.specs import Fragment, TensorSpec, whole
from ...errors import CorruptError, FormatError, LazyckptError
from .. import limits
from ..children import Child, Frame
from ..storage.streams import StoreFile
from .hdf5_child import BYTES, INLINE, MOST_CHUNKS, ROWS

MAGIC = b"\x89HDF\r\n\x1a\n"
_PROGRAM = Path(__file__).with_name("hdf5_child.py")
_BLOCK = 64 << 10  # bytes that are read at a time of a file behind a network
_PAGE = 4 << 10  # and of a local file
_START = 120.0  # seconds in which the process is to start; importing h5py takes long on some file systems
_DEFLATE, _SHUFFLE, _FLETCHER, _LZF = 1, 2, 3, 32000
_FILTERS = {_DEFLATE: "zlib", _SHUFFLE: "shuffle", _FLETCHER: "fletcher32", _LZF: "lzf"}
_NUMBERS = {
    dtype.numpy.str[1:]: dtype for dtype in DTYPES if dtype.is_number and dtype._numpy and "." not in dtype._numpy
} | {"b1": BOOL, "c8": C64, "c16": C128}


class NotReadError(FormatError):
    """A dataset that is valid and not read; ``kind`` says why in a few words."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


@dataclass(slots=True)
class Hdf5:
    """The content of a file: datasets by path, those that are not read with the reason, hard links to the same dataset
    (later path -> first), and the attributes of groups and datasets that are texts or numbers."""

    tensors: dict[str, TensorSpec] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    damaged: dict[str, str] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class ChunkTable(Blocks):
    """The chunks of a dataset: ``there`` by the index of their first element; all others hold the fill value."""

    grid: Grid
    there: Mapping[Shape, Chunk]
    absent: Chunk

    @property
    def blocks(self) -> Grid:
        """The cells of the grid of chunks."""
        return self.grid

    @property
    def intact(self) -> bool:
        """True: every element is in a chunk, or has the fill value."""
        return True

    def meeting(self, want: Selection) -> list[Fragment]:
        """Return the fragments of the chunks that hold wanted elements."""
        return list(map(self._held, self.blocks.meeting(want)))

    def fragment(self, n: int) -> Fragment:
        """Return the fragment of a cell of the grid."""
        return self._held(self.blocks.box(n))

    def _held(self, box: Box) -> Fragment:
        chunk = self.there.get(box.start) or replace(self.absent, shape=box.shape)
        return Fragment(chunk, box.shape, (Part(Box.of(box.shape), box.start),))


def read_hdf5(file: StoreFile) -> Hdf5:
    """Return the content of a file, or of a window of it. Raises CorruptError, FormatError (h5py is missing)."""
    about = {
        "size": file.size,
        "step": _BLOCK if file.store.gap else _PAGE,
        "memory": limits.CHILD_MEMORY + file.size,
        "seconds": math.ceil(limits.CHILD_PROCESSOR + file.size * limits.SECONDS_PER_BYTE),
    }
    with Child(_PROGRAM, file.where, about) as child:
        return _Listener(file, child).content()


class _Listener:
    """Serves the process that parses a file, and makes tensors of what it says. It trusts nothing of that: a hostile
    file might have taken the process over."""

    def __init__(self, file: StoreFile, child: Child) -> None:
        self.file, self.child = file, child
        self.budget = limits.Budget(file.where, file.size)
        self.found = Hdf5()
        self.seconds = limits.SECONDS + file.size * limits.SECONDS_PER_BYTE  # without those of the store
        self.served = limits.CHILD_SERVED + file.size * limits.CHILD_SERVED_PER_BYTE
        self.chunked = False

    def content(self) -> Hdf5:
        try:
            self._hear(self.child.frame(_START), ("ready", "missing"))
            while not self._hear(self._next()):
                pass
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError, RecursionError) as e:
            if isinstance(e, LazyckptError):
                raise
            raise self.child.wrong() from e
        return self.found

    def _next(self) -> Frame:
        """Return the next frame that asks for no bytes."""
        while True:
            begun = time.monotonic()
            frame = self.child.frame(self.seconds)
            self.seconds -= time.monotonic() - begun
            if frame.said["says"] != "read":
                return frame
            start, size = _numbers([frame.said["start"], frame.said["size"]])
            self.served -= max(size, _PAGE)
            if self.served < 0:
                raise CorruptError(
                    f"{self.file.where}: parsing it reads its {self.file.size:,} bytes again and again: it is damaged "
                    "or hostile. Copy it again from its source, or do not trust it."
                )
            self.child.write(self.file.at(start, size))

    def _hear(self, frame: Frame, expected: tuple[str, ...] = ()) -> bool:
        """Note what a frame says; return whether it is the last."""
        said = frame.said
        what = said["says"]
        if expected and what not in expected:
            raise self.child.wrong()
        if what in ("ready", "done"):
            return bool(what == "done")
        if what == "missing":
            raise FormatError(
                f"{self.file.where} is an HDF5 file, which needs h5py: pip install 'lazyckpt[hdf5]' ({said['why']})"
            )
        if what == "behind":
            raise FormatError(
                f"{self.file.where}: an HDF5 file behind a user block of {_numbers([said['size']])[0]:,} bytes"
            )
        if what == "failed":
            why = _text(said["why"])
            raise CorruptError(f"{self.file.where}: HDF5 cannot read it ({why:.120}): damaged, or truncated")
        self.budget.objects(1 if what == "attribute" else 4)
        path = _text(said["path"])
        if what == "attribute":
            self._attribute(path, _text(said["name"]), said["value"])
        elif what == "refused":
            self.found.refused[path] = _text(said["why"])[:200]
        elif what == "alias":
            self.found.aliases[path] = _text(said["of"])
        elif what == "dataset":
            self._dataset(path, said, frame.data)
        else:
            raise self.child.wrong()
        return False

    def _attribute(self, path: str, name: str, value: Any) -> None:
        limits.check_levels(self.file.where, [value])
        value = _plain(value)
        self.budget.characters(len(str(value)) if isinstance(value, str | list) else 8)
        self.found.attributes.setdefault(path, {})[name] = value

    def _dataset(self, path: str, said: dict[str, Any], data: bytes) -> None:
        rows = self._rows() if said["layout"] == "chunked" else iter(())
        try:
            self.found.tensors[path] = self._spec(path, said, data, rows)
        except NotReadError as e:
            self.found.refused[path] = e.kind
        except CorruptError as e:
            if isinstance(e, limits.ExcessError):
                raise
            self.found.damaged[path] = str(e)
        for _ in rows:  # of a dataset that is not read
            pass

    def _rows(self) -> Iterator[bytes]:
        """Yield the rows of chunks that follow a dataset."""
        while (frame := self._next()).said != {"says": "chunks", "count": 0}:
            if frame.said["says"] == "failed":
                self._hear(frame)
            (count,) = _numbers([frame.said["count"]])
            if frame.said["says"] != "chunks" or not 0 < count <= ROWS:
                raise self.child.wrong()
            self.budget.objects(count)
            yield frame.data

    def _spec(self, path: str, said: dict[str, Any], data: bytes, rows: Iterator[bytes]) -> TensorSpec:
        where = f"{self.file.where}: the dataset {path!r:.80}"
        shape = _numbers(said["shape"])
        dtype = BF16 if said["dtype"] == "bfloat16" else _NUMBERS.get(_text(said["dtype"]))
        if dtype is None:
            raise NotReadError(f"not of numbers that torch has ({said['dtype']:.40})")
        if not fits(shape, dtype.itemsize):
            raise CorruptError(f"{where} has the shape {shape!s:.60}: damaged")
        if 0 in shape:
            return TensorSpec(path, shape, dtype, ())
        nbytes = math.prod(shape) * dtype.itemsize
        swapped = said["swapped"] is True and dtype.itemsize > 1
        strides = c_strides(shape)
        if said["layout"] == "contiguous":
            if said["offset"] is None:
                return self._unwritten(path, _fill(said["fill"], dtype), shape, dtype)
            (offset,) = _numbers([said["offset"]])
            self._check(where, offset, nbytes)
            start = self.file.start + offset
            return whole(path, Extent(self.file.path, start, dtype, shape, strides, swapped=swapped))
        if said["layout"] == "compact":
            if nbytes > INLINE:
                raise CorruptError(f"{where} has {nbytes:,} bytes in its header: damaged")
            if len(data) != nbytes:
                raise self.child.wrong()
            held = Inline(self.file.path, data)
            return whole(path, Extent(self.file.path, 0, dtype, shape, strides, swapped=swapped, within=held))
        if said["layout"] == "chunked":
            return self._chunked(path, where, said, shape, dtype, swapped, rows)
        raise self.child.wrong()

    def _check(self, where: str, offset: int, nbytes: int) -> None:
        if offset + nbytes > self.file.size:
            raise CorruptError(
                f"{where} has {nbytes:,} bytes from {offset:,} on, the file has {self.file.size:,}: truncated"
            )

    def _unwritten(self, path: str, fill: bytes, shape: Shape, dtype: DType) -> TensorSpec:
        absent = Chunk(self.file.path, dtype, shape, c_strides(shape), 0, fill=fill, window=(0, 0), present=False)
        return TensorSpec(path, shape, dtype, (Fragment(absent, shape),), rule="never written: the fill value")

    def _chunked(
        self,
        path: str,
        where: str,
        said: dict[str, Any],
        shape: Shape,
        dtype: DType,
        swapped: bool,
        rows: Iterator[bytes],
    ) -> TensorSpec:
        cell = _numbers(said["cell"])
        if len(cell) != len(shape) or not all(cell) or not fits(cell, dtype.itemsize):
            raise CorruptError(f"{where} has chunks of the shape {cell!s:.60}: damaged")
        nbytes = math.prod(cell) * dtype.itemsize
        filters = list(_filters(said["filters"], dtype))
        (count,) = _numbers([said["count"]])
        cells = math.prod(-(-n // size) for n, size in zip(shape, cell, strict=True))
        if max(count, cells) > MOST_CHUNKS:
            raise NotReadError(f"a dataset of {limits.short_number(max(count, cells))} chunks")
        strides, fill = c_strides(cell), _fill(said["fill"], dtype)
        there: dict[Shape, Chunk] = {}
        for row in (row for part in rows for row in np.frombuffer(part, "<u8").reshape(-1, len(shape) + 3).tolist()):
            *first, offset, size, mask = row
            start = tuple(first)
            self._check(where, offset, size)
            if any(a >= n for a, n in zip(start, shape, strict=True)):
                continue  # left over from a larger dataset
            if start in there or any(a % c for a, c in zip(start, cell, strict=True)):
                raise CorruptError(f"{where} has two chunks, or one off the grid, at {start!s:.60}: damaged")
            sizes = tuple(min(c, n - a) for a, c, n in zip(start, cell, shape, strict=True))
            used = tuple(codec for bit, codec in reversed(filters) if not mask >> bit & 1)
            window = self.file.start + offset, size
            there[start] = Chunk(self.file.path, dtype, sizes, strides, nbytes, used, fill, swapped, window=window)
        absent = Chunk(self.file.path, dtype, cell, strides, nbytes, fill=fill, window=(0, 0), present=False)
        return TensorSpec(path, shape, dtype, ChunkTable(Grid(shape, cell), there, absent))


def _numbers(values: Any) -> tuple[int, ...]:
    """Return numbers that HDF5 keeps in 64 bits. Raises ValueError for anything else."""
    if not isinstance(values, list) or not all(type(n) is int and 0 <= n < 1 << 64 for n in values):
        raise ValueError(values)
    return tuple(values)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value


def _plain(value: Any) -> Any:
    """Return the value of an attribute: a text, a number, or lists of these and of bytes."""
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return bytes.fromhex(value[BYTES])
    if not isinstance(value, str | int | float):
        raise TypeError(value)
    return value


def _fill(value: Any, dtype: DType) -> bytes:
    """Return the bytes of one element, little-endian."""
    found = bytes.fromhex(value[BYTES])
    if len(found) not in (0, dtype.itemsize):
        raise ValueError(value)
    return found or bytes(dtype.itemsize)


def _filters(told: Any, dtype: DType) -> Iterator[tuple[int, Codec]]:
    """Yield the filters in the order of packing, each with the bit that a chunk's mask has if it was left out."""
    for n, (code, first, name) in enumerate(told):
        if code not in _FILTERS:
            raise NotReadError(f"packed with the filter {code} ({name!s:.40}), which lazyckpt cannot unpack")
        size = dtype.itemsize if first is None else _numbers([first])[0]
        yield n, Codec(_FILTERS[code], f'{{"elementsize": {size}}}' if code == _SHUFFLE else "{}")


def dotted(path: str) -> str:
    """Return a path as a name."""
    return posixpath.normpath(path).replace("/", ".")
