"""What the engine of exports is given: files with runs of bytes, chunks, texts, and where they go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..lazy import LazyArray
from .destination import Destination, Remote, Session
from .places import Place, Target

if TYPE_CHECKING:
    import torch


class Writable(Protocol):
    """Shape and dtype at once, the elements in pieces: what a `LazyArray` is to a writer."""

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
    """A tensor, and the byte of the file where its elements begin, in C order."""

    offset: int
    tensor: Writable


class Layout(NamedTuple):
    """A file in which everything is written but the tensors' elements. ``finish``: is called with the CRC-32s of all
    tensors' bytes when these are written; None if nobody asks for them."""

    file: Target
    placed: Sequence[Placed]
    finish: Callable[[list[int]], None] | None = None


class File(NamedTuple):
    """A file that tensors go into. ``key``: its path in the folder. ``nbytes``: of its tensors. ``layout``: makes it at
    a path, without their elements; a file of the same call that is there keeps what it has of them."""

    key: str
    nbytes: int
    layout: Callable[[Target], Layout]


class Chunk(NamedTuple):
    """A file that one task writes as a whole, with `Place.put`. ``nbytes``: of the tensor's elements in it. ``memory``:
    bytes that the task holds. ``write`` returns the bytes of the file; ``check`` reads it again, and raises
    CorruptError. Both have to pickle."""

    key: str
    nbytes: int
    memory: int
    write: Callable[[], int]
    check: Callable[[], None]


class Chunks(NamedTuple):
    """``nbytes``: of the tensors. ``at``: the chunks, as they are written to a place."""

    nbytes: int
    at: Callable[[Place], Iterator[Chunk]]


Text = bytes | Callable[[], Iterable[bytes]]


@dataclass(frozen=True, slots=True)
class WritePlan:
    """What is going to be written. Making it reads no tensor data, and writes nothing.

    Parameters
    ----------
    destination
        Where to, and what may be replaced there.
    tensors
        The lazy arrays that are read.
    fingerprint
        What two calls have in common that may continue each other's work: `publish.fingerprint`, or `publish.once`.
    files
        Files that tensors are streamed into, run by run, in this order.
    chunks
        Files that are written as a whole, by one task each.
    texts
        Key -> the content of a small file. They are written last, in this order: the last one may be what makes the
        others a checkpoint.
    build
        Writes files of its own to a local folder: other libraries do.
    room
        Bytes that the files take, about.
    paths
        What `WriteResult.paths` says.
    left_out
        What is not written -> why.
    """

    destination: Destination | Remote | Session
    tensors: Sequence[LazyArray]
    fingerprint: str
    files: Sequence[File] = ()
    chunks: Chunks | None = None
    texts: Mapping[str, Text] = field(default_factory=dict)
    build: Callable[[str], None] | None = None
    room: int = 0
    paths: tuple[Path, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(file.nbytes for file in self.files) + (self.chunks.nbytes if self.chunks is not None else 0)

    @property
    def keys(self) -> list[str]:
        """The files and texts."""
        return [*(file.key for file in self.files), *self.texts]
