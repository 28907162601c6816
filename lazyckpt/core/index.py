"""The checkpoint as data: which bytes of which file belong to which part of which tensor.

Dtypes are `DType` objects. `Extent`, `Archive`, `Chunk` and `TensorSpec` also accept a `torch.dtype` and convert it.

All objects are picklable, hold no handles and do no I/O. A reader creates an `Index`; all other code only reads it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ..errors import Problem, printable
from .box import Box, Shape, c_strides
from .dtypes import DType, check_converts, dtype_of


class Rank(NamedTuple):
    """The coordinates of a rank in the mesh that trained the model."""

    tp: int = 0
    pp: int = 0
    dp: int = 0
    ep: int = 0


@dataclass(frozen=True, slots=True)
class Mesh:
    """The parallel degrees that a checkpoint was written with."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1


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
        Torch's lazy bits: a reader has to conjugate or negate the stored values.
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

    The position of the elements in it is looked up at the first read (io/archives.py), because a checkpoint may have
    hundreds of thousands of archives.

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

    Whether the chunk exists, and its position, is looked up at the first read (io/chunks.py).

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


@dataclass(frozen=True, slots=True)
class Part:
    """A block of a rank-local array, and the position of its first element in the global tensor.

    Attributes
    ----------
    local
        The block, in indices of the rank-local array.
    start
        The index of the block's first element in the global tensor.
    """

    local: Box
    start: Shape


@dataclass(frozen=True, slots=True)
class Placement:
    """The positions of an array's blocks in a larger array, such as a shard in its tensor or a tensor in a stack.

    Attributes
    ----------
    shape
        The array's shape, in elements.
    parts
        The array's blocks and their positions in the larger array. Elements outside all blocks (padding) are not in
        the larger array. None: the array is the whole larger array.
    axes
        For each dimension of the larger array the dimension of the array, as in `Fragment`.
    """

    shape: Shape
    parts: tuple[Part, ...] | None = None
    axes: tuple[int | None, ...] | None = None

    @staticmethod
    def of(shape: Shape, block: Box, start: Shape, axes: tuple[int | None, ...] | None = None) -> Placement:
        """Return the placement of one block of an array, at index ``start`` of the larger array.

        Parameters
        ----------
        shape
            The array's shape, in elements.
        block
            The block, in indices of the array.
        start
            The index of the block's first element in the larger array.
        axes
            For each dimension of the larger array the dimension of the array, as in `Fragment`.
        """
        return Placement(shape, (Part(block, start),), axes)

    @staticmethod
    def at(shape: Shape, start: Shape, axes: tuple[int | None, ...] | None = None) -> Placement:
        """Return the placement of a whole array, at index ``start`` of the larger array.

        Parameters
        ----------
        shape
            The array's shape, in elements.
        start
            The index of the array's first element in the larger array.
        axes
            For each dimension of the larger array the dimension of the array, as in `Fragment`.
        """
        return Placement(shape, (Part(Box.of(shape), start),), axes)

    @property
    def blocks(self) -> tuple[Part, ...]:
        """`parts`, or one part for the whole array if `parts` is None."""
        return self.parts if self.parts is not None else (Part(Box.of(self.shape), (0,) * len(self.shape)),)

    @property
    def numel(self) -> int:
        """The number of the array's elements that are in a block."""
        return sum(part.local.numel for part in self.blocks)

    def target(self, part: Part) -> Box:
        """Return the block of the larger array that one of `blocks` fills.

        Parameters
        ----------
        part
            One of `blocks`.
        """
        sizes = part.local.shape
        if self.axes is not None:
            sizes = tuple(1 if a is None else sizes[a] for a in self.axes)
        return Box(part.start, tuple(s + n for s, n in zip(part.start, sizes, strict=True)))


