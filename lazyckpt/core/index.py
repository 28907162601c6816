"""The checkpoint as data: which bytes of which file sit where in which tensor.

Dtypes are `DType`s. `Extent`, `Archive`, `Chunk` and `TensorSpec` also take a `torch.dtype`, and keep its `DType`.

Everything here is picklable, holds no handle and does no I/O. A reader makes an `Index`; all the rest only looks at it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal, NamedTuple

from ..errors import Problem, printable
from .box import Box, Shape, c_strides
from .dtypes import DType, check_converts, dtype_of


class Rank(NamedTuple):
    """Where a rank stands in the mesh that trained the model."""

    tp: int = 0
    pp: int = 0
    dp: int = 0
    ep: int = 0


@dataclass(frozen=True, slots=True)
class Mesh:
    """The parallel degrees a checkpoint was written with."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1


@dataclass(frozen=True, slots=True)
class Extent:
    """A strided array of bytes in a file.

    ``offset`` is in bytes from the start of the file, ``strides`` in elements (as torch stores them; 0 where expanded,
    never negative). Nothing is promised about alignment. ``conj`` and ``neg`` are torch's lazy bits: the stored values
    are still to be conjugated or negated. ``swapped`` says that the file's byte order is not little-endian. ``within``:
    the offset counts from the start of what this unpacks to, not from the start of the file.
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
        """True if the bytes in the file are the values, as they stand."""
        return not (self.conj or self.neg or self.swapped or self.within)


@dataclass(frozen=True, slots=True)
class Archive:
    """A file of torch.save inside a file, which holds one tensor of this dtype and shape.

    It takes ``length`` bytes from ``offset`` on. Where in it the elements lie is looked up when they are first read
    (io/archives.py): a checkpoint has hundreds of thousands of them. ``codecs``: what it has to be unpacked with first,
    in this order.
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
        """What can be said of the elements without looking: a C-order array, somewhere within."""
        return Extent(self.path, self.offset, self.dtype, self.shape, c_strides(self.shape), within=self)

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells it from all others of a checkpoint."""
        return self.path, self.offset, self.length

    def __str__(self) -> str:
        return f"the archive at bytes {self.offset:,} to {self.offset + self.length:,}"


class Codec(NamedTuple):
    """What bytes were packed with, by its name in numcodecs; ``config``: its parameters, as JSON."""

    name: str
    config: str = "{}"


class Shard(NamedTuple):
    """A place in a shard: a run of chunks with a table of where each is (offset, length: two 64-bit numbers).

    ``number``: which chunk of ``chunks``. The table is at the end of the shard or at its start, ``checked`` by a CRC32C
    behind it, big-endian if ``swapped``.
    """

    number: int
    chunks: int
    at_end: bool = True
    checked: bool = True
    swapped: bool = False


class ZipEntry(NamedTuple):
    """A record of a zip as the zip's directory describes it.

    ``header``: where its own header begins; ``nbytes``, ``stored``: its size in bytes, unpacked and in the file;
    ``method``, ``flags``: as numbers of the format; ``at``: where its entry begins in the directory; ``after``: where
    the next record's header, or the directory, begins, if that is known.
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
    """A chunk of a chunked array, which may be absent: then all its elements are ``fill`` (the bytes of one, little-
    endian); None means that it has to be there.

    Whether it is there and where is looked up when it is first read (io/chunks.py). ``window``: (offset, length) of its
    bytes in the file; None for all of the file. ``zipped``: the entry of a zip that it is; the window begins at the
    entry's header then, which is compared with the directory when the chunk is looked up.
    ``shards``: the shards it is in, the outermost first. ``codecs``: what its bytes are unpacked with, in this order,
    to ``nbytes`` bytes in the end; there ``shape`` elements lie at ``strides``, big-endian if ``swapped``.
    ``present``: False if it is known already that it is not there.
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
        """What can be said of the elements without looking."""
        return Extent(self.path, 0, self.dtype, self.shape, self.strides, swapped=self.swapped, within=self)

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells it from all others of a checkpoint. Those that a zip has not are nowhere in it: they differ by
        what stands for them."""
        if not self.present:
            return self.path, self.dtype, self.shape, self.fill
        return self.path, self.window, self.shards, self.codecs

    def __str__(self) -> str:
        packed = f" packed with {', '.join(codec.name for codec in self.codecs)}" if self.codecs else ""
        return f"a chunk{packed}" + (f", number {self.shards[-1].number:,} of its shard" if self.shards else "")


