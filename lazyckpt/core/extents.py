"""Arrays in files: which bytes hold the elements, in which dtype, order and packing.

Dtypes are `DType` objects. The classes also accept a `torch.dtype` and convert it. All objects are picklable, hold no
handles and do no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from .box import Shape, c_strides
from .dtypes import DType, dtype_of


@dataclass(frozen=True, slots=True)
class Extent:
    """A strided array in a file.

    Attributes
    ----------
    path
        The file's path in the store.
    offset
        The first element's position in the file, in bytes. It may be unaligned.
    dtype, shape
        The elements' dtype, and the shape in elements.
    strides
        In elements, as torch stores them: 0 where expanded, never negative.
    conj, neg
        Torch's lazy bits: a reader has to conjugate or negate the stored values. They are part of how elements are
        stored, as the order of their bytes is: those of an `Archive` are known only when it is located.
    swapped
        Whether the elements are big-endian in the file.
    within
        The archive, chunk or inline data that holds the array, if any: ``offset`` then counts from the start of its
        unpacked bytes.
    """

    path: str
    offset: int
    dtype: DType
    shape: Shape
    strides: Shape
    conj: bool = False
    neg: bool = False
    swapped: bool = False
    within: Packed | Inline | None = None

    def __post_init__(self) -> None:
        if type(self.dtype) is not DType:
            object.__setattr__(self, "dtype", dtype_of(self.dtype))

    @property
    def raw(self) -> bool:
        """Whether the bytes in the file are the values, without any conversion."""
        return not (self.conj or self.neg or self.swapped or self.within)


@dataclass(frozen=True, slots=True)
class Archive:
    """A file of torch.save inside another file, which holds one tensor.

    The position of the elements in it is looked up at the first read (io/reading/packed.py), because a checkpoint may
    have hundreds of thousands of archives.

    Attributes
    ----------
    path
        The outer file's path in the store.
    offset, length
        The archive's position and size in the outer file, in bytes.
    dtype, shape
        The tensor's dtype, and its shape in elements.
    codecs
        The codecs that unpack the archive, in the order of unpacking.
    """

    path: str
    offset: int
    length: int
    dtype: DType
    shape: Shape
    codecs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if type(self.dtype) is not DType:
            object.__setattr__(self, "dtype", dtype_of(self.dtype))

    @property
    def as_told(self) -> Extent:
        """The elements as a C-order array at an unknown position inside the archive."""
        return Extent(self.path, self.offset, self.dtype, self.shape, c_strides(self.shape), within=self)

    @property
    def key(self) -> tuple[Any, ...]:
        """A key that is unique to the archive within a checkpoint."""
        return self.path, self.offset, self.length

    def __str__(self) -> str:
        return f"the archive at bytes {self.offset:,} to {self.offset + self.length:,}"


class Codec(NamedTuple):
    """A codec that packed some bytes. ``name`` is its name in numcodecs, ``config`` its parameters as JSON."""

    name: str
    config: str = "{}"


class Shard(NamedTuple):
    """The position of a chunk in a shard: a run of chunks with a table of their offsets and lengths (64-bit numbers).

    Attributes
    ----------
    number
        The index of the chunk in the table.
    chunks
        The number of chunks in the table.
    at_end
        Whether the table is at the end of the shard, else at its start.
    checked
        Whether a CRC32C of the table follows the table.
    swapped
        Whether the table is big-endian.
    """

    number: int
    chunks: int
    at_end: bool = True
    checked: bool = True
    swapped: bool = False


class ZipEntry(NamedTuple):
    """A record of a zip, as the zip's central directory describes it. All positions are in bytes.

    Attributes
    ----------
    name
        The record's name.
    header
        The position of the record's local header.
    nbytes, stored
        The record's size in bytes, unpacked and in the file.
    crc
        The CRC-32 of the unpacked bytes.
    method, flags
        The numbers of the zip format.
    at
        The position of the entry in the directory; -1 if unknown.
    after
        The position of the next local header, or of the directory; -1 if unknown.
    """

    name: str
    header: int
    nbytes: int
    stored: int
    crc: int
    method: int
    flags: int
    at: int = -1
    after: int = -1


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of a chunked array. It may be absent.

    Whether the chunk exists, and its position, is looked up at the first read (io/reading/packed.py).

    Attributes
    ----------
    path
        The file's path in the store.
    dtype, shape, strides
        The elements' dtype, and the shape and strides in elements, in the unpacked bytes.
    nbytes
        The size of the unpacked chunk in bytes.
    codecs
        The codecs that unpack the chunk, in the order of unpacking.
    fill
        The bytes of one element, little-endian, that an absent chunk is filled with. None: the chunk must not be
        absent.
    swapped
        Whether the elements are big-endian in the unpacked bytes.
    shards
        The shards that the chunk is in, the outermost first.
    window
        (offset, length) of the bytes in the file; None for the whole file.
    zipped
        The zip entry that the chunk is, if any. The window then begins at the entry's local header, and the lookup
        compares that header with the directory.
    present
        False if the chunk is already known to be absent.
    """

    path: str
    dtype: DType
    shape: Shape
    strides: Shape
    nbytes: int
    codecs: tuple[Codec, ...] = ()
    fill: bytes | None = None
    swapped: bool = False
    shards: tuple[Shard, ...] = ()
    window: tuple[int, int] | None = None
    zipped: ZipEntry | None = None
    present: bool = True

    def __post_init__(self) -> None:
        if type(self.dtype) is not DType:
            object.__setattr__(self, "dtype", dtype_of(self.dtype))

    @property
    def as_told(self) -> Extent:
        """The elements as an array at an unknown position inside the unpacked chunk."""
        return Extent(self.path, 0, self.dtype, self.shape, self.strides, swapped=self.swapped, within=self)

    @property
    def key(self) -> tuple[Any, ...]:
        """A key that is unique to the chunk within a checkpoint. Absent chunks with the same elements share one."""
        if not self.present:
            return self.path, self.dtype, self.shape, self.fill
        return self.path, self.window, self.shards, self.codecs

    def __str__(self) -> str:
        packed = f" packed with {', '.join(codec.name for codec in self.codecs)}" if self.codecs else ""
        return f"a chunk{packed}" + (f", number {self.shards[-1].number:,} of its shard" if self.shards else "")


@dataclass(frozen=True, slots=True)
class Inline:
    """Bytes that a file holds as text (numpy arrays in a pickle), decoded when the file was indexed."""

    path: str
    data: bytes

    def __str__(self) -> str:
        return f"{len(self.data):,} bytes that are text in a pickle"


Packed = Archive | Chunk


@dataclass(frozen=True, slots=True)
class Hole:
    """Replaces an extent whose file is missing or unreadable. ``reason`` is a sentence that names the file."""

    path: str
    reason: str


def from_folder(folder: str, extent: Extent | Packed | Hole) -> Extent | Packed | Hole:
    """Return the extent with ``folder`` in front of the path of its file."""
    path = f"{folder}/{extent.path}"
    if isinstance(extent, Extent) and extent.within is not None:
        return replace(extent, path=path, within=replace(extent.within, path=f"{folder}/{extent.within.path}"))
    return replace(extent, path=path)