@dataclass(frozen=True, slots=True)
class Fragment:
    """What one file contributes to a tensor.

    Attributes
    ----------
    extent
        The bytes in the file, or a `Hole` if the file is missing or unreadable.
    local_shape
        The shape of the rank-local array, in elements.
    parts
        The blocks of the rank-local array and their positions in the tensor. None: the whole array, at the origin.
    span
        The interval of the rank-local array's C-order ravel, in elements, that the extent holds; the extent's last
        dimension then has length hi - lo, all others have length 1. None: the whole array, in the extent's shape.
    rank
        The rank that wrote the file, if known.
    axes
        For each dimension of the tensor the dimension of the rank-local array, or None for a new dimension of length 1
        (an expert among others). A dimension of the rank-local array may be left out if the parts have only one index
        of it (a layer of a stack). None: the dimensions are the same.
    """

    extent: Extent | Packed | Hole
    local_shape: Shape
    parts: tuple[Part, ...] | None = None
    span: tuple[int, int] | None = None
    rank: Rank | None = None
    axes: tuple[int | None, ...] | None = None


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One logical tensor.

    Attributes
    ----------
    name
        The tensor's name.
    shape, dtype
        The tensor's shape, in elements, and its dtype; reads convert the stored elements to it.
    fragments
        What the files contribute: a tuple, or `Fragments`, which creates them on demand and so stores once what a
        thousand ranks share.
    combine
        How to read an element that several fragments hold: "first" takes the first one, "mean" averages in fp32.
    rule
        How the fragments form the tensor, and the evidence for it, for `explain`; empty if there was nothing to decide.
    stored_as
        The name that the tensor was saved under, if different.
    """

    name: str
    shape: Shape
    dtype: DType
    fragments: Sequence[Fragment]
    combine: Literal["first", "mean"] = "first"
    rule: str = ""
    stored_as: str = ""

    def __post_init__(self) -> None:
        if type(self.dtype) is not DType:
            object.__setattr__(self, "dtype", dtype_of(self.dtype))

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size of the elements in bytes, as read."""
        return self.numel * self.dtype.itemsize


class Place(NamedTuple):
    """Where a tensor is that is one run of plain values of one file, in C order.

    Attributes
    ----------
    path
        The file's path in the store.
    offset
        The first element's position in the file, in bytes.
    shape, dtype
        The tensor's shape and dtype.
    """

    path: str
    offset: int
    shape: Shape
    dtype: DType


class Specs(Mapping[str, TensorSpec]):
    """Tensors that are described when they are looked up, because a checkpoint may have a million of them.

    A subclass defines `make` and `kind`. A pickled copy is a plain dict.

    Parameters
    ----------
    table
        Name -> whatever describes the tensor.
    """

    __slots__ = ("_made", "table")

    def __init__(self, table: dict[str, Any]) -> None:
        self.table = table
        self._made: dict[str, TensorSpec] = {}  # a tensor that is looked up twice has one description

    @abstractmethod
    def make(self, name: str, entry: Any) -> TensorSpec:
        """Return the spec of an entry of the table."""

    @abstractmethod
    def kind(self, name: str) -> tuple[Shape, DType]:
        """Return the shape and the dtype of a tensor. Raises KeyError."""

    def place(self, name: str) -> Place | None:
        """Return the place of a tensor without making its spec; None if only its spec has it. Raises KeyError."""
        return None

    def marks(self, kinds: dict[tuple[Shape, DType], int]) -> NDArray[np.int64]:
        """Return the number of every tensor's shape and dtype, and add new ones to ``kinds``. Much faster than asking
        for each."""
        found = (kinds.setdefault(self.kind(name), len(kinds)) for name in self.table)
        return np.fromiter(found, np.int64, len(self.table))

    @property
    def renamed(self) -> Mapping[str, TensorSpec]:
        """The tensors that were saved under other names, by those names."""
        return {}  # usually, what is described when it is looked up has its own name

    @abstractmethod
    def of(self, table: dict[str, Any]) -> Self:
        """Return the tensors of another table of the same files."""

    def only(self, table: dict[str, Any]) -> Self:
        """Return the tensors of a part of the table."""
        part = self.of(table)
        part._made = self._made
        return part

    def __getitem__(self, name: str) -> TensorSpec:
        entry = self.table[name]
        made = self._made.get(name)
        return self._made.setdefault(name, self.make(name, entry)) if made is None else made

    def __contains__(self, name: object) -> bool:
        return name in self.table

    def __iter__(self) -> Iterator[str]:
        return iter(self.table)

    def __len__(self) -> int:
        return len(self.table)

    def keys(self) -> KeysView[str]:
        return self.table.keys()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self.items()),)


