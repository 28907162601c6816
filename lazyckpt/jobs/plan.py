"""Write plans: the files, chunks and texts of an export and its destination."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..core.merkle import Form, Leaves
from ..lazy import LazyArray
from .destination import Destination, Session
from .places import Place
from .remote import Remote

if TYPE_CHECKING:
    import torch


class Writable(Protocol):
    """The part of `LazyArray` that writers use: shape, dtype, and the elements in pieces."""

    @property
    def shape(self) -> torch.Size: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def itemsize(self) -> int: ...
    def numel(self) -> int: ...
    def pieces(self, nbytes: int) -> Iterator[tuple[int, Any]]: ...
    def _runs(self) -> Any: ...


class Placed(NamedTuple):
    """A tensor, and the byte offset in the file at which its elements begin, in C order. If it is a part of the tensor
    that readers see, ``whole`` is that tensor, and ``at`` the byte in its C order at which the part begins."""

    offset: int
    tensor: Writable
    whole: Form | None = None
    at: int = 0


class Layout(NamedTuple):
    """The content of a file as data, so that it is written to a disk or sent to an object store in parts.

    ``size`` is its size in bytes. ``texts`` are the bytes around the tensors, each with its offset, in order; nothing
    overlaps. ``checksums`` says where the CRC-32 of a tensor's bytes belongs, 4 bytes with the lowest first: (offset
    within a text, number of the tensor)."""

    size: int
    texts: Sequence[tuple[int, bytes]]
    placed: Sequence[Placed]
    checksums: Sequence[tuple[int, int]] = ()


class File(NamedTuple):
    """A file of tensors.

    ``key`` is its path in the folder, ``nbytes`` the size of its tensors. ``layout`` returns its content."""

    key: str
    nbytes: int
    layout: Callable[[], Layout]


class Part(NamedTuple):
    """Elements of an array that follow one another: the array's path, the tensor, and the byte at which they begin.
    ``write`` writes their file like `Chunk.write`, given what to hash (`passing.Passing`), and returns the hashes, too;
    it must be picklable."""

    array: str
    whole: Form
    at: int
    write: Callable[[Any], tuple[int, Leaves]]


class Chunk(NamedTuple):
    """A file that one task writes as a whole, with `Place.put`.

    ``nbytes`` is the size of the tensor's elements in it, ``memory`` the number of bytes that the task holds. ``write``
    writes the file and returns its size in bytes; ``check`` reads it again and raises CorruptError if it differs. Both
    must be picklable. ``tensor`` is what they read. ``part`` is not None if the elements follow one another in an
    array."""

    key: str
    nbytes: int
    memory: int
    write: Callable[[], int]
    check: Callable[[], None]
    tensor: LazyArray | None = None
    part: Part | None = None


class Chunks(NamedTuple):
    """All chunks of an export: ``nbytes`` of their tensors, and a function ``at`` that yields chunks for a place."""

    nbytes: int
    at: Callable[[Place], Iterator[Chunk]]


Text = bytes | Callable[[], Iterable[bytes]]


class Manifest(NamedTuple):
    """A manifest that is written when all other files are complete.

    ``key`` is its path. ``make`` returns its content, given the folder of all files (a path or URL), the hashes of what
    was written (`passing.Passed`), and the engine; it reads the files for what was not hashed."""

    key: str
    algorithm: str
    make: Callable[..., bytes]


@dataclass(frozen=True, slots=True)
class WritePlan:
    """The plan of an export. Creating a plan reads no tensor data and writes nothing.

    Parameters
    ----------
    destination
        Where to write, and what may be replaced there.
    tensors
        The lazy arrays that are read.
    fingerprint
        Identifies the job: a call resumes only the work of a call with the same fingerprint (`publish.fingerprint`, or
        `publish.once` for a job that cannot be resumed).
    files
        Files of tensors, written run by run, in this order.
    chunks
        Files that are written as a whole, by one task each.
    texts
        Key -> content of a small file. They are written last, in this order: the last one may complete the checkpoint.
    build
        Writes additional files to a local folder, for formats that another library writes.
    room
        Approximate size of the files in bytes.
    paths
        The value of `WriteResult.paths`.
    left_out
        Name of a part that is not written -> reason.
    manifests
        The manifests to write, usually one.
    """

    destination: Destination | Remote | Session
    tensors: Sequence[LazyArray]
    fingerprint: str
    files: Sequence[File] = ()
    chunks: Chunks | None = None
    texts: Mapping[str, Text] = field(default_factory=dict)
    build: Callable[[str], None] | None = None
    room: int = 0
    paths: tuple[Path | str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    manifests: Sequence[Manifest] = ()

    @property
    def algorithm(self) -> str | None:
        """The hash function of the manifests; None if there are none."""
        return self.manifests[0].algorithm if self.manifests else None

    @property
    def nbytes(self) -> int:
        """Size of the tensors in bytes."""
        return sum(file.nbytes for file in self.files) + (self.chunks.nbytes if self.chunks is not None else 0)

    @property
    def keys(self) -> list[str]:
        """Keys of the files, texts and manifests."""
        return [*(file.key for file in self.files), *self.texts, *(one.key for one in self.manifests)]