@dataclass(frozen=True, slots=True)
class Inline:
    """Bytes that a file holds in an encoding of its own (numpy arrays in a pickle), decoded when it was indexed."""

    path: str
    data: bytes

    def __str__(self) -> str:
        return f"{len(self.data):,} bytes that are text in a pickle"


Packed = Archive | Chunk


@dataclass(frozen=True, slots=True)
class Hole:
    """Stands where an extent should: its file is missing or unreadable. ``reason`` says so and names it."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class Part:
    """A block of a rank-local array, and where the block's first element stands in the global tensor."""

    local: Box
    start: Shape


@dataclass(frozen=True, slots=True)
class Placement:
    """Which blocks of an array lie where in a larger one: a shard in its tensor, a tensor in a stack, a layer of a
    stack as a tensor of its own.

    ``shape``: of the array. ``parts``: its blocks, and where each begins in the larger one. What is in none of them is
    not there (padding). None: the array is all of the larger one. ``axes``: for each dimension of the larger one the
    dimension of the array, as of a `Fragment`.
    """

    shape: Shape
    parts: tuple[Part, ...] | None = None
    axes: tuple[int | None, ...] | None = None

    @staticmethod
    def of(shape: Shape, block: Box, start: Shape, axes: tuple[int | None, ...] | None = None) -> Placement:
        """One block of an array, from ``start`` on in the larger one."""
        return Placement(shape, (Part(block, start),), axes)

    @staticmethod
    def at(shape: Shape, start: Shape, axes: tuple[int | None, ...] | None = None) -> Placement:
        """All of an array, from ``start`` on in the larger one."""
        return Placement(shape, (Part(Box.of(shape), start),), axes)

    @property
    def blocks(self) -> tuple[Part, ...]:
        """``parts``, also where the array is all of the larger one."""
        return self.parts if self.parts is not None else (Part(Box.of(self.shape), (0,) * len(self.shape)),)

    @property
    def numel(self) -> int:
        """Elements of the array that are in a block."""
        return sum(part.local.numel for part in self.blocks)

    def target(self, part: Part) -> Box:
        """Where a block lies in the larger array."""
        sizes = part.local.shape
        if self.axes is not None:
            sizes = tuple(1 if a is None else sizes[a] for a in self.axes)
        return Box(part.start, tuple(s + n for s, n in zip(part.start, sizes, strict=True)))