class Gathered(Specs):
    """The tensors of several files. ``table`` maps each name to the tensors of its file."""

    __slots__ = ()

    def __getitem__(self, name: str) -> TensorSpec:
        found: TensorSpec = self.table[name][name]
        return found

    def make(self, name: str, entry: Mapping[str, TensorSpec]) -> TensorSpec:
        return entry[name]

    def kind(self, name: str) -> tuple[Shape, DType]:
        return kind_of(self.table[name], name)

    def place(self, name: str) -> Place | None:
        return place_of(self.table[name], name)

    def marks(self, kinds: dict[tuple[Shape, DType], int]) -> NDArray[np.int64]:
        files = dict(zip(map(id, self.table.values()), self.table.values(), strict=True)).values()
        if not files or sum(map(len, files)) != len(self.table):
            return super().marks(kinds)
        return np.concatenate([marks_of(specs, kinds) for specs in files])

    def of(self, table: dict[str, Any]) -> Self:
        return type(self)(table)


def kind_of(specs: Mapping[str, TensorSpec], name: str) -> tuple[Shape, DType]:
    """Return the shape and the dtype of a tensor, without a spec if there is none yet. Raises KeyError.

    Parameters
    ----------
    specs
        Name -> spec.
    name
        The tensor's name.
    """
    if isinstance(specs, Specs):
        return specs.kind(name)
    spec = specs[name]
    return spec.shape, spec.dtype


def place_of(specs: Mapping[str, TensorSpec], name: str) -> Place | None:
    """Return the place of a tensor that is one run of plain values, without making its spec. Return None if only its
    spec has the place. Raises KeyError.

    Parameters
    ----------
    specs
        Name -> spec.
    name
        The tensor's name.
    """
    return specs.place(name) if isinstance(specs, Specs) else None


def marks_of(specs: Mapping[str, TensorSpec], kinds: dict[tuple[Shape, DType], int]) -> NDArray[np.int64]:
    """Return the number of every tensor's shape and dtype, without specs if there are none yet.

    Parameters
    ----------
    specs
        Name -> spec.
    kinds
        The shapes and dtypes that have a number. New ones are added.
    """
    if isinstance(specs, Specs):
        return specs.marks(kinds)
    found = (kinds.setdefault((spec.shape, spec.dtype), len(kinds)) for spec in specs.values())
    return np.fromiter(found, np.int64, len(specs))


def some_of(specs: Mapping[str, TensorSpec], keep: Callable[[str], bool]) -> Mapping[str, TensorSpec]:
    """Return the tensors whose names are to be kept.

    Parameters
    ----------
    specs
        Name -> spec.
    keep
        Return whether to keep a name.
    """
    if isinstance(specs, Specs):
        return specs.only({name: entry for name, entry in specs.table.items() if keep(name)})
    return {name: spec for name, spec in specs.items() if keep(name)}


class FileInfo(NamedTuple):
    """The state of a file when it was indexed.

    Attributes
    ----------
    size
        The size in bytes.
    mtime_ns
        The modification time in nanoseconds; 0 if unknown.
    version
        The version in the protocol's terms (an ETag, a generation); empty if there is none, as for a local file.
    """

    size: int
    mtime_ns: int
    version: str = ""

    def may_be(self, other: FileInfo) -> bool:
        """Return whether both may describe the same state of a file.

        Different sizes never do. If both have a version, it decides; else the modification times, if both are known.

        Parameters
        ----------
        other
            The other description of the file.
        """
        if self.size != other.size:
            return False
        if self.version and other.version:
            return self.version == other.version
        return self.mtime_ns == other.mtime_ns or not (self.mtime_ns and other.mtime_ns)


