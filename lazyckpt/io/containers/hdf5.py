"""The datasets of an HDF5 file: names, dtypes, and where their elements lie. Needs h5py.

h5py parses the file's structure through a stream over the store; the elements are then read by lazyckpt, from the
offsets and the chunk tables that HDF5 tells. Nothing outside the file is followed: external links, external storage and
virtual datasets are refused. Source: HDF5 File Format Specification 3.0 (H5Z filters, chunk indexes); h5py's h5d.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np

from ...core.blocks import Blocks, Grid
from ...core.box import Box, Selection, Shape, c_strides, fits
from ...core.dtypes import BF16, BOOL, C64, C128, DTYPES, DType
from ...core.extents import Chunk, Codec, Extent, Inline
from ...core.placement import Part
from ...core.specs import Fragment, TensorSpec, whole
from ...errors import CorruptError, FormatError
from ..limits import Budget
from ..storage.streams import StoreFile

MAGIC = b"\x89HDF\r\n\x1a\n"
_BLOCK = 64 << 10  # bytes that are read at a time of a file behind a network
_KEPT = 256  # such blocks in memory
_MOST_CHUNKS = 1 << 20  # of one dataset
_MOST = 4096  # elements of an attribute
_LARGEST = 1 << 20  # bytes of an attribute
_DEPTH = 100  # groups, one within the other
_INLINE = 64 << 10  # bytes; HDF5 keeps less than that in an object's header
_DEFLATE, _SHUFFLE, _FLETCHER, _LZF = 1, 2, 3, 32000
_FILTERS = {_DEFLATE: "zlib", _SHUFFLE: "shuffle", _FLETCHER: "fletcher32", _LZF: "lzf"}
_NUMBERS = {
    dtype.numpy.str[1:]: dtype for dtype in DTYPES if dtype.is_number and dtype._numpy and "." not in dtype._numpy
}


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


class _Blocks:
    """A file for h5py: it reads small pieces of the metadata, which over a network are read in blocks."""

    def __init__(self, file: StoreFile) -> None:
        self._file, self._at = file, 0
        self._step = _BLOCK if file.store.gap else 0
        self._blocks: dict[int, bytes] = {}

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = {0: 0, 1: self._at, 2: self._file.size}[whence] + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        stop = self._file.size if size < 0 else min(self._file.size, self._at + size)
        data = self._between(self._at, stop) if stop > self._at else b""
        self._at += len(data)
        return data

    def readinto(self, target: Any) -> int:
        """Read into a buffer of HDF5, which fills what is behind the end with zeros. Raises OSError for a buffer that
        is larger than the file: a damaged length, for which HDF5 would touch so much memory."""
        if len(target) > max(self._file.size, _BLOCK):
            raise OSError(f"{len(target):,} bytes of a file of {self._file.size:,}")
        data = self.read(len(target))
        target[: len(data)] = data
        return len(data)

    def _between(self, start: int, stop: int) -> bytes:
        if not self._step or stop - start > self._step:
            return self._file.at(start, stop - start)
        parts = [self._block(n) for n in range(start // self._step, (stop - 1) // self._step + 1)]
        first = start - start // self._step * self._step
        return b"".join(parts)[first : first + stop - start]

    def _block(self, n: int) -> bytes:
        found = self._blocks.get(n)
        if found is None:
            start = n * self._step
            found = self._blocks[n] = self._file.at(start, min(self._step, self._file.size - start))
            if len(self._blocks) > _KEPT:
                del self._blocks[next(iter(self._blocks))]
        return found


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
    try:
        import h5py
    except ImportError as e:
        raise FormatError(f"{file.where} is an HDF5 file, which needs h5py: pip install 'lazyckpt[hdf5]'") from e
    budget = Budget(file.where, file.size)
    try:
        with h5py.File(_Blocks(file), "r") as h5:
            if h5.userblock_size:
                raise FormatError(f"{file.where}: an HDF5 file behind a user block of {h5.userblock_size:,} bytes")
            return _Walk(file, budget, h5py).walk(h5)
    except (OSError, RuntimeError, ValueError, KeyError, TypeError) as e:
        if isinstance(e, CorruptError | FormatError) or (isinstance(e, OSError) and e.errno):
            raise
        raise CorruptError(f"{file.where}: HDF5 cannot read it ({e!s:.120}): damaged, or truncated") from e


class _Walk:
    def __init__(self, file: StoreFile, budget: Budget, h5py: Any) -> None:
        self.file, self.budget, self.h5py = file, budget, h5py
        self.found = Hdf5()
        self.seen: dict[Any, str] = {}

    def walk(self, root: Any) -> Hdf5:
        groups = [("", root, 0)]
        self.seen[self.h5py.h5o.get_info(root.id).addr] = ""
        while groups:
            path, group, depth = groups.pop()
            self._note(path, group)
            inner = []
            for name in group:
                self.budget.objects(4)
                self.budget.time()
                one = f"{path}/{name}" if path else name
                link = group.get(name, getlink=True)
                if not isinstance(link, self.h5py.HardLink):
                    outside = isinstance(link, self.h5py.ExternalLink)
                    self.found.refused[one] = (
                        "a link into another file, which is not followed"
                        if outside
                        else "a soft link, which is not followed"
                    )
                    continue
                item = group[name]
                if isinstance(item, self.h5py.Group):
                    key = self.h5py.h5o.get_info(item.id).addr
                    if key in self.seen or depth >= _DEPTH:
                        self.found.refused[one] = "a second link to a group that is read elsewhere"
                        continue
                    self.seen[key] = one
                    inner.append((one, item, depth + 1))
                elif isinstance(item, self.h5py.Dataset):
                    self._dataset(one, item)
            groups += reversed(inner)
        return self.found

    def _note(self, path: str, item: Any) -> None:
        values = {}
        for name in item.attrs:
            self.budget.objects()
            try:
                about = item.attrs.get_id(name)
                size = prod(about.shape or ()) * about.dtype.itemsize
                if about.get_storage_size() > self.file.size or size > _LARGEST or prod(about.shape or ()) > _MOST:
                    continue  # damaged, or no text and no few numbers
                value = item.attrs[name]
            except (OSError, TypeError, ValueError, RuntimeError, KeyError):
                continue  # of a type that h5py does not know, or damaged
            if isinstance(value, np.generic | np.ndarray) and value.dtype.kind in "biufSU" and value.size <= _MOST:
                value = value.tolist()
            if isinstance(value, str | int | float | bool | list):
                values[str(name)] = value
                self.budget.characters(len(str(value)) if isinstance(value, str | list) else 8)
        if values:
            self.found.attributes[path] = values

    def _dataset(self, path: str, item: Any) -> None:
        key = self.h5py.h5o.get_info(item.id).addr
        first = self.seen.setdefault(key, path)
        if first != path:
            self.found.aliases[path] = first
            return
        self._note(path, item)
        try:
            self.found.tensors[path] = self._spec(path, item)
        except NotReadError as e:
            self.found.refused[path] = e.kind
        except CorruptError as e:
            self.found.damaged[path] = str(e)

    def _spec(self, path: str, item: Any) -> TensorSpec:
        where = f"{self.file.where}: the dataset {path!r:.80}"
        if item.is_virtual:
            raise NotReadError("a virtual dataset, whose elements are in other files")
        if item.external:
            raise NotReadError("a dataset whose elements are in another file, which is not opened")
        if item.shape is None:
            raise NotReadError("an empty dataset without a shape")
        shape = tuple(int(n) for n in item.shape)
        dtype, swapped = _dtype(item, self.h5py)
        if not fits(shape, dtype.itemsize):
            raise CorruptError(f"{where} has the shape {shape!s:.60}: damaged")
        if 0 in shape:
            return TensorSpec(path, shape, dtype, ())
        nbytes = int(np.prod(shape, dtype=object)) * dtype.itemsize
        create = item.id.get_create_plist()
        layout = create.get_layout()
        swapped = swapped and dtype.itemsize > 1
        strides = c_strides(shape)
        if layout == self.h5py.h5d.CONTIGUOUS:
            offset = item.id.get_offset()
            if offset is None:
                return self._unwritten(path, item, shape, dtype)
            self._check(where, offset, nbytes)
            start = self.file.start + offset
            return whole(path, Extent(self.file.path, start, dtype, shape, strides, swapped=swapped))
        if layout == self.h5py.h5d.COMPACT:
            if nbytes > _INLINE:
                raise CorruptError(f"{where} has {nbytes:,} bytes in its header: damaged")
            raw = np.empty(shape, item.dtype)
            item.id.read(self.h5py.h5s.ALL, self.h5py.h5s.ALL, raw, item.id.get_type())
            held = Inline(self.file.path, raw.tobytes())
            return whole(path, Extent(self.file.path, 0, dtype, shape, strides, swapped=swapped, within=held))
        if layout == self.h5py.h5d.CHUNKED:
            return self._chunked(path, where, item, shape, dtype, swapped)
        raise NotReadError("a dataset of a layout that lazyckpt does not know")

    def _check(self, where: str, offset: int, nbytes: int) -> None:
        if offset < 0 or offset + nbytes > self.file.size:
            raise CorruptError(
                f"{where} has {nbytes:,} bytes from {offset:,} on, the file has {self.file.size:,}: truncated"
            )

    def _unwritten(self, path: str, item: Any, shape: Shape, dtype: DType) -> TensorSpec:
        fill = _fill(item, dtype)
        absent = Chunk(self.file.path, dtype, shape, c_strides(shape), 0, fill=fill, window=(0, 0), present=False)
        return TensorSpec(path, shape, dtype, (Fragment(absent, shape),), rule="never written: the fill value")

    def _chunked(self, path: str, where: str, item: Any, shape: Shape, dtype: DType, swapped: bool) -> TensorSpec:
        cell = tuple(int(n) for n in item.chunks)
        if len(cell) != len(shape) or not all(cell) or not fits(cell, dtype.itemsize):
            raise CorruptError(f"{where} has chunks of the shape {cell!s:.60}: damaged")
        nbytes = int(np.prod(cell, dtype=object)) * dtype.itemsize
        filters = list(_filters(item.id.get_create_plist(), dtype))
        count = item.id.get_num_chunks()
        grid = [-(-n // size) for n, size in zip(shape, cell, strict=True)]
        cells = int(np.prod(grid, dtype=object))
        if count > _MOST_CHUNKS or cells > _MOST_CHUNKS:
            raise NotReadError(f"a dataset of {max(count, cells):,} chunks")
        self.budget.objects(count)
        strides, fill = c_strides(cell), _fill(item, dtype)
        there: dict[Shape, Chunk] = {}

        def note(info: Any) -> None:
            start = tuple(int(n) for n in info.chunk_offset)
            if info.byte_offset is None:
                return
            self._check(where, int(info.byte_offset), int(info.size))
            if start in there or any(a % c or a >= n for a, c, n in zip(start, cell, shape, strict=True)):
                if any(a >= n for a, n in zip(start, shape, strict=True)):
                    return  # left over from a larger dataset
                raise CorruptError(f"{where} has two chunks, or one off the grid, at {start!s:.60}: damaged")
            sizes = tuple(min(c, n - a) for a, c, n in zip(start, cell, shape, strict=True))
            used = [codec for bit, codec in filters if not info.filter_mask >> bit & 1]
            window = (self.file.start + int(info.byte_offset), int(info.size))
            there[start] = Chunk(
                self.file.path, dtype, sizes, strides, nbytes, tuple(reversed(used)), fill, swapped, window=window
            )

        for n in range(count):
            note(item.id.get_chunk_info(n))
        absent = Chunk(self.file.path, dtype, cell, strides, nbytes, fill=fill, window=(0, 0), present=False)
        return TensorSpec(path, shape, dtype, ChunkTable(Grid(shape, cell), there, absent))


def _dtype(item: Any, h5py: Any) -> tuple[DType, bool]:
    """Return the dtype of a dataset and whether it is big-endian. Raises NotReadError for what is no number."""
    try:
        dtype = item.dtype
    except TypeError as e:
        raise NotReadError(f"of a type that numpy lacks ({e!s:.60})") from None
    kind = item.id.get_type()
    told = item.attrs.get("dtype")
    if dtype.kind == "V" and dtype.names is None and dtype.itemsize == 2 and told in ("bfloat16", b"bfloat16"):
        return BF16, False  # as Keras marks it (saving_lib.H5IOStore)
    if str(dtype) == "bfloat16":
        return BF16, kind.get_order() == h5py.h5t.ORDER_BE
    if h5py.check_enum_dtype(dtype) is not None and dtype.kind != "b":
        raise NotReadError("an enumeration")
    if dtype.kind == "b":
        return BOOL, False
    if dtype.kind == "c" and dtype.itemsize in (8, 16):
        return (C64 if dtype.itemsize == 8 else C128), dtype.str.startswith(">")
    found = _NUMBERS.get(dtype.str[1:]) if dtype.kind in "iuf" and dtype.subdtype is None else None
    if found is None:
        raise NotReadError(f"not of numbers that torch has ({dtype!s:.40})")
    if isinstance(kind, h5py.h5t.TypeIntegerID) and kind.get_precision() != 8 * dtype.itemsize:
        raise NotReadError(f"of integers of {kind.get_precision()} bits")
    if isinstance(kind, h5py.h5t.TypeFloatID):
        fields = {2: (15, 10, 5, 0, 10), 4: (31, 23, 8, 0, 23), 8: (63, 52, 11, 0, 52)}
        if tuple(kind.get_fields()) != fields.get(dtype.itemsize):
            raise NotReadError("of floats that are not IEEE's")
    return found, dtype.str.startswith(">")


def _fill(item: Any, dtype: DType) -> bytes:
    """Return the bytes of one element, little-endian."""
    value = item.fillvalue
    if value is None or dtype is BF16:
        return bytes(dtype.itemsize)
    return np.asarray(value).astype(dtype.numpy.newbyteorder("<")).tobytes()


def _filters(create: Any, dtype: DType) -> Iterator[tuple[int, Codec]]:
    """Yield the filters in the order of packing, each with the bit that a chunk's mask has if it was left out."""
    for n in range(create.get_nfilters()):
        code, _, values, name = create.get_filter(n)
        if code not in _FILTERS:
            raise NotReadError(f"packed with the filter {code} ({name!r:.40}), which lazyckpt cannot unpack")
        size = int(values[0]) if code == _SHUFFLE and values else dtype.itemsize
        yield n, Codec(_FILTERS[code], f'{{"elementsize": {size}}}' if code == _SHUFFLE else "{}")


def dotted(path: str) -> str:
    """Return a path as a name."""
    return posixpath.normpath(path).replace("/", ".")