@dataclass(frozen=True, slots=True)
class Fragment:
    """What one file contributes to a tensor.

    ``local_shape``: the rank-local array. ``parts``: how its blocks map into the global tensor; None means that the
    whole array stands at the global origin. ``span``: the flat interval of the rank-local array's C-order ravel that
    the extent holds (its last dimension is then hi - lo, all others are 1); None means all of it, in the extent's own
    shape.
    ``axes``: for each dimension of the tensor the one of the rank-local array that it is, or None where it is a new one
    of size 1 (an expert among others); where the parts have just one index of a dimension, no axis need be it (a layer
    of a stack). None means the same dimensions.
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

    ``fragments`` may be a tuple, or `Fragments`, which makes them when they are asked for: a checkpoint of a thousand
    ranks stores what its ranks share once. ``combine``: what to do where several fragments hold the same
    element: "first" takes the first, "mean" averages (in fp32). ``rule``: how the fragments were put together and how
    that is known, for `explain`; empty if there was nothing to decide. ``stored_as``: the name it was saved under, if
    that is another.
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
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class FileInfo(NamedTuple):
    """A file as it was when it was indexed: size in bytes, modification time in nanoseconds (0 if unknown), and what
    the protocol calls its version (an ETag, a generation; empty if it has none: a local file)."""

    size: int
    mtime_ns: int
    version: str = ""

    def may_be(self, other: FileInfo) -> bool:
        """Whether both describe the same state of a file, as far as both know: a version decides, else the
        modification time, else the size alone."""
        if self.size != other.size:
            return False
        if self.version and other.version:
            return self.version == other.version
        return self.mtime_ns == other.mtime_ns or not (self.mtime_ns and other.mtime_ns)


@dataclass(frozen=True, slots=True)
class Index:
    """The whole checkpoint as data.

    ``states``: state name -> tensor name -> spec; the first is the one a plain ``view[...]`` reads. ``stored``: every
    tensor as it lies in the files, under its raw name; None if that has to be looked up in ``files`` again (formats of
    many rank files). ``indexed``: of these files those that are kept as they were read; they do not travel.
    ``aliases``: tied name -> the name that owns the data. ``unreadable``: names that the checkpoint
    lists but that cannot even be described (their file is gone), with the reason. ``ruled``: names that the user's
    rules are for and that are no tensors here any more (flat parameters that were taken apart). ``guards``: path ->
    what is to be checked of a file when it is read (io/store.py `Guard`). ``watched``: the files
    that were looked at, if ``files`` has more (chunks by the thousand, which are looked at when they are read).
    ``layout``: whose part of which checkpoint it is, if it is one rank's under another layout. ``open_problems``: gives
    the lines on what is decided when it is first looked at; they change then.
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
        """The files that have to stay as they were."""
        return self.files if self.watched is None else self.watched


def _problem(line: str) -> Problem:
    """Readers of other packages may give plain sentences."""
    return line if isinstance(line, Problem) else Problem("reader-note", line)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed(Placement):
    """The placement of a rank's array in the tensor ``source``, of shape ``whole``.

    ``flat``: which elements of that array's C order the rank's tensor holds (of one dimension then); None: all, in its
    shape.
    """

    source: str
    whole: Shape
    flat: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """One rank's part of ``source`` on a mesh. ``rules``: those of the user; ``placed``: state -> name on the rank."""

    mesh: Mesh
    rank: Rank
    source: Index
    rules: Mapping[str, Any]
    placed: Mapping[str, Mapping[str, Placed]]


def renamed(spec: TensorSpec, name: str) -> TensorSpec:
    """The same tensor under another name; the first it had is kept in ``stored_as``."""
    return spec if name == spec.name else replace(spec, name=name, stored_as=spec.stored_as or spec.name)


def converted(specs: Mapping[str, TensorSpec], dtype: DType) -> dict[str, TensorSpec]:
    """The same tensors, those of floating-point dtypes in ``dtype`` once they are read. Raises DataError if torch
    cannot convert one."""
    for kind, name in {s.dtype: name for name, s in specs.items() if s.dtype.is_floating_point}.items():
        check_converts(name, kind, dtype)
    return {name: replace(s, dtype=dtype) if s.dtype.is_floating_point else s for name, s in specs.items()}


def relocated(spec: TensorSpec, folder: str) -> TensorSpec:
    """The same tensor, its files named from further up: from where ``folder`` is the one that they are in."""
    return replace(spec, fragments=tuple(replace(f, extent=from_folder(folder, f.extent)) for f in spec.fragments))


def from_folder(folder: str, extent: Extent | Packed | Hole) -> Extent | Packed | Hole:
    """The same bytes, their file named from further up."""
    path = f"{folder}/{extent.path}"
    if isinstance(extent, Extent) and extent.within is not None:
        return replace(extent, path=path, within=replace(extent.within, path=f"{folder}/{extent.within.path}"))
    return replace(extent, path=path)


def whole(name: str, extent: Extent, rank: Rank | None = None) -> TensorSpec:
    """The spec of a tensor that lies in one piece, as its extent describes it."""
    return TensorSpec(name, extent.shape, extent.dtype, (Fragment(extent, extent.shape, rank=rank),))