@dataclass(frozen=True, slots=True)
class Index:
    """The whole checkpoint as data.

    Attributes
    ----------
    format
        The name of the format.
    states
        State name -> tensor name -> spec. A plain ``view[...]`` reads the first state.
    files
        Path -> state of the file, for all files of the checkpoint.
    stored
        Raw name -> spec of every tensor as the files hold it. None: indexing ``files`` again yields them (formats of
        many rank files).
    indexed
        The files of ``files`` that are kept in memory as they were indexed. They are not pickled.
    aliases
        Tied name -> the name that owns the data.
    meta
        The objects of the checkpoint that are not tensors.
    mesh
        The parallel degrees that the checkpoint was written with.
    problems
        What is wrong with the checkpoint. A reader of another package may give plain sentences.
    unreadable
        Name -> reason, for names that the checkpoint lists but whose tensor cannot be described (its file is gone).
    ruled
        Names that the user's rules may match although they are no tensors any more (split flat parameters).
    guards
        Path -> what a read of the file has to check (io/store.py `Guard`).
    watched
        The files that were looked at, if ``files`` has more (thousands of chunks, which are looked at on reading).
    layout
        The rank's layout, if the index is one rank's part of a resharded checkpoint.
    open_problems
        A function that returns the problems of decisions that are made on demand; the list changes with them.
    """

    format: str
    states: Mapping[str, Mapping[str, TensorSpec]]
    files: Mapping[str, FileInfo]
    stored: Mapping[str, TensorSpec] | None = None
    indexed: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)
    mesh: Mesh = field(default_factory=Mesh)
    problems: tuple[Problem, ...] = ()
    unreadable: Mapping[str, str] = field(default_factory=dict)
    ruled: tuple[str, ...] = ()
    guards: Mapping[str, Any] = field(default_factory=dict)
    watched: Mapping[str, FileInfo] | None = None
    layout: Layout | None = None
    open_problems: Callable[[], tuple[Problem, ...]] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "problems", tuple(map(_problem, self.problems)))
        object.__setattr__(self, "unreadable", {name: printable(why) for name, why in self.unreadable.items()})

    @property
    def pins(self) -> Mapping[str, FileInfo]:
        """The files that must not change while the checkpoint is open."""
        return self.files if self.watched is None else self.watched


def _problem(line: str) -> Problem:
    """Return a problem; readers of other packages may give plain sentences."""
    return line if isinstance(line, Problem) else Problem("reader-note", line)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed(Placement):
    """The placement of a rank's array in a tensor.

    Attributes
    ----------
    source
        The name of the tensor.
    whole
        The tensor's shape, in elements.
    flat
        The interval of the array's C-order ravel, in elements, that the rank holds, as a 1-d tensor. None: the whole
        array, in its shape.
    """

    source: str
    whole: Shape
    flat: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """One rank's part of a checkpoint on a mesh.

    Attributes
    ----------
    mesh, rank
        The parallel degrees, and the rank's coordinates.
    source
        The index of the whole checkpoint.
    rules
        The user's merge rules.
    placed
        State name -> name on the rank -> placement in the whole tensor.
    """

    mesh: Mesh
    rank: Rank
    source: Index
    rules: Mapping[str, Any]
    placed: Mapping[str, Mapping[str, Placed]]


def renamed(spec: TensorSpec, name: str) -> TensorSpec:
    """Return the tensor under another name. ``stored_as`` keeps the first name."""
    return spec if name == spec.name else replace(spec, name=name, stored_as=spec.stored_as or spec.name)


def converted(specs: Mapping[str, TensorSpec], dtype: DType) -> dict[str, TensorSpec]:
    """Return the tensors with ``dtype`` in place of every floating-point dtype.

    Raises DataError if torch cannot convert one of them.
    """
    for kind, name in {s.dtype: name for name, s in specs.items() if s.dtype.is_floating_point}.items():
        check_converts(name, kind, dtype)
    return {name: replace(s, dtype=dtype) if s.dtype.is_floating_point else s for name, s in specs.items()}


def relocated(spec: TensorSpec, folder: str) -> TensorSpec:
    """Return the tensor with ``folder`` in front of the paths of its files."""
    return replace(spec, fragments=tuple(replace(f, extent=from_folder(folder, f.extent)) for f in spec.fragments))


def from_folder(folder: str, extent: Extent | Packed | Hole) -> Extent | Packed | Hole:
    """Return the extent with ``folder`` in front of the path of its file."""
    path = f"{folder}/{extent.path}"
    if isinstance(extent, Extent) and extent.within is not None:
        return replace(extent, path=path, within=replace(extent.within, path=f"{folder}/{extent.within.path}"))
    return replace(extent, path=path)


def whole(name: str, extent: Extent, rank: Rank | None = None) -> TensorSpec:
    """Return the spec of a tensor that is stored in one piece.

    Parameters
    ----------
    name
        The tensor's name.
    extent
        The bytes of the tensor, with its dtype and shape.
    rank
        The rank that wrote the file, if known.
    """
    return TensorSpec(name, extent.shape, extent.dtype, (Fragment(extent, extent.shape, rank=rank),))
